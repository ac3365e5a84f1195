// A stream: bytes from one rank to another, in order, over one or more connections.
//
// The sender's bytes have positions, counted from the group's start.  They travel in frames, each
// of which says its position and length; whichever connection takes bytes next is given the next
// frame. The receiver has said beforehand where the next bytes go (expect), so a frame goes
// straight from the socket to its place, in whatever order frames come.  A frame for which no place
// is known yet stays in its socket, which is all the flow control there is.
//
// Nothing here waits: `progress` moves what can be moved.  Connections are one-way, so that nothing
// is ever unread on a sender's socket when it is closed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/tcp/frame.h"
#include "transport/tcp/silence.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

inline constexpr size_t kPieceBytes = 256 << 10;  // a buffer of the pool

// Buffers of kPieceBytes, the last one given back first: it is still in cache.
class Pool {
 public:
  std::byte* take();
  void give(std::byte* buffer) { free_.push_back(buffer); }
  size_t bytes() const { return all_.size() * kPieceBytes; }
  // Frees what is not in use, down to so many bytes.
  void trim(size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* buffer) const;
  };
  std::vector<std::unique_ptr<std::byte, Free>> all_;
  std::vector<std::byte*> free_;
};

// What became of a try to move bytes.
enum class Moved : uint8_t { kNothing, kSome, kBroken };

// A connection, and what edge-triggered epoll has told of it.
struct Connection {
  Socket socket;
  bool ready = true;    // until the system says that there is no more for now
  bool hangup = false;  // the other end has closed: what is there must be read to the end
  Silence silence = {};
};

class SendStream {
 public:
  explicit SendStream(Pool& pool) : pool_(pool) {}

  // Bytes to be sent; memory stays as it is until `idle`.
  void send(const void* data, size_t bytes);
  // The same for the first `bytes` of a buffer of the pool, which goes back there.
  void sendBuffer(std::byte* buffer, size_t bytes);
  size_t buffersUnderWay() const { return buffers_; }

  // Whether all has been handed to the system.
  bool idle() const { return spans_.empty(); }
  uint64_t unsent() const { return posted_ - sent_; }
  uint64_t sent() const { return sent_; }
  // What its connections have taken: the same and the frames' heads.
  uint64_t taken() const { return taken_; }

  // Connection `number`, of which there is one. They may come in any order.
  Connection& add(Socket socket, int number);
  int lanes() const { return static_cast<int>(lanes_.size()); }
  Connection& lane(int i) { return lanes_[static_cast<size_t>(i)]->connection; }
  // New frames go over no more than `count` of the connections, those of the lowest numbers.
  void use(int count) { used_ = static_cast<size_t>(count); }
  int used() const { return static_cast<int>(std::min(used_, lanes_.size())); }

  // Sends a frame, or what is left of one, on every connection that is ready.  After kBroken `why`
  // says what happened.
  Moved progress();
  const std::string& why() const { return why_; }

 private:
  struct Span {
    uint64_t position;
    const std::byte* data;
    size_t bytes, left;  // left: not handed over yet
    std::byte* buffer;   // of the pool, or null
  };
  struct Lane {
    Connection connection;
    int number = 0;
    Frame frame;
    uint64_t at = 0, end = 0;  // positions of what is left of the frame
    size_t header_left = 0;
    bool busy() const { return header_left > 0 || at < end; }
  };
  void push(const void* data, size_t bytes, std::byte* buffer);
  void cut(Lane& lane);
  size_t spanAt(uint64_t position) const;
  bool write(Lane& lane);
  void handedOver(uint64_t from, uint64_t to);

  Pool& pool_;
  std::deque<Span> spans_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  uint64_t posted_ = 0, cut_ = 0, sent_ = 0, taken_ = 0;
  size_t buffers_ = 0, turn_ = 0, used_ = std::numeric_limits<size_t>::max();
  std::string why_;
};

class RecvStream {
 public:
  explicit RecvStream(Pool& pool) : pool_(pool) {}

  // Where the next bytes of the stream go; null: a buffer of the pool, taken when the first of them
  // come.
  void expect(void* data, size_t bytes);
  bool expectsNone() const { return expected_.empty(); }
  // Whether what was expected first is there, and where.
  bool ready() const { return expected_.front().left == 0; }
  const std::byte* front() const { return expected_.front().data; }
  void pop();

  void add(Socket socket);
  int lanes() const { return static_cast<int>(lanes_.size()); }
  Connection& lane(int i) { return lanes_[static_cast<size_t>(i)]->connection; }
  bool isOpen() const { return openLanes() > 0; }  // so more may come
  int openLanes() const;
  uint64_t received() const { return received_; }  // bytes, of whatever

  // Takes what has come, no more than some hundred KiB from each connection.  kBroken: no more can
  // come, and what was expected is not there.
  Moved progress();
  const std::string& why() const { return why_; }

 private:
  struct Expected {
    uint64_t position;
    std::byte* data;
    size_t bytes, left;
    bool pooled;
  };
  struct Lane {
    Connection connection;
    uint64_t at = 0, end = 0;  // positions of what is still to come of the frame
    // What was read beyond a frame: the next one's header, and what came with it.
    std::array<std::byte, 4096> ahead;
    size_t ahead_begin = 0, ahead_end = 0;
    bool closed = false;
    size_t aheadBytes() const { return ahead_end - ahead_begin; }
  };
  bool claim(uint64_t begin, uint64_t end);
  bool parse(Lane& lane);
  void takeAhead(Lane& lane);
  bool read(Lane& lane, size_t& budget);
  void placed(Lane& lane, size_t bytes);
  size_t entryAt(uint64_t position);
  void credit(uint64_t from, uint64_t to);
  bool broken(const std::string& why);

  Pool& pool_;
  std::deque<Expected> expected_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  uint64_t expected_end_ = 0, missing_ = 0;  // bytes expected in all, and those not there yet
  // Frames that have begun to come: all bytes before `floor_`, and these, begin to end, beyond it.
  uint64_t floor_ = 0;
  std::map<uint64_t, uint64_t> claimed_;
  uint64_t received_ = 0;
  bool dead_ = false;
  std::string why_;
};

}  // namespace ringreduce::net
