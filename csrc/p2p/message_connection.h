// The two ends of a one-way connection between the rings of a channel: bytes go straight between
// ring and socket, around the ring's end.
//
// On the way they stand in frames: a head that says how many bytes follow and how many eager bytes
// of the other rank's have arrived, and then bytes of the ring, cut anywhere.  The receiver looks
// at the heads of records as they pass: the channel's reader is shown whole records only, and none
// that could not be one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "p2p/pump.h"
#include "transport/shm/channel.h"
#include "transport/shm/flags.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

struct PumpHead {
  static constexpr uint32_t kMagic = 0x33505252;  // "RRP3"
  uint32_t magic = kMagic;
  uint32_t bytes = 0;     // that follow
  uint64_t consumed = 0;  // eager bytes of the receiver's that have arrived
  uint64_t header = 0;    // CRC32C of the fields above; the upper half is 0
};
static_assert(sizeof(PumpHead) == 24);
PumpHead sealed(PumpHead head);  // with its header's checksum

enum class Lane : uint8_t {
  kIdle,     // nothing more to do for now
  kBlocked,  // the socket takes no more, or the ring has no room
  kMore,     // there is more, but others are to have their turn
  kEnded,    // the connection's end has come: error() says how
};

class PumpSender {
 public:
  explicit PumpSender(const Pump::Ends& ends) : ends_(ends) {}

  // Whether there is anything to carry.  From any thread.
  bool hasNews() const;
  // Whether there are records to carry, or a part of a frame.
  bool hasRecords() const;
  // Sends what there is; `moved` is set if ring bytes were.
  Lane carry(Socket& socket, bool& moved);
  // Takes the records that are there, and all later ones, for sent: nobody will receive them.
  void discard();
  // Takes it for told which eager bytes have arrived.
  void keepQuiet() { told_ = ends_.consumed->observe(); }
  int error() const { return error_; }

 private:
  void cut();

  const Pump::Ends ends_;
  PumpHead head_;
  size_t head_left_ = 0, bytes_left_ = 0;  // of the frame that is on its way
  uint64_t sent_ = 0;
  std::atomic<uint64_t> framed_ = 0, told_ = 0;
  int error_ = 0;
};

class PumpReceiver {
 public:
  explicit PumpReceiver(const Pump::Ends& ends) : ends_(ends) {}

  // Whether the ring has room again after it had none.  From any thread.
  bool canGoOn() const;
  // Receives what there is; `moved` is set if records came or were acknowledged.
  Lane carry(Socket& socket, bool& moved);
  // In words, after kEnded.
  const std::string& end() const { return end_; }
  bool isDamaged() const { return damaged_; }  // it was ended here, for what came

 private:
  bool takeHead(bool& moved);
  bool showRecords(bool& moved);
  Lane endsWith(std::string how, bool damaged);

  const Pump::Ends ends_;
  PumpHead head_;
  size_t head_got_ = 0, bytes_left_ = 0;
  uint64_t got_ = 0, shown_ = 0, acknowledged_ = 0;
  static constexpr uint64_t kNotFull = ~uint64_t{0};  // which no counter is: records are aligned
  std::atomic<uint64_t> full_at_ = kNotFull;          // what the reader had read when it was full
  std::string end_;
  bool damaged_ = false;
};

// Whether a record with this head can stand there: `left` bytes before the ring's end.
bool isSound(const Record& record, size_t left);

}  // namespace ringreduce::net
