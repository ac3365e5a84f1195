// Finds the ranks that are late, and the ranks that called another operation.
#include "health/blame.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/text.h"

namespace ringreduce {
namespace {

// The sum of all flags that the rank has moved: how far it has come.
uint64_t progressOf(const PeerTable& peers, int r) {
  RankPage& own = peers.page(r);
  return own.posted.observe() + own.reduced.observe() + own.done.observe() +
         peers.page((r + 1) % peers.size()).inbound.observe() +
         peers.page((r + peers.size() - 1) % peers.size()).outbound.observe();
}

// Some of these ranks may wait for others of them.  Returns those that wait for none.
std::vector<int> freeOf(const PeerTable& peers, std::vector<int> ranks) {
  std::vector<int> free = ranks;
  std::erase_if(free, [&](int r) { return peers.heldUpBy(r) != r; });
  return free.empty() ? ranks : free;
}

// `absent` are the ranks that have not arrived.  Returns the ranks to blame: the stopped ones; if
// none is stopped, those that announced the fewest operations, since the others may wait for them.
std::vector<int> lastOf(const PeerTable& peers, const std::vector<int>& absent) {
  std::vector<int> last = peers.stoppedOf(absent);
  if (!last.empty()) return last;
  uint64_t least = UINT64_MAX;
  for (int r : absent) {
    const uint64_t come = peers.page(r).announced.observe();
    if (come > least) continue;
    if (come < least) last.clear();
    least = come;
    last.push_back(r);
  }
  return freeOf(peers, std::move(last));
}

}  // namespace

Laggards laggardsOf(const PeerTable& peers, const OpSignature& operation, int waited_for) {
  Laggards late;
  std::vector<int> absent;
  for (int r = 0; r < peers.size(); ++r)
    if (r != peers.rank() && !peers.isAbsent(r) && !peers.hasAnnounced(r, operation.sequence))
      absent.push_back(r);
  if (!absent.empty()) {
    const bool names_all = operation.kind == Kind::kMonitoredBarrier;
    late.ranks = names_all ? freeOf(peers, absent) : lastOf(peers, absent);
    late.text = peers.whereabouts(late.ranks) + " did not arrive";
    std::erase_if(absent, [&](int r) { return std::ranges::count(late.ranks, r) > 0; });
    if (!absent.empty()) late.text += "; late too: " + peers.whereabouts(absent);
    return late;
  }
  // All have arrived: blame a stopped process, else the rank that has come least far, or between
  // hosts the end of the chain in which one rank waits for another.
  int slowest = waited_for;
  bool stopped = false;
  for (int r = 0; r < peers.size() && !stopped; ++r) {
    if (r == peers.rank() || peers.isAbsent(r)) continue;
    stopped = peers.isStopped(r);
    if (stopped || (!peers.areMirrors() && progressOf(peers, r) < progressOf(peers, slowest)))
      slowest = r;
  }
  if (!stopped) slowest = peers.heldUpBy(slowest);
  late.ranks = {slowest};
  late.text =
      peers.who(slowest) + (stopped ? " arrived but stopped moving data: its process is stopped"
                                    : " arrived but has not done its part");
  return late;
}

int firstOfAny(const PeerTable& peers) {
  const std::vector<int> others = otherRanks(peers.rank(), peers.size());
  if (others.empty()) return kNobody;
  const std::vector<int> stopped = peers.stoppedOf(others);
  return stopped.empty() ? others.front() : stopped.front();
}

Disagreement disagreementOf(const PeerTable& peers, PeerTable::Census found, int other,
                            const OpSignature* sent) {
  auto& [sequence, parties, complete] = found;
  // All announced the same, but the data that came were of another operation.
  if (parties.size() == 1 && sent) {
    std::erase(parties[0].ranks, other);
    parties.push_back({.operation = *sent, .ranks = {other}});
  }
  const auto right = std::max_element(parties.begin(), parties.end(),
                                      [](const PeerTable::Party& a, const PeerTable::Party& b) {
                                        return a.ranks.size() < b.ranks.size();
                                      });
  std::string text = "ranks disagree on operation #" + std::to_string(sequence) + ": ";
  int culprit = -1;
  for (const PeerTable::Party& party : parties) {
    if (party.ranks == right->ranks) continue;
    if (culprit < 0) culprit = party.ranks.front();
    text +=
        peers.options().rankList(party.ranks) + " called " + peers.textOf(party.operation) + ", ";
  }
  if (culprit < 0) culprit = peers.rank();  // cannot happen: a mismatch makes at least two parties
  text += "where " + peers.options().rankList(right->ranks) + " called " +
          peers.textOf(right->operation);
  return {culprit, text};
}

}  // namespace ringreduce
