// One loop: connects, accepts, receives and answers, until this rank has the descriptors of all
// ranks and has sent its own to all.
#include "group/exchange_fds.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/text.h"
#include "base/wait_clock.h"
#include "bootstrap/unix_socket.h"
#include "group/agreement.h"

namespace ringreduce {

namespace {

// The period of polling for events that cannot wake the loop.
constexpr Nanos kPollPeriod = 10 * kMillisecond;
constexpr int kCallersAStep = 64;

// The address of a rank and the secret for its callers; sent through the group.
struct Invitation {
  char socket[96] = {};
  char secret[72] = {};
};

class FdExchange {
 public:
  FdExchange(Group& group, int mine, const std::string& what)
      : group_(group),
        mine_(mine),
        what_(what),
        wait_(group.timeout(), group.options().stall),
        partners_(static_cast<size_t>(group.size())) {}

  std::vector<Fd> run() {
    Invitation invitation;
    agreeOnStatus(group_, [&] {
      setText(invitation.socket, "ringreduce-fds-" + randomSecretText());
      setText(invitation.secret, randomSecretText());
      listener_ = listenAt(invitation.socket, group_.size() + 16);
    });
    invitations_ = gatherEach(group_, invitation);
    partner(group_.rank()).sent = partner(group_.rank()).received = true;
    try {
      while (!missing().empty()) step();
    } catch (const Error& error) {
      if (error.kind() != Failure::kSetup || group_.failed()) throw;
      // An error of this process (no descriptors left, for example): the others wait for it.
      epoch_->arbiter->fail(
          Failure::kSetup, group_.rank(),
          epoch_->peers().who(group_.rank()) + ", " + doing() + ": " + error.what());
    }
    group_.run({Barrier{}});  // a rank that has all must learn if another has not
    std::vector<Fd> fds;
    for (Partner& p : partners_) fds.push_back(std::move(p.fd));
    return fds;
  }

 private:
  struct Partner {
    Fd socket;              // connected to it; none if not connected
    bool sent = false;      // it has this rank's descriptor
    bool received = false;  // `fd` is its descriptor
    Fd fd;
  };

  Partner& partner(int r) { return partners_[static_cast<size_t>(r)]; }
  const Invitation& invitationOf(int r) const { return invitations_[static_cast<size_t>(r)]; }
  std::string doing() const { return "while ranks exchanged descriptors of " + what_; }

  // The ranks that have not sent or received a descriptor yet.
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < group_.size(); ++r) {
      const Partner& p = partners_[static_cast<size_t>(r)];
      if (!p.sent || !p.received) ranks.push_back(r);
    }
    return ranks;
  }

  void step() {
    // First: data of a rank that is gone by now are in its socket.
    const std::vector<PeerState> states = epoch_->peers().states();
    for (int r = 0; r < group_.rank(); ++r)
      if (Partner& p = partner(r); !p.received || !p.sent) exchangeWith(r, p);
    // A limited number: endless calls must not delay the clock below.
    for (int i = 0; i < kCallersAStep; ++i) {
      Fd caller = acceptFrom(listener_);
      if (!caller) break;
      if (peerOf(caller).uid == geteuid()) callers_.push_back(std::move(caller));
    }
    std::erase_if(callers_, [&](Fd& caller) { return !receiveFrom(caller); });

    const std::vector<int> late = missing();
    if (late.empty()) return;
    group_.checkHealth();
    for (int r : late)
      if (!states[static_cast<size_t>(r)].isHere()) epoch_->arbiter->failLost(r, doing());
    checkClock(late);
    group_.interrupt(doing());
    std::vector<int> wanted{listener_.get()};
    for (const Fd& caller : callers_) wanted.push_back(caller.get());
    for (const Partner& p : partners_)
      if (p.socket) wanted.push_back(p.socket.get());
    waitReadable(wanted, kPollPeriod);
  }

  void checkClock(const std::vector<int>& late) {
    const Nanos waited = wait_.waited();
    if (wait_.isOver())
      epoch_->arbiter->fail(Failure::kTimeout, late.front(),
                            epoch_->peers().whereabouts(late) + " did not take part within " +
                                seconds(wait_.timeout()) + " " + doing());
    if (!wait_.reportIsDue()) return;
    log(epoch_->peers().who(group_.rank()) + " has waited " + seconds(waited) + " for " +
        epoch_->peers().whereabouts(late) + " " + doing());
  }

  // With a lower rank, which listens: one message each way.
  void exchangeWith(int r, Partner& p) {
    if (!p.socket) {
      p.socket = connectTo(invitationOf(r).socket);
      p.sent = false;
      if (!p.socket) return;  // its queue is full, or it has ended: both show later
      if (peerOf(p.socket).uid != geteuid()) return p.socket.reset();
    }
    if (!p.sent) p.sent = send(p.socket, r);
    Packet packet;
    switch (receivePacket(p.socket, packet)) {
      case Received::kNothingYet:
        return;
      case Received::kClosed:
        p.socket.reset();
        return;
      case Received::kMessage:
        if (!take(r, packet)) p.socket.reset();
    }
  }

  // Reads from a caller.  False: the caller is done, or is refused.
  bool receiveFrom(Fd& caller) {
    Packet packet;
    Fields fields;
    try {
      const Received received = receivePacket(caller, packet);
      if (received != Received::kMessage) return received == Received::kNothingYet;
      fields = decode(packet.bytes);
    } catch (const Error&) {  // no descriptors left for what it sent
      if (isProven(decode(packet.bytes))) throw;
      return false;
    }
    const int64_t rank = number(fields, "rank");
    if (rank <= group_.rank() || rank >= group_.size()) return false;
    Partner& p = partner(static_cast<int>(rank));
    if ((p.received && p.sent) || !take(static_cast<int>(rank), packet)) return false;
    p.sent = send(caller, static_cast<int>(rank));
    p.socket = std::move(caller);
    return false;
  }

  bool isProven(const Fields& fields) const {
    return sameSecret(fieldOf(fields, "secret"), invitationOf(group_.rank()).secret);
  }

  // Takes the descriptor if this is a valid message of rank `r`.
  bool take(int r, Packet& packet) {
    const Fields fields = decode(packet.bytes);
    const auto fds = static_cast<int64_t>(packet.fds.size());
    if (!isProven(fields) || number(fields, "rank") != r || number(fields, "fds") != fds || fds > 1)
      return false;
    Partner& p = partner(r);
    if (fds == 1) p.fd = std::move(packet.fds[0]);
    return p.received = true;
  }

  // False if the other end is gone.
  bool send(const Fd& socket, int r) {
    const Fields fields{{"secret", invitationOf(r).secret},
                        {"rank", std::to_string(group_.rank())},
                        {"fds", mine_ < 0 ? "0" : "1"}};
    return sendPacket(socket, encode(fields),
                      mine_ < 0 ? std::vector<int>{} : std::vector<int>{mine_});
  }

  Group& group_;
  const std::shared_ptr<Epoch> epoch_ = group_.epoch();
  const int mine_;
  const std::string what_;
  WaitClock wait_;
  Fd listener_;
  std::vector<Invitation> invitations_;
  std::vector<Partner> partners_;  // by rank
  std::vector<Fd> callers_;        // not identified yet
};

}  // namespace

std::vector<Fd> exchangeFds(Group& group, int mine, const std::string& what) {
  return FdExchange(group, mine, what).run();
}

// ---- pages of the host

namespace {

constexpr size_t kPageBytes = 4096;

}  // namespace

HostPages::HostPages(Group& group, size_t bytes) : segments_(static_cast<size_t>(group.size())) {
  const size_t size = roundUp(bytes == 0 ? 1 : bytes, kPageBytes);
  std::shared_ptr<Segment>& own = segments_[static_cast<size_t>(group.rank())];
  agreeOnStatus(group, [&] { own = Segment::create(size); });
  std::vector<Fd> fds = exchangeFds(group, own->fd(), "shared memory");
  agreeOnStatus(group, [&] {
    for (int r = 0; r < group.size(); ++r)
      if (r != group.rank())
        segments_[static_cast<size_t>(r)] =
            Segment::attach(std::move(fds[static_cast<size_t>(r)]), size);
  });
  for (const auto& segment : segments_) segment->closeFd();
}

}  // namespace ringreduce
