// One step of compressed gradients; for the files that implement Compression.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "group/compression.h"

namespace ringreduce {

struct Compression::Step {
  Step(uint64_t number, Way way, size_t parameters)
      : number(number), way(way), seen(parameters), unseen(parameters) {}

  const uint64_t number;
  const Way way;
  const Nanos began = now();
  std::vector<bool> seen;  // by parameter
  size_t unseen;
  bool last = false;  // its last bucket was there
  std::vector<std::shared_ptr<Residuals::Store>> stores;
  size_t started = 0;  // buckets; of them have arrived:
  std::atomic<size_t> arrived{0};
  std::atomic<bool> finite{true};
  std::atomic<Nanos> busy{0};  // with operations

  bool complete() const { return last || unseen == 0; }
  bool underWay() const { return arrived != started; }
};

// Refuses before anything is sent.
[[noreturn]] inline void refuseGradients(const std::string& why) {
  throw Error(Failure::kArgument, "ringreduce compressed gradients: " + why);
}

}  // namespace ringreduce
