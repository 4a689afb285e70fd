// Online softmax in the registers of wgmma: a lane holds two rows of a (64, keys) tile of scores, element
// 4 j + 2 half + i in row l/4 + 8 half and column 8 j + 2 (l%4) + i.
#pragma once

#include "common/softmax.cuh"

namespace flashattn::sm90 {

// A range of references.
struct Bounds {
  float low, high;
  __device__ bool hold(float x) const { return low < x && x <= high; }
};

// Weights are powers of two relative to a reference of each row, in log2 units.  The exact update takes the
// largest logit so far.  The fast one keeps the reference, 0 at first, looks for no maximum, and finds out
// from the sum whether that was right: weights may exceed 1, but while the sum of a lane's weights stays
// under 2^kLargestPower neither they nor their 16-bit forms overflow, and no sum loses precision; and the
// first sum of a row must not be so small that 16-bit weights lose any.  If it is wrong, the scores must be
// computed again.
struct OnlineSoftmax {
  static constexpr int kLargestPower = 13;
  float reference[2], sum[2];  // sums of this lane's columns
  float rescale[2];            // of earlier sums and outputs, by the latest exact update
  bool near, far;  // all references of the warp lie within these bounds, so that fast updates may follow

  __device__ void start(Bounds near_bounds, Bounds far_bounds) {
    reference[0] = reference[1] = sum[0] = sum[1] = 0;
    near = near_bounds.hold(0);
    far = far_bounds.hold(0);
  }

  __device__ void forget_reference() { reference[0] = reference[1] = -INFINITY; }

  // Scores become weights 2^(logit(score) - reference), logit(x, minus) = logit of x, plus minus.  False, and
  // the scores are lost, if the reference was wrong; the first sum of a row must be `least` or more.  One
  // answer for the warp.
  template <bool first, int n, class Logit>
  __device__ bool fast_update(float (&s)[n], float least, Logit logit) {
    constexpr float kMost = 1 << kLargestPower;
    float sums[2][2];
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * half + i];
          x = ptx::ex2(first ? logit(x, 0.f) : logit(x, -reference[half]));
          sums[half][i] = j ? sums[half][i] + x : x;
        }
    const float top = sums[0][0] + sums[0][1], bottom = sums[1][0] + sums[1][1];
    const float lower = first ? fminf(quad_sum(top), quad_sum(bottom)) : least;
    if (!__all_sync(0xFFFFFFFFu, fmaxf(top, bottom) <= kMost && lower >= least)) return false;
    sum[0] += top;
    sum[1] += bottom;
    return true;
  }

  // The same with the largest logit so far, scale * score, as the reference.
  template <int n>
  __device__ void exact_update(float (&s)[n], float scale, Bounds near_bounds, Bounds far_bounds) {
    bool is_near = true, is_far = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[2 * half];
#pragma unroll
      for (int j = 0; j < n / 4; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      top = fmaxf(reference[half], quad_max(top) * scale);
      const float base = top == -INFINITY ? 0.f : top;
      rescale[half] = ptx::ex2(reference[half] - base);
      reference[half] = top;
      is_near = is_near && near_bounds.hold(top);
      is_far = is_far && far_bounds.hold(top);
      float total = 0;
#pragma unroll
      for (int j = 0; j < n / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * half + i];
          x = ptx::ex2(fmaf(x, scale, -base));
          total += x;
        }
      sum[half] = sum[half] * rescale[half] + total;
    }
    near = __all_sync(0xFFFFFFFFu, is_near);
    far = __all_sync(0xFFFFFFFFu, is_far);
  }
};

// c tanh(x f) as an odd polynomial in x, and the references for which it is right: no weight that matters
// then has an argument outside the interval of the polynomial.
struct SoftcapPolynomial {
  static constexpr int kMostTerms = 5;
  float factors[kMostTerms];
  Bounds bounds;
  float least;  // the same of the first sum of a row, while its reference is 0

  template <int terms>
  __device__ float at(float x, float minus) const {
    const float square = x * x;
    float sum = factors[terms - 1];
#pragma unroll
    for (int i = terms - 2; i >= 0; --i) sum = fmaf(sum, square, factors[i]);
    return fmaf(x, sum, minus);
  }
};

// What turns products q k into logits, in log2 units, as the host computes it once a call.
struct Logits {
  float scale;               // of what modify() leaves, otherwise of the products
  float softcap, cap_slope;  // c and f above; c 0: none
  SoftcapPolynomial near, far;
};

}  // namespace flashattn::sm90
