// The backend as a whole: its group's life, groups made of it, what is known of it.  Its calls are
// in reduction_calls.cc, moving_calls.cc and message_calls.cc.
#include "torch/backend.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/errors.h"
#include "torch/memory.h"

namespace ringreduce {
namespace {

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

// torch's store, as the rendezvous wants it.
class TorchStore final : public Store {
 public:
  explicit TorchStore(const c10::intrusive_ptr<c10d::Store>& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override {
    fromStore([&] { store_->set(key, value); });
  }
  std::optional<std::string> get(const std::string& key) override {
    return fromStore([&]() -> std::optional<std::string> {
      if (!store_->check({key})) return std::nullopt;
      return store_->get_to_str(key);
    });
  }
  void remove(const std::string& key) override {
    fromStore([&] { store_->deleteKey(key); });
  }

 private:
  const c10::intrusive_ptr<c10d::Store>& store_;
};

// The groups that are alive, for shutdownAll.
struct LiveGroups {
  std::mutex mutex;
  std::vector<std::weak_ptr<Group>> groups;

  void add(const std::shared_ptr<Group>& group) {
    const std::lock_guard lock(mutex);
    std::erase_if(groups, [](const auto& g) { return g.expired(); });
    groups.push_back(group);
  }
};

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

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                 const GroupOptions& options)
    : c10d::Backend(rank, size),
      store_(store),
      group_options_(options),
      options_(c10::make_intrusive<Options>(
          "ringreduce", std::chrono::milliseconds(options.timeout / kMillisecond))) {
  options_->group_name = options.name;
  options_->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  TorchStore adapted(store);
  group_ = translated([&] { return Group::create(adapted, rank, size, options); });
  liveGroups().add(group_);
}

Backend::~Backend() {
  // Completions that are under way may want the interpreter, so it must not be held while they end.
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  group_.reset();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  group_->setTimeout(nanosOf(timeout));
}

// ---- starting operations

Backend::WorkPtr Backend::start(Job job, bool async) {
  job.observer = observer_;
  return collected(Work::start(*group_, std::move(job), !async));
}

Backend::WorkPtr Backend::startMessage(Job job, Message message) {
  job.observer = observer_;
  return collected(Work::start(*group_, std::move(job), std::move(message)));
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
}

Backend::WorkPtr Backend::endCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  TORCH_CHECK(coalescing_, "ringreduce: endCoalescing without startCoalescing");
  coalescing_ = false;
  return c10::make_intrusive<WorkList>(rank_, std::exchange(coalesced_, {}));
}

// ---- groups made of this one

// Of `ranks` of this group, this one `rank` among them.
Backend::BackendPtr Backend::derived(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                     const std::vector<int>& ranks,
                                     const OptionsPtr& options) const {
  GroupOptions made = group_options_;
  made.timeout = options ? nanosOf(options->timeout) : group_->timeout();
  made.name =
      options && !options->group_name.empty() ? options->group_name : group_options_.name + "/part";
  made.shared = group_->sharedOptions();
  made.global_ranks.clear();
  for (int r : ranks) made.global_ranks.push_back(group_options_.shownAs(r));
  return c10::make_intrusive<Backend>(store, rank, static_cast<int>(ranks.size()), made);
}

// A part of this group's store for some of its ranks.  A group can be made there again and again.
c10::intrusive_ptr<c10d::Store> Backend::meeting(const char* why,
                                                 const std::vector<int>& ranks) const {
  std::string prefix = std::string("ringreduce/") + why + "/";
  for (int r : ranks) prefix += std::to_string(r) + ",";
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
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
                 ranks, options);
}

Backend::BackendPtr Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                   const OptionsPtr& options, const int& rank, const int& size) {
  GroupOptions made = group_options_;
  if (options) made.timeout = nanosOf(options->timeout);
  if (options && !options->group_name.empty()) made.name = options->group_name;
  made.shared = group_->sharedOptions();
  made.global_ranks.clear();  // those of other groups are not known here
  return c10::make_intrusive<Backend>(store ? store : store_, rank, size, made);
}

Backend::BackendPtr Backend::shrink(const std::vector<int64_t>& excluded, int flags,
                                    const OptionsPtr& options) {
  constexpr int kAbort = 1;  // torch's SHRINK_ABORT
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r)
    if (std::find(excluded.begin(), excluded.end(), r) == excluded.end()) ranks.push_back(r);
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  TORCH_CHECK_VALUE(self != ranks.end(), "ringreduce shrink: rank ", rank_, " excludes itself");
  if ((flags & kAbort) != 0 && !group_->failed()) abort();
  return derived(meeting("shrink", ranks), static_cast<int>(self - ranks.begin()), ranks, options);
}

// ---- what is known of it

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

void Backend::waitForPendingWorks() {
  translated([&] { group_->drain(); });
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  return {{"staging_bytes", group_->stagingBytes()}};
}

c10d::ErrorType Backend::getError() {
  switch (group_->failure()) {
    case Failure::kNone:
      return c10d::ErrorType::SUCCESS;
    case Failure::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case Failure::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::abort() {
  translated([&] { group_->abort("abort() was called"); });
}

void Backend::shutdown() {
  group_->shutdown();
}

void Backend::shutdownAll() {
  std::vector<std::weak_ptr<Group>> groups;
  {
    const std::lock_guard lock(liveGroups().mutex);
    groups.swap(liveGroups().groups);
  }
  for (const auto& weak : groups)
    if (const auto group = weak.lock()) group->shutdown();
}

// ---- memory

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  return pageAllocator();
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "ringreduce allocateTensor: ", size, " elements");
  TORCH_CHECK_VALUE(options.device().is_cpu(), "ringreduce allocateTensor: on ", options.device());
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                             pageAllocator()->allocate(bytes), nullptr, /*resizable=*/false);
  return at::empty({0}, options).set_(storage, 0, {size}, {1});
}

}  // namespace ringreduce
