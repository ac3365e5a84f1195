// Whole-number division and rounding up.
#pragma once

#include <cstddef>

namespace ringreduce {

constexpr size_t ceilDiv(size_t a, size_t b) {
  return a / b + (a % b != 0);
}
constexpr size_t roundUp(size_t a, size_t b) {
  return ceilDiv(a, b) * b;
}

}  // namespace ringreduce
