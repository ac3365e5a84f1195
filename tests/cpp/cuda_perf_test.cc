// The data that results on GPUs are compared with (benchmarks/cuda), which needs no GPU itself.
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/kernels/kernel_table.h"
#include "random_elements.h"
#include "ranks.h"
#include "ring_oracle.h"

using namespace ringreduce;
using random_elements::Texture;
using ring_oracle::Case;

TEST(any_part_of_the_elements_is_made_alike) {
  for (int t = 0; t < cuda::kKernelDTypes; ++t)
    for (Texture draw : {Texture::kRough, Texture::kExact}) {
      const auto dtype = static_cast<DType>(t);
      const uint32_t key = random_elements::keyOf(5, 2);
      std::vector<unsigned char> all(3000 * 8), part(3000 * 8);
      random_elements::fill(dtype, all.data(), 0, 3000, draw, key);
      random_elements::withDType(dtype, [&]<DType d>() {
        using Stored = typename random_elements::Random<d>::Stored;
        const random_elements::Random<d> random{key, draw};
        const size_t width = sizeof(Stored);
        for (uint32_t i = 0; i < 3000; ++i) {
          const Stored one = random(i);
          CHECK(std::memcmp(&one, &all[i * width], width) == 0);
        }
        for (size_t begin : {size_t{1}, size_t{250}, size_t{1717}}) {
          random_elements::fill(d, part.data(), begin, 500, draw, key);
          CHECK(std::memcmp(part.data(), &all[begin * width], 500 * width) == 0);
        }
      });
    }
}

TEST(sums_of_exact_elements_are_the_same_in_every_order) {
  constexpr size_t kCount = 1000;
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kUInt8}) {
    const Case eight{.ranks = 8,
                     .count = kCount,
                     .dtype = dtype,
                     .op = ReduceOp::kSum,
                     .draw = Texture::kExact,
                     .seed = 3};
    std::vector<unsigned char> sum(kCount * sizeOf(dtype)), other(sum.size());
    ring_oracle::expect(eight, sum.data());
    std::vector<std::vector<unsigned char>> addends(8, std::vector<unsigned char>(sum.size()));
    std::vector<const void*> backwards;
    for (int r = 7; r >= 0; --r) {
      auto& one = addends[static_cast<size_t>(r)];
      random_elements::fill(dtype, one.data(), 0, kCount, Texture::kExact,
                            random_elements::keyOf(3, r));
      backwards.push_back(one.data());
    }
    reduceKernels(dtype, ReduceOp::kSum).reduce(other.data(), backwards.data(), 8, kCount, 8);
    CHECK(sum == other);
  }
}

TEST(the_oracle_gives_the_bits_of_the_cpus_ring) {
  const ranks::Setting ring("RINGREDUCE_ALGORITHM", "ring");
  for (int P : {2, 3, 4})
    ranks::inGroup(P, [&](Group& group) {
      for (size_t t = 0; t < kDTypes.size(); ++t)
        for (int o = 0; o < kReduceOps; ++o) {
          const auto dtype = static_cast<DType>(t);
          const auto op = static_cast<ReduceOp>(o);
          if (!isSupported(dtype, op)) continue;
          const Case what{.ranks = P,
                          .count = 5003,
                          .dtype = dtype,
                          .op = op,
                          .factor = 0.7f,
                          .seed = static_cast<uint32_t>(t * 100 + o)};
          const size_t width = sizeOf(dtype);
          std::vector<unsigned char> data(what.count * width), expected(data.size());
          random_elements::fill(dtype, data.data(), 0, what.count, what.draw,
                                random_elements::keyOf(what.seed, group.rank()));
          group.run({AllReduce{data.data(), what.count, dtype, op, what.factor}});
          ring_oracle::expect(what, expected.data());
          for (size_t i = 0; i < what.count; ++i)
            if (!ring_oracle::same(dtype, &data[i * width], &expected[i * width]))
              check::fail(__FILE__, __LINE__,
                          std::string(name(dtype)) + " " + name(op) + ", " + std::to_string(P) +
                              " ranks: element " + std::to_string(i) + " differs");
        }
    });
}
