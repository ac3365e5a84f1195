// From a call to its check, its announcement and its collective.
#include "group/operation.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "base/hash.h"

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
              kindOf<MonitoredBarrier>() == Kind::kMonitoredBarrier);

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
}

// The elements of all parts; parts that differ in size are told apart by a hash as well.
void announceParts(Announcement& a, const std::vector<size_t>& counts) {
  bool even = true;
  uint64_t hash = 0;
  for (size_t n : counts) {
    a.count += n;
    even = even && n == counts[0];
    hash = mixed(hash, n);
  }
  if (!even) a.parts = hash;
}

}  // namespace

void validate(const Operation& operation, int rank, int world_size) {
  std::visit([&](const auto& call) { check(call, rank, world_size); }, operation.call);
}

Announcement announce(const Operation& operation, uint64_t sequence) {
  Announcement a{.sequence = sequence};
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
        // What ranks send each other in an uneven all-to-all they compare while it runs.
        if constexpr (std::is_same_v<Call, AllToAll>) {
          if (call.even) announceParts(a, call.send_counts);
          a.parts = call.even ? 0 : 1;
        }
      },
      operation.call);
  return a;
}

void run(Communicator& c, const Operation& operation) {
  std::visit(Overloaded{
                 [&](const AllReduce& a) { allReduce(c, a); },
                 [&](const Reduce& r) { reduce(c, r); },
                 [&](const ReduceScatter& r) { reduceScatter(c, r); },
                 [&](const Broadcast& b) { broadcast(c, b); },
                 [&](const AllGather& a) { allGather(c, a); },
                 [&](const Gather& g) { gather(c, g); },
                 [&](const Scatter& s) { scatter(c, s); },
                 [&](const AllToAll& a) { allToAll(c, a); },
                 [&](const Barrier& b) { barrier(c, b); },
                 [&](const SparseAllReduce& s) { allGatherUnknown(c, s.gather); },
                 [&](const MonitoredBarrier&) { barrier(c, {}); },
             },
             operation.call);
}

}  // namespace ringreduce
