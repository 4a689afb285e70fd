// The 16-bit types: nothing but conversions, which round to nearest even.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"

namespace emulator {

template <class To, class From>
To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "another size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline float decode_bf16(uint16_t x) { return bits_of<float>(uint32_t{x} << 16); }

inline uint16_t encode_bf16(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  if (x != x) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float decode_f16(uint16_t x) {
  static const auto table = [] {
    std::array<float, 1 << 16> values;
    for (int i = 0; i < 1 << 16; ++i) {
      const int exponent = i >> 10 & 31, fraction = i & 1023;
      const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                         : exponent     ? std::ldexp(1024.f + fraction, exponent - 25)
                                        : std::ldexp(static_cast<float>(fraction), -24);
      values[i] = i >> 15 ? -size : size;
    }
    return values;
  }();
  return table[x];
}

inline uint16_t encode_f16(float x) {
  const uint16_t sign = bits_of<uint32_t>(x) >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (x != x) return 0x7FFF;
  if (size >= 65520.f) return sign | 0x7C00;
  const int exponent = std::max(std::ilogb(size), -14);  // of zero it is far below
  const float units = std::nearbyint(std::ldexp(size, 10 - exponent));
  return static_cast<uint16_t>(sign + (exponent + 14) * 1024 + static_cast<int>(units));
}

}  // namespace emulator

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return emulator::decode_f16(x.bits); }
inline __half __float2half_rn(float x) { return {emulator::encode_f16(x)}; }
inline __half __float2half(float x) { return {emulator::encode_f16(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
