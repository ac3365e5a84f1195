// The places of pages and slots in the members' segments.
#include "collectives/shared_memory.h"

namespace ringreduce {
namespace {

Layout layout(const HostMemory& m) {
  return Layout(m.options, static_cast<int>(m.members.size()));
}
Slots slots(const HostMemory& m, int r, size_t offset) {
  return {.data = memoryOf(m, r) + offset, .bytes = m.options.slot_bytes, .depth = m.options.slots};
}
Slots linkSlots(const HostMemory& m, int r) {
  return slots(m, r, layout(m).link);
}
std::vector<Exchange::Member> exchangeMembers(const HostMemory& m) {
  std::vector<Exchange::Member> members;
  for (int r = 0; r < static_cast<int>(m.members.size()); ++r)
    members.push_back({&pageOf(m, r), slots(m, r, layout(m).exchange)});
  return members;
}
ShmPipe pipe(const HostMemory& m, int from, int to) {
  return {from, to, &pageOf(m, from), &pageOf(m, to), linkSlots(m, to)};
}
std::vector<RankPage*> pages(const HostMemory& m) {
  std::vector<RankPage*> all;
  for (int r = 0; r < static_cast<int>(m.members.size()); ++r) all.push_back(&pageOf(m, r));
  return all;
}
// A rank that is lost while it writes in place leaves neither an input nor a result, so groups that
// go on after losses do not; nor do those whose user has chosen an algorithm.
bool sharesTensors(const HostMemory& m) {
  return !m.options.goesOn() && m.options.algorithm == Algorithm::kAuto;
}

}  // namespace

SharedMemory::SharedMemory(int rank, const HostMemory& host_memory, WaitGuard& watch)
    : size_(static_cast<int>(host_memory.members.size())),
      bytes_(layout(host_memory).bytes),
      waiter_(pageOf(host_memory, rank), watch),
      exchange_(rank, exchangeMembers(host_memory), waiter_, watch),
      to_next_(pipe(host_memory, rank, (rank + 1) % size_), waiter_),
      from_prev_(pipe(host_memory, (rank + size_ - 1) % size_, rank), waiter_),
      tensors_(sharesTensors(host_memory) ? std::make_unique<SharedTensors>(
                                                rank, pages(host_memory), exchange_, waiter_, watch)
                                          : nullptr),
      over_{.rank = rank,
            .size = size_,
            .exchange = exchange_,
            .next = to_next_,
            .prev = from_prev_,
            .link_slots = linkSlots(host_memory, rank),
            .watch = watch,
            .algorithm = host_memory.options.algorithm,
            .order = host_memory.options.order,
            .tensors = tensors_.get()} {}

}  // namespace ringreduce
