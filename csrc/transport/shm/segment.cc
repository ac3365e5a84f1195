// memfd, seals and mmap.
#include "transport/shm/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>

#include "base/error.h"

namespace ringreduce {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

using FileId = std::pair<dev_t, ino_t>;

struct Mappings {
  std::mutex mutex;
  std::map<FileId, std::weak_ptr<Segment>> live;
};

Mappings& mappings() {
  // Never destroyed: groups may outlive static objects.
  static Mappings* all = [] {
    pthread_atfork([] { mappings().mutex.lock(); }, [] { mappings().mutex.unlock(); },
                   [] { mappings().mutex.unlock(); });
    return new Mappings;
  }();
  return *all;
}

struct stat statusOf(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throwErrno(Failure::kSetup, "cannot inspect shared memory");
  return status;
}

}  // namespace

std::shared_ptr<Segment> Segment::map(Fd fd, size_t bytes) {
  const struct stat status = statusOf(fd.get());
  Mappings& all = mappings();
  const std::lock_guard lock(all.mutex);
  std::weak_ptr<Segment>& known = all.live[{status.st_dev, status.st_ino}];
  if (auto segment = known.lock()) return segment;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED)
    throwErrno(Failure::kSetup, "cannot map " + std::to_string(bytes) + " bytes of shared memory");
  madvise(data, bytes, MADV_HUGEPAGE);  // a hint; most kernels ignore it for shared memory
  std::shared_ptr<Segment> segment(
      new Segment(std::move(fd), static_cast<std::byte*>(data), bytes));
  known = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  Fd fd(memfd_create("ringreduce", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throwErrno(Failure::kSetup, "cannot make shared memory (memfd_create)");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throwErrno(Failure::kSetup, "cannot make " + std::to_string(bytes) + " bytes of shared memory");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0)
    throwErrno(Failure::kSetup, "cannot seal shared memory");
  return map(std::move(fd), bytes);
}

std::shared_ptr<Segment> Segment::attach(Fd fd, size_t bytes) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw Error(Failure::kSetup, "a peer sent shared memory that is not sealed against resizing");
  const auto size = static_cast<size_t>(statusOf(fd.get()).st_size);
  if (size != bytes)
    throw Error(Failure::kSetup, "a peer sent " + std::to_string(size) +
                                     " bytes of shared memory where " + std::to_string(bytes) +
                                     " were agreed");
  return map(std::move(fd), bytes);
}

void Segment::closeFd() {
  const std::lock_guard lock(mappings().mutex);  // ranks that are threads share this object
  fd_.reset();
}

Segment::~Segment() {
  Mappings& all = mappings();
  const std::lock_guard lock(all.mutex);
  // A later mapping of the same file may have replaced this entry.
  for (auto it = all.live.begin(); it != all.live.end();)
    it = it->second.expired() ? all.live.erase(it) : std::next(it);
  munmap(data_, size_);
}

}  // namespace ringreduce
