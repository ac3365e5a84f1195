// Words that messages are made of.
#include "group/text.h"

#include <cstdio>

#include "group/operation.h"

namespace ringreduce {

std::string rankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string seconds(Nanos time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(time) / kSecond);
  return text;
}

namespace {

bool toRoot(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kGather;
}

}  // namespace

std::string describe(const Announcement& operation) {
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
