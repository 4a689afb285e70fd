#include "compare.h"

#include <algorithm>
#include <cstdio>

namespace emulator {

namespace {

double ratio(double ours, double expected, double bound) {
  if (ours == expected) return 0;
  const double off = std::fabs(ours - expected);
  return off <= bound ? off / bound : off > 0 && bound > 0 && off < INFINITY ? off / bound : INFINITY;
}

bool holds(const uint8_t* bytes, int64_t count, uint8_t value) {
  return std::all_of(bytes, bytes + count, [value](uint8_t byte) { return byte == value; });
}

// A tensor against its expected rows, `count` of each sequence.  The rest of a sequence's rows are untouched
// or zero, and everything else is untouched.
double compare(const Problem& p, const Tensor& x, const Expected& expected, const Rows& rows,
               const std::vector<int64_t>& count) {
  const int64_t size = element_size(x.dtype), elements = x.memory->bytes() / size;
  const auto* bytes = static_cast<const uint8_t*>(x.memory->data());
  std::vector<bool> checked(elements);
  double worst = 0;
  for (int64_t b = 0; b < p.options.batch; ++b)
    for (int64_t i = 0; i < rows.allotted[b]; ++i)
      for (int64_t h = 0; h < x.heads; ++h)
        for (int64_t column = 0; column < x.columns; ++column) {
          const int64_t at = x.offset() + x.index(p.tensor_batch(b), rows.first[b] + i, h, column);
          const int64_t index = expected.index(b, i, h, column);
          checked[at] = i < count[b] || holds(bytes + at * size, size, 0);
          if (i < count[b])
            worst = std::max(
                worst, ratio(load_element(x.dtype, bytes, at), expected.value[index], expected.bound[index]));
        }
  for (int64_t i = 0; i < elements; ++i)
    if (!checked[i] && !holds(bytes + i * size, size, 0xFF)) return INFINITY;
  return worst;
}

// The cache: new rows are there, up to `tolerance` of the largest number in the row, and nothing else
// changed.
double compare_cache(const DecodeProblem& p, const Tensor& cache, const Tensor& before,
                     const Tensor& expected, double tolerance) {
  const int64_t size = element_size(cache.dtype);
  std::vector<bool> is_new(before.memory->bytes() / size);
  double worst = 0;
  for (int64_t b = 0; b < p.options.batch; ++b)
    for (int64_t key = p.k_rows.used[b]; key < p.k_rows.length[b]; ++key)
      for (int64_t h = 0; h < cache.heads; ++h) {
        const auto to = p.place(b, key);
        const int64_t batch = p.tensor_batch(b), row = p.k_rows.first[b] + key;
        double largest = 0;
        for (int64_t column = 0; column < cache.columns; ++column)
          largest = std::max(largest, std::fabs(expected.get(batch, row, h, column)));
        for (int64_t column = 0; column < cache.columns; ++column) {
          is_new[cache.offset() + cache.index(to.batch, to.row, h, column)] = true;
          worst = std::max(worst, ratio(cache.get(to.batch, to.row, h, column),
                                        expected.get(batch, row, h, column), tolerance * largest));
        }
      }
  const auto *ours = static_cast<const uint8_t*>(cache.memory->data()),
             *old = static_cast<const uint8_t*>(before.memory->data());
  for (size_t i = 0; i < is_new.size(); ++i)
    if (!is_new[i] && memcmp(ours + i * size, old + i * size, size)) return INFINITY;
  return worst;
}

bool same_bytes(const Tensor& x, const Tensor& y) {
  return !memcmp(x.memory->data(), y.memory->data(), x.memory->bytes());
}

}  // namespace

void Comparison::add(const char* name, double ratio) {
  char piece[64];
  snprintf(piece, sizeof piece, " %s %.2f", name, ratio);
  text += piece;
  right &= ratio <= 1;
}

void compare_forward(const Problem& p, const Reference& reference, Comparison& result) {
  result.add("out", compare(p, p.out, reference.out, p.q_rows, p.q_rows.allotted));
  result.add("lse", compare(p, p.lse, reference.lse, p.q_rows, p.q_rows.allotted));
  if (p.options.max_logit)
    result.add("max_logit", compare(p, p.max_logit, reference.max_logit, p.q_rows, p.q_rows.allotted));
}

void compare_backward(const Problem& p, const Reference& reference, Comparison& result) {
  result.add("dq", compare(p, p.dq, reference.dq, p.q_rows, p.q_rows.length));
  result.add("dk", compare(p, p.dk, reference.dk, p.k_rows, p.k_rows.length));
  result.add("dv", compare(p, p.dv, reference.dv, p.k_rows, p.k_rows.length));
  double worst = 0;
  for (size_t i = 0; p.options.dbias && i < reference.dbias.size(); ++i)
    worst = std::max(worst, ratio(load_element(p.sum_dtype, p.dbias->data(), i), reference.dbias[i],
                                  reference.dbias_bound[i]));
  if (p.options.dbias) result.add("dbias", worst);
  worst = 0;
  for (int h = 0; p.options.sink && h < p.options.heads; ++h)
    worst = std::max(worst, ratio(p.dsink[h], reference.dsink[h], reference.dsink_bound[h]));
  if (p.options.sink) result.add("dsink", worst);
}

void compare_decode(const DecodeProblem& p, const DecodeProblem& before, const Reference& reference,
                    Comparison& result) {
  compare_forward(p, reference, result);
  // The sums of a rotation in float32 or double; 16-bit numbers are chosen so that all round them alike.
  const double tolerance = p.options.cache.rotary && element_size(p.dtype) > 2 ? 8 * rounding_of(p.dtype) : 0;
  result.add("k_cache", compare_cache(p, p.k_cache, before.k_cache, p.k, tolerance));
  if (!p.options.cache.v_in_k) result.add("v_cache", compare_cache(p, p.v_cache, before.v_cache, p.v, 0));
  const bool same = same_bytes(p.plain_q, before.plain_q) && same_bytes(p.k_new, before.k_new) &&
                    same_bytes(p.v_new, before.v_new);
  if (!same) result.add("inputs", INFINITY);
}

}  // namespace emulator
