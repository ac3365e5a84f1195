// Messages between ranks that are threads: every size, any order, any number at a time, with
// collectives beside them.  What ends them is in messages_end_test.cc.
#include "messages.h"

#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace ringreduce;
using messages::letter;
using messages::Letter;
using messages::post;
using messages::receive;
using messages::send;
using messages::waitFor;

namespace {

// Where something else is done with a message: nothing to send with it, as little as goes eagerly
// and as is announced, as fits one fragment, and what comes in many.
constexpr size_t kSizes[] = {0,
                             1,
                             100,
                             kEagerBytes - 1,
                             kEagerBytes,
                             kEagerBytes + 1,
                             kFragmentBytes - 1,
                             kFragmentBytes,
                             kFragmentBytes + 1,
                             kRingBytes,
                             3 * kFragmentBytes,
                             (3 << 20) + 5};

}  // namespace

TEST(every_size_arrives_whoever_comes_first) {
  ranks::inGroup(2, [](Group& group) {
    const int me = group.rank(), other = 1 - me;
    int tag = 0;
    for (size_t n : kSizes)
      for (int late : {-1, 0, 1}) {
        ++tag;
        if (me == late) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        if (me == 0) {
          const Letter out = letter(0, tag, n);
          waitFor(group, post(group, Message::Direction::kSend, other, tag, out));
          CHECK(out == letter(0, tag, n));
        } else {
          CHECK(receive(group, other, tag, n) == letter(0, tag, n));
        }
      }
  });
}

TEST(both_send_first) {
  ranks::inGroup(2, [](Group& group) {
    const int me = group.rank(), other = 1 - me;
    for (size_t n : kSizes) {
      const Letter out = letter(me, 0, n);
      const auto sent = post(group, Message::Direction::kSend, other, 0, out);
      // A small one is on its way whether or not it is received, so this blocks nobody.
      if (n <= kEagerBytes) waitFor(group, sent);
      CHECK(receive(group, other, 0, n) == letter(other, 0, n));
      waitFor(group, sent);
    }
  });
}

TEST(many_in_flight_with_many_tags_are_awaited_in_any_order) {
  constexpr int kRanks = 3, kTags = 7, kEach = 12;
  ranks::inGroup(kRanks, [](Group& group) {
    const int me = group.rank();
    std::mt19937 random(static_cast<unsigned>(me) + 1);
    struct Flight {
      Letter data, wanted;
      std::shared_ptr<Delivery> delivery;
    };
    std::vector<Flight> flights;
    flights.reserve(2 * kRanks * kTags * kEach);
    const auto sizeOf = [](int from, int to, int tag, int i) {
      return kSizes[static_cast<size_t>(from * 5 + to * 3 + tag + i) % (std::size(kSizes) - 1)];
    };
    // Tags in another order on each side; those of one tag in the order in which they are sent.
    std::vector<int> order(kRanks * kTags);
    for (auto way : {Message::Direction::kSend, Message::Direction::kReceive}) {
      std::iota(order.begin(), order.end(), 0);
      for (int i = 0; i < kEach; ++i) {
        std::shuffle(order.begin(), order.end(), random);
        for (int which : order) {
          const int peer = which / kTags, tag = which % kTags;
          const bool out = way == Message::Direction::kSend;
          const size_t n = out ? sizeOf(me, peer, tag, i) : sizeOf(peer, me, tag, i);
          Letter wanted = letter(out ? me : peer, tag * 100 + i, n);
          flights.push_back({out ? wanted : Letter(n), wanted, nullptr});
          flights.back().delivery = post(group, way, peer, tag, flights.back().data);
        }
      }
    }
    std::shuffle(flights.begin(), flights.end(), random);
    for (Flight& flight : flights) {
      waitFor(group, flight.delivery);
      CHECK(flight.data == flight.wanted);
    }
  });
}

TEST(from_any_rank_in_the_order_of_each_and_nobody_is_left_out) {
  constexpr int kEach = 200;
  for (size_t n : {size_t{8}, kEagerBytes + 8})
    ranks::inGroup(4, [n](Group& group) {
      if (group.rank() > 0) {
        std::vector<Letter> out;
        std::vector<std::shared_ptr<Delivery>> sent;
        for (int i = 0; i < kEach; ++i) {
          out.push_back(letter(group.rank(), i, n));
          sent.push_back(post(group, Message::Direction::kSend, 0, 5, out.back()));
        }
        group.run({Barrier{}});
        for (const auto& delivery : sent) waitFor(group, delivery);
        return;
      }
      group.run({Barrier{}});
      std::vector<int> next(4);
      int first_of_last = 0;
      for (int i = 0; i < 3 * kEach; ++i) {
        Letter in(n);
        const auto delivery = post(group, Message::Direction::kReceive, kAnySource, 5, in);
        waitFor(group, delivery);
        const int from = delivery->source;
        CHECK(from >= 1 && from <= 3);
        auto& count = next[static_cast<size_t>(from)];
        CHECK(in == letter(from, count, n));
        if (count++ == 0) first_of_last = i;
      }
      CHECK(next == (std::vector<int>{0, kEach, kEach, kEach}));
      // All were there from the start, so none may wait until another rank's are through.
      CHECK(first_of_last < kEach);
    });
}

TEST(receives_from_any_and_from_one_match_in_the_order_of_posting) {
  ranks::inGroup(2, [](Group& group) {
    if (group.rank() == 1) {
      group.run({Barrier{}});
      for (int i = 0; i < 4; ++i) send(group, 0, 3, letter(1, i, 100));
      send(group, 0, 4, letter(1, 4, 100));
      return;
    }
    std::vector<Letter> in(5, Letter(100));
    const int peers[] = {kAnySource, 1, kAnySource, 1};
    std::vector<std::shared_ptr<Delivery>> posted;
    for (size_t i = 0; i < 4; ++i)
      posted.push_back(post(group, Message::Direction::kReceive, peers[i], 3, in[i]));
    posted.push_back(post(group, Message::Direction::kReceive, kAnySource, 4, in[4]));
    group.run({Barrier{}});
    for (size_t i = 5; i-- > 0;) {
      waitFor(group, posted[i]);
      CHECK_EQ(posted[i]->source, 1);
      CHECK(in[i] == letter(1, static_cast<int>(i), 100));
    }
  });
}

TEST(messages_to_oneself) {
  for (int P : {1, 2})
    ranks::inGroup(P, [](Group& group) {
      const int me = group.rank();
      for (size_t n : kSizes)
        for (bool receive_first : {false, true})
          for (int from : {me, kAnySource}) {
            const Letter out = letter(me, 1, n);
            Letter in(n);
            std::shared_ptr<Delivery> received, sent;
            if (receive_first) received = post(group, Message::Direction::kReceive, from, 1, in);
            sent = post(group, Message::Direction::kSend, me, 1, out);
            if (!receive_first) received = post(group, Message::Direction::kReceive, from, 1, in);
            waitFor(group, received);
            waitFor(group, sent);
            CHECK(in == out);
            CHECK_EQ(received->source, me);
          }
    });
}

TEST(collectives_and_messages_do_not_wait_for_each_other) {
  ranks::inGroup(3, [](Group& group) {
    const int me = group.rank(), next = (me + 1) % 3, prev = (me + 2) % 3;
    // Messages under way, large ones too, while collectives run in this thread and in the worker.
    for (size_t n : {size_t{64}, size_t{1} << 20}) {
      Letter in(n);
      const Letter out = letter(me, 0, n);
      const auto received = post(group, Message::Direction::kReceive, prev, 0, in);
      std::vector<float> data(20000, 1.f);
      group.run({AllReduce{data.data(), data.size(), DType::kFloat32, ReduceOp::kSum}});
      const auto sent = post(group, Message::Direction::kSend, next, 0, out);
      const auto ticket =
          group.submit({AllReduce{data.data(), data.size(), DType::kFloat32, ReduceOp::kSum}}, {});
      group.run({Barrier{}});
      CHECK(data == std::vector<float>(20000, 9.f));
      CHECK(ticket->isDone());
      waitFor(group, received);
      waitFor(group, sent);
      CHECK(in == letter(prev, 0, n));
    }
    // A collective that cannot end before messages have been exchanged.
    int32_t sum = 1;
    std::shared_ptr<OperationHandle> ticket;
    if (me != 0) ticket = group.submit({AllReduce{&sum, 1, DType::kInt32, ReduceOp::kSum}}, {});
    for (size_t n : kSizes) {
      const Letter out = letter(me, 9, n);
      const auto sent = post(group, Message::Direction::kSend, next, 9, out);
      CHECK(receive(group, prev, 9, n) == letter(prev, 9, n));
      waitFor(group, sent);
    }
    if (me == 0) ticket = group.submit({AllReduce{&sum, 1, DType::kInt32, ReduceOp::kSum}}, {});
    CHECK(group.await(*ticket, kNever));
    CHECK_EQ(sum, 3);
  });
}

TEST(many_threads_wait_for_messages_of_one_group) {
  constexpr int kThreads = 6, kRounds = 60;
  ranks::inGroup(2, [](Group& group) {
    const int me = group.rank(), other = 1 - me;
    ranks::inThreads(kThreads, [&](int t) {
      std::mt19937 random(static_cast<unsigned>(t));  // the same on both sides
      for (int i = 0; i < kRounds; ++i) {
        const size_t n = random() % 4 == 0 ? 50000 : random() % 300;
        const bool first = (i + t + me) % 2 == 0;
        if (first) send(group, other, t, letter(me, t, n));
        CHECK(receive(group, other, t, n) == letter(other, t, n));
        if (!first) send(group, other, t, letter(me, t, n));
      }
    });
  });
}

// The group's own thread moves messages on, also after it has gone to sleep for want of any.
TEST(messages_arrive_though_nobody_waits) {
  ranks::inGroup(2, [](Group& group) {
    const int me = group.rank(), other = 1 - me;
    for (size_t n : {size_t{10}, size_t{1} << 20}) {
      Letter in(n);
      const Letter out = letter(me, 2, n);
      const auto received = post(group, Message::Direction::kReceive, other, 2, in);
      const auto sent = post(group, Message::Direction::kSend, other, 2, out);
      messages::untilDone(*received);
      messages::untilDone(*sent);
      CHECK(in == letter(other, 2, n));
      std::this_thread::sleep_for(std::chrono::milliseconds(me == 0 ? 5 : 120));
    }
  });
}

// While somebody waits for one message the group's thread rests; the others are its own again
// afterwards.
TEST(messages_arrive_after_somebody_has_waited_for_another) {
  ranks::inGroup(2, [](Group& group) {
    const size_t n = 1 << 20;
    if (group.rank() == 0) {
      Letter first(8), second(n);
      const auto later = post(group, Message::Direction::kReceive, 1, 2, second);
      waitFor(group, post(group, Message::Direction::kReceive, 1, 1, first));
      messages::untilDone(*later);
      CHECK(second == letter(1, 2, n));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      send(group, 0, 1, letter(1, 1, 8));
      send(group, 0, 2, letter(1, 2, n));
    }
  });
}

// More than the budget of small messages lies with nobody but their sender, so these wait; the
// others are with the receiver, and those wait for nothing.
TEST(what_a_receiver_keeps_is_bounded) {
  constexpr int kTags = 3, kEach = 1000;
  constexpr size_t kBytes = 1000;
  ranks::inGroup(2, [](Group& group) {
    if (group.rank() == 1) {
      std::vector<Letter> out;
      std::vector<std::shared_ptr<Delivery>> sent;
      for (int i = 0; i < kTags * kEach; ++i) {
        out.push_back(letter(i % kTags, i / kTags, kBytes));
        sent.push_back(post(group, Message::Direction::kSend, 0, i % kTags, out.back()));
      }
      // They are either with rank 0 or announced by now, so this one comes after all of them.
      send(group, 0, kTags, letter(1, 0, 0));
      group.run({Barrier{}});
      size_t gone = 0;
      for (const auto& delivery : sent) gone += delivery->isDone();
      CHECK_EQ(gone, kEagerBudget / kBytes);
      group.run({Barrier{}});
      for (const auto& delivery : sent) waitFor(group, delivery);
      // Now that they have been received there is room again.
      const auto again = post(group, Message::Direction::kSend, 0, 0, out.front());
      CHECK(again->isDone());
      return;
    }
    receive(group, 1, kTags, 0);
    group.run({Barrier{}});
    group.run({Barrier{}});
    for (int tag = kTags; tag-- > 0;)
      for (int i = 0; i < kEach; ++i)
        CHECK(receive(group, 1, tag, kBytes) == letter(tag, i, kBytes));
    receive(group, 1, 0, kBytes);
  });
}

TEST(completions_are_called_once_and_may_use_the_group) {
  ranks::inGroup(2, [](Group& group) {
    const int me = group.rank(), other = 1 - me;
    std::atomic<int> after_receive{0}, after_send{0}, completed{0};
    Letter in(100000), answer(100);
    const auto received = group.post({Message::Direction::kReceive, other, 0, in.data(), in.size(),
                                      DType::kUInt8, [&] { ++after_receive; }});
    const bool registered = received->setCompletion([&](std::exception_ptr error) {
      if (error || after_receive != 1) return;
      const Letter back = letter(me, 1, 100);
      waitFor(group, post(group, Message::Direction::kSend, other, 1, back));
      waitFor(group, post(group, Message::Direction::kReceive, other, 1, answer));
      ++completed;
    });
    CHECK(registered);
    const Letter out = letter(me, 0, in.size());
    const auto sent =
        group.post({Message::Direction::kSend, other, 0, const_cast<uint8_t*>(out.data()),
                    out.size(), DType::kUInt8, [&] { ++after_send; }});
    waitFor(group, sent);
    waitFor(group, received);
    CHECK_EQ(after_receive.load(), 1);
    CHECK_EQ(after_send.load(), 1);
    CHECK(!received->setCompletion([](std::exception_ptr) {}));  // too late
    while (completed == 0) std::this_thread::yield();
    CHECK(answer == letter(other, 1, 100));
  });
}
