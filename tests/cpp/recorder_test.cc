// Records of operations: none is lost or torn for a reader that keeps up, and they say which rank
// came last.
#include "epoch/recorder.h"

#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <numeric>
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
          .step = static_cast<uint32_t>(index),
          .state = OpRecord::State::kDone,
          .done = time + 2,
          .first = time};
}

bool isWhole(const OpRecord& r) {
  const OpRecord expected = recordOf(r.index);
  return r.sequence == expected.sequence && r.bytes == expected.bytes &&
         r.posted == expected.posted && r.arrived == expected.arrived && r.done == expected.done &&
         r.step == expected.step && r.first == expected.first;
}

std::vector<int> first(int ranks) {
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

const auto none = [](int) { return Inherited{}; };

}  // namespace

TEST(a_reader_that_keeps_up_loses_none) {
#ifdef __SANITIZE_THREAD__
  constexpr uint64_t kCount = 200'000;
#else
  constexpr uint64_t kCount = 2'000'000;
#endif
  Recorder recorder(first(6));
  std::atomic<uint64_t> read{0};
  std::thread writer([&] {
    for (uint64_t i = 0; i < kCount; ++i) {
      while (i - read > Recorder::kRecords / 2) std::this_thread::yield();
      OpRecord running = recordOf(i);
      running.state = OpRecord::State::kRuns;
      recorder.begin(running);
      recorder.end(recordOf(i));
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
  Recorder recorder(first(6));
  CHECK(recorder.since(0).empty());
  for (uint64_t i = 0; i < Recorder::kRecords + 10; ++i) recorder.end(recordOf(i));
  const std::vector<OpRecord> all = recorder.since(0);
  CHECK_EQ(all.size(), size_t{Recorder::kRecords});
  CHECK_EQ(all.front().index, uint64_t{10});
  CHECK_EQ(recorder.since(Recorder::kRecords + 9).size(), size_t{1});
  CHECK(recorder.since(Recorder::kRecords + 10).empty());
  CHECK_EQ(recorder.since(Recorder::kRecords + 11).size(), size_t{Recorder::kRecords});
}

TEST(the_latest_ranks_are_named_with_their_delay_after_the_median) {
  Recorder recorder(first(6));
  OpRecord record;
  recorder.setArrivals(record, {1000, 0, 5000, 1200, 9000, 1100}, RankMap({}, 6), none);
  CHECK_EQ(record.known, uint32_t{5});
  CHECK_EQ(record.first, Nanos{1000});
  CHECK_EQ(record.median, Nanos{1200});
  CHECK_EQ(record.latest[0].rank, 4);
  CHECK_EQ(record.latest[0].nanos, 7800.f);
  CHECK_EQ(record.latest[1].rank, 2);
  CHECK_EQ(record.latest[2].rank, 3);
  recorder.setArrivals(record, {0, 70}, RankMap({}, 2), none);
  CHECK_EQ(record.known, uint32_t{1});
  CHECK_EQ(record.latest[0].rank, -1);
}

TEST(the_sums_have_each_operation_and_what_was_waited_for_the_last_rank) {
  Waits waits;
  Recorder recorder({5, 6, 7}, /*between_hosts=*/false, waits);
  OpRecord record{.bytes = 100, .arrived = 1000, .kind = Kind::kBroadcast, .done = 9000};
  record.state = OpRecord::State::kDone;
  recorder.setArrivals(record, {1000, 1500, 4000}, RankMap({}, 3), none);
  recorder.count(record);
  record.clock_error = 2000;  // as much is not certain
  recorder.count(record);
  recorder.setArrivals(record, {1000, 1500, 12'000}, RankMap({}, 3), none);
  recorder.count(record);  // it ended before the last rank came
  record.clock_error = std::numeric_limits<Nanos>::max();
  recorder.count(record);
  record.clock_error = 0;
  recorder.setArrivals(record, {1000, 1500, 200'000'003}, RankMap({}, 3), none);
  record.arrived = 200'000'003;  // this rank is the last one
  record.done = record.arrived + 8000;
  recorder.count(record);
  record.state = OpRecord::State::kFailed;
  recorder.count(record);
  Totals totals;
  recorder.addTo(totals);
  const Totals::OfKind& sums = totals.kinds[static_cast<size_t>(Kind::kBroadcast)];
  CHECK_EQ(sums.operations, uint64_t{5});
  CHECK_EQ(sums.bytes, uint64_t{500});
  CHECK_EQ(sums.nanos, Nanos{5 * 8000});
  CHECK_EQ(totals.failed, uint64_t{1});
  CHECK(totals.waited == (std::map<int, Nanos>{{7, 3000 + 1000 + 6000}}));
}

TEST(a_wait_is_put_on_the_rank_where_the_delay_began) {
  Waits waits;
  Recorder row({4, 5}, false, waits), column({4, 6}, false, waits), all({4, 5, 6}, false, waits);
  const Nanos start = monotonicNow();
  const auto ms = [&](Nanos n) { return start + n * kMillisecond; };
  const auto lasts = [](Nanos n) { return n * kMillisecond; };
  // This rank, 4, comes at 100 ms, and the other after 60 ms, of which it has waited 50 for rank 9.
  OpRecord record{.sequence = 12, .arrived = ms(100), .done = ms(161)};
  record.state = OpRecord::State::kDone;
  row.meet(record.arrived, /*by_all=*/true);
  row.setArrivals(record, {ms(100), ms(160)}, RankMap({}, 2),
                  [&](int) { return Inherited{.rank = 9, .micros = 50'000}; });
  row.count(record);
  Totals totals;
  row.addTo(totals);
  CHECK(totals.waited == (std::map<int, Nanos>{{5, lasts(10)}, {9, lasts(50)}}));
  // It passes that on in another group, but not in this one, where all ranks waited.
  const Waits::Reason why = column.reason(kNever);
  CHECK_EQ(why.told.rank, 9);
  CHECK_EQ(why.told.micros, uint32_t{50'000});
  CHECK_EQ(why.told.sequence, uint32_t{12});
  CHECK_EQ(why.group, row.id() * 2);
  CHECK_EQ(row.reason(kNever).told.rank, Inherited::kNone);
  CHECK_EQ(row.reason(0, 1, 0, kNever).told.rank, Inherited::kNone);  // nor in a message there
  // What was called before it had waited is not late since then.
  CHECK_EQ(column.reason(ms(140)).told.rank, Inherited::kNone);
  // Nor is what it calls after it has met these ranks elsewhere.
  all.meet(ms(170), /*by_all=*/true);
  CHECK_EQ(column.reason(kNever).told.rank, Inherited::kNone);
}

TEST(groups_of_the_same_ranks_and_larger_ones_tell_when_ranks_met) {
  Waits waits;
  const Waits::Group pair = waits.makeGroup({3, 1}), same = waits.makeGroup({1, 3});
  CHECK(pair.set == same.set && pair.id != same.id);
  const Nanos start = monotonicNow();
  const auto ms = [&](Nanos n) { return start + n * kMillisecond; };
  const auto waitsIn = [&](const Waits::Group& group, Nanos from, Nanos until, bool by_all) {
    waits.add({.from = ms(from),
               .until = ms(until),
               .rank = 7,
               .sequence = 1,
               .group = group.id,
               .set = group.set->id,
               .in_message = false,
               .by_all = by_all});
  };
  const auto micros = [&] { return waits.reason(*pair.set, start, kNever).told.micros; };
  // All ranks of the pair have waited too, in whatever group has them; a part of them has not.
  auto larger = std::make_unique<Waits::Group>(waits.makeGroup({1, 2, 3}));
  waitsIn(*larger, 1, 31, /*by_all=*/true);
  waitsIn(same, 31, 61, /*by_all=*/true);
  CHECK_EQ(micros(), uint32_t{0});
  waitsIn(waits.makeGroup({1, 2}), 61, 91, /*by_all=*/true);
  CHECK_EQ(micros(), uint32_t{30'000});
  waitsIn(same, 91, 101, /*by_all=*/false);
  CHECK_EQ(micros(), uint32_t{40'000});
  larger->set->met = ms(95);
  CHECK_EQ(micros(), uint32_t{6'000});
  larger.reset();  // a later one of the same ranks is another set
  CHECK_EQ(waits.makeGroup({2, 1, 3}).set->around.size(), size_t{1});
  for (int i = 0; i < 5000; ++i) waits.makeGroup({1, 2, 3, 4});
}

TEST(a_wait_that_computation_hides_is_no_reason) {
  Waits waits;
  Recorder here({0, 1}, false, waits), other({0, 2}, false, waits);
  const Nanos start = monotonicNow();
  OpRecord record{.arrived = start, .done = start + 60 * kMillisecond};
  record.state = OpRecord::State::kDone;
  here.setArrivals(record, {start, start + 60 * kMillisecond}, RankMap({}, 2), none);
  here.count(record, /*blocked_since=*/kNever);
  CHECK_EQ(other.reason(kNever).told.rank, Inherited::kNone);
  Totals totals;
  here.addTo(totals);
  CHECK_EQ(totals.waited.at(1), 60 * kMillisecond);
  here.count(record, /*blocked_since=*/start + 40 * kMillisecond);
  CHECK_EQ(other.reason(kNever).told.micros, uint32_t{20'000});
}

TEST(waits_at_the_same_time_delay_once) {
  Waits waits;
  Recorder here({0, 1}, false, waits);
  const Nanos start = monotonicNow();
  for (int group = 50; group < 52; ++group)
    waits.add({.from = start,
               .until = start + 30 * kMillisecond,
               .rank = 3,
               .sequence = 1,
               .group = static_cast<uint32_t>(group),
               .set = static_cast<uint32_t>(group),
               .in_message = false,
               .by_all = true});
  CHECK_EQ(here.reason(kNever).told.micros, uint32_t{30'000});
}

TEST(between_hosts_a_wait_for_a_rank_that_is_not_seen_is_passed_on_as_unknown) {
  Waits waits;
  Recorder ring({0, 1, 2}, /*between_hosts=*/true, waits), other({1, 7}, true, waits);
  OpRecord record{.bytes = 4, .arrived = monotonicNow()};
  record.state = OpRecord::State::kDone;
  for (int i = 0; i < 20; ++i) {
    record.arrived += kSecond;
    record.done = record.arrived + (i == 19 ? 50 : 2) * kMillisecond;
    ring.setArrivals(record, {record.arrived, 0, record.arrived}, RankMap({}, 3), none);
    CHECK_EQ(other.reason(kNever).told.rank, Inherited::kNone);
    ring.count(record);
  }
  CHECK_EQ(other.reason(kNever).told.rank, Inherited::kUnknown);
  CHECK_EQ(other.reason(kNever).told.micros, uint32_t{48'000});
  // A line may have been slow: then the others have not waited, and this rank is late for them too.
  CHECK_EQ(ring.reason(kNever).told.rank, Inherited::kUnknown);
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

TEST(queued_operations_and_messages_have_records) {
  ranks::inGroup(2, [&](Group& group) {
    float data[3] = {1, 2, 3};
    const int peer = 1 - group.rank();
    std::vector<Operation> operations(3, Operation{Barrier{}});
    if (group.rank() == 0) {
      // The other rank comes to the first one only after this one has looked.
      const auto handle = group.submitAll(operations, nullptr);
      group.hurry();
      while (group.recorder().since(0).empty()) std::this_thread::yield();
      const std::vector<OpRecord> queued = group.queued();
      CHECK_EQ(queued.size(), size_t{2});
      CHECK_EQ(queued[1].index, uint64_t{2});
      CHECK(queued[1].state == OpRecord::State::kQueued && queued[1].kind == Kind::kBarrier);
      const auto receive =
          group.post({Message::Direction::kReceive, peer, 7, data, 3, DType::kFloat32});
      CHECK_EQ(group.pendingMessages().size(), size_t{1});
      group.await(*group.post({Message::Direction::kSend, peer, 5, data, 3, DType::kFloat32}),
                  kNever);
      group.await(*handle, kNever);
      group.await(*receive, kNever);
      CHECK(group.queued().empty() && group.pendingMessages().empty());
    } else {
      group.await(*group.post({Message::Direction::kReceive, peer, 5, data, 3, DType::kFloat32}),
                  kNever);
      for (const Operation& operation : operations) group.run(operation);
      group.await(*group.post({Message::Direction::kSend, peer, 7, data, 3, DType::kFloat32}),
                  kNever);
    }
    const std::vector<OpRecord> messages = group.messages().since(0);
    CHECK_EQ(messages.size(), size_t{2});
    for (const OpRecord& one : messages) {
      CHECK_EQ(one.root, peer);
      CHECK_EQ(one.bytes, uint64_t{12});
      CHECK_EQ(one.sequence, uint64_t{0});
      CHECK(one.state == OpRecord::State::kDone && one.posted <= one.done);
      CHECK((one.message == OpRecord::Message::kSend) ==
            (one.bucket == (group.rank() == 0 ? 5u : 7u)));
    }
  });
}

TEST(a_message_that_comes_late_is_put_on_its_sender_and_passed_on) {
  std::atomic<bool> is_awaited = false;
  ranks::inGroup(2, [&](Group& group) {
    float data = 1;
    while (ranks::overSockets() && !group.epoch()->arbiter->clock().isKnown())
      std::this_thread::yield();
    group.run({Barrier{}});
    if (group.rank() == 0) {
      ranks::await("rank 1 waits", [&] { return is_awaited.load(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      group.await(*group.post({Message::Direction::kSend, 1, 0, &data, 1, DType::kFloat32}),
                  kNever);
      return;
    }
    const auto received =
        group.post({Message::Direction::kReceive, 0, 0, &data, 1, DType::kFloat32});
    is_awaited = true;
    group.await(*received, kNever);
    const OpRecord record = group.messages().since(0).back();
    CHECK_EQ(record.known, uint32_t{2});
    CHECK_EQ(record.latest[0].rank, 0);
    CHECK(record.latest[0].nanos > 50 * kMillisecond);
  });
}
