// The collectives over a mesh that is as hard on them as it may be (stand_in_mesh.h).
#include "mesh_cases.h"
#include "mesh_meetings.h"
#include "mesh_moves.h"
#include "stand_in_mesh.h"

using namespace ringreduce;
using mesh_cases::Caller;
using mesh_cases::kMostRanks;

namespace {

void inMesh(int P, const Mesh::Options& options, const std::function<void(Caller&)>& body,
            stand_in::Hardness hardness = {}) {
  static uint32_t seed = 0;
  hardness.seed = ++seed;
  stand_in::inMesh(
      P, options,
      [&](Mesh& mesh, stand_in::Net& net) {
        Caller call(mesh, [&](const OpSignature& a, const std::function<void(Mesh&)>& run) {
          stand_in::operate(mesh, net, a, run);
        });
        body(call);
      },
      hardness);
}

const auto kInMesh = [](auto... with) { inMesh(with...); };

// What the mesh says of `body`, run by two ranks.
std::string complaint(const std::function<void(Mesh&)>& body) {
  try {
    inMesh(2, {}, [&](Caller& call) { call.perform(body); });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(reductions_of_every_kind) {
  mesh_cases::checkReductions(kInMesh, kMostRanks, 60000);
}

TEST(moves_of_every_kind) {
  mesh_cases::checkMoves(kInMesh, kMostRanks, 50000);
}

TEST(a_barrier_is_one) {
  mesh_cases::checkBarrier(kInMesh, kMostRanks);
}

TEST(ranks_that_disagree_find_out) {
  mesh_cases::checkMeetings(kInMesh, 5);
  mesh_cases::checkUnequalCounts(kInMesh, 4);
}

TEST(a_ring_runs_with_few_buffers) {
  const auto few = [](int P, const Mesh::Options& options, const auto& body) {
    inMesh(P, options, body, {.buffers_out = 6, .buffers_in = 1});
  };
  mesh_cases::checkWindow(few, 6, 6, 23);
}

TEST(the_mesh_is_hard_on_mistakes) {
  const auto other = [](Mesh& mesh) { return 1 - mesh.rank(); };
  CHECK_EQ(complaint([&](Mesh& mesh) {
             int lent = 1, got = 0;
             mesh.send(other(mesh), &lent, sizeof lent);
             {  // The write is the mistake.  The lock keeps it from being a data race too.
               const std::lock_guard lock(stand_in::net->mutex);
               lent = 2;
             }
             mesh.expect(other(mesh), &got, sizeof got);
             mesh.peek(other(mesh));
             mesh.release(other(mesh));
             mesh.finish();
           }),
           "memory was written while it was lent");
  CHECK_EQ(complaint([&](Mesh& mesh) {
             mesh.expect(other(mesh), 1);
             mesh.peek(other(mesh));
           }),
           "deadlock");
  CHECK_EQ(complaint([&](Mesh& mesh) { mesh.expect(other(mesh), 1); }),
           "something was expected and not taken");
}
