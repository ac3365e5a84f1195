// Numbers and lists in words.
#include "base/text.h"

#include <cstdio>

namespace ringreduce {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

}  // namespace

std::vector<int> otherRanks(int rank, int size) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r)
    if (r != rank) ranks.push_back(r);
  return ranks;
}

std::string seconds(Nanos time) {
  const double value = static_cast<double>(time) / kSecond;
  char text[32];
  std::snprintf(text, sizeof text, value < 999.5 ? "%.3g s" : "%.0f s", value);
  return text;
}

std::string joined(const std::vector<int>& numbers, std::string_view between) {
  return joined(numbers, between, [](int number) { return std::to_string(number); });
}

std::string hexText(const void* data, size_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  std::string text;
  for (; bytes > 0; --bytes, ++next) {
    text += kHexDigits[*next >> 4];
    text += kHexDigits[*next & 15];
  }
  return text;
}

bool isHex(std::string_view text) {
  return text.find_first_not_of(kHexDigits) == std::string_view::npos;
}

bool fromHex(std::string_view text, void* data, size_t bytes) {
  if (text.size() != 2 * bytes || !isHex(text)) return false;
  auto* out = static_cast<unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i)
    out[i] = static_cast<unsigned char>(kHexDigits.find(text[2 * i]) << 4 |
                                        kHexDigits.find(text[2 * i + 1]));
  return true;
}

}  // namespace ringreduce
