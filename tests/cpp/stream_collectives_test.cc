// The collectives over a mesh of TCP connections against what they must give, which is what shared
// memory gives.
#include "collectives/stream_primitives.h"
#include "mesh_cases.h"
#include "mesh_meetings.h"
#include "mesh_moves.h"
#include "mesh_world.h"
#include "ranks.h"

using namespace ringreduce;
using mesh_cases::Caller;
using mesh_cases::kMostRanks;
using mesh_world::OneRank;

namespace {

void inMesh(int P, const Mesh::Options& options, const std::function<void(Caller&)>& body) {
  mesh_world::inMesh(
      P,
      [&](OneRank& one) {
        Caller call(one.mesh(), [&](const OpSignature& a, const std::function<void(Mesh&)>& run) {
          one.operation(run, a.kind, a.count);
        });
        body(call);
      },
      options);
}

}  // namespace

TEST(reductions_of_every_kind) {
  mesh_cases::checkReductions(inMesh, kMostRanks, 60000);
}

TEST(moves_of_every_kind) {
  mesh_cases::checkMoves(inMesh, kMostRanks, 50000);
}

TEST(a_barrier_is_one) {
  mesh_cases::checkBarrier(inMesh, kMostRanks);
}

TEST(ranks_that_disagree_find_out) {
  mesh_cases::checkMeetings(inMesh, 4);
  mesh_cases::checkUnequalCounts(inMesh, 3);
}

TEST(a_ring_of_more_slices_than_buffers) {
  mesh_cases::checkWindow(inMesh, 4, Mesh::window(), 300);
}

TEST(a_window_is_bounded_by_what_the_whole_ring_has_under_way) {
  CHECK_EQ(meshWindow(1000, 4, 256), 127u);
  CHECK_EQ(meshWindow(100, 4, 256), 100u);
  for (const int ranks : {16, 100, 1000, 16'000}) {
    const size_t window = meshWindow(1000, ranks, 256);
    CHECK(window >= 1 &&
          window * static_cast<size_t>(ranks) <=
              std::max<size_t>(kMostUnderWay / net::kPieceBytes, static_cast<size_t>(ranks)));
  }
}

TEST(shared_memory_gives_the_same_bits) {
  for (int P : {2, 3, 5}) {
    const auto cases = mesh_cases::reductions(P, static_cast<uint32_t>(P), 60000);
    ranks::inGroup(P, [&](Group& group) {
      for (const mesh_cases::Reducing& c : cases) {
        mesh_cases::Bytes data = c.addends[mesh_cases::at(group.rank())];
        group.run({AllReduce{data.data(), c.count, c.dtype, c.op, c.factor(group.rank())}});
        c.expect(data.data(), c.reduced.data(), c.count, "all_reduce in shared memory");
      }
    });
  }
}
