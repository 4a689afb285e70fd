// Runs the kernels of the table on the emulator and compares each case with the definition in double.
//   emulator [part of a kernel's name] [--part i/n] [--case n] [--random n] [--stop]
// Prints a line a case, with the error over its bound for each result, and exits with 1 when one is wrong.
// --part: every n-th case; --case: this one; --random: how many random ones; --stop: at the first wrong one.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cases.h"
#include "compare.h"
#include "dispatch.h"
#include "simt.h"

namespace flashattn {
extern const Family family;
const Family family{"emulator", nullptr, 0, {}, nullptr, nullptr};
}  // namespace flashattn

namespace emulator {
namespace {

using namespace flashattn;

struct Arguments {
  std::string name;
  int part = 0, parts = 1, only_case = -1, random_cases = 20;
  bool stop = false;
};

template <class Params>
constexpr bool kDecode = std::is_same_v<Params, DecodeParams>;
template <class Params>
using ProblemOf = std::conditional_t<kDecode<Params>, DecodeProblem, Problem>;

// Runs the kernel; the error of the launch, empty if there was none.
template <class Params>
std::string launch(const Instance<Params>& kernel, Params p, Schedule schedule) {
  if constexpr (kDecode<Params>)
    if (!kernel.module && p.splits == 0)  // only CUDA kernels divide the work
      p.splits = 1, p.keys_per_split = p.seqlen_k.rows;
  p.workspace = kernel.workspace(p);
  p.workspace.threads = 1;  // of a CPU kernel
  const Memory scratch(p.workspace.shared_bytes), private_scratch(p.workspace.private_bytes);
  p.workspace.shared = scratch.data();
  p.workspace.private_data = private_scratch.data();
  set_schedule(schedule);
  const int code = kernel.launch(p, nullptr);
  const std::string error = take_error();
  return code == 0 ? error : "launch error " + std::to_string(code);
}

// The results of a deterministic call do not depend on who comes first.
template <class Params>
bool repeats(const Instance<Params>& kernel, const Case& c, DType dtype, unsigned seed, const Problem& first,
             Schedule schedule) {
  ProblemOf<Params> again(c, dtype, seed);
  if constexpr (std::is_same_v<Params, BackwardParams>)
    for (Tensor Problem::* x : {&Problem::out, &Problem::lse})
      memcpy((again.*x).memory->data(), (first.*x).memory->data(), (first.*x).memory->bytes());
  if (!launch<Params>(kernel, again.params(), schedule).empty()) return false;
  for (Tensor Problem::* x : {&Problem::out, &Problem::lse, &Problem::dq, &Problem::dk, &Problem::dv})
    if (memcmp((first.*x).memory->data(), (again.*x).memory->data(), (again.*x).memory->bytes()))
      return false;
  return !memcmp(first.dbias->data(), again.dbias->data(), again.dbias->bytes());
}

bool same_rows(const Tensor& x, const Tensor& y, int64_t batch, int64_t first, int64_t rows) {
  for (int64_t row = first; row < first + rows; ++row)
    for (int64_t h = 0; h < x.heads; ++h)
      if (memcmp(x.at(batch, row, h), y.at(batch, row, h), x.columns * element_size(x.dtype))) return false;
  return true;
}

// Every sequence of a batch-invariant call has the results that it has alone.
bool same_alone(const Instance<DecodeParams>& kernel, const DecodeProblem& first, unsigned seed,
                Schedule schedule) {
  for (int b = 0; b < first.options.batch; ++b) {
    const int64_t batch = first.tensor_batch(b), row = first.q_rows.first[b], rows = first.q_rows.length[b];
    if (rows == 0) continue;
    const DecodeProblem again(first.options, first.dtype, seed);
    if (!launch(kernel, again.alone(b), schedule).empty()) return false;
    for (Tensor Problem::* x : {&Problem::out, &Problem::lse})
      if (!same_rows(first.*x, again.*x, batch, row, rows)) return false;
  }
  return true;
}

template <class Params>
void compare(const ProblemOf<Params>& problem, const Reference& reference, unsigned seed,
             Comparison& result) {
  if constexpr (kDecode<Params>)
    compare_decode(problem, DecodeProblem(problem.options, problem.dtype, seed), reference, result);
  else if constexpr (std::is_same_v<Params, BackwardParams>)
    compare_backward(problem, reference, result);
  else
    compare_forward(problem, reference, result);
}

template <class Params>
bool run_case(const Instance<Params>& kernel, const Case& c, DType dtype, int number) {
  constexpr bool kBackward = std::is_same_v<Params, BackwardParams>;
  static const Schedule schedules[] = {
      {Order::greedy, 1}, {Order::round_robin, 3}, {Order::greedy_backwards, 2}};
  static const char* const names[] = {"greedy", "round robin", "greedy backwards"};
  ProblemOf<Params> problem(c, dtype, number);
  const uint32_t served = kernel.serves | set_of(Need::small_tiles, Need::few_rows);  // matters of speed
  if (needs(static_cast<Params>(problem.params())) & ~served) return true;
  printf("%s %d, %s: %s:", kernel.name, number, names[number % 3], c.text().c_str());
  fflush(stdout);
  Reference reference(problem, kBackward);
  Comparison result;
  std::string error = launch<Params>(kernel, problem.params(), schedules[number % 3]);
  if (error.empty()) {
    compare<Params>(problem, reference, number, result);
    if ((c.deterministic || !kBackward) &&
        !repeats(kernel, c, dtype, number, problem, schedules[(number + 1) % 3]))
      error = "another order of the warps gives another result";
    if constexpr (kDecode<Params>)
      if (c.batch_invariant && !same_alone(kernel, problem, number, schedules[(number + 2) % 3]))
        error = "a sequence alone has another result";
  }
  const bool right = error.empty() && result.right;
  printf("%s %s%s\n", result.text.c_str(), right ? "ok" : "WRONG ", error.c_str());
  return right;
}

// Counts of cases and of those that are wrong.
struct Counts {
  int cases = 0, wrong = 0;
};

template <class Params>
void run_kernel(const Instance<Params>& kernel, DType dtype, const Arguments& arguments, Counts& counts) {
  const auto dim = static_cast<int>(kernel.head_dim), dim_v = static_cast<int>(kernel.head_dim_v);
  const bool general = kernel.serves & set_of(Need::softcap),
             v_in_k = !(kernel.serves & set_of(Need::own_values));
  const auto cases = kDecode<Params> ? make_decode_cases(dim, dim_v, general, v_in_k, arguments.random_cases)
                                     : make_cases(dim, dim_v, general, arguments.random_cases);
  for (int number = 0; number < static_cast<int>(cases.size()); ++number) {
    if (number % arguments.parts != arguments.part) continue;
    if (arguments.only_case >= 0 && number != arguments.only_case) continue;
    if (arguments.stop && counts.wrong) return;
    ++counts.cases;
    counts.wrong += !run_case(kernel, cases[number], dtype, number);
  }
}

template <class Params>
void run_kernels(const Arguments& arguments, Counts& counts) {
  for (const auto* kernel : instances<Params>())
    if (std::string(kernel->name).find(arguments.name) != std::string::npos)
      for (const auto& [name, dtype] : kDTypeNames)  // CUDA kernels serve one
        if (kernel->dtypes & set_of(dtype)) run_kernel(*kernel, dtype, arguments, counts);
}

Arguments parse(int count, char** texts) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string text = texts[i];
    const char* value = i + 1 < count ? texts[i + 1] : "";
    if (text == "--stop")
      arguments.stop = true;
    else if (text == "--part" && sscanf(value, "%d/%d", &arguments.part, &arguments.parts) == 2)
      ++i;
    else if (text == "--case" && sscanf(value, "%d", &arguments.only_case) == 1)
      ++i;
    else if (text == "--random" && sscanf(value, "%d", &arguments.random_cases) == 1)
      ++i;
    else
      arguments.name = text;
  }
  return arguments;
}

}  // namespace
}  // namespace emulator

int main(int count, char** texts) {
  const emulator::Arguments arguments = emulator::parse(count, texts);
  const auto start = std::chrono::steady_clock::now();
  emulator::Counts counts;
  emulator::run_kernels<flashattn::ForwardParams>(arguments, counts);
  emulator::run_kernels<flashattn::BackwardParams>(arguments, counts);
  emulator::run_kernels<flashattn::DecodeParams>(arguments, counts);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  printf("%d cases, %d wrong, %.1f s\n", counts.cases, counts.wrong, seconds.count());
  return counts.wrong != 0 || counts.cases == 0;
}
