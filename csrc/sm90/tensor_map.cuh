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

// The map of x with dimensions (columns, group, rows, units, batch), where heads are units * group and
// `group` neighbours lie in one box of 64 columns and `box` rows (head after head of one row).  Zeros are
// copied for what lies outside the tensor.  Returns a cudaError_t.
template <class C>
int make_map(CUtensorMap& map, const Tensor4& x, int64_t columns, int group, int64_t rows, int64_t units,
             int64_t batch, int box) {
  constexpr int kDimensions = 5, kBytes = 2;
  const cuuint64_t sizes[kDimensions] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(group),
                                         static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(units),
                                         static_cast<cuuint64_t>(batch)};
  const int64_t strides_of[kDimensions - 1] = {x.head, x.row, x.head * group, x.batch};
  cuuint64_t strides[kDimensions - 1];
  for (int i = 0; i < kDimensions - 1; ++i)  // that of a dimension of size 1 may be anything, but not here
    strides[i] = sizes[i + 1] == 1 ? 16 : strides_of[i] * kBytes;
  const cuuint32_t boxes[kDimensions] = {64, static_cast<cuuint32_t>(group),
                                         static_cast<cuuint32_t>(box / group), 1, 1},
                   steps[kDimensions] = {1, 1, 1, 1, 1};
  const auto type =
      C::kDType == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const CUresult result = encode(&map, type, kDimensions, x.data, sizes, strides, boxes, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flashattn::sm90
