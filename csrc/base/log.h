// Lines for the person who watches a run: on standard error, one write each, marked as ours.
#pragma once

#include <cstdio>
#include <string>

namespace ringreduce {

inline void log(const std::string& text) {
  const std::string line = "[ringreduce] " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace ringreduce
