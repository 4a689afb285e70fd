// Host side of the kernels in plain CUDA C++: grids, shared memory, order of the launches.  E is the type of
// q's elements.  Every function returns a cudaError_t.
#pragma once

#include <cuda_runtime.h>

#include "any/bias_gradient.cuh"
#include "any/delta.cuh"
#include "any/simt_backward.cuh"
#include "any/simt_forward.cuh"

namespace flashattn::any {

// Blocks in x as far as they go, the rest in y.
template <class Params>
int launch(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes, const Params& p,
           cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (const auto error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return error;
  constexpr int64_t kLargestX = 0x7FFFFFFF;
  const int64_t y = divide_up(blocks, kLargestX);
  const dim3 grid(static_cast<unsigned>(divide_up(blocks, y)), static_cast<unsigned>(y));
  kernel<<<grid, threads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class E, class Params>
int launch_tiles(void (*kernel)(Params), int64_t blocks, const Params& p, cudaStream_t stream) {
  return launch(kernel, blocks, kThreads, sizeof(SharedTiles<Sum<E>>), p, stream);
}

template <class E>
int launch_delta(const BackwardParams& p, cudaStream_t stream) {
  return launch(delta_kernel<E>, delta_blocks(p), kDeltaThreads, 0, p, stream);
}

// After launch_delta.
template <class E>
int launch_sink_gradient(const BackwardParams& p, cudaStream_t stream) {
  return launch(sink_gradient_kernel<E>, p.heads_q, kSinkThreads, kSinkBytes, p, stream);
}

// After launch_delta.
template <class E>
int launch_bias_gradient(const BackwardParams& p, cudaStream_t stream) {
  return launch_tiles<E>(bias_gradient_kernel<E>, BiasTiles(p).count(), p, stream);
}

template <class E>
int launch_simt_forward(const ForwardParams& p, cudaStream_t stream) {
  return launch_tiles<E>(simt_forward_kernel<E>, forward_blocks<E>(p), p, stream);
}

template <class E>
int launch_simt_backward(const BackwardParams& p, cudaStream_t stream) {
  int error = launch_delta<E>(p, stream);
  if (!error && p.dsink) error = launch_sink_gradient<E>(p, stream);
  if (!error && p.dbias.data) error = launch_bias_gradient<E>(p, stream);
  if (!error) error = launch_tiles<E>(simt_key_gradient_kernel<E>, key_gradient_blocks<E>(p), p, stream);
  if (!error) error = launch_tiles<E>(simt_query_gradient_kernel<E>, query_gradient_blocks<E>(p), p, stream);
  return error;
}

}  // namespace flashattn::any
