// The transport: bytes arrive in order and at their places, however they are cut, over any number
// of connections and through memory; and what is wrong is told.
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "tcp_world.h"
#include "transport/tcp/stream.h"

using namespace ringreduce;
using namespace tcp_world;

namespace {

std::vector<unsigned char> pattern(int from, int to, uint32_t seed, size_t bytes) {
  std::minstd_rand random(seed * 7919 + static_cast<uint32_t>(from * 64 + to));
  std::vector<unsigned char> data(bytes);
  for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = random() * 0x9e3779b97f4a7c15u;
    std::memcpy(&data[at], &word, std::min(bytes - at, sizeof word));
  }
  return data;
}

// Everybody sends everybody the same lengths, and expects them in other pieces.
void exchangeAll(OneRank& me, uint32_t seed) {
  std::mt19937 random(seed);
  const size_t total = random() % 3 == 0 ? random() % 200 : random() % 3'000'000;
  std::vector<std::vector<unsigned char>> sent, received;
  me.operation([&](Transport& transport) {
    for (int r = 0; r < me.size(); ++r) {
      sent.push_back(r == me.rank() ? std::vector<unsigned char>{}
                                    : pattern(me.rank(), r, seed, total));
      received.emplace_back(r == me.rank() ? 0 : total);
    }
    struct Piece {
      int from;
      size_t at, bytes;
      bool pooled;
    };
    std::vector<Piece> pieces;
    for (int k = 1; k < me.size(); ++k) {
      const int from = (me.rank() + k) % me.size();
      for (size_t at = 0; at < total || at == 0;) {
        const bool pooled = random() % 2;
        size_t n = std::min<size_t>(total - at, random() % (2 * kPieceBytes));
        if (pooled) n = std::min(n, kPieceBytes);
        if (pooled)
          transport.expect(from, n);
        else
          transport.expect(from, received[static_cast<size_t>(from)].data() + at, n);
        pieces.push_back({from, at, n, pooled});
        at += n;
        if (total == 0) break;
      }
    }
    std::mt19937 cuts(seed + 1000 + static_cast<uint32_t>(me.rank()));
    for (int k = 1; k < me.size(); ++k) {
      const int to = (me.rank() + k) % me.size();
      const auto& data = sent[static_cast<size_t>(to)];
      if (total == 0) transport.send(to, nullptr, 0);
      for (size_t at = 0; at < total;) {
        size_t n = std::min<size_t>(total - at, 1 + cuts() % (2 * kPieceBytes));
        if (cuts() % 2) {
          n = std::min(n, kPieceBytes);
          std::byte* buffer = transport.acquire(to);
          std::memcpy(buffer, data.data() + at, n);
          transport.post(to, buffer, n);
        } else {
          transport.send(to, data.data() + at, n);
        }
        at += n;
      }
    }
    for (const Piece& piece : pieces) {
      const std::byte* there = transport.peek(piece.from);
      if (piece.pooled && piece.bytes > 0)
        std::memcpy(received[static_cast<size_t>(piece.from)].data() + piece.at, there,
                    piece.bytes);
      transport.release(piece.from);
    }
  });
  for (int r = 0; r < me.size(); ++r)
    if (r != me.rank())
      CHECK(received[static_cast<size_t>(r)] == pattern(r, me.rank(), seed, total));
}

}  // namespace

TEST(bytes_arrive_in_order_whatever_the_pieces) {
  for (const int size : {2, 3, 5})
    overTcp(size, [](OneRank& me) {
      for (uint32_t seed = 0; seed < 12; ++seed) exchangeAll(me, seed);
    });
}

TEST(the_same_over_many_connections) {
  for (const int connections : {2, 7})
    overTcp(3,
            [](OneRank& me) {
              for (uint32_t seed = 20; seed < 28; ++seed) exchangeAll(me, seed);
            },
            {.min_connections = connections});
}

TEST(the_same_through_memory_and_over_both_wires_at_once) {
  for (const int hosts : {1, 2, 3})
    for (const bool sleeps : {false, true})
      overTcp(
          5,
          [&](OneRank& me) {
            me.transport().setPatience({.spin = 0, .yield = sleeps ? 0 : 200 * kMicrosecond});
            for (uint32_t seed = 40; seed < 44; ++seed) exchangeAll(me, seed);
            // Only what went over sockets is counted, and has lines.
            std::set<int> lines;
            for (const Line& line : me.transport().lines()) lines.insert(line.to % hosts);
            CHECK(!lines.contains(me.rank() % hosts));
            CHECK_EQ(me.transport().bytesSent() > 0, hosts > 1);
            size_t in_memory = 0;
            for (const std::string& route : me.transport().routes())
              in_memory += route.ends_with(": shared memory");
            CHECK_EQ(in_memory, static_cast<size_t>((4 - me.rank() % hosts) / hosts));
          },
          {}, 60 * kSecond, {}, hosts);
}

TEST(both_directions_of_a_full_pipe_go_on) {
  constexpr size_t kBytes = 8 << 20;  // of which a pipe holds little
  static_assert(kBytes > 16 * kRingBytes);
  overTcp(
      2,
      [](OneRank& me) {
        const int other = 1 - me.rank();
        const auto mine = pattern(me.rank(), other, 1, kBytes);
        std::vector<unsigned char> theirs(kBytes);
        me.operation([&](Transport& transport) {
          transport.expect(other, theirs.data(), kBytes);
          transport.send(other, mine.data(), kBytes);
          transport.finish();  // before either has looked at what came
          transport.peek(other);
          transport.release(other);
        });
        CHECK(theirs == pattern(other, me.rank(), 1, kBytes));
      },
      {}, 60 * kSecond, {}, /*hosts=*/1);
}

TEST(what_a_rank_wrote_to_a_pipe_before_it_was_lost_is_read_and_the_rest_is_not_awaited) {
  for (const PeerState state :
       {PeerState{.observed = Observed::kEnded}, PeerState{.declared = Declared::kGone}}) {
    std::atomic<int> left = 2;
    const auto kind = ranks::failureOf(
        [&] {
          overTcp(
              2,
              [&](OneRank& me) {
                int data[] = {4711, 0};
                if (me.rank() == 1) {
                  me.operation([&](Transport& transport) { transport.send(0, data, sizeof(int)); });
                  --left;
                  return;
                }
                while (left > 1) std::this_thread::yield();
                me.watch().state = state;
                int came[2] = {};
                me.operation([&](Transport& transport) {
                  transport.expect(1, &came[0], sizeof(int));
                  transport.expect(1, &came[1], sizeof(int));
                  transport.peek(1);
                  transport.release(1);
                  CHECK_EQ(came[0], data[0]);
                  transport.peek(1);
                });
              },
              {}, 60 * kSecond, {}, /*hosts=*/1);
        },
        "rank 1: it is gone");
    CHECK(kind == Failure::kPeerLost);
  }
}

TEST(a_rank_that_is_lost_takes_nothing_from_its_full_pipe) {
  const auto kind = ranks::failureOf(
      [] {
        overTcp(
            2,
            [](OneRank& me) {
              if (me.rank() == 1) return;
              me.watch().state = PeerState{.observed = Observed::kEnded};
              const std::vector<unsigned char> data(2 * kRingBytes);
              me.operation(
                  [&](Transport& transport) { transport.send(1, data.data(), data.size()); });
            },
            {}, 60 * kSecond, {}, /*hosts=*/1);
      },
      "rank 1: it is gone");
  CHECK(kind == Failure::kPeerLost);
}

TEST(bytes_that_came_before_or_through_memory_say_nothing_of_a_line) {
  constexpr size_t kFirst = 5000, kRest = 300'000, kHeaders = 1000;
  for (const int hosts : {0, 2}) {  // of 3 ranks, of which ranks 0 and 2 share memory, or none
    std::atomic<bool> sent, taken;
    sent = taken = false;
    overTcp(
        3,
        [&](OneRank& me) {
          std::vector<char> first(kFirst), rest(kRest);
          me.operation([&](Transport& transport) {
            transport.measure();
            if (me.rank() == 0) {
              for (const int to : {1, 2}) transport.send(to, first.data(), first.size());
              transport.finish();
              sent = true;
              ranks::await("rank 1 has begun", [&] { return taken.load(); });
              for (const int to : {1, 2}) transport.send(to, rest.data(), rest.size());
              return;
            }
            const auto take = [&](std::vector<char>& into) {
              transport.expect(0, into.data(), into.size());
              transport.peek(0);
              transport.release(0);
            };
            if (me.rank() == 1)
              ranks::await("rank 0's bytes are here", [&] { return sent.load(); });
            take(first);
            const bool in_memory = hosts > 0 && me.rank() == 2;
            if (me.rank() == 1) {
              CHECK_EQ(transport.heardBytes(), 0u);
              taken = true;
            }
            take(rest);
            if (in_memory) CHECK_EQ(transport.heardBytes(), 0u);
            if (me.rank() == 1)
              CHECK(transport.heardBytes() >= kRest &&
                    transport.heardBytes() < kRest + kFirst + kHeaders);
          });
          CHECK_EQ(me.transport().heard().since > 0, me.rank() > 0);
        },
        {}, 60 * kSecond, {}, hosts);
  }
}

TEST(another_operation_is_told_before_anything_is_returned) {
  for (const int hosts : {0, 1}) {
    const auto kind = ranks::failureOf(
        [&] {
          overTcp(
              2,
              [](OneRank& me) {
                int mine = me.rank(), theirs = 0;
                me.operation(
                    [&](Transport& transport) {
                      transport.expect(1 - me.rank(), &theirs, sizeof theirs);
                      transport.send(1 - me.rank(), &mine, sizeof mine);
                      transport.peek(1 - me.rank());
                      transport.release(1 - me.rank());
                    },
                    Kind::kAllReduce, static_cast<uint64_t>(me.rank()));
              },
              {}, 60 * kSecond, {}, hosts);
        },
        "called another operation");
    CHECK(kind == Failure::kMismatch);
  }
}

TEST(an_operation_that_no_rank_would_announce_is_not_believed) {
  for (const bool kind : {false, true})
    CHECK(ranks::failureOf(
              [&] {
                overTcp(2, [&](OneRank& me) {
                  char byte = 0;
                  const auto body = [&](Transport& transport) {
                    if (me.rank() == 1) return transport.send(0, &byte, 1);
                    transport.expect(1, &byte, 1);
                    transport.peek(1);
                    transport.release(1);
                  };
                  if (me.rank() == 0)
                    me.operation(body);
                  else
                    me.announce({{.kind = kind ? static_cast<Kind>(200) : Kind::kBroadcast,
                                  .root = kind ? 0 : 2}},
                                body);
                });
              },
              "rank 1: it announced what no rank would") == Failure::kPeerLost);
}

TEST(who_does_not_send_is_named) {
  ranks::MeetingPoint sent(3);  // else a slow rank could be named
  const auto kind = ranks::failureOf(
      [&] {
        overTcp(
            3,
            [&](OneRank& me) {
              char byte = 0;
              me.operation([&](Transport& transport) {
                const int next = (me.rank() + 1) % 3, previous = (me.rank() + 2) % 3;
                transport.expect(previous, &byte, 1);
                if (me.rank() != 1) transport.send(next, &byte, 1);
                transport.finish();  // of TCP it only waits until all is sent
                sent.wait();
                transport.peek(previous);
                transport.release(previous);
              });
            },
            {}, kSecond);
      },
      "rank 1 did not come");
  CHECK(kind == Failure::kTimeout);
}

namespace {
// Sends raw bytes to a stream that expects `bytes`, and returns why it broke.
std::string brokenBy(const std::vector<unsigned char>& raw, size_t bytes,
                     Nanos patience = 10 * kSecond) {
  net::Pool pool;
  net::RecvStream stream(pool);
  TcpPair pair = tcpPair();
  stream.add(std::move(pair.accepted));
  std::vector<unsigned char> data(bytes);
  stream.expect(data.data(), bytes);
  CHECK(send(pair.dialled.get(), raw.data(), raw.size(), 0) == static_cast<ssize_t>(raw.size()));
  pair.dialled.reset();
  for (const Nanos end = deadlineIn(patience); now() < end;) {
    stream.connection(0).ready = true;
    if (stream.progress() == net::Moved::kBroken) return stream.why();
    if (stream.ready()) return "";
  }
  return "nothing came";
}

bool breaks(const std::vector<unsigned char>& raw) {
  const std::string why = brokenBy(raw, 100);
  return why != "" && why != "nothing came";
}

}  // namespace

TEST(what_is_no_frame_breaks_the_stream_and_nothing_else) {
  const auto good = net::sealed({.bytes = 100, .position = 0});
  CHECK_EQ(brokenBy(framed(good, 100), 100), "");
  CHECK_EQ(brokenBy(framed(good, 50), 100), "the connection ended in the midst of a frame");
  CHECK_EQ(brokenBy(framed(good, 100), 200), "it closed the connection");
  CHECK(brokenBy(std::vector<unsigned char>(500, 'x'), 100)
            .starts_with("what came is no frame of ringreduce's (connection from 127.0.0.1:"));
  CHECK(breaks(framed(net::sealed({.bytes = 0}), 100)));
  CHECK(breaks(framed(net::sealed({.bytes = net::kLargestFrame + 1}), 100)));
  CHECK(breaks(framed(net::sealed({.bytes = 100, .position = ~uint64_t{0} - 10}), 100)));
  // What precedes it may come over another connection.
  const auto early = framed(net::sealed({.bytes = 100, .position = 1'000'000}), 100);
  CHECK_EQ(brokenBy(early, 100, 100 * kMillisecond), "nothing came");
  for (size_t bit = 0; bit < 8 * sizeof good; ++bit) {
    auto raw = framed(good, 100);
    raw[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    CHECK(breaks(raw));
  }
}

TEST(a_frame_that_comes_twice_breaks_the_stream) {
  auto raw = framed(net::sealed({.bytes = 100, .position = 0}), 100);
  const auto once = raw;
  raw.insert(raw.end(), once.begin(), once.end());
  // The first fills the front of what is expected, the second would be written over it.
  const std::string why = brokenBy(raw, 300);
  CHECK_EQ(why, "a frame came for bytes that had come before");
}
