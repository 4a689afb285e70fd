// The dynamic shared memory of a block; kernels lay a struct of tiles over it.
#pragma once

#include <cstdint>

namespace flashattn {

extern __shared__ __align__(128) uint8_t shared_memory[];

}  // namespace flashattn
