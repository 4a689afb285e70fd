// What kernels of every family leave to kernels of their own.  E is the type of q's elements; they return a
// cudaError_t.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flashattn::any {

// p.dsink from p.delta.
template <class E>
int launch_sink_gradient(const BackwardParams& p, cudaStream_t stream);

// p.dbias from p.delta, in an order that never varies.
template <class E>
int launch_bias_gradient(const BackwardParams& p, cudaStream_t stream);

// New keys and values to the cache, rotated queries to p.q_rotated; nothing where there are none.
template <class E>
int launch_append(const DecodeParams& p, cudaStream_t stream);

}  // namespace flashattn::any
