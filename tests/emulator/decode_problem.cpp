#include "decode_problem.h"

#include <algorithm>
#include <climits>
#include <numeric>

#include "dispatch.h"

namespace emulator {

namespace {

constexpr int64_t kSpareRows = 13;   // behind the longest sequence
constexpr int64_t kNobodysRows = 3;  // pages, or rows of the batch dimension, that no sequence has
constexpr int64_t kTablePadding = 2;
constexpr int64_t kSharedBytes = 227 * 1024;  // that a block may have

int64_t appended_keys(const Case& c, const Rows& q, int64_t batch) {
  return !c.cache.append ? 0 : c.packed ? q.length[batch] : c.cache.new_keys;
}

// Keys of each sequence: one is the longest, one has no more than the new ones, others end at the edges of
// tiles.
Rows key_rows(const Case& c, const Rows& q, std::mt19937& random) {
  const auto up_to = [&random](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  Rows rows{};
  const int64_t longest = std::max<int64_t>(c.keys, !c.cache.append ? 0
                                                    : c.packed      ? c.rows
                                                                    : c.cache.new_keys);
  const int64_t page = std::max(1, c.cache.page_size);
  rows.longest = (longest + (c.used_k ? kSpareRows : 0) + page - 1) / page * page;
  rows.total = c.batch * rows.longest;
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t appended = appended_keys(c, q, b), edges[] = {0, 1, 63, 64, 65, 128, up_to(longest)};
    const int64_t some = b == 0 ? longest : b == 1 ? appended + up_to(1) : edges[up_to(std::size(edges) - 1)];
    const int64_t length = c.used_k ? std::clamp(some, appended, longest) : rows.longest;
    rows.first.push_back(c.packed ? b * rows.longest : 0);
    rows.length.push_back(length);
    rows.allotted.push_back(rows.longest);
    rows.used.push_back(static_cast<int32_t>(length - appended));
    rows.pad.push_back(!c.cache.leftpad ? 0 : b == 2 ? length : up_to(b == 0 ? length / 2 : length));
  }
  return rows;
}

// Distinct numbers under `count` + kNobodysRows in any order.
std::vector<int32_t> shuffled(int64_t count, std::mt19937& random) {
  std::vector<int32_t> numbers(count + kNobodysRows);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), random);
  return numbers;
}

}  // namespace

DecodeProblem::DecodeProblem(const Case& c, DType dtype_, unsigned random_seed)
    : DecodeProblem(c, dtype_, std::mt19937(random_seed)) {}

DecodeProblem::DecodeProblem(const Case& c, DType dtype_, std::mt19937 random)
    : DecodeProblem{c, dtype_, make_rows(c, c.rows, false, random), random} {}

DecodeProblem::DecodeProblem(const Case& c, DType dtype_, const Rows& q, std::mt19937& random)
    : Problem(c, dtype_, q, key_rows(c, q, random), random) {
  make_cache(random);
  make_queries(random);
  make_new_keys(random);
  fill_cache();
}

int64_t DecodeProblem::appended(int64_t batch) const { return appended_keys(options, q_rows, batch); }

bool DecodeProblem::is_seen(int64_t batch, int64_t key) const {
  return key >= k_rows.used[batch] || some_query_sees(batch, 0, key);  // no mask: the same for every head
}

DecodeProblem::Place DecodeProblem::place(int64_t batch, int64_t key) const {
  const int64_t page = options.cache.page_size;
  if (page) return {page_table[batch * table_stride + key / page], key % page};
  return {batch_index.empty() ? batch : batch_index[batch], key};
}

void DecodeProblem::make_cache(std::mt19937& random) {
  const Case& c = options;
  int64_t entries = c.batch, rows = k_rows.longest;
  if (c.cache.page_size) {
    entries = make_page_table(random);
    rows = c.cache.page_size;
  } else if (c.cache.batch_index) {
    batch_index = shuffled(c.batch, random);
    entries = static_cast<int64_t>(batch_index.size());
  }
  leftpad.assign(k_rows.pad.begin(), k_rows.pad.end());
  k_cache = Tensor(dtype, entries, rows, c.heads_k, c.dim, c.layout);
  v_cache = Tensor(dtype, entries, rows, c.heads_k, c.dim_v, c.layout);
  const int64_t batches = c.packed ? 1 : c.batch, new_rows = c.packed ? q_rows.total : c.cache.new_keys;
  k_new = Tensor(dtype, batches, new_rows, c.heads_k, c.dim, c.layout);
  v_new = Tensor(dtype, batches, new_rows, c.heads_k, c.dim_v, c.layout);
  plain_q = Tensor(dtype, batches, q.rows, c.heads, c.dim, c.layout);
  rotated_q = Tensor(dtype, batches, q.rows, c.heads, c.dim, Layout::contiguous);
  for (Tensor* table : {&cos, &sin})
    *table = Tensor(c.cache.f32_tables ? DType::f32 : dtype, 1, k_rows.longest + 1, 1, c.cache.rotary / 2,
                    c.layout == Layout::contiguous ? Layout::contiguous : Layout::unaligned);
}

// Returns the number of pages.  An entry that no key needs holds anything.
int64_t DecodeProblem::make_page_table(std::mt19937& random) {
  const int64_t page = options.cache.page_size, pages = k_rows.longest / page;
  table_stride = pages + kTablePadding;
  std::vector<int64_t> needed;
  for (int64_t b = 0; b < options.batch; ++b)
    for (int64_t i = 0; i < pages; ++i) {
      bool seen = false;
      for (int64_t key = i * page; key < std::min((i + 1) * page, k_rows.length[b]); ++key)
        seen |= is_seen(b, key);
      if (seen) needed.push_back(b * table_stride + i);
    }
  for (int64_t i = 0; i < options.batch * table_stride; ++i)
    page_table.push_back(random() % 2 ? -1 : INT_MAX);
  const std::vector<int32_t> ids = shuffled(static_cast<int64_t>(needed.size()), random);
  for (size_t i = 0; i < needed.size(); ++i) page_table[needed[i]] = ids[i];
  return static_cast<int64_t>(ids.size());
}

// Is it certain what a sum with an error below this is rounded to?
bool DecodeProblem::rounds_alike(double x, double error) const {
  if (element_size(dtype) != 2) return true;
  double low, high;
  store_element(dtype, &low, 0, x - error);
  store_element(dtype, &high, 0, x + error);
  return load_element(dtype, &low, 0) == load_element(dtype, &high, 0);
}

// Random numbers, and the same rotated.  Those whose rotation lies so close to a tie of the rounding that
// float32 sums may round it either way are drawn again.
void DecodeProblem::draw(Tensor& plain, Spot from, Tensor& turned, Spot to, int64_t position,
                         std::mt19937& random) {
  const auto draw_one = [&](int64_t column) {
    plain.set(from.batch, from.row, from.head, column, normal(random));
    return plain.get(from.batch, from.row, from.head, column);
  };
  const auto store = [&](int64_t column, double x) { turned.set(to.batch, to.row, to.head, column, x); };
  const int64_t half = options.cache.rotary / 2;
  for (int64_t column = 2 * half; column < plain.columns; ++column) store(column, draw_one(column));
  for (int64_t c = 0; c < half; ++c) {
    const double angle = static_cast<double>(position) * std::pow(10000, -static_cast<double>(c) / half);
    cos.set(0, position, 0, c, std::cos(angle));
    sin.set(0, position, 0, c, std::sin(angle));
    const double cosine = cos.get(0, position, 0, c), sine = sin.get(0, position, 0, c);
    const int64_t first = options.cache.interleaved ? 2 * c : c,
                  second = first + (options.cache.interleaved ? 1 : half);
    double x, y, error;
    do {
      x = draw_one(first), y = draw_one(second);
      error = 0x1p-21 * (std::fabs(x) + std::fabs(y));
    } while (!rounds_alike(x * cosine - y * sine, error) || !rounds_alike(x * sine + y * cosine, error));
    store(first, x * cosine - y * sine);
    store(second, x * sine + y * cosine);
  }
}

void DecodeProblem::make_queries(std::mt19937& random) {
  const bool every_query = options.left >= 0 || options.right >= 0;
  for (int64_t b = 0; b < options.batch; ++b)
    for (int64_t i = 0; i < q_rows.length[b]; ++i)
      for (int64_t h = 0; h < options.heads; ++h) {
        const int64_t own = std::max<int64_t>(0, i + k_rows.length[b] - q_rows.length[b]);
        const Spot spot{tensor_batch(b), q_rows.first[b] + i, h};
        draw(plain_q, spot, q, spot, every_query ? own : k_rows.used[b], random);
      }
}

void DecodeProblem::make_new_keys(std::mt19937& random) {
  for (int64_t b = 0; b < options.batch; ++b)
    for (int64_t i = 0; i < appended(b); ++i)
      for (int64_t h = 0; h < options.heads_k; ++h) {
        const Spot from{tensor_batch(b), (options.packed ? q_rows.first[b] : 0) + i, h},
            to{tensor_batch(b), k_rows.first[b] + k_rows.used[b] + i, h};
        draw(k_new, from, k, to, k_rows.used[b] + i, random);
        for (int64_t column = 0; column < options.dim_v; ++column) {
          v_new.set(from.batch, from.row, h, column, normal(random));
          v.set(to.batch, to.row, h, column, v_new.get(from.batch, from.row, h, column));
        }
      }
}

// Keys that are in the cache before the call.
void DecodeProblem::fill_cache() {
  for (int64_t b = 0; b < options.batch; ++b)
    for (int64_t key = 0; key < k_rows.length[b]; ++key)
      for (int64_t h = 0; is_seen(b, key) && h < options.heads_k; ++h) {
        const int64_t batch = tensor_batch(b), row = k_rows.first[b] + key;
        if (options.cache.v_in_k)
          for (int64_t column = 0; column < options.dim_v; ++column)
            v.set(batch, row, h, column, k.get(batch, row, h, column));
        if (key >= k_rows.used[b]) continue;
        const Place to = place(b, key);
        for (auto [from, cache] : {std::pair{&k, &k_cache}, {&v, &v_cache}})
          for (int64_t column = 0; column < from->columns; ++column)
            cache->set(to.batch, to.row, h, column, from->get(batch, row, h, column));
      }
}

flashattn::DecodeParams DecodeProblem::params() const {
  const Case& c = options;
  flashattn::DecodeParams p{};
  static_cast<flashattn::ForwardParams&>(p) = Problem::params();
  p.dropout = {};
  p.q = plain_q.view, p.k = k_cache.view, p.v = c.cache.v_in_k ? k_cache.view : v_cache.view;
  p.seqlen_k = {k_rows.longest, 0, nullptr, c.used_k ? k_rows.used.data() : nullptr, 0, nullptr};
  p.cache = {k_cache.batches,
             page_table.empty() ? nullptr : page_table.data(),
             table_stride,
             c.cache.page_size,
             batch_index.empty() ? nullptr : batch_index.data(),
             c.cache.leftpad ? leftpad.data() : nullptr};
  if (c.cache.append) {
    p.new_rows = k_new.rows;
    p.seqlen_k.appended = c.packed ? 0 : p.new_rows;
    p.seqlen_k.appended_cu = c.packed ? q_rows.cu.data() : nullptr;
    p.k_new = k_new.view;
    if (!c.cache.v_in_k) p.v_new = v_new.view;
  }
  if (c.cache.rotary) {
    p.q_rotated = rotated_q.view;
    p.rotary = {cos.view.data, sin.view.data,  cos.dtype,           cos.view.row,
                sin.view.row,  c.cache.rotary, c.cache.interleaved, c.left >= 0 || c.right >= 0,
                cos.rows};
  }
  if (c.cache.splits || c.batch_invariant) {
    const auto splits = flashattn::decode_splits(1, p.seqlen_k.rows, 1, c.cache.splits, c.batch_invariant);
    p.splits = splits.count, p.keys_per_split = splits.keys;
  }
  p.device = {c.cache.capability, c.cache.processors, kSharedBytes};
  return p;
}

flashattn::DecodeParams DecodeProblem::alone(int64_t b) const {
  flashattn::DecodeParams p = params();
  const auto skip = [](void*& data, DType type, int64_t elements) {
    if (data) data = static_cast<char*>(data) + elements * element_size(type);
  };
  const int64_t batch = tensor_batch(b), row = q_rows.first[b];
  for (flashattn::Tensor4* x : {&p.q, &p.out, &p.q_rotated, &p.k_new, &p.v_new})
    skip(x->data, dtype, batch * x->batch + row * x->row);
  skip(p.lse.data, sum_dtype, batch * p.lse.batch + row * p.lse.row);
  if (p.cache.page_table)
    p.cache.page_table += b * table_stride;
  else if (p.cache.batch_index)
    p.cache.batch_index += b;
  else
    for (flashattn::Tensor4* x : {&p.k, &p.v}) skip(x->data, dtype, b * x->batch), p.cache.entries = 1;
  if (p.cache.leftpad) p.cache.leftpad += b;
  if (options.alibi == 2) p.score.alibi.data = slopes.data() + b * options.heads;
  p.batch = 1;
  p.seqlen_q = {q_rows.length[b], q_rows.length[b], nullptr, nullptr, 0, nullptr};
  if (p.seqlen_k.used) p.seqlen_k.used += b;
  if (options.cache.append) p.new_rows = p.seqlen_k.appended = appended(b);
  p.seqlen_k.appended_cu = nullptr;
  return p;
}

}  // namespace emulator
