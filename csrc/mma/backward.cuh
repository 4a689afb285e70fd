// Backward attention on mma.sync tensor cores (sm_75, sm_80 and newer).
//   P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K.
//   One block owns kKeys keys of one KV head and goes through the queries that see them, of every head of the
//   group: dK and dV stay in registers; dQ is added up in a float workspace, which finish_queries converts.
//   The warps are a grid for each of the products: (rows, keys), (keys, columns) and (rows, columns).
#pragma once

#include "any/backward_rows.cuh"
#include "common/scheduler.h"

namespace flashattn::mma {

// Shared memory of a block.  dK and dV take the places of K and V at the end.
template <class C>
struct BackwardTiles {
  static constexpr int kThreads = C::kWarps * 32;
  using Q = Tile<C::kRows, C::kHeadDim>;
  using DOut = Tile<C::kRows, C::kHeadDimV>;
  using K = Tile<C::kKeys, C::kHeadDim>;
  using V = Tile<C::kKeys, C::kHeadDimV>;
  using P = Tile<C::kRows, C::kKeys>;
  static constexpr int kStatisticsBytes = C::kRows * static_cast<int>(sizeof(float2));
  static constexpr int kStageBytes = Q::kBytes + DOut::kBytes + kStatisticsBytes;
  static constexpr int kKept = K::kBytes + V::kBytes + 2 * P::kBytes + C::kStages * kStageBytes;
  static constexpr int kBytes = kKept + (C::kGeneral ? 64 + C::kRowWarps * C::kKeys / 2 * 4 : 64);

  uint32_t base = ptx::shared_address(shared_memory);
  __device__ K k() const { return {base}; }
  __device__ V v() const { return {base + K::kBytes}; }
  __device__ P p() const { return {base + K::kBytes + V::kBytes}; }
  __device__ P ds() const { return {base + K::kBytes + V::kBytes + P::kBytes}; }
  __device__ uint32_t stage(int i) const {
    return base + K::kBytes + V::kBytes + 2 * P::kBytes + i * kStageBytes;
  }
  __device__ Q q(int i) const { return {stage(i)}; }
  __device__ DOut dout(int i) const { return {stage(i) + Q::kBytes}; }
  // Words of find_weighted: for each row of warps one for each pair of keys.
  __device__ uint32_t* weighted(int row_warp) const {
    return reinterpret_cast<uint32_t*>(shared_memory + kKept + 64) + row_warp * (C::kKeys / 2);
  }
  __device__ uint32_t statistics(int i) const { return stage(i) + Q::kBytes + DOut::kBytes; }
};

// The first keys of a head, which most queries see when causal, are its tile 0.
template <class C>
FLASHATTN_HD TileOrder backward_tiles(const BackwardParams& p) {
  return {(p.seqlen_k.rows + C::kKeys - 1) / C::kKeys, p.heads_k * p.batch};
}

// Statistics of the rows that a lane holds.
template <int kM>
struct RowStatistics {
  float lse[kM][2], delta[kM][2];

  __device__ void load(uint32_t from, int row, int lane) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = ptx::ld_shared_f32x2(from + (row + fragment_row(lane, m, 2 * half)) * 8);
        lse[m][half] = x.x, delta[m][half] = x.y;
      }
  }
};

// Scores become weights 2^(scale * score - lse), products dO v become dS.
template <int kM, int kN>
__device__ inline void differentiate(float scale, const RowStatistics<kM>& rows, Accumulator<kM, kN>& s,
                                     Accumulator<kM, kN>& ds) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s.x[m][n][e] = ptx::ex2(fmaf(s.x[m][n][e], scale, -rows.lse[m][e / 2]));
        ds.x[m][n][e] = s.x[m][n][e] * (ds.x[m][n][e] - rows.delta[m][e / 2]);
      }
}

// The same with every option; adds to dbias.
template <int kM, int kN>
__device__ inline void differentiate_general(const BackwardParams& p, const ScoreTile& tile,
                                             const RowStatistics<kM>& rows, Accumulator<kM, kN>& s,
                                             Accumulator<kM, kN>& ds) {
  Accumulator<kM, kN> cap_slope;
  tile.logits(s, &cap_slope);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 factor{1, 1};
        if (p.dropout.seed)
          factor = DropoutRow(p.dropout, tile.view, tile.row + fragment_row(tile.lane, m, 2 * half))
                       .factors(tile.key + fragment_column(tile.lane, n, 0));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float &weight = s.x[m][n][2 * half + i], &dscore = ds.x[m][n][2 * half + i];
          const float undropped =
              weight == -INFINITY ? 0.f : ptx::ex2(fmaf(weight, kLog2E, -rows.lse[m][half]));
          weight = undropped * (i == 0 ? factor.x : factor.y);
          dscore = undropped == 0 ? 0.f : weight * dscore - undropped * rows.delta[m][half];
        }
      }
  if (p.dbias.data) {
    float* dbias =
        static_cast<float*>(p.dbias.data) + tile.view.batch * p.dbias.batch + tile.view.head * p.dbias.head;
    tile.each(ds, [&](float& x, int query, int k) {
      if (x != 0) ptx::red_add(dbias + query * p.dbias.row + k, x);
    });
  }
  if (p.score.softcap > 0)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) ds.x[m][n][e] *= cap_slope.x[m][n][e];
}

// Adds the warp's part of dQ to the sums; `rows_left` of its rows count.
template <class C, int kM, int kN>
__device__ inline void add_query_sums(float* sums, const Accumulator<kM, kN>& dq, int rows_left, int lane) {
  using Workspace = BackwardWorkspace<C>;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if (m * 16 >= rows_left) continue;
    float* blocks = sums + m * Workspace::kColumnBlocks * Workspace::kBlock;
#pragma unroll
    for (int n = 0; n < kN; ++n) ptx::red_add_warp(blocks + n * Workspace::kBlock, lane, dq.x[m][n]);
  }
}

// Waits until the blocks before this one have added to a tile of dQ, and lets the next one in.
struct Turn {
  int* counter;
  int rank;

  __device__ void wait() const {
    if (threadIdx.x == 0)
      while (ptx::ld_acquire(counter) != rank) {
      }
    __syncthreads();  // all warps wait for the turn
  }
  __device__ void pass_on() const {
    __threadfence();
    __syncthreads();  // all warps have added
    if (threadIdx.x == 0) ptx::red_add_release(counter, 1);
  }
};

// Values that the loop needs at edges and turns only: in shared memory, not in registers.
struct Kept {
  VisibleKeys visible;
  int* turns;  // of the first head
};

// Products of a warp: (rows, keys) for S, dP and dQ, (keys, columns) for dK and dV.
template <class C>
struct BackwardWarps {
  static constexpr int kOthers = C::kWarps / C::kRowWarps, kColumnWarps = C::kWarps / C::kKeyWarps;
  static constexpr int kM = C::kRows / C::kRowWarps / 16, kN = C::kKeys / kOthers / 8;
  static constexpr int kQueryN = C::kHeadDim / kOthers / 8;
  static constexpr int kKeyM = C::kKeys / C::kKeyWarps / 16;
  static constexpr int kKeyN = C::kHeadDim / kColumnWarps / 8, kKeyNv = C::kHeadDimV / kColumnWarps / 8;
};

template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, C::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardParams p) {
  using Tiles = BackwardTiles<C>;
  using Warps = BackwardWarps<C>;
  using CopyQ = RowCopy<C, typename Tiles::Q, Tiles::kThreads>;
  using CopyDOut = RowCopy<C, typename Tiles::DOut, Tiles::kThreads>;
  const int warp = threadIdx.x / 32;
  const int row_warp = warp % C::kRowWarps * Warps::kM * 16, key_warp = warp / C::kRowWarps * Warps::kN * 8;
  const int own_key = warp % C::kKeyWarps * Warps::kKeyM * 16, own_column = warp / C::kKeyWarps;
  const int query_column = warp / C::kRowWarps * Warps::kQueryN * 8;
  const TileOrder order = backward_tiles<C>(p);
  if (block_index() >= order.count()) return;
  const TileOrder::Place place = order.place(block_index());
  const int64_t batch = place.head / p.heads_k, group = p.heads_q / p.heads_k;
  const int64_t first_head = place.head % p.heads_k * group;
  const int key = static_cast<int>(place.tile) * C::kKeys;
  const View view(p, batch, first_head);
  if (key >= view.k.allotted) return;

  // Rows that see a key of the block, and rows that see all of them.
  const VisibleKeys visible = view.visible(p.score);
  const RowRange rows = visible.rows(key, key + C::kKeys), whole = visible.rows_of_all(key, key + C::kKeys);
  const int first_row = rows.first / C::kRows * C::kRows;
  const int tiles_of_head = rows.first < rows.last ? (rows.last - first_row + C::kRows - 1) / C::kRows : 0;
  const Tiles tiles;
  Kept& kept = *reinterpret_cast<Kept*>(shared_memory + Tiles::kKept);
  const BackwardWorkspace<C> workspace(p);
  const int64_t start = workspace.start(p, batch, first_head, view.q.first) + first_row / 16;
  if (threadIdx.x == 0)
    kept = {visible, workspace.turns + (batch * p.heads_q + first_head) * workspace.row_tiles};

  // These go through the tiles of the first head, then of the next one: from a head's last tile to the next
  // head's first is a jump.
  const uint16_t* q_rows = view.template query_rows<uint16_t>(p.q) + first_row * p.q.row;
  const uint16_t* dout_rows = view.template query_rows<uint16_t>(p.dout) + first_row * p.dout.row;
  const float2* statistics = workspace.statistics + start * 16;
  float* sums = workspace.sums +
                ((start + row_warp / 16) * workspace.kColumnBlocks + query_column / 8) * workspace.kBlock;
  const auto step_size = [&](int64_t of_tile, int64_t of_head, bool head_ends) {
    return head_ends ? of_head - (tiles_of_head - 1) * of_tile : of_tile;
  };
  const auto load_rows = [&](int row, int stage) {
    CopyQ::load(tiles.q(stage), q_rows, p.q.row, p.head_dim, row, rows.first, rows.last);
    CopyDOut::load(tiles.dout(stage), dout_rows, p.dout.row, p.head_dim_v, row, rows.first, rows.last);
    if (threadIdx.x < C::kRows / 2)
      copy_16<C>(tiles.statistics(stage) + threadIdx.x * 16, statistics + threadIdx.x * 2,
                 row + static_cast<int>(threadIdx.x) * 2 < rows.last);
    const bool head_ends = row + C::kRows >= rows.last;
    q_rows += step_size(C::kRows * p.q.row, p.q.head, head_ends);
    dout_rows += step_size(C::kRows * p.dout.row, p.dout.head, head_ends);
    statistics += step_size(C::kRows, workspace.row_blocks * 16, head_ends);
  };
  {
    using CopyK = RowCopy<C, typename Tiles::K, Tiles::kThreads>;
    using CopyV = RowCopy<C, typename Tiles::V, Tiles::kThreads>;
    const int first = visible.first(0), last = visible.last(visible.len_q - 1);  // keys that any query sees
    CopyK::load(tiles.k(), view.template key_rows<uint16_t>(p.k) + key * p.k.row, p.k.row, p.head_dim, key,
                first, last);
    CopyV::load(tiles.v(), view.template key_rows<uint16_t>(p.v) + key * p.v.row, p.v.row, p.head_dim_v, key,
                first, last);
  }
  int steps = tiles_of_head * static_cast<int>(group);
  if (steps > 0) load_rows(first_row, 0);
  commit_copies<C>();

  Accumulator<Warps::kKeyM, Warps::kKeyN> dk;
  Accumulator<Warps::kKeyM, Warps::kKeyNv> dv;
  dk.clear();
  dv.clear();
  for (int head = 0, row = first_row, stage = 0; steps > 0; --steps, stage = (stage + 1) % C::kStages) {
    const int lane = ptx::recomputed(threadIdx.x % 32), next_stage = (stage + 1) % C::kStages;
    const bool head_ends = row + C::kRows >= rows.last;
    const int next_row = head_ends ? first_row : row + C::kRows;
    wait_for_copies<C, 0>();
    __syncthreads();  // Q and dO have landed for all warps; all have read the previous ones and dS
    if (C::kStages > 1) {
      if (steps > 1) load_rows(next_row, next_stage);
      commit_copies<C>();
    }

    Accumulator<Warps::kM, Warps::kN> s, ds;
    s.clear();
    ds.clear();
    s.template multiply<C, C::kHeadDim>(OperandA<typename Tiles::Q>(tiles.q(stage), lane), row_warp,
                                        OperandBTransposed<typename Tiles::K>(tiles.k(), lane), key_warp);
    ds.template multiply<C, C::kHeadDimV>(OperandA<typename Tiles::DOut>(tiles.dout(stage), lane), row_warp,
                                          OperandBTransposed<typename Tiles::V>(tiles.v(), lane), key_warp);
    RowStatistics<Warps::kM> of_rows;
    of_rows.load(tiles.statistics(stage), row_warp, lane);
    if (C::kGeneral && (modifies(p.score) || p.dropout.seed || p.dbias.data)) {
      const View of_head(p, batch, first_head + head);
      differentiate_general(p, {p, of_head, kept.visible, row + row_warp, key + key_warp, lane}, of_rows, s,
                            ds);
      if (p.score.mask.data) {
        uint32_t weighted[Warps::kN];
        find_weighted(ds, weighted);
#pragma unroll
        for (int n = 0; n < Warps::kN; ++n)
          if (lane < 4) tiles.weighted(warp % C::kRowWarps)[key_warp / 2 + n * 4 + lane] = weighted[n];
      }
    } else {
      differentiate(static_cast<float>(p.score.scale) * kLog2E, of_rows, s, ds);
      if (row < whole.first || row + C::kRows > whole.last)
        ScoreTile{p, view, kept.visible, row + row_warp, key + key_warp, lane}.hide(0, s, ds);
    }
    store_fragments<C>(tiles.p(), row_warp, key_warp, s, lane);
    store_fragments<C>(tiles.ds(), row_warp, key_warp, ds, lane);
    __syncthreads();  // P and dS are there for all warps

    dv.template multiply<C, C::kRows>(OperandATransposed<typename Tiles::P>(tiles.p(), lane), own_key,
                                      OperandB<typename Tiles::DOut>(tiles.dout(stage), lane),
                                      own_column * Warps::kKeyNv * 8);
    dk.template multiply<C, C::kRows>(OperandATransposed<typename Tiles::P>(tiles.ds(), lane), own_key,
                                      OperandB<typename Tiles::Q>(tiles.q(stage), lane),
                                      own_column * Warps::kKeyN * 8);
    if (C::kStages == 1) {
      __syncthreads();  // all warps have read Q and dO, whose places the next ones take
      if (steps > 1) load_rows(next_row, 0);
      commit_copies<C>();
    }
    Accumulator<Warps::kM, Warps::kQueryN> dq;
    dq.clear();
    const OperandA<typename Tiles::P> ds_operand(tiles.ds(), lane);
    const OperandB<typename Tiles::K> k_operand(tiles.k(), lane);
    if (C::kGeneral && p.score.mask.data)
      dq.template multiply<C, C::kKeys>(ds_operand, row_warp, k_operand, query_column,
                                        [&](uint32_t (&b)[4], int k) {
#pragma unroll
                                          for (int i = 0; i < 4; ++i) {
                                            uint32_t bits = 0;
#pragma unroll
                                            for (int w = 0; w < C::kRowWarps; ++w)
                                              bits |= tiles.weighted(w)[k / 2 + i % 2 * 4 + lane % 4];
                                            b[i] &= bits;
                                          }
                                        });
    else
      dq.template multiply<C, C::kKeys>(ds_operand, row_warp, k_operand, query_column);
    const Turn turn{kept.turns + head * workspace.row_tiles + row / C::kRows,
                    key / C::kKeys - kept.visible.first(row) / C::kKeys};
    if (p.deterministic) turn.wait();
    add_query_sums<C>(sums, dq, rows.last - row - row_warp, lane);
    if (p.deterministic) turn.pass_on();
    sums += step_size(C::kRows / 16 * workspace.kColumnBlocks * workspace.kBlock,
                      workspace.row_blocks * workspace.kColumnBlocks * workspace.kBlock, head_ends);
    head += head_ends, row = next_row;
  }

  wait_for_copies<C, 0>();
  __syncthreads();  // all warps have read K: dK and dV may take its place and V's
#pragma unroll
  for (int m = 0; m < Warps::kKeyM; ++m)
#pragma unroll
    for (int n = 0; n < Warps::kKeyN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk.x[m][n][e] *= static_cast<float>(p.score.scale);
  store_fragments<C>(tiles.k(), own_key, own_column * Warps::kKeyN * 8, dk, threadIdx.x % 32);
  store_fragments<C>(tiles.v(), own_key, own_column * Warps::kKeyNv * 8, dv, threadIdx.x % 32);
  __syncthreads();
  const int count = min(C::kKeys, static_cast<int>(view.k.allotted) - key);
  store_rows<C>(tiles.k(), count, view.template key_rows<uint16_t>(p.dk) + key * p.dk.row, p.dk.row,
                static_cast<int>(p.head_dim), threadIdx.x, Tiles::kThreads);
  store_rows<C>(tiles.v(), count, view.template key_rows<uint16_t>(p.dv) + key * p.dv.row, p.dv.row,
                static_cast<int>(p.head_dim_v), threadIdx.x, Tiles::kThreads);
}

}  // namespace flashattn::mma
