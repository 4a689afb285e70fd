// Host side of every CUDA kernel: grids without limits and shared memory above 48 KB.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn {

// Launches `blocks` blocks, numbered by block_index(): as many as can be in x, the rest in y.  Returns a
// cudaError_t.  With `overlap`, for devices from 9.0 on, they may start before the kernel ahead in the stream
// has ended, and wait for it themselves (ptx::griddepcontrol_wait).
template <class Params>
int launch_kernel(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes, const Params& p,
                  cudaStream_t stream, bool overlap = false) {
  if (blocks == 0) return cudaSuccess;
  if (const auto error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return error;
  constexpr int64_t kLargestX = 0x7FFFFFFF;
  const int64_t y = (blocks + kLargestX - 1) / kLargestX;
  const dim3 grid(static_cast<unsigned>((blocks + y - 1) / y), static_cast<unsigned>(y));
  // A multiprocessor that divides its memory anew waits until it is idle: kernels that overlap agree.
  if (overlap)
    if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                cudaSharedmemCarveoutMaxShared))
      return error;
  if (!overlap) {
    kernel<<<grid, threads, shared_bytes, stream>>>(p);
    return cudaGetLastError();
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace flashattn
