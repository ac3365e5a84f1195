// Which algorithm an all-reduce takes, and the cost model behind the choice.
//
// Inside a host every byte goes through the caches, so cost is counted in passes over the message:
// bytes that one rank reads and writes, for a message of S bytes and P ranks.
//
//   direct   copy in (S read, S written), add all P inputs (P S read, S written); one wait a slice
//   twoshot  copy in the others' parts, add one's own part of all inputs, share it, copy the
//   others'
//            parts out: about (3 - 2/P) S read and (3 - 2/P) S written; two waits a slice
//   ring     every byte moves through 2 (P-1) slots of 1/P of the message; 2 (P-1) waits a slice
//
// A wait costs a cache line's way between cores, or a context switch where ranks outnumber cores.
// So direct wins where waits dominate (small messages) and always for two ranks, whose extra pass
// is half a message; twoshot wins for larger messages of three and more ranks.  ring is there for
// the wires between hosts and for comparison; benchmarks/core_perf.cc measures all three.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ringreduce {

enum class Algorithm : uint8_t { kAuto, kDirect, kTwoShot, kRing };
inline constexpr auto kNoAlgorithm = static_cast<Algorithm>(0xff);  // a name that none has
inline constexpr const char* kAlgorithmNames[] = {"auto", "direct", "twoshot", "ring"};

constexpr std::optional<Algorithm> algorithmNamed(std::string_view name) {
  for (uint8_t i = 0; i < 4; ++i)
    if (name == kAlgorithmNames[i]) return static_cast<Algorithm>(i);
  return std::nullopt;
}

// From this size on three and more ranks share the addition out.
inline constexpr size_t kTwoShotBytes = 32 << 10;

// Never kAuto.  `wanted` is what the user asked for.
constexpr Algorithm chooseAllReduce(size_t bytes, int world_size, Algorithm wanted) {
  if (wanted != Algorithm::kAuto) return wanted;
  if (world_size > 2 && bytes >= kTwoShotBytes) return Algorithm::kTwoShot;
  return Algorithm::kDirect;
}

}  // namespace ringreduce
