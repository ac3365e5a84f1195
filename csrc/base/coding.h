// How the values of a compressed all-reduce are coded, as far as ranks must agree on it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ringreduce {

// Ranks send each other these values, so they never change meaning.
enum class Codec : uint8_t { kBfloat16, kFloat16, kInt8, kInt4 };

struct CodecInfo {
  const char* name;
  size_t bits;             // an element
  size_t scale_bytes = 0;  // of each block; 0: an element is coded by itself
};

// In the order of Codec.
inline constexpr std::array kCodecTable{
    CodecInfo{"bfloat16", 16},
    CodecInfo{"float16", 16},
    CodecInfo{"int8", 8, 2},
    CodecInfo{"int4", 4, 2},
};
inline constexpr int kCodecs = static_cast<int>(kCodecTable.size());

constexpr const CodecInfo& infoOf(Codec codec) {
  return kCodecTable[static_cast<size_t>(codec)];
}
constexpr const char* name(Codec codec) {
  return infoOf(codec).name;
}
constexpr std::optional<Codec> codecNamed(std::string_view name) {
  for (uint8_t i = 0; i < kCodecs; ++i)
    if (name == kCodecTable[i].name) return static_cast<Codec>(i);
  return std::nullopt;
}
// "bfloat16, float16, int8 and int4"
std::string codecNames();

// How all ranks code one operation.
struct Coding {
  Codec codec = Codec::kBfloat16;
  bool stochastic = false;
  uint64_t seed = 0;
};

// Which ranks decode, add and encode again (collectives/compressed_all_reduce.cc).
enum class CodedSchedule : uint8_t { kAuto, kOwner, kRing };
inline constexpr std::array kCodedScheduleNames{"auto", "owner", "ring"};

constexpr std::optional<CodedSchedule> codedScheduleNamed(std::string_view name) {
  for (uint8_t i = 0; i < kCodedScheduleNames.size(); ++i)
    if (name == kCodedScheduleNames[i]) return static_cast<CodedSchedule>(i);
  return std::nullopt;
}
// "auto, owner and ring"
std::string codedScheduleNames();

// OpSignature::parts of a compressed all-reduce: codec and schedule, a byte each, whether it is
// stochastic, and the low half of its seed's hash.
uint64_t wordOf(const Coding& coding, CodedSchedule schedule);
// "int8, owner, stochastic (seed hash 0123abcd)"
std::string describeCoding(uint64_t word);

}  // namespace ringreduce
