// Memory that ranks offer each other while they run: who maps what and when, and that nothing of it
// is left or used again too early.  On GPUs, or on the fake.
#define CHECK_OWN_MAIN
#include "cuda/memory/segment_board.h"

#include <csignal>
#include <optional>

#include "cuda/memory/own_memory.h"
#include "peers.h"

using namespace peers;

namespace {

constexpr size_t kBytes = 3 << 20;  // no multiple of a block

const StreamUsers kNoUsers = [] { return std::vector<CUstream_st*>(); };

std::shared_ptr<void> own(int device, size_t bytes = kBytes) {
  return ownMemory(device, bytes, kNoUsers);
}

template <class F>
void await(const char* what, F&& is_so) {
  for (const Nanos deadline = deadlineIn(30 * kSecond); !is_so(); ranks::sleepMs(1))
    if (now() > deadline) throw std::runtime_error(std::string("it never was so: ") + what);
}

// What the kernels of this rank's GPU read.
SegmentEntry entryOf(const SegmentBoard& board, Stream& stream, int rank, Place place) {
  SegmentEntry entry{};
  const auto slot = static_cast<size_t>(rank) * kMostSegments + place.segment % kMostSegments;
  stream.copy(&entry, board.table() + slot, sizeof entry);
  return entry;
}

uint64_t wordOf(int rank, uint64_t step) {
  return 0xabcd00000000u + step * 1000 + static_cast<uint64_t>(rank);
}

// A board of each rank, where own memory can be mapped.
struct Fixture {
  Fixture(Group& of, int on)
      : group(of), device(on), memory(of, on, 100), board(of, memory), stream(on) {}
  bool works() const {
    return memory.access() == MemoryAccess::kDescriptor ||
           memory.access() == MemoryAccess::kPointer;
  }
  void awaitMapped(Place place) {
    CHECK(place.segment != 0);
    await("all peers map it", [&] { return board.isMapped(place); });
  }
  // Every rank writes a word at its place, and reads those of all by its own table.
  void everybodyReads(const std::byte* data, Place place, uint64_t step) {
    const uint64_t mine = wordOf(group.rank(), step);
    stream.copy(const_cast<std::byte*>(data), &mine, sizeof mine);
    const std::vector<Place> places = gatherEach(group, place);
    for (int r = 0; r < group.size(); ++r) {
      const Place at = places[static_cast<size_t>(r)];
      const SegmentEntry entry = entryOf(board, stream, r, at);
      CHECK_EQ(entry.number, at.segment);
      CHECK(at.offset + sizeof mine <= entry.bytes);
      uint64_t word = 0;
      stream.copy(&word, entry.data + at.offset, sizeof word);
      CHECK_EQ(word, wordOf(r, step));
    }
    group.run({Barrier{}});
  }

  Group& group;
  const int device;
  PeerMemory memory;
  SegmentBoard board;
  Stream stream;
};

std::byte* bytesOf(const std::shared_ptr<void>& memory) {
  return static_cast<std::byte*>(memory.get());
}

void testAll(As as) {
  for (int P : {2, 3, 5})
    run(as, P, [](Group& group, int device) {
      Fixture f(group, device);
      if (!f.works()) return (void)std::printf("not here: %s\n", f.memory.why().c_str());
      const auto rank = static_cast<size_t>(group.rank());
      std::vector<std::shared_ptr<void>> all;
      for (uint64_t step = 0; step < 3; ++step) {
        all.push_back(own(device, kBytes + (rank << 20)));
        // Each rank at another place.
        const std::byte* const at = bytesOf(all.back()) + 4096 * (rank + 1);
        const Place place = f.board.find(at, 1 << 20);
        CHECK_EQ(place.offset, 4096 * (rank + 1));
        CHECK(f.board.find(bytesOf(all.back()), 10) == (Place{place.segment, 0}));
        f.awaitMapped(place);
        f.everybodyReads(at, place, step);
      }
      // Dropped by one rank after the other, which need not agree.
      for (size_t i = 0; i < all.size(); ++i) {
        const Place gone = f.board.find(bytesOf(all[i]), 1);
        if (i == rank % all.size()) {
          all[i].reset();
          await("its kernels no longer use it", [&] {
            CHECK(f.board.find(all[i].get(), 1) == Place{});
            return entryOf(f.board, f.stream, group.rank(), gone).number == 0;
          });
          CHECK(!f.board.isMapped(gone));
        }
      }
      group.run({Barrier{}});
    });
}

}  // namespace

TEST(processes_map_what_each_offers) {
  testAll(As::kProcesses);
}

TEST(other_memory_is_not_offered) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    const MemoryPtr plain = allocate(device, kBytes);
    const std::shared_ptr<void> memory = own(device);
    const size_t whole = ownSegmentOf(memory.get(), 1)->bytes();
    CHECK(whole >= kBytes);
    for (const Place place :
         {f.board.find(plain->data(), 8), f.board.find(nullptr, 8),
          f.board.find(bytesOf(memory) - 8, 8), f.board.find(bytesOf(memory) - 8, 16),
          f.board.find(bytesOf(memory) + whole - 8, 16), f.board.find(memory.get(), SIZE_MAX)}) {
      CHECK(place == Place{});
      CHECK(!f.board.isMapped(place));
    }
    CHECK(f.board.find(bytesOf(memory) + whole - 8, 8).segment != 0);
    CHECK(f.board.find(memory.get(), whole).segment != 0);
    group.run({Barrier{}});
  });
}

TEST(a_slot_is_used_again_when_all_have_closed_it_and_no_number_ever) {
  run(As::kProcesses, 3, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    std::vector<std::shared_ptr<void>> all;
    std::vector<Place> places;
    for (uint64_t i = 0; i < kMostSegments; ++i) {
      all.push_back(own(device, 1));
      places.push_back(f.board.find(all.back().get(), 1));
      CHECK(places.back().segment != 0);
      for (size_t k = 0; k + 1 < places.size(); ++k)
        CHECK(places[k].segment != places.back().segment);
    }
    const std::shared_ptr<void> more = own(device);
    CHECK(f.board.find(more.get(), 1) == Place{});
    for (const Place place : places) f.awaitMapped(place);
    f.everybodyReads(bytesOf(all[77]), places[77], 1);
    all[77].reset();
    Place again{};
    await("a slot is free", [&] { return (again = f.board.find(more.get(), 1)).segment != 0; });
    CHECK_EQ(again.segment % kMostSegments, places[77].segment % kMostSegments);
    CHECK(again.segment != places[77].segment);
    CHECK(!f.board.isMapped(places[77]));
    f.awaitMapped(again);
    f.everybodyReads(bytesOf(more), again, 2);
  });
}

TEST(memory_that_is_dropped_before_anybody_knew_of_it_leaves_nothing) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    for (uint64_t i = 0; i < 3 * kMostSegments; ++i) {
      const std::shared_ptr<void> memory = own(device);
      await("there is a slot", [&] { return f.board.find(memory.get(), 1).segment != 0; });
    }
    group.run({Barrier{}});
  });
}

TEST(memory_is_offered_to_each_board_and_goes_from_each) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    std::shared_ptr<void> memory = own(device);
    auto second = std::make_unique<SegmentBoard>(group, f.memory);
    const Place one = f.board.find(memory.get(), 1), other = second->find(memory.get(), 1);
    f.awaitMapped(one);
    await("it is on both", [&] { return second->isMapped(other); });
    group.run({Barrier{}});
    second.reset();
    f.everybodyReads(bytesOf(memory), one, 1);
    memory.reset();
    await("it is withdrawn", [&] { return !f.board.isMapped(one); });
    group.run({Barrier{}});
  });
}

TEST(what_a_graph_uses_stays) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    std::shared_ptr<void> memory = own(device);
    const std::byte* const data = bytesOf(memory);
    const Place place = f.board.find(data, 1);
    f.board.keep(place);
    f.awaitMapped(place);
    memory.reset();
    ranks::sleepMs(50);
    CHECK(f.board.isMapped(place));
    f.everybodyReads(data, place, 1);
  });
}

TEST(nobody_waits_for_a_rank_that_does_not_map) {
  run(As::kProcesses, 3, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    struct {
      pid_t pid = getpid();
    } mine;
    const auto all = gatherEach(group, mine);
    if (group.rank() == 1) {
      raise(SIGSTOP);
      group.run({Barrier{}});
      return;
    }
    if (group.rank() == 2) {
      group.run({Barrier{}});
      return;
    }
    await("rank 1 has stopped", [&] {
      char state = 0;
      const std::string path = "/proc/" + std::to_string(all[1].pid) + "/stat";
      if (FILE* stat = std::fopen(path.c_str(), "r")) {
        (void)!std::fscanf(stat, "%*d (%*[^)]) %c", &state);
        std::fclose(stat);
      }
      return state == 'T';
    });
    // More than its socket takes, of which some is dropped meanwhile.
    std::vector<std::shared_ptr<void>> memory;
    std::vector<Place> places;
    for (int i = 0; i < 200; ++i) {
      memory.push_back(own(device));
      places.push_back(f.board.find(memory.back().get(), 1));
    }
    for (int i = 0; i < 100; ++i) memory[static_cast<size_t>(i)].reset();
    ranks::sleepMs(100);
    for (const Place place : places) CHECK(!f.board.isMapped(place));
    kill(all[1].pid, SIGCONT);
    for (size_t i = 100; i < places.size(); ++i) f.awaitMapped(places[i]);
    group.run({Barrier{}});
  });
}

TEST(what_a_killed_rank_offered_stays_readable_and_nobody_hangs) {
  for (const bool mapped : {false, true})
    run(As::kProcesses, 3,
        [&](Group& group, int device) {
          std::optional<Fixture> made(std::in_place, group, device);
          Fixture& f = *made;
          if (!f.works()) {
            if (group.rank() == 1) raise(SIGKILL);
            return;
          }
          std::shared_ptr<void> memory = own(device);
          const Place place = f.board.find(memory.get(), 1);
          SegmentEntry entry{};
          if (mapped) {
            f.awaitMapped(place);
            f.everybodyReads(bytesOf(memory), place, 1);
            entry = entryOf(f.board, f.stream, 1, gatherEach(group, place)[1]);
            group.run({Barrier{}});
          }
          if (group.rank() == 1) raise(SIGKILL);
          while (!group.epoch()->peers().states()[1].isLost()) ranks::sleepMs(1);
          if (mapped) {
            uint64_t word = 0;
            f.stream.copy(&word, entry.data, sizeof word);
            CHECK_EQ(word, wordOf(1, 1));
          }
          const std::shared_ptr<void> later = own(device);
          const Place place_of_later = f.board.find(later.get(), 1);
          memory.reset();
          ranks::sleepMs(50);
          CHECK(!f.board.isMapped(place_of_later));
          made.reset();
        },
        {1});
}

TEST(threads_map_what_each_offers) {
  testAll(As::kThreads);
}

int main(int argc, char** argv) {
  return peers::main(argc, argv);
}
