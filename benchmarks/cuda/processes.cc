// processes: a rank is a process, and all share one GPU.  Without MPS they have it in turns, so the
// schedule is direct, and what small messages cost is hops between their streams, H.
//
// Contenders: the direct schedule on registered buffers, and staged by each way of mapping memory;
// under MPS the kernels too.  The first way's names have no ending, the others' have the way's.
#include "../../tests/cpp/processes.h"

#include <cstdio>

#include "bench.h"
#include "hop.h"
#include "shared.h"

namespace perf {
namespace {

using namespace ringreduce;
using cuda::Communicator;

constexpr double kRound = 20e-3;  // seconds that a round takes at least
constexpr int kMostCalls = 64;

// What only one process says.
template <class... T>
void say(bool speaker, const char* format, T... values) {
  if (!speaker) return;
  std::printf(format, values...);
  std::fflush(stdout);
}

// A rank: one of `size` processes.
class Rank {
 public:
  Rank(const Settings& settings, Store& store, int rank, int size, size_t most_bytes)
      : settings_(settings),
        store_(store),
        rank_(rank),
        size_(size),
        control_(Group::create(store, rank, size, groupOptions("control"))),
        data_(rank, most_bytes),
        expected_(most_bytes) {}

  // `met` counts how often the two that play have come to wait for each other.
  void measureHop(HopWords& words, std::atomic<int>& met) {
    Times times;
    // The others leave the GPU alone.
    if (rank_ < 2) {
      HopMeter meter(words);
      times = meter.measure(rank_, settings_.rounds, [&] { meet(met); });
    }
    barrier();
    hop_us_ = agreeOn(times.median);
    if (rank_ != 0) return;
    std::printf("# H = %.2f us [%.2f, %.2f]: one process's stream waits for another's write\n",
                times.median, times.least, times.most);
    Json line;
    line.add("mode", settings_.modeName()).add("ranks", size_).add("sharing", true);
    line.add("algorithm", "hop").add("dtype", "float32").add("op", "SUM").add("bytes", 4);
    line.add("time_us", times).add("algbw", 0).add("busbw", 0).add("wrong", 0);
    append(settings_.json, line);
  }

  void measureBandwidth() {
    const double mine = rank_ == 0 ? copyBandwidth() : 0;
    barrier();
    bandwidth_ = agreeOn(mine);
    say(rank_ == 0, "# copies read and write %.0f GB/s\n", bandwidth_ / 1e9);
  }

  // Communicators of all contenders.
  void enter() {
    for (size_t i = 0; i < settings_.ways.size(); ++i) {
      const std::string& way = settings_.ways[i];
      const std::string ending = i == 0 ? "" : "-" + way;
      cuda::CommunicatorOptions options;
      options.access = cuda::memoryAccessNamed(way);  // auto has none
      std::shared_ptr<Communicator> staged, registered;
      try {
        staged = Communicator::create(newGroup("staged " + way), 0, options);
        if (i == 0) registered = Communicator::create(newGroup("registered"), 0, options);
      } catch (const Error& error) {
        say(rank_ == 0, "# without %s: %s\n", way.c_str(), error.what());
        continue;
      }
      const bool turns = !staged->kernelsRunAtOnce();
      say(rank_ == 0, "# %s: memory is mapped by %s; %s\n", way.c_str(),
          cuda::name(staged->access()),
          turns ? "the processes have the GPU in turns"
                : "the processes' kernels run at once (MPS)");
      for (Path path : settings_.paths) {
        if (path == Path::kDirect) {
          if (registered) addRegistered(registered, way);
        } else if (isDirect(path) || !turns) {
          add(name(path) + ending, path, staged, way);
        }
      }
    }
  }

  size_t run(DType dtype, ReduceOp op, size_t bytes) {
    Job job;
    job.what = {.ranks = size_,
                .count = bytes / sizeOf(dtype),
                .dtype = dtype,
                .op = op,
                .draw = Texture::kExact,
                .seed = ++seed_};
    expected_.make(job.what, stream_.get());
    size_t wrong = 0;
    for (Contender& one : contenders_) {
      one.result = measurementOf(settings_, one.name, job);
      one.result.way = one.way;
      one.result.hop_us = hop_us_;
      one.result.floor_us =
          floorMicroseconds(*one.path, size_, one.result.bytes, dtype, bandwidth_);
      for (const bool in_place : {false, true}) {
        job.in_place = in_place;
        (in_place ? one.result.in_place_wrong : one.result.wrong) = check(one, job);
      }
      wrong += one.result.wrong + one.result.in_place_wrong;
      job.in_place = false;
      const double once = time(one.put, job, 2);
      const int calls = static_cast<int>(
          std::clamp(agreeOn(kRound / std::max(once, 1e-9)), 1.0, double{kMostCalls}));
      one.time = [this, put = one.put, calls](const Job& j) { return time(put, j, calls); };
    }
    compete(contenders_, job, settings_.rounds);
    if (rank_ == 0)
      for (const Contender& one : contenders_) tell(settings_, one.result, Extra::kHops);
    return wrong;
  }

  // Nobody frees what another process may still map.
  void leave() {
    contenders_.clear();
    comms_.clear();
    barrier();
  }

  bool hasContenders() const { return !contenders_.empty(); }

 private:
  std::shared_ptr<Group> newGroup(const std::string& group) {
    return Group::create(store_, rank_, size_, groupOptions(group));
  }

  void barrier() { control_->run({Barrier{}}); }
  // Rank 0's value.
  double agreeOn(double mine) {
    control_->run({Broadcast{&mine, 1, DType::kFloat64, 0}});
    return mine;
  }
  int64_t sum(int64_t mine) {
    control_->run({AllReduce{&mine, 1, DType::kInt64, ReduceOp::kSum}});
    return mine;
  }
  // Two processes wait for each other, while the others do something else.
  static void meet(std::atomic<int>& arrived) {
    const int last = (arrived.fetch_add(1) / 2 + 1) * 2;
    const Nanos deadline = deadlineIn(gpu::kHang);
    while (arrived.load() < last) {
      if (now() > deadline) throw std::runtime_error("the other process has not come");
      std::this_thread::yield();
    }
  }

  void addRegistered(const std::shared_ptr<Communicator>& comm, const std::string& way) {
    std::string why;
    for (const gpu::Buffer* buffer : {&data_.inputBuffer(), &data_.outputBuffer()})
      if (why.empty()) why = comm->registerBuffer(buffer->get(), buffer->bytes());
    if (sum(!why.empty()) == 0)
      add("direct", Path::kDirect, comm, way);
    else
      say(!why.empty(), "# without registered buffers: rank %d: %s\n", rank_, why.c_str());
  }

  void add(const std::string& contender, Path path, const std::shared_ptr<Communicator>& comm,
           const std::string& way) {
    Contender one;
    one.name = contender;
    one.path = path;
    one.put = [this, comm, path](const Job& job) {
      comm->allReduce({.input = data_.input(job),
                       .output = data_.output(job),
                       .count = job.what.count,
                       .dtype = job.what.dtype,
                       .op = job.what.op,
                       .algorithm = choiceOf(path)},
                      stream_.get());
    };
    one.way = way;
    contenders_.push_back(std::move(one));
    comms_.push_back(comm);
  }

  // Elements that are wrong, of all ranks.
  size_t check(const Contender& one, const Job& job) {
    data_.prepare(job, stream_.get());
    one.put(job);
    data_.compare(job, expected_, stream_.get());
    finish();
    const Found found = data_.found(job, expected_);
    say(found.wrong > 0, "WRONG: %s: %s\n", one.name.c_str(), found.first.c_str());
    return static_cast<size_t>(sum(static_cast<int64_t>(found.wrong)));
  }

  void finish() {
    gpu::finish(stream_.get(), "an all-reduce");
    for (const auto& comm : comms_) comm->check();
  }

  double time(const std::function<void(const Job&)>& put, const Job& job, int calls) {
    barrier();
    const Nanos begin = now();
    for (int i = 0; i < calls; ++i) put(job);
    finish();
    return static_cast<double>(now() - begin) / kSecond / calls;
  }

  const Settings& settings_;
  Store& store_;
  const int rank_, size_;
  const std::shared_ptr<Group> control_;
  RankData data_;
  Expected expected_;
  const gpu::Stream stream_;
  std::vector<Contender> contenders_;
  std::vector<std::shared_ptr<Communicator>> comms_;
  double hop_us_ = 0, bandwidth_ = 1;
  uint32_t seed_ = 0;
};

struct RankPage {
  HopWords words;
  std::atomic<int> met;
  size_t most;  // bytes of the largest message that fits
  std::atomic<size_t> wrong, measured;
};

void body(const Settings& settings, Store& store, RankPage& page, int rank, int size) {
  gpu::must(cudaSetDevice(0), "use the GPU");
  std::vector<size_t> sizes;
  for (size_t bytes : settings.sizes)
    if (bytes <= page.most) sizes.push_back(bytes);
  Rank self(settings, store, rank, size, sizes.back());
  self.measureHop(page.words, page.met);
  self.measureBandwidth();
  self.enter();
  if (rank == 0 && self.hasContenders()) std::printf("%s\n", tableHeader(Extra::kHops).c_str());
  for (DType dtype : settings.dtypes)
    for (ReduceOp op : settings.ops)
      for (size_t bytes : sizes) {
        if (!isSupported(dtype, op) || bytes < sizeOf(dtype) || !self.hasContenders()) continue;
        const size_t wrong = self.run(dtype, op, bytes);
        if (rank == 0) {
          page.wrong += wrong;
          ++page.measured;
        }
      }
  self.leave();
}

}  // namespace

int runProcesses(const Settings& settings) {
  bool good = true;
  size_t measured = 0;
  for (int size : settings.ranks) {
    std::printf("%s\n", sharingTitle(size, "each a process; the median of " +
                                               std::to_string(settings.rounds) + " rounds")
                            .c_str());
    Shared<RankPage> page;
    processes::SharedStore store;
    // What fits is asked once, by a process of its own, before the ranks take any.
    processes::run(1, [&](int) {
      for (size_t bytes : settings.sizes)
        if (fits(size, bytes)) page->most = bytes;
    });
    if (page->most == 0) {
      std::printf("# this GPU has not enough free memory for any of the sizes\n");
      continue;
    }
    const processes::Ends ends =
        processes::run(size, [&](int rank) { body(settings, store, *page, rank, size); });
    for (size_t r = 0; r < ends.size(); ++r)
      if (!ends[r].empty()) {
        std::printf("FAILED: rank %zu of %d: %s\n", r, size, ends[r].c_str());
        good = false;
      }
    good = good && page->wrong == 0;
    measured += page->measured;
  }
  if (!good) return kWrong;
  return measured > 0 ? kOk : kNotPossible;
}

}  // namespace perf
