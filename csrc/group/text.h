// An operation in words.
#pragma once

#include <string>

#include "wire/page.h"

namespace ringreduce {

// "all_reduce #17 (float32, 1024 elements, SUM)"
std::string describe(const Announcement& operation);

}  // namespace ringreduce
