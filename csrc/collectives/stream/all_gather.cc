// All-gather over a mesh: by Bruck where there is little, else round the ring, straight from and to
// the caller's memory.
#include <numeric>

#include "algorithm/choose.h"
#include "base/copy.h"
#include "collectives/stream/blocks.h"
#include "collectives/stream/calls.h"

namespace ringreduce {

void allGather(Mesh& mesh, const AllGather& a) {
  const auto P = static_cast<size_t>(mesh.size()), me = static_cast<size_t>(mesh.rank());
  const size_t width = sizeOf(a.dtype);
  if (a.outputs[me] != a.input) copyBytes(a.outputs[me], a.input, a.counts[me] * width);
  if (P == 1) return;
  Blocks blocks{.own = static_cast<const std::byte*>(a.input), .places = {}, .bytes = {}};
  for (size_t x = 0; x < P; ++x) {
    blocks.places.push_back(static_cast<std::byte*>(a.outputs[(me + x) % P]));
    blocks.bytes.push_back(a.counts[(me + x) % P] * width);
  }
  const WireCost& cost = mesh.options().cost;
  const size_t total = std::accumulate(blocks.bytes.begin(), blocks.bytes.end(), size_t{0});
  if (gathersByRing(total, mesh.size(), cost))
    gatherByRing(mesh, blocks);
  else
    gatherByBruck(mesh, blocks, bruckRadix(mesh.size(), cost));
}

void allGatherUnknown(Mesh& mesh, const AllGatherUnknown& a) {
  const auto P = static_cast<size_t>(mesh.size()), me = static_cast<size_t>(mesh.rank());
  auto* counts = reinterpret_cast<uint64_t*>(mesh.scratch(P * sizeof(uint64_t)));
  counts[me] = a.count;
  AllGather sizes{.input = counts + me, .dtype = DType::kUInt64};
  for (size_t r = 0; r < P; ++r) sizes.outputs.push_back(counts + r);
  sizes.counts.assign(P, 1);
  allGather(mesh, sizes);
  const std::vector<size_t> all(counts, counts + P);
  allGather(mesh, {.input = a.input, .outputs = a.place(all), .counts = all, .dtype = a.dtype});
}

}  // namespace ringreduce
