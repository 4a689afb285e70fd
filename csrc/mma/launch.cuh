// Host side of the mma.sync kernels: grids, shared memory, order of the launches.
#pragma once

#include <type_traits>

#include "any/gradients.cuh"
#include "common/launch.cuh"
#include "mma/backward.cuh"
#include "mma/forward.cuh"

namespace flashattn::mma {

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
  return launch_kernel(forward_kernel<C>, forward_tiles<C>(p).count(), C::kWarps * 32,
                       ForwardTiles<C>::kBytes, p, static_cast<cudaStream_t>(stream));
}

template <class C>
constexpr int64_t backward_shared_bytes() {
  return BackwardTiles<C>::kBytes;
}

template <class C>
Workspace backward_workspace(const BackwardParams& p) {
  Workspace workspace{};
  workspace.shared_bytes = BackwardWorkspace<C>(p).bytes;
  return workspace;
}

template <class C>
int launch_backward(const BackwardParams& p, void* stream) {
  using Element = std::conditional_t<C::kDType == DType::bf16, __nv_bfloat16, __half>;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return launch_backward_rows<C, StatisticsInRows>(p, cuda_stream, [&] {
    BackwardParams main = p;
    if (p.deterministic && p.dbias.data) {  // blocks would add to it in any order
      if (const int error = any::launch_bias_gradient<Element>(p, cuda_stream)) return error;
      main.dbias.data = nullptr;
    }
    return launch_kernel(backward_kernel<C>, backward_tiles<C>(p).count(), C::kWarps * 32,
                         BackwardTiles<C>::kBytes, main, cuda_stream);
  });
}

}  // namespace flashattn::mma
