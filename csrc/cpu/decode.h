// Split-KV decode: append the new keys, attend to each split of the cache on its own, merge by the LSE.
#pragma once

#include "cpu/forward.h"
#include "dispatch.h"

namespace flashattn::cpu {
namespace {

static_assert(kSplitKeys % kKeys == 0 && kInvariantSplitKeys % kKeys == 0, "splits consist of whole blocks");

// Partial results of the splits: out (split, row, head, column) and LSE (split, row, head).
template <class T>
struct Partials {
  int64_t rows, heads, columns;
  T *out, *lse;

  Partials(const DecodeParams& p, Arena& arena)
      : rows(p.seqlen_q.total),
        heads(p.heads_q),
        columns(p.head_dim_v),
        out(arena.take<T>(p.splits * rows * heads * columns)),
        lse(arena.take<T>(p.splits * rows * heads)) {}

  Destination split(const DecodeParams& p, int64_t index) const {
    const int64_t batch_rows = p.seqlen_q.cu ? 0 : p.seqlen_q.rows;
    const DType dtype = sizeof(T) == 8 ? DType::f64 : DType::f32;
    return {{out + index * rows * heads * columns, batch_rows * heads * columns, heads * columns, columns},
            dtype,
            {lse + index * rows * heads, batch_rows * heads, 1, heads},
            {},
            false};
  }
};

template <class T>
inline void rotate(const Rotary& rotary, int64_t position, T* x, T* cosines, T* sines) {
  const int64_t half = rotary.dim / 2, bytes = element_size(rotary.dtype);
  load_row<T>(rotary.dtype, static_cast<const char*>(rotary.cos) + position * rotary.cos_row * bytes, half,
              cosines);
  load_row<T>(rotary.dtype, static_cast<const char*>(rotary.sin) + position * rotary.sin_row * bytes, half,
              sines);
  for (int64_t c = 0; c < half; ++c) {
    T& first = x[rotary.interleaved ? 2 * c : c];
    T& second = x[rotary.interleaved ? 2 * c + 1 : c + half];
    const T turned = first * cosines[c] - second * sines[c];
    second = first * sines[c] + second * cosines[c];
    first = turned;
  }
}

// One row: rotate if asked, convert, store.
template <class T>
inline void move_row(const DecodeParams& p, const char* from, char* to, int64_t columns, bool turn,
                     int64_t position, T* row) {
  load_row<T>(p.dtype, from, columns, row);
  if (turn) rotate(p.rotary, position, row, row + columns, row + columns + p.rotary.dim / 2);
  store_row<T>(p.dtype, row, columns, to);
}

template <class T>
inline void append_and_rotate(const DecodeParams& p, const SequenceView& view, T* row) {
  const bool rotary = p.rotary.cos != nullptr;
  const int64_t fresh = !p.k_new.data ? 0 : p.seqlen_q.cu ? view.q.length : p.new_rows;
  for (int64_t i = 0; i < fresh; ++i) {
    const int64_t key = view.k.length - fresh + i, from = p.seqlen_q.cu ? view.q.first + i : i;
    move_row<T>(p, element(p.k_new, p.dtype, view.batch, from, view.head_k),
                const_cast<char*>(view.key_row(p.k, key)), p.head_dim, rotary, key, row);
    if (p.v_new.data)
      move_row<T>(p, element(p.v_new, p.dtype, view.batch, from, view.head_k),
                  const_cast<char*>(view.key_row(p.v, key)), p.head_dim_v, false, 0, row);
  }
  if (!rotary) return;
  for (int64_t i = 0; i < view.q.length * view.group; ++i) {
    const int64_t query = i / view.group, head = view.head_k * view.group + i % view.group;
    const int64_t position = p.rotary.every_query
                                 ? std::max<int64_t>(0, query + view.k.length - view.q.length)
                                 : view.k.length - fresh;
    move_row<T>(p, element(p.q, p.dtype, view.batch, view.q.first + query, head),
                mutable_element(p.q_rotated, p.dtype, view.batch, view.q.first + query, head), p.head_dim,
                true, position, row);
  }
}

// out = sum_s e^(lse_s - lse) out_s, lse = log(sum_s e^lse_s + e^sink); an empty split has lse -inf and adds
// nothing.
template <class T>
inline void merge_row(const DecodeParams& p, const SequenceView& view, int64_t query, int64_t head,
                      const Partials<T>& partials, T* row) {
  const int64_t q_row = view.q.first + query;
  const T sink = p.score.sink.data ? per_head<T>(p.score.sink, 0, head) : static_cast<T>(-kInfinity);
  T peak = sink;
  for (int64_t s = 0; s < p.splits; ++s)
    peak = std::max(peak, statistic<T>(partials.split(p, s).lse, view.batch, head, q_row));
  const T base = peak == static_cast<T>(-kInfinity) ? 0 : peak;
  T sum = std::exp(sink - base);
  std::fill(row, row + p.head_dim_v, T{0});
  for (int64_t s = 0; s < p.splits; ++s) {
    const Destination part = partials.split(p, s);
    const T weight = std::exp(statistic<T>(part.lse, view.batch, head, q_row) - base);
    if (weight == 0) continue;
    sum += weight;
    const T* out = reinterpret_cast<const T*>(element(part.out, part.dtype, view.batch, q_row, head));
    for (int64_t column = 0; column < p.head_dim_v; ++column) row[column] += weight * out[column];
  }
  for (int64_t column = 0; column < p.head_dim_v; ++column) row[column] = sum == 0 ? 0 : row[column] / sum;
  store_row<T>(p.dtype, row, p.head_dim_v, mutable_element(p.out, p.dtype, view.batch, q_row, head));
  statistic<T>(p.lse, view.batch, head, q_row) = sum == 0 ? static_cast<T>(-kInfinity) : base + std::log(sum);
}

template <class T>
inline Workspace decode_workspace(const DecodeParams& p) {
  Arena measure{nullptr}, shared{nullptr};
  ForwardScratch<T>(p, measure);
  measure.take<T>(std::max(2 * p.head_dim, p.head_dim_v));
  if (p.splits > 1) Partials<T>(p, shared);
  Workspace workspace{};
  workspace.private_bytes = measure.used;
  workspace.shared_bytes = shared.used;
  return workspace;
}

template <class T>
inline void decode(const DecodeParams& call) {
  DecodeParams p = call;
  if (p.rotary.cos) p.q = p.q_rotated;
  const int64_t sequences = p.batch * p.heads_k;
  const int64_t tiles = divide_up(p.seqlen_q.rows * (p.heads_q / p.heads_k), kTileRows);
  Arena shared{static_cast<char*>(p.workspace.shared)};
  const Partials<T> partials(p, shared);
  const Destination result{p.out, p.dtype, p.lse, {}, true};
#pragma omp parallel num_threads(p.workspace.threads)
  {
    Arena arena = thread_arena(p.workspace);
    ForwardScratch<T> scratch(p, arena);
    T* row = arena.take<T>(std::max(2 * p.head_dim, p.head_dim_v));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < sequences; ++i)
      append_and_rotate(call, SequenceView(call, i / p.heads_k, i % p.heads_k), row);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < sequences * tiles * p.splits; ++task) {
      const int64_t i = task / p.splits % sequences, tile = task / p.splits / sequences,
                    split = task % p.splits;
      const SequenceView view(p, i / p.heads_k, i % p.heads_k);
      if (tile * kTileRows >= view.q.allotted * view.group) continue;
      const KeyRange limit{std::min(view.k.length, split * p.keys_per_split),
                           std::min(view.k.length, (split + 1) * p.keys_per_split)};
      forward_tile(view, tile * kTileRows, limit, p.splits == 1 ? result : partials.split(p, split), scratch);
    }
    if (p.splits > 1) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < p.batch * p.heads_q; ++i) {
        const SequenceView view(p, i / p.heads_q, i % p.heads_q / (p.heads_q / p.heads_k));
        for (int64_t query = 0; query < view.q.length; ++query)
          merge_row(p, view, query, i % p.heads_q, partials, row);
      }
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
