// Which tile of which head a block works on.
#pragma once

#include "common/host_device.h"
#include "params.h"

namespace flashattn {

// How many of so many query heads of a KV head may lie in one tile: a power of two, and what a warpgroup has
// rows for.
FLASHATTN_HD int64_t neighbours_in_tile(int64_t group) {
  const int64_t most = group & -group;
  return most < 64 ? most : 64;
}

// Tiles of every head, a section of heads at a time: sections are small enough that what their heads read
// stays in the L2 cache, and large enough to occupy the chip.  Within a section tile 0 of all heads comes
// first, so that under a causal mask, where tile 0 is the longest, short tiles fill the gaps at the end.
struct TileOrder {
  int64_t tiles_of_head, heads, section;

  FLASHATTN_HD TileOrder(int64_t tiles, int64_t heads_)
      : tiles_of_head(tiles), heads(heads_), section((kSectionTiles + tiles - 1) / (tiles > 0 ? tiles : 1)) {}

  FLASHATTN_HD int64_t count() const { return tiles_of_head * heads; }

  struct Place {
    int64_t head, tile;
  };

  FLASHATTN_HD Place place(int64_t index) const {
    const int64_t first = index / (section * tiles_of_head) * section;
    const int64_t members = heads - first < section ? heads - first : section;
    const int64_t rest = index - first * tiles_of_head;
    return {first + rest % members, rest / members};
  }

 private:
  static constexpr int64_t kSectionTiles = 1024;  // about four for each place on a large chip
};

}  // namespace flashattn
