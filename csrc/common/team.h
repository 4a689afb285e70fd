// How many blocks of a decode have a tile together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashattn {

constexpr int kMostTeam = 32, kMostCluster = 8;  // blocks that have a tile together, and in a cluster

// How many blocks have each of so many tiles together, whose keys are so many units at most; 0: equal shares
// of everything are better.  Where lengths may differ, blocks may have as many units as one multiprocessor
// reads alone in about the time that a division on the device and a merge take.  A cluster merges faster, but
// not every multiprocessor has a place in one of many blocks.
struct TeamSize {
  int blocks;
  bool cluster;
};
inline TeamSize team_size(int64_t tiles, int64_t units, bool equal, int processors, int resident,
                          int capability) {
  constexpr int64_t kStepUnits = 2, kFewUnits = 8, kUnequalUnits = 32, kLongTile = 16;
  const auto most = [&](int64_t blocks) {
    return std::min({processors / tiles, blocks, (units + kStepUnits - 1) / kStepUnits});
  };
  if (tiles == 0) return {0, false};
  if (tiles > processors) {  // whole tiles, unless they leave many places empty at the end
    const int64_t places = int64_t{processors} * resident, waves = (tiles + places - 1) / places;
    return {equal && units >= kLongTile && 10 * tiles >= 9 * waves * places, false};
  }
  const bool clusters = capability >= 90 && capability < 120;  // not tried on smaller chips
  const int64_t together = most(kMostCluster), blocks = most(kMostTeam);
  if (clusters && together > 1 && units <= kFewUnits * together) return {static_cast<int>(together), true};
  const bool fills = 4 * tiles * blocks >= 3 * processors;
  if (units > kFewUnits * blocks && !(fills && (equal || units <= kUnequalUnits * blocks))) return {0, false};
  return {static_cast<int>(blocks), clusters && blocks == 2};
}

}  // namespace flashattn
