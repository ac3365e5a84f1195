// Puts membership, arbiter, wires and executor together.
#include "group/group.h"

#include <unistd.h>

#include <mutex>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/text.h"
#include "bootstrap/host_links.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/store.h"
#include "collectives/hierarchy.h"
#include "group/network.h"
#include "group/wires.h"
#include "kernels/reduce.h"

namespace ringreduce {
namespace {

// A blocking caller spins if there is a core for every rank, but not for long, since the scheduler
// may still put two ranks on one core.  The worker runs beside the computation that made its input,
// and yielding would give the computation a whole time slice, so the worker sleeps soon.
Patience patienceOf(bool in_users_thread, int world_size) {
  const bool crowded = world_size > coresAvailable();
  if (!in_users_thread) return {.spin = crowded ? 0 : 5 * kMicrosecond, .yield = 0};
  return {.spin = crowded ? 0 : 10 * kMicrosecond, .yield = 200 * kMicrosecond};
}

}  // namespace

std::shared_ptr<Group> Group::create(Store& users_store, int rank, int world_size,
                                     const GroupOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw Error(Failure::kSetup, "rank " + std::to_string(rank) + " of a group of " +
                                     std::to_string(world_size) + " cannot be");
  instructionSet();  // throws here, before anything is sent, where no kernel can run
  NamedStore store(users_store, rank, options);
  auto links = std::make_unique<HostLinks>(options);
  Rendezvous met = rendezvous(store, rank, world_size, options,
                              [&](const Hosts& hosts) { return links->open(hosts); });
  GroupOptions made = options;
  made.attempt = nullptr;  // it ends with this call
  if (!met.hosts) {
    const bool goes_on = world_size > 1 && met.membership.options.min_ranks > 0;
    for (int r = 0; r < world_size && goes_on; ++r)
      if (const auto& process = met.membership.members[static_cast<size_t>(r)].process;
          !process || !*process)
        throw Error(Failure::kSetup,
                    "rank " + options.shown(rank) + " cannot see when the process of rank " +
                        options.shown(r) +
                        " ends, which on_loss='continue' needs: pidfds of Linux 5.3 or newer");
    return std::shared_ptr<Group>(new Group(rank, std::move(met.membership), made));
  }

  const Hosts& hosts = *met.hosts;
  std::shared_ptr<Group> local;
  Membership local_members;
  links->join(hosts, store, [&](const HostLinks::Poll& poll) {
    const auto share = [&](const char* purpose) {
      return shareMemory(hosts.memoryExchange(purpose, HostLinks::localOptions(hosts), options),
                         poll);
    };
    if (hosts.count() > 1) {
      GroupOptions local_options = made.ofRanks(hosts.localRanks());
      local_options.together = true;
      local.reset(new Group(hosts.localRankOf(rank), share("group"), local_options));
    }
    if (Hierarchy::fits(hosts, links->sharedOptions())) local_members = share("hierarchy");
  });
  auto network = std::make_unique<Network>(std::move(links));
  return std::shared_ptr<Group>(new Group(rank, std::move(network), std::move(*met.hosts),
                                          std::move(local), std::move(local_members), made));
}

Group::Group(int rank, Membership membership, const GroupOptions& options)
    : rank_(rank),
      size_(static_cast<int>(membership.members.size())),
      options_(options),
      generation_(forkGeneration()),
      users_patience_(patienceOf(/*in_users_thread=*/true, size_)),
      workers_patience_(patienceOf(/*in_users_thread=*/false, size_)),
      timeout_(options.timeout),
      shared_(membership.options),
      membership_(std::move(membership)),
      arbiter_(std::make_unique<Arbiter>(rank, seatsOf(membership_), options_, nullptr,
                                         shared_.min_ranks)),
      wires_(wiresInMemory(rank, membership_, *arbiter_)),
      executor_(std::make_unique<Executor>()),
      messenger_(std::make_unique<Messenger>(rank, messageRings(membership_, rank), *arbiter_,
                                             *executor_, options_, users_patience_)) {}

Group::Group(int rank, std::unique_ptr<Network> network, Hosts hosts, std::shared_ptr<Group> local,
             Membership local_members, const GroupOptions& options)
    : rank_(rank),
      size_(hosts.size()),
      options_(options),
      generation_(forkGeneration()),
      users_patience_(
          patienceOf(/*in_users_thread=*/true, static_cast<int>(hosts.localRanks().size()))),
      workers_patience_(
          patienceOf(/*in_users_thread=*/false, static_cast<int>(hosts.localRanks().size()))),
      timeout_(options.timeout),
      shared_(network->sharedOptions()),
      membership_(std::move(local_members)),
      hosts_(std::make_unique<Hosts>(std::move(hosts))),
      network_(std::move(network)),
      local_(std::move(local)),
      arbiter_(std::make_unique<Arbiter>(rank, network_->seats(*hosts_), options_, network_.get())),
      wires_(wiresBetween(*network_, *hosts_, shared_, membership_, *arbiter_)),
      closed_first_(network_.get()),
      executor_(std::make_unique<Executor>()),
      messenger_(std::make_unique<Messenger>(rank, network_->channels(), *arbiter_, *executor_,
                                             options_, users_patience_)) {}

void Group::Closes::operator()(Network* network) const {
  network->close();
}

Group::~Group() {
  if (forkGeneration() != generation_) {
    // The threads and locks of the parent do not exist here, and its memory is not ours to mark.
    (void)messenger_.release();
    (void)executor_.release();
    (void)wires_.release();
    (void)closed_first_.release();
    (void)network_.release();
    new std::shared_ptr<Group>(std::move(local_));
    (void)arbiter_.release();
    new Membership(std::move(membership_));
    return;
  }
  leave(nullptr);
}

// In this order: no collective is called any more, then no message received, then nothing at all.
void Group::leave(void (*poll)()) {
  executor_->stop(poll);
  messenger_->stop(poll, timeout_);
  if (network_) network_->handOver(poll, timeout_);
  std::call_once(departed_, [&] {
    arbiter_->depart(Declared::kGone);
    if (network_) network_->leave();
    wires_->close();
  });
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
  const uint64_t sequence = sequence_++;
  wires_->setPatience(in_users_thread ? users_patience_ : workers_patience_);
  const Nanos timeout = operation.timeout > 0 ? operation.timeout : timeout_.load();
  try {
    if (operation.before) operation.before();
    arbiter_->begin(announce(operation, sequence), timeout, in_users_thread);
    wires_->run(operation, arbiter_->current());
    arbiter_->end();
  } catch (const Error&) {
    raised_ = true;
    throw;
  } catch (...) {  // Ctrl-C or another exception in the middle of the operation
    arbiter_->abort("interrupted in operation #" + std::to_string(sequence));
    throw;
  }
  if (operation.after) operation.after();
}

// Validates all operations before the first one runs.
void Group::check(const std::vector<Operation>& operations) const {
  for (const Operation& operation : operations) validate(operation, rank_, size_);
}

bool Group::tryRunHere(const std::vector<Operation>& operations) {
  refuseInChild();
  refuseInside();
  check(operations);
  return executor_->tryRunHere([&] {
    submitted_ += operations.size();
    for (const Operation& operation : operations) execute(operation, /*in_users_thread=*/true);
  });
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
  return executor_->submit(
      [this, operations = std::move(operations)](bool in_users_thread) {
        for (const Operation& operation : operations) execute(operation, in_users_thread);
      },
      std::move(completion));
}

std::shared_ptr<OperationHandle> Group::submit(Operation operation,
                                               Executor::Completion completion) {
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  return submitAll(std::move(operations), std::move(completion));
}

std::shared_ptr<Delivery> Group::post(Message message) {
  refuseInChild();
  return messenger_->post(std::move(message));
}

bool Group::await(Delivery& delivery, Nanos longest) {
  refuseInChild();
  return messenger_->await(delivery, longest, timeout_);
}

void Group::expect(Delivery& delivery) {
  refuseInChild();
  messenger_->expect(delivery, timeout_);
}

bool Group::await(OperationHandle& handle, Nanos longest) {
  refuseInChild();
  if (!handle.isDone()) refuseInside();
  try {
    return handle.wait(longest, options_.interrupt);
  } catch (...) {
    // Ctrl-C.  The caller may free the buffers, and other ranks wait for an operation that this
    // rank will not finish: so the operation ends for all before this returns.
    arbiter_->abort("interrupted while it waited for an operation");
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
  return executor_->isIdle() && messenger_->isIdle();
}

void Group::abort(const std::string& why) {
  refuseInChild();
  arbiter_->abort(why);
  if (local_) local_->abort(why);
}

void Group::checkHealth() const {
  refuseInChild();
  arbiter_->check();
}

std::vector<PeerState> Group::states() const {
  refuseInChild();
  return arbiter_->states();
}

std::vector<int> Group::liveRanks() const {
  const std::vector<PeerState> all = states();
  std::vector<int> live;
  for (int r = 0; r < size_; ++r)
    if (shared_.min_ranks == 0 || r == rank_ ||
        (!arbiter_->isAbsent(r) && all[static_cast<size_t>(r)].isHere()))
      live.push_back(r);
  return live;
}

void Group::fail(Failure kind, int culprit, const std::string& text) {
  refuseInChild();
  arbiter_->fail(kind, culprit, text);
}

void Group::failLost(int rank, const std::string& when) {
  refuseInChild();
  arbiter_->failLost(rank, when);
}

std::vector<int> Group::stopped() const {
  return arbiter_->stoppedOf(otherRanks(rank_, size_));
}

void Group::interrupt(const std::string& doing) {
  if (!options_.interrupt) return;
  try {
    options_.interrupt();
  } catch (...) {
    arbiter_->abort("interrupted " + doing);
    throw;
  }
}

void Group::askForStreams(bool at_once) {
  // The answers need no earlier operations of the group's own.
  network_->askForProgress(at_once ? kNoOperation - 1 : kNoOperation);
}

const HostRing* Group::ring() const {
  return network_ ? &network_->ring() : nullptr;
}

WireCost Group::wireCost() const {
  return network_ ? network_->cost() : WireCost{};
}

std::vector<std::string> Group::routes() const {
  return wires_->routes();
}

size_t Group::stagingBytes() const {
  return wires_->stagingBytes();
}

uint64_t Group::bytesSent() const {
  return wires_->bytesSent();
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
