// Fills and compares: one element a thread at a time, in a loop over the grid.
#include <cstring>

#include "../../tests/cuda/gpu.h"
#include "gpu_data.h"

namespace perf {
namespace {

using random_elements::Random;
using random_elements::same;
using random_elements::withDType;

constexpr int kThreadsOfBlock = 256;

unsigned gridFor(size_t n) {
  const size_t blocks = (n + kThreadsOfBlock - 1) / kThreadsOfBlock;
  return static_cast<unsigned>(blocks < 4096 ? blocks : 4096);
}

// Calls visit(i) for the elements of this thread.
template <class Visit>
__device__ void forEach(size_t n, Visit visit) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    visit(i);
}

__device__ void blame(Verdict* verdict, size_t i) {
  atomicAdd(&verdict->wrong, 1ull);
  atomicMax(&verdict->first_inverse, ~static_cast<unsigned long long>(i));
}

template <ringreduce::DType dtype>
__global__ void fillKernel(typename Random<dtype>::Stored* to, size_t n, Random<dtype> random) {
  forEach(n, [&](size_t i) { to[i] = random(static_cast<uint32_t>(i)); });
}

template <ringreduce::DType dtype>
__global__ void compareKernel(const typename Random<dtype>::Stored* got,
                              const typename Random<dtype>::Stored* expected, size_t n,
                              Verdict* verdict) {
  forEach(n, [&](size_t i) {
    if (!same<dtype>(got[i], expected[i])) blame(verdict, i);
  });
}

template <ringreduce::DType dtype>
__global__ void compareFillKernel(const typename Random<dtype>::Stored* got, size_t n,
                                  Random<dtype> random, Verdict* verdict) {
  forEach(n, [&](size_t i) {
    if (!same<dtype>(got[i], random(static_cast<uint32_t>(i)))) blame(verdict, i);
  });
}

__global__ void compareByteKernel(const unsigned char* got, size_t n, unsigned char value,
                                  Verdict* verdict) {
  forEach(n, [&](size_t i) {
    if (got[i] != value) blame(verdict, i);
  });
}

void launched() {
  gpu::must(cudaGetLastError(), "launch a kernel of the benchmark");
}

}  // namespace

void fillOnGpu(ringreduce::DType dtype, void* to, size_t n, Texture draw, uint32_t key,
               cudaStream_t stream) {
  if (n == 0) return;
  withDType(dtype, [&]<ringreduce::DType t>() {
    fillKernel<t><<<gridFor(n), kThreadsOfBlock, 0, stream>>>(
        static_cast<typename Random<t>::Stored*>(to), n, Random<t>{key, draw});
  });
  launched();
}

void compareOnGpu(ringreduce::DType dtype, const void* got, const void* expected, size_t n,
                  Verdict* verdict, cudaStream_t stream) {
  if (n == 0) return;
  withDType(dtype, [&]<ringreduce::DType t>() {
    using Stored = typename Random<t>::Stored;
    compareKernel<t><<<gridFor(n), kThreadsOfBlock, 0, stream>>>(
        static_cast<const Stored*>(got), static_cast<const Stored*>(expected), n, verdict);
  });
  launched();
}

void compareWithFill(ringreduce::DType dtype, const void* got, size_t n, Texture draw, uint32_t key,
                     Verdict* verdict, cudaStream_t stream) {
  if (n == 0) return;
  withDType(dtype, [&]<ringreduce::DType t>() {
    compareFillKernel<t><<<gridFor(n), kThreadsOfBlock, 0, stream>>>(
        static_cast<const typename Random<t>::Stored*>(got), n, Random<t>{key, draw}, verdict);
  });
  launched();
}

void compareWithByte(const void* got, size_t bytes, unsigned char value, Verdict* verdict,
                     cudaStream_t stream) {
  if (bytes == 0) return;
  compareByteKernel<<<gridFor(bytes), kThreadsOfBlock, 0, stream>>>(
      static_cast<const unsigned char*>(got), bytes, value, verdict);
  launched();
}

}  // namespace perf
