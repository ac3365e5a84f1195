// Users' buffers that ranks reach where they are: plain memory, mappings like those of torch's
// expandable segments, and what cannot be registered.  On GPUs, or on the fake.
#define CHECK_OWN_MAIN
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "cuda/memory/peer_memory.h"
#include "peers.h"

using namespace peers;

namespace {

uint64_t wordOf(int writer, int owner) {
  return 0xabcd00000000u + static_cast<uint64_t>(writer) * 1000 + static_cast<uint64_t>(owner);
}

// Registers the buffers; every rank writes into every buffer and reads all.
void everybodyReaches(Group& group, const PeerMemory& memory, void* data, size_t bytes) {
  const int P = group.size();
  const Registration made = registerBuffer(group, memory, data, bytes);
  if (!made.buffer) throw std::runtime_error("refused: " + made.refusal);
  CHECK_EQ(made.refusal, "");
  CHECK_EQ(made.buffer->bytes(), bytes);
  CHECK(made.buffer->at(group.rank()) == data);
  Stream stream(memory.device());
  const auto place = [&](int owner, int writer) {
    return made.buffer->at(owner) +
           (writer == P - 1 ? bytes : 8 * static_cast<size_t>(writer + 1)) - 8;
  };
  for (int owner = 0; owner < P; ++owner) {
    const uint64_t word = wordOf(group.rank(), owner);
    stream.copy(place(owner, group.rank()), &word, sizeof word);
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

void refuses(Group& group, const PeerMemory& memory, void* data, size_t bytes,
             const std::string& reason) {
  const Registration made = registerBuffer(group, memory, data, bytes);
  CHECK(!made.buffer);
  if (made.refusal.find(reason) == std::string::npos)
    throw std::runtime_error("'" + reason + "' is not in: " + made.refusal);
}

// Plain memory, and each rank's in another kind.
void testPlain(Group& group, const PeerMemory& memory) {
  const int device = memory.device();
  const MemoryPtr plain = allocate(device, 5 << 20);
  const Segments segments(device, 1, /*exportable=*/true);
  std::byte* const either = group.rank() % 2 == 0 ? plain->data() : segments.data() + 4096;
  if (memory.access() == MemoryAccess::kDescriptor && group.size() > 1) {
    refuses(group, memory, plain->data(), 1000, "rank 0 cannot register its buffer: plain memory");
    refuses(group, memory, either, 1000, "rank 0 cannot register its buffer: plain memory");
    return;
  }
  everybodyReaches(group, memory, plain->data(), plain->bytes());
  everybodyReaches(group, memory, plain->data() + 512 * (group.rank() + 1), 3 << 20);
  everybodyReaches(group, memory, either, 1 << 20);
  group.run({Barrier{}});
}

void testAll(As as) {
  for (int P : {1, 2, 3})
    run(as, P, [&](Group& group, int device) {
      const PeerMemory memory(group, device, 100);
      if (memory.access() == MemoryAccess::kHost) {
        std::printf("not here: %s\n", memory.why().c_str());
        return refuses(group, memory, nullptr, 100, "do not reach each other's memory");
      }
      testPlain(group, memory);
      const Segments segments(device, 3, /*exportable=*/true);
      const size_t granule = segments.granule();
      everybodyReaches(group, memory, segments.data() + granule + 1024, granule - 1024);
      // Over borders of mappings, at each rank over others, and all of them.
      everybodyReaches(group, memory, segments.data() + granule - 512, 1024);
      everybodyReaches(group, memory, segments.data() + 512 * (group.rank() + 1), 2 * granule);
      everybodyReaches(group, memory, segments.data() + (group.rank() % 2) * (granule / 2),
                       granule);
      everybodyReaches(group, memory, segments.data(), 3 * granule);
      group.run({Barrier{}});
    });
}

}  // namespace

TEST(processes_reach_each_others_buffers) {
  testAll(As::kProcesses);
}

TEST(processes_without_better_memory_reach_plain_buffers) {
  for (int P : {2, 3})
    run(As::kProcesses, P, [](Group& group, int device) {
      try {
        testPlain(group, PeerMemory(group, device, 100, MemoryAccess::kLegacyIpc));
      } catch (const Error& error) {
        if (std::getenv("EVERY_WAY") || !std::strstr(error.what(), "which was asked for")) throw;
        std::printf("not here: %s\n", error.what());
      }
    });
}

TEST(plain_buffers_can_move_to_memory_that_processes_reach) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    const PeerMemory memory(group, device, 100);
    if (memory.access() != MemoryAccess::kDescriptor) return;
    const MemoryPtr plain = allocate(device, 5 << 20);
    const MemoryPtr lasting = lastingMemory(memory, plain->data(), plain->bytes());
    CHECK(lasting && lasting->bytes() >= plain->bytes());
    CHECK(!lastingMemory(memory, lasting->data(), 1000));
    everybodyReaches(group, memory, lasting->data(), plain->bytes());
    group.run({Barrier{}});
  });
}

TEST(processes_are_told_why_a_buffer_cannot_be_registered) {
  run(As::kProcesses, 2, [](Group& group, int device) {
    const PeerMemory memory(group, device, 100);
    if (memory.access() == MemoryAccess::kHost) return;
    const Segments good(device, 1, /*exportable=*/true);
    const Segments own(device, 2, /*exportable=*/false);
    char on_host[4096] = {};
    const bool odd = group.rank() == 1;
    const auto or_good = [&](void* data) { return odd ? data : good.data(); };
    refuses(group, memory, or_good(own.data()), 1000,
            "rank 1 cannot register its buffer: its memory was not made to be mapped by other");
    refuses(group, memory, or_good(own.data() + own.granule() - 500), 1000,
            "rank 1 cannot register its buffer: its memory was not made to be mapped by other");
    refuses(group, memory, or_good(on_host), 1000, "rank 1 cannot register its buffer: ");
    refuses(group, memory, or_good(nullptr), 1000, "rank 1 cannot register its buffer: ");
    refuses(group, memory, good.data(), odd ? 1000 : 2000, "of different sizes");
    everybodyReaches(group, memory, good.data(), 1000);  // none of which does harm
    group.run({Barrier{}});
  });
}

TEST(a_killed_rank_ends_it_for_all) {
  run(As::kProcesses, 3,
      [](Group& group, int device) {
        const PeerMemory memory(group, device, 100);
        const MemoryPtr plain = allocate(device, 1 << 20);
        if (group.rank() == 1) raise(SIGKILL);
        CHECK(ranks::failureOf([&] { registerBuffer(group, memory, plain->data(), 100); },
                               "rank 1 (pid") == Failure::kPeerLost);
      },
      {1});
}

TEST(what_a_killed_rank_registered_stays_readable_while_it_is_mapped) {
  run(As::kProcesses, 3,
      [](Group& group, int device) {
        const PeerMemory memory(group, device, 100);
        if (memory.access() != MemoryAccess::kDescriptor) return;
        const Segments segments(device, 3, /*exportable=*/true);
        const size_t bytes = 3 * segments.granule();
        Registration made = registerBuffer(group, memory, segments.data(), bytes);
        CHECK_EQ(made.refusal, "");
        Stream stream(device);
        uint64_t word = wordOf(group.rank(), group.rank());
        stream.copy(segments.data() + bytes - 8, &word, sizeof word);
        group.run({Barrier{}});
        if (group.rank() == 1) raise(SIGKILL);
        while (!group.epoch()->peers().states()[1].isLost()) ranks::sleepMs(1);
        ranks::sleepMs(50);
        stream.copy(&word, made.buffer->at(1) + bytes - 8, sizeof word);
        CHECK_EQ(word, wordOf(1, 1));
        made.buffer.reset();
      },
      {1});
}

TEST(threads_reach_each_others_buffers) {
  testAll(As::kThreads);
}

TEST(threads_on_one_gpu_need_no_memory_that_can_be_exported) {
  ranks::inGroup(2, [](Group& group) {
    const PeerMemory memory(group, 0, 100);
    const Segments segments(0, 2, /*exportable=*/false);
    everybodyReaches(group, memory, segments.data() + segments.granule() - 500, 1000);
  });
}

int main(int argc, char** argv) {
  return peers::main(argc, argv);
}
