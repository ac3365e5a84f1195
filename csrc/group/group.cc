// Runs operations and messages in the epoch of the group.  Recoveries are in group_recovery.cc.
#include "group/group.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/topology.h"
#include "group/network.h"
#include "group/wires.h"
#include "kernels/reduce.h"

namespace ringreduce {
namespace {

// In shared memory operations of up to so many bytes take less time than to wake a thread.
constexpr size_t kQuickBytes = 64 << 10;

std::vector<int> membersOf(const Epoch& epoch) {
  std::vector<int> members = epoch.options.members;
  for (int r = static_cast<int>(members.size()); r < epoch.size; ++r) members.push_back(r);
  return members;
}

}  // namespace

std::shared_ptr<Group> Group::create(std::shared_ptr<Store> store, int rank, int world_size,
                                     const GroupOptions& options) {
  std::vector<int> members = options.members;
  if (members.empty())
    for (int r = 0; r < world_size; ++r) members.push_back(r);
  const auto self = std::ranges::find(members, rank);
  if (self == members.end())
    throw Error(Failure::kSetup, "rank " + std::to_string(rank) + " of a group of " +
                                     std::to_string(world_size) + " cannot be");
  instructionSet();  // throws here, before anything is sent, where no kernel can run
  auto executor = std::make_unique<Executor>();
  std::shared_ptr<Group> local;
  const auto make_local = [&](int local_rank, Membership membership, const GroupOptions& of_host) {
    auto of_local = std::make_unique<Executor>();
    auto epoch = std::make_shared<Epoch>(local_rank, std::move(membership), of_host, *of_local);
    const int size = epoch->size;
    local.reset(new Group(local_rank, size, of_host, std::move(of_local), std::move(epoch), nullptr,
                          nullptr));
  };
  auto epoch = Epoch::create(*store, static_cast<int>(self - members.begin()),
                             static_cast<int>(members.size()),
                             options.ofMembers(members, world_size), *executor, make_local);
  GroupOptions made = options;
  made.attempt = nullptr;
  return std::shared_ptr<Group>(new Group(rank, world_size, made, std::move(executor),
                                          std::move(epoch), std::move(local), store));
}

Group::Group(int rank, int size, const GroupOptions& options, std::unique_ptr<Executor> executor,
             std::shared_ptr<Epoch> epoch, std::shared_ptr<Group> local,
             const std::shared_ptr<Store>& store)
    : rank_(rank),
      size_(size),
      options_(options),
      generation_(forkGeneration()),
      timeout_(options.timeout),
      shared_(epoch->shared),
      local_(std::move(local)),
      executor_(std::move(executor)),
      epoch_(std::move(epoch)),
      recovery_(epoch_->hosts && shared_.min_ranks > 0
                    ? std::make_unique<Recovery>(
                          store, "ringreduce/epochs/" + epoch_->hosts->nonce() + "/", rank_,
                          membersOf(*epoch_), options_)
                    : nullptr) {}

Group::~Group() {
  if (forkGeneration() != generation_) {
    // The threads and locks of the parent do not exist here, and its memory is not ours to mark.
    (void)executor_.release();
    new std::shared_ptr<Group>(local_);
    new std::shared_ptr<Epoch>(std::move(epoch_));
    new std::vector<std::shared_ptr<Epoch>>(std::move(tried_));
    (void)recovery_.release();
    return;
  }
  leave(nullptr);
}

std::shared_ptr<Epoch> Group::epoch() const {
  const std::lock_guard lock(epoch_mutex_);
  return epoch_;
}

// No collective is called any more when the epoch ends.
void Group::leave(void (*poll)()) {
  executor_->stop(poll);
  epoch()->leave(poll, timeout_);
}

void Group::refuseInChild() const {
  if (forkGeneration() != generation_)
    throw Error(Failure::kArgument,
                "this process (pid " + std::to_string(getpid()) + ") was forked from rank " +
                    std::to_string(rank_) + " of group '" + options_.name +
                    "' and cannot use it; start processes that train with spawn, or make a new "
                    "group in the child");
}

void Group::refuseInside() const {
  if (executor_->runsInThisThread())
    throw Error(Failure::kArgument,
                "rank " + options_.shown(rank_) + " cannot wait for an operation of group '" +
                    options_.name +
                    "' inside another one that this thread waits for (in a signal handler?); set a "
                    "flag there and act on it later");
}

void Group::execute(const Operation& operation, bool in_users_thread) {
  const Nanos timeout = operation.timeout > 0 ? operation.timeout : timeout_.load();
  ++sequence_;
  try {
    if (recovery_)
      executeWhole(operation, timeout, in_users_thread);
    else if (options_.members.empty())
      epoch_->run(operation, timeout, in_users_thread);
    else
      epoch_->run(inEpoch(operation), timeout, in_users_thread);
  } catch (const Error&) {
    raised_ = true;
    throw;
  }
  if (operation.after) operation.after();
}

// The call as the ranks of the epoch number themselves.
Operation Group::inEpoch(const Operation& operation) const {
  return toMembers(operation, epoch_->options, [&](int rank) { return lacks(operation, rank); });
}

Error Group::lacks(const Operation& operation, int rank) const {
  return Error(Failure::kPeerLost,
               howAbsent(rank) + "; rank " + options_.shown(rank_) + " needs its data in " +
                   textOf(operation) + ". Group '" + options_.name + "' goes on without it.",
               facts(rank, false));
}

Facts Group::facts(int rank, bool is_final) const {
  return {.rank = options_.shownAs(rank),
          .reporter = options_.shownAs(rank_),
          .group = options_.name,
          .is_final = is_final};
}

std::string Group::howAbsent(int rank) const {
  const std::lock_guard lock(epoch_mutex_);
  const auto known = absent_.find(rank);
  return known != absent_.end() ? known->second : "rank " + options_.shown(rank) + " is lost";
}

std::string Group::textOf(const Operation& operation) const {
  OpSignature signature = announce(operation, sequence_ - 1);
  if (signature.root != kNoRoot) signature.root = options_.shownAs(signature.root);
  return describe(signature);
}

// Validates all operations before the first one runs.
void Group::check(const std::vector<Operation>& operations) const {
  for (const Operation& operation : operations) {
    validate(operation, rank_, size_);
    const auto* compressed = std::get_if<CompressedAllReduce>(&operation.call);
    if (compressed && compressed->schedule == CodedSchedule::kRing && shared_.min_ranks > 0)
      throw Error(
          Failure::kArgument,
          "the schedule 'ring' cannot go on after a loss; take 'owner', or on_loss='error'");
  }
}

bool Group::tryRunHere(const std::vector<Operation>& operations) {
  refuseInChild();
  check(operations);
  const bool ran = executor_->tryRunHere([&] {
    submitted_ += operations.size();
    for (const Operation& operation : operations) execute(operation, /*in_users_thread=*/true);
  });
  if (!ran) refuseInside();  // else this thread is in none: there is one token for all
  return ran;
}

void Group::run(Operation operation) {
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  if (tryRunHere(operations)) return;
  const auto handle = submitAll(std::move(operations), nullptr);
  await(*handle, kNever);
  if (handle->error()) std::rethrow_exception(handle->error());
}

std::shared_ptr<OperationHandle> Group::submitAll(std::vector<Operation> operations,
                                                  Executor::Completion completion) {
  refuseInChild();
  check(operations);
  submitted_ += operations.size();
  size_t bytes = 0;
  for (const Operation& operation : operations) bytes += bytesOf(operation);
  const bool quick = bytes <= kQuickBytes && !recovery_ && !epoch_->network;
  return executor_->submit(
      [this, operations = std::move(operations)](bool in_users_thread) {
        for (const Operation& operation : operations) execute(operation, in_users_thread);
      },
      std::move(completion), quick);
}

void Group::hurry() {
  if (forkGeneration() == generation_) executor_->hurry();
}

std::shared_ptr<OperationHandle> Group::submit(Operation operation,
                                               Executor::Completion completion) {
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  return submitAll(std::move(operations), std::move(completion));
}

// An epoch that ends finishes its messages.
std::shared_ptr<Epoch> Group::epochOf(const Delivery& delivery) const {
  const auto owner = std::static_pointer_cast<Epoch>(delivery.owner.lock());
  return owner ? owner : epoch();
}

std::shared_ptr<Delivery> Group::post(Message message) {
  refuseInChild();
  std::shared_ptr<Epoch> epoch;
  {
    const std::lock_guard lock(epoch_mutex_);
    epoch = epoch_;
    if (recovery_ && message.direction == Message::Direction::kSend) {
      // A later message must not be taken for one that was lost.
      if (sent_earlier_.contains(message.peer))
        throw Error(Failure::kPeerLost,
                    ownName() + " cannot send to rank " + options_.shown(message.peer) +
                        ": messages that it sent before the loss of a rank may have been lost too. "
                        "Send messages in a group that is made after the loss.");
      sent_to_.insert(message.peer);
    }
  }
  const std::vector<int>& members = epoch->options.members;
  if (!members.empty() && message.peer >= 0 && message.peer < size_) {
    const auto peer = std::ranges::find(members, message.peer);
    if (peer == members.end())
      throw Error(Failure::kPeerLost,
                  howAbsent(message.peer) +
                      "; nothing can be sent to it or received from it. Group '" + options_.name +
                      "' goes on without it.",
                  facts(message.peer, false));
    message.peer = static_cast<int>(peer - members.begin());
  }
  return epoch->messenger->post(std::move(message), epoch);
}

bool Group::await(Delivery& delivery, Nanos longest) {
  refuseInChild();
  return delivery.isDone() || epochOf(delivery)->messenger->await(delivery, longest, timeout_);
}

void Group::expect(Delivery& delivery) {
  refuseInChild();
  if (!delivery.isDone()) epochOf(delivery)->messenger->expect(delivery, timeout_);
}

bool Group::await(OperationHandle& handle, Nanos longest) {
  refuseInChild();
  if (!handle.isDone()) refuseInside();
  try {
    // A thread whose wait ends earlier must not begin to run it.
    if (longest == kNever)
      executor_->runUntil(handle);
    else
      executor_->hurry();
    return handle.wait(longest, options_.interrupt);
  } catch (...) {
    // Ctrl-C.  The caller may free the buffers, and other ranks wait for an operation that this
    // rank will not finish: so the operation ends for all before this returns.
    abort("interrupted while it waited for an operation");
    handle.wait(kNever, nullptr);
    throw;
  }
}

void Group::drain() {
  refuseInChild();
  refuseInside();
  executor_->drain(options_.interrupt);
}

bool Group::isIdle() const {
  return executor_->isIdle() && epoch()->messenger->isIdle();
}

void Group::abort(const std::string& why) {
  refuseInChild();
  {
    const std::lock_guard lock(epoch_mutex_);
    if (aborted_.empty()) aborted_ = why;
    epoch_->arbiter->abort(why);
    for (const auto& tried : tried_) tried->arbiter->abort(why);
  }
  if (local_) local_->abort(why);
}

void Group::checkHealth() const {
  refuseInChild();
  if (!recovery_) return epoch_->arbiter->check();
  if (!failed()) return;
  const std::lock_guard lock(epoch_mutex_);
  if (ended_) throw Error(*ended_);
  if (!aborted_.empty())
    throw Error(Failure::kAborted, ownName() + " aborted it: " + aborted_, facts(rank_, true));
  epoch_->arbiter->check();
}

// A group that recovers has not failed while a recovery may mend it.
Failure Group::failure() const {
  const std::lock_guard lock(epoch_mutex_);
  if (ended_) return ended_->kind();
  const Failure failure = epoch_->arbiter->failure();
  const bool may_recover = recovery_ && epoch_->network && failure == Failure::kPeerLost;
  if (!may_recover) return failure;
  return aborted_.empty() ? Failure::kNone : Failure::kAborted;
}

std::vector<PeerState> Group::states() const {
  refuseInChild();
  return epoch()->arbiter->peers().states();
}

bool Group::hasExited(int rank) const {
  refuseInChild();
  return epoch()->arbiter->peers().hasExited(rank);
}

std::vector<int> Group::members() const {
  return membersOf(*epoch());
}

std::vector<int> Group::liveRanks() const {
  refuseInChild();
  const std::shared_ptr<Epoch> epoch = this->epoch();
  const std::vector<PeerState> all = epoch->arbiter->peers().states();
  const std::vector<int> members = membersOf(*epoch);
  std::vector<int> live;
  for (int r = 0; r < epoch->size; ++r)
    if (shared_.min_ranks == 0 || r == epoch->rank ||
        (!epoch->arbiter->isAbsent(r) && all[static_cast<size_t>(r)].isHere()))
      live.push_back(members[static_cast<size_t>(r)]);
  return live;
}

void Group::fail(Failure kind, int culprit, const std::string& text) {
  refuseInChild();
  epoch()->arbiter->fail(kind, culprit, text);
}

void Group::failLost(int rank, const std::string& when) {
  refuseInChild();
  epoch()->arbiter->failLost(rank, when);
}

std::vector<int> Group::stopped() const {
  return epoch()->arbiter->peers().stoppedOf(otherRanks(rank_, size_));
}

void Group::interrupt(const std::string& doing) {
  if (!options_.interrupt) return;
  try {
    options_.interrupt();
  } catch (...) {
    abort("interrupted " + doing);
    throw;
  }
}

void Group::askForStreams(bool at_once) {
  // The answers need no earlier operations of the group's own.
  epoch()->network->askForProgress(at_once ? kNoOperation - 1 : kNoOperation);
}

std::shared_ptr<const Hosts> Group::hosts() const {
  const std::shared_ptr<Epoch> epoch = this->epoch();
  return {epoch, epoch->hosts.get()};
}

std::shared_ptr<const HostRing> Group::ring() const {
  const std::shared_ptr<Epoch> epoch = this->epoch();
  return {epoch, epoch->network ? &epoch->network->ring() : nullptr};
}

WireCost Group::wireCost() const {
  const std::shared_ptr<Epoch> epoch = this->epoch();
  return epoch->network ? epoch->network->cost() : WireCost{};
}

std::vector<std::string> Group::routes() const {
  return epoch()->wires->routes();
}

size_t Group::stagingBytes() const {
  return epoch()->wires->stagingBytes() + inputs_bytes_;
}

bool Group::usesTensorsInPlace() const {
  return size_ > 1 && epoch()->wires->usesTensorsInPlace();
}

uint64_t Group::bytesSent() const {
  return epoch()->wires->bytesSent();
}

void Group::shutdown() {
  if (forkGeneration() != generation_) return;  // only the parent leaves the group
  if (executor_->runsInThisThread()) {
    // A signal handler that ran while an operation waits below us on this thread's stack.  That
    // operation ends with this error; the rest is done by the destructor.
    abort("destroyed by a signal handler in the midst of an operation");
    return;
  }
  try {
    leave(options_.interrupt);
    if (local_) local_->shutdown();  // the last: operations of this group may go through it
  } catch (...) {  // Ctrl-C while operations are under way that others may never join
    abort("interrupted while it was leaving");
    leave(nullptr);
    if (local_) local_->leave(nullptr);
    throw;
  }
}

}  // namespace ringreduce
