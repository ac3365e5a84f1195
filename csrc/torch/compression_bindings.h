// The part of ringreduce._C that is about compressed gradients.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ringreduce {

void bindCompression(pybind11::module_& m);

}  // namespace ringreduce
