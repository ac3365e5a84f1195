// GPU memory between ranks, by each way, as processes and as threads.  On GPUs, or on the fake.
#define CHECK_OWN_MAIN
#include "cuda/memory/peer_memory.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "cuda/memory/device_memory.h"
#include "peers.h"

using namespace peers;
using ranks::failureOf;
using ranks::sleepMs;

namespace {

// A word that `writer` leaves for `reader`, seen from anywhere.
uint64_t wordOf(int writer, int reader) {
  return 0x1234500000000000u + static_cast<uint64_t>(writer) * 1000 + static_cast<uint64_t>(reader);
}

// Every rank writes into every piece, at the start, and at its end; every rank reads all of it.
void everybodyReachesEverything(Group& group, const PeerMemory& memory) {
  const int P = group.size(), me = group.rank();
  Stream stream(memory.device());
  const auto place = [&](int owner, int writer) {
    return memory.at(owner) + memory.bytes() - static_cast<size_t>(P - writer) * sizeof(uint64_t);
  };
  for (int owner = 0; owner < P; ++owner) {
    const uint64_t word = wordOf(me, owner);
    stream.copy(place(owner, me), &word, sizeof word);
  }
  group.run({Barrier{}});
  for (int owner = 0; owner < P; ++owner)
    for (int writer = 0; writer < P; ++writer) {
      uint64_t word = 0;
      stream.copy(&word, place(owner, writer), sizeof word);
      CHECK_EQ(word, wordOf(writer, owner));
    }
  group.run({Barrier{}});
}

void isZero(const PeerMemory& memory, int rank) {
  Stream stream(memory.device());
  std::vector<char> all(memory.bytes(), 'x');
  stream.copy(all.data(), memory.at(rank), all.size());
  CHECK(all[0] == 0 && std::memcmp(&all[0], &all[1], all.size() - 1) == 0);
}

// Whether ranks on their GPUs can have memory by this way at all, on this machine.  With EVERY_WAY
// in the environment (the fake has every way) it is taken for granted, and an error if not.
bool isPossible(As as, int P, MemoryAccess access) {
  if (std::getenv("EVERY_WAY")) return true;
  bool possible = true;
  try {
    run(as, P, [&](Group& group, int device) { PeerMemory(group, device, 100, access); });
  } catch (const std::exception& error) {
    if (!std::strstr(error.what(), "which was asked for")) throw;
    std::printf("not here: %s\n", error.what());
    possible = false;
  }
  return possible;
}

void byEachAccess(As as, const std::function<void(int P, MemoryAccess access)>& test) {
  for (MemoryAccess access : {MemoryAccess::kPointer, MemoryAccess::kDescriptor,
                              MemoryAccess::kLegacyIpc, MemoryAccess::kHost})
    for (int P : {1, 2, 3}) {
      if (as == As::kProcesses && access == MemoryAccess::kPointer && P > 1) continue;
      if (isPossible(as, P, access)) test(P, access);
    }
}

void allocateAndReach(As as) {
  byEachAccess(as, [&](int P, MemoryAccess access) {
    run(as, P, [&](Group& group, int device) {
      for (size_t bytes : {size_t{1}, size_t{300'000}, size_t{5} << 20}) {
        PeerMemory memory(group, device, bytes, access);
        CHECK(memory.access() == access);
        CHECK(memory.bytes() >= bytes && memory.bytes() < bytes + (64 << 20));
        CHECK_EQ(memory.why(), access == MemoryAccess::kPointer ? "" : memory.why());
        for (int r = 0; r < P; ++r) isZero(memory, r);
        group.run({Barrier{}});
        everybodyReachesEverything(group, memory);
      }
      // Two at the same time are two.
      PeerMemory one(group, device, 100, access), two(group, device, 100, access);
      everybodyReachesEverything(group, one);
      everybodyReachesEverything(group, two);
      group.run({Barrier{}});
    });
  });
}

}  // namespace

// ---- processes first: nothing here has used CUDA yet

TEST(processes_reach_each_others_memory) {
  allocateAndReach(As::kProcesses);
}

TEST(processes_take_the_best_way) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    PeerMemory memory(group, device, 1 << 20);
    CHECK(memory.access() != MemoryAccess::kPointer);
    CHECK(memory.why().starts_with("not by pointer: rank 0 and rank 1 are different processes"));
    CHECK_EQ(memory.residents().size(), 2u);
    CHECK(!memory.residents()[0].sharesProcess(memory.residents()[1]));
    CHECK_EQ(memory.residents()[static_cast<size_t>(group.rank())].gpu,
             describeDevice(device).uuid);
    everybodyReachesEverything(group, memory);
  });
}

TEST(what_a_killed_rank_owned_stays_readable_while_it_is_mapped) {
  for (MemoryAccess access : {MemoryAccess::kDescriptor, MemoryAccess::kHost})
    if (isPossible(As::kProcesses, 3, access))
      run(As::kProcesses, 3,
          [&](Group& group, int device) {
            PeerMemory memory(group, device, 1 << 20, access);
            everybodyReachesEverything(group, memory);
            if (group.rank() == 1) raise(SIGKILL);
            while (!group.epoch()->peers().states()[1].isLost()) sleepMs(1);
            Stream stream(device);
            uint64_t word = 0;
            stream.copy(&word, memory.at(1) + memory.bytes() - 3 * sizeof word, sizeof word);
            CHECK_EQ(word, wordOf(0, 1));
          },
          {1});
}

TEST(a_killed_rank_keeps_nobody_from_giving_back) {
  for (MemoryAccess access :
       {MemoryAccess::kDescriptor, MemoryAccess::kLegacyIpc, MemoryAccess::kHost})
    if (isPossible(As::kProcesses, 3, access))
      run(As::kProcesses, 3,
          [&](Group& group, int device) {
            PeerMemory memory(group, device, 1 << 20, access);
            group.run({Barrier{}});
            if (group.rank() == 1) raise(SIGKILL);
            while (!group.epoch()->peers().states()[1].isLost()) sleepMs(1);
            const Nanos start = now();
            memory.release(60 * kSecond);
            CHECK(now() - start < 30 * kSecond);
          },
          {1});
}

TEST(a_rank_that_dies_before_it_allocates_ends_it_for_all) {
  run(As::kProcesses, 3,
      [](Group& group, int device) {
        if (group.rank() == 2) raise(SIGKILL);
        CHECK(failureOf([&] { PeerMemory(group, device, 100); }, "rank 2 (pid") ==
              Failure::kPeerLost);
      },
      {2});
}

TEST(an_owner_by_ipc_waits_for_those_who_still_map_it) {
  if (!isPossible(As::kProcesses, 2, MemoryAccess::kLegacyIpc)) return;
  run(As::kProcesses, 2, [](Group& group, int device) {
    PeerMemory memory(group, device, 1 << 20, MemoryAccess::kLegacyIpc);
    everybodyReachesEverything(group, memory);
    if (group.rank() == 0) {
      const Nanos start = now();
      memory.release(60 * kSecond);
      CHECK(now() - start >= 100 * kMillisecond);
      return;
    }
    sleepMs(150);
    Stream stream(device);
    uint64_t word = 0;
    stream.copy(&word, memory.at(0) + memory.bytes() - 2 * sizeof word, sizeof word);
    CHECK_EQ(word, wordOf(0, 0));
  });
}

TEST(an_owner_by_ipc_that_waited_long_enough_leaves_the_memory) {
  if (!isPossible(As::kProcesses, 2, MemoryAccess::kLegacyIpc)) return;
  run(As::kProcesses, 2, [](Group& group, int device) {
    PeerMemory memory(group, device, 1 << 20, MemoryAccess::kLegacyIpc);
    everybodyReachesEverything(group, memory);
    if (group.rank() == 0) memory.release(50 * kMillisecond);
    group.run({Barrier{}});
    if (group.rank() == 1) {
      Stream stream(device);
      uint64_t word = 0;
      stream.copy(&word, memory.at(0) + memory.bytes() - 2 * sizeof word, sizeof word);
      CHECK_EQ(word, wordOf(0, 0));
      memory.release();
    }
    group.run({Barrier{}});  // the owner's process is there until then
  });
}

TEST(a_forked_child_gives_nothing_back) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    PeerMemory memory(group, device, 1 << 20);
    if (const pid_t child = fork(); child == 0) {
      memory.release();
      _exit(0);
    } else {
      waitpid(child, nullptr, 0);
    }
    group.run({Barrier{}});
    everybodyReachesEverything(group, memory);
  });
}

TEST(processes_see_the_same_mapped_pages) {
  run(As::kProcesses, 3, [](Group& group, int device) {
    MappedPages pages(group, device, 100);
    CHECK_EQ(pages.bytes(), 4096u);
    Stream stream(device);
    // Ranks write by the host into the next one's page, and by the GPU into their own.
    const int next = (group.rank() + 1) % 3;
    uint64_t word = wordOf(group.rank(), next);
    std::memcpy(pages.onHost(next), &word, sizeof word);
    stream.copy(pages.onDevice(group.rank()) + 64, &word, sizeof word);
    group.run({Barrier{}});
    for (int r = 0; r < 3; ++r) {
      stream.copy(&word, pages.onDevice(r), sizeof word);
      CHECK_EQ(word, wordOf((r + 2) % 3, r));
      std::memcpy(&word, pages.onHost(r) + 64, sizeof word);
      CHECK_EQ(word, wordOf(r, (r + 1) % 3));
    }
    group.run({Barrier{}});
  });
}

// ---- threads

TEST(threads_reach_each_others_memory) {
  allocateAndReach(As::kThreads);
}

TEST(threads_share_pointers_and_ownership) {
  if (!isPossible(As::kThreads, 2, MemoryAccess::kPointer)) return;
  std::atomic<std::byte*> of_rank_0{nullptr};
  run(As::kThreads, 2, [&](Group& group, int device) {
    PeerMemory memory(group, device, 1 << 20);
    CHECK(memory.access() == MemoryAccess::kPointer);
    CHECK_EQ(memory.why(), "");
    everybodyReachesEverything(group, memory);
    if (group.rank() == 0) of_rank_0 = memory.at(0);
    group.run({Barrier{}});
    CHECK(memory.at(0) == of_rank_0);
    if (group.rank() == 0) memory.release();  // an owner that goes first
    group.run({Barrier{}});
    if (group.rank() == 0) return;
    Stream stream(device);
    uint64_t word = 0;
    stream.copy(&word, memory.at(0) + memory.bytes() - sizeof word, sizeof word);
    CHECK_EQ(word, wordOf(1, 0));
  });
}

TEST(threads_see_the_same_mapped_pages) {
  run(As::kThreads, 3, [](Group& group, int device) {
    for (int again = 0; again < 6; ++again) {
      MappedPages one(group, device, 5000), two(group, device, 1);
      CHECK_EQ(one.bytes(), 8192u);
      uint64_t word = wordOf(group.rank(), again);
      std::memcpy(one.onHost(group.rank()), &word, sizeof word);
      group.run({Barrier{}});
      Stream stream(device);
      for (int r = 0; r < 3; ++r) {
        stream.copy(&word, one.onDevice(r), sizeof word);
        CHECK_EQ(word, wordOf(r, again));
      }
      group.run({Barrier{}});
    }
  });
}

TEST(ranks_that_ask_for_different_things_are_told) {
  run(As::kThreads, 3, [](Group& group, int device) {
    CHECK(failureOf([&] { PeerMemory(group, device, group.rank() == 1 ? 200 : 100); },
                    "rank 0 for 100 bytes by any way, rank 1 for 200 bytes by any way") ==
          Failure::kSetup);
    const auto wish = group.rank() == 2 ? std::optional(MemoryAccess::kHost) : std::nullopt;
    CHECK(failureOf([&] { PeerMemory(group, device, 100, wish); },
                    "rank 2 for 100 bytes by host") == Failure::kSetup);
    PeerMemory(group, device, 100);
  });
}

TEST(a_gpu_that_is_not_there_is_named) {
  run(As::kThreads, 2, [](Group& group, int device) {
    CHECK(failureOf([&] { PeerMemory(group, group.rank() == 1 ? 99 : device, 100); },
                    "cannot use GPU 99 of ") == Failure::kSetup);
    CHECK(failureOf([&] { PeerMemory(group, group.rank() == 1 ? -1 : device, 100); },
                    "rank 1 (pid") == Failure::kSetup);
    PeerMemory(group, device, 100);
  });
}

TEST(nothing_is_left) {
  for (MemoryAccess access : {MemoryAccess::kPointer, MemoryAccess::kDescriptor,
                              MemoryAccess::kLegacyIpc, MemoryAccess::kHost}) {
    if (!isPossible(As::kThreads, 2, access)) continue;
    run(As::kThreads, 2, [&](Group& group, int device) {
      const OnDevice here(device);
      constexpr size_t kBytes = 8 << 20;
      const auto left = [&] {
        group.run({Barrier{}});
        size_t left = 0, all = 0;
        cuda::check(cudaMemGetInfo(&left, &all), "ask for free memory");
        group.run({Barrier{}});
        return left;
      };
      PeerMemory(group, device, kBytes, access);
      const size_t before = left();
      for (int again = 0; again < 6; ++again) PeerMemory(group, device, kBytes, access);
      CHECK(left() + 3 * kBytes > before);  // of 12 pieces; others may use the GPU too
    });
  }
}

int main(int argc, char** argv) {
  return peers::main(argc, argv);
}
