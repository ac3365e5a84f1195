// How messages end that do not arrive: ranks that disagree, deadlines, ranks that leave, abort,
// Ctrl-C.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "messages.h"
#include "ranks.h"

using namespace ringreduce;
using messages::letter;
using messages::Letter;
using messages::post;
using messages::receive;
using messages::send;
using messages::untilDone;
using messages::waitFor;
using ranks::failureOf;
using ranks::sleepMs;
using ranks::waitForFailure;

namespace {

constexpr size_t kLarge = 1 << 20;

Failure failureOfWait(Group& group, const std::shared_ptr<Delivery>& delivery,
                      const std::string& words = "") {
  return failureOf([&] { waitFor(group, delivery); }, words);
}

// Of one that is over.
Failure errorOf(const Delivery& delivery, const std::string& words = "") {
  CHECK(delivery.isDone());
  const auto rethrow = [&] {
    if (delivery.error()) std::rethrow_exception(delivery.error());
  };
  return failureOf(rethrow, words);
}

// Waits for all ranks, unless the group fails just then.
void meet(Group& group) {
  failureOf([&] { group.run({Barrier{}}); });
}

thread_local bool interrupt_this_thread = false;
struct Interrupted {};
void interrupt() {
  if (interrupt_this_thread) throw Interrupted{};
}

}  // namespace

TEST(ranks_that_disagree_on_a_message_all_learn_it) {
  struct Kind {
    size_t sent, expected;
    DType sent_type, expected_type;
    const char* words;
  };
  const Kind kinds[] = {{10, 11, DType::kUInt8, DType::kUInt8,
                         "sent 10 elements of uint8 with tag 4, where rank 2 receives 11 of uint8"},
                        {8, 8, DType::kFloat32, DType::kInt32, "sent 8 elements of float32"},
                        {0, 1, DType::kUInt8, DType::kUInt8, "sent 0 elements"},
                        {kLarge, kLarge + 1, DType::kUInt8, DType::kUInt8, "sent 1048576 elements"},
                        {kLarge, 10, DType::kUInt8, DType::kUInt8, "where rank 2 receives 10"}};
  for (const Kind& kind : kinds)
    for (bool receive_first : {false, true})
      ranks::inGroup(3, [&](Group& group) {
        Letter data(std::max(kind.sent, kind.expected) * 4);
        if (group.rank() == 1) {
          if (receive_first) meet(group);
          const auto sent =
              group.post({Message::Direction::kSend, 2, 4, data.data(), kind.sent, kind.sent_type});
          if (!receive_first) meet(group);
          if (kind.sent == kLarge)
            CHECK(failureOfWait(group, sent, "rank 1 (pid") == Failure::kMismatch);
        }
        if (group.rank() == 2) {
          if (!receive_first) meet(group);
          const auto received = group.post(
              {Message::Direction::kReceive, 1, 4, data.data(), kind.expected, kind.expected_type});
          if (receive_first) meet(group);
          CHECK(failureOfWait(group, received, kind.words) == Failure::kMismatch);
        }
        if (group.rank() == 0) meet(group);
        waitForFailure(group);
        CHECK(failureOf([&] { group.run({Barrier{}}); }, kind.words) == Failure::kMismatch);
        CHECK(failureOf([&] { send(group, 0, 0, data); }, kind.words) == Failure::kMismatch);
      });
}

TEST(a_deadline_names_the_rank_that_is_missing) {
  enum What { kReceive, kReceiveAny, kSend };
  for (What what : {kReceive, kReceiveAny, kSend})
    ranks::inGroup(3,
                   [&](Group& group) {
                     Letter data(kLarge);
                     if (group.rank() == 1) {
                       // A message may be under way for as long as it likes while nobody waits for
                       // it.
                       const auto delivery = post(
                           group,
                           what == kSend ? Message::Direction::kSend : Message::Direction::kReceive,
                           what == kReceiveAny ? kAnySource : 2, 3, data);
                       sleepMs(400);
                       CHECK(!delivery->isDone());
                       // A busy machine may take longer than 0.2 s for a wait of 20 ms.
                       group.setTimeout(60 * kSecond);
                       CHECK(!group.await(*delivery, 20 * kMillisecond));
                       group.setTimeout(200 * kMillisecond);
                       const Nanos began = now();
                       const char* words = what == kSend ? "did not receive it: to send"
                                                         : "did not send it: to receive";
                       CHECK(failureOfWait(group, delivery, words) == Failure::kTimeout);
                       CHECK(now() - began >= 200 * kMillisecond);
                       CHECK(errorOf(*delivery, what == kReceiveAny
                                                    ? "any rank with tag 3"
                                                    : "rank 2 with tag 3") == Failure::kTimeout);
                     } else {
                       waitForFailure(group);
                     }
                     CHECK(failureOf([&] { group.run({Barrier{}}); }, "timeout of 0.2 s") ==
                           Failure::kTimeout);
                   },
                   {.name = "test", .timeout = 200 * kMillisecond});
}

TEST(a_deadline_holds_however_much_other_traffic_there_is) {
  ranks::inGroup(2, [](Group& group) {
    group.setTimeout(200 * kMillisecond);
    const int me = group.rank(), other = 1 - me;
    std::atomic<Failure> how{Failure::kNone};
    std::thread waiter([&] { how = failureOf([&] { receive(group, other, 77, 10); }); });
    // The waiter moves all of this, and it never ends.
    const auto start = std::chrono::steady_clock::now();
    const Letter out(4 << 20);
    std::vector<Letter> in(4, out);
    std::vector<std::shared_ptr<Delivery>> posted(2 * in.size());
    const auto streaming = [&] {
      for (size_t i = 0; i < posted.size(); ++i) {
        if (posted[i] && !posted[i]->isDone()) continue;
        posted[i] = i < in.size() ? post(group, Message::Direction::kReceive, other, 1, in[i])
                                  : post(group, Message::Direction::kSend, other, 1, out);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    };
    Failure mine = Failure::kNone;
    while (mine == Failure::kNone &&
           std::chrono::steady_clock::now() - start < std::chrono::seconds(10))
      mine = failureOf(streaming);
    if (mine == Failure::kNone) group.abort("the deadline has been overlooked");
    waiter.join();
    group.shutdown();  // nothing is written to these letters any more
    CHECK(mine == Failure::kTimeout);
    CHECK(how == Failure::kTimeout);
  });
}

TEST(a_rank_that_leaves_is_missed_only_by_who_waits_for_it) {
  ranks::inGroup(3, [](Group& group) {
    const int me = group.rank();
    if (me == 2) {
      for (int i = 0; i < 20; ++i) send(group, 0, 1, letter(2, i, 100));
      const Letter large = letter(2, 20, kLarge);
      post(group, Message::Direction::kSend, 0, 1, large);
      return group.shutdown();  // lasts until rank 0 has the large one
    }
    if (me == 0) {
      sleepMs(30);
      Letter in(100), from_any(100);
      const auto any = post(group, Message::Direction::kReceive, kAnySource, 9, from_any);
      const auto waiting = post(group, Message::Direction::kReceive, 2, 2, in);
      for (int i = 0; i < 20; ++i) CHECK(receive(group, 2, 1, 100) == letter(2, i, 100));
      CHECK(receive(group, 2, 1, kLarge) == letter(2, 20, kLarge));
      // Nobody waits for this one: the group's thread notices.
      untilDone(*waiting);
      CHECK(errorOf(*waiting, "has left group 'test'; rank 0 waited to receive") ==
            Failure::kPeerLost);
      for (int again = 0; again < 2; ++again)
        CHECK(failureOf([&] { receive(group, 2, 1, 100); }, "rank 2 (") == Failure::kPeerLost);
      CHECK(failureOf([&] { send(group, 2, 1, letter(0, 0, kLarge)); }, "rank 2 (") ==
            Failure::kPeerLost);
      CHECK(!any->isDone());  // there is still rank 1
      send(group, 1, 1, letter(0, 1, kLarge));
      waitFor(group, any);
      CHECK_EQ(any->source, 1);
      CHECK(from_any == letter(1, 1, 100));
    } else {
      CHECK(receive(group, 0, 1, kLarge) == letter(0, 1, kLarge));
      send(group, 0, 9, letter(1, 1, 100));
    }
    CHECK(!group.failed());
  });
}

TEST(a_receive_from_any_ends_when_all_others_have_left) {
  ranks::inGroup(3, [](Group& group) {
    if (group.rank() > 0) return;
    CHECK(failureOf([&] { receive(group, kAnySource, 1, 100); }, "ranks 1 and 2 have left") ==
          Failure::kPeerLost);
    CHECK(!group.failed());
  });
}

TEST(a_rank_that_has_been_destroyed_stays_gone) {
  ranks::MemoryStore store;
  ranks::inThreads(2, [&](int r) {
    auto group = Group::create(store, r, 2, {.name = "test", .timeout = 5 * kSecond});
    if (r == 1) {
      group->shutdown();
      group->shutdown();
      return group.reset();
    }
    sleepMs(100);
    CHECK(failureOf([&] { receive(*group, 1, 1, 10); }, "has left") == Failure::kPeerLost);
  });
}

TEST(unreceived_messages_do_not_keep_ranks_from_leaving) {
  for (int round = 0; round < 10; ++round)
    ranks::inGroup(3, [](Group& group) {
      const int me = group.rank();
      const Letter large(kLarge), small(100);
      std::vector<std::shared_ptr<Delivery>> sent;
      for (int to = 0; to < 3; ++to) {
        sent.push_back(post(group, Message::Direction::kSend, to, 1, large));
        CHECK(group.await(*post(group, Message::Direction::kSend, to, 1, small), 5 * kSecond));
      }
      group.run({Barrier{}});  // what is sent to a rank that has left is another matter
      group.shutdown();
      for (int to = 0; to < 3; ++to) {
        const Failure how = errorOf(*sent[static_cast<size_t>(to)]);
        CHECK(how == (to == me ? Failure::kAborted : Failure::kPeerLost));
      }
    });
}

TEST(leaving_gives_up_receives_and_refuses_more) {
  ranks::inGroup(2, [](Group& group) {
    const int me = group.rank(), other = 1 - me;
    std::vector<Letter> in(50, Letter(kLarge));
    std::vector<std::shared_ptr<Delivery>> posted;
    std::atomic<int> completed{0}, went_well{0};
    for (Letter& data : in) {
      posted.push_back(group.post({Message::Direction::kReceive, other, 1, data.data(), data.size(),
                                   DType::kUInt8, [&] { ++went_well; }}));
      posted.back()->setCompletion(
          [&](std::exception_ptr error) { completed += error != nullptr; });
    }
    group.run({Barrier{}});
    // Some may arrive, or begin to, just when the receiver leaves.
    std::vector<std::shared_ptr<Delivery>> sent;
    const Letter out(kLarge);
    for (int i = 0; i < 50 && me == 0; ++i)
      sent.push_back(post(group, Message::Direction::kSend, 1, 1, out));
    group.shutdown();
    int given_up = 0;
    for (const auto& delivery : posted) {
      CHECK(delivery->isDone());
      given_up += delivery->error() != nullptr;
    }
    CHECK_EQ(completed.load(), given_up);
    CHECK_EQ(went_well.load() + given_up, 50);
    if (me == 0) CHECK_EQ(given_up, 50);
    for (const auto& delivery : sent) CHECK(delivery->isDone());
    CHECK(failureOf([&] { receive(group, other, 1, 1); }, "destroyed") == Failure::kAborted);
    CHECK(failureOf([&] { send(group, other, 1, Letter(1)); }, "destroyed") == Failure::kAborted);
  });
}

TEST(many_threads_lose_the_same_rank) {
  constexpr int kThreads = 6, kEach = 20;
  for (int round = 0; round < 5; ++round)
    ranks::inGroup(2, [](Group& group) {
      if (group.rank() == 1) return sleepMs(20);
      std::atomic<int> completed{0};
      std::vector<Letter> in(kThreads * kEach, Letter(8));
      std::vector<std::shared_ptr<Delivery>> posted(in.size());
      ranks::inThreads(kThreads, [&](int t) {
        const auto begin = static_cast<size_t>(t * kEach), end = begin + kEach;
        for (size_t i = begin; i < end; ++i) {
          posted[i] = post(group, Message::Direction::kReceive, 1, t, in[i]);
          if (!posted[i]->setCompletion([&](std::exception_ptr) { ++completed; })) ++completed;
        }
        for (size_t i = begin; i < end; ++i)
          CHECK(failureOfWait(group, posted[i], "rank 1 (") == Failure::kPeerLost);
      });
      group.shutdown();
      CHECK_EQ(completed.load(), kThreads * kEach);
    });
}

TEST(abort_ends_messages_everywhere) {
  ranks::inGroup(3, [](Group& group) {
    const int next = (group.rank() + 1) % 3;
    Letter in(10), unwatched(10), large(kLarge);
    const auto waited = post(group, Message::Direction::kReceive, next, 1, in);
    const auto left_alone = post(group, Message::Direction::kReceive, kAnySource, 2, unwatched);
    const auto sent = post(group, Message::Direction::kSend, next, 3, large);
    meet(group);
    // The verdict is read by this thread, by the group's, and by one that runs collectives.
    const auto ticket = group.rank() < 2 ? group.submit({Barrier{}}, nullptr) : nullptr;
    std::thread aborter([&] {
      sleepMs(50);
      if (group.rank() == 2) group.abort("had enough");
    });
    CHECK(failureOfWait(group, waited, "had enough") == Failure::kAborted);
    aborter.join();
    CHECK(failureOf([&] { group.run({Barrier{}}); }, "had enough") == Failure::kAborted);
    untilDone(*left_alone);
    untilDone(*sent);
    CHECK(errorOf(*left_alone, "had enough") == Failure::kAborted);
    CHECK(errorOf(*sent, "had enough") == Failure::kAborted);
    if (ticket) CHECK(group.await(*ticket, kNever));
    CHECK(failureOf([&] { send(group, next, 1, in); }, "had enough") == Failure::kAborted);
  });
}

TEST(verdicts_reach_messages_while_collectives_start) {
  for (int round = 0; round < 20; ++round)
    ranks::inGroup(2, [](Group& group) {
      const int other = 1 - group.rank();
      std::thread receiver([&] {
        Letter in(10);
        failureOf(
            [&] {
              for (;;) receive(group, other, 1, 10);
            },
            "had enough");
      });
      std::thread aborter([&] {
        sleepMs(2);
        if (other == 0) group.abort("had enough");
      });
      Failure how = Failure::kNone;
      while (how == Failure::kNone)
        how = failureOf([&] { group.run({MonitoredBarrier{}}); }, "had enough");
      CHECK(how == Failure::kAborted);
      aborter.join();
      receiver.join();
    });
}

TEST(ctrl_c_ends_a_wait_and_the_group) {
  for (bool large : {false, true})
    ranks::inGroup(
        2,
        [large](Group& group) {
          Letter data(large ? kLarge : 10);
          const auto receiving =
              post(group, Message::Direction::kReceive, 1 - group.rank(), 1, data);
          meet(group);
          if (group.rank() == 0) {
            interrupt_this_thread = true;
            CHECK_THROWS(Interrupted, group.await(*receiving, kNever));
            interrupt_this_thread = false;
            CHECK(receiving->isDone());  // its memory is free
          } else {
            CHECK(failureOfWait(group, receiving, "interrupted while it waited to receive") ==
                  Failure::kAborted);
          }
          CHECK(group.failure() == Failure::kAborted);
        },
        {.name = "test", .interrupt = interrupt});
}

TEST(messages_to_ranks_that_are_not_there) {
  ranks::inGroup(2, [](Group& group) {
    const int other = 1 - group.rank();
    Letter data(10);
    for (int peer : {-2, -1, 2}) {
      const std::string words = "rank " + std::to_string(peer) + " in a group of 2";
      CHECK(failureOf([&] { send(group, peer, 0, data); }, words) == Failure::kArgument);
      if (peer != kAnySource)
        CHECK(failureOf([&] { receive(group, peer, 0, 10); }, words) == Failure::kArgument);
    }
    send(group, other, 0, letter(group.rank(), 0, 10));
    CHECK(receive(group, other, 0, 10) == letter(other, 0, 10));
  });
}

TEST(a_messages_completion_may_drop_the_group) {
  ranks::MemoryStore store;
  ranks::inThreads(2, [&](int r) {
    auto group = Group::create(store, r, 2, {.name = "test"});
    Letter in(10);
    std::atomic<bool> released{false}, done{false};
    const auto received = post(*group, Message::Direction::kReceive, 1 - r, 1, in);
    const bool registered = received->setCompletion([&, held = group](std::exception_ptr) mutable {
      while (!released) std::this_thread::yield();
      held.reset();
      done = true;
    });
    CHECK(registered);
    group->run({Barrier{}});
    post(*group, Message::Direction::kSend, 1 - r, 1, letter(r, 1, 10));
    group.reset();
    released = true;
    while (!done) std::this_thread::yield();
    CHECK(in == letter(1 - r, 1, 10));
  });
}
