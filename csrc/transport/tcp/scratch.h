// Memory that a collective lends to the mesh and that is nobody's: what it holds must stay until
// the operation is finished, which is after the collective has returned.
//
// Blocks are kept for the next operation, so that small calls allocate nothing; large ones are
// not.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/bytes.h"

namespace ringreduce::net {

class Scratch {
 public:
  // Aligned for any element; not initialised.
  std::byte* take(size_t bytes) {
    while (current_ < blocks_.size()) {
      Block& block = blocks_[current_];
      if (bytes <= block.bytes - block.taken) {
        std::byte* memory = block.memory.get() + block.taken;
        block.taken += roundUp(bytes, kAlignment);
        return memory;
      }
      ++current_;
    }
    const size_t size = roundUp(bytes < kLeast ? kLeast : bytes, kAlignment);
    blocks_.push_back({std::make_unique_for_overwrite<std::byte[]>(size), size, 0});
    return take(bytes);
  }

  // All that was taken may be taken anew.
  void reset() {
    std::erase_if(blocks_, [](const Block& block) { return block.bytes > kMostKept; });
    for (Block& block : blocks_) block.taken = 0;
    current_ = 0;
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kLeast = 64 << 10, kMostKept = 4 << 20;

  struct Block {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes, taken;
  };
  std::vector<Block> blocks_;
  size_t current_ = 0;  // the first that may have room
};

}  // namespace ringreduce::net
