// The dynamic shared memory of a block; kernels lay a struct of tiles over it.
#pragma once

#include <cstdint>

namespace flashattn {

extern __shared__ __align__(128) uint8_t shared_memory[];

// Blocks are numbered through x, then y: a grid has no limit of its own.
__device__ inline int64_t block_index() { return static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x; }

}  // namespace flashattn
