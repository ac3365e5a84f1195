// The communicator's calls of CUDA, on the fake: what it asks beside others' captures, and what
// becomes of all ranks if one cannot put its work into a stream.  No kernel runs.
#define CHECK_OWN_MAIN
#include <array>
#include <cstdlib>
#include <span>

#include "cuda/communicator/host_communicator.h"
#include "cuda/kernels/kernel_table.h"
#include "fake_cuda.h"
#include "fake_launch.h"
#include "peers.h"

// In place of the kernels, which nvcc compiles.
namespace ringreduce::cuda {
constexpr char kLL = 0, kFixed = 0;  // of a number of ranks: of them only LL need be told apart
constexpr char kLocated = 0;         // or these
constexpr char kAllReduce[kDeviceAlgorithms] = {};
const Kernels& kernelsOf(DType dtype) {
  static const auto all = [] {
    std::array<Kernels, kKernelDTypes> made{};
    for (int t = 0; t < kKernelDTypes; ++t) {
      const auto of = static_cast<DType>(t);
      Kernels& kernels = made[static_cast<size_t>(t)];
      for (int a = 0; a < kDeviceAlgorithms; ++a)
        if (hasKernel(static_cast<DeviceAlgorithm>(a), of)) kernels.all_reduce[a] = &kAllReduce[a];
      if (hasFixedKernels(of))
        for (FixedKernels& fixed : kernels.fixed) fixed = {&kFixed, &kFixed, &kLocated, &kLL};
      kernels.located = &kLocated;
    }
    return made;
  }();
  return all[static_cast<size_t>(dtype)];
}
const void* lookKernel() {
  return nullptr;
}
const void* deliverKernel() {
  return nullptr;
}
const void* gatherKernel(int) {
  return nullptr;
}
const void* locatedGatherKernel(int) {
  return &kLocated;
}
const void* carryKernel(int) {
  return nullptr;
}
const void* nvlsKernel(DType) {
  static const char kernel = 0;
  return &kernel;
}
}  // namespace ringreduce::cuda

using namespace peers;

namespace {

using OfRank = std::function<void(cuda::HostCommunicator&, Group&, const GpuAllReduce&)>;

CUstream_st* stream(uintptr_t number) {
  return reinterpret_cast<CUstream_st*>(number);
}

void expectNothingLeft() {
  // A thread of its own closes the board.
  for (int i = 0; i < 5000 && !fake::leftovers().empty(); ++i) ranks::sleepMs(1);
  CHECK_EQ(fake::leftovers(), "");
}

// A communicator for each of `size` ranks: on a GPU each, whose kernels can wait for each other, or
// on one that they share by turns.  Its end takes no time, since nothing is under way then, and
// nothing is left.
void run(int size, bool apart, const OfRank& body) {
  fake::machine().gpus = apart ? size : 1;
  const CommunicatorOptions options;
  ranks::MeetingPoint made(size);
  alignas(16) static char memory[1024];
  const GpuAllReduce call{.input = memory,
                          .output = memory,
                          .count = 100,
                          .dtype = DType::kFloat32,
                          .op = ReduceOp::kSum};
  peers::run(As::kThreads, size, [&](Group& group, int) {
    const auto of_rank = group.shared_from_this();
    auto comm = cuda::HostCommunicator::create(of_rank, apart ? group.rank() : 0, options);
    CHECK_EQ(comm->kernelsRunAtOnce(), apart || size == 1);
    made.wait();  // a rank that fails now would fail others that are still in create()
    body(*comm, group, call);
    const Nanos begin = now();
    comm.reset();
    CHECK(now() - begin < 4 * kSecond);
  });
  if (fake::hasRuins()) return;  // nothing can be given back there
  expectNothingLeft();
}

// Ends a test that ruins a GPU.
struct Healed {
  ~Healed() {
    fake::heal();
    fake::forgetLeftovers();
  }
};

}  // namespace

TEST(kernels_that_a_gpu_would_end_do_not_wait_for_peers) {
  fake::machine().gpus = 2;
  for (bool limited : {true, false}) {
    fake::machine().ends_long_kernels = limited;
    peers::run(As::kThreads, 2, [&](Group& group, int) {
      const auto comm = cuda::HostCommunicator::create(group.shared_from_this(), group.rank(), {});
      CHECK_EQ(comm->kernelsRunAtOnce(), !limited);
      group.run({Barrier{}});
    });
  }
}

// A part for each would cost ranks that take turns on a GPU a turn more.
TEST(one_rank_leads_where_all_take_turns_on_one_gpu) {
  const auto leads = [](int gpus, bool together) {
    fake::machine().gpus = gpus;
    peers::run(As::kThreads, 2, [&](Group& group, int) {
      const int device = group.rank() % gpus;
      const auto comm = cuda::HostCommunicator::create(
          group.shared_from_this(), device,
          {.algorithm = cuda::Choice::kDirect, .access = {}, .together = together});
      const bool one = gpus == 1 && !together;
      CHECK_EQ(comm->tuning().shared_lead, one ? SIZE_MAX : size_t{1} << 20);
      group.run({Barrier{}});
    });
  };
  leads(1, false);
  leads(1, true);
  leads(2, false);
}

// Without this, buckets would silently go by slots again.
TEST(large_buckets_of_gradients_go_without_copies_where_gpus_are_linked) {
  fake::machine().gpus = 3;
  for (int size : {2, 3})
    for (bool linked : {true, false}) {
      fake::machine().apart[0][1] = fake::machine().apart[1][0] = !linked;
      peers::run(As::kThreads, size, [&](Group& group, int) {
        const auto comm =
            cuda::HostCommunicator::create(group.shared_from_this(), group.rank(), {});
        const size_t least = linked ? comm->tuning().located_least : size_t{1} << 30;
        CHECK_EQ(comm->usesOwnMemory(least), linked);
        CHECK(!comm->usesOwnMemory(least - 1));
        group.run({Barrier{}});
      });
    }
  fake::machine().apart[0][1] = fake::machine().apart[1][0] = false;
}

// As under Slurm's --gpus-per-task: CUDA tells nothing of links to GPUs that it does not show.
TEST(links_to_gpus_that_a_rank_does_not_see_are_told_by_their_rate) {
  constexpr int kRanks = 4;
  constexpr size_t kLarge = size_t{1} << 30;
  fake::machine().gpus = kRanks;
  for (const bool slow : {false, true}) {
    fake::machine().gigabytes_per_s[2][1] = slow ? 50 : 100;
    peers::run(As::kProcesses, kRanks, [&](Group& group, int) {
      fake::see({group.rank()});
      const auto comm = cuda::HostCommunicator::create(group.shared_from_this(), 0, {});
      CHECK(comm->access() != MemoryAccess::kHost);
      CHECK_EQ(comm->usesOwnMemory(kLarge), !slow);
      CHECK(comm->chosen(kLarge, DType::kFloat32) == (slow ? Choice::kRing : Choice::kTwoShot));
      group.run({Barrier{}});
    });
  }
  fake::machine().gigabytes_per_s[2][1] = 0;
}

TEST(small_messages_go_by_ll) {
  static std::atomic<const void*> launched;
  fake::run_kernel = [](const void* kernel, void**, int) { launched = kernel; };
  alignas(16) static char memory[1024];
  for (const int size : {2, 3}) {
    fake::machine().gpus = size;
    peers::run(As::kThreads, size, [&](Group& group, int) {
      const auto comm = cuda::HostCommunicator::create(group.shared_from_this(), group.rank(), {});
      const auto goesByLL = [&](DType dtype, size_t bytes, ReduceOp op,
                                cuda::Choice choice = cuda::Choice::kAuto) {
        group.run({Barrier{}});
        launched = memory;
        group.run({Barrier{}});
        comm->allReduce({.input = memory,
                         .output = memory,
                         .count = bytes / sizeOf(dtype),
                         .dtype = dtype,
                         .op = op,
                         .algorithm = choice},
                        stream(1));
        CHECK(launched != memory);
        return launched == &ringreduce::cuda::kLL;
      };
      using enum ReduceOp;
      using enum cuda::Choice;
      const bool can = fixedSizeOf(size) >= 0;
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        CHECK_EQ(goesByLL(dtype, comm->tuning().ll_most, kSum), can);
        CHECK_EQ(goesByLL(dtype, 4, kAvg), can);
        CHECK(!goesByLL(dtype, comm->tuning().ll_most + 4, kSum));
        CHECK_EQ(goesByLL(dtype, kLLMost, kSum, kLL), can);
        CHECK(!goesByLL(dtype, kLLMost + 4, kSum, kLL));
        CHECK(!goesByLL(dtype, 64, kSum, kOneShot));
        CHECK(!goesByLL(dtype, 64, kSum, kTwoShot));
      }
      CHECK(!goesByLL(DType::kFloat64, 64, kSum));
      CHECK(!goesByLL(DType::kFloat32, 64, kMax));
      CHECK(comm->wait(20 * kSecond));
    });
  }
  fake::run_kernel = nullptr;
}

// FSDP's calls, of parts.
TEST(long_parts_are_used_where_they_are_on_linked_gpus) {
  static std::atomic<const void*> launched;
  fake::run_kernel = [](const void* kernel, void**, int) { launched = kernel; };
  fake::machine().gpus = 3;
  alignas(16) static char memory[1024];
  for (const int size : {2, 3})
    for (const bool linked : {true, false})
      for (const cuda::Choice wanted : {Choice::kAuto, Choice::kLocated, Choice::kTwoShot}) {
        fake::machine().apart[0][1] = fake::machine().apart[1][0] = !linked;
        peers::run(As::kThreads, size, [&](Group& group, int) {
          const auto comm = cuda::HostCommunicator::create(group.shared_from_this(), group.rank(),
                                                           {.algorithm = wanted, .access = {}});
          const auto isLocated = [&](bool scatters, DType dtype, size_t all) {
            const size_t count = all / static_cast<size_t>(size) / sizeOf(dtype);
            char* const own = memory + static_cast<size_t>(group.rank()) * count * sizeOf(dtype);
            group.run({Barrier{}});
            launched = memory;
            group.run({Barrier{}});
            if (scatters)
              comm->reduceScatter({.input = memory,
                                   .output = own,
                                   .count = count,
                                   .dtype = dtype,
                                   .op = ReduceOp::kSum},
                                  stream(1));
            else
              comm->allGather({.input = own, .output = memory, .count = count, .dtype = dtype},
                              stream(1));
            CHECK(launched != memory);
            return launched == &ringreduce::cuda::kLocated;
          };
          const size_t least = (size_t{8} << 20) * static_cast<size_t>(size);
          for (const DType dtype : {DType::kFloat32, DType::kInt64}) {
            const bool long_ones =
                wanted == Choice::kLocated || (wanted == Choice::kAuto && linked);
            CHECK_EQ(comm->usesOwnMemory(least), long_ones && linked);
            for (const bool scatters : {true, false}) {
              CHECK_EQ(isLocated(scatters, dtype, least), long_ones);
              CHECK_EQ(isLocated(scatters, dtype, size_t{1} << 20), wanted == Choice::kLocated);
            }
          }
          CHECK(comm->wait(20 * kSecond));
        });
      }
  fake::machine().apart[0][1] = fake::machine().apart[1][0] = false;
  fake::run_kernel = nullptr;
}

// They have no other kernels.
TEST(integers_and_truth_values_go_by_two_shot_whatever_is_asked_for) {
  static std::atomic<const void*> launched;
  fake::run_kernel = [](const void* kernel, void**, int) { launched = kernel; };
  fake::machine().gpus = 2;
  alignas(16) static char memory[1024];
  for (const cuda::Choice wanted :
       {Choice::kAuto, Choice::kOneShot, Choice::kTwoShot, Choice::kRing, Choice::kLL})
    peers::run(As::kThreads, 2, [&](Group& group, int) {
      const auto comm = cuda::HostCommunicator::create(group.shared_from_this(), group.rank(),
                                                       {.algorithm = wanted, .access = {}});
      const auto algorithmOf = [&](DType dtype, size_t bytes) {
        group.run({Barrier{}});
        launched = memory;
        group.run({Barrier{}});
        const size_t count = bytes / sizeOf(dtype);
        comm->allReduce({.input = memory,
                         .output = memory,
                         .count = count,
                         .dtype = dtype,
                         .op = ReduceOp::kMax},
                        stream(1));
        const auto at = static_cast<const char*>(launched.load()) - ringreduce::cuda::kAllReduce;
        CHECK(static_cast<DeviceAlgorithm>(at) == kernelOf(comm->chosen(count, dtype)));
        return comm->chosen(count, dtype);
      };
      for (const size_t bytes : {size_t{8}, size_t{128} << 10}) {  // longer ones are located
        for (const DType dtype : {DType::kInt8, DType::kUInt8, DType::kInt16, DType::kInt32,
                                  DType::kInt64, DType::kBool})
          CHECK(algorithmOf(dtype, bytes) == Choice::kTwoShot);
        const auto of_float = algorithmOf(DType::kFloat64, bytes);
        if (wanted == Choice::kOneShot || wanted == Choice::kRing) CHECK(of_float == wanted);
      }
      CHECK(comm->wait(20 * kSecond));
    });
  fake::run_kernel = nullptr;
}

// Only where it is asked for, and for what it can add.
TEST(the_switch_adds_what_it_can_where_it_is_asked_for) {
  static std::atomic<const void*> launched;
  fake::run_kernel = [](const void* kernel, void**, int) { launched = kernel; };
  fake::machine().multicasts = true;
  alignas(16) static char memory[1024];
  using enum cuda::Choice;
  for (const int size : {1, 2, 3})
    for (const cuda::Choice wanted : {kNvls, kAuto}) {
      fake::machine().gpus = size;
      peers::run(As::kThreads, size, [&](Group& group, int) {
        const auto comm = cuda::HostCommunicator::create(group.shared_from_this(), group.rank(),
                                                         {.algorithm = wanted, .access = {}});
        const auto callOf = [](DType dtype, ReduceOp op) {
          return GpuAllReduce{
              .input = memory, .output = memory, .count = 64, .dtype = dtype, .op = op};
        };
        const auto isAddedThere = [&](DType dtype, ReduceOp op) {
          group.run({Barrier{}});
          launched = memory;
          group.run({Barrier{}});
          comm->allReduce(callOf(dtype, op), stream(1));
          group.run({Barrier{}});
          return launched == nvlsKernel(dtype);
        };
        using enum ReduceOp;
        const bool adds = wanted == kNvls && size > 1;
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
          CHECK_EQ(comm->chosen(64, dtype) == kNvls, adds);
          CHECK_EQ(isAddedThere(dtype, kSum), adds);
          CHECK_EQ(isAddedThere(dtype, kAvg), adds);
          CHECK(!isAddedThere(dtype, kMax));
          CHECK(!isAddedThere(dtype, kPremulSum));
        }
        for (const DType dtype : {DType::kFloat64, DType::kInt32}) {
          CHECK(!isAddedThere(dtype, kSum));
          if (adds) CHECK(comm->chosen(64, dtype) == kTwoShot);
        }
        GpuAllReduce call = callOf(DType::kFloat32, kSum);
        call.algorithm = kNvls;
        if (!adds && size > 1)
          CHECK(ranks::failureOf([&] { comm->allReduce(call, stream(1)); },
                                 "nvls needs memory that is taken when") == Failure::kArgument);
        CHECK(comm->wait(20 * kSecond));
      });
      expectNothingLeft();
    }
  fake::machine().multicasts = false;
  fake::run_kernel = nullptr;
}

TEST(a_switch_that_is_not_there_is_missed_by_all_ranks_alike) {
  struct Lacking {
    int gpus;
    bool multicasts;
    const char* why;
  };
  for (const Lacking& lacking :
       {Lacking{2, false, "no NVSwitch adds for its GPU"}, Lacking{1, true, "ranks share a GPU"}}) {
    fake::machine().gpus = lacking.gpus;
    fake::machine().multicasts = lacking.multicasts;
    peers::run(As::kThreads, 2, [&](Group& group, int) {
      const auto isSaid = [&](const char* words) {
        const auto make = [&] {
          cuda::HostCommunicator::create(
              group.shared_from_this(), group.rank() % lacking.gpus,
              {.algorithm = cuda::Choice::kNvls, .access = {}, .together = true});
        };
        return ranks::failureOf(make, words) == Failure::kSetup;
      };
      CHECK(isSaid("RINGREDUCE_CUDA_ALGORITHM=nvls asks the NVSwitch to add"));
      CHECK(isSaid("leave the choice to auto"));
      CHECK(isSaid("rank 0"));
      CHECK(isSaid(lacking.why));
      group.run({Barrier{}});  // it is as it was
    });
    expectNothingLeft();
  }
  fake::machine().multicasts = false;
  fake::run_kernel = nullptr;
}

TEST(a_call_that_cannot_be_launched_ends_the_group_for_all) {
  for (bool apart : {true, false})  // if not, a step of the direct schedule
    run(2, apart, [&](cuda::HostCommunicator& comm, Group& group, const GpuAllReduce& call) {
      // Rank 1 makes no call: it has nothing to wait for, and learns it all the same.
      const std::string words = "rank 0 (pid";
      if (group.rank() == 0) {
        if (apart) fake::failAt(1, cudaErrorLaunchOutOfResources);
        const auto failure =
            ranks::failureOf([&] { comm.allReduce(call, stream(1)); }, "gave up: cannot");
        fake::heal();
        CHECK(failure == Failure::kAborted);
      }
      const Nanos deadline = deadlineIn(20 * kSecond);
      while (!group.failed() && now() < deadline) std::this_thread::yield();
      CHECK(ranks::failureOf([&] { comm.check(); }, words) == Failure::kAborted);
      CHECK(ranks::failureOf([&] { comm.wait(kSecond); }, words) == Failure::kAborted);
    });
}

TEST(a_gpu_that_is_ruined_ends_the_group_for_all_and_nothing_waits_for_it) {
  for (bool amid : {true, false}) {  // a call, or before it
    const Healed healed;
    run(2, true, [&](cuda::HostCommunicator& comm, Group& group, const GpuAllReduce& call) {
      fake::gpu_is_busy = true;
      if (amid) comm.allReduce(call, stream(1));
      group.run({Barrier{}});
      if (group.rank() == 1) {
        fake::ruin(1, cudaErrorIllegalAddress);
        const auto failure = ranks::failureOf([&] {
          while (!group.failed()) comm.allReduce(call, stream(1));
          comm.check();
        });
        CHECK(failure == Failure::kAborted);
      }
      const Nanos deadline = deadlineIn(20 * kSecond);
      while (!group.failed() && now() < deadline) std::this_thread::yield();
      fake::gpu_is_busy = false;
      for (const char* words :
           {"rank 1 (pid", "cudaErrorIllegalAddress", "end it and start it again"}) {
        CHECK(ranks::failureOf([&] { comm.check(); }, words) == Failure::kAborted);
        CHECK(ranks::failureOf([&] { comm.wait(kSecond); }, words) == Failure::kAborted);
      }
    });
  }
}

TEST(a_communicator_is_made_and_ended_beside_captures_of_other_threads) {
  fake::someone_captures = true;
  for (bool apart : {true, false})
    run(2, apart, [&](cuda::HostCommunicator& comm, Group&, const GpuAllReduce& call) {
      if (apart) comm.allReduce(call, stream(1));
      CHECK(comm.wait(20 * kSecond));
    });
  fake::someone_captures = false;
  CHECK_EQ(fake::captures_ended.load(), 0);
}

TEST(every_call_of_cuda_that_fails_in_an_all_reduce_is_raised_at_once) {
  bool failed = true;
  for (int n = 1; failed; ++n)
    run(1, true, [&](cuda::HostCommunicator& comm, Group&, const GpuAllReduce& call) {
      GpuAllReduce scaled = call;
      scaled.op = ReduceOp::kPremulSum;
      fake::failAt(n, cudaErrorUnknown);
      const auto failure = ranks::failureOf([&] { comm.allReduce(scaled, stream(1)); });
      failed = fake::hasFailed();
      fake::heal();
      CHECK(failure == (failed ? Failure::kAborted : Failure::kNone));
      CHECK(n > 2 || failed);  // a launch, an event
    });
}

namespace {

// Every call of `comm` but allReduce, with a label.
std::vector<std::function<void()>> otherCalls(cuda::HostCommunicator& comm) {
  alignas(16) static char memory[4096];
  const auto label = [] { return std::string("DDP bucket 2"); };
  return {
      [&comm, label] {
        comm.reduceScatter({.input = memory,
                            .output = memory + 2048,
                            .count = 100,
                            .dtype = DType::kFloat32,
                            .op = ReduceOp::kPremulSum,
                            .label = label},
                           stream(1));
      },
      [&comm, label] {
        comm.allGather({.input = memory,
                        .output = memory + 1024,
                        .count = 100,
                        .dtype = DType::kComplex32,
                        .label = label},
                       stream(1));
      },
      [&comm, label] {
        comm.broadcast(
            {.data = memory, .count = 100, .dtype = DType::kFloat8E5M2, .root = 0, .label = label},
            stream(1));
      }};
}

}  // namespace

TEST(every_call_that_cannot_be_launched_ends_the_group_and_says_which) {
  for (size_t which = 0; which < 3; ++which)
    for (bool apart : {true, false})
      run(2, apart, [&](cuda::HostCommunicator& comm, Group& group, const GpuAllReduce&) {
        if (group.rank() == 0) {
          if (apart) fake::failAt(1, cudaErrorLaunchOutOfResources);
          const auto failure = ranks::failureOf(otherCalls(comm)[which], "gave up: cannot");
          fake::heal();
          CHECK(failure == Failure::kAborted);
        }
        const Nanos deadline = deadlineIn(20 * kSecond);
        while (!group.failed() && now() < deadline) std::this_thread::yield();
        CHECK(ranks::failureOf([&] { comm.check(); }, " (DDP bucket 2)") == Failure::kAborted);
      });
}

TEST(a_group_of_one_moves_and_scales) {
  run(1, true, [&](cuda::HostCommunicator& comm, Group&, const GpuAllReduce&) {
    const int before = fake::launches;
    for (const auto& call : otherCalls(comm)) call();
    CHECK(comm.wait(20 * kSecond));
    CHECK_EQ(fake::launches - before, 2);  // a broadcast sends no word
  });
}

TEST(every_call_of_cuda_that_fails_in_another_call_is_raised_at_once) {
  for (size_t which = 0; which < 3; ++which) {
    bool failed = true;
    for (int n = 1; failed; ++n)
      run(2, true, [&](cuda::HostCommunicator& comm, Group& group, const GpuAllReduce&) {
        if (group.rank() == 1) {
          // It may have learned of the other's failure first.
          const auto failure = ranks::failureOf([&] { otherCalls(comm)[which](); });
          CHECK(failure == Failure::kAborted || failure == Failure::kNone);
          return;
        }
        fake::failAt(n, cudaErrorUnknown);
        const auto failure = ranks::failureOf(otherCalls(comm)[which]);
        failed = fake::hasFailed();
        fake::heal();
        CHECK(failure == (failed ? Failure::kAborted : Failure::kNone));
        CHECK(n > 2 || failed);  // a launch, an event
      });
  }
}

TEST(what_other_calls_cannot_do_is_refused_and_the_group_goes_on) {
  run(2, true, [&](cuda::HostCommunicator& comm, Group& group, const GpuAllReduce&) {
    alignas(16) static char memory[4096];
    const auto refused = [](const std::function<void()>& call, const char* words) {
      CHECK(ranks::failureOf(call, words) == Failure::kArgument);
    };
    const cuda::GpuReduceScatter scatter{.input = memory,
                                         .output = memory + 2048,
                                         .count = 100,
                                         .dtype = DType::kFloat32,
                                         .op = ReduceOp::kSum};
    const cuda::GpuAllGather gather{
        .input = memory, .output = memory + 1024, .count = 100, .dtype = DType::kComplex128};
    const auto scattered = [&](auto change, const char* words) {
      cuda::GpuReduceScatter call = scatter;
      change(call);
      refused([&] { comm.reduceScatter(call, stream(1)); }, words);
    };
    const auto gathered = [&](auto change, const char* words) {
      cuda::GpuAllGather call = gather;
      change(call);
      refused([&] { comm.allGather(call, stream(1)); }, words);
    };
    scattered([](auto& c) { c.dtype = DType::kUInt16; }, "reduce_scatter on a GPU: SUM has no");
    scattered([](auto& c) { c.op = ReduceOp::kBxor; }, "BXOR has no meaning for float32");
    scattered([](auto& c) { c.output = nullptr; }, "null pointer");
    scattered([](auto& c) { c.count = SIZE_MAX / 5; }, "more than there is memory for");
    scattered([](auto& c) { c.input = memory + 2; }, "not aligned to elements of float32");
    // The output may be its own part of the input.
    scattered([&](auto& c) { c.output = memory + (1 - group.rank()) * 400; }, "overlap");
    gathered([](auto& c) { c.input = nullptr; }, "all_gather on a GPU: a null pointer");
    gathered([](auto& c) { c.input = memory + 4; }, "not aligned to elements of complex128");
    gathered([](auto& c) { c.input = memory + 1040; }, "overlap");
    for (int root : {-1, 2})
      refused(
          [&] {
            comm.broadcast({.data = memory, .count = 1, .dtype = DType::kInt8, .root = root},
                           stream(1));
          },
          "is none of the group's 2 ranks");
    comm.reduceScatter(scatter, stream(1));
    cuda::GpuReduceScatter in_place = scatter;
    in_place.output = memory + group.rank() * 400;
    comm.reduceScatter(in_place, stream(1));
    comm.allGather({.input = memory, .output = memory, .count = 0, .dtype = DType::kInt8},
                   stream(1));
    CHECK(comm.wait(20 * kSecond));
    for (Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather, Kind::kBroadcast})
      CHECK(comm.performs(kind));
    CHECK(!comm.performs(Kind::kAllToAll));
  });
}

TEST(events_are_asked_beside_captures_and_leave_no_error_behind) {
  run(1, true, [&](cuda::HostCommunicator& comm, Group&, const GpuAllReduce& call) {
    fake::someone_captures = fake::gpu_is_busy = true;
    comm.allReduce(call, stream(1));
    for (int i = 0; i < 20; ++i) {
      comm.check();
      CHECK(cudaGetLastError() == cudaSuccess);
      CHECK(!comm.wait(kMillisecond));
    }
    fake::gpu_is_busy = false;
    CHECK(comm.wait(20 * kSecond));
    fake::someone_captures = false;
    CHECK_EQ(fake::captures_ended.load(), 0);
  });
}

TEST(calls_on_another_stream_are_held_back) {
  run(1, true, [&](cuda::HostCommunicator& comm, Group&, const GpuAllReduce& call) {
    const int before = fake::streams_held_back;
    for (uintptr_t number : {1, 1, 2, 2, 1}) comm.allReduce(call, stream(number));
    CHECK_EQ(fake::streams_held_back - before, 2);
    comm.wait(20 * kSecond);
  });
}

// A ring of one rank would double its input.
TEST(a_group_of_one_has_nothing_to_add_up_in_one_grid_either) {
  run(1, true, [&](cuda::HostCommunicator& comm, Group&, GpuAllReduce call) {
    call.algorithm = cuda::Choice::kRing;
    cuda::HostCommunicator* const ranks[] = {&comm};
    const int before = fake::launches;
    cuda::HostCommunicator::allReduceTogether(ranks, std::span(&call, 1), stream(1));
    CHECK(comm.wait(20 * kSecond));
    CHECK_EQ(fake::launches - before, 0);  // in place, and not scaled
  });
}

int main(int argc, char** argv) {
  return peers::main(argc, argv);
}
