// check: every algorithm, dtype and op against what the CPU computes, bit for bit.
//
// Each all-reduce has fresh addends (so that nothing right is left in a slot from the last one),
// outputs that were poisoned, and, in turn, aligned and misaligned pointers, one grid and a launch
// a rank, a factor of the host's and one in the GPU's memory.
#include <cstdio>
#include <map>

#include "bench.h"
#include "kernels/reduce.h"

namespace perf {
namespace {

// What came of one path and dtype.
struct Tally {
  size_t cases = 0, wrong = 0, bytes = 0;
  std::string ops, first;
};

// Elements of inputs and outputs into their buffers.
constexpr size_t kOffsets[][2] = {{0, 0}, {1, 1}, {0, 3}, {5, 0}, {2, 6}};

std::string textOf(const Job& job, const char* path, bool apart) {
  return std::to_string(job.what.ranks) + " ranks, " + path + (apart ? " (a launch a rank)" : "") +
         ", " + name(job.what.dtype) + ", " + name(job.what.op) + ", " +
         std::to_string(job.what.count) + " elements, " +
         (job.in_place ? "in place" : "out of place") + ", at elements " +
         std::to_string(job.input_at) + " and " +
         std::to_string(job.in_place ? job.input_at : job.output_at) + " of the buffers";
}

class Check {
 public:
  Check(const Settings& settings, int ranks, size_t most_bytes)
      : settings_(settings), bench_(ranks, most_bytes) {}

  size_t run(const std::vector<size_t>& sizes) {
    size_t wrong = 0;
    std::vector<Path> paths;
    for (Path path : settings_.paths) {
      // A sanitizer may run one kernel at a time, and these paths are never one grid.
      const bool is_none = ringreduce::cuda::fixedSizeOf(bench_.size()) < 0;
      if (isFixed(path) && (settings_.reduced || is_none)) {
        std::printf("# %d ranks, without %s: %s\n", bench_.size(), name(path),
                    is_none ? "there is no such kernel" : "its kernels are not one grid");
        continue;
      }
      const std::string why = bench_.whyNot(path);
      if (why.empty())
        paths.push_back(path);
      else
        leaveOut(path, why);
    }
    for (DType dtype : settings_.dtypes) {
      for (ReduceOp op : settings_.ops) {
        if (!isSupported(dtype, op)) continue;
        for (Path path : paths) {
          if (!exists(path, dtype, op, 0)) continue;
          Tally& tally = tallies_[path];
          if (!tally.ops.empty()) tally.ops += ",";
          tally.ops += name(op);
        }
        for (size_t bytes : sizes)
          for (Path path : paths)
            if (exists(path, dtype, op, bytes)) both(path, dtype, op, bytes);
      }
      for (const auto& [path, tally] : tallies_) {
        report(path, dtype, tally);
        wrong += tally.wrong;
        cases_ += tally.cases;
      }
      tallies_.clear();
    }
    return wrong;
  }
  size_t cases() const { return cases_; }
  size_t leftOut() const { return left_out_; }

 private:
  // What was not checked must not look as if it had been.
  void leaveOut(Path path, const std::string& why) {
    ++left_out_;
    std::printf("FAILED: %d ranks, %s was not checked: %s\n", bench_.size(), name(path),
                why.c_str());
  }

  void both(Path path, DType dtype, ReduceOp op, size_t bytes) {
    const size_t count = bytes / sizeOf(dtype);
    if (bytes > 0 && count == 0) return;
    once(path, dtype, op, count, false);
    // In place some other number of elements, that no block or pack divides.
    once(path, dtype, op, count < 3 ? count : (count - count / 7 - 1) | 1, true);
  }

  void once(Path path, DType dtype, ReduceOp op, size_t count, bool in_place) {
    const uint32_t turn = turn_++;
    const auto& offsets = kOffsets[turn % std::size(kOffsets)];
    Job job;
    job.what = {.ranks = bench_.size(),
                .count = count,
                .dtype = dtype,
                .op = op,
                .factor = 0.37109375f * static_cast<float>(turn % 3 + 1),
                .seed = turn};
    job.in_place = in_place;
    job.input_at = offsets[0];
    job.output_at = offsets[1];
    const bool on_device = op == ReduceOp::kPremulSum && in_place;
    if (on_device) bench_.setFactor(dtype, job.what.factor);
    bench_.useFactorOnDevice(on_device);
    // A sanitizer may run one kernel at a time, so there it is one grid always.
    const bool apart = !isDirect(path) && !isFixed(path) && in_place && !settings_.reduced &&
                       count * sizeOf(dtype) <= 1 << 20;
    const Found found = bench_.runOnce(job, [&](const Job& j) { bench_.issue(path, j, apart); });
    Tally& tally = tallies_[path];
    ++tally.cases;
    tally.wrong += found.wrong;
    tally.bytes = std::max(tally.bytes, count * sizeOf(dtype));
    if (found.wrong == 0) return;
    const std::string text = textOf(job, name(path), apart) + ": " + std::to_string(found.wrong) +
                             " wrong; " + found.first;
    if (tally.first.empty()) tally.first = text;
    if (shown_++ < kMostShown) std::printf("WRONG: %s\n", text.c_str());
  }

  void report(Path path, DType dtype, const Tally& tally) const {
    std::printf("%6d %-14s %-9s %7zu cases up to %10zu bytes: %zu wrong\n", bench_.size(),
                name(path), name(dtype), tally.cases, tally.bytes, tally.wrong);
    std::fflush(stdout);
    Json line;
    line.add("mode", "check").add("ranks", bench_.size()).add("gpus", 1).add("sharing", true);
    line.add("algorithm", name(path)).add("dtype", name(dtype)).add("op", tally.ops);
    line.add("bytes", tally.bytes).add("cases", tally.cases).add("wrong", tally.wrong);
    if (!tally.first.empty()) line.add("first_wrong", tally.first);
    append(settings_.json, line);
  }

  static constexpr int kMostShown = 20;
  const Settings& settings_;
  Bench bench_;
  std::map<Path, Tally> tallies_;
  size_t cases_ = 0, left_out_ = 0;
  uint32_t turn_ = 0;
  int shown_ = 0;
};

}  // namespace

int runCheck(const Settings& settings) {
  size_t wrong = 0, cases = 0, left_out = 0;
  for (int ranks : settings.ranks) {
    std::printf("%s\n",
                titleOf(ranks, 1,
                        std::string("bits against the CPU (") + ringreduce::instructionSet() + ")")
                    .c_str());
    std::vector<size_t> sizes;
    for (size_t bytes : settings.sizes) {
      if (fits(ranks, bytes))
        sizes.push_back(bytes);
      else
        std::printf("# without %zu bytes: this GPU has not enough free memory for it\n", bytes);
    }
    if (sizes.empty()) continue;
    Check check(settings, ranks, sizes.back());
    wrong += check.run(sizes);
    cases += check.cases();
    left_out += check.leftOut();
  }
  std::printf("check: %zu cases, %zu wrong, %zu algorithms not checked\n", cases, wrong, left_out);
  if (wrong > 0 || left_out > 0) return kWrong;
  if (cases > 0) return kOk;
  std::printf("# nothing was checked: no size fits in the GPU's free memory\n");
  return kNotPossible;
}

}  // namespace perf
