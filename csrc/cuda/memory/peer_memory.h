// GPU memory that all ranks of a group reach: a piece on each rank's GPU, mapped by every rank.
//
// Kernels see pointers only.  The access is chosen once for the group (memory_access.h), by trying:
// every rank reads in each mapped piece a pattern of its owner, and writes one for the owner to
// read, since on some machines mapping succeeds and the data goes nowhere.
//
// Giving it back needs no barrier, so it also works after a failure:
//
//   pointer     ranks share ownership; the last one frees the memory
//   descriptor  each process unmaps; the memory goes with the last mapping
//   ipc         the owner must free last, else the mappings of the others are undefined.  Each rank
//               writes to host memory when it has closed all of the others', and the owner waits
//               for that, for a limited time; a process that has ended has closed.  After that the
//               memory stays allocated until the owner's process ends, and the log says so.
//   host        as descriptor
//
// In every case a rank first waits until no kernel of its own uses the memory.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cuda/memory/access_probe.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/memory_access.h"
#include "group/group.h"

namespace ringreduce::cuda {

class PeerMemory {
 public:
  // Collective: all ranks call it with the same size and the same wish, each with a GPU of its
  // process.  Without a wish the best access is taken.  The memory is zeroed on all ranks when it
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
  // Bytes a second at which this rank's GPU copies rank r's piece to its own memory, up to 16 MiB
  // of it.  Throws CudaError.
  double readRate(int rank) const;
  // Why no better access was taken: "not by pointer: ranks ..."; empty if it is the best.
  const std::string& why() const { return state_->why; }
  // Which ranks share a process or a GPU.
  const std::vector<Resident>& residents() const { return state_->residents; }

  // Gives everything back, after which at() must not be called.  Waits for other ranks at most
  // `patience`, and only with the access ipc.
  void release(Nanos patience = PeerPieces::kPatience) noexcept { state_->release(patience); }

 private:
  std::unique_ptr<PeerPieces> state_;
};

}  // namespace ringreduce::cuda
