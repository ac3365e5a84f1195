// An operation in words.
#include "base/op_signature.h"

#include <cstdio>

#include "base/coding.h"
#include "base/hash.h"

namespace ringreduce {
namespace {

std::string describeParts(KindInfo::Parts meaning, uint64_t parts) {
  if (meaning == KindInfo::Parts::kCoding) return ", " + describeCoding(parts);
  if (meaning == KindInfo::Parts::kCountsOfEachRank || parts == 0) return "";
  char text[48];
  std::snprintf(text, sizeof text, " in %s (hash %08x)",
                meaning == KindInfo::Parts::kShape ? "a shape" : "uneven parts",
                static_cast<unsigned>(parts ^ parts >> 32));
  return text;
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
