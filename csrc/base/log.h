// Lines for the person who watches a run: on standard error, one write each, marked as ours.
//
// What goes wrong is always told; what is merely good to know, with RINGREDUCE_LOG=info.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace ringreduce {

inline void log(const std::string& text) {
  const std::string line = "[ringreduce] " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

inline bool logsInfo() {
  const char* level = std::getenv("RINGREDUCE_LOG");
  return level && std::strcmp(level, "info") == 0;
}

}  // namespace ringreduce
