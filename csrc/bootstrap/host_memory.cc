// The two sides of the exchange.
#include "bootstrap/host_memory.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "bootstrap/process.h"
#include "transport/shm/channel.h"

namespace ringreduce {
namespace {

constexpr size_t kMostReason = 3000;  // bytes of the reason of a failure in a packet
// Of the table of all members.
constexpr int kMembersPerPacket = kMostFds / 4;

std::string entryOf(const char* field, int rank) {
  return field + std::to_string(rank);
}

std::string leaderName(const LocalRanks& ranks) {
  return "rank " + ranks.options.shown(0);
}

std::string nameOfThis(const LocalRanks& ranks) {
  return "rank " + ranks.options.shown(ranks.rank) + " (pid " + std::to_string(getpid()) +
         " on host " + hostName() + ")";
}

// Of this rank; null where there are no pipes.
std::shared_ptr<Fd> doorbellOf(const LocalRanks& ranks) {
  if (!ranks.pipes) return nullptr;
  auto doorbell = std::make_shared<Fd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!*doorbell) throwErrno(Failure::kSetup, "no descriptors are left for a group's doorbells");
  return doorbell;
}

}  // namespace

Layout::Layout(const SharedOptions& options, int world_size, bool pipes) {
  const size_t slots = options.slot_bytes * static_cast<size_t>(options.slots);
  const auto P = static_cast<size_t>(world_size);
  // Not the kernel's pages, which may be larger: a segment is mapped as a whole.
  exchange = roundUp(sizeof(RankPage), 4096);
  link = exchange + slots;
  boxes = link + slots;
  rings = roundUp(boxes + P * sizeof(Box), 4096);
  pipe_boxes = rings + P * kRingBytes;
  pipe_rings = roundUp(pipe_boxes + P * sizeof(Box), 4096);
  bytes = pipes ? pipe_rings + P * kRingBytes : pipe_boxes;
}

Reason reasonOf(const std::exception_ptr& error, const std::string& who) {
  const std::string gave_up = who + " gave up making the group: ";
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return {known.kind(), known.what()};
  } catch (const std::exception& known) {  // the store's, or Ctrl-C
    return {Failure::kAborted, gave_up + known.what()};
  } catch (...) {
    return {Failure::kAborted, gave_up + "interrupted"};
  }
}

Failure kindOf(const Fields& fields) {
  const int64_t kind = number(fields, "kind");
  for (const Failure known : {Failure::kAborted, Failure::kTimeout, Failure::kPeerLost})
    if (kind == static_cast<int64_t>(known)) return known;
  return Failure::kSetup;
}

std::string reasonKey(const std::string& nonce) {
  return "ringreduce/" + nonce + "/failed";
}

std::string encode(const Reason& reason, int culprit) {
  return encode(Fields{{"kind", std::to_string(static_cast<int>(reason.kind))},
                       {"text", reason.text},
                       {"culprit", std::to_string(culprit)}});
}

std::string storeReason(Store& store, const std::string& key, const std::string& reason) {
  try {
    return store.setOnce(key, reason);
  } catch (const std::exception&) {  // it has no compare_set, or it is lost, as set() then says
  }
  try {
    if (const auto theirs = store.get(key)) return *theirs;
  } catch (const std::exception& error) {  // the reason matters more
    log(std::string("cannot see whether another rank has given up: ") + error.what());
  }
  store.set(key, reason);
  return reason;
}

namespace {

std::string readKey(const std::string& nonce, int rank) {
  return reasonKey(nonce) + "/" + std::to_string(rank);
}

}  // namespace

void confirmReason(Store& store, const std::string& nonce, int rank, const GroupOptions& options) {
  try {
    store.set(readKey(nonce, rank), "1");
  } catch (const std::exception& error) {  // the reason matters more
    log("rank " + options.shown(rank) + " cannot tell rank " + options.shown(0) +
        " that it knows why the group is not made: " + error.what());
  }
}

void awaitReaders(Store& store, const std::string& nonce, int size, const GroupOptions& options) {
  std::vector<int> readers;
  for (int r = 1; r < size; ++r) readers.push_back(r);
  try {
    size_t before = 0;
    do {
      before = readers.size();
      AttemptClock::await(
          [&] {
            std::erase_if(readers, [&](int r) {
              if (!store.get(readKey(nonce, r))) return false;
              store.remove(readKey(nonce, r));
              return true;
            });
            return readers.size() < before;
          },
          limits::kReadersTime);
    } while (!readers.empty() && readers.size() < before);
  } catch (const std::exception& error) {  // the reason matters more
    log("rank " + options.shown(0) + " cannot see whether " + options.rankList(readers) +
        " know why the group is not made: " + error.what());
  }
}

// ---- the leader

HostLeader::HostLeader(LocalRanks ranks, Check check)
    : ranks_(std::move(ranks)),
      check_(std::move(check)),
      joined_(static_cast<size_t>(ranks_.size)) {
  table_.options = ranks_.shared;
  table_.members.resize(joined_.size());
  joined_[0] = true;
  if (ranks_.size > 1) listener_ = listenAt(ranks_.socket, ranks_.size + 16);
}

HostMemory HostLeader::run(const Poll& poll, const std::function<void()>& all_there) {
  Member& self = table_.members[0];  // made while the other ranks come
  self.pid = static_cast<int>(getpid());
  self.host = hostName();
  try {
    self.segment = Segment::create(Layout(ranks_.shared, ranks_.size, ranks_.pipes).bytes);
    self.process = ownProcessFds();
    self.doorbell = doorbellOf(ranks_);
  } catch (const Error& error) {  // all ranks read it
    throw Error(error.kind(), nameOfThis(ranks_) + ": " + error.what());
  }
  if (ranks_.size > 1) {
    while (std::ranges::count(joined_, false) > 0) step(poll, "join");
    for (const Caller& caller : callers_)
      if (caller.rank > 0) sendTable(caller);
    all_there();  // while they map the memory
    while (!missing().empty()) step(poll, "map the memory");
    for (const Caller& caller : callers_)
      if (caller.rank > 0) tell(caller, {{"say", "go"}});
  }
  for (const Member& member : table_.members) member.segment->closeFd();
  return std::move(table_);
}

void HostLeader::sendAway() {
  acceptAll();
  for (const Caller& caller : callers_) sendPacket(caller.socket, encode(Fields{{"say", "away"}}));
  listener_.reset();
}

void HostLeader::fail(const Reason& reason) {
  try {
    acceptAll();
  } catch (const Error& error) {
    log(std::string("cannot tell all ranks why the group is not made: ") + error.what());
  }
  for (Caller& caller : callers_) tellFailure(caller, reason);
}

void HostLeader::failAll(const Reason& reason, const Poll& poll) {
  for (;; waitForCallers()) {
    acceptAll();
    for (Caller& caller : callers_) {
      Packet packet;
      if (!caller.proven && receivePacket(caller.socket, packet) == Received::kMessage)
        proves(caller, decode(packet.bytes));
      if (caller.proven && !caller.told) tellFailure(caller, reason);
    }
    const std::vector<int> late = missing();
    if (late.empty() || std::ranges::count(callers_, true, &Caller::told) >= ranks_.size - 1)
      return;
    poll(late, "join");
  }
}

void HostLeader::tellFailure(Caller& caller, const Reason& reason) {
  caller.told = true;
  sendPacket(caller.socket, encode({{"say", "fail"},
                                    {"kind", std::to_string(static_cast<int>(reason.kind))},
                                    {"text", reason.text.substr(0, kMostReason)}}));
}

// The ranks that are not as far as the others.
std::vector<int> HostLeader::missing() const {
  std::vector<int> ranks;
  for (int r = 1; r < ranks_.size; ++r)
    if (!joined_[static_cast<size_t>(r)]) ranks.push_back(r);
  if (!ranks.empty()) return ranks;
  for (const Caller& caller : callers_)
    if (caller.rank > 0 && !caller.ready) ranks.push_back(caller.rank);
  return ranks;
}

void HostLeader::waitForCallers() {
  std::vector<int> wanted{listener_.get()};
  for (const Caller& caller : callers_) wanted.push_back(caller.socket.get());
  waitReadable(wanted, clock_.pause(kMillisecond));
}

void HostLeader::step(const Poll& poll, const char* what) {
  waitForCallers();
  acceptAll();
  for (size_t i = 0; i < callers_.size();)
    if (receiveFrom(callers_[i]))
      ++i;
    else
      callers_.erase(callers_.begin() + static_cast<std::ptrdiff_t>(i));
  if (const std::vector<int> late = missing(); !late.empty()) poll(late, what);
}

void HostLeader::acceptAll() {
  while (listener_) {
    Fd socket = acceptFrom(listener_);
    if (!socket) return;
    const Peer peer = peerOf(socket);
    if (peer.uid == geteuid())
      callers_.push_back({.socket = std::move(socket), .peer = peer});
    else if (!strangers_++)
      log("a process of user id " + std::to_string(peer.uid) + " was refused");
  }
}

bool HostLeader::proves(Caller& caller, const Fields& fields) {
  caller.proven = sameSecret(fieldOf(fields, "secret"), ranks_.secret);
  if (!caller.proven && !strangers_++)
    log("a process that does not know the group's secret was refused");
  return caller.proven;
}

// False: forget this caller.
bool HostLeader::receiveFrom(Caller& caller) {
  Packet packet;
  switch (receivePacket(caller.socket, packet)) {
    case Received::kNothingYet:
      return true;
    case Received::kClosed:
      if (caller.rank < 0) return false;
      throw Error(Failure::kPeerLost, "rank " + nameOf(caller.rank) + " (pid " +
                                          std::to_string(caller.pid) + ") ended while group '" +
                                          ranks_.options.name + "' was being made");
    case Received::kMessage:
      break;
  }
  const Fields fields = decode(packet.bytes);
  if (!proves(caller, fields)) return false;
  if (fieldOf(fields, "say") == "ready")
    caller.ready = true;
  else if (fieldOf(fields, "say") == "fail")
    throw Error(kindOf(fields), fieldOf(fields, "text"));
  else
    admit(caller, fields, std::move(packet.fds));
  return true;
}

void HostLeader::admit(Caller& caller, const Fields& fields, std::vector<Fd> fds) {
  const int64_t rank = number(fields, "rank");
  const int64_t pid = number(fields, "pid");
  caller.pid = pid > 0 ? static_cast<int>(pid) : caller.peer.pid;
  const std::string host = fieldOf(fields, "host");
  if (check_) check_(static_cast<int>(rank), fields);
  if (rank <= 0 || rank >= ranks_.size || fds.size() != (ranks_.pipes ? 3 : 2))
    throw Error(Failure::kSetup, "rank " + nameOf(rank) + " (pid " + std::to_string(caller.pid) +
                                     ") is not a rank of a group of " +
                                     std::to_string(ranks_.size));
  Member& member = table_.members[static_cast<size_t>(rank)];
  if (joined_[static_cast<size_t>(rank)])
    throw Error(Failure::kSetup, "two processes claim rank " + nameOf(rank) + ": pid " +
                                     std::to_string(member.pid) + " on host " + member.host +
                                     ", and pid " + std::to_string(caller.pid) + " on host " +
                                     host);
  member.pid = caller.pid;
  member.host = host;
  member.segment =
      Segment::attach(std::move(fds[0]), Layout(ranks_.shared, ranks_.size, ranks_.pipes).bytes);
  member.process = {.pidfd = shareProcessFd(pidfdOf(caller.socket, caller.peer)),
                    .pipe = shareProcessFd(std::move(fds[1]))};
  if (ranks_.pipes) member.doorbell = std::make_shared<Fd>(std::move(fds[2]));
  caller.rank = static_cast<int>(rank);
  joined_[static_cast<size_t>(rank)] = true;
}

void HostLeader::tell(const Caller& caller, const Fields& fields, const std::vector<int>& fds) {
  if (!sendPacket(caller.socket, encode(fields), fds))
    throw Error(Failure::kPeerLost,
                "rank " + nameOf(caller.rank) + " (pid " + std::to_string(caller.pid) +
                    ") no longer listens while group '" + ranks_.options.name + "' is being made");
}

void HostLeader::sendTable(const Caller& caller) {
  for (int first = 0; first < ranks_.size; first += kMembersPerPacket) {
    Fields entries{{"say", "members"}};
    std::vector<int> fds;
    for (int r = first; r < std::min(first + kMembersPerPacket, ranks_.size); ++r) {
      const Member& member = table_.members[static_cast<size_t>(r)];
      fds.push_back(member.segment->fd());
      fds.push_back(member.process.pipe->get());
      if (member.doorbell) fds.push_back(member.doorbell->get());
      if (member.process.pidfd) fds.push_back(member.process.pidfd->get());
      entries[entryOf("pid", r)] = std::to_string(member.pid);
      entries[entryOf("host", r)] = member.host;
      entries[entryOf("fds", r)] =
          std::to_string(2 + (member.doorbell != nullptr) + (member.process.pidfd != nullptr));
    }
    tell(caller, entries, fds);
  }
}

// A rank's number in messages; the caller may have made it up.
std::string HostLeader::nameOf(int64_t rank) const {
  return rank >= 0 && rank < ranks_.size ? ranks_.options.shown(static_cast<int>(rank))
                                         : std::to_string(rank);
}

// ---- the other ranks

namespace {

class HostMember {
 public:
  HostMember(Fd socket, const LocalRanks& ranks, const std::function<void()>& poll)
      : socket_(std::move(socket)), ranks_(ranks), poll_(poll) {
    table_.options = ranks.shared;
    table_.members.resize(static_cast<size_t>(ranks.size));
  }

  std::optional<HostMemory> run(const std::function<void()>& all_there) {
    try {
      sendHello();
      for (int first = 0; first < ranks_.size; first += kMembersPerPacket) {
        Packet packet;
        if (!await(packet)) return std::nullopt;
        if (first == 0) all_there();
        take(std::move(packet), first);
      }
      sendPacket(socket_, encode({{"say", "ready"}, {"secret", ranks_.secret}}));
      Packet go;
      if (!await(go)) return std::nullopt;
    } catch (const LeaderClosed&) {
      throw;
    } catch (const Error& error) {
      // A leader that was stopped does not see that it is the late one.
      const bool is_known = error.kind() == Failure::kSetup || error.kind() == Failure::kAborted ||
                            error.kind() == Failure::kTimeout;
      if (told_ || !is_known) throw;
      if (error.kind() != Failure::kSetup) {  // its text names this rank
        sendFailure({error.kind(), error.what()});
        throw;
      }
      const Error named(error.kind(), nameOfThis(ranks_) + ": " + error.what());
      sendFailure({named.kind(), named.what()});
      Packet answer;
      await(answer);  // throws the error that all ranks get
      throw named;
    } catch (...) {  // Ctrl-C, or the store
      sendFailure(reasonOf(std::current_exception(), nameOfThis(ranks_)));
      throw;
    }
    for (const Member& member : table_.members) member.segment->closeFd();
    return std::move(table_);
  }

 private:
  void sendHello() {
    Member& self = table_.members[static_cast<size_t>(ranks_.rank)];
    self.segment = Segment::create(Layout(ranks_.shared, ranks_.size, ranks_.pipes).bytes);
    Fields hello = ranks_.entry;
    hello["say"] = "hello";
    hello["secret"] = ranks_.secret;
    hello["rank"] = std::to_string(ranks_.rank);
    hello["pid"] = std::to_string(getpid());
    hello["host"] = hostName();
    self.process = ownProcessFds();
    self.doorbell = doorbellOf(ranks_);
    std::vector<int> fds{self.segment->fd(), self.process.pipe->get()};
    if (self.doorbell) fds.push_back(self.doorbell->get());
    sendPacket(socket_, encode(hello), fds);  // if the leader is gone, the answer says so
  }

  void sendFailure(const Reason& reason) {
    sendPacket(socket_, encode({{"say", "fail"},
                                {"secret", ranks_.secret},
                                {"kind", std::to_string(static_cast<int>(reason.kind))},
                                {"text", reason.text.substr(0, kMostReason)}}));
  }

  // False if the leader sent this rank away.
  bool await(Packet& packet) {
    for (;;) {
      switch (receivePacket(socket_, packet)) {
        case Received::kClosed:
          throw LeaderClosed();
        case Received::kNothingYet:
          poll_();
          waitReadable({socket_.get()}, AttemptClock::kTick);
          continue;
        case Received::kMessage:
          break;
      }
      const Fields fields = decode(packet.bytes);
      if (fieldOf(fields, "say") == "away") return false;
      if (fieldOf(fields, "say") != "fail") return true;
      told_ = true;
      const auto kind = static_cast<Failure>(number(fields, "kind"));
      if (ranks_.optional && kind == Failure::kSetup)
        throw MemoryRefused(kind, fieldOf(fields, "text"));
      throw Error(kind, fieldOf(fields, "text"));
    }
  }

  // The entries of the ranks from `first` on.
  void take(Packet packet, int first) {
    const Fields fields = decode(packet.bytes);
    const int least = ranks_.pipes ? 3 : 2;
    auto fd = packet.fds.begin();
    for (int r = first; r < std::min(first + kMembersPerPacket, ranks_.size); ++r) {
      const int64_t fds = number(fields, entryOf("fds", r).c_str());
      if (fds < least || fds > least + 1 || packet.fds.end() - fd < fds)
        throw Error(Failure::kSetup, leaderName(ranks_) + " sent an entry that cannot be read");
      Member& member = table_.members[static_cast<size_t>(r)];
      member.pid = static_cast<int>(number(fields, entryOf("pid", r).c_str()));
      member.host = fieldOf(fields, entryOf("host", r).c_str());
      if (r != ranks_.rank)
        member.segment =
            Segment::attach(std::move(*fd), Layout(ranks_.shared, ranks_.size, ranks_.pipes).bytes);
      ++fd;
      member.process.pipe = shareProcessFd(std::move(*fd++));
      if (ranks_.pipes) {
        if (r != ranks_.rank) member.doorbell = std::make_shared<Fd>(std::move(*fd));
        ++fd;
      }
      member.process.pidfd = fds > least ? shareProcessFd(std::move(*fd++)) : nullptr;
    }
  }

  const Fd socket_;
  const LocalRanks& ranks_;
  const std::function<void()>& poll_;
  HostMemory table_;
  bool told_ = false;  // the error is the leader's
};

}  // namespace

void checkUser(const Fd& socket, const LocalRanks& ranks) {
  const Peer peer = peerOf(socket);
  if (peer.uid != geteuid())
    throw Error(Failure::kSetup, nameOfThis(ranks) + " runs as user id " +
                                     std::to_string(geteuid()) + ", " + leaderName(ranks) +
                                     " as user id " + std::to_string(peer.uid) +
                                     "; all ranks must run as the same user");
}

std::optional<HostMemory> joinLeader(Fd socket, const LocalRanks& ranks,
                                     const std::function<void()>& poll,
                                     const std::function<void()>& all_there) {
  return HostMember(std::move(socket), ranks, poll).run(all_there);
}

// ---- both, between ranks that know that they share a host

HostMemory shareMemory(const LocalRanks& ranks, const std::function<void(int late)>& poll) {
  const GroupOptions& options = ranks.options;
  if (ranks.rank == 0) {
    HostLeader leader(ranks);
    const auto wait = [&](const std::vector<int>& missing, const char*) { poll(missing.front()); };
    try {
      return leader.run(wait, [] {});
    } catch (...) {
      const Reason reason = reasonOf(std::current_exception(), leaderName(ranks));
      if (ranks.optional && reason.kind == Failure::kSetup) {
        leader.failAll(reason, wait);
        throw MemoryRefused(reason.kind, reason.text);
      }
      leader.fail(reason);
      throw;
    }
  }
  const auto wait = [&] { poll(0); };
  try {
    for (;; AttemptClock::sleep(kMillisecond)) {
      wait();
      Fd socket = connectTo(ranks.socket);
      if (!socket) continue;  // the leader does not listen yet
      checkUser(socket, ranks);
      if (auto host_memory = joinLeader(std::move(socket), ranks, wait, [] {}))
        return std::move(*host_memory);
    }
  } catch (const LeaderClosed&) {
    throw Error(Failure::kPeerLost, leaderName(ranks) + " ended while group '" + options.name +
                                        "' was being made (this is rank " +
                                        options.shown(ranks.rank) + ")");
  }
}

}  // namespace ringreduce
