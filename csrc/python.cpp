// The Python module: importing it registers the operators; the functions call them, tell what was built and
// run host logic.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <iterator>

#include "calls.h"
#include "common/mask.h"
#include "dispatch.h"

namespace py = pybind11;

namespace flashattn {
namespace {

// Images of each CUDA family, as FLASHATTN_ARCHS writes them.
py::dict cuda_images() {
  py::dict every;
  for (const Family* family : families()) {
    py::list images;
    for (const int* image = family->images; *image; ++image) images.append(version(*image));
    if (family->ptx) images.append(version(family->ptx) + "+PTX");
    every[family->name] = images;
  }
  return every;
}

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
  info["cuda"] = cuda_images();
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
  for (const auto* instance : instances<Params>()) {
    py::dict row;
    row["name"] = instance->name;
    row["family"] = instance->family;
    row["op"] = op;
    row["device"] = instance->module ? "cuda" : "cpu";
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

DType to_dtype(const std::string& dtype) {
  for (const auto& [name, type] : kDTypeNames)
    if (dtype == name) return type;
  throw py::value_error("dtype is '" + dtype + "': expected float32, bfloat16, float16 or float64");
}

uint32_t to_needs(const std::vector<std::string>& names) {
  uint32_t needs = 0;
  for (const auto& name : names) {
    const auto* found = std::find_if(std::begin(kNeeds), std::end(kNeeds),
                                     [&](const auto& need) { return name == need.first; });
    if (found == std::end(kNeeds)) {
      std::string text = "needs has '" + name + "': expected some of";
      for (const auto& need : kNeeds) text += std::string(" ") + need.first;
      throw py::value_error(text);
    }
    needs |= 1u << (found - kNeeds);
  }
  return needs;
}

Reasons candidates(const std::string& op, const std::string& device, const std::string& dtype,
                   int64_t head_dim, int64_t head_dim_v, const std::vector<std::string>& needs,
                   int capability, int64_t shared_bytes, int64_t longest) {
  if (device != "cpu" && device != "cuda")
    throw py::value_error("device is '" + device + "': this build serves 'cpu' and 'cuda'");
  const bool cuda = device == "cuda";
  const Problem problem{cuda ? Device::cuda : Device::cpu,
                        cuda ? capability : cpu_level(),
                        shared_bytes,
                        to_dtype(dtype),
                        head_dim,
                        head_dim_v,
                        to_needs(needs),
                        longest};
  if (op == "forward") return reasons<ForwardParams>(problem);
  if (op == "backward") return reasons<BackwardParams>(problem);
  if (op == "decode") return reasons<DecodeParams>(problem);
  throw py::value_error("op is '" + op + "': expected forward, backward or decode");
}

// What a call of the operators in `function` would run.
Reasons explain(const py::function& function) {
  Reasons reasons;
  struct Guard {
    explicit Guard(Reasons* wanted) { explanation() = wanted; }
    ~Guard() { explanation() = nullptr; }
  } guard(&reasons);
  function();
  return reasons;
}

void add_family_of(const py::capsule& capsule) {
  if (std::string(capsule.name()) != kContract)
    throw py::import_error(
        std::string("a family of kernels was compiled from other sources than flashattn._C: '") +
        capsule.name() + "', expected '" + kContract + "'");
  add_family(capsule.get_pointer<const Family>());
}

}  // namespace
}  // namespace flashattn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flashattn;
  for (const char* name : {"forward", "forward_out", "backward", "decode", "decode_"}) define_call(m, name);
  m.def("build_info", &build_info, "what this module was built with");
  m.def("instances", &all_instances, "the compiled kernels, one dict a row, in the dispatcher's order");
  m.def(
      "candidates", &candidates, py::arg("op"), py::arg("device"), py::arg("dtype"), py::arg("head_dim") = 64,
      py::arg("head_dim_v") = 64, py::arg("needs") = std::vector<std::string>{}, py::arg("capability") = 0,
      py::arg("shared_bytes") = 0, py::arg("longest") = 0,
      "(name, why not) of each row for a problem; the first with an empty reason serves it.  needs are names "
      "of csrc/instances.py, capability and shared_bytes those of a CUDA device, longest is the rows of a "
      "sequence");
  m.def("explain", &explain, py::arg("function"),
        "call it without launching anything; (name, why not) of each row for the last operator it called");
  m.def("add_family", &add_family_of, py::arg("capsule"), "let the kernels of a CUDA family serve, first");
  m.def(
      "cuda_device",
      [](int ordinal) {
        const CudaDevice device = cuda_device(ordinal);
        return std::tuple{device.capability, device.processors, device.shared_bytes};
      },
      py::arg("ordinal"),
      "(compute capability as 10 * major + minor, multiprocessors, bytes a block may share)");
  m.def("debug_checks", [] { return debug_checks(); }, "whether contents of CUDA tensors are checked");
  m.def("set_debug_checks", [](bool on) { debug_checks() = on; }, py::arg("on"));
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
