// The connections to and from each rank, and when each one is served.
#include "p2p/message_forwarder.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

namespace ringreduce::net {
// Used in the reactor's thread, unless a function says otherwise.
class MessageForwarder::Carrier : public std::enable_shared_from_this<Carrier> {
 public:
  struct alignas(kPartAlign) ByteRing {
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
    const ChannelEnds ends;
    MessageSender sender;
    MessageReceiver receiver;

    Socket out, in;
    bool dialling = false, closed = false;       // closed: nothing more can be sent
    bool watching_in = false, in_ended = false;  // in_ended: no more will arrive
    std::atomic<bool> blocked = false;           // its socket is full
    std::atomic<bool> scheduled = false;         // serve() will run soon
  };

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
  void wake(int rank);  // from any thread
  void add(int from, Socket socket);
  std::vector<int> unsent();
  bool isFlushed();
  void end();
  void stopConnecting() { connector_.stop(); }  // from any thread

 private:
  void serve(Peer& peer);
  void send(Peer& peer);
  void watchIncoming(Peer& peer);
  void receive(Peer& peer);
  void connect(Peer& peer);
  void connected(Peer& peer, Socket socket, const ConnectFailure& error);
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

void MessageForwarder::Carrier::wake(int rank) {
  Peer& peer = at(rank);
  if (peer.receiver.canGoOn() || (!peer.blocked && peer.sender.hasNews())) schedule(peer);
}

void MessageForwarder::Carrier::schedule(Peer& peer) {
  if (peer.scheduled.exchange(true)) return;
  reactor_->soon([self = shared_from_this(), &peer] {
    peer.scheduled = false;  // before serve(), so that later news schedule it again
    if (!self->over_) self->serve(peer);
  });
}

void MessageForwarder::Carrier::serve(Peer& peer) {
  if (peer.in && (peer.watching_in ? peer.in.holdsBytes() : peer.receiver.canGoOn())) receive(peer);
  if (!over_) send(peer);
}

// ---- out

void MessageForwarder::Carrier::send(Peer& peer) {
  if (peer.closed) {
    const bool parts = peer.sender.hasRecords();
    peer.sender.discard();
    if (parts) listener_.onProgress(peer.rank);
    return;
  }
  if (peer.blocked) return;
  if (!peer.out) {
    // A rank that has closed its connection needs no count of eager bytes.
    if (peer.in_ended && !peer.sender.hasRecords()) return peer.sender.markTold();
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
  if (moved && !over_) listener_.onProgress(peer.rank);
}

void MessageForwarder::Carrier::connect(Peer& peer) {
  if (std::exchange(peer.dialling, true)) return;
  connector_.call(
      peer.rank, 0,
      [self = weak_from_this(), reactor = reactor_, &peer](Socket socket,
                                                           const ConnectFailure& error) {
        reactor->soon([self, &peer, fd = std::make_shared<Socket>(std::move(socket)), error] {
          if (const auto carrier = self.lock(); carrier && !carrier->over_)
            carrier->connected(peer, std::move(*fd), error);
        });
      });
}

void MessageForwarder::Carrier::connected(Peer& peer, Socket socket, const ConnectFailure& error) {
  peer.dialling = false;
  if (!socket) {
    // Only a count of eager bytes is lost, and its receiver may have left.
    if (!peer.sender.hasRecords()) return peer.sender.markTold();
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

void MessageForwarder::Carrier::closeOut(Peer& peer, const std::string& how) {
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

void MessageForwarder::Carrier::add(int from, Socket socket) {
  Peer& peer = at(from);
  if (over_ || peer.in || peer.in_ended || !socket) return;  // a rank makes one
  peer.in = std::move(socket);
  watchIncoming(peer);
  if (peer.in.holdsBytes()) schedule(peer);
}

void MessageForwarder::Carrier::watchIncoming(Peer& peer) {
  peer.watching_in = true;
  reactor_->watch(peer.in.get(), EPOLLIN,
                  onEvent(peer, [](Carrier& self, Peer& p, uint32_t) { self.receive(p); }));
}

void MessageForwarder::Carrier::receive(Peer& peer) {
  bool moved = false;
  const Carried result = peer.receiver.carry(peer.in, moved);
  if (result == Carried::kBlocked || result == Carried::kEnded) {
    // Bytes without room stay in the socket until wake().
    if (std::exchange(peer.watching_in, false)) reactor_->forget(peer.in.get());
  } else if (!peer.watching_in) {
    watchIncoming(peer);
  }
  if (result == Carried::kEnded) {
    peer.in.reset();
    peer.in_ended = true;
  }
  // The kernel does not report bytes that the socket object holds.
  if (result == Carried::kMore && peer.in.holdsBytes()) schedule(peer);
  if (moved) listener_.onProgress(peer.rank);
  if (result == Carried::kEnded && !over_)
    listener_.broken(peer.rank, peer.receiver.end(), peer.receiver.isDamaged());
}

// ---- ends

std::vector<int> MessageForwarder::Carrier::unsent() {
  std::vector<int> ranks;
  for (const auto& peer : peers_) {
    if (over_) return {};
    send(*peer);
    if (!peer->closed && peer->sender.hasRecords()) ranks.push_back(peer->rank);
  }
  return ranks;
}

bool MessageForwarder::Carrier::isFlushed() {
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

void MessageForwarder::Carrier::end() {
  over_ = true;
  for (const auto& peer : peers_)
    for (Socket* socket : {&peer->out, &peer->in})
      if (*socket) {
        reactor_->forget(socket->get());
        socket->reset();
      }
}

// ---- the calls of message_forwarder.h

MessageForwarder::MessageForwarder(std::shared_ptr<Reactor> reactor,
                                   std::shared_ptr<Carrier> carrier)
    : reactor_(std::move(reactor)), carrier_(std::move(carrier)) {}

MessageForwarder::~MessageForwarder() {
  reactor_->run([&] { carrier_->end(); });
  carrier_->stopConnecting();
}

ChannelEnds MessageForwarder::ends(int rank) const {
  return carrier_->at(rank).ends;
}

bool MessageForwarder::mayReceiveFrom(int rank) const {
  return static_cast<bool>(carrier_->at(rank).in);
}

void MessageForwarder::accept(int from, Socket socket) {
  if (reactor_->isItsThread()) return carrier_->add(from, std::move(socket));
  reactor_->soon([carrier = carrier_, from, fd = std::make_shared<Socket>(std::move(socket))] {
    carrier->add(from, std::move(*fd));
  });
}

void MessageForwarder::wake(int rank) {
  carrier_->wake(rank);
}

std::vector<int> MessageForwarder::unsent() {
  std::vector<int> ranks;
  reactor_->run([&] { ranks = carrier_->unsent(); });
  return ranks;
}

bool MessageForwarder::flush(Nanos longest) {
  return reactor_->waitUntil(longest, [&] { return carrier_->isFlushed(); });
}

std::unique_ptr<MessageForwarder> MessageForwarder::start(std::shared_ptr<Reactor> reactor,
                                                          int rank, int size, Dial dial,
                                                          Listener& listener) {
  auto carrier = std::make_shared<Carrier>(reactor, rank, size, std::move(dial), listener);
  return std::unique_ptr<MessageForwarder>(
      new MessageForwarder(std::move(reactor), std::move(carrier)));
}

}  // namespace ringreduce::net
