// Reads the options from the environment, and carries the shared ones as text.
#include "bootstrap/options.h"

#include <sched.h>

#include <algorithm>

#include "base/config.h"
#include "base/error.h"
#include "base/text.h"
#include "transport/shm/page.h"
#include "transport/tcp/tls.h"

namespace ringreduce {

namespace {

static_assert(Config::kMostSlots == kMaxSlots);

}  // namespace

std::string GroupOptions::shown(int rank) const {
  const std::string number = std::to_string(shownAs(rank));
  if (startedAs(rank) == shownAs(rank)) return number;
  return number + " (started as " + std::to_string(startedAs(rank)) + ")";
}

std::string GroupOptions::rankList(const std::vector<int>& ranks) const {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks, [&](int r) { return shown(r); });
}

SharedOptions GroupOptions::chosenShared(int world_size) const {
  if (shared) return *shared;
  return choose_shared ? choose_shared(world_size) : SharedOptions::fromEnvironment(world_size);
}

GroupOptions GroupOptions::ofRanks(const std::vector<int>& ranks) const {
  GroupOptions some = *this;
  some.global_ranks = shownAs(ranks);
  if (started_as.empty()) return some;
  some.started_as.clear();
  for (const int rank : ranks) some.started_as.push_back(startedAs(rank));
  return some;
}

GroupOptions GroupOptions::ofMembers(const std::vector<int>& ranks, int size) const {
  const bool all = static_cast<int>(ranks.size()) == size;
  GroupOptions some = all ? *this : ofRanks(ranks);
  some.members = all ? std::vector<int>() : ranks;
  if (!all && some.of_ranks == 0) some.of_ranks = size;
  return some;
}

int coresAvailable() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

bool forcesSockets() {
  return Config::read().wire.get() == "tcp";
}

SharedOptions SharedOptions::fromEnvironment(int world_size) {
  SharedOptions options;
  // Four slots that fill half of a core's cache serve best.  Where ranks take turns on a core, each
  // turn is a context switch, and a larger slot makes fewer of them.
  if (world_size > coresAvailable()) options.slot_bytes = 256 << 10;
  const Config config = Config::read();
  if (const int64_t bytes = config.slot_bytes.get())
    options.slot_bytes = static_cast<size_t>(bytes);
  if (const int64_t slots = config.slots.get()) options.slots = static_cast<int>(slots);
  options.algorithm = algorithmNamed(config.algorithm.get()).value();
  if (config.order.get() == "rank") options.order = AddOrder::kRank;
  options.sockets = config.wire.get() == "tcp";
  options.encrypted = config.tls.get() == 1;
  const auto most = static_cast<int64_t>(world_size);  // a subgroup may be smaller
  if (config.on_loss.get() == "continue") {
    options.on_loss = OnLoss::kContinue;
    options.min_ranks = static_cast<int>(std::min(config.min_ranks.get(), most));
  }
  config.removed.get();
  return options;
}

void SharedOptions::validate(int world_size) const {
  const auto within = [](const char* what, size_t value, int64_t low, int64_t high) {
    if (value < static_cast<size_t>(low) || value > static_cast<size_t>(high))
      throw Error(Failure::kArgument, std::string(what) + " is " + std::to_string(value) +
                                          "; it can be " + std::to_string(low) + " to " +
                                          std::to_string(high));
  };
  within("slot_bytes", slot_bytes, Config::kLeastSlotBytes, Config::kMostSlotBytes);
  within("slots", static_cast<size_t>(slots), Config::kLeastSlots, Config::kMostSlots);
  if (algorithm > Algorithm::kHierarchical)
    throw Error(Failure::kArgument,
                "there is no such algorithm; there are auto, direct, twoshot, ring, bruck and "
                "hierarchical");
  if (min_ranks < 1 || min_ranks > world_size)
    throw Error(Failure::kArgument, "min_ranks is " + std::to_string(min_ranks) +
                                        "; it can be 1 to " + std::to_string(world_size));
  if (goesOn() && algorithm == Algorithm::kRing)
    throw Error(Failure::kArgument,
                "on_loss is 'continue', and the algorithm 'ring' cannot go on after a loss; take "
                "auto, direct or twoshot");
  if (order == AddOrder::kRank && !addsByRank(algorithm))
    throw Error(Failure::kArgument, std::string("order is 'rank', and the algorithm '") +
                                        kAlgorithmNames[static_cast<size_t>(algorithm)] +
                                        "' cannot add in the order of ranks; take auto, direct, "
                                        "twoshot or bruck");
  if (encrypted && !net::Tls::isBuiltIn())
    throw Error(Failure::kSetup,
                "RINGREDUCE_TLS=1 is set, and this copy of ringreduce was built without OpenSSL 3: "
                "install its headers (libssl-dev, openssl-devel) and build again with "
                "RINGREDUCE_OPENSSL=1, or unset RINGREDUCE_TLS");
  if (slot_bytes % kLine != 0)
    throw Error(Failure::kArgument, "slot_bytes is " + std::to_string(slot_bytes) +
                                        ", which is not a multiple of " + std::to_string(kLine));
}

std::string SharedOptions::toText() const {
  TextWriter text;
  text << static_cast<int>(algorithm) << ' ' << slot_bytes << ' ' << slots << ' ' << sockets << ' '
       << encrypted << ' ' << static_cast<int>(on_loss) << ' ' << min_ranks << ' '
       << static_cast<int>(order);
  return text.str();
}

SharedOptions SharedOptions::fromText(const std::string& text) {
  TextReader in(text);
  SharedOptions options;
  int algorithm = 0, on_loss = 0, order = 0;
  if (!(in >> algorithm >> options.slot_bytes >> options.slots >> options.sockets >>
        options.encrypted >> on_loss >> options.min_ranks >> order))
    throw Error(Failure::kSetup, "a rank told options that cannot be read: " + text);
  options.algorithm = static_cast<Algorithm>(algorithm);
  options.on_loss = static_cast<OnLoss>(on_loss);
  options.order = static_cast<AddOrder>(order);
  return options;
}

}  // namespace ringreduce
