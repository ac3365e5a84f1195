// All blocks of the process, by address.
#include "transport/shm/shared_block.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"

namespace ringreduce {

struct SharedBlocks {
  std::mutex mutex;
  std::map<const std::byte*, SharedBlock*> by_address;
  std::atomic<size_t> count{0};
  std::atomic<uint64_t> numbers{0};

  // DDP asks for a size twice while it makes its buckets, and lets go of the first for good.
  static constexpr int kAgainAndAgain = 3;
  static constexpr Nanos kKeptFor = 10 * kSecond;
  static constexpr size_t kMostKept = size_t{1} << 30;

  struct Kept {
    std::shared_ptr<SharedBlock> block;
    Nanos since;
  };
  struct Asked {
    int times = 0;  // with less than kKeptFor between them
    Nanos last = 0;
  };
  std::multimap<size_t, Kept> kept;  // by size
  size_t kept_bytes = 0;
  std::map<size_t, Asked> asked;  // of reuse(), by size

  static SharedBlocks& all() {
    static SharedBlocks* blocks = [] {
      auto* made = new SharedBlocks;  // never destroyed: tensors may outlive static objects
      pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); }, inChild);
      return made;
    }();
    return *blocks;
  }

  // Takes out the blocks that were kept for too long.  Forgets the sizes that were not asked for
  // lately.
  std::vector<std::shared_ptr<SharedBlock>> takeOld() {
    std::vector<std::shared_ptr<SharedBlock>> old;
    const Nanos before = now() - kKeptFor;
    std::erase_if(asked, [&](const auto& one) { return one.second.last < before; });
    std::erase_if(kept, [&](auto& one) {
      if (one.second.since >= before) return false;
      kept_bytes -= one.first;
      old.push_back(std::move(one.second.block));
      return true;
    });
    return old;
  }

  // A view of the file shows what is in the block, and keeps what the child writes.  Some pages of
  // a detached block are no longer those of the file, so the child gets a copy of it.
  static void inChild() {
    for (const auto& [address, block] : all().by_address) {
      const bool is_private = std::exchange(block->detached_, true)
                                  ? makePrivate(block->data(), block->size())
                                  : mmap(block->data(), block->size(), PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_FIXED, block->fd_, 0) != MAP_FAILED;
      if (!is_private) _exit(1);  // to go on would mean to write into the parent's tensors
      close(std::exchange(block->fd_, -1));
    }
    all().mutex.unlock();
  }

  // Replaces whole pages by a copy that only this process has.  False, with errno, if it cannot.
  static bool makePrivate(std::byte* pages, size_t bytes) {
    void* copy = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return false;
    std::memcpy(copy, pages, bytes);
    if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, pages) != MAP_FAILED) return true;
    const int error = errno;
    munmap(copy, bytes);
    errno = error;
    return false;
  }
};

SharedBlock::SharedBlock(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)), number_(++SharedBlocks::all().numbers) {
  struct stat status{};
  if (fstat(segment_->fd(), &status) != 0 || (fd_ = fcntl(segment_->fd(), F_DUPFD_CLOEXEC, 0)) < 0)
    throwErrno(Failure::kSetup, "cannot make shared memory for a tensor");
  device_ = status.st_dev;
  inode_ = status.st_ino;
  segment_->closeFd();
}

std::shared_ptr<SharedBlock> SharedBlock::create(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto segment = Segment::create(roundUp(bytes == 0 ? 1 : bytes, page));
  SharedBlocks& all = SharedBlocks::all();
  // Takes the lock of all segments, so not within that of all blocks: a fork takes both.
  const std::shared_ptr<SharedBlock> block(new SharedBlock(std::move(segment)));
  const std::lock_guard lock(all.mutex);
  all.by_address[block->data()] = block.get();
  ++all.count;
  return block;
}

std::shared_ptr<SharedBlock> SharedBlock::reuse(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t size = roundUp(bytes == 0 ? 1 : bytes, page);
  SharedBlocks& all = SharedBlocks::all();
  std::vector<std::shared_ptr<SharedBlock>> dropped;  // ends after the lock
  {
    const std::lock_guard lock(all.mutex);
    dropped = all.takeOld();
    auto& [times, last] = all.asked[size];
    last = now();
    ++times;
    if (auto found = all.kept.extract(size)) {
      all.kept_bytes -= size;
      std::shared_ptr<SharedBlock>& block = found.mapped().block;
      if (!block->detached_) return std::move(block);
      dropped.push_back(std::move(block));
    }
  }
  return create(bytes);
}

void SharedBlock::keep(std::shared_ptr<SharedBlock> block) {
  SharedBlocks& all = SharedBlocks::all();
  std::vector<std::shared_ptr<SharedBlock>> dropped;  // ends after the lock
  const std::lock_guard lock(all.mutex);
  dropped = all.takeOld();
  const size_t size = block->size();
  const auto asked = all.asked.find(size);
  if (block->detached_ || asked == all.asked.end() ||
      asked->second.times < SharedBlocks::kAgainAndAgain ||
      all.kept_bytes + size > SharedBlocks::kMostKept)
    return;
  all.kept_bytes += size;
  all.kept.emplace(size, SharedBlocks::Kept{std::move(block), now()});
}

void SharedBlock::dropKept() {
  SharedBlocks& all = SharedBlocks::all();
  std::multimap<size_t, SharedBlocks::Kept> dropped;  // ends after the lock
  const std::lock_guard lock(all.mutex);
  dropped.swap(all.kept);
  all.kept_bytes = 0;
  all.asked.clear();
}

std::shared_ptr<SharedBlock> SharedBlock::holding(const void* data, size_t bytes) {
  SharedBlocks& all = SharedBlocks::all();
  if (all.count.load(std::memory_order_relaxed) == 0) return nullptr;
  const auto* begin = static_cast<const std::byte*>(data);
  std::shared_ptr<SharedBlock> block;  // may end after the lock
  const std::lock_guard lock(all.mutex);
  auto after = all.by_address.upper_bound(begin);
  if (after == all.by_address.begin()) return nullptr;
  block = std::prev(after)->second->weak_from_this().lock();
  const bool holds = block && !block->detached_ && begin + bytes <= block->data() + block->size();
  return holds ? block : nullptr;
}

void SharedBlock::detach(const std::byte* begin, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<size_t>(begin - data());
  const size_t first = roundUp(offset, page);
  const size_t last = (offset + bytes) / page * page;
  const size_t end = last + page == size() ? size() : last;
  const std::lock_guard lock(SharedBlocks::all().mutex);
  detached_ = true;
  if (end > first && !SharedBlocks::makePrivate(data() + first, end - first))
    throwErrno(Failure::kSetup, "cannot make a private copy of a shared tensor");
}

SharedBlock::~SharedBlock() {
  const bool is_parents = forkGeneration() != generation_;
  {
    SharedBlocks& all = SharedBlocks::all();
    const std::lock_guard lock(all.mutex);
    all.by_address.erase(data());
    --all.count;
    if (!is_parents && !detached_) madvise(data(), size(), MADV_REMOVE);
    if (fd_ >= 0) close(fd_);
  }
  // The lock that it would take may have been held by a thread of the parent.
  if (is_parents) new std::shared_ptr<Segment>(std::move(segment_));
}

}  // namespace ringreduce
