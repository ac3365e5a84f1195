// The calls of the backend that change its members: reconfigure, and newcomers to a group that goes
// on after losses.
#include <algorithm>
#include <charconv>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/limits.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"
#include "torch/live_groups.h"
#include "torch/torch_store.h"

namespace ringreduce {

// ---- what all changes have in common: the steps of survival/successor.h

std::shared_ptr<Attempt> Backend::prepareSuccessor(const StorePtr& store, int rank, int size,
                                                   GroupOptions options, int ends,
                                                   const std::function<void()>& made) {
  const std::shared_ptr<Attempt> attempt = options.attempt;
  const std::shared_ptr<Attempt> under_way(attempt.get(), [attempt](Attempt*) {});
  {
    const std::lock_guard lock(group_mutex_);
    if (is_destroyed_ || ends_ > ends) attempt->end(end_reason_);
    change_ = attempt;
    addLive(under_way);
  }
  Successor next{.group = nullptr, .store = store, .attempt = attempt};
  try {
    makeGroup(store, rank, size, std::move(options), [&](const std::shared_ptr<Group>& group) {
      next.group = group;
      if (made) made();
    });
    next.group->setTimeout(nanosOf(options_->timeout));
    const std::lock_guard lock(group_mutex_);
    attempt->check();  // later, who ends it drops the group
    prepared_ = next;
  } catch (...) {
    drop(next);
    throw;
  }
  return under_way;
}

std::shared_ptr<Group> Backend::enterSuccessor(const GpuPtr& gpu,
                                               const std::function<void()>& entered) {
  try {
    const std::lock_guard lock(group_mutex_);
    if (change_) change_->check();  // later, the new group is aborted or destroyed
    if (!prepared_.group)
      throw Error(Failure::kSetup, "ringreduce: there is no prepared group to enter");
    const Successor next = std::exchange(prepared_, {});
    std::shared_ptr<Group> old = replaceGroup(next.group, gpu, next.store);
    if (entered) entered();
    return old;
  } catch (const Error&) {
    dropPrepared();
    throw;
  }
}

void Backend::dropPrepared() {
  std::unique_lock lock(group_mutex_);
  const Successor next = std::exchange(prepared_, {});
  lock.unlock();
  drop(next);
}

void Backend::drop(const Successor& next) {
  if (!next.group) return;
  // Others that go on after losses do so without this rank.
  if (!next.group->sharedOptions().goesOn()) next.group->abort(next.attempt->text());
  leave(*next.group);
}

void Backend::endChange(const char* why) {
  const std::lock_guard lock(group_mutex_);
  ++ends_;
  end_reason_ = why;
  if (change_) change_->end(why);
}

std::shared_ptr<Group> Backend::replaceGroup(std::shared_ptr<Group> group, const GpuPtr& gpu,
                                             const StorePtr& store) {
  options_->take(group->sharedOptions());
  addLive(group, gpu);
  gpu_ = gpu;
  group_store_ = store;
  last_failure_ = Failure::kNone;
  is_connected_ = true;
  ends_ = 0;
  observer_->enterGroup();
  return std::exchange(group_, std::move(group));
}

// ---- reconfigure

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace {

// A reconfigure under way: its claim of the uuid, and its end from another thread.
//
// A uuid is for one attempt of one list of members: a second one would meet the remains of the
// first.  Rank 0 claims it in the store with the list.  Each other rank looks at the claim while it
// waits.  A rank that finds another list there with its own handle in it says so beside the claim,
// where rank 0 looks: that attempt can never be complete.
class MembershipChange final : public Attempt {
 public:
  // `members`: the handles of all.  `refusal`: the error where the uuid is another list's.
  MembershipChange(c10::intrusive_ptr<c10d::Store> store, std::string key, std::string members,
                   std::string own, int rank, std::string who, std::string refusal)
      : Attempt(who + " gave up its reconfigure"),
        store_(std::move(store)),
        adapted_(std::make_unique<TorchStore>(store_)),
        key_(std::move(key)),
        members_(std::move(members)),
        own_(std::move(own)),
        rank_(rank),
        who_(std::move(who)),
        refusal_(std::move(refusal)) {}

  void claim() override {
    Attempt::claim();
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
};

// A rank's handle for a reconfigure: "ringreduce-<token>-<generation>-<number>".
struct Handle {
  std::string text;
  int number = 0;  // of the rank when its process made the group

  // `place`: ", given for rank 2,"; empty where there is no order.
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

}  // namespace

c10d::ReconfigureHandle Backend::get_reconfigure_handle() const {
  const std::lock_guard lock(group_mutex_);
  return "ringreduce-" + token_ + "-" + std::to_string(observer_->groups()) + "-" +
         std::to_string(group_options_.startedAs(rank_));
}

Backend::WorkPtr Backend::reconfigure(const c10d::ReconfigureOptions& options) {
  return translated([&] {
    const std::lock_guard lock(change_mutex_);
    const int ends = [&] {
      const std::lock_guard group_lock(group_mutex_);
      return ends_;  // those ended the old group
    }();
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
    within.attempt = std::make_shared<MembershipChange>(store_, place + "/claim", members, own,
                                                        rank, who, refusal);
    // Ranks that are not in the new group may never join what is under way in the old one.  That
    // ends on all ranks before any leaves the old group: otherwise its operations would report a
    // rank that has left as lost.
    std::shared_ptr<Group> old = groupIfAny();
    const auto endOld = [&] {
      if (old && !old->failed() && !old->isIdle()) old->abort("it was reconfigured");
    };
    // What can fail here alone comes before the other ranks are met.
    const GpuPtr gpu = makeGpuBackend(rank, size), old_gpu = gpuIfAny();
    const auto under_way = prepareSuccessor(store, rank, size, std::move(within), ends, endOld);
    old = enterSuccessor(gpu, [&] {
      group_options_ = std::move(made);
      rank_ = rank;
      size_ = size;
      options_->global_ranks_in_group.assign(group_options_.started_as.begin(),
                                             group_options_.started_as.end());
    });
    if (old_gpu) leave(*old_gpu, true);
    endOld();
    if (old) leave(*old);
    return c10::make_intrusive<WorkList>(rank_, std::vector<WorkPtr>());
  });
}

#endif

// ---- newcomers

void Backend::prepare(const std::string& place, const std::vector<int>& members, Nanos timeout) {
  translated([&] {
    const std::lock_guard change_lock(change_mutex_);
    const auto self = std::ranges::find(members, rank_);
    TORCH_CHECK_VALUE(self != members.end() && std::ranges::is_sorted(members) &&
                          members.front() >= 0 && members.back() < size_,
                      "ringreduce: these ranks cannot be the members of a group of ", size_,
                      ", seen from rank ", rank_);
    GroupOptions made = group_options_;
    made.members = members;
    made.timeout = timeout;
    if (const auto group = groupIfAny()) made.shared = group->sharedOptions();
    made.attempt = std::make_shared<Attempt>("rank " + made.shown(rank_) + " of group '" +
                                             made.name + "' gave up while newcomers joined");
    const auto store = c10::make_intrusive<c10d::PrefixStore>(place, store_);
    prepareSuccessor(store, rank_, size_, std::move(made), /*ends=*/0);
  });
}

void Backend::enterPrepared() {
  const auto old = translated([&] { return enterSuccessor(gpuIfAny()); });
  // No abort: a survivor may still be in its last operation.  Messages may never be received.
  if (old) leave(*old);
}

}  // namespace ringreduce
