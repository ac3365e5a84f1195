// All-reduce of small messages in one hop, with the flags among the data.
//
// A slot is an array of words of 8 bytes: 4 bytes of data and a flag, which is one more than the
// number of the call.  A word is stored and loaded whole, so a thread that finds the flag has the
// data.  No flag follows the data, and no barrier stands between a push and its use.  A thread
// pushes its pieces to all peers, waits for the same pieces of theirs, and adds them.  Twice the
// bytes cross the links.
//
// Source: the LL ("low latency") protocol of NCCL (prims_ll.h), here with one hop, the canonical
// order of addition, and no counters of reads.
//
// Slots are used again two calls later.  Each call is a step of the push exchange too (push.h),
// without data: a rank posts it when its kernel starts, so when its earlier kernels have ended, and
// ends only once all peers have posted theirs.  A rank in call n + 2 therefore has peers that have
// begun n + 1, and no longer read n.  The last threads of a block exchange these flags, since they
// have no data in most messages.
//
// A flag has 32 bits and repeats after 2^32 calls.  Every 2^30 calls all words of both sets are
// pushed, so that no word that short messages have left out still has such an old flag.
//
// Bytes through device memory, all ranks on one GPU: (4P - 1) S a rank, and more while threads look
// at words that are not there yet.
#pragma once

#include "cuda/kernels/push.h"

namespace ringreduce::cuda {

inline constexpr uint64_t kLLRefresh = uint64_t{1} << 30;
static_assert(kLLRefresh % kLLSets == 0);

template <class E, class Rules, class Block, int P>
class OneShotLL {
 public:
  static_assert(Rules::kLLSets <= kLLSets);

  RINGREDUCE_DEVICE OneShotLL(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                              const RankCall& call, int channel)
      : block_(block),
        guard_(guard),
        comm_(comm),
        call_(call),
        exchange_(block, guard, comm, channel),
        channel_(channel),
        slice_(piece(call.count, call.slice, static_cast<size_t>(channel))),
        pieces_(ceilDiv(slice_.size, kPer)),
        step_(exchange_.first(kParts)),
        number_(comm.local->counters[channel].ll),
        input_(static_cast<const std::byte*>(call.input) + slice_.begin * kWidth),
        output_(static_cast<std::byte*>(call.output) + slice_.begin * kWidth),
        aligned_((reinterpret_cast<uintptr_t>(input_) | reinterpret_cast<uintptr_t>(output_)) %
                     sizeof(Piece) ==
                 0) {}

  RINGREDUCE_DEVICE void run() {
    if (guard_.failed()) return;
    const auto threads = static_cast<size_t>(block_.threads());
    const auto thread = static_cast<size_t>(block_.thread());
    exchange_.enter(kParts, step_);
    push(thread, threads);

    size_t u = thread;
    int i = exchange_.firstFromTheEnd();
    Place place = placeOf(u);
    const bool all = guard_.until(
        block_.threads(),  // each thread for its own pieces and flags
        [&](int) {
          while (u < pieces_) {
            if (!take(place)) return false;
            place = placeOf(u += threads);
          }
          for (; i < P - 1; i += block_.threads())
            if (!exchange_.hasCome(kParts, step_, i)) return false;
          return true;
        },
        [&](int) { return u < pieces_ ? place.late : exchange_.peer(i); },
        [&](int) { return step_; });
    if (!all) return;
    exchange_.save(kParts, step_ + 1);
    if (block_.thread() == 0) comm_.local->counters[channel_].ll = number_ + 1;
  }

 private:
  using Stored = typename E::Stored;
  using Value = typename E::Value;
  static constexpr auto kParts = DeviceLayout::Of::kParts;
  static constexpr size_t kWidth = sizeof(Stored);
  // What a thread moves at once: two words' data.
  static constexpr size_t kPer = sizeof(uint64_t) / kWidth;
  struct alignas(8) Piece {
    Stored elements[kPer];
  };

  RINGREDUCE_DEVICE void push(size_t thread, size_t threads) const {
    const bool refresh = number_ % kLLRefresh < kLLSets;
    const size_t end = refresh ? comm_.layout.ll_bytes / (2 * sizeof(Piece)) : pieces_;
    const uint64_t flag = (number_ + 1) << 32;
    for (size_t u = thread; u < end; u += threads) {
      uint64_t data = 0;
      if (u < pieces_) {
        const Piece mine = own(u);
        std::memcpy(&data, &mine, sizeof data);
      }
      for (int i = 0; i < P - 1; ++i)
        Rules::template storeWords<Rules>(words(exchange_.peer(i), comm_.rank, u),
                                          (data & 0xffffffff) | flag, data >> 32 | flag);
    }
  }

  // A piece that a thread waits for.
  struct Place {
    size_t u;
    int chunk;
    int late;    // a peer whose piece was missing at the last look
    Piece mine;  // loaded before the first look
  };
  RINGREDUCE_DEVICE Place placeOf(size_t u) const {
    const size_t at = slice_.begin + u * kPer, chunk_size = Cut{call_.count, P}.chunkSize();
    Place place{u, 0, 0, {}};
    RINGREDUCE_UNROLL for (int c = 1; c < P; ++c) place.chunk +=
        at >= static_cast<size_t>(c) * chunk_size;
    if (u < pieces_) place.mine = own(u);
    return place;
  }

  // Adds a piece of all ranks, if those of all peers are here.
  RINGREDUCE_DEVICE bool take(Place& place) const {
    Piece pieces[P];  // in the order of addition
    bool all = true;
    RINGREDUCE_UNROLL for (int k = 0; k < P; ++k) {
      const int rank = kthToAdd(place.chunk, k, P);
      if (rank == comm_.rank) {
        pieces[k] = place.mine;
      } else if (!load(rank, place.u, pieces[k])) {
        place.late = rank;
        all = false;
      }
    }
    if (!all) return false;
    const PlainSum arithmetic = arithmeticOf<P>(call_);
    Value sums[kPer];
    Piece out;
    RINGREDUCE_UNROLL for (size_t v = 0; v < kPer; ++v) {
      sums[v] = E::widen(pieces[0].elements[v]);
      RINGREDUCE_UNROLL for (int k = 1; k < P; ++k) sums[v] =
          E::add(sums[v], E::widen(pieces[k].elements[v]));
      if (arithmetic.divide) sums[v] *= arithmetic.inverse;
      out.elements[v] = E::narrow(sums[v]);
    }
    if (isWhole(place.u))
      block_.store(reinterpret_cast<Piece*>(output_) + place.u, out);
    else
      RINGREDUCE_UNROLL for (size_t v = 0; v < kPer; ++v) if (place.u * kPer + v < slice_.size)
          block_.store(reinterpret_cast<Stored*>(output_) + place.u * kPer + v, out.elements[v]);
    return true;
  }

  // A peer's piece; false if it is not here yet.
  RINGREDUCE_DEVICE bool load(int peer, size_t u, Piece& piece) const {
    uint64_t first, second;
    Rules::template loadWords<Rules>(words(comm_.rank, peer, u), first, second);
    const auto flag = static_cast<uint32_t>(number_ + 1);
    const uint64_t data = (first & 0xffffffff) | second << 32;
    std::memcpy(&piece, &data, sizeof piece);
    return static_cast<uint32_t>(first >> 32) == flag &&
           static_cast<uint32_t>(second >> 32) == flag;
  }

  RINGREDUCE_DEVICE Piece own(size_t u) const {
    if (isWhole(u)) return block_.load(reinterpret_cast<const Piece*>(input_) + u);
    Piece piece{};
    RINGREDUCE_UNROLL for (size_t v = 0; v < kPer; ++v) if (u * kPer + v < slice_.size)
        piece.elements[v] = block_.load(reinterpret_cast<const Stored*>(input_) + u * kPer + v);
    return piece;
  }
  RINGREDUCE_DEVICE bool isWhole(size_t u) const {
    return aligned_ && (u + 1) * kPer <= slice_.size;
  }

  // Where `from` pushes its piece u for rank `at`.
  RINGREDUCE_DEVICE uint64_t* words(int at, int from, size_t u) const {
    const uint64_t set = slotOf(number_, Rules::kLLSets);
    return reinterpret_cast<uint64_t*>(comm_.base[at] + comm_.layout.llSlot(channel_, set, from)) +
           2 * u;
  }

  Block& block_;
  Guard<Block>& guard_;
  const DeviceComm& comm_;
  const RankCall& call_;
  const PushExchange<Rules, Block, P> exchange_;
  const int channel_;
  const Span slice_;
  const size_t pieces_;
  const uint64_t step_, number_;
  const std::byte* const input_;
  std::byte* const output_;
  const bool aligned_;
};

}  // namespace ringreduce::cuda
