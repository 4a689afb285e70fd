// The torch surface: schemas, allocation, and one call into a kernel.  Arguments come as a stack of values in
// the order of the schema, because that is how the dispatcher holds them and because structs read better than
// functions of thirty arguments.
#include <ATen/Parallel.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <limits>

#include "dispatch.h"
#include "namespace.h"
#include "ops_checks.h"

namespace flashattn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- schemas ------------------------------------------------------------------------------------

const std::string kOptions =
    "float? scale, float softcap, bool causal, SymInt window_left, SymInt window_right, Tensor? "
    "alibi_slopes, "
    "Tensor? bias, Tensor? mask, Tensor? sink, float dropout_p, Tensor? seed, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? seqused_q, Tensor? seqused_k, "
    "bool deterministic, bool batch_invariant";

const std::string kDecodeOptions =
    "Tensor? cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx, Tensor? leftpad, Tensor? "
    "rotary_cos, "
    "Tensor? rotary_sin, bool rotary_interleaved, SymInt? v_head_dim, SymInt num_splits, bool "
    "batch_invariant, "
    "bool causal, SymInt window_left, SymInt window_right, float softcap, Tensor? alibi_slopes, Tensor? "
    "sink, "
    "float? scale, Tensor? cu_seqlens_q, SymInt? max_seqlen_q";

const std::string kForward = "forward(Tensor q, Tensor k, Tensor v, " + kOptions +
                             ", bool return_max_logit) -> (Tensor out, Tensor lse, Tensor max_logit)";
const std::string kForwardOut = "forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, " + kOptions +
                                ", bool return_max_logit) -> (Tensor lse, Tensor max_logit)";
const std::string kBackward =
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? dlse, " +
    kOptions + ", bool bias_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)";
const std::string kDoubleBackward =
    "double_backward(Tensor? ddq, Tensor? ddk, Tensor? ddv, Tensor? ddbias, Tensor? ddsink, Tensor dout, "
    "Tensor q, "
    "Tensor k, Tensor v, Tensor? dlse, " +
    kOptions +
    ") -> (Tensor ddout, Tensor dq, Tensor dk, Tensor dv, Tensor? ddlse, Tensor? dbias, Tensor? dsink)";
const std::string kDecode =
    "decode(Tensor q, Tensor k_cache, Tensor? v_cache, " + kDecodeOptions + ") -> (Tensor out, Tensor lse)";
const std::string kDecodeInPlace =
    "decode_(Tensor q, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor? k_new, Tensor? v_new, Tensor(c!) "
    "out, " +
    kDecodeOptions + ") -> Tensor lse";

// ---- launch -------------------------------------------------------------------------------------

std::string refusals(const Tensor& q, const Reasons& reasons) {
  std::string lines =
      reasons.empty() ? c10::str(" none of this operation is built for ", q.device().type()) : "";
  if (q.is_cuda() && families().empty()) lines += "; install with FLASHATTN_CUDA=on to build CUDA kernels";
  for (const auto& [name, reason] : reasons) lines += "\n  " + name + ": " + reason;
  return lines;
}

CudaDevice cuda_device_of(const Tensor& q) {
  return q.is_cuda() ? cuda_device(q.device().index()) : CudaDevice{};
}

bool nothing_to_do(const ForwardParams& p) { return p.batch == 0 || p.seqlen_q.rows == 0; }
bool nothing_to_do(const DecodeParams& p) {
  return p.batch == 0 || (p.seqlen_q.rows == 0 && p.new_rows == 0);
}

// Scratch memory of a launch; owns the result.
template <class Params>
Tensor allocate_workspace(Params& p, const Tensor& q, const Instance<Params>& instance) {
  const double work =
      static_cast<double>(p.seqlen_q.total) * p.heads_q * p.seqlen_k.rows * (p.head_dim + p.head_dim_v);
  constexpr double kWorthThreads = 1 << 18;  // multiply-adds that cost more than waking the threads
  Workspace need = instance.workspace(p);
  need.threads = q.is_cuda() || work < kWorthThreads ? 1 : at::get_num_threads();
  constexpr int64_t kAlign = 64;
  const int64_t shared = (need.shared_bytes + kAlign - 1) / kAlign * kAlign;
  const int64_t total = shared + need.threads * need.private_bytes;
  Tensor bytes;
  if (total > 0) {
    bytes = at::empty({total}, q.options().dtype(at::kByte));
    need.shared = bytes.data_ptr();
    need.private_data = static_cast<char*>(need.shared) + shared;
  }
  p.workspace = need;
  return bytes;
}

// Runs the kernel that serves the call, on a GPU in the current stream of q's device.
template <class Params>
void launch(Params& p, const Tensor& q) {
  const CudaDevice device = cuda_device_of(q);
  const Problem problem{q.is_cuda() ? Device::cuda : Device::cpu,
                        q.is_cuda() ? device.capability : cpu_level(),
                        device.shared_bytes,
                        p.dtype,
                        p.head_dim,
                        p.head_dim_v,
                        needs(p),
                        std::max(p.seqlen_q.rows, p.seqlen_k.rows)};
  if (Reasons* reasons_wanted = explanation()) {
    *reasons_wanted = reasons<Params>(problem);
    return;
  }
  const auto* instance = select<Params>(problem);
  TORCH_CHECK_NOT_IMPLEMENTED(instance, "no kernel serves this call:", refusals(q, reasons<Params>(problem)));
  if (nothing_to_do(p)) return;
  const Tensor workspace = allocate_workspace(p, q, *instance);
  void* stream = nullptr;
  c10::OptionalDeviceGuard guard;
  if (q.is_cuda()) {
    guard.reset_device(q.device());
    stream = c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(q.device()).native_handle();
  }
  const int error = instance->launch(p, stream);
  TORCH_CHECK(error == 0, instance->name, " failed to launch: ", instance->module->error_text(error));
}

// ---- operators ----------------------------------------------------------------------------------

Tensor new_tensor(const Tensor& q, at::IntArrayRef shape, at::ScalarType type, bool zero) {
  const auto options = q.options().dtype(type);
  return zero ? at::zeros(shape, options) : at::empty(shape, options);
}

// Fills out and returns lse and max_logit.
std::pair<Tensor, Tensor> run_forward(ForwardParams& p, const Tensor& q, const Tensor& out,
                                      bool return_max_logit) {
  const auto type = sum_type(q);
  const bool packed = p.seqlen_q.cu != nullptr;
  const auto options = q.options().dtype(type);
  Tensor lse =
      packed ? at::full(statistic_shape(q), -kInfinity, options) : at::empty(statistic_shape(q), options);
  p.out = view(out), p.lse = statistic(lse);
  if (!return_max_logit) {
    launch(p, q);
    return {lse, at::empty({0}, options)};
  }
  Tensor row_peaks = at::full(statistic_shape(q), -kInfinity, options);
  p.max_logit = statistic(row_peaks);
  launch(p, q);
  if (row_peaks.numel() == 0) return {lse, at::full({p.heads_q}, -kInfinity, options)};
  return {lse, packed ? row_peaks.amax(1) : row_peaks.amax({0, 2})};
}

void forward(const c10::OperatorHandle& op, Stack* stack) {
  Reader read(op, stack);
  const Tensor q = read.tensor(), k = read.tensor(), v = read.tensor();
  const Options o = read_options(read);
  read.flag();  // deterministic: the forward always is
  ForwardParams p{};
  p.batch_invariant = read.flag();
  fill(p, q, k, v, o);
  Tensor out = new_tensor(q, out_shape(q, p.head_dim_v), q.scalar_type(), o.cu_seqlens_q.has_value());
  auto [lse, max_logit] = run_forward(p, q, out, read.flag());
  torch::jit::push(*stack, out, lse, max_logit);
}

// Autograd notices that a tensor it saved was written to.
void mark_written(const Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

void forward_out(const c10::OperatorHandle& op, Stack* stack) {
  Reader read(op, stack);
  const Tensor q = read.tensor(), k = read.tensor(), v = read.tensor(), out = read.tensor();
  const Options o = read_options(read);
  read.flag();
  ForwardParams p{};
  p.batch_invariant = read.flag();
  fill(p, q, k, v, o);
  check_out(out, q, p.head_dim_v);
  auto [lse, max_logit] = run_forward(p, q, out, read.flag());
  mark_written(out);
  torch::jit::push(*stack, lse, max_logit);
}

void backward(const c10::OperatorHandle& op, Stack* stack) {
  Reader read(op, stack);
  Tensor dout = read.tensor();
  const Tensor q = read.tensor(), k = read.tensor(), v = read.tensor(), out = read.tensor(),
               lse = read.tensor();
  const MaybeTensor dlse = read.maybe_tensor();
  const Options o = read_options(read);
  BackwardParams p{};
  p.deterministic = read.flag(), read.flag();
  const bool bias_grad = read.flag() && o.bias.has_value();
  fill(p, q, k, v, o);
  if (dout.dim() > 0 && dout.stride(-1) != 1) dout = dout.contiguous();
  check_like("dout", dout, q);
  check_shape("dout", dout, out_shape(q, p.head_dim_v), "the shape of out");
  check_like("out", out, q);
  check_shape("out", out, out_shape(q, p.head_dim_v), "the shape of q with Dv");
  check_statistic("lse", lse, q);
  p.dout = const_view(dout), p.out = const_view(out), p.lse = statistic(lse);
  if (dlse) {
    check_statistic("dlse", *dlse, q);
    p.dlse = statistic(*dlse);
  }
  const bool some_q = o.cu_seqlens_q || o.seqused_q, some_k = o.cu_seqlens_k || o.seqused_k;
  Tensor dq = new_tensor(q, q.sizes(), q.scalar_type(), some_q);
  const bool zero_k = some_k || q.numel() == 0;  // nothing is launched without queries
  Tensor dk = new_tensor(q, k.sizes(), q.scalar_type(), zero_k),
         dv = new_tensor(q, v.sizes(), q.scalar_type(), zero_k);
  Tensor delta = new_tensor(q, statistic_shape(q), sum_type(q), false);
  Tensor dbias = new_tensor(q, bias_grad ? o.bias->sizes() : at::IntArrayRef{0}, sum_type(q), bias_grad);
  Tensor dsink =
      o.sink ? new_tensor(q, {p.heads_q}, at::kDouble, true) : new_tensor(q, {0}, sum_type(q), false);
  p.dq = view(dq), p.dk = view(dk), p.dv = view(dv), p.delta = statistic(delta);
  if (bias_grad)
    p.dbias = {dbias.data_ptr(), broadcast_stride(dbias, 0), broadcast_stride(dbias, 1),
               broadcast_stride(dbias, 2)};
  if (o.sink) p.dsink = dsink.data_ptr<double>();
  launch(p, q);
  if (bias_grad) dbias = dbias.to(o.bias->scalar_type());
  if (o.sink) dsink = dsink.to(o.sink->scalar_type());
  torch::jit::push(*stack, dq, dk, dv, dbias, dsink);
}

// Fills out and returns the LSE.
Tensor run_decode(const Tensor& q, const Tensor& k_cache, const MaybeTensor& v_cache,
                  const MaybeTensor& k_new, const MaybeTensor& v_new, MaybeTensor& out,
                  const DecodeOptions& o) {
  DecodeParams p{};
  const bool packed = o.score.cu_seqlens_q.has_value();
  check_query(q, packed);
  if (packed) check_integers("cu_seqlens_q", *o.score.cu_seqlens_q, q, -1);
  TORCH_CHECK_VALUE(!packed || o.score.cu_seqlens_q->size(0) >= 1,
                    "cu_seqlens_q has shape [0]: expected B + 1 numbers");
  p.batch = packed ? o.score.cu_seqlens_q->size(0) - 1 : q.size(0);
  p.heads_q = q.size(-2), p.head_dim = q.size(-1);
  p.dtype = to_dtype(q.scalar_type());
  p.q = const_view(q);
  p.seqlen_q = check_lengths("cu_seqlens_q", o.score.cu_seqlens_q, "", std::nullopt, "max_seqlen_q",
                             o.score.max_seqlen_q, q, q, p.batch);
  check_cache(p, q, k_cache, v_cache, o);
  check_new(p, q, k_cache, v_cache, k_new, v_new, o);
  const auto lengths = check_cache_lengths(p, q, o);
  check_rotary(p, q, lengths, o);
  check_score(p, o.score, q);
  TORCH_CHECK_VALUE(o.num_splits >= 0, "num_splits is ", o.num_splits, ": expected at least 0 (0 chooses)");
  TORCH_CHECK_VALUE(!o.batch_invariant || o.num_splits == 0, "num_splits is ", o.num_splits,
                    ": expected 0 with batch_invariant, whose splits have a fixed length");
  if (out) {
    check_out(*out, q, p.head_dim_v);
  } else {
    out = new_tensor(q, out_shape(q, p.head_dim_v), q.scalar_type(), packed);
  }
  const auto options = q.options().dtype(sum_type(q));
  Tensor lse =
      packed ? at::full(statistic_shape(q), -kInfinity, options) : at::empty(statistic_shape(q), options);
  p.out = view(*out), p.lse = statistic(lse);
  Tensor rotated;
  if (p.rotary.cos) {
    // Zeros: offsets that are none may lead to rows that nobody turns.
    rotated = new_tensor(q, q.sizes(), q.scalar_type(), packed);
    p.q_rotated = view(rotated);
  }
  p.device = cuda_device_of(q);
  p.batch_invariant = o.batch_invariant;
  if (q.is_cpu() || o.batch_invariant || o.num_splits > 0) {
    int64_t longest = q.is_cpu() ? 0 : p.seqlen_k.rows;
    for (const int64_t keys : lengths) longest = std::max(longest, keys);
    constexpr int64_t kTileRows = 128;  // about the query rows that share one pass over the keys
    const int64_t row_tiles = (p.seqlen_q.rows * (p.heads_q / p.heads_k) + kTileRows - 1) / kTileRows;
    const Splits splits = decode_splits(p.batch * p.heads_k * row_tiles, longest, at::get_num_threads(),
                                        o.num_splits, o.batch_invariant);
    p.splits = splits.count, p.keys_per_split = splits.keys;
  }
  launch(p, q);
  return lse;
}

void decode(const c10::OperatorHandle& op, Stack* stack) {
  Reader read(op, stack);
  const Tensor q = read.tensor(), k_cache = read.tensor();
  const MaybeTensor v_cache = read.maybe_tensor();
  MaybeTensor out;
  const Tensor lse = run_decode(q, k_cache, v_cache, {}, {}, out, read_decode_options(read));
  torch::jit::push(*stack, *out, lse);
}

void decode_in_place(const c10::OperatorHandle& op, Stack* stack) {
  Reader read(op, stack);
  const Tensor q = read.tensor(), k_cache = read.tensor();
  const MaybeTensor v_cache = read.maybe_tensor(), k_new = read.maybe_tensor(), v_new = read.maybe_tensor();
  MaybeTensor out = read.tensor();
  const Tensor lse = run_decode(q, k_cache, v_cache, k_new, v_new, out, read_decode_options(read));
  mark_written(*out);
  if (k_new) mark_written(k_cache);
  if (v_new) mark_written(*v_cache);
  torch::jit::push(*stack, lse);
}

template <auto function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

torch::Library define() {
  torch::Library library(torch::Library::DEF, FLASHATTN_NAMESPACE, std::nullopt, __FILE__, __LINE__);
  for (const auto* schema :
       {&kForward, &kForwardOut, &kBackward, &kDoubleBackward, &kDecode, &kDecodeInPlace})
    library.def(schema->c_str(), {at::Tag::pt2_compliant_tag});
  return library;
}

torch::Library implement(c10::DispatchKey key) {
  torch::Library library(torch::Library::IMPL, FLASHATTN_NAMESPACE, key, __FILE__, __LINE__);
  library.impl("forward", boxed<&forward>());
  library.impl("forward_out", boxed<&forward_out>());
  library.impl("backward", boxed<&backward>());
  library.impl("decode", boxed<&decode>());
  library.impl("decode_", boxed<&decode_in_place>());
  return library;
}

// They live as long as the module.
const torch::Library definitions = define();
const torch::Library cpu = implement(c10::DispatchKey::CPU);
const torch::Library cuda = implement(c10::DispatchKey::CUDA);

}  // namespace
}  // namespace flashattn
