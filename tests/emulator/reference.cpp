#include "reference.h"

#include "common/dropout.h"

namespace emulator {

// One query row: its logits and weights, by key.
struct Reference::Row {
  int64_t batch, head, query, head_k;
  const std::vector<double>&k, &v;  // rows of the sequence and KV head
  std::vector<double> q;
  std::vector<int64_t> keys;  // that it sees; the other vectors go with them
  std::vector<double> logit, weight, factor, cap_slope;
  double lse;
  double rounding, noise, tiny;  // u, e and what may become 0
};

namespace {

double weight_factor(const Problem& p, int64_t batch, int64_t head, int64_t query, int64_t key) {
  if (!p.options.dropout) return 1;
  const auto numbers = flashattn::philox(static_cast<uint64_t>(p.seed), static_cast<uint32_t>(key / 8),
                                         static_cast<uint32_t>(query), static_cast<uint32_t>(head),
                                         static_cast<uint32_t>(batch));
  return flashattn::dropout_keeps(numbers, key % 8, p.keep_below)
             ? static_cast<double>(flashattn::kDropoutRange) / p.keep_below
             : 0;
}

// Rows of one head, one after another.
std::vector<double> read(const Tensor& x, int64_t batch, int64_t first_row, int64_t rows, int64_t head) {
  std::vector<double> numbers;
  for (int64_t row = first_row; row < first_row + rows; ++row)
    for (int64_t column = 0; column < x.columns; ++column) numbers.push_back(x.get(batch, row, head, column));
  return numbers;
}

// Adds factor * x to a sum and the share of the error to its bound.
void add_scaled(double factor, double error, const double* x, int64_t count, double* __restrict sum,
                double* __restrict bound) {
  for (int64_t i = 0; i < count; ++i) {
    sum[i] += factor * x[i];
    bound[i] += error * std::fabs(x[i]);
  }
}

// float32 exponentials may flush subnormal results to 0.
double tiny_of(DType dtype) {
  return dtype == DType::f16 ? 0x1p-25 : dtype == DType::f64 ? 0x1p-1022 : 0x1p-126;
}

}  // namespace

Reference::Reference(Problem& p, bool with_backward) {
  const Case& c = p.options;
  out = Expected(c.batch, c.rows, c.heads, c.dim_v);
  lse = max_logit = Expected(c.batch, c.rows, c.heads, 1);
  dq = Expected(c.batch, c.rows, c.heads, c.dim);
  dk = Expected(c.batch, c.keys, c.heads_k, c.dim);
  dv = Expected(c.batch, c.keys, c.heads_k, c.dim_v);
  dbias.resize(p.dbias->bytes() / element_size(p.sum_dtype));
  dbias_bound.resize(dbias.size());
  dsink.resize(c.heads);
  dsink_bound.resize(c.heads);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t head_k = h / (c.heads / c.heads_k), tensor = p.tensor_batch(b);
      const auto k = read(p.k, tensor, p.k_rows.first[b], p.k_rows.length[b], head_k);
      const auto v = read(p.v, tensor, p.k_rows.first[b], p.k_rows.length[b], head_k);
      for (int64_t i = 0; i < c.rows; ++i) {
        const bool counts = i < p.q_rows.length[b];
        Row row{b,  h,  i, head_k, k, v, read(p.q, tensor, p.q_rows.first[b] + i, counts, h), {}, {}, {},
                {}, {}, 0, 0,      0, 0};
        row.rounding = element_size(p.dtype) == 2 ? rounding_of(p.dtype) : 0;
        row.noise = p.dtype == DType::f64 ? 1e-13 : 1e-5;
        row.tiny = tiny_of(p.dtype);
        forward_row(p, row);
        if (with_backward && counts) backward_row(p, row);
      }
    }
  for (Expected* x : {&out, &dq, &dk, &dv})
    for (size_t i = 0; i < x->value.size(); ++i)
      x->bound[i] += rounding_of(p.dtype) * std::fabs(x->value[i]) + tiny_of(p.dtype);
}

void Reference::forward_row(const Problem& p, Row& row) {
  const Case& c = p.options;
  const auto [b, h, i] = std::tuple{row.batch, row.head, row.query};
  const int64_t length = i < p.q_rows.length[b] ? p.k_rows.length[b] : 0;
  double largest = -INFINITY, magnitude = 0;
  for (int64_t j = 0; j < length; ++j) {
    if (!p.visible(b, h, i, j)) continue;
    double s = 0, slope = 1;
    for (int64_t column = 0; column < c.dim; ++column) s += row.q[column] * row.k[j * c.dim + column];
    s *= p.scale();
    if (c.softcap) {
      const double t = std::tanh(s / c.softcap);
      s = c.softcap * t;
      slope = 1 - t * t;
    }
    s -= p.slope(b, h) * std::fabs(static_cast<double>(i + p.k_rows.length[b] - p.q_rows.length[b] - j));
    if (c.bias) s += load_element(p.dtype, p.bias->data(), p.bias_index(b, h, i, j));
    row.keys.push_back(j);
    row.logit.push_back(s);
    row.cap_slope.push_back(slope);
    row.factor.push_back(weight_factor(p, b, h, i, j));
    largest = std::max(largest, s);
    magnitude = std::max(magnitude, std::fabs(s));
  }
  const bool sink = c.sink && i < p.q_rows.length[b];
  row.noise *= 1 + magnitude / 16;  // exponentials of large logits
  const double peak = sink ? std::max<double>(largest, p.sink[h]) : largest;
  double sum = sink ? std::exp(p.sink[h] - peak) : 0;
  for (double s : row.logit) sum += std::exp(s - peak);
  row.lse = peak == -INFINITY ? -INFINITY : peak + std::log(sum);
  for (double s : row.logit) row.weight.push_back(std::exp(s - row.lse));
  const int64_t at = out.index(b, i, h);
  for (size_t n = 0; n < row.keys.size(); ++n) {
    const double weight = row.weight[n] * row.factor[n];
    add_scaled(weight, (row.rounding + row.noise) * weight + row.tiny, &row.v[row.keys[n] * c.dim_v], c.dim_v,
               &out.value[at], &out.bound[at]);
  }
  const double accuracy = p.dtype == DType::f64 ? 1e-12 : 2e-5;
  lse.value[lse.index(b, i, h)] = row.lse;
  max_logit.value[lse.index(b, i, h)] = largest;
  lse.bound[lse.index(b, i, h)] = max_logit.bound[lse.index(b, i, h)] = accuracy * (1 + magnitude);
}

void Reference::backward_row(Problem& p, const Row& row) {
  const Case& c = p.options;
  const auto [b, h, i] = std::tuple{row.batch, row.head, row.query};
  const int64_t q_at = p.q_rows.first[b] + i, tensor = p.tensor_batch(b);
  for (int64_t column = 0; column < c.dim_v; ++column)
    p.out.set(tensor, q_at, h, column, out.value[out.index(b, i, h, column)]);
  p.lse.set(tensor, q_at, h, 0, row.lse);
  if (row.lse == -INFINITY) return;
  const auto rounded_out = read(p.out, tensor, q_at, 1, h), dout = read(p.dout, tensor, q_at, 1, h);
  double delta = c.dlse ? -p.dlse.get(tensor, q_at, h, 0) : 0, size = std::fabs(delta);
  for (int64_t column = 0; column < c.dim_v; ++column) {
    delta += dout[column] * rounded_out[column];
    size += std::fabs(dout[column] * rounded_out[column]);
  }
  if (c.sink) {
    const double weight = std::exp(p.sink[h] - row.lse);
    dsink[h] -= weight * delta;
    dsink_bound[h] += row.noise * weight * size;
  }
  for (size_t n = 0; n < row.keys.size(); ++n) differentiate(p, row, n, dout, delta, size);
}

// The gradients through key n of a row; |delta| is at most delta_size before cancellation.
void Reference::differentiate(const Problem& p, const Row& row, size_t n, const std::vector<double>& dout,
                              double delta, double delta_size) {
  const Case& c = p.options;
  const int64_t j = row.keys[n];
  const double weight = row.weight[n] * row.factor[n];
  const double* v = &row.v[j * c.dim_v];
  const double* k = &row.k[j * c.dim];
  double dp = 0, dp_size = 0;
  for (int64_t column = 0; column < c.dim_v; ++column) {
    dp += dout[column] * v[column];
    dp_size += std::fabs(dout[column] * v[column]);
  }
  const int64_t v_index = dv.index(row.batch, j, row.head_k);
  add_scaled(weight, (row.rounding + row.noise) * weight + row.tiny, dout.data(), c.dim_v, &dv.value[v_index],
             &dv.bound[v_index]);
  double ds = row.weight[n] * (row.factor[n] * dp - delta);
  double error = (row.noise * row.weight[n] + row.tiny) * (row.factor[n] * dp_size + delta_size);
  if (c.dbias) {
    const int64_t at = p.bias_index(row.batch, row.head, row.query, j);
    dbias[at] += ds;
    dbias_bound[at] += row.rounding * std::fabs(ds) + error + row.tiny;
  }
  ds *= row.cap_slope[n];
  error += row.rounding * std::fabs(ds) + row.tiny;
  const double scaled = p.scale() * ds, scaled_error = std::fabs(p.scale()) * error;
  const int64_t q_index = dq.index(row.batch, row.query, row.head);
  const int64_t k_index = dk.index(row.batch, j, row.head_k);
  add_scaled(scaled, scaled_error, k, c.dim, &dq.value[q_index], &dq.bound[q_index]);
  add_scaled(scaled, scaled_error, row.q.data(), c.dim, &dk.value[k_index], &dk.bound[k_index]);
}

}  // namespace emulator
