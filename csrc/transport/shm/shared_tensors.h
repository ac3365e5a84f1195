// Where the tensors of an operation lie if all ranks have them in shared blocks (shared_block.h),
// so that a collective can read and write them in place.
//
// Each rank puts an offer beside the announcement of an operation: block, place, and how to open
// it. A rank whose data lie in a block looks at the offers of all others.  If one of them has none,
// the operation goes through the slots, as a rank without a block does without looking.  So all
// ranks decide alike.  The first time that the ranks offer these blocks together they map them, and
// agree whether all could.
//
// A rank opens another's block by /proc/<pid>/fd.  Where that is refused (another PID namespace)
// operations go through the slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "transport/shm/exchange.h"
#include "transport/shm/page.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_block.h"
#include "transport/shm/wait.h"

namespace ringreduce {

class SharedTensors {
 public:
  SharedTensors(int rank, std::vector<RankPage*> pages, Exchange& exchange, Waiter& waiter,
                WaitGuard& guard);

  // Before operation `sequence` is announced.  `data` of null: its data are not to be shared.
  // `is_output`: of an operation for which ranks can offer one or the other.
  void offer(uint64_t sequence, const void* data, size_t bytes, bool is_output);

  // Collective, in the operation that was offered.  Where the data of each rank are in this
  // process, by rank; null if not all ranks have them in blocks, or if some of them are outputs and
  // others are not.
  const std::vector<std::byte*>* gather();
  // Of what gather() returned.
  bool areOutputs() const { return offers_[0].is_output; }

  // The operation has failed: peers may still write to this rank's data.
  void detach();

  // The operation is over.
  void finish() { own_ = nullptr; }

 private:
  // Blocks that were offered together, and this process's mappings of them.
  struct Blocks {
    std::vector<std::shared_ptr<Segment>> segments;  // by rank
    bool usable = false;                             // all ranks have mapped all
    uint64_t used = 0;                               // the latest operation on them
  };
  // More than a model has gradients.  A mapping of a block that has ended costs addresses, but no
  // memory.
  static constexpr size_t kMostSets = 4096;

  const Blocks& blocksOf(const std::vector<TensorOffer>& offers);
  std::vector<std::shared_ptr<Segment>> map(const std::vector<TensorOffer>& offers) const;
  bool allHave(bool mine);

  const int rank_;
  const std::vector<RankPage*> pages_;
  Exchange& exchange_;
  Waiter& waiter_;
  WaitGuard& guard_;
  bool has_offered_ = false;  // ever
  uint64_t sequence_ = 0;
  std::shared_ptr<SharedBlock> own_;  // of the operation, or null
  const std::byte* own_data_ = nullptr;
  size_t own_bytes_ = 0;
  std::map<std::vector<uint64_t>, Blocks> known_;  // by their numbers; the same sets on all ranks
  std::vector<TensorOffer> offers_;
  std::vector<std::byte*> places_;
};

}  // namespace ringreduce
