// What tensor-core backward kernels of every family leave to kernels of their own: statistics of the query
// rows before, conversion of dQ after, and the workspace between.  C is a row of csrc/instances.py.
#pragma once

#include <type_traits>

#include "any/launches.cuh"
#include "common/launch.cuh"
#include "common/score.cuh"
#include "common/tile.cuh"

namespace flashattn {

// The workspace.  Rows of a sequence start at a block of 16 of their own; what lies between two sequences is
// never used.
//   sums        of dQ: blocks of 16 rows and 8 columns in the order of the accumulators
//   statistics  {log2 of the sum of weights, delta} of a row, blocks of 16 in the order of the family; rows
//               that see nothing have {inf, 0}, so that their weights are 0
//   turns       in which blocks add to a tile of dQ when the order must not vary: a counter for each tile
template <class C>
struct BackwardWorkspace {
  static constexpr int kColumnBlocks = C::kHeadDim / 8, kBlock = 128;
  int64_t row_blocks, row_tiles;  // of one head; of one head and sequence
  float* sums;
  float2* statistics;
  int* turns;
  int64_t bytes;

  FLASHATTN_HD explicit BackwardWorkspace(const BackwardParams& p)
      : row_blocks(p.seqlen_q.cu ? p.seqlen_q.total / 16 + p.batch + 1
                                 : p.batch * ((p.seqlen_q.rows + 15) / 16)),
        row_tiles((p.seqlen_q.rows + C::kRows - 1) / C::kRows) {
    const int64_t blocks = p.heads_q * row_blocks;
    sums = static_cast<float*>(p.workspace.shared);
    statistics = reinterpret_cast<float2*>(sums + blocks * kColumnBlocks * kBlock);
    turns = reinterpret_cast<int*>(statistics + blocks * 16);
    const int64_t turn_count = p.deterministic ? p.batch * p.heads_q * row_tiles : 0;
    bytes = reinterpret_cast<char*>(turns + turn_count) - static_cast<char*>(p.workspace.shared);
  }

  // Block of 16 rows where a sequence starts.
  FLASHATTN_HD int64_t start(const BackwardParams& p, int64_t batch, int64_t head, int64_t first_row) const {
    return head * row_blocks +
           (p.seqlen_q.cu ? first_row / 16 + batch : batch * ((p.seqlen_q.rows + 15) / 16));
  }
};

template <class C>
Workspace backward_workspace(const BackwardParams& p) {
  Workspace workspace{};
  workspace.shared_bytes = BackwardWorkspace<C>(p).bytes;
  return workspace;
}

constexpr int kSmallThreads = 256;  // of the kernels before and after

// Where the index-th block of 16 rows lies: no memory holds the sums of 2^32.
struct BlockOfRows {
  unsigned batch, head;
  int row;

  __device__ BlockOfRows(const BackwardParams& p, unsigned index) {
    const auto row_blocks = static_cast<unsigned>((p.seqlen_q.rows + 15) / 16),
               heads = static_cast<unsigned>(p.heads_q);
    const unsigned of_head = index / row_blocks;
    row = static_cast<int>(index - of_head * row_blocks) * 16;
    batch = of_head / heads;
    head = of_head - batch * heads;
  }
};

// Statistics row after row.
struct StatisticsInRows {
  __device__ static void store(float2* block, int row, float2 x) { block[row] = x; }
};

// delta = rowsum(dO * O) - dlse and the statistics of 16 rows, whose sums of dQ become zero, if there are
// any. 16 lanes share a row.
struct Preparation {
  BackwardParams p;
  bool sums;
};

template <class C>
FLASHATTN_HD int64_t prepare_blocks(const BackwardParams& p) {
  return p.batch * p.heads_q * ((p.seqlen_q.rows + 15) / 16);
}

template <class C, class Statistics>
__global__ void __launch_bounds__(kSmallThreads) prepare_rows(const __grid_constant__ Preparation all) {
  const BackwardParams& p = all.p;
  static_assert(kSmallThreads == 16 * 16, "16 rows, 16 lanes each");
  using Workspace = BackwardWorkspace<C>;
  if (block_index() >= prepare_blocks<C>(p)) return;
  const BlockOfRows place(p, static_cast<unsigned>(block_index()));
  const int first_row = place.row, lane = threadIdx.x % 16;
  const View view(p, place.batch, place.head);
  if (first_row >= view.q.length) return;
  const int64_t query = first_row + threadIdx.x / 16;
  const bool exists = query < view.q.length;
  const uint16_t* out = view.template query_rows<uint16_t>(p.out) + query * p.out.row;
  const uint16_t* dout = view.template query_rows<uint16_t>(p.dout) + query * p.dout.row;
  float delta = 0;
#pragma unroll
  for (int column = 0; column < C::kHeadDimV; column += 16 * kChunk) {
    const int at = column + lane * kChunk, count = exists ? static_cast<int>(p.head_dim_v) - at : 0;
    const uint4 a = load_chunk<C>(out + at, count), b = load_chunk<C>(dout + at, count);
    const uint32_t pairs_a[4] = {a.x, a.y, a.z, a.w}, pairs_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = ptx::cvt_unpack<C::kDType>(pairs_a[i]), y = ptx::cvt_unpack<C::kDType>(pairs_b[i]);
      delta += x.x * y.x + x.y * y.y;
    }
  }
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(0xFFFFFFFFu, delta, lanes);

  const Workspace workspace(p);
  const int64_t block = workspace.start(p, view.batch, view.head, view.q.first) + first_row / 16;
  if (lane == 0) {
    const float lse = exists ? view.statistic(p.lse)[query * p.lse.row] : -INFINITY;
    const bool empty = lse == -INFINITY;  // its LSE is a constant
    if (exists && p.dlse.data) delta -= view.statistic(p.dlse)[query * p.dlse.row];
    if (empty) delta = 0;
    if (exists) view.statistic(p.delta)[query * p.delta.row] = delta;
    Statistics::store(workspace.statistics + block * 16, threadIdx.x / 16,
                      {empty ? INFINITY : lse * kLog2E, delta});
  }
  if (!all.sums) return;
  float4* sums =
      reinterpret_cast<float4*>(workspace.sums + block * Workspace::kColumnBlocks * Workspace::kBlock);
  for (int i = threadIdx.x; i < Workspace::kColumnBlocks * Workspace::kBlock / 4; i += kSmallThreads)
    sums[i] = float4{0, 0, 0, 0};
}

// dQ = scale * sums, rounded.  A thread converts 8 columns of two rows that lie 8 apart.
template <class C>
FLASHATTN_HD int64_t finish_blocks(const BackwardParams& p) {
  const int64_t units =
      p.batch * p.heads_q * ((p.seqlen_q.rows + 15) / 16) * 8 * BackwardWorkspace<C>::kColumnBlocks;
  return (units + kSmallThreads - 1) / kSmallThreads;
}

template <class C>
__global__ void __launch_bounds__(kSmallThreads) finish_queries(const __grid_constant__ BackwardParams p) {
  using Workspace = BackwardWorkspace<C>;
  const int64_t unit = block_index() * kSmallThreads + threadIdx.x;
  const int column_block = static_cast<int>(unit % Workspace::kColumnBlocks);
  const int64_t octet = unit / Workspace::kColumnBlocks;
  const BlockOfRows place(p, static_cast<unsigned>(octet / 8));
  const int row = place.row, top = static_cast<int>(octet % 8);
  const int columns = static_cast<int>(p.head_dim) - column_block * 8;
  if (place.batch >= p.batch || columns <= 0) return;
  const View view(p, place.batch, place.head);
  const Workspace workspace(p);
  const float* sums = workspace.sums + ((workspace.start(p, view.batch, view.head, view.q.first) + row / 16) *
                                            Workspace::kColumnBlocks +
                                        column_block) *
                                           Workspace::kBlock;
  const float scale = static_cast<float>(p.score.scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = row + top + 8 * half;
    if (query >= view.q.allotted) break;
    uint32_t packed[4] = {0, 0, 0, 0};  // of rows after the end
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (query >= view.q.length) break;
      const float low = sums[ptx::red_add_slot(top * 4 + i, 2 * half)],
                  high = sums[ptx::red_add_slot(top * 4 + i, 2 * half + 1)];
      packed[i] = ptx::cvt_pack<C::kDType>(low * scale, high * scale);
    }
    store_chunk<C>(view.template query_rows<uint16_t>(p.dq) + query * p.dq.row + column_block * 8,
                   uint4{packed[0], packed[1], packed[2], packed[3]}, columns);
  }
}

// All kernels of a backward in order; `main` launches the one between, which reads Statistics and adds to the
// sums of dQ, or, without `sums`, stores dQ itself.
template <class C, class Statistics, class Main>
int launch_backward_rows(const BackwardParams& p, cudaStream_t stream, Main main, bool sums = true) {
  using Element = std::conditional_t<C::kDType == DType::bf16, __nv_bfloat16, __half>;
  int error = launch_kernel(prepare_rows<C, Statistics>, prepare_blocks<C>(p), kSmallThreads, 0,
                            Preparation{p, sums}, stream);
  if (!error && p.dsink) error = any::launch_sink_gradient<Element>(p, stream);
  if (!error && sums && p.deterministic) {
    const BackwardWorkspace<C> workspace(p);
    const int64_t bytes =
        workspace.bytes - (reinterpret_cast<char*>(workspace.turns) - static_cast<char*>(p.workspace.shared));
    error = cudaMemsetAsync(workspace.turns, 0, bytes, stream);
  }
  if (!error) error = main();
  if (!error && sums)
    error = launch_kernel(finish_queries<C>, finish_blocks<C>(p), kSmallThreads, 0, p, stream);
  return error;
}

}  // namespace flashattn
