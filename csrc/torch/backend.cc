// The backend as a whole: its group's life, groups made of it, its state and its memory.  Its calls
// are in reduction_calls.cc and moving_calls.cc.
#include "torch/backend.h"

#include <Python.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/bytes.h"
#include "base/config.h"
#include "base/error.h"
#include "group/wires.h"
#include "torch/arguments.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"
#include "torch/inner_nccl.h"
#include "torch/staged_backend.h"
#include "torch/store_keeper.h"
#include "transport/shm/shared_block.h"

namespace ringreduce {
namespace {

// How long the end of a process waits for reconfigures that it ends.
constexpr Nanos kExitGrace = 3 * kSecond;
// How long a rank that goes on in another group waits for the others of the old one.
constexpr Nanos kLeaveTime = kSecond;
constexpr char kDestroyed[] = "its group was destroyed";
// A rank may give up making a group that others have already, and tell them, so long after its
// timeout.
constexpr Nanos kLaterNews = 3 * kSecond / 2;

// torch's errors carry pages of frames.
template <class F>
auto fromStore(F&& call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    throw Error(Failure::kSetup,
                std::string("the store failed: ") + error.what_without_backtrace());
  }
}

// compareSet, or null where the store has none, as a store of the user's may.
std::optional<std::vector<uint8_t>> compareSet(c10d::Store& store, const std::string& key,
                                               const std::vector<uint8_t>& expected,
                                               const std::vector<uint8_t>& desired) {
  try {
    return store.compareSet(key, expected, desired);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const c10::Error& error) {  // of a store in Python
    if (std::string(error.what_without_backtrace()).find("Not implemented") == std::string::npos)
      throw;
    return std::nullopt;
  }
}

// torch's store, as the rendezvous wants it.
class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override {
    fromStore([&] { store_->set(key, value); });
  }
  std::optional<std::string> get(const std::string& key) override {
    // Not check and get: a key that is removed between the two would be waited for.  compareSet
    // returns the present value, or the expected one if there is none.
    static const std::vector<uint8_t> nothing{0};
    return fromStore([&]() -> std::optional<std::string> {
      const auto value = compareSet(*store_, key, nothing, nothing);
      if (!value)
        return store_->check({key}) ? std::optional(store_->get_to_str(key)) : std::nullopt;
      if (*value == nothing) return std::nullopt;
      return std::string(value->begin(), value->end());
    });
  }
  void remove(const std::string& key) override {
    fromStore([&] { store_->deleteKey(key); });
  }
  std::string setOnce(const std::string& key, const std::string& value) override {
    return fromStore([&] {
      const std::vector<uint8_t> desired(value.begin(), value.end());
      const auto kept = compareSet(*store_, key, {}, desired);
      if (!kept) return Store::setOnce(key, value);
      return std::string(kept->begin(), kept->end());
    });
  }
  Store* ofJob() override {
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store_.get());
    if (!prefixed) return this;
    if (!of_job_) of_job_ = std::make_unique<TorchStore>(prefixed->getUnderlyingNonPrefixStore());
    return of_job_.get();
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<Store> of_job_;
};

// Where a store is, if it is one of torch's that others reach by a network.
std::string hostOf(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10d::Store* inner = store.get();
  if (const auto* prefixed = dynamic_cast<const c10d::PrefixStore*>(inner))
    inner = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingNonPrefixStore().get();
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner)) return tcp->getHost();
  return Config::read().master_addr;
}

}  // namespace

#ifdef C10D_BACKEND_HAS_RECONFIGURE

// A reconfigure under way: its claim of the uuid, and its end from another thread.
//
// A uuid is for one attempt of one list of members: a second one would meet the remains of the
// first.  Rank 0 claims it in the store with the list.  Each other rank looks at the claim while it
// waits.  A rank that finds another list there with its own handle in it says so beside the claim,
// where rank 0 looks: that attempt can never be complete.
class MembershipChange final : public Cancel {
 public:
  // `members`: the handles of all.  `refusal`: the error where the uuid is another list's.
  MembershipChange(c10::intrusive_ptr<c10d::Store> store, std::string key, std::string members,
                   std::string own, int rank, std::string who, std::string refusal)
      : Cancel(who + " gave up its reconfigure"),
        store_(std::move(store)),
        adapted_(std::make_unique<TorchStore>(store_)),
        key_(std::move(key)),
        members_(std::move(members)),
        own_(std::move(own)),
        rank_(rank),
        who_(std::move(who)),
        refusal_(std::move(refusal)) {}

  void claim() override {
    if (!claims()) refuse();
  }
  void poll(Nanos waited) override {
    check();
    if (waited < next_look_ || (rank_ != 0 && is_claimed_)) return;
    next_look_ = waited + kLookPeriod;
    if (rank_ == 0) {
      if (const auto other = adapted_->get(key_ + "/differs"))
        throw Error(Failure::kSetup, refusal_ + " (" + *other + " gave other handles)");
      return;
    }
    const auto claimed_by = adapted_->get(key_);
    if (claimed_by && *claimed_by != members_) refuse();
    is_claimed_ = claimed_by.has_value();
  }
  // It has returned or thrown.
  void finish() { is_finished_ = true; }
  bool isFinished() const { return is_finished_; }

 private:
  static constexpr Nanos kFirstLook = 10 * kMillisecond, kLookPeriod = 30 * kMillisecond;

  bool claims() {
    return fromStore([&] {
      const std::vector<uint8_t> members(members_.begin(), members_.end());
      if (const auto claimed_by = compareSet(*store_, key_, {}, members))
        return *claimed_by == members;
      if (store_->add(key_ + "/claims", 1) > 1) return adapted_->get(key_) == members_;
      store_->set(key_, members_);
      return true;
    });
  }
  [[noreturn]] void refuse() {
    const std::string claimed_by = adapted_->get(key_).value_or("");
    if (claimed_by.find(own_ + " ") != std::string::npos) adapted_->set(key_ + "/differs", who_);
    throw Error(Failure::kSetup, refusal_);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::unique_ptr<Store> adapted_;
  const std::string key_, members_, own_;
  const int rank_;
  const std::string who_, refusal_;
  Nanos next_look_ = kFirstLook;
  bool is_claimed_ = false;  // by this list
  std::atomic<bool> is_finished_ = false;
};

#endif

namespace {

// The groups that are alive, for shutdownAll.
struct LiveGroups {
  std::mutex mutex;
  struct Entry {
    std::weak_ptr<Group> group;
    c10::weak_intrusive_ptr<GpuBackend> gpu;
  };
  std::vector<Entry> groups;
  std::vector<std::weak_ptr<MembershipChange>> changes;  // under way

  void add(const std::shared_ptr<Group>& group, const c10::intrusive_ptr<GpuBackend>& gpu) {
    const std::lock_guard lock(mutex);
    std::erase_if(groups, [](const Entry& e) { return e.group.expired(); });
    groups.push_back({group, c10::weak_intrusive_ptr<GpuBackend>(gpu)});
  }
  void add(const std::shared_ptr<MembershipChange>& change) {
    const std::lock_guard lock(mutex);
    std::erase_if(changes, [](const auto& one) { return one.expired(); });
    changes.push_back(change);
  }
};

// Logs errors, those of the NCCL backend inside it too: at this point no caller can receive them.
void leave(GpuBackend& gpu, bool abort = false) {
  try {
    if (abort) gpu.abort();
    gpu.shutdown();
  } catch (const std::exception& error) {
    log("rank " + std::to_string(gpu.getRank()) + " leaves a group's GPUs: " + error.what());
  }
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

// A rank's handle for a reconfigure: "ringreduce-<token>-<generation>-<number>".
struct Handle {
  std::string text;
  int number = 0;  // of the rank when its process made the group

  // `place`: "handle 2 of the list", by rank; empty where there is no order.
  Handle(const std::string& handle, const std::string& place) : text(handle) {
    const auto digits = handle.rfind('-') + 1;
    const char* end = handle.data() + handle.size();
    const auto read = std::from_chars(handle.data() + digits, end, number);
    if (!handle.starts_with("ringreduce-") || read.ec != std::errc() || read.ptr != end)
      throw Error(Failure::kArgument,
                  "'" + handle + "'" + place + " is no handle of a ringreduce group");
  }
};

// By rank.  A list is in that order; a set is put into the order of the ranks' first numbers.
std::vector<Handle> handlesOf(const c10d::ReconfigureOptions& options, const std::string& own) {
  std::vector<Handle> handles;
  const bool is_set = std::holds_alternative<std::unordered_set<std::string>>(options.handles);
  const auto placeOf = [&](size_t rank) {
    return is_set ? "" : ", given for rank " + std::to_string(rank) + ",";
  };
  std::visit(
      [&](const auto& all) {
        for (const auto& handle : all) handles.emplace_back(handle, placeOf(handles.size()));
      },
      options.handles);
  const auto inOrder = [](const Handle& a, const Handle& b) {
    return std::tie(a.number, a.text) < std::tie(b.number, b.text);
  };
  if (is_set) std::ranges::sort(handles, inOrder);
  for (size_t r = 0; r < handles.size(); ++r) {
    const auto first = std::ranges::find(handles, handles[r].text, &Handle::text);
    if (const auto at = static_cast<size_t>(first - handles.begin()); at < r)
      throw Error(Failure::kArgument, "'" + handles[r].text +
                                          "' stands twice among the handles, for ranks " +
                                          std::to_string(at) + " and " + std::to_string(r));
  }
  if (std::ranges::count(handles, own, &Handle::text) == 0)
    throw Error(Failure::kArgument, "this rank's own handle, '" + own + "', is not among the " +
                                        std::to_string(handles.size()) +
                                        " given; collect all handles again after each reconfigure");
  return handles;
}

#endif

// Waits for no other rank for longer than `longest`.
void leave(Group& old, Nanos longest) {
  try {
    old.setTimeout(longest);
    old.shutdown();  // its works are told of its end
  } catch (const Error& error) {
    log("rank " + old.options().shown(old.rank()) + " leaves a group: " + error.what());
  }
}

// Of CUDA tensors, which neither the communicators nor NCCL can go on with.
void refuseIfItGoesOn(const Group& group) {
  if (group.sharedOptions().min_ranks > 0)
    throw Error(Failure::kArgument,
                "group '" + group.options().name +
                    "' has on_loss='continue', which CUDA tensors do not support; make their group "
                    "with on_loss='error'");
}

LiveGroups& liveGroups() {
  static auto* all = new LiveGroups;  // never destroyed: used while the process exits
  return *all;
}

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
    shared.min_ranks = *on_loss == "continue" ? min_ranks.value_or(static_cast<int>(at_most)) : 0;
  }
  if (order) shared.order = orderNamed(*order);
  return shared;
}

void Settings::take(const SharedOptions& shared) {
  algorithm = kAlgorithmNames[static_cast<size_t>(shared.algorithm)];
  slot_bytes = shared.slot_bytes;
  slots = shared.slots;
  on_loss = shared.min_ranks > 0 ? "continue" : "error";
  min_ranks = shared.min_ranks > 0 ? std::optional(shared.min_ranks) : std::nullopt;
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
      is_connected_(connect == Connect::kNow),
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
  group_ = translated([&] { return makeGroup(store, rank, size, options); });
  options_->take(group_->sharedOptions());
  // Not of groups made of this one.
  group_options_.attempt = nullptr;
  group_options_.job = group_options_.program = "";
  gpu_ = makeGpuBackend(rank, size);
  liveGroups().add(group_, gpu_);
}

std::shared_ptr<Group> Backend::makeGroup(const StorePtr& store, int rank, int size,
                                          GroupOptions options) const {
  const auto adapted = std::make_shared<TorchStore>(store);
  if (options.store_host.empty()) options.store_host = hostOf(store);
  const int first = options.members.empty() ? 0 : options.members.front();
  if (rank == first) options.choose_shared = choose_shared_;
  if (hasCuda()) adapted->set("ringreduce/gpus/" + std::to_string(rank), gpus_.facts);
  return Group::create(adapted, rank, size, options);
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
  prepared_.reset();
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
  job.held = std::make_shared<HeldMemory>(std::initializer_list<const Tensors*>{&job.inputs});
  message.after = [then = std::move(message.after), held = job.held] { then(); };
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

#ifdef C10D_BACKEND_HAS_RECONFIGURE

// ---- membership

c10d::ReconfigureHandle Backend::get_reconfigure_handle() const {
  const std::lock_guard lock(group_mutex_);
  return "ringreduce-" + token_ + "-" + std::to_string(observer_->groups()) + "-" +
         std::to_string(group_options_.startedAs(rank_));
}

Backend::WorkPtr Backend::reconfigure(const c10d::ReconfigureOptions& options) {
  return translated([&] {
    const std::lock_guard lock(reconfigure_mutex_);
    const std::string own = get_reconfigure_handle();
    const std::vector<Handle> handles = handlesOf(options, own);
    const auto self = std::ranges::find(handles, own, &Handle::text);
    const int rank = static_cast<int>(self - handles.begin());
    const int size = static_cast<int>(handles.size());

    std::string members;
    GroupOptions made = group_options_;
    made.global_ranks.clear();
    made.started_as.clear();
    made.of_ranks = 0;
    for (const Handle& handle : handles) {
      made.started_as.push_back(handle.number);
      members += handle.text + " ";
    }
    const std::string uuid = std::to_string(options.uuid);
    const std::string who = "rank " + made.shown(rank) + " of group '" + made.name + "'";
    const std::string refusal =
        who + ": uuid " + uuid +
        " of a reconfigure was already used, or another rank gave other handles with it; give each "
        "reconfigure a new uuid, and all its ranks the same handles in the same order";
    if (!used_uuids_.insert(options.uuid).second) throw Error(Failure::kSetup, refusal);
    const std::string place = "ringreduce/reconfigure/" + uuid;
    const auto store = c10::make_intrusive<c10d::PrefixStore>(
        place + "/" + std::to_string(std::hash<std::string>()(members)), store_);

    GroupOptions within = made;
    within.timeout = nanosOf(options.timeout.value_or(options_->timeout));
    const Nanos until = deadlineIn(within.timeout);
    const auto change = std::make_shared<MembershipChange>(store_, place + "/claim", members, own,
                                                           rank, who, refusal);
    within.attempt = change;
    const auto setChange = [&](const std::shared_ptr<MembershipChange>& now) {
      const std::lock_guard group_lock(group_mutex_);
      change_ = now;
    };
    setChange(change);
    liveGroups().add(change);
    try {
      const std::shared_ptr<Group> group = makeGroup(store, rank, size, std::move(within));
      group->setTimeout(std::max<Nanos>(until - now(), 0) + kLaterNews);
      enter(group, store, std::move(made));
      group->setTimeout(nanosOf(options_->timeout));
    } catch (...) {
      setChange(nullptr);
      change->finish();
      throw;
    }
    change->finish();
    return c10::make_intrusive<WorkList>(rank_, std::vector<WorkPtr>());
  });
}

// Leaves the old group, if there is one, for the new one.  Throws if the new one has failed
// already.  The old one then stays the current one; if it was busy, it has been aborted.
void Backend::enter(const std::shared_ptr<Group>& group, const StorePtr& store,
                    GroupOptions options) {
  // Ranks that are not in the new group may never join what is under way in the old one.  That ends
  // on all ranks before any leaves the old group: otherwise its operations would report a rank that
  // has left as lost.
  const auto gpu = makeGpuBackend(group->rank(), group->size());
  std::shared_ptr<Group> old = groupIfAny();
  GpuPtr old_gpu;
  try {
    if (old && !old->failed() && !old->isIdle()) old->abort("it was reconfigured");
    group->run({.call = Barrier{}});
    const std::lock_guard lock(group_mutex_);
    change_->check();  // later, the new group is aborted or destroyed
    change_ = nullptr;
    old = std::exchange(group_, group);
    old_gpu = std::exchange(gpu_, gpu);
    last_failure_ = Failure::kNone;
    group_store_ = store;
    group_options_ = std::move(options);
    rank_ = group->rank();
    size_ = group->size();
    is_connected_ = true;
    observer_->enterGroup();
  } catch (const Error& error) {
    group->abort(error.what());
    leave(*group, kLeaveTime);
    throw;
  }
  options_->take(group->sharedOptions());
  options_->global_ranks_in_group.assign(group_options_.started_as.begin(),
                                         group_options_.started_as.end());
  liveGroups().add(group, gpu);
  if (old_gpu) leave(*old_gpu, true);
  if (!old) return;
  if (!old->failed() && !old->isIdle()) old->abort("it was reconfigured");
  leave(*old, kLeaveTime);
}

#endif

void Backend::endChange(const char* why) {
  const std::lock_guard lock(group_mutex_);
  if (!end_reason_) end_reason_ = why;
  if (preparing_) preparing_->end(why);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (change_) change_->end(why);
#endif
}

// ---- newcomers

void Backend::prepare(const std::string& place, const std::vector<int>& members, Nanos timeout) {
  translated([&] {
    const auto self = std::ranges::find(members, rank_);
    TORCH_CHECK_VALUE(self != members.end() && std::ranges::is_sorted(members) &&
                          members.front() >= 0 && members.back() < size_,
                      "ringreduce: these ranks cannot be the members of a group of ", size_,
                      ", seen from rank ", rank_);
    GroupOptions made = group_options_;
    made.members = members;
    made.timeout = timeout;
    if (const auto group = groupIfAny()) made.shared = group->sharedOptions();
    const auto cancel = std::make_shared<Cancel>("rank " + made.shown(rank_) + " of group '" +
                                                 made.name + "' gave up while newcomers joined");
    {
      const std::lock_guard lock(group_mutex_);
      if (end_reason_) cancel->end(end_reason_);
      preparing_ = cancel;
    }
    made.attempt = cancel;
    const auto store = c10::make_intrusive<c10d::PrefixStore>(place, store_);
    const std::shared_ptr<Group> group = makeGroup(store, rank_, size_, std::move(made));
    try {
      group->run({Barrier{}});  // a member may have failed to make it
      const std::lock_guard lock(group_mutex_);
      cancel->check();
      group->setTimeout(nanosOf(options_->timeout));
      prepared_ = group;
      prepared_store_ = store;
    } catch (...) {
      leave(*group, kLeaveTime);
      throw;
    }
  });
}

void Backend::enterPrepared() {
  std::shared_ptr<Group> old;
  translated([&] {
    const std::lock_guard lock(group_mutex_);
    if (preparing_) preparing_->check();
    if (!prepared_) throw Error(Failure::kSetup, "ringreduce: there is no prepared group to enter");
    old = std::exchange(group_, std::exchange(prepared_, nullptr));
    options_->take(group_->sharedOptions());
    last_failure_ = Failure::kNone;
    group_store_ = prepared_store_;
    is_connected_ = true;
    observer_->enterGroup();
    liveGroups().add(group_, gpu_);
  });
  if (!old) return;
  // No abort: a survivor may still be in its last operation.  Messages may never be received.
  leave(*old, kLeaveTime);
}

bool Backend::isEnded() const {
  const std::lock_guard lock(group_mutex_);
  return end_reason_ != nullptr;
}

bool Backend::isConnected() const {
  const std::lock_guard lock(group_mutex_);
  return is_connected_;
}

bool Backend::goesOn() const {
  const auto group = groupIfAny();
  return group ? group->sharedOptions().min_ranks > 0 : connect_ == Connect::kByPrepare;
}

void Backend::dropPrepared() {
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(group_mutex_);
    group = std::exchange(prepared_, nullptr);
  }
  if (group) leave(*group, kLeaveTime);
}

// ---- its state

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
  return group ? group->epoch()->wires->routes() : std::vector<std::string>();
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
  endChange(kDestroyed);
  dropPrepared();
  if (const auto gpu = gpuIfAny()) gpu->shutdown();
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

void Backend::shutdownAll() {
  dropKeptStore();
  decltype(LiveGroups::groups) groups;
  decltype(LiveGroups::changes) changes;
  {
    const std::lock_guard lock(liveGroups().mutex);
    groups.swap(liveGroups().groups);
    changes.swap(liveGroups().changes);
  }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  for (const auto& entry : changes)
    if (const auto change = entry.lock()) change->end("its process exits");
  // They tell the other ranks.
  for (const Nanos limit = deadlineIn(kExitGrace); now() < limit;) {
    if (std::ranges::all_of(changes, [](const auto& entry) {
          const auto change = entry.lock();
          return !change || change->isFinished();
        }))
      break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
#endif
  for (const auto& entry : groups) {
    if (const auto gpu = entry.gpu.lock()) leave(*gpu);
    if (const auto group = entry.group.lock()) group->shutdown();
  }
}

// ---- memory

namespace {

constexpr size_t kPage = 4 << 10, kHugePage = 2 << 20;

struct Mapping {
  void* data;
  size_t bytes;
};

void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  munmap(mapping->data, mapping->bytes);
  delete mapping;
}

}  // namespace

c10::DataPtr PageAllocator::allocate(size_t bytes) {
  if (bytes == 0) return {nullptr, c10::DeviceType::CPU};
  const bool huge = bytes >= kHugePage;
  auto mapping =
      std::make_unique<Mapping>(Mapping{nullptr, roundUp(bytes, huge ? kHugePage : kPage)});
  mapping->data =
      mmap(nullptr, mapping->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, mapping->data != MAP_FAILED, "ringreduce cannot map ",
                   mapping->bytes, " bytes of memory: ", std::strerror(errno));
  if (huge) madvise(mapping->data, mapping->bytes, MADV_HUGEPAGE);  // a wish
  void* data = mapping->data;
  return {data, mapping.release(), &unmap, c10::DeviceType::CPU};
}

namespace {

std::shared_ptr<PageAllocator> pageAllocator() {
  static auto* allocator =
      new std::shared_ptr<PageAllocator>(new PageAllocator);  // never destroyed
  return *allocator;
}

size_t bytesOf(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
}

at::Tensor tensorIn(c10::DataPtr memory, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytesOf(sizes, options),
                             std::move(memory), nullptr, /*resizable=*/false);
  const at::Tensor tensor = at::empty({0}, options);
  return tensor.set_(storage, 0, sizes, c10::contiguous_strides(sizes));
}

}  // namespace

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  return pageAllocator();
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "ringreduce allocateTensor: ", size, " elements");
  if (options.device().is_cuda() && gpuIfAny()) return at::empty({size}, options);
  TORCH_CHECK_VALUE(options.device().is_cpu(), "ringreduce allocateTensor: on ", options.device());
  const std::shared_ptr<Group> group = groupIfAny();
  if (group && group->epoch()->usesTensorsInPlace()) try {
      return sharedTensor({size}, options);
    } catch (const Error& error) {  // too many descriptors, for example: the slots will do
      log(std::string("a tensor is not shared: ") + error.what());
    }
  return tensorIn(pageAllocator()->allocate(bytesOf({size}, options)), {size}, options);
}

at::Tensor sharedTensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = bytesOf(sizes, options);
  auto* block = new std::shared_ptr<SharedBlock>(SharedBlock::create(bytes));
  c10::DataPtr memory(
      (*block)->data(), block,
      [](void* context) { delete static_cast<std::shared_ptr<SharedBlock>*>(context); },
      c10::DeviceType::CPU);
  return tensorIn(std::move(memory), sizes, options);
}

}  // namespace ringreduce
