// Puts membership, session, wires and executor together.
#include "group/group.h"

#include <unistd.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/error.h"
#include "bootstrap/hosts.h"
#include "bootstrap/named_store.h"
#include "collectives/hierarchy.h"
#include "group/network.h"
#include "group/wires.h"
#include "kernels/reduce.h"

namespace ringreduce {
namespace {

// A caller that blocks has nothing better to do than to look; it spins only where there is a core
// for every rank, and not for long, since the scheduler may have put two ranks on one core all the
// same. The worker runs beside the computation that made its input: yielding would give that a
// whole time slice, so it sleeps at once and is woken.
Patience patienceOf(bool in_users_thread, int world_size) {
  const bool crowded = world_size > coresAvailable();
  if (!in_users_thread) return {.spin = crowded ? 0 : 5 * kMicrosecond, .yield = 0};
  return {.spin = crowded ? 0 : 10 * kMicrosecond, .yield = 200 * kMicrosecond};
}

}  // namespace

std::shared_ptr<Group> Group::createTogether(Store& store, int rank, int world_size,
                                             const GroupOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw Error(Failure::kSetup, "rank " + std::to_string(rank) + " of a group of " +
                                     std::to_string(world_size) + " cannot be");
  instructionSet();  // throws here, before anything is sent, where no kernel can run
  return std::shared_ptr<Group>(new Group(rank, join(store, rank, world_size, options), options));
}

namespace {

// Somebody else's entry was taken for rank 0's.
struct Reconsider {};

// Returns what the hosts know of each other; none if rank 0 was misread, or has given up before it
// heard of this rank.
std::optional<Hosts> meet(Store& store, int rank, int size, const GroupOptions& options,
                          const Apart& apart, Network& network) {
  // Where the meeting has failed, the table says so before the entry does: so it has one more look.
  const auto looking = [&, stale = false]() mutable {
    if (stale) throw Reconsider();
    stale = rank != 0 && isStale(store, apart);
  };
  try {
    return Hosts::meet(
        store, rank, size, options, "", [&](const Hosts& hosts) { return network.open(hosts); },
        looking);
  } catch (const Reconsider&) {
    return std::nullopt;
  } catch (...) {
    if (rank == 0) {
      const Reason reason = reasonOf(std::current_exception(), "rank " + options.shown(0));
      leaveReason(store, apart, reason.kind, reason.text);
    } else {
      noteFailure(apart, rank);
    }
    throw;
  }
}

}  // namespace

std::shared_ptr<Group> Group::create(Store& users_store, int rank, int world_size,
                                     const GroupOptions& options) {
  NamedStore store(users_store, rank, options);
  for (;;) {
    try {
      return createTogether(store, rank, world_size, options);
    } catch (const Apart& apart) {
      auto network = std::make_unique<Network>(options);
      std::optional<Hosts> hosts = meet(store, rank, world_size, options, apart, *network);
      if (!hosts) continue;
      if (rank == 0) removeEntry(store);
      std::shared_ptr<Group> local;
      Membership neighbours;
      network->join(*hosts, store, [&](Store& looking) {
        if (hosts->count() > 1) local = ofHost(*hosts, looking, options);
        if (Hierarchy::fits(*hosts, network->sharedOptions()))
          neighbours = hosts->joinNeighbours(looking, options);
      });
      return std::shared_ptr<Group>(new Group(rank, std::move(network), std::move(*hosts),
                                              std::move(local), std::move(neighbours), options));
    }
  }
}

std::shared_ptr<Group> Group::ofHost(const Hosts& hosts, Store& store,
                                     const GroupOptions& options) {
  PartOfStore own = hosts.part(store, "host");
  return createTogether(own, hosts.placeOf(hosts.rank()),
                        static_cast<int>(hosts.neighbours().size()), hosts.ofNeighbours(options));
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
      session_(std::make_unique<Session>(rank, seatsOf(membership_), options_)),
      wires_(wiresInMemory(rank, membership_, *session_)),
      executor_(std::make_unique<Executor>()),
      messenger_(std::make_unique<Messenger>(rank, messageRings(membership_, rank), *session_,
                                             *executor_, options_, users_patience_)) {}

Group::Group(int rank, std::unique_ptr<Network> network, Hosts hosts, std::shared_ptr<Group> local,
             Membership neighbours, const GroupOptions& options)
    : rank_(rank),
      size_(hosts.size()),
      options_(options),
      generation_(forkGeneration()),
      users_patience_(
          patienceOf(/*in_users_thread=*/true, static_cast<int>(hosts.neighbours().size()))),
      workers_patience_(
          patienceOf(/*in_users_thread=*/false, static_cast<int>(hosts.neighbours().size()))),
      timeout_(options.timeout),
      shared_(network->sharedOptions()),
      membership_(std::move(neighbours)),
      hosts_(std::make_unique<Hosts>(std::move(hosts))),
      network_(std::move(network)),
      local_(std::move(local)),
      session_(std::make_unique<Session>(rank, network_->seats(*hosts_), options_, network_.get())),
      wires_(wiresBetween(*network_, *hosts_, shared_, membership_, *session_)),
      closed_first_(network_.get()),
      executor_(std::make_unique<Executor>()),
      messenger_(std::make_unique<Messenger>(rank, network_->channels(), *session_, *executor_,
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
    (void)session_.release();
    new Membership(std::move(membership_));
    return;
  }
  leave(nullptr);
}

// In this order: no collective is called any more, then no message received, then nothing at all.
void Group::leave(void (*turn)()) {
  executor_->stop(turn);
  messenger_->stop(turn, timeout_);
  if (network_) network_->handOver(turn, timeout_);
  std::call_once(departed_, [&] {
    session_->depart(Departure::kGone);
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
    session_->begin(announce(operation, sequence), timeout, in_users_thread);
    wires_->run(operation, session_->current());
    session_->end();
  } catch (const Error&) {
    raised_ = true;
    throw;
  } catch (...) {  // Ctrl-C, or whatever else left the operation half done
    session_->abort("interrupted in operation #" + std::to_string(sequence));
    throw;
  }
  if (operation.after) operation.after();
}

// All of them before any is run.
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
  const auto ticket = submitAll(std::move(operations), nullptr);
  await(*ticket, kNever);
  if (ticket->error()) std::rethrow_exception(ticket->error());
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

bool Group::await(OperationHandle& ticket, Nanos longest) {
  refuseInChild();
  if (!ticket.isDone()) refuseInside();
  try {
    return ticket.wait(longest, options_.interrupt);
  } catch (...) {
    // Ctrl-C.  Whoever gave up may free the buffers, and others wait for an operation that this
    // rank will not finish: so it ends, for all, before anybody goes on.
    session_->abort("interrupted while it waited for an operation");
    ticket.wait(kNever, nullptr);
    throw;
  }
}

void Group::drain() {
  refuseInChild();
  refuseInside();
  executor_->drain(options_.interrupt);
}

void Group::abort(const std::string& why) {
  refuseInChild();
  session_->abort(why);
  if (local_) local_->abort(why);
}

void Group::checkHealth() const {
  refuseInChild();
  session_->check();
}

std::vector<Presence> Group::presence() const {
  refuseInChild();
  const std::vector<bool> ended = session_->endedProcesses();
  std::vector<Presence> all;
  for (int r = 0; r < size_; ++r) {
    // Of one that shares no memory messages may still be on their way: whoever asks here waits for
    // none of them.
    const PeerState fate = network_ ? session_->stateOf(r) : PeerState::kHere;
    all.push_back(ended[static_cast<size_t>(r)] || fate >= PeerState::kEnded ? Presence::kEnded
                  : fate == PeerState::kLeft || session_->departureOf(r) != Departure::kHere
                      ? Presence::kLeft
                      : Presence::kHere);
  }
  return all;
}

void Group::fail(Failure kind, int culprit, const std::string& text) {
  refuseInChild();
  session_->fail(kind, culprit, text);
}

void Group::failLost(int rank, const std::string& when) {
  const bool ended = presence()[static_cast<size_t>(rank)] == Presence::kEnded;
  session_->fail(
      Failure::kPeerLost, rank,
      who(rank) +
          (ended ? " is lost: " + session_->howLost(rank) : std::string(" has left the group")) +
          " " + when);
}

std::vector<int> Group::stopped() const {
  std::vector<int> others;
  for (int r = 0; r < size_; ++r)
    if (r != rank_) others.push_back(r);
  return session_->stoppedOf(others);
}

std::string Group::howLost(int rank) const {
  return session_->howLost(rank);
}

std::string Group::who(int rank) const {
  return session_->who(rank);
}

std::string Group::whereabouts(const std::vector<int>& ranks) const {
  return session_->whereabouts(ranks);
}

void Group::interrupt(const std::string& doing) {
  if (!options_.interrupt) return;
  try {
    options_.interrupt();
  } catch (...) {
    session_->abort("interrupted " + doing);
    throw;
  }
}

void Group::publishProgress(const StreamProgress& own) {
  network_->publishProgress(own);
}

std::pair<StreamProgress, Nanos> Group::progressOf(int rank) const {
  return network_->progressOf(rank);
}

void Group::askProgress(bool at_once) {
  // The answers need no earlier operations of the group's own.
  network_->ask(at_once ? kNoOperation - 1 : kNoOperation);
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
  if (forkGeneration() != generation_) return;  // the parent's to do
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
