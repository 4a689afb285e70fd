// dQ, dK, dV, dbias and dsink from the saved LSE; the probabilities are recomputed tile by tile.
//   P = exp(S - lse), dP = dO V^T, dS = P * (dP - delta) with delta = rowsum(dO * O) - dlse,
//   dV = P^T dO, dK = dS^T Q, dQ = dS K. A task owns a chunk of keys: it writes their dK and dV, and its
// share of dQ to a buffer of its own.  The shares are added in order, so the result does not depend on the
// number of threads.
#pragma once

#include "cpu/tile.h"

namespace flashattn::cpu {
namespace {

constexpr int64_t kParallelTasks = 32, kMaxChunks = 8, kMinChunkKeys = 512;

inline int64_t key_chunks(const BackwardParams& p) {
  const int64_t wanted = divide_up(kParallelTasks, std::max<int64_t>(1, p.batch * p.heads_k));
  return clamp(wanted, 1, clamp(p.seqlen_k.rows / kMinChunkKeys, 1, kMaxChunks));
}

inline int64_t keys_per_chunk(const BackwardParams& p) {
  return divide_up(std::max<int64_t>(1, p.seqlen_k.rows), key_chunks(p) * kKeys) * kKeys;
}

// Partial dQ lies in panels (column, lane).  A sequence's panels start at the panel of its first packed row,
// shifted by one for each sequence before it, whose last panel may be partly filled.
template <class T>
struct QuerySums {
  T* data;
  int64_t panels, heads_k, elements;

  explicit QuerySums(const BackwardParams& p)
      : data(static_cast<T*>(p.workspace.shared)),
        panels(p.seqlen_q.total * (p.heads_q / p.heads_k) / kPanel<T> + p.batch + 1),
        heads_k(p.heads_k),
        elements(p.head_dim * kPanel<T>) {}

  T* panel(const SequenceView& view, int64_t chunk, int64_t index) const {
    const int64_t first_row = view.p.seqlen_q.cu ? view.q.first : view.batch * view.p.seqlen_q.rows;
    const int64_t base = first_row * view.group / kPanel<T> + view.batch;
    return data + ((chunk * panels + base + index) * heads_k + view.head_k) * elements;
  }
};

template <class T>
struct BackwardScratch {
  int64_t width, width_v;  // columns rounded up to whole panels
  T *k, *v, *q_rows, *dout_rows, *q, *dout, *scores, *slopes, *dscores, *factors, *row, *zeros;
  // Of the keys of a block: gradients over a few panels, and over all before them.  Long sums in parts round
  // less.
  int64_t sums;
  T *dk, *dv = nullptr, *dbias = nullptr, *before = nullptr;

  BackwardScratch(const BackwardParams& p, Arena& arena)
      : width(divide_up(p.head_dim, kPanel<T>) * kPanel<T>),
        width_v(divide_up(p.head_dim_v, kPanel<T>) * kPanel<T>),
        k(arena.take<T>(kKeys * p.head_dim)),
        v(arena.take<T>(kKeys * p.head_dim_v)),
        q_rows(arena.take<T>(kPanel<T> * width)),
        dout_rows(arena.take<T>(kPanel<T> * width_v)),
        q(arena.take<T>(p.head_dim * kPanel<T>)),
        dout(arena.take<T>(p.head_dim_v * kPanel<T>)),
        scores(arena.take<T>(kKeys * kPanel<T>)),
        slopes(arena.take<T>(kKeys * kPanel<T>)),
        dscores(arena.take<T>(kKeys * kPanel<T>)),
        factors(arena.take<T>(kKeys * kPanel<T>)),
        row(arena.take<T>(kKeys)),
        zeros(arena.take<T>(p.head_dim)),
        sums(kKeys * (width + width_v + 1)),
        dk(arena.take<T>(2 * sums)) {
    if (!arena.data) return;
    dv = dk + kKeys * width;
    dbias = dv + kKeys * width_v;
    before = dk + sums;
    std::fill(q_rows, q_rows + kPanel<T> * width, T{0});
    std::fill(dout_rows, dout_rows + kPanel<T> * width_v, T{0});
    std::fill(zeros, zeros + p.head_dim, T{0});
  }

  void start_sums() { std::fill(dk, dk + 2 * sums, T{0}); }
  void next_part() {
    for (int64_t e = 0; e < sums; ++e) before[e] += dk[e], dk[e] = 0;
  }
  void finish_sums() {
    for (int64_t e = 0; e < sums; ++e) dk[e] += before[e];
  }
};

template <class T>
inline T* dbias_row(const SequenceView& view, const BackwardParams& p, int64_t head, int64_t query) {
  return static_cast<T*>(p.dbias.data) + view.batch * p.dbias.batch + head * p.dbias.head +
         query * p.dbias.row;
}

// Do all rows of the sequence and KV head add to one row of dbias?
inline bool dbias_is_one_row(const SequenceView& view, const BackwardParams& p) {
  return p.dbias.row == 0 && (p.dbias.head == 0 || view.group == 1);
}

// `sums` collects the panels of a block where they add to one row.
template <class T>
inline void add_dbias(const SequenceView& view, const BackwardParams& p, const Panel<T>& panel, KeyRange keys,
                      const T* dscores, T* sums) {
  if (dbias_is_one_row(view, p)) {
    for (int64_t j = 0; j < keys.last - keys.first; ++j) {
      T sum = 0;
      for (int64_t lane = 0; lane < kPanel<T>; ++lane) sum += dscores[j * kPanel<T> + lane];
      sums[j] += sum;
    }
    return;
  }
  for (int64_t lane = 0; lane < panel.count; ++lane) {
    if (!panel.reads(view, lane)) continue;
    T* to = dbias_row<T>(view, p, panel.head[lane], panel.query[lane]);
    for (int64_t j = 0; j < keys.last - keys.first; ++j) to[keys.first + j] += dscores[j * kPanel<T> + lane];
  }
}

// Scores become weights, products dO V^T become dS.
template <class T>
inline void differentiate(const SequenceView& view, const BackwardParams& p, const Panel<T>& panel,
                          int64_t count, T* scores, T* dscores, const T* factors) {
  alignas(kVectorBytes) T lse[kPanel<T>], delta[kPanel<T>];
  for (int64_t lane = 0; lane < kPanel<T>; ++lane) {
    const bool reads = panel.reads(view, lane);
    lse[lane] =
        reads ? statistic<T>(p.lse, view.batch, panel.head[lane], view.q.first + panel.query[lane]) : 0;
    if (lse[lane] == static_cast<T>(-kInfinity))
      lse[lane] = static_cast<T>(kInfinity);  // empty row: weights are 0
    delta[lane] =
        reads ? statistic<T>(p.delta, view.batch, panel.head[lane], view.q.first + panel.query[lane]) : 0;
  }
  const bool dropout = p.dropout.seed != nullptr;
  for (int64_t i = 0; i < count * kPanel<T>; i += kWidth<T>) {
    const int64_t half = i % kPanel<T>;
    const Vector<T> weight = exp(load(scores + i) - load(lse + half));
    const Vector<T> factor = dropout ? load(factors + i) : splat<T>(1);
    const Vector<T> dscore = weight * (load(dscores + i) * factor - load(delta + half));
    store<T>(dscores + i,
             select<T>(weight == splat<T>(0), splat<T>(0), dscore));  // invisible keys may hold NaN
    store<T>(scores + i, weight * factor);
  }
}

template <class T>
inline void backward_keys(const BackwardParams& p, const SequenceView& view, KeyRange keys, int64_t chunk,
                          const QuerySums<T>& dq_sums, BackwardScratch<T>& s) {
  const int64_t panels = divide_up(view.q.length * view.group, kPanel<T>);
  const bool direct = in_place<T>(p, panels);
  const T *k_rows[kKeys], *v_rows[kKeys], *seen[kKeys], *weight_rows[kKeys], *dscore_rows[kKeys];
  T ones[kPanel<T>];
  std::fill(ones, ones + kPanel<T>, T{1});
  load_keys(view, p.k, keys, p.head_dim, direct, s.k, k_rows);
  load_keys(view, p.v, keys, p.head_dim_v, direct, s.v, v_rows);
  for (int64_t j = 0; j < kKeys; ++j) {
    weight_rows[j] = s.scores + j * kPanel<T>;
    dscore_rows[j] = s.dscores + j * kPanel<T>;
  }

  s.start_sums();
  for (int64_t i = 0; i < panels; ++i) {
    if (i > 0 && i % kDepth == 0) s.next_part();
    const Panel<T> panel(view, i * kPanel<T>, keys);
    const KeyRange mine = panel.some;
    const int64_t count = mine.last - mine.first, skip = mine.first - keys.first;
    if (count <= 0) continue;
    for (int64_t lane = 0; lane < kPanel<T>; ++lane) {
      load_lane(view, panel, lane, p.q, p.head_dim, static_cast<T>(p.score.scale), s.q_rows + lane * s.width,
                s.q);
      load_lane(view, panel, lane, p.dout, p.head_dim_v, T{1}, s.dout_rows + lane * s.width_v, s.dout);
    }
    rows_by_panel(k_rows + skip, count, s.q, kPanel<T>, p.head_dim, s.scores, kPanel<T>, false);
    rows_by_panel(v_rows + skip, count, s.dout, kPanel<T>, p.head_dim_v, s.dscores, kPanel<T>, false);
    score_panel(view, panel, mine, s.scores, s.slopes, s.row);
    replace_hidden(view, s.scores, count, s.zeros, k_rows + skip, seen);
    if (p.dropout.seed) dropout_panel(view, panel, mine, s.factors);
    differentiate(view, p, panel, count, s.scores, s.dscores, s.factors);
    if (p.dbias.data) add_dbias(view, p, panel, mine, s.dscores, s.dbias + skip);
    if (p.score.softcap > 0)
      for (int64_t e = 0; e < count * kPanel<T>; ++e) s.dscores[e] *= s.slopes[e];
    for (int64_t column = 0; column < s.width_v; column += kPanel<T>)
      rows_by_panel(weight_rows, count, s.dout_rows + column, s.width_v, kPanel<T>,
                    s.dv + skip * s.width_v + column, s.width_v, true);
    for (int64_t column = 0; column < s.width; column += kPanel<T>)
      rows_by_panel(dscore_rows, count, s.q_rows + column, s.width, kPanel<T>, s.dk + skip * s.width + column,
                    s.width, true);
    columns_by_panel(seen, 0, p.head_dim, count, s.dscores, ones, dq_sums.panel(view, chunk, i));
  }
  s.finish_sums();
  if (p.dbias.data && dbias_is_one_row(view, p)) {
    T* to = dbias_row<T>(view, p, view.head_k * view.group, 0);
    for (int64_t key = keys.first; key < keys.last; ++key) to[key] += s.dbias[key - keys.first];
  }
  for (int64_t key = keys.first; key < keys.last; ++key) {
    const int64_t j = key - keys.first, row = view.k.first + key;
    store_row<T>(p.dtype, s.dk + j * s.width, p.head_dim,
                 mutable_element(p.dk, p.dtype, view.batch, row, view.head_k));
    store_row<T>(p.dtype, s.dv + j * s.width_v, p.head_dim_v,
                 mutable_element(p.dv, p.dtype, view.batch, row, view.head_k));
  }
}

// delta = rowsum(dO * O) - dlse of one head and sequence; returns the gradient of the sink.
template <class T>
inline double prepare(const BackwardParams& p, const SequenceView& view, int64_t head, T* row, T* drow) {
  double dsink = 0;
  for (int64_t query = view.q.first; query < view.q.first + view.q.length; ++query) {
    load_row<T>(p.dtype, element(p.out, p.dtype, view.batch, query, head), p.head_dim_v, row);
    load_row<T>(p.dtype, element(p.dout, p.dtype, view.batch, query, head), p.head_dim_v, drow);
    double delta = 0;  // it is subtracted from numbers of its size
    for (int64_t column = 0; column < p.head_dim_v; ++column)
      delta += static_cast<double>(row[column]) * drow[column];
    if (p.dlse.data) delta -= statistic<T>(p.dlse, view.batch, head, query);
    const T lse = statistic<T>(p.lse, view.batch, head, query);
    const bool empty = lse == static_cast<T>(-kInfinity);  // also without a sink: the LSE is a constant
    if (empty) delta = 0;
    statistic<T>(p.delta, view.batch, head, query) = static_cast<T>(delta);
    if (p.dsink && !empty)
      dsink -= std::exp(static_cast<double>(per_head<T>(p.score.sink, 0, head) - lse)) * delta;
  }
  return dsink;
}

template <class T>
inline void finish(const BackwardParams& p, const SequenceView& view, const QuerySums<T>& dq_sums, T* row) {
  const int64_t rows = view.q.length * view.group;
  const int64_t chunks = std::min(key_chunks(p), divide_up(view.k.length, keys_per_chunk(p)));
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(row, row + p.head_dim, T{0});
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const T* sums = dq_sums.panel(view, chunk, r / kPanel<T>) + r % kPanel<T>;
      for (int64_t column = 0; column < p.head_dim; ++column) row[column] += sums[column * kPanel<T>];
    }
    for (int64_t column = 0; column < p.head_dim; ++column) row[column] *= static_cast<T>(p.score.scale);
    store_row<T>(p.dtype, row, p.head_dim,
                 mutable_element(p.dq, p.dtype, view.batch, view.q.first + r / view.group,
                                 view.head_k * view.group + r % view.group));
  }
}

template <class T>
inline Workspace backward_workspace(const BackwardParams& p) {
  Arena measure{nullptr};
  BackwardScratch<T>(p, measure);
  measure.take<T>(2 * std::max(p.head_dim, p.head_dim_v));
  const QuerySums<T> sums(p);
  Workspace workspace{};
  workspace.private_bytes = measure.used;
  workspace.shared_bytes = key_chunks(p) * sums.panels * sums.heads_k * sums.elements * sizeof(T);
  return workspace;
}

template <class T>
inline void backward(const BackwardParams& p) {
  const QuerySums<T> dq_sums(p);
  const int64_t chunks = key_chunks(p), chunk_keys = keys_per_chunk(p),
                widest = std::max(p.head_dim, p.head_dim_v);
  // Sequences and heads that add to the same dbias are one task.
  const bool one_batch = p.dbias.data && p.dbias.batch == 0, one_head = p.dbias.data && p.dbias.head == 0;
  const int64_t batches = one_batch ? 1 : p.batch, heads = one_head ? 1 : p.heads_k;
#pragma omp parallel num_threads(p.workspace.threads)
  {
    Arena arena = thread_arena(p.workspace);
    BackwardScratch<T> scratch(p, arena);
    T* row = arena.take<T>(2 * widest);
#pragma omp for schedule(dynamic, 1)
    for (int64_t head = 0; head < p.heads_q; ++head) {
      double dsink = 0;
      for (int64_t batch = 0; batch < p.batch; ++batch)
        dsink +=
            prepare<T>(p, SequenceView(p, batch, head / (p.heads_q / p.heads_k)), head, row, row + widest);
      if (p.dsink) p.dsink[head] = dsink;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < batches * heads * chunks; ++task) {
      const int64_t chunk = task % chunks, first_batch = task / chunks / heads,
                    first_head = task / chunks % heads;
      for (int64_t batch = first_batch; batch < (one_batch ? p.batch : first_batch + 1); ++batch)
        for (int64_t head = first_head; head < (one_head ? p.heads_k : first_head + 1); ++head) {
          const SequenceView view(p, batch, head);
          const int64_t last = std::min(view.k.length, (chunk + 1) * chunk_keys);
          if (chunk * chunk_keys >= last) continue;
          for (int64_t i = 0; i < divide_up(view.q.length * view.group, kPanel<T>); ++i)
            std::fill_n(dq_sums.panel(view, chunk, i), dq_sums.elements, T{0});
          for (int64_t key = chunk * chunk_keys; key < last; key += kKeys)
            backward_keys(p, view, {key, std::min(key + kKeys, last)}, chunk, dq_sums, scratch);
        }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < p.batch * p.heads_k; ++task)
      finish<T>(p, SequenceView(p, task / p.heads_k, task % p.heads_k), dq_sums, row);
  }
}

}  // namespace
}  // namespace flashattn::cpu
