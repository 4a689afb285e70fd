// Runs the kernels of the table on the emulator and compares each case with the definition in double.
//   emulator [part of a kernel's name] [--part i/n] [--case n] [--random n] [--stop]
// Prints a line a case, with the error over its bound for each result, and exits with 1 when one is wrong.
// --part: every n-th case; --case: this one; --random: how many random ones; --stop: at the first wrong one.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cases.h"
#include "dispatch.h"
#include "reference.h"
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

// Largest error of a result over its bound; infinite when something was written that should not be.
class Comparison {
 public:
  std::string text;
  bool right = true;

  void add(const char* name, double ratio) {
    char piece[64];
    snprintf(piece, sizeof piece, " %s %.2f", name, ratio);
    text += piece;
    right &= ratio <= 1;
  }
};

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
  const int64_t offset = (static_cast<const uint8_t*>(x.view.data) - bytes) / size;
  std::vector<bool> checked(elements);
  double worst = 0;
  for (int64_t b = 0; b < p.options.batch; ++b)
    for (int64_t i = 0; i < rows.allotted[b]; ++i)
      for (int64_t h = 0; h < x.heads; ++h)
        for (int64_t column = 0; column < x.columns; ++column) {
          const int64_t at = offset + x.index(p.tensor_batch(b), rows.first[b] + i, h, column);
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

// Runs the kernel; the error of the launch, empty if there was none.
template <class Params>
std::string launch(const Instance<Params>& kernel, const Problem& problem, Schedule schedule) {
  Params p = problem.params();
  p.workspace = kernel.workspace(p);
  const Memory scratch(p.workspace.shared_bytes);
  p.workspace.shared = scratch.data();
  set_schedule(schedule);
  const int code = kernel.launch(p, nullptr);
  const std::string error = take_error();
  return code == 0 ? error : "launch error " + std::to_string(code);
}

// The results of a deterministic call do not depend on who comes first.
template <class Params>
bool repeats(const Instance<Params>& kernel, const Case& c, DType dtype, unsigned seed, const Problem& first,
             Schedule schedule) {
  Problem again(c, dtype, seed);
  if constexpr (std::is_same_v<Params, BackwardParams>)
    for (Tensor Problem::* x : {&Problem::out, &Problem::lse})
      memcpy((again.*x).memory->data(), (first.*x).memory->data(), (first.*x).memory->bytes());
  if (!launch(kernel, again, schedule).empty()) return false;
  for (Tensor Problem::* x : {&Problem::out, &Problem::lse, &Problem::dq, &Problem::dk, &Problem::dv})
    if (memcmp((first.*x).memory->data(), (again.*x).memory->data(), (again.*x).memory->bytes()))
      return false;
  return !memcmp(first.dbias->data(), again.dbias->data(), again.dbias->bytes());
}

template <class Params>
bool run_case(const Instance<Params>& kernel, const Case& c, DType dtype, int number) {
  constexpr bool kBackward = std::is_same_v<Params, BackwardParams>;
  static const Schedule schedules[] = {
      {Order::greedy, 1}, {Order::round_robin, 3}, {Order::greedy_backwards, 2}};
  static const char* const names[] = {"greedy", "round robin", "greedy backwards"};
  Problem problem(c, dtype, number);
  if (needs(static_cast<Params>(problem.params())) & ~kernel.serves) return true;
  printf("%s %d, %s: %s:", kernel.name, number, names[number % 3], c.text().c_str());
  fflush(stdout);
  Reference reference(problem, kBackward);
  Comparison result;
  std::string error = launch(kernel, problem, schedules[number % 3]);
  if (error.empty()) {
    if constexpr (kBackward)
      compare_backward(problem, reference, result);
    else
      compare_forward(problem, reference, result);
    if ((c.deterministic || !kBackward) &&
        !repeats(kernel, c, dtype, number, problem, schedules[(number + 1) % 3]))
      error = "another order of the warps gives another result";
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
void run_kernel(const Instance<Params>& kernel, const Arguments& arguments, Counts& counts) {
  const DType dtype = static_cast<DType>(__builtin_ctz(kernel.dtypes));  // CUDA kernels serve one
  const auto cases = make_cases(static_cast<int>(kernel.head_dim), static_cast<int>(kernel.head_dim_v),
                                kernel.serves & set_of(Need::softcap), arguments.random_cases);
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
      run_kernel(*kernel, arguments, counts);
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
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  printf("%d cases, %d wrong, %.1f s\n", counts.cases, counts.wrong, seconds.count());
  return counts.wrong != 0 || counts.cases == 0;
}
