// By which way ranks reach each other's GPU memory: the choice, without any GPU.
#include "cuda/memory/memory_access.h"

#include <cstring>

#include "check.h"

using namespace ringreduce::cuda;

namespace {

Resident resident(uint64_t process, const char* gpu) {
  Resident r;
  r.process[0] = process;
  r.process[1] = 7;
  std::strcpy(r.gpu, gpu);
  r.exports_memory = r.registers_host_memory = true;
  return r;
}

std::vector<std::string> names(size_t n) {
  std::vector<std::string> all;
  for (size_t r = 0; r < n; ++r) all.push_back("rank " + std::to_string(10 + r));
  return all;
}

// What the ranks find together, if each reaches every GPU but for what `reach` says.
Obstacles together(const std::vector<Resident>& ranks,
                   const std::vector<std::vector<Reach>>& reach = {}) {
  std::vector<Obstacles> all;
  for (size_t me = 0; me < ranks.size(); ++me)
    all.push_back(obstaclesOf(
        me, ranks, reach.empty() ? std::vector<Reach>(ranks.size(), Reach::kUnknown) : reach[me],
        names(ranks.size())));
  return merged(all);
}

constexpr Reach Y = Reach::kYes, N = Reach::kNo, U = Reach::kUnknown;

}  // namespace

TEST(names_of_ways) {
  for (MemoryAccess access : {MemoryAccess::kPointer, MemoryAccess::kDescriptor,
                              MemoryAccess::kLegacyIpc, MemoryAccess::kHost})
    CHECK(memoryAccessNamed(name(access)) == access);
  CHECK(!memoryAccessNamed("vmm"));
  CHECK(!memoryAccessNamed(""));
}

TEST(threads_of_one_process_use_pointers) {
  for (const char* gpu : {"GPU-a", "GPU-b"}) {
    const Obstacles found = together({resident(1, "GPU-a"), resident(1, gpu)}, {{Y, Y}, {Y, Y}});
    CHECK(chooseAccess(found, std::nullopt) == MemoryAccess::kPointer);
    CHECK_EQ(explain(found, MemoryAccess::kPointer), "");
  }
  CHECK(chooseAccess(together({resident(1, "GPU-a")}), std::nullopt) == MemoryAccess::kPointer);
}

TEST(one_rank_elsewhere_and_all_use_descriptors) {
  const Obstacles found =
      together({resident(1, "GPU-a"), resident(1, "GPU-a"), resident(2, "GPU-b")});
  CHECK(chooseAccess(found, std::nullopt) == MemoryAccess::kDescriptor);
  CHECK_EQ(explain(found, MemoryAccess::kDescriptor),
           "not by pointer: rank 10 and rank 12 are different processes");
  // The same pid in two containers, say: half a token is no token.
  Resident other = resident(1, "GPU-a");
  other.process[1] = 8;
  CHECK(chooseAccess(together({resident(1, "GPU-a"), other}), std::nullopt) ==
        MemoryAccess::kDescriptor);
}

TEST(one_gpu_that_cannot_export_moves_all_to_ipc) {
  std::vector<Resident> ranks{resident(1, "GPU-a"), resident(2, "GPU-b"), resident(3, "GPU-c")};
  ranks[1].exports_memory = false;
  const Obstacles found = together(ranks);
  CHECK(chooseAccess(found, std::nullopt) == MemoryAccess::kLegacyIpc);
  CHECK_EQ(
      explain(found, MemoryAccess::kLegacyIpc),
      "not by pointer: rank 10 and rank 11 are different processes; not by descriptor: the GPU "
      "of rank 11 cannot hand memory to other processes");
}

TEST(one_pair_without_peer_access_moves_all_to_host_memory) {
  const std::vector<Resident> ranks{resident(1, "GPU-a"), resident(2, "GPU-b"),
                                    resident(3, "GPU-c")};
  const Obstacles found = together(ranks, {{Y, Y, Y}, {Y, Y, Y}, {Y, N, Y}});
  CHECK(chooseAccess(found, std::nullopt) == MemoryAccess::kHost);
  CHECK(explain(found, MemoryAccess::kHost)
            .ends_with("not by ipc: the GPU of rank 12 has no peer access to that of rank 11"));
  // What nobody can know is tried.
  CHECK(chooseAccess(together(ranks, {{Y, U, U}, {U, Y, U}, {U, U, Y}}), std::nullopt) ==
        MemoryAccess::kDescriptor);
  // A GPU needs no access to itself, whatever the driver says.
  CHECK(chooseAccess(together({resident(1, "GPU-a"), resident(1, "GPU-a")}, {{N, N}, {N, N}}),
                     std::nullopt) == MemoryAccess::kPointer);
}

TEST(without_host_memory_too_there_is_no_way) {
  std::vector<Resident> ranks{resident(1, "GPU-a"), resident(1, "GPU-b")};
  ranks[1].registers_host_memory = false;
  const Obstacles found = together(ranks, {{Y, N}, {N, Y}});
  CHECK(!chooseAccess(found, std::nullopt));
  for (const char* access : {"pointer", "descriptor", "ipc"})
    CHECK(explain(found, std::nullopt)
              .find(std::string("not by ") + access + ": the GPU of rank 10") != std::string::npos);
  CHECK(explain(found, std::nullopt)
            .ends_with("not by host: the GPU of rank 11 cannot register host memory"));
}

TEST(a_wish_is_granted_or_not_but_never_replaced) {
  Obstacles found;
  for (MemoryAccess access : {MemoryAccess::kPointer, MemoryAccess::kDescriptor,
                              MemoryAccess::kLegacyIpc, MemoryAccess::kHost})
    CHECK(chooseAccess(found, access) == access);
  found[static_cast<size_t>(MemoryAccess::kLegacyIpc)] = "rank 10 cannot";
  CHECK(!chooseAccess(found, MemoryAccess::kLegacyIpc));
  CHECK(chooseAccess(found, MemoryAccess::kHost) == MemoryAccess::kHost);
}
