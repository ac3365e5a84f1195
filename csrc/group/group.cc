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

  const int size;
  Waiter waiter;
  Exchange exchange;
  ShmSendLink to_next;
  ShmRecvLink from_prev;
  Communicator communicator;

 private:
  static Page& page(const Membership& m, int r) {
    return *reinterpret_cast<Page*>(m.members[static_cast<size_t>(r)].segment->data());
  }
  // A segment holds the page, the exchange's slots, the inbound link's slots (segmentBytes).
  static Slots slots(const Membership& m, int r, int region) {
    std::byte* first =
        m.members[static_cast<size_t>(r)].segment->data() + roundUp(sizeof(Page), 4096);
    const SharedOptions& o = m.options;
    return {
        .data = first + static_cast<size_t>(region) * o.slot_bytes * static_cast<size_t>(o.slots),
        .bytes = o.slot_bytes,
        .depth = o.slots};
  }
  static Slots linkSlots(const Membership& m, int r) { return slots(m, r, 1); }
  static std::vector<Exchange::Member> exchangeMembers(const Membership& m) {
    std::vector<Exchange::Member> members;
    for (int r = 0; r < static_cast<int>(m.members.size()); ++r)
      members.push_back({&page(m, r), slots(m, r, 0)});
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
      executor_(std::make_unique<Executor>()) {}

Group::~Group() {
  if (forkGeneration() != generation_) {
    // The threads and locks of the parent do not exist here, and its memory is not ours to mark.
    (void)executor_.release();
    (void)wires_.release();
    (void)session_.release();
    new Membership(std::move(membership_));
    return;
  }
  executor_->stop();
  std::call_once(departed_, [&] { session_->depart(); });
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
  } catch (const Error&) {
    throw;
  } catch (...) {  // Ctrl-C, or whatever else left the operation half done
    session_->abort("interrupted in operation #" + std::to_string(sequence));
    throw;
  }
  if (operation.after) operation.after();
}

bool Group::tryRunHere(const Operation& operation) {
  refuseInChild();
  refuseInside();
  validate(operation, size_);
  return executor_->tryRunHere([&] {
    ++submitted_;
    execute(operation, /*in_users_thread=*/true);
  });
}

void Group::run(Operation operation) {
  if (tryRunHere(operation)) return;
  const auto ticket = submit(std::move(operation), nullptr);
  await(*ticket, kNever);
  if (ticket->error()) std::rethrow_exception(ticket->error());
}

std::shared_ptr<Ticket> Group::submit(Operation operation, Executor::Completion completion) {
  refuseInChild();
  validate(operation, size_);
  ++submitted_;
  return executor_->submit([this, operation = std::move(operation)](
                               bool in_users_thread) { execute(operation, in_users_thread); },
                           std::move(completion));
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
    executor_->stop(options_.interrupt);
  } catch (...) {  // Ctrl-C while operations are under way that others may never join
    session_->abort("interrupted while it was leaving");
    executor_->stop();
    throw;
  }
  std::call_once(departed_, [&] { session_->depart(); });
}

}  // namespace ringreduce
