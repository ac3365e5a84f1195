// The compiler and the GPUs that the code was compiled for: for messages, and to tell a GPU that is
// too old before a kernel fails on it.
#pragma once

#include <string>
#include <vector>

namespace ringreduce::cuda {

struct BuildInfo {
  int toolkit;  // the runtime's own number: 13000 is CUDA 13.0
  // Compute capabilities (90 is 9.0) that there is code for, lowest first.  GPUs from the first on
  // can run it: those that are not listed by compiling the PTX of one that is.
  std::vector<int> architectures;

  // As in "13.0, sm_80 sm_90 and newer".
  std::string text() const;
};

BuildInfo buildInfo();

}  // namespace ringreduce::cuda
