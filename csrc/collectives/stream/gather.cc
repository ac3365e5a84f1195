// Gather over a mesh: each rank sends to the root, all at once.
#include "base/copy.h"
#include "collectives/stream/calls.h"

namespace ringreduce {

void gather(Mesh& mesh, const Gather& g) {
  const size_t bytes = g.count * sizeOf(g.dtype);
  if (mesh.rank() != g.root) return mesh.send(g.root, g.input, bytes);
  const auto output = [&](int r) { return g.outputs[static_cast<size_t>(r)]; };
  for (int r = 0; r < mesh.size(); ++r)
    if (r != g.root) mesh.expect(r, output(r), bytes);
  if (output(g.root) != g.input) copyBytes(output(g.root), g.input, bytes);
  for (int r = 0; r < mesh.size(); ++r) {
    if (r == g.root) continue;
    mesh.peek(r);
    mesh.release(r);
  }
}

}  // namespace ringreduce
