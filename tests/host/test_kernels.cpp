// The forward kernels without torch: with equal scores each output row is the mean of its visible V rows and
// the LSE the logarithm of their number.  Checks each row of the table that this CPU runs, float and double.
#include <omp.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "dispatch.h"

using namespace flashattn;

namespace {

constexpr int64_t kBatch = 2, kSeqQ = 70, kSeqK = 133, kHeadsQ = 4, kHeadsK = 2, kDim = 24, kDimV = 40;

// A contiguous (B, S, H, width) tensor.
template <class T>
Tensor4 view(std::vector<T>& data, int64_t rows, int64_t heads, int64_t width) {
  return {data.data(), rows * heads * width, heads * width, width};
}

// Largest difference from the closed form; causal, so query i sees the keys up to i + Sk - Sq.
template <class T>
double error(const Instance<ForwardParams>& kernel, DType dtype) {
  std::vector<T> q(kBatch * kSeqQ * kHeadsQ * kDim), k(kBatch * kSeqK * kHeadsK * kDim);
  std::vector<T> v(kBatch * kSeqK * kHeadsK * kDimV), out(kBatch * kSeqQ * kHeadsQ * kDimV, T(NAN));
  std::vector<T> lse(kBatch * kHeadsQ * kSeqQ, T(NAN));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<T>(i / (kHeadsK * kDimV) % kSeqK);  // its key

  ForwardParams p{};
  p.q = view(q, kSeqQ, kHeadsQ, kDim);
  p.k = view(k, kSeqK, kHeadsK, kDim);
  p.v = view(v, kSeqK, kHeadsK, kDimV);
  p.out = view(out, kSeqQ, kHeadsQ, kDimV);
  p.lse = {lse.data(), kHeadsQ * kSeqQ, kSeqQ, 1};
  p.batch = kBatch, p.heads_q = kHeadsQ, p.heads_k = kHeadsK, p.head_dim = kDim, p.head_dim_v = kDimV;
  p.dtype = dtype;
  p.seqlen_q.rows = kSeqQ, p.seqlen_q.total = kBatch * kSeqQ;
  p.seqlen_k.rows = kSeqK, p.seqlen_k.total = kBatch * kSeqK;
  p.score.scale = 1, p.score.window_left = -1, p.score.window_right = 0;
  p.dropout.keep_below = 1 << 16;
  p.workspace = kernel.workspace(p);
  p.workspace.threads = omp_get_max_threads();
  constexpr int64_t kAlign = 64;
  const int64_t private_bytes = p.workspace.threads * p.workspace.private_bytes;
  std::vector<char> scratch(p.workspace.shared_bytes + private_bytes + 2 * kAlign);
  const auto aligned = [](char* at) {
    return at + (kAlign - reinterpret_cast<uintptr_t>(at) % kAlign) % kAlign;
  };
  p.workspace.shared = aligned(scratch.data());
  p.workspace.private_data = aligned(static_cast<char*>(p.workspace.shared) + p.workspace.shared_bytes);
  kernel.launch(p, nullptr);

  double worst = 0;
  const auto compare = [&worst](double ours, double right) {
    worst = std::isnan(ours) ? INFINITY : std::fmax(worst, std::fabs(ours - right));
  };
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t row = 0; row < kSeqQ; ++row)
      for (int64_t head = 0; head < kHeadsQ; ++head) {
        const double visible = static_cast<double>(row + 1 + kSeqK - kSeqQ);
        for (int64_t column = 0; column < kDimV; ++column)
          compare(out[((b * kSeqQ + row) * kHeadsQ + head) * kDimV + column], (visible - 1) / 2);
        compare(lse[(b * kHeadsQ + head) * kSeqQ + row], std::log(visible));
      }
  return worst;
}

bool check(const char* name, const char* type, double error, double bound) {
  std::printf("%s %s: error %.1e%s\n", name, type, error, error <= bound ? "" : "  FAILED");
  return error <= bound;
}

// Strides and sizes that no tensor in the memory of a test has.
bool check_addressing() {
  constexpr int64_t kLong = int64_t{1} << 40;
  ForwardParams p{};
  p.batch = p.heads_q = p.heads_k = 2, p.head_dim = p.head_dim_v = 64, p.dtype = DType::f16;
  p.score.scale = 1, p.score.window_left = p.score.window_right = -1;
  p.seqlen_q.total = p.seqlen_k.total = 10;
  p.q = p.k = p.v = p.out = {nullptr, 640, 128, 64};
  const auto with = [&p](int64_t batch, int64_t row, int64_t total) {
    ForwardParams changed = p;
    changed.k.batch = batch, changed.k.row = row, changed.seqlen_k.total = total;
    return needs(changed) & ~set_of(Need::small_tiles);  // there are few rows
  };
  const uint32_t far = set_of(Need::addressing);
  const bool right = with(640, 128, 10) == 0 && with(kLong / 2 - 8, 128, 10) == 0 &&
                     with(kLong / 2, 128, 10) == far && with(640, kLong / 2, 10) == far &&
                     with(640, kLong / 2, 1) == 0 && with(640, 128, kLong >> 9) == far &&
                     with(640, 0, 10) == far && with(0, 128, 10) == far && with(640, 4, 10) != 0;
  std::printf("needs of strides and sizes%s\n", right ? "" : "  FAILED");
  return right;
}

}  // namespace

int main() {
  bool right = check_addressing();
  int checked = 0;
  for (const auto* kernel : instances<ForwardParams>()) {
    const std::string reason =
        why_not(*kernel, {Device::cpu, cpu_level(), 0, DType::f32, kDim, kDimV, 0, kSeqK});
    if (!reason.empty()) {
      std::printf("%s: %s\n", kernel->name, reason.c_str());
      continue;
    }
    constexpr double kLargest = (kSeqK - 1) / 2.0;  // mean of all keys
    right &= check(kernel->name, "float", error<float>(*kernel, DType::f32), kLargest * 1e-6);
    right &= check(kernel->name, "double", error<double>(*kernel, DType::f64), kLargest * 1e-14);
    ++checked;
  }
  return right && checked > 0 ? 0 : 1;
}
