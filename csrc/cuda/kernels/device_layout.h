// The layout of a rank's device memory: computed from a few numbers that all ranks share, so that a
// rank's base pointer is all that its peers need to be told.
//
//     flags    for each channel: two of the ring's pipe, and for each peer two of the push exchange
//     ring     for each channel: `depth` slots, filled by the previous rank
//     parts    for each channel, set and peer: a slot that this peer pushes addends into
//     results  the same for finished values (two-shot, all-gather, broadcast)
//     ll       for each channel, set and peer: a slot of words that carry their flags (ll.h)
//     window   for each chunk of a message and channel: a piece of the owner's tensor, where peers
//              cannot reach the tensor itself (located.h)
//
// All but the window is written by peers and read by the owner, and every line of flags has one
// writer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "transport/shm/flags.h"

namespace ringreduce::cuda {

// More ranks than one host has GPUs; bounds the tables in device memory.
inline constexpr int kMostRanks = 32;
// For a rank's number, where all give something and not one root alone.
inline constexpr int kEverybody = -1;
inline constexpr int kMostChannels = 128;
// Sets of push slots: enough for two-shot's pipeline (push_all_reduce.h), and a divisor of 2^64
// (pipe.h).
inline constexpr uint64_t kPushSets = 4;
inline constexpr uint64_t kLLSets = 2;  // ll.h

struct DeviceLayout {
  int ranks = 0, channels = 0;
  size_t slot_bytes = 0;  // of a ring slot; a multiple of 128
  uint64_t depth = 0;     // ring slots a channel; a power of two
  size_t part_bytes = 0;  // of a push slot; a multiple of 128
  size_t ll_bytes = 0;    // of an LL slot, with its flags; a multiple of 128
  size_t window_bytes = 0;

  enum class Of : uint8_t { kParts, kResults };

  constexpr size_t flagsOfChannel() const { return 2 + 2 * size(ranks); }
  // The ring's flags: messages that the previous rank posted here, and that the next released.
  constexpr size_t filledFlag(int channel) const { return flag(channel, 0); }
  constexpr size_t emptiedFlag(int channel) const { return flag(channel, 1); }
  // Steps that `peer` has pushed here.
  constexpr size_t pushedFlag(int channel, Of what, int peer) const {
    return flag(channel, 2 + size(what == Of::kResults) * size(ranks) + size(peer));
  }

  constexpr size_t ringBegin() const { return size(channels) * flagsOfChannel() * sizeof(Flag); }
  constexpr size_t ringSlot(int channel, uint64_t slot) const {
    return ringBegin() + (size(channel) * depth + slot) * slot_bytes;
  }

  constexpr size_t pushBegin() const { return ringSlot(channels, 0); }
  constexpr size_t pushSlot(int channel, Of what, uint64_t set, int peer) const {
    const size_t of_channel = 2 * size(channel) + size(what == Of::kResults);
    return pushBegin() + ((of_channel * kPushSets + set) * size(ranks) + size(peer)) * part_bytes;
  }

  constexpr size_t llSlot(int channel, uint64_t set, int peer) const {
    return pushSlot(channels, Of::kParts, 0, 0) +
           ((size(channel) * kLLSets + set) * size(ranks) + size(peer)) * ll_bytes;
  }

  constexpr size_t window() const { return llSlot(channels, 0, 0); }

  constexpr size_t bytes() const { return window() + window_bytes; }

 private:
  static constexpr size_t size(int n) { return static_cast<size_t>(n); }
  constexpr size_t flag(int channel, size_t i) const {
    return (size(channel) * flagsOfChannel() + i) * sizeof(Flag);
  }
};

}  // namespace ringreduce::cuda
