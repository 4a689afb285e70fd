// Which tile a block works on next, and which keys the tile needs.
#pragma once

#include <climits>

#include "common/divisor.h"
#include "common/score.cuh"

namespace flashattn::sm90 {

// A tile of kRows rows: queries of one head, or of 2^group query heads that share a KV head, those of one
// query next to each other.  A unit is such a group of heads.
struct Work {
  int row, unit, batch;              // the first row of the tile; batch -1: nothing is left
  int q_first, q_allotted, k_first;  // of the sequence in its tensor
  int first_block, blocks;           // blocks of keys that some row of the tile sees
  VisibleKeys visible;

  __device__ int last_block() const { return first_block + blocks - 1; }
};
static_assert(sizeof(Work) == 48, "three vectors");

// What a warpgroup needs of it: of the blocks those from first_block to last_block, none if they are the
// wrong way round.  All of its rows see the keys of [seen_first, seen_last).
struct Share {
  int first_block, last_block, seen_first, seen_last;
};

// The query of a row of a unit.  Rows past the end of the sequence are computed like its last, and not
// stored.
__device__ inline int query_of(int row, int group, const VisibleKeys& visible) {
  return min(row >> group, visible.len_q - 1);
}

template <class C>
__device__ inline Share share_of(const Work& work, int warpgroup, int group) {
  const int first = query_of(work.row + warpgroup * 64, group, work.visible),
            last = query_of(work.row + warpgroup * 64 + 63, group, work.visible);
  const VisibleKeys& visible = work.visible;
  const int first_key = visible.first(first), last_key = visible.last(last);
  const bool any = work.blocks > 0 && first_key < last_key;
  return {any ? first_key / C::kKeys : INT_MAX, any ? (last_key - 1) / C::kKeys : -1, visible.first(last),
          visible.last(first)};
}

// The order of a launch's tiles.
struct Schedule {
  int group;           // log2 of the query heads in a tile
  Divisor units;       // heads_q >> group
  Divisor units_of_k;  // that share a KV head
  int blocks;          // of the launch
  int ticket;          // which counter hands out tiles; -1: a block takes every blocks-th
  // When all sequences have the same lengths, otherwise tiles is 0:
  int tiles, tiles_of_unit, all_units;
  Divisor section, tiles_of_section;  // units whose tiles are mixed, see common/scheduler.h
  VisibleKeys visible;
};

// Counters that hand out tiles.  At rest each is zero: the last block of a launch sets it back.
constexpr int kTickets = 1 << 14;
static __device__ unsigned ticket_counters[kTickets];

// Walks over the tiles of a launch; a whole warp calls it.
template <class C>
class Tiles {
 public:
  __device__ Tiles(const ForwardParams& p, const Schedule& schedule, int lane)
      : p_(p), schedule_(schedule), lane_(lane), index_(blockIdx.x) {}

  // Asks for the next tile's number, which `next` then waits for.
  __device__ void request() {
    if (schedule_.ticket >= 0 && lane_ == 0) answer_ = ptx::atom_add(&ticket_counters[schedule_.ticket], 1);
  }

  __device__ void next() {
    if (schedule_.ticket < 0) {
      index_ += schedule_.blocks;
      return;
    }
    answer_ = __shfl_sync(0xFFFFFFFFu, answer_, 0);
    index_ = schedule_.blocks + answer_;
  }

  __device__ Work work() { return schedule_.tiles ? even() : ragged(); }

  // After the last tile.  Whoever got the last number sets the counter back: blocks ask once for each of
  // their tiles.
  __device__ void finish() const {
    const int tiles = schedule_.tiles ? schedule_.tiles : start_;
    if (schedule_.ticket >= 0 && lane_ == 0 && static_cast<int>(answer_) == tiles - 1)
      ticket_counters[schedule_.ticket] = 0;
  }

 private:
  // A sequence in 32 bits.
  struct Span {
    int first, length, allotted;
    __device__ Span(const Lengths& lengths, int batch) {
      const Sequence x = sequence(lengths, batch);
      first = static_cast<int>(x.first), length = static_cast<int>(x.length);
      allotted = static_cast<int>(x.allotted);
    }
  };

  __device__ int tiles_of(int rows) const {
    return static_cast<int>(((static_cast<unsigned>(rows) << schedule_.group) + C::kRows - 1) / C::kRows);
  }

  __device__ static Work nothing() {
    Work work;
    work.batch = -1;
    return work;
  }

  __device__ Work describe(int tile, int unit, int batch, int q_first, int q_allotted, int k_first,
                           const VisibleKeys& visible) const {
    Work work;
    work.row = tile * C::kRows;
    work.unit = unit;
    work.batch = batch;
    work.q_first = q_first;
    work.q_allotted = q_allotted;
    work.k_first = k_first;
    work.visible = visible;
    const int first_query = work.row >> schedule_.group,
              last_query = query_of(work.row + C::kRows - 1, schedule_.group, visible);
    const int first = visible.first(first_query), last = visible.last(last_query);
    work.first_block = first / C::kKeys;
    work.blocks =
        first_query <= last_query && first < last ? (last - 1) / C::kKeys - work.first_block + 1 : 0;
    return work;
  }

  __device__ Work even() const {
    if (index_ >= schedule_.tiles) return nothing();
    const unsigned section = schedule_.tiles_of_section.divide(index_),
                   first = section * schedule_.section.value,
                   members = min(schedule_.section.value, schedule_.all_units - first),
                   rest = index_ - section * schedule_.tiles_of_section.value;
    const unsigned tile =
        members == schedule_.section.value ? schedule_.section.divide(rest) : rest / members;
    const unsigned place = first + rest - tile * members, batch = schedule_.units.divide(place);
    return describe(schedule_.tiles_of_unit - 1 - tile,  // the longest when causal first
                    place - batch * schedule_.units.value, batch, 0, schedule_.visible.len_q, 0,
                    schedule_.visible);
  }

  // Sequences of different lengths, 32 at a time: batches base_ to base_ + 31 start at tile start_.
  __device__ Work ragged() {
    const int units = schedule_.units.value;
    for (; base_ < p_.batch; base_ += 32) {
      const int tiles = base_ + lane_ < p_.batch ? tiles_of(Span(p_.seqlen_q, base_ + lane_).allotted) : 0;
      int end = tiles * units;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xFFFFFFFFu, end, step);
        if (lane_ >= step) end += before;
      }
      const unsigned after = __ballot_sync(0xFFFFFFFFu, index_ < start_ + end);
      if (after) {
        const int owner = __ffs(static_cast<int>(after)) - 1, batch = base_ + owner;
        const int tiles_here = __shfl_sync(0xFFFFFFFFu, tiles, owner);
        const int rest = index_ - start_ - __shfl_sync(0xFFFFFFFFu, end, owner) + tiles_here * units;
        const int tile = static_cast<int>(schedule_.units.divide(rest));
        const Span q(p_.seqlen_q, batch), k(p_.seqlen_k, batch);
        return describe(tiles_here - 1 - tile, rest - tile * units, batch, q.first, q.allotted, k.first,
                        {q.length, k.length, p_.score.window_left, p_.score.window_right});
      }
      start_ += __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    return nothing();
  }

  const ForwardParams& p_;
  const Schedule& schedule_;
  const int lane_;
  int index_, base_ = 0, start_ = 0;
  unsigned answer_ = 0;
};

}  // namespace flashattn::sm90
