// The operators as functions of the Python module.  They take the arguments of their schemas by position, as
// torch.ops does, without its search for a fitting overload and its conversion by type: on calls of twenty
// arguments that is a third of what the host does.  What is no plain argument goes to torch.ops: subclasses
// of tensors, symbolic sizes, modes, and whatever must raise its errors.  Only python.cpp includes this.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "namespace.h"

namespace flashattn {
namespace {

enum class Kind { tensor, number, integer, flag };

struct Operator {
  struct Argument {
    Kind kind;
    bool optional;
  };
  std::string name;
  c10::OperatorHandle handle;
  std::vector<Argument> arguments;
};

Operator find_operator(const char* name) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      (std::string(FLASHATTN_NAMESPACE "::") + name).c_str(), "");
  std::vector<Operator::Argument> arguments;
  for (const auto& argument : handle.schema().arguments()) {
    auto type = argument.type();
    const auto* optional = type->castRaw<c10::OptionalType>();
    if (optional) type = optional->getElementType();
    const Kind kind = type->kind() == c10::TypeKind::TensorType  ? Kind::tensor
                      : type->kind() == c10::TypeKind::FloatType ? Kind::number
                      : type->kind() == c10::TypeKind::BoolType  ? Kind::flag
                                                                 : Kind::integer;
    arguments.push_back({kind, optional != nullptr});
  }
  return {name, handle, arguments};
}

// Pushes a plain argument.  False: it is none.
bool push_argument(const Operator::Argument& argument, PyObject* value, torch::jit::Stack& stack) {
  if (value == Py_None) {
    stack.emplace_back();
    return argument.optional;
  }
  switch (argument.kind) {
    case Kind::tensor:
      if (!THPVariable_CheckExact(value)) return false;
      stack.emplace_back(THPVariable_Unpack(value));
      return true;
    case Kind::number:
      if (!PyFloat_CheckExact(value)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(value));
      return true;
    case Kind::flag:
      if (!PyBool_Check(value)) return false;
      stack.emplace_back(value == Py_True);
      return true;
    case Kind::integer: {
      if (!PyLong_CheckExact(value)) return false;
      int overflow = 0;
      stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(value, &overflow)));
      return overflow == 0;
    }
  }
  return false;
}

bool push_arguments(const Operator& op, PyObject* const* values, size_t count, torch::jit::Stack& stack) {
  if (at::impl::torch_function_mode_enabled() || count != op.arguments.size()) return false;
  stack.reserve(count);
  for (size_t i = 0; i < count; ++i)
    if (!push_argument(op.arguments[i], values[i], stack)) return false;
  return true;
}

PyObject* call_operator(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto& op = *static_cast<const Operator*>(PyCapsule_GetPointer(self, nullptr));
  torch::jit::Stack stack;
  if (!push_arguments(op, values, count, stack)) {
    const auto torch_op =
        pybind11::module_::import("torch").attr("ops").attr(FLASHATTN_NAMESPACE).attr(op.name.c_str());
    return PyObject_Vectorcall(torch_op.ptr(), values, count, nullptr);
  }
  {
    pybind11::gil_scoped_release others_run;
    op.handle.callBoxed(&stack);
  }
  if (stack.size() == 1) return THPVariable_Wrap(stack[0].toTensor());
  pybind11::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i)
    PyTuple_SET_ITEM(results.ptr(), i, THPVariable_Wrap(stack[i].toTensor()));
  return results.release().ptr();
  END_HANDLE_TH_ERRORS
}

// Adds the operator to the module as a function of its name.
void define_call(pybind11::module_& m, const char* name) {
  static PyMethodDef definition{"operator", reinterpret_cast<PyCFunction>(&call_operator), METH_FASTCALL,
                                "an operator of torch.ops, by position"};
  const pybind11::capsule self(new Operator(find_operator(name)),
                               [](void* op) { delete static_cast<Operator*>(op); });
  m.attr(name) =
      pybind11::reinterpret_steal<pybind11::object>(PyCFunction_NewEx(&definition, self.ptr(), nullptr));
}

}  // namespace
}  // namespace flashattn
