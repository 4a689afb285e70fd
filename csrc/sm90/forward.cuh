// Forward attention on Hopper (sm_90a).
//   O = softmax(scale Q K^T) V, lse = log sum exp: a block takes tile after tile of kRows queries of one head.
//   A producer warp has the copy engine bring Q, K and V into rings of shared-memory tiles; each of the
//   kWarpgroups other warpgroups multiplies 64 of the rows with all keys.  Scores and weights stay in registers.
//   While a warpgroup computes its softmax, the tensor cores work for the others: kTurns makes them go in turns.
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

// Shared memory of a block: tiles, then the barriers that say who may touch them.  O takes the place of Q.
template <class C>
struct ForwardShared {
  using Q = SlabTile<C::kRows, C::kHeadDim>;
  using K = SlabTile<C::kKeys, C::kHeadDim>;
  using V = SlabTile<C::kKeys, C::kHeadDimV>;
  using O = SlabTile<C::kRows, C::kHeadDimV>;
  static constexpr int kThreads = (C::kWarpgroups + 1) * 128, kAlignment = 1024;
  static constexpr int kQueryBytes = Q::kBytes > O::kBytes ? Q::kBytes : O::kBytes;
  static constexpr int kKeyPlace = C::kQueryStages * kQueryBytes, kValuePlace = kKeyPlace + C::kKeyStages * K::kBytes;
  static constexpr int kBarrierPlace = kValuePlace + C::kValueStages * V::kBytes;
  static constexpr int kBarriers = 2 * (C::kQueryStages + C::kKeyStages + C::kValueStages);
  static constexpr int kWorkPlace = kBarrierPlace + (kBarriers * 8 + 15) / 16 * 16;
  static constexpr int kWorkVectors = sizeof(Work) / 16;
  static constexpr int kBytes = kAlignment + kWorkPlace + C::kQueryStages * kWorkVectors * 16;

  uint32_t base = (ptx::shared_address(shared_memory) + kAlignment - 1) / kAlignment * kAlignment;

  __device__ Q q(int stage) const { return {base + stage * kQueryBytes}; }
  __device__ O o(int stage) const { return {base + stage * kQueryBytes}; }
  __device__ K k(int stage) const { return {base + kKeyPlace + stage * K::kBytes}; }
  __device__ V v(int stage) const { return {base + kValuePlace + stage * V::kBytes}; }

  // full: the copy engine has filled the tile (and the producer has written `work`).
  // empty: the warpgroups (one thread of each for Q, of each warp for K and V) are done with it.
  __device__ uint32_t q_full(int stage) const { return barrier(stage); }
  __device__ uint32_t q_empty(int stage) const { return barrier(C::kQueryStages + stage); }
  __device__ uint32_t k_full(int stage) const { return barrier(2 * C::kQueryStages + stage); }
  __device__ uint32_t k_empty(int stage) const { return barrier(2 * C::kQueryStages + C::kKeyStages + stage); }
  __device__ uint32_t v_full(int stage) const {
    return barrier(2 * (C::kQueryStages + C::kKeyStages) + stage);
  }
  __device__ uint32_t v_empty(int stage) const {
    return barrier(2 * (C::kQueryStages + C::kKeyStages) + C::kValueStages + stage);
  }

  // What the tile in this Q buffer is.
  __device__ void put_work(int stage, const Work& work) const {
    uint4 x[kWorkVectors];
    __builtin_memcpy(x, &work, sizeof work);
#pragma unroll
    for (int i = 0; i < kWorkVectors; ++i) ptx::st_shared_16(work_place(stage) + i * 16, x[i]);
  }
  __device__ Work get_work(int stage) const {
    uint4 x[kWorkVectors];
#pragma unroll
    for (int i = 0; i < kWorkVectors; ++i) x[i] = ptx::ld_shared_16(work_place(stage) + i * 16);
    Work work;
    __builtin_memcpy(&work, x, sizeof work);
    return work;
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < C::kQueryStages; ++i)
      ptx::mbarrier_init(q_full(i), 1), ptx::mbarrier_init(q_empty(i), C::kWarpgroups);
    for (int i = 0; i < C::kKeyStages; ++i)
      ptx::mbarrier_init(k_full(i), 1), ptx::mbarrier_init(k_empty(i), C::kWarpgroups * 4);
    for (int i = 0; i < C::kValueStages; ++i)
      ptx::mbarrier_init(v_full(i), 1), ptx::mbarrier_init(v_empty(i), C::kWarpgroups * 4);
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ uint32_t barrier(int index) const { return base + kBarrierPlace + index * 8; }
  __device__ uint32_t work_place(int stage) const { return base + kWorkPlace + stage * kWorkVectors * 16; }
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
__device__ inline void load_tile(const T& tile, const CUtensorMap& map, uint32_t barrier, uint64_t hint, int row,
                                 int unit, int batch) {
  ptx::mbarrier_arrive_expect_tx(barrier, T::kBytes);
#pragma unroll
  for (int slab = 0; slab < T::kSlabs; ++slab)
    ptx::cp_async_bulk_tensor_load(tile.base + slab * T::kSlabBytes, &map, barrier, hint, slab * 64, 0, row, unit,
                                   batch);
}

template <class C>
__device__ inline void produce(const Forward& f, const ForwardShared<C>& shared, int lane) {
  const ForwardParams& p = f.p;
  const int group = f.schedule.group;
  const bool packed_q = p.seqlen_q.cu, packed_k = p.seqlen_k.cu;
  Ring<C::kQueryStages> q_ring;
  Ring<C::kKeyStages> k_ring;
  Ring<C::kValueStages> v_ring;
  Tiles<C> tiles(p, f.schedule, lane);
  for (;; q_ring.advance()) {
    const Work work = tiles.work();
    if (work.batch >= 0) tiles.request();
    if (lane == 0) {
      ptx::mbarrier_wait(shared.q_empty(q_ring.stage), q_ring.parity ^ 1);
      shared.put_work(q_ring.stage, work);
      if (work.batch < 0)
        ptx::mbarrier_arrive(shared.q_full(q_ring.stage));
      else
        load_tile(shared.q(q_ring.stage), f.q, shared.q_full(q_ring.stage), ptx::kEvictFirst,
                  work.q_first + (work.row >> group), work.unit, packed_q ? 0 : work.batch);
    }
    if (work.batch < 0) break;
    if (lane == 0) {
      const int head_k = f.schedule.units_of_k.divide(work.unit), batch_k = packed_k ? 0 : work.batch;
      const auto load_k = [&](int block) {
        ptx::mbarrier_wait(shared.k_empty(k_ring.stage), k_ring.parity ^ 1);
        load_tile(shared.k(k_ring.stage), f.k, shared.k_full(k_ring.stage), ptx::kEvictLast,
                  work.k_first + block * C::kKeys, head_k, batch_k);
        k_ring.advance();
      };
      const auto load_v = [&](int block) {
        ptx::mbarrier_wait(shared.v_empty(v_ring.stage), v_ring.parity ^ 1);
        load_tile(shared.v(v_ring.stage), f.v, shared.v_full(v_ring.stage), ptx::kEvictLast,
                  work.k_first + block * C::kKeys, head_k, batch_k);
        v_ring.advance();
      };
      // From the last block to the first, as they are needed: V one step after K.
#pragma unroll 1
      for (int step = 0; step <= work.blocks && work.blocks > 0; ++step) {
        const int block = work.first_block + work.blocks - 1 - step;
        if (step < work.blocks) load_k(block);
        if (step > 0) load_v(block + 1);
      }
    }
    tiles.next();
  }
  tiles.finish(tiles.total());
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

  // Rows past the end of the sequence are computed like its last, and not stored.
  __device__ int query(int row) const {
    return min((first_row + row) >> f.schedule.group, work.visible.len_q - 1);
  }
  __device__ int head(int row) const {
    return (work.unit << f.schedule.group) + ((first_row + row) & ((1 << f.schedule.group) - 1));
  }

  // Keys that all rows see.
  __device__ int first() const { return work.visible.first(query(63)); }
  __device__ int last() const { return work.visible.last(query(0)); }

  // Scores of keys that a row does not see, because they lie before or after what it sees, become -inf.
  __device__ void hide_after(float (&s)[kScores], int key) const {
    hide_if(
        s, [&](int row) { return work.visible.last(query(row)) - key; },
        [](int column, int last) { return column >= last; });
  }
  __device__ void hide_before(float (&s)[kScores], int key) const {
    hide_if(
        s, [&](int row) { return work.visible.first(query(row)) - key; },
        [](int column, int first) { return column < first; });
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
      const float slope = kLog2E * load_number(alibi.data, DType::f32,
                                               work.batch * alibi.batch + head(row) * alibi.head);
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
  template <class Limit, class Hidden>
  __device__ void hide_if(float (&s)[kScores], Limit limit_of_row, Hidden hidden) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit = limit_of_row(lane_row + 8 * half) - lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (hidden(8 * j + i, limit)) s[4 * j + 2 * half + i] = -INFINITY;
    }
  }
};

// S = Q K^T of a warp's 16 rows once more, by mma.sync from the tiles in shared memory, where wgmma could not
// be: in a branch that one warp takes alone.
template <class C, class Q, class K, int n>
__device__ inline void multiply_again(float (&s)[n], const Q& q, const K& k, int warp_row, int lane) {
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

// Rows of V outside [first, last) become zeros: their weights are 0, but 0 * NaN is NaN.  A warpgroup does it
// for itself; several may write the same zeros.
template <class V>
__device__ inline void clear_rows(const V& v, int first, int last, int thread, int group_barrier) {
  for (int i = thread; i < V::kBytes / 16; i += 128) {
    const int row = i / 8 % (V::kSlabBytes / 128);
    if (row < first || row >= last) ptx::st_shared_16(v.base + i * 16, uint4{0, 0, 0, 0});
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(group_barrier, 128);
}

// Normalised rows through the place of Q to `out`; statistics straight from the lanes that hold them.  Returns
// whether thread 0 has started a copy that still reads the place.
template <class C, int n>
__device__ inline bool store_output(const Forward& f, const typename ForwardShared<C>::O& o,
                                    const ScoreRows<C>& rows, const OnlineSoftmax& softmax, float (&out)[n],
                                    int warpgroup, int thread) {
  const ForwardParams& p = f.p;
  const Work& work = rows.work;
  const int lane = rows.lane, tile_row = warpgroup * 64, group = f.schedule.group;
  const int rows_left = (work.q_allotted << group) - rows.first_row;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.lane_row + 8 * half, query = (rows.first_row + row) >> group;
    const bool counts = query < work.visible.len_q;
    const int head = rows.head(row);
    const float sink = p.score.sink.data && counts
                           ? load_number(p.score.sink.data, p.score.sink.dtype, head * p.score.sink.head)
                           : -INFINITY;
    const float reference = counts ? softmax.reference[half] : -INFINITY;
    const RowResult result =
        finish_row(quad_sum(counts ? softmax.sum[half] : 0.f), reference, reference, sink);
    factor[half] = result.factor;
    if (lane % 4 == 0 && row < rows_left) {
      const auto place = [&](const Statistic& x) {
        return static_cast<float*>(x.data) + work.batch * x.batch + head * x.head +
               (work.q_first + query) * x.row;
      };
      *place(p.lse) = result.lse;
      if (p.max_logit.data) *place(p.max_logit) = result.max_logit;
    }
  }
  if (__any_sync(0xFFFFFFFFu, factor[0] == 0 || factor[1] == 0))  // 0 times anything is not always 0
#pragma unroll
    for (int e = 0; e < n; ++e) out[e] = factor[e / 2 % 2] == 0 ? 0.f : out[e];
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
  using QK = Wgmma<C::kDType, C::kKeys>;
  using PV = Wgmma<C::kDType, C::kHeadDimV>;
  const ForwardParams& p = f.p;
  const int lane = thread % 32, warp_row = warpgroup * 64 + thread / 32 * 16;
  const bool softcapped = C::kGeneral && f.logits.softcap > 0 && !p.score.alibi.data;
  const bool modified = C::kGeneral && (f.logits.softcap > 0 || p.score.alibi.data);
  const float scale = modified ? 1.f : f.logits.scale;
  const Bounds all{-INFINITY, INFINITY}, none{INFINITY, INFINITY};
  // The largest logit is known only if every update is exact.
  const Bounds near = softcapped && !p.max_logit.data ? f.logits.near.bounds : none,
               far = p.max_logit.data ? none : softcapped ? f.logits.far.bounds : all;
  // Keys past the end of a sequence are zeros where the tensor ends, otherwise anything.
  const bool anything_past_end = p.seqlen_k.cu || p.seqlen_k.used;
  Ring<C::kQueryStages> q_ring;
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
    const uint64_t q_rows = shared.q(q_ring.stage).rows_of_k(warpgroup * 64),
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

  // The tile in the Q buffer: read again where it is needed, because registers are scarce.
  const auto rows = [&](int stage) { return ScoreRows<C>(f, shared.get_work(stage), warpgroup, thread); };
  int block;
  bool add;                       // is there an O to add to?
  bool dirty;                     // may rows of V that no query sees be anything but zeros?
  int seen_first, seen_last;      // keys that all rows see
  const auto multiply_pv = [&] {  // O += P V of this block, asynchronously
    const typename Shared::V v = shared.v(v_ring.stage);
    ptx::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
    if (dirty) {
      const VisibleKeys visible = shared.get_work(q_ring.stage).visible;
      const int first = visible.first(0) - block * C::kKeys, last = visible.len_k - block * C::kKeys;
      if (first > 0 || last < C::kKeys) clear_rows(v, first, last, thread, kGroupBarrier + warpgroup);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step)
      PV::template rs<1>(out, weights[step], v.columns_of_n() + Shared::V::row_step(step * 16), step > 0 || add);
    ptx::wgmma_commit_group();
    add = true;
  };
  // Scores become weights.  True: what was added to `out` must be multiplied by softmax.rescale.
  const auto update = [&](int key, auto first_block) {
    constexpr bool kFirst = decltype(first_block)::value;
    const auto hide = [&] {
      if (key + C::kKeys > seen_last) rows(q_ring.stage).hide_after(s, key);
      if (key < seen_first) rows(q_ring.stage).hide_before(s, key);
    };
    if (softmax.far) {
      bool done;
      if (!softcapped && modified) rows(q_ring.stage).modify(s, key);
      hide();
      if (C::kGeneral && softcapped)
        done = softmax.near ? softmax.fast_update<C::kDType, kFirst>(s, [&](float x, float minus) {
          return f.logits.near.template operator()<3>(x, minus);
        })
                            : softmax.fast_update<C::kDType, kFirst>(s, [&](float x, float minus) {
          return f.logits.far.template operator()<5>(x, minus);
        });
      else
        done = softmax.fast_update<C::kDType, kFirst>(
            s, [&](float x, float minus) { return fmaf(x, scale, minus); });
      if (done) return false;
      multiply_again<C>(s, shared.q(q_ring.stage), shared.k(k_ring.stage), warp_row, lane);
    }
    if (modified) rows(q_ring.stage).modify(s, key);
    hide();
    if (kFirst) softmax.forget_reference();
    softmax.exact_update(s, scale, near, far);
    return true;
  };

  for (;; q_ring.advance()) {
    ptx::mbarrier_wait(shared.q_full(q_ring.stage), q_ring.parity);
    int first_block, blocks;
    {
      const ScoreRows<C> tile = rows(q_ring.stage);
      if (tile.work.batch < 0) break;
      first_block = tile.work.first_block;
      blocks = tile.work.blocks;
      block = first_block + blocks - 1;
    }
    const auto prepare = [&] {
      const ScoreRows<C> tile = rows(q_ring.stage);
      seen_first = tile.first();
      seen_last = tile.last();
      dirty = anything_past_end || tile.work.visible.first(0) > 0;
      softmax.start(near, far);
      add = false;
    };
    if (blocks > 0) {
      if constexpr (C::kQueriesInRegisters)
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          ptx::ldmatrix_x4(q_frag[step],
                           shared.q(q_ring.stage).chunk(warp_row + lane % 16, step * 2 + lane / 16));
      ptx::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
      multiply_qk();
      prepare();
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(s);
      update(block * C::kKeys, std::true_type{});
      release_k();
      pack_weights();
      if (C::kQueryStages > 1) release_storing();
      for (; block > first_block; --block) {
        // S of the next block and O of this one; softmax of the next under the second of the two.
        ptx::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
        if (C::kTurns) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
        multiply_qk();
        multiply_pv();
        if (C::kTurns) ptx::bar_arrive(kTurnBarrier + (warpgroup + 1) % C::kWarpgroups, 256);
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
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(out);
      release_v();
    } else {
      if (C::kQueryStages > 1) release_storing();
      prepare();
      softmax.forget_reference();
    }
    const bool copying = store_output<C>(f, shared.o(q_ring.stage), rows(q_ring.stage), softmax, out, warpgroup,
                                         thread);
    storing = q_ring.stage;
    if (C::kQueryStages == 1 || !copying) release_storing();
  }
  if (thread == 0) ptx::cp_async_bulk_wait_group_read();
}

template <class C>
__global__ void __launch_bounds__(ForwardShared<C>::kThreads, C::kBlocks)
    forward_kernel(const __grid_constant__ Forward f) {
  // What the block is launched with is divided again: the producer needs few registers.
  constexpr int kThreads = ForwardShared<C>::kThreads, kAll = 65536 / C::kBlocks / (8 * kThreads) * 8 * kThreads;
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
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < 32) produce<C>(f, shared, threadIdx.x);
  } else {
    ptx::setmaxnreg_inc<(kConsumerRegisters < 240 ? kConsumerRegisters : 240)>();
    consume<C>(f, shared, warpgroup - 1, threadIdx.x % 128);
  }
}

}  // namespace flashattn::sm90
