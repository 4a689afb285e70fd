// Derivatives: forward's gradient is the backward operator, backward's own is double_backward (plain torch,
// in Python).  In C++ because torch.library.register_autograd costs far more: a forward of one token that
// records its gradient took 29 us of CPU instead of 244 us, its backward 85 us instead of 151 us (EPYC,
// torch 2.13).
#include <ATen/Context.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "namespace.h"

namespace flashattn {
namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Stack = torch::jit::Stack;

// Where a schema has the arguments that may need a gradient.
std::vector<size_t> positions(const OperatorHandle& op, std::initializer_list<const char*> names) {
  std::vector<size_t> positions;
  for (const char* name : names) positions.push_back(*op.schema().argumentIndexWithName(name));
  return positions;
}

// A call that records its gradient: its arguments; SymInts and Nones stay what they are.
struct Call {
  const OperatorHandle& op;
  c10::DispatchKeySet keys;
  std::vector<IValue> values;

  Call(const OperatorHandle& op_, c10::DispatchKeySet keys_, Stack* stack) : op(op_), keys(keys_) {
    const auto count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    values.assign(arguments.begin(), arguments.end());
    torch::jit::drop(*stack, count);
  }

  Tensor tensor(size_t position) const { return values[position].toTensor(); }
  std::optional<Tensor> maybe_tensor(size_t position) const { return values[position].toOptional<Tensor>(); }

  // The results of the kernels below autograd.
  variable_list run() const {
    Stack stack(values);
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, &stack);
    variable_list results;
    for (const auto& result : stack) results.push_back(result.toTensor());
    return results;
  }
};

// Tensors are saved where autograd can watch them, the other values beside them.
void save(AutogradContext* ctx, std::vector<IValue> values, const variable_list& results) {
  variable_list tensors = results;
  c10::List<bool> is_tensor;
  for (auto& value : values) {
    is_tensor.push_back(value.isTensor());
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
      value = IValue();
    }
  }
  ctx->save_for_backward(std::move(tensors));
  ctx->saved_data["is_tensor"] = is_tensor;
  ctx->saved_data["values"] = c10::ivalue::Tuple::create(std::move(values));
  ctx->set_materialize_grads(false);
}

struct Saved {
  variable_list tensors;  // results that were saved come first
  std::vector<IValue> values;

  Saved(AutogradContext* ctx, size_t results) : tensors(ctx->get_saved_variables()) {
    const auto is_tensor = ctx->saved_data["is_tensor"].toBoolList();
    values = ctx->saved_data["values"].toTupleRef().elements().vec();
    for (size_t i = 0, next = results; i < values.size(); ++i)
      if (is_tensor.get(i)) values[i] = tensors[next++];
  }
};

IValue maybe(const Tensor& x) { return x.defined() ? IValue(x) : IValue(); }

std::vector<Tensor> call(const char* name, Stack stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  op.callBoxed(&stack);
  std::vector<Tensor> results;
  for (const auto& result : stack) results.push_back(result.isTensor() ? result.toTensor() : Tensor());
  return results;
}

using Maybe = std::optional<Tensor>;

// The tensors with gradients are arguments of their own so that autograd connects them.
struct Forward : torch::autograd::Function<Forward> {
  static variable_list forward(AutogradContext* ctx, const Call& call, const Tensor&, const Tensor&,
                               const Tensor&, const Maybe&, const Maybe&) {
    auto results = call.run();
    ctx->mark_non_differentiable({results[2]});
    save(ctx, call.values, {results[0], results[1]});
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    Saved saved(ctx, 2);
    const Tensor &out = saved.tensors[0], &lse = saved.tensors[1];
    auto& values = saved.values;
    const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(FLASHATTN_NAMESPACE "::forward", "");
    const auto value = [&](const char* name) -> IValue& {
      return values[*schema.schema().argumentIndexWithName(name)];
    };
    constexpr size_t kBiasEdge = 3;  // after q, k and v
    const bool bias_grad = value("bias").isTensor() && ctx->needs_input_grad(kBiasEdge);
    IValue& deterministic = value("deterministic");
    deterministic = deterministic.toBool() || at::globalContext().deterministicAlgorithms();
    Stack stack{grads[0].defined() ? grads[0] : at::zeros_like(out),
                values[0],
                values[1],
                values[2],
                out,
                lse,
                maybe(grads[1])};
    stack.insert(stack.end(), values.begin() + 3, values.end() - 1);  // the options, without return_max_logit
    stack.emplace_back(bias_grad);
    std::vector<Tensor> result;
    if (at::GradMode::is_enabled()) {
      result = call(FLASHATTN_NAMESPACE "::backward", std::move(stack));
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      result = call(FLASHATTN_NAMESPACE "::backward", std::move(stack));
    }
    return {Tensor(),
            result[0],
            result[1],
            result[2],
            bias_grad ? result[3] : Tensor(),
            value("sink").isTensor() ? result[4] : Tensor()};
  }
};

struct Backward : torch::autograd::Function<Backward> {
  static variable_list forward(AutogradContext* ctx, const Call& call, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&, const Maybe&, const Maybe&, const Maybe&) {
    auto results = call.run();
    save(ctx, call.values, {});
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    Saved saved(ctx, 0);
    auto& values = saved.values;  // dout, q, k, v, out, lse, dlse, options, bias_grad
    Stack stack;
    for (const auto& grad : grads) stack.push_back(maybe(grad));
    stack.insert(stack.end(), values.begin(), values.begin() + 4);
    stack.insert(stack.end(), values.begin() + 6, values.end() - 1);
    const auto result = call(FLASHATTN_NAMESPACE "::double_backward", std::move(stack));
    variable_list gradients{Tensor()};
    gradients.insert(gradients.end(), result.begin(), result.end());
    return gradients;
  }
};

void push(Stack* stack, const variable_list& results) {
  for (const auto& result : results) stack->emplace_back(result);
}

// Whether a call must record its gradient; a tangent is refused.
bool records(const OperatorHandle& op, const Stack& stack, const std::vector<size_t>& differentiable) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  bool some = false;
  for (const size_t position : differentiable) {
    if (!arguments[position].isTensor()) continue;
    const Tensor& x = arguments[position].toTensor();
    some |= x.requires_grad();
    TORCH_CHECK_NOT_IMPLEMENTED(!x.unsafeGetTensorImpl()->_fw_grad(0, x).defined(),
                                op.schema().arguments()[position].name(),
                                " has a tangent: ", "forward-mode AD (jvp) of ", op.schema().name(),
                                " is not implemented; expected reverse mode");
  }
  return some && at::GradMode::is_enabled();
}

void run_below(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void forward(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static const auto at = positions(op, {"q", "k", "v", "bias", "sink"});
  if (!records(op, *stack, at)) return run_below(op, keys, stack);
  const Call call(op, keys, stack);
  push(stack, Forward::apply(call, call.tensor(at[0]), call.tensor(at[1]), call.tensor(at[2]),
                             call.maybe_tensor(at[3]), call.maybe_tensor(at[4])));
}

void backward(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static const auto at = positions(op, {"dout", "q", "k", "v", "dlse", "bias", "sink"});
  if (!records(op, *stack, at)) return run_below(op, keys, stack);
  const Call call(op, keys, stack);
  push(stack,
       Backward::apply(call, call.tensor(at[0]), call.tensor(at[1]), call.tensor(at[2]), call.tensor(at[3]),
                       call.maybe_tensor(at[4]), call.maybe_tensor(at[5]), call.maybe_tensor(at[6])));
}

torch::Library implement() {
  torch::Library library(torch::Library::IMPL, FLASHATTN_NAMESPACE, c10::DispatchKey::Autograd, __FILE__,
                         __LINE__);
  library.impl("forward", torch::CppFunction::makeFromBoxedFunction<&forward>());
  library.impl("backward", torch::CppFunction::makeFromBoxedFunction<&backward>());
  // flashattn.decode itself refuses gradients.
  for (const char* name : {"decode", "decode_"}) library.impl(name, torch::CppFunction::makeFallthrough());
  return library;
}

const torch::Library autograd = implement();

}  // namespace
}  // namespace flashattn
