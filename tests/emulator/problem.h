// A call of attention in memory: its tensors with NaN wherever no kernel may read, and the parameters that
// describe them.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "numbers.h"

namespace emulator {

enum class Layout {
  contiguous,
  heads_first,
  unaligned
};  // heads_first: (B, H, S, D), rows and batches padded

// Dimensions that a bias or mask has; it is broadcast over the others.
enum Dims : int { kAbsent = 0, kKeys = 1, kRows = 2, kHeads = 4, kBatch = 8, kAll = 15 };

// A KV cache in the place of k and v.  `keys` of the case counts those of the longest sequence after the
// append, and `used_k` says whether the call knows how many each sequence has.
struct CacheCase {
  int page_size = 0;  // 0: not paged
  bool batch_index = false, leftpad = false, v_in_k = false;
  bool append = false;
  int new_keys = 0;  // appended ones; to packed sequences as many as they have queries
  int rotary = 0;    // columns that are rotated
  bool interleaved = false, f32_tables = false;
  int splits = 0;  // 0: the kernel divides the work
  int capability = 80, processors = 8;

  std::string text() const;
};

struct Case {
  int batch = 2, rows = 100, keys = 150, heads = 2, heads_k = 1, dim = 64, dim_v = 64;
  int left = -1, right = -1;  // window; causal is right == 0
  bool packed = false, used_q = false, used_k = false;
  double scale = 0, softcap = 0, dropout = 0;  // scale 0: the default
  int alibi = 0;                               // dimensions of the slopes: 0 is absent, 1 (H), 2 (B, H)
  int bias = kAbsent, mask = kAbsent;
  bool sink = false, max_logit = false, dlse = false, dbias = false, deterministic = false;
  bool batch_invariant = false;
  Layout layout = Layout::contiguous;
  CacheCase cache;  // of a decode

  std::string text() const;
};

// Rows of each sequence within the row dimension of the tensors.
struct Rows {
  std::vector<int64_t> first, length, allotted, pad;  // pad: rows at the start that do not count
  std::vector<int32_t> cu, used;
  int64_t longest, total;
};

// The longest sequence has this many rows.
Rows make_rows(const Case& c, int longest, bool used, std::mt19937& random);

double normal(std::mt19937& random);

// A tensor (batch, row, head, column); packed ones have one batch.
struct Tensor {
  DType dtype;
  int64_t batches, rows, heads, columns;
  flashattn::Tensor4 view;
  std::unique_ptr<Memory> memory;

  Tensor() = default;
  Tensor(DType dtype, int64_t batches, int64_t rows, int64_t heads, int64_t columns, Layout layout);
  int64_t index(int64_t batch, int64_t row, int64_t head, int64_t column) const {
    return batch * view.batch + row * view.row + head * view.head + column;
  }
  double get(int64_t batch, int64_t row, int64_t head, int64_t column) const {
    return load_element(dtype, view.data, index(batch, row, head, column));
  }
  void set(int64_t batch, int64_t row, int64_t head, int64_t column, double x) {
    store_element(dtype, view.data, index(batch, row, head, column), x);
  }
  const char* at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<const char*>(view.data) + index(batch, row, head, 0) * element_size(dtype);
  }
  int64_t offset() const {  // of element 0 in the memory
    return (static_cast<const char*>(view.data) - static_cast<const char*>(memory->data())) /
           element_size(dtype);
  }
  flashattn::Statistic statistic() const;  // of a (batch, row, head, 1) tensor
};

struct Problem {
  Case options;
  DType dtype, sum_dtype;
  Rows q_rows, k_rows;
  Tensor q, k, v, out, lse, max_logit, dout, dlse, delta, dq, dk, dv;
  std::vector<float> slopes, sink;
  std::vector<double> dsink;
  std::unique_ptr<Memory> bias, mask, dbias;
  int64_t bias_strides[3], mask_strides[3];  // batch, head, row
  int64_t seed = 0x123456789ABCDEF;
  uint32_t keep_below;  // of 65536

  Problem(const Case& options, DType dtype, unsigned random_seed);

  double scale() const { return options.scale ? options.scale : 1 / std::sqrt(std::max(options.dim, 1)); }
  int64_t tensor_batch(int64_t batch) const { return options.packed ? 0 : batch; }
  double slope(int64_t batch, int64_t head) const;
  bool visible(int64_t batch, int64_t head, int64_t query, int64_t key) const;
  int64_t bias_index(int64_t batch, int64_t head, int64_t query, int64_t key) const;

  flashattn::BackwardParams params() const;  // of the forward too

 protected:
  Problem(const Case& options, DType dtype, Rows q_rows, Rows k_rows, std::mt19937& random);
  bool some_query_sees(int64_t batch, int64_t head_k, int64_t key) const;

 private:
  Problem(const Case& options, DType dtype, std::mt19937 random);
  void make_tensors();
  void make_options(std::mt19937& random);
  void make_numbers(std::mt19937& random);
};

}  // namespace emulator
