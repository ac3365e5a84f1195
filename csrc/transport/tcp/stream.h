// A stream: bytes from one rank to another, in order, over one or more connections.  To a rank of
// this host the only connection is a pipe in memory (transport/neighbours.h), with the same frames.
//
// Each byte has a position, counted from the start of the group.  Bytes travel in frames; a frame
// carries its position and length.  The next frame goes to the first connection that accepts bytes.
// The receiver names the destination of the next bytes in advance (expect), so a frame goes from
// the socket straight to its destination, in any order.  A frame without a destination stays in its
// socket; there is no other flow control.
//
// No call waits: `progress` moves as many bytes as possible.  Connections are one-way, so that a
// sender's socket never holds unread bytes when it is closed.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/neighbours.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"

namespace ringreduce::net {

// ---- frames

inline constexpr uint32_t kFrameMagic = 0x52523246;  // "RR2F"
inline constexpr size_t kLargestFrame = 256 << 10;

// The header before the bytes of a stream on a connection.
struct Frame {
  uint32_t magic = kFrameMagic;
  uint32_t bytes = 0;     // of payload, which follow
  uint64_t position = 0;  // of the first payload byte in the stream
  uint64_t header = 0;    // CRC-32C of the fields above; the upper half is 0
};
static_assert(sizeof(Frame) == 24);

// Fills in the checksum.
Frame sealed(Frame frame);
// Whether magic, checksum and length are valid.
bool isSound(const Frame& frame);

// CRC-32C (Castagnoli).
uint32_t crc32c(const void* data, size_t bytes);

// ---- the two ends of a stream

// Buffers of kPieceBytes.  The one returned last is taken first, since it is still in cache.
class Pool {
 public:
  std::byte* take();
  void give(std::byte* buffer) { free_.push_back(buffer); }
  // From any thread.
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  // Frees unused buffers until `bytes` are left.
  void trim(size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* buffer) const;
  };
  std::vector<std::unique_ptr<std::byte, Free>> all_;
  std::vector<std::byte*> free_;
  std::atomic<size_t> bytes_ = 0;
};

// The result of an attempt to move bytes.
enum class Moved : uint8_t { kNothing, kSome, kBroken };

// A connection, and its state according to edge-triggered epoll.
struct Connection {
  Socket socket;
  BytePipe* pipe = nullptr;  // instead of a socket
  bool ready = true;         // until the kernel has no more for now
  bool hangup = false;       // the other end has closed; read what is left
  Silence silence = {};

  // epoll does not report on pipes, so a pipe is tried each time.
  bool mayMove() const { return ready || pipe; }
  // As those of a socket.
  ssize_t send(const iovec* pieces, size_t count) {
    return pipe ? moved(pipe->send(pieces, count)) : socket.send(pieces, count);
  }
  ssize_t receive(const iovec* pieces, size_t count) {
    return pipe ? moved(pipe->receive(pieces, count)) : socket.receive(pieces, count);
  }

 private:
  static ssize_t moved(size_t bytes) {
    if (bytes == 0) errno = EAGAIN;
    return bytes == 0 ? -1 : static_cast<ssize_t>(bytes);
  }
};

class SendStream {
 public:
  explicit SendStream(Pool& pool) : pool_(pool) {}

  // Queues bytes.  The memory must not change until `idle`.
  void send(const void* data, size_t bytes);
  // The same for the first `bytes` of a buffer of the pool, which is returned to it.
  void sendBuffer(std::byte* buffer, size_t bytes);
  size_t buffersInFlight() const { return buffers_; }

  // Whether the kernel has taken all bytes.
  bool idle() const { return spans_.empty(); }
  uint64_t unsent() const { return posted_ - sent_; }
  uint64_t sent() const { return sent_; }
  // Bytes that the connections have taken, with frame headers.
  uint64_t taken() const { return taken_; }

  // Adds the connection with this number.  Numbers are unique and may come in any order.
  Connection& add(Socket socket, int number);
  void add(BytePipe& pipe) { add(Socket(), 0).pipe = &pipe; }
  int connections() const { return static_cast<int>(writers_.size()); }
  Connection& connection(int i) { return writers_[static_cast<size_t>(i)]->connection; }
  // Limits new frames to the `count` connections with the lowest numbers.
  void use(int count) { used_ = static_cast<size_t>(count); }
  int used() const { return static_cast<int>(std::min(used_, writers_.size())); }

  // Sends a frame, or the rest of one, on every connection that is ready.  After kBroken, `why` is
  // the reason.
  Moved progress();
  const std::string& why() const { return why_; }

 private:
  struct Span {
    uint64_t position;
    const std::byte* data;
    size_t bytes, left;  // left: not yet taken by the kernel
    std::byte* buffer;   // of the pool, or null
  };
  // A connection and the frame that it is sending.
  struct Writer {
    Connection connection;
    int number = 0;
    Frame frame;
    uint64_t at = 0, end = 0;  // positions of the rest of the frame
    size_t header_left = 0;
    bool busy() const { return header_left > 0 || at < end; }
  };
  void push(const void* data, size_t bytes, std::byte* buffer);
  void cutFrame(Writer& writer);
  size_t spanAt(uint64_t position) const;
  bool write(Writer& writer);
  void markSent(uint64_t from, uint64_t to);

  Pool& pool_;
  std::deque<Span> spans_;
  std::vector<std::unique_ptr<Writer>> writers_;
  uint64_t posted_ = 0, cut_ = 0, sent_ = 0, taken_ = 0;
  size_t buffers_ = 0, first_ = 0, used_ = std::numeric_limits<size_t>::max();
  std::string why_;
};

class RecvStream {
 public:
  explicit RecvStream(Pool& pool) : pool_(pool) {}

  // Names the destination of the next bytes of the stream.  Null: a buffer of the pool, taken when
  // the first of them arrive.
  void expect(void* data, size_t bytes);
  bool expectsNone() const { return expected_.empty(); }
  // Whether the first expected piece has arrived, and where it is.
  bool ready() const { return expected_.front().left == 0; }
  const std::byte* front() const { return expected_.front().data; }
  void pop();

  void add(Socket socket);
  void add(BytePipe& pipe) {
    add(Socket());
    readers_.back()->connection.pipe = &pipe;
  }
  int connections() const { return static_cast<int>(readers_.size()); }
  Connection& connection(int i) { return readers_[static_cast<size_t>(i)]->connection; }
  bool isOpen() const { return openConnections() > 0; }  // more bytes may arrive
  int openConnections() const;
  uint64_t received() const { return received_; }  // bytes, with headers
  // Bytes that have come over sockets, as they travel, with those that were not read yet.
  uint64_t arrived() const;

  // Reads what has arrived, up to some hundred KiB from each connection.  kBroken: no more bytes
  // can arrive, and expected ones are missing.
  Moved progress();
  const std::string& why() const { return why_; }

 private:
  struct Expected {
    uint64_t position;
    std::byte* data;
    size_t bytes, left;
    bool pooled;
  };
  // A connection and the frame that it is receiving.
  struct Reader {
    Connection connection;
    uint64_t at = 0, end = 0;  // positions of the rest of the frame
    // Bytes read beyond the frame: the next header and the start of its payload.
    std::array<std::byte, 4096> ahead;
    size_t ahead_begin = 0, ahead_end = 0;
    bool closed = false;
    size_t aheadBytes() const { return ahead_end - ahead_begin; }
  };
  bool claim(uint64_t begin, uint64_t end);
  bool parseHeader(Reader& reader);
  void takeAhead(Reader& reader);
  bool read(Reader& reader, size_t& budget);
  void advance(Reader& reader, size_t bytes);
  size_t entryAt(uint64_t position);
  void markReceived(uint64_t from, uint64_t to);
  bool broken(const std::string& why);

  Pool& pool_;
  std::deque<Expected> expected_;
  std::vector<std::unique_ptr<Reader>> readers_;
  uint64_t expected_end_ = 0, missing_ = 0;  // bytes expected in total, and those still missing
  // Frames that have begun to arrive: all before `floor_`, and from begin to end those beyond it.
  uint64_t floor_ = 0;
  std::map<uint64_t, uint64_t> claimed_;
  uint64_t received_ = 0;
  bool dead_ = false;
  std::string why_;
};

// ---- how many connections a stream should have
//
// On a short path without loss one is best: more cost system calls.  On a long path a single
// connection is limited by its congestion window: slow start begins with ten packets, and loss
// shrinks the window.  So a stream on a long path starts with a few.  BBR sends at the rate that it
// measures, so those few fill the path.  With any other congestion control, a stream that always
// had data to send doubles its connections as long as that makes it faster; on a short path it goes
// back when it did not.  When it is paced it begins anew with a few: packets were lost because it
// had filled the line, and many slow connections make the end of a message late.  From there on it
// has more only if packets go on to be lost and it is slower than its pace, and that helps.

// One connection fills a path with a shorter round trip, if nothing is lost.
inline constexpr Nanos kLongPath = 2 * kMillisecond;

// How many connections to begin with, if the round trip is known beforehand.
int initialConnections(Nanos round_trip);

class ConnectionCount {
 public:
  ConnectionCount(int least, int most) : least_(least), most_(most), wanted_(least) {}

  // Totals over the connections of a stream.
  struct Sample {
    Nanos time = 0;
    uint64_t sent = 0;         // bytes, ever
    Nanos round_trip = 0;      // the shortest that was seen, of the fastest connection
    Nanos smoothed = 0;        // TCP's smoothed one, of connections that await acknowledgements
    uint64_t retransmits = 0;  // packets, ever
    int connections = 0;       // that exist now
    bool bbr = false;          // congestion control that fills the path in spite of loss
    double pace = 0;           // bytes a second, so as not to overfill the line; 0: no limit
  };

  // Returns how many connections the stream should have.  `busy`: it had more to send than its
  // connections took, ever since the last call.
  int look(const Sample& sample, bool busy);
  int wanted() const { return wanted_; }
  // No more can be made.
  void limit(int most) {
    most_ = std::max(1, most);
    wanted_ = std::min(wanted_, most_);
  }
  bool isLongPath() const;
  // The number and its reasons: "8: round trip 50.0 ms, 12 packets lost, 457 Mbit/s; 16 were no
  // faster".
  std::string why() const;

 private:
  const int least_;
  int most_;
  int wanted_;
  bool settled_ = false, paced_ = false;
  Sample since_;       // the start of this measurement
  double rate_ = 0;    // bytes a second
  double pace_ = 0;    // likewise
  int fewer_ = 0;      // connections before the last doubling,
  double before_ = 0;  // and the rate with those
  int in_vain_ = 0;    // measurements in a row that were no faster
  int no_faster_ = 0;  // a higher number that was tried
  Nanos round_trip_ = 0;
  uint64_t lost_ = 0;
};

// ---- the rate of a stream on a long path
//
// A stream that overfills a line loses packets, and messages wait behind a full queue.  BBR bounds
// its rate by itself; other congestion controls send faster until packets are lost.
//
// A queue makes round trips longer.  There is no limit until a stream sees its first queue.  From
// then on the rate falls while there is a queue, and rises while there is none.  It does not stay
// below what the line carries at least, so other traffic in the queue does not stop the stream.
//
// Round trips are also longer where a receiver is busy, or the route has changed.  So if there is a
// queue at the least rate for some time, the stream tries half of it for as long as a queue of its
// own would need to drain.  If round trips are still long, the queue is not its own, and they count
// as those without a queue until a shorter one is seen.
//
// A line that loses packets without a queue is not paced: there the windows of many connections
// limit the rate, and what calls measure is less than the line carries.

// How often a stream that sends is looked at.
inline constexpr Nanos kLookEvery = 10 * kMillisecond;
// Losses are counted over so many bytes.
inline constexpr uint64_t kLossBytes = 48 << 20;

class Pace {
 public:
  using Sample = ConnectionCount::Sample;

  // Returns bytes a second; 0: no limit.  `line`: what the line carries at least for this stream;
  // 0: not known.
  double look(const Sample& sample, double line);
  double rate() const { return rate_; }

 private:
  void countLosses(const Sample& sample, bool queue);

  double rate_ = 0;
  Nanos base_ = 0;            // a round trip that stays longer than the shortest, whatever the rate
  int at_least_ = 0;          // looks in a row that saw a queue at the least rate
  int tries_ = 0;             // looks that are left at half of it
  uint64_t retransmits_ = 0;  // at the last look
  Nanos queue_seen_ = 0;      // when a look saw a queue
  uint64_t counted_from_ = 0;  // bytes that had been sent
  int losses_alone_ = 0;       // looks since then that saw packets lost and no queue
  bool is_lossy_ = false;
};

// The connections that one transport has beyond the first to each rank.  All transports of a
// process together may have a quarter of its descriptors: the other ranks open as many towards this
// one, and half is left to the program.
class ConnectionBudget {
 public:
  ConnectionBudget() = default;
  ~ConnectionBudget() { taken_in_all_ -= taken_; }
  ConnectionBudget(const ConnectionBudget&) = delete;
  ConnectionBudget& operator=(const ConnectionBudget&) = delete;

  // Takes one if there is one left.
  bool take() {
    if (taken_in_all_++ < most()) {
      ++taken_;
      return true;
    }
    --taken_in_all_;
    return false;
  }

  static int most() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
    return static_cast<int>(std::min<rlim_t>(limit.rlim_cur / 4, 1 << 20));
  }

 private:
  static inline std::atomic<int> taken_in_all_ = 0;
  int taken_ = 0;
};

}  // namespace ringreduce::net
