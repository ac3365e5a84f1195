// Numbers and lists in words.
#include "base/text.h"

#include <charconv>
#include <system_error>

namespace ringreduce {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

std::string textOf(double number, std::chars_format format, int precision) {
  char text[400];  // the largest double has 309 digits before its point
  const auto written = std::to_chars(text, text + sizeof text, number, format, precision);
  return {text, written.ptr};
}

}  // namespace

std::vector<int> otherRanks(int rank, int size) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r)
    if (r != rank) ranks.push_back(r);
  return ranks;
}

std::string shortText(double number, int digits) {
  return textOf(number, std::chars_format::general, digits);
}

std::string fixedText(double number, int decimals) {
  return textOf(number, std::chars_format::fixed, decimals);
}

std::optional<double> takeNumber(std::string_view& text) {
  const size_t start = text.find_first_not_of(" \t\n\v\f\r");
  if (start == std::string_view::npos) return std::nullopt;
  const bool plus = text[start] == '+' && !text.substr(start + 1).starts_with('-');
  double number = 0;
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data() + start + (plus ? 1 : 0), end, number);
  if (read.ec != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(read.ptr - text.data()));
  return number;
}

std::string seconds(Nanos time) {
  const double value = static_cast<double>(time) / kSecond;
  return (value < 999.5 ? shortText(value, 3) : fixedText(value, 0)) + " s";
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
