// Signatures as text, and the bits of a coding.
#include "base/op_signature.h"

#include <cstdio>

#include "base/bytes.h"

namespace ringreduce {
namespace {

bool toRoot(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kGather;
}

// "int8, owner, stochastic (seed hash 0123abcd)"
std::string describeCoding(uint64_t bits) {
  const uint64_t codec = bits & 0xff, schedule = bits >> 8 & 0xff;
  // A peer may have sent anything.
  std::string text = codec < std::size(kCodecNames) ? kCodecNames[codec] : "an unknown codec";
  text += ", ";
  text += schedule < std::size(kCodedScheduleNames) ? kCodedScheduleNames[schedule]
                                                    : "an unknown schedule";
  if ((bits >> 16 & 0xffff) == 0) return text;
  char seed[48];
  std::snprintf(seed, sizeof seed, ", stochastic (seed hash %08x)",
                static_cast<unsigned>(bits >> 32));
  return text + seed;
}

}  // namespace

uint64_t codingBits(const Coding& coding, CodedSchedule schedule) {
  uint64_t bits = static_cast<uint64_t>(coding.codec) | static_cast<uint64_t>(schedule) << 8;
  // Without stochastic rounding the seed has no effect.
  if (coding.stochastic) {
    const uint64_t hash = mixed(mixed(0xcbf29ce484222325, coding.seed), coding.seed >> 32);
    bits |= uint64_t{1} << 16 | (hash >> 32 ^ hash) << 32;
  }
  return bits;
}

std::string describe(const OpSignature& operation) {
  std::string text = kKindNames[static_cast<size_t>(operation.kind)];
  text += " #" + std::to_string(operation.sequence);
  if (operation.kind == Kind::kBarrier || operation.kind == Kind::kMonitoredBarrier) return text;
  text += std::string(" (") + name(operation.dtype);
  if (operation.kind == Kind::kAllToAll && operation.parts != 0)
    text += ", with counts for each rank";
  else
    text +=
        ", " + std::to_string(operation.count) + (operation.count == 1 ? " element" : " elements");
  if (operation.kind == Kind::kCompressedAllReduce) {
    text += ", " + describeCoding(operation.parts);
  } else if (operation.kind != Kind::kAllToAll && operation.parts != 0) {
    char parts[48];
    std::snprintf(parts, sizeof parts, " in %s (hash %08x)",
                  operation.kind == Kind::kSparseAllReduce ? "a shape" : "uneven parts",
                  static_cast<unsigned>(operation.parts ^ operation.parts >> 32));
    text += parts;
  }
  if (operation.op != kNoReduceOp)
    text += std::string(", ") + name(static_cast<ReduceOp>(operation.op));
  if (operation.root != kNoRoot)
    text +=
        (toRoot(operation.kind) ? ", to rank " : ", from rank ") + std::to_string(operation.root);
  return text + ")";
}

}  // namespace ringreduce
