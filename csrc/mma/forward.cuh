// Forward attention on mma.sync tensor cores (sm_75, sm_80 and newer).
//   O = softmax(scale Q K^T) V, lse = log sum exp: one block computes kRows queries of one head; its warps
//   split the rows, every warp sees all keys.  Scores and weights stay in registers.
//   Q (kRows, D), K and V (kKeys, D) in shared memory, D rounded up to kHeadDim.
#pragma once

#include "common/scheduler.h"
#include "common/score.cuh"

namespace flashattn::mma {

// Shared memory of a block.  O takes the place of Q at the end.
template <class C>
struct ForwardTiles {
  static constexpr int kThreads = C::kWarps * 32;
  static constexpr int kWide = C::kHeadDim > C::kHeadDimV ? C::kHeadDim : C::kHeadDimV;
  using Q = Tile<C::kRows, C::kHeadDim>;
  using K = Tile<C::kKeys, C::kHeadDim>;
  using V = Tile<C::kKeys, C::kHeadDimV>;
  using O = Tile<C::kRows, C::kHeadDimV>;
  static constexpr int kQueryBytes = C::kRows * kWide * 2;
  static constexpr int kStageBytes = K::kBytes + V::kBytes;
  static constexpr int kBytes = kQueryBytes + C::kStages * kStageBytes;

  uint32_t base = ptx::shared_address(shared_memory);
  __device__ Q q() const { return {base}; }
  __device__ O o() const { return {base}; }
  __device__ K k(int stage) const { return {base + kQueryBytes + stage * kStageBytes}; }
  __device__ V v(int stage) const { return {base + kQueryBytes + stage * kStageBytes + K::kBytes}; }
};

// The last rows of a head, which see most keys when causal, are its tile 0.
template <class C>
FLASHATTN_HD TileOrder forward_tiles(const ForwardParams& p) {
  return {(p.seqlen_q.rows + C::kRows - 1) / C::kRows, p.heads_q * p.batch};
}

template <int kM, int kN>
__device__ inline void drop_weights(const ForwardParams& p, const View& view, Accumulator<kM, kN>& weights,
                                    int row, int key, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DropoutRow dropout(p.dropout, view, row + fragment_row(lane, m, 2 * half));
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 factor = dropout.factors(key + fragment_column(lane, n, 0));
        weights.x[m][n][2 * half] *= factor.x;
        weights.x[m][n][2 * half + 1] *= factor.y;
      }
    }
}

// Weights as the left operand of the product with V: two n8 blocks of sums are one k16 block.
template <class C, int kM, int kN>
struct WeightOperand {
  const Accumulator<kM, kN>& weights;

  __device__ void load(uint32_t (&a)[4], int row, int k) const {
    const auto& x = weights.x[row / 16];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = ptx::cvt_pack<C::kDType>(x[k / 8 + i / 2][i % 2 * 2], x[k / 8 + i / 2][i % 2 * 2 + 1]);
  }
};

// O += P V
template <class C, int kM, int kN, int kNv, class V>
__device__ inline void accumulate_values(const ForwardParams& p, Accumulator<kM, kNv>& out,
                                         const Accumulator<kM, kN>& weights, const V& values) {
  const WeightOperand<C, kM, kN> operand{weights};
  if (C::kGeneral && p.score.mask.data) {
    uint32_t weighted[kN];
    find_weighted(weights, weighted);
    out.template multiply<C, kN * 8>(operand, 0, values, 0, [&](uint32_t (&b)[4], int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] &= weighted[k / 8 + i % 2];
    });
  } else {
    out.template multiply<C, kN * 8>(operand, 0, values, 0);
  }
}

// Normalised rows through shared memory to `out`; statistics straight from the lanes that hold them.
template <class C, int kM, int kNv, class Softmax>
__device__ inline void store_output(const ForwardParams& p, const View& view, const ForwardTiles<C>& tiles,
                                    Accumulator<kM, kNv>& out, const Softmax& softmax, int row, int warp,
                                    int lane) {
  const int warp_row = warp * kM * 16, rows_left = static_cast<int>(view.q.allotted) - row;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp_row + fragment_row(lane, m, 2 * half);
      const bool counts = row + r < view.q.length;
      const float sink = p.score.sink.data && counts ? load_number(p.score.sink.data, p.score.sink.dtype,
                                                                   view.head * p.score.sink.head)
                                                     : -INFINITY;
      const RowResult result = softmax.finish(m, half, sink);
#pragma unroll
      for (int n = 0; n < kNv; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          out.x[m][n][e] = result.factor == 0 ? 0.f : out.x[m][n][e] * result.factor;
      if (lane % 4 == 0 && r < rows_left) {
        view.statistic(p.lse)[(row + r) * p.lse.row] = result.lse;
        if (p.max_logit.data) view.statistic(p.max_logit)[(row + r) * p.max_logit.row] = result.max_logit;
      }
    }
  __syncthreads();  // every warp has read Q, and its copies have landed: O may take its place
  store_fragments<C>(tiles.o(), warp_row, 0, out, lane);
  __syncthreads();
  store_rows<C>(tiles.o(), min(C::kRows, rows_left),
                view.template query_rows<uint16_t>(p.out) + row * p.out.row, p.out.row,
                static_cast<int>(p.head_dim_v), threadIdx.x, ForwardTiles<C>::kThreads);
}

template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, C::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using Tiles = ForwardTiles<C>;
  using CopyQ = RowCopy<C, typename Tiles::Q, Tiles::kThreads>;
  using CopyK = RowCopy<C, typename Tiles::K, Tiles::kThreads>;
  using CopyV = RowCopy<C, typename Tiles::V, Tiles::kThreads>;
  constexpr int kM = C::kRows / C::kWarps / 16, kN = C::kKeys / 8, kNv = C::kHeadDimV / 8;
  const int warp = threadIdx.x / 32, warp_row = warp * kM * 16;
  const TileOrder order = forward_tiles<C>(p);
  if (block_index() >= order.count()) return;
  const TileOrder::Place place = order.place(block_index());
  const int row = static_cast<int>(order.tiles_of_head - 1 - place.tile) * C::kRows;
  const View view(p, place.head / p.heads_q, place.head % p.heads_q);
  if (row >= view.q.allotted) return;
  const VisibleKeys visible = view.visible(p.score);
  const int last_row = min(row + C::kRows, visible.len_q) - 1;
  const int first = visible.first(row), last = visible.last(last_row);  // keys that some row sees
  const int first_block = first / C::kKeys,
            blocks = row <= last_row && first < last ? (last - 1) / C::kKeys - first_block + 1 : 0;

  const Tiles tiles;
  const uint16_t* q_rows = view.template query_rows<uint16_t>(p.q);
  const uint16_t* k_rows = view.template key_rows<uint16_t>(p.k);
  const uint16_t* v_rows = view.template key_rows<uint16_t>(p.v);
  const auto load_keys = [&](int key, int stage) {
    CopyK::load(tiles.k(stage), k_rows + key * p.k.row, p.k.row, p.head_dim, key, first, last);
  };

  Accumulator<kM, kNv> out;
  OnlineSoftmax<kM> softmax;
  out.clear();
  softmax.clear();
  const bool modified = C::kGeneral && modifies(p.score);
  const float scale = modified ? kLog2E : static_cast<float>(p.score.scale) * kLog2E;

  if (blocks > 0) {
    CopyQ::load(tiles.q(), q_rows + row * p.q.row, p.q.row, p.head_dim, row, row, visible.len_q);
    load_keys((first_block + blocks - 1) * C::kKeys, 0);
    commit_copies<C>();
  }
  for (int block = blocks - 1, stage = 0; block >= 0; --block, stage = (stage + 1) % C::kStages) {
    const int key = (first_block + block) * C::kKeys, next_stage = (stage + 1) % C::kStages;
    const int lane = ptx::recomputed(threadIdx.x % 32);
    wait_for_copies<C, 0>();
    __syncthreads();  // K has landed for all warps; all have read the V of the previous block
    CopyV::load(tiles.v(stage), v_rows + key * p.v.row, p.v.row, p.head_dim_v, key, first, last);
    commit_copies<C>();
    if (C::kStages > 1) {
      if (block > 0) load_keys(key - C::kKeys, next_stage);
      commit_copies<C>();
    }

    Accumulator<kM, kN> s;
    s.clear();
    s.template multiply<C, C::kHeadDim>(OperandA<typename Tiles::Q>(tiles.q(), lane), warp_row,
                                        OperandBTransposed<typename Tiles::K>(tiles.k(stage), lane), 0);
    if (C::kStages == 1) {
      wait_for_copies<C, 0>();
      __syncthreads();  // V has landed; all warps have read K, whose place the next one takes
      if (block > 0) load_keys(key - C::kKeys, 0);
      commit_copies<C>();
    }
    // Rows of the tile differ in what they see at its edges only.
    const bool edge =
        key < visible.first(last_row) || key + C::kKeys > visible.last(row) || row + C::kRows > visible.len_q;
    const ScoreTile scores{p, view, visible, row + warp_row, key, lane};
    if (C::kGeneral && modified)
      scores.logits(s, static_cast<decltype(&s)>(nullptr));
    else if (edge)
      scores.hide(-INFINITY, s);
    softmax.update(s, scale);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (softmax.grown[m][half])
#pragma unroll
          for (int n = 0; n < kNv; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) out.x[m][n][e] *= softmax.rescale[m][half];
    if (C::kGeneral && p.dropout.seed) drop_weights(p, view, s, row + warp_row, key, lane);
    if (C::kStages > 1) {
      wait_for_copies<C, 1>();
      __syncthreads();  // V has landed for all warps
    }
    accumulate_values<C>(p, out, s, OperandB<typename Tiles::V>(tiles.v(stage), lane));
  }
  wait_for_copies<C, 0>();
  store_output<C>(p, view, tiles, out, softmax, row, warp, threadIdx.x % 32);
}

}  // namespace flashattn::mma
