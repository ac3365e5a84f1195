// A transport and its connections: how many there are, which of them are dead, and what becomes of
// those of ranks that are gone.
#include <linux/filter.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "tcp_world.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/stream.h"

using namespace ringreduce;
using namespace tcp_world;

namespace {

// Rank 0 of two, whose other is a socket of the test's.
struct Alone {
  explicit Alone(const TcpOptions& options)
      : me(0, 2, failed,
           std::make_unique<TcpFabric>(
               [this](int, int, const std::function<void()>&) { return dialled(); }, options),
           20 * kSecond) {}

  Fd dialled() {
    TcpPair pair = tcpPair();
    const std::lock_guard lock(mutex);
    if (prepare) prepare(pair);
    ours.emplace_back(dup(pair.dialled.get()));
    theirs.push_back(std::move(pair.accepted));
    return std::move(pair.dialled);
  }
  // A connection from the other.
  Fd heard() {
    TcpPair pair = tcpPair();
    me.fabric().accept(1, std::move(pair.accepted));
    return std::move(pair.dialled);
  }

  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::function<void(const TcpPair&)> prepare;
  std::vector<Fd> ours, theirs;  // of connections that were dialled; `ours` are copies
  OneRank me;
};

// What the other sends first: the same opening.
std::string operationAnd(size_t bytes) {
  Opening opening{};
  std::memset(static_cast<void*>(&opening), 0, sizeof opening);
  opening.kind = Kind::kAllReduce;
  opening.dtype = DType::kUInt8;
  opening.op = kNoReduceOp;
  opening.root = kNoRoot;
  const auto total = static_cast<uint32_t>(sizeof opening + bytes);
  const auto raw = framed(net::sealed({.bytes = total, .position = 0}), total);
  std::string text(raw.begin(), raw.end());
  std::memcpy(text.data() + sizeof(net::Frame), &opening, sizeof opening);
  return text;
}

void say(const Fd& socket, const std::string& text) {
  CHECK(send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
        static_cast<ssize_t>(text.size()));
}

// `bytes` at a time, with pauses between.  Returns the longest time in which nothing may have come.
Nanos saySlowly(const Fd& socket, const std::string& text, size_t bytes, Nanos pause) {
  Nanos longest = 0, last = monotonicNow();
  for (size_t at = 0; at < text.size(); at += bytes) {
    const Nanos before = monotonicNow();
    say(socket, text.substr(at, bytes));
    longest = std::max(longest, monotonicNow() - last);
    last = before;
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause));
  }
  return longest;
}

void sendNothingAndAwaitByte(Alone& alone) {
  char byte = 0;
  alone.me.operation([&](Transport& transport) {
    transport.send(1, nullptr, 0);
    transport.expect(1, &byte, 1);
    transport.peek(1);
    transport.release(1);
  });
}

void expectAll(Alone& alone, size_t bytes) {
  std::vector<unsigned char> data(bytes);
  alone.me.operation([&](Transport& transport) {
    transport.expect(1, data.data(), bytes);
    transport.peek(1);
    transport.release(1);
  });
  CHECK(data == std::vector<unsigned char>(bytes, 7));
}

// Bytes that come slowly are awaited.  After the last of them the wait ends in `words`.  On a busy
// machine the sender may pause for longer than `patience`, and the wait ends early: then once more.
void expectSlowOnes(const TcpOptions& options, const std::function<void(OneRank&)>& prepare,
                    size_t bytes, Nanos pause, Nanos patience, const char* words) {
  for (int attempt = 0;; ++attempt) {
    Alone alone(options);
    const Fd other = alone.heard();
    prepare(alone.me);
    Nanos longest = 0;
    std::jthread slow([&] { longest = saySlowly(other, operationAnd(1200), bytes, pause); });
    const Failure how = ranks::failureOf([&] { expectAll(alone, 1200); });
    slow.join();
    if (how != Failure::kNone && longest >= patience && attempt < 10) continue;
    CHECK(how == Failure::kNone);
    CHECK(ranks::failureOf([&] { expectAll(alone, 100); }, words) == Failure::kPeerLost);
    return;
  }
}

}  // namespace

TEST(the_last_bytes_of_a_rank_that_has_left_are_awaited_while_they_come) {
  // They come for much longer than it may be quiet.
  constexpr Nanos kLost = 150 * kMillisecond;
  expectSlowOnes(
      {.lost_after = kLost},
      [](OneRank& me) { me.watch().state = PeerState{.declared = Declared::kGone}; }, 50,
      60 * kMillisecond, 2 * kLost, "rank 1: it is gone");
}

TEST(a_wait_in_which_nothing_moves_asks_whether_it_ever_will) {
  // Not as long as bytes come.
  expectSlowOnes(
      {}, [](OneRank& me) { me.watch().hopeless = true; }, 100, 80 * kMillisecond, limits::kIdle,
      "a third rank is lost");
}

TEST(who_leaves_waits_until_all_is_there_and_closes) {
  Alone alone({});
  std::vector<unsigned char> data(8 << 20, 7);
  alone.prepare = [](const TcpPair& pair) {
    const int little = 16 << 10;
    setsockopt(pair.accepted.get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
    const int much = 16 << 20;
    setsockopt(pair.dialled.get(), SOL_SOCKET, SO_SNDBUF, &much, sizeof much);
  };
  std::atomic<size_t> read{0};
  std::thread reader([&] {
    const auto there = [&] {
      const std::lock_guard lock(alone.mutex);
      return alone.theirs.empty() ? -1 : alone.theirs[0].get();
    };
    while (there() < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::vector<char> buffer(64 << 10);
    for (ssize_t n; (n = recv(there(), buffer.data(), buffer.size(), 0)) > 0;)
      read += static_cast<size_t>(n);
  });
  alone.me.operation([&](Transport& transport) { transport.send(1, data.data(), data.size()); });
  alone.me.transport().leave(20 * kSecond);
  int under_way = -1;
  {
    const std::lock_guard lock(alone.mutex);  // a slow machine dials once more
    CHECK(ioctl(alone.ours[0].get(), SIOCOUTQ, &under_way) == 0);
  }
  CHECK(under_way <= 1);  // its end
  reader.join();          // it is told the end, although a copy of the socket is still open
  CHECK(read > data.size());
}

namespace {

// Whether it takes little more than it sends at once.
bool isLimited(const Fd& socket) {
  unsigned limit = 0;
  socklen_t size = sizeof limit;
  CHECK(getsockopt(socket.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &limit, &size) == 0);
  return limit > 0 && limit < (1u << 20);
}

}  // namespace

TEST(a_connection_that_is_alone_takes_as_much_as_it_can) {
  for (const int connections : {1, 2, 5}) {
    Alone alone({.min_connections = connections});
    const Fd other = alone.heard();
    std::jthread answer([&] {
      // The operation may end as soon as the byte is here.  All connections are set up before.
      const auto areInUse = [&] {
        const std::lock_guard lock(alone.mutex);
        return alone.ours.size() >= static_cast<size_t>(connections) &&
               std::ranges::all_of(alone.ours, [&](const Fd& socket) {
                 return isLimited(socket) == (connections > 1);
               });
      };
      const Nanos last = deadlineIn(10 * kSecond);
      while (!areInUse() && now() < last) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      say(other, operationAnd(1));
    });
    sendNothingAndAwaitByte(alone);
    answer.join();
    const std::lock_guard lock(alone.mutex);
    CHECK_EQ(alone.ours.size(), static_cast<size_t>(connections));
    for (const Fd& socket : alone.ours) CHECK_EQ(isLimited(socket), connections > 1);
  }
}

// Reno stands for a choice of the system's, since every process may set it.
TEST(a_short_path_leaves_bbr_alone_unless_it_was_chosen) {
  for (const bool chosen : {false, true})
    for (const std::string before : {"bbr", "reno"}) {
      Alone alone({.min_connections = 2, .max_connections = 2, .leaves_bbr = !chosen});
      std::atomic<bool> is_set = true;
      alone.prepare = [&](const TcpPair& pair) {
        if (setsockopt(pair.dialled.get(), IPPROTO_TCP, TCP_CONGESTION, before.data(),
                       static_cast<socklen_t>(before.size())) != 0)
          is_set = false;  // this kernel has no BBR, or this process may not use it
      };
      // More than the kernel's buffers hold, so it is still being sent when the others are read.
      const std::vector<unsigned char> data(32 << 20, 7);
      std::jthread reader([&](const std::stop_token& stop) {
        const auto made = [&] {
          const std::lock_guard lock(alone.mutex);
          return alone.theirs.size();
        };
        while (made() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        std::vector<char> buffer(1 << 20);
        while (!stop.stop_requested()) {
          for (size_t k = 0; k < 2; ++k)
            while (recv(alone.theirs[k].get(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0)
              continue;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
      alone.me.operation(
          [&](Transport& transport) { transport.send(1, data.data(), data.size()); });
      reader.request_stop();
      reader.join();
      const std::lock_guard lock(alone.mutex);
      for (const Fd& socket : alone.ours) {
        char name[16] = {};
        socklen_t size = sizeof name;
        CHECK(getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0);
        if (is_set) CHECK_EQ(std::string(name) == before, chosen || before == "reno");
      }
    }
}

TEST(connections_are_no_more_than_there_are_descriptors_for) {
  rlimit before{}, few{};
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  few = before;
  few.rlim_cur = 80;  // of which a fourth may be more connections than one to each rank
  {
    net::ConnectionBudget one, other;
    int taken = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    while (one.take()) ++taken;
    CHECK(!other.take());
    CHECK_EQ(taken, 20);
    // Even so each rank has one.
    Alone alone({.min_connections = 8});
    const Fd other_rank = alone.heard();
    say(other_rank, operationAnd(1));
    sendNothingAndAwaitByte(alone);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::lock_guard lock(alone.mutex);
    CHECK_EQ(alone.ours.size(), 1u);
  }
  net::ConnectionBudget again;
  CHECK(again.take());
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST(a_connection_that_cannot_be_made_costs_that_one_alone) {
  // Of eight one fails, before or after the first is there; the first itself; or all.
  for (const auto& [failing, before] :
       std::initializer_list<std::pair<int, bool>>{{5, true}, {5, false}, {0, true}, {-1, true}}) {
    std::atomic<int> made = 0;
    const auto fabricOf = [&](World& world, int r) {
      const auto dial = [&, r, failing, before](int to, int number,
                                                const std::function<void()>&) -> Fd {
        const bool fails = number == failing || failing < 0;
        if (fails != before) std::this_thread::sleep_for(std::chrono::milliseconds(30));
        if (r == 0 && fails) throw net::LocalConnectError("no descriptor is left");
        TcpPair pair = tcpPair();
        world.deliver(r, to, std::move(pair.accepted));
        ++made;
        return std::move(pair.dialled);
      };
      return std::make_unique<TcpFabric>(
          dial, TcpOptions{.min_connections = 8, .max_connections = 8}, nullptr);
    };
    const Failure failure = ranks::failureOf([&] {
      World(2, fabricOf, 10 * kSecond, {}).run([&](OneRank& me) {
        std::vector<char> in(4 << 20), out(4 << 20);
        const int other = 1 - me.rank();
        const std::string count = me.rank() == 0 && failing >= 0 ? ": 7: " : ": 8: ";
        const auto exchange = [&](const void* mine, void* theirs, size_t bytes) {
          me.operation([&](Transport& transport) {
            transport.send(other, mine, bytes);
            transport.expect(other, theirs, bytes);
            transport.peek(other);
            transport.release(other);
          });
        };
        const Nanos last = deadlineIn(60 * kSecond);
        for (bool goes_on = true; goes_on;) {  // until both have as many as they can
          CHECK(now() < last);
          exchange(in.data(), out.data(), in.size());
          const std::vector<std::string> routes = me.transport().routes();
          const char waits = routes.empty() || routes[0].find(count) == std::string::npos;
          char theirs = 0;
          exchange(&waits, &theirs, 1);
          goes_on = waits || theirs;
        }
        ranks::await("the others are made", [&] { return made == 15; });
      });
    });
    CHECK(failure == (failing < 0 ? Failure::kPeerLost : Failure::kNone));
    CHECK(failing < 0 || made == 15);
  }
}

TEST(a_rank_has_no_more_connections_here_than_any_makes) {
  for (const bool at_once : {true, false}) {
    Alone alone({});
    std::vector<Fd> others;
    others.push_back(alone.heard());
    for (int i = 0; at_once && i <= kMaxConnections; ++i) others.push_back(alone.heard());
    char byte = 0;
    if (at_once) CHECK(recv(others.back().get(), &byte, 1, MSG_DONTWAIT) == 0);
    say(others[0], operationAnd(1));
    expectAll(alone, 1);
    for (int i = 0; !at_once && i <= kMaxConnections; ++i) others.push_back(alone.heard());
    CHECK(ranks::failureOf(
              [&] {
                alone.me.watch().state =
                    PeerState{.observed = Observed::kUnreachable};  // looks at what has come
                expectAll(alone, 1);
              },
              "it is gone") == Failure::kPeerLost);
    int closed = 0;
    for (const Fd& socket : others) {
      closed += recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0 ? 1 : 0;
    }
    CHECK_EQ(closed, 2);
  }
}

namespace {

// From now on no packet gets through to this end: not even its system hears it.
void deafen(const Fd& socket) {
  sock_filter none[] = {{.code = BPF_RET | BPF_K, .jt = 0, .jf = 0, .k = 0}};
  const sock_fprog program{.len = 1, .filter = none};
  CHECK(setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0);
}

}  // namespace

TEST(a_connection_that_nothing_gets_through_is_found_by_both_sides) {
  for (const bool sends : {true, false}) {
    Alone alone({.lost_after = 100 * kMillisecond});
    if (sends) alone.prepare = [](const TcpPair& pair) { deafen(pair.accepted); };
    const Fd other = alone.heard();
    if (!sends) deafen(other);
    char byte = 0;
    const auto waitForByte = [&](Transport& transport) {
      if (sends) transport.send(1, &byte, 1);
      transport.expect(1, &byte, 1);
      transport.peek(1);
    };
    const char* const words = sends ? "rank 1: nothing that was sent from 127.0.0.1:"
                                    : "rank 1: Connection timed out (connection from 127.0.0.1:";
    CHECK(ranks::failureOf([&] { alone.me.operation(waitForByte); }, words) == Failure::kPeerLost);
  }
}

TEST(who_is_slow_or_was_idle_is_not_taken_for_dead) {
  // One that acknowledges and never reads, so that its window is full, for longer than a silence.
  Alone alone({.lost_after = 100 * kMillisecond});
  const Fd other = alone.heard();
  std::jthread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    say(other, operationAnd(1));
    const std::lock_guard lock(alone.mutex);
    alone.theirs.clear();
  });
  std::vector<char> data(32 << 20);
  char byte = 0;
  CHECK(ranks::failureOf(
            [&] {
              alone.me.operation([&](Transport& transport) {
                transport.send(1, data.data(), data.size());
                transport.expect(1, &byte, 1);
                transport.peek(1);
                transport.release(1);
              });
            },
            "rank 1: ") == Failure::kPeerLost);  // its end
  late.join();
  CHECK_EQ(byte, 7);

  net::Silence idle;
  const Nanos second = kSecond;
  CHECK_EQ(idle.look(100 * second, false, 3 * second, 3 * second), 0);
  CHECK_EQ(idle.look(200 * second, true, 103 * second, 0), 0);  // sent after a long time
  CHECK_EQ(idle.look(201 * second, true, 104 * second, second), second);
  CHECK_EQ(idle.look(261 * second, true, second / 2, 0), 0);  // acknowledged meanwhile
  CHECK_EQ(idle.look(300 * second, true, 40 * second, 9 * second), 39 * second);
  CHECK_EQ(idle.look(310 * second, true, 20 * second, 20 * second), 0);  // the last try was
  CHECK_EQ(idle.look(320 * second, false, 60 * second, second), 0);
}

TEST(buffers_that_are_not_used_are_given_back) {
  net::Pool pool;
  std::vector<std::byte*> taken;
  for (int i = 0; i < 10; ++i) taken.push_back(pool.take());
  pool.trim(0);
  CHECK_EQ(pool.bytes(), 10 * kPieceBytes);  // all of them are in use
  for (int i = 0; i < 7; ++i) {
    pool.give(taken.back());
    taken.pop_back();
  }
  pool.trim(5 * kPieceBytes);
  CHECK_EQ(pool.bytes(), 5 * kPieceBytes);
  for (std::byte* buffer : taken) std::memset(buffer, 1, kPieceBytes);
  for (int i = 0; i < 2; ++i) taken.push_back(pool.take());
  CHECK_EQ(pool.bytes(), 5 * kPieceBytes);
  std::memset(pool.take(), 1, kPieceBytes);
  CHECK_EQ(pool.bytes(), 6 * kPieceBytes);
  pool.trim(0);
  CHECK_EQ(pool.bytes(), 6 * kPieceBytes);

  // What comes before it is looked at takes many buffers, and they do not stay.
  overTcp(3, [](OneRank& me) {
    const size_t pieces = 400;
    std::vector<std::byte> data(kPieceBytes);
    std::byte byte{};
    me.operation([&](Transport& transport) {
      const auto await = [&](int from) {
        transport.peek(from);
        transport.release(from);
      };
      if (me.rank() == 1) {
        for (size_t i = 0; i < pieces; ++i) transport.send(0, data.data(), data.size());
        transport.finish();
        transport.send(2, &byte, 1);
      } else if (me.rank() == 2) {
        transport.expect(1, &byte, 1);
        await(1);
        transport.send(0, &byte, 1);
      } else {
        for (size_t i = 0; i < pieces; ++i) transport.expect(1, data.size());
        transport.expect(2, &byte, 1);
        await(2);
        CHECK(transport.stagingBytes() > 64 << 20);
        for (size_t i = 0; i < pieces; ++i) await(1);
      }
    });
    CHECK(me.transport().stagingBytes() <= 64 << 20);
  });
}

// A look at a stream that has sent so many MB.
net::Pace::Sample lookAt(int i, double smoothed_ms, uint64_t lost, uint64_t mb) {
  return {.time = kSecond + i * net::kLookEvery,
          .sent = mb << 20,
          .round_trip = 50 * kMillisecond,
          .smoothed = static_cast<Nanos>(smoothed_ms * kMillisecond),
          .retransmits = lost};
}

TEST(a_stream_is_paced_from_its_first_queue_on_and_by_the_line_at_least) {
  constexpr double kLine = 1e7;
  net::Pace pace;
  int i = 0;
  CHECK_EQ(pace.look(lookAt(++i, 90, 0, 0), 0), 0);      // the line is not known
  CHECK_EQ(pace.look(lookAt(++i, 51, 0, 0), kLine), 0);  // no queue
  CHECK_EQ(pace.look(lookAt(++i, 90, 9, 0), kLine), kLine);
  CHECK_EQ(pace.look(lookAt(++i, 90, 9, 0), kLine),
           kLine);  // of others: it does not stop the stream
  const double faster = pace.look(lookAt(++i, 51, 9, 0), kLine);
  CHECK(faster > kLine && faster < 1.1 * kLine);
  CHECK_EQ(pace.look(lookAt(++i, 0, 9, 0), kLine), faster);  // nothing is on its way
  CHECK(pace.look(lookAt(++i, 90, 9, 0), kLine) < faster);
  // One stream where there were several: at least all of the line, at once.
  CHECK_EQ(pace.look(lookAt(++i, 51, 9, 0), 7 * kLine), 7 * kLine);
  for (int n = 0; n < 500; ++n) pace.look(lookAt(++i, 51, 9, 0), kLine);
  CHECK_EQ(pace.rate(), 16 * kLine);
  net::Pace::Sample bbr = lookAt(++i, 90, 9, 0), near = bbr;
  bbr.bbr = true;
  near.round_trip = kMillisecond;
  CHECK_EQ(pace.look(bbr, kLine), 0);
  CHECK_EQ(pace.look(lookAt(++i, 90, 9, 0), kLine), kLine);
  CHECK_EQ(pace.look(near, kLine), 0);
}

TEST(round_trips_that_stay_long_at_half_the_rate_are_no_queue) {
  constexpr double kLine = 1e7;
  for (const bool own : {true, false}) {
    net::Pace pace;
    double least = kLine, most = 0, queue_ms = 400;
    for (int i = 0; i < 2000; ++i) {
      // The line carries as much.  A queue grows by what is sent beyond that, and is full at 400
      // ms.
      const double rate = i == 0 || pace.rate() == 0 ? 2 * kLine : pace.rate();
      queue_ms =
          std::clamp(queue_ms + (rate / kLine - 1) * net::kLookEvery / kMillisecond, 0., 400.);
      most = std::max(most, pace.look(lookAt(i, own ? 51 + queue_ms : 90, 0, 0), kLine));
      least = std::min(least, pace.rate());
    }
    CHECK_EQ(least, kLine / 2);
    CHECK(own ? most < 2 * kLine : most == 16 * kLine);
    // Once round trips are shorter, longer ones are a queue again.
    pace.look(lookAt(2001, 51, 0, 0), kLine);
    const double before = pace.rate();
    CHECK(pace.look(lookAt(2002, 90, 0, 0), kLine) < std::max(before, 1.001 * kLine));
  }
}

TEST(a_line_that_loses_packets_without_a_queue_is_not_paced) {
  constexpr double kLine = 1e7;
  // Lost packets every 0.2 s: behind a queue; long after one; and so rarely that it means nothing.
  const auto rateAfter = [](double smoothed_ms, uint64_t mb_a_loss) {
    net::Pace pace;
    pace.look(lookAt(0, 90, 0, 0), kLine);
    uint64_t lost = 0;
    for (int i = 1; i < 400; ++i) {
      if (i % 20 == 0) ++lost;
      pace.look(lookAt(i, i % 50 == 0 ? smoothed_ms : 51, lost, lost * mb_a_loss), kLine);
    }
    return pace.rate();
  };
  CHECK(rateAfter(90, 1) >= kLine);
  CHECK_EQ(rateAfter(51, 1), 0);
  CHECK(rateAfter(51, 40) >= kLine);
}

TEST(connections_are_added_where_they_help) {
  const auto sample = [](Nanos ms, uint64_t sent, double rtt_ms, uint64_t lost, int connections) {
    return net::ConnectionCount::Sample{.time = 1 + ms * kMillisecond,
                                        .sent = sent,
                                        .round_trip = static_cast<Nanos>(rtt_ms * kMillisecond),
                                        .retransmits = lost,
                                        .connections = connections};
  };
  CHECK_EQ(net::initialConnections(200 * kMicrosecond), 1);
  CHECK_EQ(net::initialConnections(50 * kMillisecond), 4);
  net::ConnectionCount near(1, 64);  // a short way without loss stays as it is
  for (int i = 0; i < 50; ++i)
    CHECK_EQ(near.look(sample(100 * i, 10'000'000 * static_cast<uint64_t>(i), 0.2, 0, 1), true), 1);
  // A long one has several, more while that helps, and then no more.
  net::ConnectionCount far(1, 64);
  CHECK_EQ(far.look(sample(0, 0, 50, 0, 1), true), 1);
  CHECK_EQ(far.look(sample(10, 100'000, 50, 0, 1), true), 8);
  CHECK_EQ(far.look(sample(100, 200'000, 50, 0, 3), true), 8);  // not all there yet
  Nanos ms = 200;
  uint64_t sent = 300'000;
  const auto measure = [&](net::ConnectionCount& count, double rtt, int connections,
                           uint64_t bytes) {
    count.look(sample(ms, sent, rtt, 1, connections), true);  // the measurement starts, or goes on
    return count.look(sample(ms += 200, sent += bytes, rtt, 2, connections), true);
  };
  CHECK_EQ(measure(far, 50, 8, 10'000'000), 16);
  CHECK_EQ(measure(far, 50, 16, 5'100'000), 16);
  for (int i = 0; i < 10; ++i) CHECK_EQ(measure(far, 50, 16, 50'000'000), 16);
  CHECK(far.why().find("16: round trip 50.0 ms") == 0);
  // Nearby, where packets are lost, it tries more, and goes back to the fewer for good.
  net::ConnectionCount lossy(1, 64);
  CHECK_EQ(measure(lossy, 0.2, 1, 5'000'000), 2);
  CHECK_EQ(measure(lossy, 0.2, 2, 8'000'000), 4);
  CHECK_EQ(measure(lossy, 0.2, 4, 8'100'000), 2);
  for (int i = 0; i < 10; ++i) CHECK_EQ(measure(lossy, 0.2, 4, 50'000'000), 2);
  CHECK(lossy.why().find("; 4 were no faster") != std::string::npos);
  net::ConnectionCount bbr(1, 64);  // BBR on a long way needs but those
  for (int i = 0; i < 50; ++i) {
    net::ConnectionCount::Sample one =
        sample(250 * i, 10'000'000 * static_cast<uint64_t>(i), 50, 9, 4);
    one.bbr = true;
    CHECK_EQ(bbr.look(one, true), i == 0 ? 1 : 4);
  }
  net::ConnectionCount fixed(6, 6);
  for (int i = 0; i < 50; ++i) {
    net::ConnectionCount::Sample one =
        sample(100 * i, 10'000'000 * static_cast<uint64_t>(i), 50, 9, 6);
    one.pace = i > 25 ? 1e9 : 0;
    CHECK_EQ(fixed.look(one, true), 6);
  }
  // One that is paced begins anew with a few, and has more only where packets are lost and it is
  // slower than its pace.
  net::ConnectionCount paced(4, 64), fast(4, 64);
  for (int i = 0; i < 60; ++i) {
    const bool is_paced = i >= 10, loses = i < 10 || i >= 40;
    net::ConnectionCount::Sample one =
        sample(250 * i, 1'000'000 * static_cast<uint64_t>(i) * static_cast<uint64_t>(i), 50,
               loses ? static_cast<uint64_t>(i) : 10, 64);
    one.pace = is_paced ? 1e9 : 0;
    const int wanted = paced.look(one, true);
    one.pace = is_paced ? 1e7 : 0;
    const int wanted_by_fast = fast.look(one, true);
    if (is_paced) CHECK_EQ(wanted_by_fast, 4);
    if (i == 9) CHECK(wanted > 4);
    if (is_paced && !loses) CHECK_EQ(wanted, 4);
    if (i == 59) CHECK_EQ(wanted, 8);  // more were no faster
  }
  net::ConnectionCount idle(2, 64);  // what has nothing to send learns nothing
  for (int i = 0; i < 50; ++i) CHECK_EQ(idle.look(sample(100 * i, 0, 50, 9, 2), false), 2);
}
