// A mesh from within: the streams to and from all ranks, what other threads leave for whoever
// waits, and how waiting moves it all.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/tcp/lane_budget.h"
#include "transport/tcp/lane_count.h"
#include "transport/tcp/mesh.h"

namespace ringreduce {

struct Mesh::State {
  struct Out {
    Out(net::Pool& pool, const Options& options)
        : stream(pool), count(options.least_lanes, options.most_lanes) {}
    net::SendStream stream;
    net::LaneCount count;
    int requested = 0;  // connections, ever
    Nanos next_look = 0;
    bool busy = true;        // had a backlog at every look since the last sample
    uint64_t operation = 0;  // the last one announced there
    bool active = false;
  };
  struct In {
    explicit In(net::Pool& pool) : stream(pool) {}
    net::RecvStream stream;
    Announcement theirs;
    uint64_t operation = 0;  // the last one in which something was expected
    bool verified = true;
    int expected = 0;  // things expected and not released
    bool active = false;
  };
  struct Arrived {
    int from;
    net::Socket socket;
  };
  struct Made {
    int to, lane;
    net::Socket socket;
    net::NotMade error;
  };

  State(int rank, int size, Watch& watch, Dial dial, const Options& options);

  void ringBell() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n =
        write(bell.get(), &one, sizeof one);  // full: it rings already
  }

  Out& out(int r) {
    auto& out = outs[static_cast<size_t>(r)];
    if (!out) out = std::make_unique<Out>(pool, options);
    return *out;
  }
  In& in(int r) {
    auto& in = ins[static_cast<size_t>(r)];
    if (!in) in = std::make_unique<In>(pool);
    return *in;
  }

  // The stream to a rank, on which the operation has been announced.
  Out& announced(int to) {
    Out& o = out(to);
    if (o.operation != operations) {
      o.operation = operations;
      o.stream.send(&operation, sizeof operation);
    }
    if (!o.active) {
      o.active = true;
      sending.push_back(to);
    }
    return o;
  }

  In& expecting(int from) {
    In& i = in(from);
    if (i.operation != operations) {
      i.operation = operations;
      i.verified = false;
      i.stream.expect(&i.theirs, sizeof i.theirs);
    }
    ++i.expected;
    if (!i.active) {
      i.active = true;
      receiving.push_back(from);
    }
    return i;
  }

  // What other threads have left here.
  void collect();
  void add(net::Connection& connection) const;
  static void limitUnsent(Out& o);
  void failedToDial(int to, const net::NotMade& error);

  // Has as many connections made as the stream is to have now.
  void consider(int to, Out& o);
  void request(int to, Out& o, int wanted);
  void request(int to, Out& o);

  // Whether sockets have something new; waits for it no longer than `longest_ms`.
  bool look(int longest_ms);
  // Moves what can be moved; false if nothing could.
  bool progress();

  // A rank that is gone, as whoever waits for it sees it.
  struct Gone {
    Nanos quiet_since = 0;  // 0: it is here
    uint64_t received = 0;
  };
  // Ends the wait for a rank that is gone, once what it sent before has come.
  void lookAfter(int r, Ready ready, Gone& gone);
  // How long a connection may be silent while control connections live.
  Nanos longestSilence() const { return 5 * options.lost_after; }
  void lookForSilence();

  // How long nothing may move before it is asked whether it ever will.
  static constexpr Nanos kIdle = kSecond / 2;

  // Returns once ready() is true; `r` is who must make it so.
  template <class F>
  void until(int r, F&& ready) {
    if (ready()) return;
    Nanos idle_since = 0, next_poll = now() + kLongestSleep;
    Gone gone;
    for (;;) {
      const bool moved = progress();
      if (ready()) return;
      const Nanos time = now();
      if (moved) idle_since = 0;
      if (!moved && idle_since == 0) idle_since = time;
      if (time >= next_poll || watch.failed()) {
        // A rank that was stopped itself may have all that it waits for in its sockets.
        auto drained = [&] {
          while (progress()) {
          }
          return ready();
        };
        watch.poll(r, Ready(drained));
        lookAfter(r, Ready(ready), gone);
        lookForSilence();
        if (idle_since != 0 && time - idle_since >= kIdle) watch.idle(Ready(ready));
        next_poll = now() + kLongestSleep / 2;
      }
      if (moved) {
        look(0);
        continue;
      }
      const Nanos idle = time - idle_since;
      if (idle < patience.spin) {
        look(0);
      } else if (idle < patience.spin + patience.yield) {
        if (!look(0)) sched_yield();
      } else {
        look(static_cast<int>(kLongestSleep / kMillisecond));
      }
    }
  }

  const int rank, size;
  Watch& watch;
  const Options options;
  Patience patience;
  net::Pool pool;
  Fd epoll, bell;
  std::vector<std::unique_ptr<Out>> outs;  // by rank; null where nothing was sent yet
  std::vector<std::unique_ptr<In>> ins;
  std::vector<int> sending, receiving;  // ranks with something to be moved
  Announcement operation;
  uint64_t operations = 0;
  std::atomic<uint64_t> taken = 0;  // by all connections, at the end of the last operation
  Nanos next_silence_look = 0;
  net::LaneBudget budget;

  std::mutex mutex;  // of the next two
  std::vector<Arrived> arrived;
  std::vector<Made> made;

  net::Dialler dialler;  // the last, since its threads use the above
};

}  // namespace ringreduce
