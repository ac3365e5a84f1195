// What an arbiter makes of news from other hosts, and when it asks them for their progress.
#include "health/arbiter.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "health/judge.h"
#include "health/mirror_view.h"
#include "health/shared_view.h"
#include "ranks.h"

using namespace ringreduce;

namespace {

struct Others final : PeerChannel {
  void broadcastFailure(const GroupFailure&) override {}
  void depart(Declared) override {}
  void askForProgress(uint64_t since) override {
    ++asked;
    if (since != kNoOperation && answer) answer(since);
  }
  void wakePeer(int) override {}
  bool mayReceiveFrom(int) override { return connected; }
  void callLater(Nanos, std::function<void()> then) override { later = std::move(then); }
  int asked = 0;
  bool connected = false;
  std::function<void()> later;
  std::function<void(uint64_t since)> answer;
};

// One rank's arbiter, with mirrors of all.
struct One {
  // `min_ranks`: all share memory, and the group survives losses.
  One(int rank, int size, int min_ranks = 0)
      : pages(std::make_unique<RankPage[]>(static_cast<size_t>(size))) {
    std::vector<Seat> seats;
    for (int r = 0; r < size; ++r) {
      RankPage& page = pages[static_cast<size_t>(r)];
      for (Announcement& announcement : page.announcements) announcement.sequence = kNoOperation;
      seats.push_back({.page = &page, .process = {}, .name = "a process", .pid = 0});
    }
    std::unique_ptr<PeerView> view;
    if (min_ranks > 0)
      view = std::make_unique<SharedView>(rank, std::move(seats), options, true);
    else
      view = std::make_unique<MirrorView>(rank, std::move(seats), options, others);
    mirrors = dynamic_cast<MirrorView*>(view.get());
    arbiter = std::make_unique<Arbiter>(
        std::move(view), min_ranks > 0 ? AfterLoss::kIsAbsent : AfterLoss::kFails, min_ranks);
  }
  void see(int rank, uint64_t announced, const Announcement& last, int waits_for,
           const std::vector<Announcement>& earlier = {}) const {
    mirrors->onProgress(rank, {announced, last, earlier, waits_for, false});
  }
  // Waits for a rank that does not come.
  void poll(int rank) const {
    auto never = [] { return false; };
    arbiter->poll(rank, Ready(never));
  }

  const GroupOptions options{.name = "test", .stall = kNever};
  Others others;
  const std::unique_ptr<RankPage[]> pages;
  std::unique_ptr<Arbiter> arbiter;
  MirrorView* mirrors = nullptr;  // its view, if they do not share memory
};

Announcement barrier(uint64_t sequence) {
  return {{.sequence = sequence}};
}

}  // namespace

TEST(what_is_heard_late_is_no_mismatch) {
  One one(0, 2);
  const uint64_t ahead = 6 + kAnnouncements;
  // Rank 1 is where this rank is too; of an earlier operation it is heard only now.
  one.see(1, ahead + 1, barrier(ahead), -1);
  one.see(1, 7, barrier(6), -1);
  one.arbiter->begin(barrier(ahead), kNever, false);
  one.poll(1);
  CHECK_EQ(one.pages[1].announcements[ahead % kAnnouncements].sequence, ahead);
  // The same where this rank is told by the data itself.
  one.arbiter->verify(1, one.arbiter->current());
  one.see(1, 7, barrier(6), -1);
  one.poll(1);
}

TEST(what_stands_there_of_an_earlier_operation_is_not_compared) {
  One one(0, 2);
  one.see(1, 7, barrier(6), -1);
  const uint64_t ahead = 6 + kAnnouncements;
  one.pages[1].announced.publish(ahead + 1);
  one.arbiter->begin(barrier(ahead), kNever, false);
  one.poll(1);
}

TEST(another_operation_is_a_mismatch_however_it_is_heard) {
  Announcement other = barrier(3);
  other.count = 7;
  for (const bool by_data : {false, true}) {
    One one(0, 2);
    one.arbiter->begin(barrier(3), kNever, false);
    const auto kind = ranks::failureOf(
        [&] {
          if (by_data) one.arbiter->verify(1, other);
          one.see(1, 4, other, -1);
          one.poll(1);
        },
        "ranks disagree on operation #3");
    CHECK(kind == Failure::kMismatch);
  }
  // And where it is of a much later one, of the same place in the mirror.
  One one(0, 2);
  one.arbiter->begin(barrier(3), kNever, false);
  other.sequence = 3 + kAnnouncements;
  CHECK(ranks::failureOf([&] { one.arbiter->verify(1, other); },
                         "ranks disagree on operation #3") == Failure::kMismatch);
}

TEST(a_mismatch_names_a_rank_though_its_call_was_replaced) {
  const One one(0, 3);
  const OpSignature all = {.sequence = 7, .kind = Kind::kBarrier};
  const Finding found = differs(
      one.arbiter->peers(), {.sequence = 7, .parties = {{all, {0, 1, 2}}}}, /*other=*/2, nullptr);
  CHECK(found.ranks == std::vector<int>{2});
  CHECK(found.text.find("rank 2 (a process) called another operation, where rank") !=
        std::string::npos);
}

TEST(what_another_has_asked_is_not_asked_again) {
  One heard(1, 4), unheard(1, 4);
  for (One* one : {&heard, &unheard}) one->arbiter->begin(barrier(0), kNever, false);
  for (const Nanos end = now() + 2500 * kMillisecond; now() < end;) {
    heard.see(3, 1, barrier(0), -1);
    heard.poll(2);
    unheard.poll(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK_EQ(heard.others.asked, 0);
  CHECK(unheard.others.asked > 0);
}

TEST(who_called_what_is_asked_of_all) {
  // Rank 1 differs in operation #1, in which rank 2 needed nobody, and rank 0 still waits.
  One one(2, 3);
  std::vector<Announcement> calls;
  for (uint64_t sequence = 0; sequence < 3; ++sequence) {
    Announcement call = barrier(sequence);
    call.count = sequence;
    one.arbiter->begin(call, kNever, false);
    one.arbiter->end();
    calls.push_back(one.arbiter->current());
  }
  Announcement others_call = calls[1];
  others_call.count = 100;
  one.others.answer = [&](uint64_t since) {
    CHECK_EQ(since, uint64_t{0});
    one.see(0, 2, calls[1], -1, {calls[0]});
    one.see(1, 2, others_call, -1, {calls[0]});
  };
  for (const bool by_data : {true, false}) {
    const auto kind = ranks::failureOf(
        [&] {
          if (by_data) one.arbiter->verify(1, others_call);
          one.arbiter->check();
        },
        "ranks disagree on operation #1: rank 1 called barrier #1, where ranks 0 and 2 called");
    CHECK(kind == Failure::kMismatch);
  }
}

TEST(a_rank_that_went_on_is_held_to_what_it_called) {
  // Rank 1 has not waited in operation #0, which it called otherwise than rank 0, and its next data
  // are of #1.
  One one(0, 3);
  one.arbiter->begin(barrier(0), kNever, false);
  const Announcement own = one.arbiter->current();
  Announcement theirs = own, next = barrier(1);
  theirs.count = 3;
  one.others.answer = [&](uint64_t) {
    one.see(1, 2, next, -1, {theirs});
    one.see(2, 1, own, -1);
  };
  CHECK(ranks::failureOf([&] { one.arbiter->verify(1, next); },
                         "ranks disagree on operation #0: rank 1 called barrier #0, where ranks 0 "
                         "and 2 called barrier #0") == Failure::kMismatch);
}

TEST(a_rank_that_was_left_behind_is_held_to_what_it_called) {
  // In operation #0 rank 1 waits for rank 2, which had nothing to do for it there: the others, who
  // called another one, are in the next by now and wait for rank 1.
  One one(0, 3);
  one.arbiter->begin(barrier(0), kNever, false);
  one.arbiter->end();
  const Announcement own = one.arbiter->current();
  Announcement theirs = own;
  theirs.root = 2;
  one.arbiter->begin(barrier(1), kNever, false);
  one.see(2, 2, one.arbiter->current(), 1);
  one.see(1, 1, own, 2);
  one.poll(1);  // one that is only late is waited for
  One again(0, 3);
  again.arbiter->begin(barrier(0), kNever, false);
  again.arbiter->end();
  again.arbiter->begin(barrier(1), kNever, false);
  again.others.answer = [&](uint64_t) { again.see(2, 2, again.arbiter->current(), 1, {own}); };
  again.see(1, 1, theirs, 2);
  CHECK(ranks::failureOf([&] { again.poll(1); },
                         "ranks disagree on operation #0: rank 1 called barrier #0") ==
        Failure::kMismatch);
}

TEST(a_rank_is_gone_once_all_its_messages_have_arrived) {
  One one(0, 4);
  Arbiter& arbiter = *one.arbiter;
  one.others.connected = true;
  one.mirrors->onPeersLost({1}, Observed::kEnded, "its process ended");
  CHECK(arbiter.stateOf(1).isLost() && !arbiter.stateOf(1).isGone());
  one.mirrors->onDeparture(2, Declared::kLeaving);
  CHECK(!arbiter.stateOf(2).isHere() && !arbiter.stateOf(2).isLost());
  one.mirrors->onDeparture(2, Declared::kGone);
  CHECK(arbiter.stateOf(2).mayStillSend() && !arbiter.stateOf(2).isGone());
  // A rank that cannot be reached sends nothing more.
  one.mirrors->onPeersLost({3}, Observed::kUnreachable, "no packet from its host came for 3 s");
  CHECK(arbiter.stateOf(3).isGone());
  one.others.connected = false;
  for (int r : {1, 2, 3}) {
    one.mirrors->onDisconnect(r, "nobody knows why", false);
    CHECK(arbiter.stateOf(r).isGone());
    one.others.later();
  }
  CHECK_EQ(arbiter.peers().howLost(3), std::string("no packet from its host came for 3 s"));
  CHECK_EQ(arbiter.peers().howLost(1), std::string("its process ended"));
  CHECK(!arbiter.failed());
}

TEST(a_rank_that_failed_and_left_has_failed) {
  for (const bool fails : {false, true}) {
    One one(0, 2);
    if (fails)
      one.mirrors->onRemoteFailure(
          {.kind = Failure::kTimeout, .culprit = 0, .reporter = 1, .text = "late"});
    one.mirrors->onDeparture(1, Declared::kGone);
    const auto of_message = [&] { throw one.arbiter->errorOfGone({1}, "receive a message"); };
    CHECK(ranks::failureOf(of_message, fails ? "late" : "has left group 'test'") ==
          (fails ? Failure::kTimeout : Failure::kPeerLost));
  }
}

TEST(a_connection_that_ended_unexplained_ends_the_group) {
  One one(0, 2);
  one.mirrors->onDisconnect(1, "nobody knows why", false);
  one.others.later();
  CHECK(ranks::failureOf([&] { one.arbiter->check(); },
                         "rank 1 (a process) is lost: nobody knows") == Failure::kPeerLost);
}

TEST(a_rank_that_is_lost_ends_a_wait_for_another) {
  One one(0, 3);
  Arbiter& arbiter = *one.arbiter;
  arbiter.begin(barrier(0), kNever, false);
  bool come = false;
  auto ready = [&] { return come; };
  arbiter.idle(Ready(ready));
  one.mirrors->onDeparture(1, Declared::kGone);  // it may have left after this operation
  const Nanos heard = now();
  one.mirrors->onPeersLost({2}, Observed::kEnded, "its process ended");
  const auto wait = [&] {
    for (const Nanos end = heard + 10 * kSecond; now() < end;) arbiter.idle(Ready(ready));
  };
  CHECK(
      ranks::failureOf(
          wait, "rank 2 (a process) is lost: its process ended before it was seen in barrier #0") ==
      Failure::kPeerLost);
  // What was on its way from there had time to come.
  CHECK(now() - heard >= 500 * kMillisecond);
}

// Others learn whose message it waits for, and that it waits for none any more.
TEST(the_progress_of_a_rank_names_the_rank_that_it_waits_for) {
  One one(0, 3);
  CHECK_EQ(one.mirrors->ownProgress(kNoOperation).waits_for, -1);
  for (const bool is_send : {false, true})
    for (const int peer : {-1, 0, 1, 2}) {
      one.mirrors->setAwaitedMessage({.exists = true, .is_send = is_send, .peer = peer});
      CHECK_EQ(one.mirrors->ownProgress(kNoOperation).waits_for, peer);
      one.mirrors->setAwaitedMessage({});
      CHECK_EQ(one.mirrors->ownProgress(kNoOperation).waits_for, -1);
    }
  one.see(1, 0, {}, 2);
  CHECK(one.arbiter->peers().whereabouts({1}) ==
        "rank 1 (a process, no collective so far, waits for data from rank 2)");
}

TEST(a_rank_that_is_lost_does_not_end_a_wait_that_is_over) {
  One one(0, 2);
  one.arbiter->begin(barrier(0), kNever, false);
  one.mirrors->onPeersLost({1}, Observed::kUnreachable, "no packet from its host came for 3 s");
  auto over = [] { return true; };
  for (const Nanos end = now() + kSecond; now() < end;) one.arbiter->idle(Ready(over));
  CHECK(!one.arbiter->failed());
}

TEST(who_holds_up_another_is_found_along_the_chain) {
  One one(0, 4);
  Arbiter& arbiter = *one.arbiter;
  CHECK_EQ(arbiter.peers().heldUpBy(3), 3);
  // Rank 3 waits for rank 2, and that for rank 1, which says nothing.
  one.see(3, 1, barrier(0), 2);
  one.see(2, 1, barrier(0), 1);
  CHECK_EQ(arbiter.peers().heldUpBy(3), 1);
  // A chain that comes back here ends before.
  one.see(1, 1, barrier(0), 0);
  CHECK_EQ(arbiter.peers().heldUpBy(3), 1);
  // Nor is one without an end followed for ever.
  one.see(1, 1, barrier(0), 3);
  CHECK(arbiter.peers().heldUpBy(3) > 0);
}

TEST(who_waits_for_a_late_one_is_not_blamed_with_it) {
  One one(1, 4);
  one.arbiter->begin(barrier(5), kMillisecond, false);
  one.see(0, 5, barrier(4), -1);
  one.see(2, 5, barrier(4), 0);
  one.see(3, 6, barrier(5), -1);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(ranks::failureOf([&] { one.poll(0); }, "rank 0 (a process, last seen in barrier #4) did") ==
        Failure::kTimeout);
}

// In a group that survives losses.  Rank 2 has announced the operation, so nothing of it is
// missing, and left; rank 1 lives, but does not come.
TEST(a_rank_that_is_gone_does_not_put_off_the_timeout) {
  One one(0, 3, 2);
  one.pages[2].announced.publish(1);
  one.arbiter->begin(barrier(0), kMillisecond, false);
  one.pages[2].announcements[0] = one.arbiter->current();
  one.pages[2].departed = static_cast<uint32_t>(Declared::kGone);
  const auto wait = [&] {
    for (const Nanos end = deadlineIn(20 * kSecond); now() < end;) one.poll(1);
  };
  CHECK(ranks::failureOf(wait, "rank 1 (a process, no collective so far) did not arrive") ==
        Failure::kTimeout);
  CHECK(!isLeftOut(one.pages[1]));  // with rank 2 gone, min_ranks would not be left
  CHECK(!one.arbiter->isAbsent(2));
}

TEST(a_rank_that_comes_a_little_late_costs_no_other_its_place) {
  One one(0, 3, 1);
  one.arbiter->begin(barrier(0), kMillisecond, false);
  const Nanos come = now() + 100 * kMillisecond;
  auto ready = [&] { return now() >= come; };
  while (!ready()) one.arbiter->poll(1, Ready(ready));
  // Neither has a thread that answers.
  CHECK(!isLeftOut(one.pages[1]) && !isLeftOut(one.pages[2]));
}

TEST(no_rank_is_left_out_if_too_few_would_be_left) {
  One one(0, 3, 2);
  one.arbiter->begin(barrier(0), kMillisecond, false);
  const auto wait = [&] {
    for (const Nanos end = deadlineIn(20 * kSecond); now() < end;) one.poll(1);
  };
  // Neither has a thread that answers.
  CHECK(ranks::failureOf(wait, "ranks 1 and 2 (") == Failure::kTimeout);
  CHECK(!isLeftOut(one.pages[1]) && !isLeftOut(one.pages[2]));
}

TEST(a_group_has_failed_for_a_rank_that_is_left_out) {
  One one(1, 3, 1);
  CHECK(!one.arbiter->failed() && one.arbiter->failure() == Failure::kNone);
  leaveOut(one.pages[1]);
  CHECK(one.arbiter->failed() && one.arbiter->failure() == Failure::kPeerLost);
  CHECK_EQ(one.arbiter->culprit(), 1);
  CHECK(ranks::failureOf([&] { one.arbiter->check(); }, "was left out of group 'test'") ==
        Failure::kPeerLost);
}
