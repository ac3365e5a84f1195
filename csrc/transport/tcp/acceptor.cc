// The port of this process: who connects to it, and who is let in.
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
#include <span>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/config.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/text.h"
#include "transport/tcp/address.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/rate_limited_log.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/tls.h"

namespace ringreduce::net {

// ---- a connection whose handshake is not complete

struct PendingConnection {
  Fd socket;
  Address from;
  Nanos until;  // the deadline of its handshake
  Handshake machine;
  std::string output;
  uint32_t events;           // that epoll reports
  std::unique_ptr<Tls> tls;  // after the handshake, if the group is encrypted
  bool leaving = false;      // refused; kept open until the other side has read the reason
  size_t discarded = 0;

  // Move bytes of the handshake.  False if the connection has ended.
  bool read();
  bool write();
  // Drops what arrives.  False if the connection has ended, or too much arrives.
  bool discard();
};

// ---- bytes of such a connection

namespace {

constexpr size_t kMostDiscarded = 4096;

}  // namespace

bool PendingConnection::read() {
  std::array<std::byte, 256> bytes;
  while (machine.wants() > 0) {
    const size_t most = std::min(bytes.size(), machine.wants());
    const ssize_t got = recv(socket.get(), bytes.data(), most, 0);
    if (got == 0) return false;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    machine.feed(std::span(bytes).first(static_cast<size_t>(got)));
  }
  return true;
}

bool PendingConnection::write() {
  while (!output.empty()) {
    const ssize_t sent = send(socket.get(), output.data(), output.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    output.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

// What was not read when a socket is closed makes the system throw away what was sent.
bool PendingConnection::discard() {
  std::array<std::byte, 256> bytes;
  while (discarded < kMostDiscarded) {
    const ssize_t got = recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 && errno == EAGAIN;
    discarded += static_cast<size_t>(got);
  }
  return false;
}

// ---- endpoints as text
//
// Endpoints as text.

namespace {

// Whether this is an address but for the interface that it names.
bool isOfInterfaceElsewhere(const std::string& word) {
  const size_t percent = word.find('%'), end = word.find(']');
  if (percent == std::string::npos || end == std::string::npos || percent > end) return false;
  return Address::parse(word.substr(0, percent) + word.substr(end)).has_value();
}

}  // namespace

std::string Endpoint::text() const {
  std::string text;
  for (const Address& address : addresses) {
    if (!text.empty()) text += ' ';
    text += address.text();
  }
  return text;
}

Endpoint Endpoint::fromText(const std::string& text) {
  Endpoint endpoint;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const auto address = Address::parse(word);
    if (!address && isOfInterfaceElsewhere(word)) continue;
    if (!address || address->port() == 0)
      throw Error(Failure::kSetup, "a rank gave '" + word + "' as an address, which is none");
    if (std::none_of(endpoint.addresses.begin(), endpoint.addresses.end(),
                     [&](const Address& other) {
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
// The door of a process: who knocks, who is held, and who is let in.  All of it happens in the
// reactor's thread; other threads ask it to.

namespace {

// How many connections may be held that have not proven who they are: a quarter of the descriptors
// that this process may have, so that groups still find some for themselves.
size_t mostGuests() {
  constexpr rlim_t kMost = 256;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMost;
  return static_cast<size_t>(std::clamp<rlim_t>(limit.rlim_cur / 4, 1, kMost));
}

constexpr int kGuestsATurn = 64;  // other sockets of the reactor's want their turn
constexpr Nanos kPause = 100 * kMillisecond;
// A rank's first message is here by then, unless nothing at all goes on.
constexpr Nanos kTimeToSpeak = kSecond;
constexpr size_t kMostLeft = 256;  // that are known to have been here

class Door final : public Acceptor, public std::enable_shared_from_this<Door> {
 private:
  // A callback for the reactor, which keeps this alive only while it runs.
  template <class Call>
  auto bound(Call call) {
    return [weak = weak_from_this(), call](auto... arguments) {
      if (const auto self = weak.lock()) call(*self, arguments...);
    };
  }

 public:
  Door(Listener listener, std::string choice)
      : listener_(std::move(listener)), choice_(std::move(choice)) {
    endpoint_.addresses = listener_.addresses;
  }
  ~Door() override {
    // In a forked child it does nothing: the reactor is the parent's.
    reactor_->run([this] {
      for (const Fd& socket : listener_.sockets) reactor_->forget(socket.get());
      for (const PendingConnection& guest : guests_) reactor_->forget(guest.socket.get());
      reactor_->cancel(expiry_);
      reactor_->cancel(resumption_);
    });
  }

  void open() {
    reactor_->run([this] {
      for (const Fd& socket : listener_.sockets)
        reactor_->watch(socket.get(), EPOLLIN,
                        bound([&socket](Door& self, uint32_t) { self.hear(socket); }));
    });
  }

  const Endpoint& endpoint() const override { return endpoint_; }
  const std::string& choice() const override { return choice_; }
  std::shared_ptr<void> admit(const std::string& group, int to, const Secret& secret, Taken taken,
                              bool encrypted) override;

 private:
  using Guests = std::list<PendingConnection>;
  using Key = std::pair<std::string, int>;  // a group and a rank of it
  struct Host {
    Secret secret;
    std::shared_ptr<Taken> taken;
    bool encrypted;
  };
  struct Token;

  void hear(const Fd& listener);
  void receive(Fd socket, const Address& from);
  void rest(int error);
  void progress(Guests::iterator guest, uint32_t happened);
  void lookFor(Guests::iterator guest, uint32_t events);
  void encrypt(Guests::iterator guest);
  void letIn(Guests::iterator guest);
  void note(const PendingConnection& guest, const std::string& why);
  void refuse(Guests::iterator guest, const std::string& why);
  void remove(Guests::iterator guest);
  bool dropStranger(const std::string& why, Nanos age = 0);
  void makeRoom();
  void expire();
  void awaitExpiry();
  void dismiss(const Key& key);
  bool callsOneWhoLeft(const PendingConnection& guest) const;

  const std::shared_ptr<Reactor> reactor_ = Reactor::shared();
  Listener listener_;
  const std::string choice_;
  Endpoint endpoint_;
  // Of the reactor's thread:
  Guests guests_;  // by their time
  std::map<Key, Host> hosts_;
  std::deque<Key> left_;  // were here: the last of them
  Reactor::Timer expiry_ = 0, resumption_ = 0;
  RateLimitedLog refusals_{reactor_}, troubles_{reactor_};
};

// ---- new connections

void Door::hear(const Fd& listener) {
  for (int i = 0; i < kGuestsATurn; ++i) {
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
            !dropStranger(std::generic_category().message(error), kTimeToSpeak))
          return rest(error);
        continue;
      case ENOBUFS:
      case ENOMEM:
      case EBADF:
      case EINVAL:
      case ENOTSOCK:
        return rest(errno);
      default:  // of that one connection, which is over already
        continue;
    }
  }
}

// The connection stays where it is, and the listener would be ready again at once.
void Door::rest(int error) {
  troubles_.add("cannot take a connection that another rank may have made: " +
                std::generic_category().message(error) + (error == EMFILE ? " (ulimit -n)" : "") +
                "; it is tried again");
  if (resumption_ != 0) return;
  for (const Fd& socket : listener_.sockets) reactor_->change(socket.get(), 0);
  resumption_ = reactor_->at(deadlineIn(kPause), bound([](Door& self) {
                               self.resumption_ = 0;
                               for (const Fd& socket : self.listener_.sockets)
                                 self.reactor_->change(socket.get(), EPOLLIN);
                             }));
}

void Door::receive(Fd socket, const Address& from) {
  makeRoom();
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const auto find = [this](const PeerHello& caller) -> std::optional<Secret> {
    const auto host = hosts_.find(Key(caller.group, caller.to));
    if (host == hosts_.end()) return std::nullopt;
    return host->second.secret;
  };
  guests_.push_back({.socket = std::move(socket),
                     .from = from,
                     .until = deadlineIn(kHandshakeTime),
                     .machine = Handshake::acceptor(find),
                     .output = {},
                     .events = EPOLLIN | EPOLLRDHUP,
                     .tls = nullptr});
  const auto guest = std::prev(guests_.end());
  try {
    reactor_->watch(
        guest->socket.get(), guest->events,
        bound([guest](Door& self, uint32_t happened) { self.progress(guest, happened); }));
  } catch (const Error& error) {
    return refuse(guest, error.what());
  }
  awaitExpiry();
}

// Drops the oldest connection that has not named a group of this process; false if there is none of
// that age.
bool Door::dropStranger(const std::string& why, Nanos age) {
  const auto oldest =
      std::find_if(guests_.begin(), guests_.end(),
                   [](const PendingConnection& guest) { return !guest.machine.namedGroup(); });
  if (oldest == guests_.end() || now() < oldest->until - kHandshakeTime + age) return false;
  refuse(oldest, why);
  return true;
}

void Door::makeRoom() {
  constexpr auto kWhy = "too many connect at once that have not proven who they are";
  for (const size_t most = mostGuests(); guests_.size() >= most;)
    if (!dropStranger(kWhy)) refuse(guests_.begin(), kWhy);
}

void Door::awaitExpiry() {
  if (expiry_ != 0 || guests_.empty()) return;
  expiry_ = reactor_->at(guests_.front().until, bound([](Door& self) { self.expire(); }));
}

void Door::expire() {
  expiry_ = 0;
  while (!guests_.empty() && guests_.front().until <= now()) {
    const PendingConnection& guest = guests_.front();
    if (guest.leaving || callsOneWhoLeft(guest))
      remove(guests_.begin());
    else
      refuse(guests_.begin(), guest.machine.waitsForGroup()
                                  ? "it calls a group, or a rank of one, that is not here"
                                  : "it did not prove in time who it is");
  }
  awaitExpiry();
}

// ---- handshakes

// Moves a guest as far as it can be moved: the only place from which one is let in.
void Door::progress(Guests::iterator guest, uint32_t happened) {
  if (guest->leaving) return guest->discard() ? void() : remove(guest);
  if (guest->tls) return encrypt(guest);
  bool present = guest->read();
  guest->output += guest->machine.takeOutput();
  const bool spoke = !guest->output.empty();
  present = guest->write() && present;
  // One who waits for its group is not listened to, but seen if it goes.
  const bool held = guest->machine.waitsForGroup();
  if (held && (happened & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))) present = false;

  const Handshake::State state = guest->machine.state();
  if (state == Handshake::State::kRefused) {
    if (!spoke || !present) return refuse(guest, guest->machine.why());
    note(*guest, guest->machine.why());
    shutdown(guest->socket.get(), SHUT_WR);
    guest->leaving = true;
    return guest->discard() ? void() : remove(guest);
  }
  if (!present) {
    // A rank that gave up, of a group that is here: its own log says why.
    if (guest->machine.namedGroup() || callsOneWhoLeft(*guest)) return remove(guest);
    return refuse(guest, "it went before it had proven who it is");
  }
  if (state == Handshake::State::kDone && guest->output.empty())
    return guest->machine.caller().encrypted ? encrypt(guest) : letIn(guest);
  lookFor(guest, EPOLLRDHUP | (held ? 0u : EPOLLIN) | (guest->output.empty() ? 0u : EPOLLOUT));
}

void Door::lookFor(Guests::iterator guest, uint32_t events) {
  if (events == guest->events) return;
  guest->events = events;
  try {
    reactor_->change(guest->socket.get(), events);
  } catch (const Error& error) {
    refuse(guest, error.what());
  }
}

// Of one that has proven itself.
void Door::encrypt(Guests::iterator guest) {
  try {
    if (!guest->tls)
      guest->tls =
          Tls::make(Tls::Side::kAcceptor, guest->socket.get(), guest->machine.keyForEncryption());
  } catch (const Error& error) {
    return refuse(guest, error.what());
  }
  switch (guest->tls->shakeHands()) {
    case Tls::State::kGoesOn:
      return lookFor(guest, EPOLLRDHUP | EPOLLIN | (guest->tls->wantsToWrite() ? EPOLLOUT : 0u));
    case Tls::State::kRefused:
    case Tls::State::kEnded:
      return refuse(guest, guest->tls->why());
    case Tls::State::kDone:
      return letIn(guest);
  }
}

void Door::letIn(Guests::iterator guest) {
  const PeerHello caller = guest->machine.caller();
  const auto host = hosts_.find(Key(caller.group, caller.to));
  if (host == hosts_.end()) return remove(guest);
  if (host->second.encrypted != caller.encrypted)
    return refuse(guest, std::string("RINGREDUCE_TLS=1 is set ") +
                             (caller.encrypted ? "there and not here" : "here and not there"));
  const std::shared_ptr<Taken> taken = host->second.taken;  // it may end its own admission
  const Address from = guest->from;
  reactor_->forget(guest->socket.get());
  Socket socket(std::move(guest->socket), std::move(guest->tls));
  guests_.erase(guest);
  try {
    (*taken)(std::move(socket), caller);
  } catch (const std::exception& error) {
    troubles_.add("lost a connection of rank " + std::to_string(caller.from) + " from " +
                  from.text() + ": " + error.what());
  }
}

void Door::note(const PendingConnection& guest, const std::string& why) {
  refusals_.add("refused a connection from " + guest.from.text() + ": " + why);
}

void Door::refuse(Guests::iterator guest, const std::string& why) {
  note(*guest, why);
  remove(guest);
}

void Door::remove(Guests::iterator guest) {
  reactor_->forget(guest->socket.get());
  guests_.erase(guest);
}

// ---- admission

struct Door::Token {
  const std::shared_ptr<Door> door;
  const Key key;

  Token(std::shared_ptr<Door> owner, Key admitted)
      : door(std::move(owner)), key(std::move(admitted)) {}
  ~Token() {
    door->reactor_->run([this] { door->dismiss(key); });
  }
};

std::shared_ptr<void> Door::admit(const std::string& group, int to, const Secret& secret,
                                  Taken taken, bool encrypted) {
  const Key key(group, to);
  reactor_->run([&] {
    if (!hosts_.emplace(key, Host{secret, std::make_shared<Taken>(std::move(taken)), encrypted})
             .second)
      throw Error(Failure::kSetup, "rank " + std::to_string(to) + " of group " + group +
                                       " is in this process already");
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      const auto held = guest++;  // it may be removed
      if (!held->machine.waitsForGroup()) continue;
      held->machine.lookAgain();
      progress(held, 0);
    }
  });
  return std::make_shared<Token>(shared_from_this(), key);
}

// Ranks do not leave at the same moment, so one may call another that has just left: no stranger.
bool Door::callsOneWhoLeft(const PendingConnection& guest) const {
  if (!guest.machine.waitsForGroup()) return false;
  const PeerHello& caller = guest.machine.caller();
  return std::ranges::find(left_, Key(caller.group, caller.to)) != left_.end();
}

void Door::dismiss(const Key& key) {
  hosts_.erase(key);
  left_.push_back(key);
  if (left_.size() > kMostLeft) left_.pop_front();
  for (auto guest = guests_.begin(); guest != guests_.end();) {
    const auto one = guest++;
    const PeerHello& caller = one->machine.caller();
    if (one->machine.namedGroup() && Key(caller.group, caller.to) == key) remove(one);
  }
}

// ---- the acceptor of the process

std::string inWords(const std::vector<Interface>& all, const std::vector<Address>& addresses) {
  return joined(addresses, ", ", [&](const Address& address) {
    const auto its = std::ranges::find_if(
        all, [&](const Interface& one) { return one.address.sameHost(address); });
    return (its == all.end() ? "an interface" : its->name) + " (" + address.text() + ")";
  });
}

std::shared_ptr<Door> doorFor(const std::string& store_host) {
  const Config config = Config::read();
  const std::string wanted = config.interfaces.get();
  const std::string store = store_host.empty() ? "the store" : "the store's host " + store_host;
  auto towards = addressTowards(store_host);
  std::string why = "by which " + store + " is reached";
  if (!towards || towards->isLoopback()) {
    why = std::string("of the default route, since ") +
          (towards ? store + " is reached by loopback" : "no way to " + store + " is known");
    towards = addressTowardsOthers();
    if (!towards) why = "which is what there is, since there is no default route either";
  }
  if (!wanted.empty()) why = "as RINGREDUCE_IF=" + wanted + " has it";
  const std::string ports = config.ports.get();
  const std::vector<Interface> all = interfaces();
  Listener listener =
      listenOn(choose(all, wanted, towards), ports.empty() ? Ports{} : Ports::fromText(ports));
  std::string choice = inWords(all, listener.addresses);
  choice += ", " + why;
  return std::make_shared<Door>(std::move(listener), std::move(choice));
}

constinit PerProcess<Acceptor> acceptor_of_process;

}  // namespace

std::shared_ptr<Acceptor> Acceptor::shared(const std::string& store_host) {
  return acceptor_of_process.get([&] {
    auto door = doorFor(store_host);
    door->open();
    return door;
  });
}

}  // namespace ringreduce::net
