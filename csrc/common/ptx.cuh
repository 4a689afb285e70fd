// One wrapper per PTX instruction, named as in the PTX manual.  The kernels of sm75 and sm80 contain no other
// asm, so that the emulator can stand in for the card by replacing this file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

namespace flashattn::ptx {

// The same number, which the compiler takes for a new one: what follows from it is computed again instead of
// occupying registers.
__device__ inline int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Address in the shared window, as ldmatrix and cp.async want it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory; zeros where not valid (nothing is read then).
__device__ inline void cp_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `groups` of this thread's latest groups are in flight.
template <int groups>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

__device__ inline void st_shared_16(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ inline void st_shared_4(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ inline uint4 ld_shared_16(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ inline float ld_shared_f32(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

__device__ inline float2 ld_shared_f32x2(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

__device__ inline float4 ld_shared_f32x4(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ inline void st_shared_f32x2(uint32_t to, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}

__device__ inline void st_shared_f32x4(uint32_t to, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i.
__device__ inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// An 8x8 matrix of 16-bit elements transposed: lane l has columns 2 (l % 4) + {0, 1} of row l / 4.
__device__ inline uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d (16x8) += a (16x16) b (16x8)
template <DType dtype>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(dtype == DType::f16 || dtype == DType::bf16, "16-bit elements");
  if constexpr (dtype == DType::bf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d (16x8) += a (16x8) b (8x8)
__device__ inline void mma_m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// 2^x with a relative error of about 1e-7; subnormal results are 0.
__device__ inline float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 x with an error of about 1e-7 (absolute between 0.5 and 2, relative elsewhere).
__device__ inline float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers rounded to 16 bits, `low` in the low half.
template <DType dtype>
__device__ inline uint32_t cvt_pack(float low, float high) {
  uint32_t packed;
  if constexpr (dtype == DType::bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    __builtin_memcpy(&packed, &pair, sizeof packed);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    __builtin_memcpy(&packed, &pair, sizeof packed);
  }
  return packed;
}

template <DType dtype>
__device__ inline float2 cvt_unpack(uint32_t packed) {
  if constexpr (dtype == DType::bf16) {
    __nv_bfloat162 pair;
    __builtin_memcpy(&pair, &packed, sizeof packed);
    return __bfloat1622float2(pair);
  } else {
    __half2 pair;
    __builtin_memcpy(&pair, &packed, sizeof packed);
    return __half22float2(pair);
  }
}

// A reduction into global memory, without a result.
__device__ inline void red_add(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// A warp adds 4 numbers a lane to 128 floats: number e of a lane lies at red_add_slot(lane, e), so that every
// instruction touches whole lines.
__device__ inline int red_add_slot(int lane, int e) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + e;
#else
  return e * 32 + lane;
#endif
}

__device__ inline void red_add_warp(float* to, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + lane * 4), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
  for (int e = 0; e < 4; ++e) red_add(to + red_add_slot(lane, e), x[e]);
#endif
}

// Turns that blocks take: the holder's writes before the release are seen after the acquire.
__device__ inline int ld_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

__device__ inline void red_add_release(int* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// What was there before.  The block's writes before it are seen after the last block's.
__device__ inline unsigned atom_add_acq_rel(unsigned* to, unsigned x) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
  return before;
}

// `threads` threads, whole warps, wait for each other at a barrier of their own.
__device__ inline void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Until the kernels before in the stream have ended and what they wrote is visible.  Before compute
// capability 9.0 a kernel starts after that.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind in the stream may take the place of blocks that end, if it waits likewise.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- clusters, from compute capability 9.0 on -------------------------------------------------------------

__device__ inline void mbarrier_init(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ inline void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives, and the phase ends only after `bytes` more have been copied.
__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Returns when the phase of this parity has ended, of which other blocks of the cluster have a part.
__device__ inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Every thread of a cluster arrives once and waits once: then all blocks run.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// To the same place of another block of the cluster, whose barrier counts the bytes.
__device__ inline void st_async_f32x2(uint32_t to, uint32_t barrier, int block, float2 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [barrier];\n"
      "}" ::"r"(to),
      "r"(barrier), "r"(block), "f"(x.x), "f"(x.y)
      : "memory");
#endif
}
__device__ inline void st_async_f32x4(uint32_t to, uint32_t barrier, int block, float4 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [barrier];\n"
      "}" ::"r"(to),
      "r"(barrier), "r"(block), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
#endif
}

}  // namespace flashattn::ptx
