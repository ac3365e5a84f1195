// The parts of ringreduce_cuda_perf that need no GPU: refused arguments, the results file, the
// floors (most of them when compiled), and the data that results are compared with.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>

#include "../../benchmarks/cuda/floors.h"
#include "../../benchmarks/cuda/report.h"
#include "../../benchmarks/cuda/settings.h"
#include "../../benchmarks/cuda/shared.h"
#include "check.h"
#include "processes.h"
#include "random_elements.h"
#include "ranks.h"
#include "ring_oracle.h"

using namespace ringreduce;
using namespace perf;
using random_elements::Texture;
using ring_oracle::Case;

namespace {

Settings parsed(std::string_view line) {
  return parse(split(std::string(line), ' '));
}

// The text of a UsageError, "" if there is none.
std::string refusal(std::string_view line) {
  try {
    parsed(line);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}

}  // namespace

// --- Arguments -----------------------------------------------------------------------------------

TEST(wrong_arguments_are_named) {
  CHECK(has(refusal("--ranks 2"), "no mode"));
  CHECK(has(refusal("speed"), "check, floor, single"));
  CHECK(has(refusal("check floor"), "two modes"));
  CHECK(has(refusal("check --colour red"), "--colour"));
  CHECK(has(refusal("check --ranks"), "--ranks wants a value"));
  CHECK(has(refusal("check --ranks 1"), "2 to 16"));
  CHECK(has(refusal("check --minbytes 1K"), "--maxbytes"));
  CHECK(has(refusal("check --minbytes 1 --maxbytes 2 --sizes 3"), "one too many"));
  CHECK(has(refusal("check --dtypes float31"), "float16"));
  CHECK(has(refusal("processes --way pigeon"), "descriptor"));
}

// --- The results file ----------------------------------------------------------------------------

TEST(lines_are_appended_and_a_file_that_cannot_be_written_is_an_error) {
  const auto path =
      std::filesystem::temp_directory_path() / ("cuda_perf_test." + std::to_string(getpid()));
  for (int i = 0; i < 2; ++i) append(path, Json().add("i", i));
  std::ifstream file(path);
  std::string first, second;
  std::getline(file, first);
  std::getline(file, second);
  std::filesystem::remove(path);
  CHECK_EQ(first + second, std::string("{\"i\": 0}{\"i\": 1}"));
  append("", Json());
  CHECK_THROWS(std::runtime_error, append("/nowhere/at/all", Json()));
}

TEST(floors_follow_the_wire) {
  // Halves go round a ring as float32 on their first way, not on their second.
  CHECK_EQ(bytesMovedByAll(Path::kRing, 2, 1000, DType::kFloat32), size_t{2 * 4000});
  CHECK_EQ(bytesMovedByAll(Path::kRing, 2, 1000, DType::kFloat16), size_t{2 * 5000});
  CHECK_EQ(bytesMovedByAll(Path::kOneShot, 3, 1000, DType::kFloat16), size_t{3 * 7000});
  CHECK(std::abs(floorMicroseconds(Path::kDirect, 2, 1 << 20, DType::kFloat32, 4e12) - 1.048576) <
        1e-9);
}

// --- Processes -----------------------------------------------------------------------------------

TEST(memory_is_shared_with_children) {
  struct Page {
    std::atomic<int> sum;
  };
  Shared<Page> page;
  CHECK_EQ(page->sum.load(), 0);
  const processes::Ends ends = processes::run(3, [&](int r) { page->sum += r + 1; });
  for (const std::string& end : ends) CHECK_EQ(end, std::string());
  CHECK_EQ(page->sum.load(), 6);
}

// --- Data ----------------------------------------------------------------------------------------

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

TEST(rough_elements_have_edges_and_others_that_differ_by_rank_and_seed) {
  constexpr size_t kCount = 100000;
  std::vector<float> a(kCount), b(kCount), c(kCount);
  random_elements::fill(DType::kFloat32, a.data(), 0, kCount, Texture::kRough,
                        random_elements::keyOf(1, 0));
  random_elements::fill(DType::kFloat32, b.data(), 0, kCount, Texture::kRough,
                        random_elements::keyOf(1, 1));
  random_elements::fill(DType::kFloat32, c.data(), 0, kCount, Texture::kRough,
                        random_elements::keyOf(2, 0));
  std::map<int, int> classes;
  size_t zeros = 0, negative_zeros = 0, same = 0, negative = 0;
  for (size_t i = 0; i < kCount; ++i) {
    ++classes[std::fpclassify(a[i])];
    if (a[i] == 0) ++(std::signbit(a[i]) ? negative_zeros : zeros);
    same += (a[i] == b[i]) + (a[i] == c[i]) + (b[i] == c[i]);
    negative += a[i] < 0;
    if (std::isnormal(a[i]) && std::fabs(a[i]) < 1e30f && std::fabs(a[i]) > 1e-30f)
      CHECK(std::fabs(a[i]) >= 0x1p-8f && std::fabs(a[i]) < 0x1p8f);
  }
  CHECK(classes[FP_NAN] > 10 && classes[FP_INFINITE] > 10 && classes[FP_SUBNORMAL] > 10);
  CHECK(zeros > 10 && negative_zeros > 10);
  CHECK(same < kCount / 100);
  CHECK(negative > kCount / 3 && negative < 2 * kCount / 3);
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

TEST(the_oracle_uses_several_threads_for_much) {
  // The same at a size that is cut into parts and at one that is not, where their chunks agree.
  const Case what{.ranks = 2, .count = 1 << 20, .dtype = DType::kInt32, .op = ReduceOp::kSum};
  std::vector<int32_t> whole(what.count), parts(what.count);
  ring_oracle::expect(what, whole.data());
  ring_oracle::Oracle one(what);
  one.run({0, what.count}, reinterpret_cast<std::byte*>(parts.data()));
  CHECK(whole == parts);
}
