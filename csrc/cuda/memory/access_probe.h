// The parts of peer_memory.h and peer_memory.h: trying one kind of access on all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/cuda_errors.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/peer_memory.h"
#include "group/gather.h"

namespace ringreduce::cuda {

// ----
//
// How a step went at one rank, where another way may be tried on all ranks if it went wrong.

struct Outcome {
  enum class Kind : uint8_t {
    kDone,
    kCannot,  // another way may
    kBroken,  // none will: no memory left, or CUDA is ruined in the rank's process
  } kind = Kind::kDone;
  char text[800] = {};

  Outcome() = default;
  Outcome(Kind k, const std::string& t) : kind(k) { setText(text, t); }
};

template <class F>
Outcome outcomeOf(F&& step) {
  using Kind = Outcome::Kind;
  try {
    step();
  } catch (const CudaError& error) {
    const bool hopeless = error.ruinsProcess() || error.is(cudaErrorMemoryAllocation);
    return {hopeless ? Kind::kBroken : Kind::kCannot, error.what()};
  } catch (const Error& error) {
    return {Kind::kCannot, error.what()};
  } catch (const std::exception& error) {
    return {Kind::kBroken, error.what()};
  }
  return {};
}

// All ranks call it with the same gathered reports, each with an Outcome `outcome`.  Throws if the
// step broke at a rank, else returns "rank 2 cannot ..." of the first that cannot, "" if all can.
template <class Report>
std::string obstacleIn(const Group& group, const std::vector<Report>& reports) {
  for (int r = 0; r < group.size(); ++r)
    if (const Outcome& o = reports[static_cast<size_t>(r)].outcome;
        o.kind == Outcome::Kind::kBroken)
      throw Error(Failure::kSetup, group.who(r) + " " + o.text);
  for (int r = 0; r < group.size(); ++r)
    if (const Outcome& o = reports[static_cast<size_t>(r)].outcome;
        o.kind == Outcome::Kind::kCannot)
      return "rank " + group.options().shown(r) + " " + o.text;
  return "";
}

// ----
//
// Memory shared by ranks that are threads of one process, by its pointer.

// Random; no other process has it, nor a forked child.
std::array<uint64_t, 2> processToken();

// Memory that another rank of this process may take part in: that rank is told the ticket, and owns
// the memory with this one once it has taken it.  A ticket is good while its memory lives.
uint64_t offer(const MemoryPtr& memory);
MemoryPtr take(uint64_t ticket);  // throws Error(kSetup) if there is none such

// ----
//
// Trying one way to each other's memory, on all ranks at the same time.

// Collective.  Fills in `state`, whose way is set, with memory of at least `bytes`; of a multiple
// of `granularity` where it is exported.  Returns "" if every rank reaches every piece, else, on
// all ranks, what stands against it.  Throws the same Error on all ranks where no other way would
// do better: a GPU without memory left, a process whose CUDA is ruined.
std::string tryAccess(Group& group, PeerMemory::State& state, size_t bytes, size_t granularity,
                      const std::vector<std::string>& names);

}  // namespace ringreduce::cuda
