// The sparse codec: the bytes of its layout, the right elements and magnitudes, what coding loses,
// and what the decoder refuses.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.h"
#include "codec_oracle.h"
#include "kernels/sparse_codec.h"

using namespace oracle;

namespace {

#define CHECK_OR(condition, what)                            \
  do {                                                       \
    if (!(condition)) check::fail(__FILE__, __LINE__, what); \
  } while (0)

using Floats = std::vector<float>;
using Indices = std::vector<size_t>;

size_t keptOf(size_t n, double share) {
  return std::max(size_t{1}, static_cast<size_t>(std::floor(share * static_cast<double>(n) + 0.5)));
}

// --- The layout, said again ----------------------------------------------------------------------

// Bits one after the other, the least significant first.
class Bits {
 public:
  void add(size_t value, unsigned count) {
    for (unsigned i = 0; i < count; ++i) bits_.push_back(value >> i & 1);
  }
  Bytes bytes() const {
    Bytes found((bits_.size() + 7) / 8);
    for (size_t i = 0; i < bits_.size(); ++i)
      found[i / 8] |= static_cast<std::byte>(unsigned{bits_[i]} << i % 8);
    return found;
  }

 private:
  std::vector<bool> bits_;
};

// A block with these elements, which ascend: for each whether it has the greater magnitude, and
// whether it is negative.
struct Element {
  size_t index;
  bool greater, negative;
};
Bytes laidOut(size_t n, uint16_t lesser, uint16_t greater, const std::vector<Element>& elements) {
  unsigned lower = 0;
  while (elements.size() << (lower + 1) <= n) ++lower;
  Bits bits;
  bits.add(lesser, 16), bits.add(greater, 16);
  std::vector<bool> row(elements.size() + ((n - 1) >> lower));
  for (size_t k = 0; k < elements.size(); ++k) {
    const Element& one = elements[k];
    bits.add(one.index, lower), bits.add(one.greater, 1), bits.add(one.negative, 1);
    row[(one.index >> lower) + k] = true;
  }
  for (const bool bit : row) bits.add(bit, 1);
  return bits.bytes();
}

uint16_t halfOf(double mean) {
  if (mean == 0) return 0;
  const uint32_t bits = as<uint32_t>(static_cast<float>(mean));
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(std::clamp<uint32_t>(rounded, 0x0080, 0x7f7f));
}

Indices keptIn(const Floats& block, double share) {
  Indices order(block.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return std::fabs(block[a]) > std::fabs(block[b]); });
  order.resize(keptOf(block.size(), share));
  std::sort(order.begin(), order.end());
  return order;
}

Bytes encodedBlock(const Floats& block, double share) {
  if (!std::all_of(block.begin(), block.end(), [](float x) { return std::isfinite(x); })) {
    Bytes nan(sparseBytes(block.size(), share));
    put16(&nan[0], 0x7fc0), put16(&nan[2], 0x7fc0);
    return nan;
  }
  const Indices kept = keptIn(block, share);
  double sum = 0, sums[2] = {}, counts[2] = {};
  bool zeros = false;
  for (const size_t i : kept) sum += std::fabs(block[i]), zeros |= block[i] == 0;
  std::vector<Element> elements;
  for (const size_t i : kept) {
    const double magnitude = std::fabs(block[i]);
    const bool greater = magnitude > (zeros ? 0 : sum / static_cast<double>(kept.size()));
    elements.push_back({i, greater, std::signbit(block[i])});
    sums[greater] += magnitude, counts[greater] += 1;
  }
  const uint16_t lesser = halfOf(counts[0] > 0 ? sums[0] / counts[0] : 0);
  const uint16_t greater = halfOf(counts[1] > 0 ? sums[1] / counts[1] : 0);
  return laidOut(block.size(), lesser, std::max(lesser, greater), elements);
}

Bytes encoded(const Floats& in, double share) {
  Bytes all;
  for (size_t first = 0; first < in.size(); first += kSparseBlock) {
    const auto begin = in.begin() + static_cast<long>(first);
    const Bytes one = encodedBlock(
        Floats(begin, begin + static_cast<long>(std::min(kSparseBlock, in.size() - first))), share);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

// Of its own size, so that a sanitizer sees who reads or writes beside it.
bool decodeAdd(Floats& sum, const Bytes& coded, double share) {
  const Bytes exact(coded);
  return sparseDecodeAdd(sum.data(), exact.data(), exact.size(), sum.size(), share);
}

// --- Encoding ------------------------------------------------------------------------------------

constexpr double kShares[] = {1e-9, 0.001, 0.02, 0.1, 0.3, 0.5, 0.75, 1};
constexpr size_t kCounts[] = {1, 2, 3, 31, 100, 4095, 4096, 4097, 10'000};

TEST(the_bytes_are_the_oracles_and_what_is_lost_is_told) {
  for (const size_t n : kCounts) {
    for (const double share : kShares) {
      for (const bool wild : {false, true}) {
        const std::string what = std::to_string(n) + " elements, share " + std::to_string(share);
        const Floats in = someValues(n, n, wild);
        const Bytes want = encoded(in, share);
        CHECK_OR(want.size() == sparseBytes(n, share), what);
        Bytes coded(want.size(), std::byte{0xa5});
        Floats error(n), out(n, 0.f), sum(n, 3.f);
        sparseEncode(coded.data(), error.data(), in.data(), n, share);
        CHECK_OR(coded == want, what);
        CHECK_OR(decodeAdd(out, coded, share) && decodeAdd(sum, coded, share), what);
        for (size_t first = 0; first < n; first += kSparseBlock) {
          const size_t end = std::min(n, first + kSparseBlock);
          size_t changed = 0;
          for (size_t i = first; i < end; ++i) {
            const float left = std::isfinite(out[i]) ? in[i] - out[i] : 0;
            CHECK_OR(error[i] == left, what);
            CHECK_OR(std::isnan(out[i]) ? std::isnan(sum[i]) : sum[i] == 3.f + out[i], what);
            CHECK_OR(std::isnan(out[i]) == std::isnan(out[first]), what);
            CHECK_OR(in[i] != 0 || out[i] == 0 || std::isnan(out[i]), what);
            changed += out[i] != 0;
          }
          CHECK_OR(std::isnan(out[first]) || changed <= keptOf(end - first, share), what);
        }
        // Without an error, and where the error is the input.
        Bytes again(coded.size());
        sparseEncode(again.data(), nullptr, in.data(), n, share);
        CHECK_OR(again == want, what);
        Floats place(in);
        sparseEncode(again.data(), place.data(), place.data(), n, share);
        CHECK_OR(again == want && std::equal(place.begin(), place.end(), error.begin()), what);
      }
    }
  }
}

TEST(a_block_that_is_not_finite_becomes_nan_alone) {
  for (const float strange : {kInf, -kInf, kNan, -kNan}) {
    Floats in = someValues(3 * kSparseBlock, 5, false), out(in.size()), error(in.size(), 7.f);
    in[kSparseBlock + 17] = strange;
    Bytes coded(sparseBytes(in.size(), 0.02));
    sparseEncode(coded.data(), error.data(), in.data(), in.size(), 0.02);
    CHECK(decodeAdd(out, coded, 0.02));
    for (size_t i = 0; i < in.size(); ++i) {
      CHECK_EQ(std::isnan(out[i]), i / kSparseBlock == 1);
      CHECK(std::isfinite(error[i]) && (i / kSparseBlock != 1 || error[i] == 0));
    }
  }
}

// Of equals the first ones, and the bytes that docs/diloco.md tells of.
TEST(the_layout_is_the_documented_one) {
  // 4 of 16: 2 lower bits, and a row of 4 + 15 / 4 bits.
  Floats in(16, 1.f);
  in[9] = -4, in[12] = 4.5f;
  CHECK(keptIn(in, 0.25) == (Indices{0, 1, 9, 12}));
  // The mean is 10.5 / 4: 0 and 1 have 1, 9 and 12 have 4.25, of which 9 is negative.
  Bytes want(4);
  put16(&want[0], 0x3f80), put16(&want[2], 0x4088);
  Bits bits;
  for (const size_t field : {0b0000, 0b0001, 0b1101, 0b0100}) bits.add(field, 4);
  bits.add(0b1010011, 7);  // at 0 + 0, 0 + 1, 2 + 2 and 3 + 3
  const Bytes rest = bits.bytes();
  want.insert(want.end(), rest.begin(), rest.end());
  Bytes coded(sparseBytes(16, 0.25));
  sparseEncode(coded.data(), nullptr, in.data(), 16, 0.25);
  CHECK(coded == want);
  Floats out(16), expected(16);
  expected[0] = expected[1] = 1, expected[9] = -4.25f, expected[12] = 4.25f;
  CHECK(decodeAdd(out, coded, 0.25) && out == expected);
}

TEST(sizes_are_what_is_promised) {
  CHECK_EQ(sparseBytes(0, 0.02), 0u);
  CHECK_EQ(sparseBytes(4096, 0.02), 102u);
  CHECK_EQ(sparseBytes(8193, 0.02), 2 * 102u + sparseBytes(1, 0.02));
}

// --- What is refused -----------------------------------------------------------------------------

TEST(any_other_length_is_refused) {
  for (const size_t n : {size_t{1}, size_t{100}, size_t{4097}}) {
    const Bytes coded = encoded(someValues(n, n, false), 0.1);
    Floats sum(n);
    for (size_t bytes = 0; bytes < coded.size(); ++bytes)
      CHECK(!decodeAdd(sum, Bytes(coded.begin(), coded.begin() + static_cast<long>(bytes)), 0.1));
    Bytes longer(coded);
    longer.push_back(std::byte{0});
    CHECK(!decodeAdd(sum, longer, 0.1));
    CHECK(decodeAdd(sum, coded, 0.1));
  }
}

TEST(magnitudes_that_no_encoder_makes_are_refused) {
  const std::vector<Element> elements = {{3, false, false}, {7, true, false}};
  const double share = 2.0 / 16;
  Floats sum(16);
  for (uint32_t one = 0; one < 0x10000; ++one) {
    const uint16_t scale = static_cast<uint16_t>(one);
    const bool right = one == 0 || (one >= 0x0080 && one <= 0x7f7f);
    CHECK_EQ(decodeAdd(sum, laidOut(16, scale, scale, elements), share), right);
    CHECK_EQ(decodeAdd(sum, laidOut(16, 0, scale, elements), share), right);
    CHECK_EQ(decodeAdd(sum, laidOut(16, scale, 0x3f80, elements), share), right && one <= 0x3f80);
  }
  // NaN is that of both, and has no elements.
  CHECK(!decodeAdd(sum, laidOut(16, 0x7fc0, 0x7fc0, elements), share));
  CHECK(!decodeAdd(sum, laidOut(16, 0x3f80, 0x7fc0, elements), share));
}

// All bits of a small block: what is taken is what the layout can say, each in one way.
TEST(places_that_no_encoder_makes_are_refused) {
  const size_t n = 11;
  const double share = 2.0 / 11;  // 2 lower bits, a row of 2 + 10 / 4 bits, 4 bits of filling
  std::vector<Bytes> right;
  for (size_t a = 0; a < n; ++a)
    for (size_t b = a + 1; b < n; ++b)
      for (unsigned kinds = 0; kinds < 16; ++kinds)
        right.push_back(laidOut(
            n, 0x3f80, 0x4000,
            {{a, (kinds & 1) != 0, (kinds & 2) != 0}, {b, (kinds & 4) != 0, (kinds & 8) != 0}}));
  std::sort(right.begin(), right.end());
  Bytes coded = right.front();
  CHECK_EQ(coded.size(), 6u);
  Floats sum(n);
  size_t taken = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    put16(&coded[4], bits);
    const bool wanted = std::binary_search(right.begin(), right.end(), coded);
    CHECK_EQ(decodeAdd(sum, coded, share), wanted);
    taken += wanted;
  }
  CHECK_EQ(taken, right.size());
}

}  // namespace
