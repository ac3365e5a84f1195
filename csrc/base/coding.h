// How the values of a compressed all-reduce are coded, as far as ranks must agree on it.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

namespace ringreduce {

// The values are part of what ranks compare with each other, so they never change meaning.
enum class Codec : uint8_t { kBfloat16, kFloat16, kInt8, kInt4 };
inline constexpr const char* kCodecNames[] = {"bfloat16", "float16", "int8", "int4"};
inline constexpr int kCodecs = static_cast<int>(std::size(kCodecNames));

constexpr std::optional<Codec> codecNamed(std::string_view name) {
  for (uint8_t i = 0; i < kCodecs; ++i)
    if (name == kCodecNames[i]) return static_cast<Codec>(i);
  return std::nullopt;
}
constexpr const char* name(Codec codec) {
  return kCodecNames[static_cast<int>(codec)];
}

// What all ranks share of one operation.
struct Coding {
  Codec codec = Codec::kBfloat16;
  bool stochastic = false;
  uint64_t seed = 0;
};

// Who decodes, adds and codes again (collectives/coded.h).
enum class CodedSchedule : uint8_t { kAuto, kOwner, kRing };
inline constexpr const char* kCodedScheduleNames[] = {"auto", "owner", "ring"};

constexpr std::optional<CodedSchedule> codedScheduleNamed(std::string_view name) {
  for (uint8_t i = 0; i < std::size(kCodedScheduleNames); ++i)
    if (name == kCodedScheduleNames[i]) return static_cast<CodedSchedule>(i);
  return std::nullopt;
}

// Of a compressed all-reduce: codec and schedule, a byte each, whether it is stochastic, and the
// low half of its seed's hash, as `parts` of its announcement.
uint64_t wordOf(const Coding& coding, CodedSchedule schedule);
// "int8, owner, stochastic (seed hash 0123abcd)"
std::string describeCoding(uint64_t word);

}  // namespace ringreduce
