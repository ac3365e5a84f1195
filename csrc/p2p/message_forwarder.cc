// The connections to and from each rank, and when each one is served.
#include "p2p/message_forwarder.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "p2p/message_connection.h"

namespace ringreduce::net {
namespace {

struct alignas(kRecordAlign) ByteRing {
  std::byte bytes[kRingBytes];  // committed by the system when first written to
};

struct Peer {
  explicit Peer(int r)
      : rank(r),
        out_ring(new ByteRing),
        in_ring(new ByteRing),
        ends{.out_ring = out_ring->bytes,
             .out_filled = &flags[0],
             .out_emptied = &flags[1],
             .in_ring = in_ring->bytes,
             .in_filled = &flags[2],
             .in_emptied = &flags[3],
             .consumed = &flags[4],
             .acknowledged = &flags[5]},
        sender(ends),
        receiver(ends) {}

  const int rank;
  Flag flags[6]{};
  const std::unique_ptr<ByteRing> out_ring, in_ring;
  const MessageForwarder::Ends ends;
  MessageSender sender;
  MessageReceiver receiver;

  Socket out, in;
  bool dialling = false, closed = false;       // closed: nothing more can be sent
  bool watches_in = false, heard_out = false;  // heard_out: `in` has ended
  std::atomic<bool> blocked = false;           // its socket is full
  std::atomic<bool> scheduled = false;         // serve() will run soon
};

// Used in the reactor's thread, unless a function says otherwise.
class Carrier : public std::enable_shared_from_this<Carrier> {
 public:
  Carrier(std::shared_ptr<Reactor> reactor, int rank, int size, Dial dial,
          MessageForwarder::Listener& listener)
      : reactor_(std::move(reactor)),
        listener_(listener),
        rank_(rank),
        connector_(std::move(dial)) {
    for (int r = 0; r < size; ++r) peers_.push_back(std::make_unique<Peer>(r));
    at(rank).closed = true;  // it has no connection to itself
  }

  Peer& at(int rank) { return *peers_[static_cast<size_t>(rank)]; }
  void stir(int rank);  // from any thread
  void add(int from, Socket socket);
  std::vector<int> unsent();
  bool isFlushed();
  void end();
  void stopConnecting() { connector_.stop(); }  // from any thread

 private:
  void serve(Peer& peer);
  void send(Peer& peer);
  void hear(Peer& peer);
  void receive(Peer& peer);
  void connect(Peer& peer);
  void connected(Peer& peer, Socket socket, const NotMade& error);
  void closeOut(Peer& peer, const std::string& how);
  void schedule(Peer& peer);
  template <class F>
  std::function<void(uint32_t)> onEvent(Peer& peer, F f) {
    return [self = weak_from_this(), &peer, f](uint32_t events) {
      if (const auto carrier = self.lock(); carrier && !carrier->over_) f(*carrier, peer, events);
    };
  }

  const std::shared_ptr<Reactor> reactor_;
  MessageForwarder::Listener& listener_;
  const int rank_;
  std::vector<std::unique_ptr<Peer>> peers_;
  bool over_ = false;
  Connector connector_;
};

void Carrier::stir(int rank) {
  Peer& peer = at(rank);
  if (peer.receiver.canGoOn() || (!peer.blocked && peer.sender.hasNews())) schedule(peer);
}

void Carrier::schedule(Peer& peer) {
  if (peer.scheduled.exchange(true)) return;
  reactor_->soon([self = shared_from_this(), &peer] {
    peer.scheduled = false;  // before serve(), so that later news schedule it again
    if (!self->over_) self->serve(peer);
  });
}

void Carrier::serve(Peer& peer) {
  if (peer.in && (peer.watches_in ? peer.in.holdsBytes() : peer.receiver.canGoOn())) receive(peer);
  if (!over_) send(peer);
}

// ---- out

void Carrier::send(Peer& peer) {
  if (peer.closed) {
    const bool records = peer.sender.hasRecords();
    peer.sender.discard();
    if (records) listener_.stirred(peer.rank);
    return;
  }
  if (peer.blocked) return;
  if (!peer.out) {
    // A rank that has closed its connection needs no count of eager bytes.
    if (peer.heard_out && !peer.sender.hasRecords()) return peer.sender.keepQuiet();
    if (peer.sender.hasNews()) connect(peer);
    return;
  }
  bool moved = false;
  const Carried result = peer.sender.carry(peer.out, moved);
  if (result == Carried::kBlocked) {
    peer.blocked = true;
    reactor_->change(peer.out.get(), EPOLLIN | EPOLLOUT);
  } else if (result == Carried::kMore) {
    schedule(peer);
  } else if (result == Carried::kEnded) {
    closeOut(peer, "cannot send messages to it any more: " + textOfError(peer.sender.error()));
  }
  if (moved && !over_) listener_.stirred(peer.rank);
}

void Carrier::connect(Peer& peer) {
  if (std::exchange(peer.dialling, true)) return;
  connector_.call(
      peer.rank, 0,
      [self = weak_from_this(), reactor = reactor_, &peer](Socket socket, const NotMade& error) {
        reactor->soon([self, &peer, fd = std::make_shared<Socket>(std::move(socket)), error] {
          if (const auto carrier = self.lock(); carrier && !carrier->over_)
            carrier->connected(peer, std::move(*fd), error);
        });
      });
}

void Carrier::connected(Peer& peer, Socket socket, const NotMade& error) {
  peer.dialling = false;
  if (!socket) {
    // Only a count of eager bytes is lost, and its receiver may have left.
    if (!peer.sender.hasRecords()) return peer.sender.keepQuiet();
    closeOut(peer, error.why);
    if (error.own) listener_.broken(rank_, error.why, true);
    return;
  }
  peer.out = std::move(socket);
  reactor_->watch(peer.out.get(), EPOLLIN,
                  onEvent(peer, [](Carrier& self, Peer& p, uint32_t events) {
                    // Nothing is ever sent back, so this is the end of the connection.
                    if (events & ~static_cast<uint32_t>(EPOLLOUT))
                      return self.closeOut(p, "it has closed its connection for messages");
                    p.blocked = false;
                    self.reactor_->change(p.out.get(), EPOLLIN);
                    self.send(p);
                  }));
  send(peer);
}

void Carrier::closeOut(Peer& peer, const std::string& how) {
  if (peer.out) {
    reactor_->forget(peer.out.get());
    peer.out.reset();
  }
  peer.closed = true;
  peer.blocked = false;
  peer.sender.discard();
  listener_.broken(peer.rank, how, false);
}

// ---- in

void Carrier::add(int from, Socket socket) {
  Peer& peer = at(from);
  if (over_ || peer.in || peer.heard_out || !socket) return;  // a rank makes one
  peer.in = std::move(socket);
  hear(peer);
  if (peer.in.holdsBytes()) schedule(peer);
}

void Carrier::hear(Peer& peer) {
  peer.watches_in = true;
  reactor_->watch(peer.in.get(), EPOLLIN,
                  onEvent(peer, [](Carrier& self, Peer& p, uint32_t) { self.receive(p); }));
}

void Carrier::receive(Peer& peer) {
  bool moved = false;
  const Carried result = peer.receiver.carry(peer.in, moved);
  if (result == Carried::kBlocked || result == Carried::kEnded) {
    // Bytes without room stay in the socket until stir().
    if (std::exchange(peer.watches_in, false)) reactor_->forget(peer.in.get());
  } else if (!peer.watches_in) {
    hear(peer);
  }
  if (result == Carried::kEnded) {
    peer.in.reset();
    peer.heard_out = true;
  }
  // The kernel does not report bytes that the socket object holds.
  if (result == Carried::kMore && peer.in.holdsBytes()) schedule(peer);
  if (moved) listener_.stirred(peer.rank);
  if (result == Carried::kEnded && !over_)
    listener_.broken(peer.rank, peer.receiver.end(), peer.receiver.isDamaged());
}

// ---- ends

std::vector<int> Carrier::unsent() {
  std::vector<int> ranks;
  for (const auto& peer : peers_) {
    if (over_) return {};
    send(*peer);
    if (!peer->closed && peer->sender.hasRecords()) ranks.push_back(peer->rank);
  }
  return ranks;
}

bool Carrier::isFlushed() {
  if (over_) return true;
  bool flushed = true;
  for (const auto& peer : peers_) {
    send(*peer);
    if (over_) return true;
    if (peer->closed) continue;
    int under_way = 0;
    if (peer->sender.hasRecords() ||
        (peer->out && ioctl(peer->out.get(), SIOCOUTQ, &under_way) == 0 && under_way > 0))
      flushed = false;
  }
  return flushed;
}

void Carrier::end() {
  over_ = true;
  for (const auto& peer : peers_)
    for (Socket* socket : {&peer->out, &peer->in})
      if (*socket) {
        reactor_->forget(socket->get());
        socket->reset();
      }
}

class SocketForwarder final : public MessageForwarder {
 public:
  SocketForwarder(std::shared_ptr<Reactor> reactor, std::shared_ptr<Carrier> carrier)
      : reactor_(std::move(reactor)), carrier_(std::move(carrier)) {}
  ~SocketForwarder() override {
    reactor_->run([&] { carrier_->end(); });
    carrier_->stopConnecting();
  }

  Ends ends(int rank) override { return carrier_->at(rank).ends; }
  bool hears(int rank) override { return static_cast<bool>(carrier_->at(rank).in); }
  void accept(int from, Socket socket) override {
    if (reactor_->isItsThread()) return carrier_->add(from, std::move(socket));
    reactor_->soon([carrier = carrier_, from, fd = std::make_shared<Socket>(std::move(socket))] {
      carrier->add(from, std::move(*fd));
    });
  }
  void stir(int rank) override { carrier_->stir(rank); }
  std::vector<int> unsent() override {
    std::vector<int> ranks;
    reactor_->run([&] { ranks = carrier_->unsent(); });
    return ranks;
  }
  bool flush(Nanos longest) override {
    const Nanos limit = deadlineIn(longest);
    Nanos nap = 100 * kMicrosecond;
    for (;;) {
      bool flushed = true;
      reactor_->run([&] { flushed = carrier_->isFlushed(); });
      const Nanos left = limit - now();
      if (flushed || left <= 0 || reactor_->isItsThread()) return flushed;
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(nap, left)));
      nap = std::min(2 * nap, 5 * kMillisecond);
    }
  }

 private:
  const std::shared_ptr<Reactor> reactor_;
  const std::shared_ptr<Carrier> carrier_;
};

}  // namespace

std::unique_ptr<MessageForwarder> MessageForwarder::start(std::shared_ptr<Reactor> reactor,
                                                          int rank, int size, Dial dial,
                                                          Listener& listener) {
  auto carrier = std::make_shared<Carrier>(reactor, rank, size, std::move(dial), listener);
  return std::make_unique<SocketForwarder>(std::move(reactor), std::move(carrier));
}

}  // namespace ringreduce::net
