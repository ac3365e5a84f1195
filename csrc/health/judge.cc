// What the findings go by, and their texts.
#include "health/judge.h"

#include <algorithm>

#include "base/text.h"

namespace ringreduce {
namespace {

// Some of these ranks may wait for others of them.  Returns those that wait for none.
std::vector<int> freeOf(const PeerView& peers, const std::vector<int>& ranks) {
  std::vector<int> free = ranks;
  std::erase_if(free, [&](int r) { return peers.heldUpBy(r) != r; });
  return free.empty() ? ranks : free;
}

// The ranks that have not come to an operation: those to blame, and the others.  The stopped ones
// are to blame; if none is stopped, those that announced the fewest operations, since the others
// may wait for them; or all, if the operation names all.
struct Absent {
  std::vector<int> last, others;
};

Absent absentFrom(const PeerView& peers, const OpSignature& operation,
                  const std::function<uint64_t(int rank)>& announced) {
  std::vector<int> absent, last;
  uint64_t least = UINT64_MAX;
  for (int r = 0; r < peers.size(); ++r) {
    if (r == peers.rank() || peers.isAbsent(r)) continue;
    const uint64_t come = announced(r);
    if (come > operation.sequence) continue;
    absent.push_back(r);
    if (come < least) last.clear();
    if (come <= least) last.push_back(r);
    least = std::min(least, come);
  }
  const bool names_all = operation.kind == Kind::kMonitoredBarrier;
  const std::vector<int> stopped = peers.stoppedOf(absent);
  last = stopped.empty() || names_all ? freeOf(peers, names_all ? absent : last) : stopped;
  std::erase_if(absent, [&](int r) { return std::ranges::count(last, r) > 0; });
  return {last, absent};
}

// Of the ranks that a message to or from `peer` waits for, the stopped ones, or else all.
std::vector<int> awaited(const PeerView& peers, int peer) {
  if (peer >= 0) return {peer};
  const std::vector<int> others = otherRanks(peers.rank(), peers.size());
  const std::vector<int> stopped = peers.stoppedOf(others);
  return stopped.empty() ? others : stopped;
}

}  // namespace

// ---- late

Finding late(const PeerView& peers, const OpSignature& operation, int waited_for) {
  const auto [last, others] =
      absentFrom(peers, operation, [&](int r) { return peers.page(r).announced.observe(); });
  if (!last.empty())
    return {Failure::kTimeout, last,
            peers.whereabouts(last) + " did not arrive" +
                (others.empty() ? "" : "; late too: " + peers.whereabouts(others))};
  // All have arrived: blame a stopped process, else the rank that has come least far, or between
  // hosts the end of the chain in which one rank waits for another.
  int slowest = waited_for;
  bool stopped = false;
  for (int r = 0; r < peers.size() && !stopped; ++r) {
    if (r == peers.rank() || peers.isAbsent(r)) continue;
    stopped = peers.isStopped(r);
    if (stopped || peers.progressOf(r) < peers.progressOf(slowest)) slowest = r;
  }
  if (!stopped) slowest = peers.heldUpBy(slowest);
  return {Failure::kTimeout,
          {slowest},
          peers.who(slowest) + (stopped ? " arrived but stopped moving data: its process is stopped"
                                        : " arrived but has not done its part")};
}

Finding lateInStream(const PeerView& peers, const OpSignature& operation,
                     const std::function<uint64_t(int rank)>& announced,
                     const std::function<Finding()>& unfinished) {
  if (const std::vector<int> last = absentFrom(peers, operation, announced).last; !last.empty())
    return {Failure::kTimeout, last, peers.whereabouts(last) + " did not arrive"};
  // Before the rank that is waited for, since that one may itself wait for a stopped rank.
  const std::vector<int> stopped = peers.stoppedOf(otherRanks(peers.rank(), peers.size()));
  if (stopped.empty()) return unfinished();
  return {Failure::kTimeout, stopped, peers.whereabouts(stopped) + " came, and then stood still"};
}

Finding undone(const PeerView& peers, int peer, const std::string& missing) {
  const std::vector<int> ranks = awaited(peers, peer);
  return {Failure::kTimeout, ranks,
          ranks.empty() ? "there is no other rank to send it" : peers.whereabouts(ranks) + missing};
}

Finding lateMessage(const PeerView& peers, int peer, const std::string& missing) {
  Finding late = undone(peers, peer, missing);
  if (peer < 0) return late;
  if (const int culprit = peers.heldUpBy(peer); culprit != peer) {
    late.ranks = {culprit};
    late.text = peers.whereabouts({culprit}) + " holds up the others; late too: " + late.text;
  } else if (peers.waitsFor(peer) == peers.rank()) {
    late.text += ", and waits for this rank itself; do the order of calls and the tags match?";
  }
  return late;
}

// ---- differs

Finding differs(const PeerView& peers, PeerView::Census found, int other, const OpSignature* sent) {
  auto& [sequence, parties, complete] = found;
  // All announced the same, but the data that came were of another operation.
  if (parties.size() == 1 && sent) {
    std::erase(parties[0].ranks, other);
    parties.push_back({.operation = *sent, .ranks = {other}});
  }
  const auto right = std::ranges::max_element(
      parties, {}, [](const PeerView::Party& party) { return party.ranks.size(); });
  Finding blame{
      Failure::kMismatch, {}, "ranks disagree on operation #" + std::to_string(sequence) + ": "};
  for (const PeerView::Party& party : parties) {
    if (party.ranks == right->ranks) continue;
    blame.ranks.insert(blame.ranks.end(), party.ranks.begin(), party.ranks.end());
    blame.text +=
        peers.options().rankList(party.ranks) + " called " + peers.textOf(party.operation) + ", ";
  }
  // A later call of the other rank may have replaced the one that differed.
  if (blame.ranks.empty()) {
    std::erase(right->ranks, other);
    blame.ranks = {other};
    blame.text += peers.who(other) + " called another operation, ";
  }
  blame.text += "where " + peers.options().rankList(right->ranks) + " called " +
                peers.textOf(right->operation);
  return blame;
}

// ---- lost

Finding lost(const PeerView& peers, int rank, const std::string& when, const std::string& how) {
  const PeerState state = peers.stateOf(rank);
  const std::string why = state.isLost() ? peers.howLost(rank) : state.isHere() ? how : "";
  return {
      Failure::kPeerLost,
      {rank},
      peers.who(rank) + (why.empty() ? " has left the group" : " is lost: " + why) + " " + when};
}

Finding gone(const PeerView& peers, const std::vector<int>& ranks, const std::string& doing) {
  const std::string waited =
      "; rank " + peers.options().shown(peers.rank()) + " waited to " + doing;
  for (int r : ranks)
    if (const PeerState state = peers.stateOf(r);
        state.isLost() && state.declared == Declared::kHere)
      return {Failure::kPeerLost, {r}, peers.who(r) + " is lost: " + peers.howLost(r) + waited};
  return {Failure::kNone, ranks,
          (ranks.size() == 1 ? peers.who(ranks[0]) + " has"
                             : peers.options().rankList(ranks) + " have") +
              " left group '" + peers.options().name + "'" + waited};
}

}  // namespace ringreduce
