// What may happen to a score before the softmax, element by element, and where the rows of a call lie.
#pragma once

#include <cmath>

#include "common/dropout.h"
#include "common/mask.h"
#include "common/softmax.cuh"

namespace flashattn {

__device__ inline float load_number(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f64:
      return static_cast<float>(static_cast<const double*>(data)[index]);
    case DType::f16:
      return __half2float(static_cast<const __half*>(data)[index]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  }
}

// One sequence of the batch and one query head.
struct View {
  int64_t batch, head, head_k;
  Sequence q, k;

  __device__ View(const ForwardParams& p, int64_t batch_, int64_t head_)
      : batch(batch_),
        head(head_),
        head_k(head_ / (p.heads_q / p.heads_k)),
        q(sequence(p.seqlen_q, batch_)),
        k(sequence(p.seqlen_k, batch_)) {}

  __device__ VisibleKeys visible(const Score& score) const {
    return {q.length, k.length, score.window_left, score.window_right};
  }

  template <class T>
  __device__ T* query_rows(const Tensor4& x) const {
    return static_cast<T*>(x.data) + batch * x.batch + q.first * x.row + head * x.head;
  }

  template <class T>
  __device__ T* key_rows(const Tensor4& x) const {
    return static_cast<T*>(x.data) + batch * x.batch + k.first * x.row + head_k * x.head;
  }

  __device__ float* statistic(const Statistic& x) const {
    return static_cast<float*>(x.data) + batch * x.batch + head * x.head + q.first * x.row;
  }
};

// Must products be turned into logits, or is scaling all that happens to them?
__device__ inline bool modifies(const Score& score) {
  return score.softcap > 0 || score.alibi.data || score.bias.data || score.mask.data || score.scale <= 0;
}

// tanh of x / (2 log2 e), 1 - 2 / (1 + 2^x), to about 1e-7.
__device__ inline float softcap_tanh(float x) { return 1 - 2 * ptx::rcp(1 + ptx::ex2(x)); }

// A warp's scores: rows from `row` and keys from `key` on of one head.
struct ScoreTile {
  const ForwardParams& p;
  const View& view;
  VisibleKeys visible;
  int row, key, lane;

  // Calls f(value, row, key) for each value that the lane holds.
  template <int kM, int kN, class F>
  __device__ void each(Accumulator<kM, kN>& s, F f) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          f(s.x[m][n][e], row + fragment_row(lane, m, e), key + fragment_column(lane, n, e));
  }

  // Is there an element here, in a bias or a mask?
  __device__ bool within(int query, int k) const { return query < visible.len_q && k < visible.len_k; }

  __device__ int64_t offset(const ScoreTensor& x, int query, int k) const {
    return view.batch * x.batch + view.head * x.head + query * x.row + k;
  }

  // What belongs to keys that a row does not see becomes `hidden`.
  template <class... Accumulators>
  __device__ void hide(float hidden, Accumulators&... accumulators) const {
    (hide_one(hidden, accumulators), ...);
  }

  // Products q k become logits; cap_slope, of the same shape or null, the derivative of the softcap.
  template <int kM, int kN>
  __device__ void logits(Accumulator<kM, kN>& s, Accumulator<kM, kN>* cap_slope) const {
    const Score& score = p.score;
    const float scale = static_cast<float>(score.scale), cap = static_cast<float>(score.softcap);
    each(s, [&](float& x, int, int) { x *= scale; });
    if (cap > 0) softcap(s, cap, cap_slope);
    if (score.alibi.data) {
      const float slope = load_number(score.alibi.data, DType::f32,
                                      view.batch * score.alibi.batch + view.head * score.alibi.head);
      const int shift = visible.len_k - visible.len_q;
      each(s, [&](float& x, int query, int k) { x -= slope * fabsf(static_cast<float>(query + shift - k)); });
    }
    if (score.bias.data) {
      if (score.bias.dtype == DType::f32)
        add_bias<DType::f32>(s);
      else if (score.bias.dtype == DType::f16)
        add_bias<DType::f16>(s);
      else
        add_bias<DType::bf16>(s);
    }
    if (score.mask.data) {
      const auto* seen = static_cast<const uint8_t*>(score.mask.data);
      each(s, [&](float& x, int query, int k) {
        if (within(query, k) && !seen[offset(score.mask, query, k)]) x = -INFINITY;
      });
    }
    hide(-INFINITY, s);
  }

 private:
  template <int kM, int kN>
  __device__ void hide_one(float hidden, Accumulator<kM, kN>& s) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = row + fragment_row(lane, m, 2 * half), own_key = key + fragment_column(lane, 0, 0);
        const int first = visible.first(query) - own_key, last = visible.last(query) - own_key;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i < first || n * 8 + i >= last) s.x[m][n][2 * half + i] = hidden;
      }
  }

  template <int kM, int kN>
  __device__ void softcap(Accumulator<kM, kN>& s, float cap, Accumulator<kM, kN>* cap_slope) const {
    const float twice = 2 * kLog2E / cap;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float t = softcap_tanh(s.x[m][n][e] * twice);
          s.x[m][n][e] = cap * t;
          if (cap_slope) cap_slope->x[m][n][e] = 1 - t * t;
        }
  }

  template <DType dtype, int kM, int kN>
  __device__ void add_bias(Accumulator<kM, kN>& s) const {
    const ScoreTensor& bias = p.score.bias;
    each(s, [&](float& x, int query, int k) {
      if (within(query, k)) x += load_number(bias.data, dtype, offset(bias, query, k));
    });
  }
};

// Which keys of a warp's tile have a weight that is not 0 in any of its rows: for the lane's two keys of each
// n8 block all bits or none of their 16-bit elements.  A key that a mask hides must not be read: 0 * NaN is
// NaN.
template <int kM, int kN>
__device__ inline void find_weighted(const Accumulator<kM, kN>& weights, uint32_t (&bits)[kN]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    bool low = false, high = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      low |= weights.x[m][n][0] != 0 || weights.x[m][n][2] != 0;
      high |= weights.x[m][n][1] != 0 || weights.x[m][n][3] != 0;
    }
    bits[n] = (low ? 0xFFFFu : 0u) | (high ? 0xFFFF0000u : 0u);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) bits[n] |= __shfl_xor_sync(0xFFFFFFFFu, bits[n], lanes);
  }
}

// What the weights of a row are multiplied by: 0 for a dropped one, 1 / (kept share) otherwise.  A lane asks
// for two neighbouring columns at a time.
struct DropoutRow {
  uint64_t seed;
  uint32_t keep_below, query, head, batch;
  float kept;

  __device__ DropoutRow(const Dropout& dropout, const View& view, int query_)
      : seed(static_cast<uint64_t>(*dropout.seed)),
        keep_below(dropout.keep_below),
        query(query_),
        head(static_cast<uint32_t>(view.head)),
        batch(static_cast<uint32_t>(view.batch)),
        kept(static_cast<float>(static_cast<double>(kDropoutRange) / dropout.keep_below)) {}

  // Factors of columns `column` (even) and `column` + 1.
  __device__ float2 factors(int column) const {
    const Philox numbers = philox(seed, column / kDropoutColumns, query, head, batch);
    const int index = column % kDropoutColumns / 2;
    const uint32_t low = index & 1 ? numbers.word[1] : numbers.word[0],
                   high = index & 1 ? numbers.word[3] : numbers.word[2], pair = index & 2 ? high : low;
    return {(pair & 0xFFFF) < keep_below ? kept : 0.f, pair >> 16 < keep_below ? kept : 0.f};
  }
};

}  // namespace flashattn
