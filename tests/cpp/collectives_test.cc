// Every collective against what it must give, element by element; what they must refuse is in
// arguments_test.cc.
//
// Ranks are threads.  Slots are as small as they may be, so that a few thousand elements take many.
#include <cstring>
#include <functional>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "reduction_case.h"

using namespace ringreduce;
using oracle::Bytes;
using oracle::Case;
using oracle::factorOf;
using ranks::failureOf;
using ranks::Setting;

namespace {

constexpr int kWorldSizes[] = {1, 2, 3, 5};
constexpr size_t kSizes[] = {0, 1, 127, 1021, oracle::kMost};
constexpr unsigned char kUntouched = 0xa5;

size_t at(int i) {
  return static_cast<size_t>(i);
}

// Groups of every size, with few and small slots, and every kind of arithmetic.
void forEachCase(const std::function<void(Group&, const Case&)>& body) {
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096"), few("RINGREDUCE_SLOTS", "3");
  for (int P : kWorldSizes) {
    std::vector<Case> cases;
    for (DType t : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16})
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum})
        cases.emplace_back(P, t, op);
    cases.emplace_back(P, DType::kFloat32, ReduceOp::kMin);
    cases.emplace_back(P, DType::kInt64, ReduceOp::kAvg);
    cases.emplace_back(P, DType::kInt16, ReduceOp::kProduct);
    cases.emplace_back(P, DType::kUInt8, ReduceOp::kBxor);
    cases.emplace_back(P, DType::kBool, ReduceOp::kSum);
    ranks::inGroup(P, [&](Group& group) {
      for (const Case& c : cases) body(group, c);
    });
  }
}

Bytes allReduced(Group& group, const Case& c, size_t n) {
  Bytes data = c.addends[at(group.rank())];
  data.resize(n * c.width());
  group.run({AllReduce{data.data(), n, c.dtype, c.op, factorOf(group.rank())}});
  return data;
}

// `n` bytes that tell who sent them to whom.
Bytes letter(int from, int to, size_t n) {
  Bytes bytes(n);
  for (size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<unsigned char>(i * 7 + i / 251 + at(from) * 31 + at(to) * 5 + 1);
  return bytes;
}

// Uneven, and nothing at all between some.
size_t countBetween(int from, int to) {
  const int kind = (from * 3 + to) % 4;
  return kind == 0 ? 0 : at(kind) * 617 + at(from);
}

template <class T>
std::vector<const void*> reading(const std::vector<T>& parts) {
  std::vector<const void*> pointers;
  for (const T& part : parts) pointers.push_back(part.data());
  return pointers;
}
template <class T>
std::vector<void*> writing(std::vector<T>& parts) {
  std::vector<void*> pointers;
  for (T& part : parts) pointers.push_back(part.data());
  return pointers;
}

}  // namespace

TEST(reduce_gives_the_root_the_bits_of_all_reduce) {
  forEachCase([](Group& group, const Case& c) {
    for (size_t n : kSizes) {
      const Bytes wanted = c.canonical(n), everywhere = allReduced(group, c, n);
      c.expect(everywhere, wanted, "all_reduce");
      for (int root = 0; root < c.P; ++root) {
        const bool mine = root == group.rank();
        Bytes input = c.addends[at(group.rank())];
        input.resize(n * c.width());
        const Bytes before = input;
        Bytes output(n * c.width(), kUntouched);
        Reduce call{input.data(), output.data(), n, c.dtype, c.op, root, factorOf(group.rank())};
        group.run({call});
        CHECK(input == before);
        if (mine)
          CHECK(output == everywhere);
        else
          CHECK(output == Bytes(n * c.width(), kUntouched));
        call.output = mine ? input.data() : nullptr;
        group.run({call});
        CHECK(input == (mine ? everywhere : before));
      }
    }
  });
}

TEST(reduce_scatter_adds_even_and_uneven_parts) {
  forEachCase([](Group& group, const Case& c) {
    const int me = group.rank();
    const size_t total = oracle::kMost;
    std::vector<std::vector<size_t>> layouts(4);
    for (int p = 0; p < c.P; ++p) {
      layouts[0].push_back(total / at(c.P));
      layouts[1].push_back(Cut{total, c.P}.chunk(p).size);
      layouts[2].push_back(p % 2 == 0 ? 0 : total / at(c.P) - at(p));
      layouts[3].push_back(p == c.P - 1 ? 1 : 0);
    }
    for (const auto& counts : layouts) {
      std::vector<Bytes> inputs;
      size_t begin = 0, my_begin = 0;
      for (int p = 0; p < c.P; ++p) {
        if (p == me) my_begin = begin;
        const auto from = c.addends[at(me)].begin();
        const auto element = [&](size_t i) { return from + static_cast<long>(i * c.width()); };
        inputs.emplace_back(element(begin), element(begin + counts[at(p)]));
        begin += counts[at(p)];
      }
      const size_t bytes = counts[at(me)] * c.width();
      const unsigned char* first = &c.owned[at(me)][0] + my_begin * c.width();
      const Bytes wanted(first, first + bytes);
      const std::vector<Bytes> before = inputs;
      Bytes output(bytes, kUntouched);
      ReduceScatter call{reading(inputs), counts, output.data(), c.dtype, c.op, factorOf(me)};
      group.run({call});
      CHECK(inputs == before);
      c.expect(output, wanted, "reduce_scatter");
      call.output = inputs[at(me)].data();
      group.run({call});
      CHECK(inputs[at(me)] == output);
      for (int p = 0; p < c.P; ++p) CHECK(p == me || inputs[at(p)] == before[at(p)]);
      if (&counts != &layouts[1]) continue;
      // These are the canonical chunks.
      const Bytes everywhere = allReduced(group, c, total);
      CHECK(bytes == 0 ||
            std::memcmp(output.data(), &everywhere[my_begin * c.width()], bytes) == 0);
    }
  });
}

TEST(halves_are_rounded_once) {
  // 1 + eps/2 + eps/2, in this order: rounded after each step it stays 1.
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096");
  ranks::inGroup(3, [](Group& group) {
    for (DType t : {DType::kFloat16, DType::kBFloat16}) {
      const double eps = t == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
      const uint16_t one = oracle::encodeHalf(t, 1), half = oracle::encodeHalf(t, eps / 2);
      const uint16_t mine = group.rank() == 1 ? one : half;  // rank 1 comes first in chunk 0
      const uint16_t sum = oracle::encodeHalf(t, 1 + eps);
      uint16_t output = 0;
      group.run({Reduce{&mine, &output, 1, t, ReduceOp::kSum, 2}});
      if (group.rank() == 2) CHECK_EQ(output, sum);
      const std::vector<const void*> inputs(3, &mine);
      group.run({ReduceScatter{inputs, {1, 0, 0}, &output, t, ReduceOp::kSum}});
      if (group.rank() == 0) CHECK_EQ(output, sum);
    }
  });
}

TEST(all_gather_takes_uneven_counts) {
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096");
  for (int P : kWorldSizes)
    ranks::inGroup(P, [P](Group& group) {
      const int me = group.rank();
      for (DType t : {DType::kUInt8, DType::kFloat32, DType::kComplex128, DType::kFloat8E5M2})
        for (size_t base : {0, 1, 300, 2049})
          for (int idle = 0; idle < 3; ++idle) {  // every third rank has nothing
            std::vector<size_t> counts;
            std::vector<Bytes> outputs, wanted;
            for (int r = 0; r < P; ++r) {
              counts.push_back(r % 3 == idle ? 0 : base + at(r));
              wanted.push_back(letter(r, 0, counts.back() * sizeOf(t)));
              outputs.emplace_back(wanted.back().size(), kUntouched);
            }
            Bytes input = wanted[at(me)];
            AllGather call{input.data(), writing(outputs), counts, t};
            group.run({call});
            CHECK(input == wanted[at(me)]);
            CHECK(outputs == wanted);

            for (Bytes& bytes : outputs) bytes.assign(bytes.size(), kUntouched);
            call.outputs[at(me)] = input.data();
            group.run({call});
            outputs[at(me)] = input;
            CHECK(outputs == wanted);
          }
    });
}

TEST(all_gather_of_unknown_counts) {
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096");
  for (int P : kWorldSizes)
    ranks::inGroup(P, [P](Group& group) {
      for (int base : {0, 1, 1500}) {
        const auto countOf = [&](int r) { return r == 1 ? 0 : at(base * (P - r)); };
        const Bytes input = letter(group.rank(), 0, 4 * countOf(group.rank()));
        std::vector<Bytes> outputs;
        int placed = 0;
        const AllGatherUnknown gather{.input = input.data(),
                                      .count = countOf(group.rank()),
                                      .dtype = DType::kFloat32,
                                      .place = [&](const std::vector<size_t>& counts) {
                                        ++placed;
                                        outputs.clear();
                                        for (size_t n : counts)
                                          outputs.emplace_back(4 * n, kUntouched);
                                        return writing(outputs);
                                      }};
        group.run({SparseAllReduce{gather, 100000, DType::kFloat32, ReduceOp::kSum}});
        CHECK_EQ(placed, 1);
        for (int r = 0; r < P; ++r) CHECK(outputs[at(r)] == letter(r, 0, 4 * countOf(r)));
      }
    });
}

TEST(gather_and_scatter_with_every_root) {
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096");
  for (int P : kWorldSizes)
    ranks::inGroup(P, [P](Group& group) {
      const int me = group.rank();
      for (DType t : {DType::kUInt8, DType::kFloat64, DType::kComplex128})
        for (size_t n : kSizes)
          for (int root = 0; root < P; ++root) {
            const size_t bytes = n * sizeOf(t);
            std::vector<Bytes> to_root, from_root;
            for (int r = 0; r < P; ++r) {
              to_root.push_back(letter(r, root, bytes));
              from_root.push_back(letter(root, r, bytes));
            }
            for (bool in_place : {false, true}) {
              Bytes input = to_root[at(me)];
              std::vector<Bytes> outputs(at(P), Bytes(bytes, kUntouched));
              Gather gather{input.data(), {}, n, t, root};
              if (me == root) gather.outputs = writing(outputs);
              if (me == root && in_place) gather.outputs[at(root)] = input.data();
              group.run({gather});
              CHECK(input == to_root[at(me)]);
              if (in_place) outputs[at(root)] = to_root[at(root)];
              if (me == root) CHECK(outputs == to_root);

              std::vector<Bytes> inputs = from_root;
              Bytes output(bytes, kUntouched);
              Scatter scatter{{}, output.data(), n, t, root};
              if (me == root) scatter.inputs = reading(inputs);
              if (me == root && in_place) scatter.output = inputs[at(root)].data();
              group.run({scatter});
              CHECK(inputs == from_root);
              if (me != root || !in_place) CHECK(output == from_root[at(me)]);
            }
          }
    });
}

TEST(all_to_all_even_and_uneven) {
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096");
  for (int P : kWorldSizes)
    ranks::inGroup(P, [P](Group& group) {
      const int me = group.rank();
      for (DType t : {DType::kUInt8, DType::kInt32, DType::kComplex128})
        for (size_t even : {size_t{0}, size_t{1}, size_t{1021}, SIZE_MAX}) {
          const bool uneven = even == SIZE_MAX;
          std::vector<Bytes> inputs, outputs, wanted;
          AllToAll call{{}, {}, {}, {}, !uneven, t};
          for (int r = 0; r < P; ++r) {
            call.send_counts.push_back(uneven ? countBetween(me, r) : even);
            call.recv_counts.push_back(uneven ? countBetween(r, me) : even);
            inputs.push_back(letter(me, r, call.send_counts.back() * sizeOf(t)));
            wanted.push_back(letter(r, me, call.recv_counts.back() * sizeOf(t)));
            outputs.emplace_back(wanted.back().size(), kUntouched);
          }
          const std::vector<Bytes> before = inputs;
          call.inputs = reading(inputs);
          call.outputs = writing(outputs);
          group.run({call});
          CHECK(inputs == before);
          CHECK(outputs == wanted);

          for (Bytes& bytes : outputs) bytes.assign(bytes.size(), kUntouched);
          call.outputs[at(me)] = inputs[at(me)].data();
          call.even = false;  // whether or not the counts are equal
          group.run({call});
          outputs[at(me)] = inputs[at(me)];
          CHECK(outputs == wanted);
        }
    });
}
