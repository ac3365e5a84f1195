// What every collective must refuse: arguments that cannot be, and ranks that disagree on parts
// (tests/failures/test_rules.py has whatever else ranks may disagree on).  Also the monitored
// barrier, which is there for its errors.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace ringreduce;
using ranks::failureOf;
using ranks::waitForFailure;

namespace {

constexpr int kRanks = 4;

// Memory for one rank, large enough for whatever is called here by mistake.
struct Room {
  std::vector<uint64_t> in = std::vector<uint64_t>(4096), out = std::vector<uint64_t>(4096);
  std::vector<const void*> inputs = std::vector<const void*>(kRanks, in.data());
  std::vector<void*> outputs = std::vector<void*>(kRanks, out.data());
};

struct Knobs {
  size_t n = 8;
  int root = 1;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::vector<size_t> counts = std::vector<size_t>(kRanks, 8);
  bool even = true;
  uint64_t shape = 0;
};

Operation make(Kind kind, int rank, Room& room, const Knobs& k) {
  const auto [n, root, dtype, op, counts, even, shape] = k;
  const bool mine = rank == root;
  switch (kind) {
    case Kind::kAllReduce:
      return {AllReduce{room.out.data(), n, dtype, op}};
    case Kind::kReduce:
      return {Reduce{room.in.data(), room.out.data(), n, dtype, op, root}};
    case Kind::kReduceScatter:
      return {ReduceScatter{room.inputs, counts, room.out.data(), dtype, op}};
    case Kind::kBroadcast:
      return {Broadcast{room.out.data(), n, dtype, root}};
    case Kind::kAllGather:
      return {AllGather{room.in.data(), room.outputs, counts, dtype}};
    case Kind::kGather:
      return {Gather{room.in.data(), mine ? room.outputs : std::vector<void*>{}, n, dtype, root}};
    case Kind::kScatter:
      return {Scatter{mine ? room.inputs : std::vector<const void*>{}, room.out.data(), n, dtype,
                      root}};
    case Kind::kAllToAll:
      return {AllToAll{room.inputs, room.outputs, counts, counts, even, dtype}};
    case Kind::kBarrier:
      return {Barrier{}};
    case Kind::kSparseAllReduce: {
      const AllGatherUnknown gather{room.in.data(), 3, dtype,
                                    [&room](const auto&) { return room.outputs; }};
      return {SparseAllReduce{gather, n, dtype, op, shape}};
    }
    case Kind::kMonitoredBarrier:
      return {MonitoredBarrier{}};
    case Kind::kCompressedAllReduce: {
      auto* const data = reinterpret_cast<float*>(room.out.data());
      return {CompressedAllReduce{
          .input = data, .output = data, .count = n, .coding = {Codec::kInt8}, .op = op}};
    }
  }
  throw std::logic_error("no such kind");
}

constexpr Kind kKinds[] = {
    Kind::kReduce,          Kind::kReduceScatter,    Kind::kAllGather,
    Kind::kGather,          Kind::kScatter,          Kind::kAllToAll,
    Kind::kSparseAllReduce, Kind::kMonitoredBarrier, Kind::kCompressedAllReduce};

// One rank calls another thing than the others: all of them learn it, and who it was.
void expectMismatch(const std::string& what, Kind kind, const Knobs& knobs) {
  for (int odd : {0, 2}) {
    try {
      ranks::inGroup(kRanks, [&](Group& group) {
        Room room;
        const bool differs = group.rank() == odd;
        const Operation mine = make(kind, group.rank(), room, differs ? knobs : Knobs{});
        const auto twice = [&] {
          group.run(mine);
          group.run({Barrier{}});
        };
        const std::string words = "rank " + std::to_string(odd) + " called " + name(kind);
        CHECK(failureOf(twice, words) == Failure::kMismatch);
        CHECK(group.failure() == Failure::kMismatch);
      });
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__,
                  name(kind) + (", other " + what) + " on rank " + std::to_string(odd) + ": " +
                      error.what());
    }
  }
}

}  // namespace

TEST(ranks_that_differ_in_their_parts_only) {
  const std::vector<size_t> uneven{7, 9, 8, 8};  // as many elements in all
  for (Kind kind : {Kind::kReduceScatter, Kind::kAllGather})
    expectMismatch("parts", kind, {.counts = uneven});
  expectMismatch("evenness", Kind::kAllToAll, {.even = false});
  for (Kind kind : {Kind::kReduceScatter, Kind::kAllGather})
    ranks::inGroup(kRanks, [&](Group& group) {
      Room room;
      const bool odd = group.rank() == 3;
      const Knobs knobs{.counts = odd ? std::vector<size_t>{9, 7, 8, 8} : uneven};
      CHECK(failureOf([&] { group.run(make(kind, group.rank(), room, knobs)); }, "rank 3 called") ==
            Failure::kMismatch);
    });
}

TEST(all_to_all_names_who_sends_what_another_does_not_expect) {
  for (int longer : {0, 1})  // the message, or what is expected of it
    ranks::inGroup(kRanks, [&](Group& group) {
      Room room;
      AllToAll call{room.inputs, room.outputs, {5, 5, 5, 5}, {5, 5, 5, 5}, false, DType::kInt64};
      if (group.rank() == 1 && longer == 0) call.send_counts[2] = 7;
      if (group.rank() == 2 && longer == 1) call.recv_counts[1] = 7;
      const std::string words = longer == 0
                                    ? "rank 1 sends 7 elements to rank 2, which expects 5 elements"
                                    : "rank 1 sends 5 elements to rank 2, which expects 7 elements";
      const auto once_or_twice = [&] {
        group.run({call});
        // In shared memory all see all counts; over sockets each those of its own parts, and who
        // has got these hears of the rest at its next call.
        if (ranks::overSockets()) group.run({Barrier{}});
      };
      CHECK(failureOf(once_or_twice, words) == Failure::kMismatch);
    });
  ranks::inGroup(2, [](Group& group) {  // to itself
    Room room;
    AllToAll call{room.inputs, room.outputs, {1, 1}, {1, 1}, false, DType::kInt64};
    call.inputs.resize(2);
    call.outputs.resize(2);
    if (group.rank() == 1) call.recv_counts[1] = 0;
    CHECK(failureOf([&] { group.run({call}); },
                    "rank 1 sends 1 element to rank 1, which expects 0 elements") ==
          Failure::kMismatch);
  });
}

// Each is refused where it is called, and nobody else hears of it.
TEST(bad_arguments_are_refused_before_anything_is_sent) {
  ranks::inGroup(kRanks, [](Group& group) {
    const int me = group.rank();
    Room room;
    std::vector<std::pair<const char*, Operation>> bad;
    const auto add = [&](const char* why, Kind kind, const Knobs& knobs, int as_rank) {
      bad.emplace_back(why, make(kind, as_rank, room, knobs));
    };
    for (Kind kind : {Kind::kReduce, Kind::kGather, Kind::kScatter})
      for (int root : {-1, kRanks}) add("rank", kind, {.root = root}, root);
    for (Kind kind : {Kind::kReduce, Kind::kReduceScatter, Kind::kSparseAllReduce}) {
      add("BAND", kind, {.op = ReduceOp::kBand}, me);
      add("complex64", kind, {.dtype = DType::kComplex64}, me);
      add("PREMUL_SUM", kind, {.dtype = DType::kInt32, .op = ReduceOp::kPremulSum}, me);
    }
    for (Kind kind : {Kind::kReduceScatter, Kind::kAllGather})
      add("3 counts", kind, {.counts = {1, 1, 1}}, me);
    add("3 send counts", Kind::kAllToAll, {.counts = {1, 1, 1}}, me);
    const auto change = [&]<class Call>(const char* why, Call call, auto how) {
      how(call);
      bad.emplace_back(why, Operation{call});
    };
    const std::vector<size_t> eight(kRanks, 8);
    const ReduceScatter reduce_scatter{room.inputs, eight, room.out.data(), DType::kFloat32,
                                       ReduceOp::kSum};
    change("5 inputs", reduce_scatter, [](auto& c) { c.inputs.push_back(c.inputs[0]); });
    change("0 inputs", reduce_scatter, [](auto& c) { c.inputs.clear(); });
    const AllGather all_gather{room.in.data(), room.outputs, eight, DType::kFloat32};
    change("3 outputs", all_gather, [](auto& c) { c.outputs.pop_back(); });
    change("0 counts", all_gather, [](auto& c) { c.counts.clear(); });
    const AllToAll all_to_all{room.inputs, room.outputs, eight, eight, true, DType::kFloat32};
    change("3 inputs", all_to_all, [](auto& c) { c.inputs.pop_back(); });
    change("3 outputs", all_to_all, [](auto& c) { c.outputs.pop_back(); });
    change("3 receive counts", all_to_all, [](auto& c) { c.recv_counts.pop_back(); });
    change("equal", all_to_all, [](auto& c) { c.send_counts[3] = 9; });
    change("equal", all_to_all, [](auto& c) { c.recv_counts[0] = 7; });
    const Gather gather{room.in.data(), room.outputs, 8, DType::kFloat32, me};
    change("3 outputs", gather, [](auto& c) { c.outputs.pop_back(); });
    change("0 outputs", gather, [](auto& c) { c.outputs.clear(); });
    const Scatter scatter{room.inputs, room.out.data(), 8, DType::kFloat32, me};
    change("5 inputs", scatter, [](auto& c) { c.inputs.push_back(c.inputs[0]); });
    change("0 inputs", scatter, [](auto& c) { c.inputs.clear(); });

    for (int r = 0; r < kRanks; ++r) {
      for (const auto& [why, operation] : bad) {
        if (me != r) continue;
        CHECK(failureOf([&] { group.run(operation); }, why) == Failure::kArgument);
        CHECK(failureOf([&] { group.submit(operation, nullptr); }, why) == Failure::kArgument);
      }
      int32_t x = me;
      group.run({AllReduce{&x, 1, DType::kInt32, ReduceOp::kSum}});
      CHECK_EQ(x, kRanks * (kRanks - 1) / 2);
    }
    CHECK_EQ(group.operations(), static_cast<uint64_t>(kRanks));
  });
}

TEST(a_monitored_barrier_names_who_did_not_come) {
  ranks::inGroup(3, [](Group& group) {
    for (int i = 0; i < 20; ++i) group.run({MonitoredBarrier{}});
    if (group.rank() == 1) waitForFailure(group);
    const Operation hasty{MonitoredBarrier{}, 1500 * kMillisecond};
    CHECK(failureOf([&] { group.run(hasty); },
                    "Rank 1 failed to pass monitoredBarrier in 1500 ms") == Failure::kTimeout);
  });
}

TEST(every_collective_has_a_deadline_and_misses_who_left) {
  for (Kind kind : kKinds)
    for (bool leaves : {false, true}) {
      ranks::MeetingPoint ahead(kRanks - 1);
      ranks::inGroup(kRanks, [&](Group& group) {
        if (group.rank() == 2 && leaves) return;
        if (group.rank() == 2) waitForFailure(group);
        Room room;
        // A broadcast from rank 0 ends without rank 2, which is behind the others then.
        if (group.rank() != 2 && !leaves) {
          group.run({Broadcast{room.out.data(), 1, DType::kUInt8, 0}});
          ahead.wait();
        }
        // A monitored barrier names all ranks that are late, so it gets more time.
        const Nanos timeout =
            (kind == Kind::kMonitoredBarrier && !leaves ? 1500 : 250) * kMillisecond;
        const auto twice = [&] {  // in some, a rank need not wait for this very one
          for (int i = 0; i < 2; ++i) {
            Operation call = make(kind, group.rank(), room, {});
            call.timeout = timeout;
            group.run(call);
          }
          group.run({.call = Barrier{}, .timeout = timeout});
        };
        CHECK(failureOf(twice, kind == Kind::kMonitoredBarrier ? "ank 2" : "2 (pid") ==
              (leaves ? Failure::kPeerLost : Failure::kTimeout));
      });
    }
}
