// Compressed all-reduce inside a host: by the owners, as two-shot is built, and round the ring.
//
// Memory is no slow wire: this is for who tries a codec on one host, and for the same bits as
// between hosts.  Slots hold coded slices and nothing is kept beside them but the sum of one.
#include <algorithm>

#include "algorithm/ring.h"
#include "base/copy.h"
#include "base/error.h"
#include "collectives/coded.h"
#include "collectives/pipeline.h"

namespace ringreduce {
namespace {

// The elements of a slice whose code fits into one of so many parts of a slot, and that is in
// cache.
size_t sliceOf(Codec codec, size_t slot_bytes, int parts) {
  constexpr size_t kMostElements = 16 << 10;
  const size_t block = codedBytes(codec, kChunkElements);
  const size_t bytes = slot_bytes / static_cast<size_t>(parts);
  if (bytes < block)
    throw Error(Failure::kArgument, "a slot of " + std::to_string(slot_bytes) +
                                        " bytes is too small for the codes of " +
                                        std::to_string(parts) +
                                        " ranks; set RINGREDUCE_SLOT_BYTES higher");
  return std::min(kMostElements, bytes / block * kChunkElements);
}

// A slot has a part for each rank: for the others this rank's addends of their chunks, for itself
// the sum of its own.
void byOwners(Communicator& c, const CompressedAllReduce& a) {
  Exchange& exchange = c.exchange;
  const size_t share = exchange.slotBytes() / static_cast<size_t>(c.size);
  const size_t slice = sliceOf(a.coding.codec, exchange.slotBytes(), c.size);
  CodedMessage message(a, c.rank, c.size, c.size, slice);
  const uint64_t slices = message.slices(), first = exchange.begin(slices);
  const auto part = [&](int p) { return static_cast<size_t>(p) * share; };
  const auto require = [&](bool decoded, int p) {
    if (!decoded) c.watch.broken(p, undecodable(a.coding.codec));
  };

  const auto fill = [&](uint64_t j) {
    std::byte* slot = exchange.acquire(first + j);
    for (int p = 0; p < c.size; ++p)
      if (p != c.rank) message.encodeAddends(slot + part(p), message.span(p, j));
    exchange.post(first + j);
  };
  const auto add = [&](uint64_t j) {
    const Span mine = message.span(c.rank, j);
    for (int k = 0; k < c.size - 1; ++k) {
      const int p = kthToAdd(c.rank, k, c.size);
      const std::byte* in = exchange.peek(p, first + j) + part(c.rank);
      require(k == 0 ? message.begin(in, mine) : message.add(in, mine), p);
    }
    message.finish(mine);
    message.encodeSum(exchange.own(first + j) + part(c.rank), mine, /*finished=*/true);
    exchange.share(first + j);
  };
  const auto collect = [&](uint64_t j) {
    for (int k = 0; k < c.size; ++k) {
      const int p = (c.rank + k) % c.size;
      const std::byte* slot = p == c.rank ? exchange.own(first + j) : exchange.shared(p, first + j);
      require(message.decodeResult(slot + part(p), message.span(p, j)), p);
    }
    exchange.release(first + j);
  };
  pipeline(exchange, slices, fill, [&](uint64_t j) {
    add(j);
    if (j > 0) collect(j - 1);
  });
  collect(slices - 1);
}

// The five ring primitives (algorithm/ring.h) over links whose slots hold coded slices.
class CodedPrimitives {
 public:
  CodedPrimitives(Communicator& c, CodedMessage& message, Codec codec)
      : c_(c), message_(message), codec_(codec) {}

  void send(int chunk, size_t j) {
    message_.encodeAddends(c_.next.acquire(), message_.span(chunk, j));
    c_.next.post();
  }
  void recvReduceSend(int chunk, size_t j) {
    const Span s = message_.span(chunk, j);
    require(message_.begin(peek(), s));
    c_.prev.release();
    message_.addOwn(s);
    message_.encodeSum(c_.next.acquire(), s, /*finished=*/false);
    c_.next.post();
  }
  void recvReduceCopySend(int chunk, size_t j) {
    const Span s = message_.span(chunk, j);
    require(message_.begin(peek(), s));
    c_.prev.release();
    message_.finish(s);
    std::byte* const sum = c_.next.acquire();
    message_.encodeSum(sum, s, /*finished=*/true);
    message_.decodeResult(sum, s);
    c_.next.post();
  }
  void recvCopySend(int chunk, size_t j) {
    const Span s = message_.span(chunk, j);
    const std::byte* in = peek();
    require(message_.decodeResult(in, s));
    copyBytes(c_.next.acquire(), in, message_.bytes(s));
    c_.prev.release();
    c_.next.post();
  }
  void recv(int chunk, size_t j) {
    require(message_.decodeResult(peek(), message_.span(chunk, j)));
    c_.prev.release();
  }

 private:
  const std::byte* peek() {
    const std::byte* slot = c_.prev.peek();
    if (!verified_) {
      c_.watch.verify(c_.previousRank());
      verified_ = true;
    }
    return slot;
  }
  void require(bool decoded) {
    if (!decoded) c_.watch.broken(c_.previousRank(), undecodable(codec_));
  }

  Communicator& c_;
  CodedMessage& message_;
  const Codec codec_;
  bool verified_ = false;
};

void byRing(Communicator& c, const CompressedAllReduce& a) {
  const size_t slice = sliceOf(a.coding.codec, c.link_slots.bytes, 1);
  CodedMessage message(a, c.rank, c.size, c.size, slice);
  CodedPrimitives primitives(c, message, a.coding.codec);
  runRing(primitives, {.rank = c.rank,
                       .world_size = c.size,
                       .slices = message.slices(),
                       .window = static_cast<size_t>(c.link_slots.depth) / 2});
}

}  // namespace

void compressedAllReduce(Communicator& c, const CompressedAllReduce& a) {
  if (c.size == 1) return copyUncoded(a);
  if (a.schedule == CodedSchedule::kRing)
    byRing(c, a);
  else
    byOwners(c, a);
}

}  // namespace ringreduce
