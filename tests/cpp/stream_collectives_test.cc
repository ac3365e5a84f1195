// The collectives over streams, over TCP, over TCP between hosts and memory inside them, over
// socket pairs, and over the stand-in, which is as hard on them as the contract allows, against
// what they must give: the bits that shared memory gives.
#include "collectives/stream_algorithms.h"
#include "ranks.h"
#include "socketpair_transport.h"
#include "stand_in_transport.h"
#include "stream_cases.h"
#include "stream_meetings.h"
#include "stream_moves.h"
#include "stream_world.h"
#include "tcp_world.h"

using namespace ringreduce;
using stream_cases::Caller;
using stream_cases::kMostRanks;
using stream_world::OneRank;

namespace {

// What the group does around a call.
std::function<void(OneRank&)> asCaller(const std::function<void(Caller&)>& body) {
  return [&body](OneRank& one) {
    Caller call(one.over(), [&](const Announcement& a, const std::function<void()>& run) {
      one.operation([&](Transport&) { run(); }, a.kind, a.count);
    });
    body(call);
  };
}

void overTcp(int P, const StreamOptions& options, const std::function<void(Caller&)>& body) {
  tcp_world::overTcp(P, asCaller(body), {}, 60 * kSecond, options);
}

void overBothWires(int P, const StreamOptions& options, const std::function<void(Caller&)>& body) {
  tcp_world::overTcp(P, asCaller(body), {}, 60 * kSecond, options, /*hosts=*/P > 2 ? 2 : 1);
}

void overSocketpairs(int P, const StreamOptions& options,
                     const std::function<void(Caller&)>& body) {
  socketpairs::overSocketpairs(P, options, asCaller(body));
}

void overStandIn(int P, const StreamOptions& options, const std::function<void(Caller&)>& body) {
  stand_in::overStandIn(P, options, [&](Caller& call, stand_in::Net&) { body(call); });
}

// What the stand-in says of `body`, run by two ranks.
std::string complaint(const std::function<void(Transport&, stand_in::Net&)>& body) {
  try {
    stand_in::overStandIn(2, {}, [&](Caller& call, stand_in::Net& net) {
      call.perform([&](OverStreams& c) { body(c.transport, net); });
    });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(reductions_of_every_kind) {
  stream_cases::checkReductions(overTcp, kMostRanks, 60000);
}

TEST(reductions_of_every_kind_over_the_stand_in) {
  stream_cases::checkReductions(overStandIn, kMostRanks, 60000);
}

TEST(reductions_of_every_kind_over_socket_pairs) {
  stream_cases::checkReductions(overSocketpairs, 5, 60000);
}

TEST(reductions_of_every_kind_over_both_wires) {
  stream_cases::checkReductions(overBothWires, kMostRanks, 60000);
}

TEST(moves_of_every_kind) {
  stream_cases::checkMoves(overTcp, kMostRanks, 50000);
}

TEST(moves_of_every_kind_over_the_stand_in) {
  stream_cases::checkMoves(overStandIn, kMostRanks, 50000);
}

TEST(moves_of_every_kind_over_socket_pairs) {
  stream_cases::checkMoves(overSocketpairs, 5, 50000);
}

TEST(moves_of_every_kind_over_both_wires) {
  stream_cases::checkMoves(overBothWires, kMostRanks, 50000);
}

// The announced openings carry what is said, and each algorithm lets ranks hear from those that
// agreed_line.cc says.  So all ranks take a new rate with the same call.  A socket may hold all of
// a message when the first of it is read, and then nothing is known of the line.
TEST(ranks_agree_on_the_rate_of_lines) {
  const std::pair<stream_cases::Over, bool> kWorlds[] = {
      {overTcp, false}, {overStandIn, true}, {overSocketpairs, false}};
  for (const auto& [over, measures] : kWorlds)
    for (const int P : {2, 5})
      for (StreamOptions options : stream_cases::everyChoice()) {
        options.measures = true;
        options.cost.hop = 1e-9;  // no call is all hops
        constexpr size_t kCalls = 16;
        std::vector<std::vector<uint64_t>> rates(static_cast<size_t>(P));
        over(P, options, [&](Caller& call) {
          std::vector<uint64_t>& mine = rates[static_cast<size_t>(call.transport.rank())];
          const size_t count = 64 << 10, part = 32 << 10;
          std::vector<float> data(count), parts(static_cast<size_t>(P) * part);
          for (size_t i = 0; i < kCalls; ++i) {
            std::vector<const void*> inputs;
            std::vector<void*> outputs;
            for (size_t r = 0; r < static_cast<size_t>(P); ++r) {
              inputs.push_back(parts.data() + r * part);
              outputs.push_back(parts.data() + r * part);
            }
            const std::vector<size_t> counts(static_cast<size_t>(P), part);
            // From a root only some hear.
            if (i % 4 == 0) call(Broadcast{data.data(), count, DType::kFloat32, 0});
            if (i % 4 == 1) call(AllReduce{data.data(), count, DType::kFloat32, ReduceOp::kSum});
            if (i % 4 == 2) call(AllGather{data.data(), outputs, counts, DType::kFloat32});
            if (i % 4 == 3)
              call(ReduceScatter{inputs, counts, data.data(), DType::kFloat32, ReduceOp::kSum});
            call.learn();
            mine.push_back(call.rate());
          }
        });
        for (const auto& mine : rates) CHECK(mine == rates[0]);
        CHECK(rates[0].front() == 0 && (rates[0].back() > 0 || !measures));
      }
}

TEST(a_barrier_is_one) {
  stream_cases::checkBarrier(overTcp, kMostRanks);
  stream_cases::checkBarrier(overBothWires, kMostRanks);
  stream_cases::checkBarrier(overStandIn, kMostRanks);
  stream_cases::checkBarrier(overSocketpairs, 5);
}

TEST(ranks_that_disagree_find_out) {
  stream_cases::checkMeetings(overTcp, 4);
  stream_cases::checkUnequalCounts(overTcp, 3);
  stream_cases::checkMeetings(overBothWires, 4);
  stream_cases::checkUnequalCounts(overBothWires, 3);
  stream_cases::checkMeetings(overStandIn, 5);
  stream_cases::checkUnequalCounts(overStandIn, 4);
  stream_cases::checkMeetings(overSocketpairs, 4);
  stream_cases::checkUnequalCounts(overSocketpairs, 3);
}

TEST(a_ring_of_more_slices_than_buffers) {
  stream_cases::checkWindow(overTcp, 4, Transport::kWindow, 300);
  stream_cases::checkWindow(overBothWires, 4, Transport::kWindow, 300);
  stream_cases::checkWindow(overSocketpairs, 4, Transport::kWindow, 300);
}

TEST(a_ring_runs_with_few_buffers) {
  const auto few = [](int P, const StreamOptions& options, const auto& body) {
    stand_in::overStandIn(P, options, [&](Caller& call, stand_in::Net&) { body(call); },
                          {.buffers_out = 6, .buffers_in = 1});
  };
  stream_cases::checkWindow(few, 6, 6, 23);
}

TEST(the_stand_in_is_hard_on_mistakes) {
  const auto other = [](const Transport& transport) { return 1 - transport.rank(); };
  int memory[] = {1, 1};  // outlives both ranks: one may read it while the other fails
  CHECK_EQ(complaint([&](Transport& transport, stand_in::Net& net) {
             int got = 0, &lent = memory[transport.rank()];
             transport.send(other(transport), &lent, sizeof lent);
             {  // The write is the mistake.  The lock keeps it from being a data race too.
               const std::lock_guard lock(net.mutex);
               lent = 2;
             }
             transport.expect(other(transport), &got, sizeof got);
             transport.peek(other(transport));
             transport.release(other(transport));
             transport.finish();
           }),
           "memory was written while it was lent");
  CHECK_EQ(complaint([&](Transport& transport, stand_in::Net&) {
             transport.expect(other(transport), 1);
             transport.peek(other(transport));
           }),
           "deadlock");
  CHECK_EQ(complaint([&](Transport& transport, stand_in::Net&) {
             transport.expect(other(transport), 1);
           }),
           "something was expected and not taken");
}

TEST(a_window_is_bounded_by_what_the_wire_needs_and_by_what_the_whole_ring_has_under_way) {
  const WireCost near{}, far{.hop = 0.05};
  CHECK_EQ(streamWindow(1000, kPieceBytes, 4, 256, far), 127u);
  CHECK_EQ(streamWindow(100, kPieceBytes, 4, 256, far), 100u);
  CHECK_EQ(streamWindow(1000, kPieceBytes, 4, 256, near), 4u);
  CHECK_EQ(streamWindow(1000, kLeastSlice, 4, 256, near), 58u);
  for (const int ranks : {16, 100, 1000, 16'000}) {
    const size_t window = streamWindow(1000, kPieceBytes, ranks, 256, far);
    CHECK(window >= 1 &&
          window * static_cast<size_t>(ranks) <=
              std::max<size_t>(kMostUnderWay / kPieceBytes, static_cast<size_t>(ranks)));
  }
}

TEST(shared_memory_gives_the_same_bits) {
  for (int P : {2, 3, 5}) {
    const auto cases = stream_cases::reductions(P, static_cast<uint32_t>(P), 60000);
    for (AddOrder order : {AddOrder::kRing, AddOrder::kRank}) {
      const auto reduce = [&](Group& group) {
        for (const stream_cases::Reducing& c : cases) {
          stream_cases::Bytes data = c.addends[stream_cases::at(group.rank())];
          group.run({AllReduce{data.data(), c.count, c.dtype, c.op, c.factor(group.rank())}});
          c.expect(data.data(), c.wanted({.order = order}).data(), c.count,
                   "all_reduce in shared memory");
        }
      };
      SharedOptions shared;
      shared.order = order;
      ranks::inGroup(P, reduce, {.name = "test", .shared = shared});
    }
  }
}
