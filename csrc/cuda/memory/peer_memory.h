// GPU memory that all ranks of a group reach: a piece on each rank's GPU, mapped by every rank.
//
// Kernels see pointers only.  How a pointer comes to be is chosen once for the group
// (memory_access.h), by trying: when the pieces are mapped every rank reads a pattern in each that
// its owner wrote, and writes one of its own for the owner to read, since there are machines where
// mapping succeeds and the data goes nowhere.
//
// Giving it back needs no barrier, so that it also works after a failure:
//
//   pointer     ranks share ownership; the memory goes with the last of them
//   descriptor  each process unmaps; the memory goes with the last that maps it
//   ipc         the owner must free last, else what the others map is undefined.  So each rank says
//               in host memory when it has closed all of the others', and the owner waits for that,
//               for a time; a process that has ended has closed.  If one has not by then, the
//               memory stays allocated until the owner's process ends, and the log says so.
//   host        as descriptor
//
// In every case a rank first sees to it that no kernel of its own uses the memory any more.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/memory_access.h"
#include "group/group.h"
#include "group/host_pages.h"

namespace ringreduce::cuda {

class PeerMemory {
 public:
  // Collective: all ranks call it with the same size and the same wish, each with a GPU of its own
  // process.  Without a wish the best way is taken.  The memory is zeroed, on all ranks, when it
  // returns.  Throws the same Error on all ranks, with nothing left behind; the group stays usable,
  // unless it has failed.
  PeerMemory(Group& group, int device, size_t bytes,
             std::optional<MemoryAccess> wish = std::nullopt);
  ~PeerMemory();  // release()
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Rank r's piece, for kernels on this rank's GPU.
  std::byte* at(int rank) const { return state_->memory[static_cast<size_t>(rank)]->data(); }
  size_t bytes() const { return state_->bytes; }  // of each piece, as allocated
  int device() const { return state_->device; }
  MemoryAccess access() const { return state_->access; }
  // Why no better way was taken: "not by pointer: ranks ..."; empty if it is the best.
  const std::string& why() const { return state_->why; }
  // Which ranks share a process or a GPU.
  const std::vector<Resident>& residents() const { return state_->residents; }

  static constexpr Nanos kPatience = 2 * kSecond;
  // Gives everything back, after which at() must not be called.  Waits for other ranks at most
  // `patience`, and only by the way ipc.
  void release(Nanos patience = kPatience) noexcept { state_->release(patience); }

  // A rank's state while an access is tried, and after.
  struct State {
    State(Group& group, int device, std::vector<Resident> residents);
    ~State() { release(kPatience); }
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

 private:
  std::unique_ptr<State> state_;
};

// ----
//
// A user's buffer that all ranks of a group reach where it is, so that nothing need be copied.
//
// Only some memory can be handed to other processes, and what is asked is the memory itself: a
// plain allocation (cudaMalloc, torch's allocator as it comes) by legacy IPC; a mapping that was
// made to be exported, of one handle (torch's expandable segments: a tensor within one of them) by
// a descriptor. Where any rank's buffer cannot be, all ranks are told why, and data goes through
// memory of our own as it does without registration: that is no error.

// The buffer stays the user's.  No rank may free it before every rank has let go of this object: of
// plain memory that another process still maps nothing is defined (put a barrier between).
class PeerBuffer {
 public:
  struct Piece {
    MemoryPtr memory;  // that contains the rank's buffer; none where the pointer itself serves
    std::byte* data;
  };
  PeerBuffer(std::vector<Piece> pieces, size_t bytes) : pieces_(std::move(pieces)), bytes_(bytes) {}

  // Rank r's buffer, for kernels on this rank's GPU.
  std::byte* at(int rank) const { return pieces_[static_cast<size_t>(rank)].data; }
  size_t bytes() const { return bytes_; }

 private:
  std::vector<Piece> pieces_;  // by rank
  size_t bytes_;
};

struct Registration {
  std::unique_ptr<PeerBuffer> buffer;  // or none, and
  std::string refusal;                 // why: "rank 1 ...", the same on all ranks
};

// Collective.  `memory` is what the ranks have in common already: the same ranks and GPUs, which
// are then known to reach each other.  Throws the same Error on all ranks only where CUDA or the
// group has failed.
Registration registerBuffer(Group& group, const PeerMemory& memory, void* data, size_t bytes);

}  // namespace ringreduce::cuda
