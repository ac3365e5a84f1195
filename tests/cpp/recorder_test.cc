// Records of operations: none is lost or torn for a reader that keeps up, and they say which rank
// came last.
#include "group/recorder.h"

#include <atomic>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace ringreduce;

namespace {

// All of its words depend on the index.
OpRecord recordOf(uint64_t index) {
  const auto time = static_cast<Nanos>(index * 3);
  return {.index = index,
          .sequence = index + 1,
          .bytes = index * 7,
          .posted = time,
          .arrived = time + 1,
          .done = time + 2,
          .step = static_cast<uint32_t>(index),
          .state = OpRecord::State::kDone};
}

bool isWhole(const OpRecord& r) {
  const OpRecord expected = recordOf(r.index);
  return r.sequence == expected.sequence && r.bytes == expected.bytes &&
         r.posted == expected.posted && r.arrived == expected.arrived && r.done == expected.done &&
         r.step == expected.step;
}

}  // namespace

TEST(a_reader_that_keeps_up_loses_none) {
#ifdef __SANITIZE_THREAD__
  constexpr uint64_t kCount = 200'000;
#else
  constexpr uint64_t kCount = 2'000'000;
#endif
  Recorder recorder(6);
  std::atomic<uint64_t> read{0};
  std::thread writer([&] {
    for (uint64_t i = 0; i < kCount; ++i) {
      while (i - read > Recorder::kRecords / 2) std::this_thread::yield();
      OpRecord running = recordOf(i);
      running.state = OpRecord::State::kRuns;
      recorder.put(running);
      recorder.put(recordOf(i));
    }
  });
  uint64_t torn = 0, missing = 0;
  while (read < kCount) {
    uint64_t next = read;
    for (const OpRecord& record : recorder.since(next)) {
      if (record.state == OpRecord::State::kRuns) break;
      missing += record.index - next;
      torn += !isWhole(record);
      next = record.index + 1;
    }
    read = next;
  }
  writer.join();
  CHECK_EQ(missing, uint64_t{0});
  CHECK_EQ(torn, uint64_t{0});
}

TEST(the_last_ones_are_kept) {
  Recorder recorder(6);
  CHECK(recorder.since(0).empty());
  for (uint64_t i = 0; i < Recorder::kRecords + 10; ++i) recorder.put(recordOf(i));
  const std::vector<OpRecord> all = recorder.since(0);
  CHECK_EQ(all.size(), size_t{Recorder::kRecords});
  CHECK_EQ(all.front().index, uint64_t{10});
  CHECK_EQ(recorder.since(Recorder::kRecords + 9).size(), size_t{1});
  CHECK(recorder.since(Recorder::kRecords + 10).empty());
  CHECK_EQ(recorder.since(Recorder::kRecords + 11).size(), size_t{Recorder::kRecords});
}

TEST(the_latest_ranks_are_named_with_their_delay_after_the_median) {
  Recorder recorder(6);
  OpRecord record;
  recorder.setArrivals(record, {1000, 0, 5000, 1200, 9000, 1100}, RankMap({}, 6));
  CHECK_EQ(record.known, uint32_t{5});
  CHECK_EQ(record.first, Nanos{1000});
  CHECK_EQ(record.median, Nanos{1200});
  CHECK_EQ(record.latest[0].rank, 4);
  CHECK_EQ(record.latest[0].nanos, 7800.f);
  CHECK_EQ(record.latest[1].rank, 2);
  CHECK_EQ(record.latest[2].rank, 3);
  recorder.setArrivals(record, {0, 70}, RankMap({}, 2));
  CHECK_EQ(record.known, uint32_t{1});
  CHECK_EQ(record.latest[0].rank, -1);
}

TEST(the_sums_have_each_operation_and_what_was_waited_for_the_last_rank) {
  Recorder recorder(3);
  OpRecord record{.bytes = 100, .arrived = 1000, .done = 9000, .kind = Kind::kBroadcast};
  record.state = OpRecord::State::kDone;
  recorder.setArrivals(record, {1000, 1500, 4000}, RankMap({}, 3));
  recorder.count(record);
  record.clock_error = 2000;  // as much is not certain
  recorder.count(record);
  recorder.setArrivals(record, {1000, 1500, 12'000}, RankMap({}, 3));
  recorder.count(record);  // it ended before the last rank came
  record.clock_error = std::numeric_limits<Nanos>::max();
  recorder.count(record);
  record.clock_error = 0;
  recorder.setArrivals(record, {1000, 1500, 200'000'003}, RankMap({}, 3));
  record.arrived = 200'000'003;  // this rank is the last one
  record.done = record.arrived + 8000;
  recorder.count(record);
  record.state = OpRecord::State::kFailed;
  recorder.count(record);
  const Totals totals = recorder.totals();
  const Totals::OfKind& sums = totals.kinds[static_cast<size_t>(Kind::kBroadcast)];
  CHECK_EQ(sums.operations, uint64_t{5});
  CHECK_EQ(sums.bytes, uint64_t{500});
  CHECK_EQ(sums.nanos, Nanos{5 * 8000});
  CHECK_EQ(totals.failed, uint64_t{1});
  CHECK(totals.waited == (std::vector<Nanos>{0, 0, 3000 + 1000 + 6000}));
}

TEST(each_rank_records_who_came_last) {
  constexpr int kLast = 2;
  std::atomic<int> arrived{0};
  ranks::inGroup(4, [&](Group& group) {
    std::vector<float> data(1000, 1.f);
    const Operation sum{AllReduce{data.data(), data.size(), DType::kFloat32, ReduceOp::kSum}};
    for (int i = 0; i < 100; ++i) group.run(sum);  // between hosts, clocks are known by then
    while (ranks::overSockets() && !group.epoch()->arbiter->clock().isKnown())
      std::this_thread::yield();
    group.run({Barrier{}});
    const auto runs = [&] { return group.recorder().since(101).size() > 0; };
    if (group.rank() == kLast) {
      while (arrived < 3) std::this_thread::yield();
      group.run(sum);
    } else {
      std::thread watch([&] {
        while (!runs()) std::this_thread::yield();
        ++arrived;
      });
      group.run(sum);
      watch.join();
    }
    const std::vector<OpRecord> records = group.recorder().since(0);
    CHECK_EQ(records.size(), size_t{102});
    const OpRecord& last = records.back();
    CHECK(last.state == OpRecord::State::kDone);
    CHECK(last.kind == Kind::kAllReduce);
    CHECK_EQ(last.bytes, size_t{4000});
    CHECK(last.arrived <= last.first_data && last.first_data <= last.done);
    if (last.known == 4) CHECK_EQ(last.latest[0].rank, kLast);
    if (!ranks::overSockets()) CHECK_EQ(last.known, uint32_t{4});
  });
}

TEST(steps_and_buckets_are_counted) {
  ranks::inGroup(2, [&](Group& group) {
    float one = 1;
    const AllReduce sum{&one, 1, DType::kFloat32, ReduceOp::kSum};
    group.run({sum});
    std::vector<Operation> operations{{sum}, {Barrier{}}, {sum}};
    const auto handle = group.submitAll(operations, nullptr);
    group.await(*handle, kNever);
    const std::vector<OpRecord> records = group.recorder().since(0);
    CHECK_EQ(records.size(), size_t{4});
    const std::vector<uint32_t> buckets{0, 1, 2, 2};
    for (size_t i = 0; i < records.size(); ++i) {
      CHECK_EQ(records[i].bucket, buckets[i]);
      CHECK_EQ(records[i].step, records[0].step);
      CHECK(records[i].posted <= records[i].arrived);
    }
  });
}

TEST(a_failed_operation_has_a_record) {
  ranks::inGroup(2, [&](Group& group) {
    float data[2] = {1, 2};
    const size_t count = group.rank() == 0 ? 1 : 2;
    CHECK(ranks::failureOf([&] {
            group.run({AllReduce{data, count, DType::kFloat32, ReduceOp::kSum}});
          }) == Failure::kMismatch);
    const std::vector<OpRecord> records = group.recorder().since(0);
    CHECK_EQ(records.size(), size_t{1});
    CHECK(records[0].state == OpRecord::State::kFailed);
    CHECK(records[0].done != 0);
  });
}
