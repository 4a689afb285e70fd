// Where the rows of a KV cache lie, paged or not.
#pragma once

#include <type_traits>

#include "common/seqlen.h"

namespace flashattn {

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
    base +=
        (p.cache.batch_index ? clamp(p.cache.batch_index[batch], 0, p.cache.entries - 1) : batch) * x.batch;
  }

  // Of a key of the sequence; I is the type in which it is divided.
  template <class I>
  __device__ E* at(I key) const {
    if (!pages) return base + key * stride;
    using Index = std::make_unsigned_t<I>;
    const auto index = static_cast<Index>(key), size = static_cast<Index>(page_size), page = index / size;
    return base + clamp(pages[page], 0, page_count - 1) * page_stride + (index - page * size) * stride;
  }
};

// The first key of a sequence that counts.
FLASHATTN_HD int64_t first_unpadded(const ForwardParams& p, int64_t batch, const Sequence& k) {
  return p.cache.leftpad ? clamp(p.cache.leftpad[batch], 0, k.length) : 0;
}

}  // namespace flashattn
