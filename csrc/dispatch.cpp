#include "dispatch.h"

#include <algorithm>

#include "common/mask.h"
#include "common/scheduler.h"

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

constexpr int64_t kFewQueries = 128;

constexpr uint32_t need_if(bool needed, Need need) { return needed ? set_of(need) : 0; }

// What the layout of a tensor of this shape needs; the stride of a dimension of size 1 does not count.
uint32_t needs(const Tensor4& x, int64_t batch, int64_t rows, int64_t heads, DType dtype) {
  constexpr int64_t kTmaStride = int64_t{1} << 40, kTmaSize = int64_t{1} << 31;
  const int64_t bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
  const struct {
    int64_t size, stride;
  } dims[] = {{batch, x.batch}, {rows, x.row}, {heads, x.head}};
  bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0, addressed = true;
  for (const auto& dim : dims) {
    if (dim.size <= 1) continue;
    const int64_t stride = dim.stride * bytes;
    aligned &= stride % 16 == 0;
    addressed &= stride > 0 && stride < kTmaStride && dim.size < kTmaSize;
  }
  return need_if(!aligned, Need::alignment) | need_if(!addressed, Need::addressing);
}

uint32_t needs(const Tensor4& x, const Lengths& rows, int64_t heads, const ForwardParams& p) {
  return needs(x, rows.cu ? 1 : p.batch, rows.total, heads, p.dtype);
}

// Is there too little for the largest tiles, which fetch keys less often, but leave more rows empty, more
// scores masked and more multiprocessors idle at the end?  The limits are measured (docs/sm90_forward.md).
// What becomes of a packed sequence shall not depend on the others.
bool small_tiles(const ForwardParams& p) {
  constexpr int64_t kQueries = 1024, kRows = 1 << 17, kKeys = 2048;
  const Score& score = p.score;
  const int64_t queries = p.seqlen_q.rows;
  const KeyRange seen =
      visible_keys(queries / 2, queries, p.seqlen_k.rows, score.window_left, score.window_right);
  return p.batch_invariant || p.seqlen_q.cu || queries < kQueries || queries * p.heads_q * p.batch < kRows ||
         seen.last - seen.first < kKeys;
}

// All but the layouts of K and V.
uint32_t needs_beside_keys(const ForwardParams& p) {
  const Score& score = p.score;
  return need_if(score.softcap != 0, Need::softcap) | need_if(score.alibi.data, Need::alibi) |
         need_if(score.bias.data, Need::bias) | need_if(score.mask.data, Need::mask) |
         need_if(p.dropout.seed, Need::dropout) | need_if(score.scale <= 0, Need::scale) |
         need_if(p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0, Need::head_dim) |
         need_if(p.batch_invariant || p.seqlen_q.cu || p.seqlen_q.rows > kFewQueries, Need::many_queries) |
         need_if(p.max_logit.data, Need::max_logit) | needs(p.q, p.seqlen_q, p.heads_q, p) |
         needs(p.out, p.seqlen_q, p.heads_q, p);
}

uint32_t needs_with_keys(const ForwardParams& p) {
  return needs_beside_keys(p) | needs(p.k, p.seqlen_k, p.heads_k, p) | needs(p.v, p.seqlen_k, p.heads_k, p);
}

// Are there too few tiles of queries, all keys of which go through one block, to occupy the device, or too
// few rows in a tile?  The limits are measured (docs/decode.md).  Whoever forces a family gets it all the
// same.
bool few_rows(const DecodeParams& p) {
  if (!family().empty()) return false;
  const int64_t kTileRows = 128, kSmallTile = p.head_dim > 64 && p.head_dim <= 128 ? 16 : 8;
  const int64_t together = p.seqlen_q.cu ? 1 : neighbours_in_tile(p.heads_q / p.heads_k);
  const int64_t queries = p.seqlen_q.cu ? p.seqlen_q.total / std::max<int64_t>(1, p.batch) : p.seqlen_q.rows;
  const int64_t tiles = divide_up(queries * together, kTileRows) * (p.heads_q / together) * p.batch;
  return queries * together <= kSmallTile || 5 * tiles < p.device.processors;
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

uint32_t needs(const ForwardParams& p) {
  return needs_with_keys(p) | need_if(small_tiles(p), Need::small_tiles);
}

uint32_t needs(const DecodeParams& p) {
  constexpr int64_t kSmallTile = 8, kTile = 16, kWide = 256, kSlab = 64, kGroup = 8;
  const int64_t rows = p.seqlen_q.rows * (p.heads_q / p.heads_k), page = p.cache.page_size;
  const bool any = p.batch_invariant || p.seqlen_q.cu, paged = p.cache.page_table;
  const auto of_cache = [&](const Tensor4& x) {
    return needs(x, p.cache.entries, paged ? page : p.seqlen_k.rows, p.heads_k, p.dtype);
  };
  const bool in_keys = p.v.data == p.k.data && p.v.batch == p.k.batch && p.v.row == p.k.row &&
                       p.v.head == p.k.head && p.head_dim_v <= p.head_dim;
  return (needs_beside_keys(p) & ~set_of(Need::many_queries)) | of_cache(p.k) | of_cache(p.v) |
         need_if(any || rows > kTile, Need::many_queries) |
         need_if(any || rows > kSmallTile, Need::many_rows) |
         need_if(!in_keys || p.head_dim <= kWide || p.head_dim % kSlab != 0, Need::own_values) |
         need_if(paged && page % kGroup != 0, Need::odd_pages) | need_if(p.cache.leftpad, Need::leftpad) |
         need_if(p.batch_invariant || p.splits > 0 || few_rows(p), Need::few_rows);
}

uint32_t needs(const BackwardParams& p) {
  return needs_with_keys(p) | needs(p.dout, p.seqlen_q, p.heads_q, p);
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

enum class Reason { none, device, forced, level, image, dtype, head_dim, need, length, shared };

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
  if (!(row.dtypes & set_of(problem.dtype))) return Reason::dtype;
  if ((row.head_dim && problem.head_dim > row.head_dim) ||
      (row.head_dim_v && problem.head_dim_v > row.head_dim_v))
    return Reason::head_dim;
  // Small tiles are only faster: whoever names a kernel gets it.
  const uint32_t waived = family() == row.name ? set_of(Need::small_tiles) : 0;
  if (problem.needs & ~row.serves & ~waived) return Reason::need;
  if (row.head_dim && problem.longest >= kLongest) return Reason::length;
  if (row.shared_bytes > problem.shared_bytes) return Reason::shared;
  return Reason::none;
}

std::string images_text(const Family& family) {
  std::string text;
  for (const int* image = family.images; *image; ++image) text += version(*image) + ", ";
  return family.ptx ? text + "PTX of " + version(family.ptx) : text.substr(0, text.size() - 2);
}

std::string first_text(uint32_t needs) {
  const auto* need = kNeeds;
  for (; needs % 2 == 0; needs /= 2) ++need;
  return need->second;
}

std::string dtypes_text(uint32_t dtypes) {
  std::string text;
  for (const auto& [name, type] : kDTypeNames)
    if (dtypes & set_of(type)) text += std::string(text.empty() ? "" : " and ") + name;
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
    case Reason::need:
      return "does not serve " + first_text(problem.needs & ~row.serves);
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
