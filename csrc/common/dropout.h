// Dropout by position: the mask depends on (seed, batch, query head, row, column) alone, so every tile shape
// and every backend draws the same one.  Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", 2011.
#pragma once

#include "common/host_device.h"
#include "params.h"

namespace flashattn {

constexpr uint32_t kDropoutRange = 65536;  // 16-bit numbers
constexpr int kDropoutColumns = 8;         // of one Philox call

struct Philox {
  uint32_t word[4];
};

FLASHATTN_HD Philox philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Is column 8 * (column / 8) + e kept, given the eight numbers of that column group?
FLASHATTN_HD bool dropout_keeps(const Philox& numbers, int e, uint32_t keep_below) {
  return ((numbers.word[e / 2] >> (16 * (e % 2))) & 0xFFFF) < keep_below;
}

}  // namespace flashattn
