// Options from the environment.  A value that cannot be read is an error that names the variable.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ringreduce {

std::optional<std::string> env(const char* name);

// A whole number within [low, high]; sizes may end in K, M or G (of 1024).
int64_t envInteger(const char* name, int64_t fallback, int64_t low, int64_t high);

// Seconds, fractions allowed, within [low, high].
double envSeconds(const char* name, double fallback, double low, double high);

}  // namespace ringreduce
