// Tensor maps: how the copy engine (TMA) finds a box of a tensor.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "params.h"

namespace flashattn::sm90 {

// cuTensorMapEncodeTiled of the driver; null if it has none.
inline PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

// The dimensions of a map but for columns, the innermost.
struct MapDimension {
  int64_t size, stride;
  int box;
};

// The map of x whose boxes have 64 columns of the innermost dimension and some of four more.  Zeros are
// copied for what lies outside the tensor.  Returns a cudaError_t.
template <class C>
int make_map(CUtensorMap& map, const Tensor4& x, int64_t columns, const MapDimension (&others)[4]) {
  constexpr int kDimensions = 5, kBytes = 2;
  cuuint64_t sizes[kDimensions] = {static_cast<cuuint64_t>(columns)}, strides[kDimensions - 1];
  cuuint32_t boxes[kDimensions] = {64};
  const cuuint32_t steps[kDimensions] = {1, 1, 1, 1, 1};
  for (int i = 0; i < kDimensions - 1; ++i) {
    sizes[i + 1] = static_cast<cuuint64_t>(others[i].size);
    boxes[i + 1] = static_cast<cuuint32_t>(others[i].box);
    // That of a dimension of size 1 may be anything, but not here.
    strides[i] = others[i].size == 1 ? 16 : others[i].stride * kBytes;
  }
  const auto type =
      C::kDType == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const CUresult result = encode(&map, type, kDimensions, x.data, sizes, strides, boxes, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// With dimensions (columns, group, rows, units, batch), where heads are units * group and `group` neighbours
// lie in one box of `box` rows, head after head of one row.
template <class C>
int make_map(CUtensorMap& map, const Tensor4& x, int64_t columns, int group, int64_t rows, int64_t units,
             int64_t batch, int box) {
  return make_map<C>(map, x, columns,
                     {{group, x.head, group},
                      {rows, x.row, box / group},
                      {units, x.head * group, 1},
                      {batch, x.batch, 1}});
}

// With dimensions (64 columns, rows, slabs of so many columns, heads, batch) and boxes of 8 rows of some
// slabs.
template <class C>
int make_slab_map(CUtensorMap& map, const Tensor4& x, int64_t columns, int64_t rows, int64_t heads,
                  int64_t batch, int slabs) {
  return make_map<C>(
      map, x, 64, {{rows, x.row, 8}, {columns / 64, 64, slabs}, {heads, x.head, 1}, {batch, x.batch, 1}});
}

}  // namespace flashattn::sm90
