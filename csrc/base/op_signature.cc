// Signatures as text, and the bits of a coding.
#include "base/op_signature.h"

#include <cstdio>

#include "base/bytes.h"
#include "base/text.h"

namespace ringreduce {
namespace {

std::string hashText(uint64_t hash) {
  char text[24];
  std::snprintf(text, sizeof text, "hash %08x", static_cast<unsigned>(hash));
  return text;
}

// "int8, owner, stochastic (seed and tensors hash 0123abcd)"
std::string describeCoding(uint64_t bits) {
  const uint64_t codec = bits & 0xff, schedule = bits >> 8 & 0xff;
  // A peer may have sent anything.
  std::string text = codec < kCodecTable.size() ? kCodecTable[codec].name : "an unknown codec";
  text += ", ";
  text +=
      schedule < kCodedScheduleNames.size() ? kCodedScheduleNames[schedule] : "an unknown schedule";
  const bool stochastic = (bits >> 16 & 0xffff) != 0;
  if (stochastic) text += ", stochastic";
  if (bits >> 32 != 0)
    text +=
        std::string(stochastic ? " (seed and tensors " : " (tensors ") + hashText(bits >> 32) + ")";
  return text;
}

std::string describeParts(KindInfo::Parts meaning, uint64_t parts) {
  if (meaning == KindInfo::Parts::kCoding) return ", " + describeCoding(parts);
  if (meaning == KindInfo::Parts::kCountsOfEachRank || parts == 0) return "";
  const char* what = meaning == KindInfo::Parts::kShape     ? "a shape"
                     : meaning == KindInfo::Parts::kTensors ? "several tensors"
                                                            : "uneven parts";
  return std::string(" in ") + what + " (" + hashText(parts ^ parts >> 32) + ")";
}

}  // namespace

void OpSignature::setParts(const std::vector<size_t>& counts) {
  bool even = true;
  uint64_t hash = 0;
  for (const size_t n : counts) {
    count += n;
    even = even && n == counts[0];
    hash = mixed(hash, n);
  }
  if (!even) parts = hash;
}

uint64_t OpSignature::historyAfter() const {
  // All fields but the sequence, so that none is forgotten.
  const auto hashOf = [](uint64_t, uint64_t count_of, uint64_t hash, auto... rest) {
    for (const uint64_t word : {count_of, static_cast<uint64_t>(rest)...}) hash = mixed(hash, word);
    return hash;
  };
  return std::apply(hashOf, fields(*this));
}

std::string codecNames() {
  return listed(kCodecTable, [](const CodecInfo& codec) { return codec.name; });
}

std::string codedScheduleNames() {
  return listed(kCodedScheduleNames, [](const char* name) { return name; });
}

uint64_t bordersOf(const std::vector<size_t>& sizes) {
  if (sizes.size() == 1) return 0;
  uint64_t hash = 0xcbf29ce484222325;
  for (const size_t size : sizes) hash = mixed(hash, size);
  return hash;
}

uint64_t codingBits(const Coding& coding, CodedSchedule schedule, uint64_t borders) {
  uint64_t bits = static_cast<uint64_t>(coding.codec) | static_cast<uint64_t>(schedule) << 8;
  uint64_t hash = borders;
  // Without stochastic rounding the seed has no effect.
  if (coding.stochastic) {
    bits |= uint64_t{1} << 16;
    hash = mixed(mixed(mixed(0xcbf29ce484222325, coding.seed), coding.seed >> 32), borders);
  }
  return bits | (hash >> 32 ^ hash) << 32;
}

std::string describe(const OpSignature& operation) {
  const KindInfo& kind = infoOf(operation.kind);
  std::string text = std::string(kind.name) + " #" + std::to_string(operation.sequence);
  if (!kind.has_elements) return text;
  text += std::string(" (") + name(operation.dtype);
  if (kind.parts == KindInfo::Parts::kCountsOfEachRank && operation.parts != 0)
    text += ", with counts for each rank";
  else
    text +=
        ", " + std::to_string(operation.count) + (operation.count == 1 ? " element" : " elements");
  text += describeParts(kind.parts, operation.parts);
  if (operation.op != kNoReduceOp)
    text += std::string(", ") + name(static_cast<ReduceOp>(operation.op));
  if (operation.root != kNoRoot)
    text += std::string(", ") + kind.root + " rank " + std::to_string(operation.root);
  return text + ")";
}

}  // namespace ringreduce
