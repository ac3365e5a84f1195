// Queues operations and runs them in the current epoch, as it posts messages.
#include "group/group.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/aside.h"
#include "base/error.h"
#include "epoch/wires.h"
#include "kernels/reduce.h"
#include "survival/successor.h"

namespace ringreduce {
namespace {

// In shared memory operations of up to so many bytes take less time than to wake a thread.
constexpr size_t kQuickBytes = 64 << 10;

}  // namespace

std::shared_ptr<Group> Group::create(std::shared_ptr<Store> store, int rank, int world_size,
                                     const GroupOptions& options, const Made& made) {
  instructionSet();  // throws here, before anything is sent, where no kernel can run
  stepAside();
  auto executor = std::make_unique<Executor>();
  std::shared_ptr<Group> local;
  const auto make_local = [&](int local_rank, HostMemory host_memory, const GroupOptions& of_host) {
    auto of_local = std::make_unique<Executor>();
    auto epoch = std::make_shared<Epoch>(local_rank, std::move(host_memory), of_host, *of_local);
    const int size = epoch->size;
    local.reset(new Group(local_rank, size, of_host, std::move(of_local), std::move(epoch), nullptr,
                          nullptr));
  };
  std::shared_ptr<Group> group;
  const auto take = [&](std::shared_ptr<Epoch> epoch) {
    GroupOptions own = options;
    own.attempt = nullptr;
    group.reset(new Group(rank, world_size, own, std::move(executor), std::move(epoch),
                          std::move(local), store));
  };
  Executor& runs = *executor;
  if (!made) {
    take(Epoch::create(*store, rank, world_size, options, runs, make_local));
    return group;
  }
  makeSuccessor(*store, rank, world_size, options, runs, make_local,
                [&](std::shared_ptr<Epoch> epoch, const Operation& barrier) {
                  take(std::move(epoch));
                  made(group);
                  group->run(barrier);
                });
  return group;
}

Group::Group(int rank, int size, const GroupOptions& options, std::unique_ptr<Executor> executor,
             std::shared_ptr<Epoch> epoch, std::shared_ptr<Group> local,
             const std::shared_ptr<Store>& store)
    : rank_(rank),
      size_(size),
      options_(options),
      generation_(forkGeneration()),
      meeting_(epoch->options.meeting),
      timeout_(options.timeout),
      shared_(epoch->shared),
      in_memory_(!epoch->network),
      local_(std::move(local)),
      executor_(std::move(executor)),
      epochs_(std::make_unique<Epochs>(rank, size, options_, std::move(epoch), messages_)),
      survivors_(epochs_->running().mayBeReplaced()
                     ? std::make_unique<Survivors>(*epochs_, *executor_, store, timeout_)
                     : nullptr) {}

Group::~Group() {
  if (forkGeneration() != generation_) {
    // The threads and locks of the parent do not exist here, and its memory is not ours to mark.
    (void)executor_.release();
    new std::shared_ptr<Group>(local_);
    (void)epochs_.release();
    (void)survivors_.release();
    return;
  }
  leave(nullptr);
}

std::shared_ptr<Epoch> Group::epoch() const {
  refuseInChild();
  return epochs_->current();
}

// No collective is called any more when the epoch ends.
void Group::leave(void (*poll)()) {
  executor_->stop(poll);
  epochs_->current()->leave(poll, timeout_);
}

void Group::refuseInChild() const {
  if (forkGeneration() != generation_)
    throw Error(Failure::kArgument,
                "this process (pid " + std::to_string(getpid()) + ") was forked from rank " +
                    std::to_string(rank_) + " of group '" + options_.name +
                    "' and cannot use it; start processes that train with spawn, or make a new "
                    "group in the child");
}

void Group::stepOutside() const {
  stepAside();
  if (executor_->runsInThisThread())
    throw Error(Failure::kArgument,
                "rank " + options_.shown(rank_) + " cannot wait for an operation of group '" +
                    options_.name +
                    "' inside another one that this thread waits for (in a signal handler?); set a "
                    "flag there and act on it later");
}

// What an operation waits while the program computes makes the program no later.
Nanos Group::blockedSince(bool in_users_thread) const {
  if (in_users_thread || has_futures_.load(std::memory_order_relaxed)) return 0;
  return waiting_.load(std::memory_order_acquire) > 0
             ? waiting_since_.load(std::memory_order_relaxed)
             : kNever;
}

Nanos Group::execute(const Operation& operation, bool in_users_thread) {
  const Nanos timeout = operation.timeout > 0 ? operation.timeout : timeout_.load();
  Recording recording{recorder_, nextRecord(operation)};
  try {
    if (survivors_)
      survivors_->run(operation, timeout, in_users_thread, recording);
    else
      epochs_->run(operation, timeout, in_users_thread, recording);
  } catch (const Error&) {
    raised_ = true;
    recording.end(OpRecord::State::kFailed);
    throw;
  } catch (...) {
    recording.end(OpRecord::State::kFailed);
    throw;
  }
  recording.blocked_since = blockedSince(in_users_thread);
  recording.end(OpRecord::State::kDone);
  if (operation.after) operation.after();
  return recording.record.done;
}

std::vector<int> Group::shownRanks() const {
  std::vector<int> ranks(static_cast<size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  return options_.shownAs(std::move(ranks));
}

namespace {

// What is known of an operation before it begins.
OpRecord recordOf(const Operation& operation, uint64_t index) {
  OpRecord record{
      .index = index, .sequence = index, .bytes = bytesOf(operation), .posted = operation.posted};
  record.kind = std::visit([]<class Call>(const Call&) { return Call::kKind; }, operation.call);
  record.step = operation.posted == 0 ? training_step.load() : operation.step;
  if (const std::optional<Codec> codec = codecOf(operation))
    record.codec = static_cast<uint8_t>(*codec);
  return record;
}

}  // namespace

std::vector<OpRecord> Group::queued() const {
  refuseInChild();
  std::vector<OpRecord> found;
  uint64_t index = recorder_.next();
  const std::lock_guard lock(queue_mutex_);
  for (auto [order, record] : queued_) {
    // It counts operations that have been submitted: some of them may never run, after an error.
    if (record.index < index) continue;
    record.index = record.sequence = index++;
    found.push_back(record);
  }
  return found;
}

std::vector<OpRecord> Group::pendingMessages() const {
  refuseInChild();
  const std::shared_ptr<Epoch> epoch = epochs_->current();
  std::vector<OpRecord> found;
  epoch->messenger->forEachPending([&](const Delivery& delivery) {
    found.push_back(MessageRecorder::recordOf(delivery, epoch->ranks));
  });
  std::ranges::sort(found, {}, &OpRecord::posted);
  uint64_t index = messages_.next();
  for (OpRecord& record : found) record.index = index++;
  return found;
}

OpRecord Group::nextRecord(const Operation& operation) {
  OpRecord record = recordOf(operation, sequence_++);
  if (std::exchange(step_, record.step) != record.step) bucket_ = 0;
  record.bucket = bucket_;
  if (std::holds_alternative<AllReduce>(operation.call) ||
      std::holds_alternative<CompressedAllReduce>(operation.call))
    ++bucket_;
  return record;
}

// Validates all operations before the first one runs.
void Group::check(const std::vector<Operation>& operations) const {
  for (const Operation& operation : operations) {
    validate(operation, rank_, size_);
    const auto* compressed = std::get_if<CompressedAllReduce>(&operation.call);
    if (compressed && compressed->schedule == CodedSchedule::kRing && shared_.goesOn())
      throw Error(
          Failure::kArgument,
          "the schedule 'ring' cannot go on after a loss; take 'owner', or on_loss='error'");
  }
}

bool Group::tryRunHere(const std::vector<Operation>& operations, Nanos* ended) {
  refuseInChild();
  check(operations);
  stepAside();
  const bool ran = executor_->tryRunHere([&] {
    submitted_ += operations.size();
    for (const Operation& operation : operations) {
      const Nanos done = execute(operation, /*in_users_thread=*/true);
      if (ended) *ended = done;
    }
  });
  if (!ran) stepOutside();  // else this thread is in none: there is one token for all
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

// Takes operations off the list of those that are queued: each as it begins, the rest if it does
// not come to that.
struct Group::Queued {
  Group& group;
  uint64_t next, end;  // in the order of submission

  void take(uint64_t until) {
    const std::lock_guard lock(group.queue_mutex_);
    for (; next < until; ++next) group.queued_.erase(next);
  }
  ~Queued() { take(end); }
};

std::shared_ptr<OperationHandle> Group::submitAll(std::vector<Operation> operations,
                                                  Executor::Completion completion) {
  refuseInChild();
  check(operations);
  stepAside();  // a signal handler may wait for the Future, which knows nothing of this group
  size_t bytes = 0;
  const Nanos posted = monotonicNow();
  const auto queued = std::make_shared<Queued>(*this);
  {
    const std::lock_guard lock(queue_mutex_);
    queued->next = queue_order_;
    for (Operation& operation : operations) {
      bytes += bytesOf(operation);
      operation.posted = posted;
      operation.step = training_step;
      OpRecord record = recordOf(operation, submitted_++);
      record.state = OpRecord::State::kQueued;
      queued_.emplace(queue_order_++, record);
    }
    queued->end = queue_order_;
  }
  const bool quick = in_memory_ && bytes <= kQuickBytes;
  return executor_->submit(
      [this, queued, operations = std::move(operations)](bool in_users_thread) {
        for (const Operation& operation : operations) {
          queued->take(queued->next + 1);
          execute(operation, in_users_thread);
        }
        queued->take(queued->end);
      },
      std::move(completion), quick);
}

void Group::hurry() {
  has_futures_ = true;
  if (forkGeneration() == generation_) executor_->hurry();
}

std::shared_ptr<OperationHandle> Group::submit(Operation operation,
                                               Executor::Completion completion) {
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  return submitAll(std::move(operations), std::move(completion));
}

std::shared_ptr<Delivery> Group::post(Message message) {
  refuseInChild();
  return epochs_->post(std::move(message));
}

void Group::keep(Delivery& delivery, std::shared_ptr<void> memory) {
  epochs_->epochOf(delivery)->messenger->keep(delivery, std::move(memory));
}

bool Group::await(Delivery& delivery, Nanos longest) {
  refuseInChild();
  stepAside();
  return delivery.isDone() ||
         epochs_->epochOf(delivery)->messenger->await(delivery, longest, timeout_);
}

void Group::expect(Delivery& delivery) {
  refuseInChild();
  if (!delivery.isDone()) epochs_->epochOf(delivery)->messenger->expect(delivery, timeout_);
}

bool Group::await(OperationHandle& handle, Nanos longest) {
  refuseInChild();
  if (!handle.isDone()) stepOutside();
  struct Waiting {
    explicit Waiting(Group& g) : group(g) {
      if (group.waiting_.load(std::memory_order_relaxed) == 0)
        group.waiting_since_.store(monotonicNow(), std::memory_order_relaxed);
      group.waiting_.fetch_add(1, std::memory_order_release);
    }
    ~Waiting() { group.waiting_.fetch_sub(1, std::memory_order_relaxed); }
    Group& group;
  } const waiting(*this);
  try {
    // A thread whose wait ends earlier must not begin to run it.
    if (longest == kNever)
      executor_->runUntil(handle);
    else
      executor_->hurry();
    return handle.wait(longest, options_.interrupt);
  } catch (...) {
    if (handle.isDone()) throw;
    // Ctrl-C.  The caller may free the buffers, and other ranks wait for an operation that this
    // rank will not finish: so the operation ends for all before this returns.
    abort("interrupted while it waited for an operation");
    handle.wait(kNever, nullptr);
    throw;
  }
}

void Group::drain() {
  refuseInChild();
  stepOutside();
  executor_->drain(options_.interrupt);
}

bool Group::isIdle() const {
  return executor_->isIdle() && epochs_->current()->messenger->isIdle();
}

void Group::abort(const std::string& why) {
  refuseInChild();
  epochs_->abort(why);
  if (local_) local_->abort(why);
}

void Group::checkHealth() const {
  refuseInChild();
  epochs_->check();
}

std::vector<int> Group::liveRanks() const {
  const std::shared_ptr<Epoch> epoch = this->epoch();
  if (!shared_.goesOn()) return epoch->ranks.ranks();
  const std::vector<PeerState> states = epoch->peers().states();
  std::vector<int> live;
  for (int position = 0; position < epoch->size; ++position)
    if (position == epoch->rank ||
        (!epoch->peers().isAbsent(position) && states[static_cast<size_t>(position)].isHere()))
      live.push_back(epoch->ranks.rankAt(position));
  return live;
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

size_t Group::stagingBytes() const {
  return epochs_->current()->wires->stagingBytes() + (survivors_ ? survivors_->stagingBytes() : 0);
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
