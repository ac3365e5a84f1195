// The places of pages and slots in the members' segments.
#include "collectives/shared_memory.h"

namespace ringreduce {
namespace {

Layout layout(const Membership& m) {
  return Layout(m.options, static_cast<int>(m.members.size()));
}
Slots slots(const Membership& m, int r, size_t offset) {
  return {.data = memoryOf(m, r) + offset, .bytes = m.options.slot_bytes, .depth = m.options.slots};
}
Slots linkSlots(const Membership& m, int r) {
  return slots(m, r, layout(m).link);
}
std::vector<Exchange::Member> exchangeMembers(const Membership& m) {
  std::vector<Exchange::Member> members;
  for (int r = 0; r < static_cast<int>(m.members.size()); ++r)
    members.push_back({&pageOf(m, r), slots(m, r, layout(m).exchange)});
  return members;
}
ShmPipe pipe(const Membership& m, int from, int to) {
  return {from, to, &pageOf(m, from), &pageOf(m, to), linkSlots(m, to)};
}

}  // namespace

SharedMemory::SharedMemory(int rank, const Membership& membership, WaitGuard& watch)
    : size_(static_cast<int>(membership.members.size())),
      bytes_(layout(membership).bytes),
      waiter_(pageOf(membership, rank), watch),
      exchange_(rank, exchangeMembers(membership), waiter_, watch),
      to_next_(pipe(membership, rank, (rank + 1) % size_), waiter_),
      from_prev_(pipe(membership, (rank + size_ - 1) % size_, rank), waiter_),
      communicator_{.rank = rank,
                    .size = size_,
                    .exchange = exchange_,
                    .next = to_next_,
                    .prev = from_prev_,
                    .link_slots = linkSlots(membership, rank),
                    .watch = watch,
                    .algorithm = membership.options.algorithm,
                    .order = membership.options.order} {}

}  // namespace ringreduce
