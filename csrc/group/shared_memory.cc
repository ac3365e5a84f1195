// Where everything lies in the members' segments.
#include "group/shared_memory.h"

namespace ringreduce {
namespace {

Layout layout(const Membership& m) {
  return Layout(m.options, static_cast<int>(m.members.size()));
}
std::byte* memory(const Membership& m, int r) {
  return m.members[static_cast<size_t>(r)].segment->data();
}
Slots slots(const Membership& m, int r, size_t offset) {
  return {.data = memory(m, r) + offset, .bytes = m.options.slot_bytes, .depth = m.options.slots};
}
Slots linkSlots(const Membership& m, int r) {
  return slots(m, r, layout(m).link);
}
std::vector<Exchange::Member> exchangeMembers(const Membership& m) {
  std::vector<Exchange::Member> members;
  for (int r = 0; r < static_cast<int>(m.members.size()); ++r)
    members.push_back({&SharedMemory::page(m, r), slots(m, r, layout(m).exchange)});
  return members;
}
ShmPipe pipe(const Membership& m, int from, int to) {
  return {from, to, &SharedMemory::page(m, from), &SharedMemory::page(m, to), linkSlots(m, to)};
}

}  // namespace

SharedMemory::SharedMemory(int rank, const Membership& membership, Watch& watch)
    : size_(static_cast<int>(membership.members.size())),
      bytes_(layout(membership).bytes),
      waiter_(page(membership, rank), watch),
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
                    .algorithm = membership.options.algorithm} {}

Page& SharedMemory::page(const Membership& m, int rank) {
  return *reinterpret_cast<Page*>(memory(m, rank));
}

std::vector<Engine::Wire> SharedMemory::channels(const Membership& m, int rank) {
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

}  // namespace ringreduce
