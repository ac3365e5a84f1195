// By which way the ranks of a group reach each other's GPU memory: the choice, as pure functions.
//
// All ranks use the same way, the first in this order to which no rank knows an obstacle:
//
//   pointer     all ranks are threads of one process: the pointer itself
//   descriptor  memory that the driver hands to other processes as a file descriptor (VMM)
//   ipc         legacy CUDA IPC handles
//   host        pinned host memory that all map, where GPUs do not reach each other
//
// What a rank cannot know beforehand (a GPU that its process does not see, what a container allows)
// shows when the way is tried; that is then an obstacle like any other, and the next is tried.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ringreduce::cuda {

enum class Way : uint8_t { kPointer, kDescriptor, kLegacyIpc, kHost };
inline constexpr int kWays = 4;
inline constexpr std::array<const char*, kWays> kWayNames{"pointer", "descriptor", "ipc", "host"};

constexpr const char* name(Way way) {
  return kWayNames[static_cast<size_t>(way)];
}
constexpr std::optional<Way> wayNamed(std::string_view name) {
  for (size_t i = 0; i < kWays; ++i)
    if (name == kWayNames[i]) return static_cast<Way>(i);
  return std::nullopt;
}

// Where a rank is and what its GPU can do, by its own account.
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

// By way: why it cannot be, in words; empty if nothing is known against it.
using Obstacles = std::array<std::string, kWays>;

// What rank `me` knows.  `reach[r]` is from its GPU to rank r's; `names[r]` how messages call rank
// r.
inline Obstacles obstaclesOf(size_t me, const std::vector<Resident>& ranks,
                             const std::vector<Reach>& reach,
                             const std::vector<std::string>& names) {
  Obstacles found;
  const auto add = [&](Way way, const std::string& why) {
    if (auto& text = found[static_cast<size_t>(way)]; text.empty()) text = why;
  };
  const Resident& own = ranks[me];
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (!own.sharesProcess(ranks[r]))
      add(Way::kPointer, names[me] + " and " + names[r] + " are different processes");
    if (!own.sharesGpu(ranks[r]) && reach[r] == Reach::kNo)
      for (Way way : {Way::kPointer, Way::kDescriptor, Way::kLegacyIpc})
        add(way, "the GPU of " + names[me] + " has no peer access to that of " + names[r]);
  }
  if (!own.exports_memory)
    add(Way::kDescriptor, "the GPU of " + names[me] + " cannot hand memory to other processes");
  if (!own.registers_host_memory)
    add(Way::kHost, "the GPU of " + names[me] + " cannot register host memory");
  return found;
}

// What all ranks know together, by the first rank that knows it.
inline Obstacles merged(const std::vector<Obstacles>& by_rank) {
  Obstacles all;
  for (const Obstacles& one : by_rank)
    for (size_t way = 0; way < kWays; ++way)
      if (all[way].empty()) all[way] = one[way];
  return all;
}

// None if there is no way, or not the one that is wanted.
constexpr std::optional<Way> chooseWay(const Obstacles& obstacles, std::optional<Way> wanted) {
  for (size_t way = 0; way < kWays; ++way)
    if (obstacles[way].empty() && (!wanted || *wanted == static_cast<Way>(way)))
      return static_cast<Way>(way);
  return std::nullopt;
}

// "not by pointer: ranks 0 and 1 are ...; not by descriptor: ...": why none of those before `way`
// was taken, or, without one, why none is.
inline std::string explain(const Obstacles& obstacles, std::optional<Way> way) {
  std::string text;
  const size_t end = way ? static_cast<size_t>(*way) : kWays;
  for (size_t w = 0; w < end; ++w)
    if (!obstacles[w].empty())
      text += (text.empty() ? "not by " : "; not by ") + std::string(kWayNames[w]) + ": " +
              obstacles[w];
  return text;
}

}  // namespace ringreduce::cuda
