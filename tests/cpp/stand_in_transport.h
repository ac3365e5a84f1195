// A transport between threads of one process: bytes are copied from memory to memory.  It keeps the
// contract of transport/transport.h and is as hard on collectives as that allows:
//
//   - lent memory is read late, and must not have changed since
//   - arriving bytes are written as soon as they have a destination, by any thread
//   - buffers are few, on both sides; small pieces move, in any order between ranks
//   - where no rank can go on, all throw "deadlock"; what was expected must have been taken
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "stream_cases.h"
#include "stream_world.h"
#include "transport/transport.h"

namespace stand_in {

using namespace ringreduce;

struct Hardness {
  size_t buffers_out = Transport::kWindow;  // of each rank, for each other
  size_t buffers_in = 2;
  uint32_t seed = 1;
};

class Net {
 public:
  Net(int size, Hardness hardness)
      : size_(size),
        hardness_(hardness),
        random_(hardness.seed),
        streams_(static_cast<size_t>(size * size)),
        ranks_(static_cast<size_t>(size)) {}

  struct Outgoing {
    const std::byte* data;  // lent
    std::vector<std::byte> copy;
    size_t sent = 0;
    bool buffer = false;
    bool announces = false;
    Opening opening = {};
  };
  struct Place {
    std::byte* data;
    std::vector<std::byte> own;
    size_t bytes;
    size_t filled = 0;
    bool announces = false, there = false;
  };
  struct Stream {
    std::deque<Outgoing> out;
    std::deque<Place> in;
    std::deque<Opening> announced;  // that arrived
    bool sender_announced = false, receiver_expects = false;
    std::atomic<uint64_t> arrived = 0;  // bytes
  };

  Stream& stream(int from, int to) { return streams_[static_cast<size_t>(from * size_ + to)]; }

  // Moves up to `most` bytes of what a stream has; returns whether anything moved.
  bool move(Stream& s, size_t most) {
    // What is empty needs no place, and no bytes.
    if (!s.out.empty() && !s.out.front().announces && s.out.front().copy.empty()) {
      s.out.pop_front();
      return true;
    }
    size_t held = 0;
    for (Place& place : s.in) {
      if (!place.own.empty() && ++held > hardness_.buffers_in) return false;
      if (place.there) continue;
      if (!place.announces && place.bytes == 0) return place.there = true;
      if (s.out.empty()) return false;
      Outgoing& out = s.out.front();
      if (out.announces != place.announces) throw std::runtime_error("an announcement meets data");
      if (out.announces) {
        s.announced.push_back(out.opening);
        s.out.pop_front();
        return place.there = true;
      }
      const size_t n = std::min({most, out.copy.size() - out.sent, place.bytes - place.filled});
      if (std::memcmp(out.data + out.sent, out.copy.data() + out.sent, n) != 0)
        throw std::runtime_error("memory was written while it was lent");
      std::memcpy(place.data + place.filled, out.data + out.sent, n);
      out.sent += n;
      s.arrived += n;
      place.filled += n;
      place.there = place.filled == place.bytes;
      if (out.sent == out.copy.size()) s.out.pop_front();
      return true;
    }
    return false;
  }

  // A little, of anybody's.
  void moveAnything() {
    const int from = static_cast<int>(random_() % static_cast<uint32_t>(size_)),
              to = static_cast<int>(random_() % static_cast<uint32_t>(size_));
    tryMove(from, to);
  }
  // Something has happened that concerns a rank.
  void changed(int rank) {
    Rank& r = ranks_[static_cast<size_t>(rank)];
    ++r.changes;
    if (r.asleep) r.awake.notify_one();
  }

  template <class Ready>
  void until(std::unique_lock<std::mutex>& lock, int rank, Ready ready) {
    while (!ready()) {
      if (!failure_.empty()) throw std::runtime_error(failure_);
      if (moveOwn(rank)) continue;
      Rank& r = ranks_[static_cast<size_t>(rank)];
      r.known = r.changes;
      r.asleep = true;
      if (std::ranges::all_of(ranks_, [](const Rank& each) {
            return each.gone || (each.asleep && each.known == each.changes);
          }))
        fail("deadlock");
      r.awake.wait(lock, [&] { return r.known != r.changes; });
      r.asleep = false;
    }
  }

  [[noreturn]] void fail(const std::string& why) {
    failure_ = why;
    for (int r = 0; r < size_; ++r) changed(r);
    throw std::runtime_error(why);
  }
  void gone(int rank) {
    const std::lock_guard lock(mutex);
    ranks_[static_cast<size_t>(rank)].gone = true;
    for (int r = 0; r < size_; ++r) changed(r);
  }
  // From where an exception is handled.
  void giveUp() {
    const std::lock_guard lock(mutex);
    if (!first_) first_ = std::current_exception();
    if (failure_.empty()) failure_ = "another rank threw";
    for (int r = 0; r < size_; ++r) changed(r);
  }

  // What was thrown first: the rest may be its consequences.
  void rethrowFirst() const {
    if (first_) std::rethrow_exception(first_);
  }

  bool chance(uint32_t in) { return random_() % in == 0; }
  size_t buffersOut() const { return hardness_.buffers_out; }
  int size() const { return size_; }

  std::mutex mutex;

 private:
  struct Rank {
    std::condition_variable awake;
    uint64_t changes = 0, known = 0;  // known: when it fell asleep
    bool asleep = false, gone = false;
  };

  bool tryMove(int from, int to) {
    if (!failure_.empty()) return false;  // memory of those that have given up is theirs again
    if (!move(stream(from, to), 1 + random_() % 30000)) return false;
    changed(from);
    changed(to);
    return true;
  }
  // A little of what a rank sends or gets.
  bool moveOwn(int rank) {
    const int first = static_cast<int>(random_() % static_cast<uint32_t>(size_));
    for (int k = 0; k < size_; ++k) {
      const int r = (first + k) % size_;
      if (tryMove(r, rank) || tryMove(rank, r)) return true;
    }
    return false;
  }

  const int size_;
  const Hardness hardness_;
  std::mt19937 random_;
  std::vector<Stream> streams_;
  std::vector<Rank> ranks_;
  std::string failure_;
  std::exception_ptr first_;
};

class StandIn final : public Transport {
 public:
  StandIn(int rank, Net& net) : Transport(rank, net.size()), net_(net) {}
  ~StandIn() override { net_.gone(rank()); }

  void finish() override {
    std::unique_lock lock(net_.mutex);
    for (int r = 0; r < size(); ++r) {
      for (const auto& place : net_.stream(r, rank()).in)
        if (!place.announces) net_.fail("something was expected and not taken");
      net_.until(lock, rank(), [&] { return net_.stream(rank(), r).out.empty(); });
    }
  }

  void advance() override {
    const std::lock_guard lock(net_.mutex);
    net_.moveAnything();
  }

  void send(int to, const void* data, size_t bytes) override {
    const std::lock_guard lock(net_.mutex);
    const auto* begin = static_cast<const std::byte*>(data);
    streamTo(to).out.push_back({.data = begin, .copy = {begin, begin + bytes}});
    touched(to);
  }

  std::byte* acquire(int to) override {
    std::unique_lock lock(net_.mutex);
    auto& s = streamTo(to);
    net_.until(lock, rank(), [&] {
      size_t on_the_way = 0;
      for (const auto& out : s.out) on_the_way += out.buffer;
      return on_the_way < net_.buffersOut();
    });
    return filling_.emplace_back(std::make_unique_for_overwrite<std::byte[]>(kPieceBytes)).get();
  }

  void post(int to, std::byte* buffer, size_t bytes) override {
    const std::lock_guard lock(net_.mutex);
    auto& s = streamTo(to);
    std::erase_if(filling_, [&](const auto& filled) {
      if (filled.get() != buffer) return false;
      s.out.push_back({.data = nullptr, .copy = {buffer, buffer + bytes}, .buffer = true});
      s.out.back().data = s.out.back().copy.data();
      return true;
    });
    touched(to);
  }

  void expect(int from, void* data, size_t bytes) override {
    const std::lock_guard lock(net_.mutex);
    streamFrom(from).in.push_back(
        {.data = static_cast<std::byte*>(data), .own = {}, .bytes = bytes});
    touched(from);
  }

  void expect(int from, size_t bytes) override {
    CHECK(bytes <= kPieceBytes);
    const std::lock_guard lock(net_.mutex);
    auto& s = streamFrom(from);
    s.in.push_back({.data = nullptr, .own = std::vector<std::byte>(bytes), .bytes = bytes});
    s.in.back().data = s.in.back().own.data();
    touched(from);
  }

  const std::byte* peek(int from) override {
    std::unique_lock lock(net_.mutex);
    auto& s = net_.stream(from, rank());
    if (!s.in.empty() && s.in.front().announces) {
      net_.until(lock, rank(), [&] { return !s.announced.empty(); });
      const Opening theirs = s.announced.front();
      s.announced.pop_front();
      s.in.pop_front();
      if (theirs != operation_) throw Error(Failure::kMismatch, "ranks disagree on what this is");
      hear(theirs);
    }
    if (s.in.empty()) net_.fail("a peek at what was not expected");
    net_.until(lock, rank(), [&] { return s.in.front().there; });
    return s.in.front().data;
  }

  void release(int from) override {
    const std::lock_guard lock(net_.mutex);
    net_.stream(from, rank()).in.pop_front();
    touched(from);
  }

 private:
  void open(const Opening& operation) override {
    const std::lock_guard lock(net_.mutex);
    operation_ = operation;
    for (int r = 0; r < size(); ++r) {
      net_.stream(rank(), r).sender_announced = false;
      net_.stream(r, rank()).receiver_expects = false;
    }
  }

  uint64_t arrived() override {
    uint64_t bytes = 0;
    for (int r = 0; r < size(); ++r) bytes += net_.stream(r, rank()).arrived;
    return bytes;
  }

  Net::Stream& streamTo(int r) {
    Net::Stream& s = net_.stream(rank(), r);
    if (!s.sender_announced) {
      s.sender_announced = true;
      s.out.push_back({.data = nullptr, .copy = {}, .announces = true, .opening = operation_});
    }
    return s;
  }
  Net::Stream& streamFrom(int r) {
    Net::Stream& s = net_.stream(r, rank());
    if (!s.receiver_expects) {
      s.receiver_expects = true;
      s.in.push_back({.data = nullptr, .own = {}, .bytes = 0, .announces = true});
    }
    return s;
  }
  void touched(int other) {
    net_.changed(other);
    if (net_.chance(4)) net_.moveAnything();
  }

  Net& net_;
  Opening operation_ = {};
  std::vector<std::unique_ptr<std::byte[]>> filling_;  // buffers acquired and not posted
};

// Runs body in a thread for each rank, each time with another seed; throws the first error.
inline void overStandIn(int size, const StreamOptions& options,
                        const std::function<void(stream_cases::Caller&, Net&)>& body,
                        Hardness hardness = {}) {
  static uint32_t seed = 0;
  hardness.seed = ++seed;
  Net net(size, hardness);
  const std::atomic<bool> failed = false;  // the net tells of failures
  ranks::inThreads(size, [&](int r) {
    stream_world::TestWatch watch(failed, kNever);
    StandIn transport(r, net);
    OverStreams c(transport, watch, options);
    stream_cases::Caller call(c,
                              [&](const Announcement& announced, const std::function<void()>& run) {
                                try {
                                  c.begin(announced);
                                  run();
                                  transport.finish();
                                } catch (...) {
                                  net.giveUp();
                                  throw;
                                }
                              });
    try {
      body(call, net);
    } catch (const std::exception&) {
      net.giveUp();
    }
  });
  net.rethrowFirst();
}

}  // namespace stand_in
