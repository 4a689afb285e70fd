#include "cases.h"

#include <algorithm>

namespace emulator {

namespace {

Case shape(const Case& base, int batch, int rows, int keys, int heads, int heads_k) {
  Case c = base;
  c.batch = batch, c.rows = rows, c.keys = keys, c.heads = heads, c.heads_k = heads_k;
  return c;
}

Case with(Case c, int Case::* option, int value) {
  c.*option = value;
  return c;
}
Case with(Case c, bool Case::* option) {
  c.*option = true;
  return c;
}
Case with(Case c, double Case::* option, double value) {
  c.*option = value;
  return c;
}
Case with(Case c, int CacheCase::* option, int value) {
  c.cache.*option = value;
  return c;
}
Case with(Case c, bool CacheCase::* option) {
  c.cache.*option = true;
  return c;
}
Case with(Case c, Layout layout) {
  c.layout = layout;
  return c;
}
Case window(Case c, int left, int right) {
  c.left = left, c.right = right;
  return c;
}
Case dims(Case c, int dim, int dim_v) {
  c.dim = dim, c.dim_v = dim_v;
  return c;
}

void add_plain(const Case& base, std::vector<Case>& cases) {
  const Case wide = shape(base, 1, 200, 210, 2, 1), ragged = shape(base, 4, 70, 140, 2, 1);
  cases.push_back(shape(base, 1, 128, 128, 1, 1));
  cases.push_back(window(wide, -1, 0));
  cases.push_back(window(shape(base, 1, 140, 66, 2, 2), -1, 0));  // rows without a key
  cases.push_back(window(shape(base, 2, 33, 300, 4, 1), -1, 0));
  cases.push_back(window(wide, 37, 12));
  cases.push_back(window(wide, 0, 0));
  cases.push_back(window(wide, 20, -1));
  cases.push_back(shape(base, 2, 1, 1, 1, 1));
  cases.push_back(shape(base, 1, 50, 0, 1, 1));
  cases.push_back(window(with(ragged, &Case::packed), -1, 0));
  cases.push_back(with(with(with(ragged, &Case::packed), &Case::used_q), &Case::used_k));
  cases.push_back(window(with(with(ragged, &Case::used_q), &Case::used_k), -1, 0));
  cases.push_back(with(with(wide, Layout::heads_first), &Case::dlse));
  cases.push_back(with(with(window(shape(base, 1, 140, 66, 2, 2), -1, 0), &Case::sink), &Case::dlse));
  cases.push_back(dims(wide, base.dim - 8, base.dim_v - 24));
  cases.push_back(dims(wide, 8, base.dim_v));
  cases.push_back(with(window(shape(base, 1, 260, 270, 2, 1), -1, 0), &Case::deterministic));
  cases.push_back(with(window(wide, -1, 0), &Case::scale, 2.0));  // logits far apart
  cases.push_back(with(wide, &Case::max_logit));
}

void add_general(const Case& base, std::vector<Case>& cases) {
  const Case wide = shape(base, 2, 140, 130, 2, 1), causal = window(wide, -1, 0);
  const Case with_bias = with(with(wide, &Case::bias, kAll), &Case::dbias);
  cases.push_back(with(causal, &Case::softcap, 2.0));
  cases.push_back(with(causal, &Case::alibi, 1));
  cases.push_back(with(wide, &Case::alibi, 2));
  cases.push_back(
      with(with(window(shape(wide, 2, 150, 130, 4, 2), 60, 20), &Case::alibi, 2), &Case::softcap, 0.5));
  cases.push_back(with_bias);
  cases.push_back(with(with(with_bias, &Case::bias, kKeys), &Case::deterministic));
  cases.push_back(with(with_bias, &Case::bias, kKeys | kRows));
  cases.push_back(with(wide, &Case::mask, kAll));
  cases.push_back(with(causal, &Case::mask, kKeys));  // hides keys from every query
  cases.push_back(with(with(wide, &Case::mask, kKeys | kBatch), Layout::unaligned));
  cases.push_back(with(causal, &Case::dropout, 0.3));
  cases.push_back(with(with(causal, &Case::max_logit), &Case::softcap, 1.0));
  cases.push_back(with(wide, &Case::scale, -0.3));
  cases.push_back(with(dims(causal, base.dim - 3, base.dim_v - 7), Layout::unaligned));
  cases.push_back(with(with(dims(wide, 1, 1), &Case::packed), Layout::unaligned));
}

Case random_case(const Case& base, bool general, std::mt19937& random) {
  const auto one_of = [&random](std::initializer_list<int> values) {
    return values.begin()[random() % values.size()];
  };
  const auto now_and_then = [&random] { return random() % 4 == 0; };
  const int heads_k = one_of({1, 1, 2});
  Case c = shape(base, one_of({1, 2, 3}), one_of({1, 7, 64, 65, 100, 129, 150}),
                 one_of({1, 33, 64, 65, 128, 150, 190}), heads_k * one_of({1, 2, 3}), heads_k);
  if (random() % 2) c.right = one_of({0, 0, 0, 5, 40});
  if (now_and_then()) c.left = one_of({0, 9, 70, 1000});
  c.packed = now_and_then(), c.used_q = now_and_then(), c.used_k = now_and_then();
  c.layout = now_and_then() ? Layout::heads_first : Layout::contiguous;
  c.sink = now_and_then(), c.dlse = now_and_then(), c.deterministic = now_and_then();
  if (now_and_then()) c.dim_v = std::max(8, c.dim_v - 16);
  if (!general) return c;
  if (now_and_then()) c.softcap = 3;
  if (now_and_then()) c.dropout = 0.2;
  if (now_and_then()) c.alibi = one_of({1, 2});
  if (now_and_then()) c.bias = kKeys | one_of({kRows, kHeads, kBatch, kRows | kHeads, kAll});
  if (now_and_then()) c.mask = kKeys | one_of({kAbsent, kRows, kBatch | kRows, kAll});
  if (now_and_then()) c.layout = Layout::unaligned, c.dim -= 1;
  c.dbias = c.bias && random() % 4 != 0;
  c.max_logit = now_and_then();
  return c;
}

Case append(Case c, int new_keys) {
  c.cache.append = true, c.cache.new_keys = new_keys;
  return c;
}
Case rotary(Case c, int columns, bool interleaved, bool f32_tables) {
  c.cache.rotary = columns, c.cache.interleaved = interleaved, c.cache.f32_tables = f32_tables;
  return c;
}

void add_caches(const Case& base, std::vector<Case>& cases) {
  const Case one = shape(base, 4, 1, 200, 6, 2), few = window(shape(base, 3, 4, 150, 6, 2), -1, 0);
  Case whole = shape(base, 2, 1, 256, 4, 4);
  whole.used_k = false;
  cases.push_back(one);
  cases.push_back(whole);
  cases.push_back(with(whole, &CacheCase::page_size, 16));
  cases.push_back(shape(base, 1, 1, 700, 4, 1));
  cases.push_back(shape(base, 5, 1, 330, 16, 1));
  cases.push_back(shape(base, 2, 1, 140, 40, 1));
  cases.push_back(few);
  cases.push_back(with(with(one, &CacheCase::batch_index), &CacheCase::leftpad));
  for (int page_size : {1, 3, 16, 64, 256})
    cases.push_back(with(page_size % 3 ? one : few, &CacheCase::page_size, page_size));
  cases.push_back(with(with(few, &CacheCase::page_size, 16), &CacheCase::leftpad));
  cases.push_back(append(one, 1));
  cases.push_back(append(with(few, &CacheCase::batch_index), 7));  // more than there are queries
  cases.push_back(append(with(few, &CacheCase::page_size, 3), 2));
  cases.push_back(with(append(with(one, &CacheCase::page_size, 64), 1), Layout::heads_first));
  const Case mla = with(with(shape(base, 3, 1, 190, 16, 1), &CacheCase::v_in_k), &CacheCase::page_size, 64);
  cases.push_back(dims(mla, base.dim, std::min(base.dim, base.dim_v) - 8));
  cases.push_back(rotary(append(dims(mla, base.dim, std::min(base.dim, base.dim_v)), 1), 16, true, false));
  cases.push_back(with(one, &Case::scale, 2.0));  // logits far apart
  cases.push_back(dims(few, base.dim - 8, base.dim_v - 24));
  cases.push_back(dims(one, 8, base.dim_v));
}

void add_windows(const Case& base, std::vector<Case>& cases) {
  const Case one = shape(base, 4, 1, 300, 6, 2), few = shape(base, 3, 5, 260, 3, 1);
  cases.push_back(window(one, 100, 0));
  cases.push_back(window(few, 63, 0));
  cases.push_back(window(few, 0, 2));
  cases.push_back(window(few, 20, -1));
  cases.push_back(with(window(with(one, &CacheCase::page_size, 16), 40, 0), &Case::sink));
  cases.push_back(
      with(window(shape(base, 2, 12, 7, 1, 1), -1, 0), &CacheCase::splits, 2));  // rows without a key
  cases.push_back(with(with(one, &Case::sink), &CacheCase::leftpad));
  cases.push_back(
      with(with(window(with(one, &Case::sink), 150, 0), &CacheCase::leftpad), &CacheCase::splits, 3));
}

void add_rotary(const Case& base, std::vector<Case>& cases) {
  const Case one = shape(base, 3, 1, 180, 4, 2), few = shape(base, 3, 4, 130, 3, 1);
  cases.push_back(rotary(append(one, 1), base.dim, false, false));
  cases.push_back(rotary(append(window(few, -1, 0), 4), base.dim, true, true));
  cases.push_back(rotary(append(few, 3), 16, false, true));
  cases.push_back(rotary(window(few, 70, 0), 6, true, false));
  cases.push_back(rotary(with(append(window(few, -1, 0), 4), &CacheCase::page_size, 3), 32, false, true));
}

void add_splits(const Case& base, std::vector<Case>& cases) {
  const Case one = shape(base, 3, 1, 600, 4, 2), few = window(shape(base, 2, 4, 700, 3, 1), -1, 0);
  for (int splits : {2, 3, 7}) {
    cases.push_back(with(one, &CacheCase::splits, splits));
    cases.push_back(with(with(window(few, 300, 0), &CacheCase::page_size, 64), &CacheCase::splits, splits));
  }
  cases.push_back(with(with(one, &Case::packed), &CacheCase::splits, 3));
  cases.push_back(with(one, &Case::batch_invariant));
  cases.push_back(with(shape(base, 2, 2, 1100, 2, 1), &Case::batch_invariant));
  cases.push_back(with(with(shape(base, 3, 20, 200, 4, 1), &Case::packed), &Case::batch_invariant));
  cases.push_back(append(with(with(few, &CacheCase::page_size, 16), &Case::batch_invariant), 4));
}

void add_many(const Case& base, std::vector<Case>& cases) {
  const Case many = window(shape(base, 2, 40, 170, 4, 2), -1, 0);
  cases.push_back(many);
  cases.push_back(window(shape(base, 2, 40, 33, 2, 2), -1, 0));  // rows without a key
  cases.push_back(shape(base, 2, 9, 300, 16, 1));
  cases.push_back(window(shape(base, 2, 23, 300, 3, 1), 40, 5));
  cases.push_back(with(many, &Case::packed));
  cases.push_back(append(with(with(many, &Case::packed), &CacheCase::page_size, 16), 0));
  cases.push_back(append(rotary(with(shape(base, 4, 17, 140, 4, 1), &Case::packed), 24, false, false), 0));
  cases.push_back(append(rotary(with(many, &CacheCase::leftpad), 24, true, false), 40));
  cases.push_back(with(window(shape(base, 5, 3, 90, 8, 1), -1, 0), &Case::packed));
  const Case tiles = window(shape(base, 2, 150, 400, 2, 1), 130, 0);
  cases.push_back(append(rotary(with(tiles, &CacheCase::page_size, 24), 24, false, true), 150));
  cases.push_back(with(with(tiles, &CacheCase::page_size, 64), &Case::packed));
}

void add_decode_scores(const Case& base, std::vector<Case>& cases) {
  const Case one = shape(base, 3, 1, 260, 4, 2), few = window(shape(base, 2, 5, 150, 3, 1), -1, 0);
  cases.push_back(with(one, &Case::softcap, 2.0));
  cases.push_back(with(few, &Case::alibi, 1));
  cases.push_back(with(with(few, &Case::alibi, 2), &CacheCase::leftpad));
  cases.push_back(
      with(with(with(window(few, 60, 20), &Case::alibi, 2), &Case::softcap, 0.5), &CacheCase::splits, 2));
  cases.push_back(with(one, &Case::scale, -0.3));
  cases.push_back(with(dims(few, base.dim - 3, base.dim_v - 7), Layout::unaligned));
  cases.push_back(
      with(append(rotary(dims(one, base.dim - 1, base.dim_v - 1), 10, false, false), 1), Layout::unaligned));
  cases.push_back(with(with(with(few, &Case::alibi, 2), &Case::batch_invariant), &Case::sink));
  cases.push_back(append(with(with(dims(one, 2, 1), &CacheCase::page_size, 3), Layout::unaligned), 2));
}

Case random_decode_case(const Case& base, bool general, std::mt19937& random) {
  const auto one_of = [&random](std::initializer_list<int> values) {
    return values.begin()[random() % values.size()];
  };
  const auto now_and_then = [&random] { return random() % 4 == 0; };
  const int group = one_of({1, 1, 3, 4, 8, 16, 40}), heads_k = group < 8 ? one_of({1, 2}) : 1;
  Case c = shape(base, one_of({1, 2, 3, 5}), group > 8 ? one_of({1, 1, 2}) : one_of({1, 1, 1, 2, 4, 9, 40}),
                 one_of({1, 33, 64, 65, 128, 150, 190, 300, 500, 700}), heads_k * group, heads_k);
  c.used_k = random() % 8 != 0;
  if (random() % 2) c.right = one_of({0, 0, 0, 5});
  if (now_and_then()) c.left = one_of({0, 9, 70, 200, 1000});
  c.packed = now_and_then(), c.sink = now_and_then(), c.batch_invariant = now_and_then();
  c.layout = now_and_then() ? Layout::heads_first : Layout::contiguous;
  if (random() % 2) c.cache.page_size = one_of({1, 3, 16, 64, 256});
  c.cache.batch_index = !c.cache.page_size && now_and_then();
  c.cache.leftpad = now_and_then();
  if (c.used_k && random() % 2) c = append(c, c.packed ? 0 : one_of({1, c.rows, 5}));
  if (now_and_then()) c = rotary(c, one_of({2, 16, base.dim}), random() % 2, random() % 2);
  if (!c.batch_invariant && now_and_then()) c.cache.splits = one_of({1, 2, 3, 7});
  if (now_and_then()) c.dim_v = std::max(8, c.dim_v - 16);
  c.cache.v_in_k |= c.dim_v <= c.dim && now_and_then();
  if (!general) return c;
  if (now_and_then()) c.softcap = 3;
  if (now_and_then()) c.alibi = one_of({1, 2});
  if (now_and_then() && c.cache.rotary < c.dim && c.dim_v < c.dim) c.layout = Layout::unaligned, c.dim -= 1;
  return c;
}

}  // namespace

std::vector<Case> make_cases(int dim, int dim_v, bool general, int random_cases) {
  Case base;
  base.dim = dim ? dim : 72, base.dim_v = dim_v ? dim_v : 40;
  std::vector<Case> cases;
  add_plain(base, cases);
  if (general) add_general(base, cases);
  std::mt19937 random(static_cast<unsigned>(dim * 1000 + dim_v + general));
  for (int i = 0; i < random_cases; ++i) cases.push_back(random_case(base, general, random));
  return cases;
}

std::vector<Case> make_decode_cases(int dim, int dim_v, bool general, bool v_in_k, int random_cases) {
  Case base;
  base.dim = dim ? dim : 72, base.dim_v = dim_v ? dim_v : 40;
  base.used_k = true, base.cache.v_in_k = v_in_k;
  std::vector<Case> cases;
  for (auto* add : {add_caches, add_windows, add_rotary, add_splits, add_many}) add(base, cases);
  if (general) add_decode_scores(base, cases);
  std::mt19937 random(static_cast<unsigned>(dim * 1000 + dim_v + general));
  for (int i = 0; i < random_cases; ++i) cases.push_back(random_decode_case(base, general, random));
  cases.push_back(with(shape(base, 2, 40, 168, 2, 1), &CacheCase::page_size, 24));
  cases.back().used_k = false;  // all keys of all pages, the last block of which is not full
  static constexpr int kProcessors[] = {1, 3, 8, 2, 20};  // so that tiles are cut at any key
  for (size_t i = 0; i < cases.size(); ++i) {
    cases[i].cache.processors = kProcessors[i % std::size(kProcessors)];
    cases[i].cache.capability = i % 2 ? 90 : 80;
  }
  return cases;
}

}  // namespace emulator
