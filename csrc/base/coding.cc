// A coding as one word, and in words.
#include "base/coding.h"

#include <cstdio>

#include "base/hash.h"
#include "base/text.h"

namespace ringreduce {

std::string codecNames() {
  return listed(kCodecTable, [](const CodecInfo& codec) { return codec.name; });
}

std::string codedScheduleNames() {
  return listed(kCodedScheduleNames, [](const char* name) { return name; });
}

uint64_t wordOf(const Coding& coding, CodedSchedule schedule) {
  uint64_t word = static_cast<uint64_t>(coding.codec) | static_cast<uint64_t>(schedule) << 8;
  // Without chance the seed makes no difference.
  if (coding.stochastic) {
    const uint64_t hash = mixed(mixed(0xcbf29ce484222325, coding.seed), coding.seed >> 32);
    word |= uint64_t{1} << 16 | (hash >> 32 ^ hash) << 32;
  }
  return word;
}

std::string describeCoding(uint64_t word) {
  const uint64_t codec = word & 0xff, schedule = word >> 8 & 0xff;
  // A word that was received may be anything.
  std::string text = codec < kCodecTable.size() ? kCodecTable[codec].name : "an unknown codec";
  text += ", ";
  text +=
      schedule < kCodedScheduleNames.size() ? kCodedScheduleNames[schedule] : "an unknown schedule";
  if ((word >> 16 & 0xffff) == 0) return text;
  char seed[48];
  std::snprintf(seed, sizeof seed, ", stochastic (seed hash %08x)",
                static_cast<unsigned>(word >> 32));
  return text + seed;
}

}  // namespace ringreduce
