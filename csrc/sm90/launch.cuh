// Host side of the Hopper kernels: tensor maps, grids, order of the tiles.
#pragma once

#include <algorithm>
#include <climits>
#include <numeric>

#include "any/launch.cuh"
#include "mma/launch.cuh"
#include "sm90/backward.cuh"
#include "sm90/decode.cuh"
#include "sm90/forward.cuh"
#include "sm90/tensor_map.cuh"

namespace flashattn::sm90 {

template <class C>
constexpr int64_t forward_shared_bytes() {
  return ForwardShared<C>::kBytes;
}

template <class C>
Workspace forward_workspace(const ForwardParams&) {
  return {};
}

inline int processors() {
  static thread_local int known_device = -1, known_count = 0;
  int device = 0;
  cudaGetDevice(&device);
  if (device != known_device) {
    cudaDeviceGetAttribute(&known_count, cudaDevAttrMultiProcessorCount, device);
    known_device = device;
  }
  return known_count;
}

// Query heads that share a tile: more than one if that leaves fewer rows of tiles empty.  Not when packed:
// what becomes of a sequence shall not depend on the length of others.
template <class C>
int heads_in_tile(const ForwardParams& p) {
  const int64_t group = neighbours_in_tile(p.heads_q / p.heads_k), rows = p.seqlen_q.rows;
  const auto filled = [](int64_t rows) {
    return static_cast<double>(rows) / ((rows + C::kRows - 1) / C::kRows * C::kRows);
  };
  const bool possible = !p.seqlen_q.cu && !p.batch_invariant;
  return possible && filled(rows) < 0.9 * filled(rows * group) ? static_cast<int>(group) : 1;
}

// c tanh(f x) with tanh's odd polynomial of least relative error up to an argument.  Weights below 2^-24 of a
// row's sum do not count, so that arguments may be too negative (the polynomial grows with them).
inline SoftcapPolynomial softcap_polynomial(float c, float f, const float (&coefficients)[5],
                                            float tanh_end) {
  SoftcapPolynomial polynomial{};
  float factor = c * f;
  for (int i = 0; i < 5; ++i, factor *= f * f) polynomial.factors[i] = coefficients[i] * factor;
  const float low = 24 - c * tanh_end;
  polynomial.bounds = {low, c * tanh_end};
  return polynomial;
}

inline Logits logits(const Score& score) {
  constexpr float kNear[5] = {0.999997131f, -0.332909541f, 0.123950313f},  // to 0.35: 3e-6, to 0.7: 3e-7
      kFar[5] = {0.999999697f, -0.333302129f, 0.132811126f, -0.0508362359f, 0.0137737106f};
  Logits logits{};
  logits.scale = static_cast<float>(score.scale) * kLog2E;
  if (score.softcap > 0) {
    logits.softcap = static_cast<float>(score.softcap) * kLog2E;
    logits.cap_slope = static_cast<float>(score.scale / score.softcap);
    logits.near = softcap_polynomial(logits.softcap, logits.cap_slope, kNear, 0.3363755f);
    logits.far = softcap_polynomial(logits.softcap, logits.cap_slope, kFar, 0.6043678f);
  }
  return logits;
}

// The map of K or V, which may be a cache; `box_rows` of its rows lie in one page.
template <class C>
int make_key_map(CUtensorMap& map, const ForwardParams& p, const Tensor4& x, int64_t columns, int box_rows) {
  const Lengths& keys = p.seqlen_k;
  if (!C::kCached)
    return make_map<C>(map, x, columns, 1, keys.cu ? keys.total : keys.rows, p.heads_k, keys.cu ? 1 : p.batch,
                       box_rows);
  return make_map<C>(map, x, columns, 1, p.cache.page_table ? p.cache.page_size : keys.rows, p.heads_k,
                     p.cache.entries, box_rows);
}

template <class C>
int launch_forward(const ForwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Forward f{};
  f.p = p;
  f.logits = logits(p.score);
  const int group = heads_in_tile<C>(p);
  const int64_t units = p.heads_q / group;
  const bool ragged = p.seqlen_q.cu || p.seqlen_q.used || p.seqlen_k.cu || p.seqlen_k.used;
  const int64_t rows = p.seqlen_q.rows * group, of_unit = (rows + C::kRows - 1) / C::kRows;
  const int64_t total_rows = p.seqlen_q.cu ? p.seqlen_q.total * group : rows * p.batch;
  const int64_t tiles =  // at most
      ragged ? std::min(of_unit * p.batch, total_rows / C::kRows + p.batch) * units
             : of_unit * p.batch * units;
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT_MAX) return cudaErrorInvalidValue;
  const int64_t blocks = std::min<int64_t>(tiles, C::kBlocks * processors());

  Schedule& schedule = f.schedule;
  while (1 << schedule.group < group) ++schedule.group;
  schedule.units = Divisor(static_cast<unsigned>(units));
  schedule.blocks = static_cast<int>(blocks);
  schedule.units_of_k = Divisor(static_cast<unsigned>(units / p.heads_k));
  schedule.ticket = tiles > blocks ? take_counters<kTickets>(cuda_stream) : -1;
  if (!ragged) {
    // Causal: tiles of so many heads together that short ones fill the gaps at the end, and that the few
    // blocks of a head walk over K and V at the same time (measured: docs/sm90_forward.md).  Otherwise tile
    // after tile of a head.
    constexpr int64_t kTogether = 64;
    const int64_t section = std::min<int64_t>(p.score.window_right < 0 ? 1 : kTogether, p.batch * units);
    schedule.tiles = static_cast<int>(tiles);
    schedule.tiles_of_unit = static_cast<int>(of_unit);
    schedule.all_units = static_cast<int>(p.batch * units);
    schedule.section = Divisor(static_cast<unsigned>(section));
    schedule.tiles_of_section = Divisor(static_cast<unsigned>(section * of_unit));
    schedule.visible = {p.seqlen_q.rows, p.seqlen_k.rows, p.score.window_left, p.score.window_right};
  }

  const bool packed_q = p.seqlen_q.cu;
  const int64_t q_rows = packed_q ? p.seqlen_q.total : p.seqlen_q.rows, batch_q = packed_q ? 1 : p.batch;
  // Without keys nothing reads them, and the maps are of something that exists.
  const bool no_keys = (p.seqlen_k.cu ? p.seqlen_k.total : p.seqlen_k.rows) == 0;
  const bool paged = C::kCached && p.cache.page_table;
  f.page_size = Divisor(static_cast<unsigned>(clamp(p.cache.page_size, 1, INT_MAX)));
  f.box_rows = paged ? std::gcd(static_cast<int>(f.page_size.value), C::kKeys) : C::kKeys;
  int error = make_map<C>(f.q, p.q, p.head_dim, group, q_rows, units, batch_q, C::kRows);
  if (!error) error = make_map<C>(f.out, p.out, p.head_dim_v, group, q_rows, units, batch_q, 64);
  if (no_keys) f.k = f.v = f.q;
  if (!error && !no_keys) error = make_key_map<C>(f.k, p, p.k, p.head_dim, f.box_rows);
  if (!error && !no_keys) error = make_key_map<C>(f.v, p, p.v, p.head_dim_v, f.box_rows);
  if (error) return error;
  if (const auto failed = cudaFuncSetAttribute(forward_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               ForwardShared<C>::kBytes))
    return failed;
  cudaLaunchAttribute overlap{};  // its first instructions with the end of the kernel before
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = ForwardShared<C>::kThreads;
  config.dynamicSmemBytes = ForwardShared<C>::kBytes;
  config.stream = cuda_stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, forward_kernel<C>, f);
}

template <class C>
constexpr int64_t backward_shared_bytes() {
  return BackwardShared<C>::kBytes;
}

using flashattn::backward_workspace;

// Heads of a section share the L2 cache: of each query Q, dO and the sums of dQ.  A causal launch of few
// blocks has one section, so that its last blocks are the shortest of all.
template <class C>
KeyOrder key_order(const BackwardParams& p) {
  constexpr int64_t kCache = 36 << 20, kFewWaves = 8;
  constexpr int kQueryBytes = C::kHeadDim * 2 + C::kHeadDimV * 2 + C::kHeadDim * 4;
  const int64_t tiles = (p.seqlen_k.rows + C::kKeys - 1) / C::kKeys, heads = p.heads_k * p.batch,
                group = p.heads_q / p.heads_k,
                cached = kCache / std::max<int64_t>(1, p.seqlen_q.rows * group * kQueryBytes);
  const bool together = p.score.window_right >= 0 && tiles * heads < kFewWaves * processors();
  // Blocks that add in turn go through the same queries at the same time, of which the cache holds what they
  // need, and begin after each other: few of a head, if some are shorter anyway.
  const int64_t least = p.deterministic && p.score.window_right >= 0 ? processors() / 4 : 1;
  const int64_t section = together ? heads : std::min(std::max(cached, least), heads);
  KeyOrder order{};
  order.last_section = static_cast<int>(heads / section) - 1;
  order.all_heads = static_cast<int>(heads);
  order.group = static_cast<int>(group);
  order.section = Divisor(static_cast<unsigned>(section));
  order.tiles_of_section = Divisor(static_cast<unsigned>(section * tiles));
  order.heads = Divisor(static_cast<unsigned>(p.heads_k));
  return order;
}

// Does a block see all keys of its head, and dQ of every query?
template <class C>
bool stores_queries(const BackwardParams& p) {
  const bool even = !p.seqlen_q.cu && !p.seqlen_q.used && !p.seqlen_k.cu && !p.seqlen_k.used;
  if (!C::kBulkSums || !even || p.seqlen_k.rows > C::kKeys) return false;
  const VisibleKeys visible{p.seqlen_q.rows, p.seqlen_k.rows, p.score.window_left, p.score.window_right};
  const RowRange rows = visible.rows(0, C::kKeys);
  return rows.first == 0 && rows.last == p.seqlen_q.rows;
}

template <class C>
int launch_backward(const BackwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool stores = stores_queries<C>(p);
  const auto main = [&]() -> int {
    const int64_t blocks = (p.seqlen_k.rows + C::kKeys - 1) / C::kKeys * p.heads_k * p.batch;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT_MAX) return cudaErrorInvalidValue;
    Backward f{};
    f.p = p;
    f.order = key_order<C>(p);
    f.queries = stores ? Queries::stored : p.deterministic ? Queries::added_in_turn : Queries::added;
    const Logits of_score = logits(p.score);
    f.cap_factor = 2 * kLog2E * of_score.cap_slope;
    f.largest_tanh = p.score.softcap > 0;
    f.logit_factor = p.score.softcap > 0 ? of_score.softcap : of_score.scale;
    const bool packed_q = p.seqlen_q.cu, packed_k = p.seqlen_k.cu;
    const int64_t q_rows = packed_q ? p.seqlen_q.total : p.seqlen_q.rows,
                  k_rows = packed_k ? p.seqlen_k.total : p.seqlen_k.rows;
    const int64_t batch_q = packed_q ? 1 : p.batch, batch_k = packed_k ? 1 : p.batch;
    const auto map_keys = [&](CUtensorMap& map, const Tensor4& x, int64_t columns, int box) {
      return make_map<C>(map, x, columns, 1, k_rows, p.heads_k, batch_k, box);
    };
    int error = map_keys(f.k, p.k, p.head_dim, C::kKeys);
    if (!error) error = map_keys(f.v, p.v, p.head_dim_v, C::kKeys);
    if (!error) error = map_keys(f.dk, p.dk, p.head_dim, 64);
    if (!error) error = map_keys(f.dv, p.dv, p.head_dim_v, 64);
    if (q_rows == 0) {  // nothing reads them, and the maps are of something that exists
      f.q = f.dout = f.k;
    } else {
      if (!error) error = make_map<C>(f.q, p.q, p.head_dim, 1, q_rows, p.heads_q, batch_q, C::kRows);
      if (!error) error = make_map<C>(f.dout, p.dout, p.head_dim_v, 1, q_rows, p.heads_q, batch_q, C::kRows);
    }
    if (error) return error;
    return launch_kernel(backward_kernel<C>, blocks, BackwardShared<C>::kThreads, BackwardShared<C>::kBytes,
                         f, cuda_stream);
  };
  return launch_backward_rows<C, StatisticsInQuads>(p, cuda_stream, main, !stores);
}

template <class C>
constexpr int64_t prefill_shared_bytes() {
  return ForwardShared<C>::kBytes;
}

template <class C>
Workspace prefill_workspace(const DecodeParams&) {
  return {};
}

// A decode of many queries.
template <class C>
int launch_prefill(const DecodeParams& p, void* stream) {
  if (const int error = any::launch_append<mma::Element<C>>(p, static_cast<cudaStream_t>(stream)))
    return error;
  ForwardParams forward = p;
  if (p.rotary.cos) forward.q = p.q_rotated;
  return launch_forward<C>(forward, stream);
}

template <class C>
constexpr int64_t decode_shared_bytes() {
  return DecodeShared<C>::kBytes;
}

// How a decode is divided.  A few multiprocessors may stay idle if then every tile is cut alike, or none is:
// the result of a part is as large as the keys of two units.
template <class C>
Decode divided_decode(const DecodeParams& call) {
  DecodeParams p = call;
  const int64_t processors = std::max(1, p.device.processors),
                rows = p.seqlen_q.rows * (p.heads_q / p.heads_k),
                tiles = (rows + C::kRows - 1) / C::kRows * p.heads_k * p.batch;
  if (tiles > 0 && !p.seqlen_q.cu) {
    const int64_t of_block = (tiles + processors - 1) / processors,
                  even = tiles < processors ? processors / tiles * tiles : (tiles + of_block - 1) / of_block;
    if (even >= processors * 9 / 10) p.device.processors = static_cast<int>(even);
  }
  return mma::divided<C>(p);
}

template <class C>
Workspace decode_workspace(const DecodeParams& p) {
  Workspace workspace{};
  workspace.shared_bytes = mma::DecodeWorkspace<C>(divided_decode<C>(p)).bytes;
  return workspace;
}

template <class C>
int launch_decode(const DecodeParams& p, void* stream) {
  using Shared = DecodeShared<C>;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (const int error = any::launch_append<mma::Element<C>>(p, cuda_stream)) return error;
  LatentDecode f{};
  f.d = divided_decode<C>(p);
  const Decode& d = f.d;
  if (p.seqlen_q.rows * d.group.value > INT_MAX || d.most_tiles == INT_MAX) return cudaErrorInvalidValue;
  if (d.most_tiles == 0) return cudaSuccess;
  if (p.seqlen_k.rows > 0) {  // otherwise nothing reads keys
    const int64_t rows = p.cache.page_table ? p.cache.page_size : p.seqlen_k.rows;
    const auto map = [&](CUtensorMap& to, int slabs) {
      return make_slab_map<C>(to, p.k, p.head_dim, rows, p.heads_k, p.cache.entries, slabs);
    };
    int error = map(f.half, Shared::kHalfSlabs);
    if (!error) error = map(f.tail, Shared::kTailSlabs);
    if (error) return error;
  }
  const int64_t blocks = d.splits > 0 ? d.most_tiles * p.batch * d.splits : d.shares.value * d.alike.value,
                rows_of_tile = mma::rows_to_merge<C>(d),
                merge_blocks = d.merges * ((rows_of_tile + d.rows_of_merge - 1) / d.rows_of_merge);
  int error = launch_kernel(decode_kernel<C>, blocks, Shared::kThreads, Shared::kBytes, f, cuda_stream, true);
  if (!error)
    error = launch_kernel(mma::merge_kernel<C>, merge_blocks, mma::kMergeThreads,
                          mma::kMergeWarps * C::kHeadDimV * 4, d, cuda_stream, true);
  return error;
}

}  // namespace flashattn::sm90
