// The loops over a message's blocks.  This file is compiled once for each instruction set, with
// RINGREDUCE_ISA set to the end of the namespace of its table.
#include "kernels/codec.h"
#include "kernels/halves.h"
#include "kernels/integers.h"

#define RINGREDUCE_JOIN(a, b) a##b
#define RINGREDUCE_JOIN_VALUES(a, b) RINGREDUCE_JOIN(a, b)
#define RINGREDUCE_NAMESPACE RINGREDUCE_JOIN_VALUES(kernels_, RINGREDUCE_ISA)

namespace ringreduce {
namespace {

constexpr size_t kBlockFloats = kCodecBlock * sizeof(float);

template <class C, bool kStochastic, bool kError>
void encodeAll(std::byte* out, float* error, const float* in, size_t n, const Draw* draw) {
  const Draw from = kStochastic ? *draw : Draw{};
  uint64_t block = from.first / kCodecBlock;
  const auto key = [&] { return kStochastic ? codec::keyOf(from.seed, block) : 0; };
  const char* values = reinterpret_cast<const char*>(in);
  char* lost = reinterpret_cast<char*>(error);
  for (; n >= kCodecBlock; n -= kCodecBlock, ++block) {
    C::template encode<kStochastic, kError>(out, lost, values, key());
    out += C::kBytes;
    values += kBlockFloats;
    if constexpr (kError) lost += kBlockFloats;
  }
  if (n == 0) return;
  char last[kBlockFloats] = {}, last_lost[kBlockFloats];
  std::byte coded[C::kBytes];
  __builtin_memcpy(last, values, n * sizeof(float));
  C::template encode<kStochastic, kError>(coded, last_lost, last, key());
  __builtin_memcpy(out, coded, C::bytesOf(n));
  if constexpr (kError) __builtin_memcpy(lost, last_lost, n * sizeof(float));
}

template <class C>
void encode(std::byte* out, float* error, const float* in, size_t n, const Draw* draw) {
  if (draw) {
    if (error) return encodeAll<C, true, true>(out, error, in, n, draw);
    return encodeAll<C, true, false>(out, error, in, n, draw);
  }
  if (error) return encodeAll<C, false, true>(out, error, in, n, draw);
  return encodeAll<C, false, false>(out, error, in, n, draw);
}

template <class C, Codec codec, bool kAdd>
bool decodeAll(float* to, const std::byte* in, size_t bytes, size_t n) {
  if (bytes != codedBytes(codec, n)) return false;
  char* out = reinterpret_cast<char*>(to);
  typename C::Wrong wrong;
  for (; n >= kCodecBlock; n -= kCodecBlock) {
    C::template decode<kAdd>(out, in, wrong);
    in += C::kBytes;
    out += kBlockFloats;
  }
  if (n > 0) {
    std::byte coded[C::kBytes] = {};
    char last[kBlockFloats] = {};
    __builtin_memcpy(coded, in, C::bytesOf(n));
    if constexpr (kAdd) __builtin_memcpy(last, out, n * sizeof(float));
    C::template decode<kAdd>(last, coded, wrong);
    __builtin_memcpy(out, last, n * sizeof(float));
    for (size_t i = n; i < kCodecBlock; ++i)
      if (!C::isZero(coded, i)) return false;
  }
  return !wrong.any();
}

template <class C, Codec codec>
constexpr CodecKernels kernelsOf() {
  static_assert(C::kBytes == codedBytes(codec, kCodecBlock));
  return {encode<C>, decodeAll<C, codec, false>, decodeAll<C, codec, true>};
}

// In the order of Codec.
constexpr CodecKernels kTable[] = {kernelsOf<Halves<codec::Bfloat16Code>, Codec::kBfloat16>(),
                                   kernelsOf<Halves<codec::Float16Code>, Codec::kFloat16>(),
                                   kernelsOf<Int8, Codec::kInt8>(),
                                   kernelsOf<Int4, Codec::kInt4>()};
static_assert(sizeof kTable == sizeof(CodecKernels) * kCodecs);

}  // namespace

namespace RINGREDUCE_NAMESPACE {

const CodecKernels& codecs(Codec codec) {
  return kTable[static_cast<int>(codec)];
}

}  // namespace RINGREDUCE_NAMESPACE
}  // namespace ringreduce
