// What the warpgroups of a backward on Hopper work with: shared memory, the warp that fills it, sums of dQ,
// stores of dK and dV.
#pragma once

#include "any/backward_rows.cuh"
#include "sm90/schedule.cuh"
#include "sm90/wgmma.cuh"

namespace flashattn::sm90 {

// Which keys of which KV head a block owns: TileOrder (common/scheduler.h), divided by numbers that the host
// knows.  The first keys of a head, which most queries see when causal, come first.
struct KeyOrder {
  Divisor section, tiles_of_section;  // KV heads whose tiles are mixed
  Divisor heads;                      // of a sequence
  int last_section, all_heads;        // the last section has the heads that are left, too
  int group;                          // query heads of a KV head

  struct Place {
    int head, tile;
  };
  __device__ Place place(unsigned block) const {
    const unsigned last = last_section, index = min(tiles_of_section.divide(block), last),
                   first = index * section.value, members = index < last ? section.value : all_heads - first,
                   rest = block - index * tiles_of_section.value;
    const unsigned tile = members == section.value ? section.divide(rest) : rest / members;
    return {static_cast<int>(first + rest - tile * members), static_cast<int>(tile)};
  }
};

// How dQ comes about: blocks add to sums, as they come or in a fixed order, or one block computes it.
enum class Queries { added, added_in_turn, stored };

struct Backward {
  CUtensorMap q, dout, k, v, dk, dv;  // as in Forward
  BackwardParams p;
  KeyOrder order;
  Queries queries;
  // Of general rows, in log2 units: 2x of the softcap's tanh x is cap_factor times a product, a logit is
  // logit_factor times tanh x.  Without a softcap largest_tanh is 0, not 1, and a logit is of a product.
  float cap_factor, largest_tanh, logit_factor;
};

// What a block works on.
struct KeyBlock {
  VisibleKeys visible;
  RowRange rows, whole;  // that see a key of the block, that see all of them
  int key, k_first, k_allotted, head_k, batch;
  int q_first, first_head, first_row, steps;  // steps: tiles of queries of all heads; -1: nothing is left
};

// A tile of queries of one head.
struct Step {
  void* dq;            // where sums of the tile begin, or where it is stored
  int row, rows_left;  // the tile's first row, and how many count from there on
  bool edge;           // is there a row that does not see all keys?
};
struct SlopedStep : Step {
  float slope;  // -slope of ALiBi in log2 units
};

// Which tile of queries comes in a step, and of which head of the group.  Tile after tile of a head; but the
// last tile first, of all heads, when blocks add in turn (docs/sm90_backward.md).
template <int rows>
struct StepPlace {
  bool in_turn;
  int row, head = 0;

  __device__ StepPlace(const Backward& f, const KeyBlock& block)
      : in_turn(f.queries == Queries::added_in_turn),
        row(in_turn ? (block.rows.last - 1) / rows * rows : block.first_row) {}
  __device__ void advance(const Backward& f, const KeyBlock& block) {
    if (in_turn) {
      if (++head == f.order.group) head = 0, row -= rows;
    } else if ((row += rows) >= block.rows.last) {
      row = block.first_row, ++head;
    }
  }
};

// Statistics of 16 rows: those of lse, then those of delta, each in the order in which the four lanes of a
// quad hold the columns of a transposed score tile.
struct StatisticsInQuads {
  static constexpr int kBytes = 16 * sizeof(float2), kDelta = kBytes / 2;
  __device__ static int slot(int row) { return row % 8 / 2 * 4 + row / 8 * 2 + row % 2; }
  __device__ static void store(float2* block, int row, float2 x) {
    float* to = reinterpret_cast<float*>(block) + slot(row);
    to[0] = x.x, to[kDelta / 4] = x.y;
  }
};

// Shared memory of a block: tiles, then what describes them, then the barriers that say who may touch them.
// dK and dV take the places of K and V.
template <class C>
struct BackwardShared {
  using Q = SlabTile<C::kRows, C::kHeadDim>;
  using DOut = SlabTile<C::kRows, C::kHeadDimV>;
  using K = SlabTile<C::kKeys, C::kHeadDim>;
  using V = SlabTile<C::kKeys, C::kHeadDimV>;
  using DS = SlabTile<C::kRows, C::kKeys>;
  using Slab = SlabTile<C::kKeys, 64>;
  using OwnStep = std::conditional_t<C::kGeneral, SlopedStep, Step>;
  static constexpr bool kSplitKeys = C::kKeys == 128;  // or warpgroups differ in what they multiply
  static_assert(kSplitKeys ? C::kRows == 64 || C::kRows == 128 : C::kKeys == 64 && C::kRows == 64, "");
  static constexpr int kWarpgroups = 2, kThreads = (kWarpgroups + 1) * 128, kWarps = 4 * kWarpgroups;
  static constexpr int kAlignment = 1024, kScoreStages = 2, kTurnStages = 2, kSteps = 6;
  // Queries whose scores a warpgroup has at once: half a tile, if dK and dV leave no registers for more.
  static constexpr int kScoreRows = kSplitKeys && C::kHeadDim + C::kHeadDimV > 256 ? 32 : C::kRows,
                       kHalves = C::kRows / kScoreRows;
  // dQ of a warpgroup: 64 rows and all columns, or all rows and half the columns, 32 at a time if a step has
  // halves, or, when one computes all, 64 columns at a time.
  static constexpr bool kSplitRows = C::kRows == 128;
  static constexpr int kOwnColumns = kSplitKeys && !kSplitRows ? C::kHeadDim / 2 : C::kHeadDim,
                       kQueryColumns = !kSplitKeys    ? 64
                                       : kHalves == 2 ? 32
                                                      : kOwnColumns,
                       kQueryParts = kOwnColumns / kQueryColumns;
  __device__ static int first_column(int warpgroup, int part) {  // of a part of a warpgroup's dQ
    return (kSplitRows ? 0 : warpgroup * kOwnColumns) + part * kQueryColumns;
  }
  // Warps that write dS, and that add dQ.
  static constexpr int kScoreWarps = kSplitKeys ? kWarps : 4, kSumWarps = kScoreWarps,
                       kSumWarpgroups = kSumWarps / 4;
  static_assert(kSplitKeys || !C::kBulkSums, "there is no place for a warp's sums");
  static constexpr int kSumBytes = C::kBulkSums ? kQueryColumns / 8 * 512 : 0;  // of a warp
  // The second half of K's columns begins within a slab: it is there once more, in a slab of its own.
  static constexpr bool kShiftedSlab = kSplitKeys && !kSplitRows && kHalves == 1 && C::kHeadDim / 2 % 64 != 0;
  static constexpr int kStatisticsBytes = C::kRows * static_cast<int>(sizeof(float2));
  static constexpr int kShiftedPlace = K::kBytes, kValuePlace = kShiftedPlace + kShiftedSlab * Slab::kBytes;
  static constexpr int kQueryPlace = kValuePlace + V::kBytes,
                       kDOutPlace = kQueryPlace + C::kQueryStages * Q::kBytes,
                       kScorePlace = kDOutPlace + C::kDOutStages * DOut::kBytes,
                       kSumPlace = kScorePlace + kScoreStages * DS::kBytes,
                       kStatisticsPlace = kSumPlace + kWarps * kSumBytes,
                       kStepPlace = kStatisticsPlace + C::kQueryStages * kStatisticsBytes,
                       kBlockPlace = kStepPlace + kSteps * static_cast<int>(sizeof(OwnStep));
  static constexpr int kBarrierPlace = kBlockPlace + (static_cast<int>(sizeof(KeyBlock)) + 7) / 8 * 8;
  static constexpr int kBarriers = 4 + 2 * (C::kQueryStages + C::kDOutStages + kScoreStages + kTurnStages);
  static constexpr int kBytes = kAlignment + kBarrierPlace + kBarriers * 8;

  uint32_t padding = -ptx::shared_address(shared_memory) % kAlignment,
           base = ptx::shared_address(shared_memory) + padding;

  __device__ K k() const { return {base}; }
  __device__ Slab k_columns(int first) const {  // those of a part of dQ
    if (kShiftedSlab) return {base + (first == 0 ? 0 : kShiftedPlace)};
    return {base + first / 64 * K::kSlabBytes + (kQueryColumns < 64 ? first % 64 * 2 : 0)};
  }
  __device__ V v() const { return {base + kValuePlace}; }
  __device__ Q q(int stage) const { return {base + kQueryPlace + stage * Q::kBytes}; }
  __device__ DOut dout(int stage) const { return {base + kDOutPlace + stage * DOut::kBytes}; }
  __device__ DS ds(int stage) const { return {base + kScorePlace + stage * DS::kBytes}; }
  __device__ uint32_t sums(int warp) const { return base + kSumPlace + warp * kSumBytes; }
  __device__ uint32_t statistics(int stage) const {
    return base + kStatisticsPlace + stage * kStatisticsBytes;
  }
  __device__ KeyBlock& block() const {
    return *reinterpret_cast<KeyBlock*>(shared_memory + padding + kBlockPlace);
  }
  // Described while the copies of Q are in flight, read until dQ of the step has been added: two steps later.
  static_assert(kSteps >= C::kQueryStages + 2);
  __device__ OwnStep& step(int step) const {
    return reinterpret_cast<OwnStep*>(shared_memory + padding + kStepPlace)[step % kSteps];
  }

  // full: the copy engine has filled the tile, or the warps have written dS.
  // empty: the warps are done with it.
  // turn: that of a step has come, and those who add know it.
  __device__ uint32_t k_full() const { return barrier(0); }
  __device__ uint32_t v_full() const { return barrier(1); }
  __device__ uint32_t landed() const { return barrier(2); }     // what the producer changes before it is full
  __device__ uint32_t keys_read() const { return barrier(3); }  // K and V, by all warps
  __device__ uint32_t q_full(int stage) const { return barrier(4 + stage); }
  __device__ uint32_t dout_full(int stage) const { return barrier(4 + C::kQueryStages + stage); }
  __device__ uint32_t ds_full(int stage) const {
    return barrier(4 + C::kQueryStages + C::kDOutStages + stage);
  }
  __device__ uint32_t turn_full(int stage) const {
    return barrier(4 + C::kQueryStages + C::kDOutStages + kScoreStages + stage);
  }
  __device__ uint32_t q_empty(int stage) const { return q_full(stage) + kEmpty; }
  __device__ uint32_t dout_empty(int stage) const { return dout_full(stage) + kEmpty; }
  __device__ uint32_t ds_empty(int stage) const { return ds_full(stage) + kEmpty; }
  __device__ uint32_t turn_empty(int stage) const { return turn_full(stage) + kEmpty; }

  __device__ void init_barriers() const {
    ptx::mbarrier_init(k_full(), 1), ptx::mbarrier_init(v_full(), 1), ptx::mbarrier_init(landed(), 1);
    ptx::mbarrier_init(keys_read(), kWarps);
    for (int i = 0; i < C::kQueryStages; ++i)
      ptx::mbarrier_init(q_full(i), 1), ptx::mbarrier_init(q_empty(i), kWarps);
    for (int i = 0; i < C::kDOutStages; ++i)
      ptx::mbarrier_init(dout_full(i), 1), ptx::mbarrier_init(dout_empty(i), kWarps);
    for (int i = 0; i < kScoreStages; ++i)
      ptx::mbarrier_init(ds_full(i), kScoreWarps), ptx::mbarrier_init(ds_empty(i), kSumWarps);
    for (int i = 0; i < kTurnStages; ++i)
      ptx::mbarrier_init(turn_full(i), 1), ptx::mbarrier_init(turn_empty(i), kSumWarpgroups);
    ptx::fence_mbarrier_init();
  }

 private:
  static constexpr int kEmpty = (C::kQueryStages + C::kDOutStages + kScoreStages + kTurnStages) * 8;
  __device__ uint32_t barrier(int index) const { return base + kBarrierPlace + index * 8; }
};

constexpr uint32_t kInfinityBits = 0x7F800000;
// Named barriers beside those of the forward.  When another warp adds or stores
// dQ, of that warp and a warpgroup (+ warpgroup):
constexpr int kMayAddBarrier = 8;  // the warpgroup may write dQ of a step to shared memory, or add it
constexpr int kSumsBarrier = 10;   // it has done so
constexpr int kKeptThreads = 160;

template <class C>
__device__ inline KeyBlock key_block(const BackwardParams& p, const KeyOrder& order) {
  const KeyOrder::Place place = order.place(blockIdx.x);
  const int batch = static_cast<int>(order.heads.divide(place.head)),
            head_k = place.head - batch * static_cast<int>(order.heads.value);
  const Sequence q = sequence(p.seqlen_q, batch), k = sequence(p.seqlen_k, batch);
  KeyBlock block;
  block.visible = {q.length, k.length, p.score.window_left, p.score.window_right};
  block.key = place.tile * C::kKeys;
  block.rows = block.visible.rows(block.key, block.key + C::kKeys);
  block.whole = block.visible.rows_of_all(block.key, block.key + C::kKeys);
  block.k_first = static_cast<int>(k.first), block.k_allotted = static_cast<int>(k.allotted);
  block.q_first = static_cast<int>(q.first);
  block.head_k = head_k, block.batch = batch, block.first_head = head_k * order.group;
  block.first_row = block.rows.first / C::kRows * C::kRows;
  const int tiles =
      block.rows.first < block.rows.last ? (block.rows.last - block.first_row + C::kRows - 1) / C::kRows : 0;
  block.steps = block.key < block.k_allotted ? tiles * order.group : -1;
  return block;
}

// Stage and parity of step `step` in a ring.
template <int stages>
__device__ inline Ring<stages> ring_at(int step) {
  return {step % stages, static_cast<uint32_t>(step / stages) & 1};
}

// Of a warp.
__device__ inline void arrive_once(uint32_t barrier, int lane) {
  if (lane == 0) ptx::mbarrier_arrive(barrier);
}

// Rows of a tile outside [first, last) become zeros.  A warp does it, and wgmma sees them when the warp has
// arrived at a barrier afterwards.
template <int rows, class T>
__device__ inline void clear_rows_outside(const T& tile, int first, int last, int lane) {
#pragma unroll 1
  for (int row = 0; row < rows; ++row)
    if ((row < first || row >= last) && lane < 8)
#pragma unroll
      for (int slab = 0; slab < T::kSlabs; ++slab)
        ptx::st_shared_16(tile.base + slab * T::kSlabBytes + row * 128 + lane * 16, uint4{0, 0, 0, 0});
  ptx::fence_proxy_async();
  __syncwarp();
}

// What one warp does: loads the keys and values of the block, then tile after tile of Q, with what is known
// of its rows, and dO.  What lies outside the rows that count may be anything, and 0 * NaN is NaN: it becomes
// zeros, with statistics that make weights 0.
template <class C>
__device__ inline void produce_tiles(const Backward& f, const BackwardShared<C>& shared, int lane) {
  using Shared = BackwardShared<C>;
  const BackwardParams& p = f.p;
  const KeyBlock& block = shared.block();
  uint32_t landed = 0;  // parity
  // Where copies arrive that leave rows to be cleared, and what follows them.
  const auto barrier_of = [&](bool cut, uint32_t full) { return cut ? shared.landed() : full; };
  const auto wait_for_landing = [&] {
    ptx::mbarrier_wait(shared.landed(), landed);
    landed ^= 1;
  };
  const auto fill = [&](uint32_t full) { arrive_once(full, lane); };

  const int key_batch = p.seqlen_k.cu ? 0 : block.batch, row_batch = p.seqlen_q.cu ? 0 : block.batch;
  const int first_key = block.visible.first(0) - block.key,
            last_key = block.visible.last(block.visible.len_q - 1) - block.key;  // that any query sees
  const bool keys_cut = first_key > 0 || last_key < C::kKeys;
  const auto load_keys = [&] {
    const uint32_t barrier = barrier_of(keys_cut, shared.k_full());
    if (lane == 0) {
      if constexpr (Shared::kShiftedSlab) {
        const typename Shared::Slab slab = shared.k_columns(C::kHeadDim / 2);
        ptx::mbarrier_expect_tx(barrier, Shared::Slab::kBytes);
        ptx::cp_async_bulk_tensor_load(slab.base, &f.k, barrier, ptx::kEvictFirst, C::kHeadDim / 2, 0,
                                       block.k_first + block.key, block.head_k, key_batch);
      }
      load_tile(shared.k(), f.k, barrier, ptx::kEvictFirst, block.k_first + block.key, block.head_k,
                key_batch);
    }
    if (!keys_cut) return;
    wait_for_landing();
    if constexpr (Shared::kShiftedSlab)
      clear_rows_outside<C::kKeys>(shared.k_columns(C::kHeadDim / 2), first_key, last_key, lane);
    clear_rows_outside<C::kKeys>(shared.k(), first_key, last_key, lane);
    fill(shared.k_full());
  };
  const auto load_values = [&] {
    if (lane == 0)
      load_tile(shared.v(), f.v, barrier_of(keys_cut, shared.v_full()), ptx::kEvictFirst,
                block.k_first + block.key, block.head_k, key_batch);
    if (!keys_cut) return;
    wait_for_landing();
    clear_rows_outside<C::kKeys>(shared.v(), first_key, last_key, lane);
    fill(shared.v_full());
  };

  load_keys();
  StepPlace<C::kRows> place(f, block);
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step, place.advance(f, block)) {
    const int row = place.row, head = block.first_head + place.head;
    const int first = block.rows.first - row, last = block.rows.last - row;  // that count
    const bool cut = first > 0 || last < C::kRows;
    const auto q = ring_at<C::kQueryStages>(step);
    ptx::mbarrier_wait(shared.q_empty(q.stage), q.parity ^ 1);
    if (lane == 0) {
      const BackwardWorkspace<C> workspace(p);
      const int64_t start = workspace.start(p, block.batch, head, block.q_first) + row / 16;
      void* dq = workspace.sums + start * workspace.kColumnBlocks * workspace.kBlock;
      if (C::kBulkSums && f.queries == Queries::stored)
        dq = static_cast<uint16_t*>(p.dq.data) + block.batch * p.dq.batch + head * p.dq.head + row * p.dq.row;
      static_cast<Step&>(shared.step(step)) = {dq, row, last,
                                               row < block.whole.first || row + C::kRows > block.whole.last};
      if constexpr (C::kGeneral) {
        const PerHead& alibi = p.score.alibi;
        shared.step(step).slope =
            alibi.data
                ? -kLog2E * load_number(alibi.data, DType::f32, block.batch * alibi.batch + head * alibi.head)
                : 0.f;
      }
      const uint32_t barrier = barrier_of(cut, shared.q_full(q.stage)),
                     bytes = (min(last, C::kRows) + 15) / 16 * 16 * sizeof(float2);
      ptx::mbarrier_expect_tx(barrier, bytes);
      ptx::cp_async_bulk_load(shared.statistics(q.stage), workspace.statistics + start * 16, bytes, barrier);
      load_tile(shared.q(q.stage), f.q, barrier, ptx::kEvictLast, block.q_first + row, head, row_batch);
    }
    if (cut) {
      wait_for_landing();
      for (int i = lane; i < C::kRows; i += 32) {
        const uint32_t to = shared.statistics(q.stage) + i / 16 * StatisticsInQuads::kBytes +
                            StatisticsInQuads::slot(i % 16) * 4;
        if (i >= first && i < last) continue;
        ptx::st_shared_4(to, kInfinityBits);
        ptx::st_shared_4(to + StatisticsInQuads::kDelta, 0);
      }
      clear_rows_outside<C::kRows>(shared.q(q.stage), first, last, lane);
      fill(shared.q_full(q.stage));
    }
    if (step == 0) load_values();
    const auto dout = ring_at<C::kDOutStages>(step);
    ptx::mbarrier_wait(shared.dout_empty(dout.stage), dout.parity ^ 1);
    if (lane == 0)
      load_tile(shared.dout(dout.stage), f.dout, barrier_of(cut, shared.dout_full(dout.stage)),
                ptx::kEvictLast, block.q_first + row, head, row_batch);
    if (cut) {
      wait_for_landing();
      clear_rows_outside<C::kRows>(shared.dout(dout.stage), first, last, lane);
      fill(shared.dout_full(dout.stage));
    }
  }
}

// Scores of queries that do not see the lane's keys, `key` and the eighth after it, become -inf.
template <int n>
__device__ inline void hide_queries(float (&s)[n], const VisibleKeys& visible, int key, int row, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowRange seen = visible.rows(key + 8 * half, key + 8 * half + 1);
    const int first = seen.first - row - lane % 4 * 2;
    const unsigned count = seen.last - seen.first;
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[4 * j + 2 * half + i];
        x = static_cast<unsigned>(8 * j + i - first) < count ? x : -INFINITY;
      }
  }
}

// Where the statistics lie of the queries of a step from the row-th on.
template <class C>
__device__ inline uint32_t statistics_from(const BackwardShared<C>& shared, int step, int row) {
  return shared.statistics(ring_at<C::kQueryStages>(step).stage) + row / 16 * StatisticsInQuads::kBytes;
}

// Calls f(e, statistic of the query) for each element e of a lane; `statistics` are those of lse or of delta.
template <int n, class F>
__device__ inline void each_score(uint32_t statistics, int lane, F f) {
  const uint32_t from = statistics + lane % 4 * sizeof(float4);
  float4 next = ptx::ld_shared_f32x4(from);
#pragma unroll
  for (int block = 0; block < n / 8; ++block) {
    const float4 now = next;
    if ((block + 1) * 8 < n)  // in time
      next = ptx::ld_shared_f32x4(from + (block + 1) * StatisticsInQuads::kBytes);
#pragma unroll
    for (int e = 0; e < 8; e += 4)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f(block * 8 + e + 2 * half, e ? now.z : now.x);
        f(block * 8 + e + 2 * half + 1, e ? now.w : now.y);
      }
  }
}

// The same tile, whose descriptors are then computed where they are needed: they would occupy registers.
template <class T>
__device__ inline T recomputed(const T& tile) {
  return {static_cast<uint32_t>(ptx::recomputed(tile.base))};
}

template <int n>
__device__ inline void clear(float (&x)[n]) {
#pragma unroll
  for (int e = 0; e < n; ++e) x[e] = 0;
}

// Numbers of an accumulator, rounded: the A operand of the next product.
template <class C, int n>
__device__ inline void round_operand(uint32_t (&to)[n / 8][4], const float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) to[i / 4][i % 4] = ptx::cvt_pack<C::kDType>(x[2 * i], x[2 * i + 1]);
}

// Scores of the queries of a step from the row-th on become weights.  In a general row s has them times the
// derivative of the softcap, as dS wants them, which needs no registers of its own, and p has them rounded.
template <class C, int n>
__device__ inline void weigh(uint32_t (&p)[n / 8][4], float (&s)[n], const Backward& f,
                             const BackwardShared<C>& shared, int step, int row, int key, float scale,
                             int lane) {
  if (C::kGeneral && f.largest_tanh > 0)  // tanh, as in ScoreRows::modify
#pragma unroll
    for (int e = 0; e < n; ++e) s[e] = 1 - 2 * ptx::rcp(1 + ptx::ex2(s[e] * f.cap_factor));
  const auto& of_step = shared.step(step);
  const KeyBlock& block = shared.block();
  if (of_step.edge) hide_queries(s, block.visible, block.key + key, of_step.row + row, lane);
  const uint32_t statistics = statistics_from(shared, step, row);
  if constexpr (C::kGeneral) {
    const auto distance = static_cast<float>(of_step.row + row + lane % 4 * 2 + block.visible.len_k -
                                             block.visible.len_q - block.key - key);
    float weight[n];
    each_score<n>(statistics, lane, [&](int e, float lse) {
      const float away = fabsf(distance + static_cast<float>(e / 4 * 8 + e % 2 - e / 2 % 2 * 8));
      weight[e] = ptx::ex2(fmaf(s[e], f.logit_factor, fmaf(of_step.slope, away, -lse)));
      const float tanh = fminf(fabsf(s[e]), f.largest_tanh);  // of a hidden score finite
      s[e] = weight[e] * fmaf(-tanh, tanh, 1.f);
    });
    round_operand<C>(p, weight);
  } else {
    each_score<n>(statistics, lane, [&](int e, float lse) { s[e] = ptx::ex2(fmaf(s[e], scale, -lse)); });
  }
}

// Keeps the products that this thread waits for next behind its arithmetic, which ends with x: a wait is for
// ptxas an instruction like another, which it moves above arithmetic, but not above a branch.
__device__ inline void hold_waits(float x) {
  if (x == INFINITY) ptx::hold();
}

// Products dP become dS, rounded: the A operand of the product with Q.
template <class C, int n>
__device__ inline void score_gradient(uint32_t (&ds)[n / 8][4], const float (&s)[n], float (&dp)[n],
                                      const BackwardShared<C>& shared, int step, int row, int lane) {
  each_score<n>(statistics_from(shared, step, row) + StatisticsInQuads::kDelta, lane,
                [&](int e, float delta) { dp[e] = s[e] * (dp[e] - delta); });
  round_operand<C>(ds, dp);
}

// dS of 16 keys from `key` on, transposed back, for all who compute dQ: the queries from `row` on.
template <class C, int n>
__device__ inline void store_ds(const uint32_t (&ds)[n][4], const BackwardShared<C>& shared, int step,
                                int row, int key, int lane) {
  const auto place = ring_at<BackwardShared<C>::kScoreStages>(step);
  if (row == 0) ptx::mbarrier_wait(shared.ds_empty(place.stage), place.parity ^ 1);
#pragma unroll
  for (int k = 0; k < n; ++k)
    ptx::stmatrix_x4_trans(
        shared.ds(place.stage).chunk(row + k * 16 + lane / 16 * 8 + lane % 8, key / 8 + lane / 8 % 2),
        ds[k][0], ds[k][1], ds[k][2], ds[k][3]);
  ptx::fence_proxy_async();
  __syncwarp();
  if (row + n * 16 == C::kRows) arrive_once(shared.ds_full(place.stage), lane);
}

// d (64 x n) = a b^T over `depth` columns of tiles with rows of k, asynchronously, from `row` and `b_row` on;
// before(k) comes before each product.
template <class C, int depth, class A, class B, int n, class F>
__device__ inline void multiply_rows(float (&d)[n], const A& a, int row, const B& b, int b_row, F before) {
  const uint64_t a_rows = recomputed(a).rows_of_k(row), b_rows = b.rows_of_k(b_row);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < depth; k += 16) {
    before(k);
    Wgmma<C::kDType, 2 * n>::ss(d, a_rows + A::k_step(k), b_rows + B::k_step(k), k > 0);
  }
  ptx::wgmma_commit_group();
}

// Scores S^T = K Q^T of 64 keys from `key` on with the queries of a step from the row-th on, asynchronously.
template <class C, int n>
__device__ inline void multiply_scores(float (&s)[n], const BackwardShared<C>& shared, int key, int step,
                                       int row = 0) {
  const auto q = ring_at<C::kQueryStages>(step);
  if (row == 0) ptx::mbarrier_wait(shared.q_full(q.stage), q.parity);
  multiply_rows<C, C::kHeadDim>(s, shared.k(), key, shared.q(q.stage), row, [](int) {});
}

// d (64 x n) += a b, a in registers and b rows of k of a tile from `row` on, asynchronously.
template <class C, class B, int n, int depth>
__device__ inline void add_product(float (&d)[n], const uint32_t (&a)[depth][4], const B& b, int row = 0) {
  const uint64_t columns = b.columns_of_n();
#pragma unroll
  for (int k = 0; k < depth; ++k)
    Wgmma<C::kDType, 2 * n>::template rs<1>(d, a[k], columns + B::row_step(row + k * 16), 1);
  ptx::wgmma_commit_group();
}

// dQ = dS K of 64 rows and some columns of a step, asynchronously.
template <class C, class B, int n>
__device__ inline void multiply_dq(float (&dq)[n], const BackwardShared<C>& shared, int step, int row,
                                   const B& columns) {
  using DS = typename BackwardShared<C>::DS;
  const uint64_t a = shared.ds(step & 1).rows_of_k(row), b = columns.columns_of_n();
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < C::kKeys; k += 16)
    Wgmma<C::kDType, 2 * n>::template ss<1>(dq, a + DS::k_step(k), b + B::row_step(k), k > 0);
  ptx::wgmma_commit_group();
}

// Until all warps are done with K and V.
template <class C>
__device__ inline void wait_for_readers(const BackwardShared<C>& shared, int lane) {
  arrive_once(shared.keys_read(), lane);
  ptx::mbarrier_wait(shared.keys_read(), 0);
}

// Where a warp adds 16 rows of dQ to the sums.  With another warp beside it (keep_turns, store_queries) only
// after that says so; and what lies in shared memory is left to it.
template <class C>
struct QuerySums {
  using Shared = BackwardShared<C>;
  using Workspace = BackwardWorkspace<C>;

  const Shared& shared;
  bool with_another;
  int warpgroup, warp, lane;  // warp of the warpgroup

  // Columns from `column` on, the first of a step if `first`, and the last ones if `last`.
  template <int n>
  __device__ void add(const float (&dq)[n], int number, int column, bool first = true,
                      bool last = true) const {
    constexpr int kBlocks = n / 4;
    const Step& step = shared.step(number);
    if (!C::kBulkSums) {
      if (with_another && first) ptx::bar_sync(kMayAddBarrier + warpgroup, kKeptThreads);
      float* sums = sums_of(step, warp, column);
      if (counts(step, warp))
#pragma unroll
        for (int j = 0; j < kBlocks; ++j)
          ptx::red_add_warp(sums + j * Workspace::kBlock, lane,
                            {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]});
      if (with_another && last) ptx::bar_arrive(kSumsBarrier + warpgroup, kKeptThreads);
      return;
    }
    const uint32_t place = shared.sums(warpgroup * 4 + warp);
    const bool own_rows = counts(step, warp);  // loaded in time
    float* sums = sums_of(step, warp, column);
    if (with_another)
      ptx::bar_sync(kMayAddBarrier + warpgroup, kKeptThreads);
    else if (lane == 0)
      ptx::cp_async_bulk_wait_group_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
      ptx::st_shared_f32x4(place + j * 512 + lane * 16,
                           {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]});
    ptx::fence_proxy_async();
    __syncwarp();
    if (with_another)
      ptx::bar_arrive(kSumsBarrier + warpgroup, kKeptThreads);
    else if (lane == 0 && own_rows)
      start_adding(sums, warp);
  }

  // What a warp of the warpgroup has written; one lane calls it.
  __device__ void start_adding(float* to, int warp_) const {
    ptx::cp_reduce_async_bulk_add(to, shared.sums(warpgroup * 4 + warp_), Shared::kSumBytes);
    ptx::cp_async_bulk_commit_group();
  }

  // After the last step.
  __device__ void finish() const {
    if (lane == 0) ptx::cp_async_bulk_wait_group_read();
  }

  __device__ int row_block(int warp_) const { return (Shared::kSplitRows ? warpgroup * 4 : 0) + warp_; }
  __device__ bool counts(const Step& step, int warp_) const { return row_block(warp_) * 16 < step.rows_left; }
  __device__ float* sums_of(const Step& step, int warp_, int column) const {
    return static_cast<float*>(step.dq) +
           (row_block(warp_) * Workspace::kColumnBlocks + column / 8) * Workspace::kBlock;
  }
};

// Counters of the turns at the tiles of the block's first head.
template <class C>
__device__ inline int* turns_of(const BackwardWorkspace<C>& workspace, const BackwardParams& p,
                                const KeyBlock& block) {
  return workspace.turns + (int64_t{block.batch} * p.heads_q + block.first_head) * workspace.row_tiles;
}

// What a warp does when the order of sums must not vary: it waits for the block's turn at each tile, until
// the blocks of the keys before that the tile sees have added, and says so, up to two steps ahead.
template <class C>
__device__ inline void await_turns(const Backward& f, const BackwardShared<C>& shared, int lane) {
  using Shared = BackwardShared<C>;
  if (lane > 0) return;
  const KeyBlock& block = shared.block();
  const BackwardWorkspace<C> workspace(f.p);
  const int* turns = turns_of(workspace, f.p, block);
  StepPlace<C::kRows> place(f, block);
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step, place.advance(f, block)) {
    const auto turn = ring_at<Shared::kTurnStages>(step);
    ptx::mbarrier_wait(shared.turn_empty(turn.stage), turn.parity ^ 1);
    const int before = block.key / C::kKeys - block.visible.first(place.row) / C::kKeys;
    while (ptx::ld_acquire(turns + place.head * workspace.row_tiles + place.row / C::kRows) <
           before * Shared::kSumWarpgroups) {
    }
    ptx::mbarrier_arrive(shared.turn_full(turn.stage));
  }
}

// What a warp does for each warpgroup that adds dQ then: it has the sums of a tile added when the turn has
// come, and counts them when they have been performed, while the warpgroup computes the next ones.
template <class C>
__device__ inline void keep_turns(const Backward& f, const BackwardShared<C>& shared, int warpgroup,
                                  int lane) {
  using Shared = BackwardShared<C>;
  constexpr int kParts = C::kBulkSums ? Shared::kQueryParts : 1;  // that come one after another
  const BackwardParams& p = f.p;
  const KeyBlock& block = shared.block();
  const QuerySums<C> sums{shared, true, warpgroup, 0, lane};
  const auto may_add = [&] { ptx::bar_arrive(kMayAddBarrier + warpgroup, kKeptThreads); };
  const auto pass_on = [&](int* turn) {
    if (lane == 0) {
      ptx::cp_async_bulk_wait_group();
      ptx::red_add_release(turn, 1);
    }
  };
  const BackwardWorkspace<C> workspace(p);
  int* const turns = turns_of(workspace, p, block);
  int* turn = turns;
  StepPlace<C::kRows> place(f, block);
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step, place.advance(f, block)) {
    if (C::kBulkSums) may_add();  // the copy engine has read what lay there
    if (step > 0) pass_on(turn);
    turn = turns + place.head * workspace.row_tiles + place.row / C::kRows;
    const auto ring = ring_at<Shared::kTurnStages>(step);
    ptx::mbarrier_wait(shared.turn_full(ring.stage), ring.parity);
    arrive_once(shared.turn_empty(ring.stage), lane);
    if (!C::kBulkSums) may_add();
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (part > 0) may_add();
      ptx::bar_sync(kSumsBarrier + warpgroup, kKeptThreads);
      if (C::kBulkSums && lane == 0) {
        const Step& of_step = shared.step(step);
#pragma unroll 1
        for (int warp = 0; warp < 4; ++warp)
          if (sums.counts(of_step, warp))
            sums.start_adding(sums.sums_of(of_step, warp, Shared::first_column(warpgroup, part)), warp);
        ptx::cp_async_bulk_wait_group_read();
      }
      __syncwarp();
    }
  }
  pass_on(turn);
}

// What a warp does for each warpgroup when no other block adds to dQ: it stores what the warpgroup computed,
// rounded.  A lane takes 8 columns of two rows that lie 8 apart.
template <class C>
__device__ inline void store_queries(const Backward& f, const BackwardShared<C>& shared, int warpgroup,
                                     int lane) {
  using Shared = BackwardShared<C>;
  constexpr int kBlocks = Shared::kQueryColumns / 8;
  const float scale = static_cast<float>(f.p.score.scale);
  const int first_row = Shared::kSplitRows ? warpgroup * 64 : 0;
#pragma unroll 1
  for (int number = 0; number < shared.block().steps * Shared::kQueryParts; ++number) {
    const int first_column = Shared::first_column(warpgroup, number % Shared::kQueryParts);
    ptx::bar_arrive(kMayAddBarrier + warpgroup, kKeptThreads);
    ptx::bar_sync(kSumsBarrier + warpgroup, kKeptThreads);
    const Step& step = shared.step(number / Shared::kQueryParts);
#pragma unroll 1
    for (int unit = lane; unit < 4 * kBlocks * 8; unit += 32) {
      const int warp = unit / (kBlocks * 8), block = unit / 8 % kBlocks, top = unit % 8;
      const uint32_t from = shared.sums(warpgroup * 4 + warp) + block * 512 + top * 64;
      uint32_t rows[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 x = ptx::ld_shared_f32x4(from + i * 16);
        rows[0][i] = ptx::cvt_pack<C::kDType>(x.x * scale, x.y * scale);
        rows[1][i] = ptx::cvt_pack<C::kDType>(x.z * scale, x.w * scale);
      }
      const int row = first_row + warp * 16 + top, column = first_column + block * 8;
      uint16_t* to = static_cast<uint16_t*>(step.dq) + row * f.p.dq.row + column;
      if (column >= f.p.head_dim) continue;
      if (row < step.rows_left)
        *reinterpret_cast<uint4*>(to) = {rows[0][0], rows[0][1], rows[0][2], rows[0][3]};
      if (row + 8 < step.rows_left)
        *reinterpret_cast<uint4*>(to + 8 * f.p.dq.row) = {rows[1][0], rows[1][1], rows[1][2], rows[1][3]};
    }
    __syncwarp();
  }
}

// Rows of dK or dV that a warpgroup has, rounded, through shared memory to global memory.
template <class C, class T, int n>
__device__ inline void store_gradient(const T& tile, const CUtensorMap& map, const Tensor4& to,
                                      int64_t columns, const KeyBlock& block, bool packed,
                                      const float (&x)[n], float factor, int warpgroup,
                                      int warpgroup_thread) {
  const int thread = ptx::recomputed(warpgroup_thread), lane = thread % 32;
  const int tile_row = BackwardShared<C>::kSplitKeys ? warpgroup * 64 : 0;
  const int first = block.key + tile_row, count = block.k_allotted - first;
#pragma unroll
  for (int j = 0; j < n / 4; j += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 4 * (j + i / 2) + 2 * (i % 2);
      pairs[i] = ptx::cvt_pack<C::kDType>(x[e] * factor, x[e + 1] * factor);
    }
    ptx::stmatrix_x4(tile.chunk(tile_row + thread / 32 * 16 + lane % 16, j + lane / 16), pairs[0], pairs[1],
                     pairs[2], pairs[3]);
  }
  if (count >= 64 || !packed) {  // the copy engine knows where the tensor ends
    ptx::fence_proxy_async();
    ptx::bar_sync(kGroupBarrier + warpgroup, 128);
    if (thread == 0 && count > 0) {
#pragma unroll
      for (int slab = 0; slab < T::kSlabs; ++slab)
        ptx::cp_async_bulk_tensor_store(&map, tile.base + slab * T::kSlabBytes + tile_row * 128, slab * 64, 0,
                                        block.k_first + first, block.head_k, packed ? 0 : block.batch);
      ptx::cp_async_bulk_commit_group();
    }
    return;
  }
  ptx::bar_sync(kGroupBarrier + warpgroup, 128);  // the next sequence begins in this tile
  constexpr int kChunks = n * 2 / kChunk;
  for (int i = thread; i < count * kChunks; i += 128) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * kChunk < columns)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to.data) + block.head_k * to.head +
                                (int64_t{block.k_first} + first + row) * to.row + chunk * kChunk) =
          ptx::ld_shared_16(tile.chunk(tile_row + row, chunk));
  }
}

template <class C>
__device__ inline void store_values(const Backward& f, const BackwardShared<C>& shared,
                                    const float (&dv)[C::kHeadDimV / 2], int warpgroup, int thread) {
  store_gradient<C>(shared.v(), f.dv, f.p.dv, f.p.head_dim_v, shared.block(), f.p.seqlen_k.cu, dv, 1.f,
                    warpgroup, thread);
}

template <class C>
__device__ inline void store_keys(const Backward& f, const BackwardShared<C>& shared,
                                  const float (&dk)[C::kHeadDim / 2], int warpgroup, int thread) {
  store_gradient<C>(shared.k(), f.dk, f.p.dk, f.p.head_dim, shared.block(), f.p.seqlen_k.cu, dk,
                    static_cast<float>(f.p.score.scale), warpgroup, thread);
}

}  // namespace flashattn::sm90
