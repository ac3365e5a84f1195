// What the modes have in common: ranks of one process with their data, contenders that take turns,
// and where results go.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../tests/cuda/one_process.h"
#include "floors.h"
#include "nccl_all_reduce.h"
#include "rank_data.h"
#include "report.h"
#include "settings.h"

namespace perf {

using ringreduce::DType;
using ringreduce::Nanos;
using ringreduce::ReduceOp;
using ringreduce::cuda::Choice;

inline constexpr int kOk = 0, kWrong = 1, kUsage = 2, kNotPossible = 77;

// The modes; each returns the exit status.
int runCheck(const Settings& settings);
int runFloor(const Settings& settings);
int runSingle(const Settings& settings);
int runLatency(const Settings& settings);
int runProcesses(const Settings& settings);
int runKill(const Settings& settings);
int runBytes(const Settings& settings);

Choice choiceOf(Path path);
// Whether there are such kernels; false for the zero copy of some dtypes and operations.
bool exists(Path path, DType dtype, ReduceOp op, size_t bytes);
// Of device-to-device copies, read and written: bytes a second.
Times copyTimes(size_t bytes, int rounds);
double copyBandwidth();
// How many of this machine's GPUs ranks take that are processes: rank r has number r modulo their
// count.  Starts CUDA: do not fork afterwards.
int gpusFor(int ranks);
// Free memory of the GPU's is enough for ranks with two buffers of `bytes` and some more.
bool fits(int ranks, size_t bytes);
ringreduce::GroupOptions groupOptions(const std::string& name);
// What does not have to be measured.
Measurement measurementOf(const Settings& settings, const std::string& contender, const Job& job);
// Prints a row and appends a line.
void tell(const Settings& settings, const Measurement& measurement, Extra extra);

// Ranks of one process: communicators that map the buffers of `data` (mapped) and such as do not
// (staged), and the streams that both use.
class Bench {
 public:
  Bench(int ranks, size_t most_bytes);

  int size() const { return staged_.size(); }
  size_t mostBytes() const { return most_bytes_; }
  const one_process::Ranks& ranks() const { return staged_; }
  const RankData& data(int r) const { return data_[static_cast<size_t>(r)]; }
  Expected& expected() { return expected_; }

  // "" or why this path cannot be taken here.
  std::string whyNot(Path path) const;
  // Puts an all-reduce into the streams: the first one's, if it is one grid; else each rank's,
  // between fork() and join().  Kernels: one grid, or if `apart` is set a launch for each rank.
  void issue(Path path, const Job& job, bool apart = false) const;
  one_process::Run runOf(const Job& job) const;
  // PREMUL_SUM's factor in the GPU's memory, of the type that `dtype` takes.
  void setFactor(DType dtype, double factor);
  void useFactorOnDevice(bool use) { factor_on_device_ = use; }

  cudaStream_t stream() const { return staged_.stream(); }
  void fork() const { staged_.fork(); }
  void join() const { staged_.join(); }
  void wait() const;

  // One all-reduce from fresh data, and what is wrong with it, of all ranks.  `same`: the expected
  // result is the one that was made last.
  Found runOnce(const Job& job, const std::function<void(const Job&)>& put, bool same = false);

 private:
  one_process::Ranks staged_;
  std::vector<RankData> data_;
  std::optional<one_process::Ranks> mapped_;
  std::string why_not_mapped_, why_not_together_;
  const size_t most_bytes_;
  Expected expected_;
  gpu::Buffer factor_;
  bool factor_on_device_ = false;
};

// NCCL's communicators for the ranks of a bench; null, with a line that says why, if there are
// none.
class Nccl {
 public:
  static std::unique_ptr<Nccl> make(const Settings& settings, const Bench& bench);
  void issue(const Bench& bench, const Job& job) const;

 private:
  nccl::Communicators comms_;
  std::optional<nccl::AllReduce> reduce_;
};

// One of those that are compared.
struct Contender {
  std::string name, way = {};
  std::optional<Path> path;                // none: NCCL
  std::function<void(const Job&)> put;     // one all-reduce into the streams
  std::function<double(const Job&)> time;  // seconds an all-reduce took in a round
  Measurement result;
  std::vector<double> seconds[2];  // out of place, in place
};

// Lets contenders take turns, `rounds` times, in both places, and fills in their times.
void compete(std::vector<Contender>& contenders, const Job& job, int rounds);
// A row for each; the last of them, if it is NCCL, is what the others are compared with.
void tellBesideNccl(const Settings& settings, std::vector<Contender>& contenders);

// Tables of ranks of one process: for each number of ranks a Mode, made with the settings, that
// number, the bytes of the largest message and `more`, measures every dtype, op and size that there
// is room for.  Returns the exit status.
template <class Mode, class... More>
int runTables(const Settings& settings, const std::string& how, const More&... more) {
  size_t wrong = 0;
  bool measured = false;
  for (int ranks : settings.ranks) {
    std::vector<size_t> sizes;
    for (size_t bytes : settings.sizes)
      if (fits(ranks, bytes)) sizes.push_back(bytes);
    if (sizes.empty()) continue;
    std::printf(
        "%s\n",
        titleOf(ranks, 1, how + "; the median of " + std::to_string(settings.rounds) + " rounds")
            .c_str());
    Mode mode(settings, ranks, sizes.back(), more...);
    std::printf("%s\n", tableHeader(Extra::kFloorAndNccl).c_str());
    for (DType dtype : settings.dtypes)
      for (ReduceOp op : settings.ops)
        for (size_t bytes : sizes)
          if (isSupported(dtype, op) && bytes >= sizeOf(dtype)) {
            wrong += mode.run(dtype, op, bytes);
            measured = true;
          }
  }
  if (wrong > 0) return kWrong;
  if (measured) return kOk;
  std::printf(
      "# nothing was measured: no size fits in the GPU's free memory and has a whole element\n");
  return kNotPossible;
}

}  // namespace perf
