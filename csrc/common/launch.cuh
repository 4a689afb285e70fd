// Host side of every CUDA kernel: grids without limits and shared memory above 48 KB.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flashattn {

// Launches `blocks` blocks, numbered by block_index(): as many as can be in x, the rest in y.  Returns a
// cudaError_t.  With `overlap`, for devices from 9.0 on, they may start before the kernel ahead in the stream
// has ended, and wait for it themselves (ptx::griddepcontrol_wait).
template <class Params>
int launch_kernel(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes, const Params& p,
                  cudaStream_t stream, bool overlap = false, int cluster = 1) {
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
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// The compute capability whose instructions a kernel has on the current device, which is of `capability`.
// Code that was compiled for an older one, and translated for this one, knows no overlap and no clusters.
template <auto kernel>
int code_capability(int capability) {
  static thread_local int known = 0, code = 0;
  if (capability != known) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return 0;
    known = capability, code = capability < attributes.ptxVersion ? capability : attributes.ptxVersion;
  }
  return code;
}

// The first of `count` counters, at most kMostCounters, of `all` for a launch; -1: none.  Launches that may
// run at the same time need different ones.  Eager launches take them in turn, and far fewer can be queued
// than there are.  A graph keeps its own for good, until they have run out.
constexpr int kMostCounters = 256;
template <int all>
int take_counters(cudaStream_t stream, int count = 1) {
  constexpr int kEager = all / 2 - kMostCounters;
  static std::atomic<unsigned> eager{0};
  static std::atomic<int> captured{0};
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  if (status == cudaStreamCaptureStatusNone) return static_cast<int>(eager.fetch_add(count) % kEager);
  if (captured > all / 2 - count) return -1;
  const int first = captured.fetch_add(count);
  return first <= all / 2 - count ? all / 2 + first : -1;
}

}  // namespace flashattn
