// All-reduce between hosts on the fake of CUDA, over the stand-in for NCCL: ranks are threads that
// pose as hosts, kernels run as host code when they are launched, and inside a host a group of the
// core's stands for its GPUs.
#define CHECK_OWN_MAIN
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include "cuda/internode/internode_communicator.h"
#include "cuda/kernels/kernel_table.h"
#include "fake_cuda.h"
#include "fake_launch.h"
#include "fake_nccl.h"
#include "host_block.h"
#include "peers.h"
#include "ring_oracle.h"

// ---- kernels, as functions of their arguments

namespace {

using namespace ringreduce;
using namespace ringreduce::cuda;

using HostKernel = void (*)(const void* call, int blocks);

template <class Call, class Run>
void eachBlock(const void* call, int blocks, Run run) {
  host::Team team(1);
  host::Block block(team, 0);
  for (int b = 0; b < blocks; ++b) run(block, *static_cast<const Call*>(call), b, blocks);
}
template <DType t>
void hostCopyIn(const void* call, int blocks) {
  eachBlock<CopyCall>(call, blocks, [](auto&... all) { copyIn<Element<t>>(all...); });
}
template <DType t>
void hostRingStep(const void* call, int blocks) {
  eachBlock<RingStepCall>(call, blocks, [](auto&... all) { addRingStep<Element<t>>(all...); });
}
void hostDeliver(const void* call, int blocks) {
  eachBlock<DeliverCall>(call, blocks, [](auto&... all) { deliver(all...); });
}

const void* pointerTo(HostKernel kernel) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace

namespace ringreduce::cuda {
const Kernels& kernelsOf(DType dtype) {
  static std::array<Kernels, kKernelDTypes> all = [] {
    std::array<Kernels, kKernelDTypes> made{};
    for (int t = 0; t < kKernelDTypes; ++t)
      random_elements::withDType(static_cast<DType>(t), [&]<DType of>() {
        made[static_cast<size_t>(t)].copy_in = pointerTo(hostCopyIn<of>);
        made[static_cast<size_t>(t)].ring_step = pointerTo(hostRingStep<of>);
      });
    return made;
  }();
  return all[static_cast<size_t>(dtype)];
}
const void* lookKernel() {
  return nullptr;
}
const void* deliverKernel() {
  return pointerTo(hostDeliver);
}
const void* gatherKernel(int) {
  return nullptr;
}
const void* locatedGatherKernel(int) {
  return nullptr;
}
const void* carryKernel(int) {
  return nullptr;
}
const void* nvlsKernel(DType) {
  static const char kernel = 0;
  return &kernel;
}
}  // namespace ringreduce::cuda

namespace {

using random_elements::Texture;
using ranks::failureOf;
using ring_oracle::Case;

// ---- the GPUs of a host

class HostCommunicator final : public GpuCommunicator {
 public:
  explicit HostCommunicator(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  std::atomic<int> calls{0};
  std::atomic<bool> gives_up{false};  // found by check()

  bool performs(Kind) const override { return true; }
  void allReduce(const GpuAllReduce& c, CUstream_st*) override {
    ++calls;
    if (c.output != c.input) std::memcpy(c.output, c.input, c.count * sizeOf(c.dtype));
    group_->run({AllReduce{c.output, c.count, c.dtype, c.op, c.factor}, c.timeout});
  }
  void reduceScatter(const GpuReduceScatter& c, CUstream_st*) override {
    ++calls;
    ReduceScatter all{.inputs = {},
                      .counts = {},
                      .output = c.output,
                      .dtype = c.dtype,
                      .op = c.op,
                      .factor = c.factor};
    for (int r = 0; r < group_->size(); ++r) {
      all.inputs.push_back(at(const_cast<void*>(c.input), r, c.count, c.dtype));
      all.counts.push_back(c.count);
    }
    group_->run({all, c.timeout});
  }
  void allGather(const GpuAllGather& c, CUstream_st*) override {
    ++calls;
    AllGather all{.input = c.input, .dtype = c.dtype};
    for (int r = 0; r < group_->size(); ++r) {
      all.outputs.push_back(at(c.output, r, c.count, c.dtype));
      all.counts.push_back(c.count);
    }
    group_->run({all, c.timeout});
  }
  void broadcast(const GpuBroadcast&, CUstream_st*) override {}
  std::shared_ptr<Local> local() const override { return local_; }
  void check() override {
    if (gives_up) group_->epoch()->arbiter->fail(Failure::kTimeout, 0, "a kernel gave up");
    group_->checkHealth();
  }
  bool wait(Nanos) override { return true; }
  void abort(const std::string& why) override { group_->abort(why); }
  size_t bytes() const override { return 1000; }
  std::vector<OpRecord> records(uint64_t) const override { return {}; }
  void addTo(Totals&) const override {}

 private:
  static void* at(void* base, int r, size_t count, DType dtype) {
    return static_cast<std::byte*>(base) + static_cast<size_t>(r) * count * sizeOf(dtype);
  }
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Local> local_ = std::make_shared<Local>();
};

// ---- ranks

FakeNccl& freshNccl() {
  static void* const handle = dlopen(RINGREDUCE_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
  auto& state = *static_cast<FakeNccl*>(dlsym(handle, "fake_nccl"));
  state = FakeNccl{};
  state.moves = true;
  return state;
}

struct Rank {
  int rank, size;
  InterNodeCommunicator& communicator;
  Group& local;
  HostCommunicator& inside;
};

// Threads cannot pose as hosts by RINGREDUCE_HOSTID: this is the table of a rendezvous in which
// they would.
Hosts hostsOf(const std::string& letters, int rank, const GroupOptions& options) {
  Fields table;
  for (size_t r = 0; r < letters.size(); ++r) table["id" + std::to_string(r)] = letters[r];
  return {table, rank, static_cast<int>(letters.size()), options};
}

// Rank r is on the host of that letter.
void onHosts(const std::string& letters, const std::function<void(Rank&)>& body, int dies = -1) {
  FakeNccl& nccl = freshNccl();
  nccl.dies = dies;
  nccl.dies_at = 3;  // after the word at the beginning and some exchanges
  fake::run_kernel = [](const void* kernel, void** arguments, int blocks) {
    reinterpret_cast<HostKernel>(const_cast<void*>(kernel))(arguments[0], blocks);
  };
  const auto size = static_cast<int>(letters.size());
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  ranks::MemoryStore store;
  std::vector<ranks::MemoryStore> host_stores(letters.size());
  ranks::MeetingPoint made(size), over(size);
  ranks::inThreads(size, [&](int r) {
    const GroupOptions options{.name = "test", .timeout = 20 * kSecond};
    const auto group = Group::create(store, r, size, options);
    const Hosts hosts = hostsOf(letters, r, options);
    GroupOptions of_host = options;
    of_host.global_ranks = hosts.localRanks();
    of_host.together = true;
    const auto host_group =
        Group::create(host_stores[static_cast<size_t>(hosts.hostOf(r))], hosts.localRankOf(r),
                      static_cast<int>(hosts.localRanks().size()), of_host);
    const auto inside = std::make_shared<HostCommunicator>(host_group);
    const auto communicator = InterNodeCommunicator::create(group, hosts, host_group, inside, 0);
    Rank rank{r, size, *communicator, *host_group, *inside};
    made.wait();  // a rank that fails now would fail others that are still in create()
    try {
      body(rank);
    } catch (...) {
      over.wait();
      throw;
    }
    over.wait();
  });
  CHECK_EQ(fake::leftovers(), "");
}

CUstream_st* stream(uintptr_t number = 1) {
  return reinterpret_cast<CUstream_st*>(number);
}

// One all-reduce, held against the oracle.
void expectRight(Rank& rank, const Case& c, bool in_place) {
  const size_t width = sizeOf(c.dtype), bytes = c.count * width;
  std::vector<unsigned char> input(bytes + width), output(bytes + width, 0xa5), right(bytes + 1);
  random_elements::fill(c.dtype, input.data(), 0, c.count, c.draw,
                        random_elements::keyOf(c.seed, rank.rank));
  auto& to = in_place ? input : output;
  rank.communicator.allReduce({.input = input.data(),
                               .output = to.data(),
                               .count = c.count,
                               .dtype = c.dtype,
                               .op = c.op,
                               .factor = c.factor},
                              stream());
  CHECK(rank.communicator.wait(20 * kSecond));
  ring_oracle::expect(c, right.data());
  if (std::equal(to.begin(), to.begin() + static_cast<ptrdiff_t>(bytes), right.begin())) return;
  for (size_t i = 0; i < c.count; ++i)
    if (!ring_oracle::same(c.dtype, &to[i * width], &right[i * width]))
      check::fail(__FILE__, __LINE__,
                  std::string(name(c.dtype)) + ", " + name(c.op) + ", rank " +
                      std::to_string(rank.rank) + ", element " + std::to_string(i) + " of " +
                      std::to_string(c.count));
}

bool isPoisoned(const std::vector<float>& data) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
  return std::all_of(bytes, bytes + data.size() * sizeof(float),
                     [](unsigned char b) { return b == 0xff; });
}

GpuAllReduce sumOf(std::vector<float>& data) {
  return {.input = data.data(),
          .output = data.data(),
          .count = data.size(),
          .dtype = DType::kFloat32,
          .op = ReduceOp::kSum};
}

// The communicators by rank.  Their records show others whether a rank has called.
using Called = std::array<std::atomic<InterNodeCommunicator*>, 4>;

void awaitCalls(const Called& by, const std::vector<int>& of) {
  for (const int r : of)
    ranks::await("a rank has called", [&] {
      InterNodeCommunicator* const one = by[static_cast<size_t>(r)];
      return one && !one->records(0).empty();
    });
}

// To its end.
void sum(Rank& rank, std::vector<float>& data, Nanos timeout = 0) {
  GpuAllReduce call = sumOf(data);
  call.timeout = timeout;
  rank.communicator.allReduce(call, stream());
  CHECK(rank.communicator.wait(20 * kSecond));
}

}  // namespace

TEST(one_ring_over_all_ranks_gives_the_bits_of_the_core) {
  for (const std::string hosts : {"ab", "abc", "aab", "abcba"})
    onHosts(hosts, [&](Rank& rank) {
      CHECK(!rank.communicator.hierarchical());
      uint32_t seed = 0;
      for (int t = 0; t < kKernelDTypes; ++t)
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kBxor,
                            ReduceOp::kPremulSum}) {
          const Case c{.ranks = rank.size,
                       .count = (seed * 977) % 6000,
                       .dtype = static_cast<DType>(t),
                       .op = op,
                       .factor = 0.7,
                       .seed = seed};
          if (isSupported(c.dtype, op)) expectRight(rank, c, ++seed % 2 == 0);
        }
      CHECK_EQ(rank.inside.calls.load(), 0);
    });
}

#ifdef __SANITIZE_THREAD__
constexpr size_t kManySlices = 4000001;  // two for a chunk
#else
constexpr size_t kManySlices = 9000001;
#endif

TEST(long_messages_go_in_many_slices) {
  onHosts("abc", [](Rank& rank) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16})
      expectRight(
          rank, {.ranks = 3, .count = kManySlices, .dtype = dtype, .op = ReduceOp::kSum, .seed = 7},
          true);
  });
}

// Whole numbers, whose sums are the same in any order.
TEST(hosts_of_the_same_size_add_inside_first) {
  for (const std::string hosts : {"aabb", "abab", "aabbcc", "aaabbb"})
    onHosts(hosts, [&](Rank& rank) {
      CHECK(rank.communicator.hierarchical());
      uint32_t seed = 0;
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt64, DType::kBool})
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kPremulSum})
          // The last go in parts, and one is no multiple of a host's ranks.
          for (size_t bytes : {0, 8, 8000, 264 << 10, 265 << 10}) {
            const size_t count = bytes / sizeOf(dtype) + bytes / (265 << 10);
            const Case c{.ranks = rank.size,
                         .count = count,
                         .dtype = dtype,
                         .op = op,
                         .factor = 0.5,
                         .draw = Texture::kExact,
                         .seed = ++seed};
            if (isSupported(dtype, op)) expectRight(rank, c, seed % 2 == 0);
          }
    });
}

TEST(parts_keep_the_network_free) {
  onHosts("aabb", [](Rank& rank) {
    const Case c{.ranks = 4,
                 .count = 400000,
                 .dtype = DType::kFloat32,
                 .op = ReduceOp::kSum,
                 .draw = Texture::kExact};
    expectRight(rank, c, true);
    CHECK_EQ(rank.inside.calls.load(), 2);
    rank.local.run({Barrier{}});
  });
  // Four ranks send half a message each in both halves of their rings, and a word when they join.
  auto& moved = static_cast<FakeNccl*>(
                    dlsym(dlopen(RINGREDUCE_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL), "fake_nccl"))
                    ->moved;
  CHECK_EQ(moved, 4 * (400000 / 2 * sizeof(float) + sizeof(int)));
}

TEST(what_is_not_its_own_is_refused_and_the_group_goes_on) {
  onHosts("ab", [](Rank& rank) {
    CHECK(rank.communicator.performs(Kind::kAllReduce) &&
          !rank.communicator.performs(Kind::kAllGather));
    std::vector<float> data(10, 1);
    CHECK(failureOf([&] { rank.communicator.allGather({}, stream()); }, "all_gather") ==
          Failure::kArgument);
    GpuAllReduce call = sumOf(data);
    call.op = ReduceOp::kBor;
    CHECK(failureOf([&] { rank.communicator.allReduce(call, stream()); }, "BOR") ==
          Failure::kArgument);
    CHECK(!rank.communicator.usesOwnMemory(size_t{1} << 30));
    CHECK(rank.communicator.bytes() > 1000 && rank.communicator.bytes() < size_t{24} << 20);
    rank.communicator.allReduce(sumOf(data), stream());
    CHECK(rank.communicator.wait(20 * kSecond));
    CHECK_EQ(data[9], 2.0f);
  });
}

TEST(calls_on_another_stream_are_held_back) {
  onHosts("ab", [](Rank& rank) {
    std::vector<float> data(10, 1);
    rank.communicator.allReduce(sumOf(data), stream(1));
    rank.communicator.allReduce(sumOf(data), stream(2));
    CHECK(rank.communicator.wait(20 * kSecond));
    CHECK_EQ(data[0], 4.0f);
  });
}

// ---- failures

TEST(a_rank_that_does_not_come_is_named_by_all) {
  for (const std::string hosts : {"abc", "aabb"}) {
    std::atomic<int> told{0};
    Called called{};
    onHosts(hosts, [&](Rank& rank) {
      std::vector<float> data(1000, 1);
      called[static_cast<size_t>(rank.rank)] = &rank.communicator;
      // Rank 0 would name all that had not called.
      if (rank.rank == 0) awaitCalls(called, rank.size == 4 ? std::vector{1, 3} : std::vector{1});
      const Nanos timeout = rank.rank == 0 ? 600 * kMillisecond : 0;
      // It comes late: most often it has heard, and then puts nothing into its stream.
      if (rank.rank == 2)
        ranks::await("the others have told", [&] { return told == rank.size - 1; });
      const auto failure = failureOf([&] { sum(rank, data, timeout); }, "rank 2 (pid ");
      ++told;
      CHECK(failure == Failure::kTimeout);
      CHECK(isPoisoned(data) || (rank.rank == 2 && data[0] == 1));
      CHECK(failureOf([&] { rank.communicator.check(); }, "did not arrive") == Failure::kTimeout);
    });
  }
}

TEST(an_error_of_nccls_is_told_with_what_is_known) {
  onHosts(
      "abc",
      [](Rank& rank) {
        std::vector<float> data(1000, 1);
        CHECK(failureOf([&] { sum(rank, data); },
                        "and does not say whether one of these is gone") == Failure::kPeerLost);
        CHECK(isPoisoned(data));
        CHECK(failureOf([&] { rank.communicator.check(); }, "NCCL failed at rank ") ==
              Failure::kPeerLost);
      },
      1);
}

TEST(an_abort_ends_all_ranks_wherever_they_wait) {
  for (const std::string hosts : {"abc", "aabb"}) {
    Called called{};
    onHosts(hosts, [&](Rank& rank) {
      std::vector<float> data(1000, 1);
      const std::string words = "rank 1 (pid";
      called[static_cast<size_t>(rank.rank)] = &rank.communicator;
      if (rank.rank == 1) {
        awaitCalls(called, rank.size == 4 ? std::vector{0, 2, 3} : std::vector{0, 2});
        std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others are waiting
        rank.communicator.abort("enough");
      } else {
        CHECK(failureOf([&] { sum(rank, data); }, words) == Failure::kAborted);
        CHECK(isPoisoned(data));
      }
      CHECK(failureOf([&] { rank.communicator.check(); }, "aborted group 'test': enough") ==
            Failure::kAborted);
    });
  }
}

TEST(a_kernel_that_gives_up_inside_a_host_poisons_the_whole_output) {
  std::atomic<int> over{0};
  onHosts("ab", [&](Rank& rank) {
    Local& local = *rank.communicator.local();
    std::vector<float> data(1000, 1);
    sum(rank, data);
    CHECK(data[999] == 2 && local.found_inf == 0);
    local.cause = static_cast<uint32_t>(Cause::kTimeout);
    sum(rank, data);
    CHECK(isPoisoned(data) && local.found_inf == 1);
    std::vector<int64_t> integers(1000, 1);
    rank.communicator.allReduce({.input = integers.data(),
                                 .output = integers.data(),
                                 .count = integers.size(),
                                 .dtype = DType::kInt64,
                                 .op = ReduceOp::kSum},
                                stream());
    CHECK(rank.communicator.wait(20 * kSecond));
    CHECK(integers == std::vector<int64_t>(1000, 0));
    ++over;
    if (rank.rank != 0) return;
    while (over < rank.size) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rank.inside.gives_up = true;  // the group hears of it by the one that waits
    CHECK(failureOf([&] { rank.communicator.wait(20 * kSecond); }, "a kernel gave up") ==
          Failure::kTimeout);
  });
}

TEST(a_gpu_that_fails_in_a_call_ends_it_for_all) {
  for (int n : {1, 4})
    onHosts("ab", [&](Rank& rank) {
      std::vector<float> data(1000, 1);
      const auto call = [&] { sum(rank, data); };
      if (rank.rank == 0) {
        fake::failAt(n, cudaErrorLaunchOutOfResources);
        CHECK(failureOf(call, "rank 0 (pid") == Failure::kAborted);
        CHECK(fake::hasFailed());
        fake::heal();
        CHECK(isPoisoned(data));
        CHECK(failureOf([&] { rank.communicator.check(); }, "gave up: cannot") ==
              Failure::kAborted);
      } else if (failureOf(call, "rank 0 (pid") == Failure::kNone) {
        CHECK_EQ(data[999], 2.0f);  // rank 0's part was done when it failed
      } else {                      // untouched if the group had failed before the call
        CHECK(isPoisoned(data) || data == std::vector<float>(1000, 1));
      }
    });
}

int main(int argc, char** argv) {
  fake::machine().hides_memory = false;  // the stand-in for NCCL moves bytes in threads of its own
  setenv("RINGREDUCE_NCCL", RINGREDUCE_FAKE_NCCL, 1);
  return peers::main(argc, argv);
}
