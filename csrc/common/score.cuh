// What may happen to a score before the softmax, element by element, and where the rows of a call lie.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "common/dropout.h"
#include "common/mask.h"
#include "common/ptx.cuh"

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

// Options of one query row.
struct ScoreRow {
  int first, last;     // keys that it sees
  int position;        // of the query among the keys
  float slope;         // of ALiBi
  int64_t bias, mask;  // offsets of its key 0

  __device__ ScoreRow(const Score& score, const View& view, int query) {
    const VisibleKeys visible = view.visible(score);
    first = visible.first(query), last = visible.last(query);
    position = static_cast<int>(query + view.k.length - view.q.length);
    slope = score.alibi.data ? load_number(score.alibi.data, DType::f32,
                                           view.batch * score.alibi.batch + view.head * score.alibi.head)
                             : 0.f;
    bias = view.batch * score.bias.batch + view.head * score.bias.head + query * score.bias.row;
    mask = view.batch * score.mask.batch + view.head * score.mask.head + query * score.mask.row;
  }

  // The logit of a product q k; cap_slope is the derivative of the softcap.
  __device__ float logit(const Score& score, float product, int key, float& cap_slope) const {
    cap_slope = 1;
    if (key < first || key >= last) return -INFINITY;
    float x = product * static_cast<float>(score.scale);
    if (score.softcap > 0) {
      const float t = tanhf(x / static_cast<float>(score.softcap));
      x = t * static_cast<float>(score.softcap);
      cap_slope = 1 - t * t;
    }
    if (score.alibi.data) x -= slope * fabsf(static_cast<float>(position - key));
    if (score.bias.data) x += load_number(score.bias.data, score.bias.dtype, bias + key);
    if (score.mask.data && !static_cast<const uint8_t*>(score.mask.data)[mask + key]) x = -INFINITY;
    return x;
  }
};

// Weights of dropped elements are 0 and the others grow; a lane asks for two neighbouring columns at a time.
struct DropoutRow {
  uint64_t seed;
  uint32_t keep_below, query, head, batch;
  float kept;

  __device__ DropoutRow(const Dropout& dropout, const View& view, int query_)
      : seed(dropout.seed ? static_cast<uint64_t>(*dropout.seed) : 0),
        keep_below(dropout.keep_below),
        query(query_),
        head(static_cast<uint32_t>(view.head)),
        batch(static_cast<uint32_t>(view.batch)),
        kept(static_cast<float>(static_cast<double>(kDropoutRange) / dropout.keep_below)) {}

  // Factors of columns `column` (even) and `column` + 1.
  __device__ float2 factors(int column) const {
    const Philox numbers = philox(seed, column / kDropoutColumns, query, head, batch);
    const int e = column % kDropoutColumns;
    return {dropout_keeps(numbers, e, keep_below) ? kept : 0.f,
            dropout_keeps(numbers, e + 1, keep_below) ? kept : 0.f};
  }
};

}  // namespace flashattn
