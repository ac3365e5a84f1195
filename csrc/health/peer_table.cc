// States from processes and news, announcements, and texts.
#include "health/peer_table.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "base/op_signature.h"
#include "base/text.h"

namespace ringreduce {
std::vector<Seat> seatsOf(const Membership& membership) {
  std::vector<Seat> seats;
  for (const Member& member : membership.members)
    seats.push_back({.page = reinterpret_cast<RankPage*>(member.segment->data()),
                     .process = member.process,
                     .name = "pid " + std::to_string(member.pid) + " on host " + member.host,
                     .pid = 0});
  return seats;
}

PeerTable::PeerTable(int rank, std::vector<Seat> seats, const GroupOptions& options,
                     PeerChannel* channel, bool leaves_out)
    : rank_(rank),
      size_(static_cast<int>(seats.size())),
      options_(options),
      channel_(channel),
      leaves_out_(leaves_out),
      peers_(seats.size()) {
  for (size_t r = 0; r < seats.size(); ++r) {
    processes_.push_back(seats[r].process);
    peers_[r].seat = std::move(seats[r]);
  }
}

// ---- the state of ranks

// An ended process has passed full barriers of the kernel, so its stores are visible.  That loads
// after this function see them, on AArch64 too, follows from `observed`: its store comes after
// poll(), and known() loads it before the process's flags are read.
void PeerTable::readProcesses() const {
  // First those that another rank has left out: it has done so to one that has ended, too.
  std::vector<bool> left_out(static_cast<size_t>(size_));
  for (int r = 0; r < size_ && leaves_out_; ++r)
    left_out[static_cast<size_t>(r)] = ringreduce::isLeftOut(page(r));
  const std::vector<bool> all = ended(processes_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || known(r).isLost()) continue;
    if (all[static_cast<size_t>(r)])
      recordLost({r}, Observed::kEnded, howEnded(peer(r).seat.process));
    else if (left_out[static_cast<size_t>(r)])
      recordLost({r}, Observed::kUnreachable, kDidNotAnswer);
  }
}

// The order matters: a rank says that it left before its process ends.
PeerState PeerTable::known(int rank) const {
  PeerState state;
  state.observed = peer(rank).observed;
  state.drained = peer(rank).drained;
  state.declared =
      static_cast<Declared>(std::atomic_ref(page(rank).departed).load(std::memory_order_acquire));
  if (!areMirrors()) state.drained = state.isLost() || state.declared == Declared::kGone;
  return state;
}

PeerState PeerTable::stateOf(int rank) const {
  readProcesses();
  return known(rank);
}

std::vector<PeerState> PeerTable::states() const {
  readProcesses();
  std::vector<PeerState> all;
  for (int r = 0; r < size_; ++r) all.push_back(known(r));
  return all;
}

bool PeerTable::hasExited(int rank) const {
  return stateOf(rank).isLost() && ringreduce::hasExited(peer(rank).seat.process);
}

std::string PeerTable::howLost(int rank) const {
  const std::lock_guard lock(mutex_);
  return peer(rank).how;
}

bool PeerTable::isStopped(int rank) const {
  const Peer& one = peer(rank);
  const int pid = one.seat.process.pidfd ? pidSeenHere(one.seat.process.pidfd) : one.seat.pid;
  return (pid != 0 && ringreduce::isStopped(pid)) || one.observed == Observed::kStopped;
}

bool PeerTable::answers(int rank) const {
  return !isStopped(rank) &&
         (!areMirrors() || ask({rank}, kNoOperation - 1, 0, [] { return false; }));
}

bool PeerTable::ask(const std::vector<int>& ranks, uint64_t since, Nanos least,
                    const std::function<bool()>& over) const {
  if (!areMirrors()) return true;
  const Nanos asked = now(), until = asked + limits::kAnswer;
  channel_->askForProgress(since);
  const auto answered = [&] {
    // Ranks do not repeat an answer at once.
    return std::ranges::all_of(ranks,
                               [&](int r) { return peer(r).last_progress >= asked - kSecond / 2; });
  };
  while ((now() < asked + least || !answered()) && !over() && now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return answered();
}

std::vector<int> PeerTable::stoppedOf(const std::vector<int>& ranks) const {
  std::vector<int> stopped;
  for (int r : ranks)
    if (isStopped(r)) stopped.push_back(r);
  return stopped;
}

std::vector<int> PeerTable::stoppedOnHost() const {
  std::vector<int> stopped;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && peer(r).seat.pid != 0 && isStopped(r)) stopped.push_back(r);
  return stopped;
}

void PeerTable::recordLost(const std::vector<int>& ranks, Observed observed,
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

std::vector<int> PeerTable::live() const {
  std::vector<int> live;
  for (int r = 0; r < size_; ++r)
    if (!isAbsent(r)) live.push_back(r);
  return live;
}

// ---- operations

void PeerTable::record(int rank, uint64_t sequence, const Announcement& call) {
  const std::lock_guard lock(mutex_);
  RankPage& mirror = page(rank);
  Announcement& slot = mirror.announcements[sequence % kAnnouncements];
  // A late message does not replace what came after it.
  if (slot.sequence != kNoOperation && slot.sequence > sequence) return;
  slot = call;
  if (mirror.announced.observe() <= sequence) mirror.announced.publish(sequence + 1);
}

std::vector<Announcement> PeerTable::calls(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  std::vector<Announcement> known;
  for (int r = 0; r < size_; ++r) {
    const Announcement& call = page(r).announcements[sequence % kAnnouncements];
    known.push_back(call.sequence == sequence ? call : Announcement{});
  }
  return known;
}

std::optional<uint64_t> PeerTable::findDifference(int rank, uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  const uint64_t announced = page(rank).announced.observe();
  if (areMirrors()) sequence = announced - 1;
  if (announced == 0 || announced <= sequence) return std::nullopt;
  const OpSignature& theirs = page(rank).announcements[sequence % kAnnouncements];
  const OpSignature& own = page(rank_).announcements[sequence % kAnnouncements];
  const bool comparable = !areMirrors() || theirs.sequence == own.sequence;
  return comparable && theirs != own ? std::optional(sequence) : std::nullopt;
}

PeerTable::Census PeerTable::census(uint64_t first, uint64_t last, int other,
                                    const OpSignature* sent, bool losses_allowed) const {
  const std::lock_guard lock(mutex_);
  Census found;
  for (found.sequence = first;; ++found.sequence) {
    const uint64_t sequence = found.sequence;
    found.parties.clear();
    for (int r = 0; r < size_; ++r) {
      const OpSignature* theirs = nullptr;
      if (page(r).announced.observe() > sequence) {
        theirs = &page(r).announcements[sequence % kAnnouncements];
        // A mirror may not hold this operation, or not any more.
        if (areMirrors() && theirs->sequence != sequence) {
          const bool over = theirs->sequence != kNoOperation && theirs->sequence > sequence;
          found.complete = found.complete && (over || !known(r).isHere());
          theirs = nullptr;
        }
      } else {
        found.complete = found.complete && losses_allowed && !known(r).isHere();
      }
      if (!theirs && sent && r == other && sequence == last) theirs = sent;
      if (!theirs) continue;
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

void PeerTable::setAwaitedMessage(const AwaitedMessage& message) {
  std::atomic_ref(page(rank_).awaited_message).store(message.word(), std::memory_order_relaxed);
}

AwaitedMessage PeerTable::awaitedMessageOf(int r) const {
  return AwaitedMessage::of(
      std::atomic_ref(page(r).awaited_message).load(std::memory_order_relaxed));
}

int PeerTable::waitsFor(int r) const {
  if (!areMirrors()) return awaitedMessageOf(r).peer;
  return now() - peer(r).last_progress > limits::kTold ? -1 : peer(r).waits_for.load();
}

int PeerTable::heldUpBy(int rank) const {
  // A stopped rank may have received by now what it waited for.
  for (int steps = 0; areMirrors() && steps < size_ && !isStopped(rank); ++steps) {
    const int next = waitsFor(rank);
    if (next < 0 || next == rank_) break;
    rank = next;
  }
  return rank;
}

void PeerTable::publishStreams(const StreamProgress& own) {
  const std::lock_guard lock(mutex_);
  peer(rank_).streams = own;
}

StreamProgress PeerTable::streamsOf(int rank) const {
  const std::lock_guard lock(mutex_);
  return peer(rank).streams;
}

// ---- texts

std::string PeerTable::textOf(OpSignature operation) const {
  if (operation.root != kNoRoot) operation.root = options_.shownAs(operation.root);
  return describe(operation);
}

std::string PeerTable::who(int r) const {
  return "rank " + options_.shown(r) + " (" + peer(r).seat.name + ")";
}

std::string PeerTable::howAbsent(int r) const {
  const PeerState state = known(r);
  return who(r) + (state.isLost()   ? " is lost: " + howLost(r)
                   : state.isHere() ? " is left out, since it did not answer in time"
                                    : " has left");
}

std::string PeerTable::details(int r) const {
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

std::string PeerTable::waitOf(int r) const {
  const AwaitedMessage message = awaitedMessageOf(r);
  if (message.exists && message.peer < 0) return ", waits to receive from any rank";
  const int awaited = waitsFor(r);
  if (awaited < 0) return "";
  if (!message.exists) return ", waits for data from rank " + options_.shown(awaited);
  return (message.is_send ? ", waits to send to rank " : ", waits to receive from rank ") +
         options_.shown(awaited);
}

std::string PeerTable::whereabouts(const std::vector<int>& ranks) const {
  std::string text = options_.rankList(ranks) + " (";
  for (int r : ranks) {
    if (r != ranks.front()) text += "; ";
    text += details(r);
  }
  return text + ")";
}

// ---- news

void PeerTable::checkDrained(int rank) {
  const PeerState state = known(rank);
  const bool sends_no_more =
      state.declared == Declared::kGone || state.observed == Observed::kEnded;
  if (sends_no_more && !channel_->mayReceiveFrom(rank)) peer(rank).drained = true;
}

void PeerTable::recordProgress(int rank, const net::Progress& progress) {
  for (const Announcement& one : progress.earlier) record(rank, one.sequence, one);
  if (progress.announced > 0) record(rank, progress.announced - 1, progress.last);
  const std::lock_guard lock(mutex_);
  Peer& one = peer(rank);
  one.waits_for = progress.waits_for;
  one.streams = progress.streams;
  if (!progress.stopped) one.heard = now();
  if (!known(rank).isLost()) one.observed = progress.stopped ? Observed::kStopped : Observed::kHere;
  last_answer_ = one.last_progress = now();
}

net::Progress PeerTable::ownProgress(uint64_t since) const {
  const std::lock_guard lock(mutex_);
  RankPage& own = page(rank_);
  net::Progress progress;
  progress.waits_for = waits_for_.load(std::memory_order_relaxed);
  if (progress.waits_for < 0) progress.waits_for = awaitedMessageOf(rank_).peer;
  progress.streams = peer(rank_).streams;
  progress.announced = own.announced.observe();
  const uint64_t announced = progress.announced;
  if (announced == 0) return progress;
  progress.last = own.announcements[(announced - 1) % kAnnouncements];
  since = std::max(since, announced - std::min(announced, kAnnouncements));
  for (; since < announced - 1; ++since)
    progress.earlier.push_back(own.announcements[since % kAnnouncements]);
  return progress;
}

}  // namespace ringreduce
