// Host side of the mma.sync kernels: grids, shared memory, order of the launches.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "any/launches.cuh"
#include "common/launch.cuh"
#include "common/team.h"
#include "mma/backward.cuh"
#include "mma/decode.cuh"
#include "mma/forward.cuh"

namespace flashattn::mma {

constexpr int kLongSplit = 1 << 16;  // keys

template <class C>
using Element = std::conditional_t<C::kDType == DType::bf16, __nv_bfloat16, __half>;

template <class C>
constexpr int64_t forward_shared_bytes() {
  return ForwardTiles<C>::kBytes;
}

template <class C>
Workspace forward_workspace(const ForwardParams&) {
  return {};
}

template <class C>
int launch_forward(const ForwardParams& p, void* stream) {
  return launch_kernel(forward_kernel<C>, forward_tiles<C>(p).count(), C::kWarps * 32,
                       ForwardTiles<C>::kBytes, p, static_cast<cudaStream_t>(stream));
}

template <class C>
constexpr int64_t backward_shared_bytes() {
  return BackwardTiles<C>::kBytes;
}

using flashattn::backward_workspace;

template <class C>
int launch_backward(const BackwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return launch_backward_rows<C, StatisticsInRows>(p, cuda_stream, [&] {
    BackwardParams main = p;
    if (p.deterministic && p.dbias.data) {  // blocks would add to it in any order
      if (const int error = any::launch_bias_gradient<Element<C>>(p, cuda_stream)) return error;
      main.dbias.data = nullptr;
    }
    return launch_kernel(backward_kernel<C>, backward_tiles<C>(p).count(), C::kWarps * 32,
                         BackwardTiles<C>::kBytes, main, cuda_stream);
  });
}

template <class C>
constexpr int64_t decode_shared_bytes() {
  return DecodeTiles<C>::kBytes;
}

// Can the rows of a tensor be copied in whole chunks?
inline bool in_chunks(const Tensor4& x, int64_t columns) {
  return columns % kChunk == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
         ((x.batch | x.row | x.head) % kChunk) == 0;
}

inline int64_t most_units(const DecodeParams& p) {  // of a tile
  return std::max<int64_t>(1, (p.seqlen_k.rows + kUnitKeys - 1) / kUnitKeys);
}

// How a decode is divided into shares or splits, and what of it waits for the merge.
template <class C>
Decode divided(const DecodeParams& p) {
  constexpr int64_t kRows = DecodeTiles<C>::kRows;
  Decode d{p};
  if (p.rotary.cos) d.q = p.q_rotated;
  const int64_t group = p.heads_q / p.heads_k;
  d.chunk_columns = C::kHeadDimV;
  d.chunks = std::max(1, static_cast<int>((p.head_dim_v + C::kHeadDimV - 1) / C::kHeadDimV));
  const int64_t tiles = (p.seqlen_q.rows * group + kRows - 1) / kRows * d.chunks * p.heads_k,
                units = most_units(p);
  d.group = Divisor(static_cast<unsigned>(group));
  d.page_size = Divisor(static_cast<unsigned>(clamp(p.cache.page_size, 1, INT_MAX)));
  d.window_left = static_cast<int>(std::min<int64_t>(p.score.window_left, 1 << 30));
  d.most_tiles = static_cast<int>(std::min<int64_t>(tiles, INT_MAX));
  d.chunks_q = in_chunks(d.q, p.head_dim), d.chunks_k = in_chunks(p.k, p.head_dim);
  d.chunks_v = in_chunks(p.v, p.head_dim_v);
  if (p.splits == 0 && tiles * p.batch * units > INT_MAX) {  // so much work needs no equal shares
    d.splits = std::max<int64_t>(1, (p.seqlen_k.rows + kLongSplit - 1) / kLongSplit);
    d.keys_per_split = kLongSplit;
  }
  if (d.splits > 0) {
    d.merge_by_tile = true;
    d.merges = d.splits > 1 ? tiles * p.batch : 0;
    d.slots = d.merges * d.splits;
  } else {
    const int64_t places = C::kMinBlocks * std::max(1, p.device.processors), of_head = places / p.heads_k,
                  alike = 10 * of_head * p.heads_k >= 9 * places ? p.heads_k : 1;
    d.alike = Divisor(static_cast<unsigned>(alike));
    d.shares = Divisor(static_cast<unsigned>(places / alike));
    d.shares = Divisor(Shares(static_cast<unsigned>(tiles / alike * p.batch * units), d.shares).count);
    const int64_t cuts = (d.shares.value - 1) * alike;
    d.merge_by_tile = !p.seqlen_q.cu && tiles * p.batch <= cuts;
    d.merges = d.merge_by_tile ? tiles * p.batch : cuts;
    d.slots = 2 * d.shares.value * alike;
  }
  // A few merges have many parts each.
  d.rows_of_merge =
      p.batch_invariant || d.merges * rows_to_merge<C>(d) <= 2 * p.device.processors ? 1 : kMergeWarps;
  return d;
}

// Blocks that have a tile together: twice the key warps of those that have shares of everything, so that one
// a multiprocessor will do, and rings that leave room for a block of the call behind.
template <class C>
struct Team : C {
  static constexpr bool kExists = C::kArch >= 80 && C::kRowWarps == 1 && C::kMinBlocks == 2;
  static constexpr int kKeyWarps = 2 * C::kKeyWarps, kStages = 3,
                       kMinBlocks = C::kRowBlocks == 1 && C::kHeadDim <= 128 ? 2 : 1;
};

// Teams in the place of shares, where they are better.
template <class C>
void form_teams(Decode& d) {
  if (d.splits > 0 || d.seqlen_q.cu || d.seqlen_q.used || d.chunks > 1 ||
      DecodeTiles<Team<C>>::kTeamBytes > d.device.shared_bytes)
    return;
  const int64_t tiles = d.most_tiles * d.batch;
  const bool equal = !d.seqlen_k.cu && !d.seqlen_k.used && !d.cache.leftpad;
  const TeamSize team =
      team_size(tiles, most_units(d), equal || d.batch == 1, d.device.processors, Team<C>::kMinBlocks,
                code_capability<decode_kernel<C>>(d.device.capability));
  if (team.blocks == 0) return;
  d.team = Divisor(static_cast<unsigned>(team.blocks));
  d.cluster = team.cluster;
  d.known_places = equal && !d.cache.batch_index;
  d.tiles = Divisor(static_cast<unsigned>(d.most_tiles));
  const int64_t numbers = rows_to_merge<C>(d) * DecodeTiles<C>::kFours;
  d.slice = Divisor(static_cast<unsigned>((numbers + team.blocks - 1) / team.blocks));
  d.slots = std::max(d.slots, tiles * team.blocks);
  if (d.cluster || team.blocks == 1) d.merges = d.slots = 0;
}

template <class C>
Decode divided_in_teams(const DecodeParams& p) {
  Decode d = divided<C>(p);
  if constexpr (Team<C>::kExists) form_teams<C>(d);
  return d;
}

template <class C>
Workspace decode_workspace(const DecodeParams& p) {
  Workspace workspace{};
  workspace.shared_bytes = DecodeWorkspace<C>(divided_in_teams<C>(p)).bytes;
  return workspace;
}

// False: there are no counters.
inline bool takes_counters(Decode& d, cudaStream_t stream) {
  if (d.cluster || d.team.value == 1) return true;
  const int64_t tiles = d.most_tiles * d.batch;
  d.first_counter = tiles > kMostCounters ? -1 : take_counters<kCounters>(stream, static_cast<int>(tiles));
  return d.first_counter >= 0;
}

template <class C>
int launch_decode(const DecodeParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (const int error = any::launch_append<Element<C>>(p, cuda_stream)) return error;
  Decode d = divided_in_teams<C>(p);
  if (p.seqlen_q.rows * d.group.value > INT_MAX || d.most_tiles == INT_MAX) return cudaErrorInvalidValue;
  if (d.most_tiles == 0) return cudaSuccess;
  const bool overlap = code_capability<decode_kernel<C>>(p.device.capability) >= 90;
  if constexpr (Team<C>::kExists) {
    using Tiles = DecodeTiles<Team<C>>;
    if (d.team.value > 0 && takes_counters(d, cuda_stream))
      return launch_kernel(team_kernel<Team<C>>, d.most_tiles * p.batch * d.team.value, Tiles::kThreads,
                           Tiles::kTeamBytes, d, cuda_stream, overlap, d.cluster ? d.team.value : 1);
  }
  const int64_t blocks = d.splits > 0 ? d.most_tiles * p.batch * d.splits : d.shares.value * d.alike.value,
                merge_blocks = d.merges * ((rows_to_merge<C>(d) + d.rows_of_merge - 1) / d.rows_of_merge);
  int error = launch_kernel(decode_kernel<C>, blocks, DecodeTiles<C>::kThreads, DecodeTiles<C>::kBytes, d,
                            cuda_stream, overlap);
  if (!error)
    error = launch_kernel(merge_kernel<C>, merge_blocks, kMergeThreads, kMergeWarps * C::kHeadDimV * 4, d,
                          cuda_stream, overlap);
  return error;
}

}  // namespace flashattn::mma
