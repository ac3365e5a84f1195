// Ranks that are threads of this process, over TCP on loopback: no handshake, and a WaitGuard that
// knows only a deadline and disagreement.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "check.h"
#include "collectives/stream_communicator.h"
#include "ranks.h"
#include "transport/tcp/stream.h"
#include "transport/tcp/tcp_transport.h"

namespace tcp_world {

using namespace ringreduce;

// Two ends of a connection over TCP.
struct TcpPair {
  Fd dialled, accepted;
};

inline TcpPair tcpPair() {
  const Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener.get(), generic, length) == 0 && listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), generic, &length) == 0);
  TcpPair pair{.dialled = Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), .accepted = {}};
  CHECK(connect(pair.dialled.get(), generic, length) == 0);
  pair.accepted = Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(static_cast<bool>(pair.accepted));
  const int on = 1;
  for (const Fd* end : {&pair.dialled, &pair.accepted})
    setsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return pair;
}

// A frame as it goes over a connection, with so many bytes in it.
inline std::vector<unsigned char> framed(net::Frame frame, size_t payload) {
  std::vector<unsigned char> raw(sizeof frame + payload, 7);
  std::memcpy(raw.data(), &frame, sizeof frame);
  return raw;
}

class TestWatch final : public WaitGuard {
 public:
  TestWatch(const std::atomic<bool>& failed, Nanos deadline)
      : failed_(failed), deadline_(deadline) {}
  bool failed() const override { return failed_; }
  void poll(int rank, Ready ready) override {
    if (failed_) throw Error(Failure::kAborted, "another rank failed");
    if (now() > deadline_ && !ready())
      throw Error(Failure::kTimeout, "rank " + std::to_string(rank) + " did not come");
  }
  void verify(int) override {}
  void verify(int rank, const OpSignature& theirs) override {
    if (theirs != own)
      throw Error(Failure::kMismatch, "rank " + std::to_string(rank) + " called another operation");
  }
  void idle(Ready ready) override {
    if (hopeless && !ready()) throw Error(Failure::kPeerLost, "a third rank is lost");
  }
  PeerState stateOf(int) const override { return state; }
  bool isAbsent(int) const override { return false; }
  [[noreturn]] void endOperation(int) override { throw std::runtime_error("no rank is absent"); }
  void broken(int rank, const std::string& how) override {
    throw Error(Failure::kPeerLost, "rank " + std::to_string(rank) + ": " + how);
  }
  void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override {
    throw Error(Failure::kMismatch, "rank " + std::to_string(sender) + " gives rank " +
                                        std::to_string(receiver) + " " + std::to_string(sent) +
                                        " elements, which expects " + std::to_string(expected));
  }

  OpSignature own;
  std::atomic<PeerState> state = PeerState{};  // of all the others
  std::atomic<bool> hopeless = false;          // a wait in which nothing moves is to end

 private:
  const std::atomic<bool>& failed_;
  const Nanos deadline_;
};

// One rank: what an operation needs around it.
class OneRank {
 public:
  OneRank(int rank, int size, const std::atomic<bool>& failed, net::Dial dial,
          const TcpOptions& tcp, Nanos timeout, const StreamOptions& options = {})
      : watch_(failed, deadlineIn(timeout)),
        transport_(rank, size, watch_, std::move(dial), tcp),
        communicator_(transport_, watch_, options) {}

  TcpTransport& transport() { return transport_; }
  StreamCommunicator& communicator() { return communicator_; }
  TestWatch& watch() { return watch_; }
  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }

  // Runs one operation, announced as `kind` of `count` elements.
  void operation(const std::function<void(Transport&)>& body, Kind kind = Kind::kAllReduce,
                 uint64_t count = 0) {
    OpSignature own = watch_.own;
    own.kind = kind;
    own.count = count;
    announce(own, body);
  }
  // The same, announced as this.
  void announce(const OpSignature& own, const std::function<void(Transport&)>& body) {
    watch_.own = own;
    communicator_.begin(watch_.own);
    body(transport_);
    transport_.finish();
    ++watch_.own.sequence;
  }

 private:
  TestWatch watch_;
  TcpTransport transport_;
  StreamCommunicator communicator_;
};

// Runs body in a thread for each of `size` ranks; throws the first error.
inline void overTcp(int size, const std::function<void(OneRank&)>& body, const TcpOptions& tcp = {},
                    Nanos timeout = 60 * kSecond, const StreamOptions& options = {}) {
  std::atomic<bool> failed = false;
  // After a failure connections may still be under way to ranks that are no more.
  std::mutex door;
  bool closed = false;
  std::vector<std::unique_ptr<OneRank>> members(static_cast<size_t>(size));
  struct Closing {
    std::mutex& door;
    bool& closed;
    ~Closing() {
      const std::lock_guard lock(door);
      closed = true;
    }
  } const closing{door, closed};
  for (int r = 0; r < size; ++r)
    members[static_cast<size_t>(r)] = std::make_unique<OneRank>(
        r, size, failed,
        [&members, &door, &closed, r](int to, int, const std::function<void()>&) {
          TcpPair pair = tcpPair();
          const std::lock_guard lock(door);
          if (closed) throw Error(Failure::kAborted, "the test is over");
          members[static_cast<size_t>(to)]->transport().accept(r, std::move(pair.accepted));
          return std::move(pair.dialled);
        },
        tcp, timeout, options);
  std::mutex mutex;
  std::exception_ptr first;  // the others' errors may be its consequences
  ranks::inThreads(size, [&](int r) {
    try {
      body(*members[static_cast<size_t>(r)]);
    } catch (const std::exception&) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      failed = true;
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace tcp_world
