// Decode in plain CUDA C++, for every dtype, head dimension, cache and option: the forward with keys in a
// cache.  Where few queries have many keys, blocks share the keys of a tile, and a kernel merges their
// results.
#pragma once

#include "any/simt_forward.cuh"
#include "common/cache.cuh"

namespace flashattn::any {

constexpr int64_t kLeastSplit = 256;  // keys, fewer cost more in the merge than they gain

// The call's number of splits, or enough for two blocks in every place of the device.
template <class E>
FLASHATTN_HD int64_t split_count(const DecodeParams& p) {
  const int64_t blocks = forward_blocks<E>(p), wanted = 2 * kMinBlocks<Sum<E>> * p.device.processors;
  if (p.splits > 0 || blocks == 0) return p.splits;
  const int64_t useful = divide_up(p.seqlen_k.rows, kLeastSplit);
  return blocks >= wanted || useful <= 1 ? 1 : smaller(useful, divide_up(wanted, blocks));
}

// The keys of a split: with the call's length, else a part of what the tile sees.  They start at a multiple
// of kTile, so that no block of keys belongs to two.
__device__ inline KeyRange keys_of_split(const DecodeParams& p, KeyRange range, int64_t split) {
  int64_t first = 0, keys = p.keys_per_split;
  if (keys == 0) {
    first = range.first / kTile * kTile;
    keys = divide_up(range.last - first, p.splits * kTile) * kTile;
    if (keys < kLeastSplit) keys = kLeastSplit;
  }
  first += split * keys;
  return {first < range.first ? range.first : first, smaller(range.last, first + keys)};
}

// Rows of a tile of keys in a cache, as in Rows.
template <class E>
struct CachedRows {
  const void* const* rows;
  int first, last;
  bool aligned;

  __device__ bool has(int row) const { return row >= first && row < last; }
  __device__ const E* operator[](int row) const { return static_cast<const E*>(rows[row]); }
  __device__ bool in_fours(int columns) const { return aligned && columns % 4 == 0; }
};

// Finds the rows.  A barrier has to follow, and nobody may read those before these any more.
template <class E>
__device__ inline CachedRows<E> cached_rows(const CacheRows<E>& cache, int64_t first_key, KeyRange range) {
  const int first = rows_of_tile(range.first - first_key), last = rows_of_tile(range.last - first_key);
  auto& rows = shared_tiles<Sum<E>>().rows;
  for (int row = thread_index(); row < kTile; row += kThreads)  // instead of one that is not read: any
    rows[row] = cache.at(first_key + clamp(row, first, last - 1));
  const bool aligned = reinterpret_cast<uintptr_t>(cache.base) % alignof(Four<E>) == 0 &&
                       cache.stride % 4 == 0 && cache.page_stride % 4 == 0;
  return {rows, first, last, aligned};
}

// What the splits leave to the merge: out (split, row, head, column) and LSE (split, row, head), rows as in
// q.
template <class T>
struct Partials {
  int64_t vectors, columns;  // rows times heads, of a split
  int64_t heads, batch_rows;
  T *out, *lse;

  FLASHATTN_HD explicit Partials(const DecodeParams& p)
      : vectors(p.seqlen_q.total * p.heads_q),
        columns(p.head_dim_v),
        heads(p.heads_q),
        batch_rows(p.seqlen_q.cu ? 0 : p.seqlen_q.rows),
        out(static_cast<T*>(p.workspace.shared)),
        lse(out + p.splits * vectors * columns) {}

  FLASHATTN_HD static int64_t bytes(const DecodeParams& p) {
    return p.splits * p.seqlen_q.total * p.heads_q * (p.head_dim_v + 1) * static_cast<int64_t>(sizeof(T));
  }

  // Sequences whose splits are of a fixed length may have one, whose result must not depend on that.
  FLASHATTN_HD static bool in_use(const DecodeParams& p) { return p.splits > 1 || p.batch_invariant; }

  __device__ Tensor4 out_of(int64_t split) const {
    return {out + split * vectors * columns, batch_rows * heads * columns, heads * columns, columns};
  }
  __device__ Statistic lse_of(int64_t split) const {
    return {lse + split * vectors, batch_rows * heads, 1, heads};
  }
};

// Blocks of the forward, times the splits; p.splits is their number and p.q is rotated.
template <class E>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Sum<E>>)
    simt_decode_kernel(const __grid_constant__ DecodeParams p) {
  using T = Sum<E>;
  if (block_index() >= forward_blocks<E>(p) * p.splits) return;
  const int64_t split = block_index() % p.splits;
  ForwardBlock<E> block(p, block_index() / p.splits);
  View<E>& view = block.view;
  if (block.first_query >= view.q.allotted) return;
  view.pad = first_unpadded(p, view.batch, view.k);

  load_queries(view, block.first_query, shared_tiles<T>().queries);
  __syncthreads();  // the queries are complete
  const KeyRange range = keys_of_split(p, view.visible_to_tile(block.first_query), split);
  OnlineSoftmax<T> softmax;
  Fragment<T> out[kChunkTiles<T>] = {};
  attend(
      block, range,
      [&](const Tensor4& x, int64_t key) {
        return cached_rows(CacheRows<E>(p, x, view.batch, view.head_k), key, range);
      },
      softmax, out);

  T factor[4];
  const auto store = [&](const auto& rows) {
    store_chunk(rows, [&](int i) { return factor[i]; }, block.first_column, p.head_dim_v, out);
  };
  if (Partials<T>::in_use(p)) {
    const Partials<T> partials(p);
    finish_tile(block, partials.lse_of(split), softmax, factor);
    store(query_rows(View<T>(p, view.batch, view.head), partials.out_of(split), block.first_query,
                     view.q.allotted));
  } else {
    finish_tile(block, p.lse, softmax, factor);
    store(query_rows(view, p.out, block.first_query, view.q.allotted));
  }
}

constexpr int kMergeThreads = 256;

template <class E>
int64_t merge_blocks(const DecodeParams& p) {
  return divide_up(p.seqlen_q.total * p.heads_q * p.head_dim_v, kMergeThreads);
}

// out = sum_s e^(lse_s - lse) out_s, lse = log(sum_s e^lse_s + e^sink), a thread for each element.
template <class E>
__global__ void __launch_bounds__(kMergeThreads) simt_merge_kernel(const __grid_constant__ DecodeParams p) {
  using T = Sum<E>;
  const Partials<T> partials(p);
  const int64_t element = block_index() * kMergeThreads + thread_index();
  const int64_t vector = element / partials.columns, column = element - vector * partials.columns;
  if (vector >= partials.vectors) return;
  const int64_t index = vector / p.heads_q;
  const Place place = place_of(p.seqlen_q, p.batch, index);
  const View<E> view(p, place.batch, vector - index * p.heads_q);
  if (place.row < 0 || place.row >= view.q.length) return;

  const T* lse = partials.lse + vector;
  const T sink = p.score.sink.data ? per_head<T>(p.score.sink, 0, view.head) : -kInfinity<T>;
  T peak = sink;
  for (int64_t s = 0; s < p.splits; ++s) peak = std::max(peak, lse[s * partials.vectors]);
  const T base = peak == -kInfinity<T> ? 0 : peak;
  T sum = std::exp(sink - base), out = 0;
  for (int64_t s = 0; s < p.splits; ++s) {
    const T weight = std::exp(lse[s * partials.vectors] - base);
    sum += weight;
    if (weight != 0) out += weight * partials.out[s * partials.vectors * partials.columns + element];
  }
  view.query_row(p.out, place.row)[column] = to_element<E>(sum == 0 ? 0 : out / sum);
  if (column == 0) view.statistic(p.lse, place.row) = sum == 0 ? -kInfinity<T> : base + std::log(sum);
}

}  // namespace flashattn::any
