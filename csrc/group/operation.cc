// From a call to its check, its announcement and its collective.
#include "group/operation.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <type_traits>

#include "base/bytes.h"
#include "base/error.h"
#include "collectives/stream_calls.h"
#include "transport/wait_guard.h"

namespace ringreduce {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

// What is checked and announced is the same wherever a call has the same members.
template <class Call>
concept Counted = requires(Call c) { size_t{c.count}; };
template <class Call>
concept Typed = requires(Call c) { DType{c.dtype}; };
template <class Call>
concept Reducing = Typed<Call> && requires(Call c) { ReduceOp{c.op}; };
template <class Call>
concept Rooted = requires(Call c) { int{c.root}; };
template <class Call>
concept HasInputs = requires(Call c) { c.inputs.size(); };
template <class Call>
concept HasOutputs = requires(Call c) { c.outputs.size(); };
template <class Call>
concept HasCounts = requires(Call c) { c.counts.size(); };

// The kinds stand in the order in which Operation lists its calls.
template <class Call, size_t i = 0>
constexpr Kind kindOf() {
  if constexpr (std::is_same_v<Call, std::variant_alternative_t<i, decltype(Operation::call)>>)
    return static_cast<Kind>(i);
  else
    return kindOf<Call, i + 1>();
}
static_assert(kindOf<AllReduce>() == Kind::kAllReduce && kindOf<Reduce>() == Kind::kReduce &&
              kindOf<ReduceScatter>() == Kind::kReduceScatter &&
              kindOf<Broadcast>() == Kind::kBroadcast && kindOf<AllGather>() == Kind::kAllGather &&
              kindOf<Gather>() == Kind::kGather && kindOf<Scatter>() == Kind::kScatter &&
              kindOf<AllToAll>() == Kind::kAllToAll && kindOf<Barrier>() == Kind::kBarrier &&
              kindOf<SparseAllReduce>() == Kind::kSparseAllReduce &&
              kindOf<MonitoredBarrier>() == Kind::kMonitoredBarrier &&
              kindOf<CompressedAllReduce>() == Kind::kCompressedAllReduce);

template <class Call>
[[noreturn]] void refuse(const Call&, const std::string& why) {
  throw Error(Failure::kArgument, std::string("ringreduce ") +
                                      kKindNames[static_cast<size_t>(kindOf<Call>())] + ": " + why);
}

// `wanted` entries by rank.
template <class Call>
void requireEntries(const Call& call, const char* what, size_t size, size_t wanted) {
  if (size != wanted)
    refuse(call,
           std::to_string(size) + " " + what + " where " + std::to_string(wanted) + " are needed");
}

template <class Call>
void check(const Call& call, int rank, int world_size) {
  const auto P = static_cast<size_t>(world_size);
  if constexpr (Reducing<Call>)
    if (!isSupported(call.dtype, call.op))
      refuse(call,
             std::string("cannot take ") + name(call.op) + " of " + name(call.dtype) + " elements");
  if constexpr (Rooted<Call>)
    if (call.root < 0 || call.root >= world_size)
      refuse(call,
             "rank " + std::to_string(call.root) + " in a group of " + std::to_string(world_size));
  // Who is not the root of a gather or a scatter has one side of it only.
  bool both_sides = true;
  if constexpr (Rooted<Call>) both_sides = call.root == rank;
  if constexpr (HasInputs<Call>)
    if (both_sides || !call.inputs.empty()) requireEntries(call, "inputs", call.inputs.size(), P);
  if constexpr (HasOutputs<Call>)
    if (both_sides || !call.outputs.empty())
      requireEntries(call, "outputs", call.outputs.size(), P);
  if constexpr (HasCounts<Call>) requireEntries(call, "counts", call.counts.size(), P);
  if constexpr (std::is_same_v<Call, AllToAll>) {
    requireEntries(call, "send counts", call.send_counts.size(), P);
    requireEntries(call, "receive counts", call.recv_counts.size(), P);
    const auto equal = [&](size_t n) { return n == call.send_counts[0]; };
    if (call.even && !(std::all_of(call.send_counts.begin(), call.send_counts.end(), equal) &&
                       std::all_of(call.recv_counts.begin(), call.recv_counts.end(), equal)))
      refuse(call, "called even, but not all counts are equal");
  }
  if constexpr (std::is_same_v<Call, CompressedAllReduce>) {
    if (call.op != ReduceOp::kSum && call.op != ReduceOp::kAvg)
      refuse(call, std::string("can take SUM or AVG, not ") + name(call.op));
    if (static_cast<size_t>(call.coding.codec) >= std::size(kCodecNames) ||
        static_cast<size_t>(call.schedule) >= std::size(kCodedScheduleNames))
      refuse(call, "no such codec or schedule");
  }
}

// The elements of all parts; parts that differ in size are told apart by a hash as well.
void announceParts(OpSignature& a, const std::vector<size_t>& counts) {
  bool even = true;
  uint64_t hash = 0;
  for (size_t n : counts) {
    a.count += n;
    even = even && n == counts[0];
    hash = mixed(hash, n);
  }
  if (!even) a.parts = hash;
}

// ---- calls in the order of places

// From a list by rank to one by place.  Lists that are not this rank's to give are empty.
template <class T>
void reorder(std::vector<T>& list, const std::vector<int>& ranks) {
  if (list.empty()) return;
  std::vector<T> by_place;
  for (const int rank : ranks) by_place.push_back(list[static_cast<size_t>(rank)]);
  list = std::move(by_place);
}

void place(AllGatherUnknown& gather, const std::vector<int>& ranks) {
  gather.place = [ranks, whole = gather.place](const std::vector<size_t>& by_place) {
    std::vector<size_t> counts(ranks.size());
    for (size_t p = 0; p < ranks.size(); ++p) counts[static_cast<size_t>(ranks[p])] = by_place[p];
    std::vector<void*> outputs = whole(counts);
    reorder(outputs, ranks);
    return outputs;
  };
}

}  // namespace

void validate(const Operation& operation, int rank, int world_size) {
  std::visit([&](const auto& call) { check(call, rank, world_size); }, operation.call);
}

OpSignature announce(const Operation& operation, uint64_t sequence) {
  OpSignature a{.sequence = sequence};
  std::visit(
      [&]<class Call>(const Call& call) {
        a.kind = kindOf<Call>();
        if constexpr (Typed<Call>) a.dtype = call.dtype;
        if constexpr (Reducing<Call>) a.op = static_cast<uint8_t>(call.op);
        if constexpr (Rooted<Call>) a.root = call.root;
        if constexpr (HasCounts<Call>)
          announceParts(a, call.counts);
        else if constexpr (Counted<Call>)
          a.count = call.count;
        if constexpr (std::is_same_v<Call, SparseAllReduce>) a.parts = call.shape;
        if constexpr (std::is_same_v<Call, CompressedAllReduce>) {
          a.dtype = DType::kFloat32;
          a.op = static_cast<uint8_t>(call.op);
          a.parts = codingBits(call.coding, call.schedule);
        }
        // What ranks send each other in an uneven all-to-all they compare while it runs.
        if constexpr (std::is_same_v<Call, AllToAll>) {
          if (call.even) announceParts(a, call.send_counts);
          a.parts = call.even ? 0 : 1;
        }
      },
      operation.call);
  return a;
}

namespace {

// Wires: a Communicator or a Transport.
template <class Wires>
void runOver(Wires& wires, const Operation& operation) {
  std::visit(Overloaded{
                 [&](const AllReduce& a) { allReduce(wires, a); },
                 [&](const Reduce& r) { reduce(wires, r); },
                 [&](const ReduceScatter& r) { reduceScatter(wires, r); },
                 [&](const Broadcast& b) { broadcast(wires, b); },
                 [&](const AllGather& a) { allGather(wires, a); },
                 [&](const Gather& g) { gather(wires, g); },
                 [&](const Scatter& s) { scatter(wires, s); },
                 [&](const AllToAll& a) { allToAll(wires, a); },
                 [&](const Barrier& b) { barrier(wires, b); },
                 [&](const SparseAllReduce& s) { allGatherUnknown(wires, s.gather); },
                 [&](const MonitoredBarrier&) { barrier(wires, Barrier{}); },
                 [&](const CompressedAllReduce& a) { compressedAllReduce(wires, a); },
             },
             operation.call);
}

}  // namespace

Operation inPlaces(const Operation& operation, const std::vector<int>& ranks) {
  Operation placed{.call = operation.call, .timeout = operation.timeout};
  std::visit(
      [&]<class Call>(Call& call) {
        if constexpr (requires { int{call.root}; })
          call.root = positionsOf(ranks)[static_cast<size_t>(call.root)];
        if constexpr (requires { call.inputs.size(); }) reorder(call.inputs, ranks);
        if constexpr (requires { call.outputs.size(); }) reorder(call.outputs, ranks);
        if constexpr (requires { call.counts.size(); }) reorder(call.counts, ranks);
        if constexpr (requires { call.send_counts.size(); }) reorder(call.send_counts, ranks);
        if constexpr (requires { call.recv_counts.size(); }) reorder(call.recv_counts, ranks);
        if constexpr (std::is_same_v<Call, AllGatherUnknown>) place(call, ranks);
        if constexpr (std::is_same_v<Call, SparseAllReduce>) place(call.gather, ranks);
      },
      placed.call);
  return placed;
}

void run(Communicator& c, const Operation& operation) {
  runOver(c, operation);
}

void run(Transport& transport, const Operation& operation) {
  runOver(transport, operation);
}

}  // namespace ringreduce
