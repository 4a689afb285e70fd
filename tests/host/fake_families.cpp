// Families without kernels: tests add them to a process of their own and look at what the dispatcher chooses.
// Compiled with -DCONTRACT, the name of a capsule that fits.
#include <pybind11/pybind11.h>

#include "dispatch.h"

namespace flashattn {
namespace {

template <class Params>
Workspace workspace(const Params&) {
  return {};
}
template <class Params>
int launch(const Params&, void*) {
  return 0;
}
CudaDevice device(int) { return {90, 132, 227 << 10}; }
const char* error_text(int) { return "no device"; }

template <class Params>
constexpr Instance<Params> row(const char* name, const char* family, const Family* module, int level,
                               uint32_t dtypes, int64_t head_dim, uint32_t serves, int64_t shared_bytes) {
  return {name,          family,   module, level,        dtypes,
          head_dim,      head_dim, serves, shared_bytes, workspace<Params>,
          launch<Params>};
}

constexpr uint32_t kHalf = set_of(DType::f16), kBoth = set_of(DType::f16, DType::bf16);
constexpr uint32_t kEvery = set_of(DType::f32, DType::f64, DType::f16, DType::bf16);
constexpr uint32_t kSmall = set_of(Need::small_tiles), kMany = kSmall | set_of(Need::many_queries);
constexpr uint32_t kSome = kMany | set_of(Need::addressing, Need::max_logit);

extern const Family sm75, sm80, plain_cpu;
const Instance<ForwardParams> kNew = row<ForwardParams>("new", "sm80", &sm80, 80, kBoth, 64, kSome, 48 << 10);
const Instance<ForwardParams> kWide =
    row<ForwardParams>("wide", "sm80", &sm80, 80, kBoth, 128, kSome, 160 << 10);
const Instance<ForwardParams> kRest = row<ForwardParams>("rest", "sm80", &sm80, 80, kEvery, 0, kEveryNeed, 0);
const Instance<ForwardParams> kOld =
    row<ForwardParams>("old", "sm75", &sm75, 75, kHalf, 128, kEveryNeed, 64 << 10);
const Instance<ForwardParams> kLarge =
    row<ForwardParams>("large", "plain_cpu", nullptr, 0, kEvery, 0, set_of(Need::many_queries), 0);
const Instance<ForwardParams> kBare =
    row<ForwardParams>("bare", "plain_cpu", nullptr, 0, kEvery, 0, kSmall, 0);
const Instance<ForwardParams> kLong =
    row<ForwardParams>("long", "plain_cpu", nullptr, 0, kEvery, 0, kMany, 0);
const Instance<ForwardParams> kPlain =
    row<ForwardParams>("plain", "plain_cpu", nullptr, 0, kEvery, 0, kSome, 0);
const Instance<BackwardParams> kBareBackward =
    row<BackwardParams>("bare_backward", "plain_cpu", nullptr, 0, kEvery, 0, 0, 0);
const Instance<BackwardParams> kPlainBackward =
    row<BackwardParams>("plain_backward", "plain_cpu", nullptr, 0, kEvery, 0, kSome, 0);
const Instance<DecodeParams> kLatent = row<DecodeParams>("latent", "plain_cpu", nullptr, 0, kEvery, 0,
                                                         kMany | set_of(Need::many_rows, Need::few_rows), 0);

const Instance<ForwardParams>* const kForward80[] = {&kNew, &kWide, &kRest, nullptr};
const Instance<ForwardParams>* const kForward75[] = {&kOld, nullptr};
const Instance<ForwardParams>* const kForwardCpu[] = {&kLarge, &kBare, &kLong, &kPlain, nullptr};
const Instance<BackwardParams>* const kBackwardCpu[] = {&kBareBackward, &kPlainBackward, nullptr};
const Instance<BackwardParams>* const kNoBackward[] = {nullptr};
const Instance<DecodeParams>* const kDecodeCpu[] = {&kLatent, nullptr};
const Instance<DecodeParams>* const kNoDecode[] = {nullptr};
const int kImages75[] = {75, 0}, kImages80[] = {80, 90, 120, 0}, kNoImages[] = {0};
const Family sm75{"sm75", kImages75, 0, {kForward75, kNoBackward, kNoDecode}, device, error_text};
const Family sm80{"sm80", kImages80, 90, {kForward80, kNoBackward, kNoDecode}, device, error_text};
const Family plain_cpu{"plain_cpu", kNoImages, 0, {kForwardCpu, kBackwardCpu, kDecodeCpu},
                       device,      error_text};

}  // namespace
}  // namespace flashattn

PYBIND11_MODULE(fakes, m) {
  m.attr("sm75") = pybind11::capsule(&flashattn::sm75, CONTRACT);
  m.attr("sm80") = pybind11::capsule(&flashattn::sm80, CONTRACT);
  m.attr("plain_cpu") = pybind11::capsule(&flashattn::plain_cpu, CONTRACT);
  m.attr("stale") = pybind11::capsule(&flashattn::sm80, "flashattn family of other sources");
}
