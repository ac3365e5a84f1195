#include "socket_trial_engines.h"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace trial {

Lane::Lane(int fd) : fd_(fd) {}

void Lane::begin(float* own, float* others, size_t count) {
  own_ = reinterpret_cast<std::byte*>(own);
  others_ = reinterpret_cast<std::byte*>(others);
  bytes_ = count * sizeof(float);
  sent_ = received_ = added_ = 0;
}

int Lane::toSend(iovec* places) const {
  int count = 0;
  if (sent_ < bytes_) places[count++] = {others_ + sent_, bytes_ - sent_};
  const size_t own = std::max(sent_, bytes_) - bytes_;
  if (added_ > own) places[count++] = {own_ + own, added_ - own};
  return count;
}

int Lane::toReceive(iovec* places) {
  int count = 0;
  if (received_ < bytes_) {
    const size_t at = received_ % kPiece, most = std::min(kPiece - at, bytes_ - received_);
    places[count++] = {piece_.data() + at, most};
    if (received_ + most < bytes_) return count;
  }
  const size_t others = std::max(received_, bytes_) - bytes_;
  if (others < bytes_) places[count++] = {others_ + others, bytes_ - others};
  return count;
}

void Lane::received(size_t bytes) {
  received_ += bytes;
  // A piece is used anew only once it is full, and its bytes are a multiple of a float's.
  const size_t whole = std::min(received_, bytes_) / sizeof(float) * sizeof(float);
  while (added_ < whole) {
    const size_t at = added_ % kPiece, some = std::min(kPiece - at, whole - added_);
    float* const to = reinterpret_cast<float*>(own_ + added_);
    const float* const from = reinterpret_cast<const float*>(piece_.data() + at);
    for (size_t i = 0; i < some / sizeof(float); ++i) to[i] += from[i];
    added_ += some;
  }
}

namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void setBlocking(const std::vector<int>& sockets, bool blocking) {
  for (const int fd : sockets) {
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK) < 0) {
      fail("fcntl");
    }
  }
}

// Sends and receives what it can without waiting; whether that was anything.
bool tryBoth(Lane& lane) {
  bool moved = false;
  iovec places[2];
  while (const int count = lane.toReceive(places)) {
    const ssize_t got = readv(lane.fd(), places, count);
    if (got == 0) throw std::runtime_error("the other rank has gone");
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got < 0) fail("readv");
    lane.received(static_cast<size_t>(got));
    moved = true;
    // What was just reduced can go before more is received: both directions stay full.
    if (static_cast<size_t>(got) < places[0].iov_len) break;
  }
  while (const int count = lane.toSend(places)) {
    const ssize_t put = writev(lane.fd(), places, count);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EAGAIN) break;
    if (put < 0) fail("writev");
    lane.sent(static_cast<size_t>(put));
    moved = true;
  }
  return moved;
}

bool allDone(const std::vector<Lane>& lanes) {
  return std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.done(); });
}

class Poll : public Engine {
 public:
  Poll(const std::vector<int>& sockets, std::chrono::microseconds spin) : spin_(spin) {
    setBlocking(sockets, false);
  }

  void run(std::vector<Lane>& lanes) override {
    using Clock = std::chrono::steady_clock;
    Clock::time_point since = Clock::now();
    while (!allDone(lanes)) {
      bool moved = false;
      for (Lane& lane : lanes) moved |= tryBoth(lane);
      if (allDone(lanes)) return;
      if (spin_.count()) {
        const Clock::time_point now = Clock::now();
        if (moved) since = now;
        if (now - since < spin_) {
          sched_yield();
          continue;
        }
      }
      std::vector<pollfd> wanted;
      iovec places[2];
      for (Lane& lane : lanes) {
        const int events =
            (lane.toReceive(places) ? POLLIN : 0) | (lane.toSend(places) ? POLLOUT : 0);
        if (events) wanted.push_back({lane.fd(), static_cast<short>(events), 0});
      }
      if (poll(wanted.data(), wanted.size(), -1) < 0 && errno != EINTR) fail("poll");
    }
  }

 private:
  std::chrono::microseconds spin_;
};

// Edge-triggered: registered once, and no call says what is waited for.
class Epoll : public Engine {
 public:
  explicit Epoll(const std::vector<int>& sockets) : fd_(epoll_create1(EPOLL_CLOEXEC)) {
    setBlocking(sockets, false);
    if (fd_ < 0) fail("epoll_create1");
    for (size_t i = 0; i < sockets.size(); ++i) {
      epoll_event event{};
      event.events = EPOLLIN | EPOLLOUT | EPOLLET;
      event.data.u64 = i;
      if (epoll_ctl(fd_, EPOLL_CTL_ADD, sockets[i], &event) != 0) fail("epoll_ctl");
    }
  }
  ~Epoll() override { close(fd_); }

  void run(std::vector<Lane>& lanes) override {
    for (;;) {
      // Each is tried until it would block, since the next event comes only after that.
      for (Lane& lane : lanes) {
        while (!lane.done() && tryBoth(lane)) {
        }
      }
      if (allDone(lanes)) return;
      epoll_event events[16];
      if (epoll_wait(fd_, events, 16, -1) < 0 && errno != EINTR) fail("epoll_wait");
    }
  }

 private:
  int fd_;
};

// One send and one receive a lane in the ring at a time; submits and waits in one call.
class Uring : public Engine {
 public:
  static constexpr unsigned kEntries = 64;

  explicit Uring(const std::vector<int>& sockets) {
    io_uring_params params{};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, kEntries, &params));
    if (fd_ < 0 && errno == EINVAL) {  // older than 6.1
      params = {};
      fd_ = static_cast<int>(syscall(SYS_io_uring_setup, kEntries, &params));
    }
    if (fd_ < 0) return;
    setBlocking(sockets, true);  // or every operation that would block fails with EAGAIN
    const auto map = [&](size_t bytes, uint64_t offset) {
      void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                            static_cast<off_t>(offset));
      if (at == MAP_FAILED) fail("mmap");
      return static_cast<std::byte*>(at);
    };
    std::byte* const submissions =
        map(params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    std::byte* const completions =
        map(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(
        map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
    const auto at = [](std::byte* ring, unsigned offset) {
      return reinterpret_cast<unsigned*>(ring + offset);
    };
    sq_tail_ = at(submissions, params.sq_off.tail);
    sq_array_ = at(submissions, params.sq_off.array);
    sq_mask_ = *at(submissions, params.sq_off.ring_mask);
    cq_head_ = at(completions, params.cq_off.head);
    cq_tail_ = at(completions, params.cq_off.tail);
    cq_mask_ = *at(completions, params.cq_off.ring_mask);
    results_ = reinterpret_cast<io_uring_cqe*>(completions + params.cq_off.cqes);
  }
  ~Uring() override {
    if (fd_ >= 0) close(fd_);  // the mappings go with the process
  }
  bool ok() const { return fd_ >= 0; }

  void run(std::vector<Lane>& lanes) override {
    std::vector<bool> sending(lanes.size()), receiving(lanes.size());
    unsigned submitted = 0;
    while (!allDone(lanes)) {
      for (size_t i = 0; i < lanes.size(); ++i) {
        iovec places[2];
        if (!receiving[i] && lanes[i].toReceive(places)) {
          put(IORING_OP_RECV, lanes[i].fd(), places[0], 2 * i);
          receiving[i] = true;
          ++submitted;
        }
        if (!sending[i] && lanes[i].toSend(places)) {
          put(IORING_OP_SEND, lanes[i].fd(), places[0], 2 * i + 1);
          sending[i] = true;
          ++submitted;
        }
      }
      const long took =
          syscall(SYS_io_uring_enter, fd_, submitted, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (took < 0 && errno != EINTR) fail("io_uring_enter");
      if (took > 0) submitted -= static_cast<unsigned>(took);
      unsigned head = *cq_head_;
      while (head != std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) {
        const io_uring_cqe result = results_[head & cq_mask_];
        std::atomic_ref(*cq_head_).store(++head, std::memory_order_release);
        const size_t i = result.user_data / 2;
        const bool send = result.user_data % 2;
        (send ? sending : receiving)[i] = false;
        if (result.res == 0) throw std::runtime_error("the other rank has gone");
        if (result.res < 0) {
          errno = -result.res;
          fail(send ? "send" : "recv");
        }
        if (send) {
          lanes[i].sent(static_cast<size_t>(result.res));
        } else {
          lanes[i].received(static_cast<size_t>(result.res));
        }
      }
    }
  }

 private:
  void put(uint8_t what, int fd, const iovec& place, uint64_t tag) {
    const unsigned tail = *sq_tail_, slot = tail & sq_mask_;
    io_uring_sqe& entry = entries_[slot];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = what;
    entry.fd = fd;
    entry.addr = reinterpret_cast<uint64_t>(place.iov_base);
    entry.len = static_cast<unsigned>(std::min<size_t>(place.iov_len, 1 << 30));
    entry.user_data = tag;
    sq_array_[slot] = slot;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
  }

  int fd_ = -1;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* results_ = nullptr;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
};

}  // namespace

std::unique_ptr<Engine> makeEngine(const std::string& name, const std::vector<int>& sockets) {
  if (name == "poll") return std::make_unique<Poll>(sockets, std::chrono::microseconds(0));
  if (name == "spin") return std::make_unique<Poll>(sockets, std::chrono::microseconds(50));
  if (name == "epoll") return std::make_unique<Epoll>(sockets);
  if (name == "io_uring") {
    auto engine = std::make_unique<Uring>(sockets);
    if (engine->ok()) return engine;
  }
  return nullptr;
}

}  // namespace trial
