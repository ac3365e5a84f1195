// One all-reduce between hosts: inside each host, between them, inside again; and how it fails.
#include "cuda/internode/internode_communicator.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fd.h"
#include "base/limits.h"
#include "cuda/communicator/call_order.h"
#include "cuda/cuda_stream.h"
#include "cuda/gpu_device.h"
#include "cuda/internode/nccl_ring.h"
#include "cuda/internode/remote_ranks.h"
#include "cuda/kernels/kernel_table.h"
#include "group/agreement.h"
#include "transport/shm/segment.h"

namespace ringreduce::cuda {

// Flags between the host and kernels.
struct Signals {
  AbortFlag abort;
  alignas(kLine) uint64_t delivered;
};

struct InterNodeCommunicator::State {
  State(std::shared_ptr<Group> all, const Hosts& of, std::shared_ptr<Group> here,
        std::shared_ptr<GpuCommunicator> communicator, int on);

  // The first rank of each rail, for the others.
  int maker() const { return hierarchical ? hosts.ranksOn(0)[static_cast<size_t>(rail)] : 0; }
  void join();
  void sumInParts(const GpuAllReduce& call, cudaStream_t stream);
  void sumWhole(const GpuAllReduce& call, cudaStream_t stream);
  // Sums over the ring, which divides for AVG.  `sums`: of sums of this host, scaled already.
  void overRing(const void* input, void* output, size_t count, const GpuAllReduce& call, bool sums,
                cudaStream_t stream);
  void put(const GpuAllReduce& call, cudaStream_t stream);
  void finish(CallEnd& end, cudaStream_t stream);
  [[noreturn]] void giveUp(const GpuAllReduce& call, const Error& why, CallEnd& end,
                           cudaStream_t stream);
  bool isEcho(const Error& why) const;
  int culpritOf(const Error& why) const;
  void awaitVerdict(const Error& why);
  void deliver(const GpuAllReduce& call, cudaStream_t stream);
  std::string ncclError();
  void checkHost();
  void endWaits(const std::string& why);

  // From now on the end of each call poisons its output.
  void poison() { reinterpret_cast<Signals*>(segment->data())->abort.set(); }
  Signals* onDevice() const { return reinterpret_cast<Signals*>(signals->data()); }
  Nanos timeoutOf(const GpuAllReduce& call) const {
    return call.timeout > 0 ? call.timeout : group->timeout();
  }

  const std::shared_ptr<Group> group;  // over all hosts
  const std::shared_ptr<Epoch> epoch = group->epoch();
  const Hosts hosts;
  const std::shared_ptr<Group> host_group;
  const std::shared_ptr<GpuCommunicator> local;
  const int device;
  const int generation = forkGeneration();  // forks before it was made
  const bool hierarchical;
  const int rail;

  std::shared_ptr<Segment> segment;
  MemoryPtr signals;  // a Signals in it
  std::unique_ptr<NcclRing> ring;

  std::mutex calls;  // one at a time puts work into streams
  CallOrder order{device};
  EventPool events;
  Nanos echo_since = 0;                // for the watchdog's thread
  std::unique_ptr<Watchdog> watchdog;  // last: its threads use the rest
};

// ---- making it

InterNodeCommunicator::State::State(std::shared_ptr<Group> all, const Hosts& of,
                                    std::shared_ptr<Group> here,
                                    std::shared_ptr<GpuCommunicator> communicator, int on)
    : group(std::move(all)),
      hosts(of),
      host_group(std::move(here)),
      local(std::move(communicator)),
      device(on),
      hierarchical(of.even() && of.localRanks().size() > 1),
      rail(hierarchical ? of.localRankOf(of.rank()) : 0) {
  const OnDevice here_now(device);
  segment = Segment::create(sizeof(Signals));
  signals = registerSegment(device, segment);
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
  agreeOnStatus(*group, [&] {
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
    const std::vector<PeerState> states = epoch->peers().states();
    for (int r = 0; r < group->size(); ++r)
      if (!states[static_cast<size_t>(r)].isHere()) epoch->arbiter->failLost(r, kDoing);
  };
  try {
    ring = NcclRing::join(library, id, rank, size, device, group->timeout(), meanwhile);
  } catch (const Error& error) {
    if (group->failed()) throw;
    throw Error(error.kind(), epoch->peers().who(group->rank()) + ": " + error.what());
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
    log(s.epoch->peers().who(s.group->rank()) + " leaves GPU memory of group '" +
        s.group->options().name +
        "' to the end of the process: GPU operations that may touch it are still under way");
    state_.release()->watchdog.reset();
  }
}

bool InterNodeCommunicator::hierarchical() const {
  return state_->hierarchical;
}
size_t InterNodeCommunicator::bytes() const {
  return state_->local->bytes() + state_->ring->bytes();
}

// ---- for the watchdog

namespace {

// How long an abort waits for a call that is putting work into streams.
constexpr Nanos kCallsEnd = 300 * kMillisecond;

// The text of a group's error without the group, the rank that noticed it, and the advice.
std::string causeOf(const std::string& text) {
  const std::string cause = text.substr(0, text.find("; noticed by rank"));
  return cause.substr(0, cause.find(", in group '"));
}

}  // namespace

// Ranks abort the group of their host when the group over all hosts has failed.  Such an abort may
// arrive before the failure itself, which says why and names the rank to blame.
bool InterNodeCommunicator::State::isEcho(const Error& why) const {
  return why.kind() == Failure::kAborted && host_group->failed();
}

// The rank that an error of this host's group blames; kNobody if it names none of this group.
int InterNodeCommunicator::State::culpritOf(const Error& why) const {
  for (int r = 0; r < group->size(); ++r)
    if (group->options().shownAs(r) == why.facts().rank) return r;
  return kNobody;
}

void InterNodeCommunicator::State::checkHost() {
  try {
    local->check();
    host_group->checkHealth();
  } catch (const Error& error) {
    if (echo_since == 0) echo_since = now();
    if (isEcho(error) && now() - echo_since < limits::kVerdict) return;
    epoch->arbiter->fail(error.kind(), culpritOf(error), causeOf(error.what()));
  }
}

std::string InterNodeCommunicator::State::ncclError() {
  try {
    ring->check();
    return "";
  } catch (const Error& error) {
    const int size = hierarchical ? hosts.count() : hosts.size();
    const auto beside = [&](int step) {
      if (!hierarchical) return epoch->peers().who((hosts.rank() + step + size) % size);
      const int host = (hosts.hostOf(hosts.rank()) + step + size) % size;
      return epoch->peers().who(hosts.ranksOn(host)[static_cast<size_t>(rail)]);
    };
    return "NCCL failed at " + epoch->peers().who(hosts.rank()) + ", between " + beside(-1) +
           " and " + beside(1) +
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
  // This also ends a call of NCCL that never returns, although NCCL wants one thread at a time.
  std::unique_lock lock(calls, std::defer_lock);
  for (const Nanos end = deadlineIn(kCallsEnd); !lock.try_lock() && now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ring->abort();
}

std::shared_ptr<Local> InterNodeCommunicator::local() const {
  return state_->local->local();
}
void InterNodeCommunicator::check() {
  state_->watchdog->check();
}
std::vector<OpRecord> InterNodeCommunicator::records(uint64_t since) const {
  return state_->watchdog->records(since);
}
void InterNodeCommunicator::addTo(Totals& totals) const {
  state_->watchdog->addTo(totals);
}

bool InterNodeCommunicator::wait(Nanos longest) {
  State& s = *state_;
  if (!s.watchdog->wait(longest)) return false;
  try {
    s.local->check();  // a kernel may have given up that the group has not heard of
  } catch (const Error& error) {
    const std::lock_guard lock(s.calls);
    s.awaitVerdict(error);
    s.epoch->arbiter->fail(error.kind(), s.culpritOf(error), causeOf(error.what()));
  }
  return true;
}
void InterNodeCommunicator::abort(const std::string& why) {
  state_->watchdog->abort(why);
}

// ---- calls that it does not perform

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

// ---- all-reduce: rails, parts, and its end

namespace {

// From this size on a message is summed in parts: 256 KiB take as long between hosts, at 50 GB/s,
// as the kernel launch that whole messages save.
constexpr size_t kLeastInParts = size_t{256} << 10;

}  // namespace

void InterNodeCommunicator::allReduce(const GpuAllReduce& call, CUstream_st* stream) {
  State& s = *state_;
  validate(call);
  const std::lock_guard lock(s.calls);
  const Range range(Kind::kAllReduce);
  const OnDevice here(s.device);
  const bool captured = captureOf(stream).has_value();
  if (captured) s.watchdog->stayAwake();
  s.watchdog->announce({.count = call.count,
                        .kind = Kind::kAllReduce,
                        .dtype = call.dtype,
                        .op = static_cast<uint8_t>(call.op),
                        .parts = call.borders});
  const auto end = std::make_shared<CallEnd>(s.device);
  try {
    s.order.follow(stream);
    if (captured) {
      // Nothing runs yet, and no event of a capture tells when it will have.
      s.watchdog->track(s.timeoutOf(call), [] { return true; });
      s.put(call, stream);
      s.order.leave(stream);
      return;
    }
    const auto begun = s.events.take();
    begun->record(stream);
    // Tracked before it is in the stream, since a host that is far ahead waits while it puts it
    // there. The watchdog's threads call these, and must not create a context on another device.
    s.watchdog->track(
        s.timeoutOf(call), [end] { return end->isReached(); }, call.label,
        [begun, device = s.device] {
          const OnDevice there(device);
          return begun->isReached();
        });
    s.put(call, stream);
    s.finish(*end, stream);
  } catch (const Error& error) {
    s.giveUp(call, error, *end, stream);
  }
}

void InterNodeCommunicator::State::finish(CallEnd& end, cudaStream_t stream) {
  end.set(order.leave(stream));
}

// Gives the watchdog time to name the rank to blame: NCCL may notice a lost rank before the group
// does, and neither NCCL nor an echo names it.  NCCL is asked only while the group has not failed,
// since a failure frees NCCL's communicator once `calls` is free, or after kCallsEnd.
void InterNodeCommunicator::State::awaitVerdict(const Error& why) {
  if (group->failed()) return;
  if (why.kind() != Failure::kPeerLost && !isEcho(why) && ncclError().empty()) return;
  for (const Nanos end = deadlineIn(limits::kVerdict); !group->failed() && now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Ends a call of which parts may be in the streams: the other ranks wait for the rest.
void InterNodeCommunicator::State::giveUp(const GpuAllReduce& call, const Error& why, CallEnd& end,
                                          cudaStream_t stream) {
  try {
    if (!host_group->failed() || isEcho(why)) awaitVerdict(why);
    // The error of this host's group names the rank to blame.
    if (host_group->failed()) epoch->arbiter->fail(why.kind(), culpritOf(why), causeOf(why.what()));
    epoch->arbiter->fail(why.kind() == Failure::kPeerLost ? Failure::kPeerLost : Failure::kAborted,
                         hosts.rank(),
                         epoch->peers().who(hosts.rank()) + " gave up: " + why.what() +
                             (call.label ? " (" + call.label() + ")" : ""));
  } catch (const Error&) {
    poison();
    try {
      deliver(call, stream);
      finish(end, stream);
    } catch (const Error&) {  // do not wait for a GPU that has failed
      end.set(nullptr);
    }
    throw;
  }
}

void InterNodeCommunicator::State::put(const GpuAllReduce& call, cudaStream_t stream) {
  if (!hierarchical)
    overRing(call.input, call.output, call.count, call, false, stream);
  else if (call.count * sizeOf(call.dtype) >= kLeastInParts)
    sumInParts(call, stream);
  else if (call.count > 0)
    sumWhole(call, stream);
  deliver(call, stream);
}

void InterNodeCommunicator::State::overRing(const void* input, void* output, size_t count,
                                            const GpuAllReduce& call, bool sums,
                                            cudaStream_t stream) {
  const Arithmetic arithmetic{.combine = combineOf(call.dtype, call.op),
                              .divide = call.op == ReduceOp::kAvg,
                              .scale = call.op == ReduceOp::kPremulSum && !sums,
                              .world_size = hosts.size(),
                              .factor = call.factor};
  ring->allReduce({.input = input,
                   .output = output,
                   .count = count,
                   .dtype = call.dtype,
                   .arithmetic = arithmetic,
                   .factor_on_device = call.factor_on_device,
                   .abort = &onDevice()->abort},
                  stream, [this] { watchdog->check(); });
}

void InterNodeCommunicator::State::sumWhole(const GpuAllReduce& call, cudaStream_t stream) {
  GpuAllReduce inside = call;
  if (call.op == ReduceOp::kAvg) inside.op = ReduceOp::kSum;
  inside.timeout = timeoutOf(call);
  inside.algorithm = std::nullopt;
  local->allReduce(inside, stream);
  overRing(call.output, call.output, call.count, call, true, stream);
}

void InterNodeCommunicator::State::sumInParts(const GpuAllReduce& call, cudaStream_t stream) {
  const size_t width = sizeOf(call.dtype), ranks = hosts.localRanks().size();
  const size_t part = call.count / ranks, whole = part * ranks;
  auto* const output = static_cast<std::byte*>(call.output);
  std::byte* const own = output + static_cast<size_t>(rail) * part * width;
  local->reduceScatter({.input = call.input,
                        .output = own,
                        .count = part,
                        .dtype = call.dtype,
                        .op = call.op == ReduceOp::kAvg ? ReduceOp::kSum : call.op,
                        .factor = call.factor,
                        .factor_on_device = call.factor_on_device,
                        .timeout = timeoutOf(call),
                        .label = call.label},
                       stream);
  overRing(own, own, part, call, true, stream);
  // Wait longer than the other rails' own deadline, so that they report the error: they know the
  // culprit.
  local->allGather({.input = own,
                    .output = output,
                    .count = part,
                    .dtype = call.dtype,
                    .timeout = 2 * timeoutOf(call),
                    .label = call.label},
                   stream);
  if (whole == call.count) return;
  GpuAllReduce rest = call;
  rest.input = static_cast<const std::byte*>(call.input) + whole * width;
  rest.output = output + whole * width;
  rest.count = call.count - whole;
  rest.timeout = 2 * timeoutOf(call);
  sumWhole(rest, stream);
}

// Puts in the last kernel of a call, which poisons the output if the group has failed, or a kernel
// of this host has given up.
void InterNodeCommunicator::State::deliver(const GpuAllReduce& call, cudaStream_t stream) {
  auto* output = static_cast<std::byte*>(call.output);
  const DeliverCall arguments{.from = nullptr,
                              .to = output,
                              .bytes = 0,
                              .abort = &onDevice()->abort,
                              .delivered = &onDevice()->delivered,
                              .local = local->local().get(),
                              .output = output,
                              .output_bytes = call.count * sizeOf(call.dtype),
                              .poison = poisonOf(call.dtype)};
  launch(deliverKernel(), 1, &arguments, false, stream);
}

}  // namespace ringreduce::cuda
