// Makes and ends a communicator, and performs its calls, except the direct schedule
// (direct_stream.cc).
#include "cuda/communicator/host_communicator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <string>
#include <type_traits>

#include "base/config.h"
#include "base/error.h"
#include "base/fd.h"
#include "cuda/communicator/host_communicator_state.h"
#include "group/agreement.h"

namespace ringreduce::cuda {

std::optional<Choice> choiceNamed(const std::string& name) {
  for (size_t i = 0; i < std::size(kChoiceNames); ++i)
    if (name == kChoiceNames[i]) return static_cast<Choice>(i);
  return std::nullopt;
}

CommunicatorOptions CommunicatorOptions::fromEnvironment() {
  const Config config = Config::read();
  return {.algorithm = choiceNamed(config.cuda_algorithm.get()).value(),
          .access = memoryAccessNamed(config.cuda_way.get()),
          .maps_pieces = config.cuda_map.get() == "vmm"};
}

// ---- making it

namespace {

// Exchanged by the ranks before anything is allocated.
struct Introduction {
  char uuid[64] = {};
  int multiprocessors = 0;
  bool runs_together = false;  // its kernels may share a GPU with those of other ranks
  bool may_spin = true;        // its kernels may wait for those of other ranks
  int ranks_on_device = 1;     // some of them may be of other groups
  Choice algorithm = Choice::kAuto;
};

// Bytes a second, more than 16 lanes of PCIe 5 carry.  CUDA tells of a link only between GPUs that
// the process sees.
constexpr double kLinkRate = 60e9;

Setting settingOf(const std::vector<Introduction>& all) {
  Setting setting{.ranks = static_cast<int>(all.size())};
  setting.multiprocessors = all[0].multiprocessors;
  if (all.size() == 1) return setting;
  for (const Introduction& one : all) {
    const auto in_group = std::count_if(all.begin(), all.end(), [&](const Introduction& other) {
      return std::strcmp(one.uuid, other.uuid) == 0;
    });
    const int same = std::max(static_cast<int>(in_group), one.ranks_on_device);
    setting.ranks_on_device = std::max(setting.ranks_on_device, same);
    setting.on_one_gpu = static_cast<size_t>(in_group) == all.size();
    setting.multiprocessors = std::min(setting.multiprocessors, one.multiprocessors);
    // A kernel has a block at least, and a multiprocessor takes two.
    if (same > 1 && (!one.runs_together || same > 2 * one.multiprocessors))
      setting.run_at_once = false;
    if (!one.may_spin) setting.run_at_once = false;
  }
  return setting;
}

cudaFuncAttributes load(const void* kernel) {
  cudaFuncAttributes attributes;
  cuda::check(cudaFuncGetAttributes(&attributes, kernel), "load a kernel");
  return attributes;
}
// Loads all kernels now.  CUDA would load a kernel at its first launch, and wait for the GPU to be
// idle: for ever, behind a kernel that waits for a peer.
void loadKernels(int ranks) {
  for (int t = 0; t < kKernelDTypes; ++t) {
    const Kernels& kernels = kernelsOf(static_cast<DType>(t));
    for (const void* kernel : kernels.all_reduce)
      if (kernel) load(kernel);
    load(kernels.located);
    load(kernels.direct);
    load(kernels.copy_in);
    load(kernels.ring_step);
    if (const int place = fixedSizeOf(ranks); place >= 0)
      for (const void* kernel : {kernels.fixed[place].one_shot, kernels.fixed[place].two_shot,
                                 kernels.fixed[place].located, kernels.fixed[place].ll})
        if (kernel) load(kernel);
  }
  load(lookKernel());
  load(deliverKernel());
  for (int unit = 0; unit < kUnits; ++unit) {
    load(gatherKernel(unit));
    load(locatedGatherKernel(unit));
    load(carryKernel(unit));
  }
}

}  // namespace

HostCommunicator::State::State(std::shared_ptr<Group> of, int on, const CommunicatorOptions& wanted)
    : group(std::move(of)), device(on), options(wanted) {
  const OnDevice here(device);
  Introduction mine;
  agreeOnStatus(*group, [&] {
    facts = describeDevice(device);
    if (group->size() > kMostRanks)
      throw Error(Failure::kArgument, "a GPU communicator has at most " +
                                          std::to_string(kMostRanks) + " ranks, not " +
                                          std::to_string(group->size()));
    loadKernels(group->size());
    setText(mine.uuid, facts.uuid);
    mine.multiprocessors = facts.multiprocessors;
    mine.runs_together = options.together || facts.mps;
    // A kernel that waits for a late rank would be ended there, and CUDA be ruined (error 702).
    mine.may_spin = !facts.ends_long_kernels;
    mine.ranks_on_device = options.ranks_on_device;
    mine.algorithm = options.algorithm;
  });
  const std::vector<Introduction> all = gatherEach(*group, mine);
  options.algorithm = all[0].algorithm;
  setting = settingOf(all);
  if (options.algorithm == Choice::kNvls) makeWindow();
  pages = std::make_unique<MappedPages>(*group, device, sizeof(HostState));
  tuning = tune(setting);
  memory = std::make_unique<PeerMemory>(*group, device, tuning.layout(setting.ranks).bytes(),
                                        options.access);
  // Only the choice of the algorithm depends on the access and on links.
  setting.all_to_all = memory->access() != MemoryAccess::kHost;
  struct {
    bool all_linked = true;
  } links;
  agreeOnStatus(*group, [&] {
    for (int r = 0; r < group->size() && links.all_linked; ++r) {
      const std::string uuid = all[static_cast<size_t>(r)].uuid;
      links.all_linked = facts.uuid == uuid || areLinked(device, findDevice(uuid)) ||
                         (setting.all_to_all && memory->readRate(r) > kLinkRate);
    }
  });
  setting.linked = std::ranges::all_of(gatherEach(*group, links),
                                       [](const auto& one) { return one.all_linked; });
  tuning = tune(setting);
  if (setting.ranks_on_device > 1 || !setting.run_at_once || options.algorithm == Choice::kDirect)
    staging = std::make_unique<PeerMemory>(*group, device, kHalves * kStagingBytes, options.access);

  if (options.maps_tensors && (tuning.window_bytes > 0 || staging))
    board = std::make_unique<SegmentBoard>(*group, *memory, options.maps_pieces);

  agreeOnStatus(*group, [&] {
    constexpr size_t kBytes =
        roundUp(sizeof(DeviceComm), kLine) + sizeof(Local) + sizeof(PeerTensors);
    local = allocate(device, kBytes);
    Stream stream(device);
    stream.zero(local->data(), kBytes);
    comm.rank = group->rank();
    comm.size = group->size();
    comm.layout = tuning.layout(setting.ranks);
    for (int r = 0; r < comm.size; ++r) comm.base[r] = memory->at(r);
    comm.local = localOnDevice();
    comm.abort = &stateOnDevice(comm.rank)->abort;
    comm.trouble = &stateOnDevice(comm.rank)->trouble;
    if (board) comm.table = const_cast<SegmentEntry*>(board->table());
    stream.copy(local->data(), &comm, sizeof comm);
  });
  std::vector<HostState*> states;
  for (int r = 0; r < group->size(); ++r) states.push_back(state(r));
  locations.emplace(*state(group->rank()));
  watchdog =
      std::make_unique<Watchdog>(*group, std::make_unique<HostRanks>(*group, std::move(states)));
}

void HostCommunicator::State::makeWindow() {
  if (group->size() == 1) {  // it has nothing to add
    options.algorithm = Choice::kAuto;
    return;
  }
  try {
    agreeOnStatus(*group, [&] {
      if (setting.ranks_on_device > 1 || !setting.run_at_once)
        throw Error(Failure::kSetup, "ranks share a GPU, or are on one that ends long kernels");
    });
    window = std::make_unique<MulticastWindow>(*group, device, kNvlsWindow);
    agreeOnStatus(*group, [&] {
      // Code for older GPUs, compiled for this one when it was loaded, has no such instructions.
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
        if (load(nvlsKernel(dtype)).ptxVersion < 90)
          throw Error(Failure::kSetup, "its ringreduce was built for GPUs older than sm_90 only");
    });
  } catch (const Error& error) {
    if (error.facts().is_final.value_or(true)) throw;
    throw Error(error.kind(),
                std::string("RINGREDUCE_CUDA_ALGORITHM=nvls asks the NVSwitch to add, which it "
                            "cannot do for this group (leave the choice to auto): ") +
                    error.what(),
                error.facts());
  }
}

std::shared_ptr<HostCommunicator> HostCommunicator::create(std::shared_ptr<Group> group, int device,
                                                           const CommunicatorOptions& options) {
  return std::shared_ptr<HostCommunicator>(
      new HostCommunicator(std::make_unique<State>(std::move(group), device, options)));
}

HostCommunicator::HostCommunicator(std::unique_ptr<State> state) : state_(std::move(state)) {}

HostCommunicator::~HostCommunicator() {
  constexpr Nanos kPatience = 5 * kSecond;
  State& s = *state_;
  // In a forked child neither CUDA nor the watchdog's threads are there.
  if (forkGeneration() != s.generation) {
    (void)state_.release();
    return;
  }
  if (!s.watchdog->settle(kPatience)) {
    log("rank " + s.group->options().shown(rank()) + " of group '" + s.group->options().name +
        "' leaves " + std::to_string(bytes() >> 20) +
        " MiB of GPU memory to the end of the process: GPU operations that may touch it are still "
        "under way");
    state_.release()->watchdog.reset();
  }
}

int HostCommunicator::rank() const {
  return state_->group->rank();
}
int HostCommunicator::size() const {
  return state_->group->size();
}
const Tuning& HostCommunicator::tuning() const {
  return state_->tuning;
}
const Device& HostCommunicator::device() const {
  return state_->facts;
}
MemoryAccess HostCommunicator::access() const {
  return state_->memory->access();
}
bool HostCommunicator::usesOwnMemory(size_t bytes) const {
  const State& s = *state_;
  const Choice wanted = s.options.algorithm;
  if (!s.board || !s.board->reaches()) return false;
  return !kernelsRunAtOnce() || wanted == Choice::kDirect || s.isLocated(bytes, wanted);
}
bool HostCommunicator::kernelsRunAtOnce() const {
  return state_->setting.run_at_once;
}
bool HostCommunicator::isMapped(const void* data, size_t bytes) const {
  const State& s = *state_;
  return s.board && s.board->isMapped(s.board->find(data, bytes));
}
size_t HostCommunicator::bytes() const {
  return state_->memory->bytes() + (state_->staging ? state_->staging->bytes() : 0) +
         state_->local->bytes() + (state_->board ? state_->board->bytes() : 0) +
         (state_->window ? state_->window->bytes() : 0);
}

std::shared_ptr<Local> HostCommunicator::local() const {
  return {state_->local, state_->localOnDevice()};
}
void HostCommunicator::check() {
  state_->watchdog->check();
}
std::vector<OpRecord> HostCommunicator::records(uint64_t since) const {
  return state_->watchdog->records(since);
}
void HostCommunicator::addTo(Totals& totals) const {
  state_->watchdog->addTo(totals);
}

bool HostCommunicator::wait(Nanos longest) {
  return state_->watchdog->wait(longest);
}
void HostCommunicator::abort(const std::string& why) {
  state_->watchdog->abort(why);
}

// ---- choosing

Choice HostCommunicator::chosen(size_t count, DType dtype) const {
  return state_->choose(count, dtype, state_->options.algorithm);
}

Choice HostCommunicator::State::choose(size_t count, DType dtype, Choice choice) const {
  if (choice == Choice::kAuto)
    choice = setting.run_at_once ? choiceOf(chooseKernel(tuning, count * sizeOf(dtype)))
                                 : Choice::kDirect;
  if (choice == Choice::kDirect && !staging)
    throw Error(Failure::kArgument,
                "the direct schedule needs memory that is taken when the communicator is made: ask "
                "for it then (RINGREDUCE_CUDA_ALGORITHM=direct)");
  if (choice == Choice::kNvls && !window)
    throw Error(Failure::kArgument,
                "nvls needs memory that is taken when the communicator is made, and GPUs that an "
                "NVSwitch adds for: ask for it then (RINGREDUCE_CUDA_ALGORITHM=nvls)");
  if (choice != Choice::kDirect && !setting.run_at_once)
    throw Error(
        Failure::kArgument,
        std::string(kChoiceNames[static_cast<size_t>(choice)]) +
            " needs kernels of all ranks on their GPUs at once, for as long as a rank is late, and "
            "ranks of this group are processes that share a GPU in turns (start NVIDIA's MPS), "
            "with each other or with ranks of other groups, or are on a GPU that ends long kernels "
            "(one with a display, or under WSL): leave the choice to auto, which takes the direct "
            "schedule");
  const bool has_kernel =
      choice == Choice::kDirect ||
      (choice == Choice::kNvls ? hasNvlsKernel(dtype) : hasKernel(kernelOf(choice), dtype));
  return has_kernel ? choice : Choice::kTwoShot;
}

bool goesByLL(const Tuning& tuning, size_t bytes, Choice wanted) {
  return (wanted == Choice::kAuto && bytes <= tuning.ll_most) ||
         (wanted == Choice::kLL && bytes <= kLLMost);
}

bool HostCommunicator::State::isLocated(size_t bytes, Choice wanted) const {
  return wanted == Choice::kLocated || (wanted == Choice::kAuto && bytes >= tuning.located_least);
}

bool HostCommunicator::State::partsAreLocated(size_t count, DType dtype) const {
  const size_t bytes = static_cast<size_t>(group->size()) * count * sizeOf(dtype);
  return options.algorithm == Choice::kLocated ||
         (options.algorithm == Choice::kAuto && bytes >= tuning.parts_located);
}

Place HostCommunicator::State::placeOf(const void* data, size_t parts, size_t bytes,
                                       cudaStream_t stream, bool later) {
  // Peers would add or move elements that are not aligned one at a time.
  const size_t odd = reinterpret_cast<uintptr_t>(data) | (parts > 1 ? bytes : 0);
  if (!board || odd % sizeof(Pack) != 0) return {};
  return board->find(data, parts * bytes, [=] { return isCaptured(stream, false); }, later);
}

namespace {

uint64_t hashOf(std::initializer_list<uint64_t> words) {
  uint64_t hash = 0;
  for (const uint64_t word : words) hash = mixed(hash, word);
  return hash;
}

}  // namespace

Location HostCommunicator::State::locationOf(const GpuAllReduce& call, cudaStream_t stream,
                                             bool later) {
  const size_t bytes = call.count * sizeOf(call.dtype);
  // Inputs to be scaled are copied anyway.
  return {call.op == ReduceOp::kPremulSum ? Place{} : placeOf(call.input, 1, bytes, stream, later),
          placeOf(call.output, 1, bytes, stream, later),
          hashOf({call.count, static_cast<uint64_t>(call.dtype), static_cast<uint64_t>(call.op),
                  call.borders})};
}
Location HostCommunicator::State::locationOf(const GpuReduceScatter& call, cudaStream_t stream) {
  const auto size = static_cast<size_t>(group->size());
  const size_t bytes = call.count * sizeOf(call.dtype);
  return {call.op == ReduceOp::kPremulSum ? Place{} : placeOf(call.input, size, bytes, stream),
          {},
          hashOf({static_cast<uint64_t>(Kind::kReduceScatter), call.count,
                  static_cast<uint64_t>(call.dtype), static_cast<uint64_t>(call.op)})};
}
Location HostCommunicator::State::locationOf(const GpuAllGather& call, cudaStream_t stream) {
  const auto size = static_cast<size_t>(group->size());
  return {{},
          placeOf(call.output, size, call.count * sizeOf(call.dtype), stream),
          hashOf({static_cast<uint64_t>(Kind::kAllGather), call.count,
                  static_cast<uint64_t>(call.dtype)})};
}

const FixedKernels* HostCommunicator::State::fixedOf(DType dtype, ReduceOp op) const {
  const int place = fixedSizeOf(group->size());
  if (place < 0 || (op != ReduceOp::kSum && op != ReduceOp::kAvg)) return nullptr;
  const FixedKernels& fixed = kernelsOf(dtype).fixed[place];
  return fixed.one_shot ? &fixed : nullptr;
}

Choice HostCommunicator::State::choose(const GpuAllReduce& call) const {
  const Choice choice = choose(call.count, call.dtype, call.algorithm.value_or(options.algorithm));
  const bool is_sum = call.op == ReduceOp::kSum || call.op == ReduceOp::kAvg;
  return choice == Choice::kNvls && !is_sum ? Choice::kTwoShot : choice;
}

Arithmetic HostCommunicator::State::arithmeticOf(DType dtype, ReduceOp op, double factor) const {
  return {.combine = combineOf(dtype, op),
          .divide = op == ReduceOp::kAvg,
          .scale = op == ReduceOp::kPremulSum,
          .world_size = group->size(),
          .factor = factor};
}

// ---- checking

namespace {

[[noreturn]] void refuse(Kind kind, const std::string& why) {
  throw Error(Failure::kArgument, std::string(name(kind)) + " on a GPU: " + why);
}

uintptr_t addressOf(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}

void requireReducible(Kind kind, DType dtype, ReduceOp op) {
  if (!isSupported(dtype, op))
    refuse(kind, std::string(name(op)) + " has no meaning for " + name(dtype) +
                     ", or its elements can only be moved");
}

// Buffers of up to `parts` times `count` elements; returns the bytes of one part.
size_t requireBuffers(Kind kind, DType dtype, int parts, size_t count,
                      std::initializer_list<const void*> buffers) {
  const size_t width = sizeOf(dtype);
  if (count > SIZE_MAX / width / static_cast<size_t>(parts))
    refuse(kind, (parts > 1 ? std::to_string(parts) + " times " : "") + std::to_string(count) +
                     " elements are more than there is memory for");
  for (const void* p : buffers) {
    if (!p) refuse(kind, "a null pointer for " + std::to_string(count) + " elements");
    // Complex numbers are aligned as their parts are.
    if (addressOf(p) % std::min<size_t>(width, sizeof(double)) != 0)
      refuse(kind, std::string("pointers that are not aligned to elements of ") + name(dtype));
  }
  return count * width;
}

// The single part may be the rank's own part of all of them, and not overlap it otherwise.
void requireOwnPlace(Kind kind, const void* part, const void* all, size_t bytes, int rank,
                     int size) {
  const uintptr_t p = addressOf(part), a = addressOf(all);
  const size_t own = static_cast<size_t>(rank) * bytes, whole = static_cast<size_t>(size) * bytes;
  if (p != a + own && p < a + whole && a < p + bytes)
    refuse(kind, "input and output overlap, and not just in this rank's own part");
}

}  // namespace

void validate(const GpuAllReduce& call) {
  constexpr Kind kKind = Kind::kAllReduce;
  requireReducible(kKind, call.dtype, call.op);
  if (call.count == 0) return;
  const size_t bytes = requireBuffers(kKind, call.dtype, 1, call.count, {call.input, call.output});
  const uintptr_t in = addressOf(call.input), out = addressOf(call.output);
  if (in != out && in < out + bytes && out < in + bytes)
    refuse(kKind, "input and output overlap without being the same memory");
}

void HostCommunicator::State::validate(const GpuReduceScatter& call) const {
  constexpr Kind kKind = Kind::kReduceScatter;
  requireReducible(kKind, call.dtype, call.op);
  if (call.count == 0) return;
  const size_t bytes =
      requireBuffers(kKind, call.dtype, group->size(), call.count, {call.input, call.output});
  requireOwnPlace(kKind, call.output, call.input, bytes, group->rank(), group->size());
}

void HostCommunicator::State::validate(const GpuAllGather& call) const {
  constexpr Kind kKind = Kind::kAllGather;
  if (call.count == 0) return;
  const size_t bytes =
      requireBuffers(kKind, call.dtype, group->size(), call.count, {call.input, call.output});
  requireOwnPlace(kKind, call.input, call.output, bytes, group->rank(), group->size());
}

void HostCommunicator::State::validate(const GpuBroadcast& call) const {
  constexpr Kind kKind = Kind::kBroadcast;
  if (call.root < 0 || call.root >= group->size())
    refuse(kKind, "its root, rank " + std::to_string(call.root) + ", is none of the group's " +
                      std::to_string(group->size()) + " ranks");
  if (call.count > 0) requireBuffers(kKind, call.dtype, 1, call.count, {call.data});
}

// ---- launching

PartShape HostCommunicator::State::shapeOf(const GpuAllReduce& call, Choice choice) const {
  const DeviceAlgorithm algorithm = kernelOf(choice);
  const size_t stored = sizeOf(call.dtype);
  const size_t value = isHalf(call.dtype) ? sizeof(float) : stored;
  const size_t slice = sliceOf(tuning, algorithm, call.count, group->size(), stored, value);
  return {slice, channelsOf(tuning, algorithm, call.count, group->size(), slice)};
}

void HostCommunicator::State::launchRank(const RankCall& call, const void* kernel,
                                         const void* fixed, int channels, cudaStream_t stream,
                                         const Location& location) const {
  if (fixed) {
    const RankLaunch arguments{.comm = comm, .call = call, .location = location};
    return launch(fixed, channels, &arguments, false, stream);
  }
  const RanksLaunch arguments{.ranks = 1, .calls = {call}};
  launch(kernel, channels, &arguments, false, stream);
}

RankCall HostCommunicator::State::movingCall(const void* input, void* output, size_t count,
                                             DType dtype, Nanos timeout, uint64_t number) const {
  return {.comm = commOnDevice(),
          .input = input,
          .output = output,
          .count = count,
          .arithmetic = {},
          .factor = nullptr,
          .timeout = static_cast<uint64_t>(timeoutOf(timeout)),
          .operation = number,
          .slice = 0,
          .window = tuning.window,
          .scatter = false,
          .poison = poisonOf(dtype),
          .root = kEverybody};
}

template <class Call>
RankCall HostCommunicator::State::rankCall(const Call& call, uint64_t number) const {
  RankCall of_rank =
      movingCall(call.input, call.output, call.count, call.dtype, call.timeout, number);
  of_rank.arithmetic = arithmeticOf(call.dtype, call.op, call.factor);
  if (call.op == ReduceOp::kPremulSum) of_rank.factor = call.factor_on_device;
  return of_rank;
}

HostCommunicator::State::Begun HostCommunicator::State::begin(const Told& told, bool marked) {
  const Begun call{watchdog->announce(told.what), std::make_shared<CallEnd>(device),
                   marked ? std::make_shared<CallEnd>(device) : nullptr};
  const auto reached = [](const std::shared_ptr<CallEnd>& point) -> Watchdog::Reached {
    if (!point) return nullptr;
    return [point] { return point->isReached(); };
  };
  watchdog->track(told.timeout, reached(call.end), told.label, reached(call.start));
  return call;
}

void HostCommunicator::State::finish(CallEnd& end, cudaStream_t stream) {
  std::shared_ptr<Event> event = order.leave(stream);
  if (!event) watchdog->stayAwake();
  end.set(std::move(event));
}

void HostCommunicator::State::finishRest(CallEnd& end, cudaStream_t stream) {
  try {
    finish(end, stream);
  } catch (const Error&) {  // do not wait for a GPU that has failed
    end.set(nullptr);
  }
}

void HostCommunicator::State::giveUp(const Error& why, const Label& label) {
  group->epoch()->arbiter->fail(Failure::kAborted, group->rank(),
                                group->epoch()->peers().who(group->rank()) + " gave up: " +
                                    why.what() + (label ? " (" + label() + ")" : ""));
}

void HostCommunicator::allReduce(const GpuAllReduce& call, CUstream_st* stream) {
  State& s = *state_;
  validate(call);
  const std::lock_guard lock(s.calls);
  const OnDevice here(s.device);
  if (size() == 1)
    return s.dispatch(s.told(call, Choice::kAuto), stream, [&](uint64_t) {
      s.stage(call, 0, static_cast<std::byte*>(call.output), call.count, stream);
    });
  const Choice choice = s.choose(call);
  if (choice == Choice::kDirect) return s.direct(call, stream);
  const FixedKernels* fixed = s.fixedOf(call.dtype, call.op);
  const size_t width = sizeOf(call.dtype), bytes = call.count * width;
  const Choice wanted = call.algorithm.value_or(s.options.algorithm);
  const bool is_ll = fixed && goesByLL(s.tuning, bytes, wanted);
  const bool is_located = s.isLocated(bytes, wanted);
  const Choice taken = is_located ? Choice::kLocated : is_ll ? Choice::kLL : choice;
  s.dispatch(s.told(call, taken), stream, [&](uint64_t number) {
    if (call.count == 0) return;
    const Kernels& kernels = kernelsOf(call.dtype);
    const DeviceAlgorithm algorithm = kernelOf(taken);
    const PartShape shape = is_located ? locatedShapeOf(s.tuning, call.count, size(), width)
                            : is_ll    ? llShapeOf(s.tuning, call.count)
                            : taken == Choice::kNvls
                                ? nvlsShapeOf(s.tuning, call.count, size(), width)
                                : s.shapeOf(call, choice);
    RankCall of_rank = s.rankCall(call, number);
    of_rank.slice = shape.slice;
    if (taken == Choice::kNvls) {
      const NvlsLaunch arguments{s.comm, of_rank, {s.window->own(), s.window->everyone()}};
      return launch(nvlsKernel(call.dtype), shape.channels, &arguments, false, stream);
    }
    if (is_located)
      return s.launchRank(of_rank, nullptr, fixed ? fixed->located : kernels.located,
                          shape.channels, stream, s.locationOf(call, stream));
    const void* of_size = nullptr;
    if (fixed && algorithm == DeviceAlgorithm::kOneShot)
      of_size = is_ll ? fixed->ll : fixed->one_shot;
    if (fixed && algorithm == DeviceAlgorithm::kTwoShot) of_size = fixed->two_shot;
    s.launchRank(of_rank, kernels.all_reduce[static_cast<size_t>(algorithm)], of_size,
                 shape.channels, stream);
  });
}

void HostCommunicator::allReduceTogether(std::span<HostCommunicator* const> ranks,
                                         std::span<const GpuAllReduce> calls, CUstream_st* stream) {
  if (ranks.empty() || ranks.size() != calls.size() ||
      ranks.size() > static_cast<size_t>(kMostRanksOfLaunch))
    throw Error(Failure::kArgument, "one launch takes one call for each of 1 to " +
                                        std::to_string(kMostRanksOfLaunch) + " ranks");
  // A ring of one rank would add its inputs to themselves.
  if (ranks.size() == 1 && ranks[0]->size() == 1) return ranks[0]->allReduce(calls[0], stream);
  RanksLaunch arguments{.ranks = static_cast<int>(ranks.size()), .calls = {}};
  State& first = *ranks[0]->state_;
  const OnDevice here(first.device);
  const Choice choice = first.choose(calls[0]);
  if (choice == Choice::kDirect)
    throw Error(Failure::kArgument, "the direct schedule takes a stream for each rank");
  const PartShape shape = first.shapeOf(calls[0], choice);
  std::vector<std::unique_lock<std::mutex>> locks;
  for (size_t i = 0; i < ranks.size(); ++i) {
    State& s = *ranks[i]->state_;
    if (static_cast<int>(i) != s.group->rank() || s.group->size() != arguments.ranks)
      throw Error(Failure::kArgument, "a launch for several ranks takes all of a group, by rank");
    locks.emplace_back(s.calls);
    validate(calls[i]);
    if (s.device != first.device || calls[i].count != calls[0].count ||
        calls[i].dtype != calls[0].dtype)
      throw Error(Failure::kArgument,
                  "ranks of one launch are on one device and make the same call");
  }
  std::vector<State::Begun> begun;
  size_t finished = 0;
  const Range range(Kind::kAllReduce);
  const auto toldOf = [&](size_t i) { return ranks[i]->state_->told(calls[i], choice); };
  try {
    for (size_t i = 0; i < ranks.size(); ++i) {
      State& s = *ranks[i]->state_;
      begun.push_back(s.begin(toldOf(i)));
      arguments.calls[i] = s.rankCall(calls[i], begun[i].number);
      arguments.calls[i].slice = shape.slice;
    }
    for (HostCommunicator* rank : ranks) rank->state_->order.follow(stream);
    if (calls[0].count > 0)
      launch(kernelsOf(calls[0].dtype).all_reduce[static_cast<size_t>(kernelOf(choice))],
             shape.channels * arguments.ranks, &arguments, true, stream);
    for (; finished < ranks.size(); ++finished)
      ranks[finished]->state_->finish(*begun[finished].end, stream);
  } catch (const Error& error) {
    for (; finished < begun.size(); ++finished)
      ranks[finished]->state_->finishRest(*begun[finished].end, stream);
    first.giveUp(error, calls[0].label);
  }
}

// ---- reduce_scatter, all_gather and broadcast

bool HostCommunicator::performs(Kind kind) const {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kAllGather ||
         kind == Kind::kBroadcast;
}

// ---- putting them into streams

void HostCommunicator::State::push(RankCall call, const void* kernel, const void* fixed,
                                   size_t bytes, cudaStream_t stream) {
  const bool two_hops = call.root != kEverybody && call.scatter;
  const PartShape shape = partShapeOf(tuning, call.count, group->size(), bytes, two_hops);
  call.slice = shape.slice;
  launchRank(call, kernel, fixed, shape.channels, stream);
}

void HostCommunicator::State::launchLocated(RankCall call, const void* kernel, size_t width,
                                            const Location& location, cudaStream_t stream) const {
  const PartShape shape = locatedPartShapeOf(tuning, call.count, group->size(), width);
  call.slice = shape.slice;
  launchRank(call, nullptr, kernel, shape.channels, stream, location);
}

template <class Call, class Alone, class Push>
void HostCommunicator::State::perform(const Call& call, cudaStream_t stream, Alone alone,
                                      Push push) {
  constexpr bool kDirectAlone = std::is_null_pointer_v<Alone>;
  validate(call);
  const std::lock_guard lock(calls);
  const OnDevice here(device);
  const bool is_alone = group->size() == 1;
  if (is_alone ? kDirectAlone : partsAreDirect()) return direct(call, stream);
  dispatch(told(call), stream, [&](uint64_t number) {
    if (call.count == 0) return;
    if constexpr (!kDirectAlone)
      if (is_alone) return alone();
    push(number);
  });
}

void HostCommunicator::reduceScatter(const GpuReduceScatter& call, CUstream_st* stream) {
  State& s = *state_;
  const auto alone = [&] {
    s.stage(call, 0, static_cast<std::byte*>(call.output), call.count, stream);
  };
  s.perform(call, stream, alone, [&](uint64_t number) {
    RankCall of_rank = s.rankCall(call, number);
    of_rank.scatter = true;
    if (s.partsAreLocated(call.count, call.dtype)) {
      const FixedKernels* fixed = s.fixedOf(call.dtype, call.op);
      return s.launchLocated(of_rank, fixed ? fixed->located : kernelsOf(call.dtype).located,
                             sizeOf(call.dtype), s.locationOf(call, stream), stream);
    }
    constexpr auto kKernel = static_cast<size_t>(DeviceAlgorithm::kTwoShot);
    const FixedKernels* fixed = s.fixedOf(call.dtype, call.op);
    s.push(of_rank, kernelsOf(call.dtype).all_reduce[kKernel], fixed ? fixed->two_shot : nullptr,
           sizeOf(call.dtype), stream);
  });
}

void HostCommunicator::allGather(const GpuAllGather& call, CUstream_st* stream) {
  State& s = *state_;
  s.perform(call, stream, nullptr, [&](uint64_t number) {
    const int unit = unitOf(sizeOf(call.dtype));
    const size_t units = call.count * sizeOf(call.dtype) / unitBytes(unit);
    const RankCall of_rank =
        s.movingCall(call.input, call.output, units, call.dtype, call.timeout, number);
    if (s.partsAreLocated(call.count, call.dtype))
      return s.launchLocated(of_rank, locatedGatherKernel(unit), unitBytes(unit),
                             s.locationOf(call, stream), stream);
    s.push(of_rank, gatherKernel(unit), nullptr, unitBytes(unit), stream);
  });
}

void HostCommunicator::broadcast(const GpuBroadcast& call, CUstream_st* stream) {
  State& s = *state_;
  const auto alone = [] {};
  s.perform(call, stream, alone, [&](uint64_t number) {
    const size_t bytes = call.count * sizeOf(call.dtype);
    const int unit = unitOf(sizeOf(call.dtype));
    RankCall of_rank = s.movingCall(call.data, call.data, bytes / unitBytes(unit), call.dtype,
                                    call.timeout, number);
    of_rank.root = call.root;
    of_rank.scatter = takesTwoHops(s.tuning, bytes, size());
    s.push(of_rank, gatherKernel(unit), nullptr, unitBytes(unit), stream);
  });
}

}  // namespace ringreduce::cuda
