// Control rings for tests: ranks that are threads' worth of one process, who hear, ask, leave, end,
// and are cut off.  It stands in for sendmsg and recvmsg, so a program includes it in one file.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "control/control.h"
#include "control/control_frames.h"
#include "sockets.h"

namespace control_world {

using namespace ringreduce;
using net::Control;
using net::Progress;
using net::Reactor;
using sockets::Over;
using sockets::until;

// Black holes, since a test cannot cut a cable: what is sent into one vanishes, and reading tells
// that after a while, as the system does where TCP_USER_TIMEOUT is up.
inline std::mutex holes_mutex;
inline std::set<int> holes;
inline bool isHole(int fd) {
  const std::lock_guard lock(holes_mutex);
  return holes.contains(fd);
}

}  // namespace control_world

extern "C" {
ssize_t recvmsg(int fd, msghdr* message, int flags) {
  if (control_world::isHole(fd)) {
    errno = ETIMEDOUT;
    return -1;
  }
  return syscall(SYS_recvmsg, fd, message, flags);
}
ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (!control_world::isHole(fd)) return syscall(SYS_sendmsg, fd, message, flags);
  ssize_t bytes = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i)
    bytes += static_cast<ssize_t>(message->msg_iov[i].iov_len);
  return bytes;
}
}

namespace control_world {

constexpr const char* kEnded = kProcessEnded;

inline Fd dialNobody(int, int, const std::function<void()>&) {
  throw std::runtime_error("nobody is there");
}

struct Heard : Control::Listener {
  void onPeersLost(const std::vector<int>& ranks, Observed observed,
                   const std::string& how) override {
    const std::lock_guard lock(mutex);
    ++lost_calls;
    for (int r : ranks) {
      twice = twice || lost_ranks.contains(r);
      const bool fits = (observed == Observed::kEnded) == (how == kEnded);
      lost_ranks[r] = fits ? how : "of another fate: " + how;
    }
  }
  void onDeparture(int rank, Declared how) override {
    const std::lock_guard lock(mutex);
    twice = twice || departures[rank] >= how;
    departures[rank] = how;
  }
  void onRemoteFailure(const GroupFailure& failure) override {
    const std::lock_guard lock(mutex);
    failures.push_back(failure);
  }
  void onProgress(int rank, const Progress& there) override {
    const std::lock_guard lock(mutex);
    whereabouts[rank] = there;
    if (there.stopped) seen_stopped.insert(rank);
  }
  Progress ownProgress(uint64_t since) override {
    const std::lock_guard lock(mutex);
    Progress here = mine;
    std::erase_if(here.earlier, [&](const Announcement& a) { return a.sequence < since; });
    return here;
  }
  std::vector<int> stoppedOnHost() override {
    const std::lock_guard lock(mutex);
    return stopped_here;
  }
  void onClock(const ClockOffset& offset) override {
    const std::lock_guard lock(mutex);
    clock = offset;
  }

  template <class F>
  auto locked(F f) {
    const std::lock_guard lock(mutex);
    return f();
  }
  std::vector<int> lostRanks() {
    return locked([&] {
      std::vector<int> ranks;
      for (const auto& [rank, how] : lost_ranks) ranks.push_back(rank);
      return ranks;
    });
  }
  size_t gone() {
    return locked([&] {
      return static_cast<size_t>(std::count_if(departures.begin(), departures.end(), [](auto& d) {
        return d.second == Declared::kGone;
      }));
    });
  }

  std::mutex mutex;
  std::map<int, std::string> lost_ranks;
  int lost_calls = 0;
  std::map<int, Declared> departures;
  std::vector<GroupFailure> failures;
  std::map<int, Progress> whereabouts;
  std::set<int> seen_stopped;  // also if it answers, as no stopped rank does
  Progress mine;
  std::vector<int> stopped_here;
  ClockOffset clock;
  bool twice = false;
};

// Ranks of one process, each with its own end of every connection.
class Ranks {
 public:
  explicit Ranks(int size, Over over = Over::kUnix, Control::Options options = quick(),
                 std::vector<int> order = {})
      : over_(over), reactor_(Reactor::shared()) {
    options.ring = order;
    if (order.empty()) {
      order.resize(static_cast<size_t>(size));
      std::iota(order.begin(), order.end(), 0);
    }
    std::vector<Fd> next(order.size()), previous(order.size());
    for (size_t i = 0; size > 1 && i < order.size(); ++i) {
      const size_t after = (i + 1) % order.size();
      auto [one, other] = sockets::pair(over);
      cables_[std::minmax(order[i], order[after])].push_back({one.get(), other.get()});
      next[static_cast<size_t>(order[i])] = std::move(one);
      previous[static_cast<size_t>(order[after])] = std::move(other);
    }
    for (int r = 0; r < size; ++r) heard.push_back(std::make_unique<Heard>());
    controls.resize(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) {
      const auto i = static_cast<size_t>(r);
      auto control = Control::start(
          reactor_, r, size, std::move(next[i]), std::move(previous[i]),
          [this, r](int to, int, const std::function<void()>& turn) { return dial(r, to, turn); },
          *heard[i], options);
      const std::lock_guard lock(mutex_);
      controls[i] = std::move(control);
    }
  }
  // As a failure ends them: nobody is to miss anybody any more.
  ~Ranks() {
    for (size_t r = 0; r < controls.size(); ++r) end(static_cast<int>(r));
  }

  static Control::Options quick() {
    return {.heartbeat = 20 * kMillisecond, .lost_after = 200 * kMillisecond, .ring = {}};
  }

  Control& operator[](int r) { return *controls[static_cast<size_t>(r)]; }
  Heard& at(int r) { return *heard[static_cast<size_t>(r)]; }
  int size() const { return static_cast<int>(controls.size()); }

  // Its process ends.
  void end(int r) {
    std::unique_ptr<Control> control;
    {
      const std::lock_guard lock(mutex_);
      control = std::move(controls[static_cast<size_t>(r)]);
    }
  }
  bool leave(int r, Nanos longest = 20 * kSecond) {
    (*this)[r].depart(Declared::kLeaving);
    (*this)[r].depart(Declared::kGone);
    const bool flushed = (*this)[r].flush(longest);
    end(r);
    return flushed;
  }
  // No packet gets from one to the other any more, and both notice.
  void cut(int one, int other) {
    const std::lock_guard lock(holes_mutex);
    for (const auto& [a, b] : cables_[std::minmax(one, other)])
      for (int fd : {a, b}) {
        holes.insert(fd);
        cut_.push_back(fd);
        shutdown(fd, SHUT_RDWR);
      }
  }
  void mendCables() {
    const std::lock_guard lock(holes_mutex);
    for (int fd : cut_) holes.erase(fd);
  }
  void nobodyIsLost() {
    for (auto& h : heard) {
      CHECK_EQ(h->lostRanks().size(), size_t{0});
      CHECK(!h->twice);
    }
  }

  std::vector<std::unique_ptr<Heard>> heard;
  std::vector<std::unique_ptr<Control>> controls;

 private:
  Fd dial(int from, int to, const std::function<void()>& turn) {
    turn();
    auto [one, other] = sockets::pair(over_);
    const std::lock_guard lock(mutex_);
    if (!controls[static_cast<size_t>(to)]) throw std::runtime_error("connection refused");
    controls[static_cast<size_t>(to)]->accept(from, std::move(other));
    return std::move(one);
  }

  const Over over_;
  const std::shared_ptr<Reactor> reactor_;
  std::map<std::pair<int, int>, std::vector<std::pair<int, int>>> cables_;
  std::vector<int> cut_;
  std::mutex mutex_;
};

inline void sleepFor(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

inline GroupFailure failure(int reporter, std::string text = "because") {
  return {Failure::kTimeout, reporter, reporter, std::move(text)};
}

}  // namespace control_world
