// Point-to-point messages: matching messages with receives, and moving their bytes.
//
// A message is matched by sender and tag, in the order of sending; a receive from any rank takes
// the first message to arrive.  A small message travels with its envelope (eager).  If no receive
// is posted yet, the receiver keeps a copy.  A large message announces itself (request), waits for
// a receive (grant), and then arrives in fragments straight in the receiver's memory.  So a large
// message without a receive never blocks others.  The memory for copies is bounded: a sender has at
// most kEagerBudget bytes of eager payloads in flight to each rank; beyond that it announces small
// messages too.
//
// This is the state of one rank and the code that advances it.  Nothing here waits, locks or knows
// the time: p2p/messenger.h does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "transport/shm/channel.h"

namespace ringreduce {

inline constexpr int kAnySource = -1;
inline constexpr size_t kEagerBytes = 16 << 10;
inline constexpr size_t kEagerBudget = 1 << 20;
inline constexpr size_t kFragmentBytes = 60 << 10;  // four of them with their heads fit in the ring
static_assert(4 * partBytes(kFragmentBytes) <= kRingBytes);
static_assert(kEagerBytes <= kFragmentBytes);

struct Message {
  enum class Direction : uint8_t { kSend, kReceive };

  Direction direction;
  int peer;  // kReceive: or kAnySource
  int tag;
  void* data;  // kSend: only read
  size_t count;
  DType dtype;
  std::function<void()> after = {};   // called after success
  std::shared_ptr<void> memory = {};  // what owns the buffer, until the message is over

  size_t bytes() const { return count * sizeOf(dtype); }
};

// A message or a receive under way.
struct Transfer {
  explicit Transfer(Message m) : message(std::move(m)) {}
  virtual ~Transfer() = default;

  Message message;
  uint64_t number = 0;      // of this rank, in the order of posting
  uint64_t id = 0;          // of the sender to that rank; kReceive: once it is matched
  int source = kAnySource;  // kReceive: the sender of the matched message
  size_t moved = 0;         // bytes
  bool matched = false;
  bool over = false;
  // The matched message has another count or dtype than expected.
  bool mismatch = false;
  uint64_t sent_count = 0;
  DType sent_dtype = DType::kUInt8;
  // When this rank and the peer called, by the group's clock, and why not sooner; 0: not known.
  Nanos posted = 0, peer_posted = 0;
  Inherited why = {}, peer_why = {};
};

class Engine {
 public:
  using Handle = std::shared_ptr<Transfer>;

  // A rank's channels to and from one peer, which may be itself.
  struct Channels {
    ChannelWriter out;
    ChannelReader in;
    Flag* consumed;      // at the peer: how many of its eager bytes have arrived here
    Flag* acknowledged;  // here: how many of our eager bytes have arrived there
  };

  explicit Engine(std::vector<Channels> channels);

  void post(const Handle& transfer);

  // Moves as much as possible, to and from all ranks, for a bounded time.  Appends completed
  // transfers to `finished` and the ranks whose channels changed to `touched`.  False if nothing
  // moved.
  bool progress(std::vector<Handle>& finished, std::vector<int>& touched);

  // Whether rank r has sent something that was not processed yet.
  bool hasNews(int r) { return peers_[static_cast<size_t>(r)].channels.in.front() != nullptr; }

  const std::set<Handle>& pending() const { return pending_; }
  // Drops a transfer.  Its memory is not accessed any more.
  void cancel(const Handle& transfer);

 private:
  // A message that arrived before its receive was posted.
  struct Arrival {
    uint64_t order, id, count;
    DType dtype;
    bool eager;
    Nanos posted;
    Inherited why;
    std::vector<std::byte> payload;
  };
  struct Peer {
    explicit Peer(const Channels& w) : channels(w) {}
    Channels channels;
    std::deque<Handle> unannounced;        // sends that have not begun
    std::map<uint64_t, Handle> requested;  // announced, not granted yet
    std::deque<Handle> granted;            // being sent, one after the other
    std::deque<MessagePart> grants;        // to be sent
    std::map<uint64_t, Handle> receiving;  // granted, not complete
    uint64_t next_id = 0, eager_sent = 0, eager_consumed = 0;
  };
  using Key = std::pair<int, int>;  // rank, tag

  bool push(Peer& peer, std::vector<Handle>& finished);
  bool drain(int rank, std::vector<Handle>& finished);
  void arrive(int rank, const MessagePart& part, const std::byte* payload,
              std::vector<Handle>& finished);
  Handle takePosted(int rank, int tag);
  bool takeArrival(Transfer& receive, int& rank, Arrival& arrival);
  void match(const Handle& receive, int rank, const Arrival& arrival, const std::byte* payload,
             std::vector<Handle>& finished);
  void finish(const Handle& transfer, std::vector<Handle>& finished);
  void consume(int rank, size_t bytes);

  std::vector<Peer> peers_;
  std::map<Key, std::deque<Handle>> posted_;       // receives without a message
  std::map<Key, std::deque<Arrival>> unexpected_;  // messages without a receive
  std::set<Handle> pending_;
  std::vector<Handle> finished_by_post_;
  std::vector<int> touched_by_post_;
  uint64_t posts_ = 0, arrivals_ = 0;
};

}  // namespace ringreduce
