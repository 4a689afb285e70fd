// Elements of every type as doubles, and memory that notices accesses past its end.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "cuda_bf16.h"
#include "params.h"

namespace emulator {

using flashattn::DType;

inline int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

inline double load_element(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f16:
      return decode_f16(static_cast<const uint16_t*>(data)[index]);
    default:
      return decode_bf16(static_cast<const uint16_t*>(data)[index]);
  }
}

inline void store_element(DType dtype, void* data, int64_t index, double x) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[index] = x;
      break;
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(x);
      break;
    case DType::f16:
      static_cast<uint16_t*>(data)[index] = encode_f16(static_cast<float>(x));
      break;
    default:
      static_cast<uint16_t*>(data)[index] = encode_bf16(static_cast<float>(x));
  }
}

// Relative error of a rounding to the type.
inline double rounding_of(DType dtype) {
  return dtype == DType::bf16  ? 0x1p-8
         : dtype == DType::f16 ? 0x1p-11
         : dtype == DType::f32 ? 0x1p-24
                               : 0x1p-53;
}

// Bytes, all 0xFF at first, which is NaN in every type.  They start at a multiple of 16 and end right before
// pages that fault.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) {
    constexpr int64_t kPage = 4096;
    const int64_t used = (bytes + kPage - 1) / kPage * kPage;
    mapped_ = used + kPage;
    pages_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(pages_ + used, kPage, PROT_NONE);
    memset(pages_, 0xFF, used);
    data_ = pages_ + (used - bytes) / 16 * 16;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { munmap(pages_, mapped_); }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_, mapped_;
  char *pages_, *data_;
};

}  // namespace emulator
