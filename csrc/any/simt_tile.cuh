// What the kernels in plain CUDA C++ share: a tile of kTile x kTile scores, its operands in shared memory and
// what happens to a score before the softmax.  Every product is acc += A^T B of panels (depth, kTile).
#pragma once

#include <cmath>

#include "any/elements.cuh"
#include "common/dropout.h"
#include "common/mask.h"
#include "common/shared_memory.cuh"

namespace flashattn::any {

// A thread owns 4 x 4 of a tile, and 16 threads share a row.
constexpr int kTile = 64, kRowThreads = kTile / 4, kThreads = kRowThreads * kRowThreads;
template <class T>
constexpr int kDepth = 128 / sizeof(T);  // head columns that are staged at a time
template <class T>
constexpr int kStagedRows = 2 * kDepth<T>;  // rows that are staged at a time, in the same memory
template <class T>
constexpr int kChunkTiles = 8 / sizeof(T);  // of output columns that a block keeps in registers
template <class T>
constexpr int kChunk = kChunkTiles<T> * kTile;
template <class T>
constexpr int kMinBlocks = 8 / sizeof(T);  // blocks that the registers of a multiprocessor must do for

// Neighbouring columns; they travel together.
template <class T>
struct alignas(sizeof(T) == 2 ? 8 : 16) Four {
  T x[4];
};

// What a thread has of a tile.
template <class T>
struct Fragment {
  T x[4][4];

  __device__ void rotate() {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const T first = x[0][j];
#pragma unroll
      for (int i = 0; i < 3; ++i) x[i][j] = x[i + 1][j];
      x[3][j] = first;
    }
  }
};

// f(i, row i of each fragment) in a loop that stays a loop, because options are long code: the rows move
// instead of the index, and so stay in registers.
template <class T, class F, class... Others>
__device__ inline void for_each_row(F f, Fragment<T>& x, Others&... others) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    f(i, x.x[0], others.x[0]...);
    x.rotate(), (others.rotate(), ...);
  }
}

// A row of scores.
template <class T>
struct Query {
  int64_t index, position;  // in its sequence, and among the keys
  int64_t first, last;      // keys that it sees
  int64_t bias, mask;       // offsets of its key 0
  T slope;                  // of ALiBi
  T lse, delta;             // backward only
};

template <class T>
struct SharedTiles {
  T weights[kTile * kTile];       // W^T (column, row)
  T stage[2][kDepth<T> * kTile];  // A and B of scores, or rows that are weighted
  Query<T> queries[kTile];        // of the tile
  int weighted[kTile];            // has the column a weight that is not 0?
  const void* rows[kTile];        // where the keys of a tile lie in a cache
};

template <class T>
__device__ inline SharedTiles<T>& shared_tiles() {
  return *reinterpret_cast<SharedTiles<T>*>(shared_memory);
}

FLASHATTN_HD int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Of the output columns; none at all are one empty chunk.
template <class T>
FLASHATTN_HD int64_t chunk_count(int64_t columns) {
  return columns > 0 ? divide_up(columns, kChunk<T>) : 1;
}

__device__ inline unsigned thread_index() { return threadIdx.x; }
__device__ inline int thread_row() { return thread_index() / kRowThreads; }

// ---- rows of the call ---------------------------------------------------------------------------

// One sequence of the batch and one query head.
template <class E>
struct View {
  const ForwardParams& p;
  int64_t batch, head, head_k;
  Sequence q, k;
  int64_t pad = 0;  // keys before it are invisible

  __device__ View(const ForwardParams& params, int64_t batch_, int64_t head_)
      : p(params),
        batch(batch_),
        head(head_),
        head_k(head_ / (p.heads_q / p.heads_k)),
        q(sequence(p.seqlen_q, batch_)),
        k(sequence(p.seqlen_k, batch_)) {}

  __device__ E* query_row(const Tensor4& x, int64_t query) const {
    return static_cast<E*>(x.data) + batch * x.batch + (q.first + query) * x.row + head * x.head;
  }

  __device__ E* key_row(const Tensor4& x, int64_t key) const {
    return static_cast<E*>(x.data) + batch * x.batch + (k.first + key) * x.row + head_k * x.head;
  }

  __device__ Sum<E>& statistic(const Statistic& x, int64_t query) const {
    return static_cast<Sum<E>*>(x.data)[batch * x.batch + head * x.head + (q.first + query) * x.row];
  }

  __device__ KeyRange visible(int64_t query) const {
    if (query >= q.length) return {0, 0};
    return visible_keys(query, q.length, k.length, p.score.window_left, p.score.window_right, pad);
  }

  // Keys that some query of the tile sees.
  __device__ KeyRange visible_to_tile(int64_t first_query) const {
    if (first_query >= q.length) return {0, 0};
    return {visible(first_query).first, visible(smaller(first_query + kTile, q.length) - 1).last};
  }
};

// Rows [first, last) of a tile; its other rows are zeros and never read.
template <class E>
struct Rows {
  E* row_0;
  int64_t stride;
  int first, last;

  __device__ bool has(int row) const { return row >= first && row < last; }
  __device__ E* operator[](int row) const { return row_0 + row * stride; }

  // Is every four of columns aligned and whole?
  __device__ bool in_fours(int columns) const {
    return reinterpret_cast<uintptr_t>(row_0) % alignof(Four<E>) == 0 && stride % 4 == 0 && columns % 4 == 0;
  }
};

__device__ inline int rows_of_tile(int64_t rows) { return static_cast<int>(clamp(rows, 0, kTile)); }

// A tile from query `first` on, and one of keys.
template <class E>
__device__ inline Rows<E> query_rows(const View<E>& view, const Tensor4& x, int64_t first, int64_t last) {
  return {view.query_row(x, first), x.row, 0, rows_of_tile(last - first)};
}

template <class E>
__device__ inline Rows<E> key_rows(const View<E>& view, const Tensor4& x, int64_t first, KeyRange range) {
  return {view.key_row(x, first), x.row, rows_of_tile(range.first - first), rows_of_tile(range.last - first)};
}

template <class E, class T>
__device__ inline void load_queries(const View<E>& view, int64_t first_query, Query<T>* queries) {
  const Score& score = view.p.score;
  for (int i = thread_index(); i < kTile; i += kThreads) {
    const int64_t query = first_query + i;
    const KeyRange keys = view.visible(query);
    Query<T>& to = queries[i];
    to.index = query, to.position = query + view.k.length - view.q.length;
    to.first = keys.first, to.last = keys.last;
    to.bias = view.batch * score.bias.batch + view.head * score.bias.head + query * score.bias.row;
    to.mask = view.batch * score.mask.batch + view.head * score.mask.head + query * score.mask.row;
    to.slope = score.alibi.data ? per_head<T>(score.alibi, view.batch, view.head) : 0;
  }
}

// ---- scores -------------------------------------------------------------------------------------

// A scaled dot product becomes a score: softcap, ALiBi, bias, mask, visibility; cap_slope is the derivative
// of the softcap.
template <class T>
__device__ inline T score_of(const Score& score, const Query<T>& query, int64_t key, T s, T& cap_slope) {
  cap_slope = 1;
  if (key < query.first || key >= query.last) return -kInfinity<T>;
  if (score.softcap > 0) {
    const T t = std::tanh(s * static_cast<T>(1 / score.softcap));
    s = t * static_cast<T>(score.softcap);
    cap_slope = 1 - t * t;
  }
  if (score.alibi.data) {
    const int64_t distance = query.position - key;
    s -= query.slope * static_cast<T>(distance < 0 ? -distance : distance);
  }
  if (score.bias.data) s += load_number<T>(score.bias.data, score.bias.dtype, query.bias + key);
  const auto* mask = static_cast<const uint8_t*>(score.mask.data);
  return mask && !mask[query.mask + key] ? -kInfinity<T> : s;
}

// What a weight is multiplied by.
template <class E>
__device__ inline Sum<E> dropout_factor(const View<E>& view, int64_t query, int64_t key) {
  const Dropout& dropout = view.p.dropout;
  if (!dropout.seed) return 1;
  const Philox numbers = philox(static_cast<uint64_t>(*dropout.seed),
                                static_cast<uint32_t>(key / kDropoutColumns), static_cast<uint32_t>(query),
                                static_cast<uint32_t>(view.head), static_cast<uint32_t>(view.batch));
  const double kept = static_cast<double>(kDropoutRange) / dropout.keep_below;
  return dropout_keeps(numbers, key % kDropoutColumns, dropout.keep_below) ? static_cast<Sum<E>>(kept) : 0;
}

// ---- products -----------------------------------------------------------------------------------

// Row and column in the tile of element (i, j) of a thread's fragment.
__device__ inline int tile_row(int i) { return thread_row() * 4 + i; }
__device__ inline int tile_column(int j) { return thread_index() % kRowThreads * 4 + j; }

// Panels are swizzled in groups of 8 so that the transposing stores of a warp (8 rows, 4 fours of columns)
// meet no bank twice; 4 columns stay together.
__device__ inline int panel_offset(int depth, int column) {
  return depth * kTile + (column ^ (depth / 4 % 4 * 8));
}

template <class T>
__device__ inline Four<T>& panel_four(T* panel, int depth, int column) {
  return *reinterpret_cast<Four<T>*>(panel + panel_offset(depth, column));
}

// acc(row, column) += sum over depth of A(depth, row) B(depth, column).  Long sums in parts round less.
template <int kCount, class T>
__device__ inline void multiply(T* a, T* b, Fragment<T>& acc) {
  Fragment<T> part{};
#pragma unroll 4
  for (int depth = 0; depth < kCount; ++depth) {
    const Four<T> left = panel_four(a, depth, tile_row(0)), right = panel_four(b, depth, tile_column(0));
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) part.x[i][j] += left.x[i] * right.x[j];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) acc.x[i][j] += part.x[i][j];
}

// Where some of 4 columns lie.
template <class E>
struct Some {
  const E* from;
  int count;  // at most 0: none
};

// Fours of columns: item i comes from at(i), with zeros where columns are missing.  All loads are under way
// before the first result is needed.
template <int kItems, class E, class At>
__device__ inline void load_fours(bool in_fours, At at, Four<E> (&to)[kItems]) {
  if (in_fours) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Some<E> four = at(i);
      to[i] = {};
      if (four.count > 0) to[i] = *reinterpret_cast<const Four<E>*>(four.from);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Some<E> four = at(i);
#pragma unroll
      for (int e = 0; e < 4; ++e) to[i].x[e] = e < four.count ? four.from[e] : to_element<E>(0);
    }
  }
}

// panel(column - first, row) = factor x(row, column)
template <template <class> class Rows, class E, class T>
__device__ inline void stage_transposed(const Rows<E>& rows, T factor, int first, int columns, T* panel) {
  constexpr int kItems = kTile * kDepth<T> / 4 / kThreads;
  const int row = thread_index() / 32 * 8 + thread_index() % 8;  // a warp takes 8 rows and 4 fours at a time
  const auto column_of = [](int i) -> int { return i * 16 + thread_index() / 8 % 4 * 4; };
  const E* from = rows[row] + first;
  const int count = rows.has(row) ? columns - first : 0;
  Four<E> fours[kItems];
  load_fours(
      rows.in_fours(columns), [&](int i) { return Some<E>{from + column_of(i), count - column_of(i)}; },
      fours);
#pragma unroll
  for (int i = 0; i < kItems; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) panel[panel_offset(column_of(i) + e, row)] = factor * to_sum(fours[i].x[e]);
}

// scores = A B^T over all columns, A times factor_a and B times factor_b.
template <template <class> class Keys, class E, class T>
__device__ inline void dot_products(const Rows<E>& a, T factor_a, const Keys<E>& b, T factor_b, int columns,
                                    Fragment<T>& scores) {
  auto& shared = shared_tiles<T>();
  scores = {};
  for (int first = 0; first < columns; first += kDepth<T>) {
    __syncthreads();  // nobody reads the stage any more
    stage_transposed(a, factor_a, first, columns, shared.stage[0]);
    stage_transposed(b, factor_b, first, columns, shared.stage[1]);
    __syncthreads();  // both panels are complete
    multiply<kDepth<T>>(shared.stage[0], shared.stage[1], scores);
  }
}

// Fragments of all threads to the panel of weights.
template <class T>
__device__ inline void store_weights(const Fragment<T>& weights) {
  auto& shared = shared_tiles<T>();
  __syncthreads();  // nobody reads the weights before these any more
  for (int i = thread_index(); i < kTile; i += kThreads) shared.weighted[i] = 0;
  __syncthreads();  // all are cleared
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    Four<T> four;
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      four.x[i] = weights.x[i][j];
      any |= four.x[i] != 0;
    }
    panel_four(shared.weights, tile_column(j), tile_row(0)) = four;
    if (any) shared.weighted[tile_column(j)] = 1;
  }
}

// acc += factor W X[:, first : first + kTile].  A row of X without weights counts as zeros: it may hold NaN.
template <template <class> class Rows, class E, class T>
__device__ inline void add_weighted_rows(const Rows<E>& x, T factor, int first, int columns,
                                         Fragment<T>& acc) {
  constexpr int kStep = kThreads / kRowThreads, kItems = kStagedRows<T> / kStep;
  auto& shared = shared_tiles<T>();
  const int column = tile_column(0);
  for (int first_row = 0; first_row < kTile; first_row += kStagedRows<T>) {
    __syncthreads();  // the weights are complete, nobody reads the stage any more
    Four<E> fours[kItems];
    load_fours(
        x.in_fours(columns),
        [&](int i) {
          const int row = first_row + i * kStep + thread_row();
          return Some<E>{x[row] + first + column, x.has(row) ? columns - first - column : 0};
        },
        fours);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row = i * kStep + thread_row();
      const bool counts = shared.weighted[first_row + row];
      Four<T> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.x[e] = counts ? factor * to_sum(fours[i].x[e]) : 0;
      panel_four(shared.stage[0], row, column) = four;
    }
    __syncthreads();  // the rows are complete
    multiply<kStagedRows<T>>(shared.weights + first_row * kTile, shared.stage[0], acc);
  }
}

// The same for the columns of a chunk that starts at `first`; the tiles change places as in for_each_row.
template <template <class> class Rows, class E, class T>
__device__ inline void add_weighted_chunk(const Rows<E>& x, T factor, int first, int columns,
                                          Fragment<T> (&acc)[kChunkTiles<T>]) {
#pragma unroll 1
  for (int tile = 0; tile < kChunkTiles<T>; ++tile) {
    if (first + tile * kTile < columns) add_weighted_rows(x, factor, first + tile * kTile, columns, acc[0]);
    const Fragment<T> done = acc[0];
#pragma unroll
    for (int i = 1; i < kChunkTiles<T>; ++i) acc[i - 1] = acc[i];
    acc[kChunkTiles<T> - 1] = done;
  }
}

// Sums of a chunk that starts at column `first`, times factor(i) for the thread's row i.
template <class E, class T, class Factor>
__device__ inline void store_chunk(const Rows<E>& to, Factor factor, int first, int columns,
                                   const Fragment<T> (&sums)[kChunkTiles<T>]) {
  const bool in_fours = to.in_fours(columns);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int tile = 0; tile < kChunkTiles<T>; ++tile) {
      const int row = tile_row(i);
      const int column = first + tile * kTile + tile_column(0);
      if (!to.has(row) || column >= columns) continue;
      Four<E> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.x[j] = to_element<E>(factor(i) * sums[tile].x[i][j]);
      if (in_fours)
        *reinterpret_cast<Four<E>*>(to[row] + column) = four;
      else
        for (int j = 0; j < 4 && column + j < columns; ++j) to[row][column + j] = four.x[j];
    }
}

}  // namespace flashattn::any
