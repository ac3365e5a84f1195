// All-to-all.
//
// Shared memory: each rank shares its slots out between the others.  The number of slices depends
// on the longest message between any two ranks.  If all messages are equally long and all ranks'
// inputs are shared, each rank copies its parts from there.
// Streams: each rank sends each other its part, beginning with the next rank, so that the ranks do
// not all begin with the same one.
//
// Unless all messages are equally long by agreement, the ranks exchange their counts first.  That
// also finds a rank that expects another number of elements than it is sent.
#include <algorithm>
#include <cstring>

#include "algorithm/cut.h"
#include "base/bytes.h"
#include "base/stream_copy.h"
#include "collectives/collectives.h"
#include "collectives/over_streams.h"
#include "collectives/shared_memory.h"

namespace ringreduce {

std::string AllToAll::problem(int world_size) const {
  if (std::string wrong = wrongLength("send counts", send_counts.size(), world_size);
      !wrong.empty())
    return wrong;
  if (std::string wrong = wrongLength("receive counts", recv_counts.size(), world_size);
      !wrong.empty())
    return wrong;
  const auto equal = [&](size_t n) { return n == send_counts[0]; };
  if (even && !(std::ranges::all_of(send_counts, equal) && std::ranges::all_of(recv_counts, equal)))
    return "called even, but not all counts are equal";
  return "";
}

// Uneven counts are compared while it runs.
void AllToAll::sign(OpSignature& signature) const {
  if (even) signature.setParts(send_counts);
  signature.parts = even ? 0 : 1;
}

void AllToAll::reorder(const std::vector<int>& ranks) {
  reorderList(send_counts, ranks);
  reorderList(recv_counts, ranks);
}

// ---- over shared memory

SharedData AllToAll::shared(int) const {
  if (!even) return {};  // a rank does not know where the others' parts begin
  return inOnePiece(inputs, send_counts, sizeOf(dtype));
}

namespace {

// The elements of the longest message.  Throws if a rank sends another count than its receiver
// expects.
uint64_t agreeOnLongest(OverMemory& c, const AllToAll& a) {
  const auto P = static_cast<size_t>(c.size);
  const std::vector<uint64_t> mine(a.send_counts.begin(), a.send_counts.end());
  std::vector<uint64_t> all(P * P);  // [from][to]
  AllGather rows{.input = mine.data(), .dtype = DType::kUInt64};
  for (size_t r = 0; r < P; ++r) rows.outputs.push_back(&all[r * P]);
  rows.counts.assign(P, P);
  allGather(c, rows);
  for (size_t r = 0; r < P; ++r) {
    const uint64_t sent = all[r * P + static_cast<size_t>(c.rank)];
    if (sent != a.recv_counts[r])
      c.watch.disagree(static_cast<int>(r), c.rank, sent, a.recv_counts[r]);
  }
  return *std::max_element(all.begin(), all.end());
}

}  // namespace

void allToAll(OverMemory& c, const AllToAll& a) {
  Exchange& exchange = c.exchange;
  const size_t width = sizeOf(a.dtype);
  const auto index = [](int r) { return static_cast<size_t>(r); };
  const auto outgoing = [&](int r) { return static_cast<const std::byte*>(a.inputs[index(r)]); };
  const auto incoming = [&](int r) { return static_cast<std::byte*>(a.outputs[index(r)]); };
  const auto from_their_tensors = [&](const std::vector<std::byte*>& data) {
    const size_t bytes = a.send_counts[0] * width;
    const Copy copy = copyFor(index(c.size) * bytes);
    for (int k = 0; k < c.size; ++k) {
      const int r = (c.rank + k) % c.size;
      copy(incoming(r), data[index(r)] + index(c.rank) * bytes, bytes);
    }
  };
  if (inPlace(c, from_their_tensors)) return;
  const uint64_t longest = a.even ? a.send_counts[0] : agreeOnLongest(c, a);

  const Parts parts(c, width);
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(longest, parts.elements()));
  const uint64_t first = exchange.begin(slices);
  const auto fill = [&](uint64_t j) {
    std::byte* slot = exchange.acquire(first + j);
    for (int k = 1; k < c.size; ++k) {
      const int r = (c.rank + k) % c.size;
      const Span s = piece(a.send_counts[index(r)], parts.elements(), j);
      copyBytes(parts.outgoing(slot, r), outgoing(r) + s.begin * width, s.size * width);
    }
    exchange.post(first + j);
  };
  pipeline(exchange, slices, fill, [&](uint64_t j) {
    const Span own = piece(a.send_counts[index(c.rank)], parts.elements(), j);
    if (incoming(c.rank) != outgoing(c.rank))
      copyBytes(incoming(c.rank) + own.begin * width, outgoing(c.rank) + own.begin * width,
                own.size * width);
    for (int k = 1; k < c.size; ++k) {
      const int r = (c.rank + k) % c.size;
      const Span s = piece(a.recv_counts[index(r)], parts.elements(), j);
      copyBytes(incoming(r) + s.begin * width, parts.incoming(exchange.peek(r, first + j), r),
                s.size * width);
    }
    exchange.release(first + j);
  });
}

// ---- over streams

void allToAll(OverStreams& c, const AllToAll& a) {
  const int P = c.size, me = c.rank;
  const size_t width = sizeOf(a.dtype);
  const auto index = [](int r) { return static_cast<size_t>(r); };
  const auto forEachSource = [&](auto visit) {
    for (int k = 1; k < P; ++k) visit((me + P - k) % P);
  };
  // Before anything is sent: a rank that got its part would take this operation as done.
  if (a.send_counts[index(me)] != a.recv_counts[index(me)])
    c.watch.disagree(me, me, a.send_counts[index(me)], a.recv_counts[index(me)]);
  forEachSource([&](int r) {
    if (!a.even) c.transport.expect(r, sizeof(uint64_t));
    c.transport.expect(r, a.outputs[index(r)], a.recv_counts[index(r)] * width);
  });
  auto* counts = reinterpret_cast<uint64_t*>(c.scratch(index(P) * sizeof(uint64_t)));
  for (int k = 1; k < P; ++k) {
    const int r = (me + k) % P;
    counts[r] = a.send_counts[index(r)];
    if (!a.even) c.transport.send(r, &counts[r], sizeof(uint64_t));
    c.transport.send(r, a.inputs[index(r)], counts[r] * width);
  }
  if (a.outputs[index(me)] != a.inputs[index(me)])
    copyBytes(a.outputs[index(me)], a.inputs[index(me)], a.send_counts[index(me)] * width);
  // All counts first: a part that is too short would be waited for in vain.
  if (!a.even)
    forEachSource([&](int r) {
      uint64_t sent;
      std::memcpy(&sent, c.transport.peek(r), sizeof sent);
      c.transport.release(r);
      if (sent != a.recv_counts[index(r)]) c.watch.disagree(r, me, sent, a.recv_counts[index(r)]);
    });
  forEachSource([&](int r) {
    c.transport.peek(r);
    c.transport.release(r);
  });
}

}  // namespace ringreduce
