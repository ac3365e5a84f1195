// Rank 0's side of the rendezvous: publishes where it listens, gathers the ranks, hands the table
// out.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/meeting.h"
#include "bootstrap/process.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/unix_socket.h"

namespace ringreduce {

// For ranks that come later.
void leaveFailure(Store& store, const std::string& socket, Failure kind, const std::string& text) {
  try {
    store.set(kHubKey, encode({{"failed", text},
                               {"kind", std::to_string(static_cast<int>(kind))},
                               {"socket", socket},
                               {"time", std::to_string(std::time(nullptr))}}));
    store.remove(failureKey(socket));
  } catch (const std::exception& error) {  // what is being reported matters more
    log(std::string("cannot leave the reason in the store: ") + error.what());
  }
}

namespace {

class Hub {
 public:
  Hub(Store& store, int size, const GroupOptions& options)
      : store_(store), size_(size), options_(options), stopwatch_(options) {
    seats_.resize(static_cast<size_t>(size));
    table_.members.resize(static_cast<size_t>(size));
  }

  Membership run() {
    try {
      prepare();
      prepared_ = true;
      if (size_ > 1) gather();
    } catch (const Apart&) {
      throw;
    } catch (const Error& error) {
      // What this process itself met does not say whose it was.
      const Error named(error.kind(), prepared_ ? error.what()
                                                : hubName() + " (pid " + std::to_string(getpid()) +
                                                      "): " + error.what());
      giveUp(named.kind(), named.what());
      throw named;
    } catch (...) {
      const Reason reason = reasonOf(std::current_exception(), hubName());
      giveUp(reason.kind, reason.text);
      throw;
    }
    return std::move(table_);
  }

 private:
  struct PeerHello {
    Fd socket;
    Peer peer;
    int pid = 0;    // as it calls itself
    int rank = -1;  // not known yet
    bool ready = false;
  };

  void prepare() {
    socket_ = "ringreduce-" + randomHex();
    secret_ = randomHex();
    SharedOptions& shared = table_.options;
    shared = options_.shared ? *options_.shared : SharedOptions::fromEnvironment(size_);
    shared.validate();
    Member& self = table_.members[0];
    self.pid = static_cast<int>(getpid());
    self.host = hostName();
    self.segment = Segment::create(Layout(shared, size_).bytes);
    self.process = shareProcessFd(Fd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0))));
  }

  void gather() {
    if (!options_.together && forcesSockets()) partWays();
    listener_ = listenAt(socket_, size_ + 16);
    store_.set(kHubKey, encode({{"version", kVersion},
                                {"host_id", hostId()},
                                {"host", hostName()},
                                {"pid", std::to_string(getpid())},
                                {"socket", socket_},
                                {"secret", secret_},
                                {"options", table_.options.toText()}}));
    while (missing() > 0) turn("join", [&] { return absentees() + " to join it"; });
    store_.remove(kHubKey);
    for (const PeerHello& caller : callers_)
      if (caller.rank > 0) sendTable(caller);
    while (unready() > 0) turn("get ready", [&] { return absentees() + " to map the memory"; });
    for (const PeerHello& caller : callers_)
      if (caller.rank > 0) tell(caller, {{"say", "go"}});
  }

  // All are to meet, since not all share memory.
  [[noreturn]] void partWays() {
    const std::string entry = encode({{"apart", "1"}, {"socket", socket_}});
    store_.set(kHubKey, entry);
    while (listener_) {
      Fd socket = acceptFrom(listener_);
      if (!socket) break;
      greet(std::move(socket));
    }
    for (const PeerHello& caller : callers_)
      sendPacket(caller.socket, encode(Fields{{"say", "apart"}}));
    throw Apart{entry};
  }

  // The error goes to all who have called, and into the store for those who will.
  void giveUp(Failure kind, const std::string& text) {
    if (size_ == 1) return;
    const std::string kind_number = std::to_string(static_cast<int>(kind));
    try {
      while (listener_) {
        Fd socket = acceptFrom(listener_);
        if (!socket) break;
        greet(std::move(socket));
      }
    } catch (const Error& error) {  // those find the reason in the store
      log(std::string("cannot tell all ranks: ") + error.what());
    }
    for (const PeerHello& caller : callers_)
      sendPacket(caller.socket,
                 encode({{"say", "fail"}, {"kind", kind_number}, {"text", text.substr(0, 3000)}}));
    leaveFailure(store_, socket_, kind, text);
  }

  void tell(const PeerHello& caller, const Fields& fields, const std::vector<int>& fds = {}) {
    if (!sendPacket(caller.socket, encode(fields), fds))
      throw Error(Failure::kPeerLost,
                  "rank " + options_.shown(caller.rank) + " (pid " + std::to_string(caller.pid) +
                      ") no longer listens while group '" + options_.name + "' is being made");
  }

  int missing() const {
    return static_cast<int>(std::count(seats_.begin() + 1, seats_.end(), false));
  }
  int unready() const {
    return static_cast<int>(std::count_if(callers_.begin(), callers_.end(), [](const PeerHello& c) {
      return c.rank > 0 && !c.ready;
    }));
  }
  // The ranks that are not as far as the others.
  std::string absentees() const {
    std::vector<int> ranks;
    for (int r = 1; r < size_; ++r)
      if (!seats_[static_cast<size_t>(r)]) ranks.push_back(r);
    if (ranks.empty())
      for (const PeerHello& caller : callers_)
        if (caller.rank > 0 && !caller.ready) ranks.push_back(caller.rank);
    return rankList(options_.shownAs(ranks));
  }

  template <class Missing>
  void turn(const char* verb, Missing missing) {
    std::vector<int> wanted{listener_.get()};
    for (const PeerHello& caller : callers_) wanted.push_back(caller.socket.get());
    waitReadable(wanted, kTick);
    stopwatch_.turn(options_.shownAs(0), missing);
    while (Fd socket = acceptFrom(listener_)) greet(std::move(socket));
    for (size_t i = 0; i < callers_.size();)
      if (hear(callers_[i]))
        ++i;
      else
        callers_.erase(callers_.begin() + static_cast<std::ptrdiff_t>(i));
    if (store_.get(apartKey(socket_))) {
      store_.remove(apartKey(socket_));
      partWays();
    }
    if (const auto text = store_.get(failureKey(socket_))) throw Error(Failure::kSetup, *text);
    if (stopwatch_.over())
      throw Error(Failure::kTimeout, absentees() + " of " + std::to_string(size_) + " did not " +
                                         verb + " within " + seconds(options_.timeout) +
                                         ", making group '" + options_.name + "'");
  }

  void greet(Fd socket) {
    const Peer peer = peerOf(socket);
    if (peer.uid != geteuid()) {
      if (!strangers_++) log("a process of user id " + std::to_string(peer.uid) + " was refused");
      return;
    }
    callers_.push_back({.socket = std::move(socket), .peer = peer});
  }

  // False: forget this caller.
  bool hear(PeerHello& caller) {
    Packet packet;
    switch (receivePacket(caller.socket, packet)) {
      case Received::kNothingYet:
        return true;
      case Received::kClosed:
        if (caller.rank < 0) return false;
        throw Error(Failure::kPeerLost, "rank " + options_.shown(caller.rank) + " (pid " +
                                            std::to_string(caller.pid) + ") ended while group '" +
                                            options_.name + "' was being made");
      case Received::kMessage:
        break;
    }
    const Fields fields = decode(packet.bytes);
    if (!sameSecret(word(fields, "secret"), secret_)) {
      if (!strangers_++) log("a process that does not know the group's secret was refused");
      return false;
    }
    if (word(fields, "say") == "ready")
      caller.ready = true;
    else if (word(fields, "say") == "fail")
      throw Error(Failure::kSetup, word(fields, "text"));
    else
      admit(caller, fields, std::move(packet.fds));
    return true;
  }

  void admit(PeerHello& caller, const Fields& fields, std::vector<Fd> fds) {
    const int64_t rank = number(fields, "rank"), size = number(fields, "size");
    const int64_t pid = number(fields, "pid");  // none from another version
    caller.pid = pid > 0 ? static_cast<int>(pid) : caller.peer.pid;
    const std::string who = "rank " + nameOf(rank) + " (pid " + std::to_string(caller.pid) + ")";
    if (word(fields, "version") != kVersion)
      throw Error(Failure::kSetup, who + " runs another version of ringreduce than " + hubName() +
                                       "; install "
                                       "the same one for all ranks");
    if (size != size_)
      throw Error(Failure::kSetup, "world size mismatch: " + who + " was started with world size " +
                                       std::to_string(size) + ", " + hubName() + " with " +
                                       std::to_string(size_));
    if (rank <= 0 || rank >= size_ || fds.size() != 1)
      throw Error(Failure::kSetup, who + " is not a rank of a group of " + std::to_string(size_));
    if (seats_[static_cast<size_t>(rank)])
      throw Error(Failure::kSetup,
                  "two processes claim rank " + nameOf(rank) + ": pid " +
                      std::to_string(table_.members[static_cast<size_t>(rank)].pid) + " on host " +
                      table_.members[static_cast<size_t>(rank)].host + ", and pid " +
                      std::to_string(caller.pid) + " on host " + word(fields, "host"));
    Member& member = table_.members[static_cast<size_t>(rank)];
    member.pid = caller.pid;
    member.host = word(fields, "host");
    member.segment = Segment::attach(std::move(fds[0]), Layout(table_.options, size_).bytes);
    member.process = shareProcessFd(pidfdOf(caller.socket, caller.peer));
    caller.rank = static_cast<int>(rank);
    seats_[static_cast<size_t>(rank)] = true;
  }

  // This rank, 0 of the group.
  std::string hubName() const { return "rank " + options_.shown(0); }

  // Of a rank as it says it is, which may be none of this group's.
  std::string nameOf(int64_t rank) const {
    return rank >= 0 && rank < size_ ? options_.shown(static_cast<int>(rank))
                                     : std::to_string(rank);
  }

  void sendTable(const PeerHello& caller) {
    for (int r = 0; r < size_; ++r) {
      const Member& member = table_.members[static_cast<size_t>(r)];
      std::vector<int> fds{member.segment->fd()};
      if (member.process && *member.process) fds.push_back(member.process->get());
      tell(caller,
           {{"say", "member"},
            {"rank", std::to_string(r)},
            {"pid", std::to_string(member.pid)},
            {"host", member.host}},
           fds);
    }
  }

  Store& store_;
  const int size_;
  const GroupOptions& options_;
  Stopwatch stopwatch_;
  std::string socket_, secret_;
  Fd listener_;
  std::vector<PeerHello> callers_;
  std::vector<bool> seats_;  // taken, by rank
  Membership table_;
  int strangers_ = 0;
  bool prepared_ = false;
};

}  // namespace

Membership joinAsHub(Store& store, int size, const GroupOptions& options) {
  return Hub(store, size, options).run();
}

}  // namespace ringreduce
