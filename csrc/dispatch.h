// Which kernel serves a problem: the first row of the table that fits.  Pure host code.
#pragma once

#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "instance.h"

namespace flashattn {

// What runs the kernel.  CPU levels are the widths that the CPU rows are compiled for.
enum class Device : uint8_t { cpu, cuda };
enum CpuLevel : int { kCpuBaseline = 0, kCpuAvx2 = 2, kCpuAvx512 = 4 };

struct Problem {
  Device device;
  int level;             // of the device: a CpuLevel or compute capability
  int64_t shared_bytes;  // that a block may have on the device
  DType dtype;
  int64_t head_dim, head_dim_v;
  uint32_t needs;   // bits of Need
  int64_t longest;  // rows of a sequence, of q or k
};

// What the call asks of its kernel, as bits of Need.
uint32_t needs(const ForwardParams& p);
uint32_t needs(const BackwardParams& p);
uint32_t needs(const DecodeParams& p);

// In the order of Need: its name in csrc/instances.py, and what a row that lacks it does not serve.
constexpr std::pair<const char*, const char*> kNeeds[] = {
    {"softcap", "softcap"},
    {"alibi", "alibi_slopes"},
    {"bias", "bias"},
    {"mask", "mask"},
    {"dropout", "dropout"},
    {"scale", "a scale that is not positive"},
    {"head_dim", "a head dim that is not a multiple of 8"},
    {"alignment", "a tensor whose base or strides are not multiples of 16 bytes"},
    {"many_queries", "packed sequences, batch_invariant or many queries"},
    {"small_tiles", "packed sequences, batch_invariant or too few queries and keys for large tiles"},
    {"many_rows", "more than 8 queries and heads of a KV head"},
    {"addressing", "a stride of 0 or too large for TMA"},
    {"max_logit", "return_max_logit"},
    {"own_values", "a v_cache that is not the first columns of a k_cache of 320, 384, .. columns"},
    {"odd_pages", "a page size that is not a multiple of 8"},
    {"leftpad", "cache_leftpad"},
    {"few_rows", "few queries, num_splits or batch_invariant, for which keys are divided"}};
static_assert(kEveryNeed == (1u << std::size(kNeeds)) - 1);

// As torch and users write them.
constexpr std::pair<const char*, DType> kDTypeNames[] = {
    {"float32", DType::f32}, {"float64", DType::f64}, {"float16", DType::f16}, {"bfloat16", DType::bf16}};
std::string version(int capability);

// Rows of the CUDA families, the last added first, then those of the CPU.
template <class Params>
const std::vector<const Instance<Params>*>& instances();
const std::vector<const Family*>& families();
void add_family(const Family* family);

// The device as the families see it; all zero when there is none.
CudaDevice cuda_device(int ordinal);

// Empty when the row can serve the problem.
template <class Params>
std::string why_not(const Instance<Params>& instance, const Problem& problem);

// The first row that fits, null when none does.
template <class Params>
const Instance<Params>* select(const Problem& problem);

// The name of every row for this kind of device and why it does not fit.
using Reasons = std::vector<std::pair<std::string, std::string>>;
template <class Params>
Reasons reasons(const Problem& problem);

// While this is not null, a call of this thread launches nothing and leaves its reasons there.
Reasons*& explanation();

// Only rows of this family, or the row of this name, serve from now on; empty: any.
void force_family(const std::string& family);
const std::string& forced_family();

// Whether the host reads length and page tensors of CUDA calls, which waits for the device, to check them.
bool& debug_checks();

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
