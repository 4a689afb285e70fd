// O = softmax(score(Q K^T)) V for one tile of query rows of one KV head; the tiles of a call run in parallel.
// Lanes are query rows: S^T (key, row) needs no horizontal reduction, and K and V need no transposition.
#pragma once

#include "cpu/tile.h"

namespace flashattn::cpu {
namespace {

constexpr int64_t kTileRows = 256;  // they share the copied keys of a block
template <class T>
constexpr int kPanels = kTileRows / kPanel<T>;

template <class T>
struct ForwardScratch {
  T *q, *out, *k, *v, *scores, *factors, *row, *zeros;

  ForwardScratch(const ForwardParams& p, Arena& arena)
      : q(arena.take<T>(kTileRows * p.head_dim)),
        out(arena.take<T>(kTileRows * p.head_dim_v)),
        k(arena.take<T>(kKeys * p.head_dim)),
        v(arena.take<T>(kKeys * p.head_dim_v)),
        scores(arena.take<T>(kKeys * kPanel<T>)),
        factors(arena.take<T>(kKeys * kPanel<T>)),
        row(arena.take<T>(std::max<int64_t>({kKeys, p.head_dim, p.head_dim_v}))),
        zeros(arena.take<T>(p.head_dim_v)) {}
};

// Running maximum and sum of each row (Milakov and Gimelshein 2018).
template <class T>
struct OnlineSoftmax {
  T peak[kPanel<T>], sum[kPanel<T>], rescale[kPanel<T>];

  void start() {
    std::fill(peak, peak + kPanel<T>, static_cast<T>(-kInfinity));
    std::fill(sum, sum + kPanel<T>, T{0});
  }

  // Scores (key, lane) become weights e^(score - peak); `rescale` is what earlier sums must be multiplied by.
  void update(T* scores, int64_t count) {
    for (int half = 0; half < kPanel<T>; half += kWidth<T>) {
      const Vector<T> before = load(peak + half);
      Vector<T> now = before;
      for (int64_t j = 0; j < count; ++j) now = maximum<T>(load(scores + j * kPanel<T> + half), now);
      const Vector<T> base = select<T>(now == splat<T>(-kInfinity), splat<T>(0), now);  // no -inf - -inf
      Vector<T> total{};
      for (int64_t j = 0; j < count; ++j) {
        T* s = scores + j * kPanel<T> + half;
        const Vector<T> weight = exp(load(s) - base);
        total += weight;
        store<T>(s, weight);
      }
      const Vector<T> factor = exp(before - base);
      store<T>(peak + half, now);
      store<T>(rescale + half, factor);
      store<T>(sum + half, load(sum + half) * factor + total);
    }
  }
};

// Where a tile's result goes: the tensors of the call, or one split's partial ones, which leave the sink to
// the merge.
struct Destination {
  Tensor4 out;
  DType dtype;
  Statistic lse, max_logit;
  bool with_sink;
};

template <class T>
inline void store_panel(const SequenceView& view, const Panel<T>& panel, const OnlineSoftmax<T>& softmax,
                        const Destination& to, const T* out, T* row) {
  for (int64_t lane = 0; lane < panel.count; ++lane) {
    const int64_t query = panel.query[lane], head = panel.head[lane], q_row = view.q.first + query;
    T peak = softmax.peak[lane], sum = softmax.sum[lane], rescale = 1;
    const T score_peak = peak;
    if (to.with_sink && view.p.score.sink.data && query < view.q.length) {
      const T sink = per_head<T>(view.p.score.sink, 0, head);
      peak = std::max(peak, sink);
      const T base = peak == static_cast<T>(-kInfinity) ? 0 : peak;
      rescale = std::exp(softmax.peak[lane] - base);
      sum = sum * rescale + std::exp(sink - base);
    }
    const T factor = sum == 0 ? 0 : rescale / sum;
    for (int64_t column = 0; column < view.p.head_dim_v; ++column)
      row[column] = sum == 0 ? 0 : factor * out[column * kPanel<T> + lane];
    store_row<T>(to.dtype, row, view.p.head_dim_v,
                 mutable_element(to.out, to.dtype, view.batch, q_row, head));
    statistic<T>(to.lse, view.batch, head, q_row) =
        sum == 0 ? static_cast<T>(-kInfinity) : peak + std::log(sum);
    if (to.max_logit.data) statistic<T>(to.max_logit, view.batch, head, q_row) = score_peak;
  }
}

// Rows [row, row + kTileRows) of the sequence against the keys in `limit`.
template <class T>
inline void forward_tile(const SequenceView& view, int64_t row, KeyRange limit, const Destination& to,
                         ForwardScratch<T>& scratch) {
  const ForwardParams& p = view.p;
  const int64_t panels =
      std::min<int64_t>(kPanels<T>, divide_up(view.q.allotted * view.group - row, kPanel<T>));
  const bool direct = in_place<T>(p, panels);
  Panel<T> panel[kPanels<T>];
  OnlineSoftmax<T> softmax[kPanels<T>];
  const T *k_rows[kKeys], *v_rows[kKeys], *seen[kKeys];
  KeyRange tile{limit.last, limit.first};
  for (int64_t i = 0; i < panels; ++i) {
    panel[i] = Panel<T>(view, row + i * kPanel<T>, limit);
    tile = {std::min(tile.first, panel[i].some.first), std::max(tile.last, panel[i].some.last)};
    for (int64_t lane = 0; lane < kPanel<T>; ++lane)
      load_lane(view, panel[i], lane, p.q, p.head_dim, static_cast<T>(p.score.scale), scratch.row,
                scratch.q + i * p.head_dim * kPanel<T>);
    softmax[i].start();
  }
  std::fill(scratch.out, scratch.out + panels * p.head_dim_v * kPanel<T>, T{0});
  std::fill(scratch.zeros, scratch.zeros + p.head_dim_v, T{0});

  for (int64_t block = tile.first / kKeys * kKeys; block < tile.last; block += kKeys) {
    const KeyRange keys{std::max(block, tile.first), std::min(block + kKeys, tile.last)};
    load_keys(view, p.k, keys, p.head_dim, direct, scratch.k, k_rows);
    load_keys(view, p.v, keys, p.head_dim_v, direct, scratch.v, v_rows);
    for (int64_t i = 0; i < panels; ++i) {
      const KeyRange mine{std::max(keys.first, panel[i].some.first), std::min(keys.last, panel[i].some.last)};
      const int64_t count = mine.last - mine.first, skip = mine.first - keys.first;
      if (count <= 0) continue;
      rows_by_panel(k_rows + skip, count, scratch.q + i * p.head_dim * kPanel<T>, kPanel<T>, p.head_dim,
                    scratch.scores, kPanel<T>, false);
      score_panel(view, panel[i], mine, scratch.scores, static_cast<T*>(nullptr), scratch.row);
      replace_hidden(view, scratch.scores, count, scratch.zeros, v_rows + skip, seen);
      softmax[i].update(scratch.scores, count);
      if (p.dropout.seed) {
        dropout_panel(view, panel[i], mine, scratch.factors);
        for (int64_t e = 0; e < count * kPanel<T>; ++e) scratch.scores[e] *= scratch.factors[e];
      }
      columns_by_panel(seen, 0, p.head_dim_v, count, scratch.scores, softmax[i].rescale,
                       scratch.out + i * p.head_dim_v * kPanel<T>);
    }
  }
  for (int64_t i = 0; i < panels; ++i)
    store_panel(view, panel[i], softmax[i], to, scratch.out + i * p.head_dim_v * kPanel<T>, scratch.row);
}

template <class T>
inline Workspace forward_workspace(const ForwardParams& p) {
  Arena measure{nullptr};
  ForwardScratch<T>(p, measure);
  Workspace workspace{};
  workspace.private_bytes = measure.used;
  return workspace;
}

template <class T>
inline void forward(const ForwardParams& p) {
  const int64_t tiles = divide_up(p.seqlen_q.rows * (p.heads_q / p.heads_k), kTileRows);
  const Destination to{p.out, p.dtype, p.lse, p.max_logit, true};
#pragma omp parallel num_threads(p.workspace.threads)
  {
    Arena arena = thread_arena(p.workspace);
    ForwardScratch<T> scratch(p, arena);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tiles * p.batch * p.heads_k; ++task) {
      const SequenceView view(p, task / p.heads_k % p.batch, task % p.heads_k);
      const int64_t row = (tiles - 1 - task / (p.heads_k * p.batch)) * kTileRows;  // causal: longest first
      if (row < view.q.allotted * view.group) forward_tile(view, row, {0, view.k.length}, to, scratch);
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
