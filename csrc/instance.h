// What the host knows of the compiled kernels: plain structs that every unit, registry and module includes.
#pragma once

#include <cstdint>
#include <tuple>

#include "params.h"

namespace flashattn {

struct Family;

// What a call asks of its kernel beyond a softmax over all keys of tensors in a common layout.
enum class Need : uint8_t {
  softcap,
  alibi,
  bias,
  mask,
  dropout,
  scale,         // not positive
  head_dim,      // not a multiple of 8
  alignment,     // a base or stride that is not a multiple of 16 bytes
  many_queries,  // packed, batch_invariant or more queries than a small tile has
  small_tiles,   // forward: packed, batch_invariant or too little work for large tiles
  many_rows,     // decode: more than 8 query rows of a KV head
  addressing,    // a stride or size that no TMA descriptor holds
  max_logit,
  own_values,  // decode: V is not the first columns of a K with more than 256, a multiple of 64
  odd_pages,   // decode: a page size that is not a multiple of 8
  leftpad,     // decode: keys before the first that counts
  few_rows,    // decode: so few query rows that keys are divided among blocks, a given division, or
               // batch_invariant
};

// Types or needs as bits.
template <class... Members>
constexpr uint32_t set_of(Members... members) {
  return (0u | ... | (1u << static_cast<int>(members)));
}
constexpr uint32_t kEveryNeed = 2 * set_of(Need::few_rows) - 1;  // up to the last

// A row of csrc/instances.py.  Where the kernel runs: on CUDA devices if it has a module, else on the CPU.
template <class Params>
struct Instance {
  const char* name;
  const char* family;
  const Family* module;          // what holds the images of a CUDA kernel
  int level;                     // least of the device: a CpuLevel or compute capability
  uint32_t dtypes;               // those that it serves, bits of DType
  int64_t head_dim, head_dim_v;  // largest served; 0: any
  uint32_t serves;               // bits of Need
  int64_t shared_bytes;          // of a block

  Workspace (*workspace)(const Params&);       // bytes that a launch needs
  int (*launch)(const Params&, void* stream);  // a CUDA error code, 0 on the CPU
};

// In the dispatcher's order, a null pointer at the end.
template <class Params>
using Rows = const Instance<Params>* const*;
using Tables = std::tuple<Rows<ForwardParams>, Rows<BackwardParams>, Rows<DecodeParams>>;

// The CUDA kernels of one extension module.
struct Family {
  const char* name;
  const int* images;  // compute capabilities of its native images, a 0 at the end
  int ptx;            // compute capability of its oldest PTX image, 0: none
  Tables tables;
  CudaDevice (*device)(int ordinal);
  const char* (*error_text)(int error);
};

// Generated from csrc/instances.py, one registry a module.
extern const Tables tables;
extern const char* const kContract;  // digest of the declarations that modules share

}  // namespace flashattn
