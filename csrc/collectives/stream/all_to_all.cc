// All-to-all over a mesh: each rank sends each other its part, from the next rank on, so that not
// all begin with the same.
//
// Unless all are equally long by agreement, a count goes before each part: it shows if one expects
// something else than another sends.
#include <cstring>

#include "base/copy.h"
#include "collectives/stream/calls.h"

namespace ringreduce {

void allToAll(Mesh& mesh, const AllToAll& a) {
  const int P = mesh.size(), me = mesh.rank();
  const size_t width = sizeOf(a.dtype);
  const auto index = [](int r) { return static_cast<size_t>(r); };
  const auto forEachSource = [&](auto visit) {
    for (int k = 1; k < P; ++k) visit((me + P - k) % P);
  };
  // Before anything leaves: who got its part would take this operation for done.
  if (a.send_counts[index(me)] != a.recv_counts[index(me)])
    mesh.watch().disagree(me, me, a.send_counts[index(me)], a.recv_counts[index(me)]);
  forEachSource([&](int r) {
    if (!a.even) mesh.expect(r, sizeof(uint64_t));
    mesh.expect(r, a.outputs[index(r)], a.recv_counts[index(r)] * width);
  });
  auto* counts = reinterpret_cast<uint64_t*>(mesh.scratch(index(P) * sizeof(uint64_t)));
  for (int k = 1; k < P; ++k) {
    const int r = (me + k) % P;
    counts[r] = a.send_counts[index(r)];
    if (!a.even) mesh.send(r, &counts[r], sizeof(uint64_t));
    mesh.send(r, a.inputs[index(r)], counts[r] * width);
  }
  if (a.outputs[index(me)] != a.inputs[index(me)])
    copyBytes(a.outputs[index(me)], a.inputs[index(me)], a.send_counts[index(me)] * width);
  // All counts first: a part that is too short would be waited for in vain.
  if (!a.even)
    forEachSource([&](int r) {
      uint64_t sent;
      std::memcpy(&sent, mesh.peek(r), sizeof sent);
      mesh.release(r);
      if (sent != a.recv_counts[index(r)])
        mesh.watch().disagree(r, me, sent, a.recv_counts[index(r)]);
    });
  forEachSource([&](int r) {
    mesh.peek(r);
    mesh.release(r);
  });
}

}  // namespace ringreduce
