// Forward attention on Hopper (sm_90a).
//   O = softmax(scale Q K^T) V, lse = log sum exp: a block takes tile after tile of kRows queries of a head.
//   Two warps have the copy engine bring Q, K and V into rings of shared-memory tiles, a third has it store
//   O; each of the kWarpgroups other warpgroups multiplies 64 of the rows with all keys.  Scores and weights
//   stay in registers.  While a warpgroup computes its softmax, the tensor cores work for the others: kTurns
//   makes them go in turns.
#pragma once

#include <type_traits>

#include "common/cache.cuh"
#include "sm90/schedule.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma.cuh"

namespace flashattn::sm90 {

struct Forward {
  CUtensorMap q, k, v, out;  // dimensions: column, head within a unit, row, unit, batch
  ForwardParams p;
  Schedule schedule;
  Logits logits;
  Divisor page_size;  // of a cache, whose maps have boxes of so many rows
  int box_rows;
};

constexpr int kWorkStages = 2;  // tiles that producers and warpgroups may be apart
constexpr int kLongTile = 3;    // blocks after the first, in which Q of the next tile arrives

// Shared memory of a block: tiles, then the barriers that say who may touch them.  O takes the place of Q;
// but where there is one place for Q, that is left to the next tile's, and the O of each warpgroup takes the
// turn of a V.
template <class C>
struct ForwardShared {
  static constexpr bool kOutputInValues = C::kQueryStages == 1;
  using Q = SlabTile<C::kRows, C::kHeadDim>;
  using K = SlabTile<C::kKeys, C::kHeadDim>;
  using V = SlabTile<C::kKeys, C::kHeadDimV>;
  using O = SlabTile<kOutputInValues ? 64 : C::kRows, C::kHeadDimV>;
  // So that the place of an O has been copied before the same warpgroup writes its next one.
  static_assert(!kOutputInValues || (O::kBytes <= V::kBytes && C::kValueStages <= C::kWarpgroups));
  static constexpr int kThreads = (C::kWarpgroups + 1) * 128, kAlignment = 1024;
  static constexpr int kKeyLanes = C::kCached ? 32 : 1;  // that load K and V
  static constexpr int kQueryBytes = kOutputInValues || Q::kBytes > O::kBytes ? Q::kBytes : O::kBytes;
  static constexpr int kKeyPlace = C::kQueryStages * kQueryBytes,
                       kValuePlace = kKeyPlace + C::kKeyStages * K::kBytes;
  static constexpr int kBarrierPlace = kValuePlace + C::kValueStages * V::kBytes;
  static constexpr int kFull = C::kQueryStages + C::kKeyStages + C::kValueStages + kWorkStages,
                       kBarriers = 2 * kFull + C::kQueryStages * C::kWarpgroups;
  static constexpr int kWorkPlace = kBarrierPlace + (kBarriers * 8 + 15) / 16 * 16;
  static constexpr int kWorkVectors = sizeof(Work) / 16, kWorkBytes = (kWorkVectors + C::kWarpgroups) * 16;
  static constexpr int kLsePlace = kWorkPlace + kWorkStages * kWorkBytes;
  static constexpr int kBytes = kAlignment + kLsePlace + kWorkStages * C::kRows * 4;

  uint32_t base = (ptx::shared_address(shared_memory) + kAlignment - 1) / kAlignment * kAlignment;

  __device__ Q q(int stage) const { return {base + stage * kQueryBytes}; }
  __device__ K k(int stage) const { return {base + kKeyPlace + stage * K::kBytes}; }
  __device__ V v(int stage) const { return {base + kValuePlace + stage * V::kBytes}; }
  // Of a warpgroup; the stage is that of Q or of V.
  __device__ O o(int stage, int warpgroup) const {
    if (kOutputInValues) return {v(stage).base};
    return {q(stage).base + warpgroup * 64 * 128};
  }

  // full: the copy engine has filled the tile, or it is a V's turn that O may take; the place of a Work has
  // been written; every thread of a warpgroup has written its part of O.
  // empty: every warp is done with K or V, or O has been copied from there; the same of Q; the threads that
  // load K and V and that copy O are done with a Work, the latter for the warpgroups too.
  __device__ uint32_t q_full(int stage) const { return barrier(stage); }
  __device__ uint32_t k_full(int stage) const { return barrier(C::kQueryStages + stage); }
  __device__ uint32_t v_full(int stage) const { return barrier(C::kQueryStages + C::kKeyStages + stage); }
  __device__ uint32_t work_full(int stage) const {
    return barrier(C::kQueryStages + C::kKeyStages + C::kValueStages + stage);
  }
  __device__ uint32_t q_empty(int stage) const { return q_full(stage) + kFull * 8; }
  __device__ uint32_t k_empty(int stage) const { return k_full(stage) + kFull * 8; }
  __device__ uint32_t v_empty(int stage) const { return v_full(stage) + kFull * 8; }
  __device__ uint32_t work_empty(int stage) const { return work_full(stage) + kFull * 8; }
  __device__ uint32_t o_full(int stage, int warpgroup) const {
    return barrier(2 * kFull + stage * C::kWarpgroups + warpgroup);
  }

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

  __device__ uint32_t lse(int work_stage, int row) const {
    return base + kLsePlace + (work_stage * C::kRows + row) * 4;
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < C::kQueryStages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), kOutputInValues ? C::kWarpgroups * 4 : 1);
      for (int warpgroup = 0; warpgroup < C::kWarpgroups; ++warpgroup)
        ptx::mbarrier_init(o_full(i, warpgroup), 128);
    }
    for (int i = 0; i < C::kKeyStages; ++i)
      ptx::mbarrier_init(k_full(i), 1), ptx::mbarrier_init(k_empty(i), C::kWarpgroups * 4);
    for (int i = 0; i < C::kValueStages; ++i)
      ptx::mbarrier_init(v_full(i), 1), ptx::mbarrier_init(v_empty(i), C::kWarpgroups * 4);
    for (int i = 0; i < kWorkStages; ++i)
      ptx::mbarrier_init(work_full(i), C::kWarpgroups), ptx::mbarrier_init(work_empty(i), kKeyLanes + 1);
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ uint32_t barrier(int index) const { return base + kBarrierPlace + index * 8; }
  __device__ uint32_t work_place(int stage, int vector) const {
    return base + kWorkPlace + stage * kWorkBytes + vector * 16;
  }
};

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
    if (!more) break;
    ptx::mbarrier_wait(shared.q_empty(q_ring.stage), q_ring.parity ^ 1);
    if (lane == 0)
      load_tile(shared.q(q_ring.stage), f.q, shared.q_full(q_ring.stage), ptx::kEvictFirst,
                work.q_first + (work.row >> f.schedule.group), work.unit, f.p.seqlen_q.cu ? 0 : work.batch);
  }
  tiles.finish();
}

// Where the copy engine finds the blocks of keys of a tile.
template <class C>
struct KeyBlocks {
  using Place = int;
  const Forward& f;
  int head, batch, first_row;

  __device__ KeyBlocks(const Forward& forward, const Work& work)
      : f(forward),
        head(forward.schedule.units_of_k.divide(work.unit)),
        batch(forward.p.seqlen_k.cu ? 0 : work.batch),
        first_row(work.k_first) {}

  __device__ Place find(int key, int) const { return first_row + key; }

  template <class T>
  __device__ void load(const T& to, const CUtensorMap& map, uint32_t full, Place row, int) const {
    load_tile(to, map, full, ptx::kEvictLast, row, head, batch);
  }
};

// The same in a cache: a lane brings the box of rows that lies in one page, if any of them counts.
template <class C>
struct CachedKeyBlocks {
  struct Place {
    bool counts;
    int page, row;
  };
  const Forward& f;
  CacheRows<const uint16_t> rows;
  int head, entry, last;

  __device__ CachedKeyBlocks(const Forward& forward, const Work& work)
      : f(forward),
        rows(forward.p, forward.p.k, work.batch, 0),
        head(forward.schedule.units_of_k.divide(work.unit)),
        entry(static_cast<int>(cache_entry(forward.p, work.batch))),
        last(work.visible.len_k) {}

  __device__ Place find(int key, int lane) const {
    const int own = key + lane * f.box_rows;
    if (lane * f.box_rows >= C::kKeys || own >= last) return {};
    if (!rows.pages) return {true, entry, own};
    const CachePlace place = rows.find(own, f.page_size);
    return {true, static_cast<int>(place.page), static_cast<int>(place.row)};
  }

  template <class T>
  __device__ void load(const T& to, const CUtensorMap& map, uint32_t full, const Place& place,
                       int lane) const {
    const int boxes = __popc(__ballot_sync(0xFFFFFFFFu, place.counts));
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, boxes * f.box_rows * T::kSlabs * 128);
    __syncwarp();
    if (!place.counts) return;
#pragma unroll
    for (int slab = 0; slab < T::kSlabs; ++slab)
      ptx::cp_async_bulk_tensor_load(to.base + slab * T::kSlabBytes + lane * f.box_rows * 128, &map, full,
                                     ptx::kEvictLast, slab * 64, 0, place.row, head, place.page);
  }
};

// What one thread of another does, or all of it for a cache: loads the blocks of K and V from the first to
// the last, as they are needed, V one step after K.  The turns that O takes after the last V of a tile it
// gives away no sooner than the next tile needs a V: its first K must not wait for them.
template <class C>
__device__ inline void produce_keys(const Forward& f, const ForwardShared<C>& shared, int lane) {
  using Blocks = std::conditional_t<C::kCached, CachedKeyBlocks<C>, KeyBlocks<C>>;
  Ring<kWorkStages> work_ring;
  Ring<C::kKeyStages> k_ring;
  Ring<C::kValueStages> v_ring;
  int turns_of_output = 0;
  const auto give_turns = [&] {
    for (; turns_of_output > 0; --turns_of_output, v_ring.advance()) {
      ptx::mbarrier_wait(shared.v_empty(v_ring.stage), v_ring.parity ^ 1);
      if (lane == 0) ptx::mbarrier_arrive(shared.v_full(v_ring.stage));
    }
  };
  for (;; work_ring.advance()) {
    ptx::mbarrier_wait(shared.work_full(work_ring.stage), work_ring.parity);
    const Work work = shared.get_work(work_ring.stage);
    ptx::mbarrier_arrive(shared.work_empty(work_ring.stage));
    if (work.batch < 0) break;
    const Blocks blocks(f, work);
    typename Blocks::Place place{}, before{};
    int key = work.first_block * C::kKeys;
#pragma unroll 1
    for (int step = 0; step <= work.blocks && work.blocks > 0; ++step, key += C::kKeys) {
      if (step < work.blocks) {
        place = blocks.find(key, lane);
        ptx::mbarrier_wait(shared.k_empty(k_ring.stage), k_ring.parity ^ 1);
        blocks.load(shared.k(k_ring.stage), f.k, shared.k_full(k_ring.stage), place, lane);
        k_ring.advance();
      }
      if (step > 0) {
        give_turns();
        ptx::mbarrier_wait(shared.v_empty(v_ring.stage), v_ring.parity ^ 1);
        blocks.load(shared.v(v_ring.stage), f.v, shared.v_full(v_ring.stage), before, lane);
        v_ring.advance();
      }
      before = place;
    }
    if (ForwardShared<C>::kOutputInValues) turns_of_output += C::kWarpgroups;
    if (work.blocks == 0) give_turns();
  }
  give_turns();
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
    if (logits.softcap > 0) {
#pragma unroll
      for (int e = 0; e < kScores; ++e) s[e] = logits.cap(s[e]);
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

__device__ inline float* row_statistic(const Statistic& x, const Work& work, int head, int query) {
  return static_cast<float*>(x.data) + work.batch * x.batch + head * x.head + (work.q_first + query) * x.row;
}

// What normalises the lane's two rows, 0 if one sees no key.  Their LSE goes to shared memory, from where it
// is stored with O.
template <class C>
__device__ inline void finish_rows(const Forward& f, const ForwardShared<C>& shared, int work_stage,
                                   const ScoreRows<C>& rows, const OnlineSoftmax& softmax,
                                   float (&factor)[2]) {
  const ForwardParams& p = f.p;
  const Work& work = rows.work;
  const auto row = [&](int half) { return rows.lane_row + 8 * half; };
  const auto query = [&](int half) { return (rows.first_row + row(half)) >> f.schedule.group; };
  const bool counts[2] = {query(0) < work.visible.len_q, query(1) < work.visible.len_q};
  float sink[2] = {-INFINITY, -INFINITY};
  if (p.score.sink.data)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (counts[half])
        sink[half] =
            load_number(p.score.sink.data, p.score.sink.dtype, rows.head(row(half)) * p.score.sink.head);
  RowResult result[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reference =
        counts[half] && softmax.top[half] > -INFINITY ? softmax.reference[half] : -INFINITY;
    result[half] = finish_row(quad_sum(counts[half] ? softmax.sum[half] : 0.f), reference, sink[half]);
    factor[half] = result[half].factor;
  }
  if (rows.lane % 4 > 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    ptx::st_shared_4(shared.lse(work_stage, rows.first_row - work.row + row(half)),
                     __float_as_uint(result[half].lse));
  if (p.max_logit.data)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (query(half) < work.q_allotted)
        *row_statistic(p.max_logit, work, rows.head(row(half)), query(half)) = result[half].max_logit;
}

// How many of a warpgroup's 64 rows exist, at most.
__device__ inline int rows_left(const Work& work, int group, int warpgroup) {
  return (work.q_allotted << group) - work.row - warpgroup * 64;
}

// May the copy engine store these rows?  It knows where the tensor ends, not where a sequence does.
__device__ inline bool stored_by_copy(const ForwardParams& p, int rows) {
  return rows >= 64 || !p.seqlen_q.cu;
}

// What a third warp does: stores LSE, has O stored, and frees its place.
template <class C>
__device__ inline void store_outputs(const Forward& f, const ForwardShared<C>& shared, int lane) {
  using Shared = ForwardShared<C>;
  using O = typename Shared::O;
  Ring<kWorkStages> work_ring;
  Ring<C::kQueryStages> q_ring;
  int values = 0;  // turns of V so far
  const int group = f.schedule.group;
  for (;; work_ring.advance(), q_ring.advance()) {
    ptx::mbarrier_wait(shared.work_full(work_ring.stage), work_ring.parity);
    const Work work = shared.get_work(work_ring.stage);
    if (work.batch < 0) break;
    values += work.blocks;
#pragma unroll
    for (int warpgroup = 0; warpgroup < C::kWarpgroups; ++warpgroup, ++values) {
      ptx::mbarrier_wait(shared.o_full(q_ring.stage, warpgroup), q_ring.parity);
      const int rows = rows_left(work, f.schedule.group, warpgroup);
      const int stage = Shared::kOutputInValues ? values % C::kValueStages : q_ring.stage;
      if (lane == 0 && rows > 0 && stored_by_copy(f.p, rows))
#pragma unroll
        for (int slab = 0; slab < O::kSlabs; ++slab)
          ptx::cp_async_bulk_tensor_store(&f.out, shared.o(stage, warpgroup).base + slab * O::kSlabBytes,
                                          slab * 64, 0,
                                          work.q_first + ((work.row + warpgroup * 64) >> f.schedule.group),
                                          work.unit, f.p.seqlen_q.cu ? 0 : work.batch);
      if (lane == 0) ptx::cp_async_bulk_commit_group();
      if (Shared::kOutputInValues) {  // for all warps
        if (lane == 0) ptx::cp_async_bulk_wait_group_read();
        __syncwarp();
        if (lane < C::kWarpgroups * 4) ptx::mbarrier_arrive(shared.v_empty(stage));
      }
    }
    for (int row = lane; row < C::kRows; row += 32) {
      const int query = (work.row + row) >> group,
                head = (work.unit << group) + ((work.row + row) & ((1 << group) - 1));
      if (query < work.q_allotted)
        *row_statistic(f.p.lse, work, head, query) = ptx::ld_shared_f32(shared.lse(work_ring.stage, row));
    }
    __syncwarp();  // all lanes have read the description and LSE
    if (lane == 0) ptx::mbarrier_arrive(shared.work_empty(work_ring.stage));
    if (!Shared::kOutputInValues && lane == 0) {
      ptx::cp_async_bulk_wait_group_read();
      ptx::mbarrier_arrive(shared.q_empty(q_ring.stage));
    }
  }
}

// Normalised rows to shared memory, from where they are stored.
template <class C, int n>
__device__ inline void write_output(const Forward& f, const ForwardShared<C>& shared, int q_stage,
                                    const typename ForwardShared<C>::O& o, const Work& work, float (&out)[n],
                                    const float (&factor)[2], int warpgroup, int warpgroup_thread) {
  const ForwardParams& p = f.p;
  const int thread = ptx::recomputed(warpgroup_thread), lane = thread % 32;
#pragma unroll
  for (int j = 0; j < n / 4; j += 2) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 4 * (j + i / 2) + 2 * (i % 2);
      x[i] = ptx::cvt_pack<C::kDType>(out[e] * factor[i % 2], out[e + 1] * factor[i % 2]);
    }
    ptx::stmatrix_x4(o.chunk(thread / 32 * 16 + lane % 16, j + lane / 16), x[0], x[1], x[2], x[3]);
  }
  const int rows = rows_left(work, f.schedule.group, warpgroup);
  if (!stored_by_copy(p, rows)) {  // the next sequence begins in this tile
    const ScoreRows<C> of(f, work, warpgroup, thread);
    constexpr int kChunks = C::kHeadDimV / kChunk;
    __syncwarp();
    for (int i = lane; i < 16 * kChunks; i += 32) {
      const int row = thread / 32 * 16 + i / kChunks, chunk = i % kChunks;
      if (row < rows && chunk * kChunk < p.head_dim_v)
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out.data) + of.head(row) * p.out.head +
                                  (work.q_first + ((of.first_row + row) >> f.schedule.group)) * p.out.row +
                                  chunk * kChunk) = ptx::ld_shared_16(o.chunk(row, chunk));
    }
  }
  ptx::fence_proxy_async();
  // Every thread arrives: a branch for one lane costs ptxas the uniform registers of the loop.
  ptx::mbarrier_arrive(shared.o_full(q_stage, warpgroup));
}

template <class C>
__device__ inline void consume(const Forward& f, const ForwardShared<C>& shared, int warpgroup, int thread) {
  using Shared = ForwardShared<C>;
  constexpr int kScores = C::kKeys / 2, kOutputs = C::kHeadDimV / 2, kSteps = C::kHeadDim / 16;
  constexpr bool kWeighFirst = C::kWarpgroups < 3;  // before O is rescaled: docs/sm90_forward.md, row 41
  using PV = Wgmma<C::kDType, C::kHeadDimV>;
  const ForwardParams& p = f.p;
  const int lane = thread % 32, warp_row = warpgroup * 64 + thread / 32 * 16;
  const bool softcapped = C::kGeneral && f.logits.softcap > 0 && !p.score.alibi.data;
  const bool modified = C::kGeneral && (f.logits.softcap > 0 || p.score.alibi.data);
  const float scale = modified ? 1.f : f.logits.scale;
  // Rows past the end of a sequence are zeros where the tensor ends, otherwise anything.
  const bool anything_past_queries = p.seqlen_q.cu || p.seqlen_q.used,
             anything_past_keys = C::kCached || p.seqlen_k.cu || p.seqlen_k.used;
  Ring<C::kKeyStages> k_ring;
  Ring<C::kValueStages> v_ring;
  float s[kScores], out[kOutputs];
  uint32_t weights[C::kKeys / 16][4], q_frag[C::kQueriesInRegisters ? kSteps : 1][4];
  OnlineSoftmax softmax{};
  if (C::kTurns && warpgroup == 0) ptx::bar_arrive(kTurnBarrier, 256);

  // The tile whose scores are computed.
  int tile = 0, work_stage, q_stage;
  int first_block, last_block, block;  // the tile's, and the one whose weights come next
  int own_first, own_last;             // of the blocks those that this warpgroup needs
  int seen_first, seen_last;           // keys that all rows see
  bool dirty;                          // is_dirty: may rows of V that no query sees be anything but zeros?
  bool add;                            // is there an O to add to?
  // Its description is read again wherever it is needed, because registers are scarce.
  const auto rows_of = [&](int stage) { return ScoreRows<C>(f, shared.get_work(stage), warpgroup, thread); };

  bool k_is_there = false;  // the next K, as far as was asked
  const auto ask_for_k = [&] { k_is_there = ptx::mbarrier_test(shared.k_full(k_ring.stage), k_ring.parity); };
  const auto wait_for_k = [&] {
    if (!k_is_there) ptx::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
  };
  const auto release_k = [&] {
    if (lane == 0) ptx::mbarrier_arrive(shared.k_empty(k_ring.stage));
    k_ring.advance();
    k_is_there = false;
  };
  const auto release_v = [&] {
    if (lane == 0) ptx::mbarrier_arrive(shared.v_empty(v_ring.stage));
    v_ring.advance();
  };
  const auto release_q = [&](bool done) {
    if (Shared::kOutputInValues && done && lane == 0) ptx::mbarrier_arrive(shared.q_empty(q_stage));
  };
  const auto take_turn = [&] {
    if (C::kTurns) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
  };
  const auto pass_turn = [&] {
    if (C::kTurns) ptx::bar_arrive(kTurnBarrier + (warpgroup + 1) % C::kWarpgroups, 256);
  };
  // A block that other warpgroups need.
  const auto skip_block = [&] {
    wait_for_k();
    release_k();
    ptx::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
    release_v();
    take_turn(), pass_turn();  // every block has one
  };

  const auto is_dirty = [&](const Work& work) { return anything_past_keys || work.visible.first(0) > 0; };

  // Waits for a tile and its Q.  False: there is none.
  const auto open_tile = [&] {
    work_stage = tile % kWorkStages;
    q_stage = tile % C::kQueryStages;
    ptx::mbarrier_wait(shared.work_full(work_stage), tile / kWorkStages % 2);
    const Work work = shared.get_work(work_stage);
    if (work.batch < 0) return false;
    const Share own = shared.get_share(work_stage, warpgroup);
    own_first = own.first_block, own_last = own.last_block;
    seen_first = own.seen_first, seen_last = own.seen_last;
    dirty = is_dirty(work);
    first_block = work.first_block, last_block = work.last_block();
    ptx::mbarrier_wait(shared.q_full(q_stage), tile / C::kQueryStages % 2);
    // What lies past a sequence's end must not take part in the votes of a warp.
    const int queries = (work.visible.len_q << f.schedule.group) - work.row - warpgroup * 64;
    if (anything_past_queries && queries < 64)
      clear_rows<64>(shared.q(q_stage), warpgroup * 64, 0, queries, thread, kGroupBarrier + warpgroup);
    return true;
  };
  const auto load_queries = [&] {
    if constexpr (C::kQueriesInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        ptx::ldmatrix_x4(q_frag[step], shared.q(q_stage).chunk(warp_row + lane % 16, step * 2 + lane / 16));
    }
  };
  const auto multiply_qk = [&] {  // S = Q K^T, asynchronously
    using QK = Wgmma<C::kDType, C::kKeys>;
    // Descriptors of Q are computed again: there are not enough uniform registers to keep them.
    const typename Shared::Q q{static_cast<uint32_t>(ptx::recomputed(shared.q(q_stage).base))};
    const uint64_t q_rows = q.rows_of_k(warpgroup * 64), k_rows = shared.k(k_ring.stage).rows_of_k(0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if constexpr (C::kQueriesInRegisters)
        QK::template rs<0>(s, q_frag[step], k_rows + Shared::K::k_step(step * 16), step > 0);
      else
        QK::ss(s, q_rows + Shared::Q::k_step(step * 16), k_rows + Shared::K::k_step(step * 16), step > 0);
    ptx::wgmma_commit_group();
  };
  uint32_t remainder[4];  // what rounding takes from the weights of a block's first 16 keys: see
                          // docs/sm90_forward.md, Softmax
  const auto has_remainder = [](int block) { return block % 8 == 0; };
  const auto keep_remainder = [&] {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 rounded = ptx::cvt_unpack<C::kDType>(weights[0][i]);
      remainder[i] = ptx::cvt_pack<C::kDType>(s[2 * i] - rounded.x, s[2 * i + 1] - rounded.y);
    }
  };
  const auto multiply_pv = [&](int stage, bool clear) {  // O += P V of this block, asynchronously
    const typename Shared::V v = shared.v(v_ring.stage);
    ptx::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
    if (clear) {
      const VisibleKeys visible = shared.get_work(stage).visible;
      const int first = visible.first(0) - block * C::kKeys, last = visible.len_k - block * C::kKeys;
      if (first > 0 || last < C::kKeys)  // weights are 0 there, but 0 * NaN is NaN
        clear_rows<C::kKeys>(v, 0, first, last, thread, kGroupBarrier + warpgroup);
    }
    if (has_remainder(block)) {  // a group of its own: ptxas would wait for all of one with a branch in it
      ptx::wgmma_fence();
      PV::template rs<1>(out, remainder, v.columns_of_n(), add);
      ptx::wgmma_commit_group();
      add = true;
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step)
      PV::template rs<1>(out, weights[step], v.columns_of_n() + Shared::V::row_step(step * 16),
                         step > 0 || add);
    ptx::wgmma_commit_group();
    add = true;
  };
  const auto hide = [&](int key) {
    if (key < seen_first || key + C::kKeys > seen_last) rows_of(work_stage).hide(s, key);
  };
  const auto find_largest = [&](int key) {
    if (modified && !softcapped) rows_of(work_stage).modify(s, key);
    hide(key);
    const auto logit = [&](float x) { return C::kGeneral && softcapped ? f.logits.cap(x) : x * scale; };
    softmax.raise(s, logit);
  };
  const auto weigh = [&](int key) {  // scores become weights
    const Logits& logits = f.logits;
    if (!(C::kGeneral && softcapped)) {
      softmax.weigh(s, [&](float x, float minus) { return fmaf(x, scale, minus); });
    } else if (softmax.within(logits.near.bounds)) {
      softmax.weigh(s, [&](float x, float minus) { return logits.near.template at<3>(x, minus); });
    } else if (softmax.within(logits.far.bounds)) {
      softmax.weigh(s, [&](float x, float minus) { return logits.far.template at<5>(x, minus); });
    } else {
      rows_of(work_stage).modify(s, key);
      hide(key);
      softmax.weigh(s, [&](float x, float minus) { return x + minus; });
    }
  };
  const auto round_weights = [&](int of) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      weights[i / 4][i % 4] = ptx::cvt_pack<C::kDType>(s[2 * i], s[2 * i + 1]);
    if (has_remainder(of)) keep_remainder();
  };
  const auto rescale_output = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (softmax.grown[half])
#pragma unroll
        for (int e = 0; e < kOutputs; ++e)
          if (e / 2 % 2 == half) out[e] *= softmax.rescale[half];
  };
  float factor[2] = {0, 0};            // of the rows of O
  const auto clear_empty_rows = [&] {  // 0 times anything is not always 0
    if (!__any_sync(0xFFFFFFFFu, factor[0] == 0 || factor[1] == 0)) return;
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) out[e] = factor[e / 2 % 2] == 0 ? 0.f : out[e];
  };

  const auto write = [&](int ended) {
    const int stage_of_q = ended % C::kQueryStages;
    int place = stage_of_q;
    if constexpr (Shared::kOutputInValues) {
#pragma unroll
      for (int i = 0; i < C::kWarpgroups; ++i, v_ring.advance())
        if (i == warpgroup) {
          place = v_ring.stage;
          ptx::mbarrier_wait(shared.v_full(place), v_ring.parity);
        }
    }
    write_output<C>(f, shared, stage_of_q, shared.o(place, warpgroup), shared.get_work(ended % kWorkStages),
                    out, factor, warpgroup, thread);
  };

  for (; open_tile(); ++tile) {
#pragma unroll 1
    for (block = first_block; block < own_first && block <= last_block; ++block) skip_block();
    if (own_first > own_last) {
      release_q(true);
      softmax.start();
      finish_rows<C>(f, shared, work_stage, rows_of(work_stage), softmax, factor);
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) out[e] = 0;
      write(tile);
      continue;
    }
    load_queries();
    wait_for_k();
    multiply_qk();
    softmax.start();
    add = false;
    ptx::wgmma_wait_group<0>();
    ptx::written_by_wgmma(s);
    release_k();
    release_q(block == own_last);
    find_largest(block * C::kKeys);
    weigh(block * C::kKeys);
    round_weights(block);
    for (;;) {
      for (; block < own_last; ++block) {
        // S of the next block and O of this one; under the second, the largest scores of the next.
        wait_for_k();
        take_turn();
        multiply_qk();
        multiply_pv(work_stage, dirty);
        pass_turn();
        ptx::wgmma_wait_group<1>();
        ptx::written_by_wgmma(s);
        release_k();
        release_q(block + 1 == own_last);
        const int next_key = (block + 1) * C::kKeys;
        find_largest(next_key);
        if (kWeighFirst) weigh(next_key);
        ptx::wgmma_wait_group<0>();
        ptx::written_by_wgmma(out);
        release_v();
        ask_for_k();
        if (!kWeighFirst) rescale_output(), weigh(next_key);
        round_weights(block + 1);
        if (kWeighFirst) rescale_output();
      }
      // The last block of the tile goes together with the first of the next one, if the warpgroup skips none
      // between them.
      bool join = false;
      if (C::kTurns && C::kQueryStages > 1 && block == last_block && last_block - first_block >= kLongTile) {
        ++tile;
        join = open_tile() && own_first <= own_last && own_first == first_block;
        if (!join) --tile;
      }
      if (!join) break;
      load_queries();
      wait_for_k();
      const int ended = tile - 1, stage = ended % kWorkStages;
      const bool clear = is_dirty(shared.get_work(stage));
      take_turn();
      multiply_qk();
      multiply_pv(stage, clear);
      pass_turn();
      finish_rows<C>(f, shared, stage, rows_of(stage), softmax, factor);
      softmax.start();
      add = false;
      block = first_block;
      ptx::wgmma_wait_group<1>();
      ptx::written_by_wgmma(s);
      release_k();
      find_largest(block * C::kKeys);
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(out);
      release_v();
      weigh(block * C::kKeys);
      round_weights(block);
      clear_empty_rows();
      write(ended);
    }
    const int stage = tile % kWorkStages;
    const bool clear = is_dirty(shared.get_work(stage));
    take_turn();
    multiply_pv(stage, clear);
    pass_turn();
    finish_rows<C>(f, shared, stage, rows_of(stage), softmax, factor);
    const bool empty_rows = __any_sync(0xFFFFFFFFu, factor[0] == 0 || factor[1] == 0);
    if (empty_rows) ptx::hold();
    ptx::wgmma_wait_group<0>();
    ptx::written_by_wgmma(out);
    release_v();
#pragma unroll 1
    for (int unseen = shared.get_work(stage).last_block() - block; unseen > 0; --unseen) skip_block();
    clear_empty_rows();
    write(tile);
  }
}

template <class C>
__global__ void __launch_bounds__(ForwardShared<C>::kThreads, C::kBlocks)
    forward_kernel(const __grid_constant__ Forward f) {
  // What the block is launched with is divided again: producers need few registers.
  constexpr int kThreads = ForwardShared<C>::kThreads,
                kAll = 65536 / C::kBlocks / (8 * kThreads) * 8 * kThreads;
  constexpr int kOfMatrices = C::kKeys * 3 / 4 + C::kHeadDimV / 2;  // S, P and O
  constexpr bool kScarce = C::kWarpgroups == 3 && kOfMatrices >= 120;
  constexpr int kProducerRegisters = kScarce ? 32 : 40,
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
    if (threadIdx.x < ForwardShared<C>::kKeyLanes) produce_keys<C>(f, shared, threadIdx.x);
    if (threadIdx.x / 32 == 1) produce_queries<C>(f, shared, threadIdx.x % 32);
    if (threadIdx.x / 32 == 2) store_outputs<C>(f, shared, threadIdx.x % 32);
  } else {
    ptx::setmaxnreg_inc<(kConsumerRegisters < 240 ? kConsumerRegisters : 240)>();
    consume<C>(f, shared, warpgroup - 1, threadIdx.x % 128);
  }
}

}  // namespace flashattn::sm90
