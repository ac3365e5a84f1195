// Who hears from whom over a transport: barriers, ranks that disagree, and a ring of more slices
// than it may have under way.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "collectives/stream_algorithms.h"
#include "stream_cases.h"
#include "stream_moves.h"

namespace stream_cases {

// Nobody returns from a barrier before all have come to it.
inline void checkBarrier(const Over& over, int most_ranks) {
  for (int P = 1; P <= most_ranks; ++P) {
    std::atomic<int> came = 0;
    over(P, {}, [&](Caller& call) {
      for (int round = 1; round <= 20; ++round) {
        came.fetch_add(1, std::memory_order_relaxed);
        call(Barrier{});
        CHECK(came.load(std::memory_order_relaxed) >= P * round);
      }
    });
  }
}

// Runs what must end in a mismatch; others may throw for other reasons in consequence.
inline void checkMismatch(const Over& over, int P, const StreamOptions& options,
                          const std::function<void(Caller&)>& body, const std::string& what) {
  std::atomic<int> found = 0;
  try {
    over(P, options, [&](Caller& caller) {
      try {
        body(caller);
      } catch (const Error& error) {
        if (error.kind() == Failure::kMismatch) ++found;
        throw;
      }
    });
  } catch (const std::runtime_error&) {
    CHECK(found > 0);
    return;
  }
  check::fail(__FILE__, __LINE__, what + ": nobody noticed");
}

// Ranks that disagree find out, also where nothing is to be moved.
inline void checkMeetings(const Over& over, int most_ranks) {
  for (int P = 2; P <= most_ranks; ++P) {
    const auto disagree = [&]<class Call>(const Call& call) {
      for (const StreamOptions& options : everyChoice())
        checkMismatch(
            over, P, options,
            [&](Caller& caller) {
              if (caller.transport.rank() == P - 1)
                caller.lying(call);
              else
                caller(call);
            },
            typeid(Call).name());
    };
    const std::vector<const void*> inputs(at(P));
    const std::vector<void*> outputs(at(P));
    const std::vector<size_t> none(at(P));
    disagree(AllReduce{nullptr, 0, DType::kFloat32, ReduceOp::kSum});
    disagree(Reduce{nullptr, nullptr, 0, DType::kFloat32, ReduceOp::kSum, 0});
    disagree(ReduceScatter{inputs, none, nullptr, DType::kFloat32, ReduceOp::kSum});
    disagree(Broadcast{nullptr, 0, DType::kFloat32, 0});
    disagree(AllGather{nullptr, outputs, none, DType::kFloat32});
    disagree(Gather{nullptr, outputs, 0, DType::kFloat32, 0});
    disagree(Scatter{inputs, nullptr, 0, DType::kFloat32, 0});
    disagree(AllToAll{inputs, outputs, none, none, true, DType::kFloat32});
    disagree(AllToAll{inputs, outputs, none, none, false, DType::kFloat32});
    disagree(Barrier{});
  }
}

// A rank that is sent more, or less, than it expects.
inline void checkUnequalCounts(const Over& over, int most_ranks) {
  for (int P = 2; P <= most_ranks; ++P)
    for (size_t expected : {0, 1, 1000})
      checkMismatch(
          over, P, {},
          [&](Caller& call) {
            std::vector<Bytes> inputs(at(P), Bytes(3)), outputs(at(P), Bytes(1000));
            std::vector<size_t> sent(at(P), 3), received(at(P), 3);
            if (call.transport.rank() == P - 1) received[0] = expected;
            call(AllToAll{pointers<const void*>(inputs), pointers<void*>(outputs), sent, received,
                          false, DType::kUInt8});
          },
          "all_to_all");
}

// The ring with more slices than its window holds, and `buffers` to send from.
inline void checkWindow(const Over& over, int most_ranks, size_t buffers, size_t slices) {
  constexpr size_t kSlice = kChunkElements;
  for (int P = 2; P <= most_ranks; ++P)
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (const Ending ending : {Ending::kEverybody, Ending::kOwner, Ending::kRoot}) {
        Reducing c{P,  dtype, ReduceOp::kAvg, at(P) * slices * kSlice - 1, 5, P / 2, false, {},
                   {}, {}};
        const Cut cut{c.count, P};
        for (int p = 0; p < P; ++p) c.parts.push_back(cut.chunk(p).size);
        c.compute();
        over(P, {}, [&](Caller& call) {
          const int me = call.transport.rank();
          Bytes input = c.addends[at(me)], output(input.size(), kUntouched);
          auto* const from = reinterpret_cast<std::byte*>(input.data());
          auto* const to =
              ending == Ending::kEverybody ? from : reinterpret_cast<std::byte*>(output.data());
          std::vector<RingChunk> chunks;
          for (int p = 0; p < P; ++p) {
            const size_t begin = cut.chunk(p).begin * c.width();
            chunks.push_back({from + begin, to + begin, cut.chunk(p).size});
          }
          call.perform([&](OverStreams& streams) {
            RingCall ring(chunks, dtype, c.op, ending, c.root);
            ring.slice = kSlice;
            ring.slices = slices;
            runStreamRing(streams, ring, buffers);
          });
          const Span mine = cut.chunk(me);
          if (ending == Ending::kOwner)
            c.expect(to + mine.begin * c.width(), c.reduced.data() + mine.begin * c.width(),
                     mine.size, "reduce_scatter in many slices");
          else if (ending == Ending::kEverybody || me == c.root)
            c.expect(to, c.reduced.data(), c.count, "a ring in many slices");
        });
      }
}

}  // namespace stream_cases
