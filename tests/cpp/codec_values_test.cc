// What the codecs make of values: how far from them they may be, what is special, and what rounding
// at random is right in.
#include <cmath>
#include <set>

#include "check.h"
#include "codec_oracle.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace oracle;

namespace {

std::vector<float> through(const CodecKernels& kernels, Codec codec,
                           const std::vector<float>& values, const Draw* draw = nullptr) {
  Bytes coded(codedBytes(codec, values.size()));
  std::vector<float> out(values.size());
  kernels.encode(coded.data(), nullptr, values.data(), values.size(), draw);
  CHECK(kernels.decode(out.data(), coded.data(), coded.size(), values.size()));
  return out;
}

// The most that a value of this block may be off, to nearest: half a step, and what the scale's
// rounding adds (a part in 256).
double mostOff(Codec codec, const float* block, size_t n) {
  double up = 0, down = 0;
  for (size_t i = 0; i < n; ++i) {
    up = std::max(up, static_cast<double>(block[i]));
    down = std::max(down, -static_cast<double>(block[i]));
  }
  const double step = codec == Codec::kInt8
                          ? std::max(up, down) / 127
                          : std::max(std::max(up, down) / 8, std::min(up, down) / 7.47);
  if (step > 0x1p124 * 255 / 128) return step;  // no greater scale: some is cut off
  return std::max(step, 0x1p-126) / 2 * (1 + 1 / 127.);
}

TEST(no_value_is_further_off_than_half_a_step) {
  forEachKernel([](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    if (codec != Codec::kInt8 && codec != Codec::kInt4) return;
    for (uint64_t seed = 0; seed < 300; ++seed) {
      const std::vector<float> values = someValues(333, seed, false);
      const std::vector<float> out = through(kernels, codec, values);
      for (size_t i = 0; i < values.size(); ++i) {
        const size_t first = i / kCodecBlock * kCodecBlock;
        const double most =
            mostOff(codec, &values[first], std::min(kCodecBlock, values.size() - first));
        CHECK(std::isfinite(out[i]));
        const double off = std::fabs(static_cast<double>(values[i]) - out[i]);
        if (off > most) check::fail(__FILE__, __LINE__, describe(set, codec, seed));
      }
    }
  });
}

// All values of a half type, each its own code, and between two neighbours the nearer one.
TEST(halves_round_to_the_nearest) {
  forEachKernel([](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    if (codec == Codec::kInt8 || codec == Codec::kInt4) return;
    const uint16_t infinite = codec == Codec::kFloat16 ? 0x7c00 : 0x7f80;
    Bytes codes(2 * size_t{infinite});
    for (size_t i = 0; i < infinite; ++i) put16(&codes[2 * i], static_cast<uint32_t>(i));
    std::vector<float> all(infinite);
    CHECK(kernels.decode(all.data(), codes.data(), codes.size(), all.size()));
    CHECK(through(kernels, codec, all) == all);

    std::vector<float> between, want;
    const auto add = [&](double value, float nearest) {
      for (const float sign : {1.f, -1.f}) {
        between.push_back(sign * static_cast<float>(value));
        want.push_back(sign * nearest);
      }
    };
    for (size_t i = 0; i + 1 < infinite; ++i) {
      CHECK(all[i] < all[i + 1]);
      const double middle = (static_cast<double>(all[i]) + all[i + 1]) / 2;
      add(middle, i % 2 ? all[i + 1] : all[i]);  // the even one
      add(std::nextafter(static_cast<float>(middle), 0.f), all[i]);
      add(std::nextafter(static_cast<float>(middle), kInf), all[i + 1]);
    }
    // Only a bfloat16 has the range of float32.
    const bool narrow = codec == Codec::kFloat16;
    add(kLargest, narrow ? kInf : all.back());
    if (narrow) {
      add(std::nextafter(65520.f, 0.f), 65504);
      add(65520, kInf);
    }
    const std::vector<float> got = through(kernels, codec, between);
    for (size_t i = 0; i < got.size(); ++i)
      if (!sameBits(got[i], want[i])) check::fail(__FILE__, __LINE__, describe(set, codec, i));
  });
}

TEST(what_is_not_finite_arrives_so_and_leaves_no_error) {
  forEachKernel([](const KernelSet&, Codec codec, const CodecKernels& kernels) {
    const bool blocks = codec == Codec::kInt8 || codec == Codec::kInt4;
    for (const bool stochastic : {false, true})
      for (const float special : {kInf, -kInf, kNan, -kNan})
        for (size_t at = 0; at < 100; ++at) {
          std::vector<float> values(100, 1.25f), error(100, 7.f);
          values[at] = special;
          const Draw draw{.seed = at, .first = 0};
          const Draw* const random = stochastic ? &draw : nullptr;
          const std::vector<float> out = through(kernels, codec, values, random);
          Bytes coded(codedBytes(codec, 100));
          kernels.encode(coded.data(), error.data(), values.data(), 100, random);
          for (size_t i = 0; i < 100; ++i) {
            const bool struck = blocks ? i / kCodecBlock == at / kCodecBlock : i == at;
            CHECK_EQ(std::isfinite(out[i]), !struck);
            if (struck) CHECK(sameBits(error[i], 0.f));
            if (struck && !blocks && !std::isnan(special)) CHECK_EQ(out[i], special);
            if (struck && (blocks || std::isnan(special))) CHECK(std::isnan(out[i]));
          }
        }
  });
}

// Chance does not decide whether a value is too large.
TEST(what_is_too_large_for_a_code_becomes_infinite_and_leaves_no_error) {
  const std::vector<float> values = {65504, 65519, -65519, 65520, -65520, 65536, 1e5f, -kLargest};
  forEachKernel([&](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    for (uint64_t seed = 0; seed <= 100; ++seed) {
      const Draw draw{.seed = seed, .first = 0};
      const Draw* const random = seed ? &draw : nullptr;
      const std::vector<float> out = through(kernels, codec, values, random);
      std::vector<float> error(values.size(), 7.f);
      Bytes coded(codedBytes(codec, values.size()));
      kernels.encode(coded.data(), error.data(), values.data(), values.size(), random);
      for (size_t i = 0; i < values.size(); ++i) {
        const bool fits = codec != Codec::kFloat16 || std::fabs(values[i]) < 65520;
        const float want = std::copysign(fits ? 65504.f : kInf, values[i]);
        const float left = fits ? values[i] - out[i] : 0;
        const bool right = codec == Codec::kFloat16 ? out[i] == want : std::isfinite(out[i]);
        if (!right || !sameBits(error[i], left))
          check::fail(__FILE__, __LINE__, describe(set, codec, i));
      }
    }
  });
}

TEST(zeros_and_ends) {
  forEachKernel([](const KernelSet&, Codec codec, const CodecKernels& kernels) {
    const Draw random{.seed = 5, .first = 0}, *const none = nullptr;
    for (const Draw* draw : {none, &random}) {
      for (const float zero : {0.f, -0.f})
        for (const float out : through(kernels, codec, std::vector<float>(40, zero), draw))
          CHECK_EQ(out, 0.f);
      // Among others too, with whatever sign the scale has: a zero that is not negative.
      for (const float other : {1.f, -1.f}) {
        const std::vector<float> out = through(kernels, codec, {0.f, other, 0.f}, draw);
        CHECK(sameBits(out[0], 0.f) && sameBits(out[2], 0.f));
      }
      // The least and the greatest that there are, alone and together.
      for (const std::vector<float>& ends : {std::vector<float>{kLargest},
                                             {-kLargest},
                                             {kLargest, -kLargest},
                                             {1e-45f},
                                             {-1e-45f, 1e-45f},
                                             {kLargest, 1e-45f},
                                             {0x1p-126f, -0x1p-127f}}) {
        const std::vector<float> out = through(kernels, codec, ends, draw);
        for (size_t i = 0; i < ends.size(); ++i) {
          const bool large = std::fabs(ends[i]) > 1;
          if (large && codec == Codec::kFloat16) {
            CHECK_EQ(out[i], std::copysign(kInf, ends[i]));
            continue;
          }
          CHECK(std::isfinite(out[i]));
          if (large) CHECK(out[i] / ends[i] > 0.85f && out[i] / ends[i] <= 1.f);
        }
      }
    }
  });
}

// --- At random -----------------------------------------------------------------------------------

TEST(the_mean_of_random_rounding_is_right) {
  forEachKernel([](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    std::vector<float> values(64);
    std::mt19937 random(4);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (float& value : values) value = uniform(random);
    values[3] = 1;  // the ends, where something could be cut off
    values[4] = -1;
    values[40] = 0x1p-9f;
    constexpr int kTimes = 4000;
    std::vector<double> sum(values.size());
    std::vector<float> least(values.size(), kInf), most(values.size(), -kInf);
    for (uint64_t seed = 0; seed < kTimes; ++seed) {
      const Draw draw{.seed = seed, .first = 0};
      const std::vector<float> out = through(kernels, codec, values, &draw);
      for (size_t i = 0; i < out.size(); ++i) {
        sum[i] += out[i];
        least[i] = std::min(least[i], out[i]);
        most[i] = std::max(most[i], out[i]);
      }
    }
    for (size_t i = 0; i < values.size(); ++i) {
      CHECK(least[i] <= values[i] && values[i] <= most[i]);
      // Five times the deviation that a mean of as many draws has at the most.
      const double step = static_cast<double>(most[i]) - least[i];
      const double off = std::fabs(sum[i] / kTimes - static_cast<double>(values[i]));
      if (off > 5 * step / 2 / std::sqrt(kTimes) + 0x1p-16 * step)
        check::fail(__FILE__, __LINE__, describe(set, codec, i));
    }
  });
}

TEST(what_has_a_code_keeps_it_at_random_too) {
  forEachKernel([](const KernelSet&, Codec codec, const CodecKernels& kernels) {
    std::vector<float> values(64);
    // The scale is 1 for int8 and int4: 7 and -7, whole numbers between.
    const int most = codec == Codec::kInt8 ? 127 : 7;
    for (int i = 0; i < 64; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i % 15 - 7);
    values[0] = values[32] = static_cast<float>(most);
    for (uint64_t seed = 0; seed < 500; ++seed) {
      const Draw draw{.seed = seed, .first = 0};
      CHECK(through(kernels, codec, values, &draw) == values);
    }
  });
}

TEST(draws_differ_by_seed_and_place) {
  std::set<uint32_t> seen;
  for (uint64_t seed = 0; seed < 20; ++seed)
    for (uint64_t block = 0; block < 20; ++block)
      for (uint32_t i = 0; i < kCodecBlock; ++i)
        seen.insert(codec::drawn<Single>(codec::keyOf(seed, block), i));
  // Of 12,800 in 2^32 hardly two are alike.
  CHECK(seen.size() > 12'795);
  // As often up as down, where they decide.
  CHECK_EQ((codec::part<Single, 16>(0) + codec::part<Single, 16>(0xffffffff)), 1.f);
  CHECK_EQ((codec::part<Single, 12>(0) + codec::part<Single, 12>(0xffffffff)), 1.f);
  CHECK(mixedSeed(1, 2) != mixedSeed(2, 1));
  CHECK(mixedSeed(0, 0) != mixedSeed(0, 1));
  CHECK(mixedSeed(mixedSeed(7, 1), 2) != mixedSeed(mixedSeed(7, 2), 1));

  // What one draw says of the next place, block or seed: nothing.
  const auto agreement = [](auto next) {
    int bits = 0;
    for (uint64_t seed = 0; seed < 1000; ++seed) {
      const uint32_t first = codec::drawn<Single>(codec::keyOf(seed, 0), 0);
      bits += std::popcount(first ^ next(seed));
    }
    return bits / 32000.;
  };
  const auto isHalf = [](double share) { return std::fabs(share - 0.5) < 0.02; };
  CHECK(isHalf(agreement([](uint64_t s) { return codec::drawn<Single>(codec::keyOf(s, 0), 1); })));
  CHECK(isHalf(agreement([](uint64_t s) { return codec::drawn<Single>(codec::keyOf(s, 1), 0); })));
  CHECK(isHalf(
      agreement([](uint64_t s) { return codec::drawn<Single>(codec::keyOf(s + 1, 0), 0); })));
}

// The register with the modes of this thread's arithmetic, and the one that flushes subnormals.
#if defined(__x86_64__)
constexpr unsigned kFlush = 0x8040;
unsigned modes() {
  return _mm_getcsr();
}
void setModes(unsigned modes) {
  _mm_setcsr(modes);
}
#else
constexpr uint64_t kFlush = 1 << 24;
uint64_t modes() {
  uint64_t modes;
  asm volatile("mrs %0, fpcr" : "=r"(modes));
  return modes;
}
void setModes(uint64_t modes) {
  asm volatile("msr fpcr, %0" : : "r"(modes) : "memory");
}
#endif

// A rank whose threads flush subnormals (torch.set_flush_denormal) decodes as the others do.
TEST(decoding_knows_no_modes) {
  const std::vector<float> values = someValues(4000, 11, true);
  forEachKernel([&](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    const Bytes coded = encoded(codec, values);
    std::vector<float> want(values.size()), got(values.size());
    CHECK(kernels.decode(want.data(), coded.data(), coded.size(), want.size()));
    const auto usual = modes();
    setModes(usual | kFlush);
    const bool taken = kernels.decode(got.data(), coded.data(), coded.size(), got.size());
    setModes(usual);
    CHECK(taken);
    if (std::memcmp(want.data(), got.data(), 4 * want.size()) != 0)
      check::fail(__FILE__, __LINE__, describe(set, codec, 0));
  });
}

}  // namespace
