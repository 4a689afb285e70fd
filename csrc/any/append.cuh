// What a decode does before its attention, in one kernel: new keys, rotated, and new values go behind the
// used rows of the cache, queries are rotated into a tensor of their own.  E is the type of q's elements.
//   (x, y) of a pair of columns becomes (x cos - y sin, x sin + y cos) at the position of the row.
#pragma once

#include <type_traits>

#include "any/elements.cuh"
#include "any/launches.cuh"
#include "common/cache.cuh"
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "common/shared_memory.cuh"

namespace flashattn::any {

// kMoveLanes threads move the columns of one row and head: 16 of them 128 columns of 16 bits or more at once.
constexpr int kAppendThreads = 128, kMoveLanes = 16, kBlockMoves = kAppendThreads / kMoveLanes;

// The moves of a call: for every row of a tensor like q, that has room for the new rows too, its heads.
struct Moves {
  Lengths rows;
  int64_t batch, appended_heads, heads;  // of a row: new keys, new values, then queries

  FLASHATTN_HD explicit Moves(const DecodeParams& p)
      : rows(p.seqlen_q),
        batch(p.batch),
        appended_heads((p.k_new.data ? p.heads_k : 0) + (p.v_new.data ? p.heads_k : 0)),
        heads(appended_heads + (p.rotary.cos ? p.heads_q : 0)) {
    if (p.new_rows > rows.rows) rows.rows = p.new_rows;
  }

  FLASHATTN_HD int64_t count() const { return (rows.cu ? rows.total : batch * rows.rows) * heads; }
};

template <class E, int kWidth>
struct alignas(kWidth * sizeof(E) < 16 ? kWidth * sizeof(E) : 16) Pack {
  E x[kWidth];
};

template <int kWidth, class E>
__device__ inline Pack<E, kWidth> load_pack(const E* from) {
  return *reinterpret_cast<const Pack<E, kWidth>*>(from);
}

// Numbers of a rotary table, which holds float or E.
template <int kWidth, class E>
__device__ inline void load_table(const void* table, DType dtype, int64_t at, Sum<E> (&to)[kWidth]) {
  const auto load = [&](const auto* from) {
    const auto pack = load_pack<kWidth>(from + at);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) to[e] = to_sum(pack.x[e]);
  };
  if (dtype == DType::f32)
    load(static_cast<const float*>(table));
  else
    load(static_cast<const E*>(table));
}

template <class E>
__device__ inline void turn(E& a, E& b, Sum<E> cosine, Sum<E> sine) {
  const Sum<E> x = to_sum(a), y = to_sum(b);
  a = to_element<E>(x * cosine - y * sine);
  b = to_element<E>(x * sine + y * cosine);
}

// Where a row lies, where it goes, and at which position of the tables it turns.
template <class E>
struct Move {
  const E* from;
  E* to;
  int columns, turning;  // the first `turning` columns turn
  int64_t position;
};

// A lane's part of a row.  Columns go in two packs at a time: those that turn together, behind them
// neighbours.
template <int kWidth, class E>
__device__ inline void move_row(const Move<E>& row, const Rotary& rotary, int lane) {
  const int half = row.turning / 2;
  const int64_t position = clamp(row.position, 0, rotary.positions - 1);
  for (int at = lane * kWidth; 2 * at < row.columns; at += kMoveLanes * kWidth) {
    const bool turns = at < half, apart = turns && !rotary.interleaved;
    const int first = apart ? at : 2 * at, second = apart ? at + half : 2 * at + kWidth;
    const bool both = second < row.columns;
    auto a = load_pack<kWidth>(row.from + first), b = both ? load_pack<kWidth>(row.from + second) : a;
    if (turns) {
      Sum<E> cosines[kWidth], sines[kWidth];
      load_table<kWidth, E>(rotary.cos, rotary.dtype, position * rotary.cos_row + at, cosines);
      load_table<kWidth, E>(rotary.sin, rotary.dtype, position * rotary.sin_row + at, sines);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        // Element e of the pairs: of both packs, or neighbours in one.
        if (apart || kWidth == 1)
          turn(a.x[e], b.x[e], cosines[e], sines[e]);
        else if (e < kWidth / 2)
          turn(a.x[2 * e % kWidth], a.x[(2 * e + 1) % kWidth], cosines[e], sines[e]);
        else
          turn(b.x[2 * e % kWidth], b.x[(2 * e + 1) % kWidth], cosines[e], sines[e]);
      }
    }
    *reinterpret_cast<Pack<E, kWidth>*>(row.to + first) = a;
    if (both) *reinterpret_cast<Pack<E, kWidth>*>(row.to + second) = b;
  }
}

// Packs of kWidth columns.  Nothing is written but rows that the call appends and that the cache has.
template <class E, int kWidth>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(const __grid_constant__ DecodeParams p) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const Moves moves(p);
  const int64_t number = block_index() * kBlockMoves + threadIdx.x / kMoveLanes;
  if (number >= moves.count()) return;
  const int64_t index = number / moves.heads;
  int64_t head = number - index * moves.heads;
  const Place place = place_of(moves.rows, p.batch, index);
  const Sequence q = sequence(p.seqlen_q, place.batch), k = sequence(p.seqlen_k, place.batch);
  const int64_t start = p.seqlen_k.used ? p.seqlen_k.used[place.batch] : k.length;  // of the new keys
  const bool appends = head < moves.appended_heads;
  if (place.row < 0 || place.row >= (appends && !p.seqlen_q.cu ? p.new_rows : q.length)) return;
  const auto row_of = [&](const Tensor4& x) {
    return static_cast<E*>(x.data) + place.batch * x.batch + (q.first + place.row) * x.row + head * x.head;
  };

  Move<E> move;
  move.columns = static_cast<int>(p.head_dim), move.turning = static_cast<int>(p.rotary.dim);
  if (appends) {
    move.position = start + place.row;
    if (move.position < 0 || move.position >= k.length) return;
    const bool is_k = head < p.heads_k;
    if (!is_k) head -= p.heads_k, move.columns = static_cast<int>(p.head_dim_v), move.turning = 0;
    move.from = row_of(is_k ? p.k_new : p.v_new);
    move.to = CacheRows<E>(p, is_k ? p.k : p.v, place.batch, head).at(move.position);
  } else {
    head -= moves.appended_heads;
    move.position = p.rotary.every_query ? place.row + k.length - q.length : start;
    move.from = row_of(p.q), move.to = row_of(p.q_rotated);
  }
  move_row<kWidth>(move, p.rotary, threadIdx.x % kMoveLanes);
}

// Are 16 bytes of every row aligned and whole, and the same of what they turn with?
template <class E>
bool moves_in_packs(const DecodeParams& p) {
  constexpr int64_t kElement = sizeof(E), kWidth = 16 / kElement;
  const int64_t table_element = p.rotary.dtype == DType::f32 ? sizeof(float) : kElement;
  uint64_t bits = (p.rotary.cos_row | p.rotary.sin_row) * table_element |
                  reinterpret_cast<uintptr_t>(p.rotary.cos) | reinterpret_cast<uintptr_t>(p.rotary.sin);
  for (const Tensor4* x : {&p.q, &p.q_rotated, &p.k_new, &p.v_new, &p.k, &p.v})
    bits |= (x->batch | x->row | x->head) * kElement | reinterpret_cast<uintptr_t>(x->data);
  return bits % 16 == 0 && (p.head_dim | p.head_dim_v | p.rotary.dim / 2) % kWidth == 0;
}

// Launches nothing where there is nothing to do.  Returns a cudaError_t.
template <class E>
int launch_append(const DecodeParams& p, cudaStream_t stream) {
  const auto kernel = moves_in_packs<E>(p) ? append_kernel<E, 16 / sizeof(E)> : append_kernel<E, 1>;
  return launch_kernel(kernel, divide_up(Moves(p).count(), kBlockMoves), kAppendThreads, 0, p, stream,
                       code_capability<append_kernel<E, 1>>(p.device.capability) >= 90);
}

}  // namespace flashattn::any
