// Options from the environment.  A value that cannot be read is an error that names the variable.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ringreduce {

std::optional<std::string> env(const char* name);

// A whole number within [low, high]; sizes may end in K, M or G (of 1024).
int64_t envInteger(const char* name, int64_t fallback, int64_t low, int64_t high);

// A number, fractions allowed, within [low, high]; `what` says of what, for the error.
double envNumber(const char* name, double fallback, double low, double high, const char* what);

// Seconds, likewise.
double envSeconds(const char* name, double fallback, double low, double high);

}  // namespace ringreduce
