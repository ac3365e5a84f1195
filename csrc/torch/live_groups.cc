// A list of weak references, which the end of the process goes through.
#include "torch/live_groups.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/limits.h"
#include "bootstrap/attempt.h"
#include "group/group.h"
#include "torch/gpu_backend.h"
#include "torch/store_keeper.h"

namespace ringreduce {
namespace {

struct LiveGroups {
  struct Entry {
    std::weak_ptr<Group> group;
    c10::weak_intrusive_ptr<GpuBackend> gpu;
  };
  std::mutex mutex;
  std::vector<Entry> groups;
  std::vector<std::weak_ptr<Attempt>> changes;
};

LiveGroups& liveGroups() {
  static auto* all = new LiveGroups;  // never destroyed: used while the process exits
  return *all;
}

}  // namespace

void addLive(const std::shared_ptr<Group>& group, const c10::intrusive_ptr<GpuBackend>& gpu) {
  LiveGroups& live = liveGroups();
  const std::lock_guard lock(live.mutex);
  std::erase_if(live.groups, [](const auto& entry) { return entry.group.expired(); });
  live.groups.push_back({group, c10::weak_intrusive_ptr<GpuBackend>(gpu)});
}

void addLive(const std::shared_ptr<Attempt>& change) {
  LiveGroups& live = liveGroups();
  const std::lock_guard lock(live.mutex);
  std::erase_if(live.changes, [](const auto& entry) { return entry.expired(); });
  live.changes.push_back(change);
}

void shutdownAll() {
  dropKeptStore();
  decltype(LiveGroups::groups) groups;
  decltype(LiveGroups::changes) changes;
  {
    const std::lock_guard lock(liveGroups().mutex);
    groups.swap(liveGroups().groups);
    changes.swap(liveGroups().changes);
  }
  for (const auto& entry : changes)
    if (const auto change = entry.lock()) change->end("its process exits");
  // They tell the other ranks.
  for (const Nanos limit = deadlineIn(limits::kExit); now() < limit;) {
    if (std::ranges::all_of(changes, [](const auto& entry) { return entry.expired(); })) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const auto& entry : groups) {
    if (const auto gpu = entry.gpu.lock()) leave(*gpu);
    if (const auto group = entry.group.lock()) group->shutdown();
  }
}

void leave(Group& group) {
  try {
    group.setTimeout(limits::kLeave);
    group.shutdown();  // its works are told of its end
  } catch (const Error& error) {
    log("rank " + group.options().shown(group.rank()) + " leaves a group: " + error.what());
  }
}

void leave(GpuBackend& gpu, bool abort) {
  try {
    if (abort) gpu.abort();
    gpu.shutdown();
  } catch (const std::exception& error) {  // those of the NCCL backend inside it too
    log("rank " + std::to_string(gpu.getRank()) + " leaves a group's GPUs: " + error.what());
  }
}

}  // namespace ringreduce
