// The interface between collectives and a network: one ordered stream of bytes to and one from each
// rank.  A network implements this class; collectives know nothing else of it.  Ranks that share
// memory use transport/shm/exchange.h instead.
//
// An operation runs between begin() and finish().
//
// Matching.  Sends and expectations match by order only: what one rank sends, the other must expect
// in the same order.  The pieces may differ: one send may fill two expectations.  The first bytes
// that two ranks exchange in an operation, in each direction, are its opening; the transport adds
// it.  peek() compares it with its own before it returns.  Lengths may be 0: it is sent and
// awaited all the same.
//
// Memory.  Memory given to send() belongs to the transport until finish() returns, memory given to
// expect() until release().  The transport may access it at any time until then, so the caller must
// not change it; collectives/stream_algorithms.h explains the one exception.
//
// Waiting.  Only acquire(), peek() and finish() wait.  A wait moves whatever can be moved, to and
// from all ranks, polls the WaitGuard, and passes on its exceptions.  So a collective cannot
// deadlock if every peek() has a matching send() that the sender reaches.  Of the guard a wait
// calls `poll` at least every kLongestSleep, and `idle` when nothing has moved for limits::kIdle; a
// transport calls `verify` once for each rank and operation, before peek() returns its first data,
// and `broken` when a rank can send or take no more.
//
// One thread at a time uses a transport, unless a function says otherwise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/clock.h"
#include "base/op_signature.h"
#include "transport/wait_guard.h"

namespace ringreduce {

inline constexpr size_t kPieceBytes = 256 << 10;  // a buffer of a transport

// The way of the data to one rank, since it was first sent to.
struct Line {
  int to = 0;
  uint64_t bytes = 0;  // that its system has acknowledged, headers included
  Nanos busy = 0;      // while bytes were on their way or waited for the line, not for the reader
  uint64_t retransmits = 0;  // packets
};

// The first bytes from one rank to another in an operation.
struct Opening : Announcement {
  uint64_t rate = 0;  // what the sender says of the line (algorithm/agreed_line.h)
};
static_assert(std::has_unique_object_representations_v<Opening>);

class Transport {
 public:
  Transport(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Starts an operation.
  void begin(const Opening& operation) {
    heard_ = {};
    measures_ = false;
    open(operation);
  }
  // Moves as many bytes as possible.  Call it during long computations.
  virtual void advance() = 0;
  // Waits until everything was sent.  Then all memory belongs to the caller again.
  virtual void finish() = 0;

  // Sends bytes to a rank.
  virtual void send(int to, const void* data, size_t bytes) = 0;
  // Returns a buffer of kPieceBytes, to be filled and passed to post().  Waits while kWindow
  // buffers to that rank are in flight.
  virtual std::byte* acquire(int to) = 0;
  static constexpr size_t kWindow = 256;
  // Sends the first `bytes` of that buffer.
  virtual void post(int to, std::byte* buffer, size_t bytes) = 0;

  // Names the destination of the next bytes from a rank.
  virtual void expect(int from, void* data, size_t bytes) = 0;
  // The same, into a buffer of the transport: at most kPieceBytes.
  virtual void expect(int from, size_t bytes) = 0;
  // Waits until the oldest expectation is complete, and returns its data.
  virtual const std::byte* peek(int from) = 0;
  // Ends the oldest expectation.
  virtual void release(int from) = 0;

  // What this rank has heard from others in the operation.
  struct Heard {
    uint64_t rate = 0;  // the largest of their openings
    Nanos since = 0;    // when the first opening was taken; 0: none was
  };
  const Heard& heard() const { return heard_; }
  // Before the first peek(): heardBytes() is asked for after the operation.
  void measure() { measures_ = true; }
  // Bytes of other hosts that have come since the first opening was taken.  Those that waited in
  // this system by then had come before, so a rank that is late, or waited for a late one, does not
  // find the line faster than it is.
  uint64_t heardBytes() {
    if (!measures_ || heard_.since == 0) return 0;
    return std::max(arrived(), arrived_before_) - arrived_before_;
  }

  virtual void setPatience(Patience) {}
  // Bytes a second that the line carries each way at least for this rank; 0: not known.
  virtual void setLineRate(uint64_t) {}
  // After the last operation: waits, at most `longest`, until the other ranks' systems have all
  // bytes, and closes this side.
  virtual void leave(Nanos /*longest*/) {}

  // Bytes of memory for its buffers, those that ranks of the host share not included.  From any
  // thread.
  virtual size_t stagingBytes() const { return 0; }
  // Bytes sent up to the end of the last operation, headers included, but for those that went
  // through memory of this host.  From any thread.
  virtual uint64_t bytesSent() const { return 0; }
  // What the lines to other ranks have done, at the end of a recent operation.  From any thread.
  virtual std::vector<Line> lines() const { return {}; }
  // For each rank that was sent to: how it is reached, in words.  At the end of a recent operation,
  // from any thread.
  virtual std::vector<std::string> routes() const { return {}; }

 protected:
  virtual void open(const Opening& operation) = 0;
  // Bytes of other hosts, ever, that were read or wait in this system.
  virtual uint64_t arrived() { return 0; }
  // peek() calls it once for each rank and operation, with an opening that it has compared.
  void hear(const Opening& theirs) {
    if (heard_.since == 0) {
      heard_.since = now();
      if (measures_) arrived_before_ = arrived();
    }
    heard_.rate = std::max(heard_.rate, theirs.rate);
  }

 private:
  const int rank_, size_;
  Heard heard_;
  bool measures_ = false;
  uint64_t arrived_before_ = 0;
};

}  // namespace ringreduce
