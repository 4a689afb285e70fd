// What the CPU units include before they raise their target: library headers and scalar code of the baseline.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/dropout.h"
#include "common/mask.h"
#include "common/seqlen.h"
#include "params.h"

namespace flashattn::cpu {

inline int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace flashattn::cpu
