// What reductions over a transport are given, by tests over sockets and over what stands in for
// them, and what must come of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collectives/collectives.h"
#include "collectives/over_streams.h"
#include "epoch/operation.h"
#include "ring_oracle.h"
#include "transport/transport.h"

namespace stream_cases {

using namespace ringreduce;
using Bytes = std::vector<unsigned char>;  // compared by memcmp, as std::byte is not
constexpr unsigned char kUntouched = 0xa5;

#ifdef __SANITIZE_THREAD__
constexpr int kMostRanks = 4;  // it takes ten times as long
#else
constexpr int kMostRanks = 7;
#endif

inline size_t at(int i) {
  return static_cast<size_t>(i);
}

// A rank that calls collectives.  `operate` does what the group does around each: it begins an
// operation as announced, runs what it is given, and finishes.
class Caller {
 public:
  using Operate = std::function<void(const Announcement&, const std::function<void()>& body)>;
  Caller(OverStreams& c, Operate operate)
      : transport(c.transport), options(c.options), c_(c), operate_(std::move(operate)) {}

  void operator()(const CollectiveCall& call) {
    operate_({signatureOf({call}, sequence_++)}, [&] { ringreduce::perform(c_, call); });
  }
  // The same, announced as something else.
  void lying(const CollectiveCall& call) {
    Announcement a{signatureOf({call}, sequence_++)};
    a.count += 1;
    operate_(a, [&] { ringreduce::perform(c_, call); });
  }
  // After a call.
  bool learn() { return c_.learn(); }
  uint64_t rate() const { return c_.line.rate(); }

  // An operation that is no call.
  void perform(const std::function<void(OverStreams&)>& body) {
    operate_({{.sequence = sequence_++}}, [&] { body(c_); });
  }

  Transport& transport;
  const StreamOptions& options;

 private:
  OverStreams& c_;
  const Operate operate_;
  uint64_t sequence_ = 0;
};

using Over =
    std::function<void(int size, const StreamOptions&, const std::function<void(Caller&)>&)>;

// Settings under which each algorithm is taken for some size.
inline std::vector<StreamOptions> everyChoice() {
  const WireCost ring{.hop = 0, .message = 0, .byte = 1, .memory = 1, .crowd = 1};
  const WireCost one_hop{.hop = 1, .message = 0, .byte = 0, .memory = 0};
  const WireCost few_messages{.hop = 0, .message = 1, .byte = 0, .memory = 0};
  const WireCost between{.hop = 1.5, .message = 1, .byte = 0, .memory = 0};
  return {{.algorithm = Algorithm::kAuto},
          {.algorithm = Algorithm::kRing, .cost = ring},
          {.algorithm = Algorithm::kTwoShot, .cost = few_messages},
          {.algorithm = Algorithm::kBruck, .cost = between},
          {.algorithm = Algorithm::kDirect, .cost = one_hop},
          {.algorithm = Algorithm::kBruck, .cost = few_messages}};
}

// Those that can add in the order of ranks.  The transport numbers these from the last to the first
// where it does not number them as the caller.
inline std::vector<StreamOptions> choicesByRank(int P) {
  std::vector<StreamOptions> choices;
  for (StreamOptions options : everyChoice()) {
    if (!addsByRank(options.algorithm)) continue;
    options.order = AddOrder::kRank;
    if (choices.size() % 2 == 1)
      for (int r = P - 1; r >= 0; --r) options.callers_ranks.push_back(r);
    choices.push_back(std::move(options));
  }
  return choices;
}

// ---- reductions

struct Reducing {
  int P;
  DType dtype;
  ReduceOp op;
  size_t count;
  uint32_t seed;
  int root;
  bool in_place;
  std::vector<size_t> parts = {};         // of `count`: a reduce-scatter's
  std::vector<Bytes> addends = {};        // by rank
  Bytes reduced = {}, scattered = {};     // what must come of it
  Bytes ascending = {}, descending = {};  // the same of both, added in the order of ranks

  size_t width() const { return sizeOf(dtype); }
  double factor(int rank) const { return 0.5 + rank; }

  void compute() {
    for (int r = 0; r < P; ++r) {
      addends.emplace_back(count * width());
      random_elements::fill(dtype, addends.back().data(), 0, count,
                            random_elements::Texture::kRough, random_elements::keyOf(seed, r));
      if (P == 1 && dtype == DType::kBool)  // of one rank alone nothing is computed
        for (unsigned char& b : addends.back()) b &= 1;
    }
    std::vector<Bytes> all = addends;
    for (int r = 0; r < P; ++r) {
      if (op == ReduceOp::kPremulSum)
        scale(dtype, all[at(r)].data(), all[at(r)].data(), count, factor(r));
    }
    reduced.resize(count * width());
    scattered.resize(count * width());
    const auto add = [&](Bytes& to, int owner, size_t begin, size_t n) {
      std::vector<const void*> ordered;
      for (int k = 0; k < P; ++k)
        ordered.push_back(all[at(kthToAdd(owner, k, P))].data() + begin * width());
      reduceKernels(dtype, op).reduce(to.data() + begin * width(), ordered.data(), P, n, P);
    };
    Cut{count, P}.forEachChunk(
        {0, count}, [&](int chunk, size_t begin, size_t n) { add(reduced, chunk, begin, n); });
    size_t begin = 0;
    for (int p = 0; p < P; begin += parts[at(p++)]) add(scattered, p, begin, parts[at(p)]);
    for (Bytes* sums : {&ascending, &descending}) {
      sums->resize(count * width());
      std::vector<const void*> ordered;
      for (const Bytes& addend : all) ordered.push_back(addend.data());
      if (sums == &descending) std::ranges::reverse(ordered);
      reduceKernels(dtype, op).reduce(sums->data(), ordered.data(), P, count, P);
    }
  }
  // Of an all-reduce, and of a reduce-scatter.
  const Bytes& wanted(const StreamOptions& options, bool scatters = false) const {
    if (options.order == AddOrder::kRing) return scatters ? scattered : reduced;
    return options.callers_ranks.empty() ? ascending : descending;
  }

  void expect(const void* got, const unsigned char* wanted, size_t n, const char* what) const {
    const auto* bytes = static_cast<const unsigned char*>(got);
    if (n == 0 || std::memcmp(bytes, wanted, n * width()) == 0) return;
    for (size_t i = 0; i < n; ++i)
      if (!ring_oracle::same(dtype, bytes + i * width(), wanted + i * width()))
        check::fail(__FILE__, __LINE__,
                    std::string(what) + " of " + std::to_string(P) + " ranks, " + name(dtype) +
                        ", " + name(op) + ": element " + std::to_string(i) + " of " +
                        std::to_string(count));
  }

  void run(Caller& call) const {
    const int me = call.transport.rank();
    const StreamOptions& options = call.options;
    Bytes data = addends[at(me)];
    call(AllReduce{data.data(), count, dtype, op, factor(me)});
    expect(data.data(), wanted(options).data(), count, "all_reduce");

    const Bytes& before = addends[at(me)];
    Bytes input = before, output(before.size(), kUntouched);
    unsigned char* const to = me != root ? nullptr : in_place ? input.data() : output.data();
    call(Reduce{input.data(), to, count, dtype, op, root, factor(me)});
    if (me == root) expect(to, wanted(options).data(), count, "reduce");
    if (to != input.data()) CHECK(input == before);

    input = before;
    ReduceScatter scatter{{}, parts, nullptr, dtype, op, factor(me)};
    size_t begin = 0, mine = 0;
    for (int p = 0; p < P; begin += parts[at(p++)]) {
      scatter.inputs.push_back(input.data() + begin * width());
      if (p == me) mine = begin;
    }
    scatter.output = in_place ? input.data() + mine * width() : output.data();
    call(scatter);
    expect(scatter.output, wanted(options, true).data() + mine * width(), parts[at(me)],
           "reduce_scatter");
    if (in_place)
      std::copy_n(before.data() + mine * width(), parts[at(me)] * width(),
                  input.data() + mine * width());
    CHECK(input == before);
  }
};

// Cases of every dtype and operation that there is, of sizes from nothing to some slices a chunk.
inline std::vector<Reducing> reductions(int P, uint32_t seed, size_t most_bytes) {
  std::minstd_rand random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random()) % n; };
  std::vector<Reducing> cases;
  for (size_t t = 0; t < kDTypes.size(); ++t)
    for (int o = 0; o < kReduceOps; ++o) {
      const auto dtype = static_cast<DType>(t);
      const auto op = static_cast<ReduceOp>(o);
      if (!isSupported(dtype, op)) continue;
      Reducing c{P, dtype, op, 0, static_cast<uint32_t>(random()), 0, false};
      // A slice is a whole number of kChunkElements, and most often of 16 KiB.
      const size_t slice = (16 << 10) / sizeOf(reduceKernels(dtype, op).partial);
      const size_t most = most_bytes / c.width();
      switch (below(4)) {
        case 0:
          c.count = below(300);
          break;
        case 1:
          c.count = at(P) * slice * (1 + below(2)) + below(3) - 1;
          break;
        case 2:
          c.count = below(kChunkElements * at(P) * 3);
          break;
        default:
          c.count = below(most);
      }
      c.root = static_cast<int>(below(at(P)));
      c.in_place = below(2) == 0;
      size_t rest = c.count;
      for (int p = 0; p < P; ++p) {
        c.parts.push_back(p + 1 == P ? rest : below(3) == 0 ? 0 : below(rest + 1));
        rest -= c.parts.back();
      }
      c.compute();
      cases.push_back(std::move(c));
    }
  return cases;
}

inline void checkReductions(const Over& over, int most_ranks, size_t most_bytes) {
  for (int P = 1; P <= most_ranks; ++P) {
    std::vector<StreamOptions> choices = everyChoice();
    std::ranges::copy(choicesByRank(P), std::back_inserter(choices));
    const std::vector<Reducing> cases = reductions(P, static_cast<uint32_t>(P), most_bytes);
    for (size_t i = 0; i < choices.size(); ++i)
      over(P, choices[i], [&](Caller& call) {
        for (size_t k = 0; k < cases.size(); ++k)
          if (P <= 2 || (k + i) % 3 == 0) cases[k].run(call);
      });
  }
}

}  // namespace stream_cases
