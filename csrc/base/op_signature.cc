// An operation in words.
#include "base/op_signature.h"

#include <cstdio>

#include "base/coding.h"

namespace ringreduce {
namespace {

bool toRoot(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kGather;
}

}  // namespace

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
