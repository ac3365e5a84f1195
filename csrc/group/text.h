// Words that messages are made of.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "wire/page.h"

namespace ringreduce {

// "rank 3", "ranks 1, 2 and 5"
std::string rankList(const std::vector<int>& ranks);

// "2.5 s"
std::string seconds(Nanos time);

// "all_reduce #17 (float32, 1024 elements, SUM)"
std::string describe(const Announcement& operation);

}  // namespace ringreduce
