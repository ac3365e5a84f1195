// The port of this process, and authentication of connections to it.
#include "transport/tcp/acceptor.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/config.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/limits.h"
#include "base/text.h"
#include "transport/tcp/address.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/tls.h"

namespace ringreduce::net {

namespace {

constexpr size_t kMostDiscarded = 4096;

// A connection whose handshake is not over.
struct PendingConnection {
  Fd socket;
  Address from;
  Nanos until;  // the deadline of its handshake
  Handshake machine;
  std::string output;
  uint32_t events;           // that epoll waits for
  std::unique_ptr<Tls> tls;  // after the handshake, if the group is encrypted
  bool leaving = false;      // refused; kept open until the other side has read the reason
  size_t discarded = 0;

  // Drops arriving bytes: closing a socket with unread bytes makes the kernel drop the bytes that
  // were sent.  False if the connection has ended, or too much arrives.
  bool discard() {
    std::array<std::byte, 256> bytes;
    while (discarded < kMostDiscarded) {
      const ssize_t got = recv(socket.get(), bytes.data(), bytes.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return got < 0 && errno == EAGAIN;
      discarded += static_cast<size_t>(got);
    }
    return false;
  }
};

// ---- endpoints as text

// Whether this is an address with an interface that this host lacks.
bool isOfInterfaceElsewhere(const std::string& word) {
  const size_t percent = word.find('%'), end = word.find(']');
  if (percent == std::string::npos || end == std::string::npos || percent > end) return false;
  return Address::parse(word.substr(0, percent) + word.substr(end)).has_value();
}

}  // namespace

std::string Endpoint::text() const {
  return joined(addresses, " ", [](const Address& address) { return address.text(); });
}

Endpoint Endpoint::fromText(const std::string& text) {
  Endpoint endpoint;
  TextReader words(text);
  for (std::string word; words >> word;) {
    const auto address = Address::parse(word);
    if (!address && isOfInterfaceElsewhere(word)) continue;
    if (!address || address->port() == 0)
      throw Error(Failure::kSetup, "a rank gave '" + word + "' as an address, which is none");
    if (std::ranges::none_of(endpoint.addresses, [&](const Address& other) {
          return other.sameHost(*address) && other.port() == address->port();
        }))
      endpoint.addresses.push_back(*address);
  }
  if (endpoint.addresses.empty())
    throw Error(Failure::kSetup,
                "a rank gave no address that can be reached from this host ('" + text +
                    "'); choose an interface with others on its host (RINGREDUCE_IF)");
  return endpoint;
}

// ---- the port
//
// Everything happens in the reactor's thread; other threads call into it.

namespace {

// The bound of pending connections: a quarter of the descriptors that this process may have, so
// that enough are left for groups.
size_t maxPending() {
  constexpr rlim_t kMost = 256;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMost;
  return static_cast<size_t>(std::clamp<rlim_t>(limit.rlim_cur / 4, 1, kMost));
}

constexpr int kAcceptsPerTurn = 64;  // then other sockets are served
constexpr Nanos kPause = 100 * kMillisecond;
constexpr size_t kMaxDeparted = 256;  // ranks that are remembered

class ProcessAcceptor final : public Acceptor,
                              public std::enable_shared_from_this<ProcessAcceptor> {
 private:
  // A callback for the reactor, which keeps this alive only while it runs.
  template <class Call>
  auto bound(Call call) {
    return [weak = weak_from_this(), call](auto... arguments) {
      if (const auto self = weak.lock()) call(*self, arguments...);
    };
  }

 public:
  ProcessAcceptor(Listener listener, std::string choice)
      : listener_(std::move(listener)), choice_(std::move(choice)) {
    endpoint_.addresses = listener_.addresses;
  }
  ~ProcessAcceptor() override {
    // In a forked child it does nothing: the reactor is the parent's.
    reactor_->run([this] {
      for (const Fd& socket : listener_.sockets) reactor_->forget(socket.get());
      for (const PendingConnection& one : pending_) reactor_->forget(one.socket.get());
      reactor_->cancel(expiry_);
      reactor_->cancel(resume_);
    });
  }

  void open() {
    reactor_->run([this] {
      for (const Fd& socket : listener_.sockets)
        reactor_->watch(socket.get(), EPOLLIN, bound([&socket](ProcessAcceptor& self, uint32_t) {
                          self.acceptFrom(socket);
                        }));
    });
  }

  const Endpoint& endpoint() const override { return endpoint_; }
  const std::string& choice() const override { return choice_; }
  std::shared_ptr<void> admit(const std::string& group, int to, const Secret& secret, Taken taken,
                              bool encrypted) override;

 private:
  using PendingList = std::list<PendingConnection>;
  using Key = std::pair<std::string, int>;  // a group and a rank of it
  struct Admitted {
    Secret secret;
    std::shared_ptr<Taken> taken;
    bool encrypted;
  };
  struct Token;

  void acceptFrom(const Fd& listener);
  void receive(Fd socket, const Address& from);
  void pauseListening(int error);
  void progress(PendingList::iterator one, uint32_t happened);
  void setEvents(PendingList::iterator one, uint32_t events);
  void encrypt(PendingList::iterator one);
  void handOver(PendingList::iterator one);
  void logRefusal(const PendingConnection& one, const std::string& why);
  void refuse(PendingList::iterator one, const std::string& why);
  void remove(PendingList::iterator one);
  bool closeUnknown(const std::string& why, Nanos age = 0);
  void closeSurplus();
  void expire();
  void awaitExpiry();
  void dismiss(const Key& key);
  bool callsDepartedRank(const PendingConnection& one) const;

  const std::shared_ptr<Reactor> reactor_ = Reactor::shared();
  Listener listener_;
  const std::string choice_;
  Endpoint endpoint_;
  // Of the reactor's thread:
  PendingList pending_;  // oldest first
  std::map<Key, Admitted> admitted_;
  std::deque<Key> departed_;  // ranks that were here
  Reactor::Timer expiry_ = 0, resume_ = 0;
  RateLimitedLog refusals_{reactor_}, failures_{reactor_};
};

// ---- new connections

void ProcessAcceptor::acceptFrom(const Fd& listener) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    sockaddr_storage from{};
    socklen_t size = sizeof from;
    Fd socket(accept4(listener.get(), reinterpret_cast<sockaddr*>(&from), &size,
                      SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      receive(std::move(socket), Address(reinterpret_cast<sockaddr*>(&from), size));
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return;
      case EMFILE:
      case ENFILE:
        if (const int error = errno;
            !closeUnknown(std::generic_category().message(error), limits::kHello))
          return pauseListening(error);
        continue;
      case ENOBUFS:
      case ENOMEM:
      case EBADF:
      case EINVAL:
      case ENOTSOCK:
        return pauseListening(errno);
      default:  // an error of one connection, which is gone
        continue;
    }
  }
}

// Stops listening for a moment: the connection stays in the queue, so the listener would be ready
// again at once.
void ProcessAcceptor::pauseListening(int error) {
  failures_.add("cannot take a connection that another rank may have made: " +
                std::generic_category().message(error) + (error == EMFILE ? " (ulimit -n)" : "") +
                "; it is tried again");
  if (resume_ != 0) return;
  for (const Fd& socket : listener_.sockets) reactor_->change(socket.get(), 0);
  resume_ = reactor_->at(deadlineIn(kPause), bound([](ProcessAcceptor& self) {
                           self.resume_ = 0;
                           for (const Fd& socket : self.listener_.sockets)
                             self.reactor_->change(socket.get(), EPOLLIN);
                         }));
}

void ProcessAcceptor::receive(Fd socket, const Address& from) {
  closeSurplus();
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const auto find = [this](const PeerHello& caller) -> std::optional<Secret> {
    const auto admitted = admitted_.find(Key(caller.group, caller.to));
    if (admitted == admitted_.end()) return std::nullopt;
    return admitted->second.secret;
  };
  pending_.push_back({.socket = std::move(socket),
                      .from = from,
                      .until = deadlineIn(limits::kHandshake),
                      .machine = Handshake::acceptor(find),
                      .output = {},
                      .events = EPOLLIN | EPOLLRDHUP,
                      .tls = nullptr});
  const auto one = std::prev(pending_.end());
  try {
    reactor_->watch(
        one->socket.get(), one->events,
        bound([one](ProcessAcceptor& self, uint32_t happened) { self.progress(one, happened); }));
  } catch (const Error& error) {
    return refuse(one, error.what());
  }
  awaitExpiry();
}

// Closes the oldest connection that has not named a group of this process.  False if there is none
// of that age.
bool ProcessAcceptor::closeUnknown(const std::string& why, Nanos age) {
  const auto oldest = std::ranges::find_if(
      pending_, [](const PendingConnection& one) { return !one.machine.namedGroup(); });
  if (oldest == pending_.end() || now() < oldest->until - limits::kHandshake + age) return false;
  refuse(oldest, why);
  return true;
}

void ProcessAcceptor::closeSurplus() {
  constexpr auto kWhy = "too many connect at once that have not proven who they are";
  for (const size_t most = maxPending(); pending_.size() >= most;)
    if (!closeUnknown(kWhy)) refuse(pending_.begin(), kWhy);
}

void ProcessAcceptor::awaitExpiry() {
  if (expiry_ != 0 || pending_.empty()) return;
  expiry_ =
      reactor_->at(pending_.front().until, bound([](ProcessAcceptor& self) { self.expire(); }));
}

void ProcessAcceptor::expire() {
  expiry_ = 0;
  while (!pending_.empty() && pending_.front().until <= now()) {
    const PendingConnection& one = pending_.front();
    if (one.leaving || callsDepartedRank(one))
      remove(pending_.begin());
    else
      refuse(pending_.begin(), one.machine.waitsForGroup()
                                   ? "it calls a group, or a rank of one, that is not here"
                                   : "it did not prove in time who it is");
  }
  awaitExpiry();
}

// ---- handshakes

// Continues a handshake as far as possible.
void ProcessAcceptor::progress(PendingList::iterator one, uint32_t happened) {
  if (one->leaving) return one->discard() ? void() : remove(one);
  if (one->tls) return encrypt(one);
  bool present = receiveHandshake(one->socket, one->machine);
  one->output += one->machine.takeOutput();
  const bool spoke = !one->output.empty();
  present = sendHandshake(one->socket, one->output) && present;
  // A held connection is not read from, but its end is noticed.
  const bool held = one->machine.waitsForGroup();
  if (held && (happened & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))) present = false;

  const Handshake::State state = one->machine.state();
  if (state == Handshake::State::kRefused) {
    if (!spoke || !present) return refuse(one, one->machine.why());
    logRefusal(*one, one->machine.why());
    shutdown(one->socket.get(), SHUT_WR);
    one->leaving = true;
    return one->discard() ? void() : remove(one);
  }
  if (!present) {
    // A rank of a group that is here has given up: its own log says why.
    if (one->machine.namedGroup() || callsDepartedRank(*one)) return remove(one);
    return refuse(one, "it went before it had proven who it is");
  }
  if (state == Handshake::State::kDone && one->output.empty())
    return one->machine.caller().encrypted ? encrypt(one) : handOver(one);
  setEvents(one, EPOLLRDHUP | (held ? 0u : EPOLLIN) | (one->output.empty() ? 0u : EPOLLOUT));
}

void ProcessAcceptor::setEvents(PendingList::iterator one, uint32_t events) {
  if (events == one->events) return;
  one->events = events;
  try {
    reactor_->change(one->socket.get(), events);
  } catch (const Error& error) {
    refuse(one, error.what());
  }
}

// Continues the TLS handshake of an authenticated connection.
void ProcessAcceptor::encrypt(PendingList::iterator one) {
  try {
    if (!one->tls)
      one->tls =
          Tls::make(Tls::Side::kAcceptor, one->socket.get(), one->machine.keyForEncryption());
  } catch (const Error& error) {
    return refuse(one, error.what());
  }
  switch (one->tls->shakeHands()) {
    case Tls::State::kGoesOn:
      return setEvents(one, EPOLLRDHUP | EPOLLIN | (one->tls->wantsToWrite() ? EPOLLOUT : 0u));
    case Tls::State::kRefused:
    case Tls::State::kEnded:
      return refuse(one, one->tls->why());
    case Tls::State::kDone:
      return handOver(one);
  }
}

void ProcessAcceptor::handOver(PendingList::iterator one) {
  const PeerHello caller = one->machine.caller();
  const auto admitted = admitted_.find(Key(caller.group, caller.to));
  if (admitted == admitted_.end()) return remove(one);
  if (admitted->second.encrypted != caller.encrypted)
    return refuse(one, std::string("RINGREDUCE_TLS=1 is set ") +
                           (caller.encrypted ? "there and not here" : "here and not there"));
  const std::shared_ptr<Taken> taken = admitted->second.taken;  // it may destroy its own token
  const Address from = one->from;
  reactor_->forget(one->socket.get());
  Socket socket(std::move(one->socket), std::move(one->tls));
  pending_.erase(one);
  try {
    (*taken)(std::move(socket), caller);
  } catch (const std::exception& error) {
    failures_.add("lost a connection of rank " + std::to_string(caller.from) + " from " +
                  from.text() + ": " + error.what());
  }
}

void ProcessAcceptor::logRefusal(const PendingConnection& one, const std::string& why) {
  refusals_.add("refused a connection from " + one.from.text() + ": " + why);
}

void ProcessAcceptor::refuse(PendingList::iterator one, const std::string& why) {
  logRefusal(*one, why);
  remove(one);
}

void ProcessAcceptor::remove(PendingList::iterator one) {
  reactor_->forget(one->socket.get());
  pending_.erase(one);
}

// ---- admission

struct ProcessAcceptor::Token {
  const std::shared_ptr<ProcessAcceptor> acceptor;
  const Key key;

  Token(std::shared_ptr<ProcessAcceptor> owner, Key admitted)
      : acceptor(std::move(owner)), key(std::move(admitted)) {}
  ~Token() {
    acceptor->reactor_->run([this] { acceptor->dismiss(key); });
  }
};

std::shared_ptr<void> ProcessAcceptor::admit(const std::string& group, int to, const Secret& secret,
                                             Taken taken, bool encrypted) {
  const Key key(group, to);
  reactor_->run([&] {
    if (!admitted_
             .emplace(key, Admitted{secret, std::make_shared<Taken>(std::move(taken)), encrypted})
             .second)
      throw Error(Failure::kSetup, "rank " + std::to_string(to) + " of group " + group +
                                       " is in this process already");
    for (auto one = pending_.begin(); one != pending_.end();) {
      const auto held = one++;  // it may be removed
      if (!held->machine.waitsForGroup()) continue;
      held->machine.lookAgain();
      progress(held, 0);
    }
  });
  return std::make_shared<Token>(shared_from_this(), key);
}

// Ranks leave at different moments, so one may dial another that has just left.
bool ProcessAcceptor::callsDepartedRank(const PendingConnection& one) const {
  if (!one.machine.waitsForGroup()) return false;
  const PeerHello& caller = one.machine.caller();
  return std::ranges::find(departed_, Key(caller.group, caller.to)) != departed_.end();
}

void ProcessAcceptor::dismiss(const Key& key) {
  admitted_.erase(key);
  departed_.push_back(key);
  if (departed_.size() > kMaxDeparted) departed_.pop_front();
  for (auto next = pending_.begin(); next != pending_.end();) {
    const auto one = next++;
    const PeerHello& caller = one->machine.caller();
    if (one->machine.namedGroup() && Key(caller.group, caller.to) == key) remove(one);
  }
}

// ---- the acceptor of the process

std::shared_ptr<ProcessAcceptor> acceptorFor(const std::string& store_host) {
  const Config config = Config::read();
  const std::string ports = config.ports.get();
  const Choice choice = chooseFor(store_host, config.interfaces.get());
  Listener listener = listenOn(choice.addresses, ports.empty() ? Ports{} : Ports::fromText(ports));
  std::string text = joined(listener.addresses, ", ", [&](const Address& address) {
    return choice.nameOf(address) + " (" + address.text() + ")";
  });
  text += ", " + choice.why;
  return std::make_shared<ProcessAcceptor>(std::move(listener), std::move(text));
}

constinit PerProcess<Acceptor> acceptor_of_process;

}  // namespace

std::shared_ptr<Acceptor> Acceptor::shared(const std::string& store_host) {
  return acceptor_of_process.get([&] {
    auto acceptor = acceptorFor(store_host);
    acceptor->open();
    return acceptor;
  });
}

}  // namespace ringreduce::net
