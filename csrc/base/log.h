// Log lines on standard error, one write each, with a mark of ours.
//
// Errors and stalls are always logged, the rest if logsInfo() (base/config.h).
#pragma once

#include <cstdio>
#include <string>

namespace ringreduce {

inline void log(const std::string& text) {
  const std::string line = "[ringreduce] " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace ringreduce
