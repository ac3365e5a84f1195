// For csrc/cuda/*.cu where the C++ compiler compiles them: the kernels become functions that run
// one block, of one thread, and the fake is told of them.
#pragma once

#include "../../cpp/nvlink_switch.h"
#include "base/clock.h"
#include "kernels.h"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local  // blocks of a grid are threads
#define __CUDA_ARCH_LIST__ 900          // of the fake

struct HostIndex {
  unsigned x;
};
inline thread_local HostIndex gridDim{1}, blockIdx{0}, threadIdx{0};
inline void __syncthreads() {}

namespace ringreduce::cuda {

template <int>
struct DeviceBlock {
  int thread() const { return 0; }
  static constexpr int threads() { return 1; }
  void sync() const {}
  bool any(bool x) const { return x; }
  template <class T>
  T load(const T* from) const {
    return *from;
  }
  template <class T>
  void store(T* to, T value) const {
    *to = value;
  }
  template <class T>
  T see(const T& shared) const {
    return shared;
  }
  template <class T>
  void show(T& shared, T value) const {
    shared = value;
  }
  static uint64_t nanoseconds() { return static_cast<uint64_t>(now()); }
  static void pause() { fakePause(); }
};

struct SwitchBlock : DeviceBlock<0> {
  template <DType dtype>
  Pack loadSum(const Pack* from) const {
    void* places[8];
    const int ranks = fakeMulticast(from, places);
    return nvlink::sumOf<dtype>(ranks, [&](int r) { return *static_cast<const Pack*>(places[r]); });
  }
  void storeAll(Pack* to, Pack value) const {
    void* places[8];
    const int ranks = fakeMulticast(to, places);
    for (int r = 0; r < ranks; ++r) *static_cast<Pack*>(places[r]) = value;
  }
  void fenceAliases() const {}
};

template <class Argument>
const void* pointerTo(void (*kernel)(Argument)) {
  static_assert(alignof(Argument) <= alignof(std::max_align_t));
  static_assert(sizeof(Argument) <= 4096, "more than a kernel takes before CUDA 12.1");
  const auto* key = reinterpret_cast<const void*>(kernel);
  fakeRegisterKernel(key, sizeof(Argument),
                     [](const void* of, const void* argument, int block, int blocks) {
                       gridDim.x = static_cast<unsigned>(blocks);
                       blockIdx.x = static_cast<unsigned>(block);
                       reinterpret_cast<void (*)(Argument)>(const_cast<void*>(of))(
                           *static_cast<const Argument*>(argument));
                     });
  return key;
}

}  // namespace ringreduce::cuda
