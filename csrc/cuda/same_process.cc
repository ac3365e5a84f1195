// The token of the process and the table of what its ranks offer each other.
#include "cuda/same_process.h"

#include <sys/random.h>

#include <map>
#include <mutex>

#include "base/error.h"

namespace ringreduce::cuda {
namespace {

struct Offers {
  std::mutex mutex;
  uint64_t last = 0;
  std::map<uint64_t, std::weak_ptr<DeviceMemory>> open;
};
Offers& offers() {
  static auto* all = new Offers;  // never destroyed: memory may be offered until the process ends
  return *all;
}

}  // namespace

std::array<uint64_t, 2> processToken() {
  static auto* mutex = new std::mutex;
  static std::array<uint64_t, 2> token{};
  static int generation = -1;
  const std::lock_guard lock(*mutex);
  if (generation != forkGeneration()) {
    if (getrandom(token.data(), sizeof token, 0) != sizeof token)
      throwErrno(Failure::kSetup, "no random numbers to be had");
    generation = forkGeneration();
  }
  return token;
}

uint64_t offer(const MemoryPtr& memory) {
  Offers& all = offers();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.open, [](const auto& entry) { return entry.second.expired(); });
  all.open[++all.last] = memory;
  return all.last;
}

MemoryPtr take(uint64_t ticket) {
  Offers& all = offers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.open.find(ticket);
  MemoryPtr memory = found == all.open.end() ? nullptr : found->second.lock();
  if (!memory)
    throw Error(Failure::kSetup, "another rank of this process has given its memory back already");
  return memory;
}

}  // namespace ringreduce::cuda
