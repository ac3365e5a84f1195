// single: bandwidth of ranks of one process.  Each rank has a stream and a launch, as in training
// and as NCCL has.
#include <cstdio>

#include "bench.h"

namespace perf {
namespace {

constexpr double kRound = 5e-3;  // seconds that a round takes at least
constexpr int kMostCalls = 50;   // in the streams at once

class Single {
 public:
  Single(const Settings& settings, int ranks, size_t most_bytes, double bandwidth)
      : settings_(settings), bench_(ranks, most_bytes), bandwidth_(bandwidth) {
    for (Path path : settings.paths) {
      const std::string why = bench_.whyNot(path);
      if (why.empty())
        paths_.push_back(path);
      else
        std::printf("# without %s: %s\n", name(path), why.c_str());
    }
    nccl_ = Nccl::make(settings, bench_);
  }

  size_t run(DType dtype, ReduceOp op, size_t bytes) {
    Job job;
    job.what = {.ranks = bench_.size(),
                .count = bytes / sizeOf(dtype),
                .dtype = dtype,
                .op = op,
                .draw = Texture::kExact,
                .seed = ++seed_};
    std::vector<Contender> contenders;
    for (Path path : paths_)
      if (exists(path, dtype, op, bytes))
        contenders.push_back(contender(name(path), path, [this, path](const Job& j) {
          bench_.issue(path, j, /*apart=*/true);
        }));
    if (nccl_ && nccl::supports(dtype, op))
      contenders.push_back(
          contender("nccl", std::nullopt, [this](const Job& j) { nccl_->issue(bench_, j); }));
    size_t wrong = 0;
    bool same = false;
    for (Contender& one : contenders) {
      one.result = measurementOf(settings_, one.name, job);
      for (const bool in_place : {false, true}) {
        job.in_place = in_place;
        const Found found = bench_.runOnce(job, one.put, same);
        same = true;
        (in_place ? one.result.in_place_wrong : one.result.wrong) = found.wrong;
        wrong += found.wrong;
        if (found.wrong > 0) std::printf("WRONG: %s: %s\n", one.name.c_str(), found.first.c_str());
      }
      if (one.path)
        one.result.floor_us =
            floorMicroseconds(*one.path, bench_.size(), one.result.bytes, dtype, bandwidth_);
      calibrate(one, job);
    }
    compete(contenders, job, settings_.rounds);
    tellBesideNccl(settings_, contenders);
    return wrong;
  }

 private:
  Contender contender(const char* name, std::optional<Path> path,
                      std::function<void(const Job&)> put) {
    Contender one;
    one.name = name;
    one.path = path;
    one.put = std::move(put);
    return one;
  }

  // Seconds that one of `calls` all-reduces in a row takes.
  double time(const std::function<void(const Job&)>& put, const Job& job, int calls) {
    begin_.record(bench_.stream());
    bench_.fork();
    for (int i = 0; i < calls; ++i) put(job);
    bench_.join();
    end_.record(bench_.stream());
    gpu::finish(bench_.stream(), "a round of all-reduces");
    bench_.wait();
    return end_.since(begin_) / calls;
  }

  void calibrate(Contender& one, const Job& job) {
    const double once = time(one.put, job, 3);
    const int calls = static_cast<int>(
        std::clamp(kRound / std::max(once, 1e-9), 1.0, static_cast<double>(kMostCalls)));
    one.time = [this, put = one.put, calls](const Job& j) { return time(put, j, calls); };
  }

  const Settings& settings_;
  Bench bench_;
  const double bandwidth_;
  std::vector<Path> paths_;
  std::unique_ptr<Nccl> nccl_;
  const gpu::Mark begin_, end_;
  uint32_t seed_ = 0;
};

}  // namespace

int runSingle(const Settings& settings) {
  const double bandwidth = copyBandwidth();
  std::printf("# copies read and write %.0f GB/s; ceiling: the share of what that allows\n",
              bandwidth / 1e9);
  return runTables<Single>(settings, "one process", bandwidth);
}

}  // namespace perf
