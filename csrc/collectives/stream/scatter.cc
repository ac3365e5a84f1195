// Scatter over a mesh: the root sends to each rank, all at once.
#include "base/copy.h"
#include "collectives/stream/calls.h"

namespace ringreduce {

void scatter(Mesh& mesh, const Scatter& s) {
  const size_t bytes = s.count * sizeOf(s.dtype);
  if (mesh.rank() != s.root) {
    mesh.expect(s.root, s.output, bytes);
    mesh.peek(s.root);
    mesh.release(s.root);
    return;
  }
  const auto input = [&](int r) { return s.inputs[static_cast<size_t>(r)]; };
  for (int k = 1; k < mesh.size(); ++k) {
    const int r = (s.root + k) % mesh.size();
    mesh.send(r, input(r), bytes);
  }
  if (s.output != input(s.root)) copyBytes(s.output, input(s.root), bytes);
}

}  // namespace ringreduce
