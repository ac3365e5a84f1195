// One loop: connect, accept, hear and answer, until this rank has everybody's descriptor and
// everybody has been sent this rank's.
#include "group/exchange_fds.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/meeting.h"
#include "bootstrap/unix_socket.h"
#include "group/agreement.h"

namespace ringreduce {
namespace {

// How often what cannot wake the loop is looked at.
constexpr Nanos kTurn = 10 * kMillisecond;
constexpr int kCallersATurn = 64;

// Where a rank listens, and what a caller must know; told through the group.
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
        started_(now()),
        next_report_(deadlineIn(group.options().stall)),
        partners_(static_cast<size_t>(group.size())) {}

  std::vector<Fd> run() {
    Invitation invitation;
    agreeOnStatus(group_, [&] {
      setText(invitation.socket, "ringreduce-fds-" + randomHex());
      setText(invitation.secret, randomHex());
      listener_ = listenAt(invitation.socket, group_.size() + 16);
    });
    invitations_ = gatherEach(group_, invitation);
    partner(group_.rank()).sent = partner(group_.rank()).heard = true;
    try {
      while (!missing().empty()) turn();
    } catch (const Error& error) {
      if (error.kind() != Failure::kSetup || group_.failed()) throw;
      // What this process itself met (no descriptors left, say): the others wait for it.
      group_.fail(Failure::kSetup, group_.rank(),
                  group_.who(group_.rank()) + ", " + doing() + ": " + error.what());
    }
    group_.run({Barrier{}});  // one who has all may yet learn that another has not
    std::vector<Fd> fds;
    for (Partner& p : partners_) fds.push_back(std::move(p.fd));
    return fds;
  }

 private:
  struct Partner {
    Fd socket;           // connected to it; not yet, or no more, if none
    bool sent = false;   // it has this rank's descriptor
    bool heard = false;  // `fd` is what it gave
    Fd fd;
  };

  Partner& partner(int r) { return partners_[static_cast<size_t>(r)]; }
  const Invitation& invitationOf(int r) const { return invitations_[static_cast<size_t>(r)]; }
  std::string doing() const { return "while ranks exchanged descriptors of " + what_; }

  // The ranks with whom this one is not done.
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < group_.size(); ++r) {
      const Partner& p = partners_[static_cast<size_t>(r)];
      if (!p.sent || !p.heard) ranks.push_back(r);
    }
    return ranks;
  }

  void turn() {
    // Before anything is heard: what a rank that is gone by now has sent is in the socket.
    const std::vector<PeerState> states = group_.states();
    for (int r = 0; r < group_.rank(); ++r)
      if (Partner& p = partner(r); !p.heard || !p.sent) converse(r, p);
    // Not all there are: somebody who calls without end shall not keep us from the clock below.
    for (int i = 0; i < kCallersATurn; ++i) {
      Fd caller = acceptFrom(listener_);
      if (!caller) break;
      if (peerOf(caller).uid == geteuid()) callers_.push_back(std::move(caller));
    }
    std::erase_if(callers_, [&](Fd& caller) { return !hear(caller); });

    const std::vector<int> late = missing();
    if (late.empty()) return;
    group_.checkHealth();
    for (int r : late)
      if (!states[static_cast<size_t>(r)].isHere()) group_.failLost(r, doing());
    lookAtClock(late);
    group_.interrupt(doing());
    std::vector<int> wanted{listener_.get()};
    for (const Fd& caller : callers_) wanted.push_back(caller.get());
    for (const Partner& p : partners_)
      if (p.socket) wanted.push_back(p.socket.get());
    waitReadable(wanted, kTurn);
  }

  void lookAtClock(const std::vector<int>& late) {
    const Nanos waited = now() - started_;
    if (waited >= group_.timeout())
      group_.fail(Failure::kTimeout, late.front(),
                  group_.whereabouts(late) + " did not take part within " +
                      seconds(group_.timeout()) + " " + doing());
    if (now() < next_report_) return;
    next_report_ = now() + std::max<Nanos>(waited, kSecond);
    log(group_.who(group_.rank()) + " has waited " + seconds(waited) + " for " +
        group_.whereabouts(late) + " " + doing());
  }

  // With a lower rank, which listens: one message each way.
  void converse(int r, Partner& p) {
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

  // One who called.  False: done with it, or not to be listened to.
  bool hear(Fd& caller) {
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
    if ((p.heard && p.sent) || !take(static_cast<int>(rank), packet)) return false;
    p.sent = send(caller, static_cast<int>(rank));
    p.socket = std::move(caller);
    return false;
  }

  bool isProven(const Fields& fields) const {
    return sameSecret(word(fields, "secret"), invitationOf(group_.rank()).secret);
  }

  // Whether the message is what rank `r` has to say; then its descriptor is ours.
  bool take(int r, Packet& packet) {
    const Fields fields = decode(packet.bytes);
    const auto fds = static_cast<int64_t>(packet.fds.size());
    if (!isProven(fields) || number(fields, "rank") != r || number(fields, "fds") != fds || fds > 1)
      return false;
    Partner& p = partner(r);
    if (fds == 1) p.fd = std::move(packet.fds[0]);
    return p.heard = true;
  }

  // False if the other end is gone: then it connects again, or its end shows.
  bool send(const Fd& socket, int r) {
    const Fields fields{{"secret", invitationOf(r).secret},
                        {"rank", std::to_string(group_.rank())},
                        {"fds", mine_ < 0 ? "0" : "1"}};
    return sendPacket(socket, encode(fields),
                      mine_ < 0 ? std::vector<int>{} : std::vector<int>{mine_});
  }

  Group& group_;
  const int mine_;
  const std::string what_;
  const Nanos started_;
  Nanos next_report_;
  Fd listener_;
  std::vector<Invitation> invitations_;
  std::vector<Partner> partners_;  // by rank
  std::vector<Fd> callers_;        // who have not said who they are
};

}  // namespace

std::vector<Fd> exchangeFds(Group& group, int mine, const std::string& what) {
  return FdExchange(group, mine, what).run();
}

}  // namespace ringreduce
