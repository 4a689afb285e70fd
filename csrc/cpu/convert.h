// Rows of elements to and from the type of the sums.  Plain loops that compilers vectorise.
#pragma once

#include "cpu/vector.h"

namespace flashattn::cpu {
namespace {

inline float from_bf16(uint16_t x) { return bit_cast<float>(uint32_t{x} << 16); }

inline uint16_t to_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // to nearest even
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
}

inline float from_f16(uint16_t x) {
  const uint32_t size = uint32_t{x & 0x7FFFu} << 13, sign = uint32_t{x & 0x8000u} << 16;
  const uint32_t scaled = bit_cast<uint32_t>(bit_cast<float>(size) * 0x1p112f);  // exact, subnormals too
  const uint32_t special = size >= 0x0F800000 ? 0x7F800000 : 0;                  // infinity and NaN
  return bit_cast<float>(scaled | special | sign);
}

inline uint16_t to_f16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), size = bits & 0x7FFFFFFF;
  const uint32_t normal = (size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13;  // to nearest even
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3F000000;
  const uint32_t large = size > 0x7F800000 ? 0x7E00 : 0x7C00;
  const uint32_t half = size >= 0x47800000 ? large : size < 0x38800000 ? subnormal : normal;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
}

// to[i] = factor * from[i]
template <class T>
inline void load_row(DType dtype, const void* from, int64_t count, T* __restrict to, T factor = 1) {
  switch (dtype) {
    case DType::f32:
      for (int64_t i = 0; i < count; ++i) to[i] = factor * static_cast<T>(static_cast<const float*>(from)[i]);
      break;
    case DType::f64:
      for (int64_t i = 0; i < count; ++i)
        to[i] = factor * static_cast<T>(static_cast<const double*>(from)[i]);
      break;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) to[i] = factor * from_f16(static_cast<const uint16_t*>(from)[i]);
      break;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i) to[i] = factor * from_bf16(static_cast<const uint16_t*>(from)[i]);
      break;
  }
}

template <class T>
inline void store_row(DType dtype, const T* from, int64_t count, void* to) {
  switch (dtype) {
    case DType::f32:
      for (int64_t i = 0; i < count; ++i) static_cast<float*>(to)[i] = static_cast<float>(from[i]);
      break;
    case DType::f64:
      for (int64_t i = 0; i < count; ++i) static_cast<double*>(to)[i] = static_cast<double>(from[i]);
      break;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(to)[i] = to_f16(static_cast<float>(from[i]));
      break;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i)
        static_cast<uint16_t*>(to)[i] = to_bf16(static_cast<float>(from[i]));
      break;
  }
}

inline const char* element(const Tensor4& x, DType dtype, int64_t batch, int64_t row, int64_t head) {
  return static_cast<const char*>(x.data) +
         element_size(dtype) * (batch * x.batch + row * x.row + head * x.head);
}

inline char* mutable_element(const Tensor4& x, DType dtype, int64_t batch, int64_t row, int64_t head) {
  return const_cast<char*>(element(x, dtype, batch, row, head));
}

template <class T>
inline T& statistic(const Statistic& x, int64_t batch, int64_t head, int64_t row) {
  return static_cast<T*>(x.data)[batch * x.batch + head * x.head + row * x.row];
}

template <class T>
inline T per_head(const PerHead& x, int64_t batch, int64_t head) {
  T value = 0;
  load_row<T>(x.dtype,
              static_cast<const char*>(x.data) + element_size(x.dtype) * (batch * x.batch + head * x.head), 1,
              &value);
  return value;
}

}  // namespace
}  // namespace flashattn::cpu
