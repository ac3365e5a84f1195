// Rails, a call's parts, and what is looked after.
#include "cuda/spanning.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "cuda/communicator_state.h"
#include "cuda/far_watcher.h"
#include "cuda/kernels.h"
#include "cuda/nccl_ring.h"
#include "cuda/ranges.h"
#include "group/handshake.h"
#include "wire/segment.h"

namespace ringreduce::cuda {
namespace {

// From here on parts are worth their step: 256 KiB take as long between hosts, at 50 GB/s, as the
// launch that they save.
constexpr size_t kLeastInParts = size_t{256} << 10;
// How long a rank of this host may be gone before it is blamed for what is under way: it may have
// done its part and left.
constexpr Nanos kGrace = kSecond;
// How long an abort waits for a call that is putting work into streams.
constexpr Nanos kCallsEnd = 300 * kMillisecond;

std::string toHex(const NcclId& id) {
  std::string text;
  for (char byte : id)
    for (int digit : {byte >> 4 & 15, byte & 15}) text += "0123456789abcdef"[digit];
  return text;
}

NcclId fromHex(const std::string& text) {
  NcclId id{};
  if (text.size() != 2 * id.size())
    throw Error(Failure::kSetup, "the store holds something else where NCCL's id should be");
  for (size_t i = 0; i < id.size(); ++i)
    id[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

// What is in front of the story of who noticed it.
std::string cause(const std::string& text) {
  return text.substr(0, text.find("; noticed by rank"));
}

}  // namespace

// What the host sets and kernels see.
struct Signals {
  alignas(kLine) uint64_t abort;
  alignas(kLine) uint64_t delivered;
};

struct Spanning::State {
  State(std::shared_ptr<Store> with, const Hosts& of, std::shared_ptr<Group> here,
        std::shared_ptr<Plane> plane, int on, const GroupOptions& wanted);

  // The end of a call, which comes into the stream only after the watcher has been told of it.
  class Pending {
   public:
    // Null: there is nothing to wait for.
    void set(std::shared_ptr<Event> done) {
      const std::lock_guard lock(mutex_);
      done_ = std::move(done);
      is_set_ = true;
    }
    bool isOver() {
      std::shared_ptr<Event> done;
      {
        const std::lock_guard lock(mutex_);
        if (!is_set_) return false;
        done = done_;
      }
      return !done || done->isReached();
    }

   private:
    std::mutex mutex_;
    std::shared_ptr<Event> done_;
    bool is_set_ = false;
  };

  std::string idKey() const {
    return "ringreduce/" + hosts.word() + "/nccl/" + std::to_string(rail);
  }
  // The first rank of each rail, for the others.
  int maker() const { return hierarchical ? hosts.ranksOn(0)[static_cast<size_t>(rail)] : 0; }
  NcclId agreeOnId(const NcclLibrary& library);
  void sumInParts(const GpuAllReduce& call, cudaStream_t stream);
  void sumWhole(const GpuAllReduce& call, cudaStream_t stream);
  void between(void* data, size_t count, const GpuAllReduce& call, cudaStream_t stream);
  void overAll(const GpuAllReduce& call, cudaStream_t stream);
  void put(const GpuAllReduce& call, cudaStream_t stream);
  void finish(Pending& pending, cudaStream_t stream);
  [[noreturn]] void giveUp(const GpuAllReduce& call, const Error& why, Pending& pending,
                           cudaStream_t stream);
  void follow(cudaStream_t stream);
  void deliver(const GpuAllReduce& call, cudaStream_t stream);
  std::optional<FarTrouble> probe();
  void letGo(const std::string& why);

  // From now on the end of each call spoils its output.
  void spoil() {
    auto& signals_here = *reinterpret_cast<Signals*>(segment->data());
    std::atomic_ref(signals_here.abort).store(1, std::memory_order_release);
  }
  Signals* onDevice() const { return reinterpret_cast<Signals*>(signals->data()); }
  Nanos timeoutOf(const GpuAllReduce& call) const {
    return call.timeout > 0 ? call.timeout : options.timeout;
  }

  const std::shared_ptr<Store> store;
  const Hosts hosts;
  const std::shared_ptr<Group> group;
  const std::shared_ptr<Plane> local;
  const int device;
  const GroupOptions options;
  const int generation = forkGeneration();  // forks before it was made
  const bool hierarchical;
  const int rail;
  const std::string name;  // of this rank and its process, for messages

  std::shared_ptr<Segment> segment;
  MemoryPtr signals;   // a Signals in it
  MemoryPtr counters;  // a Local
  std::unique_ptr<NcclRing> ring;

  std::mutex calls;  // one at a time puts work into streams
  EventPool events;
  std::shared_ptr<Event> last;
  unsigned long long last_stream = 0;  // its number
  Nanos gone_since = 0;
  std::unique_ptr<FarWatcher> watcher;  // last: its threads use the rest
};

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
    store->set(idKey(), toHex(id));
    return id;
  }
  const Stopwatch stopwatch(options);
  for (;;) {
    if (const auto text = store->get(idKey())) return fromHex(*text);
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

// ---- calls

void Spanning::allReduce(const GpuAllReduce& call, CUstream_st* stream) {
  State& s = *state_;
  validate(call);
  const std::lock_guard lock(s.calls);
  const Range range(Kind::kAllReduce);
  const OnDevice here(s.device);
  cudaStreamCaptureStatus capture;
  cuda::check(cudaStreamIsCapturing(stream, &capture), "ask whether a stream is being captured");
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (captured) s.watcher->stayAwake();
  const uint64_t number = s.watcher->announce({.count = call.count,
                                               .kind = Kind::kAllReduce,
                                               .dtype = call.dtype,
                                               .op = static_cast<uint8_t>(call.op)});
  const auto pending = std::make_shared<State::Pending>();
  try {
    if (captured) {
      // Nothing runs yet, and no event of a capture tells when it will have.
      const auto always = [] { return true; };
      s.watcher->entrust(number, s.timeoutOf(call), always, always);
      s.put(call, stream);
      return;
    }
    s.follow(stream);
    const auto begun = s.events.take();
    begun->record(stream);
    // Before it is put there, since a host that is far ahead waits in the midst of it.  The
    // watcher's threads ask, who shall not make a context on another device.
    s.watcher->entrust(
        number, s.timeoutOf(call),
        [begun, device = s.device] {
          const OnDevice there(device);
          return begun->isReached();
        },
        [pending, device = s.device] {
          const OnDevice there(device);
          return pending->isOver();
        });
    s.put(call, stream);
    s.finish(*pending, stream);
  } catch (const Error& error) {
    s.giveUp(call, error, *pending, stream);
  }
}

void Spanning::State::finish(Pending& pending, cudaStream_t stream) {
  const auto done = events.take();
  done->record(stream);
  last = done;
  last_stream = numberOf(stream);
  pending.set(done);
}

// Of a call that failed on its way something may be in the streams, and the other ranks wait for
// the rest.
void Spanning::State::giveUp(const GpuAllReduce& call, const Error& why, Pending& pending,
                             cudaStream_t stream) {
  try {
    // What ended this host's group has been told by it.
    if (group->failed()) watcher->fail(why.kind(), hosts.rank(), cause(why.what()));
    watcher->fail(Failure::kAborted, hosts.rank(),
                  name + " gave up: " + why.what() + (call.label ? " (" + call.label() + ")" : ""));
  } catch (const Error&) {
    spoil();
    try {
      deliver(call, stream);
      finish(pending, stream);
    } catch (const Error&) {  // a GPU that says nothing any more is not waited for
      pending.set(nullptr);
    }
    throw;
  }
}

void Spanning::State::put(const GpuAllReduce& call, cudaStream_t stream) {
  if (!hierarchical)
    overAll(call, stream);
  else if (call.count * sizeOf(call.dtype) >= kLeastInParts)
    sumInParts(call, stream);
  else if (call.count > 0)
    sumWhole(call, stream);
  deliver(call, stream);
}

// Calls follow each other, whatever their streams.
void Spanning::State::follow(cudaStream_t stream) {
  if (last && last_stream != numberOf(stream)) last->holdBack(stream);
}

void Spanning::State::overAll(const GpuAllReduce& call, cudaStream_t stream) {
  const Arithmetic arithmetic{.combine = combineOf(call.dtype, call.op),
                              .divide = call.op == ReduceOp::kAvg,
                              .scale = call.op == ReduceOp::kPremulSum,
                              .world_size = hosts.size(),
                              .factor = call.factor};
  ring->allReduce({.input = call.input,
                   .output = call.output,
                   .count = call.count,
                   .dtype = call.dtype,
                   .arithmetic = arithmetic,
                   .factor_on_device = call.factor_on_device,
                   .abort = &onDevice()->abort},
                  stream, [this] { watcher->check(); });
}

// What hosts have summed, in place: scaled already, and divided by all ranks only now.
void Spanning::State::between(void* data, size_t count, const GpuAllReduce& call,
                              cudaStream_t stream) {
  const Arithmetic arithmetic{.combine = combineOf(call.dtype, call.op),
                              .divide = call.op == ReduceOp::kAvg,
                              .scale = false,
                              .world_size = hosts.size(),
                              .factor = 1};
  ring->allReduce({.input = data,
                   .output = data,
                   .count = count,
                   .dtype = call.dtype,
                   .arithmetic = arithmetic,
                   .abort = &onDevice()->abort},
                  stream, [this] { watcher->check(); });
}

void Spanning::State::sumWhole(const GpuAllReduce& call, cudaStream_t stream) {
  GpuAllReduce inside = call;
  if (call.op == ReduceOp::kAvg) inside.op = ReduceOp::kSum;
  inside.timeout = timeoutOf(call);
  inside.algorithm = std::nullopt;
  local->allReduce(inside, stream);
  between(call.output, call.count, call, stream);
}

void Spanning::State::sumInParts(const GpuAllReduce& call, cudaStream_t stream) {
  const size_t width = sizeOf(call.dtype), ranks = hosts.neighbours().size();
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
  between(own, part, call, stream);
  // Who waits here waits for rails of others, whose own deadline is to come first: it knows more.
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

// The end of each call: its output is spoilt if the group has given up.
void Spanning::State::deliver(const GpuAllReduce& call, cudaStream_t stream) {
  auto* output = static_cast<std::byte*>(call.output);
  const DeliverCall arguments{.from = nullptr,
                              .to = output,
                              .bytes = 0,
                              .abort = &onDevice()->abort,
                              .delivered = &onDevice()->delivered,
                              .local = reinterpret_cast<Local*>(counters->data()),
                              .output = output,
                              .output_bytes = call.count * sizeOf(call.dtype)};
  launch(deliverKernel(), 1, &arguments, false, stream);
}

// ---- what is looked after, in threads of the watcher

std::optional<FarTrouble> Spanning::State::probe() {
  try {
    local->check();
  } catch (const Error& error) {
    return FarTrouble{error.kind(), cause(error.what())};
  }
  const std::vector<Presence> presence = group->presence();
  const auto gone = std::find(presence.begin(), presence.end(), Presence::kEnded);
  if (gone == presence.end()) {
    gone_since = 0;
  } else {
    if (gone_since == 0) gone_since = now();
    if (now() - gone_since >= kGrace)
      return FarTrouble{Failure::kPeerLost,
                        group->who(static_cast<int>(gone - presence.begin())) + " is lost: " +
                            group->howLost(static_cast<int>(gone - presence.begin())) +
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
