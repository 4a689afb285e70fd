// The functions of csrc/sm90/ptx.cuh in plain C++, after the PTX manual's words.  What is asynchronous there
// happens at once here, and accesses that transaction barriers order are not checked.
#pragma once

#include <cudaTypedefs.h>

#include "common/ptx.cuh"

namespace flashattn::ptx {

inline void mbarrier_arrive(uint32_t barrier, Site site = {}) {
  emulator::arrive_at_barrier(barrier, 1, 0, site);
}
inline void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes, Site site = {}) {
  emulator::arrive_at_barrier(barrier, 0, bytes, site);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site = {}) {
  emulator::wait_for_barrier(barrier, parity, site);
}
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  return emulator::test_barrier(barrier, parity);
}

constexpr uint64_t kEvictFirst = 0, kEvictLast = 1, kEvictNormal = 2;
inline void prefetch_tensormap(const CUtensorMap*) {}

// Where a byte of a swizzled slab lies: bits 4 to 6 of its address are changed by bits 7 to 9.
inline uint8_t* swizzled(uint32_t offset) { return shared_memory + (offset ^ (offset >> 7 & 7) << 4); }

// Calls f(shared memory, global memory or null where the tensor has nothing) for each element of the box.
template <class F>
void each_of_box(uint32_t address, const CUtensorMap& map, const int (&first)[5], F f) {
  for (unsigned outer = 0; outer < map.box[2]; ++outer)
    for (unsigned inner = 0; inner < map.box[1]; ++inner)
      for (unsigned column = 0; column < map.box[0]; ++column) {
        const int64_t place[5] = {first[0] + column, first[1] + inner, first[2] + outer, first[3], first[4]};
        const int64_t steps[5] = {2, map.strides[0], map.strides[1], map.strides[2], map.strides[3]};
        bool inside = true;
        int64_t offset = 0;
        for (int i = 0; i < 5; ++i) {
          inside &= place[i] >= 0 && place[i] < map.sizes[i];
          offset += place[i] * steps[i];
        }
        const uint32_t to =
            address - emulator::kSharedWindow + (outer * map.box[1] + inner) * 128 + column * 2;
        f(swizzled(to), inside ? map.data + offset : nullptr);
      }
}

inline void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t, int x0,
                                      int x1, int x2, int x3, int x4, Site site = {}) {
  each_of_box(to, *map, {x0, x1, x2, x3, x4}, [](uint8_t* shared, const uint8_t* global) {
    global ? memcpy(shared, global, 2) : memset(shared, 0, 2);
  });
  emulator::arrive_at_barrier(barrier, 0, -int64_t{2} * map->box[0] * map->box[1] * map->box[2], site);
}
inline void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from, int x0, int x1, int x2, int x3,
                                       int x4) {
  each_of_box(from, *map, {x0, x1, x2, x3, x4}, [](const uint8_t* shared, uint8_t* global) {
    if (global) memcpy(global, shared, 2);
  });
}
inline uint8_t* whole_chunks(uint32_t address, const void* global, uint32_t bytes, Site site) {
  if ((reinterpret_cast<uintptr_t>(global) | address | bytes) % 16 != 0)
    emulator::fail("a bulk copy of parts of 16 bytes, %s:%d", site.file, site.line);
  return shared_memory + (address - emulator::kSharedWindow);
}
inline void cp_async_bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                               Site site = {}) {
  memcpy(whole_chunks(to, from, bytes, site), from, bytes);
  emulator::arrive_at_barrier(barrier, 0, -int64_t{bytes}, site);
}
inline void cp_reduce_async_bulk_add(float* to, uint32_t from, uint32_t bytes, Site site = {}) {
  const auto* x = reinterpret_cast<const float*>(whole_chunks(from, to, bytes, site));
  for (uint32_t i = 0; i < bytes / 4; ++i) to[i] += x[i];
}
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read() {}
inline void cp_async_bulk_wait_group() {}
inline void fence_proxy_async() {}

inline unsigned atom_add(unsigned* to, unsigned x) { return atomicAdd(to, x); }

template <int registers>
void setmaxnreg_dec() {}
template <int registers>
void setmaxnreg_inc() {}
inline void bar_arrive(int barrier, int threads, Site site = {}) {
  emulator::named_barrier(barrier, threads, false, site);
}
inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int groups>
void wgmma_wait_group() {}
template <int n>
void written_by_wgmma(float (&)[n]) {}
inline void hold() {}

// Bits as on the device, so that a negative first number is an error here too.
inline float max_from(float positive, float x, float y) {
  const float numbers[3] = {positive, x, y};
  int bits[3], most;
  memcpy(bits, numbers, sizeof bits);
  most = std::max(std::max(bits[0], bits[1]), bits[2]);
  float result;
  memcpy(&result, &most, sizeof result);
  return result;
}

// Lane 8 i + r gives the address of row r of matrix i, lane l elements 2 (l % 4) + {0, 1} of row l / 4 of
// each, or of its transpose.
template <bool transposed>
void stmatrix(uint32_t to, const uint32_t (&x)[4], Site site) {
  struct Arguments {
    uint32_t to;
    const uint32_t* x;
  } mine{to, x};
  emulator::collective("stmatrix", site, emulator::kFullMask, mine, [site](Arguments** lanes) {
    for (int i = 0; i < 4; ++i)
      for (int lane = 0; lane < emulator::kWarpSize; ++lane)
        for (int e = 0; e < 2; ++e) {
          const int row = lane / 4, column = lane % 4 * 2 + e;
          const uint32_t place =
              transposed ? lanes[8 * i + column]->to + row * 2 : lanes[8 * i + row]->to + column * 2;
          st_shared(place, static_cast<uint16_t>(lanes[lane]->x[i] >> 16 * e), site);
        }
  });
}
inline void stmatrix_x4(uint32_t to, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3, Site site = {}) {
  stmatrix<false>(to, {x0, x1, x2, x3}, site);
}
inline void stmatrix_x4_trans(uint32_t to, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3,
                              Site site = {}) {
  stmatrix<true>(to, {x0, x1, x2, x3}, site);
}

}  // namespace flashattn::ptx

namespace flashattn::sm90 {

// wgmma of the warp's 16 rows; a and b are matrix descriptors of swizzled slabs.
template <DType dtype, int n>
struct EmulatedWgmma {
  template <int rows = 0>
  static void ss(float (&d)[n / 2], uint64_t a, uint64_t b, int add, ptx::Site site = {}) {
    multiply<rows != 0>({d, nullptr, a, b, add}, site);
  }
  template <int rows>
  static void rs(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int add, ptx::Site site = {}) {
    multiply<rows != 0>({d, a, 0, b, add}, site);
  }

 private:
  struct Arguments {
    float* d;
    const uint32_t* a_registers;
    uint64_t a, b;
    int add;
  };

  static float number(uint16_t bits) {
    return dtype == DType::bf16 ? emulator::decode_bf16(bits) : emulator::decode_f16(bits);
  }
  static float element(uint32_t offset) {
    uint16_t bits;
    memcpy(&bits, ptx::swizzled(offset), 2);
    return number(bits);
  }
  static uint32_t start(uint64_t descriptor) { return (descriptor & 0x3FFF) << 4; }

  template <bool rows_are_k>
  static void multiply(Arguments mine, ptx::Site site) {
    const int warp_row = emulator::current->id / emulator::kWarpSize % 4 * 16;
    emulator::collective("wgmma", site, emulator::kFullMask, mine, [warp_row](Arguments** lanes) {
      float left[16][16], right[16][n];
      const uint32_t b = start(lanes[0]->b), slab = start(lanes[0]->b >> 16);
      const auto in_group = [](uint64_t descriptor, int row) {  // of 8 rows
        return row / 8 * start(descriptor >> 32) + row % 8 * 128;
      };
      for (int k = 0; k < 16; ++k)
        for (int j = 0; j < n; ++j)
          right[k][j] = element(rows_are_k ? b + j / 64 * slab + in_group(lanes[0]->b, k) + j % 64 * 2
                                           : b + in_group(lanes[0]->b, j) + k * 2);
      for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) {
          const uint32_t* a = lanes[row % 8 * 4 + k % 8 / 2]->a_registers;
          left[row][k] = a ? number(static_cast<uint16_t>(a[row / 8 + k / 8 * 2] >> k % 2 * 16))
                           : element(start(lanes[0]->a) + in_group(lanes[0]->a, warp_row + row) + k * 2);
        }
      for (int lane = 0; lane < emulator::kWarpSize; ++lane)
        for (int e = 0; e < n / 2; ++e) {
          const int row = lane / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
          float sum = lanes[lane]->add ? lanes[lane]->d[e] : 0;
          for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
          lanes[lane]->d[e] = sum;
        }
    });
  }
};

}  // namespace flashattn::sm90
