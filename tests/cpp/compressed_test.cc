// Compressed all-reduce: its bits, over both wires and over the stand-in;
// its errors, which account for all that is lost; and how these grow with the ranks.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "collectives/collectives.h"
#include "compressed_cases.h"
#include "ranks.h"
#include "stand_in_transport.h"
#include "stream_cases.h"

using namespace ringreduce;
using namespace compressed_cases;

namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kMostRanks = 5;
#else
constexpr int kMostRanks = 8;
#endif

void overStandIn(int P, const std::function<void(stream_cases::Caller&)>& body,
                 const StreamOptions& options = {}) {
  stand_in::overStandIn(P, options,
                        [&](stream_cases::Caller& call, stand_in::Net&) { body(call); });
}

std::vector<int> everyRank(int P) {
  std::vector<int> all;
  for (int r = 0; r < P; ++r) all.push_back(r);
  return all;
}

// The root mean square of what is wrong with an average of ranks whose addends are nearly the same,
// as gradients can be: then partial sums grow, and their codes' errors with them.
double errorOf(int P, Codec codec, CodedSchedule schedule) {
  const size_t count = 20'000;
  Case c(P, count, {codec}, ReduceOp::kAvg, schedule);
  const Floats common = addends(count, P, 2);
  for (Floats& input : c.inputs)
    for (size_t i = 0; i < count; ++i) input[i] = common[i] + 0.1F * input[i];
  c.compute();
  double square = 0;
  for (size_t i = 0; i < count; ++i) {
    double exact = 0;
    for (const Floats& input : c.inputs) exact += static_cast<double>(input[i]);
    const double wrong = static_cast<double>(c.result[i]) - exact / P;
    square += wrong * wrong;
  }
  return std::sqrt(square / static_cast<double>(count));
}

}  // namespace

TEST(every_codec_and_schedule_over_the_stand_in) {
  for (int P = 1; P <= kMostRanks; ++P) {
    const std::vector<Case> all = cases(P, sizes(P));
    overStandIn(P, [&](stream_cases::Caller& call) {
      for (const Case& c : all)
        c.run(call.transport.rank(), [&](const CompressedAllReduce& a) { call(a); });
    });
  }
}

TEST(many_slices_and_short_windows) {
  for (const int P : {2, 3, 5}) {
    const std::vector<Case> all = cases(P, {at(P) * 11 * kChunkElements - 5});
    for (const size_t window : {1, 2, 4, 100})
      overStandIn(P, [&](stream_cases::Caller& call) {
        for (const Case& c : all)
          c.run(call.transport.rank(), [&](const CompressedAllReduce& a) {
            call.perform([&](OverStreams& streams) {
              compressedAllReduce(streams, CompressedAmong{.call = a,
                                                           .ranks = everyRank(P),
                                                           .world_size = P,
                                                           .slice = kChunkElements,
                                                           .window = window});
            });
          });
      });
  }
}

TEST(some_of_the_ranks_in_any_order) {
  const std::vector<int> some{4, 0, 3};
  const std::vector<Case> all = cases(3, {1000});
  overStandIn(5, [&](stream_cases::Caller& call) {
    const auto place = std::ranges::find(some, call.transport.rank());
    for (const Case& c : all)
      call.perform([&](OverStreams& streams) {
        if (place == some.end()) return;
        const auto me = static_cast<int>(place - some.begin());
        Floats output(c.count), error(c.count);
        compressedAllReduce(streams, CompressedAmong{.call = c.call(c.inputs[at(me)].data(),
                                                                    output.data(), error.data()),
                                                     .ranks = some,
                                                     .world_size = 3});
        streams.transport.finish();
        c.expect(me, output, &error);
      });
  });
}

TEST(messages_of_one_caller_go_one_way) {
  const int P = 3;
  StreamOptions options;
  options.cost.crowd = 1;
  options.cost.memory = 0;
  const Case owner(P, 1000, {Codec::kInt4}, ReduceOp::kSum, CodedSchedule::kOwner);
  const Case ring(P, 1000, {Codec::kInt4}, ReduceOp::kSum, CodedSchedule::kRing);
  CHECK(owner.result != ring.result);
  for (const size_t chosen_for : {size_t{0}, size_t{10'000'000}})
    overStandIn(
        P,
        [&](stream_cases::Caller& call) {
          const int me = call.transport.rank();
          Floats output(owner.count), error(owner.count);
          CompressedAllReduce a =
              owner.call(owner.inputs[at(me)].data(), output.data(), error.data());
          a.schedule = CodedSchedule::kAuto;
          a.chosen_for = chosen_for;
          call(a);
          (chosen_for ? ring : owner).expect(me, output, &error);
        },
        options);
}

TEST(errors_account_for_all_that_is_lost) {
  for (int P = 1; P <= 8; ++P)
    for (const Case& c : cases(P, {1000, at(P) * 1024 + 1}))
      if (const size_t wrong = unaccounted(c.inputs, c.errors, c.result, c.op == ReduceOp::kAvg);
          wrong > 0)
        check::fail(__FILE__, __LINE__, std::to_string(wrong) + " elements of " + c.text());
}

TEST(the_account_is_not_settled_by_anything) {
  Case c(4, 3000, {Codec::kInt8}, ReduceOp::kAvg, CodedSchedule::kOwner);
  for (int r = 0; r < 4; ++r) {
    std::vector<Floats> forgotten = c.errors;
    std::ranges::fill(forgotten[at(r)], 0.F);
    CHECK(unaccounted(c.inputs, forgotten, c.result, true) > 1000);
  }
  // The second encoding's error in units of the average.
  std::vector<Floats> undivided = c.errors;
  for (float& e : undivided[0]) e /= 4;
  CHECK(unaccounted(c.inputs, undivided, c.result, true) > 500);
}

// Prints both, as multiples of what it is for two ranks.
TEST(the_error_of_owners_does_not_grow_with_the_ranks) {
  for (int codec = 0; codec < kCodecs; ++codec) {
    const auto which = static_cast<Codec>(codec);
    const double first = errorOf(2, which, CodedSchedule::kOwner);
    std::printf("%-9s", name(which));
    for (const int P : {2, 4, 8, 16}) {
      const double owner = errorOf(P, which, CodedSchedule::kOwner),
                   ring = errorOf(P, which, CodedSchedule::kRing);
      std::printf("  %2d ranks: owner %.2f, ring %.2f", P, owner / first, ring / first);
      CHECK(owner < 1.05 * first);
      CHECK(P < 4 || ring > 1.1 * owner);
      CHECK(P < 16 || ring > 1.3 * owner);
    }
    std::printf("\n");
  }
}

TEST(the_ring_is_taken_where_it_saves_much) {
  const size_t large = 25 << 20;
  const auto choice = [](size_t bytes, int P, const WireCost& cost) {
    return choose({.kind = Kind::kCompressedAllReduce, .bytes = bytes, .coded_bytes = bytes / 4},
                  {P}, cost);
  };
  const auto rings = [&](size_t bytes, int P, const WireCost& cost) {
    return choice(bytes, P, cost).taken.algorithm == Algorithm::kRing;
  };
  const WireCost slow{.byte = 80e-9};  // 100 Mbit/s
  WireCost shared = slow;
  shared.ranks_on_host = 4;
  for (const int P : {2, 4, 8}) CHECK(!rings(large, P, slow));
  CHECK(rings(large, 8, shared));
  CHECK(!rings(1000, 8, shared));
  // What coding costs is as much by either: where it is all, nothing is saved.
  shared.memory = 1;
  CHECK(!rings(large, 8, shared));
  // Here the ring is quicker, but saves too little.
  const AlgorithmChoice close = choice(large, 8, slow);
  CHECK(close.taken.seconds >
        std::ranges::min(close.candidates(), {}, &Candidate::seconds).seconds);
  CHECK(codedScheduleNamed("owner") == CodedSchedule::kOwner && !codedScheduleNamed("owners"));
}

TEST(what_is_not_finite_arrives_as_such_everywhere) {
  for (const float bad : {INFINITY, -INFINITY, NAN})
    for (int codec = 0; codec < kCodecs; ++codec)
      for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing}) {
        const int P = 3;
        Case c(P, 1000, {static_cast<Codec>(codec)}, ReduceOp::kSum, schedule);
        for (const size_t i : {size_t{3}, size_t{500}, size_t{999}}) c.inputs[i % 3][i] = bad;
        c.compute();
        overStandIn(P, [&](stream_cases::Caller& call) {
          Floats output(c.count), error(c.count);
          call(c.call(c.inputs[at(call.transport.rank())].data(), output.data(), error.data()));
          for (const size_t i : {size_t{3}, size_t{500}, size_t{999}})
            CHECK(!std::isfinite(output[i]));
          CHECK(std::isfinite(output[200]));
          for (const float e : error) CHECK(std::isfinite(e));
          c.expect(call.transport.rank(), output, &error);
        });
      }
}

// All values fit into a float16, and so does their average, but not their sum.
TEST(an_average_of_what_fits_is_finite) {
  const float each = 60'000;
  for (const int P : {2, 3, 4, 7})
    for (int codec = 0; codec < kCodecs; ++codec)
      for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing})
        for (const bool stochastic : {false, true}) {
          Case c(P, 1000, {static_cast<Codec>(codec), stochastic, 5}, ReduceOp::kAvg, schedule);
          for (Floats& input : c.inputs) std::ranges::fill(input, each);
          c.compute();
          overStandIn(P, [&](stream_cases::Caller& call) {
            c.run(call.transport.rank(), [&](const CompressedAllReduce& a) { call(a); });
          });
          for (const float value : c.result) CHECK(std::fabs(value - each) < 0.25F * each);
          CHECK_EQ(unaccounted(c.inputs, c.errors, c.result, true), 0u);
        }
}

// No rank has 65504 instead.
TEST(what_does_not_fit_arrives_as_infinite) {
  for (const int P : {2, 3, 5})
    for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing})
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
        Case c(P, 1000, {Codec::kFloat16}, op, schedule);
        for (Floats& input : c.inputs) std::ranges::fill(input, -2 * 65504.F);
        c.compute();
        for (const float value : c.result) CHECK_EQ(value, -INFINITY);
        overStandIn(P, [&](stream_cases::Caller& call) {
          c.run(call.transport.rank(), [&](const CompressedAllReduce& a) { call(a); });
        });
      }
}
