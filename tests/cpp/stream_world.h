// Ranks that are threads of this process, over the transport of any fabric: no handshake, and a
// WaitGuard that knows only a deadline and disagreement.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/over_streams.h"
#include "ranks.h"
#include "transport/fabric.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace stream_world {

using namespace ringreduce;

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
  void verify(int rank, const Announcement& theirs) override {
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

  Announcement own;
  std::atomic<PeerState> state = PeerState{};  // of all the others
  std::atomic<bool> hopeless = false;          // a wait in which nothing moves is to end

 private:
  const std::atomic<bool>& failed_;
  const Nanos deadline_;
};

// One rank: what an operation needs around it.
class OneRank {
 public:
  OneRank(int rank, int size, const std::atomic<bool>& failed, std::unique_ptr<Fabric> fabric,
          Nanos timeout, const StreamOptions& options = {})
      : watch_(failed, deadlineIn(timeout)),
        fabric_(std::move(fabric)),
        transport_(fabric_->make(rank, size, watch_)),
        over_(*transport_, watch_, options) {}

  Fabric& fabric() { return *fabric_; }
  Transport& transport() { return *transport_; }
  OverStreams& over() { return over_; }
  TestWatch& watch() { return watch_; }
  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

  // Runs one operation, announced as `kind` of `count` elements.
  void operation(const std::function<void(Transport&)>& body, Kind kind = Kind::kAllReduce,
                 uint64_t count = 0) {
    Announcement own = watch_.own;
    own.kind = kind;
    own.count = count;
    announce(own, body);
  }
  // The same, announced as this.
  void announce(const Announcement& own, const std::function<void(Transport&)>& body) {
    watch_.own = own;
    over_.begin(watch_.own);
    body(*transport_);
    transport_->finish();
    ++watch_.own.sequence;
  }

 private:
  TestWatch watch_;
  const std::unique_ptr<Fabric> fabric_;
  const std::unique_ptr<Transport> transport_;
  OverStreams over_;
};

class World {
 public:
  // Each rank has a fabric of its own.
  using FabricOf = std::function<std::unique_ptr<Fabric>(World&, int rank)>;
  World(int size, const FabricOf& fabricOf, Nanos timeout, const StreamOptions& options) {
    for (int r = 0; r < size; ++r)
      members_.push_back(
          std::make_unique<OneRank>(r, size, failed_, fabricOf(*this, r), timeout, options));
  }
  // After a failure connections may still be under way to ranks that are no more.
  ~World() {
    const std::lock_guard lock(door_);
    closed_ = true;
  }

  // Hands rank `to` a connection that rank `from` has made.  From any thread.
  void deliver(int from, int to, net::Socket socket) {
    const std::lock_guard lock(door_);
    if (closed_) throw Error(Failure::kAborted, "the test is over");
    members_[static_cast<size_t>(to)]->fabric().accept(from, std::move(socket));
  }

  // Runs body in a thread for each rank; throws the first error.
  void run(const std::function<void(OneRank&)>& body) {
    std::mutex mutex;
    std::exception_ptr first;  // the others' errors may be its consequences
    ranks::inThreads(static_cast<int>(members_.size()), [&](int r) {
      try {
        body(*members_[static_cast<size_t>(r)]);
      } catch (const std::exception&) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
        failed_ = true;
      }
    });
    if (first) std::rethrow_exception(first);
  }

 private:
  std::atomic<bool> failed_ = false;
  std::mutex door_;
  bool closed_ = false;
  std::vector<std::unique_ptr<OneRank>> members_;
};

}  // namespace stream_world
