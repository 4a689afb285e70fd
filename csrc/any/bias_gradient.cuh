// dbias = dS summed where the bias broadcasts, in a fixed order: a block owns a tile of dbias (rows, keys)
// and recomputes every tile of dS that adds to it, over sequences, heads and, with one row for all, queries.
#pragma once

#include "any/simt_gradient.cuh"

namespace flashattn::any {

struct BiasTiles {
  int64_t batches, heads, rows, keys;  // rows and keys in tiles; 1 for all where the bias broadcasts

  FLASHATTN_HD explicit BiasTiles(const BackwardParams& p)
      : batches(p.dbias.batch ? p.batch : smaller(p.batch, 1)),
        heads(p.dbias.head ? p.heads_q : smaller(p.heads_q, 1)),
        rows(p.dbias.row ? divide_up(p.seqlen_q.rows, kTile) : 1),
        keys(divide_up(p.seqlen_k.rows, kTile)) {}

  FLASHATTN_HD int64_t count() const { return batches * heads * rows * keys; }
};

// Sums in double: they may have as many terms as the call has rows.
template <class T>
using BiasSums = double[4][4];

template <class E, class T>
__device__ inline void add_bias_gradients(const BackwardParams& p, const View<E>& view, int64_t first_query,
                                          int64_t first_key, BiasSums<T>& sums) {
  const auto& queries = shared_tiles<T>().queries;
  const KeyRange range = view.visible_to_tile(first_query);
  if (range.first >= first_key + kTile || range.last <= first_key) return;
  Fragment<T> s, dweights;
  __syncthreads();  // nobody reads the queries before these any more
  load_gradient_queries(p, view, first_query);
  dot_products(query_rows(view, p.q, first_query), static_cast<T>(p.score.scale),
               key_rows(view, p.k, first_key, range), T{1}, p.head_dim, s);
  dot_products(query_rows(view, p.dout, first_query), T{1}, key_rows(view, p.v, first_key, range), T{1},
               p.head_dim_v, dweights);
  __syncthreads();  // the queries are complete
  for_each_row(
      [&](int i, T(&row)[4], T(&drow)[4]) {
        for (int j = 0; j < 4; ++j)
          row[j] =
              differentiate(view, queries[tile_row(i)], first_key + tile_column(j), row[j], drow[j]).dscore;
      },
      s, dweights);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i][j] += s.x[i][j];
}

// The rows of a tile become one, in row 0 of the first threads.
template <class T>
__device__ inline void sum_bias_rows(BiasSums<T>& sums) {
  double* parts = reinterpret_cast<double*>(shared_memory);  // (rows of threads, kTile)
  __syncthreads();                                           // nobody reads the tiles any more
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += sums[i][j];
    parts[thread_row() * kTile + tile_column(j)] = sum;
  }
  __syncthreads();  // the parts are complete
  for (int j = 0; j < 4; ++j) {
    sums[0][j] = 0;
    for (int row = 0; row < kTile / 4; ++row) sums[0][j] += parts[row * kTile + tile_column(j)];
  }
}

template <class E>
__global__ void __launch_bounds__(kThreads) bias_gradient_kernel(const __grid_constant__ BackwardParams p) {
  using T = Sum<E>;
  const BiasTiles tiles(p);
  if (block_index() >= tiles.count()) return;
  const int64_t first_key = block_index() % tiles.keys * kTile;
  const int64_t first_row = block_index() / tiles.keys % tiles.rows * kTile;
  const int64_t slice = block_index() / (tiles.keys * tiles.rows);
  const int64_t first_head = slice % tiles.heads, first_batch = slice / tiles.heads;
  const bool one_row = p.dbias.row == 0;
  BiasSums<T> sums = {};
  for (int64_t batch = first_batch; batch < (p.dbias.batch ? first_batch + 1 : p.batch); ++batch)
    for (int64_t head = first_head; head < (p.dbias.head ? first_head + 1 : p.heads_q); ++head) {
      const View<E> view(p, batch, head);
      const int64_t last_row = one_row ? view.q.length : smaller(first_row + 1, view.q.length);
      for (int64_t row = first_row; row < last_row; row += kTile)
        add_bias_gradients<E, T>(p, view, row, first_key, sums);
    }
  if (one_row) sum_bias_rows<T>(sums);
  T* dbias = static_cast<T*>(p.dbias.data) + first_batch * p.dbias.batch + first_head * p.dbias.head;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = first_row + tile_row(i);
    if (row >= (one_row ? 1 : p.seqlen_q.rows)) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t key = first_key + tile_column(j);
      if (key < p.seqlen_k.rows) dbias[row * p.dbias.row + key] = static_cast<T>(sums[i][j]);
    }
  }
}

}  // namespace flashattn::any
