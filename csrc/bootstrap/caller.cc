// The other ranks' side of the rendezvous: finds rank 0, joins, learns the table.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/meeting.h"
#include "bootstrap/process.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/unix_socket.h"

namespace ringreduce {
namespace {

// The same for an entry that says how an attempt failed; and so long such an entry is believed.
constexpr Nanos kFailureGrace = 5 * kSecond, kFailureLife = 600 * kSecond;
// Rank 0 alone knows who is missing, so who has reached it leaves it that much time to say so.
constexpr Nanos kHubGrace = 3 * kSecond;

// Attempts that failed and that ranks of this process took part in, by rank 0's socket.
class Failures {
 public:
  void add(const std::string& socket, int rank) {
    const std::lock_guard lock(mutex_);
    known_.emplace(socket, rank);
  }
  bool knows(const std::string& socket, int rank) {
    const std::lock_guard lock(mutex_);
    return known_.contains({socket, rank});
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<std::string, int>> known_;
};

Failures& failures() {
  static auto* all = new Failures;  // never destroyed: groups are made until the process ends
  return *all;
}

class PeerHello {
 public:
  PeerHello(Store& store, int rank, int size, const GroupOptions& options)
      : store_(store), rank_(rank), size_(size), options_(options), stopwatch_(options) {}

  Membership run() {
    const Fields hub = findHub();
    const Peer peer = peerOf(socket_);
    if (peer.uid != geteuid())
      refuse(hub, "runs as user id " + std::to_string(geteuid()) + ", " + hub_name_ +
                      " as user id " + std::to_string(peer.uid) +
                      "; all ranks must run as the same user");
    if (word(hub, "version") != kVersion)
      refuse(hub, "runs another version of ringreduce than " + hub_name_ +
                      "; install the same one for all");
    hub_socket_ = word(hub, "socket");
    secret_ = word(hub, "secret");
    try {
      hello(hub);
      for (int known = 0; known < size_; ++known) learn(awaitPacket());
    } catch (const Error& error) {
      if (error.kind() != Failure::kSetup || told_) throw;
      const Error named(error.kind(), name() + ": " + error.what());
      sendPacket(socket_, encode({{"say", "fail"}, {"secret", secret_}, {"text", named.what()}}));
      awaitPacket();  // rank 0 answers with the error that all ranks get
      throw named;
    }
    sendPacket(socket_, encode({{"say", "ready"}, {"secret", secret_}}));
    awaitPacket();  // "go"
    return std::move(table_);
  }

 private:
  std::string name() const {
    return "rank " + options_.shown(rank_) + " (pid " + std::to_string(getpid()) + " on host " +
           hostName() + ")";
  }

  void hello(const Fields& hub) {
    table_.options = SharedOptions::fromText(word(hub, "options"));
    table_.members.resize(static_cast<size_t>(size_));
    Member& self = table_.members[static_cast<size_t>(rank_)];
    self.segment = Segment::create(Layout(table_.options, size_).bytes);
    sendPacket(socket_,  // if rank 0 is gone, the answer says so
               encode({{"say", "hello"},
                       {"secret", secret_},
                       {"version", kVersion},
                       {"rank", std::to_string(rank_)},
                       {"size", std::to_string(size_)},
                       {"pid", std::to_string(getpid())},
                       {"host", hostName()}}),
               {self.segment->fd()});
  }

  // Tells rank 0 through the store, since this process cannot talk to it, and throws.
  [[noreturn]] void refuse(const Fields& hub, const std::string& why) {
    const std::string text = name() + " " + why;
    store_.set(failureKey(word(hub, "socket")), text);
    throw Error(Failure::kSetup, text);
  }

  // Waits for an entry in the store that somebody answers for, and connects.
  Fields findHub() {
    std::string seen;
    Nanos seen_at = 0;
    for (Nanos pause = kMillisecond;; pause = std::min(2 * pause, kTick)) {
      const auto text = read(decode(seen));
      const Fields hub = decode(text.value_or(""));
      if (text) {
        if (*text != seen) {
          seen = *text;
          seen_at = now();
        }
        if (hub.contains("failed")) {
          if (isOurs(hub) && now() - seen_at > kFailureGrace) heedFailure(hub);
        } else if (hub.contains("apart")) {
          throw Apart{*text};
        } else if (word(hub, "host_id") == hostId()) {
          socket_ = connectTo(word(hub, "socket"));
          if (socket_) return hub;
        } else if (word(hub, "socket") != told_apart_) {
          told_apart_ = word(hub, "socket");
          store_.set(apartKey(told_apart_), "1");
        }
      }
      if (stopwatch_.over()) notFound(text.has_value(), hub);
      stopwatch_.turn(options_.shownAs(rank_),
                      [&] { return hub_name_ + " to publish its address"; });
      std::this_thread::sleep_for(std::chrono::nanoseconds(pause));
    }
  }

  // Rank 0's entry.  A store that fails has most likely gone with the process that held it, which
  // is rank 0 as a rule: then its last entry is the reason, if it is one.
  std::optional<std::string> read(const Fields& seen) {
    try {
      return store_.get(kHubKey);
    } catch (const Error&) {
      if (seen.contains("failed") && isOurs(seen)) heedFailure(seen);
      throw;
    }
  }

  // Whether an attempt that failed may be the one this rank has come for.  A new attempt on the
  // same store replaces the entry as soon as its rank 0 arrives; one that this rank was in is
  // history.
  bool isOurs(const Fields& failure) const {
    const Nanos age = (std::time(nullptr) - number(failure, "time")) * kSecond;
    return age < kFailureLife && !failures().knows(word(failure, "socket"), rank_);
  }

  [[noreturn]] void heedFailure(const Fields& failure) {
    failures().add(word(failure, "socket"), rank_);
    throw Error(static_cast<Failure>(number(failure, "kind")),
                word(failure, "failed") + " (before rank " + options_.shown(rank_) + " came)");
  }

  [[noreturn]] void notFound(bool stale, const Fields& hub) {
    std::string text = hub_name_ + " did not publish its address within " +
                       seconds(options_.timeout) + ", making group '" + options_.name +
                       "' (this is rank " + options_.shown(rank_) + ")";
    if (stale)
      text += "; the store holds an entry of an earlier run, by pid " + word(hub, "pid") +
              " on host " + word(hub, "host") + ", which no longer answers";
    throw Error(Failure::kTimeout, text);
  }

  Packet awaitPacket() {
    for (;;) {
      Packet packet;
      const Received received = receivePacket(socket_, packet);
      if (received == Received::kClosed) {
        // It may have given up, or gone to meet the others elsewhere, just when this rank called,
        // and had no time to say so here.
        const std::string text = read({}).value_or("");
        const Fields entry = decode(text);
        if (word(entry, "socket") == hub_socket_) {
          if (entry.contains("apart")) throw Apart{text};
          if (entry.contains("failed")) told(word(entry, "kind"), word(entry, "failed"));
        }
        throw Error(Failure::kPeerLost, hub_name_ + " ended while group '" + options_.name +
                                            "' was being made (this is rank " +
                                            options_.shown(rank_) + ")");
      }
      if (received == Received::kMessage) {
        const Fields fields = decode(packet.bytes);
        // Newlines became spaces on the way.
        if (word(fields, "say") == "apart") throw Apart{store_.get(kHubKey).value_or("")};
        if (word(fields, "say") != "fail") return packet;
        told(word(fields, "kind"), word(fields, "text"));
      }
      if (stopwatch_.over(kHubGrace))
        throw Error(Failure::kTimeout, "not all ranks joined within " + seconds(options_.timeout) +
                                           ", making group '" + options_.name + "' (this is rank " +
                                           options_.shown(rank_) + "; " + hub_name_ +
                                           " did not say which)");
      stopwatch_.turn(options_.shownAs(rank_),
                      [&] { return hub_name_ + " to say that all ranks are there"; });
      waitReadable({socket_.get()}, kTick);
    }
  }

  // Rank 0's error, which all ranks get.
  [[noreturn]] void told(const std::string& kind, const std::string& text) {
    told_ = true;
    failures().add(hub_socket_, rank_);
    throw Error(static_cast<Failure>(std::atoi(kind.c_str())), text);
  }

  void learn(Packet packet) {
    const Fields fields = decode(packet.bytes);
    const int64_t rank = number(fields, "rank");
    if (rank < 0 || rank >= size_ || packet.fds.empty())
      throw Error(Failure::kSetup, hub_name_ + " sent an entry that cannot be read");
    Member& member = table_.members[static_cast<size_t>(rank)];
    member.pid = static_cast<int>(number(fields, "pid"));
    member.host = word(fields, "host");
    if (rank != rank_)
      member.segment =
          Segment::attach(std::move(packet.fds[0]), Layout(table_.options, size_).bytes);
    if (packet.fds.size() > 1) member.process = shareProcessFd(std::move(packet.fds[1]));
  }

  Store& store_;
  const int rank_, size_;
  const GroupOptions& options_;
  Stopwatch stopwatch_;
  Fd socket_;
  const std::string hub_name_ = "rank " + options_.shown(0);
  std::string hub_socket_, secret_;
  std::string told_apart_;  // the hub that was told that this rank is on another host
  Membership table_;
  bool told_ = false;  // rank 0 knows, and has told everybody
};

}  // namespace

void noteFailure(const Apart& apart, int rank) {
  failures().add(word(decode(apart.entry), "socket"), rank);
}

Membership joinAsCaller(Store& store, int rank, int size, const GroupOptions& options) {
  return PeerHello(store, rank, size, options).run();
}

}  // namespace ringreduce
