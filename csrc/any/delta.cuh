// delta = rowsum(dO * O) - dlse, one number a query row, and the gradient of the sinks, which follows from
// it.
#pragma once

#include "any/simt_tile.cuh"

namespace flashattn::any {

// Half a warp computes a row, 16 bytes of it a lane at a time; a block has kDeltaRows rows of one head.
constexpr int kDeltaThreads = 256, kDeltaLanes = 16, kDeltaRows = 4 * kDeltaThreads / kDeltaLanes;

FLASHATTN_HD int64_t delta_blocks(const BackwardParams& p) {
  return divide_up(p.seqlen_q.rows, kDeltaRows) * p.batch * p.heads_q;
}

template <class E>
struct alignas(16) Vector {
  static constexpr int kCount = 16 / sizeof(E);
  E x[kCount];
};

template <class E>
__device__ inline Vector<E> load_vector(const E* from, int64_t count) {
  Vector<E> vector{};
  if (count >= Vector<E>::kCount && reinterpret_cast<uintptr_t>(from) % sizeof vector == 0)
    vector = *reinterpret_cast<const Vector<E>*>(from);
  else
    for (int e = 0; e < Vector<E>::kCount; ++e)
      if (e < count) vector.x[e] = from[e];
  return vector;
}

// Products of f32 in double: delta is subtracted from numbers of its size.
template <class E>
using DeltaSum = std::conditional_t<sizeof(E) == 2, float, double>;

template <class E>
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(const __grid_constant__ BackwardParams p) {
  using T = Sum<E>;
  if (block_index() >= delta_blocks(p)) return;
  const int64_t slice = block_index() / p.heads_q;
  const View<E> view(p, slice % p.batch, block_index() % p.heads_q);
  const int lane = thread_index() % kDeltaLanes;
  const int64_t first_row = slice / p.batch * kDeltaRows + thread_index() / kDeltaLanes;
#pragma unroll
  for (int part = 0; part < kDeltaRows; part += kDeltaThreads / kDeltaLanes) {
    const int64_t query = first_row + part;
    const bool exists = query < view.q.length;
    DeltaSum<E> sum = 0;
    if (exists) {
      const E *out = view.query_row(p.out, query), *dout = view.query_row(p.dout, query);
      for (int64_t column = lane * Vector<E>::kCount; column < p.head_dim_v;
           column += kDeltaLanes * Vector<E>::kCount) {
        const auto a = load_vector(out + column, p.head_dim_v - column);
        const auto b = load_vector(dout + column, p.head_dim_v - column);
        for (int e = 0; e < Vector<E>::kCount; ++e)
          sum += static_cast<DeltaSum<E>>(to_sum(a.x[e])) * to_sum(b.x[e]);
      }
    }
    for (int lanes = kDeltaLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    if (!exists || lane > 0) continue;
    if (p.dlse.data) sum -= view.statistic(p.dlse, query);
    const bool empty = view.statistic(p.lse, query) == -kInfinity<T>;  // its LSE is a constant
    view.statistic(p.delta, query) = empty ? 0 : static_cast<T>(sum);
  }
}

constexpr int kSinkThreads = 1024;
constexpr int kSinkBytes = kSinkThreads * sizeof(double);

// dsink = -sum of exp(sink - lse) * delta: a block adds up one head, in a fixed order.
template <class E>
__global__ void __launch_bounds__(kSinkThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams p) {
  using T = Sum<E>;
  const int64_t head = block_index();
  if (head >= p.heads_q) return;
  double* parts = reinterpret_cast<double*>(shared_memory);
  const double sink = per_head<double>(p.score.sink, 0, head);
  double sum = 0;
  for (int64_t index = thread_index(); index < p.batch * p.seqlen_q.rows; index += kSinkThreads) {
    const View<E> view(p, index / p.seqlen_q.rows, head);
    const int64_t query = index % p.seqlen_q.rows;
    if (query >= view.q.length) continue;
    const T lse = view.statistic(p.lse, query);
    if (lse != -kInfinity<T>) sum -= std::exp(sink - lse) * view.statistic(p.delta, query);
  }
  parts[thread_index()] = sum;
  for (unsigned count = kSinkThreads / 2; count > 0; count /= 2) {
    __syncthreads();  // the parts to add are complete
    if (thread_index() < count) parts[thread_index()] += parts[thread_index() + count];
  }
  if (thread_index() == 0) p.dsink[head] = parts[0];
}

}  // namespace flashattn::any
