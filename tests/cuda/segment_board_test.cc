// Memory that ranks offer each other while they run: who maps what and when, and that nothing of it
// is left or used again too early.  On GPUs, or on the fake.
#define CHECK_OWN_MAIN
#include "cuda/memory/segment_board.h"

#include <csignal>
#include <optional>

#include "cuda/memory/own_memory.h"
#include "expandable.h"
#include "peers.h"

using namespace peers;
using ranks::await;

namespace {

constexpr size_t kBytes = 3 << 20;  // no multiple of a block

const auto kAlways = [] { return true; };
const StreamUsers kNoUsers = [] { return std::vector<CUstream_st*>(); };

std::shared_ptr<void> own(int device, size_t bytes = kBytes) {
  return ownMemory(device, bytes, kNoUsers);
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
      : group(of), device(on), memory(of, on, 100), board(of, memory, true), stream(on) {}
  bool works() const {
    return memory.access() == MemoryAccess::kDescriptor ||
           memory.access() == MemoryAccess::kPointer;
  }
  void awaitMapped(Place place) {
    CHECK(place.segment != 0);
    await("all peers map it", [&] { return board.isMapped(place); });
  }
  // Of memory that is mapped piece by piece.
  Place awaitFound(const std::byte* data, size_t bytes) {
    Place place{};
    await("all peers map its pieces", [&] {
      place = board.find(data, bytes);
      return board.isMapped(place);
    });
    return place;
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

void testPieces(As as) {
  constexpr size_t kPiece = Expandable::kPiece;
  for (int P : {2, 3})
    run(as, P, [](Group& group, int device) {
      Fixture f(group, device);
      if (!f.works()) return;
      Expandable memory(device, 6);
      const auto step = [&](size_t from, size_t to, size_t word, uint64_t number) {
        const Place place = f.awaitFound(memory.at(from) + 64, (to - from) * kPiece - 64);
        CHECK_EQ(place.offset % kPiece, size_t{64});
        Place of_word = place;
        of_word.offset += (word - from) * kPiece;
        f.everybodyReads(memory.at(word) + 64, of_word, number);
        return place;
      };
      memory.map(0, 2);
      CHECK(f.board.find(memory.at(0), 2 * kPiece) == Place{});  // not yet
      const Place first = step(0, 2, 1, 1);
      CHECK(f.board.find(memory.at(1), 2 * kPiece) == Place{});
      // It grows, what is there stays found, and new tensors are in the same segment.
      memory.map(2, 3);
      CHECK(f.board.find(memory.at(0) + 64, kPiece).segment == first.segment);
      CHECK_EQ(step(1, 5, 4, 2).segment, first.segment);
      // A piece goes under its neighbours' calls.
      memory.unmap(1, 1);
      CHECK(f.board.find(memory.at(0), 2 * kPiece) == Place{});
      CHECK(f.board.find(memory.at(2), 3 * kPiece).segment == first.segment);
      memory.map(1, 1);
      CHECK(f.board.find(memory.at(1), 8) == Place{});
      CHECK_EQ(step(0, 5, 1, 3).segment, first.segment);
      CHECK(f.board.isMapped(first));
      group.run({Barrier{}});
      // No kernel finds what is gone; other memory there has another number.
      memory.unmap(0, 5);
      CHECK(f.board.find(memory.at(2), 8) == Place{});
      await("it is withdrawn", [&] { return !f.board.isMapped(first); });
      memory.map(0, 1);
      CHECK(step(0, 1, 0, 4).segment != first.segment);
      group.run({Barrier{}});
    });
}

}  // namespace

TEST(processes_map_what_each_offers) {
  testAll(As::kProcesses);
}

TEST(processes_map_pieces_as_they_come_and_go) {
  testPieces(As::kProcesses);
}

TEST(tensors_in_pieces_that_cannot_be_handed_over_are_not_found) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    Expandable memory(device, 3);
    memory.map(0, 1);
    memory.map(1, 1, /*exportable=*/group.rank() == 0);
    memory.map(2, 1);
    noteMapped(device, reinterpret_cast<uintptr_t>(memory.at(0)), 3 * Expandable::kPiece);
    const auto find = [&](size_t piece) { return f.board.find(memory.at(piece), 2 * 8); };
    await("its neighbours are mapped", [&] {
      (void)find(1);
      return f.board.isMapped(find(0)) && f.board.isMapped(find(2));
    });
    const auto all = [&] { return f.board.find(memory.at(0), 3 * Expandable::kPiece); };
    if (group.rank() == 0)
      await("all are mapped", [&] { return f.board.isMapped(all()); });
    else
      CHECK(all() == Place{} && find(1) == Place{} &&
            f.board.find(memory.at(1), 8, kAlways) == Place{});
    group.run({Barrier{}});
  });
}

TEST(many_pieces_are_mapped_a_few_at_a_time) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    constexpr size_t kPieces = 70;
    Expandable memory(device, kPieces);
    memory.map(0, kPieces);
    const Place place = f.awaitFound(memory.at(0), kPieces * Expandable::kPiece);
    f.everybodyReads(memory.at(kPieces - 1), {place.segment, (kPieces - 1) * Expandable::kPiece},
                     1);
  });
}

TEST(a_graph_knows_pieces_before_they_are_mapped_and_no_longer_than_they_are) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    Expandable memory(device, 4);
    memory.map(0, 4);
    const std::byte* const data = memory.at(1) + 64;
    const Place place = f.board.find(data, 2 * Expandable::kPiece, kAlways);
    f.awaitMapped(place);
    f.everybodyReads(data, place, 1);
    memory.unmap(0, 1);  // not the graph's
    CHECK(f.board.find(data, 2 * Expandable::kPiece, kAlways) == place);
    f.everybodyReads(data, place, 2);
    memory.unmap(3, 1);
    await("it is withdrawn", [&] { return !f.board.isMapped(place); });
    CHECK_EQ(entryOf(f.board, f.stream, group.rank(), place).number, uint64_t{0});
    group.run({Barrier{}});
  });
}

TEST(tensors_all_over_a_large_segment_take_few_places) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    // Only noted: nothing is there to be handed over.
    constexpr uintptr_t kBegin = uintptr_t{1} << 46;
    constexpr size_t kExtent = 20 << 20, kExtents = 3072;
    for (size_t i = 0; i < kExtents; ++i) {
      const uintptr_t at = kBegin + i * kExtent;
      noteMapped(device, at, kExtent);
      CHECK(f.board.find(reinterpret_cast<const void*>(at), kExtent) == Place{});
    }
    // Nor do many graphs take all.
    for (size_t i = kExtents; i < kExtents + kMostSegments; ++i) {
      const uintptr_t at = kBegin + i * kExtent;
      noteMapped(device, at, kExtent);
      (void)f.board.find(reinterpret_cast<const void*>(at), kExtent, kAlways);
    }
    const std::shared_ptr<void> memory = own(device);
    f.awaitMapped(f.board.find(memory.get(), 1));
    noteUnmapped(kBegin, (kExtents + kMostSegments) * kExtent);
    group.run({Barrier{}});
  });
}

TEST(pieces_of_a_killed_rank_stay_readable) {
  run(As::kProcesses, 3,
      [](Group& group, int device) {
        Fixture f(group, device);
        if (!f.works()) {
          if (group.rank() == 1) raise(SIGKILL);
          return;
        }
        Expandable memory(device, 2);
        memory.map(0, 2);
        const Place place = f.awaitFound(memory.at(0), 2 * Expandable::kPiece);
        f.everybodyReads(memory.at(1), {place.segment, Expandable::kPiece}, 1);
        const Place theirs = gatherEach(group, place)[1];
        const SegmentEntry entry = entryOf(f.board, f.stream, 1, theirs);
        group.run({Barrier{}});
        if (group.rank() == 1) raise(SIGKILL);
        while (!group.epoch()->peers().states()[1].isLost()) ranks::sleepMs(1);
        uint64_t word = 0;
        f.stream.copy(&word, entry.data + theirs.offset + Expandable::kPiece, sizeof word);
        CHECK_EQ(word, wordOf(1, 1));
        memory.unmap(0, 1);
        memory.map(0, 1);
        for (int i = 0; i < 10; ++i, ranks::sleepMs(5))
          CHECK(f.board.find(memory.at(0), 8) == Place{});
      },
      {1});
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
    for (uint64_t i = 0; i < kMostSegments + 8; ++i) {
      const std::shared_ptr<void> memory = own(device);
      await("there is a slot", [&] { return f.board.find(memory.get(), 1).segment != 0; });
    }
    // So do tensors of graphs in memory that is only noted.
    uintptr_t at = uintptr_t{1} << 46;
    for (uint64_t i = 0; i < kMostSegments + 8; ++i, at += kBlockBytes) {
      noteMapped(device, at, kBlockBytes);
      await("there is a place", [&] {
        return f.board.find(reinterpret_cast<const void*>(at), 8, kAlways).segment != 0;
      });
      noteUnmapped(at, kBlockBytes);
    }
    group.run({Barrier{}});
  });
}

TEST(memory_is_offered_to_each_board_and_goes_from_each) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    Fixture f(group, device);
    if (!f.works()) return;
    std::shared_ptr<void> memory = own(device);
    auto second = std::make_unique<SegmentBoard>(group, f.memory, true);
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
    const Place place = f.board.find(data, 1, kAlways);
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

TEST(threads_map_pieces_as_they_come_and_go) {
  testPieces(As::kThreads);
}

int main(int argc, char** argv) {
  return peers::main(argc, argv);
}
