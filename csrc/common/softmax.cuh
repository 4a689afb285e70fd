// Online softmax of accumulator rows (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018), in powers of two.  Nothing else takes exponentials or knows how empty rows are written.
#pragma once

#include <cmath>

#include "common/tile.cuh"

namespace flashattn {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// The same over the lanes that hold a column of an accumulator.
__device__ inline float column_max(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
  return x;
}

__device__ inline float column_sum(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
  return x;
}

// Normaliser and statistics of a finished row.
struct RowResult {
  float factor, lse, max_logit;
};

// Of a row whose weights, relative to a reference (log2 units; max_logit is right if it is the largest), have
// this total.  The sink (natural logarithm, -inf: none) joins it.
__device__ inline RowResult finish_row(float total, float reference, float sink) {
  float base = reference, mine = 1, all = total;
  if (sink > -INFINITY) {
    base = fmaxf(reference, sink * kLog2E);
    mine = ptx::ex2(reference - base);
    all = total * mine + ptx::ex2(sink * kLog2E - base);
  }
  if (all == 0) return {0, -INFINITY, reference * kLn2};
  return {mine * ptx::rcp(all), (base + ptx::lg2(all)) * kLn2, reference * kLn2};
}

// Largest score so far, which weights are relative to, so that the largest is 1 and not rounded, and sum of
// the rows that a lane holds.
template <int m_blocks>
struct OnlineSoftmax {
  float reference[m_blocks][2];  // in log2 units
  float sum[m_blocks][2];        // of this lane's columns
  float rescale[m_blocks][2];    // of earlier sums and outputs, after the latest block
  bool grown[m_blocks][2];       // is it other than 1 in a row of the warp?

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < m_blocks; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) reference[m][half] = -INFINITY, sum[m][half] = 0;
  }

  // Scores become weights 2^(scale * score - reference).
  template <int n_blocks>
  __device__ void update(Accumulator<m_blocks, n_blocks>& s, float scale) {
#pragma unroll
    for (int m = 0; m < m_blocks; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < n_blocks; ++n)
          top = fmaxf(top, fmaxf(s.x[m][n][2 * half], s.x[m][n][2 * half + 1]));
        const float before = reference[m][half];
        top = fmaxf(before, quad_max(top) * scale);
        const float base = top == -INFINITY ? 0.f : top;
        reference[m][half] = top;
        rescale[m][half] = ptx::ex2(before - base);
        grown[m][half] = __any_sync(0xFFFFFFFFu, top > before);
        float row_sum = 0;
#pragma unroll
        for (int n = 0; n < n_blocks; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s.x[m][n][e] = ptx::ex2(fmaf(s.x[m][n][e], scale, -base));
            row_sum += s.x[m][n][e];
          }
        sum[m][half] = sum[m][half] * rescale[m][half] + row_sum;
      }
  }

  // All lanes of a quad call it.
  __device__ RowResult finish(int m, int half, float sink) const {
    return finish_row(quad_sum(sum[m][half]), reference[m][half], sink);
  }
};

}  // namespace flashattn
