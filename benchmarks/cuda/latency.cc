// latency: small messages inside CUDA graphs, where launching costs least.  One graph and one
// stream for each rank, of ours and of NCCL's alike: one launch a rank and all-reduce.  (One
// cooperative grid for all ranks would be fewer launches than NCCL can have.)
#include <cstdio>
#include <set>

#include "bench.h"

namespace perf {
namespace {

constexpr int kCalls = 32;   // all-reduces in a graph, one after the other
constexpr int kReplays = 8;  // of each graph in a round

class Latency {
 public:
  Latency(const Settings& settings, int ranks, size_t most_bytes)
      : settings_(settings), bench_(ranks, most_bytes), nccl_(Nccl::make(settings, bench_)) {}

  size_t run(DType dtype, ReduceOp op, size_t bytes) {
    Job job;
    job.what = {.ranks = bench_.size(),
                .count = bytes / sizeOf(dtype),
                .dtype = dtype,
                .op = op,
                .draw = Texture::kExact,
                .seed = ++seed_};
    std::vector<Contender> contenders;
    for (Path path : settings_.paths) {
      if (!exists(path, dtype, op, bytes)) continue;
      const auto put = [this, path](const Job& j) { bench_.issue(path, j, true); };
      add(contenders, job, name(path), path, bench_.whyNot(path), put);
    }
    if (nccl_ && nccl::supports(dtype, op))
      add(contenders, job, "nccl", std::nullopt, "",
          [this](const Job& j) { nccl_->issue(bench_, j); });
    size_t wrong = 0;
    for (const Contender& one : contenders) wrong += one.result.wrong + one.result.in_place_wrong;
    compete(contenders, job, settings_.rounds);
    tellBesideNccl(settings_, contenders);
    return wrong;
  }

 private:
  // Its graphs, tried out; or a line that says why it is left out.
  void add(std::vector<Contender>& contenders, Job job, const char* contender_name,
           std::optional<Path> path, std::string why_not,
           const std::function<void(const Job&)>& put) {
    Contender one;
    one.name = contender_name;
    one.path = path;
    one.result = measurementOf(settings_, contender_name, job);
    if (why_not.empty()) {
      try {
        // Twice as it is, once as a graph: replays must go on from what went before.
        one.result.wrong = check(one, job, put);
        one.put = [put](const Job& j) { put(j); };
        auto graphs = std::make_shared<std::vector<std::unique_ptr<one_process::Graphs>>>();
        for (const bool in_place : {false, true}) {
          job.in_place = in_place;
          graphs->push_back(std::make_unique<one_process::Graphs>(bench_.ranks(), [&] {
            for (int i = 0; i < kCalls; ++i) put(job);
          }));
        }
        // In place a sum of sums comes of it, so it is the other graph that is checked.
        job.in_place = false;
        one.result.wrong += check(one, job, [&](const Job&) { (*graphs)[0]->launch(); });
        one.time = [this, graphs](const Job& j) { return time(*(*graphs)[j.in_place]); };
        (void)time(*(*graphs)[0]);
        contenders.push_back(std::move(one));
        return;
      } catch (const std::runtime_error& error) {
        why_not = error.what();
        bench_.ranks().comm(0).check();  // of a failed group nothing more is to be expected
      }
    }
    if (left_out_.insert(contender_name).second)
      std::printf("# without %s: %s\n", contender_name, why_not.c_str());
  }

  size_t check(const Contender& one, const Job& job, const std::function<void(const Job&)>& put) {
    const Found found = bench_.runOnce(job, put);
    if (found.wrong > 0) std::printf("WRONG: %s: %s\n", one.name.c_str(), found.first.c_str());
    return found.wrong;
  }

  double time(const one_process::Graphs& graphs) {
    begin_.record(bench_.stream());
    bench_.fork();
    for (int i = 0; i < kReplays; ++i) graphs.launch();
    bench_.join();
    end_.record(bench_.stream());
    gpu::finish(bench_.stream(), "a round of CUDA graphs");
    bench_.wait();
    return end_.since(begin_) / (kCalls * kReplays);
  }

  const Settings& settings_;
  Bench bench_;
  std::unique_ptr<Nccl> nccl_;
  std::set<std::string> left_out_;
  const gpu::Mark begin_, end_;
  uint32_t seed_ = 0;
};

}  // namespace

int runLatency(const Settings& settings) {
  return runTables<Latency>(settings, "one process, in CUDA graphs of " + std::to_string(kCalls) +
                                          " all-reduces, one launch a rank on both sides");
}

}  // namespace perf
