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
std::vector<RankPage*> pages(const Membership& m) {
  std::vector<RankPage*> all;
  for (int r = 0; r < static_cast<int>(m.members.size()); ++r) all.push_back(&pageOf(m, r));
  return all;
}
// A rank that is lost while it writes in place leaves neither an input nor a result, so groups that
// go on after losses do not; nor do those whose user has chosen an algorithm.
bool sharesTensors(const Membership& m) {
  return !m.options.goesOn() && m.options.algorithm == Algorithm::kAuto;
}

}  // namespace

SharedMemory::SharedMemory(int rank, const Membership& membership, WaitGuard& watch)
    : size_(static_cast<int>(membership.members.size())),
      bytes_(layout(membership).bytes),
      waiter_(pageOf(membership, rank), watch),
      exchange_(rank, exchangeMembers(membership), waiter_, watch),
      to_next_(pipe(membership, rank, (rank + 1) % size_), waiter_),
      from_prev_(pipe(membership, (rank + size_ - 1) % size_, rank), waiter_),
      tensors_(sharesTensors(membership) ? std::make_unique<SharedTensors>(
                                               rank, pages(membership), exchange_, waiter_, watch)
                                         : nullptr),
      communicator_{.rank = rank,
                    .size = size_,
                    .exchange = exchange_,
                    .next = to_next_,
                    .prev = from_prev_,
                    .link_slots = linkSlots(membership, rank),
                    .watch = watch,
                    .algorithm = membership.options.algorithm,
                    .order = membership.options.order,
                    .tensors = tensors_.get()} {}

}  // namespace ringreduce
