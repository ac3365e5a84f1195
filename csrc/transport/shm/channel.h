// A channel: a one-way pipe of parts of any size from one rank to another, over shared memory.
//
// It is a ring of bytes in the receiver's segment.  The sender writes parts in sequence, none
// across the end of the ring, and publishes how many bytes it has written; the receiver publishes
// how many it has read.  Both counters only grow, have one writer each, and lie in the memory of
// the rank that polls them.  Nothing here waits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/op_signature.h"
#include "transport/shm/flags.h"

namespace ringreduce {

// A rank's counters for one peer; the peer writes all three.
struct Box {
  Flag filled;    // bytes written into this rank's ring for that peer
  Flag emptied;   // bytes read of that peer's ring for this rank
  Flag consumed;  // bytes of this rank's eager payloads that have reached their receivers
};

// The head of a part; its payload follows.
struct MessagePart {
  enum class Type : uint8_t { kSkip, kEager, kRequest, kGrant, kFragment };

  uint64_t id = 0;     // of the message; the sender counts
  uint64_t count = 0;  // kEager, kRequest: the message's elements
  // kEager, kRequest, kGrant: when the sender of this part called, by the group's clock, and why
  // not sooner; 0: not known.
  Nanos posted = 0;
  Inherited why = {};
  uint32_t payload = 0;  // bytes
  int32_t tag = 0;
  Type type = Type::kSkip;
  DType dtype = DType::kUInt8;
};
static_assert(sizeof(MessagePart) == 48);

inline constexpr size_t kRingBytes = 256 << 10;  // the kernel commits pages at the first write
inline constexpr size_t kPartAlign = 64;

constexpr size_t partBytes(size_t payload) {
  return roundUp(sizeof(MessagePart) + payload, kPartAlign);
}

template <class Rules = HostRules>
class BasicChannelWriter {
 public:
  // `filled` lies with the receiver, `emptied` with this rank.
  BasicChannelWriter(std::byte* ring, Flag& filled, Flag& emptied)
      : ring_(ring), filled_(filled), emptied_(emptied) {}

  // The place for the payload of the next part; null if there is no room now.
  std::byte* reserve(size_t payload) {
    const size_t wanted = partBytes(payload), left = kRingBytes - written_ % kRingBytes;
    const bool wraps = wanted > left;
    if (!hasRoom(wraps ? left + wanted : wanted)) return nullptr;
    if (wraps) {
      *head() = {.payload = static_cast<uint32_t>(left - sizeof(MessagePart))};
      written_ += left;
    }
    return reinterpret_cast<std::byte*>(head() + 1);
  }

  // Sends the part whose payload was just reserved and filled.
  void commit(const MessagePart& part) {
    *head() = part;
    written_ += partBytes(part.payload);
    filled_.publish<Rules>(written_);
  }

 private:
  MessagePart* head() const {
    return reinterpret_cast<MessagePart*>(ring_ + written_ % kRingBytes);
  }

  bool hasRoom(size_t bytes) {
    const uint64_t size = kRingBytes + Rules::kEarlyReuse * kRingBytes / 2;
    if (written_ + bytes <= read_ + size) return true;
    read_ = emptied_.observe<Rules>();
    return written_ + bytes <= read_ + size;
  }

  std::byte* const ring_;
  Flag& filled_;
  Flag& emptied_;
  uint64_t written_ = 0, read_ = 0;
};

template <class Rules = HostRules>
class BasicChannelReader {
 public:
  // `filled` lies with this rank, `emptied` with the sender.
  BasicChannelReader(const std::byte* ring, Flag& filled, Flag& emptied)
      : ring_(ring), filled_(filled), emptied_(emptied) {}

  // The oldest part, or null.  Its payload follows it.
  const MessagePart* front() {
    for (;;) {
      if (read_ == written_ && read_ == (written_ = filled_.observe<Rules>())) return nullptr;
      const auto* part = reinterpret_cast<const MessagePart*>(ring_ + read_ % kRingBytes);
      if (part->type != MessagePart::Type::kSkip) return part;
      read_ += partBytes(part->payload);
    }
  }

  // Removes the oldest part, which has this payload.
  void pop(size_t payload) {
    read_ += partBytes(payload);
    emptied_.publish<Rules>(read_);
  }

 private:
  const std::byte* const ring_;
  Flag& filled_;
  Flag& emptied_;
  uint64_t written_ = 0, read_ = 0;
};

using ChannelWriter = BasicChannelWriter<>;
using ChannelReader = BasicChannelReader<>;

static_assert(kRingBytes % kPartAlign == 0 && sizeof(MessagePart) <= kPartAlign);

}  // namespace ringreduce
