// Host side of every CUDA kernel: grids without limits and shared memory above 48 KB.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn {

// Launches `blocks` blocks, numbered by block_index(): as many as can be in x, the rest in y.  Returns a
// cudaError_t.
template <class Params>
int launch_kernel(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes, const Params& p,
                  cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (const auto error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return error;
  constexpr int64_t kLargestX = 0x7FFFFFFF;
  const int64_t y = (blocks + kLargestX - 1) / kLargestX;
  const dim3 grid(static_cast<unsigned>((blocks + y - 1) / y), static_cast<unsigned>(y));
  kernel<<<grid, threads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flashattn
