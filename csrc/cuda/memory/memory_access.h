// Choosing how the ranks of a group access each other's GPU memory: pure functions.
//
// All ranks use the same access, the first in this order to which no rank knows an obstacle:
//
//   pointer     all ranks are threads of one process: the pointer itself
//   descriptor  memory that the driver hands to other processes as a file descriptor (VMM)
//   ipc         legacy CUDA IPC handles
//   host        pinned host memory that all map, where GPUs do not reach each other
//
// Trying an access shows facts that a rank cannot know beforehand (about a GPU that its process
// does not see, or the limits of a container).  A failure is an obstacle, and the next access is
// tried.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ringreduce::cuda {

enum class MemoryAccess : uint8_t { kPointer, kDescriptor, kLegacyIpc, kHost };
inline constexpr int kMemoryAccesses = 4;
inline constexpr std::array<const char*, kMemoryAccesses> kMemoryAccessNames{
    "pointer", "descriptor", "ipc", "host"};

constexpr const char* name(MemoryAccess access) {
  return kMemoryAccessNames[static_cast<size_t>(access)];
}
constexpr std::optional<MemoryAccess> memoryAccessNamed(std::string_view name) {
  for (size_t i = 0; i < kMemoryAccesses; ++i)
    if (name == kMemoryAccessNames[i]) return static_cast<MemoryAccess>(i);
  return std::nullopt;
}

// A rank's process and GPU, by its own account.
struct Resident {
  uint64_t process[2] = {};  // random, the same for all ranks of one process
  char gpu[48] = {};         // UUID
  bool exports_memory = false;
  bool registers_host_memory = false;
  bool mps = false;

  bool sharesProcess(const Resident& other) const {
    return process[0] == other.process[0] && process[1] == other.process[1];
  }
  bool sharesGpu(const Resident& other) const {
    return std::string_view(gpu) == std::string_view(other.gpu);
  }
};

// Whether one GPU's kernels can touch another's memory: known only of GPUs that the process sees.
enum class Reach : uint8_t { kYes, kNo, kUnknown };

// By access: the reason against it; empty if none is known.
using Obstacles = std::array<std::string, kMemoryAccesses>;

// Known to rank `me`.  `reach[r]` is from its GPU to rank r's; messages call rank r `names[r]`.
inline Obstacles obstaclesOf(size_t me, const std::vector<Resident>& ranks,
                             const std::vector<Reach>& reach,
                             const std::vector<std::string>& names) {
  Obstacles found;
  const auto add = [&](MemoryAccess access, const std::string& why) {
    if (auto& text = found[static_cast<size_t>(access)]; text.empty()) text = why;
  };
  const Resident& own = ranks[me];
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (!own.sharesProcess(ranks[r]))
      add(MemoryAccess::kPointer, names[me] + " and " + names[r] + " are different processes");
    if (!own.sharesGpu(ranks[r]) && reach[r] == Reach::kNo)
      for (MemoryAccess access :
           {MemoryAccess::kPointer, MemoryAccess::kDescriptor, MemoryAccess::kLegacyIpc})
        add(access, "the GPU of " + names[me] + " has no peer access to that of " + names[r]);
  }
  if (!own.exports_memory)
    add(MemoryAccess::kDescriptor,
        "the GPU of " + names[me] + " cannot hand memory to other processes");
  if (!own.registers_host_memory)
    add(MemoryAccess::kHost, "the GPU of " + names[me] + " cannot register host memory");
  return found;
}

// Of all ranks, each by the first rank that knows one.
inline Obstacles merged(const std::vector<Obstacles>& by_rank) {
  Obstacles all;
  for (const Obstacles& one : by_rank)
    for (size_t access = 0; access < kMemoryAccesses; ++access)
      if (all[access].empty()) all[access] = one[access];
  return all;
}

// Nothing if no access is possible, or not the wanted one.
constexpr std::optional<MemoryAccess> chooseAccess(const Obstacles& obstacles,
                                                   std::optional<MemoryAccess> wanted) {
  for (size_t access = 0; access < kMemoryAccesses; ++access)
    if (obstacles[access].empty() && (!wanted || *wanted == static_cast<MemoryAccess>(access)))
      return static_cast<MemoryAccess>(access);
  return std::nullopt;
}

// "not by pointer: ranks 0 and 1 are ...; not by descriptor: ...": why none before `access` was
// taken, or, without one, why none can be.
inline std::string explain(const Obstacles& obstacles, std::optional<MemoryAccess> access) {
  std::string text;
  const size_t end = access ? static_cast<size_t>(*access) : kMemoryAccesses;
  for (size_t w = 0; w < end; ++w)
    if (!obstacles[w].empty())
      text += (text.empty() ? "not by " : "; not by ") + std::string(kMemoryAccessNames[w]) + ": " +
              obstacles[w];
  return text;
}

}  // namespace ringreduce::cuda
