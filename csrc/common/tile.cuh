// Tiles of 16-bit elements in shared memory and the mma.sync operands read from them.  The only place with
// arithmetic on shared addresses.
#pragma once

#include "common/ptx.cuh"
#include "common/shared_memory.cuh"

namespace flashattn {

constexpr int kChunk = 8;  // elements of 16 bytes, the unit of copies and of ldmatrix rows

// Row-major; 16-byte chunks are swizzled so that eight rows of one chunk column lie in different banks.
template <int rows, int columns>
struct Tile {
  static_assert(columns % 32 == 0, "rows of whole 64-byte groups");
  static constexpr int kRows = rows, kColumns = columns, kPitch = columns * 2, kBytes = rows * kPitch;
  static constexpr int kLanesPerRow = columns % 64 == 0 ? 8 : 4;  // chunks of a group that is swizzled

  uint32_t base;

  __device__ static int swizzle(int row) { return kLanesPerRow == 8 ? row & 7 : row >> 1 & 3; }

  __device__ uint32_t chunk(int row, int index) const {
    return base + row * kPitch + ((index ^ swizzle(row)) << 4);
  }
};

// ---- operands ------------------------------------------------------------------------------------------

// Where a lane reads its row of the four 8x8 matrices of a 16x16 block; blocks start at multiples of 16 rows
// and columns.
template <class T>
struct BlockReader {
  uint32_t row_base, swizzled;

  __device__ BlockReader(const T& tile, int row, int chunk)
      : row_base(tile.base + row * T::kPitch), swizzled((chunk ^ T::swizzle(row)) << 4) {}

  // The swizzle changes bytes within a group only: the rest is a constant offset.
  __device__ uint32_t at(int row, int column) const {
    constexpr int kGroupBytes = T::kLanesPerRow * 16;
    const int in_group = column * 2 % kGroupBytes;
    return row_base + (in_group ^ swizzled) + (row * T::kPitch + column * 2 - in_group);
  }
};

// The 16x16 blocks of a tile as mma operands; "rows" are rows of the tile.
template <class T>
struct RowsInOrder : BlockReader<T> {  // matrices: (top, left), (bottom, left), (top, right), (bottom, right)
  __device__ RowsInOrder(const T& tile, int lane) : BlockReader<T>(tile, lane & 15, lane >> 4) {}
};
template <class T>
struct ColumnsInOrder : BlockReader<T> {  // (top, left), (top, right), (bottom, left), (bottom, right)
  __device__ ColumnsInOrder(const T& tile, int lane)
      : BlockReader<T>(tile, (lane & 7) + (lane >> 4 << 3), lane >> 3 & 1) {}
};

// A = block (rows m, columns k).
template <class T>
struct OperandA : RowsInOrder<T> {
  using RowsInOrder<T>::RowsInOrder;
  __device__ void load(uint32_t (&a)[4], int m, int k) const { ptx::ldmatrix_x4(a, this->at(m, k)); }
};
// A = block transposed (rows k, columns m).
template <class T>
struct OperandATransposed : ColumnsInOrder<T> {
  using ColumnsInOrder<T>::ColumnsInOrder;
  __device__ void load(uint32_t (&a)[4], int m, int k) const { ptx::ldmatrix_x4_trans(a, this->at(k, m)); }
};
// B of two neighbouring n8 tiles, block transposed (rows n, columns k): b[0..1] and b[2..3].
template <class T>
struct OperandBTransposed : ColumnsInOrder<T> {
  using ColumnsInOrder<T>::ColumnsInOrder;
  __device__ void load(uint32_t (&b)[4], int k, int n) const { ptx::ldmatrix_x4(b, this->at(n, k)); }
};
// B of two neighbouring k16 steps of one n8 tile, block (8 rows n, 32 columns k) transposed.
template <class T>
struct ColumnBlocks : BlockReader<T> {
  __device__ ColumnBlocks(const T& tile, int lane) : BlockReader<T>(tile, lane & 7, lane >> 3) {}
  __device__ void load(uint32_t (&b)[4], int n, int k) const { ptx::ldmatrix_x4(b, this->at(n, k)); }
};
// B of two neighbouring n8 tiles, block (rows k, columns n).
template <class T>
struct OperandB : RowsInOrder<T> {
  using RowsInOrder<T>::RowsInOrder;
  __device__ void load(uint32_t (&b)[4], int k, int n) const { ptx::ldmatrix_x4_trans(b, this->at(k, n)); }
};

// d (16x8) += a (16x16) b (16x8)
template <class C>
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (C::kArch >= 80) {
    ptx::mma_m16n8k16<C::kDType>(d, a, b0, b1);
  } else {
    static_assert(C::kDType == DType::f16, "sm_75 multiplies fp16 only");
    ptx::mma_m16n8k8_f16(d, a[0], a[1], b0);
    ptx::mma_m16n8k8_f16(d, a[2], a[3], b1);
  }
}

// Sums of a warp's tile of m16n8 blocks.  Lane l holds rows l/4 and l/4 + 8 of each, columns 2 (l%4) + {0,
// 1}.
template <int m_blocks, int n_blocks>
struct Accumulator {
  static constexpr int kM = m_blocks, kN = n_blocks;
  float x[kM][kN][4];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
  }

  // += A B over k in [0, depth), the warp's blocks starting at row m0 of A and column n0 of B.  filter(b, k)
  // may change what was read of rows k to k + 15 of B.
  template <class C, int depth, class A, class B, class Filter>
  __device__ void multiply(const A& a, int m0, const B& b, int n0, Filter filter) {
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
      uint32_t a_frag[kM][4], b_frag[kN / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) a.load(a_frag[m], m0 + m * 16, k);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        b.load(b_frag[n / 2], k, n0 + n * 8);
        filter(b_frag[n / 2], k);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply_add<C>(x[m][n], a_frag[m], b_frag[n / 2][0], b_frag[n / 2][1]);
          multiply_add<C>(x[m][n + 1], a_frag[m], b_frag[n / 2][2], b_frag[n / 2][3]);
        }
    }
  }

  template <class C, int depth, class A, class B>
  __device__ void multiply(const A& a, int m0, const B& b, int n0) {
    multiply<C, depth>(a, m0, b, n0, [](uint32_t (&)[4], int) {});
  }
};

// Row and column, within the warp's tile, of element e of block (m, n).
__device__ inline int fragment_row(int lane, int m, int e) { return m * 16 + (lane >> 2) + (e >> 1) * 8; }
__device__ inline int fragment_column(int lane, int n, int e) { return n * 8 + (lane & 3) * 2 + (e & 1); }

// ---- copies --------------------------------------------------------------------------------------------

__device__ inline bool aligned_16(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0;
}

// Up to 8 elements that may lie anywhere, zeros after them.
__device__ inline uint4 gather_chunk(const uint16_t* from, int count) {
  uint16_t x[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) x[e] = e < count ? from[e] : 0;
  uint4 packed;
  __builtin_memcpy(&packed, x, sizeof packed);
  return packed;
}

// Up to 8 elements from global memory, zeros after them.
template <class C>
__device__ inline uint4 load_chunk(const uint16_t* from, int count) {
  if (count <= 0) return {0, 0, 0, 0};
  if (C::kGeneral && (count < kChunk || !aligned_16(from))) return gather_chunk(from, count);
  return *reinterpret_cast<const uint4*>(from);
}

// 16 aligned bytes, asynchronously where the architecture can.
template <class C>
__device__ inline void copy_16(uint32_t to, const void* from, bool valid = true) {
  if constexpr (C::kArch >= 80)
    ptx::cp_async_16(to, from, valid);
  else
    ptx::st_shared_16(to, valid ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0});
}

// A chunk, of which `count` elements exist, to shared memory.
template <class C>
__device__ inline void copy_chunk(uint32_t to, const uint16_t* from, int count) {
  if constexpr (C::kGeneral) {
    if (count > 0 && (count < kChunk || !aligned_16(from))) {
      ptx::st_shared_16(to, gather_chunk(from, count));
      return;
    }
  }
  copy_16<C>(to, from, count > 0);
}

// Copies rows of 16-bit elements from global memory into a tile, asynchronously where the architecture can.
// Rows outside [first, last) and columns from `columns` on become zeros and are not read.
template <class C, class T, int threads>
struct RowCopy {
  static constexpr int kLanes = T::kLanesPerRow, kRowsPerPass = threads / kLanes;
  static_assert(T::kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0, "whole passes of one swizzle");

  // `data` is where row `row`, the tile's first, lies.
  __device__ static void load(const T& tile, const uint16_t* data, int64_t stride, int64_t columns, int row,
                              int first, int last) {
    const int thread = ptx::recomputed(threadIdx.x), lane_row = thread / kLanes, lane_chunk = thread % kLanes;
    const uint16_t* from = data + (lane_row * stride + lane_chunk * kChunk);
    const uint32_t lane_to = tile.chunk(lane_row, lane_chunk);
    const int lane_columns = static_cast<int>(columns) - lane_chunk * kChunk;
#pragma unroll
    for (int pass = 0; pass < T::kRows; pass += kRowsPerPass) {
      const bool row_counts =
          static_cast<unsigned>(row - first + lane_row + pass) < static_cast<unsigned>(last - first);
#pragma unroll
      for (int group = 0; group < T::kColumns / kChunk; group += kLanes)
        copy_chunk<C>(lane_to + (pass * T::kPitch + group * kChunk * 2),
                      from + pass * stride + group * kChunk, row_counts ? lane_columns - group * kChunk : 0);
    }
  }
};

template <class C>
__device__ inline void commit_copies() {
  if constexpr (C::kArch >= 80) ptx::cp_async_commit_group();
}

// Until at most `groups` committed groups of this thread are in flight.
template <class C, int groups>
__device__ inline void wait_for_copies() {
  if constexpr (C::kArch >= 80) ptx::cp_async_wait_group<groups>();
}

// Accumulators, rounded to 16 bits, into a tile at (row, column).
template <class C, class T, int m_blocks, int n_blocks>
__device__ inline void store_fragments(const T& tile, int row, int column,
                                       const Accumulator<m_blocks, n_blocks>& acc, int lane) {
#pragma unroll
  for (int m = 0; m < m_blocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + m * 16 + half * 8 + (lane >> 2);
#pragma unroll
      for (int n = 0; n < n_blocks; ++n)
        ptx::st_shared_4(tile.chunk(r, column / kChunk + n) + (lane & 3) * 4,
                         ptx::cvt_pack<C::kDType>(acc.x[m][n][2 * half], acc.x[m][n][2 * half + 1]));
    }
}

// Up to 8 elements to global memory.
template <class C>
__device__ inline void store_chunk(uint16_t* to, uint4 x, int count) {
  if (!C::kGeneral || (count >= kChunk && aligned_16(to))) {
    *reinterpret_cast<uint4*>(to) = x;
    return;
  }
  uint16_t elements[kChunk];
  __builtin_memcpy(elements, &x, sizeof x);
#pragma unroll
  for (int e = 0; e < kChunk; ++e)
    if (e < count) to[e] = elements[e];
}

// Four numbers, of which `count` exist, rounded to 16 bits.
template <class C>
__device__ inline void store_four(uint16_t* to, float4 x, int count) {
  const uint2 packed{ptx::cvt_pack<C::kDType>(x.x, x.y), ptx::cvt_pack<C::kDType>(x.z, x.w)};
  if (count >= 4 && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint2*>(to) = packed;
    return;
  }
  uint16_t elements[4];
  __builtin_memcpy(elements, &packed, sizeof packed);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (e < count) to[e] = elements[e];
}

// Rows of a tile to global memory; `thread` of `threads` share the work.
template <class C, class T>
__device__ inline void store_rows(const T& tile, int count, void* data, int64_t stride, int columns,
                                  int thread, int threads) {
  constexpr int kChunks = T::kColumns / kChunk;
  for (int i = thread; i < count * kChunks; i += threads) {
    const int row = i / kChunks, chunk = i % kChunks, left = columns - chunk * kChunk;
    if (left <= 0) continue;
    store_chunk<C>(static_cast<uint16_t*>(data) + row * stride + chunk * kChunk,
                   ptx::ld_shared_16(tile.chunk(row, chunk)), left);
  }
}

}  // namespace flashattn
