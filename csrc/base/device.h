// How text that runs on the host and on a GPU is marked.
//
// nvcc compiles it for the GPU only, other compilers for the host: no translation unit needs both,
// so nothing has to be __host__ __device__, and templates over host-only types stay out of nvcc's
// sight.
#pragma once

#ifdef __CUDACC__
#define RINGREDUCE_DEVICE __device__
#define RINGREDUCE_UNROLL _Pragma("unroll")
#else
#define RINGREDUCE_DEVICE
#define RINGREDUCE_UNROLL
#endif
