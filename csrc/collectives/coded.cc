// The arithmetic of a compressed all-reduce.
#include "collectives/coded.h"

#include <algorithm>

#include "base/bytes.h"
#include "kernels/reduce.h"

namespace ringreduce {

CodedMessage::CodedMessage(const CompressedAllReduce& call, int rank, int size, int world_size,
                           size_t slice)
    : call_(call),
      cut_{call.count, size},
      slice_(slice),
      slices_(std::max<size_t>(1, ceilDiv(cut_.chunkSize(), slice))),
      world_size_(world_size),
      seed_(mixedSeed(call.coding.seed, static_cast<uint64_t>(rank))),
      sum_(std::min(slice, cut_.chunkSize())) {}

void CodedMessage::encodeAddends(std::byte* out, Span s) const {
  encode(out, call_.input + s.begin, s);
}

bool CodedMessage::add(const std::byte* in, Span s) {
  return decodeAdd(call_.coding.codec, sum_.data(), in, bytes(s), s.size);
}

void CodedMessage::addOwn(Span s) {
  reduceKernels(DType::kFloat32, ReduceOp::kSum)
      .combine(sum_.data(), sum_.data(), call_.input + s.begin, s.size);
}

void CodedMessage::finish(Span s) {
  reduceKernels(DType::kFloat32, call_.op)
      .finishSums(sum_.data(), sum_.data(), call_.input + s.begin, s.size, world_size_);
}

void CodedMessage::encodeSum(std::byte* out, Span s, bool finished) const {
  encode(out, sum_.data(), s);
  if (!finished || !call_.error || call_.op != ReduceOp::kAvg) return;
  const auto ranks = static_cast<float>(world_size_);
  for (size_t i = s.begin; i < s.end(); ++i) call_.error[i] *= ranks;
}

bool CodedMessage::read(float* out, const std::byte* in, Span s) const {
  return decode(call_.coding.codec, out, in, bytes(s), s.size);
}

void CodedMessage::encode(std::byte* out, const float* in, Span s) const {
  const Draw draw{.seed = seed_, .first = s.begin};
  ringreduce::encode(call_.coding.codec, out, call_.error ? call_.error + s.begin : nullptr, in,
                     s.size, call_.coding.stochastic ? &draw : nullptr);
}

void copyUncoded(const CompressedAllReduce& call) {
  if (call.output != call.input) copyBytes(call.output, call.input, call.count * sizeof(float));
  if (call.error) std::fill_n(call.error, call.count, 0.0F);
}

std::string undecodable(Codec codec) {
  return std::string("what came from it is nothing that ") + name(codec) +
         " makes: memory or the network corrupts data";
}

}  // namespace ringreduce
