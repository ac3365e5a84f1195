// Exchanges facts about the ranks, tries one access after the other, and frees the memory.
#include "cuda/memory/peer_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/memory/access_probe.h"
#include "group/gather.h"

namespace ringreduce::cuda {
namespace {

// A rank's facts and its wish.
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

// What all ranks together know to be impossible.
Obstacles gatherObstacles(Group& group, int device, const std::vector<Resident>& residents,
                          const std::vector<std::string>& names) {
  struct Texts {
    char text[kMemoryAccesses][240] = {};
  } mine;
  together(group, [&] {
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

// Keeps memory until the process ends.
void keep(MemoryPtr memory) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<MemoryPtr>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

PeerMemory::PeerMemory(Group& group, int device, size_t bytes, std::optional<MemoryAccess> wish) {
  Facts mine;
  together(group, [&] { mine = factsOf(device, bytes, wish); });
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
    auto state = std::make_unique<State>(group, device, residents);
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
  throw Error(Failure::kSetup,
              "the ranks of group '" + group.options().name +
                  "' do not reach each other's GPU memory" +
                  (wish ? std::string(" by ") + name(*wish) +
                              ", which was asked for: " + obstacles[static_cast<size_t>(*wish)]
                        : ", " + explain(obstacles, std::nullopt)) +
                  ". `nvidia-smi topo -p2p r` shows which GPUs have peer access");
}

PeerMemory::~PeerMemory() = default;

// ---- giving back

PeerMemory::State::State(Group& g, int d, std::vector<Resident> all)
    : group(g.weak_from_this()),
      rank(g.rank()),
      device(d),
      residents(std::move(all)),
      memory(residents.size()) {}

bool PeerMemory::State::hasClosed(int r) const {
  const auto i = static_cast<size_t>(r);
  if (residents[i].sharesProcess(residents[static_cast<size_t>(rank)])) return true;
  auto& word = *reinterpret_cast<uint32_t*>(closed->at(r));
  return std::atomic_ref(word).load(std::memory_order_acquire) != 0;
}

// Whether all other processes have closed this rank's memory.
bool PeerMemory::State::awaitClosed(Nanos patience) const {
  const auto late = [&] {
    std::vector<PeerState> states(residents.size());
    if (const auto g = group.lock()) states = g->states();
    for (int r = 0; r < static_cast<int>(residents.size()); ++r)
      if (!states[static_cast<size_t>(r)].isLost() && !hasClosed(r)) return true;
    return false;
  };
  const Nanos deadline = deadlineIn(patience);
  while (late()) {
    if (now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void PeerMemory::State::release(Nanos patience) noexcept {
  if (memory.empty()) return;
  MemoryPtr own = std::move(memory[static_cast<size_t>(rank)]);
  memory.clear();
  // In a forked child all of it is the parent's.
  if (!closed || forkGeneration() != generation) return;
  std::atomic_ref(*reinterpret_cast<uint32_t*>(closed->at(rank)))
      .store(1, std::memory_order_release);
  if (own && !awaitClosed(patience)) {
    // To free it under another rank's kernels would be worse.
    keep(std::move(own));
    log("rank " + std::to_string(rank) + " leaves " + std::to_string(bytes >> 20) +
        " MiB allocated on GPU " + std::to_string(device) +
        " until its process ends: another rank still maps them");
  }
}

}  // namespace ringreduce::cuda
