// PTX instructions that Hopper adds: one wrapper each, named as in the PTX manual.  wgmma itself is generated
// by csrc/instances.py, because its operand lists depend on the shape.
#pragma once

#include <cuda.h>

#include "common/ptx.cuh"

namespace flashattn::ptx {

// ---- transaction barriers ------------------------------------------------------------------------------

__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The phase ends only after `bytes` more have been copied.
__device__ inline void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns when the phase of this parity has ended.
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Has it?  The answer takes some time, in which the thread goes on.
__device__ inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// ---- copies of tensor tiles ----------------------------------------------------------------------------

// Hints for the L2 cache, as createpolicy makes them.
constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000,
                   kEvictNormal = 0x1000000000000000;

__device__ inline void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts a copy of the map's box at these coordinates into shared memory; `barrier` counts its bytes.
__device__ inline void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                                 uint64_t hint, int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "l"(hint), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

__device__ inline void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from, int x0, int x1,
                                                  int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          map),
      "r"(from), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

// Starts a copy of contiguous bytes, a multiple of 16, into shared memory; `barrier` counts them.
__device__ inline void cp_async_bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds contiguous floats from shared memory to those in global memory.
__device__ inline void cp_reduce_async_bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the stores of this thread have read shared memory.
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until they have been performed.
__device__ inline void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What this thread wrote to shared memory becomes visible to wgmma and to the copy engine.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- counters --------------------------------------------------------------------------------------------

// One thread's: the compiler would gather those of a warp.
__device__ inline unsigned atom_add(unsigned* to, unsigned x) {
  unsigned before;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
  return before;
}

// ---- warpgroups ----------------------------------------------------------------------------------------

template <int registers>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ inline void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Before the first wgmma, and after registers that the next one reads or adds to have been written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int groups>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// The compiler does not know that a wait makes the results of wgmma valid: nothing that reads these registers
// moves above this point.
template <int n>
__device__ inline void written_by_wgmma(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// A wgmma wait is for ptxas an instruction like another, which it moves above the arithmetic in front of it.
// A branch that depends on that arithmetic holds it below: this is what the branch does, hardly ever.
__device__ inline void hold() { asm volatile("nanosleep.u32 20;" ::: "memory"); }

// The largest of three numbers, the first of which is not negative: in one instruction, since such floats are
// ordered like their bits.
__device__ inline float max_from(float positive, float x, float y) {
  return __int_as_float(__vimax3_s32(__float_as_int(positive), __float_as_int(x), __float_as_int(y)));
}

__device__ inline void stmatrix_x4(uint32_t to, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x0), "r"(x1),
               "r"(x2), "r"(x3)
               : "memory");
}

__device__ inline void stmatrix_x4_trans(uint32_t to, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x0),
               "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

}  // namespace flashattn::ptx
