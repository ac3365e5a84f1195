// The all-reduce of the trial (socket_trial.cc), and the ways to wait for sockets that it compares.
//
// Two ranks, float32, sum, in place.  Each rank owns half of the elements and sends, over one
// stream, its part of the other's half and then its own half as fast as that is complete; so both
// directions are full all the time.  Several lanes (connections) share the halves between them.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace trial {

// One connection's part of the all-reduce: two streams, and where their bytes come from and go to.
class Lane {
 public:
  explicit Lane(int fd);

  // Floats [0, count) of each half are this lane's.
  void begin(float* own, float* others, size_t count);
  bool done() const { return sent_ == 2 * bytes_ && received_ == 2 * bytes_; }

  int fd() const { return fd_; }
  // Where the next bytes to send lie, or the next received belong: up to two places; their number.
  // 0: nothing can be sent now (what is to follow is not complete), or nothing is missing.
  int toSend(iovec* places) const;
  int toReceive(iovec* places);
  void sent(size_t bytes) { sent_ += bytes; }
  void received(size_t bytes);  // and reduces what can be

 private:
  static constexpr size_t kPiece = 256 << 10;  // received at once, so that it is still in cache

  int fd_;
  std::vector<std::byte> piece_ = std::vector<std::byte>(kPiece);
  std::byte* own_ = nullptr;
  std::byte* others_ = nullptr;
  size_t bytes_ = 0;                            // of this lane's part of a half
  size_t sent_ = 0, received_ = 0, added_ = 0;  // of two such parts; added_ of one
};

// A way to move bytes until all lanes are done.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual void run(std::vector<Lane>& lanes) = 0;
};

// "poll", "epoll", "spin" (tries again for a while before it polls) or "io_uring"; sets the sockets
// up for it.  Null if the kernel does not have it.
std::unique_ptr<Engine> makeEngine(const std::string& name, const std::vector<int>& sockets);

}  // namespace trial
