// Where each ring and its box lie in the members' segments.
#include "p2p/message_rings.h"

namespace ringreduce {

std::vector<Engine::Wire> messageRings(const Membership& m, int rank) {
  const Layout at(m.options, static_cast<int>(m.members.size()));
  // What rank `of` keeps for rank `peer`.
  const auto box = [&](int of, int peer) -> Box& {
    return reinterpret_cast<Box*>(memoryOf(m, of) + at.boxes)[peer];
  };
  const auto ring = [&](int of, int peer) {
    return memoryOf(m, of) + at.rings + static_cast<size_t>(peer) * kRingBytes;
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
