// Shared-memory tiles as the copy engine writes them and wgmma reads them, and rings of them.
#pragma once

#include "common/tile.cuh"
#include "sm90/ptx.cuh"

namespace flashattn::sm90 {

// d (64 x n) = a b, plus d if `add`: the wrappers of one shape, written by csrc/instances.py.
//   ss<rows>(d, a, b, add): a and b by descriptor, a with contiguous k
//   rs<rows>(d, a, b, add): a in registers
//   b has contiguous k, or, for rows = 1, contiguous n
template <DType dtype, int n>
struct Wgmma;

// (rows, columns) 16-bit elements in slabs of 64 columns: rows of 128 bytes whose 16-byte chunks are
// swizzled.  Slab lies behind slab, or, if `interleaved`, 8 rows of each of so many slabs behind each other.
template <int rows, int columns, int interleaved = 0>
struct SlabTile {
  static constexpr int kSlabs = (columns + 63) / 64, kBytes = kSlabs * rows * 128;
  static constexpr int kSlabBytes = interleaved ? 1024 : rows * 128,          // from slab to slab
      kGroupBytes = interleaved ? interleaved * 1024 : 1024;                  // from 8 rows to the next
  static_assert(rows % 8 == 0, "whole periods of the swizzle");

  uint32_t base;  // a multiple of 1024

  __device__ uint32_t chunk(int row, int index) const {
    const int place = interleaved ? row / 8 * kGroupBytes + row % 8 * 128 : row * 128;
    return base + index / 8 * kSlabBytes + place + ((index % 8 ^ (row & 7)) << 4);
  }

  // Matrix descriptors (PTX ISA, "Asynchronous warpgroup level matrix operations").  Rows of contiguous k,
  // from a multiple of 8 on.
  __device__ uint64_t rows_of_k(int row) const { return descriptor(base + row / 8 * kGroupBytes, 1); }
  __device__ static constexpr uint64_t k_step(int k) { return (k / 64 * kSlabBytes + k % 64 * 2) >> 4; }

  // Rows are k and columns contiguous n: slabs of n are kSlabBytes apart.
  __device__ uint64_t columns_of_n() const { return descriptor(base, kSlabBytes >> 4); }
  __device__ static constexpr uint64_t row_step(int k) { return k / 8 * kGroupBytes >> 4; }

 private:
  __device__ static uint64_t descriptor(uint32_t address, uint64_t slab_step) {
    constexpr uint64_t kGroupStep = kGroupBytes >> 4, kSwizzle128 = 1;
    return (address & 0x3FFFF) >> 4 | slab_step << 16 | kGroupStep << 32 | kSwizzle128 << 62;
  }
};

// Named barriers; 0 is __syncthreads.
constexpr int kTurnBarrier = 1;   // + warpgroup: its turn at the tensor cores has come
constexpr int kGroupBarrier = 5;  // + warpgroup: its own threads

// Position in a ring of tiles.
template <int stages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Starts the copies of a tile, one box of 64 columns each.
template <class T>
__device__ inline void load_tile(const T& tile, const CUtensorMap& map, uint32_t barrier, uint64_t hint,
                                 int row, int unit, int batch) {
  ptx::mbarrier_arrive_expect_tx(barrier, T::kBytes);
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab)
    ptx::cp_async_bulk_tensor_load(tile.base + slab * T::kSlabBytes, &map, barrier, hint, slab * 64, 0, row,
                                   unit, batch);
}

}  // namespace flashattn::sm90
