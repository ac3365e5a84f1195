// The arithmetic of reductions: dst = a (op) b (op) ... for every dtype and op.
//
// A reduction adds in the order of its sources, so that every algorithm that keeps this order gives
// the same bits.  float16 and bfloat16 are accumulated in float32 and rounded once, at the end:
// their partial results are float32, also on the wire ("partial type").  A chain of `combine` that
// ends with `finish` gives the same bits as one `reduce`.  Only two things are unspecified: the
// payload of a NaN that comes from two NaNs, and the sign of a NaN that comes from none (infinity
// minus infinity), which is negative on x86-64 and positive on AArch64.
//
// MIN and MAX give NaN if either side is one, as torch.minimum does, and the earlier source where
// two are equal (0 and -0).  Sums and products of integers wrap.  A bool may be any byte; 0 is
// false.
//
// The kernels are compiled for several instruction sets and give the same bits in all of them.  The
// best set of this CPU is chosen once, or the one that RINGREDUCE_ISA names (v2, v3 or v4).
// AArch64 has one set, NEON: the vectors are of a fixed size, which is that of SVE on few CPUs.
// Pointers need no alignment.  No kernel allocates, blocks or throws; reduceKernels throws Error
// for a pair that isSupported denies, and if this CPU can run no set.
#pragma once

#include <span>

#include "base/dtype.h"
#include "base/op_signature.h"

namespace ringreduce {

struct CodecKernels;

struct ReduceKernels {
  DType partial;  // float32 for half types, else the dtype itself

  // dst[i] = src[i], as the partial type.
  void (*widen)(void* dst, const void* src, size_t n);

  // dst[i] = partial[i] (op) own[i]; dst and partial are of the partial type, own of the dtype.
  // dst may be `partial` itself; no other overlap.
  void (*combine)(void* dst, const void* partial, const void* own, size_t n);

  // The final step: dst[i] = round(finish(partial[i] (op) own[i])), dst of the dtype.  AVG divides
  // by `world_size` here (integers: truncating towards zero), before rounding.  dst may be `own`
  // itself.
  void (*finish)(void* dst, const void* partial, const void* own, size_t n, int world_size);

  // The same for two sums: a[i] (op) b[i], both of the partial type.  dst may be one of them if it
  // is of that type too; no other overlap.
  void (*finishSums)(void* dst, const void* a, const void* b, size_t n, int world_size);

  // All at once: dst[i] = finish(sources[0][i] (op) ... (op) sources[count-1][i]), count >= 1.
  // dst may be any one of the sources; no other overlap.
  void (*reduce)(void* dst, const void* const* sources, int count, size_t n, int world_size);
};

// The kernels for a supported pair (isSupported in base/dtype.h).  PREMUL_SUM uses those of SUM:
// each rank scales its input first, with `scale`.
const ReduceKernels& reduceKernels(DType dtype, ReduceOp op);

// dst[i] = src[i] * factor, computed in float32 (float64 for float64) and rounded to the dtype.
// Floating dtypes only.  dst may be src itself.
void scale(DType dtype, void* dst, const void* src, size_t n, double factor);

// The instruction set in use: "x86-64-v2", "x86-64-v3", "x86-64-v4" or "aarch64".
const char* instructionSet();

// One of the kernel sets of this build; tests and benchmarks compare them.
struct KernelSet {
  const char* name;    // "x86-64-v3"
  const char* choice;  // "v3", the value of RINGREDUCE_ISA that asks for it
  bool runs;           // this CPU (and its operating system) can execute it

  // The kernels of a pair, or null for one that isSupported (base/dtype.h) denies.
  const ReduceKernels* (*table)(DType dtype, ReduceOp op);
  void (*scale)(DType dtype, void* dst, const void* src, size_t n, double factor);
  const CodecKernels& (*codecs)(Codec codec);  // codec.h
};

// From the narrowest vectors to the widest.  The first call determines `runs`.
std::span<const KernelSet> kernelSets();

}  // namespace ringreduce
