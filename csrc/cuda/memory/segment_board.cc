// The boards of a process, the thread that serves them, and the messages between ranks.
//
// Of memory that is mapped piece by piece (expandable_memory.h) a board has *ranges*: a segment
// that peers reserve addresses for, and to which the owner sends the pieces that calls need one at
// a time.  `find` has a tensor in a range only if all peers have said that they map all pieces
// under it, so a kernel need not know of pieces.  A piece that the owner has unmapped is in no
// call, and peers close it at once, without an answer: messages of a rank come in their order, so
// it is gone before another piece comes to its place.
#include "cuda/memory/segment_board.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/thread.h"
#include "bootstrap/unix_socket.h"
#include "cuda/cuda_errors.h"
#include "cuda/memory/closer.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/expandable_memory.h"
#include "cuda/memory/own_memory.h"
#include "group/agreement.h"
#include "group/exchange_fds.h"

namespace ringreduce::cuda {

// Not without a name: State has such members, and may be compiled with other files as one.
namespace board {

// How often the thread tries again to send to a rank whose socket is full.
constexpr int kRetryMs = 5;

// Of a range.  Addresses cost little, but a process has only 128 TiB of them, for all its peers,
// groups and streams.
constexpr size_t kRangeBytes = size_t{32} << 30;
// How far it reaches back from the end of the first tensor in it: the rest is for later ones.
constexpr size_t kBefore = kRangeBytes / 4 * 3;
// How many pieces a board offers before their peers have answered: each holds a descriptor.
constexpr size_t kMostOffered = 64;

constexpr size_t slotOf(uint64_t number) {
  return static_cast<size_t>(number % kMostSegments);
}

// ---- the thread

// Serves all boards of this process; ends when there is none.
class Mapper : public std::enable_shared_from_this<Mapper> {
 public:
  using Board = std::shared_ptr<SegmentBoard::State>;

  static std::shared_ptr<Mapper> ofThisProcess() {
    static PerProcess<Mapper> all;
    return all.get([] { return std::make_shared<Mapper>(); });
  }
  Mapper() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throwErrno(Failure::kSetup, "no descriptor for the thread that maps GPU memory");
  }

  void add(const Board& board) {
    const std::lock_guard lock(mutex_);
    if (!runs_)
      startThread("ringreduce-map", "that maps other ranks' GPU memory",
                  [self = shared_from_this()] { self->run(); })
          .detach();
    runs_ = true;
    boards_.push_back(board);
    wake();
  }
  // Returns at once: the thread may still be at it.
  void remove(const SegmentBoard::State* board) {
    const std::lock_guard lock(mutex_);
    std::erase_if(boards_, [&](const Board& one) { return one.get() == board; });
    wake();
  }
  void wake() {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);  // full: it is awake
  }

 private:
  void run();

  const Fd wake_;
  std::mutex mutex_;
  std::vector<Board> boards_;
  bool runs_ = false;
};

// ---- messages

struct Message {
  enum class What : uint8_t {
    // of the owner:
    kOffer,
    kReserve,  // a range
    kPiece,    // of a range
    kDrop,     // a piece
    kWithdraw,
    // of a peer:
    kMapped,
    kRefused,
    kPieceMapped,
    kPieceRefused,
    kClosed,
  } what;
  uint64_t number;
  std::shared_ptr<OwnSegment> segment = nullptr;  // of an offer
  uint64_t piece = 0;                             // which, of a range
  uintptr_t at = 0;                               // the range, or the piece behind its begin
  size_t bytes = 0;
  std::shared_ptr<const Fd> fd = nullptr;  // of a piece
};
constexpr const char* kWords[] = {"offer",  "reserve", "piece",        "drop",          "withdraw",
                                  "mapped", "refused", "piece mapped", "piece refused", "closed"};

std::optional<Message::What> whatOf(const std::string& word) {
  for (size_t i = 0; i < std::size(kWords); ++i)
    if (word == kWords[i]) return static_cast<Message::What>(i);
  return std::nullopt;
}

struct Ends {
  Fd inbox, others;  // what is written to `others` is read from `inbox`
};
Ends makeInbox() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    throwErrno(Failure::kSetup, "cannot make a Unix socket");
  return {Fd(ends[0]), Fd(ends[1])};
}

}  // namespace board
using namespace board;

// ---- a board

class SegmentBoard::State {
 public:
  State(Group& group, const PeerMemory& memory, bool finds_pieces)
      : group_(group.weak_from_this()),
        name_(group.options().name),
        rank_(group.rank()),
        size_(group.size()),
        device_(memory.device()),
        residents_(memory.residents()),
        reaches_(size_ > 1 && (memory.access() == MemoryAccess::kPointer ||
                               memory.access() == MemoryAccess::kDescriptor)),
        finds_pieces_(finds_pieces),
        peers_(static_cast<size_t>(size_)) {
    for (int r = 0; r < size_; ++r) peers_[static_cast<size_t>(r)].name = group.options().shown(r);
  }

  // Collective.
  void connect(Group& group) {
    Ends ends;
    agreeOnStatus(group, [&] {
      const size_t bytes = static_cast<size_t>(size_) * kMostSegments * sizeof(SegmentEntry);
      stream_ = std::make_unique<Stream>(device_, kNever);
      table_ = allocate(device_, bytes);
      stream_->zero(table_->data(), bytes);
      if (reaches_) ends = makeInbox();
    });
    if (!reaches_) return;
    std::vector<Fd> fds = exchangeFds(group, ends.others.get(), "GPU memory for tensors");
    inbox_ = std::move(ends.inbox);
    for (int r = 0; r < size_; ++r)
      if (r != rank_) peer(r).outbox = std::move(fds[static_cast<size_t>(r)]);
    // A rank that makes no board must not be offered memory.
    agreeOnStatus(group, [&] {
      mapper_ = Mapper::ofThisProcess();
      // One is enough: all boards of a process have the same mapper.
      if (finds_pieces_)
        whenUnmapped([mapper = std::weak_ptr(mapper_)] {
          if (const auto still = mapper.lock()) still->wake();
        });
    });
  }
  bool reaches() const { return reaches_; }
  Mapper& mapper() const { return *mapper_; }
  int generation() const { return generation_; }
  const MemoryPtr& table() const { return table_; }

  // --- in users' threads

  Place find(const void* data, size_t bytes, const std::function<bool()>& is_kept,
             bool keeps_pieces) {
    if (!reaches_) return {};
    const std::shared_ptr<OwnSegment> segment = ownSegmentOf(data, bytes);
    if (!segment) return findInRanges(data, bytes, is_kept, keeps_pieces);
    if (segment->device() != device_) return {};
    const bool keeps = is_kept && is_kept();
    const std::lock_guard lock(mutex_);
    const auto known = slots_.find(segment->id());
    const Own* const own = known != slots_.end() ? &own_[known->second] : offer(segment);
    if (!own) return {};
    if (keeps) segment->keep();
    return {.segment = own->number,
            .offset = static_cast<uint64_t>(static_cast<const std::byte*>(data) - segment->data())};
  }

  bool isMapped(uint64_t number) const {
    return number != 0 && mapped_[slotOf(number)].load(std::memory_order_acquire) == number;
  }

  // --- in the mapping thread

  int inbox() const { return inbox_.get(); }
  // Does what there is to do.  True if it must be tried again soon.
  bool serve() {
    receive();
    lookAtOwn();
    bool rest = false;
    for (Peer& peer : peers_) rest = flush(peer) || rest;
    return rest;
  }

 private:
  enum class Answer : uint8_t { kNone, kMapped, kRefused, kClosed };
  struct Addresses {
    uintptr_t begin, end;
    bool hold(const Addresses& other) const { return begin <= other.begin && other.end <= end; }
  };
  struct Piece {
    uint64_t id;
    Addresses where;
    uint64_t extent;  // its number
    int unanswered;   // peers
    bool is_refused = false;
    bool isMapped() const { return unanswered == 0 && !is_refused; }
  };
  struct Range {
    Addresses where;
    // Of one tensor, which a CUDA graph may use at any time: kernels know the range only while all
    // of the tensor is mapped.
    std::optional<Addresses> kept = {};
    std::map<uintptr_t, Piece> pieces = {};  // by their begin; only the mapping thread changes it
    std::vector<Addresses> wanted = {};

    const Piece* at(uintptr_t address) const {
      auto found = pieces.upper_bound(address);
      if (found == pieces.begin()) return nullptr;
      --found;
      return address < found->second.where.end ? &found->second : nullptr;
    }
    bool isMapped(const Addresses& all) const {
      return every(all, [](const Piece& piece) { return piece.isMapped(); });
    }
    // Whether a piece that is still there, under these addresses, was refused.
    bool holdsRefused(const Addresses& all) const {
      return std::ranges::any_of(pieces, [&](const auto& entry) {
        const Piece& piece = entry.second;
        return piece.is_refused && piece.where.begin < all.end && all.begin < piece.where.end &&
               isThere(piece.where.begin, piece.where.end, piece.extent);
      });
    }
    // Whether all pieces under these addresses are known, and `is` so.
    template <class F>
    bool every(const Addresses& all, F&& is) const {
      for (uintptr_t at = all.begin; at < all.end;) {
        const Piece* const piece = this->at(at);
        if (!piece || !is(*piece)) return false;
        at = piece->where.end;
      }
      return true;
    }
  };
  struct Own {
    uint64_t number = 0;  // the last one in this slot
    bool is_used = false, is_offered = false, is_withdrawn = false;
    std::shared_ptr<OwnSegment> segment = nullptr;  // until it is withdrawn
    std::unique_ptr<Range> range = nullptr;         // the same, instead
    std::vector<Answer> answers = {};               // by rank
  };
  struct Theirs {
    uint64_t number = 0;
    MemoryPtr memory = nullptr;                          // mapped here, or
    std::shared_ptr<OwnSegment> segment = nullptr;       // of a rank of this process on this GPU
    std::shared_ptr<ReservedAddresses> range = nullptr;  // or for pieces,
    std::map<uint64_t, size_t> pieces = {};              // which are mapped at these offsets
  };
  struct Peer {
    std::string name;
    Fd outbox;  // none: it is this rank, or has gone
    std::deque<Message> waiting = {};
    std::array<Theirs, kMostSegments> segments = {};
  };

  Peer& peer(int r) { return peers_[static_cast<size_t>(r)]; }

  Place findInRanges(const void* data, size_t bytes, const std::function<bool()>& is_kept,
                     bool keeps_pieces) {
    if (!finds_pieces_) return {};
    const std::vector<Extent> extents = extentsOf(data, bytes);
    if (extents.empty() || extents.front().device != device_ || bytes > kRangeBytes / 2) return {};
    const auto at = reinterpret_cast<uintptr_t>(data);
    const Addresses tensor{at, at + bytes};
    const bool keeps = keeps_pieces && is_kept && is_kept();
    const std::lock_guard lock(mutex_);
    Own* own = rangeOf(tensor, false);
    const bool is_mapped =
        own && areOffered(*own->range, tensor, extents) && own->range->isMapped(tensor);
    if (!is_mapped && keeps) own = rangeOf(tensor, true);
    if (!own && (!keeps || mayKeep(tensor))) own = offer(nullptr, rangeFor(tensor, extents, keeps));
    if (!own) return {};
    Range& range = *own->range;
    if (!areOffered(range, tensor, extents) &&
        std::ranges::none_of(range.wanted, [&](const auto& one) { return one.hold(tensor); })) {
      range.wanted.push_back(tensor);
      mapper().wake();
    }
    if (!is_mapped && !range.kept) return {};
    return {.segment = own->number, .offset = at - range.where.begin};
  }

  // From the first of its neighbours on, if that is near enough.
  static std::unique_ptr<Range> rangeFor(const Addresses& tensor,
                                         const std::vector<Extent>& extents, bool is_kept) {
    const uintptr_t first = extents.front().begin;
    const size_t reach = tensor.end - first;
    Range range{.where = {first, 0}};
    if (reach > kBefore)
      range.where.begin = (tensor.end - kBefore) / kBlockBytes * kBlockBytes;
    else if (!is_kept)
      range.where.begin = beginOfRun(first, kBefore - reach);
    range.where.end = range.where.begin + kRangeBytes;
    if (is_kept) {
      range.where.end = std::min(range.where.end, extents.back().end);
      range.kept = tensor;
    }
    return std::make_unique<Range>(std::move(range));
  }

  // With the lock held, as the next ones.
  Own* rangeOf(const Addresses& tensor, bool is_kept) {
    for (Own& own : own_)
      if (own.is_used && own.range && own.range->where.hold(tensor) &&
          (is_kept ? own.range->kept && own.range->kept->hold(tensor) : !own.range->kept))
        return &own;
    return nullptr;
  }

  // Whether a range of its own may be of use, and leaves places for other memory.
  bool mayKeep(const Addresses& tensor) const {
    size_t kept = 0;
    for (const Own& own : own_) {
      if (!own.is_used || !own.range) continue;
      kept += own.range->kept.has_value();
      if (own.range->holdsRefused(tensor)) return false;
    }
    return kept < kMostSegments / 2;
  }

  // Whether what is there now has been offered.
  static bool areOffered(const Range& range, const Addresses& tensor,
                         const std::vector<Extent>& extents) {
    return std::ranges::all_of(extents, [&](const Extent& extent) {
      return range.every({std::max(extent.begin, tensor.begin), std::min(extent.end, tensor.end)},
                         [&](const Piece& piece) { return piece.extent == extent.number; });
    });
  }

  Own* offer(const std::shared_ptr<OwnSegment>& segment, std::unique_ptr<Range> range = nullptr) {
    const auto free = std::ranges::find(own_, false, &Own::is_used);
    if (free == own_.end()) {
      if (!std::exchange(told_full_, true))
        log("rank " + peer(rank_).name + " of group '" + name_ + "' has " +
            std::to_string(kMostSegments) +
            " segments of memory that other ranks map, and can have no more, so calls copy tensors "
            "in others: make fewer and larger ones, or let go of them and of CUDA graphs");
      return nullptr;
    }
    const auto slot = static_cast<uint64_t>(free - own_.begin());
    const uint64_t number = free->number == 0 ? slot + kMostSegments : free->number + kMostSegments;
    *free = {.number = number,
             .is_used = true,
             .segment = segment,
             .range = std::move(range),
             .answers = std::vector<Answer>(static_cast<size_t>(size_))};
    if (segment) slots_[segment->id()] = slot;
    mapper().wake();
    return &*free;
  }

  bool hasFailed() const {
    const std::shared_ptr<Group> group = group_.lock();
    return !group || group->failed();
  }

  void sendAll(const Message& message) {
    for (Peer& peer : peers_)
      if (peer.outbox) peer.waiting.push_back(message);
  }

  // Offers what is new, and withdraws what is over.
  void lookAtOwn() {
    for (Own& own : own_) {
      std::shared_ptr<OwnSegment> segment;
      uint64_t number = 0;
      bool is_new = false, is_over = false;
      {
        std::unique_lock lock(mutex_);
        if (!own.is_used) continue;
        if (own.range) {
          lock.unlock();
          lookAtRange(own);
          settle(own);
          continue;
        }
        number = own.number;
        segment = own.segment;
        if (segment) {
          is_new = !std::exchange(own.is_offered, true);
          is_over = segment->isOver();
          if (is_over) {
            slots_.erase(segment->id());
            own.segment = nullptr;
            own.is_withdrawn = true;
            own.is_used = !is_new;  // a slot that was never offered is free at once
          }
        }
      }
      if (is_over && is_new) continue;
      if (is_new) {
        sendAll({.what = Message::What::kOffer, .number = number, .segment = segment});
        segment->whenOver([mapper = mapper_] { mapper->wake(); });
      }
      if (is_over) withdraw(number);
      settle(own);
    }
  }

  // No kernel that begins from now on uses it.
  void withdraw(uint64_t number) {
    mapped_[slotOf(number)].store(0, std::memory_order_release);
    clearEntry(rank_, number);
    // Kernels of peers may not have ended yet where calls have failed.
    if (!hasFailed()) sendAll({.what = Message::What::kWithdraw, .number = number});
  }

  // Offers a range and what is wanted of it, and drops the pieces that are no longer there.
  void lookAtRange(Own& own) {
    Range& range = *own.range;
    const uint64_t number = own.number;
    std::vector<Addresses> wanted;
    std::vector<uint64_t> gone;
    bool is_new = false, is_over = false;
    {
      const std::lock_guard lock(mutex_);
      is_new = !std::exchange(own.is_offered, true);
      wanted.swap(range.wanted);
      std::erase_if(range.pieces, [&](const auto& entry) {
        const Piece& piece = entry.second;
        const bool is_gone = !isThere(piece.where.begin, piece.where.end, piece.extent);
        if (is_gone) gone.push_back(piece.id);
        return is_gone;
      });
      // A tensor may have gone before any piece under it was offered.
      const bool is_known = range.kept ? range.every(*range.kept, [](const Piece&) { return true; })
                                       : !range.pieces.empty();
      is_over = !is_new && ((range.kept && !gone.empty()) || (wanted.empty() && !is_known));
      if (is_over) {
        own.range = nullptr;
        own.is_withdrawn = true;
      }
    }
    if (is_over) return withdraw(number);
    if (is_new)
      sendAll({.what = Message::What::kReserve,
               .number = number,
               .at = range.where.begin,
               .bytes = range.where.end - range.where.begin});
    if (!gone.empty() && !hasFailed())
      for (const uint64_t piece : gone)
        sendAll({.what = Message::What::kDrop, .number = number, .piece = piece});
    if (wanted.empty()) return;
    size_t offered = offeredPieces();
    for (const Addresses& tensor : wanted) offerPieces(own, range, tensor, offered);
  }

  // Those that peers have not answered.
  size_t offeredPieces() {
    const std::lock_guard lock(mutex_);
    size_t offered = 0;
    for (const Own& own : own_)
      if (own.range)
        for (const auto& [begin, piece] : own.range->pieces) offered += piece.unanswered > 0;
    return offered;
  }

  void offerPieces(const Own& own, Range& range, const Addresses& tensor, size_t& offered) {
    for (uintptr_t at = tensor.begin; at < tensor.end;) {
      if (const Piece* const known = range.at(at)) {
        at = known->where.end;
        continue;
      }
      if (offered >= kMostOffered) {  // goes on when they are answered
        const std::lock_guard lock(mutex_);
        const Addresses rest{at, tensor.end};
        if (std::ranges::none_of(range.wanted, [&](const auto& one) { return one.hold(rest); }))
          range.wanted.push_back(rest);
        return;
      }
      const std::vector<Extent> extents = extentsOf(reinterpret_cast<const void*>(at), 1);
      if (extents.empty()) return mapper().wake();  // unmapped meanwhile: the range may be over
      const Extent& extent = extents.front();
      Piece piece{.id = ++last_piece_,
                  .where = {std::max(extent.begin, range.where.begin),
                            std::min(extent.end, range.where.end)},
                  .extent = extent.number,
                  .unanswered = size_ - 1};
      Message message{.what = Message::What::kPiece, .number = own.number, .piece = piece.id};
      try {
        const auto pointer = [](uintptr_t to) { return reinterpret_cast<const std::byte*>(to); };
        PieceInPlace found =
            exportMapped(device_, pointer(at), pointer(extent.begin), pointer(extent.end));
        const auto begin = reinterpret_cast<uintptr_t>(found.begin);
        piece.where.begin = std::max(begin, range.where.begin);
        piece.where.end = std::min(begin + found.piece.bytes, range.where.end);
        piece.is_refused = begin < range.where.begin;  // only whole ones, from their begin on
        message.at = piece.where.begin - range.where.begin;
        message.bytes = piece.where.end - piece.where.begin;
        message.fd = std::make_shared<const Fd>(std::move(found.piece.fd));
      } catch (const CudaError& error) {
        // A part was unmapped meanwhile: it goes by what there is now.
        if (!isThere(extent.begin, extent.end, extent.number)) continue;
        // Of others nothing is known.
        const uintptr_t block = at / kBlockBytes * kBlockBytes;
        piece.where = {std::max(piece.where.begin, block),
                       std::min(piece.where.end, block + kBlockBytes)};
        piece.is_refused = true;
        if (!std::exchange(told_not_exported_, true))
          log("rank " + peer(rank_).name + " of group '" + name_ +
              "' cannot offer memory to other ranks, so calls on tensors there copy them: " +
              error.what());
      }
      // The extent may have been unmapped before the export.  The allocator notes an unmap before
      // it maps other memory at the same addresses, so if the extent is still known, it was
      // exported.
      if (!isThere(piece.where.begin, piece.where.end, piece.extent)) return;
      at = piece.where.end;
      if (piece.is_refused)
        piece.unanswered = 0;
      else
        ++offered;
      const std::lock_guard lock(mutex_);
      // Blocks of it were refused for a reason that has passed.
      for (auto next = range.pieces.lower_bound(piece.where.begin);
           next != range.pieces.end() && next->first < piece.where.end;)
        next = next->second.is_refused ? range.pieces.erase(next) : std::next(next);
      range.pieces.emplace(piece.where.begin, piece);
      if (!piece.is_refused) sendAll(message);
    }
  }

  // Whether all peers have answered so.
  bool all(const Own& own, Answer answer, bool or_gone) {
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && own.answers[static_cast<size_t>(r)] != answer &&
          !(or_gone && !peer(r).outbox))
        return false;
    return true;
  }

  // Uses the answers of peers.
  void settle(Own& own) {
    SegmentEntry entry{};
    {
      const std::lock_guard lock(mutex_);
      if (own.is_withdrawn && all(own, Answer::kClosed, /*or_gone=*/true)) own.is_used = false;
      if (own.is_withdrawn || !all(own, Answer::kMapped, /*or_gone=*/false)) return;
      entry.number = own.number;
      if (own.segment) {
        entry.data = own.segment->data();
        entry.bytes = own.segment->bytes();
      } else if (own.range && (!own.range->kept || own.range->isMapped(*own.range->kept))) {
        entry.data = reinterpret_cast<std::byte*>(own.range->where.begin);
        entry.bytes = own.range->where.end - own.range->where.begin;
      } else {
        return;
      }
    }
    if (isMapped(entry.number) || !writeEntry(rank_, entry)) return;
    mapped_[slotOf(entry.number)].store(entry.number, std::memory_order_release);
  }

  // True if some is left that the peer could not take yet.
  bool flush(Peer& to) {
    while (to.outbox && !to.waiting.empty()) {
      const Message& message = to.waiting.front();
      const auto& segment = message.segment;
      std::vector<int> fds;
      Fields fields{{"what", kWords[static_cast<size_t>(message.what)]},
                    {"rank", std::to_string(rank_)},
                    {"number", std::to_string(message.number)}};
      if (segment) {
        fields["id"] = std::to_string(segment->id());
        fields["bytes"] = std::to_string(segment->bytes());
        if (!isBeside(to)) fds.push_back(segment->fd());
      }
      if (message.piece != 0) fields["piece"] = std::to_string(message.piece);
      if (message.what == Message::What::kReserve || message.what == Message::What::kPiece) {
        fields["at"] = std::to_string(message.at);
        fields["bytes"] = std::to_string(message.bytes);
        if (message.fd && !isBeside(to)) fds.push_back(message.fd->get());
      }
      switch (trySendPacket(to.outbox, encode(fields), fds)) {
        case Sent::kMessage:
          to.waiting.pop_front();
          break;
        case Sent::kNotYet:
          return true;
        case Sent::kGone:
          to.outbox.reset();
          to.waiting.clear();
      }
    }
    return false;
  }

  // Whether it has the same memory at the same addresses.
  bool isBeside(const Peer& other) const {
    const Resident& own = residents_[static_cast<size_t>(rank_)];
    const Resident& theirs = residents_[static_cast<size_t>(&other - peers_.data())];
    return own.sharesProcess(theirs) && own.sharesGpu(theirs);
  }

  void receive() {
    while (inbox_) {
      Packet packet;
      std::string obstacle;
      try {
        switch (receivePacket(inbox_, packet)) {
          case Received::kNothingYet:
            return;
          case Received::kClosed:  // no other rank has its end any more
            inbox_.reset();
            return;
          case Received::kMessage:
            break;
        }
      } catch (const Error& error) {  // no descriptors left for what it sent
        obstacle = error.what();
      }
      take(packet, obstacle);
    }
  }

  void take(Packet& packet, const std::string& obstacle) {
    const Fields fields = decode(packet.bytes);
    const auto what = whatOf(fieldOf(fields, "what"));
    const int64_t from = ringreduce::number(fields, "rank");
    const int64_t number = ringreduce::number(fields, "number");
    if (!what || from < 0 || from >= size_ || from == rank_ || number <= 0) return;
    Peer& peer = peers_[static_cast<size_t>(from)];
    const auto which = static_cast<uint64_t>(number);
    const auto piece = static_cast<uint64_t>(ringreduce::number(fields, "piece"));
    switch (*what) {
      case Message::What::kPiece: {
        const bool done = mapPiece(static_cast<int>(from), which, piece, fields, packet, obstacle);
        peer.waiting.push_back(
            {.what = done ? Message::What::kPieceMapped : Message::What::kPieceRefused,
             .number = which,
             .piece = piece});
        break;
      }
      case Message::What::kDrop:
        closePiece(static_cast<int>(from), which, piece);
        break;
      case Message::What::kPieceMapped:
        notePiece(which, piece, false);
        break;
      case Message::What::kPieceRefused:
        notePiece(which, piece, true);
        break;
      case Message::What::kReserve:
      case Message::What::kOffer: {
        const bool done = map(static_cast<int>(from), which, fields, packet, obstacle);
        peer.waiting.push_back(
            {.what = done ? Message::What::kMapped : Message::What::kRefused, .number = which});
        break;
      }
      case Message::What::kWithdraw:
        close(static_cast<int>(from), which);
        peer.waiting.push_back({.what = Message::What::kClosed, .number = which});
        break;
      case Message::What::kMapped:
        note(static_cast<int>(from), which, Answer::kMapped);
        break;
      case Message::What::kRefused:
        note(static_cast<int>(from), which, Answer::kRefused);
        break;
      case Message::What::kClosed:
        note(static_cast<int>(from), which, Answer::kClosed);
    }
  }

  void note(int from, uint64_t number, Answer answer) {
    const std::lock_guard lock(mutex_);
    if (Own& own = own_[slotOf(number)]; own.is_used && own.number == number)
      own.answers[static_cast<size_t>(from)] = answer;
  }

  void notePiece(uint64_t number, uint64_t id, bool is_refused) {
    const std::lock_guard lock(mutex_);
    const Own& own = own_[slotOf(number)];
    if (!own.is_used || own.number != number || !own.range) return;
    for (auto& [begin, piece] : own.range->pieces) {
      if (piece.id != id || piece.unanswered == 0) continue;
      piece.is_refused = piece.is_refused || is_refused;
      --piece.unanswered;
    }
  }

  // Maps what rank `from` offers; false if that cannot be done.
  bool map(int from, uint64_t number, const Fields& fields, Packet& packet,
           const std::string& obstacle) {
    Peer& owner = peer(from);
    Theirs& slot = owner.segments[slotOf(number)];
    const auto bytes =
        static_cast<uint64_t>(std::max<int64_t>(0, ringreduce::number(fields, "bytes")));
    try {
      if (!obstacle.empty()) throw Error(Failure::kSetup, obstacle);
      if (slot.number != 0 || bytes == 0)
        throw Error(Failure::kSetup, "its offer does not fit what it has offered before");
      Theirs mapped{.number = number};
      std::byte* data = nullptr;
      if (const bool is_range = fieldOf(fields, "what") == "reserve"; is_range && isBeside(owner)) {
        data = reinterpret_cast<std::byte*>(ringreduce::number(fields, "at"));
      } else if (is_range) {
        mapped.range = reserveAddresses(device_, bytes);
        data = mapped.range->data();
      } else if (isBeside(owner)) {
        mapped.segment = ownSegmentWithId(static_cast<uint64_t>(ringreduce::number(fields, "id")));
        if (!mapped.segment) return false;  // over by now
        data = mapped.segment->data();
      } else {
        if (packet.fds.size() != 1) throw Error(Failure::kSetup, "its descriptor has not come");
        const ExportedPiece piece{.fd = std::move(packet.fds[0]), .bytes = bytes};
        mapped.memory = mapExported(device_, std::span(&piece, 1));
        data = mapped.memory->data();
      }
      if (!writeEntry(from, {.number = number, .data = data, .bytes = bytes})) return false;
      slot = std::move(mapped);
      return true;
    } catch (const Error& error) {
      tellRefusal(owner, error);
      return false;
    }
  }

  bool mapPiece(int from, uint64_t number, uint64_t id, const Fields& fields, Packet& packet,
                const std::string& obstacle) {
    Peer& owner = peer(from);
    Theirs& slot = owner.segments[slotOf(number)];
    if (slot.number != number) return false;  // the range was refused
    if (isBeside(owner)) return true;
    const auto at = static_cast<uint64_t>(ringreduce::number(fields, "at"));
    const auto bytes = static_cast<uint64_t>(ringreduce::number(fields, "bytes"));
    try {
      if (!obstacle.empty()) throw Error(Failure::kSetup, obstacle);
      if (packet.fds.size() != 1 || !slot.range || at > slot.range->bytes() ||
          bytes > slot.range->bytes() - at)
        throw Error(Failure::kSetup, "its piece does not fit what it has offered before");
      slot.range->map(at, {.fd = std::move(packet.fds[0]), .bytes = bytes});
      slot.pieces[id] = at;
      return true;
    } catch (const Error& error) {
      tellRefusal(owner, error);
      return false;
    }
  }

  void closePiece(int from, uint64_t number, uint64_t id) {
    Theirs& slot = peer(from).segments[slotOf(number)];
    const auto found = slot.pieces.find(id);
    if (slot.number != number || found == slot.pieces.end()) return;  // it was refused
    slot.range->unmap(found->second);
    slot.pieces.erase(found);
  }

  void tellRefusal(const Peer& owner, const Error& error) {
    if (!std::exchange(told_, true))
      log("rank " + peer(rank_).name + " of group '" + name_ + "' cannot map memory of rank " +
          owner.name + ", so calls on tensors there copy them: " + error.what());
  }

  void close(int from, uint64_t number) {
    Theirs& slot = peer(from).segments[slotOf(number)];
    if (slot.number != number) return;  // it was refused
    clearEntry(from, number);
    slot = {};
  }

  SegmentEntry* entryOf(int rank, uint64_t number) const {
    return reinterpret_cast<SegmentEntry*>(table_->data()) +
           static_cast<size_t>(rank) * kMostSegments + slotOf(number);
  }

  // Both return when the table in the GPU's memory is so.  False: CUDA has failed.
  bool writeEntry(int rank, const SegmentEntry& entry) {
    SegmentEntry* const to = entryOf(rank, entry.number);
    return write(&to->data, &entry.data, sizeof entry - sizeof entry.number) &&
           write(&to->number, &entry.number, sizeof entry.number);
  }
  bool clearEntry(int rank, uint64_t number) {
    const uint64_t none = 0;
    return write(&entryOf(rank, number)->number, &none, sizeof none);
  }
  bool write(void* to, const void* from, size_t bytes) {
    if (!works_) return false;
    try {
      stream_->copy(to, from, bytes);
    } catch (const Error& error) {
      works_ = false;
      log("rank " + peer(rank_).name + " of group '" + name_ +
          "' maps no more memory of other ranks: " + error.what());
    }
    return works_;
  }

  const std::weak_ptr<Group> group_;
  const std::string name_;
  const int rank_, size_, device_;
  const int generation_ = forkGeneration();
  const std::vector<Resident> residents_;
  const bool reaches_, finds_pieces_;
  std::shared_ptr<Mapper> mapper_;
  std::unique_ptr<Stream> stream_;
  MemoryPtr table_;

  std::mutex mutex_;  // of own_, slots_ and told_full_
  std::array<Own, kMostSegments> own_;
  std::map<uint64_t, size_t> slots_;  // by the id of what is offered
  bool told_full_ = false;
  std::array<std::atomic<uint64_t>, kMostSegments> mapped_{};  // numbers that all peers map

  // The mapping thread's.
  Fd inbox_;
  std::vector<Peer> peers_;  // by rank
  bool told_ = false, told_not_exported_ = false, works_ = true;
  uint64_t last_piece_ = 0;
};

namespace board {

void Mapper::run() {
  for (;;) {
    std::vector<Board> boards;
    {
      const std::lock_guard lock(mutex_);
      if (boards_.empty()) {
        runs_ = false;
        return;
      }
      boards = boards_;
    }
    uint64_t wakes = 0;  // before the look at what woke it
    (void)!::read(wake_.get(), &wakes, sizeof wakes);
    bool again = false;
    std::vector<pollfd> wanted{{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
    for (const Board& board : boards) {
      again = board->serve() || again;
      // A negative descriptor is passed over.
      wanted.push_back({.fd = board->inbox(), .events = POLLIN, .revents = 0});
    }
    // What is removed meanwhile is given back elsewhere.
    ::poll(wanted.data(), wanted.size(), again ? kRetryMs : -1);
  }
}

}  // namespace board

SegmentBoard::SegmentBoard(Group& group, const PeerMemory& memory, bool finds_pieces)
    : state_(std::make_shared<State>(group, memory, finds_pieces)) {
  state_->connect(group);
  if (!state_->reaches()) return;
  try {
    agreeOnStatus(group, [&] { state_->mapper().add(state_); });
  } catch (...) {
    state_->mapper().remove(state_.get());
    throw;
  }
}

SegmentBoard::~SegmentBoard() {
  if (forkGeneration() != state_->generation()) {  // the parent's, as its thread is
    (void)new std::shared_ptr<State>(state_);
    return;
  }
  if (state_->reaches()) state_->mapper().remove(state_.get());
  closeLater([state = state_] {});
}

Place SegmentBoard::find(const void* data, size_t bytes, const std::function<bool()>& is_kept,
                         bool keeps_pieces) {
  return state_->find(data, bytes, is_kept, keeps_pieces);
}
bool SegmentBoard::reaches() const {
  return state_->reaches();
}
bool SegmentBoard::isMapped(Place place) const {
  return state_->isMapped(place.segment);
}
const SegmentEntry* SegmentBoard::table() const {
  return reinterpret_cast<const SegmentEntry*>(state_->table()->data());
}
size_t SegmentBoard::bytes() const {
  return state_->table()->bytes();
}

}  // namespace ringreduce::cuda
