// Making it, and what is looked after.  The calls are in spanning_calls.cc.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/meeting.h"
#include "cuda/spanning_state.h"

namespace ringreduce::cuda {
namespace {

// How long a rank of this host may be gone before it is blamed for what is under way: it may have
// done its part and left.
constexpr Nanos kGrace = kSecond;
// How long an abort waits for a call that is putting work into streams.
constexpr Nanos kCallsEnd = 300 * kMillisecond;

NcclId idOf(const std::string& text) {
  NcclId id;
  if (!fromHex(text, id.data(), id.size()))
    throw Error(Failure::kSetup, "the store holds something else where NCCL's id should be");
  return id;
}

}  // namespace

// ---- making it

Spanning::State::State(std::shared_ptr<Store> with, const Hosts& of, std::shared_ptr<Group> here,
                       std::shared_ptr<Plane> plane, int on, const GroupOptions& wanted)
    : store(std::move(with)),
      hosts(of),
      group(std::move(here)),
      local(std::move(plane)),
      device(on),
      options(wanted),
      hierarchical(of.even() && of.neighbours().size() > 1),
      rail(hierarchical ? of.placeOf(of.rank()) : 0),
      name(of.who(of.rank())) {
  const OnDevice here_now(device);
  segment = Segment::create(4096);
  signals = registerSegment(device, segment);
  counters = allocate(device, sizeof(Local));
  Stream(device).zero(counters->data(), sizeof(Local));

  const auto library = NcclLibrary::load();
  const NcclId id = agreeOnId(*library);
  const int size = hierarchical ? hosts.count() : hosts.size();
  const int rank = hierarchical ? hosts.hostOf(hosts.rank()) : hosts.rank();
  try {
    ring = NcclRing::join(library, id, rank, size, device, options.timeout, [this] {
      if (options.interrupt) options.interrupt();
      group->checkHealth();
    });
  } catch (const Error& error) {
    throw Error(error.kind(), name + ": " + error.what());
  }
  if (hosts.rank() == maker()) store->remove(idKey());  // all have joined with it
  watcher = std::make_unique<FarWatcher>(
      store, hosts, options,
      FarOptions{.probe = [this] { return probe(); },
                 .let_go = [this](const std::string& why) { letGo(why); }});
}

NcclId Spanning::State::agreeOnId(const NcclLibrary& library) {
  if (hosts.rank() == maker()) {
    const NcclId id = library.makeId();
    store->set(idKey(), hexText(id));
    return id;
  }
  const Stopwatch stopwatch(options);
  for (;;) {
    if (const auto text = store->get(idKey())) return idOf(*text);
    if (stopwatch.over())
      throw Error(Failure::kTimeout, hosts.who(maker()) +
                                         " had come, but did not start NCCL's part of group '" +
                                         options.name + "'; noticed by " + name);
    if (options.interrupt) options.interrupt();
    group->checkHealth();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::shared_ptr<Spanning> Spanning::create(std::shared_ptr<Store> store, const Hosts& hosts,
                                           std::shared_ptr<Group> group,
                                           std::shared_ptr<Plane> local, int device,
                                           const GroupOptions& options) {
  return std::shared_ptr<Spanning>(new Spanning(std::make_unique<State>(
      std::move(store), hosts, std::move(group), std::move(local), device, options)));
}

Spanning::Spanning(std::unique_ptr<State> state) : state_(std::move(state)) {}

Spanning::~Spanning() {
  constexpr Nanos kPatience = 5 * kSecond;
  State& s = *state_;
  // In a forked child neither CUDA nor the watcher's threads are there.
  if (forkGeneration() != s.generation) {
    (void)state_.release();
    return;
  }
  if (!s.watcher->settle(kPatience)) {
    log(s.name + " leaves GPU memory of group '" + s.options.name +
        "' to the end of the process: GPU operations that may touch it are still under way");
    state_.release()->watcher.reset();
  }
}

bool Spanning::hierarchical() const {
  return state_->hierarchical;
}
size_t Spanning::bytes() const {
  return state_->local->bytes() + state_->ring->bytes() + state_->counters->bytes();
}

// ---- what is looked after, in threads of the watcher

std::string causeOf(const std::string& text) {
  return text.substr(0, text.find("; noticed by rank"));
}

std::optional<FarTrouble> Spanning::State::probe() {
  try {
    local->check();
  } catch (const Error& error) {
    return FarTrouble{error.kind(), causeOf(error.what())};
  }
  const std::vector<PeerState> states = group->states();
  const auto gone = std::find_if(states.begin(), states.end(),
                                 [](const PeerState& state) { return state.isLost(); });
  if (gone == states.end()) {
    gone_since = 0;
  } else {
    if (gone_since == 0) gone_since = now();
    if (now() - gone_since >= kGrace)
      return FarTrouble{Failure::kPeerLost,
                        group->who(static_cast<int>(gone - states.begin())) +
                            " is lost: " + group->howLost(static_cast<int>(gone - states.begin())) +
                            " during a GPU operation of group '" + options.name + "'"};
  }
  try {
    ring->check();
  } catch (const Error& error) {
    const int size = hierarchical ? hosts.count() : hosts.size();
    const auto beside = [&](int step) {
      if (!hierarchical) return hosts.who((hosts.rank() + step + size) % size);
      const int host = (hosts.hostOf(hosts.rank()) + step + size) % size;
      return hosts.who(hosts.ranksOn(host)[static_cast<size_t>(rail)]);
    };
    return FarTrouble{error.kind(),
                      "NCCL failed at " + name + ", between " + beside(-1) + " and " + beside(1) +
                          ", and does not say whether one of these is gone, another rank, or the "
                          "network: " +
                          error.what(),
                      true};
  }
  return std::nullopt;
}

void Spanning::State::letGo(const std::string& why) {
  // First what makes kernels spoil outputs, then what lets them go on.
  spoil();
  try {
    local->abort(why);
  } catch (const Error&) {
    // It had ended before.
  }
  // A call of NCCL's that never comes back is ended by this as well, though NCCL would rather be
  // called by one thread at a time.
  std::unique_lock lock(calls, std::defer_lock);
  for (const Nanos end = deadlineIn(kCallsEnd); !lock.try_lock() && now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ring->abort();
}

void Spanning::check() {
  state_->watcher->check();
}
bool Spanning::wait(Nanos longest) {
  return state_->watcher->wait(longest);
}
void Spanning::abort(const std::string& why) {
  state_->watcher->abort(why);
}

// ---- what it leaves to others

namespace {

[[noreturn]] void refuse(const char* what) {
  throw Error(Failure::kArgument, std::string("between hosts ringreduce performs all_reduce only, "
                                              "not ") +
                                      what);
}

}  // namespace

void Spanning::reduceScatter(const GpuReduceScatter&, CUstream_st*) {
  refuse("reduce_scatter");
}
void Spanning::allGather(const GpuAllGather&, CUstream_st*) {
  refuse("all_gather");
}
void Spanning::broadcast(const GpuBroadcast&, CUstream_st*) {
  refuse("broadcast");
}
std::string Spanning::registerBuffer(void*, size_t) {
  return "ranks of this group are on several hosts, which map none of each other's memory";
}
void Spanning::unregisterBuffer(void*) {}

}  // namespace ringreduce::cuda
