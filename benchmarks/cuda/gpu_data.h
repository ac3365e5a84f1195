// Data on the GPU, and whether it is right: kernels of the benchmark's own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../../tests/cpp/random_elements.h"

namespace perf {

using random_elements::Texture;

// The elements of a rank (random_elements.h).
void fillOnGpu(ringreduce::DType dtype, void* to, size_t n, Texture draw, uint32_t key,
               cudaStream_t stream);

// What comparisons find, in the GPU's memory, all zero at first.
struct Verdict {
  unsigned long long wrong;          // elements
  unsigned long long first_inverse;  // ~ the index of the first of them
};

// got[i] against expected[i]: all bits, but of two NaN.
void compareOnGpu(ringreduce::DType dtype, const void* got, const void* expected, size_t n,
                  Verdict* verdict, cudaStream_t stream);
// got[i] against the elements that fillOnGpu makes: that an input is as it was.
void compareWithFill(ringreduce::DType dtype, const void* got, size_t n, Texture draw, uint32_t key,
                     Verdict* verdict, cudaStream_t stream);
// Bytes that are all to be `value`.
void compareWithByte(const void* got, size_t bytes, unsigned char value, Verdict* verdict,
                     cudaStream_t stream);

}  // namespace perf
