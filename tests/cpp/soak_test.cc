// A soak: programs of random operations, the same for all ranks, every result checked.
//
// A program is a list of steps over several groups, whose members overlap: collectives of all
// kinds, blocking and queued, and messages.  All ranks (threads) go through it in the same order,
// each doing its part.  What was queued or posted is awaited later, in an order of the rank's own.
// That cannot lock up: the two ends of a message are posted at steps of the program, and it is
// awaited after both; so whoever is least far waits for nothing that comes later.
//
//     RINGREDUCE_SEED=7 soak_test               the same program again
//     RINGREDUCE_SOAK_OPERATIONS=100000 soak_test     a longer one
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "compressed_cases.h"
#include "ranks.h"
#include "reduce_oracle.h"

using namespace ringreduce;
using oracle::Bytes;

namespace {

constexpr int kWorld = 4;
const std::vector<std::vector<int>> kGroups{{0, 1, 2, 3}, {2, 0, 1}, {1, 3}, {3, 2}, {0, 3, 2, 1}};
constexpr int kWindow = 25;  // steps that the two ends of a message may be apart

size_t at(int i) {
  return static_cast<size_t>(i);
}

struct Step {
  enum class Type { kCollective, kSend, kReceive, kAwaitable };
  Type type;
  int number = 0;  // of the operation: what its data depends on
  int group = 0;
  Kind kind = Kind::kBarrier;
  bool queued = false;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;                                 // a rank of the group
  size_t count = 0;                             // of a message too
  std::vector<size_t> counts = {};              // by rank
  std::vector<std::vector<size_t>> table = {};  // all-to-all: [from][to]
  int from = 0, to = 0, tag = 0;                // ranks of the group
  bool from_any = false;
};

// ---- the program

class Generator {
 public:
  Generator(uint64_t seed, int operations) : random_(seed) {
    for (int i = 0; i < operations; ++i) {
      if (below(5) < 2)
        message(i);
      else
        steps_[2 * i].push_back(collective(i));
    }
  }

  std::vector<Step> program() const {
    std::vector<Step> all;
    for (const auto& [when, steps] : steps_) all.insert(all.end(), steps.begin(), steps.end());
    return all;
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }

  // Mostly few, sometimes none or one, now and then more than fit the slots.
  size_t someElements() {
    switch (below(12)) {
      case 0:
        return at(below(2));
      case 1:
        return at(3000 + below(20000));
      default:
        return at(below(700));
    }
  }

  DType anyDType() { return static_cast<DType>(below(static_cast<int>(kDTypes.size()))); }

  Step collective(int number) {
    static constexpr Kind kKinds[] = {Kind::kAllReduce,        Kind::kAllReduce,
                                      Kind::kReduce,           Kind::kReduceScatter,
                                      Kind::kBroadcast,        Kind::kAllGather,
                                      Kind::kGather,           Kind::kScatter,
                                      Kind::kAllToAll,         Kind::kBarrier,
                                      Kind::kAllToAll,         Kind::kSparseAllReduce,
                                      Kind::kMonitoredBarrier, Kind::kCompressedAllReduce};
    Step s{.type = Step::Type::kCollective, .number = number};
    s.group = below(static_cast<int>(kGroups.size()));
    const int P = static_cast<int>(kGroups[at(s.group)].size());
    s.kind = kKinds[at(below(static_cast<int>(std::size(kKinds))))];
    s.queued = below(3) == 0;
    const bool reduces = s.kind == Kind::kAllReduce || s.kind == Kind::kReduce ||
                         s.kind == Kind::kReduceScatter || s.kind == Kind::kSparseAllReduce;
    do {
      s.dtype = anyDType();
      s.op = static_cast<ReduceOp>(below(kReduceOps));
    } while (reduces && !isSupported(s.dtype, s.op));
    s.root = below(P);
    s.count = someElements();
    const bool even = below(2) == 0;
    for (int r = 0; r < P; ++r) s.counts.push_back(even ? s.count : someElements() / at(P));
    for (int r = 0; r < P && s.kind == Kind::kAllToAll; ++r) {
      s.table.push_back(s.counts);
      if (!even)
        std::rotate(s.table[at(r)].begin(), s.table[at(r)].begin() + r, s.table[at(r)].end());
    }
    return s;
  }

  // The two ends are posted some steps apart; those of one sender, receiver and tag in one order.
  void message(int number) {
    Step s{.type = Step::Type::kSend, .number = number};
    s.group = below(static_cast<int>(kGroups.size()));
    const int P = static_cast<int>(kGroups[at(s.group)].size());
    s.dtype = anyDType();
    s.count = someElements();
    s.from = below(P);
    s.to = below(P);
    s.tag = below(3);
    s.from_any = below(4) == 0;
    if (s.from_any) s.tag = 1000 + number;  // or it would take another's
    auto& [sent, received] = last_[{s.group, s.from, s.to, s.tag}];
    sent = std::max(sent, 2 * (number + below(kWindow)) + 1);
    received = std::max(received, 2 * (number + below(kWindow)) + 1);
    steps_[sent].push_back(s);
    s.type = Step::Type::kReceive;
    steps_[received].push_back(s);
    s.type = Step::Type::kAwaitable;
    steps_[2 * (std::max(sent, received) / 2 + 1)].push_back(s);
  }

  std::mt19937_64 random_;
  std::map<int, std::vector<Step>> steps_;
  std::map<std::array<int, 4>, std::pair<int, int>> last_;
};

// ---- what is sent, and what must come of it

// `n` elements that rank `from` gives rank `to`: small numbers, so that no order of addition and no
// product matters, or any bytes where nothing is computed.
Bytes elements(const Step& s, int from, int to, size_t n) {
  Bytes bytes(n * sizeOf(s.dtype));
  uint32_t word = static_cast<uint32_t>(s.number * 64 + from * 8 + to) * 2654435761u;
  const bool computed = isReducible(s.dtype);
  if (!computed)
    for (unsigned char& b : bytes) b = static_cast<unsigned char>((word += 0x9e3779b9u) >> 24);
  for (size_t i = 0; i < n && computed; ++i) {
    const int small = static_cast<int>((word += 0x9e3779b9u) >> 30) + 1;
    unsigned char* p = &bytes[i * sizeOf(s.dtype)];
    if (s.dtype == DType::kBool)
      *p = small % 2;
    else if (isFloating(s.dtype))
      oracle::writeFloat(s.dtype, p, small);
    else
      oracle::writeInteger(s.dtype, p, small);
  }
  return bytes;
}

// The reduction of what all give to `to`.
Bytes reduction(const Step& s, int P, int to, size_t n) {
  std::vector<Bytes> sources;
  for (int r = 0; r < P; ++r) sources.push_back(elements(s, r, to, n));
  // PREMUL_SUM: everybody's factor is 2.
  for (size_t i = 0; i < n * at(P) && s.op == ReduceOp::kPremulSum; ++i) {
    unsigned char* p = &sources[i / n][i % n * sizeOf(s.dtype)];
    oracle::writeFloat(s.dtype, p, 2 * oracle::readFloat(s.dtype, p));
  }
  return oracle::expected(s.dtype, s.op, sources, P, P);
}

// ---- one rank

// Something under way, and what its memory must hold once it is over.
struct Flight {
  std::string what;
  std::vector<Bytes> memory, wanted;
  std::shared_ptr<OperationHandle> ticket;
  std::shared_ptr<Delivery> delivery;
  int group;
};

class Rank {
 public:
  Rank(int world_rank, uint64_t seed, std::vector<ranks::MemoryStore>& stores)
      : world_rank_(world_rank), random_(seed * 100 + static_cast<uint64_t>(world_rank)) {
    std::mt19937_64 shared(seed);
    for (size_t g = 0; g < kGroups.size(); ++g) {
      GroupOptions options{.name = "soak " + std::to_string(g), .timeout = 60 * kSecond};
      options.shared = SharedOptions{.algorithm = static_cast<Algorithm>(shared() % 4),
                                     .slot_bytes = size_t{4096} << shared() % 4,
                                     .slots = 3 + static_cast<int>(shared() % 4)};
      const auto& members = kGroups[g];
      const auto me = std::find(members.begin(), members.end(), world_rank);
      groups_.push_back(me == members.end()
                            ? nullptr
                            : Group::create(stores[g], static_cast<int>(me - members.begin()),
                                            static_cast<int>(members.size()), options));
    }
  }

  // The other ranks learn at once if this one fails.
  void run(const std::vector<Step>& program) {
    try {
      for (const Step& step : program) {
        take(step);
        if (flights_.size() > 40 || random_() % 8 == 0) land(flights_.size() / 2);
      }
      land(0);
      CHECK(posted_.empty());
      for (const auto& group : groups_)
        if (group) group->run({Barrier{}});
    } catch (const std::exception& error) {
      for (const auto& group : groups_)
        if (group) group->abort("world rank " + std::to_string(world_rank_) + ": " + error.what());
      throw;
    }
  }

 private:
  void take(const Step& s) {
    Group* group = groups_[at(s.group)].get();
    if (!group) return;
    const int me = group->rank();
    switch (s.type) {
      case Step::Type::kCollective:
        return collective(*group, s);
      case Step::Type::kSend:
      case Step::Type::kReceive:
        if (me == (s.type == Step::Type::kSend ? s.from : s.to)) message(*group, s);
        return;
      case Step::Type::kAwaitable:
        for (auto type : {Step::Type::kSend, Step::Type::kReceive})
          if (const auto posted = posted_.find({s.number, type}); posted != posted_.end()) {
            flights_.push_back(std::move(posted->second));
            posted_.erase(posted);
          }
        return;
    }
  }

  void message(Group& group, const Step& s) {
    const bool sends = s.type == Step::Type::kSend;
    auto flight = std::make_unique<Flight>();
    const Bytes data = elements(s, s.from, s.to, s.count);
    flight->what =
        std::string(sends ? "send" : "receive") + " of operation " + std::to_string(s.number);
    flight->wanted = {data};
    flight->memory = {sends ? data : Bytes(data.size())};
    flight->group = s.group;
    flight->delivery = group.post({sends ? Message::Direction::kSend : Message::Direction::kReceive,
                                   sends        ? s.to
                                   : s.from_any ? kAnySource
                                                : s.from,
                                   s.tag, flight->memory[0].data(), s.count, s.dtype});
    posted_[{s.number, s.type}] = std::move(flight);
  }

  void collective(Group& group, const Step& s) {
    auto flight = std::make_unique<Flight>();
    Flight& f = *flight;
    f.what = std::string(name(s.kind)) + ", operation " + std::to_string(s.number);
    f.group = s.group;
    Operation operation{call(group.rank(), group.size(), s, f)};
    if (!s.queued) {
      group.run(std::move(operation));
      return verify(f);
    }
    f.ticket = group.submit(std::move(operation), nullptr);
    flights_.push_back(std::move(flight));
  }

  // Memory that receives `wanted`.
  void* expect(Flight& f, Bytes wanted) {
    f.memory.emplace_back(wanted.size());
    f.wanted.push_back(std::move(wanted));
    return f.memory.back().data();
  }
  // Memory that must not change.
  void* give(Flight& f, const Bytes& data) {
    f.wanted.push_back(data);
    f.memory.push_back(data);
    return f.memory.back().data();
  }
  // Memory that holds `data` and receives `wanted`.
  void* change(Flight& f, const Bytes& data, Bytes wanted) {
    f.wanted.push_back(std::move(wanted));
    f.memory.push_back(data);
    return f.memory.back().data();
  }

  decltype(Operation::call) call(int me, int P, const Step& s, Flight& f) {
    const auto mine = [&](int to, size_t n) { return elements(s, me, to, n); };
    const bool root = me == s.root;
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    switch (s.kind) {
      case Kind::kAllReduce:
        return AllReduce{change(f, mine(0, s.count), reduction(s, P, 0, s.count)), s.count, s.dtype,
                         s.op, 2};
      case Kind::kReduce:
        return Reduce{give(f, mine(0, s.count)),
                      root ? expect(f, reduction(s, P, 0, s.count)) : nullptr,
                      s.count,
                      s.dtype,
                      s.op,
                      s.root,
                      2};
      case Kind::kReduceScatter:
        for (int r = 0; r < P; ++r) inputs.push_back(give(f, mine(r, s.counts[at(r)])));
        return ReduceScatter{inputs,  s.counts, expect(f, reduction(s, P, me, s.counts[at(me)])),
                             s.dtype, s.op,     2};
      case Kind::kBroadcast: {
        const Bytes data = elements(s, s.root, 0, s.count);
        return Broadcast{root ? give(f, data) : expect(f, data), s.count, s.dtype, s.root};
      }
      case Kind::kAllGather:
        for (int r = 0; r < P; ++r)
          outputs.push_back(expect(f, elements(s, r, 0, s.counts[at(r)])));
        return AllGather{give(f, mine(0, s.counts[at(me)])), outputs, s.counts, s.dtype};
      case Kind::kGather:
        for (int r = 0; r < P && root; ++r)
          outputs.push_back(expect(f, elements(s, r, 0, s.count)));
        return Gather{give(f, mine(0, s.count)), outputs, s.count, s.dtype, s.root};
      case Kind::kScatter:
        for (int r = 0; r < P && root; ++r) inputs.push_back(give(f, mine(r, s.count)));
        return Scatter{inputs, expect(f, elements(s, s.root, me, s.count)), s.count, s.dtype,
                       s.root};
      case Kind::kAllToAll: {
        AllToAll a{{}, {}, s.table[at(me)], {}, true, s.dtype};
        for (int r = 0; r < P; ++r) {
          a.recv_counts.push_back(s.table[at(r)][at(me)]);
          a.inputs.push_back(give(f, mine(r, a.send_counts[at(r)])));
          a.outputs.push_back(expect(f, elements(s, r, me, a.recv_counts[at(r)])));
        }
        for (const auto& row : s.table)
          for (size_t n : row) a.even = a.even && n == s.table[0][0];
        return a;
      }
      case Kind::kSparseAllReduce: {
        for (int r = 0; r < P; ++r)
          outputs.push_back(expect(f, elements(s, r, 0, s.counts[at(r)])));
        const auto place = [&f, s, outputs](const std::vector<size_t>& counts) {
          CHECK(counts == s.counts);
          return outputs;
        };
        return SparseAllReduce{
            {give(f, mine(0, s.counts[at(me)])), s.counts[at(me)], s.dtype, place},
            s.count,
            s.dtype,
            s.op};
      }
      case Kind::kCompressedAllReduce: {
        const compressed_cases::Case c(
            P, s.count, {static_cast<Codec>(s.number % kCodecs), s.number % 3 == 0, 7},
            s.number % 2 ? ReduceOp::kSum : ReduceOp::kAvg,
            s.number % 5 < 3 ? CodedSchedule::kOwner : CodedSchedule::kRing);
        const auto bytes = [](const compressed_cases::Floats& floats) {
          const auto* begin = reinterpret_cast<const unsigned char*>(floats.data());
          return Bytes(begin, begin + floats.size() * sizeof(float));
        };
        auto* const data = static_cast<float*>(change(f, bytes(c.inputs[at(me)]), bytes(c.result)));
        return c.call(data, data, nullptr);
      }
      case Kind::kMonitoredBarrier:
        return MonitoredBarrier{};
      case Kind::kBarrier:
        break;
    }
    return Barrier{};
  }

  // Awaits some of what is under way, until `left` are.
  void land(size_t left) {
    while (flights_.size() > left) {
      std::swap(flights_[random_() % flights_.size()], flights_.back());
      const std::unique_ptr<Flight> flight = std::move(flights_.back());
      flights_.pop_back();
      Group& group = *groups_[at(flight->group)];
      const std::shared_ptr<OperationHandle> over =
          flight->delivery ? flight->delivery : flight->ticket;
      CHECK(flight->delivery ? group.await(*flight->delivery, kNever)
                             : group.await(*flight->ticket, kNever));
      if (over->error()) std::rethrow_exception(over->error());
      verify(*flight);
    }
  }

  void verify(const Flight& f) {
    if (f.memory != f.wanted) check::fail(__FILE__, __LINE__, f.what + " gave something else");
  }

  const int world_rank_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Flight>> flights_;                          // may be awaited
  std::map<std::pair<int, Step::Type>, std::unique_ptr<Flight>> posted_;  // not yet
  std::vector<std::shared_ptr<Group>> groups_;  // last: they end before the memory does
};

}  // namespace

TEST(programs_of_random_operations) {
  const char *wanted = std::getenv("RINGREDUCE_SOAK_OPERATIONS"),
             *seed_text = std::getenv("RINGREDUCE_SEED");
  const int operations = wanted ? std::stoi(wanted) : 1000;
  const int64_t given = seed_text ? std::stoll(seed_text) : -1;
  const uint64_t first = given >= 0 ? static_cast<uint64_t>(given) : std::random_device{}();
  const int programs = given >= 0 ? 1 : 4;
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(programs); ++seed) {
    std::printf("%d operations; to repeat: RINGREDUCE_SEED=%llu\n", operations,
                static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    const std::vector<Step> program = Generator(seed, operations).program();
    std::vector<ranks::MemoryStore> stores(kGroups.size());
    ranks::inThreads(kWorld, [&](int r) { Rank(r, seed, stores).run(program); });
  }
}
