// The calls that only move, over a transport: what they are given, and what must come of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "stream_cases.h"

namespace stream_cases {

// `n` bytes that tell who sent them to whom.
inline Bytes letter(int from, int to, size_t n) {
  Bytes bytes(n);
  for (size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<unsigned char>(i * 7 + i / 251 + at(from) * 31 + at(to) * 5 + 1);
  return bytes;
}

template <class Pointer>
std::vector<Pointer> pointers(std::vector<Bytes>& parts) {
  std::vector<Pointer> all;
  for (Bytes& part : parts) all.push_back(part.data());
  return all;
}

inline void checkBroadcast(Caller& call, DType dtype, size_t n, int root) {
  const Bytes wanted = letter(root, 0, n * sizeOf(dtype));
  Bytes data = call.transport.rank() == root ? wanted : Bytes(wanted.size(), kUntouched);
  call(Broadcast{data.data(), n, dtype, root});
  CHECK(data == wanted);
}

inline void checkAllGather(Caller& call, DType dtype, const std::vector<size_t>& counts,
                           bool in_place, bool flat) {
  const int P = call.transport.size(), me = call.transport.rank();
  std::vector<Bytes> outputs, wanted;
  size_t total = 0;
  for (int r = 0; r < P; ++r) {
    wanted.push_back(letter(r, 0, counts[at(r)] * sizeOf(dtype)));
    outputs.emplace_back(wanted.back().size(), kUntouched);
    total += wanted.back().size();
  }
  Bytes input = wanted[at(me)], one_after_the_other(total, kUntouched);
  AllGather gather{input.data(), pointers<void*>(outputs), counts, dtype};
  if (flat) {
    unsigned char* to = one_after_the_other.data();
    for (int r = 0; r < P; to += wanted[at(r++)].size()) gather.outputs[at(r)] = to;
    if (in_place) {
      if (total > 0) std::memcpy(gather.outputs[at(me)], input.data(), input.size());
      gather.input = gather.outputs[at(me)];
    }
  } else if (in_place) {
    gather.outputs[at(me)] = input.data();
  }
  call(gather);
  CHECK(input == wanted[at(me)]);
  for (int r = 0; r < P; ++r)
    CHECK(std::equal(wanted[at(r)].begin(), wanted[at(r)].end(),
                     static_cast<unsigned char*>(gather.outputs[at(r)])));

  // The same where each knows its own count only.
  for (Bytes& bytes : outputs) bytes.assign(bytes.size(), kUntouched);
  int placed = 0;
  const AllGatherUnknown unknown{.input = input.data(),
                                 .count = counts[at(me)],
                                 .dtype = dtype,
                                 .place = [&](const std::vector<size_t>& all) {
                                   ++placed;
                                   CHECK(all == counts);
                                   return pointers<void*>(outputs);
                                 }};
  call(SparseAllReduce{unknown, total, dtype, ReduceOp::kSum});
  CHECK_EQ(placed, 1);
  CHECK(outputs == wanted);
}

inline void checkGatherAndScatter(Caller& call, DType dtype, size_t n, int root, bool in_place) {
  const int P = call.transport.size(), me = call.transport.rank();
  const size_t bytes = n * sizeOf(dtype);
  std::vector<Bytes> to_root, from_root;
  for (int r = 0; r < P; ++r) {
    to_root.push_back(letter(r, root, bytes));
    from_root.push_back(letter(root, r, bytes));
  }
  Bytes input = to_root[at(me)];
  std::vector<Bytes> outputs(at(P), Bytes(bytes, kUntouched));
  Gather gather{input.data(), {}, n, dtype, root};
  if (me == root) gather.outputs = pointers<void*>(outputs);
  if (me == root && in_place) gather.outputs[at(root)] = input.data();
  call(gather);
  CHECK(input == to_root[at(me)]);
  if (in_place) outputs[at(root)] = to_root[at(root)];
  if (me == root) CHECK(outputs == to_root);

  std::vector<Bytes> inputs = from_root;
  Bytes output(bytes, kUntouched);
  Scatter scatter{{}, output.data(), n, dtype, root};
  if (me == root) scatter.inputs = pointers<const void*>(inputs);
  if (me == root && in_place) scatter.output = inputs[at(root)].data();
  call(scatter);
  CHECK(inputs == from_root);
  if (me != root || !in_place) CHECK(output == from_root[at(me)]);
}

inline void checkAllToAll(Caller& call, DType dtype, size_t n, bool even, bool in_place) {
  const int P = call.transport.size(), me = call.transport.rank();
  const auto count = [&](int from, int to) {
    const int kind = (from * 3 + to) % 4;
    return even ? n : kind == 0 ? 0 : at(kind) * n + at(from);
  };
  std::vector<Bytes> inputs, outputs, wanted;
  AllToAll all{{}, {}, {}, {}, even, dtype};
  for (int r = 0; r < P; ++r) {
    all.send_counts.push_back(count(me, r));
    all.recv_counts.push_back(count(r, me));
    inputs.push_back(letter(me, r, count(me, r) * sizeOf(dtype)));
    wanted.push_back(letter(r, me, count(r, me) * sizeOf(dtype)));
    outputs.emplace_back(wanted.back().size(), kUntouched);
  }
  const std::vector<Bytes> before = inputs;
  all.inputs = pointers<const void*>(inputs);
  all.outputs = pointers<void*>(outputs);
  if (in_place) all.outputs[at(me)] = inputs[at(me)].data();
  call(all);
  if (in_place) outputs[at(me)] = inputs[at(me)];
  CHECK(inputs == before);
  CHECK(outputs == wanted);
}

// Every call that only moves, of sizes from nothing to some slices.
inline void checkMoves(const Over& over, int most_ranks, size_t most_bytes) {
  constexpr DType kTypes[] = {DType::kUInt8, DType::kFloat32, DType::kComplex128,
                              DType::kFloat8E5M2, DType::kInt64};
  for (int P = 1; P <= most_ranks; ++P)
    for (const StreamOptions& options : everyChoice())
      over(P, options, [&](Caller& call) {
        std::minstd_rand random(static_cast<uint32_t>(P));
        const auto below = [&](size_t n) { return static_cast<size_t>(random()) % n; };
        for (size_t most : {size_t{1}, size_t{2}, size_t{300}, most_bytes}) {
          const DType dtype = kTypes[below(std::size(kTypes))];
          const size_t n = (most <= 2 ? most - 1 : below(most)) / (most > 300 ? sizeOf(dtype) : 1);
          for (int root = static_cast<int>(below(2)); root < P; root += 1 + P / 3) {
            checkBroadcast(call, dtype, n, root);
            checkGatherAndScatter(call, dtype, n, root, below(2) == 0);
          }
          std::vector<size_t> counts;
          for (int r = 0; r < P; ++r) counts.push_back(below(4) == 0 ? 0 : below(n + 1));
          checkAllGather(call, dtype, counts, below(2) == 0, false);
          checkAllGather(call, dtype, std::vector<size_t>(at(P), n), below(2) == 0, true);
          checkAllToAll(call, dtype, n, true, below(2) == 0);
          checkAllToAll(call, dtype, n / 3, false, below(2) == 0);
          call(Barrier{});
        }
      });
}

}  // namespace stream_cases
