// A pipe of plain bytes from one rank of a host to another, and the doorbell of a rank that sleeps
// on sockets.
//
// The pipe is a ring of bytes in the receiver's segment; its counters lie in a Box of each of the
// two, as those of a channel of messages do (channel.h).  Long pieces are published in parts, so
// that both ranks copy at the same time.
//
// The doorbell is an eventfd that the host's ranks have been given.  A rank that is about to sleep
// sets its page's bell word, looks at its pipes once more, and sleeps on the eventfd with its
// sockets.  Another one stores a counter and then looks at the bell word.  All of these are
// sequentially consistent, so one of the two sees the other, as with a futex (wait.h).
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "transport/neighbours.h"
#include "transport/shm/channel.h"
#include "transport/shm/page.h"

namespace ringreduce {

struct Doorbell {
  uint32_t* word;  // 1 while its owner sleeps, or is about to
  int fd;          // an eventfd

  // After a counter was stored.  The exchange leaves the system call to one of several callers.
  template <class Rules = HostRules>
  void ring() const {
    std::atomic_ref listens(*word);
    if (!Rules::kWakes || listens.load(std::memory_order_seq_cst) == 0) return;
    if (listens.exchange(0, std::memory_order_seq_cst) == 0) return;
    const uint64_t one = 1;
    // Fails only if the counter is full; then its owner wakes up anyway.
    [[maybe_unused]] const ssize_t n = ::write(fd, &one, sizeof one);
  }
};

// What one rank of a host gives to the others.
struct PipeMemory {
  RankPage* page;
  Box* boxes;        // by the number of the other rank on this host
  std::byte* rings;  // likewise, each of kRingBytes
  int doorbell;

  Doorbell bell() const { return {&page->bell_word, doorbell}; }
};

template <class Rules = HostRules>
class BasicBytePipe final : public BytePipe {
 public:
  // Between the ranks of these numbers on this host.
  BasicBytePipe(const PipeMemory& own, size_t me, const PipeMemory& theirs, size_t other)
      : bell_(theirs.bell()),
        out_{.ring = theirs.rings + me * kRingBytes,
             .filled = theirs.boxes[me].filled,
             .emptied = own.boxes[other].emptied},
        in_{.ring = own.rings + other * kRingBytes,
            .filled = own.boxes[other].filled,
            .emptied = theirs.boxes[me].emptied} {}

  size_t send(const iovec* pieces, size_t count) override {
    constexpr size_t kMost = kRingBytes + Rules::kEarlyReuse * kRingBytes / 2;
    const auto room = [&] { return kMost - std::min<uint64_t>(kMost, out_.at - out_.seen); };
    if (room() < kMost / 2) out_.seen = out_.emptied.template observe<Rules>();
    return move(out_, room(), pieces, count, out_.filled,
                [](std::byte* place, void* piece, size_t n) { std::memcpy(place, piece, n); });
  }

  size_t receive(const iovec* pieces, size_t count) override {
    // The other process may store any number: no more than a ring full is believed.
    const auto held = [&] { return std::min<uint64_t>(kRingBytes, in_.seen - in_.at); };
    if (held() == 0) in_.seen = in_.filled.template observe<Rules>();
    return move(in_, held(), pieces, count, in_.emptied,
                [](std::byte* place, void* piece, size_t n) { std::memcpy(piece, place, n); });
  }

 private:
  // One direction, at one of its ends.
  struct End {
    std::byte* ring;
    Flag& filled;
    Flag& emptied;
    uint64_t at = 0, seen = 0;  // bytes that passed this end, and the other one as last read
  };
  static constexpr size_t kPublishedAtOnce = 64 << 10;

  // Moves up to `most` bytes between the ring and the pieces.
  template <class Copy>
  size_t move(End& end, uint64_t most, const iovec* pieces, size_t count, Flag& counter,
              Copy copy) {
    const uint64_t begin = end.at, limit = begin + most;
    uint64_t published = begin;
    const auto publish = [&] {
      if (published == end.at) return;
      counter.template publish<Rules>(published = end.at);
      bell_.template ring<Rules>();
    };
    for (; count > 0 && end.at < limit; ++pieces, --count)
      for (size_t done = 0; done < pieces->iov_len && end.at < limit;) {
        const size_t place = end.at % kRingBytes;
        const size_t n = std::min({pieces->iov_len - done, kRingBytes - place, kPublishedAtOnce,
                                   static_cast<size_t>(limit - end.at)});
        copy(end.ring + place, static_cast<std::byte*>(pieces->iov_base) + done, n);
        done += n;
        end.at += n;
        if (end.at - published >= kPublishedAtOnce) publish();
      }
    publish();
    return static_cast<size_t>(end.at - begin);
  }

  const Doorbell bell_;  // the other rank's
  End out_, in_;
};

template <class Rules = HostRules>
class BasicNeighbours final : public Neighbours {
 public:
  // `members`: of this host, of which this rank is number `me`; `ranks`: the transport's numbers of
  // them.  The memory must outlive it.
  BasicNeighbours(const std::vector<PipeMemory>& members, size_t me, const std::vector<int>& ranks)
      : own_(members[me].bell()) {
    for (size_t other = 0; other < members.size(); ++other) {
      if (other == me) continue;
      const auto rank = static_cast<size_t>(ranks[other]);
      if (pipes_.size() <= rank) pipes_.resize(rank + 1);
      pipes_[rank] = std::make_unique<BasicBytePipe<Rules>>(members[me], me, members[other], other);
    }
  }

  BytePipe* pipe(int rank) override {
    const auto r = static_cast<size_t>(rank);
    return r < pipes_.size() ? pipes_[r].get() : nullptr;
  }
  int doorbell() const override { return own_.fd; }
  void listen(bool listens) override {
    std::atomic_ref(*own_.word).store(listens ? 1 : 0, std::memory_order_seq_cst);
  }

 private:
  const Doorbell own_;
  std::vector<std::unique_ptr<BytePipe>> pipes_;  // by rank; null for those reached otherwise
};

}  // namespace ringreduce
