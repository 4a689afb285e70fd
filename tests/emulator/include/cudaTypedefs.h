// Tensor maps, as far as csrc/sm90/tensor_map.cuh makes them.
#pragma once

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

struct CUtensorMap {
  uint8_t* data;
  int64_t sizes[5], strides[4];  // strides in bytes
  uint32_t box[5];
};

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                       const cuuint64_t* sizes, const cuuint64_t* strides,
                                       const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr uint64_t kLargestStride = uint64_t{1} << 40, kLargestSize = uint64_t{1} << 32;
  map->data = static_cast<uint8_t*>(data);
  bool right = rank == 5 && data && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int i = 0; i < 5; ++i) {
    right &= sizes[i] > 0 && sizes[i] <= kLargestSize && box[i] > 0 && box[i] <= 256;
    map->sizes[i] = static_cast<int64_t>(sizes[i]);
    map->box[i] = box[i];
  }
  for (int i = 0; i < 4; ++i) {
    right &= strides[i] % 16 == 0 && strides[i] < kLargestStride;
    map->strides[i] = static_cast<int64_t>(strides[i]);
  }
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
using PFN_cuTensorMapEncodeTiled_v12000 = decltype(&cuTensorMapEncodeTiled);
