// The hub (rank 0) and the callers (everybody else).
#include "group/rendezvous.h"

#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "group/process.h"
#include "group/text.h"
#include "group/unix_socket.h"
#include "plan/cut.h"
#include "wire/page.h"

namespace ringreduce {
namespace {

constexpr char kVersion[] = "1";  // of these messages and of the layout of shared memory
constexpr char kHubKey[] = "ringreduce/hub";
constexpr Nanos kTick = 50 * kMillisecond;  // how often what cannot wake us is looked at
// A store may hold an entry of an earlier run on another host; that long it may be mended.
constexpr Nanos kForeignGrace = 2 * kSecond;
// Rank 0 alone knows who is missing, so who has reached it leaves it that much time to say so.
constexpr Nanos kHubGrace = 3 * kSecond;

using Fields = std::map<std::string, std::string>;

std::string encode(const Fields& fields) {
  std::string text;
  for (const auto& [key, value] : fields) {
    text += key + '=';
    for (char c : value) text += c == '\n' ? ' ' : c;
    text += '\n';
  }
  return text;
}

Fields decode(const std::string& text) {
  Fields fields;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (const size_t at = line.find('='); at != std::string::npos)
      fields[line.substr(0, at)] = line.substr(at + 1);
  return fields;
}

int number(const Fields& fields, const char* key) {
  const auto found = fields.find(key);
  if (found == fields.end() || found->second.empty()) return -1;
  char* end = nullptr;
  const long value = std::strtol(found->second.c_str(), &end, 10);
  return *end || value < 0 || value > 1 << 30 ? -1 : static_cast<int>(value);
}

std::string word(const Fields& fields, const char* key) {
  const auto found = fields.find(key);
  return found == fields.end() ? "" : found->second;
}

std::string randomHex() {
  std::array<unsigned char, 32> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throwErrno(Failure::kSetup, "no random numbers to be had");
  std::string text;
  for (unsigned char byte : bytes)
    for (int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  return text;
}

bool sameSecret(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  int difference = 0;  // looks at every byte, so that time tells nothing
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

std::string hostName() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// Ranks can share memory through an abstract socket if they run under the same kernel and in the
// same network namespace.
std::string hostId() {
  std::string boot, line;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char ns[64] = {};
  if (readlink("/proc/self/ns/net", ns, sizeof ns - 1) < 0) ns[0] = 0;
  return boot + ns;
}

// What both sides share: the clock of the whole undertaking.
class Patience {
 public:
  explicit Patience(const GroupOptions& options)
      : options_(options), started_(now()), next_report_(started_ + options.stall) {}

  bool over(Nanos grace = 0) const { return waited() - grace >= options_.timeout; }
  Nanos waited() const { return now() - started_; }

  // Called on every turn of a waiting loop; `missing` says what is waited for.
  template <class Missing>
  void turn(int rank, Missing missing) {
    if (options_.interrupt) options_.interrupt();
    if (now() < next_report_) return;
    next_report_ = now() + std::max<Nanos>(waited(), kSecond);
    log("rank " + std::to_string(rank) + ", making group '" + options_.name + "', has waited " +
        seconds(waited()) + " for " + missing());
  }

 private:
  const GroupOptions& options_;
  const Nanos started_;
  Nanos next_report_;
};

class Hub {
 public:
  Hub(Store& store, int size, const GroupOptions& options)
      : store_(store), size_(size), options_(options), patience_(options), callers_() {
    shared_ = options.shared ? *options.shared : SharedOptions::fromEnvironment(size);
    shared_.validate();
    seats_.resize(static_cast<size_t>(size));
    table_.options = shared_;
    table_.members.resize(static_cast<size_t>(size));
  }

  Membership run() {
    Member& self = table_.members[0];
    self.pid = static_cast<int>(getpid());
    self.host = hostName();
    self.segment = Segment::create(segmentBytes(shared_));
    self.process = shareProcessFd(Fd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0))));
    if (size_ == 1) return std::move(table_);
    publish();
    try {
      while (missing() > 0) turn("join", [&] { return absentees() + " to join it"; });
      store_.remove(kHubKey);
      for (const Caller& caller : callers_)
        if (caller.rank > 0) sendTable(caller);
      while (unready() > 0) turn("get ready", [&] { return absentees() + " to map the memory"; });
      for (const Caller& caller : callers_)
        if (caller.rank > 0) sendPacket(caller.socket, encode({{"say", "go"}}));
    } catch (const Error& error) {
      giveUp(error.kind(), error.what());
      throw;
    } catch (const std::exception& error) {  // the store's, or Ctrl-C
      giveUp(Failure::kAborted, std::string("rank 0 gave up making the group: ") + error.what());
      throw;
    } catch (...) {
      giveUp(Failure::kAborted, "rank 0 gave up making the group: interrupted");
      throw;
    }
    return std::move(table_);
  }

 private:
  struct Caller {
    Fd socket;
    Peer peer;
    int rank = -1;  // not known yet
    bool ready = false;
  };

  void publish() {
    socket_ = "ringreduce-" + randomHex();
    secret_ = randomHex();
    listener_ = listenAt(socket_, size_ + 16);
    store_.set(kHubKey, encode({{"version", kVersion},
                                {"host_id", hostId()},
                                {"host", hostName()},
                                {"pid", std::to_string(getpid())},
                                {"socket", socket_},
                                {"secret", secret_},
                                {"size", std::to_string(size_)},
                                {"options", shared_.toText()}}));
  }

  // The error goes to all who have called; the store is left clean.
  void giveUp(Failure kind, const std::string& text) {
    for (const Caller& caller : callers_)
      sendPacket(caller.socket, encode({{"say", "fail"},
                                        {"kind", std::to_string(static_cast<int>(kind))},
                                        {"text", text.substr(0, 3000)}}));
    try {
      store_.remove(kHubKey);
      store_.remove(failureKey(socket_));
    } catch (const std::exception& error) {  // what is being reported matters more
      log(std::string("cannot clean up the store: ") + error.what());
    }
  }

  int missing() const {
    return static_cast<int>(std::count(seats_.begin() + 1, seats_.end(), false));
  }
  int unready() const {
    return static_cast<int>(std::count_if(callers_.begin(), callers_.end(),
                                          [](const Caller& c) { return c.rank > 0 && !c.ready; }));
  }
  // The ranks that are not as far as the others.
  std::string absentees() const {
    std::vector<int> ranks;
    for (int r = 1; r < size_; ++r)
      if (!seats_[static_cast<size_t>(r)]) ranks.push_back(r);
    if (ranks.empty())
      for (const Caller& caller : callers_)
        if (caller.rank > 0 && !caller.ready) ranks.push_back(caller.rank);
    return rankList(ranks);
  }

  template <class Missing>
  void turn(const char* verb, Missing missing) {
    std::vector<int> wanted{listener_.get()};
    for (const Caller& caller : callers_) wanted.push_back(caller.socket.get());
    waitReadable(wanted, kTick);
    patience_.turn(0, missing);
    while (Fd socket = acceptFrom(listener_)) greet(std::move(socket));
    for (size_t i = 0; i < callers_.size();)
      if (hear(callers_[i]))
        ++i;
      else
        callers_.erase(callers_.begin() + static_cast<std::ptrdiff_t>(i));
    if (const auto text = store_.get(failureKey(socket_))) throw Error(Failure::kSetup, *text);
    if (patience_.over())
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
  bool hear(Caller& caller) {
    Packet packet;
    switch (receivePacket(caller.socket, packet)) {
      case Received::kNothingYet:
        return true;
      case Received::kClosed:
        if (caller.rank < 0) return false;
        throw Error(Failure::kPeerLost, "rank " + std::to_string(caller.rank) + " (pid " +
                                            std::to_string(caller.peer.pid) +
                                            ") ended while group '" + options_.name +
                                            "' was being made");
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

  void admit(Caller& caller, const Fields& fields, std::vector<Fd> fds) {
    const int rank = number(fields, "rank"), size = number(fields, "size");
    const std::string who =
        "rank " + std::to_string(rank) + " (pid " + std::to_string(caller.peer.pid) + ")";
    if (word(fields, "version") != kVersion)
      throw Error(Failure::kSetup, who +
                                       " runs another version of ringreduce than rank 0; install "
                                       "the same one for all ranks");
    if (size != size_)
      throw Error(Failure::kSetup, "world size mismatch: " + who + " was started with world size " +
                                       std::to_string(size) + ", rank 0 with " +
                                       std::to_string(size_));
    if (rank <= 0 || rank >= size_ || fds.size() != 1)
      throw Error(Failure::kSetup, who + " is not a rank of a group of " + std::to_string(size_));
    if (seats_[static_cast<size_t>(rank)])
      throw Error(Failure::kSetup,
                  "two processes claim rank " + std::to_string(rank) + ": pid " +
                      std::to_string(table_.members[static_cast<size_t>(rank)].pid) + " and pid " +
                      std::to_string(caller.peer.pid));
    Member& member = table_.members[static_cast<size_t>(rank)];
    member.pid = caller.peer.pid;
    member.host = word(fields, "host");
    member.segment = Segment::attach(std::move(fds[0]), segmentBytes(shared_));
    member.process = shareProcessFd(pidfdOf(caller.socket, caller.peer));
    caller.rank = rank;
    seats_[static_cast<size_t>(rank)] = true;
  }

  void sendTable(const Caller& caller) {
    for (int r = 0; r < size_; ++r) {
      const Member& member = table_.members[static_cast<size_t>(r)];
      std::vector<int> fds{member.segment->fd()};
      if (member.process && *member.process) fds.push_back(member.process->get());
      sendPacket(caller.socket,
                 encode({{"say", "member"},
                         {"rank", std::to_string(r)},
                         {"pid", std::to_string(member.pid)},
                         {"host", member.host}}),
                 fds);
    }
  }

 public:
  static std::string failureKey(const std::string& socket) { return "ringreduce/failed/" + socket; }

 private:
  Store& store_;
  const int size_;
  const GroupOptions& options_;
  SharedOptions shared_;
  Patience patience_;
  std::string socket_, secret_;
  Fd listener_;
  std::vector<Caller> callers_;
  std::vector<bool> seats_;  // taken, by rank
  Membership table_;
  int strangers_ = 0;
};

class CallerSide {
 public:
  CallerSide(Store& store, int rank, int size, const GroupOptions& options)
      : store_(store), rank_(rank), size_(size), options_(options), patience_(options) {}

  Membership run() {
    const Fields hub = findHub();
    const Peer peer = peerOf(socket_);
    if (peer.uid != geteuid())
      refuse(hub, "runs as user id " + std::to_string(geteuid()) + ", rank 0 as user id " +
                      std::to_string(peer.uid) + "; all ranks must run as the same user");
    if (word(hub, "version") != kVersion)
      refuse(hub, "runs another version of ringreduce than rank 0; install the same one for all");
    table_.options = SharedOptions::fromText(word(hub, "options"));
    table_.members.resize(static_cast<size_t>(size_));
    secret_ = word(hub, "secret");
    Member& self = table_.members[static_cast<size_t>(rank_)];
    self.segment = Segment::create(segmentBytes(table_.options));
    sendPacket(socket_,
               encode({{"say", "hello"},
                       {"secret", secret_},
                       {"version", kVersion},
                       {"rank", std::to_string(rank_)},
                       {"size", std::to_string(size_)},
                       {"host", hostName()}}),
               {self.segment->fd()});
    try {
      for (int known = 0; known < size_; ++known) learn(awaitPacket());
    } catch (const Error& error) {
      if (error.kind() != Failure::kSetup || told_) throw;
      sendPacket(socket_, encode({{"say", "fail"}, {"secret", secret_}, {"text", error.what()}}));
      awaitPacket();  // rank 0 answers with the error that all ranks get
      throw;
    }
    sendPacket(socket_, encode({{"say", "ready"}, {"secret", secret_}}));
    awaitPacket();  // "go"
    return std::move(table_);
  }

 private:
  // Tells rank 0 through the store, since this process cannot talk to it, and throws.
  [[noreturn]] void refuse(const Fields& hub, const std::string& why) {
    const std::string text = "rank " + std::to_string(rank_) + " (pid " + std::to_string(getpid()) +
                             " on host " + hostName() + ") " + why;
    store_.set(Hub::failureKey(word(hub, "socket")), text);
    throw Error(Failure::kSetup, text);
  }

  // Waits for an entry in the store that somebody answers for, and connects.
  Fields findHub() {
    std::string seen;
    Nanos seen_at = 0;
    for (Nanos pause = kMillisecond;; pause = std::min(2 * pause, kTick)) {
      const auto text = store_.get(kHubKey);
      const Fields hub = decode(text.value_or(""));
      if (text) {
        if (*text != seen) {
          seen = *text;
          seen_at = now();
        }
        if (word(hub, "host_id") == hostId()) {
          socket_ = connectTo(word(hub, "socket"));
          if (socket_) return hub;
        } else if (now() - seen_at > kForeignGrace) {
          refuse(hub, "cannot share memory with rank 0 on host " + word(hub, "host") +
                          ": groups that span hosts are not built yet; use gloo or nccl for them");
        }
      }
      if (patience_.over()) notFound(text.has_value(), hub);
      patience_.turn(rank_, [] { return std::string("rank 0 to publish its address"); });
      std::this_thread::sleep_for(std::chrono::nanoseconds(pause));
    }
  }

  [[noreturn]] void notFound(bool stale, const Fields& hub) {
    std::string text = "rank 0 did not publish its address within " + seconds(options_.timeout) +
                       ", making group '" + options_.name + "' (this is rank " +
                       std::to_string(rank_) + ")";
    if (stale)
      text += "; the store holds an entry of an earlier run, by pid " + word(hub, "pid") +
              " on host " + word(hub, "host") + ", which no longer answers";
    throw Error(Failure::kTimeout, text);
  }

  Packet awaitPacket() {
    for (;;) {
      Packet packet;
      const Received received = receivePacket(socket_, packet);
      if (received == Received::kClosed)
        throw Error(Failure::kPeerLost, "rank 0 ended while group '" + options_.name +
                                            "' was being made (this is rank " +
                                            std::to_string(rank_) + ")");
      if (received == Received::kMessage) {
        const Fields fields = decode(packet.bytes);
        if (word(fields, "say") != "fail") return packet;
        told_ = true;
        throw Error(static_cast<Failure>(number(fields, "kind")), word(fields, "text"));
      }
      if (patience_.over(kHubGrace))
        throw Error(Failure::kTimeout, "not all ranks joined within " + seconds(options_.timeout) +
                                           ", making group '" + options_.name + "' (this is rank " +
                                           std::to_string(rank_) + "; rank 0 did not say which)");
      patience_.turn(rank_, [] { return std::string("rank 0 to say that all ranks are there"); });
      waitReadable({socket_.get()}, kTick);
    }
  }

  void learn(Packet packet) {
    const Fields fields = decode(packet.bytes);
    const int rank = number(fields, "rank");
    if (rank < 0 || rank >= size_ || packet.fds.empty())
      throw Error(Failure::kSetup, "rank 0 sent an entry that cannot be read");
    Member& member = table_.members[static_cast<size_t>(rank)];
    member.pid = number(fields, "pid");
    member.host = word(fields, "host");
    if (rank != rank_)
      member.segment = Segment::attach(std::move(packet.fds[0]), segmentBytes(table_.options));
    if (packet.fds.size() > 1) member.process = shareProcessFd(std::move(packet.fds[1]));
  }

  Store& store_;
  const int rank_, size_;
  const GroupOptions& options_;
  Patience patience_;
  Fd socket_;
  std::string secret_;
  Membership table_;
  bool told_ = false;  // rank 0 knows, and has told everybody
};

}  // namespace

size_t segmentBytes(const SharedOptions& options) {
  // The exchange's slots and the inbound link's.
  return roundUp(sizeof(Page), 4096) + 2 * options.slot_bytes * static_cast<size_t>(options.slots);
}

Membership join(Store& store, int rank, int size, const GroupOptions& options) {
  Membership membership =
      rank == 0 ? Hub(store, size, options).run() : CallerSide(store, rank, size, options).run();
  for (const Member& member : membership.members) member.segment->closeFd();
  return membership;
}

}  // namespace ringreduce
