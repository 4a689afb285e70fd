#include "dispatch.h"

#include <algorithm>

namespace flashattn {

namespace {

std::string& family() {
  static std::string forced;
  return forced;
}

std::vector<const Family*>& added() {
  static std::vector<const Family*> families;
  return families;
}

template <class Params>
std::vector<const Instance<Params>*> list(Rows<Params> row) {
  std::vector<const Instance<Params>*> rows;
  while (*row) rows.push_back(*row++);
  return rows;
}

template <class Params>
std::vector<const Instance<Params>*>& rows() {
  static std::vector<const Instance<Params>*> rows = list(std::get<Rows<Params>>(tables));
  return rows;
}

template <class Params>
void put_first(const Family& family) {
  const auto more = list(std::get<Rows<Params>>(family.tables));
  rows<Params>().insert(rows<Params>().begin(), more.begin(), more.end());
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether base and strides are multiples of 16 bytes; the stride of a dimension of size 1 does not count.
bool in_vectors(const Tensor4& x, const ForwardParams& p, int64_t rows, int64_t heads) {
  const int64_t size = p.dtype == DType::f64 ? 8 : p.dtype == DType::f32 ? 4 : 2;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (p.batch <= 1 || x.batch * size % 16 == 0) &&
         (rows <= 1 || x.row * size % 16 == 0) && (heads <= 1 || x.head * size % 16 == 0);
}

}  // namespace

void force_family(const std::string& name) { family() = name; }
const std::string& forced_family() { return family(); }

std::string version(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

bool& debug_checks() {
  static bool on = false;
  return on;
}

template <class Params>
const std::vector<const Instance<Params>*>& instances() {
  return rows<Params>();
}
const std::vector<const Family*>& families() { return added(); }

void add_family(const Family* family) {
  added().insert(added().begin(), family);
  put_first<ForwardParams>(*family);
  put_first<BackwardParams>(*family);
  put_first<DecodeParams>(*family);
}

CudaDevice cuda_device(int ordinal) {
  return added().empty() ? CudaDevice{} : added().front()->device(ordinal);
}

Reasons*& explanation() {
  thread_local Reasons* reasons = nullptr;
  return reasons;
}

const char* beyond_plain(const ForwardParams& p) {
  if (p.score.softcap != 0) return "softcap";
  if (p.score.alibi.data) return "alibi_slopes";
  if (p.score.bias.data) return "bias";
  if (p.score.mask.data) return "mask";
  if (p.dropout.seed) return "dropout";
  if (p.score.scale <= 0) return "a scale that is not positive";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "a head dim that is not a multiple of 8";
  const bool in_16_bytes =
      in_vectors(p.q, p, p.seqlen_q.total, p.heads_q) && in_vectors(p.k, p, p.seqlen_k.total, p.heads_k) &&
      in_vectors(p.v, p, p.seqlen_k.total, p.heads_k) && in_vectors(p.out, p, p.seqlen_q.total, p.heads_q);
  return in_16_bytes ? nullptr : "a tensor whose base or strides are not multiples of 16 bytes";
}

const char* beyond_plain(const BackwardParams& p) {
  ForwardParams with_dout = p;
  with_dout.out = p.dout;
  const char* text = beyond_plain(static_cast<const ForwardParams&>(p));
  return text ? text : beyond_plain(with_dout);
}

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

namespace {

// Kernels for a tile of head dims count the rows of a sequence in 32 bits.
constexpr int64_t kLongest = int64_t{1} << 30;

enum class Reason { none, device, forced, level, image, dtype, head_dim, plain, length, shared };

bool has_image(const Family& family, int capability) {
  for (const int* image = family.images; *image; ++image)
    if (*image / 10 == capability / 10 && *image <= capability) return true;
  return family.ptx && family.ptx <= capability;
}

template <class Params>
Reason reason(const Instance<Params>& row, const Problem& problem) {
  if ((problem.device == Device::cuda) != (row.module != nullptr)) return Reason::device;
  if (!family().empty() && family() != row.family && family() != row.name) return Reason::forced;
  if (row.level > problem.level) return Reason::level;
  if (row.module && !has_image(*row.module, problem.level)) return Reason::image;
  if (!(row.dtypes & dtype_set(problem.dtype))) return Reason::dtype;
  if ((row.head_dim && problem.head_dim > row.head_dim) ||
      (row.head_dim_v && problem.head_dim_v > row.head_dim_v))
    return Reason::head_dim;
  if (!row.general && problem.beyond_plain) return Reason::plain;
  if (row.head_dim && problem.longest >= kLongest) return Reason::length;
  if (row.shared_bytes > problem.shared_bytes) return Reason::shared;
  return Reason::none;
}

std::string images_text(const Family& family) {
  std::string text;
  for (const int* image = family.images; *image; ++image) text += version(*image) + ", ";
  return family.ptx ? text + "PTX of " + version(family.ptx) : text.substr(0, text.size() - 2);
}

std::string dtypes_text(uint32_t dtypes) {
  std::string text;
  for (const auto& [name, type] : kDTypeNames)
    if (dtypes & dtype_set(type)) text += std::string(text.empty() ? "" : " and ") + name;
  return text;
}

}  // namespace

template <class Params>
std::string why_not(const Instance<Params>& row, const Problem& problem) {
  switch (reason(row, problem)) {
    case Reason::none:
      return "";
    case Reason::device:
      return "runs on another kind of device";
    case Reason::forced:
      return family() + " is forced";
    case Reason::level:
      return row.module ? "needs compute capability " + version(row.level) + " or newer, this is " +
                              version(problem.level)
                        : "needs a CPU with the " + std::string(row.family) + " instructions";
    case Reason::image:
      return "was not built for compute capability " + version(problem.level) + ", only for " +
             images_text(*row.module);
    case Reason::dtype:
      return "serves " + dtypes_text(row.dtypes) + " only";
    case Reason::head_dim:
      return "serves head dims (D, Dv) up to (" + std::to_string(row.head_dim) + ", " +
             std::to_string(row.head_dim_v) + ")";
    case Reason::plain:
      return "does not serve " + std::string(problem.beyond_plain);
    case Reason::length:
      return "serves sequences of fewer than " + std::to_string(kLongest) + " rows";
    case Reason::shared:
      return "needs " + std::to_string(row.shared_bytes) +
             " bytes of shared memory a block, the device has " + std::to_string(problem.shared_bytes);
  }
  return "";
}

template <class Params>
const Instance<Params>* select(const Problem& problem) {
  for (const auto* row : instances<Params>())
    if (reason(*row, problem) == Reason::none) return row;
  return nullptr;
}

template <class Params>
Reasons reasons(const Problem& problem) {
  Reasons every;
  for (const auto* row : instances<Params>())
    if (reason(*row, problem) != Reason::device) every.emplace_back(row->name, why_not(*row, problem));
  return every;
}

template const std::vector<const Instance<ForwardParams>*>& instances();
template const std::vector<const Instance<BackwardParams>*>& instances();
template const std::vector<const Instance<DecodeParams>*>& instances();
template std::string why_not(const Instance<ForwardParams>&, const Problem&);
template std::string why_not(const Instance<BackwardParams>&, const Problem&);
template std::string why_not(const Instance<DecodeParams>&, const Problem&);
template const Instance<ForwardParams>* select(const Problem&);
template const Instance<BackwardParams>* select(const Problem&);
template const Instance<DecodeParams>* select(const Problem&);
template Reasons reasons<ForwardParams>(const Problem&);
template Reasons reasons<BackwardParams>(const Problem&);
template Reasons reasons<DecodeParams>(const Problem&);

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
