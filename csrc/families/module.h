// What the extension module of every CUDA family has beside its kernels and its registry.  No torch.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "instance.h"

namespace flashattn {

inline CudaDevice read_device(int ordinal) {
  const auto attribute = [ordinal](cudaDeviceAttr which) {
    int value = 0;
    cudaDeviceGetAttribute(&value, which, ordinal);
    return value;
  };
  return {10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
          attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
}

// Read once a process: a call must not pay for it.
inline CudaDevice device(int ordinal) {
  static const std::vector<CudaDevice> devices = [] {
    int count = 0;
    cudaGetDeviceCount(&count);
    std::vector<CudaDevice> devices;
    for (int i = 0; i < count; ++i) devices.push_back(read_device(i));
    return devices;
  }();
  return devices.at(ordinal);
}

inline const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// The family as a capsule whose name tells `_C` that both were compiled from the same declarations.
inline void export_family(pybind11::module_& m, const Family& family) {
  m.attr("family") = pybind11::capsule(&family, kContract);
}

}  // namespace flashattn
