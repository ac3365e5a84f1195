// The bytes of the codecs: the same in all instruction sets, at every size and alignment and
// however a message is cut; and what the decoders refuse.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "check.h"
#include "codec_oracle.h"

using namespace oracle;

namespace {

constexpr size_t kMost = 300;

#define CHECK_OR(condition, what)                            \
  do {                                                       \
    if (!(condition)) check::fail(__FILE__, __LINE__, what); \
  } while (0)

// Two pages of memory, and none before and behind them that can be touched.
class Guarded {
 public:
  Guarded() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    base_ = static_cast<char*>(
        mmap(nullptr, 4 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(base_ != MAP_FAILED);
    CHECK_EQ(mprotect(base_, page_, PROT_NONE), 0);
    CHECK_EQ(mprotect(base_ + 3 * page_, page_, PROT_NONE), 0);
  }
  ~Guarded() { munmap(base_, 4 * page_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // The first bytes there, or the last.
  template <class T>
  T* at(bool end, size_t bytes) const {
    CHECK(bytes <= 2 * page_);
    return reinterpret_cast<T*>(end ? base_ + 3 * page_ - bytes : base_ + page_);
  }

 private:
  size_t page_;
  char* base_;
};

// Encodes, decodes and adds where a byte too far is a crash, and compares with the oracle.
void tryOne(const KernelSet& set, Codec codec, const std::vector<float>& values, const Draw* draw,
            bool end) {
  const CodecKernels& kernels = set.codecs(codec);
  const size_t n = values.size(), bytes = codedBytes(codec, n);
  const std::string what = describe(set, codec, n);
  static const Guarded memory[4];
  float* const in = memory[0].at<float>(end, 4 * n);
  float* const error = memory[1].at<float>(end, 4 * n);
  float* const out = memory[2].at<float>(end, 4 * n);
  std::copy(values.begin(), values.end(), in);
  const Bytes want = encoded(codec, values, draw);

  std::byte* const code = memory[3].at<std::byte>(end, bytes);
  for (const bool with_error : {true, false}) {
    std::fill_n(code, bytes, std::byte{0xa5});
    kernels.encode(code, with_error ? error : nullptr, in, n, draw);
    CHECK_OR(std::equal(want.begin(), want.end(), code), what);
  }
  CHECK_OR(kernels.decode(out, code, bytes, n), what);
  const std::vector<float> got(out, out + n), lost(error, error + n);
  std::vector<float> sum(n);
  for (size_t i = 0; i < n; ++i) {
    CHECK_OR(sameBits(got[i], decoded(codec, want, i)), what);
    const float left = std::isfinite(got[i]) ? values[i] - got[i] : 0;
    CHECK_OR(sameBits(lost[i], left), what);
    sum[i] = static_cast<float>(i) - 7;
  }
  std::copy(sum.begin(), sum.end(), out);
  CHECK_OR(kernels.decodeAdd(out, code, bytes, n), what);
  for (size_t i = 0; i < n; ++i)
    CHECK_OR(sameBits(out[i], sum[i] + got[i]) || (std::isnan(out[i]) && std::isnan(got[i])), what);

  // The error may go where the values were.
  kernels.encode(code, in, in, n, draw);
  CHECK_OR(std::equal(want.begin(), want.end(), code), what);
  CHECK_OR(std::equal(lost.begin(), lost.end(), in, sameBits), what);
}

TEST(every_size_and_alignment_gives_the_oracles_bytes) {
  forEachKernel([](const KernelSet& set, Codec codec, const CodecKernels&) {
    for (size_t n = 0; n <= kMost; ++n) {
      const Draw draw{.seed = n, .first = 128 * n};
      const std::vector<float> values = someValues(n, n, n % 3 == 0);
      // At the page's end the coded bytes lie at odd places, so many pointers are not aligned.
      tryOne(set, codec, values, n % 2 ? &draw : nullptr, n % 4 < 2);
    }
  });
}

TEST(pointers_need_no_alignment) {
  const std::vector<float> values = someValues(kMost, 1, true);
  forEachKernel([&](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    const Bytes want = encoded(codec, values);
    for (size_t off = 1; off < 4; ++off) {
      std::vector<char> in(4 * kMost + off), error(in), out(in), coded(want.size() + off);
      const auto floats = [&](std::vector<char>& memory) {
        return reinterpret_cast<float*>(memory.data() + off);
      };
      std::byte* const code = reinterpret_cast<std::byte*>(coded.data() + off);
      std::memcpy(in.data() + off, values.data(), 4 * kMost);
      kernels.encode(code, floats(error), floats(in), kMost, nullptr);
      CHECK_OR(std::equal(want.begin(), want.end(), code), describe(set, codec, off));
      CHECK(kernels.decode(floats(out), code, want.size(), kMost));
      CHECK(kernels.decodeAdd(floats(out), code, want.size(), kMost));
    }
  });
}

TEST(a_cut_at_a_block_changes_nothing) {
  const size_t n = 5 * 128 + 77;
  const std::vector<float> values = someValues(n, 2, true);
  forEachKernel([&](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    for (const bool stochastic : {false, true}) {
      const Draw whole{.seed = 9, .first = 256};
      const Bytes want = encoded(codec, values, stochastic ? &whole : nullptr);
      for (const size_t cut : {size_t{0}, kCodecBlock, size_t{128}, size_t{512}, size_t{640}}) {
        Bytes got(want.size());
        const Draw second{.seed = 9, .first = 256 + cut};
        kernels.encode(got.data(), nullptr, values.data(), cut, stochastic ? &whole : nullptr);
        kernels.encode(got.data() + codedBytes(codec, cut), nullptr, values.data() + cut, n - cut,
                       stochastic ? &second : nullptr);
        CHECK_OR(got == want, describe(set, codec, cut));
      }
    }
  });
}

TEST(sizes_are_what_is_promised) {
  CHECK_EQ(codedBytes(Codec::kBfloat16, 1000), 2000u);
  CHECK_EQ(codedBytes(Codec::kFloat16, 7), 14u);
  for (const size_t n : {size_t{1} << 20, size_t{100'000}}) {
    CHECK(static_cast<double>(codedBytes(Codec::kInt8, n)) <= 0.27 * 4 * static_cast<double>(n));
    CHECK(static_cast<double>(codedBytes(Codec::kInt4, n)) <= 0.15 * 4 * static_cast<double>(n));
  }
  forEachCodec([](Codec codec) {
    CHECK_EQ(codedBytes(codec, 0), 0u);
    for (size_t n = 128; n <= kMost; ++n)
      CHECK_EQ(codedBytes(codec, n), codedBytes(codec, 128) + codedBytes(codec, n - 128));
    CHECK(codecNamed(name(codec)) == codec);
  });
  CHECK(!codecNamed("int2"));
}

// The bytes that docs/compression.md tells of, on any machine.
TEST(the_layout_is_the_documented_one) {
  forEachKernel([](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    std::vector<float> values(33);
    values[0] = codec == Codec::kInt8 ? 127.f : 8.f;
    values[1] = -2;
    values[16] = -3;
    values[32] = 1;
    Bytes want(codedBytes(codec, 33)), got(want);
    switch (codec) {
      case Codec::kInt8:  // the last scale is 1/127
        put16(&want[0], 0x3f80);
        want[2] = std::byte{127}, want[3] = std::byte{0xfe}, want[18] = std::byte{0xfd};
        put16(&want[34], 0x3c01), want[36] = std::byte{127};
        break;
      case Codec::kInt4:  // 8 becomes -8, so the scale is -1; then -1/8
        put16(&want[0], 0xbf80);
        want[2] = std::byte{0x38}, want[3] = std::byte{0x02};
        put16(&want[18], 0xbe00), want[20] = std::byte{0x08};
        break;
      default: {
        const bool wide = codec == Codec::kFloat16;
        put16(&want[0], wide ? 0x4800 : 0x4100), put16(&want[2], 0xc000);
        put16(&want[32], wide ? 0xc200 : 0xc040), put16(&want[64], wide ? 0x3c00 : 0x3f80);
      }
    }
    kernels.encode(got.data(), nullptr, values.data(), 33, nullptr);
    CHECK_OR(got == want, describe(set, codec, 33));
  });
}

// --- What is refused -----------------------------------------------------------------------------

bool takes(const CodecKernels& kernels, const Bytes& coded, size_t n) {
  // Of its own size, so that a sanitizer sees who reads on.
  const Bytes exact(coded);
  std::vector<float> out(n), sum(n);
  const bool decoded = kernels.decode(out.data(), exact.data(), exact.size(), n);
  CHECK_EQ(kernels.decodeAdd(sum.data(), exact.data(), exact.size(), n), decoded);
  return decoded;
}

TEST(any_other_length_is_refused) {
  forEachKernel([](const KernelSet&, Codec codec, const CodecKernels& kernels) {
    for (const size_t n : {size_t{1}, size_t{31}, size_t{32}, size_t{33}, size_t{128}, kMost}) {
      const Bytes coded = encoded(codec, someValues(n, n, false));
      CHECK(takes(kernels, coded, n));
      for (size_t bytes = 0; bytes < coded.size(); ++bytes)
        CHECK(!takes(kernels, Bytes(coded.begin(), coded.begin() + static_cast<long>(bytes)), n));
      Bytes longer(coded);
      longer.push_back(std::byte{0});
      CHECK(!takes(kernels, longer, n));
      CHECK(!takes(kernels, coded, n + kCodecBlock));
      CHECK(!takes(kernels, {}, n));
    }
    CHECK(takes(kernels, {}, 0));
  });
}

// A block among others.  Only of some 16 bits an encoder makes a scale; of no codes yet fewer.
TEST(scales_that_no_encoder_makes_are_refused) {
  forEachKernel([](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    if (codec != Codec::kInt8 && codec != Codec::kInt4) return;
    const bool signs = codec == Codec::kInt4;
    const uint16_t greatest = signs ? codec::kGreatestInt4Scale : codec::kGreatestInt8Scale;
    Bytes coded = encoded(codec, std::vector<float>(96, 1.f));
    Bytes codeless = encoded(codec, std::vector<float>(96, 0.f));
    std::vector<float> out(96);
    const auto decodes = [&](const Bytes& bytes) {
      return kernels.decode(out.data(), bytes.data(), bytes.size(), 96);
    };
    for (uint32_t scale = 0; scale < 0x10000; ++scale) {
      put16(&coded[codedBytes(codec, 32)], scale);
      put16(&codeless[codedBytes(codec, 32)], scale);
      const uint32_t magnitude = signs ? scale & 0x7fff : scale;
      const bool normal = magnitude >= codec::kLeastScale && magnitude <= greatest;
      if (decodes(coded) != normal) check::fail(__FILE__, __LINE__, describe(set, codec, scale));
      const bool codes_no_matter = scale == 0 || scale == codec::kNanScale;
      if (decodes(codeless) != (normal || codes_no_matter))
        check::fail(__FILE__, __LINE__, describe(set, codec, scale));
    }
  });
}

TEST(codes_that_no_encoder_makes_are_refused) {
  forEachKernel([](const KernelSet& set, Codec codec, const CodecKernels& kernels) {
    const size_t n = 70;  // the last block has 6 elements
    const Bytes coded = encoded(codec, std::vector<float>(n, 3.f));
    if (codec == Codec::kInt8 || codec == Codec::kInt4) {
      const size_t last = codedBytes(codec, 64) + 2;
      for (size_t at = 2; at < coded.size(); ++at) {
        if (at < last && at % codedBytes(codec, 32) < 2) continue;  // a scale
        for (int code = 0; code < 256; ++code) {
          Bytes changed(coded);
          changed[at] = static_cast<std::byte>(code);
          const bool half_filling = codec == Codec::kInt4 && at >= last && at < last + 6;
          const bool filling = at >= last + 6 || (half_filling && code >> 4 != 0);
          const bool right =
              filling ? code == 0 && !half_filling : codec == Codec::kInt4 || code != 0x80;
          CHECK_OR(takes(kernels, changed, n) == right, describe(set, codec, at));
        }
      }
      return;
    }
    // The one NaN, and no other.
    const uint32_t infinite = codec == Codec::kFloat16 ? 0x7c00 : 0x7f80;
    const uint32_t nan = codec == Codec::kFloat16 ? 0x7e00 : 0x7fc0;
    for (uint32_t code = 0; code < 0x10000; ++code) {
      Bytes changed(coded);
      put16(&changed[2 * (code % n)], code);
      const bool right = (code & 0x7fff) <= infinite || code == nan;
      CHECK(takes(kernels, changed, n) == right);
    }
  });
}

TEST(the_chosen_kernels_are_of_a_set) {
  forEachCodec([](Codec codec) {
    bool found = false;
    for (const KernelSet& set : kernelSets())
      found |= set.runs && &set.codecs(codec) == &codecKernels(codec);
    CHECK(found);
  });
  const std::vector<float> values = someValues(kMost, 3, false);
  std::vector<float> out(kMost), sum(kMost, 1.f);
  Bytes coded(codedBytes(Codec::kInt8, kMost));
  encode(Codec::kInt8, coded.data(), nullptr, values.data(), kMost);
  CHECK(coded == encoded(Codec::kInt8, values));
  CHECK(decode(Codec::kInt8, out.data(), coded.data(), coded.size(), kMost));
  CHECK(decodeAdd(Codec::kInt8, sum.data(), coded.data(), coded.size(), kMost));
}

}  // namespace
