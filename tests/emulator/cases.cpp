#include "cases.h"

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

}  // namespace emulator
