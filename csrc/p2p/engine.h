// Point to point: which message goes to which receive, and how its bytes get there.
//
// A message is matched by its sender and tag, in the order in which it was sent; a receive from any
// rank takes whatever came first.  A small message travels with its envelope (eager): if no receive
// is posted yet, the receiver keeps a copy.  A large one announces itself (request), waits until a
// receive is there (grant), and then comes in fragments straight into the receiver's memory.  So a
// large message that nobody receives yet never stands in the way of others, and what a receiver
// keeps is bounded: a sender has at most kEagerBudget bytes of eager payloads under way to each
// rank, and beyond that announces small messages too.
//
// This is the state of one rank and what moves it on.  Nothing here waits, locks or knows of time:
// that is p2p/messenger.h's.
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
inline constexpr size_t kFragmentBytes = 60 << 10;  // four of them and their heads fit the ring
static_assert(4 * recordBytes(kFragmentBytes) <= kRingBytes);
static_assert(kEagerBytes <= kFragmentBytes);

struct Message {
  enum class Way : uint8_t { kSend, kReceive };

  Way way;
  int peer;  // kReceive: or kAnySource
  int tag;
  void* data;  // kSend: only read
  size_t count;
  DType dtype;
  // Called once it is over and went well; what it holds, the buffer's owner, lives until then.
  std::function<void()> after = {};

  size_t bytes() const { return count * sizeOf(dtype); }
};

// A message or a receive under way.
struct Transfer {
  explicit Transfer(Message m) : message(std::move(m)) {}
  virtual ~Transfer() = default;

  Message message;
  uint64_t number = 0;      // of this rank's, in the order they were posted
  uint64_t id = 0;          // kSend: of the sender's to that rank
  int source = kAnySource;  // kReceive: who sent what it was matched with
  size_t moved = 0;         // bytes
  bool matched = false;
  bool over = false;
  // Set where the message that was matched is of another kind than was expected.
  bool mismatch = false;
  uint64_t sent_count = 0;
  DType sent_dtype = DType::kUInt8;
};

class Engine {
 public:
  using Handle = std::shared_ptr<Transfer>;

  // What a rank has for each peer, itself among them.
  struct Wire {
    ChannelWriter out;
    ChannelReader in;
    Flag* consumed;      // at the peer: eager bytes of its that have arrived
    Flag* acknowledged;  // here: eager bytes of ours that have arrived there
  };

  explicit Engine(std::vector<Wire> wires);

  void post(const Handle& transfer);

  // Moves what can be moved now, to and from all ranks, but not for long.  Appends what is over to
  // `finished` and the ranks for which something was done to `touched`; false if nothing was.
  bool progress(std::vector<Handle>& finished, std::vector<int>& touched);

  // Whether rank r has sent something that has not been looked at.
  bool hasNews(int r) { return peers_[static_cast<size_t>(r)].wire.in.front() != nullptr; }

  const std::set<Handle>& pending() const { return pending_; }
  // Forgets a transfer.  Its memory is not touched any more.
  void cancel(const Handle& transfer);

 private:
  // A message that came before its receive.
  struct Arrival {
    uint64_t order, id, count;
    DType dtype;
    bool eager;
    std::vector<std::byte> payload;
  };
  struct Peer {
    explicit Peer(const Wire& w) : wire(w) {}
    Wire wire;
    std::deque<Handle> unannounced;        // to be sent
    std::map<uint64_t, Handle> requested;  // announced, not granted yet
    std::deque<Handle> granted;            // on their way, one after the other
    std::deque<uint64_t> grants;           // to be given
    std::map<uint64_t, Handle> receiving;  // granted, not here yet
    uint64_t next_id = 0, eager_sent = 0, eager_consumed = 0;
  };
  using Key = std::pair<int, int>;  // rank, tag

  bool push(Peer& peer, std::vector<Handle>& finished);
  bool drain(int rank, std::vector<Handle>& finished);
  void arrive(int rank, const Record& record, const std::byte* payload,
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
