// What nvcc and the CUDA headers give a kernel, for g++: included before every kernel unit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "cudaTypedefs.h"
#include "simt.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current_block)
inline const dim3 &blockDim = emulator::current_block_size, &gridDim = emulator::current_grid;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using std::max;
using std::min;

// ---- instructions of threads, warps and blocks
// -------------------------------------------------------------

inline void __syncthreads(emulator::Site site = {}) { emulator::synchronize_block(site); }

inline void __syncwarp(uint32_t mask = emulator::kFullMask, emulator::Site site = {}) {
  emulator::synchronize_warp(site, mask);
}

// Every lane gives x and gets that of the lane `from`.
template <class T>
T exchange(const char* what, uint32_t mask, T x, int from, emulator::Site site) {
  struct Arguments {
    T given, taken;
    int from;
  } mine{x, x, from};
  emulator::collective(what, site, mask, mine, [mask](Arguments** lanes) {
    for (int lane = 0; lane < emulator::kWarpSize; ++lane)
      if (mask >> lane & 1) lanes[lane]->taken = lanes[lanes[lane]->from]->given;
  });
  return mine.taken;
}

inline int lane_of_thread() { return emulator::current->id % emulator::kWarpSize; }

template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int lanes, int width = 32, emulator::Site site = {}) {
  const int lane = lane_of_thread(), from = lane ^ lanes;
  return exchange("__shfl_xor_sync", mask, x, from / width > lane / width ? lane : from, site);
}

template <class T>
T __shfl_sync(uint32_t mask, T x, int from, int width = 32, emulator::Site site = {}) {
  return exchange("__shfl_sync", mask, x, lane_of_thread() / width * width + from % width, site);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T x, int lanes, int width = 32, emulator::Site site = {}) {
  const int lane = lane_of_thread(), from = lane - lanes;
  return exchange("__shfl_up_sync", mask, x, from < lane / width * width ? lane : from, site);
}

template <class T>
T __shfl_down_sync(uint32_t mask, T x, int lanes, int width = 32, emulator::Site site = {}) {
  const int lane = lane_of_thread(), from = lane + lanes;
  return exchange("__shfl_down_sync", mask, x, from / width > lane / width ? lane : from, site);
}

inline uint32_t __ballot_sync(uint32_t mask, bool x, emulator::Site site = {}) {
  struct Arguments {
    bool given;
    uint32_t taken;
  } mine{x, 0};
  emulator::collective("a vote", site, mask, mine, [mask](Arguments** lanes) {
    uint32_t votes = 0;
    for (int lane = 0; lane < emulator::kWarpSize; ++lane)
      if (mask >> lane & 1) votes |= uint32_t{lanes[lane]->given} << lane;
    for (int lane = 0; lane < emulator::kWarpSize; ++lane)
      if (mask >> lane & 1) lanes[lane]->taken = votes;
  });
  return mine.taken;
}
inline bool __any_sync(uint32_t mask, bool x, emulator::Site site = {}) {
  return __ballot_sync(mask, x, site) != 0;
}
inline bool __all_sync(uint32_t mask, bool x, emulator::Site site = {}) {
  return __ballot_sync(mask, x, site) == mask;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

template <class T>
T atomicAdd(T* to, T x) {
  const T before = *to;
  *to = before + x;
  emulator::made_progress();
  return before;
}
inline void __threadfence() {}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
template <class T>
T __ldg(const T* from) {
  return *from;
}

// ---- the host's side
// ----------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
using cudaStream_t = void*;

namespace emulator {

inline cudaError_t last_error = cudaSuccess;
inline std::map<const void*, size_t> shared_allowed;  // of kernels that asked for more than the default

// kernel<<<grid, block, shared_bytes, stream>>>(arguments) becomes launch(kernel, grid, ...)(arguments).
template <class... Parameters>
auto launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes = 0,
            cudaStream_t = nullptr, unsigned cluster = 1) {
  return [=](const Parameters&... arguments) {
    constexpr size_t kDefault = 48 * 1024;
    const auto asked = shared_allowed.find(reinterpret_cast<const void*>(kernel));
    const size_t allowed = asked == shared_allowed.end() ? kDefault : std::max(kDefault, asked->second);
    if (!run(grid, block, shared_bytes, allowed, cluster, [&] { kernel(arguments...); }))
      last_error = cudaErrorInvalidValue;
  };
}

}  // namespace emulator

inline cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int bytes) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (bytes > flashattn::kSharedLimit) return cudaErrorInvalidValue;
  emulator::shared_allowed[reinterpret_cast<const void*>(kernel)] = bytes;
  return cudaSuccess;
}

// Code for any device.
struct cudaFuncAttributes {
  int ptxVersion;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  return attributes->ptxVersion = 90, cudaSuccess;
}

// A device of so few processors that blocks take several tiles.
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 3, cudaSuccess; }

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult*) {
  return *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled), cudaSuccess;
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters),
                               const Parameters& p) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = config->attrs[i].val.clusterDim.x;
  emulator::launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream,
                   cluster)(p);
  return cudaGetLastError();
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  memset(to, value, bytes);
  return cudaSuccess;
}
