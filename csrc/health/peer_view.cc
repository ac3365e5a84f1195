// What the two views have in common: states, announcements, and texts.
#include "health/peer_view.h"

#include <utility>

#include "base/text.h"
#include "transport/shm/wait.h"

namespace ringreduce {

std::vector<Seat> seatsOf(const HostMemory& host_memory) {
  std::vector<Seat> seats;
  for (const Member& member : host_memory.members) {
    auto* const page = reinterpret_cast<RankPage*>(member.segment->data());
    seats.push_back({.page = page,
                     .process = member.process,
                     .name = "pid " + std::to_string(member.pid) + " on host " + member.host,
                     .pid = 0,
                     .messenger_word = &page->messenger_wake_word});
  }
  return seats;
}

PeerView::PeerView(int rank, std::vector<Seat> seats, const GroupOptions& options, bool leaves_out)
    : rank_(rank),
      size_(static_cast<int>(seats.size())),
      options_(options),
      leaves_out_(leaves_out && size_ > 1),
      peers_(seats.size()) {
  for (size_t r = 0; r < seats.size(); ++r) peers_[r].seat = std::move(seats[r]);
}

// ---- the state of ranks

// The order matters: a rank says that it left before its process ends.
PeerState PeerView::known(int rank) const {
  PeerState state;
  state.observed = peer(rank).observed;
  state.declared =
      static_cast<Declared>(std::atomic_ref(page(rank).departed).load(std::memory_order_acquire));
  state.drained = isDrained(rank, state);
  return state;
}

PeerState PeerView::stateOf(int rank) const {
  look();
  return known(rank);
}

std::vector<PeerState> PeerView::states() const {
  look();
  std::vector<PeerState> all;
  for (int r = 0; r < size_; ++r) all.push_back(known(r));
  return all;
}

bool PeerView::hasExited(int rank) const {
  return stateOf(rank).isLost() && ringreduce::hasExited(peer(rank).seat.process);
}

std::string PeerView::howLost(int rank) const {
  const std::lock_guard lock(mutex_);
  return peer(rank).how;
}

bool PeerView::isStopped(int rank) const {
  const Peer& one = peer(rank);
  const int pid = one.seat.process.pidfd ? pidSeenHere(one.seat.process.pidfd) : one.seat.pid;
  return (pid != 0 && ringreduce::isStopped(pid)) || one.observed == Observed::kStopped;
}

bool PeerView::answers(int rank) const {
  return !isStopped(rank) && await({rank}, kNoOperation - 1, 0, [] { return false; });
}

std::vector<int> PeerView::stoppedOf(const std::vector<int>& ranks) const {
  std::vector<int> stopped;
  for (int r : ranks)
    if (isStopped(r)) stopped.push_back(r);
  return stopped;
}

void PeerView::recordLost(const std::vector<int>& ranks, Observed observed,
                          const std::string& how) const {
  const std::lock_guard lock(mutex_);
  for (int r : ranks) {
    Peer& one = peer(r);
    if (known(r).isLost()) continue;
    one.how = how;
    std::vector<int> others = ranks;
    std::erase(others, r);
    if (!others.empty()) one.how += "; nor can " + options_.rankList(others) + " be reached";
    one.lost_since = now();
    one.observed = observed;
  }
}

std::vector<int> PeerView::live() const {
  std::vector<int> live;
  for (int r = 0; r < size_; ++r)
    if (!isAbsent(r)) live.push_back(r);
  return live;
}

void PeerView::depart(Declared how) {
  std::atomic_ref(page(rank_).departed)
      .store(static_cast<uint32_t>(how), std::memory_order_release);
  tellDeparture(how);
}

void PeerView::onEnded(int rank, const std::string& how) {
  recordLost({rank}, Observed::kEnded, how);
  wakeAll();
}

void PeerView::wakeAll() const {
  for (int r = 0; r < size_; ++r) {
    wake(page(r));
    if (uint32_t* const word = peer(r).seat.messenger_word) wakeSleeper(*word);
  }
}

// ---- operations

void PeerView::record(int rank, uint64_t sequence, const Announcement& call) {
  const std::lock_guard lock(mutex_);
  RankPage& mirror = page(rank);
  Announcement& slot = mirror.announcements[sequence % kAnnouncements];
  // A late message does not replace what came after it.
  if (slot.sequence != kNoOperation && slot.sequence > sequence) return;
  slot = call;
  if (mirror.announced.observe() <= sequence) mirror.announced.publish(sequence + 1);
}

const Announcement* PeerView::callOf(int rank, uint64_t sequence) const {
  const Announcement& slot = page(rank).announcements[sequence % kAnnouncements];
  return hasAnnounced(rank, sequence) && slot.sequence == sequence ? &slot : nullptr;
}

std::vector<Announcement> PeerView::calls(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  std::vector<Announcement> known;
  for (int r = 0; r < size_; ++r) {
    const Announcement* call = callOf(r, sequence);
    known.push_back(call ? *call : Announcement{});
  }
  return known;
}

std::optional<uint64_t> PeerView::findDifference(int rank, uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  sequence = toCompare(rank, sequence);
  const OpSignature *theirs = callOf(rank, sequence), *own = callOf(rank_, sequence);
  return theirs && own && *theirs != *own ? std::optional(sequence) : std::nullopt;
}

PeerView::Census PeerView::census(uint64_t first, uint64_t last, int other,
                                  const OpSignature* sent) const {
  const std::lock_guard lock(mutex_);
  Census found;
  for (found.sequence = first;; ++found.sequence) {
    const uint64_t sequence = found.sequence;
    found.parties.clear();
    for (int r = 0; r < size_; ++r) {
      const OpSignature* theirs = callOf(r, sequence);
      if (!theirs) {
        // A mirror may not hold this operation any more.  A rank that shares memory may be writing
        // the announcement until it has published it.
        const auto isLater = [&](uint64_t held) { return held != kNoOperation && held > sequence; };
        const bool over = hasAnnounced(r, sequence) &&
                          isLater(page(r).announcements[sequence % kAnnouncements].sequence);
        found.complete = found.complete && (over || !known(r).isHere());
        if (!sent || r != other || sequence != last) continue;
        theirs = sent;
      }
      auto party = std::ranges::find_if(found.parties,
                                        [&](const Party& p) { return p.operation == *theirs; });
      if (party == found.parties.end())
        party = found.parties.insert(party, {.operation = *theirs, .ranks = {}});
      party->ranks.push_back(r);
    }
    if (found.parties.size() > 1 || sequence == last) return found;
  }
}

// ---- waits

void PeerView::setAwaitedMessage(const AwaitedMessage& message) {
  std::atomic_ref(page(rank_).awaited_message).store(message.word(), std::memory_order_relaxed);
}

AwaitedMessage PeerView::awaitedMessageOf(int r) const {
  return AwaitedMessage::of(
      std::atomic_ref(page(r).awaited_message).load(std::memory_order_relaxed));
}

void PeerView::publishStreams(const StreamProgress& own) {
  const std::lock_guard lock(mutex_);
  peer(rank_).streams = own;
}

StreamProgress PeerView::streamsOf(int rank) const {
  const std::lock_guard lock(mutex_);
  return peer(rank).streams;
}

// ---- texts

std::string PeerView::textOf(OpSignature operation) const {
  if (operation.root != kNoRoot) operation.root = options_.shownAs(operation.root);
  return describe(operation);
}

std::string PeerView::who(int r) const {
  return "rank " + options_.shown(r) + " (" + peer(r).seat.name + ")";
}

std::string PeerView::howAbsent(int r) const {
  const PeerState state = known(r);
  return who(r) + (state.isLost()   ? " is lost: " + howLost(r)
                   : state.isHere() ? " is left out, since it did not answer in time"
                                    : " has left");
}

std::string PeerView::details(int r) const {
  std::string text = peer(r).seat.name;
  if (isStopped(r)) text += ", stopped";
  const uint64_t done = page(r).announced.observe();
  if (done == 0) return text + ", no collective so far" + waitOf(r);
  OpSignature last;
  {
    const std::lock_guard lock(mutex_);
    last = page(r).announcements[(done - 1) % kAnnouncements];
  }
  return text + ", last seen in " + textOf(last) + waitOf(r);
}

std::string PeerView::waitOf(int r) const {
  const AwaitedMessage message = awaitedMessageOf(r);
  if (message.exists && message.peer < 0) return ", waits to receive from any rank";
  const int awaited = waitsFor(r);
  if (awaited < 0) return "";
  if (!message.exists) return ", waits for data from rank " + options_.shown(awaited);
  return (message.is_send ? ", waits to send to rank " : ", waits to receive from rank ") +
         options_.shown(awaited);
}

std::string PeerView::whereabouts(const std::vector<int>& ranks) const {
  std::string text = options_.rankList(ranks) + " (";
  for (int r : ranks) {
    if (r != ranks.front()) text += "; ";
    text += details(r);
  }
  return text + ")";
}

}  // namespace ringreduce
