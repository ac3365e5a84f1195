// Checks a call, announces it, and runs its collective.  All by the members that a call has
// (collectives/collectives.h), so a new collective changes
// nothing here but `Repeats`, if it can run again after a loss between hosts.
#include "epoch/operation.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "transport/wait_guard.h"

namespace ringreduce {
namespace {

template <class Call>
concept Counted = requires(Call c) { size_t{c.count}; };
template <class Call>
concept Typed = requires(Call c) { DType{c.dtype}; };
template <class Call>
concept Reducing = requires(Call c) { ReduceOp{c.op}; };
template <class Call>
concept Rooted = requires(Call c) { int{c.root}; };
template <class Call>
concept HasInputs = requires(Call c) { c.inputs.size(); };
template <class Call>
concept HasOutputs = requires(Call c) { c.outputs.size(); };
template <class Call>
concept HasCounts = requires(Call c) { c.counts.size(); };
template <class Call>
concept HasSendCounts = requires(Call c) { c.send_counts.size(); };
template <class Call>
concept Signs = requires(const Call c, OpSignature a) { c.sign(a); };
template <class Call>
concept Reorders = requires(Call c, const std::vector<int>& ranks) { c.reorder(ranks); };
template <class Call>
concept Shares = requires(const Call c, int rank) { SharedData{c.shared(rank)}; };
template <class Call>
concept HasProblem = requires(const Call c, int world_size) { c.problem(world_size); };

// Each Kind has one call.
template <class... Calls>
constexpr bool haveAllKinds(const std::variant<Calls...>*) {
  size_t kinds = 0;
  ((kinds |= size_t{1} << static_cast<size_t>(Calls::kKind)), ...);
  return sizeof...(Calls) == kKindTable.size() && kinds + 1 == size_t{1} << kKindTable.size();
}
static_assert(haveAllKinds(static_cast<CollectiveCall*>(nullptr)));

template <class T>
std::vector<T> pick(const std::vector<T>& all, const std::vector<int>& members) {
  std::vector<T> some;
  for (const int rank : members) some.push_back(all[static_cast<size_t>(rank)]);
  return some;
}

int firstMissing(const std::vector<int>& members) {
  int rank = 0;
  for (const int member : members) rank += member == rank;
  return rank;
}

// Why the call is refused; empty if it is not.
template <class Call>
std::string problemOf(const Call& call, int rank, int world_size) {
  if constexpr (Typed<Call> && Reducing<Call>)
    if (!isSupported(call.dtype, call.op))
      return std::string("cannot take ") + name(call.op) + " of " + name(call.dtype) + " elements";
  if constexpr (Rooted<Call>)
    if (call.root < 0 || call.root >= world_size)
      return "rank " + std::to_string(call.root) + " in a group of " + std::to_string(world_size);
  // A rank that is not the root of a gather or a scatter has one side of it only.
  bool both_sides = true;
  if constexpr (Rooted<Call>) both_sides = call.root == rank;
  std::string problem;
  const auto check = [&](const char* what, size_t size) {
    if (problem.empty()) problem = wrongLength(what, size, world_size);
  };
  if constexpr (HasInputs<Call>)
    if (both_sides || !call.inputs.empty()) check("inputs", call.inputs.size());
  if constexpr (HasOutputs<Call>)
    if (both_sides || !call.outputs.empty()) check("outputs", call.outputs.size());
  if constexpr (HasCounts<Call>) check("counts", call.counts.size());
  if constexpr (HasProblem<Call>)
    if (problem.empty()) problem = call.problem(world_size);
  return problem;
}

// Of each collective: see repeatable().
struct Repeats {
  using Result = std::optional<Overwritten>;
  const int rank;
  Result operator()(const AllReduce& a) { return Overwritten{a.data, a.count * sizeOf(a.dtype)}; }
  Result operator()(const Reduce& r) {
    if (r.input != r.output || r.root != rank) return Overwritten{};
    return Overwritten{r.output, r.count * sizeOf(r.dtype)};
  }
  Result operator()(const CompressedAllReduce& c) {
    if (c.input != c.output) return Overwritten{};
    return Overwritten{c.output, c.count * sizeof(float)};
  }
  Result operator()(const Broadcast&) { return Overwritten{}; }
  Result operator()(const Scatter&) { return Overwritten{}; }
  Result operator()(const Barrier&) { return Overwritten{}; }
  Result operator()(const MonitoredBarrier&) { return Overwritten{}; }
  // Others need all ranks, so they never run again after a loss.
  Result operator()(const auto&) { return std::nullopt; }
};

}  // namespace

void validate(const Operation& operation, int rank, int world_size) {
  std::visit(
      [&]<class Call>(const Call& call) {
        const std::string problem = problemOf(call, rank, world_size);
        if (!problem.empty())
          throw Error(Failure::kArgument,
                      std::string("ringreduce ") + name(Call::kKind) + ": " + problem);
      },
      operation.call);
}

OpSignature signatureOf(const Operation& operation, uint64_t sequence) {
  OpSignature a{.sequence = sequence};
  std::visit(
      [&]<class Call>(const Call& call) {
        a.kind = Call::kKind;
        if constexpr (Typed<Call>) a.dtype = call.dtype;
        if constexpr (Reducing<Call>) a.op = static_cast<uint8_t>(call.op);
        if constexpr (Rooted<Call>) a.root = call.root;
        if constexpr (Counted<Call>) a.count = call.count;
        if constexpr (HasCounts<Call>) a.setParts(call.counts);
        if constexpr (Signs<Call>) call.sign(a);
      },
      operation.call);
  return a;
}

SharedData sharedData(const Operation& operation, int rank) {
  // Below it, a round of flags more costs as much as the copies that it saves.
  constexpr size_t kLeastBytes = 64 << 10;
  return std::visit(
      [&]<class Call>(const Call& call) {
        SharedData found;
        if constexpr (Shares<Call>) found = call.shared(rank);
        return found.bytes >= kLeastBytes ? found : SharedData{};
      },
      operation.call);
}

size_t bytesOf(const Operation& operation) {
  return std::visit(
      []<class Call>(const Call& call) {
        size_t elements = 0, lists = 1, width = sizeof(float);
        if constexpr (Typed<Call>) width = sizeOf(call.dtype);
        if constexpr (HasInputs<Call>) lists = std::max(lists, call.inputs.size());
        if constexpr (HasOutputs<Call>) lists = std::max(lists, call.outputs.size());
        if constexpr (Counted<Call>) elements = call.count * lists;
        if constexpr (HasCounts<Call>)
          for (const size_t count : call.counts) elements += count;
        if constexpr (HasSendCounts<Call>)
          for (const size_t count : call.send_counts) elements += count;
        return elements * width;
      },
      operation.call);
}

std::optional<Codec> codecOf(const Operation& operation) {
  const auto* compressed = std::get_if<CompressedAllReduce>(&operation.call);
  return compressed ? std::optional(compressed->coding.codec) : std::nullopt;
}

Operation byPositions(const Operation& operation, const std::vector<int>& ranks) {
  Operation placed{.call = operation.call, .timeout = operation.timeout};
  std::visit(
      [&]<class Call>(Call& call) {
        if constexpr (Rooted<Call>) call.root = positionsOf(ranks)[static_cast<size_t>(call.root)];
        if constexpr (HasInputs<Call>) reorderList(call.inputs, ranks);
        if constexpr (HasOutputs<Call>) reorderList(call.outputs, ranks);
        if constexpr (HasCounts<Call>) reorderList(call.counts, ranks);
        if constexpr (Reorders<Call>) call.reorder(ranks);
      },
      placed.call);
  return placed;
}

Operation toMembers(const Operation& operation, const RankMap& map,
                    const std::function<Error(int rank)>& lacks) {
  Operation placed{
      .call = operation.call, .timeout = operation.timeout, .before = operation.before};
  if (map.isWhole()) return placed;
  const std::vector<int>& members = map.ranks();
  std::visit(
      [&]<class Call>(Call& call) {
        constexpr bool takes_lists = HasInputs<Call> || HasOutputs<Call> || HasCounts<Call>;
        constexpr bool is_scatter = HasInputs<Call> && Rooted<Call>;
        if constexpr (is_scatter) {
          if (!call.inputs.empty()) call.inputs = pick(call.inputs, members);
        } else if constexpr (takes_lists) {
          throw lacks(firstMissing(members));
        }
        if constexpr (Rooted<Call>) {
          const auto root = map.positionOf(call.root);
          if (!root) throw lacks(call.root);
          call.root = *root;
        }
      },
      placed.call);
  return placed;
}

std::optional<Overwritten> repeatable(const Operation& operation, int rank) {
  return std::visit(Repeats{rank}, operation.call);
}

}  // namespace ringreduce
