#include "problem.h"

#include "common/dropout.h"

namespace emulator {

namespace {

constexpr int kPackedTail = 5;   // rows behind the last sequence
constexpr int kPackedSlack = 3;  // a caller may know no more than a bound of the longest sequence

std::string dims_text(int dims) {
  std::string text = "(";
  for (auto [bit, name] : {std::pair{kBatch, "B"}, {kHeads, "H"}, {kRows, "S"}})
    text += dims & bit ? name : "1";
  return text + ")";
}

// Strides of a contiguous (B or 1, H or 1, Sq or 1, keys) tensor and its number of elements.
int64_t broadcast_strides(int dims, const Case& c, int64_t rows, int64_t keys, int64_t (&strides)[3]) {
  int64_t size = keys;
  strides[2] = dims & kRows ? size : 0;
  size *= dims & kRows ? rows : 1;
  strides[1] = dims & kHeads ? size : 0;
  size *= dims & kHeads ? c.heads : 1;
  strides[0] = dims & kBatch ? size : 0;
  return size * (dims & kBatch ? c.batch : 1);
}

}  // namespace

double normal(std::mt19937& random) { return std::normal_distribution<double>()(random); }

std::string CacheCase::text() const {
  std::string text;
  for (auto [value, name] : {std::pair{page_size, " pages of "},
                             {append ? new_keys : 0, " append "},
                             {rotary, interleaved ? " rotary interleaved " : " rotary "},
                             {splits, " splits "}})
    if (value) text += name + std::to_string(value);
  for (auto [on, name] : {std::pair{append && !new_keys, " append"},
                          {batch_index, " batch_index"},
                          {leftpad, " leftpad"},
                          {v_in_k, " v_in_k"},
                          {rotary && f32_tables, " f32_tables"}})
    if (on) text += name;
  return text;
}

std::string Case::text() const {
  std::string text = "b" + std::to_string(batch) + " q" + std::to_string(rows) + " k" + std::to_string(keys) +
                     " h" + std::to_string(heads) + "/" + std::to_string(heads_k) + " d" +
                     std::to_string(dim) + (dim_v != dim ? "v" + std::to_string(dim_v) : "");
  if (right == 0 && left < 0)
    text += " causal";
  else if (left >= 0 || right >= 0)
    text += " window(" + std::to_string(left) + "," + std::to_string(right) + ")";
  for (auto [on, name] : {std::pair{packed, " packed"},
                          {used_q, " used_q"},
                          {used_k, " used_k"},
                          {scale != 0, " scale"},
                          {softcap != 0, " softcap"},
                          {dropout != 0, " dropout"},
                          {alibi != 0, " alibi"},
                          {sink, " sink"},
                          {max_logit, " max_logit"},
                          {dlse, " dlse"},
                          {dbias, " dbias"},
                          {deterministic, " deterministic"},
                          {batch_invariant, " batch_invariant"},
                          {layout == Layout::heads_first, " heads_first"},
                          {layout == Layout::unaligned, " unaligned"}})
    if (on) text += name;
  if (bias) text += " bias" + dims_text(bias);
  if (mask) text += " mask" + dims_text(mask);
  return text + cache.text();
}

Tensor::Tensor(DType dtype_, int64_t batches_, int64_t rows_, int64_t heads_, int64_t columns_, Layout layout)
    : dtype(dtype_), batches(batches_), rows(rows_), heads(heads_), columns(columns_) {
  int64_t offset = 0;
  if (layout == Layout::heads_first) {
    const int64_t row = (columns + 7) / 8 * 8 + 8;
    view = {nullptr, rows * heads * row + 16, row, rows * row};
  } else {
    const int64_t pad = layout == Layout::unaligned ? 3 : 0;
    offset = layout == Layout::unaligned;
    view = {nullptr, rows * heads * (columns + pad), heads * (columns + pad), columns + pad};
    if (columns == 1 && !pad) view.row = 1, view.head = rows;  // statistics are (B, H, S)
  }
  memory = std::make_unique<Memory>((offset + batches * view.batch) * element_size(dtype));
  if (batches == 1) view.batch = 0;  // as packed tensors have it
  view.data = static_cast<char*>(memory->data()) + offset * element_size(dtype);
}

flashattn::Statistic Tensor::statistic() const { return {view.data, view.batch, view.head, view.row}; }

Rows make_rows(const Case& c, int longest, bool used, std::mt19937& random) {
  Rows rows{};
  rows.longest = c.packed ? longest + kPackedSlack : longest;
  rows.pad.resize(c.batch);
  rows.cu.push_back(0);
  for (int b = 0; b < c.batch; ++b) {
    // One sequence is the longest and one is empty.
    const int64_t allotted = !c.packed || b == 0     ? longest
                             : b == 1 && c.batch > 2 ? 0
                                                     : std::uniform_int_distribution<int>(0, longest)(random);
    rows.first.push_back(c.packed ? rows.cu.back() : 0);
    rows.allotted.push_back(allotted);
    rows.length.push_back(used && b != 1 ? std::uniform_int_distribution<int>(0, allotted)(random)
                                         : allotted);
    rows.cu.push_back(static_cast<int32_t>(rows.cu.back() + allotted));
    rows.used.push_back(static_cast<int32_t>(rows.length.back()));
  }
  rows.total = c.packed ? rows.cu.back() + kPackedTail : int64_t{c.batch} * longest;
  return rows;
}

Problem::Problem(const Case& c, DType dtype_, unsigned random_seed)
    : Problem(c, dtype_, std::mt19937(random_seed)) {}

Problem::Problem(const Case& c, DType dtype_, std::mt19937 random)
    : Problem{c, dtype_, make_rows(c, c.rows, c.used_q, random), make_rows(c, c.keys, c.used_k, random),
              random} {}

Problem::Problem(const Case& c, DType dtype_, Rows q_rows_, Rows k_rows_, std::mt19937& random)
    : options(c),
      dtype(dtype_),
      sum_dtype(dtype_ == DType::f64 ? DType::f64 : DType::f32),
      q_rows(std::move(q_rows_)),
      k_rows(std::move(k_rows_)) {
  keep_below = static_cast<uint32_t>(std::lround((1 - c.dropout) * flashattn::kDropoutRange));
  make_tensors();
  make_options(random);
  make_numbers(random);
}

void Problem::make_tensors() {
  const Case& c = options;
  const int64_t batches = c.packed ? 1 : c.batch;
  const int64_t rows = c.packed ? q_rows.total : q_rows.longest,
                keys = c.packed ? k_rows.total : k_rows.longest;
  for (auto [tensor, columns] : {std::pair{&q, c.dim}, {&dq, c.dim}, {&out, c.dim_v}, {&dout, c.dim_v}})
    *tensor = Tensor(dtype, batches, rows, c.heads, columns, c.layout);
  for (auto [tensor, columns] : {std::pair{&k, c.dim}, {&dk, c.dim}, {&v, c.dim_v}, {&dv, c.dim_v}})
    *tensor = Tensor(dtype, batches, keys, c.heads_k, columns, c.layout);
  for (Tensor* tensor : {&lse, &max_logit, &dlse, &delta})
    *tensor = Tensor(sum_dtype, batches, rows, c.heads, 1, c.layout);
}

void Problem::make_options(std::mt19937& random) {
  const Case& c = options;
  for (int i = 0; i < c.batch * c.heads; ++i)
    slopes.push_back(std::uniform_real_distribution<float>(0, 0.5)(random));
  for (int i = 0; i < c.heads; ++i) sink.push_back(static_cast<float>(normal(random)));
  dsink.assign(c.heads, 0);
  const int64_t bias_size = broadcast_strides(c.bias, c, q_rows.longest, k_rows.longest, bias_strides);
  const int64_t mask_size = broadcast_strides(c.mask, c, q_rows.longest, k_rows.longest, mask_strides);
  mask = std::make_unique<Memory>(mask_size);
  for (int64_t i = 0; i < mask_size; ++i) static_cast<uint8_t*>(mask->data())[i] = random() % 4 != 0;
  bias = std::make_unique<Memory>(bias_size * element_size(dtype));
  dbias = std::make_unique<Memory>(bias_size * element_size(sum_dtype));
  memset(dbias->data(), 0, dbias->bytes());
  for (int b = 0; c.bias && b < c.batch; ++b)
    for (int h = 0; h < c.heads; ++h)
      for (int64_t i = 0; i < q_rows.length[b]; ++i)
        for (int64_t j = 0; j < k_rows.length[b]; ++j)
          if (visible(b, h, i, j)) store_element(dtype, bias->data(), bias_index(b, h, i, j), normal(random));
}

// Numbers where a kernel may read; NaN stays in what no query sees.
void Problem::make_numbers(std::mt19937& random) {
  const Case& c = options;
  const auto fill = [&random](Tensor& x, int64_t batch, int64_t row, int64_t head) {
    for (int64_t column = 0; column < x.columns; ++column) x.set(batch, row, head, column, normal(random));
  };
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < q_rows.length[b]; ++i)
      for (int64_t h = 0; h < c.heads; ++h)
        for (Tensor* x : {&q, &dout, &dlse}) fill(*x, tensor_batch(b), q_rows.first[b] + i, h);
    for (int64_t j = 0; j < k_rows.length[b]; ++j)
      for (int64_t h = 0; h < c.heads_k; ++h)
        if (some_query_sees(b, h, j))
          for (Tensor* x : {&k, &v}) fill(*x, tensor_batch(b), k_rows.first[b] + j, h);
  }
}

bool Problem::some_query_sees(int64_t batch, int64_t head_k, int64_t key) const {
  const int64_t group = options.heads / options.heads_k;
  for (int64_t h = head_k * group; h < (head_k + 1) * group; ++h)
    for (int64_t i = 0; i < q_rows.length[batch]; ++i)
      if (visible(batch, h, i, key)) return true;
  return false;
}

bool Problem::visible(int64_t batch, int64_t head, int64_t query, int64_t key) const {
  const int64_t position = query + k_rows.length[batch] - q_rows.length[batch];
  if (key < k_rows.pad[batch]) return false;
  if (options.left >= 0 && key < position - options.left) return false;
  if (options.right >= 0 && key > position + options.right) return false;
  return !options.mask ||
         static_cast<const uint8_t*>(
             mask->data())[batch * mask_strides[0] + head * mask_strides[1] + query * mask_strides[2] + key];
}

int64_t Problem::bias_index(int64_t batch, int64_t head, int64_t query, int64_t key) const {
  return batch * bias_strides[0] + head * bias_strides[1] + query * bias_strides[2] + key;
}

double Problem::slope(int64_t batch, int64_t head) const {
  return options.alibi ? slopes[options.alibi == 2 ? batch * options.heads + head : head] : 0;
}

flashattn::BackwardParams Problem::params() const {
  const Case& c = options;
  flashattn::BackwardParams p{};
  p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view;
  p.lse = lse.statistic();
  if (c.max_logit) p.max_logit = max_logit.statistic();
  p.batch = c.batch, p.heads_q = c.heads, p.heads_k = c.heads_k, p.head_dim = c.dim, p.head_dim_v = c.dim_v;
  p.dtype = dtype, p.batch_invariant = c.batch_invariant;
  p.seqlen_q = {q_rows.longest,
                q_rows.total,
                c.packed ? q_rows.cu.data() : nullptr,
                c.used_q ? q_rows.used.data() : nullptr,
                0,
                nullptr};
  p.seqlen_k = {k_rows.longest,
                k_rows.total,
                c.packed ? k_rows.cu.data() : nullptr,
                c.used_k ? k_rows.used.data() : nullptr,
                0,
                nullptr};
  p.score = {scale(), c.softcap, c.left, c.right, {}, {}, {}, {}};
  if (c.alibi) p.score.alibi = {slopes.data(), DType::f32, c.alibi == 2 ? c.heads : 0, 1};
  if (c.sink) p.score.sink = {sink.data(), DType::f32, 0, 1};
  if (c.bias) p.score.bias = {bias->data(), dtype, bias_strides[0], bias_strides[1], bias_strides[2]};
  if (c.mask) p.score.mask = {mask->data(), DType::f32, mask_strides[0], mask_strides[1], mask_strides[2]};
  p.dropout = {keep_below, c.dropout != 0 ? &seed : nullptr};
  p.dout = dout.view, p.dq = dq.view, p.dk = dk.view, p.dv = dv.view;
  if (c.dlse) p.dlse = dlse.statistic();
  p.delta = delta.statistic();
  if (c.dbias) p.dbias = {dbias->data(), bias_strides[0], bias_strides[1], bias_strides[2]};
  if (c.sink) p.dsink = const_cast<double*>(dsink.data());
  p.deterministic = c.deterministic;
  return p;
}

}  // namespace emulator
