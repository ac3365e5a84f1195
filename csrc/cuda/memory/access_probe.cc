// Three stages: each rank allocates its piece; maps all pieces, reads their patterns and writes its
// own; checks the patterns of the others in its piece.  After each, the ranks exchange the outcome.
#include "cuda/memory/access_probe.h"

#include <sys/random.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "group/exchange_fds.h"

namespace ringreduce::cuda {

namespace {

// Memory that ranks of this process offer each other, by ticket.
struct Offers {
  std::mutex mutex;
  uint64_t last = 0;
  std::map<uint64_t, std::weak_ptr<DeviceMemory>> open;
};
Offers& offers() {
  static auto* all = new Offers;  // never destroyed: memory may be offered until the process ends
  return *all;
}

// Keeps memory until the process ends.
void keep(MemoryPtr memory) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<MemoryPtr>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

// ---- giving back

PeerPieces::PeerPieces(Group& g, int d, std::vector<Resident> all)
    : group(g.weak_from_this()),
      rank(g.rank()),
      device(d),
      residents(std::move(all)),
      memory(residents.size()) {}

bool PeerPieces::hasClosed(int r) const {
  const auto i = static_cast<size_t>(r);
  if (residents[i].sharesProcess(residents[static_cast<size_t>(rank)])) return true;
  auto& word = *reinterpret_cast<uint32_t*>(closed->at(r));
  return std::atomic_ref(word).load(std::memory_order_acquire) != 0;
}

// Whether all other processes have closed this rank's memory.
bool PeerPieces::awaitClosed(Nanos patience) const {
  const auto late = [&] {
    const auto g = group.lock();
    for (int r = 0; r < static_cast<int>(residents.size()); ++r)
      if (!hasClosed(r) && !(g && g->epoch()->peers().hasExited(r))) return true;
    return false;
  };
  const Nanos deadline = deadlineIn(patience);
  while (late()) {
    if (now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void PeerPieces::release(Nanos patience) noexcept {
  if (memory.empty()) return;
  MemoryPtr own = std::move(memory[static_cast<size_t>(rank)]);
  memory.clear();
  // In a forked child all of it is the parent's.
  if (!closed || forkGeneration() != generation) return;
  if (copiesHang()) return;  // nothing was closed, so other ranks must keep their memory
  std::atomic_ref(*reinterpret_cast<uint32_t*>(closed->at(rank)))
      .store(1, std::memory_order_release);
  if (own && !awaitClosed(patience)) {
    // To free it under another rank's kernels would be worse.
    keep(std::move(own));
    log("rank " + std::to_string(rank) + " leaves " + std::to_string(bytes >> 20) +
        " MiB allocated on GPU " + std::to_string(device) +
        " until its process ends: another rank still maps them");
  }
}

// ---- ranks of one process

std::array<uint64_t, 2> processToken() {
  static auto* mutex = new std::mutex;
  static std::array<uint64_t, 2> token{};
  static int generation = -1;
  const std::lock_guard lock(*mutex);
  if (generation != forkGeneration()) {
    if (getrandom(token.data(), sizeof token, 0) != sizeof token)
      throwErrno(Failure::kSetup, "no random numbers to be had");
    generation = forkGeneration();
  }
  return token;
}

uint64_t offer(const MemoryPtr& memory) {
  Offers& all = offers();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.open, [](const auto& entry) { return entry.second.expired(); });
  all.open[++all.last] = memory;
  return all.last;
}

MemoryPtr take(uint64_t ticket) {
  Offers& all = offers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.open.find(ticket);
  MemoryPtr memory = found == all.open.end() ? nullptr : found->second.lock();
  if (!memory)
    throw Error(Failure::kSetup, "another rank of this process has given its memory back already");
  return memory;
}

namespace {

// The outcome of a stage at one rank, and the data that the others need from it.
struct Report {
  Outcome outcome;
  uint64_t nonce = 0;   // of the patterns in this rank's piece
  uint64_t ticket = 0;  // for ranks of the same process
  cudaIpcMemHandle_t handle = {};
};

struct Pattern {
  uint64_t words[8];
  bool operator==(const Pattern&) const = default;
};

// Rank `writer`'s pattern in the piece with this nonce; never zero.
Pattern patternOf(uint64_t nonce, int writer) {
  uint64_t hash = mixed(nonce, static_cast<uint64_t>(writer));
  Pattern pattern{};
  for (uint64_t& word : pattern.words) word = 1 | (hash = mixed(hash, 1));
  return pattern;
}

class Trial {
 public:
  Trial(Group& group, PeerPieces& state, const std::vector<std::string>& names, Nanos patience)
      : group_(group), state_(state), names_(names), patience_(patience) {}

  std::string run(size_t bytes, size_t granularity) {
    if (state_.access == MemoryAccess::kLegacyIpc)
      state_.closed = std::make_unique<HostPages>(group_, sizeof(uint32_t));
    if (state_.access == MemoryAccess::kHost) pages_ = std::make_unique<HostPages>(group_, bytes);
    if (!stage([&](Report& mine) { allocate(mine, bytes, granularity); }, true)) return obstacle_;
    if (state_.access == MemoryAccess::kDescriptor)
      fds_ = exchangeFds(group_, fd_.get(), "GPU memory");
    fd_.reset();
    if (!stage([&](Report&) { mapOthers(); })) return obstacle_;
    if (!stage([&](Report&) { lookForOthers(); })) return obstacle_;
    return "";
  }

 private:
  // False, with the obstacle, if a rank cannot do it.
  template <class F>
  bool stage(F&& step, bool allocates = false) {
    Report mine;
    mine.outcome = outcomeOf([&] { step(mine); }, allocates);
    reports_ = gatherEach(group_, mine);
    obstacle_ = obstacleIn(group_, reports_, allocates ? "" : advice());
    return obstacle_.empty();
  }

  std::string advice() const {
    if (state_.access == MemoryAccess::kHost) return "";
    return std::string(". This was the first access to GPU memory of other ranks (by ") +
           name(state_.access) +
           "). If it does not work on this machine, set RINGREDUCE_CUDA_WAY=host on all ranks";
  }

  const Report& report(int r) const { return reports_[static_cast<size_t>(r)]; }
  MemoryPtr& piece(int r) { return state_.memory[static_cast<size_t>(r)]; }
  bool isHere(int r) const {
    return state_.residents[static_cast<size_t>(r)].sharesProcess(
        state_.residents[static_cast<size_t>(state_.rank)]);
  }

  // The place of a rank's pattern in a piece: the owner's at both ends, as many of the others'
  // between as there is room for.
  size_t placeOf(int writer) const { return (static_cast<size_t>(writer) + 1) * sizeof(Pattern); }
  bool hasPlace(int writer) const { return placeOf(writer) + 2 * sizeof(Pattern) <= state_.bytes; }
  size_t end() const { return state_.bytes - sizeof(Pattern); }

  void allocate(Report& mine, size_t bytes, size_t granularity) {
    MemoryPtr& own = piece(state_.rank);
    switch (state_.access) {
      case MemoryAccess::kPointer:
      case MemoryAccess::kLegacyIpc:
        own = cuda::allocate(state_.device, bytes);
        mine.ticket = offer(own);
        if (state_.access == MemoryAccess::kLegacyIpc)
          mine.handle = ipcHandleOf(state_.device, own->data());
        break;
      case MemoryAccess::kDescriptor: {
        Exported exported =
            allocateExported(state_.device, roundUp(bytes == 0 ? 1 : bytes, granularity));
        own = std::move(exported.memory);
        fd_ = std::move(exported.fd);
        break;
      }
      case MemoryAccess::kHost:
        own = registerSegment(state_.device, pages_->segment(state_.rank));
        break;
    }
    state_.bytes = own->bytes();
    stream_ = std::make_unique<Stream>(state_.device, patience_);
    scratch_ = cuda::allocate(state_.device, sizeof(Pattern));
    if (state_.access != MemoryAccess::kHost) stream_->zero(own->data(), own->bytes());
    if (getrandom(&nonce_, sizeof nonce_, 0) != sizeof nonce_)
      throwErrno(Failure::kSetup, "no random numbers to be had");
    mine.nonce = nonce_;
    const Pattern pattern = patternOf(nonce_, state_.rank);
    stream_->copy(own->data(), &pattern, sizeof pattern);
    stream_->copy(own->data() + end(), &pattern, sizeof pattern);
  }

  MemoryPtr map(int r) {
    switch (state_.access) {
      case MemoryAccess::kDescriptor: {
        const ExportedPiece whole{std::move(fds_[static_cast<size_t>(r)]), state_.bytes};
        return mapExported(state_.device, {&whole, 1});
      }
      case MemoryAccess::kHost:
        return registerSegment(state_.device, pages_->segment(r));
      case MemoryAccess::kLegacyIpc:
        if (!isHere(r)) return openIpc(state_.device, report(r).handle, state_.bytes);
        [[fallthrough]];  // a process cannot open its own memory
      case MemoryAccess::kPointer:
        break;
    }
    MemoryPtr memory = take(report(r).ticket);
    enablePeerAccess(state_.device, memory->device());
    return memory;
  }

  void mapOthers() {
    for (int r = 0; r < group_.size(); ++r) {
      if (r == state_.rank) continue;
      piece(r) = map(r);
      const std::byte* data = piece(r)->data();
      expect(data, patternOf(report(r).nonce, r), names_[static_cast<size_t>(r)]);
      expect(data + end(), patternOf(report(r).nonce, r), names_[static_cast<size_t>(r)]);
      if (!hasPlace(state_.rank)) continue;
      const Pattern mine = patternOf(report(r).nonce, state_.rank);
      stream_->copy(piece(r)->data() + placeOf(state_.rank), &mine, sizeof mine);
    }
  }

  void lookForOthers() {
    std::byte* data = piece(state_.rank)->data();
    for (int r = 0; r < group_.size(); ++r)
      if (r != state_.rank && hasPlace(r))
        expect(data + placeOf(r), patternOf(nonce_, r), names_[static_cast<size_t>(r)]);
    if (state_.access == MemoryAccess::kHost)
      std::memset(pages_->at(state_.rank), 0, state_.bytes);
    else
      stream_->zero(data, state_.bytes);
  }

  void expect(const std::byte* place, const Pattern& pattern, const std::string& writer) {
    // By way of this rank's own memory: the first copy can be given up.
    Pattern found{};
    stream_->copy(scratch_->data(), place, sizeof found);
    stream_->copy(&found, scratch_->data(), sizeof found);
    if (found != pattern)
      throw Error(Failure::kSetup,
                  "does not see what " + writer + " wrote, although the memory could be mapped");
  }

  Group& group_;
  PeerPieces& state_;
  const std::vector<std::string>& names_;
  const Nanos patience_;
  std::unique_ptr<Stream> stream_;
  MemoryPtr scratch_;  // of this rank's GPU
  std::unique_ptr<HostPages> pages_;
  Fd fd_;                // of this rank's piece
  std::vector<Fd> fds_;  // of the others'
  uint64_t nonce_ = 0;
  std::vector<Report> reports_;  // of the last stage, by rank
  std::string obstacle_;
};

}  // namespace

std::string tryAccess(Group& group, PeerPieces& state, size_t bytes, size_t granularity,
                      const std::vector<std::string>& names, Nanos patience) {
  return Trial(group, state, names, patience).run(bytes, granularity);
}

}  // namespace ringreduce::cuda
