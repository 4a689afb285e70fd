// The pieces of a tile that forward and backward share: the query rows of a panel, the keys of a block, and
// what happens to a score before the softmax.
#pragma once

#include "cpu/convert.h"
#include "cpu/multiply.h"

namespace flashattn::cpu {
namespace {

constexpr int kKeys =
    128;  // of a block; blocks start at multiples of it, so that no result depends on the tiling

// Hands out 64-byte aligned pieces of a thread's workspace; with data null it only measures.
struct Arena {
  char* data;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* piece = data ? reinterpret_cast<T*>(data + used) : nullptr;
    used += divide_up(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
    return piece;
  }
};

inline Arena thread_arena(const Workspace& workspace) {
  return {static_cast<char*>(workspace.private_data) + omp_get_thread_num() * workspace.private_bytes};
}

// One sequence of the batch and one KV head.  The queries of the group's heads are interleaved: packed row r
// is query r / group of head head_k * group + r % group, so that keys are read once for the group.
struct SequenceView {
  const ForwardParams& p;
  int64_t batch, head_k, group;
  Sequence q, k;
  int64_t leftpad, cache_row;

  SequenceView(const ForwardParams& params, int64_t batch_, int64_t head_k_)
      : p(params),
        batch(batch_),
        head_k(head_k_),
        group(p.heads_q / p.heads_k),
        q(sequence(p.seqlen_q, batch)),
        k(sequence(p.seqlen_k, batch)),
        leftpad(p.cache.leftpad ? clamp(p.cache.leftpad[batch], 0, k.length) : 0),
        cache_row(p.cache.batch_index ? p.cache.batch_index[batch] : batch) {}

  const char* key_row(const Tensor4& x, int64_t key) const {
    if (!p.cache.page_table) return element(x, p.dtype, cache_row, k.first + key, head_k);
    const int32_t page = p.cache.page_table[batch * p.cache.page_table_stride + key / p.cache.page_size];
    return element(x, p.dtype, page, key % p.cache.page_size, head_k);
  }
};

template <class T>
struct Panel {
  using Integer = typename VectorTypes<T>::Integer;
  int64_t count;  // lanes in use
  int64_t query[kPanel<T>], head[kPanel<T>];
  alignas(kVectorBytes) Integer first[kPanel<T>], last[kPanel<T>];  // visible keys of a lane
  T position[kPanel<T>], slope[kPanel<T>];                          // for ALiBi
  KeyRange some, every;  // keys that some lane, that every lane sees

  Panel() = default;

  // Lanes are packed rows row, row + 1, ...; no lane sees a key outside `limit`.
  Panel(const SequenceView& view, int64_t row, KeyRange limit) {
    const Score& score = view.p.score;
    count = std::min<int64_t>(kPanel<T>, view.q.allotted * view.group - row);
    some = {limit.last, limit.first};
    every = limit;
    for (int64_t lane = 0; lane < kPanel<T>; ++lane) {
      query[lane] = (row + lane) / view.group;
      head[lane] = view.head_k * view.group + (row + lane) % view.group;
      KeyRange keys{0, 0};
      if (lane < count && query[lane] < view.q.length) {
        keys = visible_keys(query[lane], view.q.length, view.k.length, score.window_left, score.window_right,
                            view.leftpad);
        keys = {std::max(keys.first, limit.first), std::min(keys.last, limit.last)};
      }
      if (keys.first < keys.last) some = {std::min(some.first, keys.first), std::max(some.last, keys.last)};
      every = {std::max(every.first, keys.first), std::min(every.last, keys.last)};
      first[lane] = static_cast<Integer>(keys.first);
      last[lane] = static_cast<Integer>(keys.last);
      position[lane] = static_cast<T>(query[lane] + view.k.length - view.q.length);
      slope[lane] = score.alibi.data && lane < count ? per_head<T>(score.alibi, view.batch, head[lane]) : 0;
    }
  }

  bool reads(const SequenceView& view, int64_t lane) const {
    return lane < count && query[lane] < view.q.length;
  }
};

// Row of x that belongs to the lane: into `row` and into its place among the panel's (column, lane).  A lane
// without a query is zero.
template <class T>
inline void load_lane(const SequenceView& view, const Panel<T>& panel, int64_t lane, const Tensor4& x,
                      int64_t columns, T factor, T* row, T* side_by_side) {
  if (panel.reads(view, lane)) {
    const auto* from =
        element(x, view.p.dtype, view.batch, view.q.first + panel.query[lane], panel.head[lane]);
    load_row<T>(view.p.dtype, from, columns, row, factor);
  } else {
    std::fill(row, row + columns, T{0});
  }
  for (int64_t column = 0; column < columns; ++column) side_by_side[column * kPanel<T> + lane] = row[column];
}

// Keys [first, last) of one block as row pointers into `copy`, or into the tensor itself.
template <class T>
inline void load_keys(const SequenceView& view, const Tensor4& x, KeyRange keys, int64_t columns,
                      bool in_place, T* copy, const T** rows) {
  for (int64_t key = keys.first; key < keys.last; ++key, copy += columns) {
    const char* from = view.key_row(x, key);
    if (in_place) {
      *rows++ = reinterpret_cast<const T*>(from);
    } else {
      load_row<T>(view.p.dtype, from, columns, copy);
      *rows++ = copy;
    }
  }
}

// Can the kernel read keys where they lie?  Copies pay when many panels read them.
template <class T>
inline bool in_place(const ForwardParams& p, int64_t panels) {
  return panels <= 2 && element_size(p.dtype) == sizeof(T);
}

template <class T>
inline void add_bias(const SequenceView& view, const Panel<T>& panel, KeyRange keys, T* scores, T* row) {
  const ScoreTensor& bias = view.p.score.bias;
  for (int64_t lane = 0; lane < panel.count; ++lane) {
    if (!panel.reads(view, lane)) continue;
    const int64_t offset =
        view.batch * bias.batch + panel.head[lane] * bias.head + panel.query[lane] * bias.row + keys.first;
    load_row<T>(bias.dtype, static_cast<const char*>(bias.data) + element_size(bias.dtype) * offset,
                keys.last - keys.first, row);
    for (int64_t j = 0; j < keys.last - keys.first; ++j) scores[j * kPanel<T> + lane] += row[j];
  }
}

template <class T>
inline void apply_mask(const SequenceView& view, const Panel<T>& panel, KeyRange keys, T* scores) {
  const ScoreTensor& mask = view.p.score.mask;
  for (int64_t lane = 0; lane < panel.count; ++lane) {
    if (!panel.reads(view, lane)) continue;
    const auto* visible = static_cast<const uint8_t*>(mask.data) + view.batch * mask.batch +
                          panel.head[lane] * mask.head + panel.query[lane] * mask.row + keys.first;
    for (int64_t j = 0; j < keys.last - keys.first; ++j)
      if (!visible[j]) scores[j * kPanel<T> + lane] = static_cast<T>(-kInfinity);
  }
}

// Scaled dot products (key, lane) become scores: softcap, ALiBi, bias, mask, visibility.  With cap_slope,
// also the derivative of the softcap.
template <class T>
inline void score_panel(const SequenceView& view, const Panel<T>& panel, KeyRange keys, T* scores,
                        T* cap_slope, T* row) {
  const Score& score = view.p.score;
  const int64_t count = keys.last - keys.first;
  if (score.softcap > 0) {
    for (int64_t i = 0; i < count * kPanel<T>; i += kWidth<T>) {
      const Vector<T> t = tanh(load(scores + i) * splat<T>(1 / score.softcap));
      store<T>(scores + i, t * splat<T>(score.softcap));
      if (cap_slope) store<T>(cap_slope + i, splat<T>(1) - t * t);
    }
  }
  if (score.alibi.data) {
    for (int64_t j = 0; j < count; ++j)
      for (int half = 0; half < kPanel<T>; half += kWidth<T>) {
        T* s = scores + j * kPanel<T> + half;
        const Vector<T> distance = magnitude<T>(load(panel.position + half) - static_cast<T>(keys.first + j));
        store<T>(s, load(s) - load(panel.slope + half) * distance);
      }
  }
  if (score.bias.data) add_bias(view, panel, keys, scores, row);
  if (score.mask.data) apply_mask(view, panel, keys, scores);
  if (keys.first < panel.every.first || keys.last > panel.every.last) {
    for (int64_t j = 0; j < count; ++j)
      for (int half = 0; half < kPanel<T>; half += kWidth<T>) {
        T* s = scores + j * kPanel<T> + half;
        const auto* first = reinterpret_cast<const Integers<T>*>(panel.first + half);
        const auto* last = reinterpret_cast<const Integers<T>*>(panel.last + half);
        const auto key = static_cast<typename Panel<T>::Integer>(keys.first + j);
        store<T>(s, select<T>((*first <= key) & (*last > key), load(s), splat<T>(-kInfinity)));
      }
  }
}

// A key that the mask hides from the whole panel must not be read: 0 * NaN is NaN.
template <class T>
inline void replace_hidden(const SequenceView& view, const T* scores, int64_t count, const T* zeros,
                           const T* const* rows, const T** seen) {
  for (int64_t j = 0; j < count; ++j) {
    bool hidden = view.p.score.mask.data != nullptr;
    for (int lane = 0; hidden && lane < kPanel<T>; ++lane)
      hidden = scores[j * kPanel<T> + lane] == static_cast<T>(-kInfinity);
    seen[j] = hidden ? zeros : rows[j];
  }
}

// What each weight (key, lane) is multiplied by: 0 for a dropped one, 1 / (kept share) otherwise.
template <class T>
inline void dropout_panel(const SequenceView& view, const Panel<T>& panel, KeyRange keys, T* factors) {
  const Dropout& dropout = view.p.dropout;
  const T kept = static_cast<T>(static_cast<double>(kDropoutRange) / dropout.keep_below);
  for (int64_t group = keys.first / kDropoutColumns; group * kDropoutColumns < keys.last; ++group)
    for (int64_t lane = 0; lane < kPanel<T>; ++lane) {
      const Philox numbers =
          philox(static_cast<uint64_t>(*dropout.seed), static_cast<uint32_t>(group),
                 static_cast<uint32_t>(panel.query[lane]), static_cast<uint32_t>(panel.head[lane]),
                 static_cast<uint32_t>(view.batch));
      for (int e = 0; e < kDropoutColumns; ++e) {
        const int64_t key = group * kDropoutColumns + e;
        if (key >= keys.first && key < keys.last)
          factors[(key - keys.first) * kPanel<T> + lane] =
              dropout_keeps(numbers, e, dropout.keep_below) ? kept : 0;
      }
    }
}

}  // namespace
}  // namespace flashattn::cpu
