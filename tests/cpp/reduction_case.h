// An all-reduce as a test sees it: the addends of all ranks, and what must come of them by the
// canonical cut and order of algorithm/cut.h.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "algorithm/cut.h"
#include "check.h"
#include "reduce_oracle.h"

namespace oracle {

inline double factorOf(int rank) {
  return 0.5 + rank;
}

struct Case {
  Case(int P, DType dtype, ReduceOp op) : P(P), dtype(dtype), op(op) {
    addends = randomSources(dtype);
    addends.resize(at(P));
    if (dtype == DType::kBool && P == 1)
      for (unsigned char& b : addends[0]) b &= 1;  // of one rank alone nothing is computed
    scaled = addends;
    for (int r = 0; r < P && op == ReduceOp::kPremulSum; ++r)
      for (size_t i = 0; i < kMost; ++i) {
        unsigned char* element = &scaled[at(r)][i * width()];
        const double product = readFloat(dtype, element) * factorOf(r);
        writeFloat(dtype, element, round(dtype, product));
      }
    for (int owner = 0; owner < P; ++owner)
      owned.push_back(expected(dtype, op, orderedFor(owner), P, P));
  }

  size_t width() const { return sizeOf(dtype); }
  // The canonical reduction of the first n elements.
  Bytes canonical(size_t n) const {
    const Cut cut{n, P};
    Bytes result(n * width());
    cut.forEachChunk({0, n}, [&](int c, size_t begin, size_t size) {
      std::memcpy(&result[begin * width()], &owned[at(c)][begin * width()], size * width());
    });
    return result;
  }
  // SUM or AVG of the first n elements as the switch of nvlink_switch.h gives it: added in the
  // order of ranks, and rounded before AVG divides.
  Bytes inRankOrder(size_t n) const {
    Bytes result = expected(dtype, ReduceOp::kSum, addends, P, P);
    result.resize(n * width());
    for (size_t i = 0; i < n && op == ReduceOp::kAvg; ++i) {
      unsigned char* element = &result[i * width()];
      writeFloat(dtype, element, round(dtype, readFloat(dtype, element) / P));
    }
    return result;
  }
  void expect(const Bytes& got, const Bytes& wanted, const char* what) const {
    if (got.size() != wanted.size() ||
        !same(dtype, got.data(), wanted.data(), got.size() / width()))
      check::fail(__FILE__, __LINE__, std::string(what) + ", " + text(got.size() / width()));
  }
  std::string text(size_t n) const {
    return std::to_string(P) + " ranks, " + name(dtype) + ", " + name(op) + ", " +
           std::to_string(n) + " elements";
  }

  int P;
  DType dtype;
  ReduceOp op;
  std::vector<Bytes> addends;  // by rank
  std::vector<Bytes> scaled;   // the same times each rank's factor, for PREMUL_SUM
  std::vector<Bytes> owned;    // by owner: the reduction of all elements, were they its

 private:
  static size_t at(int i) { return static_cast<size_t>(i); }

  // The addends in the order in which `owner` gets them.
  std::vector<Bytes> orderedFor(int owner) const {
    std::vector<Bytes> ordered;
    for (int k = 0; k < P; ++k) ordered.push_back(scaled[at(kthToAdd(owner, k, P))]);
    return ordered;
  }
};

}  // namespace oracle
