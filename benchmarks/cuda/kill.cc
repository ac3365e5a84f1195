// kill: a rank, a process, is killed amid calls, another time stopped.  The others must raise an
// error that names it; a new group of them and one new process must work, and the GPU be free for
// them.  A stopped rank goes on once the others have raised, and must raise too.
//
// A rank is killed twice: once while the others use its slots, and once while they read and write
// its tensors where they are, as they do DDP's buckets.  That they may is a promise of CUDA's:
// memory that was shared by a descriptor lives as long as anybody maps it.  If it did not hold,
// their GPU would be ruined, and their new group not work.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "../../tests/cpp/processes.h"
#include "bench.h"
#include "shared.h"

namespace perf {
namespace {

using namespace ringreduce;
using cuda::HostCommunicator;

constexpr size_t kBytes = 1 << 20;
constexpr Nanos kTimeout = 4 * kSecond;  // after which a stopped rank is an error
constexpr Nanos kBeforeDeath = 300 * kMillisecond;
constexpr int kMostRanks = 17;  // of Settings, and the new one

// What happens to a rank.
struct Fate {
  bool stopped = false;  // else killed
  bool mapped = false;   // the tensors are
};

struct RankPage {
  int gpus;
  std::atomic<Nanos> killed;  // or stopped
  std::atomic<pid_t> victim;
  std::atomic<int> over;  // survivors that are done with the first group
  struct Rank {
    double raised_s, kernel_ms, again_ms;
    size_t wrong;
    pid_t pid;
    char algorithm[32], not_mapped[800], text[800];
  };
  Rank ranks[kMostRanks];
};

// A rank of one group: its communicator, its data and what must come of it.
class Rank {
 public:
  Rank(Store& store, const std::string& group, int rank, int size, int gpu, bool mapped = false)
      : data_(rank, kBytes),
        comm_(HostCommunicator::create(Group::create(store, rank, size, optionsOf(group)), gpu,
                                       cuda::CommunicatorOptions{})),
        expected_(kBytes) {
    if (mapped) mapData();
    job_.what = {.ranks = size,
                 .count = kBytes / sizeof(float),
                 .dtype = DType::kFloat32,
                 .op = ReduceOp::kSum,
                 .draw = Texture::kExact,
                 .seed = 7};
    expected_.make(job_.what, stream_.get());
    data_.prepare(job_, stream_.get());
    gpu::finish(stream_.get(), "the filling of memory");
  }

  void allReduce() {
    comm_->allReduce({.input = data_.input(job_),
                      .output = data_.output(job_),
                      .count = job_.what.count,
                      .dtype = job_.what.dtype,
                      .op = job_.what.op},
                     stream_.get());
    if (!comm_->wait(gpu::kHang)) throw std::runtime_error("an all-reduce neither ends nor raises");
  }

  // Elements of the last result that are wrong; after an error it may be poisoned instead, and
  // where peers wrote to it themselves, in part.
  size_t wrong(bool may_be_poisoned) {
    gpu::finish(stream_.get(), "a stream after an error");
    if (may_be_poisoned && data_.isPoisoned(job_, stream_.get())) return 0;
    data_.compare(job_, expected_, stream_.get());
    gpu::finish(stream_.get(), "a comparison");
    Found found = data_.found(job_, expected_);
    if (may_be_poisoned && mapped_)
      for (const float one : gpu::fromGpu<float>(data_.output(job_), job_.what.count))
        found.wrong -= std::isnan(one);
    if (found.wrong > 0) std::printf("WRONG: %s\n", found.first.c_str());
    return found.wrong;
  }

  std::string algorithm() const {
    const cuda::Choice chosen = comm_->chosen(job_.what.count, job_.what.dtype);
    if (mapped_ && chosen != cuda::Choice::kDirect && cuda::fixedSizeOf(comm_->size()) >= 0)
      return name(Path::kZeroCopy);
    return cuda::kChoiceNames[static_cast<size_t>(chosen)];
  }
  // Why the tensors could not be mapped; "" if nobody asked for that.
  const std::string& whyNotMapped() const { return why_not_mapped_; }

 private:
  void mapData() {
    if (comm_->access() != cuda::MemoryAccess::kDescriptor) {
      why_not_mapped_ = std::string("ranks reach each other's memory by ") +
                        cuda::name(comm_->access()) + ", not by descriptor";
      return;
    }
    data_.move(one_process::ownBuffer);
    const Nanos deadline = deadlineIn(gpu::kHang);
    const auto isMapped = [&](const gpu::Buffer& buffer) {
      return comm_->isMapped(buffer.get(), buffer.bytes());
    };
    while (!isMapped(data_.inputBuffer()) || !isMapped(data_.outputBuffer())) {
      if (now() > deadline) throw std::runtime_error("a rank's memory is not mapped");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    mapped_ = true;
  }

  static GroupOptions optionsOf(const std::string& group) {
    GroupOptions options = groupOptions(group);
    options.timeout = kTimeout;
    return options;
  }

  RankData data_;
  const std::shared_ptr<HostCommunicator> comm_;
  bool mapped_ = false;
  std::string why_not_mapped_;
  Expected expected_;
  const gpu::Stream stream_;
  Job job_;
};

// All-reduces until one raises, as it must: then tells when and what.
void untilItRaises(Rank& rank, RankPage& page, RankPage::Rank& report, int victim, bool stopped) {
  const Nanos deadline = deadlineIn(gpu::kHang);
  try {
    while (now() < deadline) rank.allReduce();
  } catch (const Error& error) {
    report.raised_s = static_cast<double>(now() - page.killed) / kSecond;
    std::snprintf(report.text, sizeof report.text, "%s", error.what());
    if (page.killed == 0)
      throw std::runtime_error("raised before a rank was killed: " + std::string(error.what()));
    if (error.kind() != (stopped ? Failure::kTimeout : Failure::kPeerLost) ||
        !std::strstr(report.text, ("rank " + std::to_string(victim)).c_str()))
      throw std::runtime_error("does not say that rank " + std::to_string(victim) + " is " +
                               (stopped ? "late: " : "lost: ") + error.what());
    return;
  }
  throw std::runtime_error("no error, though rank " + std::to_string(victim) + " was " +
                           (stopped ? "stopped" : "killed"));
}

// What a kernel takes that waits for nobody: with the GPU held by one that spins, for ever.
double kernelMilliseconds() {
  const gpu::Buffer buffer(kBytes);
  const gpu::Stream stream;
  const Nanos begin = now();
  fillOnGpu(DType::kFloat32, buffer.get(), kBytes / sizeof(float), Texture::kRough, 1,
            stream.get());
  gpu::finish(stream.get(), "a kernel after a rank was killed");
  return static_cast<double>(now() - begin) / kMillisecond;
}

// Ranks 0 to size-2 survive, size-1 is killed or stopped, and process `size` takes its place
// afterwards.
void body(Store& store, Store& again, RankPage& page, int process, int size, Fate fate) {
  const int victim = size - 1, rank_again = std::min(process, victim);
  const int gpu = rank_again % page.gpus;
  RankPage::Rank& report = page.ranks[process];
  report.pid = getpid();
  if (process < size) {
    gpu::must(cudaSetDevice(gpu), "use the GPU");
    Rank rank(store, "before", process, size, gpu, fate.mapped);
    for (int i = 0; i < 10; ++i) rank.allReduce();
    if (process == victim) {
      std::thread([&page, fate] {
        std::this_thread::sleep_for(std::chrono::nanoseconds(kBeforeDeath));
        page.victim = getpid();
        page.killed = now();
        kill(getpid(), fate.stopped ? SIGSTOP : SIGKILL);
      }).detach();
      try {
        for (;;) rank.allReduce();
      } catch (const Error&) {
        if (page.killed == 0) throw;
        return;  // it was stopped, and the others have gone on without it
      }
    }
    std::snprintf(report.algorithm, sizeof report.algorithm, "%s", rank.algorithm().c_str());
    std::snprintf(report.not_mapped, sizeof report.not_mapped, "%s", rank.whyNotMapped().c_str());
    untilItRaises(rank, page, report, victim, fate.stopped);
    report.wrong = rank.wrong(true);
  }
  if (process < size) {
    ++page.over;
  } else {
    const Nanos deadline = deadlineIn(2 * gpu::kHang);
    while (page.over < size - 1 && now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (fate.stopped && page.victim != 0) kill(page.victim, SIGCONT);
    if (page.over < size - 1) throw std::runtime_error("the survivors are not done");
    gpu::must(cudaSetDevice(gpu), "use the GPU");
  }
  report.kernel_ms = kernelMilliseconds();
  const Nanos begin = now();
  Rank rank(again, "after", rank_again, size, gpu);
  for (int i = 0; i < 10; ++i) rank.allReduce();
  report.again_ms = static_cast<double>(now() - begin) / kMillisecond;
  report.wrong += rank.wrong(false);
}

// What came of it, with a line for the table; whether all is as it must be.
bool tell(const Settings& settings, const RankPage& page, const processes::Ends& ends, int size,
          Fate fate) {
  bool good = true;
  std::vector<double> raised, pids;
  size_t wrong = 0;
  for (int i = 0; i <= size; ++i) {
    const std::string& end = ends[static_cast<size_t>(i)];
    const RankPage::Rank& one = page.ranks[i];
    const bool victim = i == size - 1;
    pids.push_back(one.pid);
    if (victim && !fate.stopped ? end != "killed by signal 9" : !end.empty()) {
      std::printf("FAILED: process %d: %s\n", i, end.empty() ? "it lives" : end.c_str());
      good = false;
    }
    if (victim) continue;
    wrong += one.wrong;
    if (i < size) {
      raised.push_back(one.raised_s);
      std::printf("rank %d raised after %.3f s: %s\n", i, one.raised_s, one.text);
    }
    std::printf("%s %d: a kernel took %.2f ms, the new group and 10 all-reduces %.0f ms\n",
                i < size ? "rank" : "the new process in place of rank", i < size ? i : size - 1,
                one.kernel_ms, one.again_ms);
  }
  const bool mapped = fate.mapped && page.ranks[0].not_mapped[0] == 0;
  if (mapped != fate.mapped)
    std::printf("# without mapped tensors: %s\n", page.ranks[0].not_mapped);
  const Times times = timesOf(raised);
  std::printf("%zu wrong; all had raised after %.3f s\n", wrong, times.most / 1e6);
  std::fflush(stdout);
  Json line;
  line.add("mode", fate.stopped ? "stop" : "kill").add("mapped", mapped);
  line.add("ranks", size).add("gpus", page.gpus);
  line.add("sharing", page.gpus < size).add("algorithm", page.ranks[0].algorithm);
  line.add("dtype", "float32").add("op", "SUM").add("bytes", kBytes).add("time_us", times);
  line.add("algbw", 0)
      .add("busbw", 0)
      .add("wrong", wrong)
      .add("raised_s", raised)
      .add("pids", pids);
  append(settings.json, line);
  return good && wrong == 0;
}

}  // namespace

int runKill(const Settings& settings) {
  bool good = true;
  for (int size : settings.ranks)
    for (const Fate fate : {Fate{}, Fate{.mapped = true}, Fate{.stopped = true}}) {
      Shared<RankPage> page;
      const std::string unknown = processes::run(1, [&](int) { page->gpus = gpusFor(size); })[0];
      if (!unknown.empty()) throw std::runtime_error(unknown);
      std::printf("%s\n",
                  titleOf(size, page->gpus,
                          std::string("each a process, of which one is ") +
                              (fate.stopped ? "stopped" : "killed") + " amid all-reduces of 1 MiB" +
                              (fate.mapped ? " in mapped tensors" : "") +
                              "; then a new group with a new process")
                      .c_str());
      processes::SharedStore store, again;
      const processes::Ends ends = processes::run(
          size + 1, [&](int process) { body(store, again, *page, process, size, fate); });
      good = tell(settings, *page, ends, size, fate) && good;
    }
  return good ? kOk : kWrong;
}

}  // namespace perf
