// Reads and checks environment variables.
#include "base/env.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/error.h"

namespace ringreduce {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& value, const std::string& wanted) {
  throw Error(Failure::kSetup,
              std::string(name) + "=" + value + " is not " + wanted + "; correct or unset it");
}

// "0.5", "1000000000"
std::string shortText(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", number);
  return text;
}

}  // namespace

std::optional<std::string> env(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return std::string(value);
}

int64_t envInteger(const char* name, int64_t fallback, int64_t low, int64_t high) {
  const auto value = env(name);
  if (!value) return fallback;
  const std::string wanted =
      "a whole number from " + std::to_string(low) + " to " + std::to_string(high);
  char* end = nullptr;
  double number = std::strtod(value->c_str(), &end);
  const std::string suffix(end);
  if (end == value->c_str()) refuse(name, *value, wanted);
  if (suffix == "K" || suffix == "k")
    number *= 1 << 10;
  else if (suffix == "M" || suffix == "m")
    number *= 1 << 20;
  else if (suffix == "G" || suffix == "g")
    number *= 1 << 30;
  else if (!suffix.empty())
    refuse(name, *value, wanted);
  if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high)) ||
      number != std::floor(number))
    refuse(name, *value, wanted);
  return static_cast<int64_t>(number);
}

double envNumber(const char* name, double fallback, double low, double high, const char* what) {
  const auto value = env(name);
  if (!value) return fallback;
  char* end = nullptr;
  const double number = std::strtod(value->c_str(), &end);
  if (end == value->c_str() || *end || !(number >= low && number <= high))
    refuse(
        name, *value,
        std::string("a number of ") + what + " from " + shortText(low) + " to " + shortText(high));
  return number;
}

double envSeconds(const char* name, double fallback, double low, double high) {
  return envNumber(name, fallback, low, high, "seconds");
}

}  // namespace ringreduce
