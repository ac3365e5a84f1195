// A compressed all-reduce, as far as it is the same over every wire: its cut, its arithmetic, its
// errors.
//
// The message is cut as always (algorithm/cut.h); a chunk's slices begin at multiples of
// kChunkElements, and so do the codecs' blocks.  Of each chunk a rank encodes one thing, once:
//
//     owner   its addends of the others' chunks; of its own, the sum
//     ring    what it passes on: its addends of the chunk that begins with it, of the others a
//             partial sum, of its own the sum
//
// So its errors are that one encoding's, in units of its addends: where an average was encoded,
// times the ranks.  An owner's own addends are added as they are, last, as the canonical order has
// it.  All that is added is float32.  Everybody decodes the coded sums, their owners too, so all
// end with the same bits; these depend on the schedule, but neither on slices nor on wires.
#pragma once

#include <string>
#include <vector>

#include "algorithm/cut.h"
#include "collectives/collectives.h"
#include "kernels/codec.h"

namespace ringreduce {

class CodedMessage {
 public:
  // The rank's place among `size`, which is at least 2, and what an average divides by.  A slice
  // has `slice` elements, a multiple of kChunkElements.
  CodedMessage(const CompressedAllReduce& call, int rank, int size, int world_size, size_t slice);

  size_t slices() const { return slices_; }  // a chunk, at least 1
  // Slice j of a chunk, in the message; empty where this chunk is shorter than the first.
  Span span(int chunk, size_t j) const {
    const Span whole = cut_.chunk(chunk);
    Span s = piece(whole.size, slice_, j);
    s.begin += whole.begin;
    return s;
  }
  size_t bytes(Span s) const { return codedBytes(call_.coding.codec, s.size); }
  // Where it lies in a coded copy of the whole message.
  size_t place(Span s) const { return codedBytes(call_.coding.codec, s.begin); }

  // This rank's addends, coded.
  void encodeAddends(std::byte* out, Span s) const;

  // ---- A sum of what others sent, one at a time.  False for what no rank encodes.
  bool begin(const std::byte* in, Span s) { return read(sum_.data(), in, s); }
  bool add(const std::byte* in, Span s);
  void addOwn(Span s);
  // The same as the last, after which the sum is complete.
  void finish(Span s);
  // The sum, coded.
  void encodeSum(std::byte* out, Span s, bool finished) const;

  // The result, once it has come.
  bool decodeResult(const std::byte* in, Span s) const {
    return read(call_.output + s.begin, in, s);
  }

 private:
  bool read(float* out, const std::byte* in, Span s) const;
  void encode(std::byte* out, const float* in, Span s) const;

  const CompressedAllReduce call_;
  const Cut cut_;
  const size_t slice_, slices_;
  const int world_size_;
  const uint64_t seed_;     // of this rank's draws
  std::vector<float> sum_;  // a slice
};

// Of one rank alone: nothing travels.
void copyUncoded(const CompressedAllReduce& call);

// What is wrong with a rank whose bytes cannot be decoded.
std::string undecodable(Codec codec);

}  // namespace ringreduce
