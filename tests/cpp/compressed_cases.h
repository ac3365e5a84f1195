// What compressed all-reduces are given, and what must come of them: worked out once more from
// collectives/compressed_all_reduce.cc's words, whole chunks at a time, and with every error known
// to float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "algorithm/cut.h"
#include "check.h"
#include "collectives/collectives.h"
#include "kernels/codec.h"

namespace compressed_cases {

using namespace ringreduce;
using Floats = std::vector<float>;

inline size_t at(int i) {
  return static_cast<size_t>(i);
}

inline bool sameBits(const float* a, const float* b, size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(float)) == 0;
}

// A rank's addends: of several magnitudes, some zeros.
inline Floats addends(size_t n, int rank, uint32_t seed = 1) {
  std::mt19937 random(seed * 1000 + static_cast<uint32_t>(rank));
  Floats all(n);
  for (size_t i = 0; i < n; ++i) {
    const float uniform = static_cast<float>(random()) / 4294967296.F - 0.5F;
    all[i] = i % 37 == 5 ? 0.F : std::ldexp(uniform, static_cast<int>(i / 100 % 9) - 4);
  }
  return all;
}

struct Case {
  int P;
  size_t count;
  Coding coding;
  ReduceOp op;
  CodedSchedule schedule;           // kOwner or kRing
  std::vector<Floats> inputs = {};  // by rank
  Floats result = {};
  std::vector<Floats> errors = {};

  Case(int P, size_t count, Coding coding, ReduceOp op, CodedSchedule schedule)
      : P(P), count(count), coding(coding), op(op), schedule(schedule) {
    for (int r = 0; r < P; ++r) inputs.push_back(addends(count, r));
    compute();
  }

  void compute() {
    result.resize(count);
    errors.assign(at(P), Floats(count));
    if (P == 1) {
      result = inputs[0];
      return;
    }
    for (int c = 0; c < P; ++c) {
      const Span chunk = Cut{count, P}.chunk(c);
      Floats sum;
      for (int k = 0; k + 1 < P; ++k) {
        const int r = kthToAdd(c, k, P);
        const float* own = inputs[at(r)].data() + chunk.begin;
        if (schedule == CodedSchedule::kRing) {
          // What came so far and this rank's own, coded by it.
          if (k == 0) sum.assign(own, own + chunk.size);
          for (size_t i = 0; k > 0 && i < chunk.size; ++i) sum[i] += own[i];
          sum = coded(sum, r, chunk, unit());
        } else {
          const Floats theirs = coded({own, own + chunk.size}, r, chunk);
          if (k == 0) sum = theirs;
          for (size_t i = 0; k > 0 && i < chunk.size; ++i) sum[i] += theirs[i];
        }
      }
      for (size_t i = 0; i < chunk.size; ++i) {
        sum[i] += inputs[at(c)][chunk.begin + i];
        if (op == ReduceOp::kAvg) sum[i] /= static_cast<float>(P);
      }
      sum = coded(sum, c, chunk);
      for (size_t i = 0; i < chunk.size; ++i) {
        if (op == ReduceOp::kAvg) errors[at(c)][chunk.begin + i] *= static_cast<float>(P);
        result[chunk.begin + i] = sum[i];
      }
    }
  }

  // A sum so far of an average, in the ring, is coded as float16 in these units.
  float unit() const {
    const bool small = coding.codec == Codec::kFloat16 && op == ReduceOp::kAvg;
    return small && schedule == CodedSchedule::kRing ? std::exp2(std::ceil(std::log2(P))) : 1;
  }

  // What is left of these values of a chunk when they have been coded by a rank, which has the
  // error.
  Floats coded(Floats values, int rank, Span chunk, float unit = 1) {
    for (float& value : values) value /= unit;
    const size_t bytes = codedBytes(coding.codec, values.size());
    std::vector<std::byte> code(bytes);
    const Draw draw{.seed = mixedSeed(coding.seed, static_cast<uint64_t>(rank)),
                    .first = chunk.begin};
    encode(coding.codec, code.data(), errors[at(rank)].data() + chunk.begin, values.data(),
           values.size(), coding.stochastic ? &draw : nullptr);
    Floats left(values.size());
    CHECK(decode(coding.codec, left.data(), code.data(), bytes, left.size()));
    for (size_t i = 0; i < left.size(); ++i) {
      left[i] *= unit;
      errors[at(rank)][chunk.begin + i] *= unit;
    }
    return left;
  }

  CompressedAllReduce call(const float* input, float* output, float* error) const {
    return {.input = input,
            .output = output,
            .count = count,
            .coding = coding,
            .op = op,
            .schedule = schedule,
            .error = error};
  }

  std::string text() const {
    return std::string(name(coding.codec)) + (coding.stochastic ? ", stochastic, " : ", ") +
           kCodedScheduleNames[static_cast<int>(schedule)] + ", " + name(op) + " of " +
           std::to_string(P) + " ranks, " + std::to_string(count) + " elements";
  }

  void expect(int rank, const Floats& output, const Floats* error) const {
    if (!sameBits(output.data(), result.data(), count))
      check::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": the result of " + text());
    if (error && !sameBits(error->data(), errors[at(rank)].data(), count))
      check::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": the error of " + text());
  }

  // Runs it on a rank: with and without errors, in place and not.  `perform` runs the call.
  template <class Perform>
  void run(int rank, Perform perform) const {
    const Floats& input = inputs[at(rank)];
    Floats output(count, 7.F), error(count, 7.F), before = input;
    perform(call(before.data(), output.data(), error.data()));
    expect(rank, output, &error);
    if (before != input) check::fail(__FILE__, __LINE__, "the input was written: " + text());
    perform(call(before.data(), before.data(), nullptr));
    expect(rank, before, nullptr);
  }
};

// How many elements of `result` are not what the inputs less the errors come to, by more than the
// rounding of float32.
inline size_t unaccounted(const std::vector<Floats>& inputs, const std::vector<Floats>& errors,
                          const Floats& result, bool average) {
  size_t wrong = 0;
  const auto P = static_cast<double>(inputs.size());
  for (size_t i = 0; i < result.size(); ++i) {
    double wanted = 0, sizes = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      wanted += static_cast<double>(inputs[r][i]) - static_cast<double>(errors[r][i]);
      sizes += std::fabs(static_cast<double>(inputs[r][i])) +
               std::fabs(static_cast<double>(errors[r][i]));
    }
    if (average) {
      wanted /= P;
      sizes /= P;
    }
    const double slack = (P + 2) * 0x1p-24 * sizes + 1e-37;
    if (std::fabs(wanted - static_cast<double>(result[i])) > slack) ++wrong;
  }
  return wrong;
}

// Sizes about where something begins: nothing, a block, a chunk.
inline std::vector<size_t> sizes(int P) {
  const size_t all = at(P) * kChunkElements;
  return {0, 1, 31, 33, 127, 128, 129, all - 1, all, all + 1, 3 * all + 77};
}

// Every codec with each of these sizes, in turn with both schedules, both operations, with and
// without chance.
inline std::vector<Case> cases(int P, const std::vector<size_t>& counts) {
  std::vector<Case> all;
  size_t turn = static_cast<size_t>(P);
  for (const size_t count : counts)
    for (int codec = 0; codec < kCodecs; ++codec)
      for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing}) {
        const bool stochastic = turn % 3 == 0;
        const Coding coding{static_cast<Codec>(codec), stochastic, turn * 0x123456789abc};
        all.emplace_back(P, count, coding, turn % 2 ? ReduceOp::kSum : ReduceOp::kAvg, schedule);
        ++turn;
      }
  return all;
}

}  // namespace compressed_cases
