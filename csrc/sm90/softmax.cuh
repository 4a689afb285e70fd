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

// Weights are powers of two relative to the largest score of the row so far, so that the largest weight is 1
// and not rounded.
struct OnlineSoftmax {
  float top[2], reference[2];  // the largest score and its logit in log2 units, 0 where there is no score yet
  float sum[2];                // of this lane's weights
  float rescale[2];            // of earlier sums and outputs, after the latest block
  bool grown[2];               // is it other than 1 in a row of the warp?

  __device__ void start() {
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  // Largest scores, of which some may be negative.
  template <int n>
  __device__ void find_negative(const float (&s)[n], float (&reached)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reached[half] = top[half];
#pragma unroll
      for (int j = 0; j < n / 4; ++j)
        reached[half] = fmaxf(reached[half], fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      reached[half] = quad_max(reached[half]);
    }
  }

  // Takes a block's scores into account.  logit(x): of such a score.
  template <int n, class Logit>
  __device__ void raise(const float (&s)[n], Logit logit) {
    const auto positive = [](const float (&x)[2]) { return __all_sync(0xFFFFFFFFu, x[0] >= 0 && x[1] >= 0); };
    const bool were_positive = positive(top);
    float reached[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2] = {top[half], top[half]};
#pragma unroll
      for (int j = 0; j < n / 4; ++j)
        x[j % 2] = ptx::max_from(x[j % 2], s[4 * j + 2 * half], s[4 * j + 2 * half + 1]);
      reached[half] = ptx::max_from(x[0], x[1], x[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the quad, in one exchange
      const float x = reached[half], a = __shfl_xor_sync(0xFFFFFFFFu, x, 1),
                  b = __shfl_xor_sync(0xFFFFFFFFu, x, 2), c = __shfl_xor_sync(0xFFFFFFFFu, x, 3);
      reached[half] = ptx::max_from(ptx::max_from(x, a, b), c, c);
    }
    if (!were_positive && !positive(reached)) find_negative(s, reached);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = top[half];
      top[half] = reached[half];
      grown[half] = __any_sync(0xFFFFFFFFu, top[half] != before);
      reference[half] = top[half] == -INFINITY ? 0.f : logit(top[half]);
      rescale[half] = top[half] == before ? 1.f : ptx::ex2(logit(before) - reference[half]);
    }
  }

  // Scores become weights.  logit(x, minus): logit of x in log2 units, plus minus.
  template <int n, class Logit>
  __device__ void weigh(float (&s)[n], Logit logit) {
    float sums[2][2];
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * half + i];
          x = ptx::ex2(logit(x, -reference[half]));
          sums[half][i] = j ? sums[half][i] + x : x;
        }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = fmaf(sum[half], rescale[half], sums[half][0] + sums[half][1]);
  }

  // May every row's logits be computed by what is right for references within these bounds?
  __device__ bool within(Bounds bounds) const {
    return __all_sync(0xFFFFFFFFu, bounds.hold(reference[0]) && bounds.hold(reference[1]));
  }
};

// c tanh(x f) as an odd polynomial in x, and the references for which it is right: no weight that matters
// then has an argument outside the interval of the polynomial.
struct SoftcapPolynomial {
  static constexpr int kMostTerms = 5;
  float factors[kMostTerms];
  Bounds bounds;

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

  __device__ float cap(float x) const {  // tanh x = 1 - 2 / (1 + e^2x), to about 1e-7
    return softcap * (1 - 2 * ptx::rcp(1 + ptx::ex2(x * (2 * kLog2E * cap_slope))));
  }
};

}  // namespace flashattn::sm90
