// A user's buffer that all ranks of a group reach where it is, so that nothing need be copied.
//
// Only some memory can be handed to other processes, and what is asked is the memory itself: a
// plain allocation (cudaMalloc, torch's allocator as it comes) by legacy IPC; a mapping that was
// made to be exported, of one handle (torch's expandable segments: a tensor within one of them) by
// a descriptor. Where any rank's buffer cannot be, all ranks are told why, and data goes through
// memory of our own as it does without registration: that is no error.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cuda/memory/peer_memory.h"

namespace ringreduce::cuda {

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
