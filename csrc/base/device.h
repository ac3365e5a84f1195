// Marks functions that are compiled for the host and for a GPU.
//
// nvcc compiles them for the GPU only, other compilers for the host.  No translation unit needs
// both, so __host__ __device__ is not needed, and nvcc sees no templates over host-only types.
#pragma once

#ifdef __CUDACC__
#define RINGREDUCE_DEVICE __device__
#define RINGREDUCE_UNROLL _Pragma("unroll")
#else
#define RINGREDUCE_DEVICE
#define RINGREDUCE_UNROLL
#endif
