// Making it, and what is looked after.  The calls are in internode_calls.cc.
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "cuda/internode_state.h"
#include "group/gather.h"

namespace ringreduce::cuda {
namespace {

// How long an abort waits for a call that is putting work into streams.
constexpr Nanos kCallsEnd = 300 * kMillisecond;

}  // namespace

// ---- making it

InterNodeCommunicator::State::State(std::shared_ptr<Group> all, const Hosts& of,
                                    std::shared_ptr<Group> here,
                                    std::shared_ptr<GpuCommunicator> communicator, int on)
    : group(std::move(all)),
      hosts(of),
      host_group(std::move(here)),
      local(std::move(communicator)),
      device(on),
      hierarchical(of.even() && of.neighbours().size() > 1),
      rail(hierarchical ? of.placeOf(of.rank()) : 0) {
  const OnDevice here_now(device);
  segment = Segment::create(4096);
  signals = registerSegment(device, segment);
  counters = allocate(device, sizeof(Local));
  Stream(device).zero(counters->data(), sizeof(Local));
  join();
  RemoteRanks::Hooks hooks{.transport_error = [this] { return ncclError(); },
                           .check_host = [this] { checkHost(); },
                           .poison = [this] { poison(); },
                           .end_waits = [this](const std::string& why) { endWaits(why); }};
  watchdog = std::make_unique<Watchdog>(*group, std::make_unique<RemoteRanks>(*group, hooks));
}

// Makes the communicators of NCCL, one for each rail.
void InterNodeCommunicator::State::join() {
  std::shared_ptr<const NcclLibrary> library;
  NcclId id{};
  together(*group, [&] {
    library = NcclLibrary::load();
    if (hosts.rank() == maker()) id = library->makeId();
  });
  id = gatherEach(*group, id)[static_cast<size_t>(maker())];
  const int size = hierarchical ? hosts.count() : hosts.size();
  const int rank = hierarchical ? hosts.hostOf(hosts.rank()) : hosts.rank();
  const auto meanwhile = [this] {
    constexpr char kDoing[] = "while NCCL connected the GPUs of several hosts";
    group->interrupt(kDoing);
    group->checkHealth();
    const std::vector<PeerState> states = group->states();
    for (int r = 0; r < group->size(); ++r)
      if (!states[static_cast<size_t>(r)].isHere()) group->failLost(r, kDoing);
  };
  try {
    ring = NcclRing::join(library, id, rank, size, device, group->timeout(), meanwhile);
  } catch (const Error& error) {
    if (group->failed()) throw;
    throw Error(error.kind(), group->who(group->rank()) + ": " + error.what());
  }
}

std::shared_ptr<InterNodeCommunicator> InterNodeCommunicator::create(
    std::shared_ptr<Group> group, const Hosts& hosts, std::shared_ptr<Group> host_group,
    std::shared_ptr<GpuCommunicator> local, int device) {
  return std::shared_ptr<InterNodeCommunicator>(new InterNodeCommunicator(std::make_unique<State>(
      std::move(group), hosts, std::move(host_group), std::move(local), device)));
}

InterNodeCommunicator::InterNodeCommunicator(std::unique_ptr<State> state)
    : state_(std::move(state)) {}

InterNodeCommunicator::~InterNodeCommunicator() {
  constexpr Nanos kPatience = 5 * kSecond;
  State& s = *state_;
  // In a forked child neither CUDA nor the watchdog's threads are there.
  if (forkGeneration() != s.generation) {
    (void)state_.release();
    return;
  }
  if (!s.watchdog->settle(kPatience)) {
    log(s.group->who(s.group->rank()) + " leaves GPU memory of group '" + s.group->options().name +
        "' to the end of the process: GPU operations that may touch it are still under way");
    state_.release()->watchdog.reset();
  }
}

bool InterNodeCommunicator::hierarchical() const {
  return state_->hierarchical;
}
size_t InterNodeCommunicator::bytes() const {
  return state_->local->bytes() + state_->ring->bytes() + state_->counters->bytes();
}

// ---- for the watchdog

std::string causeOf(const std::string& text) {
  const std::string cause = text.substr(0, text.find("; noticed by rank"));
  return cause.substr(0, cause.find(", in group '"));
}

void InterNodeCommunicator::State::checkHost() {
  try {
    local->check();
    host_group->checkHealth();
  } catch (const Error& error) {
    group->fail(error.kind(), hosts.rank(), causeOf(error.what()));
  }
}

std::string InterNodeCommunicator::State::ncclError() {
  try {
    ring->check();
    return "";
  } catch (const Error& error) {
    const int size = hierarchical ? hosts.count() : hosts.size();
    const auto beside = [&](int step) {
      if (!hierarchical) return group->who((hosts.rank() + step + size) % size);
      const int host = (hosts.hostOf(hosts.rank()) + step + size) % size;
      return group->who(hosts.ranksOn(host)[static_cast<size_t>(rail)]);
    };
    return "NCCL failed at " + group->who(hosts.rank()) + ", between " + beside(-1) + " and " +
           beside(1) +
           ", and does not say whether one of these is gone, another rank, or the network: " +
           error.what();
  }
}

void InterNodeCommunicator::State::endWaits(const std::string& why) {
  try {
    local->abort(causeOf(why));
  } catch (const Error&) {
    // It had ended before.
  }
  // This also ends a call of NCCL's that never returns, although NCCL should be called by one
  // thread at a time.
  std::unique_lock lock(calls, std::defer_lock);
  for (const Nanos end = deadlineIn(kCallsEnd); !lock.try_lock() && now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ring->abort();
}

void InterNodeCommunicator::check() {
  state_->watchdog->check();
}
bool InterNodeCommunicator::wait(Nanos longest) {
  return state_->watchdog->wait(longest);
}
void InterNodeCommunicator::abort(const std::string& why) {
  state_->watchdog->abort(why);
}

// ---- what it leaves to others

namespace {

[[noreturn]] void refuse(const char* what) {
  throw Error(Failure::kArgument, std::string("between hosts ringreduce performs all_reduce only, "
                                              "not ") +
                                      what);
}

}  // namespace

void InterNodeCommunicator::reduceScatter(const GpuReduceScatter&, CUstream_st*) {
  refuse("reduce_scatter");
}
void InterNodeCommunicator::allGather(const GpuAllGather&, CUstream_st*) {
  refuse("all_gather");
}
void InterNodeCommunicator::broadcast(const GpuBroadcast&, CUstream_st*) {
  refuse("broadcast");
}
std::string InterNodeCommunicator::registerBuffer(void*, size_t) {
  return "ranks of this group are on several hosts, which map none of each other's memory";
}
void InterNodeCommunicator::unregisterBuffer(void*) {}

}  // namespace ringreduce::cuda
