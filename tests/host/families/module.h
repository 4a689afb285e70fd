// Stands in for csrc/families/module.h in a module that has the rows of a family without their kernels.
#pragma once

#include <pybind11/pybind11.h>

#include "dispatch.h"

namespace flashattn {

template <class Params>
Workspace workspace(const Params&) {
  return {};
}
template <class Params>
int launch(const Params&, void*) {
  return 0;
}
inline CudaDevice device(int) { return {}; }
inline const char* error_text(int) { return "no kernels"; }
inline void export_family(pybind11::module_& m, const Family& family) {
  m.attr("family") = pybind11::capsule(&family, kContract);
}

}  // namespace flashattn
