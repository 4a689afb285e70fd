#include "dispatch.h"

#include <algorithm>

namespace flashattn {

namespace {

std::string& family() {
  static std::string forced;
  return forced;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void force_family(const std::string& name) { family() = name; }
const std::string& forced_family() { return family(); }

int cpu_level() {
#if defined(__x86_64__)
  static const int level = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? kCpuAvx512 : avx2 ? kCpuAvx2 : kCpuBaseline;
  }();
  return level;
#else
  return kCpuBaseline;
#endif
}

template <class Params>
std::string why_not(const Instance<Params>& instance, const Problem& problem) {
  if (!family().empty() && family() != instance.family) return "family " + family() + " is forced";
  if (instance.device != problem.device) return "runs on another kind of device";
  if (instance.level > problem.level)
    return "needs a CPU with the " + std::string(instance.family) + " instructions";
  return "";
}

template <class Params>
const Instance<Params>* select(const Problem& problem) {
  for (const auto& instance : instances<Params>())
    if (why_not(instance, problem).empty()) return &instance;
  return nullptr;
}

template <class Params>
std::string refusals(const Problem& problem) {
  std::string lines;
  for (const auto& instance : instances<Params>())
    lines += std::string("\n  ") + instance.name + ": " + why_not(instance, problem);
  return lines;
}

template std::string why_not(const Instance<ForwardParams>&, const Problem&);
template std::string why_not(const Instance<BackwardParams>&, const Problem&);
template std::string why_not(const Instance<DecodeParams>&, const Problem&);
template const Instance<ForwardParams>* select(const Problem&);
template const Instance<BackwardParams>* select(const Problem&);
template const Instance<DecodeParams>* select(const Problem&);
template std::string refusals<ForwardParams>(const Problem&);
template std::string refusals<BackwardParams>(const Problem&);
template std::string refusals<DecodeParams>(const Problem&);

Splits decode_splits(int64_t tiles, int64_t longest_k, int64_t processors, int64_t wanted,
                     bool batch_invariant) {
  const int64_t blocks = std::max<int64_t>(1, divide_up(longest_k, kSplitKeys));
  int64_t keys;
  if (batch_invariant) {
    keys = kInvariantSplitKeys;
  } else {
    // Four tasks a processor even out; a split under 256 keys costs more in the merge than it gains.
    const int64_t useful = std::max<int64_t>(1, blocks * kSplitKeys / 256);
    const int64_t automatic = std::min(useful, divide_up(4 * processors, std::max<int64_t>(1, tiles)));
    const int64_t splits = std::clamp<int64_t>(wanted > 0                ? wanted
                                               : tiles >= 2 * processors ? 1
                                                                         : automatic,
                                               1, blocks);
    keys = divide_up(blocks, splits) * kSplitKeys;
  }
  return {std::max<int64_t>(1, divide_up(longest_k, keys)), keys};
}

}  // namespace flashattn
