// Which memory of a rank its peers map, so that kernels can use tensors there in place.
//
// A rank's own memory (own_memory.h) is offered to the other ranks of its host when a call first
// meets a tensor in it, and so is memory that an allocator maps piece by piece
// (expandable_memory.h), of which peers map the pieces under the tensors of calls.  A thread, one
// for all boards of a process, maps what peers offer, writes it into a table in its GPU's memory
// that kernels read (kernels/place.h), and only then says so. When all peers have said so, the
// owner's own table says that its kernels may use the memory.  No rank waits, and ranks need not
// agree: as long as a peer has not mapped it, tensors in it are copied.  A peer that cannot map it
// refuses; then they go on to be copied.
//
//   owner  find: offers    all have mapped: writes own table     over: clears it, withdraws
//   peer          maps, writes table, says so                          clears, closes, says so
//
// A slot of the tables is used again when all peers have closed what was there.  By then memory is
// over (OwnSegment::isOver), so the owner's calls that used it have ended on its GPU, and with them
// all reads and writes of peers.  In a group that has failed that need not be so, and nothing is
// withdrawn.
//
// Ranks send each other messages with descriptors.  Each has a socket of which only the others have
// the other end (group/exchange_fds.h).  The thread sleeps until a message comes, or memory is
// offered or over.  Memory of a rank that dies stays mapped at its peers until their boards go.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "cuda/kernels/place.h"
#include "cuda/memory/peer_memory.h"
#include "group/group.h"

namespace ringreduce::cuda {

class SegmentBoard {
 public:
  // Collective.  `memory` is of the same ranks and GPUs: where it goes by descriptors or pointers
  // own memory can be mapped, and else no memory is ever found.  `finds_pieces`: this rank's memory
  // that is mapped piece by piece is found, too.  Throws the same Error on all ranks; the group
  // stays usable.
  SegmentBoard(Group& group, const PeerMemory& memory, bool finds_pieces = false);
  // No kernel of this rank may use the table, or memory of peers, any more.  Does not wait.
  ~SegmentBoard();
  SegmentBoard(const SegmentBoard&) = delete;
  SegmentBoard& operator=(const SegmentBoard&) = delete;

  // Where these bytes are, if own memory on this rank's GPU holds them all; it is offered to peers
  // if it was not.  None if it does not, or if kMostSegments segments are on the board.  Bytes in
  // memory that is mapped piece by piece are found once all peers map the pieces.  Neither calls
  // CUDA nor waits.
  // `is_kept`: whether a CUDA graph will have the place; asked only if there is such memory.  Own
  // memory that a graph has is found before peers map it, and is never given back.  Memory that is
  // mapped piece by piece is found before only with `keeps_pieces`.
  Place find(const void* data, size_t bytes, const std::function<bool()>& is_kept = nullptr,
             bool keeps_pieces = true);
  // Whether own memory is ever found: the same on all ranks.
  bool reaches() const;
  // Whether all peers map it, and the own table says so.
  bool isMapped(Place place) const;

  // In memory of this rank's GPU: kMostSegments for each rank.
  const SegmentEntry* table() const;
  size_t bytes() const;  // of it

  class State;

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace ringreduce::cuda
