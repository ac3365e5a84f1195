// Parts of messages as text: rank lists, times, numbers.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <locale>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace ringreduce {

// All ranks of a group except one.
std::vector<int> otherRanks(int rank, int size);

// ---- numbers
//
// With a decimal point and without groups, whatever the program's locale is: strtod, printf and
// streams follow it.

// As printf's "%.*g" and "%.*f".
std::string shortText(double number, int digits);
std::string fixedText(double number, int decimals);
// Takes the number that a text begins with, after white space, off the text; none if there is none.
std::optional<double> takeNumber(std::string_view& text);

// Streams of text, such as what other processes write and read.
struct TextWriter : std::ostringstream {
  TextWriter() { imbue(std::locale::classic()); }
};
struct TextReader : std::istringstream {
  explicit TextReader(const std::string& text) : std::istringstream(text) {
    imbue(std::locale::classic());
  }
};

// "2.5 s"
std::string seconds(Nanos time);

// "a, b and c"
template <class All, class Text>
std::string listed(const All& all, Text&& textOf) {
  std::string text;
  for (size_t i = 0; i < std::size(all); ++i) {
    if (i > 0) text += i + 1 == std::size(all) ? " and " : ", ";
    text += textOf(all[i]);
  }
  return text;
}

// The texts of all elements, with `between` between two of them.
template <class All, class Text>
std::string joined(const All& all, std::string_view between, Text&& textOf) {
  std::string text;
  bool first = true;
  for (const auto& each : all) {
    if (!first) text += between;
    first = false;
    text += textOf(each);
  }
  return text;
}
// "1, 2, 5"
std::string joined(const std::vector<int>& numbers, std::string_view between);

// Two digits a byte, in lower case.
std::string hexText(const void* data, size_t bytes);
template <class Byte, size_t n>
std::string hexText(const std::array<Byte, n>& bytes) {
  static_assert(sizeof(Byte) == 1);
  return hexText(bytes.data(), n);
}
bool isHex(std::string_view text);
// Reads so many bytes from `text`; false if it is not their hexText.
bool fromHex(std::string_view text, void* data, size_t bytes);

}  // namespace ringreduce
