// Which kernel serves a problem: the first row of the table that fits.  Pure host code.
#pragma once

#include <string>
#include <vector>

#include "params.h"

namespace flashattn {

// What runs the kernel.  CPU levels are the widths that the CPU rows are compiled for.
enum class Device : uint8_t { cpu };
enum CpuLevel : int { kCpuBaseline = 0, kCpuAvx2 = 2, kCpuAvx512 = 4 };

struct Problem {
  Device device;
  int level;  // of the device: a CpuLevel
  DType dtype;
};

// A row: what the host knows of one compiled kernel.
template <class Params>
struct Instance {
  const char* name;
  const char* family;
  Device device;
  int level;                              // least level of the device
  Workspace (*workspace)(const Params&);  // bytes that a launch needs
  void (*launch)(const Params&);
};

// Generated from csrc/instances.py, newest family first.
template <class Params>
const std::vector<Instance<Params>>& instances();
template <>
const std::vector<Instance<ForwardParams>>& instances<ForwardParams>();
template <>
const std::vector<Instance<BackwardParams>>& instances<BackwardParams>();
template <>
const std::vector<Instance<DecodeParams>>& instances<DecodeParams>();

// Empty when the row can serve the problem.
template <class Params>
std::string why_not(const Instance<Params>& instance, const Problem& problem);

// The first row that fits, null when none does.
template <class Params>
const Instance<Params>* select(const Problem& problem);

// Every row and why it does not fit, a line each.
template <class Params>
std::string refusals(const Problem& problem);

// Only rows of this family serve from now on; empty: any.
void force_family(const std::string& family);
const std::string& forced_family();

int cpu_level();

struct Splits {
  int64_t count, keys;  // each split holds `keys` keys, a multiple of kSplitKeys
};
constexpr int64_t kSplitKeys = 128;            // the blocks of keys that kernels work on
constexpr int64_t kInvariantSplitKeys = 1024;  // of a split when results must not depend on the batch

// How to split the keys of a decode: enough splits to occupy the processors, none shorter than it is worth.
Splits decode_splits(int64_t tiles, int64_t longest_k, int64_t processors, int64_t wanted,
                     bool batch_invariant);

}  // namespace flashattn
