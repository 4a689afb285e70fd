// Backward attention in plain CUDA C++, for every dtype, head dimension, stride and option.
//   dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K: a block of one kernel owns a chunk of columns of dV or
//   dK for a tile of keys and adds up all queries; a block of the other owns a chunk of dQ for a tile of
//   queries. So nothing is added atomically.
#pragma once

#include "any/simt_gradient.cuh"

namespace flashattn::any {

// Tiles of keys of all KV heads and sequences, times the chunks of dV and those of dK.
template <class E>
FLASHATTN_HD int64_t key_gradient_blocks(const BackwardParams& p) {
  return divide_up(p.seqlen_k.rows, kTile) * p.batch * p.heads_k *
         (chunk_count<Sum<E>>(p.head_dim_v) + chunk_count<Sum<E>>(p.head_dim));
}

// Adds the queries [first_query, first_query + kTile) of one head to a chunk of dV or dK.  Rows of the tile
// are keys, columns are queries.
template <class E, class T>
__device__ inline void add_key_gradient(const BackwardParams& p, const View<E>& view, bool is_dv,
                                        int64_t first_query, int64_t first_key, int first_column,
                                        Fragment<T> (&sums)[kChunkTiles<T>]) {
  const auto& queries = shared_tiles<T>().queries;
  const T scale = static_cast<T>(p.score.scale);
  const KeyRange keys{first_key, view.k.length};
  const auto q_row = query_rows(view, p.q, first_query), dout_row = query_rows(view, p.dout, first_query);
  Fragment<T> weights, dweights{};
  __syncthreads();  // nobody reads the queries before these any more
  load_gradient_queries(p, view, first_query);
  dot_products(key_rows(view, p.k, first_key, keys), T{1}, q_row, scale, p.head_dim, weights);
  if (!is_dv)
    dot_products(key_rows(view, p.v, first_key, keys), T{1}, dout_row, T{1}, p.head_dim_v, dweights);
  __syncthreads();  // the queries are complete
  for_each_row(
      [&](int i, T(&row)[4], T(&drow)[4]) {
        for (int j = 0; j < 4; ++j) {
          const auto gradient =
              differentiate(view, queries[tile_column(j)], first_key + tile_row(i), row[j], drow[j]);
          row[j] = is_dv ? gradient.weight : gradient.dproduct;
        }
      },
      weights, dweights);
  store_weights(weights);
  add_weighted_chunk(is_dv ? dout_row : q_row, is_dv ? T{1} : scale, first_column,
                     is_dv ? p.head_dim_v : p.head_dim, sums);
}

template <class E>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Sum<E>>)
    simt_key_gradient_kernel(const __grid_constant__ BackwardParams p) {
  using T = Sum<E>;
  if (block_index() >= key_gradient_blocks<E>(p)) return;
  const int64_t chunks_v = chunk_count<T>(p.head_dim_v), chunks = chunks_v + chunk_count<T>(p.head_dim);
  const int64_t chunk = block_index() % chunks, slice = block_index() / chunks, group = p.heads_q / p.heads_k;
  const bool is_dv = chunk < chunks_v;
  const int first_column = static_cast<int>(is_dv ? chunk : chunk - chunks_v) * kChunk<T>;
  const int64_t first_key = slice / (p.heads_k * p.batch) * kTile;  // causal: longest first
  View<E> view(p, slice / p.heads_k % p.batch, slice % p.heads_k * group);
  if (first_key >= view.k.length) return;

  Fragment<T> sums[kChunkTiles<T>] = {};
  for (; view.head < (view.head_k + 1) * group; ++view.head)
    for (int64_t first_query = 0; first_query < view.q.length; first_query += kTile) {
      const KeyRange keys = view.visible_to_tile(first_query);
      if (keys.first < first_key + kTile && keys.last > first_key)
        add_key_gradient(p, view, is_dv, first_query, first_key, first_column, sums);
    }
  store_chunk(
      key_rows(view, is_dv ? p.dv : p.dk, first_key, {first_key, view.k.length}), [](int) { return T{1}; },
      first_column, is_dv ? p.head_dim_v : p.head_dim, sums);
}

// Tiles of queries of all heads and sequences, times the chunks of D.
template <class E>
FLASHATTN_HD int64_t query_gradient_blocks(const BackwardParams& p) {
  return divide_up(p.seqlen_q.rows, kTile) * p.batch * p.heads_q * chunk_count<Sum<E>>(p.head_dim);
}

template <class E>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Sum<E>>)
    simt_query_gradient_kernel(const __grid_constant__ BackwardParams p) {
  using T = Sum<E>;
  if (block_index() >= query_gradient_blocks<E>(p)) return;
  const int64_t chunks = chunk_count<T>(p.head_dim), tiles = divide_up(p.seqlen_q.rows, kTile);
  const int first_column = static_cast<int>(block_index() % chunks) * kChunk<T>;
  const int64_t slice = block_index() / chunks;
  const View<E> view(p, slice / p.heads_q % p.batch, slice % p.heads_q);
  const int64_t first_query = (tiles - 1 - slice / (p.heads_q * p.batch)) * kTile;  // causal: longest first
  if (first_query >= view.q.length) return;

  const auto& queries = shared_tiles<T>().queries;
  const T scale = static_cast<T>(p.score.scale);
  load_gradient_queries(p, view, first_query);
  __syncthreads();  // the queries are complete
  const KeyRange range = view.visible_to_tile(first_query);
  Fragment<T> dq[kChunkTiles<T>] = {}, s, dweights;
  for (int64_t block = range.first / kTile * kTile; block < range.last; block += kTile) {
    const auto k_row = key_rows(view, p.k, block, range);
    dot_products(query_rows(view, p.q, first_query), scale, k_row, T{1}, p.head_dim, s);
    dot_products(query_rows(view, p.dout, first_query), T{1}, key_rows(view, p.v, block, range), T{1},
                 p.head_dim_v, dweights);
    for_each_row(
        [&](int i, T(&row)[4], T(&drow)[4]) {
          for (int j = 0; j < 4; ++j)
            row[j] =
                differentiate(view, queries[tile_row(i)], block + tile_column(j), row[j], drow[j]).dproduct;
        },
        s, dweights);
    store_weights(s);
    add_weighted_chunk(k_row, T{1}, first_column, p.head_dim, dq);
  }
  store_chunk(query_rows(view, p.dq, first_query), [&](int) { return scale; }, first_column, p.head_dim, dq);
}

}  // namespace flashattn::any
