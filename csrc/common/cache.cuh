// Where the rows of a KV cache lie, paged or not.
#pragma once

#include "common/divisor.h"
#include "common/seqlen.h"

namespace flashattn {

// Where a key lies: row of a page, or of the sequence.
struct CachePlace {
  int64_t page, row;
};

// The row of the cache's batch dimension that a sequence has.
FLASHATTN_HD int64_t cache_entry(const ForwardParams& p, int64_t batch) {
  return p.cache.batch_index ? clamp(p.cache.batch_index[batch], 0, p.cache.entries - 1) : batch;
}

// Rows of K or V of one sequence and KV head.  Whatever the index and page tensors hold, no row lies outside
// the cache.
template <class E>
struct CacheRows {
  E* base;               // row 0 of the sequence, or of page 0
  int64_t stride;        // of rows
  const int32_t* pages;  // of the sequence, null: not paged
  int64_t page_stride, page_size, page_count;

  __device__ CacheRows(const ForwardParams& p, const Tensor4& x, int64_t batch, int64_t head_k)
      : base(static_cast<E*>(x.data) + head_k * x.head),
        stride(x.row),
        pages(p.cache.page_table ? p.cache.page_table + batch * p.cache.page_table_stride : nullptr),
        page_stride(x.batch),
        page_size(p.cache.page_size),
        page_count(p.cache.entries) {
    if (pages) return;
    base += cache_entry(p, batch) * x.batch;
  }

  __device__ E* at(const CachePlace& place) const {
    return base + place.page * page_stride + place.row * stride;
  }

  // Of a key of the sequence.
  __device__ CachePlace find(int64_t key) const {
    if (!pages) return {0, key};
    // Unsigned: the signed division makes callers spill.
    const auto page = static_cast<int64_t>(static_cast<uint64_t>(key) / static_cast<uint64_t>(page_size));
    return in_page(page, key - page * page_size);
  }
  __device__ CachePlace find(int key, const Divisor& size) const {
    if (!pages) return {0, key};
    const auto page = static_cast<int>(size.divide(key));
    return in_page(page, key - page * static_cast<int>(size.value));
  }
  __device__ E* at(int64_t key) const { return at(find(key)); }

 private:
  __device__ CachePlace in_page(int64_t page, int64_t row) const {
    return {clamp(pages[page], 0, page_count - 1), row};
  }
};

// The first key of a sequence that counts.
FLASHATTN_HD int64_t first_unpadded(const ForwardParams& p, int64_t batch, const Sequence& k) {
  return p.cache.leftpad ? clamp(p.cache.leftpad[batch], 0, k.length) : 0;
}

}  // namespace flashattn
