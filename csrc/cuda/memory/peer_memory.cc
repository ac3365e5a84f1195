// Exchanges facts about the ranks, tries one access after the other, and frees the memory.
#include "cuda/memory/peer_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "group/agreement.h"

namespace ringreduce::cuda {

namespace {

struct Facts {
  Resident resident;
  uint64_t bytes = 0, granularity = 1;
  int wish = -1;
};

Facts factsOf(int device, size_t bytes, std::optional<MemoryAccess> wish) {
  Facts facts;
  facts.bytes = bytes;
  if (wish) facts.wish = static_cast<int>(*wish);
  const Device d = describeDevice(device);
  const auto token = processToken();
  std::copy(token.begin(), token.end(), facts.resident.process);
  setText(facts.resident.gpu, d.uuid);
  facts.resident.exports_memory = d.exports_memory;
  facts.resident.registers_host_memory = d.registers_host_memory;
  facts.resident.mps = d.mps;
  if (d.exports_memory) facts.granularity = exportGranularity(device);
  return facts;
}

std::vector<std::string> namesIn(const Group& group) {
  std::vector<std::string> names;
  for (int r = 0; r < group.size(); ++r) names.push_back("rank " + group.options().shown(r));
  return names;
}

void requireSameWishes(const std::vector<Facts>& all, const std::vector<std::string>& names) {
  const auto wishOf = [](const Facts& facts) {
    return std::to_string(facts.bytes) + " bytes by " +
           (facts.wish < 0 ? "any way" : name(static_cast<MemoryAccess>(facts.wish)));
  };
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r].bytes != all[0].bytes || all[r].wish != all[0].wish)
      throw Error(Failure::kSetup, "ranks ask for different GPU memory: " + names[0] + " for " +
                                       wishOf(all[0]) + ", " + names[r] + " for " + wishOf(all[r]) +
                                       "; all must ask for the same");
}

Reach reachOf(int device, const Resident& own, const Resident& other) {
  if (own.sharesGpu(other)) return Reach::kYes;
  const int peer = findDevice(other.gpu);
  if (peer < 0) return Reach::kUnknown;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device, peer), "ask for peer access", device);
  return can ? Reach::kYes : Reach::kNo;
}

// The obstacles that all ranks together know.
Obstacles gatherObstacles(Group& group, int device, const std::vector<Resident>& residents,
                          const std::vector<std::string>& names) {
  struct Texts {
    char text[kMemoryAccesses][240] = {};
  } mine;
  agreeOnStatus(group, [&] {
    const auto me = static_cast<size_t>(group.rank());
    std::vector<Reach> reach;
    for (const Resident& other : residents) reach.push_back(reachOf(device, residents[me], other));
    const Obstacles own = obstaclesOf(me, residents, reach, names);
    for (size_t access = 0; access < kMemoryAccesses; ++access)
      setText(mine.text[access], own[access]);
  });
  std::vector<Obstacles> all;
  for (const Texts& texts : gatherEach(group, mine)) {
    Obstacles& one = all.emplace_back();
    for (size_t access = 0; access < kMemoryAccesses; ++access) one[access] = texts.text[access];
  }
  return merged(all);
}

}  // namespace

PeerMemory::PeerMemory(Group& group, int device, size_t bytes, std::optional<MemoryAccess> wish) {
  Facts mine;
  agreeOnStatus(group, [&] { mine = factsOf(device, bytes, wish); });
  const std::vector<Facts> facts = gatherEach(group, mine);
  const std::vector<std::string> names = namesIn(group);
  requireSameWishes(facts, names);
  std::vector<Resident> residents;
  size_t granularity = 1;
  for (const Facts& f : facts) {
    residents.push_back(f.resident);
    granularity = std::max<size_t>(granularity, f.granularity);
  }

  Obstacles obstacles = gatherObstacles(group, device, residents, names);
  while (const auto access = chooseAccess(obstacles, wish)) {
    auto state = std::make_unique<PeerPieces>(group, device, residents);
    state->access = *access;
    const std::string obstacle = tryAccess(group, *state, bytes, granularity, names);
    if (obstacle.empty()) {
      state->why = explain(obstacles, access);
      state_ = std::move(state);
      if (*access == MemoryAccess::kHost && !wish && group.rank() == 0)
        log("the GPUs of group '" + group.options().name +
            "' exchange data through host memory, which is slow: " + state_->why);
      return;
    }
    obstacles[static_cast<size_t>(*access)] = obstacle;
  }
  throw Error(
      Failure::kSetup,
      "the ranks of group '" + group.options().name + "' do not reach each other's GPU memory" +
          (wish ? std::string(" by ") + name(*wish) +
                      ", which was asked for: " + obstacles[static_cast<size_t>(*wish)]
                : ", " + explain(obstacles, std::nullopt)) +
          (wish == MemoryAccess::kHost ? ""
                                       : ". RINGREDUCE_CUDA_WAY=host takes none but host memory") +
          ". `nvidia-smi topo -p2p r` shows which GPUs have peer access");
}

PeerMemory::~PeerMemory() = default;

double PeerMemory::readRate(int rank) const {
  constexpr size_t kMost = size_t{16} << 20;
  constexpr int kTimes = 4;  // the first may take longer
  const size_t read = std::min(bytes(), kMost);
  const MemoryPtr to = allocate(device(), read);
  Stream stream(device());
  double best = 0;
  for (int i = 0; i < kTimes; ++i)
    best = std::max(best, stream.rateOfCopy(to->data(), at(rank), read));
  return best;
}

}  // namespace ringreduce::cuda
