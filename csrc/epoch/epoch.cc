// Puts host memory, arbiter, wires and messages of the same ranks together.
#include "epoch/epoch.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "bootstrap/host_links.h"
#include "bootstrap/rendezvous.h"
#include "collectives/hierarchy.h"
#include "control/control_frames.h"
#include "epoch/network.h"
#include "epoch/wires.h"
#include "health/shared_view.h"

namespace ringreduce {
namespace {

// A blocking caller spins if there is a core for every rank, but not for long, since the scheduler
// may still put two ranks on one core.  The worker runs beside the computation that made its input,
// and yielding would give the computation a whole time slice, so the worker sleeps soon.
Patience patienceOf(bool in_users_thread, size_t ranks_here) {
  const bool crowded = static_cast<int>(ranks_here) > coresAvailable();
  if (!in_users_thread) return {.spin = crowded ? 0 : 5 * kMicrosecond, .yield = 0};
  return {.spin = crowded ? 0 : 10 * kMicrosecond, .yield = 200 * kMicrosecond};
}

// What the ranks of this host share for the hierarchy and for their pipes; empty where they use
// sockets, the same for all of them.
HostMemory memoryForWires(const Hosts& hosts, const SharedOptions& shared, SharedOptions here,
                          const GroupOptions& options, const HostLinks::LocalPoll& poll) {
  if (shared.sockets || hosts.count() == 1 || hosts.localRanks().size() == 1) return {};
  const bool has_hierarchy = Hierarchy::fits(hosts, shared);
  if (!has_hierarchy) here.slots = 0;
  LocalRanks ranks = hosts.memoryExchange("wires", here, options);
  ranks.pipes = true;
  ranks.optional = !has_hierarchy;
  try {
    return shareMemory(ranks, poll);
  } catch (const MemoryRefused& error) {
    if (hosts.localRankOf(hosts.rank()) == 0)
      log("group '" + options.name + "': " + options.rankList(hosts.localRanks()) +
          " use sockets to each other, which is slower than memory: " + error.what());
    return {};
  }
}

}  // namespace

std::shared_ptr<Epoch> Epoch::create(Store& users_store, int group_rank, int group_size,
                                     const GroupOptions& group_options, Executor& executor,
                                     const MakeLocal& make_local) {
  const RankMap ranks(group_options.members, group_size);
  const auto position = ranks.positionOf(group_rank);
  if (!position)
    throw Error(Failure::kSetup, "rank " + std::to_string(group_rank) + " of a group of " +
                                     std::to_string(group_size) + " cannot be");
  const int rank = *position;
  const GroupOptions options = group_options.ofMembers(ranks.ranks(), group_size);
  NamedStore store(users_store, rank, options);
  auto links = std::make_unique<HostLinks>(options);
  Rendezvous met = rendezvous(store, rank, static_cast<int>(ranks.ranks().size()), options,
                              [&](const Hosts& hosts) { return links->open(hosts); });
  GroupOptions made = options;
  made.attempt = nullptr;  // it ends with this call
  made.meeting = met.id;
  if (!met.hosts) return std::make_shared<Epoch>(rank, std::move(met.host_memory), made, executor);

  const Hosts& hosts = *met.hosts;
  HostMemory local_memory;
  const auto makeLocal = [&](const HostLinks::LocalPoll& poll) {
    const SharedOptions& shared = links->sharedOptions();
    const SharedOptions here = HostLinks::localOptions(hosts);
    if (hosts.count() > 1 && !shared.goesOn()) {
      GroupOptions local_options = made.ofRanks(hosts.localRanks());
      local_options.together = true;
      make_local(hosts.localRankOf(rank),
                 shareMemory(hosts.memoryExchange("group", here, options), poll), local_options);
    }
    local_memory = memoryForWires(hosts, shared, here, options, poll);
  };
  try {
    links->join(hosts, store, makeLocal);
  } catch (...) {
    if (const auto& failure = links->failureOfLastRound()) {
      // A rank that still waits for the token does not take the heartbeat for one.
      const std::string frames = net::encode(net::Heartbeat{}) + net::encode(*failure);
      for (net::Socket* neighbour : links->neighbours())
        if (*neighbour) neighbour->send(frames.data(), frames.size());
    }
    links->leave(store);
    throw;
  }
  if (rank == 0) removeTable(store);
  auto network = std::make_unique<Network>(std::move(links));
  return std::shared_ptr<Epoch>(new Epoch(rank, std::move(network), std::move(*met.hosts),
                                          std::move(local_memory), made, executor));
}

Epoch::Epoch(int rank, HostMemory host_memory, const GroupOptions& options, Executor& executor)
    : rank(rank),
      size(static_cast<int>(host_memory.members.size())),
      options(options),
      ranks(options.members, size),
      users_patience_(patienceOf(/*in_users_thread=*/true, host_memory.members.size())),
      workers_patience_(patienceOf(/*in_users_thread=*/false, host_memory.members.size())),
      shared(host_memory.options),
      host_memory_(std::move(host_memory)),
      arbiter(std::make_unique<Arbiter>(
          std::make_unique<SharedView>(rank, seatsOf(host_memory_), this->options, shared.goesOn()),
          shared.goesOn() ? AfterLoss::kIsAbsent : AfterLoss::kFails, shared.min_ranks)),
      wires(wiresInMemory(rank, host_memory_, *arbiter)),
      messenger(std::make_unique<Messenger>(rank, messageRings(host_memory_, rank), *arbiter,
                                            executor, this->options, users_patience_)) {}

Epoch::Epoch(int rank, std::unique_ptr<Network> made, Hosts among, HostMemory local_memory,
             const GroupOptions& options, Executor& executor)
    : rank(rank),
      size(among.size()),
      options(options),
      ranks(options.members, size),
      users_patience_(patienceOf(/*in_users_thread=*/true, among.localRanks().size())),
      workers_patience_(patienceOf(/*in_users_thread=*/false, among.localRanks().size())),
      shared(made->sharedOptions()),
      host_memory_(std::move(local_memory)),
      hosts(std::make_unique<Hosts>(std::move(among))),
      network(std::move(made)),
      arbiter(std::make_unique<Arbiter>(
          network->view(*hosts, host_memory_, this->options),
          shared.goesOn() ? AfterLoss::kNeedsEpoch : AfterLoss::kFails, shared.min_ranks)),
      wires(wiresBetween(*network, *hosts, shared, host_memory_, *arbiter)),
      closed_first_(network.get()),
      messenger(std::make_unique<Messenger>(rank, network->channels(*hosts, host_memory_), *arbiter,
                                            executor, this->options, users_patience_)) {}

Epoch::~Epoch() {
  retire();  // if it has not left
}

void Epoch::Closes::operator()(Network* network) const {
  network->close();
}

void Epoch::run(const Operation& operation, Nanos timeout, bool in_users_thread,
                Recording* recording) {
  const uint64_t sequence = sequence_++;
  wires->setPatience(in_users_thread ? users_patience_ : workers_patience_);
  const OpSignature signature = signatureOf(operation, sequence);
  if (recording) recording->describe(signature, ranks);
  try {
    if (operation.before) operation.before();
    wires->prepare(operation, sequence);
    Inherited why;
    if (recording) {
      const Nanos called = operation.posted > 0 ? operation.posted : kNever;
      recording->record.why = recording->recorder.reason(called);
      why = recording->record.why.told;
    }
    arbiter->begin(signature, timeout, in_users_thread, why);
    if (recording) recording->begin(arbiter->started());
    wires->run(operation, arbiter->current());
    arbiter->end();
  } catch (const Error&) {
    note(recording);
    throw;
  } catch (...) {  // Ctrl-C or another exception in the middle of the operation
    arbiter->abort("interrupted in operation #" + std::to_string(sequence));
    note(recording);
    throw;
  }
  note(recording);
}

void Epoch::note(Recording* recording) const {
  if (!recording || recording->record.arrived == 0) return;  // it did not begin
  OpRecord& record = recording->record;
  const Way way = wires->way();
  record.algorithm = way.algorithm;
  record.in_place = way.in_place;
  record.first_data = arbiter->firstData();
  record.clock_error = arbiter->arrivalError();
  recording->recorder.setArrivals(record, arbiter->arrivals(), ranks,
                                  [this](int position) { return arbiter->whyLate(position); });
}

const HostRing* Epoch::ring() const {
  return network ? &network->ring() : nullptr;
}

WireCost Epoch::wireCost() const {
  return wires->cost();
}

bool Epoch::usesTensorsInPlace() const {
  return size > 1 && wires->usesTensorsInPlace();
}

void Epoch::askForStreams(bool at_once) {
  // The answers need no earlier operations of the group's own.
  network->askForProgress(at_once ? kNoOperation - 1 : kNoOperation);
}

// In this order: no message is received any more, then nothing at all.
void Epoch::leave(void (*poll)(), Nanos timeout) {
  messenger->stop(poll, timeout);
  if (network) network->handOver(poll, timeout);
  std::call_once(departed_, [&] {
    if (network) network->leaveWithin(timeout);
    peers().depart(Declared::kGone);
    if (network) network->leave();
    wires->close();
  });
}

void Epoch::retire() {
  messenger->stop(nullptr, 0);
  std::call_once(departed_, [&] {
    if (network) network->close();
    wires->close();
  });
}

}  // namespace ringreduce
