// Reads the options from the environment, and carries the shared ones as text.
#include "group/options.h"

#include <sched.h>

#include <algorithm>
#include <sstream>

#include "base/env.h"
#include "base/error.h"
#include "wire/page.h"

namespace ringreduce {

int coresAvailable() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

SharedOptions SharedOptions::fromEnvironment(int world_size) {
  SharedOptions options;
  // Slots that stay in a core's cache serve best, but where ranks take turns on a core each turn is a
  // context switch, and a larger slot makes fewer of them.
  if (world_size > coresAvailable()) options.slot_bytes = 1 << 20;
  options.slot_bytes = static_cast<size_t>(
      envInteger("RINGREDUCE_SLOT_BYTES", static_cast<int64_t>(options.slot_bytes), 4 << 10,
                 64 << 20));
  options.slot_bytes = options.slot_bytes / kLine * kLine;
  options.slots = static_cast<int>(envInteger("RINGREDUCE_SLOTS", options.slots, 3, kMaxSlots));
  if (const auto name = env("RINGREDUCE_ALGORITHM")) {
    const auto algorithm = algorithmNamed(*name);
    if (!algorithm)
      throw Error(Failure::kSetup, "RINGREDUCE_ALGORITHM=" + *name +
                                       " is none of auto, direct, twoshot, ring; correct or unset it");
    options.algorithm = *algorithm;
  }
  return options;
}

std::string SharedOptions::toText() const {
  std::ostringstream text;
  text << static_cast<int>(algorithm) << ' ' << slot_bytes << ' ' << slots;
  return text.str();
}

SharedOptions SharedOptions::fromText(const std::string& text) {
  std::istringstream in(text);
  SharedOptions options;
  int algorithm = 0;
  if (!(in >> algorithm >> options.slot_bytes >> options.slots))
    throw Error(Failure::kSetup, "rank 0 sent options that cannot be read: " + text);
  options.algorithm = static_cast<Algorithm>(algorithm);
  return options;
}

}  // namespace ringreduce
