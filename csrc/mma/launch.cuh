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
  int error = launch_kernel(prepare_rows<C>, prepare_blocks<C>(p), kSmallThreads, 0, p, cuda_stream);
  if (!error && p.dsink) error = any::launch_sink_gradient<Element>(p, cuda_stream);
  if (!error && p.deterministic) {
    const BackwardWorkspace<C> workspace(p);
    const int64_t bytes =
        workspace.bytes - (reinterpret_cast<char*>(workspace.turns) - static_cast<char*>(p.workspace.shared));
    error = cudaMemsetAsync(workspace.turns, 0, bytes, cuda_stream);
  }
  BackwardParams main = p;
  if (p.deterministic && p.dbias.data) {  // blocks would add to it in any order
    if (!error) error = any::launch_bias_gradient<Element>(p, cuda_stream);
    main.dbias.data = nullptr;
  }
  if (!error)
    error = launch_kernel(backward_kernel<C>, backward_tiles<C>(p).count(), C::kWarps * 32,
                          BackwardTiles<C>::kBytes, main, cuda_stream);
  if (!error) error = launch_kernel(finish_queries<C>, finish_blocks<C>(p), kSmallThreads, 0, p, cuda_stream);
  return error;
}

}  // namespace flashattn::mma
