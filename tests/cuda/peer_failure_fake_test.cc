// Failures between ranks and their GPUs, on the fake of CUDA: machines that lack one way or
// the other, and every single call that fails at one rank.
#define CHECK_OWN_MAIN
#include <csignal>
#include <set>

#include "cuda/memory/device_memory.h"
#include "cuda/memory/multicast.h"
#include "cuda/memory/own_memory.h"
#include "cuda/memory/peer_memory.h"
#include "cuda/memory/segment_board.h"
#include "expandable.h"
#include "fake_cuda.h"
#include "fake_launch.h"
#include "fake_world.h"
#include "peers.h"

using namespace peers;
using ranks::failureOf;

namespace {

// Another machine, for a scope.
struct On {
  explicit On(const std::function<void(fake::Machine&)>& change) : before(fake::machine()) {
    change(fake::machine());
  }
  ~On() { fake::machine() = before; }
  const fake::Machine before;
};

// The way that two ranks on two GPUs come to, and why.
void expectAccess(As as, MemoryAccess access, const std::vector<std::string>& reasons) {
  run(as, 2, [&](Group& group, int device) {
    PeerMemory memory(group, device, 1000);
    CHECK_EQ(name(memory.access()), std::string(name(access)));
    for (const std::string& reason : reasons)
      if (memory.why().find(reason) == std::string::npos)
        throw std::runtime_error("'" + reason + "' is not in: " + memory.why());
    group.run({Barrier{}});
  });
  CHECK_EQ(fake::leftovers(), "");
}

void apart(fake::Machine& m) {
  m.apart[0][1] = m.apart[1][0] = true;
}

// The outcome of `make` if one call of one rank fails: the same on all ranks.
struct Fate {
  std::string error;   // "" if it was made
  std::string detail;  // which way, say
};

// `arm` is called where the calls begin that may fail.
using Make = std::function<std::string(Group&, int device, const std::function<void()>& arm)>;

// Fails the victim's calls one after the other.  Returns how many there are.
int failEachCall(int P, int victim, cudaError_t error, const Make& make,
                 const std::function<void(const Fate&)>& judge) {
  for (int n = 1;; ++n) {
    std::vector<Fate> fates(static_cast<size_t>(P));
    bool failed = true;
    run(As::kThreads, P, [&](Group& group, int device) {
      Fate& fate = fates[static_cast<size_t>(group.rank())];
      const auto arm = [&] {
        if (group.rank() == victim) fake::failAt(n, error, device);
      };
      try {
        fate.detail = make(group, device, arm);
      } catch (const Error& e) {
        CHECK(e.kind() == Failure::kSetup);
        fate.error = e.what();
      }
      if (group.rank() == victim) failed = fake::hasFailed();
      // Other code in this thread must not take our errors for its own.
      if (error != cudaErrorIllegalAddress) CHECK_EQ(cudaGetLastError(), cudaSuccess);
      group.run({Barrier{}});  // it is as good as before
      fake::heal();
    });
    if (!failed) return n - 1;
    for (const Fate& fate : fates) {
      CHECK_EQ(fate.error, fates[0].error);
      CHECK_EQ(fate.detail, fates[0].detail);
    }
    judge(fates[0]);
  }
}

std::string makeMemory(Group& group, int device, std::optional<MemoryAccess> wish,
                       const std::function<void()>& arm) {
  arm();
  const PeerMemory memory(group, device, 3 << 20, wish);
  return name(memory.access());
}

void multicasts(fake::Machine& m) {
  m.multicasts = true;
  m.gpus = 3;
}

bool says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

}  // namespace

// ---- machines (processes first)

// The fake knows what the switch would add: the memory that each rank has bound.
TEST(a_multicast_window_stands_for_the_memory_of_all_ranks) {
  const auto test = [](Group& group, int device) {
    const MulticastWindow window(group, device, 5 << 20);
    CHECK(window.bytes() >= size_t{5} << 20);
    const auto word = [](int r) { return 0x1234u + static_cast<uint64_t>(r); };
    const uint64_t mine = word(group.rank());
    Stream(device).copy(window.own() + 4096, &mine, sizeof mine);
    group.run({Barrier{}});
    void* places[8];
    CHECK_EQ(fake::fakeMulticast(window.everyone() + 4096, places), group.size());
    uint64_t sum = 0, wanted = 0;
    for (int r = 0; r < group.size(); ++r) {
      sum += *static_cast<uint64_t*>(places[r]);
      wanted += word(r);
    }
    CHECK_EQ(sum, wanted);
    group.run({Barrier{}});  // nobody gives it back before
  };
  const On machine(multicasts);
  for (int P : {2, 3}) {
    // Each process sees its own GPU only.
    processes::inGroup(P, [&](Group& group) {
      fake::see({group.rank()});
      test(group, 0);
      CHECK_EQ(fake::leftovers(), "");
    });
    ranks::inGroup(P, [&](Group& group) { test(group, group.rank()); });
    CHECK_EQ(fake::leftovers(), "");
  }
}

TEST(a_rank_that_sees_only_its_own_gpu_finds_out_by_trying) {
  const auto eachSeesItsOwn = [](MemoryAccess access, const std::vector<std::string>& reasons) {
    processes::inGroup(2, [&](Group& group) {
      fake::see({group.rank()});
      PeerMemory memory(group, 0, 1000);
      CHECK_EQ(name(memory.access()), std::string(name(access)));
      for (const std::string& reason : reasons) CHECK(says(memory.why(), reason));
      CHECK(!memory.residents()[0].sharesGpu(memory.residents()[1]));
      group.run({Barrier{}});
    });
  };
  eachSeesItsOwn(MemoryAccess::kDescriptor, {});
  {
    const On machine(apart);
    eachSeesItsOwn(MemoryAccess::kHost,
                   {"not by descriptor: rank 0 cannot get access to mapped memory",
                    "not by ipc: rank 0 cannot open another rank's memory"});
  }
  const On machine([](fake::Machine& m) { m.loses_data = true; });
  eachSeesItsOwn(MemoryAccess::kHost, {"not by descriptor: rank 0 does not see what rank 1 wrote",
                                       "not by ipc: rank 0 does not see what rank 1 wrote"});
}

TEST(processes_take_the_first_way_that_all_can_go) {
  expectAccess(As::kProcesses, MemoryAccess::kDescriptor,
               {"not by pointer: rank 0 and rank 1 are different"});
  const On no_export([](fake::Machine& m) { m.exports = false; });
  expectAccess(As::kProcesses, MemoryAccess::kLegacyIpc,
               {"not by descriptor: the GPU of rank 0 cannot hand memory to other processes"});
  const On no_ipc([](fake::Machine& m) { m.ipc = false; });
  expectAccess(As::kProcesses, MemoryAccess::kHost,
               {"not by ipc: rank 0 cannot get an IPC handle on GPU 0"});
  const On no_host([](fake::Machine& m) { m.registers = false; });
  run(As::kProcesses, 2, [](Group& group, int device) {
    CHECK(failureOf([&] { PeerMemory(group, device, 1000); },
                    "do not reach each other's GPU memory, not by pointer: rank 0 and") ==
          Failure::kSetup);
    CHECK(failureOf([&] { PeerMemory(group, device, 1000); },
                    "not by host: the GPU of rank 0 cannot register host memory") ==
          Failure::kSetup);
  });
}

TEST(without_room_to_map_the_memory_of_other_gpus_host_memory_is_taken) {
  const On machine([](fake::Machine& m) { m.bar1_is_full = true; });
  expectAccess(As::kProcesses, MemoryAccess::kHost,
               {"not by descriptor: rank 0 cannot get access to mapped memory",
                "not by ipc: rank 0 cannot open another rank's memory"});
  expectAccess(As::kThreads, MemoryAccess::kHost,
               {"not by pointer: rank 0 cannot get access to the memory of GPU 1"});
}

TEST(a_window_that_a_rank_cannot_make_is_made_by_none) {
  const On machine(multicasts);
  for (const int victim : {0, 2})
    for (const cudaError_t error : {cudaErrorNotSupported, cudaErrorMemoryAllocation}) {
      const int calls = failEachCall(
          3, victim, error,
          [](Group& group, int device, const std::function<void()>& arm) {
            arm();
            const MulticastWindow window(group, device, 1 << 20);
            group.run({Barrier{}});
            return "made";
          },
          [&](const Fate& fate) {  // what only gives something back may fail
            CHECK(says(fate.error, "rank " + std::to_string(victim)) || fate.detail == "made");
          });
      CHECK(calls > 20);
      CHECK_EQ(fake::leftovers(), "");
    }
}

TEST(memory_is_shared_beside_captures_of_other_threads) {
  fake::someone_captures = true;
  for (As as : {As::kProcesses, As::kThreads})
    for (MemoryAccess access : {MemoryAccess::kPointer, MemoryAccess::kDescriptor,
                                MemoryAccess::kLegacyIpc, MemoryAccess::kHost}) {
      if (as == As::kProcesses && access == MemoryAccess::kPointer) continue;
      run(as, 2, [&](Group& group, int device) {
        {
          const MappedPages pages(group, device, 1000);
          const PeerMemory memory(group, device, 1000, access);
          group.run({Barrier{}});  // no rank frees what another maps
        }
        CHECK_EQ(fake::captures_ended.load(), 0);
      });
    }
  fake::someone_captures = false;
}

// A board of each of three ranks on one host.
void withBoards(As as, const std::function<void(Group&, SegmentBoard&, int device)>& body) {
  run(as, 3, [&](Group& group, int device) {
    const PeerMemory memory(group, device, 1000);
    SegmentBoard board(group, memory, true);
    body(group, board, device);
    group.run({Barrier{}});
  });
}

std::shared_ptr<void> own(int device) {
  return ownMemory(device, 1000, [] { return std::vector<CUstream_st*>(); });
}

void awaitMapped(const SegmentBoard& board, Place place) {
  ranks::await("it is mapped", [&] { return board.isMapped(place); });
}

TEST(memory_that_a_rank_cannot_map_is_not_used_and_no_error) {
  withBoards(As::kProcesses, [](Group& group, SegmentBoard& board, int device) {
    const int before = fake::mapsRefused();            // in tests before this one
    fake::machine().bar1_is_full = group.rank() == 2;  // of this process
    group.run({Barrier{}});
    std::shared_ptr<void> memory = own(device), later = own(device);
    const Place refused = board.find(memory.get(), 1);
    Expandable pieces(device, 2);
    pieces.map(0, 2);
    const auto areFound = [&] { return board.isMapped(board.find(pieces.at(0), pieces.kPiece)); };
    CHECK(!areFound());
    // Rank 2 refuses the memory of rank 1 and its piece.  It shares its GPU with rank 0, whose
    // memory needs no window.
    if (group.rank() == 2)
      ranks::await("they are refused", [&] { return fake::mapsRefused() == before + 2; });
    group.run({Barrier{}});
    CHECK(!board.isMapped(refused) || device == 0);
    CHECK(!areFound() || device == 0);
    fake::machine().bar1_is_full = false;
    group.run({Barrier{}});
    CHECK(!areFound() || device == 0);
    ranks::await("the other piece is mapped",
                 [&] { return board.isMapped(board.find(pieces.at(1), pieces.kPiece)); });
    CHECK(!areFound() || device == 0);
    pieces.unmap(0, 1);
    pieces.map(0, 1);
    ranks::await("another one in its place is mapped", areFound);
    const Place taken = board.find(later.get(), 1);
    awaitMapped(board, taken);
    CHECK(!board.isMapped(refused) || device == 0);
    memory.reset();
    // Its slot is free again only if all have answered.
    std::vector<std::shared_ptr<void>> all;
    for (uint64_t i = 0; i + 2 < kMostSegments;) {
      all.push_back(own(device));
      const Place place = board.find(all.back().get(), 1);
      if (place.segment == 0) {
        all.pop_back();
        ranks::sleepMs(1);
      } else {
        ++i;
      }
    }
  });
}

TEST(a_rank_whose_cuda_has_failed_ends_no_thread_and_no_other_rank) {
  withBoards(As::kProcesses, [](Group& group, SegmentBoard& board, int device) {
    const std::shared_ptr<void> memory = own(device), later = own(device);
    const Place mapped = board.find(memory.get(), 1);
    awaitMapped(board, mapped);
    group.run({Barrier{}});
    if (group.rank() == 1) fake::ruin(device, cudaErrorIllegalAddress);
    group.run({Barrier{}});
    const Place place = board.find(later.get(), 1);
    CHECK(place.segment != 0);
    ranks::sleepMs(50);
    CHECK(!board.isMapped(place));
    group.run({Barrier{}});  // else a rank that is healed first could map it before the check
    fake::heal();
  });
}

TEST(a_copy_that_does_not_end_is_an_error_and_nothing_waits_for_it) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    const MemoryPtr memory = allocate(device, 1000);
    Stream stream(device, 50 * kMillisecond);
    group.run({Barrier{}});
    if (group.rank() == 0) fake::machine().copies_hang = true;  // of this process
    struct Report {
      Outcome outcome;
    } mine;
    mine.outcome = outcomeOf([&] { stream.zero(memory->data(), 1000); });
    CHECK(failureOf([&] { obstacleIn(group, gatherEach(group, mine), ". Do this"); },
                    "it was not done after 0 s. End this process and start it again. Do this") ==
          Failure::kSetup);
  });
}

TEST(a_peer_whose_memory_does_not_answer_is_an_error_and_keeps_its_memory) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    const PeerMemory before(group, device, 1000);
    PeerPieces state(group, device, before.residents());
    state.access = MemoryAccess::kLegacyIpc;
    if (group.rank() == 0) fake::machine().peers_hang = true;  // of this process
    CHECK(failureOf(
              [&] { tryAccess(group, state, 1000, 1, {"rank 0", "rank 1"}, 50 * kMillisecond); },
              "was not done after 0 s. End this process and start it again. This was the first") ==
          Failure::kSetup);
    state.release(50 * kMillisecond);  // the fake minds if rank 1 frees what rank 0 has open
    group.run({Barrier{}});
    fake::machine().peers_hang = false;
  });
}

TEST(a_process_that_is_killed_while_ranks_try_ends_it_for_all) {
  // By SIGALRM at some moment: wherever it is then, the others must end, and soon.
  for (int us = 200; us < 20000; us += 900)
    run(As::kProcesses, 3,
        [&](Group& group, int device) {
          if (group.rank() == 1) {
            signal(SIGALRM, SIG_DFL);
            ualarm(static_cast<useconds_t>(us), 0);
          }
          CHECK(failureOf(
                    [&] {
                      for (;;) PeerMemory(group, device, 1000);
                    },
                    "rank 1 (pid") == Failure::kPeerLost);
          CHECK_EQ(fake::leftovers(), "");
        },
        {1});
}

// ---- threads

TEST(threads_give_back_all_that_boards_mapped) {
  CHECK_EQ(fake::leftovers(), "");
  withBoards(As::kThreads, [](Group& group, SegmentBoard& board, int device) {
    std::shared_ptr<void> memory = own(device), dropped = own(device);
    awaitMapped(board, board.find(memory.get(), 1));
    const Place place = board.find(dropped.get(), 1);
    awaitMapped(board, place);
    Expandable pieces(device, 3);
    pieces.map(0, 3);
    ranks::await("all pieces are mapped",
                 [&] { return board.isMapped(board.find(pieces.at(0), 3 * pieces.kPiece)); });
    pieces.unmap(1, 1);
    dropped.reset();
    while (board.isMapped(place)) ranks::sleepMs(1);
    if (group.rank() == 1) return;  // the others' memory goes before the boards, and after
    memory.reset();
  });
  for (int i = 0; i < 5000 && !fake::leftovers().empty(); ++i) ranks::sleepMs(1);
  CHECK_EQ(fake::leftovers(), "");
}

TEST(threads_take_the_first_way_that_all_can_go) {
  expectAccess(As::kThreads, MemoryAccess::kPointer, {""});
  {
    const On one_way([](fake::Machine& m) { m.apart[1][0] = true; });
    expectAccess(As::kThreads, MemoryAccess::kHost,
                 {"not by pointer: the GPU of rank 1 has no peer access to that of rank 0"});
  }
  const On machine(apart);
  ranks::inGroup(3, [](Group& group) {  // on one GPU
    CHECK(PeerMemory(group, 1, 1000).access() == MemoryAccess::kPointer);
  });
  expectAccess(As::kThreads, MemoryAccess::kHost,
               {"not by ipc: the GPU of rank 0 has no peer access"});
}

TEST(a_way_that_is_asked_for_is_taken_or_refused_with_the_reason) {
  const On machine([](fake::Machine& m) { m.exports = false; });
  run(As::kThreads, 3, [](Group& group, int device) {
    CHECK(failureOf([&] { PeerMemory(group, device, 100, MemoryAccess::kDescriptor); },
                    "by descriptor, which was asked for: the GPU of rank 0 cannot hand memory") ==
          Failure::kSetup);
    CHECK(PeerMemory(group, device, 100, MemoryAccess::kHost).access() == MemoryAccess::kHost);
  });
  CHECK_EQ(fake::leftovers(), "");
}

TEST(without_a_driver_all_ranks_say_so) {
  const On machine([](fake::Machine& m) { m.has_driver = false; });
  CHECK_EQ(deviceCount(), 0);
  ranks::inGroup(2, [](Group& group) {
    CHECK(failureOf([&] { PeerMemory(group, 0, 100); }, "no NVIDIA driver") == Failure::kSetup);
    CHECK(failureOf([&] { MappedPages(group, 0, 100); }, "no NVIDIA driver") == Failure::kSetup);
    group.run({Barrier{}});
  });
}

// ---- every call that can fail

TEST(whatever_call_fails_all_ranks_go_another_way_or_get_the_same_error) {
  const std::vector<std::optional<MemoryAccess>> wishes{
      std::nullopt, MemoryAccess::kPointer, MemoryAccess::kDescriptor, MemoryAccess::kLegacyIpc,
      MemoryAccess::kHost};
  for (const auto& wish : wishes)
    for (int victim : {0, 1}) {
      std::set<std::string> outcomes;
      const int calls = failEachCall(
          2, victim, cudaErrorNotSupported,
          [&](Group& group, int device, auto& arm) { return makeMemory(group, device, wish, arm); },
          [&](const Fate& fate) {
            CHECK_EQ(fake::leftovers(), "");
            outcomes.insert(fate.detail);
            CHECK(fate.error.empty() || says(fate.error, "rank " + std::to_string(victim)));
            CHECK(wish ? fate.detail.empty() || fate.detail == name(*wish) : true);
          });
      CHECK(calls > 20);
      // One that comes in the midst moves all to the next way.
      if (!wish) CHECK(outcomes.contains("descriptor"));
    }
}

TEST(a_gpu_without_memory_left_is_an_error_on_all_ranks_and_a_full_window_none) {
  for (const auto& wish :
       {std::optional<MemoryAccess>(), std::optional(MemoryAccess::kDescriptor),
        std::optional(MemoryAccess::kLegacyIpc), std::optional(MemoryAccess::kHost)}) {
    bool ended = false, went_on = false;
    failEachCall(
        3, 2, cudaErrorMemoryAllocation,
        [&](Group& group, int device, auto& arm) { return makeMemory(group, device, wish, arm); },
        [&](const Fate& fate) {
          CHECK_EQ(fake::leftovers(), "");
          ended = ended || says(fate.error, "rank 2 (pid");
          went_on = went_on || fate.error.empty();
          if (fate.error.empty() || says(fate.error, "Free GPU memory")) return;
          throw std::runtime_error("not said: " + fate.error);
        });
    CHECK(ended);
    CHECK_EQ(went_on, !wish);
  }
}

TEST(a_ruined_process_is_an_error_on_all_ranks_that_says_what_to_do) {
  bool advised = false;
  failEachCall(
      2, 1, cudaErrorIllegalAddress,
      [&](Group& group, int device, auto& arm) {
        return makeMemory(group, device, std::nullopt, arm);
      },
      [&](const Fate& fate) {
        CHECK(says(fate.error, "rank 1 (pid"));
        CHECK(says(fate.error, "end it and start it again"));
        advised = advised || says(fate.error, "set RINGREDUCE_CUDA_WAY=host on all ranks");
      });
  CHECK(advised);
  fake::forgetLeftovers();  // such a process can give nothing back
}

TEST(mapped_pages_fail_on_all_ranks_alike) {
  {
    const On machine([](fake::Machine& m) { m.registers = false; });
    ranks::inGroup(2, [](Group& group) {
      CHECK(failureOf([&] { MappedPages(group, 0, 100); }, "use nccl for CUDA tensors") ==
            Failure::kSetup);
    });
  }
  for (cudaError_t error : {cudaErrorNotSupported, cudaErrorMemoryAllocation})
    CHECK(failEachCall(
              3, 1, error,
              [&](Group& group, int device, auto& arm) {
                arm();
                MappedPages(group, device, 100);
                return "";
              },
              [&](const Fate& fate) {
                CHECK(fate.error.empty() || says(fate.error, "rank 1 (pid"));
              }) >= 3);
}

int main(int argc, char** argv) {
  return peers::main(argc, argv);
}
