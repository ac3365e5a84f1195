// All-reduce of coded values (kernels/codec.h).
//
// The message is cut as always (algorithm/cut.h).  A chunk's slices begin at multiples of
// kChunkElements, and so do the codecs' blocks.  A rank encodes one thing of each chunk, once:
//
//     owner   its addends of the others' chunks; the sum of its own
//     ring    its addends of the chunk that begins with it; a partial sum of the others; the sum of
//             its own
//
// So each element has one error at this rank, that of its one encoding, in units of the inputs: if
// the encoded value was an average, the error is multiplied by the number of ranks.  An owner adds
// its own addends last, as the canonical order requires, and uncoded.  All sums are float32.  All
// ranks decode the coded sums, the owners too, so all end with the same bits.  These depend on the
// schedule, but not on slices or wires.
//
// A sum of several ranks' addends may be beyond the range of float16 where their average is not. So
// where such sums are coded for an average, they are coded in units of a power of two: partial sums
// of the ring, and addends that are the sums of whole hosts.  Finished sums are not, and what does
// not fit there is infinite on all ranks.
//
// Shared memory: slots hold coded slices, and nothing is kept besides but the sum of one slice.
// This is for trying a codec on one host, and for the same bits as between hosts.  If a rank is
// lost on the way, its addends are in the slices that it has posted.  All ranks add the chunk of a
// lost owner from the slots, and use that sum without coding it.
//
// Streams: a rank has one coded copy of the message.  A slice of it holds the bytes that this rank
// sends of that slice, and then the coded sum that comes back.  The sum is made of the very bytes
// that were lent, so nothing of it can come before all of them have arrived (stream_algorithms.h).
// The owner also has room for the addends of each other rank that may be under way.  Floats lie in
// the caller's memory and in one slice of a sum.
#include <algorithm>
#include <bit>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "algorithm/ring.h"
#include "base/bytes.h"
#include "base/error.h"
#include "collectives/collectives.h"
#include "collectives/shared_memory.h"
#include "collectives/stream_algorithms.h"
#include "kernels/codec.h"
#include "kernels/reduce.h"

namespace ringreduce {

std::string CompressedAllReduce::problem(int) const {
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg)
    return std::string("can take SUM or AVG, not ") + name(op);
  if (static_cast<size_t>(coding.codec) >= kCodecTable.size() ||
      static_cast<size_t>(schedule) >= kCodedScheduleNames.size())
    return "no such codec or schedule";
  return "";
}

void CompressedAllReduce::sign(OpSignature& signature) const {
  signature.dtype = DType::kFloat32;
  signature.parts = codingBits(coding, schedule, borders);
}

namespace {

// ---- the arithmetic, the same over all wires

class CodedMessage {
 public:
  // `call` has a schedule that is not kAuto.  `rank` is a place among `size`, which is at least 2.
  // An average divides by `world_size`.  A slice has `slice` elements, a multiple of
  // kChunkElements.
  CodedMessage(const CompressedAllReduce& call, int rank, int size, int world_size, size_t slice)
      : call_(call),
        cut_{call.count, size},
        slice_(slice),
        slices_(std::max<size_t>(1, ceilDiv(cut_.chunkSize(), slice))),
        world_size_(world_size),
        unit_(unitOf(call, size, world_size)),
        seed_(mixedSeed(call.coding.seed, static_cast<uint64_t>(rank))),
        sum_(std::min(slice, cut_.chunkSize())) {}

  size_t slices() const { return slices_; }  // a chunk, at least 1
  // Slice j of a chunk, in the message; empty where this chunk is shorter than the first.
  Span span(int chunk, size_t j) const { return cut_.slice(chunk, slice_, j); }
  size_t bytes(Span s) const { return codedBytes(call_.coding.codec, s.size); }
  // Its place in a coded copy of the whole message.
  size_t place(Span s) const { return codedBytes(call_.coding.codec, s.begin); }

  // This rank's addends, coded.
  void encodeAddends(std::byte* out, Span s) { encodePart(out, call_.input + s.begin, s); }

  // ---- The sum of the others' addends, one rank at a time.  False for bytes that no rank encodes.
  bool begin(const std::byte* in, Span s) { return read(sum_.data(), in, s); }
  bool add(const std::byte* in, Span s) {
    return decodeAdd(call_.coding.codec, sum_.data(), in, bytes(s), s.size);
  }
  void addOwn(Span s) {
    takeUnits(s);
    reduceKernels(DType::kFloat32, ReduceOp::kSum)
        .combine(sum_.data(), sum_.data(), call_.input + s.begin, s.size);
  }
  // The same for the last addends: completes the sum.
  void finish(Span s) { finish(s, world_size_); }
  // Of so many ranks: some may be lost.
  void finish(Span s, int addends) {
    addends_ = addends;
    takeUnits(s);
    reduceKernels(DType::kFloat32, call_.op)
        .finishSums(sum_.data(), sum_.data(), call_.input + s.begin, s.size, addends);
  }
  // The sum of so many ranks' coded addends is the result.
  void useSum(Span s, int addends) {
    takeUnits(s);
    const void* sum = sum_.data();
    reduceKernels(DType::kFloat32, call_.op)
        .reduce(call_.output + s.begin, &sum, 1, s.size, addends);
  }
  void clearSum() { std::ranges::fill(sum_, 0.0F); }
  // The sum, coded.
  void encodeSum(std::byte* out, Span s, bool finished) {
    if (!finished) return encodePart(out, sum_.data(), s);
    encode(out, sum_.data(), s);
    if (call_.op == ReduceOp::kAvg) multiplyError(s, static_cast<float>(addends_));
  }

  // The result, when it has arrived.
  bool decodeResult(const std::byte* in, Span s) const {
    return read(call_.output + s.begin, in, s);
  }

 private:
  // What stands for 1 in the codes of addends and partial sums.
  static float unitOf(const CompressedAllReduce& call, int size, int world_size) {
    if (call.coding.codec != Codec::kFloat16 || call.op != ReduceOp::kAvg) return 1;
    const int ranks = call.schedule == CodedSchedule::kRing ? world_size : world_size / size;
    return static_cast<float>(std::bit_ceil(static_cast<unsigned>(ranks)));
  }
  void scaleTo(float* out, const float* in, Span s, float factor) const {
    scale(DType::kFloat32, out, in, s.size, static_cast<double>(factor));
  }
  // After the last decoded part.
  void takeUnits(Span s) {
    if (unit_ != 1) scaleTo(sum_.data(), sum_.data(), s, unit_);
  }
  void encodePart(std::byte* out, const float* in, Span s) {
    if (unit_ == 1) return encode(out, in, s);
    scaleTo(sum_.data(), in, s, 1 / unit_);
    encode(out, sum_.data(), s);
    multiplyError(s, unit_);
  }
  void multiplyError(Span s, float factor) const {
    if (!call_.error) return;
    for (size_t i = s.begin; i < s.end(); ++i) call_.error[i] *= factor;
  }

  bool read(float* out, const std::byte* in, Span s) const {
    return decode(call_.coding.codec, out, in, bytes(s), s.size);
  }
  void encode(std::byte* out, const float* in, Span s) const {
    const Draw draw{.seed = seed_, .first = s.begin};
    ringreduce::encode(call_.coding.codec, out, call_.error ? call_.error + s.begin : nullptr, in,
                       s.size, call_.coding.stochastic ? &draw : nullptr);
  }

  const CompressedAllReduce call_;
  const Cut cut_;
  const size_t slice_, slices_;
  const int world_size_;
  const float unit_;        // of addends and partial sums
  int addends_ = 0;         // of the finished sum
  const uint64_t seed_;     // of this rank's draws
  std::vector<float> sum_;  // a slice
};

// For a group of one.
void copyUncoded(const CompressedAllReduce& call) {
  if (call.output != call.input) copyBytes(call.output, call.input, call.count * sizeof(float));
  if (call.error) std::fill_n(call.error, call.count, 0.0F);
}

// The error of a rank whose bytes cannot be decoded.
std::string undecodable(Codec codec) {
  return std::string("what came from it is nothing that ") + name(codec) +
         " makes: memory or the network corrupts data";
}

// ---- over shared memory

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
void byOwners(OverMemory& c, const CompressedAllReduce& a) {
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
  // Adds the coded addends of an owner's chunk, and returns of how many ranks.
  const auto addUp = [&](int owner, uint64_t j) {
    const Span s = message.span(owner, j);
    int addends = 0;
    for (int k = 0; k < c.size - 1; ++k) {
      const int p = kthToAdd(owner, k, c.size);
      const std::byte* slot = p == c.rank ? exchange.own(first + j) : exchange.find(p, first + j);
      if (!slot) continue;
      const std::byte* in = slot + part(owner);
      require(addends++ == 0 ? message.begin(in, s) : message.add(in, s), p);
    }
    if (addends == 0) message.clearSum();
    return addends;
  };
  const auto add = [&](uint64_t j) {
    const Span mine = message.span(c.rank, j);
    const int addends = addUp(c.rank, j) + 1;
    message.finish(mine, addends);
    message.encodeSum(exchange.own(first + j) + part(c.rank), mine, /*finished=*/true);
    exchange.share(first + j);
  };
  const auto collect = [&](uint64_t j) {
    for (int k = 0; k < c.size; ++k) {
      const int p = (c.rank + k) % c.size;
      const Span s = message.span(p, j);
      const std::byte* slot = p == c.rank ? exchange.own(first + j) : exchange.shared(p, first + j);
      if (slot)
        require(message.decodeResult(slot + part(p), s), p);
      else
        message.useSum(s, addUp(p, j));
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
  CodedPrimitives(OverMemory& c, CodedMessage& message, Codec codec)
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

  OverMemory& c_;
  CodedMessage& message_;
  const Codec codec_;
  bool verified_ = false;
};

void byRing(OverMemory& c, const CompressedAllReduce& a) {
  const size_t slice = sliceOf(a.coding.codec, c.link_slots.bytes, 1);
  CodedMessage message(a, c.rank, c.size, c.size, slice);
  CodedPrimitives primitives(c, message, a.coding.codec);
  runRing(primitives, {.rank = c.rank,
                       .world_size = c.size,
                       .slices = message.slices(),
                       .window = static_cast<size_t>(c.link_slots.depth) / 2});
}

}  // namespace

void compressedAllReduce(OverMemory& c, const CompressedAllReduce& a) {
  if (c.size == 1) return copyUncoded(a);
  if (a.schedule == CodedSchedule::kRing)
    byRing(c, a);
  else
    byOwners(c, a);
}

// ---- over streams

namespace {

// A slice is to stay in cache between decoding, adding and encoding, and of one chunk that is large
// enough there are some.
constexpr size_t kLeastElements = 8 << 10, kMostElements = 32 << 10;
// Bytes under way from one rank to another: enough for half a Gbit/s with a round trip of 50 ms.
constexpr size_t kUnderWay = 4 << 20;

size_t codedSlice(size_t count) {
  const size_t n = std::clamp(ceilDiv(count, kSlicesWanted), kLeastElements, kMostElements);
  return n / kChunkElements * kChunkElements;
}

size_t windowOf(Codec codec, size_t slice) {
  return std::max<size_t>(1, kUnderWay / codedBytes(codec, slice));
}

// The common part of both schedules.
class CodedPass {
 public:
  CodedPass(OverStreams& c, const CompressedAmong& among)
      : transport_(c.transport),
        watch_(c.watch),
        ranks_(among.ranks),
        P_(static_cast<int>(ranks_.size())),
        me_(static_cast<int>(std::ranges::find(ranks_, c.rank) - ranks_.begin())),
        codec_(among.call.coding.codec),
        slice_(among.slice ? among.slice : codedSlice(Cut{among.call.count, P_}.chunkSize())),
        message_(among.call, me_, P_, among.world_size, slice_),
        slices_(message_.slices()),
        window_(std::min(slices_, among.window ? among.window : windowOf(codec_, slice_))),
        coded_(c.scratch(codedBytes(codec_, among.call.count))) {}

 protected:
  int rankAt(int place) const { return ranks_[static_cast<size_t>(place)]; }
  std::byte* at(Span s) const { return coded_ + message_.place(s); }
  void send(int place, Span s) { transport_.send(rankAt(place), at(s), message_.bytes(s)); }
  void expect(int place, Span s) { transport_.expect(rankAt(place), at(s), message_.bytes(s)); }
  void require(bool decoded, int place) {
    if (!decoded) watch_.broken(rankAt(place), undecodable(codec_));
  }

  Transport& transport_;
  WaitGuard& watch_;
  const std::vector<int> ranks_;
  const int P_, me_;
  const Codec codec_;
  const size_t slice_;
  CodedMessage message_;
  const size_t slices_, window_;
  std::byte* const coded_;  // the message
};

// A rank sends to each other, which expects it in this order:
//
//     addends 0 ... W-1, addends W, sum 0, addends W+1, sum 1, ...
//
// A step waits only for earlier steps of others, so no rank waits for ever.
class ByOwners : CodedPass {
 public:
  ByOwners(OverStreams& c, const CompressedAmong& among)
      : CodedPass(c, among),
        arriving_(codedBytes(codec_, std::min(slice_, Cut{among.call.count, P_}.chunkSize()))),
        addends_(c.scratch(static_cast<size_t>(P_ - 1) * window_ * arriving_)) {}

  void run() {
    for (size_t j = 0; j < window_; ++j) expectAddends(j);
    for (size_t j = 0; j < window_; ++j) sendAddends(j);
    for (size_t j = 0; j < slices_ + window_; ++j) {
      if (j + window_ < slices_) sendAddends(j + window_);
      if (j < slices_) add(j);
      if (j >= window_) collect(j - window_);
    }
  }

 private:
  template <class Visit>
  void forEachOther(Visit visit) {
    for (int k = 1; k < P_; ++k) visit((me_ + k) % P_);
  }
  // Where the addends of a slice from another rank come.
  std::byte* addends(int from, size_t j) const {
    const auto other = static_cast<size_t>((from - me_ - 1 + P_) % P_);
    return addends_ + (other * window_ + j % window_) * arriving_;
  }

  void expectAddends(size_t j) {
    forEachOther([&](int r) {
      transport_.expect(rankAt(r), addends(r, j), message_.bytes(message_.span(me_, j)));
    });
  }
  void sendAddends(size_t j) {
    forEachOther([&](int r) {
      const Span s = message_.span(r, j);
      message_.encodeAddends(at(s), s);
      send(r, s);
      transport_.advance();
    });
  }
  void add(size_t j) {
    const Span mine = message_.span(me_, j);
    for (int k = 0; k < P_ - 1; ++k) {
      const int r = kthToAdd(me_, k, P_);
      const std::byte* in = transport_.peek(rankAt(r));
      require(k == 0 ? message_.begin(in, mine) : message_.add(in, mine), r);
    }
    message_.finish(mine);
    message_.encodeSum(at(mine), mine, /*finished=*/true);
    if (j + window_ < slices_) expectAddends(j + window_);
    forEachOther([&](int r) {
      expect(r, message_.span(r, j));
      transport_.release(rankAt(r));
      send(r, mine);
    });
    transport_.advance();
    message_.decodeResult(at(mine), mine);
  }
  void collect(size_t j) {
    forEachOther([&](int r) {
      const Span s = message_.span(r, j);
      require(message_.decodeResult(transport_.peek(rankAt(r)), s), r);
      transport_.release(rankAt(r));
    });
  }

  const size_t arriving_;
  std::byte* const addends_;  // by the other ranks, slices that are under way
};

// The ring runs twice, as in stream_algorithms.h.
class CodedRing : CodedPass {
 public:
  using CodedPass::CodedPass;

  void run() {
    const RingShape shape{.rank = me_, .world_size = P_, .slices = slices_, .window = window_};
    Expect expect{*this};
    runRing(expect, shape);
    Move move{*this};
    runRing(move, shape);
  }

 private:
  int next() const { return (me_ + 1) % P_; }
  int previous() const { return (me_ + P_ - 1) % P_; }

  struct Expect {
    CodedRing& ring;

    void send(int, size_t) {}
    void recv(int c, size_t j) { ring.expect(ring.previous(), ring.message_.span(c, j)); }
    void recvReduceSend(int c, size_t j) { recv(c, j); }
    void recvReduceCopySend(int c, size_t j) { recv(c, j); }
    void recvCopySend(int c, size_t j) { recv(c, j); }
  };

  struct Move {
    CodedRing& ring;

    void send(int c, size_t j) {
      const Span s = ring.message_.span(c, j);
      ring.message_.encodeAddends(ring.at(s), s);
      pass(s);
    }
    void recvReduceSend(int c, size_t j) {
      const Span s = ring.message_.span(c, j);
      take(s);
      ring.message_.addOwn(s);
      ring.message_.encodeSum(ring.at(s), s, /*finished=*/false);
      pass(s);
    }
    void recvReduceCopySend(int c, size_t j) {
      const Span s = ring.message_.span(c, j);
      take(s);
      ring.message_.finish(s);
      ring.message_.encodeSum(ring.at(s), s, /*finished=*/true);
      pass(s);
      ring.message_.decodeResult(ring.at(s), s);
    }
    // Decoded before it is passed on, so that no rank is blamed for bytes of another.
    void recvCopySend(int c, size_t j) {
      recv(c, j);
      pass(ring.message_.span(c, j));
    }
    void recv(int c, size_t j) {
      const Span s = ring.message_.span(c, j);
      ring.require(ring.message_.decodeResult(peek(), s), ring.previous());
      release();
    }

    const std::byte* peek() { return ring.transport_.peek(ring.rankAt(ring.previous())); }
    void release() { ring.transport_.release(ring.rankAt(ring.previous())); }
    void take(Span s) {
      ring.require(ring.message_.begin(peek(), s), ring.previous());
      release();
    }
    void pass(Span s) {
      ring.send(ring.next(), s);
      ring.transport_.advance();
    }
  };
};

}  // namespace

void compressedAllReduce(OverStreams& c, const CompressedAmong& among) {
  CompressedAmong chosen = among;
  CompressedAllReduce& a = chosen.call;
  const size_t n = a.chosen_for ? a.chosen_for : a.count;
  if (a.schedule == CodedSchedule::kAuto) {
    const AlgorithmChoice choice =
        choose({.kind = Kind::kCompressedAllReduce,
                .bytes = n * sizeof(float),
                .coded_bytes = codedBytes(a.coding.codec, n)},
               {.ranks = static_cast<int>(among.ranks.size())}, c.options.cost);
    a.schedule =
        choice.taken.algorithm == Algorithm::kRing ? CodedSchedule::kRing : CodedSchedule::kOwner;
  }
  if (a.schedule == CodedSchedule::kRing)
    CodedRing(c, chosen).run();
  else
    ByOwners(c, chosen).run();
}

void compressedAllReduce(OverStreams& c, const CompressedAllReduce& a) {
  if (c.size == 1) return copyUncoded(a);
  std::vector<int> all(static_cast<size_t>(c.size));
  std::iota(all.begin(), all.end(), 0);
  compressedAllReduce(c, CompressedAmong{a, std::move(all), c.size});
}

}  // namespace ringreduce
