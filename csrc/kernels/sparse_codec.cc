// The sparse codec, block by block: which elements are kept, their two magnitudes, and the bits.
#include "kernels/sparse_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>

#include "base/bytes.h"
#include "kernels/codec_block.h"

namespace ringreduce {
namespace {

constexpr size_t kScalesBytes = 4;               // two bfloat16
constexpr uint16_t kGreatestMagnitude = 0x7f7f;  // the last finite bfloat16

// How a block of n elements is laid out behind its scales, in bits.  Indices ascend, and are stored
// as Elias and Fano did: their lower bits as they are; their upper bits as a row in which the i-th
// one that is set is at its upper bits + i.  That is close to the least that a set of so many
// indices needs, and its size does not depend on the indices.
struct BlockLayout {
  size_t n, kept;
  unsigned lower;  // bits of an index

  BlockLayout(size_t elements, double share)
      : n(elements),
        kept(std::clamp(static_cast<size_t>(share * static_cast<double>(n) + 0.5), size_t{1}, n)),
        lower(static_cast<unsigned>(std::bit_width(n / kept)) - 1) {}

  // A field: the lower bits, which magnitude, the sign.
  size_t fieldBegin(size_t i) const { return i * (lower + 2); }
  size_t rowBegin() const { return fieldBegin(kept); }
  size_t rowSize() const { return kept + ((n - 1) >> lower); }
  size_t end() const { return rowBegin() + rowSize(); }
  size_t bytes() const { return kScalesBytes + ceilDiv(end(), 8); }
};

// Calls visit(first element, layout) for each block until one returns false.  Returns whether none
// did.
template <class Visit>
bool forEachBlock(size_t n, double share, Visit visit) {
  for (size_t first = 0; first < n; first += kSparseBlock)
    if (!visit(first, BlockLayout(std::min(kSparseBlock, n - first), share))) return false;
  return true;
}

// --- Bits, least significant first ---------------------------------------------------------------

void putBits(std::byte* bits, size_t at, uint32_t value) {
  for (; value != 0; value >>= 1, ++at)
    bits[at / 8] |= static_cast<std::byte>((value & 1) << at % 8);
}
uint32_t bitAt(const std::byte* bits, size_t at) {
  return static_cast<uint32_t>(bits[at / 8]) >> at % 8 & 1;
}
uint32_t getBits(const std::byte* bits, size_t at, unsigned count) {
  uint32_t value = 0;
  for (unsigned i = 0; i < count; ++i) value |= bitAt(bits, at + i) << i;
  return value;
}

void putScales(std::byte* out, uint16_t lesser, uint16_t greater) {
  putBits(out, 0, lesser | static_cast<uint32_t>(greater) << 16);
}

// --- A block -------------------------------------------------------------------------------------

uint32_t magnitudeOf(float value) {
  return codec::as<uint32_t>(value) & codec::kMagnitude;
}

// The kept magnitudes that are above a limit, or those that are not.
struct KeptPart {
  double sum = 0;
  size_t count = 0;

  uint16_t mean() const {
    const float mean = count > 0 ? static_cast<float>(sum / static_cast<double>(count)) : 0;
    return mean > 0 ? codec::roundedScale<false>(mean, kGreatestMagnitude) : uint16_t{0};
  }
};

// The indices of the greatest magnitudes, in order; false if one is infinite or NaN.  Of equals the
// first ones are kept.
bool keepGreatest(uint16_t* kept, const float* in, const BlockLayout& block) {
  constexpr int kBucketBits = 20;  // a bucket: magnitudes with the same upper bits
  constexpr size_t kFinite = codec::kInfinity >> kBucketBits;
  std::array<uint16_t, (codec::kMagnitude >> kBucketBits) + 1> counts{};
  for (size_t i = 0; i < block.n; ++i) ++counts[magnitudeOf(in[i]) >> kBucketBits];
  if (std::any_of(counts.begin() + kFinite, counts.end(), [](uint16_t n) { return n > 0; }))
    return false;
  size_t bucket = kFinite, found = 0;
  while (found < block.kept) found += counts[--bucket];

  // What may be kept, and of it the least that is.
  std::array<uint32_t, kSparseBlock> ordered;
  const uint32_t floor = static_cast<uint32_t>(bucket << kBucketBits);
  std::array<uint16_t, kSparseBlock> candidates;
  for (size_t i = 0, n = 0; n < found; ++i) {
    if (magnitudeOf(in[i]) < floor) continue;
    ordered[n] = magnitudeOf(in[i]);
    candidates[n++] = static_cast<uint16_t>(i);
  }
  const auto last = ordered.begin() + static_cast<ptrdiff_t>(block.kept - 1);
  std::nth_element(ordered.begin(), last, ordered.begin() + static_cast<ptrdiff_t>(found),
                   std::greater<>());
  const uint32_t least = *last;
  size_t ties = 1 + static_cast<size_t>(std::count(ordered.begin(), last, least));
  for (size_t c = 0; c < found; ++c) {
    const uint32_t magnitude = magnitudeOf(in[candidates[c]]);
    if (magnitude < least || (magnitude == least && ties == 0)) continue;
    if (magnitude == least) --ties;
    *kept++ = candidates[c];
  }
  return true;
}

void encodeBlock(std::byte* out, float* error, const float* in, const BlockLayout& block) {
  std::memset(out, 0, block.bytes());
  std::array<uint16_t, kSparseBlock> kept;
  if (!keepGreatest(kept.data(), in, block)) {
    putScales(out, codec::kNanScale, codec::kNanScale);
    if (error) std::fill_n(error, block.n, 0.f);
    return;
  }
  const auto size = [&](size_t k) {
    return static_cast<double>(codec::as<float>(magnitudeOf(in[kept[k]])));
  };

  // Zeros among them must stay zeros, so they are then the lesser part.
  double sum = 0;
  bool zeros = false;
  for (size_t k = 0; k < block.kept; ++k) {
    sum += size(k);
    zeros |= magnitudeOf(in[kept[k]]) == 0;
  }
  const double limit = zeros ? 0 : sum / static_cast<double>(block.kept);
  std::array<KeptPart, 2> parts;
  for (size_t k = 0; k < block.kept; ++k) {
    KeptPart& part = parts[size(k) > limit];
    part.sum += size(k);
    ++part.count;
  }
  const uint16_t lesser = parts[0].mean(), greater = std::max(lesser, parts[1].mean());
  putScales(out, lesser, greater);

  std::byte* const bits = out + kScalesBytes;
  if (error && error != in) std::copy_n(in, block.n, error);
  for (size_t k = 0; k < block.kept; ++k) {
    const uint32_t i = kept[k], above = size(k) > limit;
    const uint32_t sign = codec::as<uint32_t>(in[i]) >> 31;
    const uint32_t below = i & ((1u << block.lower) - 1);
    putBits(bits, block.fieldBegin(k), below | (above | sign << 1) << block.lower);
    putBits(bits, block.rowBegin() + (i >> block.lower) + k, 1);
    const float magnitude = codec::scaleOf(above ? greater : lesser);
    if (error) error[i] = in[i] - (sign ? -magnitude : magnitude);
  }
}

bool decodeAddBlock(float* sum, const std::byte* in, const BlockLayout& block) {
  const uint16_t lesser = static_cast<uint16_t>(getBits(in, 0, 16));
  const uint16_t greater = static_cast<uint16_t>(getBits(in, 16, 16));
  if (lesser == codec::kNanScale && greater == codec::kNanScale) {
    std::fill_n(sum, block.n, codec::scaleOf(codec::kNanScale));
    return std::all_of(in + kScalesBytes, in + block.bytes(),
                       [](std::byte byte) { return byte == std::byte{0}; });
  }
  for (const uint16_t scale : {lesser, greater})
    if (scale != 0 && (scale < codec::kLeastScale || scale > kGreatestMagnitude)) return false;
  if (lesser > greater) return false;

  const std::byte* const bits = in + kScalesBytes;
  size_t k = 0, next = 0;  // the least index that may follow
  for (size_t at = 0; at < block.rowSize(); ++at) {
    if (!bitAt(bits, block.rowBegin() + at)) continue;
    if (k == block.kept) return false;
    const uint32_t field = getBits(bits, block.fieldBegin(k), block.lower + 2);
    const size_t i = (at - k) << block.lower | (field & ((1u << block.lower) - 1));
    if (i < next || i >= block.n) return false;
    const float magnitude = codec::scaleOf(field >> block.lower & 1 ? greater : lesser);
    sum[i] += field >> block.lower & 2 ? -magnitude : magnitude;
    next = i + 1;
    ++k;
  }
  for (size_t at = block.end(); at % 8 != 0; ++at)
    if (bitAt(bits, at)) return false;
  return k == block.kept;
}

}  // namespace

size_t sparseBytes(size_t count, double share) {
  const size_t whole = count / kSparseBlock, rest = count % kSparseBlock;
  return whole * BlockLayout(kSparseBlock, share).bytes() +
         (rest > 0 ? BlockLayout(rest, share).bytes() : 0);
}

void sparseEncode(std::byte* out, float* error, const float* in, size_t n, double share) {
  forEachBlock(n, share, [&](size_t first, const BlockLayout& block) {
    encodeBlock(out, error ? error + first : nullptr, in + first, block);
    out += block.bytes();
    return true;
  });
}

bool sparseDecodeAdd(float* sum, const std::byte* in, size_t bytes, size_t n, double share) {
  if (bytes != sparseBytes(n, share)) return false;
  return forEachBlock(n, share, [&](size_t first, const BlockLayout& block) {
    const std::byte* const coded = in;
    in += block.bytes();
    return decodeAddBlock(sum + first, coded, block);
  });
}

}  // namespace ringreduce
