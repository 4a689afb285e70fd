// The functions of csrc/common/ptx.cuh in plain C++, after the PTX manual's words.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

namespace flashattn::ptx {

using emulator::Access;
using emulator::Site;

inline int recomputed(int x) { return x; }

inline uint32_t shared_address(const void* pointer, Site site = {}) {
  return emulator::shared_address(pointer, site);
}

inline void cp_async_16(uint32_t to, const void* from, bool valid, Site site = {}) {
  emulator::start_copy(to, valid ? from : nullptr, site);
}
inline void cp_async_commit_group() { emulator::commit_copies(); }
template <int groups>
void cp_async_wait_group() {
  emulator::wait_for_copies(groups);
}

template <class T>
void st_shared(uint32_t to, T x, Site site) {
  memcpy(emulator::shared(to, sizeof x, Access::write, site), &x, sizeof x);
}
inline void st_shared_16(uint32_t to, uint4 x, Site site = {}) { st_shared(to, x, site); }
inline void st_shared_4(uint32_t to, uint32_t x, Site site = {}) { st_shared(to, x, site); }

template <class T>
T ld_shared(uint32_t from, Site site) {
  T x;
  memcpy(&x, emulator::shared(from, sizeof x, Access::read, site), sizeof x);
  return x;
}
inline uint4 ld_shared_16(uint32_t from, Site site = {}) { return ld_shared<uint4>(from, site); }
inline float ld_shared_f32(uint32_t from, Site site = {}) { return ld_shared<float>(from, site); }
inline float2 ld_shared_f32x2(uint32_t from, Site site = {}) { return ld_shared<float2>(from, site); }
inline float4 ld_shared_f32x4(uint32_t from, Site site = {}) { return ld_shared<float4>(from, site); }
inline void st_shared_f32x2(uint32_t to, float2 x, Site site = {}) { st_shared(to, x, site); }
inline void st_shared_f32x4(uint32_t to, float4 x, Site site = {}) { st_shared(to, x, site); }

inline uint32_t movmatrix_trans(uint32_t x, Site site = {}) {
  struct Arguments {
    uint32_t given, taken;
  } mine{x, 0};
  emulator::collective("movmatrix", site, emulator::kFullMask, mine, [](Arguments** lanes) {
    uint16_t matrix[8][8];
    for (int lane = 0; lane < 32; ++lane) memcpy(&matrix[lane / 4][lane % 4 * 2], &lanes[lane]->given, 4);
    for (int lane = 0; lane < 32; ++lane)
      lanes[lane]->taken = matrix[lane % 4 * 2][lane / 4] | matrix[lane % 4 * 2 + 1][lane / 4] << 16;
  });
  return mine.taken;
}

// Lane 8 i + r gives the address of row r of matrix i.  Lane l gets elements 2 (l % 4) + {0, 1} of row l / 4
// of each matrix, or of its transpose.
template <bool transposed>
void ldmatrix(uint32_t (&to)[4], uint32_t from, Site site) {
  struct Arguments {
    uint32_t (&to)[4];
    uint32_t from;
  } mine{to, from};
  emulator::collective("ldmatrix", site, emulator::kFullMask, mine, [site](Arguments** lanes) {
    for (int i = 0; i < 4; ++i) {
      uint16_t matrix[8][8];
      for (int row = 0; row < 8; ++row)
        memcpy(matrix[row],
               emulator::shared(lanes[8 * i + row]->from, 16, Access::read_by_warp, site, 8 * i + row), 16);
      for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
        const int row = lane / 4, column = lane % 4 * 2;
        const uint32_t low = transposed ? matrix[column][row] : matrix[row][column];
        const uint32_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
        lanes[lane]->to[i] = low | high << 16;
      }
    }
  });
}
inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t from, Site site = {}) { ldmatrix<false>(to, from, site); }
inline void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t from, Site site = {}) {
  ldmatrix<true>(to, from, site);
}

// d (16, 8) += a (16, depth) b (depth, 8).  With group g = lane / 4 and t = lane % 4, register r of a holds
// row g + 8 (r % 2), columns 8 (r / 2) + 2 t + {0, 1}; register r of b rows 8 r + 2 t + {0, 1}, column g;
// d[e] row g + 8 (e / 2), column 2 t + e % 2.
template <DType dtype, int depth>
void multiply_add(float (&d)[4], const uint32_t* a, const uint32_t* b, Site site) {
  struct Arguments {
    float (&d)[4];
    const uint32_t *a, *b;
  } mine{d, a, b};
  emulator::collective("mma", site, emulator::kFullMask, mine, [](Arguments** lanes) {
    const auto number = [](uint32_t pair, int i) {
      const auto bits = static_cast<uint16_t>(pair >> (16 * i));
      return dtype == DType::bf16 ? emulator::decode_bf16(bits) : emulator::decode_f16(bits);
    };
    float left[16][depth], right[depth][8];
    for (int lane = 0; lane < emulator::kWarpSize; ++lane)
      for (int r = 0; r < depth / 4; ++r)
        for (int i = 0; i < 2; ++i) {
          left[lane / 4 + 8 * (r % 2)][8 * (r / 2) + lane % 4 * 2 + i] = number(lanes[lane]->a[r], i);
          if (r % 2 == 0) right[8 * (r / 2) + lane % 4 * 2 + i][lane / 4] = number(lanes[lane]->b[r / 2], i);
        }
    for (int row = 0; row < 16; ++row) {
      float sum[8] = {};
      for (int k = 0; k < depth; ++k)
        for (int column = 0; column < 8; ++column) sum[column] += left[row][k] * right[k][column];
      for (int column = 0; column < 8; ++column)
        lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2] += sum[column];
    }
  });
}

template <DType dtype>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site = {}) {
  const uint32_t b[2] = {b0, b1};
  multiply_add<dtype, 16>(d, a, b, site);
}

inline void mma_m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0, Site site = {}) {
  const uint32_t a[2] = {a0, a1};
  multiply_add<DType::f16, 8>(d, a, &b0, site);
}

inline float ex2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.f : y;
}
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1 / x; }

template <DType dtype>
uint32_t cvt_pack(float low, float high) {
  const auto encode = dtype == DType::bf16 ? emulator::encode_bf16 : emulator::encode_f16;
  return encode(low) | static_cast<uint32_t>(encode(high)) << 16;
}

template <DType dtype>
float2 cvt_unpack(uint32_t packed) {
  const auto decode = dtype == DType::bf16 ? emulator::decode_bf16 : emulator::decode_f16;
  return {decode(static_cast<uint16_t>(packed)), decode(static_cast<uint16_t>(packed >> 16))};
}

inline void red_add(float* to, float x) { *to += x; }
inline int red_add_slot(int lane, int e) { return lane * 4 + e; }
inline void red_add_warp(float* to, int lane, const float (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulator::fail("red_add_warp at a misaligned address");
  for (int e = 0; e < 4; ++e) red_add(to + red_add_slot(lane, e), x[e]);
}

inline int ld_acquire(const int* from, Site site = {}) {
  emulator::wait_for_other_blocks(site);
  return *from;
}
inline void red_add_release(int* to, int x) {
  *to += x;
  emulator::made_progress();
}

inline unsigned atom_add_acq_rel(unsigned* to, unsigned x) {
  emulator::made_progress();
  return (*to += x) - x;
}

inline void bar_sync(int barrier, int threads, Site site = {}) {
  emulator::named_barrier(barrier, threads, true, site);
}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

// Accesses that transaction barriers order are not checked.
inline void mbarrier_init(uint32_t barrier, int arrivals) { emulator::init_barrier(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes, Site site = {}) {
  emulator::arrive_at_barrier(barrier, 1, bytes, site);
}
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity, Site site = {}) {
  emulator::wait_for_barrier(barrier, parity, site);
}
inline void cluster_arrive_relaxed() { emulator::arrive_at_cluster(); }
inline void cluster_wait(Site site = {}) { emulator::wait_for_cluster(site); }
inline void st_async_f32x2(uint32_t to, uint32_t barrier, int block, float2 x, Site site = {}) {
  emulator::store_in_cluster(to, barrier, block, &x, sizeof x, site);
}
inline void st_async_f32x4(uint32_t to, uint32_t barrier, int block, float4 x, Site site = {}) {
  emulator::store_in_cluster(to, barrier, block, &x, sizeof x, site);
}

}  // namespace flashattn::ptx
