// How the work of a decode is divided.  A tile is some query rows of one KV head and sequence; its work are
// the keys that they see, counted in units.  Either a team of blocks has each tile, its units in equal
// numbers, and merges what they found (common/team.h); or the units of all tiles, one tile behind the other,
// are cut into equal shares, one a block, so that every block of a grid that fills the chip has as much to
// do, whatever the lengths (Osama et al., "Stream-K", 2023); or the keys of every tile are cut into p.splits
// parts.  A tile that shares or splits cut has its parts merged by their LSE in a kernel of its own.
// Everything follows from lengths that only the device knows.
#pragma once

#include "common/cache.cuh"
#include "common/divisor.h"
#include "common/mask.h"
#include "common/shared_memory.cuh"

namespace flashattn {

constexpr int kUnitKeys = 64;
constexpr unsigned kLeastUnits = 2;  // of a share: less costs more in the merge than it gains

// A tile whose parts must be merged, unless there are less than two of them.
struct alignas(16) Merge {
  int batch, head_k, row, column;  // its first row and column of V
  int parts;
  int64_t slot;  // of the first part
};

// A decode as its kernels get it.
struct Decode : DecodeParams {
  Divisor group;  // query heads of a KV head
  Divisor page_size;
  // If p.splits is 0: KV heads that are divided alike, each for blocks of its own, so that blocks side by
  // side read keys of all these heads from the same pages of memory; and the most shares of what they have.
  Divisor alike, shares;
  int window_left;            // that of the score, in 32 bits
  int most_tiles;             // of a sequence
  int chunks, chunk_columns;  // of V: a tile has some columns of it
  int64_t merges, slots;      // that the workspace has room for
  bool merge_by_tile;         // or by share: whichever are fewer
  int rows_of_merge;          // that a block of the merge takes at a time
  // Blocks that have a tile together and merge it themselves; 0: not so.
  Divisor team;
  bool cluster;          // they do through each other's shared memory, else the last one when all have ended
  int first_counter;     // of those that tell which is the last, one a tile
  bool known_places;     // where a block's keys lie is not read from memory
  Divisor tiles, slice;  // of a sequence; four numbers of a tile that a block of a cluster merges
  bool chunks_q, chunks_k, chunks_v;  // can be copied 16 bytes at a time
};

// A sequence of the batch, whose tiles have so many query rows.  Those of a KV head are (query, head of its
// group).
template <int tile_rows>
struct SequenceWork {
  int64_t q_first;
  int len_q, len_k;
  int first_key;  // that some query sees; all from there on are seen
  int tiles_of_head;
  unsigned units;  // of a tile, at least one, so that a block writes the rows that see nothing

  FLASHATTN_HD SequenceWork(const Decode& p, int64_t batch) {
    const Sequence q = sequence(p.seqlen_q, batch), k = sequence(p.seqlen_k, batch);
    q_first = q.first, len_q = static_cast<int>(q.length), len_k = static_cast<int>(k.length);
    first_key = p.window_left < 0 ? 0 : len_k - len_q - p.window_left;
    const int pad = static_cast<int>(first_unpadded(p, batch, k));
    first_key = first_key > pad ? first_key : pad;
    first_key = first_key < len_k ? first_key : len_k;
    tiles_of_head = (len_q * static_cast<int>(p.group.value) + tile_rows - 1) / tile_rows * p.chunks;
    units = (len_k + kUnitKeys - 1) / kUnitKeys - first_key / kUnitKeys;
    if (units == 0) units = 1;
  }

  // Of the heads that are not divided alike: all or one.
  FLASHATTN_HD unsigned all_units(const Decode& p) const {
    return (p.alike.value > 1 ? 1u : static_cast<unsigned>(p.heads_k)) * tiles_of_head * units;
  }
};

// Keys of a tile that one block goes through.
struct Part {
  int64_t batch, q_first;
  int head_k, row, column;  // the tile's first row and column of V
  int len_q, len_k;
  int first, last;  // keys
  int64_t slot;     // where its result waits for the merge; -1: it is all of the tile
};

template <int tile_rows>
__device__ inline Part part_of(const Decode& p, const SequenceWork<tile_rows>& work, int64_t batch,
                               int tile) {
  const int head_k = work.tiles_of_head == 1 ? tile : tile / work.tiles_of_head,
            of_head = tile - head_k * work.tiles_of_head, row = p.chunks == 1 ? of_head : of_head / p.chunks;
  return {batch,
          work.q_first,
          head_k,
          row * tile_rows,
          (of_head - row * p.chunks) * p.chunk_columns,
          work.len_q,
          work.len_k,
          0,
          0,
          -1};
}

// The part of a block whose team has a tile: of its units as many as the others, or one less or more.
template <int tile_rows>
class TeamPart {
 public:
  __device__ explicit TeamPart(const Decode& p) {
    const unsigned tile = p.team.divide(blockIdx.x), batch = p.tiles.divide(tile),
                   member = blockIdx.x - tile * p.team.value;
    const SequenceWork<tile_rows> work(p, batch);
    part_ = part_of(p, work, batch, static_cast<int>(tile - batch * p.tiles.value));
    const unsigned unit_0 = work.first_key / kUnitKeys;
    const auto key = [&](unsigned before) {
      return static_cast<int>(unit_0 + p.team.divide(before * work.units)) * kUnitKeys;
    };
    part_.first = max(key(member), work.first_key);
    part_.last = max(min(key(member + 1), work.len_k), part_.first);
    if (p.team.value > 1) part_.slot = blockIdx.x;
  }

  __device__ bool next(Part& part) const {
    part = part_;
    return true;
  }

 private:
  Part part_;
};

// Shares of `total` units that differ by one at most, the larger ones first.
struct Shares {
  unsigned count, units, larger;  // units of a share, and how many have one more

  FLASHATTN_HD Shares(unsigned total, const Divisor& most) {
    const bool full = total >= kLeastUnits * most.value;
    count = full ? most.value : total < kLeastUnits ? 1 : total / kLeastUnits;
    units = full ? most.divide(total) : total < kLeastUnits ? total : kLeastUnits;
    larger = total - units * count;
  }

  FLASHATTN_HD unsigned first(unsigned share) const {
    return share * units + (share < larger ? share : larger);
  }
  FLASHATTN_HD unsigned of(unsigned unit) const {
    const unsigned of_larger = larger * (units + 1);
    return unit < of_larger ? unit / (units + 1) : larger + (unit - of_larger) / units;
  }
};

// Where a unit lies: its sequence, and the units of those before.
struct UnitPlace {
  int64_t batch;
  unsigned before;
};

// Finds units among the sequences; all threads of a block take part, and share `scratch`.
template <int threads, int tile_rows>
class UnitFinder {
 public:
  static constexpr int kWarps = threads / 32, kScratchBytes = (kWarps + 2) * 8;

  __device__ UnitFinder(const Decode& p, int64_t* scratch)
      : p_(p), scratch_(scratch), equal_(!p.seqlen_k.used && !p.seqlen_q.cu && !p.cache.leftpad) {
    if (equal_ || p.batch == 1) {
      mine_ = units_of(0);
      total = mine_ * static_cast<unsigned>(p.batch);
      return;
    }
    const int64_t each = (p.batch + threads - 1) / threads;
    first_ = clamp(threadIdx.x * each, 0, p.batch);
    const int64_t last = clamp(first_ + each, 0, p.batch);
#pragma unroll 1
    for (int64_t b = first_; b < last; ++b) mine_ += units_of(b);
    unsigned up_to = mine_;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const unsigned other = __shfl_up_sync(0xFFFFFFFFu, up_to, lanes);
      if (lane >= lanes) up_to += other;
    }
    if (lane == 31) scratch_[warp] = up_to;
    __syncthreads();  // the sums of all warps are there
    before_ = up_to - mine_;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto sum = static_cast<unsigned>(scratch_[w]);
      if (w < warp) before_ += sum;
      total += sum;
    }
  }

  // Once only.
  __device__ UnitPlace find(unsigned unit) {
    if (p_.batch == 1) return {0, 0};
    if (equal_) return {unit / mine_, unit / mine_ * mine_};
    if (unit - before_ < mine_) {
      UnitPlace place{first_, before_};
#pragma unroll 1
      for (;; ++place.batch) {
        const unsigned units = units_of(place.batch);
        if (unit - place.before < units) break;
        place.before += units;
      }
      scratch_[kWarps] = place.batch, scratch_[kWarps + 1] = place.before;
    }
    __syncthreads();  // the thread that has the unit has told
    return {scratch_[kWarps], static_cast<unsigned>(scratch_[kWarps + 1])};
  }

  unsigned total = 0;

 private:
  __device__ unsigned units_of(int64_t batch) const {
    return SequenceWork<tile_rows>(p_, batch).all_units(p_);
  }

  const Decode& p_;
  int64_t* const scratch_;
  const bool equal_;
  int64_t first_ = 0;
  unsigned before_ = 0, mine_ = 0;  // of this thread's sequences, or of every sequence
};

// The parts that are this block's, one after the other.  The block that has the first part of a tile tells
// the merge about it, and every block about its share, if merges go by them.
template <int threads, int tile_rows>
class BlockParts {
 public:
  __device__ BlockParts(const Decode& p, Merge* merges, int64_t* scratch) : p_(p), merges_(merges) {
    if (p.splits > 0) {
      end_ = 1;
      return;
    }
    UnitFinder<threads, tile_rows> finder(p, scratch);
    shares_ = Shares(finder.total, p.shares);
    share_ = p.alike.divide(blockIdx.x), head_ = blockIdx.x - share_ * p.alike.value;
    if (finder.total > 0 && share_ < shares_.count) {
      unit_ = shares_.first(share_), end_ = shares_.first(share_ + 1);
      place_ = finder.find(unit_);
    }
    if (unit_ == end_ && !p.merge_by_tile) tell(blockIdx.x, {});
  }

  // False: there are no more.
  __device__ bool next(Part& part) {
    if (unit_ == end_) return false;
    return p_.splits > 0 ? only(part) : next_of_share(part);
  }

 private:
  using Work = SequenceWork<tile_rows>;

  __device__ void tell(int64_t index, const Merge& merge) const {
    if (threadIdx.x == 0 && index < p_.merges) merges_[index] = merge;
  }

  __device__ static Merge merge_of(const Part& part, int64_t parts, int64_t slot) {
    return {static_cast<int>(part.batch), part.head_k, part.row, part.column, static_cast<int>(parts), slot};
  }

  __device__ bool only(Part& part) {
    unit_ = end_;
    const int64_t place = block_index() / p_.splits, split = block_index() - place * p_.splits,
                  batch = place / p_.most_tiles;
    if (batch >= p_.batch) return false;
    const auto tile = static_cast<int>(place - batch * p_.most_tiles);
    const Work work(p_, batch);
    const bool exists = tile < work.tiles_of_head * p_.heads_k;
    if (!exists && split == 0) tell(place, {});
    const int64_t keys = p_.keys_per_split,
                  splits = clamp((work.len_k + keys - 1) / keys, 1, p_.splits);  // that hold keys
    if (!exists || split >= splits) return false;
    part = part_of(p_, work, batch, tile);
    part.first = static_cast<int>(clamp(split * keys, work.first_key, work.len_k));
    part.last = static_cast<int>(clamp((split + 1) * keys, part.first, work.len_k));
    if (splits > 1) part.slot = block_index();
    if (split == 0) tell(place, merge_of(part, splits, block_index()));
    return true;
  }

  // Of the two slots of a block the first one is for a tile that began in another share.
  __device__ bool next_of_share(Part& part) {
    for (;;) {
      const Work work(p_, place_.batch);
      const unsigned units = work.all_units(p_);
      if (unit_ - place_.before < units) {
        const unsigned in_line = (unit_ - place_.before) / work.units,
                       start = place_.before + in_line * work.units, behind = start + work.units,
                       stop = min(behind, end_), tile = head_ * work.tiles_of_head + in_line;
        const bool begins = unit_ == start, ends = stop == behind;
        part = part_of(p_, work, place_.batch, static_cast<int>(tile));
        const int unit_0 = work.first_key / kUnitKeys;
        part.first = max(static_cast<int>(unit_0 + unit_ - start) * kUnitKeys, work.first_key);
        part.last = min(static_cast<int>(unit_0 + stop - start) * kUnitKeys, work.len_k);
        if (!begins || !ends) part.slot = 2 * blockIdx.x + begins;
        if (p_.merge_by_tile ? begins : stop == end_) {
          const unsigned parts = begins && !ends ? shares_.of(behind - 1) - share_ + 1 : 0;
          tell(p_.merge_by_tile ? place_.batch * p_.most_tiles + tile : blockIdx.x,
               merge_of(part, parts, part.slot));
        }
        unit_ = stop;
        return true;
      }
      place_ = {place_.batch + 1, place_.before + units};
    }
  }

  const Decode& p_;
  Merge* const merges_;
  Shares shares_{1, Divisor(1)};
  unsigned share_ = 0, head_ = 0;  // of the heads that are divided alike
  unsigned unit_ = 0, end_ = 0;
  UnitPlace place_{0, 0};
};

// Where a part leaves its result: in the next block's first slot, or split by split.
FLASHATTN_HD int64_t slot_of(const Decode& p, const Merge& merge, int part) {
  return merge.slot + (p.splits > 0 ? part : part == 0 ? 0 : 2 * part * static_cast<int>(p.alike.value) - 1);
}

}  // namespace flashattn
