// The contract between the torch binding and the kernels: plain structs, no torch and no CUDA header.
// Shapes: B batch, Sq/Sk rows, Hq/Hk heads, D and Dv head dims.  Strides and offsets are in elements.
#pragma once

#include <cstdint>

namespace flashattn {

enum class DType : uint8_t { f32, f64, f16, bf16 };

// A tensor (batch, row, head, column) whose columns are contiguous.  Packed tensors (row, head, column) have
// batch stride 0 and their rows are counted over all sequences.
struct Tensor4 {
  void* data;
  int64_t batch, row, head;
};

// A statistic (batch, head, row) in the type of the sums: float, or double for f64 inputs.
struct Statistic {
  void* data;  // null: not wanted
  int64_t batch, head, row;
};

// A vector with one number a head, or one a batch and head.
struct PerHead {
  const void* data;  // null: absent
  DType dtype;
  int64_t batch, head;
};

// An additive or boolean (batch, head, row, key) tensor; a broadcast dimension has stride 0, keys are
// contiguous.
struct ScoreTensor {
  const void* data;  // null: absent
  DType dtype;       // of a bias; a mask holds one byte an element
  int64_t batch, head, row;
};

// Lengths of the sequences: from the shape (all null), packed (cumulative) and shortened (used).
struct Lengths {
  int64_t rows;         // dense: rows of every sequence; packed: at least the longest sequence
  int64_t total;        // rows of all sequences in the tensor
  const int32_t* cu;    // (B + 1), null: dense
  const int32_t* used;  // (B), null: all rows count
  // Rows that come behind the used ones: so many of each sequence, and those of a packed tensor (B + 1).
  int64_t appended;
  const int32_t* appended_cu;  // null: none
};

// Where the keys of a sequence lie when k and v are a cache.
struct Cache {
  int64_t entries;            // pages, or rows of the batch dimension
  const int32_t* page_table;  // (B, max_pages), null: not paged
  int64_t page_table_stride, page_size;
  const int32_t* batch_index;  // (B), null: row b of the cache
  const int32_t* leftpad;      // (B), null: 0.  First valid key
};

struct Score {
  double scale, softcap;              // softcap 0: off
  int64_t window_left, window_right;  // -1: no limit; causal has window_right 0
  PerHead alibi, sink;
  ScoreTensor bias, mask;
};

struct Dropout {
  uint32_t keep_below;  // of 65536; 65536: no dropout
  const int64_t* seed;  // null: no dropout
};

// Scratch memory of a launch: one piece for each CPU thread and one that they share.
struct Workspace {
  void* shared;
  void* private_data;  // threads * private_bytes
  int64_t shared_bytes, private_bytes;
  int threads;
};

struct ForwardParams {
  Tensor4 q;    // (B, Sq, Hq, D)
  Tensor4 k;    // (B, Sk, Hk, D)
  Tensor4 v;    // (B, Sk, Hk, Dv)
  Tensor4 out;  // (B, Sq, Hq, Dv)
  Statistic lse, max_logit;
  int64_t batch, heads_q, heads_k, head_dim, head_dim_v;
  DType dtype;
  bool batch_invariant;  // nothing may depend on the other sequences, nor on whether they are packed
  Lengths seqlen_q, seqlen_k;
  Cache cache;
  Score score;
  Dropout dropout;
  Workspace workspace;
};

struct BackwardParams : ForwardParams {
  Tensor4 dout;        // (B, Sq, Hq, Dv)
  Tensor4 dq, dk, dv;  // like q, k, v
  Statistic dlse;      // null data: zero
  Statistic delta;     // scratch: rowsum(dout * out) - dlse
  // Sums in the type of the statistics, zero at the start, strides 0 where bias broadcasts; null data: not
  // wanted.
  struct {
    void* data;
    int64_t batch, head, row;
  } dbias;
  double* dsink;  // (Hq); null: not wanted
  bool deterministic;
};

// Rotary embedding of the first `dim` columns (Su et al. 2021): tables (position, dim / 2).
struct Rotary {
  const void *cos, *sin;  // null: none
  DType dtype;
  int64_t cos_row, sin_row, dim;
  bool interleaved;  // pairs (2c, 2c + 1) instead of (c, c + dim / 2)
  bool every_query;  // each query at its own position, otherwise all at the first new one
  int64_t positions;
};

// A GPU; all zero on the CPU.
struct CudaDevice {
  int capability;  // 10 * major + minor
  int processors;
  int64_t shared_bytes;  // that a block may have
};

// k and v are the cache, written in place where there are new keys; seqlen_k counts them.
struct DecodeParams : ForwardParams {
  Tensor4 k_new, v_new;  // (B, Snew, Hk, D or Dv), packed like q; null data: nothing to append
  int64_t new_rows;      // dense Snew; packed: those of q
  Tensor4 q_rotated;     // scratch like q; null data: no rotary
  Rotary rotary;
  // Split s holds keys [s, s + 1) * keys_per_split of its sequence; 0 splits: the kernel divides the work.
  int64_t splits, keys_per_split;
  CudaDevice device;
};

}  // namespace flashattn
