// Attention by its definition, in double, with a bound of the error that a correct kernel may make.
//
// A kernel rounds the weights P, the gradients dS and its results to the 16-bit type, each with a relative
// error of at most u (2^-8 for bfloat16, 2^-11 for float16, whose subnormals are 2^-24 apart), and computes
// everything else in float32; kernels of float32 and float64 round nothing on the way.  So, with e the error
// of float32 sums and exponentials,
//   |O error|  <= (u + e) sum_j P_j |V_j| + u |O|
//   |dS error| <= u |dS| + e P (|dO||V| + |dO||O| + |dlse|)
//   |dV error| <= (u + e) sum_i P |dO| + u |dV|,   dQ and dK likewise: the error of dS times |K| or |Q|.
// LSE and largest logit: 2e-5 (1 + largest |logit|).
#pragma once

#include "problem.h"

namespace emulator {

// Values of a (batch, row, head, column) tensor in the sequences' own rows, and their bounds.
struct Expected {
  int64_t rows, heads, columns;
  std::vector<double> value, bound;

  Expected() = default;
  Expected(int64_t batches, int64_t rows_, int64_t heads_, int64_t columns_)
      : rows(rows_),
        heads(heads_),
        columns(columns_),
        value(batches * rows * heads * columns),
        bound(value.size()) {}
  int64_t index(int64_t batch, int64_t row, int64_t head, int64_t column = 0) const {
    return ((batch * rows + row) * heads + head) * columns + column;
  }
};

struct Reference {
  Expected out, lse, max_logit;
  Expected dq, dk, dv;
  std::vector<double> dbias, dbias_bound, dsink, dsink_bound;

  // A backward starts from O and LSE, which are put, rounded, into the problem's tensors.
  Reference(Problem& problem, bool with_backward);

 private:
  struct Row;
  void forward_row(const Problem& problem, Row& row);
  void backward_row(Problem& problem, const Row& row);
  void differentiate(const Problem& problem, const Row& row, size_t n, const std::vector<double>& dout,
                     double delta, double delta_size);
};

}  // namespace emulator
