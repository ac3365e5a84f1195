// Making a communicator and ending it, what it tells of itself, and its options.
#include "cuda/communicator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/config.h"
#include "base/error.h"
#include "base/fd.h"
#include "cuda/communicator_state.h"
#include "group/gather.h"

namespace ringreduce::cuda {

std::optional<Choice> choiceNamed(const std::string& name) {
  for (size_t i = 0; i < std::size(kChoiceNames); ++i)
    if (name == kChoiceNames[i]) return static_cast<Choice>(i);
  return std::nullopt;
}

CommunicatorOptions CommunicatorOptions::fromEnvironment() {
  const Config config = Config::read();
  return {.algorithm = choiceNamed(config.cuda_algorithm.get()).value(),
          .access = memoryAccessNamed(config.cuda_way.get())};
}

// ---- making it

namespace {

// What ranks tell each other before anything is allocated.
struct Introduction {
  char uuid[64] = {};
  int multiprocessors = 0;
  bool runs_together = false;  // its kernels may share a GPU with those of other ranks
  Choice algorithm = Choice::kAuto;
};

Setting settingOf(const std::vector<Introduction>& all, int& ranks_on_my_device, int rank) {
  Setting setting{.ranks = static_cast<int>(all.size())};
  setting.multiprocessors = all[0].multiprocessors;
  for (const Introduction& one : all) {
    const auto same = std::count_if(all.begin(), all.end(), [&](const Introduction& other) {
      return std::strcmp(one.uuid, other.uuid) == 0;
    });
    setting.ranks_on_device = std::max(setting.ranks_on_device, static_cast<int>(same));
    setting.multiprocessors = std::min(setting.multiprocessors, one.multiprocessors);
    // Nor can they all be there at once if there is not a multiprocessor for each.
    if (same > 1 && (!one.runs_together || same > one.multiprocessors)) setting.run_at_once = false;
    if (&one == &all[static_cast<size_t>(rank)]) ranks_on_my_device = static_cast<int>(same);
  }
  return setting;
}

// A kernel's code is loaded when it is first launched, which waits for the GPU to be idle: behind a
// kernel that waits for a peer, for ever.  So it is all loaded now.
void loadKernels() {
  const auto load = [](const void* kernel) {
    cudaFuncAttributes attributes;
    cuda::check(cudaFuncGetAttributes(&attributes, kernel), "load a kernel");
  };
  for (int t = 0; t < kReducibleDTypes; ++t) {
    const Kernels& kernels = kernelsOf(static_cast<DType>(t));
    for (const void* kernel : kernels.all_reduce) load(kernel);
    load(kernels.direct);
    load(kernels.copy_in);
    load(kernels.ring_step);
  }
  load(deliverKernel());
  for (int unit = 0; unit < kUnits; ++unit) {
    load(gatherKernel(unit));
    load(carryKernel(unit));
  }
}

}  // namespace

Communicator::State::State(std::shared_ptr<Group> of, int on, const CommunicatorOptions& wanted)
    : group(std::move(of)), device(on), options(wanted) {
  const OnDevice here(device);
  Introduction mine;
  together(*group, [&] {
    facts = describeDevice(device);
    if (group->size() > kMostRanks)
      throw Error(Failure::kArgument, "a GPU communicator has at most " +
                                          std::to_string(kMostRanks) + " ranks, not " +
                                          std::to_string(group->size()));
    loadKernels();
    setText(mine.uuid, facts.uuid);
    mine.multiprocessors = facts.multiprocessors;
    mine.runs_together = options.together || facts.mps;
    mine.algorithm = options.algorithm;
  });
  const std::vector<Introduction> all = gatherEach(*group, mine);
  options.algorithm = all[0].algorithm;
  setting = settingOf(all, ranks_on_device, group->rank());

  pages = std::make_unique<MappedPages>(*group, device, sizeof(HostState));
  tuning = tune(setting);
  memory = std::make_unique<PeerMemory>(*group, device, tuning.layout(setting.ranks).bytes(),
                                        options.access);
  // Only which algorithm is taken depends on the way.
  setting.all_to_all = memory->access() != MemoryAccess::kHost;
  tuning = tune(setting);
  if (setting.ranks_on_device > 1 || options.algorithm == Choice::kDirect)
    staging = std::make_unique<PeerMemory>(*group, device, kStagingBytes, options.access);

  together(*group, [&] {
    constexpr size_t kBytes = roundUp(sizeof(DeviceComm), kLine) + sizeof(Local);
    local = allocate(device, kBytes);
    Stream stream(device);
    stream.zero(local->data(), kBytes);
    DeviceComm comm{};
    comm.rank = group->rank();
    comm.size = group->size();
    comm.layout = tuning.layout(setting.ranks);
    for (int r = 0; r < comm.size; ++r) comm.base[r] = memory->at(r);
    comm.local = localOnDevice();
    comm.abort = &stateOnDevice(comm.rank)->abort;
    comm.trouble = &stateOnDevice(comm.rank)->trouble;
    stream.copy(local->data(), &comm, sizeof comm);
  });
  std::vector<HostState*> states;
  for (int r = 0; r < group->size(); ++r) states.push_back(state(r));
  watchdog =
      std::make_unique<Watchdog>(*group, std::make_unique<HostRanks>(*group, std::move(states)));
}

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Group> group, int device,
                                                   const CommunicatorOptions& options) {
  return std::shared_ptr<Communicator>(
      new Communicator(std::make_unique<State>(std::move(group), device, options)));
}

Communicator::Communicator(std::unique_ptr<State> state) : state_(std::move(state)) {}

Communicator::~Communicator() {
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

int Communicator::rank() const {
  return state_->group->rank();
}
int Communicator::size() const {
  return state_->group->size();
}
const Tuning& Communicator::tuning() const {
  return state_->tuning;
}
const Device& Communicator::device() const {
  return state_->facts;
}
MemoryAccess Communicator::access() const {
  return state_->memory->access();
}
int Communicator::ranksOnDevice() const {
  return state_->ranks_on_device;
}
bool Communicator::gainsByRegistering() const {
  return state_->staging && (!kernelsRunAtOnce() || state_->options.algorithm == Choice::kDirect);
}
bool Communicator::kernelsRunAtOnce() const {
  return state_->setting.run_at_once;
}
size_t Communicator::bytes() const {
  return state_->memory->bytes() + (state_->staging ? state_->staging->bytes() : 0) +
         state_->local->bytes();
}

void Communicator::check() {
  state_->watchdog->check();
}
bool Communicator::wait(Nanos longest) {
  return state_->watchdog->wait(longest);
}
void Communicator::abort(const std::string& why) {
  state_->watchdog->abort(why);
}

}  // namespace ringreduce::cuda
