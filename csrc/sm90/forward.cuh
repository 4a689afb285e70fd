// Forward attention on Hopper (sm_90a).
//   O = softmax(scale Q K^T) V, lse = log sum exp: a block takes tile after tile of kRows queries of a head.
//   Two producer warps have the copy engine bring Q, K and V into rings of shared-memory tiles; each of the
//   kWarpgroups other warpgroups multiplies 64 of the rows with all keys.  Scores and weights stay in
//   registers.  While a warpgroup computes its softmax, the tensor cores work for the others: kTurns makes
//   them go in turns.
#pragma once

#include <type_traits>

#include "sm90/schedule.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma.cuh"

namespace flashattn::sm90 {

struct Forward {
  CUtensorMap q, k, v, out;  // dimensions: column, head within a unit, row, unit, batch
  ForwardParams p;
  Schedule schedule;
  Logits logits;
};

constexpr int kWorkStages = 2;  // tiles that producers and warpgroups may be apart

// Shared memory of a block: tiles, then the barriers that say who may touch them.  O takes the place of Q.
template <class C>
struct ForwardShared {
  using Q = SlabTile<C::kRows, C::kHeadDim>;
  using K = SlabTile<C::kKeys, C::kHeadDim>;
  using V = SlabTile<C::kKeys, C::kHeadDimV>;
  using O = SlabTile<C::kRows, C::kHeadDimV>;
  static constexpr int kThreads = (C::kWarpgroups + 1) * 128, kAlignment = 1024;
  static constexpr int kQueryBytes = Q::kBytes > O::kBytes ? Q::kBytes : O::kBytes;
  static constexpr int kKeyPlace = C::kQueryStages * kQueryBytes,
                       kValuePlace = kKeyPlace + C::kKeyStages * K::kBytes;
  static constexpr int kBarrierPlace = kValuePlace + C::kValueStages * V::kBytes;
  static constexpr int kBarriers = 2 * (C::kQueryStages + C::kKeyStages + C::kValueStages + kWorkStages);
  static constexpr int kWorkPlace = kBarrierPlace + (kBarriers * 8 + 15) / 16 * 16;
  static constexpr int kWorkVectors = sizeof(Work) / 16, kWorkBytes = (kWorkVectors + C::kWarpgroups) * 16;
  static constexpr int kBytes = kAlignment + kWorkPlace + kWorkStages * kWorkBytes;

  uint32_t base = (ptx::shared_address(shared_memory) + kAlignment - 1) / kAlignment * kAlignment;

  __device__ Q q(int stage) const { return {base + stage * kQueryBytes}; }
  __device__ O o(int stage) const { return {base + stage * kQueryBytes}; }
  __device__ K k(int stage) const { return {base + kKeyPlace + stage * K::kBytes}; }
  __device__ V v(int stage) const { return {base + kValuePlace + stage * V::kBytes}; }

  // full: the copy engine has filled the tile, or the place of a Work has been written.
  // empty: the warpgroups (one thread of each, for K and V one of each warp) are done with it, and the thread
  // that loads K and V is with a Work.
  __device__ uint32_t q_full(int stage) const { return barrier(stage); }
  __device__ uint32_t k_full(int stage) const { return barrier(C::kQueryStages + stage); }
  __device__ uint32_t v_full(int stage) const { return barrier(C::kQueryStages + C::kKeyStages + stage); }
  __device__ uint32_t work_full(int stage) const {
    return barrier(C::kQueryStages + C::kKeyStages + C::kValueStages + stage);
  }
  __device__ uint32_t q_empty(int stage) const { return q_full(stage) + kBarriers * 4; }
  __device__ uint32_t k_empty(int stage) const { return k_full(stage) + kBarriers * 4; }
  __device__ uint32_t v_empty(int stage) const { return v_full(stage) + kBarriers * 4; }
  __device__ uint32_t work_empty(int stage) const { return work_full(stage) + kBarriers * 4; }

  __device__ void put_work(int stage, const Work& work) const {
    uint4 x[kWorkVectors];
    __builtin_memcpy(x, &work, sizeof work);
#pragma unroll
    for (int i = 0; i < kWorkVectors; ++i) ptx::st_shared_16(work_place(stage, i), x[i]);
  }
  __device__ Work get_work(int stage) const {
    uint4 x[kWorkVectors];
#pragma unroll
    for (int i = 0; i < kWorkVectors; ++i) x[i] = ptx::ld_shared_16(work_place(stage, i));
    Work work;
    __builtin_memcpy(&work, x, sizeof work);
    return work;
  }
  __device__ void put_share(int stage, int warpgroup, const Share& share) const {
    uint4 x;
    __builtin_memcpy(&x, &share, sizeof share);
    ptx::st_shared_16(work_place(stage, kWorkVectors + warpgroup), x);
  }
  __device__ Share get_share(int stage, int warpgroup) const {
    const uint4 x = ptx::ld_shared_16(work_place(stage, kWorkVectors + warpgroup));
    Share share;
    __builtin_memcpy(&share, &x, sizeof share);
    return share;
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < C::kQueryStages; ++i)
      ptx::mbarrier_init(q_full(i), C::kWarpgroups), ptx::mbarrier_init(q_empty(i), C::kWarpgroups);
    for (int i = 0; i < C::kKeyStages; ++i)
      ptx::mbarrier_init(k_full(i), 1), ptx::mbarrier_init(k_empty(i), C::kWarpgroups * 4);
    for (int i = 0; i < C::kValueStages; ++i)
      ptx::mbarrier_init(v_full(i), 1), ptx::mbarrier_init(v_empty(i), C::kWarpgroups * 4);
    for (int i = 0; i < kWorkStages; ++i)
      ptx::mbarrier_init(work_full(i), C::kWarpgroups), ptx::mbarrier_init(work_empty(i), C::kWarpgroups + 1);
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ uint32_t barrier(int index) const { return base + kBarrierPlace + index * 8; }
  __device__ uint32_t work_place(int stage, int vector) const {
    return base + kWorkPlace + stage * kWorkBytes + vector * 16;
  }
};

// Named barriers; 0 is __syncthreads.
constexpr int kTurnBarrier = 1;   // + warpgroup: its turn at the tensor cores has come
constexpr int kGroupBarrier = 5;  // + warpgroup: its own threads

// Position in a ring of tiles.
template <int stages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Starts the copies of a tile, one box of 64 columns each.
template <class T>
__device__ inline void load_tile(const T& tile, const CUtensorMap& map, uint32_t barrier, uint64_t hint,
                                 int row, int unit, int batch) {
  ptx::mbarrier_arrive_expect_tx(barrier, T::kBytes);
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab)
    ptx::cp_async_bulk_tensor_load(tile.base + slab * T::kSlabBytes, &map, barrier, hint, slab * 64, 0, row,
                                   unit, batch);
}

// What one warp does: decides what the next tile is, for all others, and loads its Q.
template <class C>
__device__ inline void produce_queries(const Forward& f, const ForwardShared<C>& shared, int lane) {
  Ring<kWorkStages> work_ring;
  Ring<C::kQueryStages> q_ring;
  Tiles<C> tiles(f.p, f.schedule, lane);
  for (;; work_ring.advance(), q_ring.advance(), tiles.next()) {
    const Work work = tiles.work();
    const bool more = work.batch >= 0;
    if (more) tiles.request();
    ptx::mbarrier_wait(shared.work_empty(work_ring.stage), work_ring.parity ^ 1);
    if (lane == 0) shared.put_work(work_ring.stage, work);
    if (lane < C::kWarpgroups) {  // each lane for what it writes
      shared.put_share(work_ring.stage, lane, share_of<C>(work, lane, f.schedule.group));
      ptx::mbarrier_arrive(shared.work_full(work_ring.stage));
    }
    ptx::mbarrier_wait(shared.q_empty(q_ring.stage), q_ring.parity ^ 1);
    if (lane == 0 && more)
      load_tile(shared.q(q_ring.stage), f.q, shared.q_full(q_ring.stage), ptx::kEvictFirst,
                work.q_first + (work.row >> f.schedule.group), work.unit, f.p.seqlen_q.cu ? 0 : work.batch);
    else if (lane < C::kWarpgroups)
      ptx::mbarrier_arrive(shared.q_full(q_ring.stage));
    if (!more) break;
  }
  tiles.finish();
}

// What one thread of another does: loads the blocks of K and V from the last to the first, as they are
// needed, V one step after K.
template <class C>
__device__ inline void produce_keys(const Forward& f, const ForwardShared<C>& shared) {
  Ring<kWorkStages> work_ring;
  Ring<C::kKeyStages> k_ring;
  Ring<C::kValueStages> v_ring;
  for (;; work_ring.advance()) {
    ptx::mbarrier_wait(shared.work_full(work_ring.stage), work_ring.parity);
    const Work work = shared.get_work(work_ring.stage);
    ptx::mbarrier_arrive(shared.work_empty(work_ring.stage));
    if (work.batch < 0) break;
    const int head = f.schedule.units_of_k.divide(work.unit), batch = f.p.seqlen_k.cu ? 0 : work.batch;
    int row = work.k_first + (work.first_block + work.blocks - 1) * C::kKeys;
#pragma unroll 1
    for (int step = 0; step <= work.blocks && work.blocks > 0; ++step, row -= C::kKeys) {
      if (step < work.blocks) {
        ptx::mbarrier_wait(shared.k_empty(k_ring.stage), k_ring.parity ^ 1);
        load_tile(shared.k(k_ring.stage), f.k, shared.k_full(k_ring.stage), ptx::kEvictLast, row, head,
                  batch);
        k_ring.advance();
      }
      if (step > 0) {
        ptx::mbarrier_wait(shared.v_empty(v_ring.stage), v_ring.parity ^ 1);
        load_tile(shared.v(v_ring.stage), f.v, shared.v_full(v_ring.stage), ptx::kEvictLast, row + C::kKeys,
                  head, batch);
        v_ring.advance();
      }
    }
  }
}

// The 64 rows of a warpgroup, and what happens to their scores.
template <class C>
struct ScoreRows {
  static constexpr int kScores = C::kKeys / 2;  // of a lane

  const Forward& f;
  Work work;
  int first_row;       // of the warpgroup, in its unit
  int lane_row, lane;  // lane_row: within the warpgroup, the first of the lane's two

  __device__ ScoreRows(const Forward& forward, const Work& tile, int warpgroup, int thread)
      : f(forward),
        work(tile),
        first_row(tile.row + warpgroup * 64),
        lane_row(thread / 32 * 16 + thread % 32 / 4),
        lane(thread % 32) {}

  __device__ int query(int row) const { return query_of(first_row + row, f.schedule.group, work.visible); }
  __device__ int keys(int row) const {
    return work.visible.last(query(row)) - work.visible.first(query(row));
  }
  __device__ int head(int row) const {
    return (work.unit << f.schedule.group) + ((first_row + row) & ((1 << f.schedule.group) - 1));
  }

  // Scores of keys that a row does not see become -inf.
  __device__ void hide(float (&s)[kScores], int key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query(lane_row + 8 * half), own_key = key + lane % 4 * 2;
      const unsigned seen = columns_before(work.visible.last(row) - own_key) &
                            ~columns_before(work.visible.first(row) - own_key);
#pragma unroll
      for (int bit = 0; bit < kScores / 2; ++bit) {
        float& x = s[bit / 2 * 4 + 2 * half + bit % 2];
        x = seen & 1u << bit ? x : -INFINITY;
      }
    }
  }

  // Products become logits.
  __device__ void modify(float (&s)[kScores], int key) const {
    const Logits& logits = f.logits;
    if (logits.softcap > 0) {  // tanh x = 1 - 2 / (1 + e^2x), to about 1e-7
      const float twice = 2 * kLog2E * logits.cap_slope;
#pragma unroll
      for (int e = 0; e < kScores; ++e)
        s[e] = logits.softcap * (1 - 2 * ptx::rcp(1 + ptx::ex2(s[e] * twice)));
    } else {
#pragma unroll
      for (int e = 0; e < kScores; ++e) s[e] *= logits.scale;
    }
    const PerHead& alibi = f.p.score.alibi;
    if (!alibi.data) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      const float slope =
          kLog2E * load_number(alibi.data, DType::f32, work.batch * alibi.batch + head(row) * alibi.head);
      const float distance =
          static_cast<float>(query(row) + work.visible.len_k - work.visible.len_q - key - lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * half + i];
          x = fmaf(-slope, fabsf(distance - static_cast<float>(8 * j + i)), x);
        }
    }
  }

 private:
  // The lane's columns of a row as bits: which of 8 j + i, for bit 2 j + i, are below the limit.  Predicates
  // are loaded from bits faster than they are computed.
  __device__ static unsigned columns_before(int limit) {
    static_assert(kScores <= 64, "the columns are bits of a word");
    const int bits = limit <= 0 ? 0 : limit / 8 * 2 + min(limit % 8, 2);
    return bits < 32 ? (1u << bits) - 1 : ~0u;
  }
};

// S = Q K^T of a warp's 16 rows once more, by mma.sync from the tiles in shared memory, where wgmma could not
// be: in a branch that one warp takes alone.
template <class C, class Q, class K, int n>
__device__ inline void multiply_again(float (&s)[n], const Q& q, const K& k, int warp_row, int thread_lane) {
  const int lane = ptx::recomputed(thread_lane);  // addresses that follow from it are not worth registers
#pragma unroll
  for (int e = 0; e < n; ++e) s[e] = 0;
#pragma unroll 1
  for (int d = 0; d < C::kHeadDim; d += 16) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, q.chunk(warp_row + lane % 16, d / 8 + lane / 16));
#pragma unroll
    for (int key = 0; key < C::kKeys; key += 16) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, k.chunk(key + lane % 8 + lane / 16 * 8, d / 8 + lane / 8 % 2));
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = s[(key / 8 + block) * 4 + e];
        ptx::mma_m16n8k16<C::kDType>(x, a, b[2 * block], b[2 * block + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[(key / 8 + block) * 4 + e] = x[e];
      }
    }
  }
}

// Of `rows` rows from `begin` on those outside [first, last) become zeros.  A warpgroup does it for itself;
// several may write the same zeros.
template <int rows, class T>
__device__ inline void clear_rows(const T& tile, int begin, int first, int last, int thread,
                                  int group_barrier) {
  for (int i = thread; i < T::kSlabs * rows * 8; i += 128) {
    const int row = i / 8 % rows;
    if (row < first || row >= last)
      ptx::st_shared_16(tile.base + i / (rows * 8) * T::kSlabBytes + (begin + row) * 128 + i % 8 * 16,
                        uint4{0, 0, 0, 0});
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(group_barrier, 128);
}

// Statistics of the lane's two rows, and what normalises them: 0 for a row that sees no key.
template <class C>
__device__ inline void finish_rows(const Forward& f, const ScoreRows<C>& rows, const OnlineSoftmax& softmax,
                                   float (&factor)[2]) {
  const ForwardParams& p = f.p;
  const Work& work = rows.work;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.lane_row + 8 * half, query = (rows.first_row + row) >> f.schedule.group;
    const bool counts = query < work.visible.len_q;
    const int head = rows.head(row);
    const float sink = p.score.sink.data && counts
                           ? load_number(p.score.sink.data, p.score.sink.dtype, head * p.score.sink.head)
                           : -INFINITY;
    const float reference = counts ? softmax.reference[half] : -INFINITY;
    const float total = quad_sum(counts ? softmax.sum[half] : 0.f);
    const RowResult result = finish_row(total, reference, reference, sink);
    factor[half] = result.factor;
    if (rows.lane % 4 == 0 && query < work.q_allotted) {
      const auto place = [&](const Statistic& x) {
        return static_cast<float*>(x.data) + work.batch * x.batch + head * x.head +
               (work.q_first + query) * x.row;
      };
      *place(p.lse) = result.lse;
      if (p.max_logit.data) *place(p.max_logit) = result.max_logit;
    }
  }
}

// Normalised rows through the place of Q to `out`.  Returns whether thread 0 has started a copy that still
// reads the place.
template <class C, int n>
__device__ inline bool store_output(const Forward& f, const typename ForwardShared<C>::O& o,
                                    const ScoreRows<C>& rows, float (&out)[n], const float (&factor)[2],
                                    int warpgroup, int warpgroup_thread) {
  const ForwardParams& p = f.p;
  const Work& work = rows.work;
  const int thread = ptx::recomputed(warpgroup_thread), lane = thread % 32, tile_row = warpgroup * 64,
            group = f.schedule.group;
  const int rows_left = (work.q_allotted << group) - rows.first_row;
#pragma unroll
  for (int j = 0; j < n / 4; j += 2) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 4 * (j + i / 2) + 2 * (i % 2);
      x[i] = ptx::cvt_pack<C::kDType>(out[e] * factor[i % 2], out[e + 1] * factor[i % 2]);
    }
    ptx::stmatrix_x4(o.chunk(tile_row + thread / 32 * 16 + lane % 16, j + lane / 16), x[0], x[1], x[2], x[3]);
  }
  if (rows_left >= 64 || !p.seqlen_q.cu) {  // the copy engine knows where the tensor ends
    ptx::fence_proxy_async();
    ptx::bar_sync(kGroupBarrier + warpgroup, 128);
    if (thread == 0 && rows_left > 0) {
      using O = typename ForwardShared<C>::O;
#pragma unroll
      for (int slab = 0; slab < O::kSlabs; ++slab)
        ptx::cp_async_bulk_tensor_store(&f.out, o.base + slab * O::kSlabBytes + tile_row * 128, slab * 64, 0,
                                        work.q_first + (rows.first_row >> group), work.unit,
                                        p.seqlen_q.cu ? 0 : work.batch);
      ptx::cp_async_bulk_commit_group();
    }
    return true;
  }
  ptx::bar_sync(kGroupBarrier + warpgroup, 128);  // the next sequence begins in this tile
  constexpr int kChunks = C::kHeadDimV / kChunk;
  for (int i = thread; i < rows_left * kChunks; i += 128) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * kChunk < p.head_dim_v)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out.data) + rows.head(row) * p.out.head +
                                (work.q_first + ((rows.first_row + row) >> group)) * p.out.row +
                                chunk * kChunk) = ptx::ld_shared_16(o.chunk(tile_row + row, chunk));
  }
  ptx::bar_sync(kGroupBarrier + warpgroup, 128);
  return false;
}

template <class C>
__device__ inline void consume(const Forward& f, const ForwardShared<C>& shared, int warpgroup, int thread) {
  using Shared = ForwardShared<C>;
  constexpr int kScores = C::kKeys / 2, kOutputs = C::kHeadDimV / 2, kSteps = C::kHeadDim / 16;
  using PV = Wgmma<C::kDType, C::kHeadDimV>;
  const ForwardParams& p = f.p;
  const int lane = thread % 32, warp_row = warpgroup * 64 + thread / 32 * 16;
  const bool softcapped = C::kGeneral && f.logits.softcap > 0 && !p.score.alibi.data;
  const bool modified = C::kGeneral && (f.logits.softcap > 0 || p.score.alibi.data);
  const float scale = modified ? 1.f : f.logits.scale;
  const Bounds all{-INFINITY, INFINITY}, none{INFINITY, INFINITY};
  // The largest logit is known only if every update is exact.
  const Bounds near = softcapped && !p.max_logit.data ? f.logits.near.bounds : none,
               far = p.max_logit.data ? none
                     : softcapped     ? f.logits.far.bounds
                                      : all;
  // Rows past the end of a sequence are zeros where the tensor ends, otherwise anything.
  const bool anything_past_queries = p.seqlen_q.cu || p.seqlen_q.used,
             anything_past_keys = p.seqlen_k.cu || p.seqlen_k.used;
  int tile = 0, work_stage = 0, q_stage = 0;
  Ring<C::kKeyStages> k_ring;
  Ring<C::kValueStages> v_ring;
  float s[kScores], out[kOutputs];
  uint32_t weights[C::kKeys / 16][4], q_frag[C::kQueriesInRegisters ? kSteps : 1][4];
  OnlineSoftmax softmax;
  int storing = -1;  // the Q buffer that a copy of thread 0 still reads
  if (C::kTurns && warpgroup == 0) ptx::bar_arrive(kTurnBarrier, 256);

  const auto release_storing = [&] {
    if (storing < 0) return;
    if (thread == 0) {
      ptx::cp_async_bulk_wait_group_read();
      ptx::mbarrier_arrive(shared.q_empty(storing));
    }
    storing = -1;
  };
  const auto release_k = [&] {
    if (lane == 0) ptx::mbarrier_arrive(shared.k_empty(k_ring.stage));
    k_ring.advance();
  };
  const auto release_v = [&] {
    if (lane == 0) ptx::mbarrier_arrive(shared.v_empty(v_ring.stage));
    v_ring.advance();
  };
  const auto multiply_qk = [&] {  // S = Q K^T, asynchronously
    using QK = Wgmma<C::kDType, C::kKeys>;
    const uint64_t q_rows = shared.q(q_stage).rows_of_k(warpgroup * 64),
                   k_rows = shared.k(k_ring.stage).rows_of_k(0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if constexpr (C::kQueriesInRegisters)
        QK::template rs<0>(s, q_frag[step], k_rows + Shared::K::k_step(step * 16), step > 0);
      else
        QK::ss(s, q_rows + Shared::Q::k_step(step * 16), k_rows + Shared::K::k_step(step * 16), step > 0);
    ptx::wgmma_commit_group();
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      weights[i / 4][i % 4] = ptx::cvt_pack<C::kDType>(s[2 * i], s[2 * i + 1]);
  };

  // Those of the tile; read again wherever they are needed, because registers are scarce.
  const auto rows = [&] { return ScoreRows<C>(f, shared.get_work(work_stage), warpgroup, thread); };
  int block;
  bool add;                       // is there an O to add to?
  bool dirty;                     // may rows of V that no query sees be anything but zeros?
  int seen_first, seen_last;      // keys that all rows see
  const auto multiply_pv = [&] {  // O += P V of this block, asynchronously
    const typename Shared::V v = shared.v(v_ring.stage);
    ptx::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
    if (dirty) {
      const VisibleKeys visible = shared.get_work(work_stage).visible;
      const int first = visible.first(0) - block * C::kKeys, last = visible.len_k - block * C::kKeys;
      if (first > 0 || last < C::kKeys)  // weights are 0 there, but 0 * NaN is NaN
        clear_rows<C::kKeys>(v, 0, first, last, thread, kGroupBarrier + warpgroup);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step)
      PV::template rs<1>(out, weights[step], v.columns_of_n() + Shared::V::row_step(step * 16),
                         step > 0 || add);
    ptx::wgmma_commit_group();
    add = true;
  };
  // Scores become weights.  True: what was added to `out` must be multiplied by softmax.rescale.
  const auto update = [&](int key, auto first_block) {
    constexpr bool kFirst = decltype(first_block)::value;
    // The least first sum of a row whose 16-bit weights are precise; bf16 has the exponents of fp32.
    constexpr float kLeast = C::kDType == DType::f16 ? 0.25f : 1e-15f;
    const auto hide = [&] {
      if (key < seen_first || key + C::kKeys > seen_last) rows().hide(s, key);
    };
    if (softmax.far) {
      bool done;
      if (!softcapped && modified) rows().modify(s, key);
      hide();
      if (C::kGeneral && softcapped)
        done = softmax.near
                   ? softmax.fast_update<kFirst>(
                         s, fmaxf(kLeast, f.logits.near.least),
                         [&](float x, float minus) { return f.logits.near.template at<3>(x, minus); })
                   : softmax.fast_update<kFirst>(
                         s, fmaxf(kLeast, f.logits.far.least),
                         [&](float x, float minus) { return f.logits.far.template at<5>(x, minus); });
      else
        done = softmax.fast_update<kFirst>(s, kLeast,
                                           [&](float x, float minus) { return fmaf(x, scale, minus); });
      if (done) return false;
      multiply_again<C>(s, shared.q(q_stage), shared.k(k_ring.stage), warp_row, lane);
    }
    if (modified) rows().modify(s, key);
    hide();
    if (kFirst) softmax.forget_reference();
    softmax.exact_update(s, scale, near, far);
    return true;
  };

  const auto take_turn = [&] {
    if (C::kTurns) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
  };
  const auto pass_turn = [&] {
    if (C::kTurns) ptx::bar_arrive(kTurnBarrier + (warpgroup + 1) % C::kWarpgroups, 256);
  };
  // A block that other warpgroups need.
  const auto skip_block = [&] {
    ptx::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
    release_k();
    ptx::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
    release_v();
  };

  for (;; ++tile) {
    work_stage = tile % kWorkStages;
    q_stage = tile % C::kQueryStages;
    ptx::mbarrier_wait(shared.q_full(q_stage), tile / C::kQueryStages % 2);
    const Share own = shared.get_share(work_stage, warpgroup);
    int first_block;  // of the tile
    {
      const Work work = shared.get_work(work_stage);
      if (work.batch < 0) break;
      first_block = work.first_block;
      block = first_block + work.blocks - 1;
      // What lies past a sequence's end must not take part in the votes of a warp.
      const int queries = (work.visible.len_q << f.schedule.group) - work.row - warpgroup * 64;
      if (anything_past_queries && queries < 64)
        clear_rows<64>(shared.q(q_stage), warpgroup * 64, 0, queries, thread, kGroupBarrier + warpgroup);
    }
#pragma unroll 1
    for (; block > own.last_block && block >= first_block; --block) {
      skip_block();
      if (block > first_block) take_turn(), pass_turn();
    }
    seen_first = own.seen_first;
    seen_last = own.seen_last;
    const auto prepare = [&] {
      const ScoreRows<C> tile = rows();
      dirty = anything_past_keys || tile.work.visible.first(0) > 0;
      // The weight of a row's only key shall be 1, so that its value is the result to the bit.
      const bool few = tile.keys(0) < 2 || tile.keys(63) < 2;
      softmax.start(few ? none : near, few ? none : far);
      add = false;
    };
    float factor[2];
    if (own.first_block <= own.last_block) {
      if constexpr (C::kQueriesInRegisters)
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          ptx::ldmatrix_x4(q_frag[step], shared.q(q_stage).chunk(warp_row + lane % 16, step * 2 + lane / 16));
      ptx::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
      multiply_qk();
      prepare();
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(s);
      update(block * C::kKeys, std::true_type{});
      release_k();
      pack_weights();
      if (C::kQueryStages > 1) release_storing();
      for (; block > own.first_block; --block) {
        // S of the next block and O of this one; softmax of the next under the second of the two.
        ptx::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
        take_turn();
        multiply_qk();
        multiply_pv();
        pass_turn();
        ptx::wgmma_wait_group<1>();
        ptx::written_by_wgmma(s);
        const bool rescale = update((block - 1) * C::kKeys, std::false_type{});
        release_k();
        ptx::wgmma_wait_group<0>();
        ptx::written_by_wgmma(out);
        release_v();
        pack_weights();
        if (rescale)
#pragma unroll
          for (int e = 0; e < kOutputs; ++e) out[e] *= softmax.rescale[e / 2 % 2];
      }
      multiply_pv();
      finish_rows<C>(f, rows(), softmax, factor);
      const bool empty_rows = __any_sync(0xFFFFFFFFu, factor[0] == 0 || factor[1] == 0);
      if (empty_rows) ptx::hold();
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(out);
      release_v();
#pragma unroll 1
      for (--block; block >= first_block; --block) {
        skip_block();
        take_turn(), pass_turn();
      }
      if (empty_rows)  // 0 times anything is not always 0
#pragma unroll
        for (int e = 0; e < kOutputs; ++e) out[e] = factor[e / 2 % 2] == 0 ? 0.f : out[e];
    } else {
      if (C::kQueryStages > 1) release_storing();
      prepare();
      softmax.forget_reference();
      finish_rows<C>(f, rows(), softmax, factor);
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) out[e] = 0;
    }
    const bool copying = store_output<C>(f, shared.o(q_stage), rows(), out, factor, warpgroup, thread);
    if (thread == 0) ptx::mbarrier_arrive(shared.work_empty(work_stage));
    storing = q_stage;
    if (C::kQueryStages == 1 || !copying) release_storing();
  }
  if (thread == 0) ptx::cp_async_bulk_wait_group_read();
}

template <class C>
__global__ void __launch_bounds__(ForwardShared<C>::kThreads, C::kBlocks)
    forward_kernel(const __grid_constant__ Forward f) {
  // What the block is launched with is divided again: producers need few registers.
  constexpr int kThreads = ForwardShared<C>::kThreads,
                kAll = 65536 / C::kBlocks / (8 * kThreads) * 8 * kThreads;
  constexpr int kProducerRegisters = C::kWarpgroups == 3 ? 32 : 40,
                kConsumerRegisters = (kAll / 128 - kProducerRegisters) / C::kWarpgroups / 8 * 8;
  const ForwardShared<C> shared;
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    shared.init_barriers();
    ptx::prefetch_tensormap(&f.q);
    ptx::prefetch_tensormap(&f.k);
    ptx::prefetch_tensormap(&f.v);
  }
  __syncthreads();
  ptx::griddepcontrol_wait();  // all before was about this block only
  ptx::griddepcontrol_launch_dependents();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) produce_keys<C>(f, shared);
    if (threadIdx.x / 32 == 1) produce_queries<C>(f, shared, threadIdx.x % 32);
  } else {
    ptx::setmaxnreg_inc<(kConsumerRegisters < 240 ? kConsumerRegisters : 240)>();
    consume<C>(f, shared, warpgroup - 1, threadIdx.x % 128);
  }
}

}  // namespace flashattn::sm90
