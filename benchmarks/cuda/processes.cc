// processes: a rank is a process, on a GPU of its own as far as there are enough.  Where ranks
// share one without MPS they have it in turns, so the schedule is direct, and what small messages
// cost is hops between their streams, H.
//
// Contenders: the direct schedule on mapped tensors, and staged by each way of mapping memory;
// the kernels, where those of all ranks run at once; NCCL, where each rank has a GPU.  The first
// way's names have no ending, the others' have the way's.
#include "../../tests/cpp/processes.h"

#include <cstdio>

#include "bench.h"
#include "hop.h"
#include "shared.h"

namespace perf {
namespace {

using namespace ringreduce;
using cuda::HostCommunicator;

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
  Rank(const Settings& settings, Store& store, int rank, int size, int gpus, size_t most_bytes)
      : settings_(settings),
        store_(store),
        rank_(rank),
        size_(size),
        gpus_(gpus),
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
    line.add("mode", settings_.modeName()).add("ranks", size_).add("gpus", gpus_);
    line.add("sharing", gpus_ < size_)
        .add("algorithm", "hop")
        .add("dtype", "float32")
        .add("op", "SUM")
        .add("bytes", 4);
    line.add("time_us", times).add("algbw", 0).add("busbw", 0).add("wrong", 0);
    append(settings_.json, line);
  }

  // For the floors, which are of ranks that share all of one GPU's memory.
  void measureBandwidth() {
    if (gpus_ > 1) return;
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
      options.maps_tensors = false;
      std::shared_ptr<HostCommunicator> staged, mapped;
      try {
        staged = HostCommunicator::create(newGroup("staged " + way), gpu(), options);
        // The memory of the direct schedule is there only if it is asked for.
        options.algorithm = cuda::Choice::kDirect;
        options.maps_tensors = true;
        if (i == 0) mapped = HostCommunicator::create(newGroup("mapped"), gpu(), options);
      } catch (const Error& error) {
        say(rank_ == 0, "# without %s: %s\n", way.c_str(), error.what());
        continue;
      }
      const bool turns = !staged->kernelsRunAtOnce();
      say(rank_ == 0, "# %s: memory is mapped by %s; %s\n", way.c_str(),
          cuda::name(staged->access()),
          turns           ? "processes that share a GPU have it in turns"
          : gpus_ < size_ ? "the processes' kernels run at once (MPS)"
                          : "the processes' kernels run at once");
      for (Path path : settings_.paths) {
        if (takesMapped(path)) {
          const bool fits = path == Path::kDirect || (!turns && cuda::fixedSizeOf(size_) >= 0);
          if (mapped && fits) addMapped(path, mapped, way);
        } else if (isDirect(path) == turns && (!isFixed(path) || cuda::fixedSizeOf(size_) >= 0)) {
          add(name(path) + ending, path, staged, way);
        }
      }
    }
    if (gpus_ == size_) enterNccl();
  }

  size_t run(DType dtype, ReduceOp op, size_t bytes) {
    Job job;
    job.what = {
        .ranks = size_, .count = bytes / sizeOf(dtype), .dtype = dtype, .op = op, .seed = ++seed_};
    expected_.make(job.what, stream_.get());
    size_t wrong = 0;
    for (Contender& one : contenders_) {
      if (!takesPart(one, dtype, op, bytes)) continue;
      if (!one.path) {
        // Its order of addition is its own, so it gets addends whose sums need no rounding.
        job.what.draw = Texture::kExact;
        expected_.make(job.what, stream_.get());
      }
      one.result = measurementOf(settings_, one.name, job);
      one.result.gpus = gpus_;
      one.result.way = one.way;
      one.result.hop_us = hop_us_;
      if (gpus_ == 1)
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
    std::vector<Contender> racers;
    for (const Contender& one : contenders_)
      if (takesPart(one, dtype, op, bytes)) racers.push_back(one);
    compete(racers, job, settings_.rounds);
    if (rank_ != 0) return wrong;
    if (gpus_ == size_)
      tellBesideNccl(settings_, racers);
    else
      for (const Contender& one : racers) tell(settings_, one.result, Extra::kHops);
    return wrong;
  }

  // Nobody frees what another process may still map.
  void leave() {
    contenders_.clear();
    comms_.clear();
    nccl_.reset();
    barrier();
  }

  bool hasContenders() const { return !contenders_.empty(); }

 private:
  int gpu() const { return rank_ % gpus_; }
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

  // NCCL on the same ranks.  All agree on each step, as its calls wait for each other.
  void enterNccl() {
    std::string why;
    std::shared_ptr<const cuda::NcclLibrary> library;
    cuda::NcclId id{};
    try {
      library = cuda::NcclLibrary::load(settings_.nccl);
      if (rank_ == 0) id = library->makeId();
    } catch (const Error& error) {
      why = error.what();
    }
    if (sum(!why.empty()) == 0) {
      control_->run({Broadcast{id.data(), id.size(), DType::kUInt8, 0}});
      try {
        nccl_reduce_.emplace(*library);
        nccl_ = std::make_unique<cuda::NcclCommunicator>(library, id, rank_, size_);
      } catch (const Error& error) {
        why = error.what();
      }
    }
    if (sum(nccl_ == nullptr) > 0) {
      say(!why.empty(), "# without NCCL: rank %d: %s\n", rank_, why.c_str());
      nccl_.reset();
      return;
    }
    say(rank_ == 0, "# beside %s\n", library->description().c_str());
    Contender one;
    one.name = "nccl";
    one.put = [this](const Job& job) {
      (*nccl_reduce_)(*nccl_, data_.input(job), data_.output(job), job.what.count, job.what.dtype,
                      job.what.op, stream_.get());
    };
    contenders_.push_back(std::move(one));
  }

  static bool takesPart(const Contender& one, DType dtype, ReduceOp op, size_t bytes) {
    return one.path ? exists(*one.path, dtype, op, bytes) : nccl::supports(dtype, op);
  }

  void addMapped(Path path, const std::shared_ptr<HostCommunicator>& comm, const std::string& way) {
    if (!why_not_mapped_) {
      why_not_mapped_ = "";
      try {
        data_.move(one_process::ownBuffer);
      } catch (const Error& error) {
        why_not_mapped_ = error.what();
      }
      const Nanos deadline = deadlineIn(gpu::kHang);
      for (const gpu::Buffer* buffer : {&data_.inputBuffer(), &data_.outputBuffer()})
        while (why_not_mapped_->empty() && !comm->isMapped(buffer->get(), buffer->bytes())) {
          if (now() > deadline) why_not_mapped_ = "its peers do not map its memory";
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    if (sum(!why_not_mapped_->empty()) == 0)
      add(name(path), path, comm, way);
    else
      say(!why_not_mapped_->empty(), "# without mapped tensors: rank %d: %s\n", rank_,
          why_not_mapped_->c_str());
  }

  void add(const std::string& contender, Path path, const std::shared_ptr<HostCommunicator>& comm,
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
    if (nccl_) nccl_->check();
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
  const int rank_, size_, gpus_;
  const std::shared_ptr<Group> control_;
  RankData data_;
  Expected expected_;
  const gpu::Stream stream_;
  std::vector<Contender> contenders_;
  std::vector<std::shared_ptr<HostCommunicator>> comms_;
  std::unique_ptr<cuda::NcclCommunicator> nccl_;
  std::optional<nccl::AllReduce> nccl_reduce_;
  std::optional<std::string> why_not_mapped_;  // once tried; "" if they were
  double hop_us_ = 0, bandwidth_ = 1;
  uint32_t seed_ = 0;
};

struct RankPage {
  HopWords words;
  std::atomic<int> met;
  int gpus;
  size_t most;  // bytes of the largest message that fits
  std::atomic<size_t> wrong, measured;
};

void body(const Settings& settings, Store& store, RankPage& page, int rank, int size) {
  gpu::must(cudaSetDevice(rank % page.gpus), "use the GPU");
  std::vector<size_t> sizes;
  for (size_t bytes : settings.sizes)
    if (bytes <= page.most) sizes.push_back(bytes);
  Rank self(settings, store, rank, size, page.gpus, sizes.back());
  self.measureHop(page.words, page.met);
  self.measureBandwidth();
  self.enter();
  const Extra extra = page.gpus == size ? Extra::kFloorAndNccl : Extra::kHops;
  if (rank == 0 && self.hasContenders()) std::printf("%s\n", tableHeader(extra).c_str());
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
    Shared<RankPage> page;
    processes::SharedStore store;
    // What fits is asked once, by a process of its own, before the ranks take any.
    const std::string unknown = processes::run(1, [&](int) {
      page->gpus = gpusFor(size);
      const int each = (size + page->gpus - 1) / page->gpus;
      for (size_t bytes : settings.sizes) {
        bool everywhere = true;
        for (int gpu = 0; gpu < page->gpus && everywhere; ++gpu) {
          gpu::must(cudaSetDevice(gpu), "use the GPU");
          everywhere = fits(each, bytes);
        }
        if (everywhere) page->most = bytes;
      }
    })[0];
    if (!unknown.empty()) throw std::runtime_error(unknown);
    std::printf("%s\n", titleOf(size, page->gpus,
                                "each a process; the median of " + std::to_string(settings.rounds) +
                                    " rounds")
                            .c_str());
    if (page->most == 0) {
      std::printf("# a GPU has not enough free memory for any of the sizes\n");
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
