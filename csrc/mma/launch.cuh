// Host side of the mma.sync kernels: grids, shared memory, order of the launches.
#pragma once

#include <cuda_runtime.h>

#include "mma/forward.cuh"

namespace flashattn::mma {

constexpr int64_t kGridLimit = 0x7FFFFFFF;

// Blocks in x as far as they go, the rest in y.
inline dim3 grid_of(int64_t blocks) {
  const int64_t y = (blocks + kGridLimit - 1) / kGridLimit, x = (blocks + y - 1) / y;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

template <class C, class Kernel, class Params>
int launch(Kernel* kernel, int64_t blocks, int shared_bytes, const Params& p, void* stream) {
  if (blocks == 0) return cudaSuccess;
  if (const auto error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return error;
  kernel<<<grid_of(blocks), C::kWarps * 32, shared_bytes, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

template <class C>
constexpr int64_t forward_shared_bytes() {
  return ForwardTiles<C>::kBytes;
}

template <class C>
Workspace forward_workspace(const ForwardParams&) {
  return {};
}

template <class C>
int launch_forward(const ForwardParams& p, void* stream) {
  return launch<C>(forward_kernel<C>, forward_tiles<C>(p), ForwardTiles<C>::kBytes, p, stream);
}

}  // namespace flashattn::mma
