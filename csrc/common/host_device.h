// Functions that the CPU kernels, the CUDA kernels and the host share.
#pragma once

#ifdef __CUDACC__
#define FLASHATTN_HD __host__ __device__ inline
#else
#define FLASHATTN_HD inline
#endif
