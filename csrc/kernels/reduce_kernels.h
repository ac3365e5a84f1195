// The kernel sets that this build holds, one for each instruction set: what reduce.cc chooses from,
// and what tests and benchmarks compare.
#pragma once

#include <span>

#include "kernels/reduce.h"

namespace ringreduce {

struct KernelSet {
  const char* name;    // "x86-64-v3"
  const char* choice;  // "v3", the value of RINGREDUCE_ISA that asks for it
  bool runs;           // this CPU (and its operating system) can execute it

  // The kernels of a pair, or null for one that isSupported (base/dtype.h) denies.
  const ReduceKernels* (*table)(DType dtype, ReduceOp op);
  void (*scale)(DType dtype, void* dst, const void* src, size_t n, double factor);
};

// From the narrowest vectors to the widest.  Whether `runs` holds is found out at the first call.
std::span<const KernelSet> kernelSets();

}  // namespace ringreduce
