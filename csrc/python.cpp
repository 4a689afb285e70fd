// The Python module: importing it registers the operators; the functions tell what was built and run host
// logic.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "common/mask.h"
#include "dispatch.h"

namespace py = pybind11;

namespace flashattn {
namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
  info["cuda"] = false;
#ifdef _OPENMP
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
  info["cpu_level"] = cpu_level();
  return info;
}

template <class Params>
void append_rows(const char* op, py::list& rows) {
  for (const auto& instance : instances<Params>()) {
    py::dict row;
    row["name"] = instance.name;
    row["family"] = instance.family;
    row["op"] = op;
    row["device"] = "cpu";
    rows.append(row);
  }
}

py::list all_instances() {
  py::list rows;
  append_rows<ForwardParams>("forward", rows);
  append_rows<BackwardParams>("backward", rows);
  append_rows<DecodeParams>("decode", rows);
  return rows;
}

Problem problem(const std::string& device, const std::string& dtype) {
  if (device != "cpu") throw py::value_error("device is '" + device + "': this build serves 'cpu'");
  for (const auto& [name, type] : {std::pair{"float32", DType::f32}, std::pair{"float64", DType::f64},
                                   std::pair{"float16", DType::f16}, std::pair{"bfloat16", DType::bf16}})
    if (dtype == name) return {Device::cpu, cpu_level(), type};
  throw py::value_error("dtype is '" + dtype + "': expected float32, bfloat16, float16 or float64");
}

template <class Params>
std::vector<std::pair<std::string, std::string>> reasons(const Problem& problem) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const auto& instance : instances<Params>())
    rows.emplace_back(instance.name, why_not(instance, problem));
  return rows;
}

std::vector<std::pair<std::string, std::string>> candidates(const std::string& op, const std::string& device,
                                                            const std::string& dtype) {
  const Problem call = problem(device, dtype);
  if (op == "forward") return reasons<ForwardParams>(call);
  if (op == "backward") return reasons<BackwardParams>(call);
  if (op == "decode") return reasons<DecodeParams>(call);
  throw py::value_error("op is '" + op + "': expected forward, backward or decode");
}

}  // namespace
}  // namespace flashattn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flashattn;
  m.def("build_info", &build_info, "what this module was built with");
  m.def("instances", &all_instances, "the compiled kernels, one dict a row, in the dispatcher's order");
  m.def("candidates", &candidates, py::arg("op"), py::arg("device"), py::arg("dtype"),
        "(name, why not) of each row for a problem; the first with an empty reason serves it");
  m.def("force_family", &force_family, py::arg("family"), "only rows of this family serve; empty: any");
  m.def("forced_family", &forced_family);
  m.def(
      "visible_range",
      [](int64_t query, int64_t len_q, int64_t len_k, int64_t left, int64_t right, int64_t leftpad) {
        const KeyRange keys = visible_keys(query, len_q, len_k, left, right, leftpad);
        return std::pair{keys.first, keys.last};
      },
      py::arg("query"), py::arg("len_q"), py::arg("len_k"), py::arg("left"), py::arg("right"),
      py::arg("leftpad") = 0, "[first, last) keys that a query sees");
  m.def(
      "decode_splits",
      [](int64_t tiles, int64_t longest_k, int64_t processors, int64_t num_splits, bool batch_invariant) {
        const Splits splits = decode_splits(tiles, longest_k, processors, num_splits, batch_invariant);
        return std::pair{splits.count, splits.keys};
      },
      py::arg("tiles"), py::arg("longest_k"), py::arg("processors"), py::arg("num_splits"),
      py::arg("batch_invariant"), "(number of splits, keys of a split)");
}
