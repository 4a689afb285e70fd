// Decode on Hopper (sm_90a) where values are the first columns of the keys, as absorbed MLA has them.
//   O = softmax(scale Q K^T) V, V = K[:, :Dv].  Rows of a tile are the queries of every head of a KV head's
//   group, 64 of them; all stay in shared memory beside two tiles of 64 keys, which the copy engine brings.
//   The scores of a tile of keys are computed once, by one of two warpgroups in turn: it leaves the weights
//   to the other one in the place of the key columns that are no values.  Each adds the products of all
//   weights with one half of the columns of V.  While one computes its softmax, the scores of the next tile
//   begin in the other one (docs/decode.md).
#pragma once

#include "mma/decode.cuh"
#include "sm90/forward.cuh"

namespace flashattn::sm90 {

// A decode, and how the copy engine finds keys (make_slab_map): 8 rows of half of V, and of what is behind V.
struct LatentDecode {
  CUtensorMap half, tail;
  Decode d;
};

// Shared memory of a block: Q, two tiles of keys, barriers and what the warpgroups tell each other.
template <class C>
struct DecodeShared {
  using Q = SlabTile<C::kRows, C::kHeadDim>;
  static constexpr int kSlabs = (C::kHeadDim + 63) / 64;
  using K = SlabTile<C::kKeys, C::kHeadDim, kSlabs>;
  using V = SlabTile<C::kKeys, C::kHeadDimV, kSlabs>;
  using HalfV = SlabTile<C::kKeys, C::kHeadDimV / 2, kSlabs>;
  using P = SlabTile<C::kRows, C::kKeys, kSlabs>;
  static constexpr int kThreads = 384, kAlignment = 1024, kStages = 2, kPartStages = 2;
  // A tile arrives and leaves in three groups of slabs: the halves of V, and what is behind them.
  static constexpr int kGroups = 3, kTail = 2, kHalfSlabs = HalfV::kSlabs,
                       kTailSlabs = K::kSlabs - 2 * kHalfSlabs;
  static_assert(C::kRows == 64 && C::kKeys == 64, "one product of a warpgroup, one box");
  static_assert(kTailSlabs > 0 && P::kSlabs <= kTailSlabs, "weights take the place of the tail");
  static constexpr int kKeyPlace = Q::kBytes, kBarrierPlace = kKeyPlace + kStages * K::kBytes;
  static constexpr int kFull = 0, kEmpty = kFull + kStages * kGroups, kWeights = kEmpty + kStages * kGroups,
                       kPartFull = kWeights + kStages, kPartEmpty = kPartFull + kPartStages,
                       kTotals = kPartEmpty + kPartStages, kBarriers = kTotals + kPartStages;
  static constexpr int kReferencePlace = kBarrierPlace + (kBarriers * 8 + 15) / 16 * 16,
                       kTotalPlace = kReferencePlace + kStages * C::kRows * 4,
                       kPartPlace = kTotalPlace + kPartStages * 2 * C::kRows * 4,
                       kScratchPlace = kPartPlace + kPartStages * sizeof(Part), kScratchBytes = 128;
  static_assert(UnitFinder<kThreads, C::kRows>::kScratchBytes <= kScratchBytes);
  static constexpr int kBytes = kAlignment + kScratchPlace + kScratchBytes;

  uint32_t base = (ptx::shared_address(shared_memory) + kAlignment - 1) / kAlignment * kAlignment;

  __device__ Q q() const { return {base}; }
  __device__ K k(int stage) const { return {base + kKeyPlace + stage * K::kBytes}; }
  __device__ V v(int stage) const { return {k(stage).base}; }
  __device__ HalfV half_v(int stage, int half) const {
    return {k(stage).base + half * kHalfSlabs * K::kSlabBytes};
  }
  __device__ P weights(int stage) const { return {k(stage).base + 2 * kHalfSlabs * K::kSlabBytes}; }

  // full: the copy engine has filled the group of slabs; the weights are there.  empty: warps that were the
  // last to read it are done with it.
  __device__ uint32_t full(int stage, int group) const { return barrier(kFull + stage * kGroups + group); }
  __device__ uint32_t empty(int stage, int group) const { return barrier(kEmpty + stage * kGroups + group); }
  __device__ uint32_t weights_full(int stage) const { return barrier(kWeights + stage); }
  __device__ uint32_t part_full(int stage) const { return barrier(kPartFull + stage); }
  __device__ uint32_t part_empty(int stage) const { return barrier(kPartEmpty + stage); }
  __device__ uint32_t totals_full(int stage) const { return barrier(kTotals + stage); }

  // What the weights of a tile are relative to; the sums of a warpgroup's weights.
  __device__ uint32_t reference(int stage, int row) const {
    return base + kReferencePlace + (stage * C::kRows + row) * 4;
  }
  __device__ uint32_t total(int part_stage, int warpgroup, int row) const {
    return base + kTotalPlace + ((part_stage * 2 + warpgroup) * C::kRows + row) * 4;
  }
  __device__ Part& part(int stage) const { return reinterpret_cast<Part*>(at(kPartPlace))[stage]; }
  __device__ int64_t* scratch() const { return reinterpret_cast<int64_t*>(at(kScratchPlace)); }

  __device__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int group = 0; group < kGroups; ++group)
        ptx::mbarrier_init(full(stage, group), 1), ptx::mbarrier_init(empty(stage, group), 4);
      ptx::mbarrier_init(weights_full(stage), 128);
    }
    for (int stage = 0; stage < kPartStages; ++stage)
      ptx::mbarrier_init(part_full(stage), 1), ptx::mbarrier_init(part_empty(stage), 256),
          ptx::mbarrier_init(totals_full(stage), 256);
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ uint32_t barrier(int index) const { return base + kBarrierPlace + index * 8; }
  __device__ char* at(int place) const {
    return reinterpret_cast<char*>(shared_memory) + (base - ptx::shared_address(shared_memory)) + place;
  }
};

// Tiles of keys of a part: the first one begins at a multiple of kUnitKeys.
__device__ inline int first_tile_key(const Part& part) { return part.first / kUnitKeys * kUnitKeys; }

// What a warp does: brings one group of slabs of every tile, a lane 8 rows.
template <class C, class Parts>
__device__ inline void produce_keys(const LatentDecode& f, const DecodeShared<C>& shared, Parts& parts,
                                    int group, int lane) {
  using Shared = DecodeShared<C>;
  constexpr int kRowGroups = C::kKeys / 8;
  const Decode& d = f.d;
  const bool tail = group == Shared::kTail;
  const CUtensorMap* map = tail ? &f.tail : &f.half;
  const int slab = group * Shared::kHalfSlabs, slabs = tail ? Shared::kTailSlabs : Shared::kHalfSlabs;
  Ring<Shared::kStages> ring;
  Part part;
  while (parts.next(part)) {
    const CacheRows<const uint16_t> rows(d, d.k, part.batch, part.head_k);
    const int64_t entry = cache_entry(d, part.batch);
#pragma unroll 1
    for (int tile_key = first_tile_key(part); tile_key < part.last; tile_key += C::kKeys, ring.advance()) {
      // Rows without a key that counts are left out: their pages may not exist.
      const int key = tile_key + lane * 8;
      const bool counts = lane < kRowGroups && key + 8 > part.first && key < part.last;
      const int bytes = __popc(__ballot_sync(0xFFFFFFFFu, counts)) * slabs * 1024;
      CachePlace place{entry, key};
      if (counts && rows.pages) place = rows.find(key, d.page_size);
      ptx::mbarrier_wait(shared.empty(ring.stage, group), ring.parity ^ 1);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(shared.full(ring.stage, group), bytes);
      __syncwarp();
      if (counts)
        ptx::cp_async_bulk_tensor_load(
            shared.k(ring.stage).base + lane * Shared::K::kGroupBytes + slab * Shared::K::kSlabBytes, map,
            shared.full(ring.stage, group), ptx::kEvictNormal, 0, static_cast<int>(place.row), slab,
            part.head_k, static_cast<int>(place.page));
    }
  }
}

// What another warp does: tells the warpgroups that compute which parts there are.
template <class C, class Parts>
__device__ inline void publish_parts(const DecodeShared<C>& shared, Parts& parts, int lane) {
  Ring<DecodeShared<C>::kPartStages> ring;
  Part part{};
  for (bool more = true; more; ring.advance()) {
    more = parts.next(part);
    if (!more) part.batch = -1;
    if (lane == 0) {
      ptx::mbarrier_wait(shared.part_empty(ring.stage), ring.parity ^ 1);
      shared.part(ring.stage) = part;
      ptx::mbarrier_arrive(shared.part_full(ring.stage));
    }
    __syncwarp();
  }
}

// Elements 2 q and 2 q + 1 of rows of 8 in lane q of a quad, four rows: lane q gets all elements of row q.
__device__ inline void transpose_in_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = lane & step;
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = got;
    }
}

// Two rows of a lane, 64 rows of a tile for a warpgroup.
template <class C>
struct LatentRows {
  static constexpr int kScores = C::kKeys / 2, kOutputs = C::kHeadDimV / 4;
  static constexpr int kConsumerBarrier = 1, kGroupBarrier = 2;  // 0 is __syncthreads; + warpgroup

  // Values of keys outside [first, last) become zeros: their weights are 0, but 0 * NaN is NaN.
  __device__ static void clear_keys(const typename DecodeShared<C>::V& v, int first, int last, int thread) {
    for (int i = thread; i < C::kKeys * C::kHeadDimV / kChunk; i += 128) {
      const int key = i / (C::kHeadDimV / kChunk), chunk = i % (C::kHeadDimV / kChunk);
      if (key < first || key >= last) ptx::st_shared_16(v.chunk(key, chunk), uint4{0, 0, 0, 0});
    }
    ptx::fence_proxy_async();
  }

  // Rows of Q, zeros where there are none; all threads of both warpgroups.
  __device__ static void load_queries(const Decode& d, const typename DecodeShared<C>::Q& q, const Part& part,
                                      int thread) {
    const mma::TileRows rows(d, part);
#pragma unroll
    for (int pass = 0; pass < C::kRows; pass += 32) {
      const int row = pass + thread / 8, chunk = thread % 8;
      const bool exists = rows.has(row);
      const uint16_t* from = rows.at<const uint16_t>(d.q, exists ? row : 0);
#pragma unroll
      for (int slab = 0; slab < DecodeShared<C>::Q::kSlabs; ++slab) {
        const int column = slab * 64 + chunk * kChunk;
        ptx::cp_async_16(q.chunk(row, slab * 8 + chunk), from + column, exists && column < d.head_dim);
      }
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async();
    ptx::bar_sync(kConsumerBarrier, 256);
  }

  // Scores of keys that a row does not see become -inf.
  __device__ static void hide(float (&s)[kScores], const Decode& d, const Part& part, int key, int lane_row,
                              int lane) {
    const mma::TileRows rows(d, part);
    const mma::PartScores scores(rows, C::kRows, part);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = scores.query(lane_row + 8 * half), own = key + lane % 4 * 2,
                from = max(scores.first, scores.visible.first(at)) - own,
                to = min(scores.last, scores.visible.last(at)) - own;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * half + i];
          if (8 * j + i < from || 8 * j + i >= to) x = -INFINITY;
        }
    }
  }

  // Normalised rows, a half of the columns of V, to the result or a slot of the workspace.
  __device__ static void store(float (&out)[kOutputs], const Decode& d, const Part& part,
                               const float (&total)[2], const float (&reference)[2], int warpgroup,
                               int lane_row, int lane) {
    const mma::TileRows rows(d, part);
    const mma::DecodeWorkspace<C> workspace(d);
    const int column = warpgroup * (C::kHeadDimV / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      const bool exists = rows.has(row);
      const float sink = part.slot < 0 && exists ? rows.sink(row) : -INFINITY;
      const RowResult result = finish_row(total[half], reference[half], sink);
      // A row that sees no key may have summed 0 times anything.
      const auto number = [&](int e) { return result.factor == 0 ? 0.f : out[e] * result.factor; };
      if (part.slot < 0) {
        uint16_t* to = rows.out(exists ? row : 0) + column;
#pragma unroll
        for (int block = 0; block < kOutputs / 4; block += 4) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int e = 4 * (block + i) + 2 * half;
            x[i] = ptx::cvt_pack<C::kDType>(number(e), number(e + 1));
          }
          transpose_in_quad(x, lane);
          const int own = (block + lane % 4) * kChunk;
          if (exists && column + own < rows.columns)
            *reinterpret_cast<uint4*>(to + own) = uint4{x[0], x[1], x[2], x[3]};
        }
        if (exists && warpgroup == 0 && lane % 4 == 0) rows.store_lse(row, result.lse);
      } else if (exists) {
        float* to = workspace.out_row(part.slot, row) + column + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kOutputs / 4; ++block) {
          const int e = 4 * block + 2 * half;
          *reinterpret_cast<float2*>(to + block * 8) = float2{number(e), number(e + 1)};
        }
        if (warpgroup == 0 && lane % 4 == 0) workspace.lse_of(part.slot, row) = result.lse;
      }
    }
  }
};

// What a warpgroup does: scores of every other tile of keys, products of all tiles with its half of V.
template <class C>
__device__ inline void consume(const LatentDecode& f, const DecodeShared<C>& shared, int warpgroup,
                               int thread) {
  using Shared = DecodeShared<C>;
  using Rows = LatentRows<C>;
  using QK = Wgmma<C::kDType, C::kKeys>;
  using PV = Wgmma<C::kDType, C::kHeadDimV / 2>;
  constexpr float kSlack = 8;  // the reference is the largest score so far, or up to so much less
  const Decode& d = f.d;
  const int lane = thread % 32, warp_row = thread / 32 * 16, lane_row = warp_row + lane / 4;
  const float scale = static_cast<float>(d.score.scale) * kLog2E;
  const uint64_t q_rows = shared.q().rows_of_k(0);
  float s[Rows::kScores], out[Rows::kOutputs], reference[2], sum[2];
  uint32_t weights[C::kKeys / 16][4];
  Ring<Shared::kPartStages> part_ring;
  int tile = 0;  // since the block began

  const auto release = [&](int stage, int group) {
    if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage, group));
  };
  // Earlier sums are brought to a larger reference.
  const auto refer_to = [&](const float (&larger)[2]) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = larger[half] == reference[half] ? 1.f : ptx::ex2(reference[half] - larger[half]);
      reference[half] = larger[half], sum[half] *= factor[half];
    }
#pragma unroll
    for (int e = 0; e < Rows::kOutputs; ++e) out[e] *= factor[e / 2 % 2];
  };
  // S of a group of slabs of a tile, asynchronously.
  const auto multiply_group = [&](int own, int group, auto tail, bool add) {
    constexpr int kSlabs = decltype(tail)::value ? Shared::kTailSlabs : Shared::kHalfSlabs;
    const int stage = own % Shared::kStages, slab = group * Shared::kHalfSlabs;
    const uint64_t a = q_rows + slab * (Shared::Q::kSlabBytes >> 4),
                   b = shared.k(stage).rows_of_k(0) + slab * (Shared::K::kSlabBytes >> 4);
    ptx::mbarrier_wait(shared.full(stage, group), own / Shared::kStages % 2);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSlabs * 4; ++step)
      QK::ss(s, a + Shared::Q::k_step(step * 16), b + Shared::K::k_step(step * 16), add || step > 0);
  };
  const auto begin_scores = [&](int own) {
    multiply_group(own, warpgroup, std::false_type{}, false);
    ptx::wgmma_commit_group();
  };
  const auto finish_scores = [&](int own) {
    multiply_group(own, warpgroup ^ 1, std::false_type{}, true);
    multiply_group(own, Shared::kTail, std::true_type{}, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::written_by_wgmma(s);
  };
  // O += P V of the other's tile; scores that have begun are then complete.
  const auto add_others = [&] {
    const int stage = tile % Shared::kStages;
    ptx::mbarrier_wait(shared.weights_full(stage), tile / Shared::kStages % 2);
    const float larger[2] = {ptx::ld_shared_f32(shared.reference(stage, lane_row)),
                             ptx::ld_shared_f32(shared.reference(stage, lane_row + 8))};
    if (__any_sync(0xFFFFFFFFu, larger[0] > reference[0] || larger[1] > reference[1])) refer_to(larger);
    const uint64_t p_rows = shared.weights(stage).rows_of_k(0),
                   v = shared.half_v(stage, warpgroup).columns_of_n();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step)
      PV::template ss<1>(out, p_rows + Shared::P::k_step(step * 16), v + Shared::HalfV::row_step(step * 16),
                         1);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::written_by_wgmma(out);
    release(stage, warpgroup), release(stage, Shared::kTail);
  };

  for (;; part_ring.advance()) {
    ptx::mbarrier_wait(shared.part_full(part_ring.stage), part_ring.parity);
    const Part& part = shared.part(part_ring.stage);
    if (part.batch < 0) break;
    const int part_first = part.first, part_last = part.last;
    int key = first_tile_key(part), seen_first, seen_last;
    bool exists[2];
    {
      const mma::TileRows rows(d, part);
      const mma::PartScores scores(rows, C::kRows, part);
      seen_first = scores.all_first, seen_last = scores.all_last;
      exists[0] = rows.has(lane_row), exists[1] = rows.has(lane_row + 8);
    }
#pragma unroll
    for (int e = 0; e < Rows::kOutputs; ++e) out[e] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[half] = -INFINITY, sum[half] = 0;
    if (key < part_last) Rows::load_queries(d, shared.q(), part, warpgroup * 128 + thread);

    // Scores of a tile of its own become weights; O += P V.
    const auto add_own = [&] {
      const int stage = tile % Shared::kStages;
      if (key < seen_first || key + C::kKeys > seen_last) Rows::hide(s, d, part, key, lane_row, lane);
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int e = 0; e < Rows::kScores; ++e) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], s[e]);
      top[0] *= scale, top[1] *= scale;
      if (__any_sync(0xFFFFFFFFu, top[0] > reference[0] + kSlack || top[1] > reference[1] + kSlack)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          top[half] = quad_max(top[half]);
          if (!(top[half] > reference[half] + kSlack)) top[half] = reference[half];
        }
        refer_to(top);
      }
      const bool dirty = key < part_first || key + C::kKeys > part_last;
      if (dirty) {
        Rows::clear_keys(shared.v(stage), part_first - key, part_last - key, thread);
        ptx::bar_sync(Rows::kGroupBarrier + warpgroup, 128);
      }
      float base[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)  // products with zeros take less power
        base[half] = !exists[half] ? INFINITY : reference[half] == -INFINITY ? 0.f : reference[half];
      const uint64_t v = shared.half_v(stage, warpgroup).columns_of_n();
#pragma unroll
      for (int step = 0; step < C::kKeys / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          float (&x)[2] = *reinterpret_cast<float (*)[2]>(&s[step * 8 + i]);
          const int half = i / 2 % 2;
          x[0] = ptx::ex2(fmaf(x[0], scale, -base[half]));
          x[1] = ptx::ex2(fmaf(x[1], scale, -base[half]));
          sum[half] += x[0] + x[1];
          weights[step][i / 2] = ptx::cvt_pack<C::kDType>(x[0], x[1]);
        }
        if (step % 2 == 1) {  // O += P V of half the keys, asynchronously
          ptx::wgmma_fence();
          PV::template rs<1>(out, weights[step - 1], v + Shared::HalfV::row_step((step - 1) * 16), 1);
          PV::template rs<1>(out, weights[step], v + Shared::HalfV::row_step(step * 16), 1);
          ptx::wgmma_commit_group();
        }
      }
      // When all warps have their scores the weights may take the place of keys.
      if (!dirty) ptx::bar_sync(Rows::kGroupBarrier + warpgroup, 128);
      const typename Shared::P p_tile = shared.weights(stage);
#pragma unroll
      for (int step = 0; step < C::kKeys / 16; ++step)
        ptx::stmatrix_x4(p_tile.chunk(warp_row + lane % 16, step * 2 + lane / 16), weights[step][0],
                         weights[step][1], weights[step][2], weights[step][3]);
      if (lane % 4 == 0)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::st_shared_4(shared.reference(stage, lane_row + 8 * half), __float_as_uint(reference[half]));
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(shared.weights_full(stage));
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(out);
      release(stage, warpgroup);
      ++tile, key += C::kKeys;
    };

    // The scores of the first tile are always the same warpgroup's: their bits depend on whose they are.
    if (warpgroup == 0 && key < part_last) {
      begin_scores(tile);
      finish_scores(tile);
      add_own();
    }
#pragma unroll 1
    while (key + C::kKeys < part_last) {  // a tile of the other's, and one of its own
      begin_scores(tile + 1);
      add_others();
      ptx::written_by_wgmma(s);
      ++tile, key += C::kKeys;
      finish_scores(tile);
      add_own();
    }
    if (key < part_last) {
      add_others();
      ++tile, key += C::kKeys;
    }

    float total[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = quad_sum(sum[half]);
      if (lane % 4 == 0)
        ptx::st_shared_4(shared.total(part_ring.stage, warpgroup, lane_row + 8 * half),
                         __float_as_uint(total[half]));
    }
    ptx::mbarrier_arrive(shared.totals_full(part_ring.stage));
    ptx::mbarrier_wait(shared.totals_full(part_ring.stage), part_ring.parity);  // and Q has been read
#pragma unroll
    for (int half = 0; half < 2; ++half)
      total[half] = ptx::ld_shared_f32(shared.total(part_ring.stage, 0, lane_row + 8 * half)) +
                    ptx::ld_shared_f32(shared.total(part_ring.stage, 1, lane_row + 8 * half));
    Rows::store(out, d, part, total, reference, warpgroup, lane_row, lane);
    ptx::mbarrier_arrive(shared.part_empty(part_ring.stage));
  }
}

template <class C>
__global__ void __launch_bounds__(DecodeShared<C>::kThreads, 1)
    decode_kernel(const __grid_constant__ LatentDecode f) {
  constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  using Shared = DecodeShared<C>;
  const Shared shared;
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0),
            warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    shared.init_barriers();
    ptx::prefetch_tensormap(&f.half), ptx::prefetch_tensormap(&f.tail);
  }
  __syncthreads();
  ptx::griddepcontrol_wait();  // all before was about this block only
  ptx::griddepcontrol_launch_dependents();
  BlockParts<Shared::kThreads, C::kRows> parts(f.d, mma::DecodeWorkspace<C>(f.d).merges, shared.scratch());
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp < Shared::kGroups)
      produce_keys<C>(f, shared, parts, warp, lane);
    else
      publish_parts<C>(shared, parts, lane);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume<C>(f, shared, warpgroup - 1, threadIdx.x % 128);
  }
}

}  // namespace flashattn::sm90
