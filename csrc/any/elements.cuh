// Elements of tensors and the type of their sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <type_traits>

#include "common/host_device.h"
#include "params.h"

namespace flashattn::any {

// Sums of elements E: float, or double for f64.
template <class E>
using Sum = std::conditional_t<std::is_same_v<E, double>, double, float>;

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

FLASHATTN_HD int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

__device__ inline float to_sum(float x) { return x; }
__device__ inline double to_sum(double x) { return x; }
__device__ inline float to_sum(__half x) { return __half2float(x); }
__device__ inline float to_sum(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class E>
__device__ inline E to_element(Sum<E> x) {
  if constexpr (std::is_same_v<E, __half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<E, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

template <class T>
__device__ inline T load_number(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<T>(static_cast<const float*>(data)[index]);
    case DType::f64:
      return static_cast<T>(static_cast<const double*>(data)[index]);
    case DType::f16:
      return static_cast<T>(to_sum(static_cast<const __half*>(data)[index]));
    default:
      return static_cast<T>(to_sum(static_cast<const __nv_bfloat16*>(data)[index]));
  }
}

template <class T>
__device__ inline T per_head(const PerHead& x, int64_t batch, int64_t head) {
  return load_number<T>(x.data, x.dtype, batch * x.batch + head * x.head);
}

}  // namespace flashattn::any
