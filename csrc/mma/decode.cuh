// Decode on mma.sync tensor cores (sm_75, sm_80 and newer): attention of few query rows to a KV cache.
//   O = softmax(scale Q K^T) V, lse = log sum exp.  A tile has the queries of every head of a KV head's
//   group, so that K and V are read once for all of them.  Products are transposed, S^T = K Q^T and O^T = V^T
//   P^T: a warp's 16 keys are the rows of a product, and the tile its columns, which may be few.  Key warps
//   share the keys of a part (common/split.cuh), each with copies of its own in flight, and meet only at its
//   end; row warps share the rows of a tile. Q (kRows, D), for every key warp a ring of K and V tiles (kKeys,
//   D) in shared memory.
#pragma once

#include "common/score.cuh"
#include "common/split.cuh"
#include "common/team.h"

namespace flashattn::mma {

// Shared memory of a block.  At the end sums of the warps take the place of all tiles.
template <class C>
struct DecodeTiles {
  static constexpr int kWarps = C::kRowWarps * C::kKeyWarps, kThreads = kWarps * 32,
                       kGroupThreads = C::kRowWarps * 32, kWarpRows = C::kRowBlocks * 8,
                       kRows = C::kRowWarps * kWarpRows;
  using Q = Tile<kRows, C::kHeadDim>;
  using K = Tile<C::kKeys, C::kHeadDim>;
  using V = Tile<C::kKeys, C::kHeadDimV>;
  static constexpr int kScratchBytes = 128;
  static_assert(UnitFinder<kThreads, kRows>::kScratchBytes <= kScratchBytes);
  static constexpr int kStageBytes = K::kBytes > V::kBytes ? K::kBytes : V::kBytes;
  static constexpr int kSumPitch = (C::kHeadDimV + 4) * 4;  // what lanes write together is in different banks
  // Do the sums of a warp fit into one tile of its own, the last one that it has read?
  static constexpr bool kSumsInTile =
      C::kRowWarps == 1 && kWarpRows == 8 && kWarpRows * C::kHeadDimV * 4 <= kStageBytes;
  static constexpr int kTileBytes = Q::kBytes + C::kKeyWarps * C::kStages * kStageBytes;
  static constexpr int kSumBytes = kSumsInTile ? 0 : kWarps * kWarpRows * kSumPitch;
  static constexpr int kSumPlace = kScratchBytes + (kTileBytes > kSumBytes ? kTileBytes : kSumBytes);
  static constexpr int kBytes = kSumPlace + kWarps * kWarpRows * 8;
  // The blocks of a team have more: numbers, four at a time, and weights that they get from each other.
  static constexpr int kFours = C::kHeadDimV / 4, kGivenBytes = (kRows * kFours + kMostCluster) * 16,
                       kTeamBytes = kBytes + kGivenBytes + kMostCluster * kRows * 8;

  uint32_t base = ptx::shared_address(shared_memory) + kScratchBytes;
  __device__ static int64_t* scratch() { return reinterpret_cast<int64_t*>(shared_memory); }
  __device__ Q q() const { return {base}; }
  // Where the key warp's tile has its place in the ring: those with even numbers are K, the others V.
  __device__ uint32_t keys(int key_warp, int tile) const {
    return base + Q::kBytes + (key_warp * C::kStages + tile % C::kStages) * kStageBytes;
  }
  // Column `column`, and those behind it up to a multiple of 4, of the sums of row `row` of a warp; `tile` is
  // the last one that it has read.
  __device__ uint32_t sums(int warp, int tile, int row, int column) const {
    if constexpr (kSumsInTile) return keys(warp, tile) + (row * C::kHeadDimV + (column ^ row / 2 * 8)) * 4;
    return base + (warp * kWarpRows + row) * kSumPitch + column * 4;
  }
  // Their total weight and its reference.
  __device__ uint32_t weight(int warp, int row) const {
    return base - kScratchBytes + kSumPlace + (warp * kWarpRows + row) * 8;
  }
  // What a block of the cluster gives this one, and the barrier that counts it.
  __device__ uint32_t barrier() const { return base - kScratchBytes; }
  __device__ uint32_t given(int index) const { return base - kScratchBytes + kBytes + index * 16; }
  __device__ uint32_t given_weight(int block, int row) const {
    return base - kScratchBytes + kBytes + kGivenBytes + (block * kRows + row) * 8;
  }
};

// The workspace: results of parts, rows of kHeadDimV numbers and their LSE, and what to merge.
template <class C>
struct DecodeWorkspace {
  static constexpr int kRows = DecodeTiles<C>::kRows;
  Merge* merges;
  float *out, *lse;
  int64_t bytes;

  FLASHATTN_HD explicit DecodeWorkspace(const Decode& p)
      : merges(static_cast<Merge*>(p.workspace.shared)),
        out(reinterpret_cast<float*>(merges + p.merges)),
        lse(out + p.slots * kRows * C::kHeadDimV),
        bytes(p.merges * sizeof(Merge) + p.slots * kRows * (C::kHeadDimV + 1) * sizeof(float)) {}
  __device__ float* out_row(int64_t slot, int row) const { return out + (slot * kRows + row) * C::kHeadDimV; }
  __device__ float& lse_of(int64_t slot, int row) const { return lse[slot * kRows + row]; }
};

// The rows of a tile, from the row `first` of a KV head on: (query, head of the group).
struct TileRows {
  const Decode& p;
  int64_t batch, q_first;
  int head_k, first, len_q;
  int column, columns;  // the first of the tile's columns of V, and how many there are

  __device__ TileRows(const Decode& decode, const Part& part)
      : p(decode),
        batch(part.batch),
        q_first(part.q_first),
        head_k(part.head_k),
        first(part.row),
        len_q(part.len_q) {
    take_columns(part.column);
  }
  __device__ TileRows(const Decode& decode, const Merge& merge)
      : p(decode), batch(merge.batch), head_k(merge.head_k), first(merge.row) {
    const Sequence q = sequence(p.seqlen_q, batch);
    q_first = q.first, len_q = static_cast<int>(q.length);
    take_columns(merge.column);
  }

  __device__ int query(int row) const { return static_cast<int>(p.group.divide(first + row)); }
  __device__ bool has(int row) const { return query(row) < len_q; }
  __device__ int count(int most) const { return min(most, len_q * static_cast<int>(p.group.value) - first); }
  __device__ int head(int row) const {
    const int group = static_cast<int>(p.group.value);
    return head_k * group + (first + row - query(row) * group);
  }

  template <class T>
  __device__ T* at(const Tensor4& x, int row) const {
    return static_cast<T*>(x.data) + batch * x.batch + (q_first + query(row)) * x.row + head(row) * x.head;
  }
  __device__ void store_lse(int row, float lse) const {
    if (column > 0) return;  // another tile does
    *at<float>({p.lse.data, p.lse.batch, p.lse.row, p.lse.head}, row) = lse;
  }
  __device__ uint16_t* out(int row) const { return at<uint16_t>(p.out, row) + column; }
  __device__ float sink(int row) const {  // -inf: none
    const PerHead& x = p.score.sink;
    return x.data ? load_number(x.data, x.dtype, head(row) * x.head) : -INFINITY;
  }

 private:
  __device__ void take_columns(int from) {
    column = from;
    columns = min(static_cast<int>(p.head_dim_v) - from, p.chunk_columns);
  }
};

// Online softmax over the rows of S^T, whose columns are query rows, in powers of two.  A reference is the
// largest score so far, as in OnlineSoftmax; that it must grow, one vote tells.
template <int n_blocks>
struct ColumnSoftmax {
  float reference[n_blocks][2], sum[n_blocks][2];  // the sum is of this lane's keys

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < n_blocks; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) reference[n][c] = -INFINITY, sum[n][c] = 0;
  }

  // Scores become weights 2^(scale * score - reference), and earlier sums, `out` too, are brought to the same
  // reference.
  template <int m_blocks, int out_blocks>
  __device__ void update(Accumulator<m_blocks, n_blocks>& s, float scale,
                         Accumulator<out_blocks, n_blocks>& out) {
    float top[n_blocks][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < n_blocks; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float most = -INFINITY;
#pragma unroll
        for (int m = 0; m < m_blocks; ++m) most = fmaxf(most, fmaxf(s.x[m][n][c], s.x[m][n][2 + c]));
        top[n][c] = most * scale;
        grows |= top[n][c] > reference[n][c];
      }
    if (__any_sync(0xFFFFFFFFu, grows)) grow(top, out);
#pragma unroll
    for (int n = 0; n < n_blocks; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float base = reference[n][c] == -INFINITY ? 0.f : reference[n][c];
#pragma unroll
        for (int m = 0; m < m_blocks; ++m)
#pragma unroll
          for (int e = c; e < 4; e += 2) {
            s.x[m][n][e] = ptx::ex2(fmaf(s.x[m][n][e], scale, -base));
            sum[n][c] += s.x[m][n][e];
          }
      }
  }

 private:
  template <int out_blocks>
  __device__ void grow(const float (&top)[n_blocks][2], Accumulator<out_blocks, n_blocks>& out) {
#pragma unroll
    for (int n = 0; n < n_blocks; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float most = column_max(top[n][c]);
        if (!(most > reference[n][c])) continue;
        const float rescale = ptx::ex2(reference[n][c] - most);
        reference[n][c] = most, sum[n][c] *= rescale;
#pragma unroll
        for (int m = 0; m < out_blocks; ++m) out.x[m][n][c] *= rescale, out.x[m][n][2 + c] *= rescale;
      }
  }
};

// Scores of the rows of a tile and the keys of a part: what happens to them before the softmax.
struct PartScores {
  const TileRows& rows;
  VisibleKeys visible;
  int first, last;          // keys of the part
  int all_first, all_last;  // those that every row of the tile sees
  bool modified;

  __device__ PartScores(const TileRows& rows_, int tile_rows, const Part& part)
      : rows(rows_),
        visible(part.len_q, part.len_k, rows.p.score.window_left, rows.p.score.window_right),
        first(part.first),
        last(part.last),
        all_first(max(first, visible.first(query(tile_rows - 1)))),
        all_last(min(last, visible.last(query(0)))),
        modified(modifies(rows.p.score)) {}

  // A row that does not exist is computed like the last one.
  __device__ int query(int row) const { return min(rows.query(row), visible.len_q - 1); }

  // What a logit of the softmax is multiplied by: its weight is a power of 2.
  __device__ float scale() const {
    return modified ? kLog2E : static_cast<float>(rows.p.score.scale) * kLog2E;
  }

  // Of keys from `key` and rows from `row` on.
  template <int kM, int kN>
  __device__ void apply(Accumulator<kM, kN>& s, int key, int row, int lane) const {
    const bool edge = key < all_first || key + kM * 16 > all_last;
    if (!edge && !modified) return;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = row + fragment_column(lane, n, c), at = key + lane / 4;
#pragma unroll
        for (int m = 0; m < kM; ++m) apply_to_row(s.x[m][n][c], s.x[m][n][2 + c], r, at + m * 16);
      }
  }

 private:
  // Scores of keys `key` and key + 8.
  __device__ void apply_to_row(float& low, float& high, int row, int key) const {
    const int at = query(row), from = max(first, visible.first(at)), to = min(last, visible.last(at));
    if (modified) {
      const Score& score = rows.p.score;
      float slope = 0;
      if (score.alibi.data && rows.has(row))
        slope = load_number(score.alibi.data, DType::f32,
                            rows.batch * score.alibi.batch + rows.head(row) * score.alibi.head);
      const int distance = at + visible.len_k - visible.len_q - key;
      low = logit(low, slope, distance), high = logit(high, slope, distance - 8);
    }
    if (key < from || key >= to) low = -INFINITY;
    if (key + 8 < from || key + 8 >= to) high = -INFINITY;
  }

  __device__ float logit(float x, float slope, int distance) const {
    const float cap = static_cast<float>(rows.p.score.softcap);
    x *= static_cast<float>(rows.p.score.scale);
    if (cap > 0) x = cap * softcap_tanh(x * (2 * kLog2E / cap));
    return x - slope * fabsf(static_cast<float>(distance));
  }
};

// Chunks of a tile's rows: where(row) is where a row lies; null makes it zeros.
template <class C, class T, int threads, class Where>
__device__ inline void load_tile(const T& tile, int64_t columns, int thread, Where where) {
  constexpr int kLanes = T::kLanesPerRow, kPass = threads / kLanes;
  const int lane_chunk = thread % kLanes, count = static_cast<int>(columns) - lane_chunk * kChunk;
#pragma unroll
  for (int pass = 0; pass < T::kRows; pass += kPass) {
    const int row = pass + thread / kLanes;
    if (T::kRows % kPass != 0 && row >= T::kRows) break;
    const uint16_t* from = where(row);
#pragma unroll
    for (int chunk = 0; chunk < T::kColumns / kChunk; chunk += kLanes)
      copy_16<C>(tile.chunk(row, chunk + lane_chunk), from + (chunk + lane_chunk) * kChunk,
                 from && chunk * kChunk < count);
  }
}

// The same of rows that are not in chunks.
template <class C, class T, int threads, class Where>
__device__ inline void gather_tile(const T& tile, int64_t columns, int thread, Where where) {
  constexpr int kChunks = T::kColumns / kChunk;
#pragma unroll 1
  for (int i = thread; i < T::kRows * kChunks; i += threads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const uint16_t* from = where(row);
    const int count = from ? static_cast<int>(columns) - chunk * kChunk : 0;
    ptx::st_shared_16(tile.chunk(row, chunk), gather_chunk(from + chunk * kChunk, count));
  }
}

// The keys from `key` on, of [first, last), to a tile; the others become zeros.  `lowest` is one that counts,
// if there is one, and lies at `place`.
template <class C, class T>
__device__ inline void load_keys(const T& tile, const CacheRows<const uint16_t>& cache, const Decode& p,
                                 int64_t columns, bool chunks, int key, int first, int last, int lowest,
                                 const CachePlace& place) {
  constexpr int kThreads = DecodeTiles<C>::kGroupThreads;
  const int thread = threadIdx.x % kThreads;
  const auto counts = [&](int row) {
    return static_cast<unsigned>(key + row - first) < static_cast<unsigned>(last - first);
  };
  if (chunks && (!cache.pages || p.page_size.value % T::kRows == 0)) {  // all are in one page
    const uint16_t* from = cache.at(place) - (lowest - key) * cache.stride;
    load_tile<C, T, kThreads>(tile, columns, thread,
                              [&](int row) { return counts(row) ? from + row * cache.stride : nullptr; });
  } else {
    const auto where = [&](int row) {
      return counts(row) ? cache.at(cache.find(key + row, p.page_size)) : nullptr;
    };
    if (chunks)
      load_tile<C, T, kThreads>(tile, columns, thread, where);
    else
      gather_tile<C, T, kThreads>(tile, columns, thread, where);
  }
}

// S^T += K Q^T, of the rows from `row` on.
template <class C, int kM, int kN, class K, class Q>
__device__ inline void multiply_keys(Accumulator<kM, kN>& s, const K& k_tile, const Q& q_tile, int row,
                                     int lane) {
  const OperandA<K> keys(k_tile, lane);
  if constexpr (kN == 1) {  // its 8 rows, 32 columns of them at a time
    const ColumnBlocks<Q> queries(q_tile, lane);
#pragma unroll
    for (int depth = 0; depth < C::kHeadDim; depth += 32) {
      uint32_t q_frag[4];
      queries.load(q_frag, row, depth);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint32_t k_frag[4];
          keys.load(k_frag, m * 16, depth + half * 16);
          multiply_add<C>(s.x[m][0], k_frag, q_frag[2 * half], q_frag[2 * half + 1]);
        }
    }
  } else {
    s.template multiply<C, C::kHeadDim>(keys, 0, OperandBTransposed<Q>(q_tile, lane), row);
  }
}

// O^T += V^T P^T: weights, transposed where they are, become right operands.
template <class C, int kMv, int kM, int kN, class V>
__device__ inline void add_values(Accumulator<kMv, kN>& out, const Accumulator<kM, kN>& weights,
                                  const V& v_tile, int lane) {
  const OperandATransposed<V> values(v_tile, lane);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    uint32_t p_frag[kN][2];
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = weights.x[m][n] + 2 * half;
        p_frag[n][half] = ptx::movmatrix_trans(ptx::cvt_pack<C::kDType>(x[0], x[1]));
      }
#pragma unroll
    for (int mv = 0; mv < kMv; ++mv) {
      uint32_t v_frag[4];
      values.load(v_frag, mv * 16, m * 16);
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_add<C>(out.x[mv][n], v_frag, p_frag[n][0], p_frag[n][1]);
    }
  }
}

// The warps that share tiles wait for each other.
template <class C>
__device__ inline void sync_key_warp(int key_warp) {
  if (C::kRowWarps == 1)
    __syncwarp();
  else
    ptx::bar_sync(1 + key_warp, DecodeTiles<C>::kGroupThreads);
}

// A row of a block's part: what the sums of its key warps count, relative to their largest reference.
template <class C>
struct BlockRow {
  const DecodeTiles<C>& tiles;
  int tile, first_warp, row;  // the first of the warps that share the row, and its number in them
  float factor[C::kKeyWarps], reference = -INFINITY, sum = 0;

  __device__ BlockRow(const DecodeTiles<C>& tiles_, int last_tile, int row_of_tile)
      : tiles(tiles_),
        tile(last_tile),
        first_warp(row_of_tile / DecodeTiles<C>::kWarpRows),
        row(row_of_tile % DecodeTiles<C>::kWarpRows) {
    float total[C::kKeyWarps];
#pragma unroll
    for (int w = 0; w < C::kKeyWarps; ++w) {
      const float2 weight = ptx::ld_shared_f32x2(tiles.weight(w * C::kRowWarps + first_warp, row));
      total[w] = weight.x, factor[w] = weight.y;
      reference = fmaxf(reference, weight.y);
    }
    const float base = reference == -INFINITY ? 0.f : reference;
#pragma unroll
    for (int w = 0; w < C::kKeyWarps; ++w) {
      factor[w] = ptx::ex2(factor[w] - base);
      sum += total[w] * factor[w];
    }
  }

  // Four numbers, times `scale`.
  __device__ float4 four(int column, float scale) const {
    float4 all{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < C::kKeyWarps; ++w) {
      if (factor[w] == 0) continue;  // it may have summed what no row sees
      const float4 x = ptx::ld_shared_f32x4(tiles.sums(w * C::kRowWarps + first_warp, tile, row, column));
      const float share = scale * factor[w];
      all.x += share * x.x, all.y += share * x.y, all.z += share * x.z, all.w += share * x.w;
    }
    return all;
  }
};

// The rows of a part, normalised, from the sums of all key warps: to `out`, or to their slot.
template <class C>
__device__ inline void store_part(const TileRows& rows, const DecodeTiles<C>& tiles, int tile, int64_t slot) {
  using Tiles = DecodeTiles<C>;
  constexpr int kThreadsOfRow = Tiles::kThreads / Tiles::kRows;
  const int row = threadIdx.x / kThreadsOfRow, thread = threadIdx.x % kThreadsOfRow;
  if (!rows.has(row)) return;
  const BlockRow<C> mine(tiles, tile, row);
  const RowResult result = finish_row(mine.sum, mine.reference, slot < 0 ? rows.sink(row) : -INFINITY);
  const DecodeWorkspace<C> workspace(rows.p);
  uint16_t* to = rows.out(row);
#pragma unroll 1
  for (int column = thread * 4; column < C::kHeadDimV; column += kThreadsOfRow * 4) {
    const float4 all = mine.four(column, result.factor);
    if (slot < 0)
      store_four<C>(to + column, all, rows.columns - column);
    else
      *reinterpret_cast<float4*>(workspace.out_row(slot, row) + column) = all;
  }
  if (thread != 0) return;
  if (slot < 0)
    rows.store_lse(row, result.lse);
  else
    workspace.lse_of(slot, row) = result.lse;
}

// Numbers [first, first + count) of a tile, four each, from its parts: number(part, i) and what it counts,
// weight(part, row), a sum and its reference, the latter in units of 1 / scale.  Neighbours share a number.
template <class C, class Weight, class Number>
__device__ inline void merge_parts(const TileRows& rows, int first, int count, int parts, float scale,
                                   Weight weight, Number number) {
  using Tiles = DecodeTiles<C>;
  constexpr int kSharers = 2, kAtOnce = 8, kStep = Tiles::kThreads / kSharers;
  const int sharer = threadIdx.x % kSharers;
#pragma unroll 1
  for (int from = 0; from < count; from += kStep) {
    const int index = from + threadIdx.x / kSharers, row = (first + index) / Tiles::kFours,
              column = (first + index) % Tiles::kFours * 4;
    const bool exists = index < count && row < Tiles::kRows && rows.has(row);
    float peak = -INFINITY, total = 0;
    float4 all{0, 0, 0, 0};
#pragma unroll 1
    for (int before = 0; before < parts; before += kSharers * kAtOnce) {
      float2 w[kAtOnce];
      float4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {  // all are under way before the first one is needed
        const int part = before + i * kSharers + sharer;
        const bool counts = exists && part < parts;
        w[i] = counts ? weight(part, row) : float2{0, -INFINITY};
        x[i] = counts ? number(part, index) : float4{0, 0, 0, 0};
      }
      float top = peak;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, w[i].y * scale);
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
      const float base = top == -INFINITY ? 0.f : top, rescale = ptx::ex2(peak - base);
      peak = top, total *= rescale;
      all.x *= rescale, all.y *= rescale, all.z *= rescale, all.w *= rescale;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float share = ptx::ex2(fmaf(w[i].y, scale, -base));
        total += share * w[i].x;
        all.x += share * x[i].x, all.y += share * x[i].y, all.z += share * x[i].z, all.w += share * x[i].w;
      }
    }
    for (float* x : {&total, &all.x, &all.y, &all.z, &all.w}) *x += __shfl_xor_sync(0xFFFFFFFFu, *x, 1);
    if (!exists || sharer > 0) continue;
    const RowResult result = finish_row(total, peak, rows.sink(row));
    const float f = result.factor;
    store_four<C>(rows.out(row) + column, {f * all.x, f * all.y, f * all.z, f * all.w},
                  rows.columns - column);
    if (column == 0) rows.store_lse(row, result.lse);
  }
}

// The rows of a tile whose keys the blocks of a cluster have: each gets a slice of all blocks' sums.
template <class C>
__device__ inline void merge_in_cluster(const TileRows& rows, const DecodeTiles<C>& tiles, int tile) {
  using Tiles = DecodeTiles<C>;
  constexpr int kThreadsOfRow = Tiles::kThreads / Tiles::kRows;
  const Decode& p = rows.p;
  const int blocks = static_cast<int>(p.team.value), slice = static_cast<int>(p.slice.value),
            block = static_cast<int>(blockIdx.x - p.team.divide(blockIdx.x) * blocks),
            row = threadIdx.x / kThreadsOfRow, thread = threadIdx.x % kThreadsOfRow;
  ptx::cluster_wait();  // all blocks run
  if (rows.has(row)) {
    const BlockRow<C> mine(tiles, tile, row);
#pragma unroll 1
    for (int four = thread; four < Tiles::kFours; four += kThreadsOfRow) {
      const int number = row * Tiles::kFours + four, to = static_cast<int>(p.slice.divide(number));
      ptx::st_async_f32x4(tiles.given(block * slice + number - to * slice), tiles.barrier(), to,
                          mine.four(four * 4, 1));
    }
    for (int to = thread; to < blocks; to += kThreadsOfRow)
      ptx::st_async_f32x2(tiles.given_weight(block, row), tiles.barrier(), to, {mine.sum, mine.reference});
  }
  const int numbers = rows.count(Tiles::kRows) * Tiles::kFours,
            mine = min(slice, max(0, numbers - block * slice));
  if (threadIdx.x == 0)
    ptx::mbarrier_arrive_expect_tx(tiles.barrier(), blocks * (mine * 16 + rows.count(Tiles::kRows) * 8));
  ptx::mbarrier_wait_cluster(tiles.barrier(), 0);  // all blocks have given
  merge_parts<C>(
      rows, block * slice, mine, blocks, 1,
      [&](int part, int row) { return ptx::ld_shared_f32x2(tiles.given_weight(part, row)); },
      [&](int part, int index) { return ptx::ld_shared_f32x4(tiles.given(part * slice + index)); });
}

// Counters of a tile's parts that have been stored.  At rest each is zero: the last block sets it back.
constexpr int kCounters = 1 << 18;
static __device__ unsigned part_counters[kCounters];

// Of the blocks that have a tile, the last one merges what all have stored.
template <class C>
__device__ inline void merge_by_last(const TileRows& rows) {
  using Tiles = DecodeTiles<C>;
  const Decode& p = rows.p;
  const int tile = static_cast<int>(p.team.divide(blockIdx.x)), blocks = static_cast<int>(p.team.value);
  __syncthreads();  // the part is in memory
  if (threadIdx.x == 0) {
    unsigned* counter = &part_counters[p.first_counter + tile];
    const bool last = ptx::atom_add_acq_rel(counter, 1) + 1 == p.team.value;
    if (last) *counter = 0;
    *Tiles::scratch() = last;
  }
  __syncthreads();  // whether this block is the last is known
  if (!*Tiles::scratch()) return;
  const DecodeWorkspace<C> workspace(p);
  const int64_t slot = static_cast<int64_t>(tile) * blocks;
  merge_parts<C>(
      rows, 0, rows.count(Tiles::kRows) * Tiles::kFours, blocks, kLog2E,
      [&](int part, int row) { return float2{1, workspace.lse_of(slot + part, row)}; },
      [&](int part, int index) {
        return *reinterpret_cast<const float4*>(workspace.out_row(slot + part, 0) + index * 4);
      });
}

// Brings the keys of a part, tile after tile, to a key warp's ring: tile 2 i is K of step i and tile 2 i + 1
// its V.
template <class C>
struct KeyLoads {
  using Tiles = DecodeTiles<C>;
  static constexpr int kStepKeys = C::kKeyWarps * C::kKeys;
  CacheRows<const uint16_t> k, v;
  CachePlace place{0, 0};  // the same of K and V
  int columns, begin, first, last, tiles;

  __device__ KeyLoads(const Decode& p, const Part& part, int key_warp)
      : k(p, p.k, part.batch, part.head_k),
        v(p, p.v, part.batch, part.head_k),
        columns(min(static_cast<int>(p.head_dim_v) - part.column, p.chunk_columns)),
        first(part.first),
        last(part.last) {
    v.base += part.column;
    const int unit = first / kUnitKeys * kUnitKeys;
    begin = unit + key_warp * C::kKeys;
    tiles = first < last ? 2 * ((last - unit + kStepKeys - 1) / kStepKeys) : 0;
  }

  template <bool is_k>
  __device__ void load(const Decode& p, int tile, uint32_t to) {
    const int key = begin + tile / 2 * kStepKeys, lowest = min(max(key, first), last - 1);
    if (is_k) place = k.find(lowest, p.page_size);
    if constexpr (is_k)
      load_keys<C>(typename Tiles::K{to}, k, p, p.head_dim, p.chunks_k, key, first, last, lowest, place);
    else
      load_keys<C>(typename Tiles::V{to}, v, p, columns, p.chunks_v, key, first, last, lowest, place);
  }
};

template <class C>
__device__ inline void load_queries(const TileRows& rows, const typename DecodeTiles<C>::Q& tile) {
  using Tiles = DecodeTiles<C>;
  using Q = typename Tiles::Q;
  const Decode& p = rows.p;
  const auto where = [&](int r) { return rows.has(r) ? rows.at<const uint16_t>(p.q, r) : nullptr; };
  if (p.chunks_q)
    load_tile<C, Q, Tiles::kThreads>(tile, p.head_dim, threadIdx.x, where);
  else
    gather_tile<C, Q, Tiles::kThreads>(tile, p.head_dim, threadIdx.x, where);
}

// Attention of the rows of tiles to the keys of the block's parts; only one if `team`.  Nothing that a kernel
// before may write is read until `wait` returns.
template <class C, bool team, class Parts, class Wait>
__device__ inline void attend(const Decode& p, Parts& parts, Wait wait) {
  using Tiles = DecodeTiles<C>;
  using K = typename Tiles::K;
  using V = typename Tiles::V;
  constexpr int kM = C::kKeys / 16, kN = C::kRowBlocks, kMv = C::kHeadDimV / 16,
                kStepKeys = C::kKeyWarps * C::kKeys;
  // One tile is read while the kAhead behind it are in flight, a group of copies each; the one that is waited
  // for is the oldest.
  constexpr int kAhead = C::kStages - 1;
  const Tiles tiles;
  const int warp = threadIdx.x / 32, key_warp = warp / C::kRowWarps,
            row = warp % C::kRowWarps * Tiles::kWarpRows, lane = threadIdx.x % 32;
  Part part;
#pragma unroll 1
  while (parts.next(part)) {
    KeyLoads<C> loads(p, part, key_warp);
    const TileRows rows(p, part);
    const PartScores scores(rows, Tiles::kRows, part);
    const int steps = loads.tiles / 2;
    Accumulator<kMv, kN> out;
    ColumnSoftmax<kN> softmax;
    out.clear();
    softmax.clear();
    wait();
    if (steps > 0) load_queries<C>(rows, tiles.q());
    const auto load_ahead = [&](int tile, auto is_k) {
      const int ahead = tile + kAhead;
      if (ahead >= 0 && ahead < loads.tiles)
        loads.template load<decltype(is_k)::value == (kAhead % 2 == 0)>(p, ahead,
                                                                        tiles.keys(key_warp, ahead));
      commit_copies<C>();
    };
#pragma unroll 1
    for (int step = -(C::kStages / 2); step < steps; ++step) {
      Accumulator<kM, kN> s;
      if (step >= 0) {
        wait_for_copies<C, kAhead - 1>();
        if (step == 0)
          __syncthreads();  // Q and K have landed for all warps
        else
          sync_key_warp<C>(key_warp);  // K has landed, and V of the step before has been read
      }
      load_ahead(2 * step, std::true_type{});
      if (step >= 0) {
        s.clear();
        multiply_keys<C>(s, K{tiles.keys(key_warp, 2 * step)}, tiles.q(), row, lane);
        scores.apply(s, loads.begin + step * kStepKeys, row, lane);
        softmax.update(s, scores.scale(), out);
        wait_for_copies<C, kAhead - 1>();
        sync_key_warp<C>(key_warp);  // V has landed, and K has been read
      }
      load_ahead(2 * step + 1, std::false_type{});
      if (step >= 0) add_values<C>(out, s, V{tiles.keys(key_warp, 2 * step + 1)}, lane);
    }

    const int last_tile = max(loads.tiles - 1, 0);
    if constexpr (Tiles::kSumsInTile) {
      __syncwarp();  // all lanes have read the last tile
    } else {
      wait_for_copies<C, 0>();
      __syncthreads();  // all have read their tiles: sums may take their places
    }
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = fragment_column(lane, n, c);
        const float sum = column_sum(softmax.sum[n][c]);
        if (lane / 4 == 0) ptx::st_shared_f32x2(tiles.weight(warp, r), {sum, softmax.reference[n][c]});
#pragma unroll
        for (int m = 0; m < kMv; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            ptx::st_shared_4(tiles.sums(warp, last_tile, r, m * 16 + half * 8 + lane / 4),
                             __float_as_uint(out.x[m][n][2 * half + c]));
      }
    __syncthreads();  // the sums of all warps are there
    if (team && p.cluster) {
      merge_in_cluster<C>(rows, tiles, last_tile);
      return;
    }
    store_part<C>(rows, tiles, last_tile, part.slot);
    if constexpr (team) {
      if (part.slot >= 0) merge_by_last<C>(rows);
      return;
    }
    __syncthreads();  // and have been read
  }
}

template <class C>
__global__ void __launch_bounds__(DecodeTiles<C>::kThreads, C::kMinBlocks)
    decode_kernel(const __grid_constant__ Decode p) {
  using Tiles = DecodeTiles<C>;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  BlockParts<Tiles::kThreads, Tiles::kRows> parts(p, DecodeWorkspace<C>(p).merges, Tiles::scratch());
  attend<C, false>(p, parts, [] {});
}

// The same where a team of blocks has a tile.
template <class C>
__global__ void __launch_bounds__(DecodeTiles<C>::kThreads, C::kMinBlocks)
    team_kernel(const __grid_constant__ Decode p) {
  if (p.cluster) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(DecodeTiles<C>().barrier(), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive_relaxed();
  }
  if (!p.known_places) ptx::griddepcontrol_wait();
  TeamPart<DecodeTiles<C>::kRows> part(p);
  attend<C, true>(p, part, [&] {
    if (p.known_places) ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
  });
}

// ---- merge ---------------------------------------------------------------------------------------------

constexpr int kMergeWarps = 8, kMergeThreads = kMergeWarps * 32;

// Rows of a tile that may exist.
template <class C>
FLASHATTN_HD int64_t rows_to_merge(const Decode& p) {
  return clamp(p.seqlen_q.rows * p.group.value, 1, DecodeTiles<C>::kRows);
}

// out = sum_s e^(lse_s - lse) out_s, lse = log(sum_s e^lse_s + e^sink) of the rows of a tile.  A block takes
// p.rows_of_merge of them, all its warps for one or a warp each.
template <class C>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Decode p) {
  constexpr int kFours = C::kHeadDimV / 4, kPieces = (kFours + 31) / 32, kAtOnce = 8 / kPieces;
  auto* shared_sums = reinterpret_cast<float4*>(shared_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = kMergeWarps / p.rows_of_merge;
  const auto blocks = static_cast<unsigned>((rows_to_merge<C>(p) + p.rows_of_merge - 1) / p.rows_of_merge);
  const unsigned index = blockIdx.x / blocks;
  const int row = static_cast<int>(blockIdx.x - index * blocks) * p.rows_of_merge + warp / warps;
  const DecodeWorkspace<C> workspace(p);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const Merge merge = workspace.merges[index];
  if (merge.parts < 2) return;
  const TileRows rows(p, merge);
  if (!rows.has(row)) return;

  float4 sum[kPieces] = {}, x[kAtOnce][kPieces];
  float lse[kAtOnce];
  const auto load = [&](int first) {  // all are under way before the first one is needed
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int part = first + i * warps;
      const bool exists = part < merge.parts;
      const int64_t slot = slot_of(p, merge, exists ? part : 0);
      const auto* from = reinterpret_cast<const float4*>(workspace.out_row(slot, row));
      lse[i] = exists ? workspace.lse_of(slot, row) : -INFINITY;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        x[i][piece] = exists && piece * 32 + lane < kFours ? from[piece * 32 + lane] : float4{0, 0, 0, 0};
    }
  };
  load(warp % warps);
  const float sink = rows.sink(row);
  float peak = sink, total = 0;
  for (int part = lane; part < merge.parts; part += 32)
    peak = fmaxf(peak, workspace.lse_of(slot_of(p, merge, part), row));
  peak = quad_max(column_max(peak));
  const float base = peak == -INFINITY ? 0.f : peak;
  const auto weight = [base](float of_lse) { return ptx::ex2((of_lse - base) * kLog2E); };
  for (int part = lane; part < merge.parts; part += 32)
    total += weight(workspace.lse_of(slot_of(p, merge, part), row));
  total = quad_sum(column_sum(total)) + weight(sink);
  for (int first = warp % warps;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float mine = weight(lse[i]);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        sum[piece].x += mine * x[i][piece].x, sum[piece].y += mine * x[i][piece].y;
        sum[piece].z += mine * x[i][piece].z, sum[piece].w += mine * x[i][piece].w;
      }
    }
    if ((first += warps * kAtOnce) >= merge.parts) break;
    load(first);
  }
  if (warps > 1) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (piece * 32 + lane < kFours) shared_sums[warp * kFours + piece * 32 + lane] = sum[piece];
    __syncthreads();  // the sums of all warps are there
    if (warp > 0) return;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      for (int w = 1; w < kMergeWarps && piece * 32 + lane < kFours; ++w) {
        const float4 other = shared_sums[w * kFours + piece * 32 + lane];
        sum[piece].x += other.x, sum[piece].y += other.y, sum[piece].z += other.z, sum[piece].w += other.w;
      }
  }
  const float factor = total == 0 ? 0.f : ptx::rcp(total);
  uint16_t* to = rows.out(row);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int column = (piece * 32 + lane) * 4;
    if (column < C::kHeadDimV)
      store_four<C>(
          to + column,
          {factor * sum[piece].x, factor * sum[piece].y, factor * sum[piece].z, factor * sum[piece].w},
          rows.columns - column);
  }
  if (lane == 0) rows.store_lse(row, total == 0 ? -INFINITY : base + ptx::lg2(total) * kLn2);
}

}  // namespace flashattn::mma
