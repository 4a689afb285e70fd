// Arguments of the operators: read from the dispatcher's stack, checked, and turned into parameter structs.
// Every error names the argument, its value and what is accepted.  Only ops.cpp includes this.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "dispatch.h"

namespace flashattn {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Stack = torch::jit::Stack;

// ---- arguments ----------------------------------------------------------------------------------

class Reader {
 public:
  Reader(const c10::OperatorHandle& op, Stack* stack) {
    const auto count = op.schema().arguments().size();
    auto values = torch::jit::last(*stack, count);
    values_.assign(values.begin(), values.end());
    torch::jit::drop(*stack, count);
  }
  Tensor tensor() { return next().toTensor(); }
  MaybeTensor maybe_tensor() { return next().toOptional<Tensor>(); }
  std::optional<double> maybe_number() { return next().toOptional<double>(); }
  std::optional<int64_t> maybe_integer() { return next().toOptional<int64_t>(); }
  double number() { return next().toDouble(); }
  int64_t integer() { return next().toInt(); }
  bool flag() { return next().toBool(); }

 private:
  const c10::IValue& next() { return values_[index_++]; }
  std::vector<c10::IValue> values_;
  size_t index_ = 0;
};

struct Options {
  std::optional<double> scale;
  double softcap;
  bool causal;
  int64_t window_left, window_right;
  MaybeTensor alibi_slopes, bias, mask, sink;
  double dropout_p = 0;
  MaybeTensor seed, cu_seqlens_q, cu_seqlens_k;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  MaybeTensor seqused_q, seqused_k;
};

Options read_options(Reader& read) {
  Options o;
  o.scale = read.maybe_number(), o.softcap = read.number(), o.causal = read.flag();
  o.window_left = read.integer(), o.window_right = read.integer();
  o.alibi_slopes = read.maybe_tensor(), o.bias = read.maybe_tensor(), o.mask = read.maybe_tensor();
  o.sink = read.maybe_tensor(), o.dropout_p = read.number(), o.seed = read.maybe_tensor();
  o.cu_seqlens_q = read.maybe_tensor(), o.cu_seqlens_k = read.maybe_tensor();
  o.max_seqlen_q = read.maybe_integer(), o.max_seqlen_k = read.maybe_integer();
  o.seqused_q = read.maybe_tensor(), o.seqused_k = read.maybe_tensor();
  return o;
}

struct DecodeOptions {
  MaybeTensor cache_seqlens, page_table, cache_batch_idx, leftpad, rotary_cos, rotary_sin;
  bool rotary_interleaved;
  std::optional<int64_t> v_head_dim;
  int64_t num_splits;
  bool batch_invariant;
  Options score;
};

DecodeOptions read_decode_options(Reader& read) {
  DecodeOptions o;
  o.cache_seqlens = read.maybe_tensor(), o.page_table = read.maybe_tensor();
  o.cache_batch_idx = read.maybe_tensor(), o.leftpad = read.maybe_tensor();
  o.rotary_cos = read.maybe_tensor(), o.rotary_sin = read.maybe_tensor(), o.rotary_interleaved = read.flag();
  o.v_head_dim = read.maybe_integer(), o.num_splits = read.integer(), o.batch_invariant = read.flag();
  o.score.causal = read.flag(), o.score.window_left = read.integer(), o.score.window_right = read.integer();
  o.score.softcap = read.number(), o.score.alibi_slopes = read.maybe_tensor(),
  o.score.sink = read.maybe_tensor();
  o.score.scale = read.maybe_number(), o.score.cu_seqlens_q = read.maybe_tensor();
  o.score.max_seqlen_q = read.maybe_integer();
  return o;
}

// ---- checks -------------------------------------------------------------------------------------

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    case at::kHalf:
      return DType::f16;
    default:
      return DType::bf16;
  }
}

at::ScalarType sum_type(const Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

void check_like(const char* name, const Tensor& x, const Tensor& q) {
  TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), name, " has dtype ", x.scalar_type(),
                   ": expected that of q, ", q.scalar_type());
  TORCH_CHECK_VALUE(x.device() == q.device(), name, " is on ", x.device(), ": expected the device of q, ",
                    q.device());
  TORCH_CHECK_VALUE(x.dim() > 0 && (x.size(-1) <= 1 || x.stride(-1) == 1), name, " has strides ", x.strides(),
                    " for shape ", x.sizes(), ": expected a contiguous last dimension (stride 1)");
}

void check_shape(const char* name, const Tensor& x, at::IntArrayRef shape, const char* meaning) {
  TORCH_CHECK_VALUE(x.sizes() == shape, name, " has shape ", x.sizes(), ": expected ", meaning, " = ", shape);
}

void check_query(const Tensor& q, bool packed) {
  const auto type = q.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble,
                   "q has dtype ", type, ": expected float32, bfloat16, float16 or float64");
  TORCH_CHECK_VALUE(q.dim() == (packed ? 3 : 4), "q has shape ", q.sizes(), ": expected ",
                    packed ? "(total_q, Hq, D), because cu_seqlens_q is given" : "(B, Sq, Hq, D)");
  TORCH_CHECK_VALUE(q.size(-1) >= 1 && q.size(-2) >= 1, "q has shape ", q.sizes(),
                    ": expected at least one head and one column");
  check_like("q", q, q);
}

void check_heads(const Tensor& q, const Tensor& k, const char* k_name) {
  TORCH_CHECK_VALUE(k.size(-1) == q.size(-1), k_name, " has head dim ", k.size(-1), ": expected that of q, ",
                    q.size(-1));
  TORCH_CHECK_VALUE(k.size(-2) >= 1 && q.size(-2) % k.size(-2) == 0, k_name, " has ", k.size(-2),
                    " heads: expected a divisor of q's ", q.size(-2));
}

void check_integers(const char* name, const Tensor& x, const Tensor& q, int64_t count) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kInt, name, " has dtype ", x.scalar_type(), ": expected int32");
  TORCH_CHECK_VALUE(x.device() == q.device(), name, " is on ", x.device(), ": expected the device of q, ",
                    q.device());
  TORCH_CHECK_VALUE(x.dim() == 1 && (count < 0 || x.size(0) == count) && (x.numel() < 2 || x.stride(0) == 1),
                    name, " has shape ", x.sizes(), " and strides ", x.strides(),
                    ": expected a contiguous vector of ",
                    count < 0 ? std::string("B + 1 numbers") : std::to_string(count) + " numbers");
}

// The numbers of an int32 length or page tensor, if the host may know them: on the CPU, and with
// debug_checks. Kernels clamp what nobody has checked.
class Contents {
 public:
  explicit Contents(const MaybeTensor& x) {
    if (x && x->is_cpu()) host_ = *x;
    if (x && x->is_cuda() && debug_checks()) host_ = x->cpu();
  }
  explicit operator bool() const { return host_.defined(); }
  int64_t operator[](int64_t i) const { return host_.const_data_ptr<int32_t>()[i]; }
  int64_t at(int64_t row, int64_t column) const { return (*this)[row * host_.stride(0) + column]; }

 private:
  Tensor host_;
};

void check_between(const char* name, const Contents& numbers, int64_t index, int64_t low, int64_t high,
                   const char* meaning) {
  TORCH_CHECK_VALUE(numbers[index] >= low && numbers[index] <= high, name, "[", index, "] = ", numbers[index],
                    ": expected ", low, " to ", high, ", ", meaning);
}

// Lengths of one side of a packed or dense call.
Lengths check_lengths(const char* cu_name, const MaybeTensor& cu, const char* used_name,
                      const MaybeTensor& used, const char* max_name, std::optional<int64_t> max_seqlen,
                      const Tensor& q, const Tensor& x, int64_t batch) {
  const Contents starts(cu), counts(used);
  Lengths lengths{};
  lengths.total = cu ? x.size(0) : batch * x.size(1);
  lengths.rows = cu ? 0 : x.size(1);
  TORCH_CHECK_VALUE(!max_seqlen || *max_seqlen >= 0, max_name, " is ", *max_seqlen, ": expected at least 0");
  if (cu) {
    check_integers(cu_name, *cu, q, batch + 1);
    TORCH_CHECK_VALUE(max_seqlen || q.is_cpu(), max_name, " is None: packed tensors on ", q.device(),
                      " need it, as an int");
    lengths.cu = cu->const_data_ptr<int32_t>();
    if (starts) {
      check_between(cu_name, starts, 0, 0, lengths.total, "rows of the packed tensor");
      for (int64_t b = 0; b < batch; ++b) {
        check_between(cu_name, starts, b + 1, starts[b], lengths.total,
                      "not decreasing, within the packed tensor");
        lengths.rows = std::max(lengths.rows, starts[b + 1] - starts[b]);
      }
      TORCH_CHECK_VALUE(!max_seqlen || *max_seqlen >= lengths.rows, max_name, " is ", *max_seqlen,
                        ": expected at least the longest sequence, ", lengths.rows);
    }
    lengths.rows = max_seqlen.value_or(lengths.rows);
  } else {
    TORCH_CHECK_VALUE(!max_seqlen || *max_seqlen >= lengths.rows, max_name, " is ", *max_seqlen,
                      ": expected at least the dense length, ", lengths.rows);
  }
  if (used) {
    check_integers(used_name, *used, q, batch);
    lengths.used = used->const_data_ptr<int32_t>();
    for (int64_t b = 0; counts && b < batch; ++b)
      check_between(used_name, counts, b, 0, cu ? starts[b + 1] - starts[b] : lengths.rows,
                    "rows of the sequence");
  }
  return lengths;
}

void check_parameter(const char* name, const Tensor& x, const Tensor& q) {
  TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type() || x.scalar_type() == at::kFloat, name, " has dtype ",
                   x.scalar_type(), ": expected float32 or that of q, ", q.scalar_type());
  TORCH_CHECK_VALUE(x.device() == q.device(), name, " is on ", x.device(), ": expected the device of q, ",
                    q.device());
}

PerHead check_per_head(const char* name, const MaybeTensor& x, const Tensor& q, int64_t batch,
                       bool with_batch) {
  if (!x) return {};
  check_parameter(name, *x, q);
  const int64_t heads = q.size(-2);
  const bool fits = x->sizes() == at::IntArrayRef{heads} ||
                    (with_batch && x->dim() == 2 && x->size(0) == batch && x->size(1) == heads);
  TORCH_CHECK_VALUE(fits, name, " has shape ", x->sizes(), ": expected (Hq) = [", heads, "]",
                    with_batch ? " or (B, Hq)" : "");
  return {x->const_data_ptr(), to_dtype(x->scalar_type()), x->dim() == 2 ? x->stride(0) : 0, x->stride(-1)};
}

// Stride 0 where the tensor broadcasts.
int64_t broadcast_stride(const Tensor& x, int64_t dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); }

ScoreTensor check_score_tensor(const char* name, const Tensor& x, const Tensor& q, const ForwardParams& p) {
  TORCH_CHECK_VALUE(x.device() == q.device(), name, " is on ", x.device(), ": expected the device of q, ",
                    q.device());
  const int64_t expected[4] = {p.batch, p.heads_q, p.seqlen_q.rows, p.seqlen_k.rows};
  bool fits = x.dim() == 4 && x.size(3) == expected[3];
  for (int64_t dim = 0; fits && dim < 3; ++dim) fits = x.size(dim) == 1 || x.size(dim) == expected[dim];
  TORCH_CHECK_VALUE(fits, name, " has shape ", x.sizes(),
                    ": expected (B or 1, Hq or 1, Sq or 1, Sk) with B, Hq, Sq, ",
                    "Sk = ", at::IntArrayRef(expected));
  TORCH_CHECK_VALUE(x.size(3) <= 1 || x.stride(3) == 1, name, " has strides ", x.strides(),
                    ": expected a contiguous last dimension (stride 1)");
  return {x.const_data_ptr(), to_dtype(x.scalar_type()), broadcast_stride(x, 0), broadcast_stride(x, 1),
          broadcast_stride(x, 2)};
}

void check_score(ForwardParams& p, const Options& o, const Tensor& q) {
  const double scale = o.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale is ", scale, ": expected a finite number");
  TORCH_CHECK_VALUE(std::isfinite(o.softcap) && o.softcap >= 0, "softcap is ", o.softcap,
                    ": expected a finite number >= 0 (0 is off)");
  TORCH_CHECK_VALUE(o.window_left >= -1 && o.window_right >= -1, "window is (", o.window_left, ", ",
                    o.window_right, "): expected numbers of keys >= 0, or -1 for no limit");
  p.score.scale = scale, p.score.softcap = o.softcap;
  p.score.window_left = o.window_left, p.score.window_right = o.causal ? 0 : o.window_right;
  p.score.alibi = check_per_head("alibi_slopes", o.alibi_slopes, q, p.batch, true);
  TORCH_CHECK_TYPE(!o.alibi_slopes || o.alibi_slopes->scalar_type() == at::kFloat, "alibi_slopes has dtype ",
                   o.alibi_slopes->scalar_type(), ": expected float32");
  p.score.sink = check_per_head("sink", o.sink, q, p.batch, false);
  if (o.bias) {
    check_parameter("bias", *o.bias, q);
    p.score.bias = check_score_tensor("bias", *o.bias, q, p);
  }
  if (o.mask) {
    TORCH_CHECK_TYPE(o.mask->scalar_type() == at::kBool, "mask has dtype ", o.mask->scalar_type(),
                     ": expected bool");
    p.score.mask = check_score_tensor("mask", *o.mask, q, p);
  }
}

void check_dropout(ForwardParams& p, const Options& o, const Tensor& q) {
  TORCH_CHECK_VALUE(o.dropout_p >= 0 && o.dropout_p < 1, "dropout_p is ", o.dropout_p,
                    ": expected 0 <= dropout_p < 1");
  if (o.dropout_p == 0) return;
  TORCH_CHECK_VALUE(o.seed && o.seed->numel() == 1 && o.seed->device() == q.device(), "seed is ",
                    o.seed ? c10::str("of shape ", o.seed->sizes(), " on ", o.seed->device()) : "None",
                    ": dropout needs one number on the device of q, ", q.device());
  TORCH_CHECK_TYPE(o.seed->scalar_type() == at::kLong, "seed has dtype ", o.seed->scalar_type(),
                   ": expected int64");
  p.dropout.keep_below = static_cast<uint32_t>(std::max(1.0, std::round((1 - o.dropout_p) * 65536)));
  p.dropout.seed = o.seed->const_data_ptr<int64_t>();
}

// ---- parameters ---------------------------------------------------------------------------------

Tensor4 view(const Tensor& x) {
  const bool packed = x.dim() == 3;
  return {x.data_ptr(), packed ? 0 : x.stride(0), x.stride(-3), x.stride(-2)};
}

Tensor4 const_view(const Tensor& x) {
  const bool packed = x.dim() == 3;
  return {const_cast<void*>(x.const_data_ptr()), packed ? 0 : x.stride(0), x.stride(-3), x.stride(-2)};
}

// (B, H, S), or (H, total) of packed calls.
Statistic statistic(const Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), x.dim() == 3 ? x.stride(0) : 0, x.stride(-2), x.stride(-1)};
}

std::vector<int64_t> statistic_shape(const Tensor& q) {
  return q.dim() == 3 ? std::vector<int64_t>{q.size(1), q.size(0)}
                      : std::vector<int64_t>{q.size(0), q.size(2), q.size(1)};
}

std::vector<int64_t> out_shape(const Tensor& q, int64_t head_dim_v) {
  auto shape = q.sizes().vec();
  shape.back() = head_dim_v;
  return shape;
}

void check_writable(const char* name, const Tensor& x) {
  for (int64_t dim = 0; dim < x.dim(); ++dim)
    TORCH_CHECK_VALUE(x.size(dim) <= 1 || x.stride(dim) != 0, name, " has strides ", x.strides(),
                      ": expected no broadcast dimension, because it is written to");
}

void check_out(const Tensor& out, const Tensor& q, int64_t head_dim_v) {
  check_like("out", out, q);
  check_shape("out", out, out_shape(q, head_dim_v), "the shape of q with Dv");
  check_writable("out", out);
}

void check_statistic(const char* name, const Tensor& x, const Tensor& q) {
  TORCH_CHECK_TYPE(x.scalar_type() == sum_type(q), name, " has dtype ", x.scalar_type(), ": expected ",
                   sum_type(q));
  TORCH_CHECK_VALUE(x.device() == q.device(), name, " is on ", x.device(), ": expected the device of q, ",
                    q.device());
  check_shape(name, x, statistic_shape(q), q.dim() == 3 ? "(Hq, total_q)" : "(B, Hq, Sq)");
}

// What forward and backward have in common.
void fill(ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
  const bool packed = o.cu_seqlens_q.has_value();
  TORCH_CHECK_VALUE(packed == o.cu_seqlens_k.has_value(), packed ? "cu_seqlens_k" : "cu_seqlens_q",
                    " is None: expected both cu_seqlens_q and cu_seqlens_k, or neither");
  check_query(q, packed);
  check_like("k", k, q);
  check_like("v", v, q);
  TORCH_CHECK_VALUE(k.dim() == q.dim(), "k has shape ", k.sizes(), ": expected ",
                    packed ? "(total_k, Hk, D)" : "(B, Sk, Hk, D)");
  check_heads(q, k, "k");
  TORCH_CHECK_VALUE(v.dim() == k.dim() &&
                        v.sizes().slice(0, v.dim() - 1) == k.sizes().slice(0, k.dim() - 1) && v.size(-1) >= 1,
                    "v has shape ", v.sizes(), ": expected that of k, ", k.sizes(), ", with Dv columns");
  TORCH_CHECK_VALUE(packed || k.size(0) == q.size(0), "k has batch ", packed ? 0 : k.size(0),
                    ": expected that of q, ", q.size(0));
  if (packed) check_integers("cu_seqlens_q", *o.cu_seqlens_q, q, -1);
  TORCH_CHECK_VALUE(!packed || o.cu_seqlens_q->size(0) >= 1,
                    "cu_seqlens_q has shape [0]: expected B + 1 numbers");
  p.batch = packed ? o.cu_seqlens_q->size(0) - 1 : q.size(0);
  p.heads_q = q.size(-2), p.heads_k = k.size(-2), p.head_dim = q.size(-1), p.head_dim_v = v.size(-1);
  p.dtype = to_dtype(q.scalar_type());
  p.q = const_view(q), p.k = const_view(k), p.v = const_view(v);
  p.seqlen_q = check_lengths("cu_seqlens_q", o.cu_seqlens_q, "seqused_q", o.seqused_q, "max_seqlen_q",
                             o.max_seqlen_q, q, q, p.batch);
  p.seqlen_k = check_lengths("cu_seqlens_k", o.cu_seqlens_k, "seqused_k", o.seqused_k, "max_seqlen_k",
                             o.max_seqlen_k, q, k, p.batch);
  check_score(p, o, q);
  check_dropout(p, o, q);
}

// ---- decode -------------------------------------------------------------------------------------

void check_cache(DecodeParams& p, const Tensor& q, const Tensor& k_cache, const MaybeTensor& v_cache,
                 const DecodeOptions& o) {
  check_like("k_cache", k_cache, q);
  TORCH_CHECK_VALUE(k_cache.dim() == 4, "k_cache has shape ", k_cache.sizes(),
                    ": expected (Bc, S, Hk, D), or (pages, ", "page_size, Hk, D) with page_table");
  check_heads(q, k_cache, "k_cache");
  TORCH_CHECK_VALUE(v_cache || o.v_head_dim,
                    "v_cache is None: expected a tensor, or v_head_dim to take V from the ",
                    "first columns of k_cache");
  p.head_dim_v = v_cache ? v_cache->size(-1) : *o.v_head_dim;
  TORCH_CHECK_VALUE(p.head_dim_v >= 1 && (v_cache || p.head_dim_v <= k_cache.size(-1)) &&
                        p.head_dim_v == o.v_head_dim.value_or(p.head_dim_v),
                    "v_head_dim is ", o.v_head_dim.value_or(p.head_dim_v), ": expected ",
                    v_cache ? "that of v_cache, " : "1 to the head dim of k_cache, ",
                    v_cache ? p.head_dim_v : k_cache.size(-1));
  if (v_cache) {
    check_like("v_cache", *v_cache, q);
    check_shape("v_cache", *v_cache, out_shape(k_cache, p.head_dim_v), "the shape of k_cache with Dv");
  }
  p.k = const_view(k_cache), p.v = v_cache ? const_view(*v_cache) : p.k;
  p.heads_k = k_cache.size(2);
  p.seqlen_k.rows = k_cache.size(1);
  p.cache.entries = k_cache.size(0);
  if (o.page_table) {
    const Tensor& table = *o.page_table;
    TORCH_CHECK_TYPE(table.scalar_type() == at::kInt, "page_table has dtype ", table.scalar_type(),
                     ": expected int32");
    TORCH_CHECK_VALUE(table.device() == q.device(), "page_table is on ", table.device(),
                      ": expected the device of q, ", q.device());
    TORCH_CHECK_VALUE(
        table.dim() == 2 && table.size(0) == p.batch && (table.size(1) <= 1 || table.stride(1) == 1),
        "page_table has shape ", table.sizes(), " and strides ", table.strides(),
        ": expected (B, max_pages) with B = ", p.batch, " and a contiguous last dimension");
    TORCH_CHECK_VALUE(!o.cache_batch_idx, "cache_batch_idx is given with page_table: expected one of them");
    TORCH_CHECK_VALUE(k_cache.size(1) >= 1, "k_cache has shape ", k_cache.sizes(),
                      ": expected a page_size of at least 1");
    p.cache.page_table = table.const_data_ptr<int32_t>();
    p.cache.page_table_stride = table.stride(0);
    p.cache.page_size = k_cache.size(1);
    p.seqlen_k.rows = p.cache.entries > 0 ? table.size(1) * p.cache.page_size : 0;
  } else if (o.cache_batch_idx) {
    check_integers("cache_batch_idx", *o.cache_batch_idx, q, p.batch);
    p.cache.batch_index = o.cache_batch_idx->const_data_ptr<int32_t>();
    const Contents index(o.cache_batch_idx);
    for (int64_t b = 0; index && b < p.batch; ++b)
      check_between("cache_batch_idx", index, b, 0, k_cache.size(0) - 1, "rows of the cache");
  } else {
    TORCH_CHECK_VALUE(k_cache.size(0) == p.batch, "k_cache has batch ", k_cache.size(0),
                      ": expected that of q, ", p.batch, ", or cache_batch_idx");
  }
}

void check_new(DecodeParams& p, const Tensor& q, const Tensor& k_cache, const MaybeTensor& v_cache,
               const MaybeTensor& k_new, const MaybeTensor& v_new, const DecodeOptions& o) {
  TORCH_CHECK_VALUE(k_new || !v_new, "k_new is None: expected it with v_new");
  if (!k_new) return;
  TORCH_CHECK_VALUE(v_new.has_value() == v_cache.has_value(), "v_new is ", v_new ? "given" : "None",
                    ": expected it exactly when v_cache is given");
  TORCH_CHECK_VALUE(o.cache_seqlens, "cache_seqlens is None: k_new needs it");
  check_writable("k_cache", k_cache);
  if (v_cache) check_writable("v_cache", *v_cache);
  const bool packed = q.dim() == 3;
  check_like("k_new", *k_new, q);
  p.new_rows = packed ? q.size(0) : k_new->dim() == 4 ? k_new->size(1) : -1;
  auto shape = packed ? std::vector<int64_t>{q.size(0), p.heads_k, p.head_dim}
                      : std::vector<int64_t>{p.batch, p.new_rows, p.heads_k, p.head_dim};
  check_shape("k_new", *k_new, shape, packed ? "(total_q, Hk, D)" : "(B, Snew, Hk, D)");
  p.k_new = const_view(*k_new);
  if (v_new) {
    check_like("v_new", *v_new, q);
    shape.back() = p.head_dim_v;
    check_shape("v_new", *v_new, shape, "the shape of k_new with Dv");
    p.v_new = const_view(*v_new);
  }
}

// The keys of each sequence after the append, empty where only the device knows them.  Contents are checked
// before anything is written.
std::vector<int64_t> check_cache_lengths(DecodeParams& p, const Tensor& q, const DecodeOptions& o) {
  std::vector<int64_t> keys(o.cache_seqlens ? 0 : p.batch, p.seqlen_k.rows);
  if (o.cache_seqlens) {
    check_integers("cache_seqlens", *o.cache_seqlens, q, p.batch);
    p.seqlen_k.used = o.cache_seqlens->const_data_ptr<int32_t>();
    if (p.k_new.data && p.seqlen_q.cu)
      p.seqlen_k.appended_cu = p.seqlen_q.cu;
    else if (p.k_new.data)
      p.seqlen_k.appended = p.new_rows;
    const Contents before(o.cache_seqlens), starts(o.score.cu_seqlens_q);
    for (int64_t b = 0; before && b < p.batch; ++b) {
      const int64_t fresh = p.seqlen_k.appended_cu ? starts[b + 1] - starts[b] : p.seqlen_k.appended;
      check_between("cache_seqlens", before, b, 0, p.seqlen_k.rows - fresh,
                    "so that the sequence with its new keys fits in the cache");
      keys.push_back(before[b] + fresh);
    }
  }
  if (o.leftpad) {
    check_integers("leftpad", *o.leftpad, q, p.batch);
    p.cache.leftpad = o.leftpad->const_data_ptr<int32_t>();
  }
  const Contents pads(o.leftpad), ids(o.page_table);
  for (size_t b = 0; b < keys.size(); ++b) {
    if (pads) check_between("leftpad", pads, b, 0, keys[b], "keys of the sequence");
    for (int64_t page = 0; ids && page * p.cache.page_size < keys[b]; ++page)
      TORCH_CHECK_VALUE(ids.at(b, page) >= 0 && ids.at(b, page) < p.cache.entries, "page_table[", b, ", ",
                        page, "] = ", ids.at(b, page), ": expected 0 to ", p.cache.entries - 1,
                        ", pages of the cache");
  }
  return keys;
}

void check_rotary(DecodeParams& p, const Tensor& q, const std::vector<int64_t>& keys,
                  const DecodeOptions& o) {
  TORCH_CHECK_VALUE(o.rotary_cos.has_value() == o.rotary_sin.has_value(),
                    o.rotary_cos ? "rotary_sin" : "rotary_cos",
                    " is None: expected both rotary_cos and rotary_sin, or neither");
  if (!o.rotary_cos) return;
  const Tensor &cos = *o.rotary_cos, &sin = *o.rotary_sin;
  check_parameter("rotary_cos", cos, q);
  check_parameter("rotary_sin", sin, q);
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(0) >= 1 && cos.size(1) >= 1 && 2 * cos.size(1) <= p.head_dim &&
                        cos.stride(1) == 1,
                    "rotary_cos has shape ", cos.sizes(), " and strides ", cos.strides(),
                    ": expected (positions, R / 2)", " with R at most the head dim, ", p.head_dim,
                    ", and a contiguous last dimension");
  TORCH_CHECK_VALUE(
      sin.sizes() == cos.sizes() && sin.stride(1) == 1 && sin.scalar_type() == cos.scalar_type(),
      "rotary_sin has shape ", sin.sizes(), ", strides ", sin.strides(), " and dtype ", sin.scalar_type(),
      ": expected those of rotary_cos, ", cos.sizes(), " and ", cos.scalar_type());
  const bool every_query = o.score.causal || o.score.window_left >= 0 || o.score.window_right >= 0;
  p.rotary = {cos.const_data_ptr(), sin.const_data_ptr(), to_dtype(cos.scalar_type()),
              cos.stride(0),        sin.stride(0),        2 * cos.size(1),
              o.rotary_interleaved, every_query,          cos.size(0)};
  for (size_t b = 0; b < keys.size(); ++b) {
    const int64_t positions = keys[b] + (!every_query && !p.k_new.data);
    TORCH_CHECK_VALUE(cos.size(0) >= positions, "rotary_cos has ", cos.size(0),
                      " positions: expected at least ", positions, ", for sequence ", b);
  }
}

}  // namespace
}  // namespace flashattn
