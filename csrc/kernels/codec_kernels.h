// The codecs' kernels that this build holds, for each instruction set: what codec.cc chooses from,
// and what tests and benchmarks compare.  In the order of reduce's (kernels/reduce_kernels.h).
#pragma once

#include <span>

#include "kernels/codec.h"

namespace ringreduce {

struct CodecSet {
  const char* name;  // "x86-64-v3"
  bool runs;         // this CPU (and its operating system) can execute it
  const CodecKernels& (*kernels)(Codec codec);
};

std::span<const CodecSet> codecSets();

}  // namespace ringreduce
