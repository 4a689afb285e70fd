// Forward attention on mma.sync tensor cores (sm_75, sm_80 and newer).
//   O = softmax(scale Q K^T) V, lse = log sum exp: one block computes kRows queries of one head; its warps
//   split the rows, every warp sees all keys.  Scores and weights stay in registers.
//   Q (kRows, D), K and V (kKeys, D) in shared memory, D rounded up to kHeadDim.
#pragma once

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

// Tiles of queries of all heads and sequences; the last rows of a head, which see most keys when causal,
// come first.
template <class C>
FLASHATTN_HD int64_t forward_tiles(const ForwardParams& p) {
  return (p.seqlen_q.rows + C::kRows - 1) / C::kRows * p.heads_q * p.batch;
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
__device__ inline void pack_weights(uint32_t (&a)[4], const Accumulator<kM, kN>& weights, int m, int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = ptx::cvt_pack<C::kDType>(weights.x[m][2 * k + i / 2][i % 2 * 2],
                                    weights.x[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// O += P V
template <class C, int kM, int kN, int kNv, class V>
__device__ inline void accumulate_values(Accumulator<kM, kNv>& out, const Accumulator<kM, kN>& weights,
                                         const V& values) {
#pragma unroll
  for (int k = 0; k < kN / 2; ++k) {
    uint32_t a_frag[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) pack_weights<C>(a_frag[m], weights, m, k);
#pragma unroll
    for (int n = 0; n < kNv; n += 2) {
      uint32_t b_frag[4];
      values.load(b_frag, k * 16, n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        multiply_add<C>(out.x[m][n], a_frag[m], b_frag[0], b_frag[1]);
        multiply_add<C>(out.x[m][n + 1], a_frag[m], b_frag[2], b_frag[3]);
      }
    }
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
      const float sink =
          p.score.sink.data && counts
              ? load_number(p.score.sink.data, p.score.sink.dtype, view.head * p.score.sink.head)
              : -INFINITY;
      const RowResult result = softmax.finish(m, half, sink);
#pragma unroll
      for (int n = 0; n < kNv; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          out.x[m][n][e] = result.factor == 0 ? 0.f : out.x[m][n][e] * result.factor;
      if (lane % 4 == 0 && r < rows_left) {
        view.statistic(p.lse)[(row + r) * p.lse.row] = result.lse;
        if (C::kGeneral && p.max_logit.data)
          view.statistic(p.max_logit)[(row + r) * p.max_logit.row] = result.max_logit;
      }
    }
  __syncthreads();  // every warp has read Q, and its copies have landed: O may take its place
  store_fragments<C>(tiles.o(), warp_row, 0, out, lane);
  __syncthreads();
  store_rows<C>(tiles.o(), min(C::kRows, rows_left), view.template query_rows<uint16_t>(p.out) + row * p.out.row,
                p.out.row, static_cast<int>(p.head_dim_v), threadIdx.x, ForwardTiles<C>::kThreads);
}

// Which rows of which head a block computes.
template <class C>
struct ForwardTask {
  int64_t batch, head;
  int row;

  __device__ explicit ForwardTask(const ForwardParams& p) {
    const int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    const int64_t tiles_of_head = (p.seqlen_q.rows + C::kRows - 1) / C::kRows;
    const int64_t index = tile / tiles_of_head;
    batch = index / p.heads_q, head = index % p.heads_q;
    row = static_cast<int>(tiles_of_head - 1 - tile % tiles_of_head) * C::kRows;
  }
};

template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, C::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using Tiles = ForwardTiles<C>;
  constexpr int kM = C::kRows / C::kWarps / 16, kN = C::kKeys / 8, kNv = C::kHeadDimV / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp * kM * 16;
  const ForwardTask<C> task(p);
  if (task.batch >= p.batch) return;
  const int row = task.row;
  const View view(p, task.batch, task.head);
  if (row >= view.q.allotted) return;
  const VisibleKeys visible = view.visible(p.score);
  const int last_row = min(row + C::kRows, visible.len_q) - 1;
  const int first = visible.first(row), last = visible.last(last_row);  // keys that some row sees
  const int first_block = first / C::kKeys,
            blocks = row <= last_row && first < last ? (last - 1) / C::kKeys - first_block + 1 : 0;

  const Tiles tiles;
  const RowCopy<C, typename Tiles::Q, Tiles::kThreads> q_copy(view.template query_rows<uint16_t>(p.q), p.q.row,
                                                              p.head_dim, threadIdx.x);
  const RowCopy<C, typename Tiles::K, Tiles::kThreads> k_copy(view.template key_rows<uint16_t>(p.k), p.k.row,
                                                              p.head_dim, threadIdx.x);
  const RowCopy<C, typename Tiles::V, Tiles::kThreads> v_copy(view.template key_rows<uint16_t>(p.v), p.v.row,
                                                              p.head_dim_v, threadIdx.x);
  const OperandA<typename Tiles::Q> q_operand(tiles.q(), lane);

  Accumulator<kM, kNv> out;
  OnlineSoftmax<kM, C::kGeneral ? 0 : 8> softmax;
  out.clear();
  softmax.clear();
  const float scale = C::kGeneral ? kLog2E : static_cast<float>(p.score.scale) * kLog2E;

  if (blocks > 0) {
    q_copy.load(tiles.q(), row, row, visible.len_q);
    k_copy.load(tiles.k(0), (first_block + blocks - 1) * C::kKeys, first, last);
    commit_copies<C>();
  }
  for (int block = blocks - 1, stage = 0; block >= 0; --block, stage = (stage + 1) % C::kStages) {
    const int key = (first_block + block) * C::kKeys, next_stage = (stage + 1) % C::kStages;
    wait_for_copies<C, 0>();
    __syncthreads();  // K has landed for all warps; all have read the V of the previous block
    v_copy.load(tiles.v(stage), key, first, last);
    commit_copies<C>();
    if (C::kStages > 1) {
      if (block > 0) k_copy.load(tiles.k(next_stage), key - C::kKeys, first, last);
      commit_copies<C>();
    }

    Accumulator<kM, kN> s;
    s.clear();
    s.template multiply<C, C::kHeadDim>(q_operand, warp_row,
                                        OperandBTransposed<typename Tiles::K>(tiles.k(stage), lane), 0);
    if (C::kStages == 1) {
      wait_for_copies<C, 0>();
      __syncthreads();  // V has landed; all warps have read K, whose place the next one takes
      if (block > 0) k_copy.load(tiles.k(0), key - C::kKeys, first, last);
      commit_copies<C>();
    }
    // Rows of the tile differ in what they see at its edges only.
    const bool edge = key < visible.first(last_row) || key + C::kKeys > visible.last(row) ||
                      row + C::kRows > visible.len_q;
    const ScoreTile scores{p, view, visible, row + warp_row, key, lane};
    if (C::kGeneral)
      scores.logits(s, static_cast<decltype(&s)>(nullptr));
    else if (edge)
      scores.hide(s, -INFINITY);
    float rescale[kM][2];
    if (softmax.update(s, scale, rescale))
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kNv; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) out.x[m][n][e] *= rescale[m][e / 2];
    if (C::kGeneral && p.dropout.seed)
      drop_weights(p, view, s, row + warp_row, key, lane);
    if (C::kStages > 1) {
      wait_for_copies<C, 1>();
      __syncthreads();  // V has landed for all warps
    }
    accumulate_values<C>(out, s, OperandB<typename Tiles::V>(tiles.v(stage), lane));
  }
  wait_for_copies<C, 0>();
  store_output<C>(p, View(p, task.batch, task.head), tiles, out, softmax, row, warp, lane);
}

}  // namespace flashattn::mma
