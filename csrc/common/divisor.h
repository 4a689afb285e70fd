// Division without a division.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flashattn {

// Division by a number that the host knows, of dividends below 2^31 (Granlund and Montgomery, "Division by
// invariant integers using multiplication", 1994).
struct Divisor {
  unsigned value, factor, shift;

  Divisor() = default;
  FLASHATTN_HD explicit Divisor(unsigned divisor) : value(divisor), factor(0), shift(0) {
    while (1u << shift < divisor) ++shift;
    factor = static_cast<unsigned>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  FLASHATTN_HD unsigned divide(unsigned x) const {
    return (static_cast<unsigned>(uint64_t{factor} * x >> 32) + x) >> shift;
  }
};

}  // namespace flashattn
