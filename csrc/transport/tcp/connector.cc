// The threads that make connections; dialling one rank: its addresses, the handshake, errors.
#include "transport/tcp/connector.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <functional>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "base/thread.h"
#include "transport/tcp/acceptor.h"

namespace ringreduce::net {

// ---- threads

namespace {

// How long a call may keep a thread while others wait for one.  One lost packet fits in.
constexpr Nanos kShare = 2 * kSecond;

// Thrown through a dial that yields its thread and is tried again later.
struct Yields {};

}  // namespace

Connector::Connector(Dial dial, Nanos longest) : dial_(std::move(dial)), longest_(longest) {}

void Connector::call(int to, int number, Taken taken) {
  if (generation_ != forkGeneration()) return;
  std::unique_lock lock(mutex_);
  if (stopping_) return;
  calls_.push_back({.to = to, .number = number, .taken = std::move(taken)});
  if (alive_ >= kMostThreads) return;
  joinEnded();
  ConnectFailure error;
  try {
    threads_->push_back(startThread("ringreduce-dial", "that connects to it", [this] { run(); }));
    ++alive_;
  } catch (const Error& thrown) {
    error = {thrown.what(), true};
  }
  if (error.why.empty() || alive_ > 0) return;  // a running thread takes it
  const Call refused = std::move(calls_.back());
  calls_.pop_back();
  lock.unlock();
  refused.taken(Socket(), error);
}

// Ended threads have released the mutex, so joining them with the mutex held cannot deadlock.
void Connector::joinEnded() {
  std::erase_if(*threads_, [this](std::thread& thread) {
    const bool ended = std::ranges::count(ended_, thread.get_id()) > 0;
    if (ended) thread.join();
    return ended;
  });
  ended_.clear();
}

void Connector::stop() {
  if (generation_ != forkGeneration()) return;
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (threads_) threads.swap(*threads_);
    delete std::exchange(threads_, nullptr);
  }
  for (std::thread& thread : threads) thread.join();
  calls_.clear();
}

bool Connector::isStopping() {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

bool Connector::othersWait() {
  const std::lock_guard lock(mutex_);
  return !calls_.empty();
}

Socket Connector::dial(Call& call) {
  if (call.until == 0) call.until = deadlineIn(longest_);
  const Nanos share = deadlineIn(kShare);
  Socket socket = dial_(call.to, call.number, [&] {
    if (isStopping()) throw Error(Failure::kAborted, "nobody wants this connection any more");
    const Nanos time = now();
    if (time >= call.until) throw Error(Failure::kSetup, "it does not answer");
    if (time >= share && othersWait()) throw Yields();
  });
  if (!socket) throw Error(Failure::kSetup, "no connection was made");
  return socket;
}

void Connector::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !calls_.empty()) {
    Call call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    Socket socket;
    ConnectFailure error;
    bool again = false;
    try {
      socket = dial(call);
    } catch (const Yields&) {
      again = true;
    } catch (const LocalConnectError& thrown) {
      error = {thrown.what(), true};
    } catch (const std::exception& thrown) {
      error.why = thrown.what();
    } catch (...) {
      error.why = "an error of an unknown kind";
    }
    if (!again && !isStopping()) call.taken(std::move(socket), error);
    lock.lock();
    if (again) calls_.push_back(std::move(call));
  }
  --alive_;
  ended_.push_back(std::this_thread::get_id());
}

// ---- one connection

namespace {

constexpr Nanos kPollPeriod = 5 * kMillisecond;
// Between rounds: a peer that closes connections is busy, or not ready yet.
constexpr Nanos kFirstPause = 20 * kMillisecond, kLongestPause = 500 * kMillisecond;

// Connecting to one address failed.
struct Failed {
  std::string why;
  bool for_good;  // do not try it again
};

std::string systemText(int error) {
  std::string text = std::generic_category().message(error);
  text[0] = static_cast<char>(text[0] | 0x20);  // "connection refused"
  return text;
}

std::string contents(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

void setCongestion(const Fd& fd, const std::string& name) {
  if (setsockopt(fd.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(),
                 static_cast<socklen_t>(name.size())) == 0)
    return;
  const int error = errno;
  throw LocalConnectError(
      "RINGREDUCE_CONGESTION=" + name +
      (error == EPERM ? " is not allowed to this user: the kernel allows " +
                            contents("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
                      : " is not to be had (" + systemText(error) + "): the kernel has " +
                            contents("/proc/sys/net/ipv4/tcp_available_congestion_control")) +
      "; choose one of these, have it loaded (modprobe tcp_" + name + "), or unset it");
}

class Dialling {
 public:
  Dialling(const PeerHello& self, const Secret& secret, const DialOptions& options)
      : self_(self), secret_(secret), options_(options) {}

  // Throws Failed.
  Socket connected(const Address& address, Nanos patience, Nanos until) {
    Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
    if (!fd && errno == EAFNOSUPPORT) throw Failed{systemText(errno), true};
    if (!fd)
      throw LocalConnectError("no socket can be made to connect to another rank: " +
                              systemText(errno) + (errno == EMFILE ? " (raise ulimit -n)" : ""));
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (!options_.congestion.empty()) setCongestion(fd, options_.congestion);
    connect(fd, address, patience, std::min(until, heard_ ? kNever : deaf_));
    heard_ = true;
    std::unique_ptr<Tls> tls = shakeHands(fd, until);
    return {std::move(fd), std::move(tls)};
  }

  // The deadline as far as it is known.
  Nanos deadline() const { return heard_ ? deadline_ : std::min(deadline_, deaf_); }

  // Waits that long, unless the poll callback throws.
  void pause(Nanos time) {
    for (const Nanos until = deadlineIn(time); now() < until;) wait(nullptr, until);
  }

 private:
  void connect(const Fd& fd, const Address& address, Nanos patience, Nanos until) {
    const Nanos started = now();
    const Nanos enough = std::min(until, deadlineIn(patience));
    int error = 0;
    if (::connect(fd.get(), address.get(), address.length()) != 0) error = errno;
    if (error == EINPROGRESS || error == EINTR) {
      pollfd wanted{.fd = fd.get(), .events = POLLOUT, .revents = 0};
      while (!wait(&wanted, enough))
        if (now() >= enough) throw Failed{"no answer within " + seconds(now() - started), false};
      socklen_t size = sizeof error;
      if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    }
    if (error == 0 && isConnectedToItself(fd)) error = ECONNREFUSED;
    if (error == 0) return;
    const bool passing = error == EADDRNOTAVAIL || error == EAGAIN || error == ENOBUFS ||
                         error == ENOMEM || error == ETIMEDOUT || error == ECONNRESET;
    throw Failed{systemText(error), !passing};
  }

  // Connecting to a local port without a listener may connect a socket to itself, if the kernel
  // chose that port for it.
  static bool isConnectedToItself(const Fd& fd) {
    const std::optional<Address> here = localAddress(fd), there = peerAddress(fd);
    return here && there && here->sameHost(*there) && here->port() == there->port();
  }

  std::unique_ptr<Tls> shakeHands(const Fd& fd, Nanos until) {
    const Nanos started = now();
    // Longer than the acceptor's own deadline, so that the acceptor ends it.
    until = std::min(until, deadlineIn(limits::kHandshake + kSecond));
    Handshake machine = Handshake::dialler(self_, secret_);
    std::string output = machine.takeOutput();
    for (;;) {
      if (!sendHandshake(fd, output))
        output.clear();  // closed; earlier bytes may still be readable
      const bool ended = !receiveHandshake(fd, machine);
      output += machine.takeOutput();
      if (machine.state() == Handshake::State::kDone)
        return self_.encrypted ? encrypted(fd, machine.keyForEncryption(), until) : nullptr;
      if (machine.state() == Handshake::State::kRefused) throw Failed{machine.why(), true};
      if (ended) throw Failed{"it ended the connection before it had let this rank in", false};
      if (now() >= until) throw Failed{"no handshake within " + seconds(now() - started), false};
      const short events = output.empty() ? POLLIN : POLLIN | POLLOUT;
      pollfd wanted{.fd = fd.get(), .events = events, .revents = 0};
      wait(&wanted, until);
    }
  }

  std::unique_ptr<Tls> encrypted(const Fd& fd, const Digest& key, Nanos until) {
    const Nanos started = now();
    std::unique_ptr<Tls> tls = Tls::make(Tls::Side::kDialler, fd.get(), key);
    for (;;) {
      const Tls::State state = tls->shakeHands();
      if (state == Tls::State::kDone) return tls;
      if (state == Tls::State::kRefused) throw Failed{tls->why(), true};
      if (state == Tls::State::kEnded) throw Failed{tls->why(), false};
      if (now() >= until) throw Failed{"no encryption within " + seconds(now() - started), false};
      const short events = tls->wantsToWrite() ? POLLIN | POLLOUT : POLLIN;
      pollfd wanted{.fd = fd.get(), .events = events, .revents = 0};
      wait(&wanted, until);
    }
  }

  // Waits a short time for the descriptor; true if it is ready.
  bool wait(pollfd* wanted, Nanos until) {
    if (options_.poll) options_.poll(options_.context);
    const Nanos longest = options_.poll ? kPollPeriod : ProcessClock::kLongestGap / 2;
    const Nanos left = std::clamp<Nanos>(until - now(), 0, longest);
    const auto milliseconds = static_cast<int>((left + kMillisecond - 1) / kMillisecond);
    return ::poll(wanted, wanted ? 1 : 0, milliseconds) > 0;
  }

  const PeerHello& self_;
  const Secret& secret_;
  const DialOptions& options_;
  const Nanos deadline_ = deadlineIn(options_.timeout), deaf_ = deadlineIn(options_.deaf);
  bool heard_ = false;  // an address has accepted a connection
};

struct Attempt {
  Address address;
  std::string why = "not tried: no time was left";
  bool over = false;
};

[[noreturn]] void giveUp(const std::string& who, const std::vector<Attempt>& attempts) {
  std::string text = "cannot reach " + who;
  for (const Attempt& one : attempts)
    text += (&one == attempts.data() ? " at " : "; at ") + one.address.text() + ": " + one.why;
  throw Error(Failure::kSetup,
              text +
                  "; look whether its process has ended, for a firewall between the hosts "
                  "(RINGREDUCE_PORTS bounds the ports to open), and whether RINGREDUCE_IF, on its "
                  "host, leads to interfaces that this host can reach");
}

}  // namespace

void checkCongestion(const std::string& name) {
  if (name.empty()) return;
  const Fd probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP));
  if (probe) setCongestion(probe, name);
}

Socket dial(const Endpoint& endpoint, const PeerHello& self, const Secret& secret,
            const DialOptions& options, const std::string& who) {
  std::vector<Attempt> attempts;
  const size_t n = endpoint.addresses.size();
  if (n == 0) throw Error(Failure::kSetup, "cannot reach " + who + ": it gave no address");
  for (size_t i = 0; i < n; ++i)
    attempts.push_back({.address = endpoint.addresses[(options.address % n + i) % n]});

  Dialling dialling(self, secret, options);
  Nanos patience = limits::kFirstDial, pause = kFirstPause;
  const auto isOver = [](const Attempt& one) { return one.over; };
  for (;;) {
    for (auto one = attempts.begin(); one != attempts.end(); ++one) {
      const auto hopes = std::count_if(one, attempts.end(), std::not_fn(isOver));
      const Nanos left = dialling.deadline() - now();
      if (left <= 0) giveUp(who, attempts);
      if (one->over) continue;
      try {
        return dialling.connected(one->address, patience, deadlineIn(left / hopes));
      } catch (const Failed& failed) {
        one->why = failed.why;
        one->over = failed.for_good;
      }
    }
    if (std::ranges::all_of(attempts, isOver)) giveUp(who, attempts);
    dialling.pause(std::min(pause, std::max<Nanos>(0, dialling.deadline() - now())));
    pause = std::min(2 * pause, kLongestPause);
    patience = std::min<Nanos>(2 * patience, 60 * kSecond);
  }
}

}  // namespace ringreduce::net
