// Puts membership, session, wires and executor together.
#include "group/group.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "base/align.h"
#include "base/error.h"
#include "reduce/reduce.h"
#include "wire/shm_link.h"

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

// The wires of one rank.  Links point at pages and slots in the members' segments.
struct Group::Wires {
  Wires(int rank, const Membership& membership, Session& session)
      : size(static_cast<int>(membership.members.size())),
        waiter(page(membership, rank), session),
        exchange(rank, exchangeMembers(membership), waiter, session),
        to_next(pipe(membership, rank, (rank + 1) % size), waiter),
        from_prev(pipe(membership, (rank + size - 1) % size, rank), waiter),
        communicator{.rank = rank,
                     .size = size,
                     .exchange = exchange,
                     .next = to_next,
                     .prev = from_prev,
                     .link_slots = linkSlots(membership, rank),
                     .watch = session,
                     .algorithm = membership.options.algorithm} {}

  // What rank `rank` sends messages to each rank with, and receives them by.
  static std::vector<Engine::Wire> channels(const Membership& m, int rank) {
    const Layout at = layout(m);
    // What rank `of` keeps for rank `peer`.
    const auto box = [&](int of, int peer) -> Box& {
      return reinterpret_cast<Box*>(memory(m, of) + at.boxes)[peer];
    };
    const auto ring = [&](int of, int peer) {
      return memory(m, of) + at.rings + static_cast<size_t>(peer) * kRingBytes;
    };
    std::vector<Engine::Wire> wires;
    for (int r = 0; r < static_cast<int>(m.members.size()); ++r)
      wires.push_back({.out = {ring(r, rank), box(r, rank).filled, box(rank, r).emptied},
                       .in = {ring(rank, r), box(rank, r).filled, box(r, rank).emptied},
                       .consumed = &box(r, rank).consumed,
                       .acknowledged = &box(rank, r).consumed});
    return wires;
  }

  const int size;
  Waiter waiter;
  Exchange exchange;
  ShmSendLink to_next;
  ShmRecvLink from_prev;
  Communicator communicator;

 private:
  static Page& page(const Membership& m, int r) { return *reinterpret_cast<Page*>(memory(m, r)); }
  static std::byte* memory(const Membership& m, int r) {
    return m.members[static_cast<size_t>(r)].segment->data();
  }
  static Layout layout(const Membership& m) {
    return Layout(m.options, static_cast<int>(m.members.size()));
  }
  static Slots slots(const Membership& m, int r, size_t offset) {
    return {.data = memory(m, r) + offset, .bytes = m.options.slot_bytes, .depth = m.options.slots};
  }
  static Slots linkSlots(const Membership& m, int r) { return slots(m, r, layout(m).link); }
  static std::vector<Exchange::Member> exchangeMembers(const Membership& m) {
    std::vector<Exchange::Member> members;
    for (int r = 0; r < static_cast<int>(m.members.size()); ++r)
      members.push_back({&page(m, r), slots(m, r, layout(m).exchange)});
    return members;
  }
  static ShmPipe pipe(const Membership& m, int from, int to) {
    return {from, to, &page(m, from), &page(m, to), linkSlots(m, to)};
  }
};

std::shared_ptr<Group> Group::create(Store& store, int rank, int world_size,
                                     const GroupOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw Error(Failure::kSetup, "rank " + std::to_string(rank) + " of a group of " +
                                     std::to_string(world_size) + " cannot be");
  instructionSet();  // throws here, before anything is sent, where no kernel can run
  return std::shared_ptr<Group>(new Group(rank, join(store, rank, world_size, options), options));
}

Group::Group(int rank, Membership membership, const GroupOptions& options)
    : rank_(rank),
      size_(static_cast<int>(membership.members.size())),
      options_(options),
      generation_(forkGeneration()),
      users_patience_(patienceOf(/*in_users_thread=*/true, size_)),
      workers_patience_(patienceOf(/*in_users_thread=*/false, size_)),
      timeout_(options.timeout),
      membership_(std::move(membership)),
      session_(std::make_unique<Session>(rank, membership_, options_)),
      wires_(std::make_unique<Wires>(rank, membership_, *session_)),
      executor_(std::make_unique<Executor>()),
      messenger_(std::make_unique<Messenger>(rank, Wires::channels(membership_, rank), *session_,
                                             *executor_, options_, users_patience_)) {}

Group::~Group() {
  if (forkGeneration() != generation_) {
    // The threads and locks of the parent do not exist here, and its memory is not ours to mark.
    (void)messenger_.release();
    (void)executor_.release();
    (void)wires_.release();
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
  std::call_once(departed_, [&] { session_->depart(Departure::kGone); });
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
  wires_->waiter.setPatience(in_users_thread ? users_patience_ : workers_patience_);
  const Nanos timeout = operation.timeout > 0 ? operation.timeout : timeout_.load();
  try {
    session_->begin(announce(operation, sequence), timeout, in_users_thread);
    ringreduce::run(wires_->communicator, operation);
    session_->end();
  } catch (const Error&) {
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

std::shared_ptr<Ticket> Group::submitAll(std::vector<Operation> operations,
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

std::shared_ptr<Ticket> Group::submit(Operation operation, Executor::Completion completion) {
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

bool Group::await(Ticket& ticket, Nanos longest) {
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
}

void Group::shutdown() {
  if (forkGeneration() != generation_) return;  // the parent's to do
  if (executor_->runsInThisThread()) {
    // A signal handler that ran while an operation waits below us on this thread's stack.  That
    // operation ends with this error; the rest is done by the destructor.
    session_->abort("destroyed by a signal handler in the midst of an operation");
    return;
  }
  try {
    leave(options_.interrupt);
  } catch (...) {  // Ctrl-C while operations are under way that others may never join
    session_->abort("interrupted while it was leaving");
    leave(nullptr);
    throw;
  }
}

}  // namespace ringreduce
