// How buckets lie in messages, and what becomes of residuals where buckets or world sizes change.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "kernels/message.h"

using namespace ringreduce;

namespace {

std::vector<Part> partsOf(const std::vector<size_t>& counts) {
  std::vector<Part> parts;
  size_t begin = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    parts.push_back({i, begin, counts[i]});
    begin += counts[i];
  }
  return parts;
}

std::vector<float> numbers(size_t n, float from = 1) {
  std::vector<float> all(n);
  std::iota(all.begin(), all.end(), from);
  return all;
}

const std::vector<std::vector<size_t>> kBuckets = {
    {0}, {1}, {127, 1, 0}, {128}, {129, 128}, {1000, 3, 384}, {640}, {1, 1, 1}, {4096, 257}};

}  // namespace

TEST(every_element_has_one_place_in_its_ranks_chunk) {
  for (const auto& counts : kBuckets)
    for (int P = 1; P <= 9; ++P) {
      const MessageLayout layout(partsOf(counts), P);
      CHECK_EQ(layout.count() % (kChunkElements * static_cast<size_t>(P)), size_t{0});
      const Cut whole{layout.count(), P};
      std::vector<int> used(layout.count());
      for (size_t i = 0; i < counts.size(); ++i) {
        const Cut own{counts[i], P};
        std::vector<int> seen(counts[i]);
        layout.forEachRun(i, [&](size_t at, size_t offset, size_t size, size_t padded) {
          CHECK(size <= padded && padded % kChunkElements == 0 && at % kChunkElements == 0);
          for (size_t k = 0; k < padded; ++k) ++used[at + k];
          for (size_t k = 0; k < size; ++k) {
            ++seen[offset + k];
            CHECK_EQ(whole.chunkOf(at + k), own.chunkOf(offset + k));
          }
        });
        CHECK(seen == std::vector<int>(counts[i], 1));
      }
      CHECK(used == std::vector<int>(layout.count(), 1));
    }
}

TEST(what_is_gathered_is_scattered_back) {
  for (const auto& counts : kBuckets)
    for (int P : {1, 2, 3, 8}) {
      const MessageLayout layout(partsOf(counts), P);
      const size_t n = std::accumulate(counts.begin(), counts.end(), size_t{0});
      const std::vector<float> bucket = numbers(n);
      std::vector<float> message(layout.count(), 77), residual(layout.count(), 0.5f), back(n);
      gather(message.data(), layout, bucket.data(), DType::kFloat32, nullptr);
      const float sum = std::accumulate(message.begin(), message.end(), 0.f);
      CHECK_EQ(sum, std::accumulate(bucket.begin(), bucket.end(), 0.f));  // pads are zeros
      CHECK(scatter(back.data(), DType::kFloat32, layout, message.data()));
      CHECK(back == bucket);

      gather(message.data(), layout, bucket.data(), DType::kFloat32, residual.data());
      CHECK(scatter(back.data(), DType::kFloat32, layout, message.data()));
      for (size_t i = 0; i < n; ++i) CHECK_EQ(back[i], bucket[i] + 0.5f);
      addTo(back.data(), DType::kFloat32, layout, residual.data());
      for (size_t i = 0; i < n; ++i) CHECK_EQ(back[i], bucket[i] + 1);

      std::vector<double> doubles(bucket.begin(), bucket.end()), again(n), raw(layout.count());
      auto* bytes = reinterpret_cast<std::byte*>(raw.data());
      gatherExact(bytes, layout, doubles.data(), DType::kFloat64);
      CHECK(scatterExact(again.data(), DType::kFloat64, layout, bytes));
      CHECK(again == doubles);
    }
}

TEST(halves_are_widened_and_rounded_once) {
  // 1, -0, the largest, the smallest subnormal; then the sum with a residual that rounding drops.
  const std::vector<uint16_t> halves = {0x3c00, 0x8000, 0x7bff, 0x0001};
  const std::vector<uint16_t> brains = {0x3f80, 0x8000, 0x7f7f, 0x0001};
  const MessageLayout layout(partsOf({4}), 2);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const auto& bucket = dtype == DType::kFloat16 ? halves : brains;
    std::vector<float> message(layout.count());
    gather(message.data(), layout, bucket.data(), dtype, nullptr);
    CHECK_EQ(message[0], 1.f);
    CHECK(message[1] == 0 && std::signbit(message[1]));
    CHECK_EQ(message[3], dtype == DType::kFloat16 ? 0x1p-24f : 0x1p-133f);
    std::vector<uint16_t> back(4);
    CHECK(scatter(back.data(), dtype, layout, message.data()));
    CHECK(back == bucket);
    message[2] = 3e38f * (dtype == DType::kFloat16 ? 1 : 1.3f);  // finite, but not in the bucket
    CHECK(!scatter(back.data(), dtype, layout, message.data()));
  }
}

TEST(what_is_not_finite_is_seen) {
  const float inf = std::numeric_limits<float>::infinity();
  for (size_t n : {1, 7, 64, 1001})
    for (const float bad : {inf, -inf, std::nanf(""), -std::nanf("")})
      for (size_t at : {size_t{0}, n / 2, n - 1}) {
        std::vector<float> values = numbers(n);
        CHECK(allFinite(values.data(), DType::kFloat32, n));
        values[at] = bad;
        CHECK(!allFinite(values.data(), DType::kFloat32, n));
        std::vector<double> doubles(values.begin(), values.end());
        CHECK(!allFinite(doubles.data(), DType::kFloat64, n));
      }
  const std::vector<float> largest(5, std::numeric_limits<float>::max());
  CHECK(allFinite(largest.data(), DType::kFloat32, 5));
  const std::vector<int> ones(5, -1);
  CHECK(allFinite(ones.data(), DType::kInt32, 5));
}

TEST(residuals_move_with_their_parameters) {
  const std::vector<size_t> counts = {1000, 5, 384, 0};
  Residuals residuals(counts);
  CHECK(residuals.empty() && residuals.bytes() == 0);
  std::vector<float> out(1000);
  CHECK(!residuals.read(0, out.data()));
  for (size_t p = 0; p < 3; ++p)
    residuals.write(p, numbers(counts[p], static_cast<float>(100 * p)).data());

  const auto holds = [&](size_t p, float factor = 1) {
    std::vector<float> values(counts[p]), wanted = numbers(counts[p], static_cast<float>(100 * p));
    for (float& value : wanted) value *= factor;
    return residuals.read(p, values.data()) && values == wanted;
  };
  CHECK(holds(0) && holds(1) && holds(2));
  // As one bucket; in another order; as several; with more ranks.
  const auto all = residuals.storeOf(MessageLayout(partsOf({1000, 5, 384}), 2));
  CHECK(holds(0) && holds(1) && holds(2));
  CHECK(residuals.storeOf(MessageLayout(partsOf({1000, 5, 384}), 2)) == all);
  CHECK_EQ(residuals.bytes(), 2 * sizeof(float) * all->layout.count());
  residuals.storeOf(MessageLayout({{2, 0, 384}, {1, 384, 5}}, 2));
  CHECK(holds(0) && holds(1) && holds(2));
  residuals.storeOf(MessageLayout({{0, 10, 1000}}, 2));
  for (int P = 1; P < 6; ++P) {
    residuals.storeOf(MessageLayout({{1, 0, 5}, {0, 5, 1000}}, P));
    CHECK(holds(0) && holds(1) && holds(2));
  }
  residuals.scale(0.5f);
  CHECK(holds(0, 0.5f) && holds(1, 0.5f) && holds(2, 0.5f));
  residuals.write(1, nullptr);
  CHECK(residuals.read(1, out.data()) && out[0] == 0 && out[4] == 0);
  residuals.clear();
  CHECK(residuals.empty() && !residuals.read(0, out.data()));
}

TEST(a_store_counts_only_while_it_has_all_of_its_parameters) {
  Residuals residuals({300, 200});
  const MessageLayout both({{0, 0, 300}, {1, 300, 200}}, 2), second({{1, 0, 200}}, 2);
  const auto old = residuals.storeOf(both);
  // A step whose first bucket has the second parameter, and that never comes to the other.
  residuals.storeOf(second);
  const std::vector<float> later = numbers(200, 7);
  residuals.write(1, later.data());
  const auto store = residuals.storeOf(both);
  CHECK(store != old);
  std::vector<float> found(200);
  store->layout.forEachRun(1, [&](size_t at, size_t offset, size_t size, size_t) {
    std::copy_n(store->kept.data() + at, size, found.data() + offset);
  });
  CHECK(found == later);
}

TEST(what_is_not_finite_is_no_residual) {
  const float most = std::numeric_limits<float>::max();
  Residuals residuals({3});
  std::vector<float> found(3);
  for (const bool stored : {false, true}) {
    if (stored) residuals.storeOf(MessageLayout({{0, 0, 3}}, 2));
    const std::vector<float> given = {std::nanf(""), -std::numeric_limits<float>::infinity(), most};
    residuals.write(0, given.data());
    CHECK(residuals.read(0, found.data()) && found == std::vector<float>({0, 0, most}));
    residuals.scale(2);
    CHECK(residuals.read(0, found.data()) && found == std::vector<float>({0, 0, 0}));
  }
}

TEST(a_parameter_without_a_gradient_is_found) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const MessageLayout layout(partsOf({1000, 1, 0, 257, 300}), 2);
    const size_t width = sizeOf(dtype);
    std::vector<std::byte> bucket(1558 * width);
    using Found = std::vector<size_t>;
    CHECK(partsOfZeros(layout, bucket.data(), dtype) == (Found{0, 1, 2, 3, 4}));
    bucket[1000 * width + width - 1] = std::byte{0x80};         // -0
    bucket[1257 * width] = bucket[999 * width] = std::byte{1};  // subnormal
    CHECK(partsOfZeros(layout, bucket.data(), dtype) == (Found{1, 2, 4}));
    CHECK(partsOfZeros(MessageLayout(partsOf({1557}), 3), bucket.data(), dtype) == Found{});
  }
}
