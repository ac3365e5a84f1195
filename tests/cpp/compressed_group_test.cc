// Compressed all-reduce in whole groups, over shared memory, over sockets and between hosts of
// several ranks: the same bits, the failures, and the bytes that go out.
#include <atomic>
#include <cmath>
#include <csignal>
#include <thread>

#include "collectives/collectives.h"
#include "compressed_cases.h"
#include "epoch/wires.h"
#include "processes.h"
#include "ranks.h"
#include "tcp_world.h"

using namespace ringreduce;
using namespace compressed_cases;
using ranks::failureOf;

namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kMostRanks = 5;
constexpr size_t kMany = 300'007;
#else
constexpr int kMostRanks = 8;
constexpr size_t kMany = 1'000'007;
#endif

void expectCases(int P, const std::vector<Case>& all) {
  ranks::inGroup(P, [&](Group& group) {
    for (const Case& c : all)
      c.run(group.rank(), [&](const CompressedAllReduce& a) { group.run({a}); });
  });
}

// Runs body over both wires.
void overEach(const std::function<void()>& body) {
  body();
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  body();
}

CompressedAllReduce some(Floats& data) {
  return {.input = data.data(),
          .output = data.data(),
          .count = data.size(),
          .coding = {Codec::kInt8},
          .op = ReduceOp::kSum};
}

// Failures are told as this operation's by all but the doomed.
void expectEnds(const processes::Ends& ends, int doomed) {
  for (size_t r = 0; r < ends.size(); ++r)
    if (static_cast<int>(r) != doomed) CHECK_EQ(ends[r], "");
}

processes::Ends inProcesses(int P, const std::function<void(Group&)>& body) {
  processes::SharedStore store;
  return processes::run(P, [&](int r) {
    const auto group = Group::create(store, r, P, {.name = "test"});
    body(*group);
  });
}

}  // namespace

TEST(both_wires_give_the_bits_that_are_worked_out) {
  for (int P = 1; P <= kMostRanks; ++P) {
    const std::vector<Case> all = cases(P, sizes(P));
    overEach([&] { expectCases(P, all); });
  }
}

TEST(messages_of_many_slices) {
  for (const int P : {2, 3}) {
    std::vector<Case> all = cases(P, {kMany});
    overEach([&] { expectCases(P, all); });
  }
}

TEST(small_slots) {
  const ranks::Setting slots("RINGREDUCE_SLOT_BYTES", "4096");
  expectCases(4, cases(4, {1, 129, 20'000}));
}

TEST(a_choice_is_made_where_none_is_asked_for) {
  const Case c(3, 5000, {Codec::kInt4}, ReduceOp::kAvg, CodedSchedule::kOwner);
  overEach([&] {
    ranks::inGroup(3, [&](Group& group) {
      Floats output(c.count);
      CompressedAllReduce a = c.call(c.inputs[at(group.rank())].data(), output.data(), nullptr);
      a.schedule = CodedSchedule::kAuto;
      group.run({a});
      c.expect(group.rank(), output, nullptr);
    });
  });
}

// What a rank hands to its sockets, against what a sum of float32 takes.
TEST(bytes_on_the_wire) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  constexpr size_t kCount = 1 << 20;
  for (const int P : {2, 4})
    ranks::inGroup(P, [&](Group& group) {
      Floats data(kCount, 1.F);
      uint64_t before = group.epoch()->wires->bytesSent();
      const auto sent = [&](const Operation& operation) {
        group.run(operation);
        const uint64_t now = group.epoch()->wires->bytesSent();
        return static_cast<double>(now - std::exchange(before, now));
      };
      const double exact = sent({AllReduce{data.data(), kCount, DType::kFloat32, ReduceOp::kAvg}});
      const double wanted = 2. * (P - 1) / P * kCount * sizeof(float);
      CHECK(exact > wanted && exact < 1.01 * wanted);
      for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing})
        for (const auto& [codec, most] : {std::pair{Codec::kBfloat16, 0.501},
                                          {Codec::kFloat16, 0.501},
                                          {Codec::kInt8, 0.27},
                                          {Codec::kInt4, 0.15}}) {
          CompressedAllReduce a = some(data);
          a.coding.codec = codec;
          a.schedule = schedule;
          a.op = ReduceOp::kAvg;
          const double coded = sent({a});
          CHECK(coded < most * exact && coded > 0.8 * most * exact);
        }
    });
}

TEST(between_hosts_only_what_leaves_them_is_coded) {
  for (const std::string letters : {"aabb", "abcabc"}) {
    const int P = static_cast<int>(letters.size());
    for (const size_t count : {size_t{0}, size_t{1}, size_t{300}, size_t{50'000}})
      for (const CodedSchedule schedule : {CodedSchedule::kAuto, CodedSchedule::kRing}) {
        std::vector<Floats> inputs;
        for (int r = 0; r < P; ++r) inputs.push_back(addends(count, r));
        processes::SharedStore store;
        // Everybody's result and errors, where all can look.
        const size_t all = at(P) * 2 * count * sizeof(float) + 1;
        auto* const shared = static_cast<float*>(
            mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
        CHECK(shared != MAP_FAILED);
        const auto ends = processes::run(P, [&](int r) {
          const ranks::Setting host("RINGREDUCE_HOSTID", letters.substr(at(r), 1));
          const auto group = Group::create(store, r, P, {.name = "test"});
          float* const output = shared + at(r) * 2 * count;
          for (int turn = 0; turn < 2; ++turn) {
            CompressedAllReduce a{.input = inputs[at(r)].data(),
                                  .output = output,
                                  .count = count,
                                  .coding = {Codec::kInt8, true, 11},
                                  .op = ReduceOp::kAvg,
                                  .schedule = schedule,
                                  .error = output + count};
            if (turn == 1) {  // in place
              std::ranges::copy(inputs[at(r)], output);
              a.input = output;
            }
            group->run({a});
          }
          if (count >= 50'000) {
            const uint64_t before = group->epoch()->wires->bytesSent();
            Floats data(count);
            group->run({some(data)});
            const auto sent = static_cast<double>(group->epoch()->wires->bytesSent() - before);
            CHECK(sent < 0.27 * static_cast<double>(count) * sizeof(float));
          }
        });
        for (const std::string& end : ends) CHECK_EQ(end, "");
        std::vector<Floats> errors;
        for (int r = 0; r < P; ++r) {
          const float* const output = shared + at(r) * 2 * count;
          CHECK(sameBits(output, shared, count));
          errors.emplace_back(output + count, output + 2 * count);
        }
        CHECK_EQ(unaccounted(inputs, errors, Floats(shared, shared + count), true), 0u);
        munmap(shared, all);
      }
  }
}

// The sum of a host may be beyond a codec's range where the average is not.
TEST(averages_of_several_hosts_are_finite_if_they_and_all_values_are) {
  constexpr size_t kCount = 3000, kBad = 777;
  for (const std::string letters : {"aabb", "abcabcabc"}) {
    const int P = static_cast<int>(letters.size());
    processes::SharedStore store;
    const auto ends = processes::run(P, [&](int r) {
      const ranks::Setting host("RINGREDUCE_HOSTID", letters.substr(at(r), 1));
      const auto group = Group::create(store, r, P, {.name = "test"});
      for (int codec = 0; codec < kCodecs; ++codec)
        for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing})
          for (const float bad : {60'000.F, NAN, -INFINITY}) {
            Floats data(kCount, 60'000.F), error(kCount, 7.F);
            if (r == 1) data[kBad] = bad;
            group->run({CompressedAllReduce{.input = data.data(),
                                            .output = data.data(),
                                            .count = kCount,
                                            .coding = {static_cast<Codec>(codec)},
                                            .op = ReduceOp::kAvg,
                                            .schedule = schedule,
                                            .error = error.data()}});
            CHECK_EQ(std::isfinite(data[kBad]), std::isfinite(bad));
            for (const float e : error) CHECK(std::isfinite(e));
            for (size_t i = 0; i < kCount; ++i)
              CHECK(i / kCodecBlock == kBad / kCodecBlock || std::fabs(data[i] - 60'000) < 600);
          }
    });
    for (const std::string& end : ends) CHECK_EQ(end, "");
  }
}

TEST(who_is_killed_is_named) {
  overEach([] {
    const auto ends = inProcesses(3, [](Group& group) {
      Floats data(200'000, 1.F);
      group.run({some(data)});
      std::thread killer;
      if (group.rank() == 1)
        killer = std::thread([] {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          kill(getpid(), SIGKILL);
        });
      const auto failure = failureOf(
          [&] {
            for (int i = 0;; ++i) {
              CompressedAllReduce a = some(data);
              a.schedule = i % 2 ? CodedSchedule::kRing : CodedSchedule::kOwner;
              group.run({a});
            }
          },
          "rank 1 (pid ");
      CHECK(failure == Failure::kPeerLost);
    });
    expectEnds(ends, 1);
    CHECK(ends[1].starts_with("killed by signal"));
  });
}

TEST(who_does_not_come_is_named_at_the_deadline) {
  overEach([] {
    expectEnds(inProcesses(3,
                           [](Group& group) {
                             Floats data(1000, 1.F);
                             group.run({some(data)});
                             if (group.rank() == 2) {
                               while (!group.failed()) std::this_thread::yield();
                               return;
                             }
                             group.setTimeout(1500 * kMillisecond);
                             CHECK(failureOf([&] { group.run({some(data)}); }, "rank 2 (pid ") ==
                                   Failure::kTimeout);
                           }),
               -1);
  });
}

TEST(who_calls_another_one_is_named_with_what_it_called) {
  struct Difference {
    std::function<void(CompressedAllReduce&)> make;
    const char* words;
  };
  const std::vector<Difference> differences{
      {[](auto& a) { a.coding.codec = Codec::kInt4; }, "int4, auto"},
      {[](auto& a) { a.schedule = CodedSchedule::kRing; }, "int8, ring"},
      {[](auto& a) { a.coding.stochastic = true; }, "stochastic"},
      {[](auto& a) { a.count -= 1; }, "999 elements"},
      {[](auto& a) { a.op = ReduceOp::kAvg; }, "AVG"}};
  overEach([&] {
    for (const Difference& difference : differences)
      ranks::inGroup(3, [&](Group& group) {
        Floats data(1000, 1.F);
        CompressedAllReduce a = some(data);
        if (group.rank() == 2) difference.make(a);
        CHECK(failureOf([&] { group.run({a}); }, difference.words) == Failure::kMismatch);
      });
  });
  // The seed as well, where it makes a difference, and only there.
  ranks::inGroup(2, [&](Group& group) {
    Floats data(1000, 1.F);
    CompressedAllReduce a = some(data);
    a.coding.seed = 1 + at(group.rank());
    group.run({a});
    a.coding.stochastic = true;
    CHECK(failureOf([&] { group.run({a}); }, "seed and tensors hash") == Failure::kMismatch);
  });
}

TEST(what_cannot_be_is_refused) {
  ranks::inGroup(2, [](Group& group) {
    Floats data(10, 1.F);
    CompressedAllReduce a = some(data);
    a.op = ReduceOp::kMax;
    CHECK(failureOf([&] { group.run({a}); }, "SUM or AVG") == Failure::kArgument);
    a = some(data);
    a.coding.codec = static_cast<Codec>(9);
    CHECK(failureOf([&] { group.run({a}); }, "no such codec") == Failure::kArgument);
    a = some(data);
    group.run({a});
  });
}

// Rank 2 sends bytes that no rank encodes, as its addends or as its sum.
TEST(what_cannot_be_decoded_names_whom_it_came_from) {
  constexpr int kRanks = 3;
  const size_t bytes = codedBytes(Codec::kInt8, kChunkElements);
  const std::vector<std::byte> zeros(bytes), broken(bytes, std::byte{0x80});
  for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing})
    for (const bool in_sum : {false, true}) {
      const auto first = [&] { return in_sum ? zeros.data() : broken.data(); };
      const auto sabotage = [&](Transport& transport) {
        if (schedule == CodedSchedule::kOwner) {
          for (const int r : {0, 1}) transport.send(r, first(), bytes);
          for (const int r : {0, 1}) transport.send(r, broken.data(), bytes);
        } else {  // addends of chunk 1, the sum so far of chunk 0, the sum of its own
          for (const std::byte* each : {first(), zeros.data(), broken.data()})
            transport.send(0, each, bytes);
        }
      };
      const auto failing = [&] {
        tcp_world::overTcp(kRanks, [&](stream_world::OneRank& one) {
          Floats data(kRanks * kChunkElements, 1.F);
          CompressedAllReduce a = some(data);
          a.schedule = schedule;
          one.operation([&](Transport& transport) {
            one.rank() == 2 ? sabotage(transport) : compressedAllReduce(one.over(), a);
          });
        });
      };
      // In the ring rank 2 sends sums before it has had what they are made of, which no rank does.
      // They may arrive where rank 0 has lent its own, and then rank 1 gets them from it.
      const std::string who = schedule == CodedSchedule::kOwner ? "rank 2: " : "";
      CHECK(failureOf(failing, who + "what came from it is nothing that int8 makes") ==
            Failure::kPeerLost);
    }
}
