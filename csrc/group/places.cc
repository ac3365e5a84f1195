// Lists by rank, and roots, as lists by place.
#include "group/places.h"

#include <type_traits>

namespace ringreduce {
namespace {

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

std::vector<int> placesOf(const std::vector<int>& ranks) {
  std::vector<int> places(ranks.size());
  for (size_t p = 0; p < ranks.size(); ++p)
    places[static_cast<size_t>(ranks[p])] = static_cast<int>(p);
  return places;
}

Operation inPlaces(const Operation& operation, const std::vector<int>& ranks) {
  Operation placed{.call = operation.call, .timeout = operation.timeout};
  std::visit(
      [&]<class Call>(Call& call) {
        if constexpr (requires { int{call.root}; })
          call.root = placesOf(ranks)[static_cast<size_t>(call.root)];
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

}  // namespace ringreduce
