// The two ends of a one-way connection for messages: bytes go straight between ring and socket,
// around the ring's end.
//
// On the connection they travel in frames: a header that says how many bytes follow and how many
// eager bytes of the other rank have arrived, then bytes of the ring, cut anywhere.  The receiver
// checks the parts' heads: the channel's reader sees complete and valid parts only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/shm/channel.h"
#include "transport/shm/flags.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

// The ends of the channels to and from one rank, for p2p/engine.h.
struct ChannelEnds {
  std::byte* out_ring;  // parts to that rank
  Flag* out_filled;     // bytes that the engine has written
  Flag* out_emptied;    // bytes that the forwarder has sent
  std::byte* in_ring;   // parts from that rank
  Flag* in_filled;      // bytes that the forwarder has received
  Flag* in_emptied;     // bytes that the engine has read
  Flag* consumed;       // eager bytes from that rank that the engine has taken
  Flag* acknowledged;   // that rank's `consumed`, as last received
};

struct MessageFrame {
  static constexpr uint32_t kMagic = 0x33505252;  // "RRP3"
  uint32_t magic = kMagic;
  uint32_t bytes = 0;     // that follow
  uint64_t consumed = 0;  // eager bytes of the receiver that have arrived
  uint64_t header = 0;    // CRC-32C of the fields above; the upper half is 0
};
static_assert(sizeof(MessageFrame) == 24);
MessageFrame sealed(MessageFrame head);  // with its header's checksum

// Why carry() returned.
enum class Carried : uint8_t {
  kIdle,     // nothing is left for now
  kBlocked,  // the socket or the ring is full
  kMore,     // there is more, but other connections are to be served first
  kEnded,    // the connection has ended; error() or end() says why
};

class MessageSender {
 public:
  explicit MessageSender(const ChannelEnds& ends) : ends_(ends) {}

  // Whether there is something to send.  From any thread.
  bool hasNews() const;
  // Whether there are parts to send, or the rest of a frame.
  bool hasRecords() const;
  // Sends available bytes; sets `moved` if bytes of the ring were sent.
  Carried carry(Socket& socket, bool& moved);
  // Drops the parts that are there; call it again for later ones.
  void discard();
  // Marks the count of eager bytes as sent.
  void markTold() { told_ = ends_.consumed->observe(); }
  int error() const { return error_; }

 private:
  void cutFrame();

  const ChannelEnds ends_;
  MessageFrame head_;
  size_t head_left_ = 0, bytes_left_ = 0;  // of the frame that is being sent
  uint64_t sent_ = 0;
  std::atomic<uint64_t> framed_ = 0, told_ = 0;
  int error_ = 0;
};

class MessageReceiver {
 public:
  explicit MessageReceiver(const ChannelEnds& ends) : ends_(ends) {}

  // Whether the ring has room again after it had none.  From any thread.
  bool canGoOn() const;
  // Receives available bytes; sets `moved` if parts arrived or were acknowledged.
  Carried carry(Socket& socket, bool& moved);
  // The reason in words, after kEnded.
  const std::string& end() const { return end_; }
  bool isDamaged() const { return damaged_; }  // it ended because of invalid bytes

 private:
  bool takeHeader(bool& moved);
  bool publishRecords(bool& moved);
  Carried endsWith(std::string how, bool damaged);

  const ChannelEnds ends_;
  MessageFrame head_;
  size_t head_got_ = 0, bytes_left_ = 0;
  uint64_t got_ = 0, published_ = 0, acknowledged_ = 0;
  static constexpr uint64_t kNotFull =
      ~uint64_t{0};                           // no counter has this value: parts are aligned
  std::atomic<uint64_t> full_at_ = kNotFull;  // the reader's count when the ring was full
  std::string end_;
  bool damaged_ = false;
};

// Whether this is a valid head of a part that begins `left` bytes before the ring's end.
bool isSound(const MessagePart& part, size_t left);

}  // namespace ringreduce::net
