// What ends a message other than its arrival: a mismatch, a rank that is gone, a deadline.  And the
// words in which that is told.
#include "base/error.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "p2p/messenger.h"

namespace ringreduce {

void Messenger::checkMismatch(const Transfer& transfer) {
  const Message& m = transfer.message;
  session_.fail(Failure::kMismatch, transfer.source,
                "ranks disagree on a message: " + session_.who(transfer.source) + " sent " +
                    std::to_string(transfer.sent_count) + " elements of " +
                    name(transfer.sent_dtype) + " with tag " + std::to_string(m.tag) +
                    ", where rank " + options_.shown(rank_) + " receives " +
                    std::to_string(m.count) + " of " + name(m.dtype));
}

// Ends what can no longer happen: messages to and from ranks that are gone.
void Messenger::lookAfterPeers() {
  const std::vector<bool> dead = session_.endedProcesses();
  std::vector<bool> leaving(dead.size()), gone(dead.size());
  bool any = false;
  for (int r = 0; r < size_; ++r) {
    const auto i = static_cast<size_t>(r);
    const Departure departure = session_.departureOf(r);
    leaving[i] = r != rank_ && (dead[i] || departure != Departure::kHere);
    gone[i] = r != rank_ && (dead[i] || departure == Departure::kGone);
    any = any || leaving[i];
  }
  if (!any) return;
  // What they did before they went is in memory by now.
  const auto hasNews = [&] {
    const std::lock_guard lock(mutex_);
    for (int r = 0; r < size_; ++r)
      if (gone[static_cast<size_t>(r)] && engine_.hasNews(r)) return true;
    return false;
  };
  do pass();
  while (hasNews());
  std::vector<Engine::Handle> hopeless;
  {
    const std::lock_guard lock(mutex_);
    for (const Engine::Handle& handle : engine_.pending()) {
      const Message& m = handle->message;
      const int peer = handle->source != kAnySource ? handle->source : m.peer;
      const auto nobody = [&] {
        for (int r = 0; r < size_; ++r)
          if (r != rank_ && !gone[static_cast<size_t>(r)]) return false;
        return size_ > 1;
      };
      const auto i = static_cast<size_t>(peer);
      if (m.way == Message::Way::kSend ? gone[i] || (leaving[i] && !handle->matched)
          : peer == kAnySource         ? nobody()
                                       : gone[i])
        hopeless.push_back(handle);
    }
  }
  for (const Engine::Handle& handle : hopeless) {
    const int peer = handle->source != kAnySource ? handle->source : handle->message.peer;
    const std::vector<int> awaited = peer == kAnySource ? others() : std::vector<int>{peer};
    for (int r : awaited)
      if (dead[static_cast<size_t>(r)] && session_.departureOf(r) == Departure::kHere)
        session_.fail(Failure::kPeerLost, r,
                      session_.who(r) + " is lost: " + session_.howLost(r) + "; rank " +
                          options_.shown(rank_) + " waited to " + describe(*handle));
    fail({handle}, std::make_exception_ptr(
                       Error(Failure::kPeerLost,
                             (awaited.size() == 1 ? session_.who(awaited[0]) + " has"
                                                  : rankList(options_.shownAs(awaited)) + " have") +
                                 " left group '" + options_.name + "'; rank " +
                                 options_.shown(rank_) + " waited to " + describe(*handle))));
  }
}

void Messenger::expect(Delivery& delivery, Nanos timeout) {
  const std::lock_guard lock(mutex_);
  if (delivery.expected_since != 0) return;
  delivery.expected_since = now();
  delivery.timeout = timeout;
}

// What a wait inside torch (Future.wait) cannot look after itself: its deadline and Ctrl-C.
void Messenger::lookAfterExpected() {
  const Nanos time = now();
  Engine::Handle late;
  bool interrupted = false;
  {
    const std::lock_guard lock(mutex_);
    for (const Engine::Handle& handle : engine_.pending()) {
      const auto& delivery = static_cast<const Delivery&>(*handle);
      if (delivery.expected_since == 0) continue;
      interrupted = options_.interrupted && options_.interrupted(delivery.expected_since);
      if (!interrupted && time - delivery.expected_since < delivery.timeout) continue;
      late = handle;
      break;
    }
  }
  if (!late) return;
  const auto& delivery = static_cast<const Delivery&>(*late);
  if (interrupted)
    session_.fail(Failure::kAborted, rank_,
                  session_.who(rank_) + " aborted group '" + options_.name +
                      "': interrupted while it waited to " + describe(delivery));
  timedOut(delivery, delivery.timeout);
}

void Messenger::timedOut(const Delivery& delivery, Nanos timeout) {
  // It may have been this rank that was away, and the others have long said so.
  session_.hearOthers();
  pass();
  if (delivery.isDone()) return;
  const Message& m = delivery.message;
  // The other one may itself wait for a third in a collective.
  const int late = m.peer == kAnySource ? 0 : session_.heldUpBy(m.peer);
  std::string text;
  if (m.peer != kAnySource && late != m.peer)
    text = session_.whereabouts({late}) + " holds up the others; late too: ";
  session_.fail(Failure::kTimeout, late,
                text + missing(delivery) + ": to " + describe(delivery) +
                    " timed out after a timeout of " + seconds(timeout));
}

// ---- words

// The first message that is still to be sent, and who does not receive it.
std::string Messenger::stillSending() {
  Engine::Handle first;
  {
    const std::lock_guard lock(mutex_);
    if (!engine_.pending().empty()) first = *engine_.pending().begin();
  }
  return first ? missing(*first) + ", to which it is to " + describe(*first) : "nothing is left";
}

std::string Messenger::describe(const Transfer& transfer) const {
  const Message& m = transfer.message;
  const bool send = m.way == Message::Way::kSend;
  return std::string(send ? "send " : "receive ") + std::to_string(m.count) +
         (m.count == 1 ? " element" : " elements") + " of " + name(m.dtype) +
         (send ? " to " : " from ") +
         (m.peer == kAnySource ? "any rank" : "rank " + options_.shown(m.peer)) + " with tag " +
         std::to_string(m.tag) + " (message #" + std::to_string(transfer.number) + ")";
}

std::vector<int> Messenger::others() const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r)
    if (r != rank_) ranks.push_back(r);
  return ranks;
}

std::string Messenger::missing(const Transfer& transfer) {
  const Message& m = transfer.message;
  int matched = kAnySource;
  {
    const std::lock_guard lock(mutex_);
    if (transfer.matched) matched = transfer.source != kAnySource ? transfer.source : m.peer;
  }
  if (matched != kAnySource) return session_.whereabouts({matched}) + " stopped moving data";
  if (m.way == Message::Way::kSend) return session_.whereabouts({m.peer}) + " did not receive it";
  if (m.peer != kAnySource) return session_.whereabouts({m.peer}) + " did not send it";
  if (size_ == 1) return "there is no other rank to send it";
  const std::vector<int> stopped = session_.stoppedOf(others());
  return session_.whereabouts(stopped.empty() ? others() : stopped) + " did not send it";
}

}  // namespace ringreduce
