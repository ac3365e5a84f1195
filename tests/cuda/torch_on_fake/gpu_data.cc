// What benchmarks/cuda takes and PyTorch does not: its kernels (gpu_data.cu) as loops of the host
// in the fake's streams, and some calls of CUDA.
#include "../../../benchmarks/cuda/gpu_data.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "kernels.h"

extern "C" {

cudaError_t cudaMallocHost(void** data, size_t bytes) {
  return cudaHostAlloc(data, bytes, 0);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}
}

namespace perf {
namespace {

using random_elements::Random;
using random_elements::same;
using random_elements::withDType;

void put(cudaStream_t stream, std::function<void()> task) {
  const auto run = [](void* given) {
    const auto* held = static_cast<std::function<void()>*>(given);
    (*held)();
    delete held;
  };
  if (fakeLaunchWork(stream, run, new std::function<void()>(std::move(task))) != 0)
    throw std::runtime_error("the fake takes no function into a stream");
}

void blame(Verdict* verdict, size_t i) {
  ++verdict->wrong;
  verdict->first_inverse = std::max(verdict->first_inverse, ~static_cast<unsigned long long>(i));
}

}  // namespace

void fillOnGpu(ringreduce::DType dtype, void* to, size_t n, Texture draw, uint32_t key,
               cudaStream_t stream) {
  withDType(dtype, [&]<ringreduce::DType t>() {
    put(stream, [=] {
      const Random<t> random{key, draw};
      for (size_t i = 0; i < n; ++i)
        static_cast<typename Random<t>::Stored*>(to)[i] = random(static_cast<uint32_t>(i));
    });
  });
}

void compareOnGpu(ringreduce::DType dtype, const void* got, const void* expected, size_t n,
                  Verdict* verdict, cudaStream_t stream) {
  withDType(dtype, [&]<ringreduce::DType t>() {
    using Stored = typename Random<t>::Stored;
    put(stream, [=] {
      for (size_t i = 0; i < n; ++i)
        if (!same<t>(static_cast<const Stored*>(got)[i], static_cast<const Stored*>(expected)[i]))
          blame(verdict, i);
    });
  });
}

void compareWithFill(ringreduce::DType dtype, const void* got, size_t n, Texture draw, uint32_t key,
                     Verdict* verdict, cudaStream_t stream) {
  withDType(dtype, [&]<ringreduce::DType t>() {
    put(stream, [=] {
      const Random<t> random{key, draw};
      for (size_t i = 0; i < n; ++i)
        if (!same<t>(static_cast<const typename Random<t>::Stored*>(got)[i],
                     random(static_cast<uint32_t>(i))))
          blame(verdict, i);
    });
  });
}

void compareWithByte(const void* got, size_t bytes, unsigned char value, Verdict* verdict,
                     cudaStream_t stream) {
  put(stream, [=] {
    for (size_t i = 0; i < bytes; ++i)
      if (static_cast<const unsigned char*>(got)[i] != value) blame(verdict, i);
  });
}

}  // namespace perf
