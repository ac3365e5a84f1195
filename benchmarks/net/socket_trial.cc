// What plain sockets can do: two processes all-reduce float32 over loopback TCP, and wait by poll,
// epoll, io_uring, or by trying again for a while; over one connection or several.
//
//   ringreduce_socket_trial [rounds, 9 unless given]
//   ringreduce_socket_trial ROUNDS listen PORT         between hosts: this on the one, with more
//   ringreduce_socket_trial ROUNDS connect HOST PORT   connections, and this on the other
//
// It is the yardstick of the project's own TCP, and the record of why that waits as it does.  The
// ways take turns; a round is some 0.1 s of calls back to back.  Of each: the median round's
// microseconds a call, the least and the most, bytes / time, and the microseconds of processor time
// that both ranks took together for a call, which says something on a busy machine too.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "socket_trial_engines.h"

namespace {

using namespace trial;
using Clock = std::chrono::steady_clock;

constexpr double kRound = 0.1;
constexpr int kMostLanes = 4;

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string(what) + " failed");
}

int makeSocket() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  require(fd >= 0, "socket");
  return fd;
}

int listenAt(sockaddr_in address) {
  const int fd = makeSocket(), one = 1;
  require(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0, "setsockopt");
  require(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "bind");
  require(listen(fd, 64) == 0, "listen");
  return fd;
}

int connectTo(sockaddr_in address) {
  const int fd = makeSocket(), one = 1;
  require(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "connect");
  require(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "setsockopt");
  return fd;
}

int acceptAt(int listener) {
  const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), one = 1;
  require(fd >= 0, "accept");
  require(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "setsockopt");
  return fd;
}

sockaddr_in addressOf(const char* host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  require(inet_pton(AF_INET, host, &address.sin_addr) == 1, "the address");
  return address;
}

struct Way {
  std::string engine;
  int lanes;
};

// What a rank tells the other between rounds, over a socket of their own.
template <class T>
void tell(int fd, const T& value) {
  require(write(fd, &value, sizeof value) == sizeof value, "write");
}
template <class T>
T hear(int fd) {
  T value;
  require(recv(fd, &value, sizeof value, MSG_WAITALL) == sizeof value, "read");
  return value;
}

double processorSeconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

class Rank {
 public:
  Rank(int rank, const Way& way, const std::vector<int>& sockets)
      : rank_(rank), engine_(makeEngine(way.engine, sockets)) {
    for (const int fd : sockets) lanes_.emplace_back(fd);
  }
  bool ok() const { return engine_ != nullptr; }

  void allReduce(std::vector<float>& data) {
    const size_t half = data.size() / 2;
    float* const own = data.data() + static_cast<size_t>(rank_) * half;
    float* const others = data.data() + static_cast<size_t>(1 - rank_) * half;
    const size_t lanes = lanes_.size();
    for (size_t i = 0; i < lanes; ++i) {
      const size_t from = half * i / lanes, to = half * (i + 1) / lanes;
      lanes_[i].begin(own + from, others + from, to - from);
    }
    engine_->run(lanes_);
  }

  // Seconds of `calls` calls.
  double time(std::vector<float>& data, int calls) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < calls; ++i) allReduce(data);
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  void check(size_t count) {
    std::vector<float> data(count);
    const auto value = [](size_t i, int rank) { return static_cast<float>(i % 1000 + rank * 7u); };
    for (size_t i = 0; i < count; ++i) data[i] = value(i, rank_);
    allReduce(data);
    for (size_t i = 0; i < count; ++i) {
      if (data[i] != value(i, 0) + value(i, 1)) throw std::runtime_error("a wrong sum");
    }
  }

 private:
  int rank_;
  std::unique_ptr<Engine> engine_;
  std::vector<Lane> lanes_;
};

struct Round {
  double seconds, busy;  // a call, by the clock and of processors
};

double medianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(size_t bytes, const Way& way, const std::vector<Round>& rounds) {
  std::vector<double> seconds, busy;
  for (const Round& round : rounds) {
    seconds.push_back(round.seconds);
    busy.push_back(round.busy);
  }
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  const double median = medianOf(seconds);
  std::printf("%9zu  %-9s %5d  %10.1f  %10.1f - %-10.1f  %7.3f  %9.1f\n", bytes, way.engine.c_str(),
              way.lanes, median * 1e6, *least * 1e6, *most * 1e6,
              static_cast<double>(bytes) / median * 1e-9, medianOf(busy) * 1e6);
  std::fflush(stdout);
}

// One rank's whole run; `other` is a socket to the other rank.
void runRank(int rank, int other, const std::vector<Way>& ways,
             const std::vector<std::vector<int>>& sockets, int count_of_rounds) {
  std::vector<Rank> ranks;
  for (size_t w = 0; w < ways.size(); ++w) ranks.emplace_back(rank, ways[w], sockets[w]);
  for (const size_t bytes : {size_t{1} << 10, size_t{1} << 20, size_t{25} << 20}) {
    std::vector<float> data(bytes / sizeof(float));
    std::vector<std::vector<Round>> rounds(ways.size());
    std::vector<int> calls(ways.size());
    for (size_t w = 0; w < ways.size(); ++w) {
      if (!ranks[w].ok()) continue;
      ranks[w].check(data.size());
      ranks[w].time(data, 2);
      const double seconds = ranks[w].time(data, 3) / 3;
      if (rank == 0) tell(other, calls[w] = std::max(1, static_cast<int>(kRound / seconds)));
      if (rank == 1) calls[w] = hear<int>(other);
    }
    for (int round = 0; round < count_of_rounds; ++round) {
      for (size_t w = 0; w < ways.size(); ++w) {
        if (!ranks[w].ok()) continue;
        ranks[w].time(data, 1);  // so that both are awake
        const double before = processorSeconds();
        const double seconds = ranks[w].time(data, calls[w]);
        const double used = processorSeconds() - before;
        if (rank == 1) tell(other, used);
        if (rank == 0) {
          rounds[w].push_back({seconds / calls[w], (used + hear<double>(other)) / calls[w]});
        }
      }
    }
    for (size_t w = 0; rank == 0 && w < ways.size(); ++w) {
      if (ranks[w].ok()) {
        print(bytes, ways[w], rounds[w]);
      } else {
        std::printf("%9zu  %-9s %5d  this kernel has none, or does not allow it\n", bytes,
                    ways[w].engine.c_str(), ways[w].lanes);
      }
    }
  }
}

// Ways, and for each its sockets to the other rank.
struct Meeting {
  std::vector<Way> ways;
  std::vector<std::vector<int>> sockets;
};

void printHead() {
  std::printf("%9s  %-9s %5s  %10s  %-23s  %7s  %9s\n", "bytes", "way", "lanes", "us",
              "     least - most", "GB/s", "cpu us");
}

// Rank 0 listens, rank 1 connects.
void runBetweenHosts(int rank, const sockaddr_in& address, int rounds) {
  Meeting meeting;
  for (int lanes = 1; lanes <= 16; lanes *= 2) meeting.ways.push_back({"epoll", lanes});
  for (const Way& way : meeting.ways) meeting.sockets.emplace_back(way.lanes);
  const int listener = rank == 0 ? listenAt(address) : -1;
  const int other = rank == 0 ? acceptAt(listener) : connectTo(address);
  for (std::vector<int>& sockets : meeting.sockets) {
    for (int& fd : sockets) {
      // One after the other, so that both ends give a connection the same place.
      fd = rank == 0 ? acceptAt(listener) : connectTo(address);
      if (rank == 0) tell(other, fd);
      if (rank == 1) hear<int>(other);
    }
  }
  if (rank == 0) printHead();
  runRank(rank, other, meeting.ways, meeting.sockets, rounds);
}

void runOnOneHost(int rounds) {
  Meeting meetings[2];
  for (const char* engine : {"poll", "epoll", "io_uring", "spin"}) {
    for (int lanes = 1; lanes <= kMostLanes; lanes *= 2) {
      for (Meeting& meeting : meetings) meeting.ways.push_back({engine, lanes});
    }
  }
  const int listener = listenAt(addressOf("127.0.0.1", 0));
  sockaddr_in address{};
  socklen_t length = sizeof address;
  require(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0, "the port");
  for (const Way& way : meetings[0].ways) {
    for (Meeting& meeting : meetings) meeting.sockets.emplace_back();
    for (int lane = 0; lane < way.lanes; ++lane) {
      meetings[0].sockets.back().push_back(connectTo(address));
      meetings[1].sockets.back().push_back(acceptAt(listener));
    }
  }
  close(listener);
  int between[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, between) == 0, "socketpair");
  const pid_t child = fork();
  require(child >= 0, "fork");
  const int rank = child == 0 ? 1 : 0;
  // So that a rank that fails ends the other one too.
  for (const std::vector<int>& sockets : meetings[1 - rank].sockets) {
    for (const int fd : sockets) close(fd);
  }
  close(between[1 - rank]);
  if (rank == 0) printHead();
  runRank(rank, between[rank], meetings[rank].ways, meetings[rank].sockets, rounds);
  if (rank == 1) std::_Exit(0);
  int status = 0;
  waitpid(child, &status, 0);
  require(status == 0, "the other rank");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  const std::string mode = argc > 2 ? argv[2] : "";
  const bool listens = mode == "listen" && argc == 4, connects = mode == "connect" && argc == 5;
  if (rounds <= 0 || (argc > 2 && !listens && !connects)) {
    std::fprintf(stderr, "usage: %s [ROUNDS [listen PORT | connect HOST PORT]]\n", argv[0]);
    return 2;
  }
  try {
    if (argc <= 2) {
      runOnOneHost(rounds);
    } else {
      const int port = std::atoi(argv[argc - 1]);
      runBetweenHosts(connects, addressOf(connects ? argv[3] : "0.0.0.0", port), rounds);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "socket_trial: %s\n", error.what());
    return 1;
  }
  return 0;
}
