// The pieces of a process by address.
#include "cuda/memory/own_memory.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "cuda/cuda_stream.h"
#include "cuda/gpu_device.h"
#include "cuda/memory/closer.h"

namespace ringreduce::cuda {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<OwnSegment>> by_address;
  uint64_t last = 0;

  void remove(const OwnSegment& segment) {
    const std::lock_guard lock(mutex);
    by_address.erase(reinterpret_cast<uintptr_t>(segment.data()));
  }
};

Registry& registry() {
  static auto* all = new Registry;  // never destroyed: memory may be given back at exit
  return *all;
}

// To the end of the process.
void leave(std::shared_ptr<OwnSegment> segment) {
  (void)new std::shared_ptr<OwnSegment>(std::move(segment));
}

void giveBack(const std::shared_ptr<OwnSegment>& segment, const StreamUsers& users) {
  registry().remove(*segment);
  if (segment->isKept()) return leave(segment);
  std::vector<CUstream_st*> streams;
  try {
    streams = users();
  } catch (const std::exception& error) {
    log("cannot tell which streams use GPU memory that is given back, so it stays: " +
        std::string(error.what()));
    return leave(segment);
  }
  closeLater([segment, streams = std::move(streams)] {
    const OnDevice here(segment->device());
    try {
      for (const cudaStream_t stream : streams) await(stream);
    } catch (const CudaError&) {
      // The GPU has failed, and uses it no more.
    }
    segment->end();
  });
}

}  // namespace

void await(cudaStream_t stream) {
  constexpr auto kLook = std::chrono::milliseconds(2);
  while (captureOf(stream)) std::this_thread::sleep_for(kLook);
  Event end;
  end.record(stream);
  while (!end.isReached()) std::this_thread::sleep_for(kLook);
}

void OwnSegment::whenOver(std::function<void()> then) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_over_) {
      then_ = std::move(then);
      return;
    }
  }
  then();
}

void OwnSegment::end() {
  std::function<void()> then;
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    then.swap(then_);
  }
  if (then) then();
}

std::shared_ptr<void> ownMemory(int device, size_t bytes, StreamUsers users) {
  Exported made =
      allocateExported(device, roundUp(std::max<size_t>(bytes, 1), exportGranularity(device)));
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto segment = std::make_shared<OwnSegment>(++all.last, std::move(made));
  all.by_address[reinterpret_cast<uintptr_t>(segment->data())] = segment;
  void* const data = segment->data();
  const int generation = forkGeneration();
  return {data, [segment, users = std::move(users), generation](void*) {
            if (forkGeneration() == generation)
              giveBack(segment, users);
            else
              leave(segment);  // the parent's
          }};
}

std::shared_ptr<OwnSegment> ownSegmentOf(const void* data, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(data);
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto found = all.by_address.upper_bound(at);
  if (found == all.by_address.begin()) return nullptr;
  --found;
  const size_t offset = at - found->first, whole = found->second->bytes();
  return offset <= whole && bytes <= whole - offset ? found->second : nullptr;
}

std::shared_ptr<OwnSegment> ownSegmentWithId(uint64_t id) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const auto& [at, segment] : all.by_address)
    if (segment->id() == id) return segment;
  return nullptr;
}

}  // namespace ringreduce::cuda
