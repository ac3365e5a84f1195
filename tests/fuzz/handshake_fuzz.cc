// The handshake in the hands of somebody who lacks the secret: he carries what the machines say, as
// he likes: to whom, in what pieces, again, changed, or his own words instead.
//
// The input is what he does.  Whatever it is, a machine may only believe (kDone) one that has the
// same secret, is of the other side, and has heard and said the same bytes.
//
//     libFuzzer    LLVMFuzzerTestOneInput
//     otherwise    standalone.cc
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz.h"
#include "input.h"
#include "transport/tcp/handshake.h"

using namespace ringreduce::net;
using State = Handshake::State;

namespace {

constexpr size_t kHello = 96, kChallenge = 96, kProof = 32, kBuild = 32;
constexpr size_t kMostWhy = 300;

// The seven that talk.  The stranger dials without having the secret.
enum Who : size_t { kDialler, kOtherDialler, kStranger, kAcceptor, kTwin, kLate, kStrange, kAll };

bool dials(size_t who) {
  return who <= kStranger;
}
bool isStrange(size_t who) {
  return who == kStranger || who == kStrange;
}

class Arena {
 public:
  // `leak`: the stranger has the secret after all, which the arena does not know.
  explicit Arena(bool leak) {
    Secret secret, other;
    secret.fill(0x5e);
    other.fill(0x07);
    for (size_t who = 0; who < kAll; ++who) {
      const Secret& own = isStrange(who) && !leak ? other : secret;
      machines_.push_back(made(who, own));
    }
    for (size_t who = 0; who < kAll; ++who) collect(who);
  }

  // What was wrong; "" if nothing was.
  std::string play(fuzz::Input input) {
    while (!input.ended() && wrong_.empty()) act(input);
    return wrong_;
  }

  int believers() const {
    int count = 0;
    for (const Party& party : machines_) count += party.machine.state() == State::kDone;
    return count;
  }

 private:
  struct Party {
    Handshake machine;
    std::string said, heard;
    size_t carried[kAll] = {};  // of what each has said, how much this one was given
    bool judged = false;
  };

  Party made(size_t who, const Secret& secret) {
    Nonce nonce;
    nonce.fill(static_cast<unsigned char>(who));
    if (dials(who)) {
      const PeerHello caller{.group = "00112233445566aa",
                             .from = static_cast<int>(who),
                             .to = 3,
                             .purpose = static_cast<Purpose>(who),
                             .connection = 0};
      return {.machine = Handshake::dialler(caller, secret, nonce), .said = {}, .heard = {}};
    }
    const auto find = [this, who, secret](const PeerHello& caller) -> std::optional<Secret> {
      if (caller.group != "00112233445566aa" || caller.to != 3) return std::nullopt;
      if (who == kLate && !admitted_) return std::nullopt;
      return secret;
    };
    return {.machine = Handshake::acceptor(find, nonce), .said = {}, .heard = {}};
  }

  void act(fuzz::Input& input) {
    const uint8_t what = input.byte();
    const size_t to = what / 8 % kAll;
    switch (what % 8) {
      case 0: {  // the next bytes of another
        const size_t from = input.below(kAll);
        size_t& at = machines_[to].carried[from];
        const std::string part = machines_[from].said.substr(at, input.byte());
        at += part.size();
        return give(to, part);
      }
      case 1: {  // the rest of what another has said, and the answer
        const size_t from = input.below(kAll);
        carry(from, to);
        return carry(to, from);
      }
      case 2: {  // any bytes that somebody has said
        const std::string& said = machines_[input.below(kAll)].said;
        const size_t at = input.byte();
        const size_t size = input.byte();
        return give(to, at < said.size() ? said.substr(at, size) : "");
      }
      case 3: {  // the same with a bit changed
        const std::string& said = machines_[input.below(kAll)].said;
        const size_t at = input.byte();
        std::string part = at < said.size() ? said.substr(at, input.byte()) : "";
        const size_t bit = input.byte() + 256u * input.below(4);
        if (bit / 8 < part.size()) part[bit / 8] = static_cast<char>(part[bit / 8] ^ 1 << bit % 8);
        return give(to, part);
      }
      case 4: {  // his own words
        const size_t size = input.byte();
        return give(to, std::string(input.bytes(size)));
      }
      case 5:  // the rank is admitted that was not there
        admitted_ = true;
        machines_[kLate].machine.lookAgain();
        return collect(kLate);
      case 6: {  // a piece is lost
        const size_t from = input.below(kAll);
        size_t& at = machines_[to].carried[from];
        at = std::min(machines_[from].said.size(), at + input.byte());
        return;
      }
      default:
        machines_[to].machine.lookAgain();
        return collect(to);
    }
  }

  void carry(size_t from, size_t to) {
    size_t& at = machines_[to].carried[from];
    const std::string part = machines_[from].said.substr(at);
    at += part.size();
    give(to, part);
  }

  void give(size_t who, const std::string& bytes) {
    Party& party = machines_[who];
    const size_t wants = party.machine.wants();
    const State before = party.machine.state();
    const size_t taken = party.machine.feed(std::as_bytes(std::span(bytes)));
    if (taken > bytes.size()) return wrong("took more than there was");
    if (taken < std::min(wants, bytes.size())) return wrong("took less than it wanted");
    if (before != State::kGoesOn && taken > 0) return wrong("took bytes after its end");
    party.heard += bytes.substr(0, taken);
    collect(who);
  }

  // Takes what it says, and looks at it.
  void collect(size_t who) {
    Party& party = machines_[who];
    const Handshake& machine = party.machine;
    party.said += party.machine.takeOutput();
    const size_t said = party.said.size();
    if (machine.state() != State::kGoesOn && machine.wants() > 0) wrong("wants more after its end");
    if (dials(who) && said != kHello && said != kHello + kProof) wrong("a dialler said too much");
    if (!dials(who) && said != 0 && said != kChallenge && said != kChallenge + kProof &&
        !(said == kBuild && machine.state() == State::kRefused))
      wrong("an acceptor said too much");
    const bool whole = said == (dials(who) ? kHello : kChallenge) + kProof;
    if (!dials(who) && whole != (machine.state() == State::kDone))
      wrong("an acceptor welcomed somebody without believing him, or did not");
    if (machine.state() == State::kRefused) {
      if (machine.why().empty() || machine.why().size() > kMostWhy) wrong("no good reason");
      for (char c : machine.why())
        if (c < ' ' || c > '~') wrong("a reason that is no text");
    }
    if (machine.state() == State::kDone && !std::exchange(party.judged, true)) judge(who);
  }

  // Whether there is one whom it may believe.
  void judge(size_t who) {
    for (size_t other = 0; other < kAll; ++other) {
      if (dials(other) == dials(who) || isStrange(other) != isStrange(who)) continue;
      const Party& dialler = machines_[dials(who) ? who : other];
      const Party& acceptor = machines_[dials(who) ? other : who];
      const size_t last = dials(who) ? kChallenge + kProof : kChallenge;
      if (acceptor.heard == dialler.said &&
          std::string_view(dialler.heard).substr(0, last) ==
              std::string_view(acceptor.said).substr(0, last) &&
          acceptor.machine.caller().from == dialler.machine.caller().from &&
          acceptor.machine.caller().purpose == dialler.machine.caller().purpose)
        return;
    }
    wrong("believed somebody who is not there");
  }

  void wrong(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }

  bool admitted_ = false;
  std::vector<Party> machines_;
  std::string wrong_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Arena arena(false);
  const std::string wrong = arena.play(fuzz::Input(data, size));
  if (wrong.empty()) return 0;
  std::fprintf(stderr, "the handshake %s\n", wrong.c_str());
  std::abort();
}

fuzz::Trial fuzz::control(const uint8_t* data, size_t size) {
  Arena whole(false), leaky(true);
  whole.play(fuzz::Input(data, size));
  return {.reached = whole.believers() > 0, .seen = !leaky.play(fuzz::Input(data, size)).empty()};
}
