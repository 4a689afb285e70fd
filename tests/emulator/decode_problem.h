// A decode in memory.  As a Problem it is the attention that is expected: rotated queries over the keys of
// each sequence, one behind the other; beside it lies what the kernel gets: queries as they come, a cache
// with NaN wherever no query sees a key, and new keys.
#pragma once

#include "problem.h"

namespace emulator {

struct DecodeProblem : Problem {
  Tensor plain_q, rotated_q;  // the second is scratch
  Tensor k_cache, v_cache, k_new, v_new;
  Tensor cos, sin;
  std::vector<int32_t> page_table, batch_index, leftpad;
  int64_t table_stride = 0;

  DecodeProblem(const Case& options, DType dtype, unsigned random_seed);

  struct Place {
    int64_t batch, row;
  };
  Place place(int64_t batch, int64_t key) const;  // of a key in the cache
  int64_t appended(int64_t batch) const;          // keys, the last of the sequence

  flashattn::DecodeParams params() const;
  flashattn::DecodeParams alone(int64_t batch) const;  // a call with nothing but this sequence, not packed

 private:
  DecodeProblem(const Case& options, DType dtype, std::mt19937 random);
  DecodeProblem(const Case& options, DType dtype, const Rows& q_rows, std::mt19937& random);
  struct Spot {
    int64_t batch, row, head;
  };
  void make_cache(std::mt19937& random);
  int64_t make_page_table(std::mt19937& random);
  void make_queries(std::mt19937& random);
  void make_new_keys(std::mt19937& random);
  void fill_cache();
  void draw(Tensor& plain, Spot from, Tensor& turned, Spot to, int64_t position, std::mt19937& random);
  bool rounds_alike(double x, double error) const;
  bool is_seen(int64_t batch, int64_t key) const;
};

}  // namespace emulator
