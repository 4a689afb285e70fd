#pragma once

#include "cuda_fp16.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return emulator::decode_bf16(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulator::encode_bf16(x)}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return {emulator::encode_bf16(x)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
