// The kernels of this CPU, chosen once: the widest that it can run, or those of RINGREDUCE_ISA.
#include <array>
#include <cstdio>
#include <span>
#include <string>

#include "base/config.h"
#include "base/error.h"
#include "kernels/codec.h"
#include "kernels/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ringreduce {

#define RINGREDUCE_DECLARE_KERNELS(isa)                                           \
  namespace kernels_##isa {                                                       \
    const ReduceKernels* table(DType dtype, ReduceOp op);                         \
    void scale(DType dtype, void* dst, const void* src, size_t n, double factor); \
    const CodecKernels& codecs(Codec codec);                                      \
  }
#if defined(__x86_64__)
RINGREDUCE_DECLARE_KERNELS(v2)
RINGREDUCE_DECLARE_KERNELS(v3)
RINGREDUCE_DECLARE_KERNELS(v4)
#else
RINGREDUCE_DECLARE_KERNELS(aarch64)
#endif
#undef RINGREDUCE_DECLARE_KERNELS

namespace {

#if defined(__x86_64__)

// Features are tested one by one: supported compilers are older than
// __builtin_cpu_supports("x86-64-v3").  The builtin knows whether the operating system saves the
// wide registers, but not all features in all these compilers; the rest comes from cpuid.
bool cpuHasV2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") &&
         __builtin_cpu_supports("popcnt");
}

bool cpuHasV3() {
  constexpr unsigned kMovbe = 1u << 22, kF16c = 1u << 29;  // leaf 1, ecx
  constexpr unsigned kLzcnt = 1u << 5;                     // leaf 0x80000001, ecx
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  if ((ecx & kMovbe) == 0 || (ecx & kF16c) == 0) return false;
  if (!__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) || (ecx & kLzcnt) == 0) return false;
  return cpuHasV2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool cpuHasV4() {
  return cpuHasV3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

#endif

const KernelSet& choose() {
  const std::span<const KernelSet> sets = kernelSets();
  const KernelSet* widest = nullptr;
  for (const KernelSet& set : sets) {
    if (set.runs) widest = &set;
  }
  if (!widest)
    throw Error(Failure::kSetup, "this CPU lacks SSE4.2 (x86-64-v2), the least that is needed");
  const std::string wish = Config::read().instruction_set.get();
  if (wish.empty()) return *widest;
  for (const KernelSet& set : sets) {
    if (set.runs && set.choice == wish) return set;
  }
  std::fprintf(stderr,
               "ringreduce: RINGREDUCE_ISA=%s is no instruction set of this CPU; using %s\n",
               wish.c_str(), widest->choice);
  return *widest;
}

const KernelSet& chosenKernels() {
  static const KernelSet& set = choose();
  return set;
}

// An internal error: calls are checked against isSupported first.
[[noreturn]] void unsupported(const char* what, DType dtype) {
  throw Error(Failure::kArgument, std::string("no kernel for ") + what + " of " + name(dtype));
}

}  // namespace

std::span<const KernelSet> kernelSets() {
#if defined(__x86_64__)
  static const std::array sets{
      KernelSet{"x86-64-v2", "v2", cpuHasV2(), kernels_v2::table, kernels_v2::scale,
                kernels_v2::codecs},
      KernelSet{"x86-64-v3", "v3", cpuHasV3(), kernels_v3::table, kernels_v3::scale,
                kernels_v3::codecs},
      KernelSet{"x86-64-v4", "v4", cpuHasV4(), kernels_v4::table, kernels_v4::scale,
                kernels_v4::codecs},
  };
#else
  static const std::array sets{
      KernelSet{"aarch64", "aarch64", true, kernels_aarch64::table, kernels_aarch64::scale,
                kernels_aarch64::codecs},
  };
#endif
  return sets;
}

const ReduceKernels& reduceKernels(DType dtype, ReduceOp op) {
  const ReduceKernels* kernels = chosenKernels().table(dtype, op);
  if (!kernels) unsupported(name(op), dtype);
  return *kernels;
}

void scale(DType dtype, void* dst, const void* src, size_t n, double factor) {
  if (!isFloating(dtype)) unsupported("scale", dtype);
  chosenKernels().scale(dtype, dst, src, n, factor);
}

const char* instructionSet() {
  return chosenKernels().name;
}

const CodecKernels& codecKernels(Codec codec) {
  return chosenKernels().codecs(codec);
}

}  // namespace ringreduce
