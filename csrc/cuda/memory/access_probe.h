// The memory of all ranks by one kind of access, tried on all ranks, for peer_memory.h.
//
// It is tried in the ranks' own processes.  Broken peer access drops writes or hangs, as a rule,
// and both are seen here and leave CUDA usable.  Only an access that faults ruins the process, and
// a child process to try it in would cost more: it must be a new program, since CUDA does not
// survive a fork; each takes a second context on its GPU (hundreds of MiB, seconds), which a GPU in
// exclusive mode refuses; and under MPS its fault ends the other clients too.  So the error says
// how to go on without peer access.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/fd.h"
#include "cuda/cuda_errors.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/memory_access.h"
#include "group/agreement.h"
#include "group/exchange_fds.h"
#include "group/group.h"

namespace ringreduce::cuda {

// The outcome of a step at one rank.  If a rank cannot do it, all ranks try another access.
struct Outcome {
  enum class Kind : uint8_t {
    kDone,
    kCannot,  // another access may work
    // no access will work in this process: no memory left, CUDA is ruined or does not answer
    kBroken,
  } kind = Kind::kDone;
  char text[800] = {};

  Outcome() = default;
  Outcome(Kind k, const std::string& t) : kind(k) { setText(text, t); }
};

// `allocates`: it takes memory of this rank's GPU.  Other steps lack memory when no room is left to
// map that of peers (the BAR1 window of a GPU on PCIe), which the next access may not need.
template <class F>
Outcome outcomeOf(F&& step, bool allocates = false) {
  using Kind = Outcome::Kind;
  try {
    step();
  } catch (const CudaError& error) {
    const bool hopeless =
        error.ruinsProcess() || (allocates && error.is(cudaErrorMemoryAllocation));
    return {hopeless ? Kind::kBroken : Kind::kCannot, error.what()};
  } catch (const CopyHangs& error) {
    return {Kind::kBroken, error.what()};
  } catch (const Error& error) {
    return {Kind::kCannot, error.what()};
  } catch (const std::exception& error) {
    return {Kind::kBroken, error.what()};
  }
  return {};
}

// All ranks call it with the same gathered reports, each with an Outcome `outcome`.  Throws if the
// step broke at a rank, with the advice; else returns "rank 2 cannot ..." of the first that cannot,
// or "".
template <class Report>
std::string obstacleIn(const Group& group, const std::vector<Report>& reports,
                       const std::string& advice = "") {
  for (int r = 0; r < group.size(); ++r)
    if (const Outcome& o = reports[static_cast<size_t>(r)].outcome;
        o.kind == Outcome::Kind::kBroken)
      throw Error(Failure::kSetup, group.epoch()->peers().who(r) + " " + o.text + advice);
  for (int r = 0; r < group.size(); ++r)
    if (const Outcome& o = reports[static_cast<size_t>(r)].outcome;
        o.kind == Outcome::Kind::kCannot)
      return "rank " + group.options().shown(r) + " " + o.text;
  return "";
}

// The pieces of memory that a rank reaches, while an access is tried and after.
struct PeerPieces {
  static constexpr Nanos kPatience = 2 * kSecond;

  PeerPieces(Group& group, int device, std::vector<Resident> residents);
  ~PeerPieces() { release(kPatience); }
  PeerPieces(const PeerPieces&) = delete;
  PeerPieces& operator=(const PeerPieces&) = delete;
  // Gives everything back.  With the access ipc it waits `patience` for other ranks at most.
  void release(Nanos patience) noexcept;

  const std::weak_ptr<Group> group;
  const int rank, device;
  const int generation = forkGeneration();
  const std::vector<Resident> residents;
  MemoryAccess access = MemoryAccess::kPointer;
  std::string why;
  size_t bytes = 0;
  std::vector<MemoryPtr> memory;  // by rank
  // ipc: in each rank's page, whether it has closed all of the others' memory.
  std::unique_ptr<HostPages> closed;

 private:
  bool hasClosed(int r) const;
  bool awaitClosed(Nanos patience) const;
};

// Random; differs between processes, also after a fork.
std::array<uint64_t, 2> processToken();

// Shares memory with another rank of this process, which takes it by the ticket.  A ticket is valid
// while its memory lives.
uint64_t offer(const MemoryPtr& memory);
MemoryPtr take(uint64_t ticket);  // throws Error(kSetup) if it is not valid

// Collective.  Fills in `state`, whose access is set, with memory of at least `bytes`, a multiple
// of `granularity` if it is exported.  Returns "" if every rank reaches every piece, else the
// obstacle, on all ranks.  A copy may take `patience`.  Throws the same Error on all ranks if no
// other access would do better: a GPU without memory left, a process whose CUDA is ruined.
std::string tryAccess(Group& group, PeerPieces& state, size_t bytes, size_t granularity,
                      const std::vector<std::string>& names, Nanos patience = Stream::kPatience);

}  // namespace ringreduce::cuda
