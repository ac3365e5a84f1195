// What decodes the bytes of other ranks (kernels/codec.h, kernels/sparse_codec.h), given any bytes:
// the coded message ends where the next page cannot be touched.
//
// Whatever comes: all instruction sets say the same of it, they take what an encoder could have
// made and nothing else, write n elements and no more, and what they took is finite or NaN by whole
// blocks.  Any floats come back from an encoder as a message that is taken, and are finite there
// only if they were and are in its range.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "fuzz.h"
#include "input.h"
#include "kernels/codec.h"
#include "kernels/reduce.h"
#include "kernels/sparse_codec.h"

using namespace ringreduce;

namespace {

constexpr size_t kPlace = 4096;
constexpr size_t kSparseStep = 33;  // so that some messages have several blocks
constexpr float kUntouched = 1234.5f;

// The last bytes before a page that cannot be touched.
std::byte* endOf(size_t bytes) {
  static std::byte* const end = [] {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t before = (kPlace + page - 1) / page * page;
    void* const base =
        mmap(nullptr, before + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) std::abort();
    std::byte* const last = static_cast<std::byte*>(base) + before;
    if (mprotect(last, page, PROT_NONE) != 0) std::abort();
    return last;
  }();
  return end - bytes;
}

bool isInteger(Codec codec) {
  return codec == Codec::kInt8 || codec == Codec::kInt4;
}

uint32_t word(const std::byte* at) {
  return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8;
}

// By the letter of docs/compression.md.
bool couldBeEncoded(Codec codec, const std::byte* in, size_t bytes, size_t n) {
  if (bytes != codedBytes(codec, n)) return false;
  if (!isInteger(codec)) {
    const uint32_t infinite = codec == Codec::kFloat16 ? 0x7c00 : 0x7f80;
    const uint32_t nan = codec == Codec::kFloat16 ? 0x7e00 : 0x7fc0;
    for (size_t i = 0; i < n; ++i)
      if (const uint32_t code = word(in + 2 * i); (code & 0x7fff) > infinite && code != nan)
        return false;
    return true;
  }
  for (size_t first = 0; first < n; first += kCodecBlock) {
    const std::byte* const block = in + codedBytes(codec, first);
    const uint32_t scale = word(block);
    const uint32_t magnitude = codec == Codec::kInt4 ? scale & 0x7fff : scale;
    const bool codeless = scale == 0 || scale == 0x7fc0;
    const uint32_t greatest = codec == Codec::kInt4 ? 0x7dff : 0x7c01;
    if (!codeless && (magnitude < 0x0080 || magnitude > greatest)) return false;
    for (size_t i = 0; i < kCodecBlock; ++i) {
      const uint32_t pair = static_cast<uint32_t>(block[2 + (codec == Codec::kInt4 ? i % 16 : i)]);
      const uint32_t code = codec == Codec::kInt8 ? pair : i < 16 ? pair & 15 : pair >> 4;
      if (code != 0 && (codeless || first + i >= n)) return false;
      if (codec == Codec::kInt8 && code == 0x80) return false;
    }
  }
  return true;
}

// Whether an element is finite and in the codec's range; of integers, all of its block.
bool fits(Codec codec, const std::vector<float>& in, size_t i) {
  if (codec == Codec::kFloat16) return std::fabs(in[i]) < 65520;
  if (!isInteger(codec)) return std::isfinite(in[i]);
  const size_t first = i / kCodecBlock * kCodecBlock;
  return std::all_of(&in[first], &in[first] + std::min(kCodecBlock, in.size() - first),
                     [](float value) { return std::isfinite(value); });
}

// By the letter of docs/diloco.md.
bool couldBeSparse(const std::byte* in, size_t bytes, size_t n, double share) {
  const std::byte* const end = in + bytes;
  for (size_t left = n; left > 0;) {
    const size_t chunk = std::min(left, kSparseBlock);
    const size_t kept =
        std::max<size_t>(1, static_cast<size_t>(share * static_cast<double>(chunk) + 0.5));
    size_t lower = 0;
    while (kept << (lower + 1) <= chunk) ++lower;
    const size_t row = kept * (lower + 2), filling = row + kept + ((chunk - 1) >> lower);
    const size_t size = 4 + (filling + 7) / 8;
    if (static_cast<size_t>(end - in) < size) return false;
    const uint32_t lesser = word(in), greater = word(in + 2);
    const auto bit = [&](size_t at) { return static_cast<uint32_t>(in[4 + at / 8]) >> at % 8 & 1; };
    std::vector<size_t> places;
    size_t set = 0;
    for (size_t at = 0; at < 8 * (size - 4); ++at) {
      set += bit(at);
      if (at >= filling && bit(at)) return false;
      if (at < row || at >= filling || !bit(at)) continue;
      size_t place = (at - row - places.size()) << lower;
      for (size_t k = 0; k < lower && places.size() < kept; ++k)
        place |= static_cast<size_t>(bit(places.size() * (lower + 2) + k)) << k;
      places.push_back(place);
    }
    const auto isMagnitude = [](uint32_t one) {
      return one == 0 || (one >= 0x0080 && one <= 0x7f7f);
    };
    if (lesser == 0x7fc0 && greater == 0x7fc0) {
      if (set > 0) return false;
    } else if (!isMagnitude(lesser) || !isMagnitude(greater) || lesser > greater ||
               places.size() != kept || places.back() >= chunk ||
               std::adjacent_find(places.begin(), places.end(), std::greater_equal<>()) !=
                   places.end()) {
      return false;
    }
    in += size;
    left -= chunk;
  }
  return in == end;
}

class Play {
 public:
  // `trusting`: takes for granted that what has the right length is right.
  explicit Play(bool trusting) : trusting_(trusting) {}

  void run(fuzz::Input input) {
    const uint8_t what = input.byte();
    const Codec codec = static_cast<Codec>(what % kCodecs);
    const size_t n = input.byte();
    if (what & 16) {
      const double share = (input.byte() + 1) / 256.0;
      const std::string_view rest = input.bytes(kPlace);
      return what & 4 ? encodeSparse(rest, share) : decodeSparse(rest, n * kSparseStep, share);
    }
    const std::string_view rest = input.bytes(kPlace);
    if (what & 4)
      encode(codec, rest, what & 8);
    else
      decode(codec, rest, n);
  }
  const char* wrong() const { return wrong_; }
  bool took() const { return took_; }

 private:
  void decode(Codec codec, std::string_view bytes, size_t n) {
    std::byte* const in = endOf(bytes.size());
    std::memcpy(in, bytes.data(), bytes.size());
    const bool right = couldBeEncoded(codec, in, bytes.size(), n);
    if (trusting_) {
      took_ = bytes.size() == codedBytes(codec, n);
      if (took_ && !right) wrong_ = "took what no encoder makes";
      return;
    }
    std::vector<float> first;
    for (const KernelSet& set : kernelSets()) {
      if (!set.runs) continue;
      std::vector<float> out(n + 16, kUntouched), sum(n + 16, kUntouched);
      std::fill_n(sum.begin(), n, 1.f);
      took_ = set.codecs(codec).decode(out.data(), in, bytes.size(), n);
      if (took_ != set.codecs(codec).decodeAdd(sum.data(), in, bytes.size(), n))
        wrong_ = "adds what it does not decode, or the other way round";
      if (took_ != right) wrong_ = took_ ? "took what no encoder makes" : "refused what one makes";
      for (size_t i = n; i < out.size(); ++i)
        if (out[i] != kUntouched || sum[i] != kUntouched) wrong_ = "wrote beside its place";
      if (took_) lookAt(codec, out, sum, n);
      if (first.empty()) first = out;
      if (took_ && std::memcmp(first.data(), out.data(), 4 * n) != 0)
        wrong_ = "differs by instruction set";
    }
  }

  void lookAt(Codec codec, const std::vector<float>& out, const std::vector<float>& sum, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const float begin = out[i / kCodecBlock * kCodecBlock];
      if (isInteger(codec) && !std::isfinite(out[i]) && !(std::isnan(out[i]) && std::isnan(begin)))
        wrong_ = "made of codes what is not finite";
      if (!(sum[i] == 1.f + out[i] || std::isnan(out[i]))) wrong_ = "added something else";
    }
  }

  void encode(Codec codec, std::string_view bytes, bool stochastic) {
    const size_t n = bytes.size() / 4, size = codedBytes(codec, n);
    std::vector<float> in(n), error(n), out(n);
    if (n > 0) std::memcpy(in.data(), bytes.data(), 4 * n);
    const Draw draw{.seed = n, .first = 0};
    std::byte* const coded = endOf(size);
    for (const KernelSet& set : kernelSets()) {
      if (!set.runs) continue;
      set.codecs(codec).encode(coded, error.data(), in.data(), n, stochastic ? &draw : nullptr);
      if (!couldBeEncoded(codec, coded, size, n)) wrong_ = "encoded what is to be refused";
      if (!set.codecs(codec).decode(out.data(), coded, size, n)) wrong_ = "refuses its own";
      for (size_t i = 0; i < n; ++i) {
        if (error[i] != (std::isfinite(out[i]) ? in[i] - out[i] : 0))
          wrong_ = "lost something else";
        if (std::isfinite(out[i]) != fits(codec, in, i)) wrong_ = "hides an overflow or makes one";
      }
    }
  }

  void decodeSparse(std::string_view bytes, size_t n, double share) {
    std::byte* const in = endOf(bytes.size());
    std::memcpy(in, bytes.data(), bytes.size());
    const bool right = couldBeSparse(in, bytes.size(), n, share);
    if (trusting_) {
      took_ = bytes.size() == sparseBytes(n, share);
      if (took_ && !right) wrong_ = "took what no encoder makes";
      return;
    }
    std::vector<float> sum(n + 16, kUntouched);
    took_ = sparseDecodeAdd(sum.data(), in, bytes.size(), n, share);
    if (took_ != right) wrong_ = took_ ? "took what no encoder makes" : "refused what one makes";
    for (size_t i = n; i < sum.size(); ++i)
      if (sum[i] != kUntouched) wrong_ = "wrote beside its place";
    for (size_t i = 0; i < n && took_; ++i)
      if (!std::isfinite(sum[i]) &&
          !(std::isnan(sum[i]) && std::isnan(sum[i / kSparseBlock * kSparseBlock])))
        wrong_ = "made of codes what is not finite";
  }

  void encodeSparse(std::string_view bytes, double share) {
    const size_t n = bytes.size() / 4, size = sparseBytes(n, share);
    std::vector<float> in(n), error(n), out(n);
    if (n > 0) std::memcpy(in.data(), bytes.data(), 4 * n);
    std::byte* const coded = endOf(size);
    sparseEncode(coded, error.data(), in.data(), n, share);
    if (!couldBeSparse(coded, size, n, share)) wrong_ = "encoded what is to be refused";
    if (!sparseDecodeAdd(out.data(), coded, size, n, share)) wrong_ = "refuses its own";
    const bool fits = std::all_of(in.begin(), in.end(), [](float x) { return std::isfinite(x); });
    for (size_t i = 0; i < n; ++i) {
      if (error[i] != (std::isfinite(out[i]) ? in[i] - out[i] : 0)) wrong_ = "lost something else";
      if (std::isfinite(out[i]) != fits) wrong_ = "hides an overflow or makes one";
    }
  }

  const bool trusting_;
  const char* wrong_ = nullptr;
  bool took_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Play play(false);
  play.run(fuzz::Input(data, size));
  if (play.wrong()) {
    std::fprintf(stderr, "a codec %s\n", play.wrong());
    std::abort();
  }
  return 0;
}

// The protection is the look at scales and codes: without it bytes are taken that mean nothing.
fuzz::Trial fuzz::control(const uint8_t* data, size_t size) {
  Play play(false), trusting(true);
  play.run(Input(data, size));
  trusting.run(Input(data, size));
  return {.reached = play.took(), .seen = trusting.wrong() != nullptr};
}
