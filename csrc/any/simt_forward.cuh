// Forward attention in plain CUDA C++, for every dtype, head dimension, stride and option.
//   O = softmax(score(Q K^T)) V, lse = log sum exp(score): a block computes one chunk of the columns of O for
//   kTile queries of one head; scores in registers, weights through shared memory.
#pragma once

#include "any/simt_tile.cuh"

namespace flashattn::any {

// Tiles of queries of all heads and sequences, times the chunks of Dv.
template <class E>
FLASHATTN_HD int64_t forward_blocks(const ForwardParams& p) {
  return divide_up(p.seqlen_q.rows, kTile) * p.batch * p.heads_q * chunk_count<Sum<E>>(p.head_dim_v);
}

template <class T>
__device__ inline T row_maximum(T x) {
  for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) {
    const T other = __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    x = x > other ? x : other;
  }
  return x;
}

template <class T>
__device__ inline T row_sum(T x) {
  for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
  return x;
}

// Running maximum and sum of a thread's rows (Milakov and Gimelshein 2018).
template <class T>
struct OnlineSoftmax {
  T peak[4], sum[4];  // the sum is of this thread's columns

  __device__ OnlineSoftmax() {
    for (int i = 0; i < 4; ++i) peak[i] = -kInfinity<T>, sum[i] = 0;
  }

  // Scores become weights e^(score - peak), and earlier sums are brought to the new maximum.
  __device__ void update(Fragment<T>& s, Fragment<T> (&out)[kChunkTiles<T>]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T top = peak[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) top = s.x[i][j] > top ? s.x[i][j] : top;
      top = row_maximum(top);
      const T base = top == -kInfinity<T> ? 0 : top, rescale = std::exp(peak[i] - base);  // no -inf - -inf
      peak[i] = top, sum[i] *= rescale;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[i] += s.x[i][j] = std::exp(s.x[i][j] - base);
#pragma unroll
        for (int tile = 0; tile < kChunkTiles<T>; ++tile) out[tile].x[i][j] *= rescale;
      }
    }
  }
};

// Writes the statistics of row i and returns the factor of its weighted sums.
template <class E>
__device__ inline Sum<E> finish_row(const View<E>& view, const Statistic& lse, int64_t query,
                                    Sum<E> score_peak, Sum<E> sum, bool writes) {
  using T = Sum<E>;
  const ForwardParams& p = view.p;
  T peak = score_peak, rescale = 1;
  if (p.score.sink.data && query < view.q.length) {
    const T sink = per_head<T>(p.score.sink, 0, view.head);
    peak = peak > sink ? peak : sink;
    const T base = peak == -kInfinity<T> ? 0 : peak;
    rescale = std::exp(score_peak - base);
    sum = sum * rescale + std::exp(sink - base);
  }
  if (writes) {
    view.statistic(lse, query) = sum == 0 ? -kInfinity<T> : peak + std::log(sum);
    if (p.max_logit.data) view.statistic(p.max_logit, query) = score_peak;
  }
  return sum == 0 ? 0 : rescale / sum;
}

// What block `index` computes: under a causal mask, longest first.
template <class E>
struct ForwardBlock {
  int64_t slice;
  int first_column;
  View<E> view;
  int64_t first_query;

  __device__ ForwardBlock(const ForwardParams& p, int64_t index)
      : ForwardBlock(p, index, chunk_count<Sum<E>>(p.head_dim_v), divide_up(p.seqlen_q.rows, kTile)) {}

 private:
  __device__ ForwardBlock(const ForwardParams& p, int64_t index, int64_t chunks, int64_t tiles)
      : slice(index / chunks),
        first_column(static_cast<int>(index % chunks) * kChunk<Sum<E>>),
        view(p, slice / p.heads_q % p.batch, slice % p.heads_q),
        first_query((tiles - 1 - slice / (p.heads_q * p.batch)) * kTile) {}
};

// Adds the keys of a range to the softmax and to the weighted sums of a chunk; key_tile(x, key) are the rows
// of K or V from a key on.
template <class E, class T, class KeyTile>
__device__ inline void attend(const ForwardBlock<E>& tile, KeyRange range, KeyTile key_tile,
                              OnlineSoftmax<T>& softmax, Fragment<T> (&out)[kChunkTiles<T>]) {
  const View<E>& view = tile.view;
  const ForwardParams& p = view.p;
  const auto& queries = shared_tiles<T>().queries;
  const auto q_row = query_rows(view, p.q, tile.first_query, view.q.length);
  Fragment<T> s;
  for (int64_t block = range.first / kTile * kTile; block < range.last; block += kTile) {
    dot_products(q_row, static_cast<T>(p.score.scale), key_tile(p.k, block), T{1}, p.head_dim, s);
    for_each_row(
        [&](int i, T(&row)[4]) {
          T cap_slope;
          for (int j = 0; j < 4; ++j)
            row[j] = score_of(p.score, queries[tile_row(i)], block + tile_column(j), row[j], cap_slope);
        },
        s);
    softmax.update(s, out);
    if (p.dropout.seed)
      for_each_row(
          [&](int i, T(&row)[4]) {
            for (int j = 0; j < 4; ++j)
              row[j] *= dropout_factor(view, queries[tile_row(i)].index, block + tile_column(j));
          },
          s);
    store_weights(s);
    add_weighted_chunk(key_tile(p.v, block), T{1}, tile.first_column, p.head_dim_v, out);
  }
}

// Writes the statistics of a tile; factor[i] is what the weighted sums of a thread's row i lack.
template <class E, class T>
__device__ inline void finish_tile(const ForwardBlock<E>& tile, const Statistic& lse,
                                   const OnlineSoftmax<T>& softmax, T (&factor)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t query = tile.first_query + tile_row(i);
    const bool writes = query < tile.view.q.allotted && tile.first_column == 0 && tile_column(0) == 0;
    factor[i] = finish_row(tile.view, lse, query, softmax.peak[i], row_sum(softmax.sum[i]), writes);
  }
}

template <class E>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Sum<E>>)
    simt_forward_kernel(const __grid_constant__ ForwardParams p) {
  using T = Sum<E>;
  if (block_index() >= forward_blocks<E>(p)) return;
  const ForwardBlock<E> block(p, block_index());
  const View<E>& view = block.view;
  if (block.first_query >= view.q.allotted) return;

  load_queries(view, block.first_query, shared_tiles<T>().queries);
  __syncthreads();  // the queries are complete
  const KeyRange range = view.visible_to_tile(block.first_query);
  OnlineSoftmax<T> softmax;
  Fragment<T> out[kChunkTiles<T>] = {};
  attend(
      block, range, [&](const Tensor4& x, int64_t key) { return key_rows(view, x, key, range); }, softmax,
      out);
  T factor[4];
  finish_tile(block, p.lse, softmax, factor);
  store_chunk(
      query_rows(view, p.out, block.first_query, view.q.allotted), [&](int i) { return factor[i]; },
      block.first_column, p.head_dim_v, out);
}

}  // namespace flashattn::any
