// Calls by the hierarchy: processes that pose as hosts of several ranks each.  Their results to the
// bit, and what becomes of failures while ranks wait inside their host.
#include "collectives/hierarchy.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <numeric>

#include "algorithm/cut.h"
#include "check.h"
#include "epoch/epoch.h"
#include "epoch/wires.h"
#include "processes.h"
#include "ranks.h"
#include "reduce_oracle.h"

using namespace ringreduce;
using oracle::Bytes;
using ranks::failureOf;

namespace {

size_t at(int i) {
  return static_cast<size_t>(i);
}

// Ranks of each host; rank r is on the host of letter r.
std::vector<std::vector<int>> ranksOf(const std::string& letters) {
  std::string seen;
  std::vector<std::vector<int>> hosts;
  for (size_t r = 0; r < letters.size(); ++r) {
    const size_t host = std::min(seen.find(letters[r]), seen.size());
    if (host == seen.size()) {
      seen += letters[r];
      hosts.emplace_back();
    }
    hosts[host].push_back(static_cast<int>(r));
  }
  return hosts;
}

GroupOptions hierarchical(Nanos timeout = 60 * kSecond) {
  SharedOptions shared;
  shared.algorithm = Algorithm::kHierarchical;
  shared.slot_bytes = 16 << 10;
  return {.name = "test", .timeout = timeout, .shared = shared};
}

// Runs body in a group, in a process for each rank.  Returns how they ended.
processes::Ends onHosts(const std::string& letters, const GroupOptions& options,
                        const std::function<void(Group&)>& body) {
  processes::SharedStore store;
  return processes::run(static_cast<int>(letters.size()), [&](int r) {
    const ranks::Setting host("RINGREDUCE_HOSTID", letters.substr(at(r), 1));
    const auto group = Group::create(store, r, static_cast<int>(letters.size()), options);
    body(*group);
  });
}

void expectWell(const processes::Ends& ends, int but = -1) {
  for (size_t r = 0; r < ends.size(); ++r)
    if (static_cast<int>(r) != but) CHECK_EQ(ends[r], "");
}

// An all-reduce of n elements of each rank, or a reduce-scatter of parts, and what must come of it.
struct Case {
  Case(const std::string& letters, DType dtype, ReduceOp op, size_t n,
       std::vector<size_t> counts = {})
      : dtype(dtype),
        op(op),
        n(n),
        counts(std::move(counts)),
        hosts(ranksOf(letters)),
        P(static_cast<int>(letters.size())) {
    addends = oracle::randomSources(dtype);
    addends.resize(at(P));
    for (Bytes& addend : addends) {
      const Bytes some = addend;
      addend.resize(n * width());
      for (size_t i = 0; i < addend.size(); ++i) addend[i] = some[i % some.size()];
    }
    compute();
  }

  static double factor(int rank) { return 0.5 + rank; }
  size_t width() const { return sizeOf(dtype); }
  DType partial() const { return isHalf(dtype) ? DType::kFloat32 : dtype; }
  AllReduce call(Bytes& data, int rank) const { return {data.data(), n, dtype, op, factor(rank)}; }

  // Where a rank's part begins.
  size_t beginOf(int rank) const {
    return std::accumulate(counts.begin(), counts.begin() + rank, size_t{0});
  }
  ReduceScatter call(const Bytes& data, void* output, int rank) const {
    ReduceScatter made{.inputs = {},
                       .counts = counts,
                       .output = output,
                       .dtype = dtype,
                       .op = op,
                       .factor = factor(rank)};
    for (int r = 0; r < P; ++r) made.inputs.push_back(data.data() + beginOf(r) * width());
    return made;
  }

  void compute() {
    const int H = static_cast<int>(hosts.size()), p = static_cast<int>(hosts[0].size());
    reduced.resize(n * width());
    for (int r = 0; r < P; ++r) inputs.push_back(prepared(r));
    for (int place = 0; place < p; ++place) {
      const Span part = Cut{n, p}.chunk(place);
      for (int owner = 0; owner < H; ++owner) {
        Span chunk = Cut{part.size, H}.chunk(owner);
        chunk.begin += part.begin;
        if (!counts.empty()) {
          const int rank = hosts[at(owner)][at(place)];
          chunk = {beginOf(rank), counts[at(rank)]};
        }
        add(chunk, place, owner);
      }
    }
  }

  // As the rank of that place on that host adds it.
  void add(Span chunk, int place, int owner) {
    const int H = static_cast<int>(hosts.size()), p = static_cast<int>(hosts[0].size());
    const ReduceOp inside = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
    std::vector<Bytes> sums;
    for (int k = 0; k < H; ++k) {
      const std::vector<int>& ranks = hosts[at(kthToAdd(owner, k, H))];
      std::vector<Bytes> ordered;
      for (int i = 0; i < p; ++i) {
        const Bytes& all = inputs[at(ranks[at(kthToAdd(place, i, p))])];
        const auto from = all.begin() + static_cast<long>(chunk.begin * sizeOf(partial()));
        ordered.emplace_back(from, from + static_cast<long>(chunk.size * sizeOf(partial())));
      }
      sums.push_back(oracle::expected(partial(), inside, ordered, p, 1));
    }
    const Bytes sum = oracle::expected(partial(), op, sums, H, P);
    for (size_t i = 0; i < chunk.size; ++i) {
      unsigned char* to = &reduced[(chunk.begin + i) * width()];
      const unsigned char* from = &sum[i * sizeOf(partial())];
      if (isHalf(dtype))
        oracle::writeFloat(dtype, to, oracle::readFloat(partial(), from));
      else
        std::memcpy(to, from, width());
    }
  }

  // A rank's addends times its factor, as the partial type.
  Bytes prepared(int rank) const {
    Bytes result(n * sizeOf(partial()));
    for (size_t i = 0; i < n; ++i) {
      unsigned char element[16];
      std::memcpy(element, &addends[at(rank)][i * width()], width());
      if (op == ReduceOp::kPremulSum)
        oracle::writeFloat(dtype, element,
                           oracle::round(dtype, oracle::readFloat(dtype, element) * factor(rank)));
      if (partial() == dtype)
        std::memcpy(&result[i * width()], element, width());
      else
        oracle::writeFloat(partial(), &result[i * sizeOf(partial())],
                           oracle::readFloat(dtype, element));
    }
    return result;
  }

  DType dtype;
  ReduceOp op;
  size_t n;
  std::vector<size_t> counts;  // of the parts, by rank; empty: an all-reduce
  std::vector<std::vector<int>> hosts;
  int P;
  std::vector<Bytes> addends;  // by rank
  std::vector<Bytes> inputs;   // likewise, prepared
  Bytes reduced;
};

void expectReduced(const std::string& letters, const std::vector<Case>& cases) {
  expectWell(onHosts(letters, hierarchical(), [&](Group& group) {
    for (const Case& c : cases) {
      const int rank = group.rank();
      Bytes data = c.addends[at(rank)], part;
      bool same = false;
      if (c.counts.empty()) {
        group.run({c.call(data, rank)});
        same = oracle::same(c.dtype, data.data(), c.reduced.data(), c.n);
      } else {
        part.resize(c.counts[at(rank)] * c.width());
        const uint64_t before = group.epoch()->wires->bytesSent();
        group.run({c.call(data, part.data(), rank)});
        // Sums round the ring of its place, with headers of frames.
        const size_t most = (c.hosts.size() - 1) * std::ranges::max(c.counts) * sizeOf(c.partial());
        CHECK(group.epoch()->wires->bytesSent() - before <= most + 4096);
        same = oracle::same(c.dtype, part.data(), c.reduced.data() + c.beginOf(rank) * c.width(),
                            c.counts[at(rank)]) &&
               data == c.addends[at(rank)];
      }
      if (!same)
        check::fail(__FILE__, __LINE__,
                    std::string(name(c.dtype)) + " " + name(c.op) + ", " + std::to_string(c.n) +
                        " elements, hosts " + letters);
    }
  }));
}

// One all-reduce that all take part in, then `body`.
void afterOne(Group& group, const std::function<void()>& body) {
  std::vector<float> data(1000, 1);
  group.run({AllReduce{data.data(), data.size(), DType::kFloat32, ReduceOp::kSum}});
  CHECK_EQ(data[999], static_cast<float>(group.size()));
  body();
}

void reduceSome(Group& group, size_t count = 1000) {
  std::vector<float> data(count, 1);
  group.run({AllReduce{data.data(), count, DType::kFloat32, ReduceOp::kSum}});
}

// Waits until the group has failed otherwise than by this rank.
void outlast(Group& group) {
  while (!group.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST(sums_are_added_in_the_hosts_and_then_between_them) {
  for (const std::string letters : {"aabb", "abab", "aaabbb", "abccab"}) {
    std::vector<Case> cases;
    for (int type = 0; type < static_cast<int>(kDTypes.size()); ++type)
      for (int op = 0; op < kReduceOps; ++op) {
        const auto dtype = static_cast<DType>(type);
        const auto reduce = static_cast<ReduceOp>(op);
        if (!isSupported(dtype, reduce)) continue;
        const size_t some = 130 * (1 + static_cast<size_t>(type + op) % 9);
        cases.emplace_back(letters, dtype, reduce, some);
      }
    for (size_t n : {0, 1, 2, 127, 128, 129, 255, 257, 511, 513, 1000, 4099})
      cases.emplace_back(letters, DType::kBFloat16, ReduceOp::kAvg, n);
    expectReduced(letters, cases);
  }
}

TEST(parts_are_added_in_the_hosts_and_then_between_them) {
  for (const std::string letters : {"aabb", "abab", "aaabbb", "abccab"}) {
    std::vector<Case> cases;
    const auto add = [&](DType dtype, ReduceOp op, std::vector<size_t> counts) {
      counts.resize(letters.size(), 57);
      const size_t n = std::accumulate(counts.begin(), counts.end(), size_t{0});
      cases.emplace_back(letters, dtype, op, n, counts);
    };
    for (int type = 0; type < static_cast<int>(kDTypes.size()); ++type)
      for (int op = 0; op < kReduceOps; ++op)
        if (isSupported(static_cast<DType>(type), static_cast<ReduceOp>(op)))
          add(static_cast<DType>(type), static_cast<ReduceOp>(op), {});
    add(DType::kBFloat16, ReduceOp::kAvg, {0, 1, 129, 4099});
    add(DType::kFloat32, ReduceOp::kSum, {0, 0, 0, 0, 0, 0});
    add(DType::kFloat32, ReduceOp::kPremulSum, {70'001, 3, 0, 70'001});
    expectReduced(letters, cases);
  }
}

TEST(gathered_blocks_reach_all_hosts) {
  const auto value = [](int rank, size_t i) { return static_cast<int64_t>(i) * 1000 + rank; };
  for (const std::string letters : {"aabb", "abab", "aaabbb", "abccab"})
    for (const std::vector<size_t>& some :
         {std::vector<size_t>{0, 0, 0, 0}, {1, 0, 129, 3}, {20'000, 20'000, 20'000, 20'000}}) {
      std::vector<size_t> counts = some;
      counts.resize(letters.size(), 40);
      expectWell(onHosts(letters, hierarchical(), [&](Group& group) {
        for (const bool in_place : {false, true}) {
          std::vector<std::vector<int64_t>> all;
          for (const size_t count : counts) all.emplace_back(count + 1, -1);
          AllGather call{.input = nullptr, .counts = counts, .dtype = DType::kInt64};
          for (auto& one : all) call.outputs.push_back(one.data());
          std::vector<int64_t> own(counts[at(group.rank())] + 1);
          int64_t* const input = in_place ? all[at(group.rank())].data() : own.data();
          for (size_t i = 0; i < counts[at(group.rank())]; ++i) input[i] = value(group.rank(), i);
          call.input = input;
          const uint64_t before = group.epoch()->wires->bytesSent();
          group.run({call});
          // Round the ring of its place, with headers of frames.
          const size_t most = (ranksOf(letters).size() - 1) * std::ranges::max(counts) * 8 + 4096;
          CHECK(group.epoch()->wires->bytesSent() - before <= most);
          for (int r = 0; r < group.size(); ++r) {
            for (size_t i = 0; i < counts[at(r)]; ++i) CHECK_EQ(all[at(r)][i], value(r, i));
            CHECK_EQ(all[at(r)][counts[at(r)]], -1);
          }
        }
      }));
    }
}

TEST(sums_of_many_slices) {
  const std::string letters = "aabb";
  std::vector<Case> cases;
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt64})
    cases.emplace_back(letters, dtype, ReduceOp::kSum, 300'001);
  expectReduced(letters, cases);
}

TEST(it_goes_between_other_operations_and_in_the_worker) {
  expectWell(onHosts("abab", hierarchical(), [](Group& group) {
    for (int i = 0; i < 40; ++i) {
      std::vector<int64_t> data(500, group.rank() + i);
      const auto ticket = group.submit(
          {AllReduce{data.data(), data.size(), DType::kInt64, ReduceOp::kSum}}, nullptr);
      int32_t word = group.rank() == i % 4 ? i : -1;
      group.run({Broadcast{&word, 1, DType::kInt32, i % 4}});
      CHECK(group.await(*ticket, kNever) && !ticket->error());
      CHECK_EQ(data[499], 6 + 4 * i);
      CHECK_EQ(word, i);
    }
  }));
}

TEST(uneven_hosts_go_round_one_ring) {
  expectWell(onHosts("aab", hierarchical(), [](Group& group) {
    std::vector<double> data(3000, 1 << group.rank());
    group.run({AllReduce{data.data(), data.size(), DType::kFloat64, ReduceOp::kSum}});
    CHECK(std::all_of(data.begin(), data.end(), [](double x) { return x == 7; }));
  }));
}

TEST(who_dies_in_its_host_is_named_by_all) {
  std::vector<float> data(50'000), whole(4 * data.size());
  const std::vector<size_t> counts(4, data.size());
  std::vector<void*> blocks;
  for (int r = 0; r < 4; ++r) blocks.push_back(&whole[at(r) * data.size()]);
  const AllReduce all_reduce{data.data(), data.size(), DType::kFloat32, ReduceOp::kSum};
  const AllGather all_gather{
      .input = data.data(), .outputs = blocks, .counts = counts, .dtype = DType::kFloat32};
  const ReduceScatter reduce_scatter{.inputs = {blocks.begin(), blocks.end()},
                                     .counts = counts,
                                     .output = data.data(),
                                     .dtype = DType::kFloat32,
                                     .op = ReduceOp::kSum};
  const std::pair<int, CollectiveCall> cases[] = {
      {0, all_reduce}, {3, all_reduce}, {1, all_gather}, {2, reduce_scatter}};
  for (const auto& [doomed, call] : cases) {
    const auto ends = onHosts("aabb", hierarchical(), [&](Group& group) {
      group.run({Barrier{}});  // else a rank that dies could fail those in create()
      std::thread killer;
      if (group.rank() == doomed)
        killer = std::thread([] {
          std::this_thread::sleep_for(std::chrono::milliseconds(60));
          kill(getpid(), SIGKILL);
        });
      const auto failure = failureOf(
          [&] {
            for (;;) group.run({call});
          },
          "rank " + std::to_string(doomed) + " (pid ");
      CHECK(failure == Failure::kPeerLost);
    });
    expectWell(ends, doomed);
    CHECK(ends[at(doomed)].starts_with("killed by signal"));
  }
}

// By then only the other rank of its host waits for it.  What that one adds up is written there in
// the last stage only, so writing it is made deadly.
TEST(who_dies_in_the_last_stage_is_named_by_all) {
  const size_t count = 200'000;
  const auto ends = onHosts("aabb", hierarchical(20 * kSecond), [&](Group& group) {
    void* const memory = mmap(nullptr, count * sizeof(float), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    if (group.rank() == 1) {
      std::signal(SIGSEGV, SIG_DFL);
      CHECK(mprotect(memory, 4096, PROT_READ) == 0);
    }
    const auto reduce = [&] {
      group.run({AllReduce{memory, count, DType::kFloat32, ReduceOp::kSum}});
    };
    if (group.rank() == 0) {
      CHECK(failureOf(reduce, "rank 1 (pid ") == Failure::kPeerLost);
    } else {
      // A rank that is slow to finish may hear of the loss before it has.
      const Failure how = failureOf(reduce, "rank 1 (pid ");
      CHECK(how == Failure::kNone || how == Failure::kPeerLost);
      outlast(group);
      CHECK(group.failure() == Failure::kPeerLost);
    }
  });
  expectWell(ends, 1);
  CHECK(ends[1].starts_with("killed by signal"));
}

TEST(who_dies_before_it_comes_is_named_by_all) {
  const auto ends = onHosts("aabb", hierarchical(), [](Group& group) {
    afterOne(group, [&] {
      if (group.rank() == 1) kill(getpid(), SIGKILL);
      CHECK(failureOf([&] { reduceSome(group); }, "rank 1 (pid ") == Failure::kPeerLost);
    });
  });
  expectWell(ends, 1);
}

TEST(who_has_left_is_named_by_all) {
  expectWell(onHosts("abab", hierarchical(), [](Group& group) {
    afterOne(group, [&] {
      if (group.rank() == 3) return group.shutdown();
      CHECK(failureOf([&] { reduceSome(group); }, "rank 3 (pid ") == Failure::kPeerLost);
    });
  }));
}

TEST(who_does_not_come_is_named_by_all_at_the_deadline) {
  expectWell(onHosts("aabb", hierarchical(), [](Group& group) {
    afterOne(group, [&] {
      if (group.rank() == 1) return outlast(group);
      group.setTimeout(1500 * kMillisecond);
      CHECK(failureOf([&] { reduceSome(group); }, "rank 1 (pid ") == Failure::kTimeout);
    });
  }));
}

TEST(an_abort_elsewhere_ends_a_wait_in_the_host) {
  expectWell(onHosts("aabb", hierarchical(), [](Group& group) {
    afterOne(group, [&] {
      if (group.rank() == 1) return outlast(group);
      if (group.rank() == 3) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return group.abort("a test");
      }
      CHECK(failureOf([&] { reduceSome(group); }, "rank 3 (pid ") == Failure::kAborted);
    });
  }));
}

TEST(who_calls_something_else_is_named_by_all) {
  for (bool count : {true, false})
    expectWell(onHosts("aabb", hierarchical(), [&](Group& group) {
      afterOne(group, [&] {
        const auto differ = [&] {
          if (count) return reduceSome(group, 1001);
          float one = 1;
          group.run({Broadcast{&one, 1, DType::kFloat32, 0}});
        };
        CHECK(failureOf([&] { group.rank() == 1 ? differ() : reduceSome(group); },
                        "rank 1 called") == Failure::kMismatch);
      });
    }));
}

namespace {
std::atomic<bool> interrupted = false;
}  // namespace

TEST(ctrl_c_ends_a_wait_in_the_host_for_all) {
  GroupOptions options = hierarchical();
  options.interrupt = [] {
    if (interrupted) throw std::runtime_error("Ctrl-C");
  };
  expectWell(onHosts("aabb", options, [](Group& group) {
    afterOne(group, [&] {
      if (group.rank() == 1) return outlast(group);
      if (group.rank() != 0) {
        CHECK(failureOf([&] { reduceSome(group); }, "rank 0 (pid ") == Failure::kAborted);
        return;
      }
      interrupted = true;
      bool thrown = false;
      try {
        reduceSome(group);
      } catch (const std::runtime_error& error) {
        thrown = std::string(error.what()) == "Ctrl-C";
      }
      CHECK(thrown);
      interrupted = false;
    });
  }));
}

TEST(a_fork_may_come_and_go) {
  expectWell(onHosts("aabb", hierarchical(), [](Group& group) {
    afterOne(group, [&] {
      const pid_t child = fork();
      if (child == 0) {
        const bool refused = failureOf([&] { reduceSome(group); }) == Failure::kArgument;
        _exit(refused ? 0 : 1);
      }
      int status = -1;
      CHECK(waitpid(child, &status, 0) == child && status == 0);
      reduceSome(group);
    });
  }));
}
