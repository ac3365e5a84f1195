// The backend as a whole: its group's life, groups made of it, its state and its memory.  Its calls
// are in reduction_calls.cc, moving_calls.cc and membership_calls.cc.
#include "torch/backend.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string_view>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "epoch/wires.h"
#include "torch/arguments.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"
#include "torch/inner_nccl.h"
#include "torch/live_groups.h"
#include "torch/page_memory.h"
#include "torch/staged_backend.h"
#include "torch/store_keeper.h"
#include "torch/torch_store.h"
#include "transport/shm/shared_block.h"

namespace ringreduce {
namespace {

// Of CUDA tensors, which neither the communicators nor NCCL can go on with.
void refuseIfItGoesOn(const Group& group) {
  if (group.sharedOptions().goesOn())
    throw Error(Failure::kArgument,
                "group '" + group.options().name +
                    "' has on_loss='continue', which CUDA tensors do not support; make their group "
                    "with on_loss='error'");
}

// Whether DDP cuts buckets of complex gradients as real numbers.  It then views the memory that it
// makes itself as such, but not what it gets from its group.
class Reducer : c10d::Reducer {
 public:
  template <class B = Bucket>
  static constexpr bool cutsComplexAsReal() {
    return requires(B bucket) { bucket.is_complex_bucket; };
  }
};

// torch's switch, an environment variable.  DDP reads it whenever it makes its buckets, on groups
// of any backend, and asks the group for their memory unless it is 1, which is torch's default.
// Processes that this one starts inherit it.
class BucketSwitch {
 public:
  static bool isOn() {
    const char* const set = std::getenv(kName);
    return set && std::string_view(set) != "1";
  }
  // On until the last owner of the result lets go.  Null if the user has set it: that stays.
  static std::shared_ptr<void> turnOn() {
    static BucketSwitch only;
    const std::lock_guard lock(only.mutex_);
    const char* const set = std::getenv(kName);
    if (set && set != only.ours_) return nullptr;
    if (!set) setenv(kName, "0", 1);
    only.ours_ = std::getenv(kName);
    ++only.owners_;
    return {&only, [](BucketSwitch* held) { held->letGo(); }};
  }

 private:
  static constexpr const char* kName = "DDP_DISABLE_COMM_MEM";

  void letGo() {
    const std::lock_guard lock(mutex_);
    if (--owners_ == 0 && std::getenv(kName) == ours_) unsetenv(kName);
  }

  std::mutex mutex_;
  int owners_ = 0;  // ranks may be threads
  const char* ours_ = nullptr;
};

}  // namespace

Backend& asRingreduce(c10d::Backend& backend) {
  auto* ours = dynamic_cast<Backend*>(&backend);
  TORCH_CHECK(ours, "a ringreduce group is needed, not one of ", backend.getBackendName());
  return *ours;
}

c10::intrusive_ptr<c10d::Backend::Options> Settings::clone() const {
  return c10::make_intrusive<Settings>(*this);
}

SharedOptions Settings::over(SharedOptions shared, int size) const {
  if (algorithm) shared.algorithm = algorithmNamed(*algorithm).value_or(kNoAlgorithm);
  shared.slot_bytes = slot_bytes.value_or(shared.slot_bytes);
  shared.slots = slots.value_or(shared.slots);
  if (on_loss) {
    const auto at_most = std::min<int64_t>(Config::read().min_ranks.orDefault(), size);
    shared.on_loss = *on_loss == "continue" ? OnLoss::kContinue : OnLoss::kError;
    shared.min_ranks = shared.goesOn() ? min_ranks.value_or(static_cast<int>(at_most)) : 1;
  }
  if (order) shared.order = orderNamed(*order);
  return shared;
}

void Settings::take(const SharedOptions& shared) {
  algorithm = kAlgorithmNames[static_cast<size_t>(shared.algorithm)];
  slot_bytes = shared.slot_bytes;
  slots = shared.slots;
  on_loss = shared.goesOn() ? "continue" : "error";
  min_ranks = shared.goesOn() ? std::optional(shared.min_ranks) : std::nullopt;
  order = shared.order == AddOrder::kRank ? "rank" : "ring";
}

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                 const GroupOptions& options, const Settings& settings, Gpus gpus, Connect connect,
                 ChooseShared choose_shared, bool keeps_store)
    : c10d::Backend(rank, size),
      store_(store),
      group_store_(store),
      group_options_(options),
      options_(c10::make_intrusive<Settings>(settings)),
      gpus_(std::move(gpus)),
      choose_shared_(std::move(choose_shared)),
      keeps_store_(keeps_store),
      connect_(connect),
      buffers_(std::make_shared<Buffers>()) {
  options_->timeout = std::chrono::milliseconds(options.timeout / kMillisecond);
  options_->stall_seconds = static_cast<double>(options.stall) / kSecond;
  options_->group_name = options.name;
  const auto& global = options.started_as.empty() ? options.global_ranks : options.started_as;
  options_->global_ranks_in_group.assign(global.begin(), global.end());
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options_->enable_reconfigure = connect == Connect::kByReconfigure;
#endif
  if (connect != Connect::kNow) return;
  const auto group = translated([&] { return makeGroup(store, rank, size, options); });
  // Not of groups made of this one.
  group_options_.attempt = nullptr;
  group_options_.job = group_options_.program = "";
  replaceGroup(group, makeGpuBackend(rank, size), store);
}

std::shared_ptr<Group> Backend::makeGroup(const StorePtr& store, int rank, int size,
                                          GroupOptions options, const Group::Made& made) const {
  const auto adapted = std::make_shared<TorchStore>(store);
  if (options.store_host.empty()) options.store_host = hostOf(store);
  const int first = options.members.empty() ? 0 : options.members.front();
  if (rank == first) options.choose_shared = choose_shared_;
  if (hasCuda()) adapted->set("ringreduce/gpus/" + std::to_string(rank), gpus_.facts);
  return Group::create(adapted, rank, size, options, made);
}

c10::intrusive_ptr<GpuBackend> Backend::makeGpuBackend(int rank, int size) {
  if (!hasCuda()) return nullptr;
  return c10::make_intrusive<GpuBackend>(
      rank, size, observer_, [this](c10::Device device) { return makeCommunicatorOn(device); },
      [this] {
        translated([&] { refuseIfItGoesOn(*group()); });
        const auto made = gpus_.make_inner(group_store_, rank_, size_);
        if (!made) return made;
        made->setTimeout(options_->timeout);  // of this group, as it is by now
        return GpuBackend::BackendPtr(c10::make_intrusive<InnerNccl>(made, group(), observer_));
      },
      makeStagedBackend(*this, [this](const std::string& why) { group()->abort(why); }));
}

Backend::~Backend() {
  // Completions that are under way may want the interpreter, so it must not be held while they end.
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  if (gpu_) leave(*gpu_);
  prepared_ = {};
  group_.reset();
}

std::shared_ptr<Group> Backend::groupIfAny() const {
  const std::lock_guard lock(group_mutex_);
  return group_;
}

std::shared_ptr<Group> Backend::group() const {
  if (auto group = groupIfAny()) return group;
  return translated([&]() -> std::shared_ptr<Group> {
    if (!is_connected_ && connect_ == Connect::kByPrepare)
      throw Error(Failure::kSetup,
                  "group '" + group_options_.name + "' runs already, and rank " +
                      group_options_.shown(rank_) +
                      " is not yet in it: call restore() of a ringreduce.elastic.State before any "
                      "operation, and make DistributedDataParallel with init_sync=False");
    if (!is_connected_)
      throw Error(Failure::kSetup, "group '" + group_options_.name +
                                       "' was made with enable_reconfigure=True and has no members "
                                       "yet: call reconfigure() first");
    throw Error(Failure::kAborted, "group '" + group_options_.name + "' of rank " +
                                       group_options_.shown(rank_) + " has been destroyed");
  });
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  const Nanos nanos = translated([&] { return nanosOf(timeout); });
  options_->timeout = timeout;
  if (const auto gpu = gpuIfAny()) gpu->setTimeout(timeout);
  if (const auto group = groupIfAny()) group->setTimeout(nanos);
}

std::shared_ptr<cuda::GpuCommunicator> Backend::makeCommunicatorOn(c10::Device device) {
  const auto group = this->group();
  refuseIfItGoesOn(*group);
  if (group->sharedOptions().order == AddOrder::kRank)
    throw Error(Failure::kArgument,
                "group '" + group->options().name +
                    "' has order='rank', in which GPUs do not add; make the group of CUDA tensors "
                    "with order='ring'");
  const auto epoch = group->epoch();
  const bool several_hosts = epoch->hosts && epoch->hosts->count() > 1;
  const int ranks_on_device = gpus_.count_ranks(size_);
  return several_hosts ? makeInterNodeCommunicator(group, device, ranks_on_device)
                       : makeHostCommunicator(group, device, ranks_on_device);
}

Backend::GpuPtr Backend::gpuIfAny() const {
  const std::lock_guard lock(group_mutex_);
  return gpu_;
}

Backend::GpuPtr Backend::gpuFor(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.is_cuda() ? gpuIfAny() : nullptr;
}

Backend::GpuPtr Backend::gpuFor(const Tensors& tensors) const {
  return tensors.empty() ? nullptr : gpuFor(tensors[0]);
}

size_t Backend::gpuBytes() const {
  const auto gpu = gpuIfAny();
  return gpu ? gpu->bytes() : 0;
}

std::vector<std::vector<OpRecord>> Backend::gpuRecords(const std::vector<uint64_t>& since) const {
  const auto gpu = gpuIfAny();
  return gpu ? gpu->records(since) : std::vector<std::vector<OpRecord>>();
}

std::vector<Totals> Backend::totals() const {
  const std::shared_ptr<Group> group = this->group();
  std::vector<Totals> found(1);
  group->recorder().addTo(found[0]);
  group->messages().addTo(found[0]);
  if (const auto gpu = gpuIfAny()) {
    const std::vector<Totals> of_gpus = gpu->totals();
    found.insert(found.end(), of_gpus.begin(), of_gpus.end());
  }
  return found;
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cuda()) return;
  if (const auto gpu = gpuIfAny()) gpu->eagerConnectSingleDevice(device);
}

// ---- starting operations

Job Backend::observed(Job job) const {
  job.observer = observer_;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  job.refused_after_failure = options_->enable_reconfigure;
#endif
  return job;
}

Backend::WorkPtr Backend::start(Group& group, Job job, bool async) {
  if (async)
    job.held = std::make_shared<HeldMemory>(
        std::initializer_list<const Tensors*>{&job.inputs, &job.outputs, &job.others});
  return collected(Work::start(group, observed(std::move(job)), !async));
}

Backend::WorkPtr Backend::start(Group& group, c10d::OpType type, const char* title, Tensors inputs,
                                Tensors outputs, Operation operation, bool async) {
  Job job{type, title, std::move(inputs), std::move(outputs)};
  job.operations.push_back(std::move(operation));
  return start(group, std::move(job), async);
}

Backend::WorkPtr Backend::startMessage(c10d::OpType type, const char* title, const Tensors& tensors,
                                       Message message) {
  Job job{type, title, tensors, tensors};
  job.observer = observer_;
  return collected(Work::start(*group(), std::move(job), std::move(message)));
}

Backend::WorkPtr Backend::collected(WorkPtr work) {
  const std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

void Backend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  coalescing_ = true;
  coalesced_.clear();  // of a block that an error has left without its end
  if (const auto gpu = gpuIfAny()) gpu->startCoalescing();
}

Backend::WorkPtr Backend::endCoalescing() {
  std::vector<WorkPtr> works;
  {
    const std::lock_guard lock(coalescing_mutex_);
    TORCH_CHECK(coalescing_, "ringreduce: endCoalescing without startCoalescing");
    coalescing_ = false;
    works = std::exchange(coalesced_, {});
  }
  if (const auto gpu = gpuIfAny()) works.push_back(gpu->endCoalescing());
  return c10::make_intrusive<WorkList>(rank_, std::move(works));
}

// ---- groups made of this one

// `options`: the caller's or null; what they leave out is as here.
Backend::BackendPtr Backend::derived(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                     int size, GroupOptions made, const OptionsPtr& options) const {
  if (options) made.timeout = translated([&] { return nanosOf(options->timeout); });
  if (options && !options->group_name.empty()) made.name = options->group_name;
  const auto* given = dynamic_cast<const Settings*>(options.get());
  const Settings settings = given ? *given : Settings();
  made.shared = settings.over(group()->sharedOptions(), size);
  made.shared->min_ranks = std::min(made.shared->min_ranks, size);
  if (settings.stall_seconds) made.stall = nanosOf(*settings.stall_seconds);
  return c10::make_intrusive<Backend>(store, rank, size, made, settings, gpus_);
}

// Of some of this group.
GroupOptions Backend::optionsOfPart(const std::vector<int>& ranks) const {
  GroupOptions made = group_options_.ofRanks(ranks);
  made.timeout = group()->timeout();
  made.name += "/part";
  const int all = made.of_ranks > 0 ? made.of_ranks : getSize();
  made.of_ranks = static_cast<int>(ranks.size()) < all ? all : 0;
  return made;
}

// A part of this group's store for some of its ranks.  A group can be made there again and again.
c10::intrusive_ptr<c10d::Store> Backend::meeting(const char* why,
                                                 const std::vector<int>& ranks) const {
  std::string prefix = std::string("ringreduce/") + why + "/";
  for (int r : ranks) prefix += std::to_string(r) + ",";
  return c10::make_intrusive<c10d::PrefixStore>(prefix, group_store_);
}

Backend::BackendPtr Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                   const std::vector<int>& ranks, const OptionsPtr& options) {
  for (int r : ranks)
    TORCH_CHECK_VALUE(r >= 0 && r < size_ && std::count(ranks.begin(), ranks.end(), r) == 1,
                      "ringreduce split: rank ", r, " in a group of ", size_,
                      ", or twice in the list");
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return nullptr;
  return derived(store ? store : meeting("split", ranks), static_cast<int>(self - ranks.begin()),
                 static_cast<int>(ranks.size()), optionsOfPart(ranks), options);
}

Backend::BackendPtr Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                   const OptionsPtr& options, const int& rank, const int& size) {
  GroupOptions made = group_options_;
  made.global_ranks.clear();  // those of other groups are not known here
  made.started_as.clear();
  return derived(store ? store : group_store_, rank, size, made, options);
}

Backend::BackendPtr Backend::shrink(const std::vector<int64_t>& excluded, int flags,
                                    const OptionsPtr& options) {
  constexpr int kAbort = 1;  // torch's SHRINK_ABORT
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r)
    if (std::find(excluded.begin(), excluded.end(), r) == excluded.end()) ranks.push_back(r);
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  TORCH_CHECK_VALUE(self != ranks.end(), "ringreduce shrink: rank ", rank_, " excludes itself");
  if ((flags & kAbort) != 0 && !hasFailed()) abort();
  return derived(meeting("shrink", ranks), static_cast<int>(self - ranks.begin()),
                 static_cast<int>(ranks.size()), optionsOfPart(ranks), options);
}

// ---- its state

bool Backend::isEnded() const {
  const std::lock_guard lock(group_mutex_);
  return ends_ > 0;
}

bool Backend::isConnected() const {
  const std::lock_guard lock(group_mutex_);
  return is_connected_;
}

bool Backend::goesOn() const {
  const auto group = groupIfAny();
  return group ? group->sharedOptions().goesOn() : connect_ == Connect::kByPrepare;
}

std::vector<int> Backend::liveRanks() const {
  return group()->liveRanks();
}

void Backend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(!observer_->hooked, "ringreduce: there is an onCompletion hook already");
  observer_->on_completion = std::move(hook);
  observer_->hooked = true;
  // torch looks here before it destroys a group, to wait for the hooks that are still to come.
  onCompletionHook_ = [observer = observer_](std::shared_ptr<c10d::WorkInfo> info) {
    observer->on_completion(std::move(info));
  };
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
bool Backend::supportsCompletionHooks() const {
  return !hasCuda();
}

void Backend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  observer_->completion_hooks.add(
      id, [hook = std::move(hook)](uint64_t key, std::optional<float> milliseconds) {
        hook({.completionKey = key, .duration_ms = milliseconds});
      });
}
#endif

void Backend::waitForPendingWorks() {
  translated([&] { group()->drain(); });
}

void Backend::commit() {
  const std::shared_ptr<Group> group = this->group();
  const uint64_t observed_group = observer_->groups();
  const GpuPtr gpu = gpuIfAny();
  translated([&] {
    try {
      if (gpu)
        gpu->commit(*group, group->timeout());
      else
        group->drain();
      group->checkHealth();
    } catch (const Error&) {
      if (group->failed()) observer_->noteFailure(observed_group);
      throw;
    } catch (...) {  // Ctrl-C: the other ranks wait for what this one does not finish
      group->abort("interrupted while it committed");
      throw;
    }
  });
}

at::Tensor Backend::foundInf(c10::Device device) {
  if (device.is_cpu()) {
    const at::Tensor flag = observer_->foundInf();
    if (hasFailed()) flag.fill_(1);
    return flag;
  }
  const GpuPtr gpu = device.is_cuda() ? gpuIfAny() : nullptr;
  TORCH_CHECK_VALUE(gpu, "ringreduce.found_inf: this group has no calls on ", device,
                    hasCuda() ? "" : "; this ringreduce was built for CPUs only");
  return translated([&] { return gpu->foundInf(device); });
}

uint64_t Backend::getSequenceNumberForGroup() {
  return observer_->calls;
}

Failure Backend::failure() const {
  const std::lock_guard lock(group_mutex_);
  return group_ ? group_->failure() : last_failure_;
}

void Backend::check() const {
  translated([&] {
    if (const auto group = groupIfAny()) group->checkHealth();
    if (const auto gpu = gpuIfAny()) gpu->check();
  });
}

bool Backend::isIdle() const {
  const auto group = groupIfAny();
  return !group || (group->isIdle() && gpuBytes() == 0);  // streams may hold its operations
}

bool Backend::hasRaised() const {
  const auto group = groupIfAny();
  return group && group->hasRaised();
}

size_t Backend::stagingBytes() const {
  const auto group = groupIfAny();
  return group ? group->stagingBytes() : 0;
}

std::vector<std::string> Backend::routes() const {
  const auto group = groupIfAny();
  if (!group) return {};
  return translated([&] { return group->epoch()->wires->routes(); });
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  return {{"staging_bytes", stagingBytes()}, {"gpu_bytes", gpuBytes()}};
}

c10d::ErrorType Backend::getError() {
  switch (failure()) {
    case Failure::kNone:
      return c10d::ErrorType::SUCCESS;
    case Failure::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case Failure::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
    case Failure::kAborted:  // as the caller wished, who reconfigures it
      if (options_->enable_reconfigure) return c10d::ErrorType::SUCCESS;
      [[fallthrough]];
#endif
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::abort() {
  if (keeps_store_) keepStore(store_, nanosOf(options_->timeout));  // torch may destroy it next
  observer_->noteFailure(observer_->groups());
  endChange("abort() was called");
  dropPrepared();
  if (const auto group = groupIfAny()) translated([&] { group->abort("abort() was called"); });
  if (const auto gpu = gpuIfAny()) gpu->abort();
}

void Backend::shutdown() {
  if (keeps_store_.exchange(false)) keepStore(store_, nanosOf(options_->timeout));
  {
    const std::lock_guard lock(group_mutex_);
    is_destroyed_ = true;
    lends_buckets_ = nullptr;
  }
  endChange("its group was destroyed");
  dropPrepared();
  if (const auto gpu = gpuIfAny()) gpu->shutdown();
  SharedBlock::dropKept();
  std::shared_ptr<Group> group = groupIfAny();
  if (!group) return;
  group->shutdown();
  // Torch keeps this object alive beyond destroy_process_group, and so do default arguments that
  // were bound to the group.
  const std::lock_guard lock(group_mutex_);
  if (group_) last_failure_ = group_->failure();
  group_.reset();
  is_connected_ = true;  // errors then say that the group was destroyed
}

// ---- memory

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  if (gpuIfAny()) return memAllocator();
  return pageAllocator();
}

bool Backend::isMapped(const at::Tensor& tensor) const {
  const auto gpu = gpuFor(tensor);
  return gpu && gpu->isMapped(tensor);
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "ringreduce allocateTensor: ", size, " elements");
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  if (Reducer::cutsComplexAsReal() && c10::isComplexType(dtype) && BucketSwitch::isOn()) {
    size *= 2;
    options = options.dtype(c10::toRealValueType(dtype));
  }
  if (const auto gpu = gpuIfAny(); gpu && options.device().is_cuda())
    return gpu->allocateTensor(size, options);
  TORCH_CHECK_VALUE(options.device().is_cpu(), "ringreduce allocateTensor: on ", options.device());
  const std::shared_ptr<Group> group = groupIfAny();
  if (group) try {
      if (group->epoch()->usesTensorsInPlace()) return reusedTensor({size}, options);
    } catch (const Error& error) {  // too many descriptors, for example: the slots will do
      if (!told_unshared_.exchange(true))
        log("group '" + group_options_.name + "': rank " + group_options_.shown(rank_) +
            " cannot share the memory of a DDP bucket or another tensor that it asked for, so all "
            "ranks' calls on it are slower: " +
            error.what());
    }
  return pageTensor({size}, options);
}

void Backend::lendBuckets() {
  const std::shared_ptr<Group> group = groupIfAny();
  if (!gpuIfAny() && (!group || !group->epoch()->usesTensorsInPlace())) return;
  const std::lock_guard lock(group_mutex_);
  lends_buckets_ = BucketSwitch::turnOn();
}

}  // namespace ringreduce
