// Barrier over a mesh: in hop k a rank tells the rank 2^k after it that it has come, and all of
// whom it has heard.  Source: Hensgen, Finkel and Manber, "Two algorithms for barrier
// synchronization" (1988).
#include "collectives/stream/calls.h"

namespace ringreduce {

void barrier(Mesh& mesh, const Barrier&) {
  static constexpr std::byte kHere{1};
  const int P = mesh.size();
  for (int distance = 1; distance < P; distance *= 2) {
    const int from = (mesh.rank() + P - distance) % P;
    mesh.expect(from, 1);
    mesh.send((mesh.rank() + distance) % P, &kHere, 1);
    mesh.peek(from);
    mesh.release(from);
  }
}

}  // namespace ringreduce
