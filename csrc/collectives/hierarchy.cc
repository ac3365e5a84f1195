// The three stages, and the wait guard of those inside the host.
#include "collectives/hierarchy.h"

#include <algorithm>
#include <numeric>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "bootstrap/process.h"
#include "collectives/collectives.h"
#include "collectives/over_streams.h"
#include "collectives/shared_memory.h"
#include "collectives/stream_algorithms.h"
#include "kernels/reduce.h"
#include "transport/wait_guard.h"

namespace ringreduce {

// The ranks of this host, by their places, and their shared memory.
//
// Operations have their own numbers here, without gaps, because not all of the group's run here.
// The pages hold the signatures that the whole group announces.
class Hierarchy::Inside final : public RingPositionGuard {
 public:
  Inside(const Hosts& hosts, const HostMemory& host_memory, Arbiter& arbiter)
      : RingPositionGuard(arbiter, hosts.localRanks()),
        me_(hosts.localRankOf(hosts.rank())),
        host_memory_(host_memory),
        arbiter_(arbiter),
        memory_(me_, host_memory, *this) {
    for (const Member& member : host_memory.members) processes_.push_back(member.process);
  }

  SharedMemory& memory() { return memory_; }
  OverMemory& begin() {
    RankPage& own = page(me_);
    own.announcements[next_ % kAnnouncements] = arbiter_.current();
    own.announced.publish(++next_);
    return memory_.over();
  }

  // ---- WaitGuard, by places
  using RingPositionGuard::verify;
  void poll(int place, Ready ready) override {
    arbiter_.poll(rankAt(place), ready);
    arbiter_.idle(ready);  // of the ranks of other hosts
    for (int p = 0; p < size(); ++p)
      if (p != me_ && hasAnnounced(p)) verify(p);
    const std::vector<bool> gone = ended(processes_);
    for (int p = 0; p < size(); ++p) {
      if (p == me_) continue;
      const bool dead = gone[static_cast<size_t>(p)];
      if (!dead && arbiter_.stateOf(rankAt(p)).isHere()) continue;
      // A rank that has ended is lost if it never arrived here, or if this wait needs it.  What it
      // wrote before is in memory by now.
      if ((hasAnnounced(p) && p != place) || ready()) continue;
      if (dead) arbiter_.peers().onEnded(rankAt(p), howEnded(processes_[static_cast<size_t>(p)]));
      arbiter_.broken(rankAt(p), kProcessEnded);
    }
  }

  void verify(int place) override {
    arbiter_.verify(rankAt(place), page(place).announcements[(next_ - 1) % kAnnouncements]);
  }

 private:
  RankPage& page(int place) const { return pageOf(host_memory_, place); }
  // Whether that rank has arrived at this operation.
  bool hasAnnounced(int place) const { return page(place).announced.observe() >= next_; }

  const int me_;
  const HostMemory& host_memory_;
  Arbiter& arbiter_;
  std::vector<ProcessFds> processes_;
  SharedMemory memory_;
  uint64_t next_ = 0;
};

bool Hierarchy::fits(const Hosts& hosts, const SharedOptions& options) {
  // It adds in place, in the memory of ranks that may be lost.
  return !options.goesOn() && !options.sockets && hosts.count() > 1 && hosts.even() &&
         hosts.localRanks().size() > 1;
}

std::unique_ptr<Hierarchy> Hierarchy::create(const Hosts& hosts, const SharedOptions& options,
                                             const HostRing& ring, const HostMemory& local_memory,
                                             Arbiter& arbiter) {
  if (!fits(hosts, options)) return nullptr;
  return std::unique_ptr<Hierarchy>(new Hierarchy(hosts, ring, local_memory, arbiter));
}

Hierarchy::Hierarchy(const Hosts& hosts, const HostRing& ring, const HostMemory& local_memory,
                     Arbiter& arbiter)
    : hosts_(hosts),
      arbiter_(arbiter),
      inside_(std::make_unique<Inside>(hosts, local_memory, arbiter)),
      hosts_in_ring_(ring.hosts) {
  const auto place = static_cast<size_t>(hosts.localRankOf(hosts.rank()));
  const std::vector<int> places = positionsOf(ring.ranks);
  for (const int host : ring.hosts) {
    if (host == hosts.hostOf(hosts.rank())) here_ = ring_.size();
    const int rank = hosts.ranksOn(host)[place];
    ring_.push_back(places.empty() ? rank : places[static_cast<size_t>(rank)]);
  }
}

Hierarchy::~Hierarchy() = default;

void Hierarchy::setPatience(Patience patience) {
  inside_->memory().setPatience(patience);
}

void Hierarchy::begin(OverStreams& c, int turns, size_t bytes) const {
  c.begin(arbiter_.current());
  const auto places = static_cast<double>(hosts_.localRanks().size());
  c.measure(turns * static_cast<double>(ring_.size() - 1), static_cast<double>(bytes) / places);
}

bool Hierarchy::takes(const OverStreams& c, CallSize call) const {
  call.wanted =
      c.options.algorithm;  // an all-reduce's: if it is another one, there is no hierarchy
  const int ranks_on_host = static_cast<int>(hosts_.localRanks().size());
  return c.takesHierarchy(call, ranks_on_host);
}

bool Hierarchy::run(OverStreams& c, const CollectiveCall& call) {
  const auto tries = [&](const auto& one) {
    if (!takes(c, callSize(one))) return false;
    run(c, one);
    return true;
  };
  if (const auto* one = std::get_if<AllReduce>(&call)) return tries(*one);
  if (const auto* one = std::get_if<AllGather>(&call)) return tries(*one);
  if (const auto* one = std::get_if<ReduceScatter>(&call)) return tries(*one);
  const auto* coded = std::get_if<CompressedAllReduce>(&call);
  if (!coded || !takes(c, *coded)) return false;
  run(c, *coded);
  return true;
}

Hierarchy::InsideHost Hierarchy::parts(const void* input, void* output, size_t count, DType dtype,
                                       ReduceOp op) const {
  const int places = static_cast<int>(hosts_.localRanks().size());
  const int me = hosts_.localRankOf(hosts_.rank());
  const Cut cut{count, places};
  InsideHost made{
      .inside = {.inputs = {}, .counts = {}, .output = nullptr, .dtype = dtype, .op = op},
      .spread = {.input = nullptr, .dtype = dtype},
      .mine = cut.chunk(me)};
  for (int place = 0; place < places; ++place) {
    const Span part = cut.chunk(place);
    const size_t begin = part.begin * sizeOf(dtype);
    made.inside.inputs.push_back(static_cast<const std::byte*>(input) + begin);
    made.inside.counts.push_back(part.size);
    made.spread.outputs.push_back(static_cast<std::byte*>(output) + begin);
    made.spread.counts.push_back(part.size);
  }
  made.inside.output = made.spread.outputs[static_cast<size_t>(me)];
  made.spread.input = made.inside.output;
  return made;
}

void Hierarchy::run(OverStreams& c, const AllReduce& a) {
  begin(c, 2, a.count * sizeOf(a.dtype));
  if (a.op == ReduceOp::kPremulSum) scale(a.dtype, a.data, a.data, a.count, a.factor);
  const ReduceOp op = a.op == ReduceOp::kPremulSum ? ReduceOp::kSum : a.op;
  const DType partial = reduceKernels(a.dtype, op).partial;
  auto [inside, spread, part] = parts(a.data, a.data, a.count, a.dtype, op);
  auto* const mine = static_cast<std::byte*>(inside.output);
  const size_t count = part.size;
  std::byte* const sums = partial == a.dtype ? mine : c.scratch(count * sizeOf(partial));
  inside.output = sums;

  OverMemory& host = inside_->begin();
  reduceScatterSums(host, inside);
  allReduceSums(c, {.sums = sums,
                    .output = mine,
                    .count = count,
                    .dtype = a.dtype,
                    .op = op,
                    .ranks = ring_,
                    .world_size = hosts_.size()});
  c.transport.finish();  // nothing is sent while this rank waits inside its host
  allGather(host, spread);
}

bool Hierarchy::takes(const OverStreams& c, const CompressedAllReduce&) const {
  // Compression is for a slow wire: so each part is coded, and travels, once a host.
  const Algorithm wanted = c.options.algorithm;
  return wanted == Algorithm::kAuto || wanted == Algorithm::kHierarchical;
}

void Hierarchy::run(OverStreams& c, const CompressedAllReduce& a) {
  begin(c, 2, a.count);
  const auto [inside, spread, part] =
      parts(a.input, a.output, a.count, DType::kFloat32, ReduceOp::kSum);
  if (a.error) {
    std::fill_n(a.error, part.begin, 0.0F);
    std::fill(a.error + part.end(), a.error + a.count, 0.0F);
  }

  OverMemory& host = inside_->begin();
  reduceScatterSums(host, inside);
  CompressedAllReduce between = a;
  between.input = between.output = a.output + part.begin;
  between.count = part.size;
  // Elements of several parts have the same numbers between the hosts.
  between.coding.seed =
      mixedSeed(a.coding.seed, static_cast<uint64_t>(hosts_.localRankOf(hosts_.rank())));
  between.error = a.error ? a.error + part.begin : nullptr;
  ringreduce::compressedAllReduce(
      c, CompressedAmong{.call = between, .ranks = ring_, .world_size = hosts_.size()});
  c.transport.finish();  // nothing is sent while this rank waits inside its host
  allGather(host, spread);
}

void Hierarchy::run(OverStreams& c, const ReduceScatter& r) {
  const size_t count_of_all = std::accumulate(r.counts.begin(), r.counts.end(), size_t{0});
  begin(c, 1, count_of_all * sizeOf(r.dtype));
  const auto place = static_cast<size_t>(hosts_.localRankOf(hosts_.rank()));
  const ReduceOp op = r.op == ReduceOp::kPremulSum ? ReduceOp::kSum : r.op;
  const size_t width = sizeOf(r.dtype), partial = sizeOf(reduceKernels(r.dtype, op).partial);
  OverMemory& host = inside_->begin();
  std::vector<RingChunk> chunks;  // the sums of this host, for this place of each host
  for (size_t position = 0; position < ring_.size(); ++position) {
    ReduceScatter inside{.inputs = {}, .counts = {}, .output = nullptr, .dtype = r.dtype, .op = op};
    for (const int rank : ranksAt(position)) {
      const auto owner = static_cast<size_t>(rank);
      inside.inputs.push_back(r.inputs[owner]);
      inside.counts.push_back(r.counts[owner]);
      if (r.op != ReduceOp::kPremulSum) continue;  // the inputs are the caller's
      std::byte* const scaled = c.scratch(r.counts[owner] * width);
      scale(r.dtype, scaled, r.inputs[owner], r.counts[owner], r.factor);
      inside.inputs.back() = scaled;
    }
    const size_t count = inside.counts[place];
    std::byte* const sums = c.scratch(count * partial);
    inside.output = sums;
    reduceScatterSums(host, inside);
    chunks.push_back({sums, nullptr, count, sums});
  }
  chunks[here_].output = static_cast<std::byte*>(r.output);
  runStreamRing(
      c, RingCall::ofSums(std::move(chunks), r.dtype, op, ring_, hosts_.size(), Ending::kOwner));
  c.transport.finish();
}

void Hierarchy::run(OverStreams& c, const AllGather& a) {
  const size_t count_of_all = std::accumulate(a.counts.begin(), a.counts.end(), size_t{0});
  begin(c, 1, count_of_all * sizeOf(a.dtype));
  const auto place = static_cast<size_t>(hosts_.localRankOf(hosts_.rank()));
  const size_t hosts = ring_.size(), width = sizeOf(a.dtype);
  Blocks blocks{
      .own = static_cast<const std::byte*>(a.input), .places = {}, .bytes = {}, .ranks = ring_};
  for (size_t x = 0; x < hosts; ++x) {
    const auto owner = static_cast<size_t>(ranksAt((here_ + x) % hosts)[place]);
    blocks.places.push_back(static_cast<std::byte*>(a.outputs[owner]));
    blocks.bytes.push_back(a.counts[owner] * width);
  }
  gatherByRing(c, blocks);
  c.transport.finish();  // nothing is sent while this rank waits inside its host
  OverMemory& host = inside_->begin();
  for (size_t x = 0; x < hosts; ++x) {
    AllGather spread{.input = blocks.at(x), .dtype = a.dtype};
    for (const int rank : ranksAt((here_ + x) % hosts)) {
      spread.outputs.push_back(a.outputs[static_cast<size_t>(rank)]);
      spread.counts.push_back(a.counts[static_cast<size_t>(rank)]);
    }
    allGather(host, spread);
  }
}

}  // namespace ringreduce
