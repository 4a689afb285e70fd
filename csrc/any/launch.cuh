// Host side of the kernels in plain CUDA C++: grids, shared memory, order of the launches.  E is the type of
// q's elements.  Every function returns a cudaError_t.
#pragma once

#include "any/append.cuh"
#include "any/bias_gradient.cuh"
#include "any/delta.cuh"
#include "any/launches.cuh"
#include "any/simt_backward.cuh"
#include "any/simt_decode.cuh"
#include "any/simt_forward.cuh"
#include "common/launch.cuh"

namespace flashattn::any {

template <class E, class Params>
int launch_tiles(void (*kernel)(Params), int64_t blocks, const Params& p, cudaStream_t stream) {
  return launch_kernel(kernel, blocks, kThreads, sizeof(SharedTiles<Sum<E>>), p, stream);
}

template <class E>
int launch_delta(const BackwardParams& p, cudaStream_t stream) {
  return launch_kernel(delta_kernel<E>, delta_blocks(p), kDeltaThreads, 0, p, stream);
}

// After launch_delta.
template <class E>
int launch_sink_gradient(const BackwardParams& p, cudaStream_t stream) {
  return launch_kernel(sink_gradient_kernel<E>, p.heads_q, kSinkThreads, kSinkBytes, p, stream);
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

// With the number of splits.
template <class E>
DecodeParams with_splits(DecodeParams p) {
  p.splits = split_count<E>(p);
  return p;
}

template <class E>
Workspace simt_workspace(const ForwardParams&) {
  return {};
}

template <class E>
Workspace simt_workspace(const BackwardParams&) {
  return {};
}

template <class E>
Workspace simt_workspace(const DecodeParams& call) {
  const DecodeParams p = with_splits<E>(call);
  Workspace workspace{};
  if (Partials<Sum<E>>::in_use(p)) workspace.shared_bytes = Partials<Sum<E>>::bytes(p);
  return workspace;
}

template <class E>
int launch_simt_decode(const DecodeParams& call, cudaStream_t stream) {
  int error = launch_append<E>(call, stream);
  DecodeParams p = with_splits<E>(call);
  const bool merges = Partials<Sum<E>>::in_use(p);
  if (p.rotary.cos) p.q = p.q_rotated;
  if (merges) p.score.sink.data = nullptr;  // it counts once, in the merge
  if (!error) error = launch_tiles<E>(simt_decode_kernel<E>, forward_blocks<E>(p) * p.splits, p, stream);
  p.score.sink = call.score.sink;
  if (!error && merges)
    error = launch_kernel(simt_merge_kernel<E>, merge_blocks<E>(p), kMergeThreads, 0, p, stream);
  return error;
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
