// What comes over connections, what is told here, and what follows from it: gaps that are closed,
// ranks that are lost.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "health/control_node.h"

namespace ringreduce::net {
namespace {

// How much later than a first cut a second one may be known, beside the time between heartbeats.
constexpr Nanos kSettle = 200 * kMillisecond;

std::string howEnded(Broken::How how) {
  if (how == Broken::How::kEnded) return kProcessEnded;
  if (how == Broken::How::kSilent) return "it answers nobody any more";
  return "its control connection carried what no rank sends";
}

}  // namespace

void ControlNode::take(const Link& link, const ControlFrame& frame) {
  Connection* from = link.get();
  if (const auto* departed = std::get_if<Departed>(&frame)) {
    if (departed->rank == me_ || !state_.depart(departed->rank, departed->how)) return;
    if (departed->how == Departure::kGone) ring_.remove(departed->rank);
    spread({Outbox::Kind::kDeparture, departed->rank}, from);
    listener_.departed(departed->rank, departed->how);
    mend();
  } else if (const auto* verdict = std::get_if<Verdict>(&frame)) {
    if (state_.verdict) return;
    reactor_->cancel(std::exchange(settling_, 0));  // it is known who is to blame
    state_.verdict = *verdict;
    spread({Outbox::Kind::kVerdict, 0}, from);
    if (state_.departure(me_) != Departure::kGone) listener_.ended(*verdict);
    mend();
  } else if (const auto* broken = std::get_if<Broken>(&frame)) {
    takeBroken(*broken, from);
  } else if (const auto* question = std::get_if<Question>(&frame)) {
    if (question->asker == me_ || !state_.asked(*question)) return;
    spread({Outbox::Kind::kQuestion, question->asker}, from);
    // As good as one's own, as long as nobody would answer another.
    next_question_ = std::max(next_question_, now() + options_.heartbeat / 2);
    answer(question->since);
  } else if (const auto* answer = std::get_if<Answer>(&frame)) {
    takeAnswer(*answer, from);
  } else if (std::holds_alternative<Bridged>(frame)) {
    from->needed = false;
  }
}

void ControlNode::takeBroken(const Broken& broken, Connection* from) {
  if (broken.rank == me_ && broken.reporter != me_ && broken.how != Broken::How::kUnreachable)
    return;  // it is here, whatever became of that connection: the others' verdict will come
  const std::optional<int> number = state_.broke(broken);
  if (!number) return;
  spread({Outbox::Kind::kBroken, *number}, from);
  if (broken.how == Broken::How::kUnreachable) {
    cuts_.insert(std::minmax(broken.reporter, broken.rank));
    reactor_->cancel(settling_);
    settling_ = reactor_->at(now() + options_.heartbeat + kSettle,
                             later([](ControlNode& ring) { ring.judge(); }));
    return;
  }
  if (!ring_.has(broken.rank)) return;
  ring_.remove(broken.rank);
  tellLost({broken.rank},
           broken.how == Broken::How::kEnded ? PeerState::kEnded : PeerState::kUnreachable,
           howEnded(broken.how));
  mend();
}

void ControlNode::takeAnswer(const Answer& answer, Connection* from) {
  if (answer.rank == me_ || !state_.answered(answer)) return;
  spread({Outbox::Kind::kAnswer, answer.rank}, from);
  if (!listens()) return;
  listener_.seen(answer.rank, answer.there);
  for (int rank : answer.stopped) {
    if (rank == me_) continue;
    Whereabouts there = state_.lastSeen(rank);
    there.stopped = true;
    listener_.seen(rank, there);
  }
}

// Whether it is more than this rank last said.
bool ControlNode::isNews(const Whereabouts& own) const {
  const Whereabouts said = state_.lastSeen(me_);
  const auto first = [](const Whereabouts& there) {
    return there.announced - std::min<uint64_t>(there.announced, 1 + there.earlier.size());
  };
  return own.announced != said.announced || first(own) < first(said);
}

void ControlNode::answer(uint64_t since) {
  const Nanos time = now();
  const bool soon = time < next_answer_;
  if (!listens() || (soon && since == kNoOperation)) return;
  Whereabouts own = listener_.own(since);
  if (soon && !isNews(own)) return;
  next_answer_ = time + options_.heartbeat / 2;
  state_.answered({.rank = me_,
                   .number = state_.answersOf(me_) + 1,
                   .there = std::move(own),
                   .stopped = listener_.stopped()});
  spread({Outbox::Kind::kAnswer, me_}, nullptr);
}

void ControlNode::spread(Outbox::Item item, const Connection* from) {
  for (const Link& link : std::vector<Link>(links_)) {
    if (link.get() == from) continue;
    link->outbox.add(item);
    send(*link);
  }
}

// ---- what is told here

void ControlNode::tell(const Verdict& verdict) {
  if (state_.verdict) return;
  reactor_->cancel(std::exchange(settling_, 0));
  state_.verdict = verdict;
  spread({Outbox::Kind::kVerdict, 0}, nullptr);
  mend();
}

void ControlNode::depart(Departure how) {
  if (how == Departure::kHere || !state_.depart(me_, how)) return;
  spread({Outbox::Kind::kDeparture, me_}, nullptr);
  mend();
}

void ControlNode::ask(uint64_t since) {
  const Nanos time = now();
  if (time < next_question_ && since == kNoOperation) return;
  next_question_ = time + options_.heartbeat;
  state_.asked({me_, state_.questionsOf(me_) + 1, since});
  spread({Outbox::Kind::kQuestion, me_}, nullptr);
  answer(since);  // the others, who need not ask now, want to know it of this rank too
}

// ---- gaps, cuts and who is lost

// Keeps this rank connected to both that stand beside it, and lets go those that left.
void ControlNode::mend() {
  if (over_) return;
  const bool gone = state_.departure(me_) == Departure::kGone;
  if (!gone && !state_.verdict) dialNext();
  const bool bridged =
      gone || state_.verdict || (isLinked(ring_.next(me_)) && isLinked(ring_.previous(me_)));
  if (!bridged) return;
  for (const Link& link : std::vector<Link>(links_)) {
    if (link->told_not_needed || state_.departure(link->peer) != Departure::kGone) continue;
    link->told_not_needed = true;
    link->out += encode(Bridged{});
    send(*link);
  }
}

// Where a rank that stood here has gone: connects to the one that is now next.
void ControlNode::dialNext() {
  if (dialling_ || cuts_.contains(std::minmax(me_, ring_.next(me_)))) return;
  int target = ring_.next(me_);
  while (target != me_ && not_reached_.contains(target)) target = ring_.next(target);
  const bool exists = std::any_of(links_.begin(), links_.end(),
                                  [&](const Link& link) { return link->peer == target; });
  if (target == me_ || exists) return;
  dialling_ = true;
  auto taken = later([target](ControlNode& ring, const std::shared_ptr<Socket>& socket) {
    ring.dialling_ = false;
    if (*socket) return ring.add(target, std::move(*socket), false, true);
    ring.notReached(target);
    ring.mend();
  });
  dialler_.call(target, 0, [reactor = reactor_, taken](Socket socket, const NotMade&) {
    reactor->soon(
        [taken, fd = std::make_shared<Socket>(std::move(socket))]() mutable { taken(fd); });
  });
}

// A gap could not be closed towards this rank.  It may have left too, or ended: those beyond it may
// know.  If nobody does, since its neighbours went with it, it is lost after a while.
void ControlNode::notReached(int rank) {
  not_reached_.insert(rank);
  const Nanos since = silent_since_.try_emplace(rank, now()).first->second;
  if (now() - since >= options_.lost_after)
    return takeBroken({me_, rank, Broken::How::kSilent}, nullptr);
  if (again_ != 0) return;
  again_ = reactor_->at(now() + options_.heartbeat / 2, later([](ControlNode& node) {
                          node.again_ = 0;
                          node.not_reached_.clear();
                          node.mend();
                        }));
}

// Once all cuts of a partition are known.
void ControlNode::judge() {
  settling_ = 0;
  if (!listens()) return;
  std::vector<int> linked;
  for (const Link& link : links_)
    if (link->proven) linked.push_back(link->peer);
  std::vector<int> ranks = ring_.beyond(me_, cuts_, linked);
  if (ranks.empty()) {
    // One connection alone is cut: its ends speak.
    for (const auto& [one, other] : cuts_)
      for (int r : {one, other})
        if ((one == me_ || other == me_) && r != me_ && ring_.has(r) && !isLinked(r))
          ranks.push_back(r);
  }
  const std::string how = noPacket(ranks.size());
  tellLost(std::move(ranks), PeerState::kUnreachable, how);
}

std::string ControlNode::noPacket(size_t ranks) const {
  return std::string("no packet from ") + (ranks > 1 ? "their hosts" : "its host") + " came for " +
         seconds(options_.lost_after);
}

void ControlNode::tellLost(std::vector<int> ranks, PeerState fate, const std::string& how) {
  std::erase_if(ranks, [&](int rank) { return !told_lost_.insert(rank).second; });
  std::sort(ranks.begin(), ranks.end());
  if (!ranks.empty() && listens()) listener_.lost(ranks, fate, how);
}

}  // namespace ringreduce::net
