// Messages over sockets: the engine of point-to-point over forwarders, and what a forwarder does
// with rings that are full and ranks that leave.  tests/fuzz/message_fuzz.cc sends it nonsense.
#include "p2p/message_forwarder.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "messages.h"
#include "p2p/engine.h"
#include "p2p/message_connection.h"
#include "sockets.h"

using namespace ringreduce;
using messages::letter;
using messages::Letter;
using net::ChannelEnds;
using net::MessageForwarder;
using net::Reactor;
using sockets::Over;
using sockets::until;

namespace {

class Ranks;

// A rank that is a thread: an engine over a forwarder, which it drives until all of its own is
// over.
class Rank final : MessageForwarder::Listener {
 public:
  Rank(Ranks& ranks, int rank, int size);
  // No thread calls its listener any more once this has returned.
  ~Rank() override { forwarder.reset(); }

  Engine::Handle send(int to, int tag, const Letter& data) {
    return post(Message::Direction::kSend, to, tag, const_cast<uint8_t*>(data.data()), data.size());
  }
  Engine::Handle receive(int from, int tag, Letter& data) {
    return post(Message::Direction::kReceive, from, tag, data.data(), data.size());
  }
  void drive() {
    std::vector<Engine::Handle> finished;
    turn(finished);  // also if all was over as soon as it was posted
    while (!engine->pending().empty()) {
      uint64_t before = 0;
      {
        const std::lock_guard lock(mutex);
        before = stirs;
      }
      if (turn(finished)) continue;
      std::unique_lock lock(mutex);
      // A lost call would be a hang; so would one that never came be.
      if (!changed.wait_for(lock, std::chrono::seconds(20), [&] { return stirs != before; }))
        throw std::runtime_error("nothing has moved for 20 s");
    }
  }
  bool turn(std::vector<Engine::Handle>& finished) {
    std::vector<int> touched;
    const bool moved = engine->progress(finished, touched);
    for (int r : touched) forwarder->wake(r);
    return moved;
  }
  std::vector<std::string> endsOf(int rank) {
    const std::lock_guard lock(mutex);
    return ends[rank];
  }

  std::unique_ptr<MessageForwarder> forwarder;
  std::unique_ptr<Engine> engine;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t stirs = 0;

 private:
  Engine::Handle post(Message::Direction way, int peer, int tag, uint8_t* data, size_t n) {
    auto transfer = std::make_shared<Transfer>(Message{way, peer, tag, data, n, DType::kUInt8});
    engine->post(transfer);
    return transfer;
  }
  void onProgress(int) override {
    const std::lock_guard lock(mutex);
    ++stirs;
    changed.notify_all();
  }
  void broken(int rank, const std::string& how, bool) override {
    const std::lock_guard lock(mutex);
    ends[rank].push_back(how);
    ++stirs;
    changed.notify_all();
  }

  std::unique_ptr<std::byte[]> own_ring_ = std::make_unique<std::byte[]>(kRingBytes);
  std::unique_ptr<Box> own_box_ = std::make_unique<Box>();
  std::map<int, std::vector<std::string>> ends;
};

class Ranks {
 public:
  Ranks(int size, Over o, int slow = 0) : over(o), slow_dial(slow), reactor(Reactor::shared()) {
    ranks.resize(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) {
      auto rank = std::make_unique<Rank>(*this, r, size);
      const std::lock_guard lock(mutex);
      ranks[static_cast<size_t>(r)] = std::move(rank);
    }
  }
  Rank& operator[](int r) { return *ranks[static_cast<size_t>(r)]; }
  void leave(int r) {
    CHECK((*this)[r].forwarder->flush(20 * kSecond));
    end(r);
  }
  void end(int r) {
    std::unique_ptr<Rank> rank;
    const std::lock_guard lock(mutex);
    rank = std::move(ranks[static_cast<size_t>(r)]);
    rank->forwarder.reset();
    gone.push_back(std::move(rank));
  }
  Fd dial(int from, int to, const std::function<void()>& turn) {
    for (int i = 0; i < slow_dial; ++i) {
      turn();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    auto [one, other] = sockets::pair(over);
    const std::lock_guard lock(mutex);
    if (!ranks[static_cast<size_t>(to)]) throw std::runtime_error("connection refused");
    ranks[static_cast<size_t>(to)]->forwarder->accept(from, std::move(other));
    return std::move(one);
  }

  const Over over;
  const int slow_dial;
  const std::shared_ptr<Reactor> reactor;
  std::mutex mutex;
  std::vector<std::unique_ptr<Rank>> ranks, gone;
};

Rank::Rank(Ranks& ranks, int rank, int size)
    : forwarder(MessageForwarder::start(
          ranks.reactor, rank, size,
          [&ranks, rank](int to, int, const std::function<void()>& turn) {
            return ranks.dial(rank, to, turn);
          },
          *this)) {
  std::vector<Engine::Channels> wires;
  for (int r = 0; r < size; ++r) {
    if (r == rank) {
      wires.push_back({.out = {own_ring_.get(), own_box_->filled, own_box_->emptied},
                       .in = {own_ring_.get(), own_box_->filled, own_box_->emptied},
                       .consumed = &own_box_->consumed,
                       .acknowledged = &own_box_->consumed});
      continue;
    }
    const ChannelEnds e = forwarder->ends(r);
    wires.push_back({.out = {e.out_ring, *e.out_filled, *e.out_emptied},
                     .in = {e.in_ring, *e.in_filled, *e.in_emptied},
                     .consumed = e.consumed,
                     .acknowledged = e.acknowledged});
  }
  engine = std::make_unique<Engine>(std::move(wires));
}

// Runs a function for each rank in a thread of its own; throws what one of them threw.
template <class F>
void together(int size, F f) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::string wrong;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        f(r);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        wrong = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (!wrong.empty()) throw std::runtime_error(wrong);
}

constexpr size_t kSizes[] = {0,
                             1,
                             100,
                             kEagerBytes - 1,
                             kEagerBytes,
                             kEagerBytes + 1,
                             kFragmentBytes,
                             kFragmentBytes + 1,
                             kRingBytes,
                             (3 << 20) + 5};

}  // namespace

TEST(every_size_arrives) {
  for (const Over over : {Over::kIpv4, Over::kIpv6, Over::kUnix}) {
    Ranks ranks(2, over);
    together(2, [&](int me) {
      for (const size_t n : kSizes) {
        const Letter out = letter(me, static_cast<int>(n), n);
        Letter in(n);
        ranks[me].send(1 - me, 0, out);
        ranks[me].receive(1 - me, 0, in);
        ranks[me].drive();
        CHECK(in == letter(1 - me, static_cast<int>(n), n));
      }
    });
  }
}

TEST(one_way_only_all_eager_bytes_are_acknowledged) {
  Ranks ranks(2, Over::kIpv4);
  constexpr int kMessages = 400;
  together(2, [&](int me) {
    std::vector<Letter> letters;
    for (int i = 0; i < kMessages; ++i)
      letters.push_back(me == 0 ? letter(0, i, kEagerBytes) : Letter(kEagerBytes));
    for (int i = 0; i < kMessages; ++i)
      if (me == 0)
        ranks[0].send(1, 7, letters[static_cast<size_t>(i)]);
      else
        ranks[1].receive(0, 7, letters[static_cast<size_t>(i)]);
    ranks[me].drive();
    for (int i = 0; i < kMessages; ++i)
      CHECK(letters[static_cast<size_t>(i)] == letter(0, i, kEagerBytes));
  });
  // The budget was used up at least once; what is left untold is not worth a packet.
  const uint64_t consumed = ranks[1].forwarder->ends(0).consumed->observe();
  CHECK(consumed >= kEagerBudget);
  until([&] { return ranks[0].forwarder->ends(1).acknowledged->observe() + (64 << 10) > consumed; },
        "acknowledgements");
}

TEST(nothing_is_lost_of_a_rank_that_has_left) {
  for (const Over over : {Over::kIpv4, Over::kUnix}) {
    Ranks ranks(3, over);
    // Both sent more than sockets hold elsewhere than here; here nobody has looked yet.
    std::vector<Letter> out;
    for (int i = 0; i < 8; ++i) out.push_back(letter(0, i, kEagerBytes));
    for (int i = 0; i < 8; ++i) {
      ranks[0].send(1, 3, out[static_cast<size_t>(i)]);
      ranks[2].send(0, 3, out[static_cast<size_t>(i)]);  // which rank 0 never reads
    }
    ranks[0].drive();
    ranks[2].drive();
    ranks.leave(0);
    until([&] { return ranks[1].forwarder->ends(0).in_filled->observe() > 8 * kEagerBytes; },
          "bytes");
    until([&] { return !ranks[1].endsOf(0).empty(); }, "the end of a connection");
    CHECK_EQ(ranks[1].endsOf(0).back(), std::string("it closed its connection for messages"));
    for (int i = 0; i < 8; ++i) {
      Letter in(kEagerBytes);
      ranks[1].receive(0, 3, in);
      ranks[1].drive();
      CHECK(in == out[static_cast<size_t>(i)]);
    }
  }
}

TEST(a_full_ring_waits_and_goes_on) {
  Ranks ranks(2, Over::kIpv4);
  // Records straight into the ring, more than ring, sockets and ring there hold.
  const ChannelEnds out = ranks[0].forwarder->ends(1), in = ranks[1].forwarder->ends(0);
  ChannelWriter writer(out.out_ring, *out.out_filled, *out.out_emptied);
  ChannelReader reader(in.in_ring, *in.in_filled, *in.in_emptied);
  constexpr size_t kBytes = 5000;
  uint64_t written = 0, read = 0;
  int idle = 0;
  const auto write = [&] {
    while (std::byte* payload = writer.reserve(kBytes)) {
      const Letter data = letter(0, static_cast<int>(written), kBytes);
      std::memcpy(payload, data.data(), kBytes);
      writer.commit(
          {.id = written++, .count = kBytes, .payload = kBytes, .type = MessagePart::Type::kEager});
      ranks[0].forwarder->wake(1);
      idle = 0;
    }
  };
  until(
      [&] {
        for (idle = 0; idle < 50; ++idle) {
          write();
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return !ranks[0].forwarder->flush(5 * kMillisecond) &&
               ranks[0].forwarder->unsent() == std::vector<int>{1};
      },
      "a full ring");
  CHECK(written * kBytes > 2 * kRingBytes);
  const uint64_t stuck = written;
  until(
      [&] {
        write();
        while (const MessagePart* part = reader.front()) {
          CHECK_EQ(part->id, read);
          CHECK(std::memcmp(part + 1, letter(0, static_cast<int>(read), kBytes).data(), kBytes) ==
                0);
          ++read;
          reader.pop(kBytes);
          ranks[1].forwarder->wake(0);
        }
        return read > 2 * stuck;
      },
      "what was stuck");
}

TEST(a_rank_that_cannot_be_reached_is_told_of_and_holds_up_nobody) {
  Ranks ranks(3, Over::kIpv4);
  ranks.end(1);
  const Letter out = letter(0, 0, 100), large = letter(0, 1, 100'000);
  ranks[0].send(1, 0, out);
  std::vector<Engine::Handle> finished;
  ranks[0].turn(finished);
  until([&] { return ranks[0].endsOf(1).size() == 1; }, "a rank that cannot be reached");
  CHECK_EQ(ranks[0].endsOf(1)[0], std::string("connection refused"));
  for (int i = 0; i < 10'000; ++i) ranks[0].send(1, 0, out);  // more than the ring holds
  ranks[0].drive();
  CHECK(ranks[0].forwarder->flush(20 * kSecond));
  CHECK(ranks[0].forwarder->unsent().empty());
  // One that ends while there is a connection.
  ranks[0].send(2, 0, large);
  ranks[0].turn(finished);
  until([&] { return ranks[2].forwarder->ends(0).in_filled->observe() > 0; }, "a request");
  ranks.end(2);
  until([&] { return ranks[0].endsOf(2).size() == 1; }, "a rank that ended");
  CHECK_EQ(ranks[0].endsOf(1).size(), size_t{1});
}

TEST(whoever_leaves_while_it_dials_does_not_wait_for_that) {
  Ranks ranks(2, Over::kIpv4, 100'000);
  const Letter out = letter(0, 0, 10);
  ranks[0].send(1, 0, out);
  std::vector<Engine::Handle> finished;
  ranks[0].turn(finished);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(!ranks[0].forwarder->flush(kMillisecond));
  CHECK(ranks[0].forwarder->unsent() == std::vector<int>{1});
  ranks.end(0);
}

TEST(no_record_is_believed_that_no_rank_sends) {
  using Type = MessagePart::Type;
  CHECK(net::isSound({.count = 10, .payload = 10, .type = Type::kEager}, 64));
  CHECK(net::isSound({.count = 1 << 30, .type = Type::kRequest}, 64));
  CHECK(net::isSound({.payload = 64 - sizeof(MessagePart), .type = Type::kSkip}, 64));
  CHECK(!net::isSound({.payload = 0, .type = Type::kSkip}, 128));
  CHECK(!net::isSound({.count = 11, .payload = 10, .type = Type::kEager}, 64));
  CHECK(!net::isSound({.count = 10, .payload = 10, .type = Type::kEager, .dtype = DType::kInt64},
                      64));
  CHECK(!net::isSound({.count = 100, .payload = 100, .type = Type::kEager}, 64));
  CHECK(!net::isSound({.payload = 1, .type = Type::kGrant}, 64));
  CHECK(!net::isSound({.payload = ~0u, .type = Type::kFragment}, kRingBytes));
  CHECK(!net::isSound({.type = static_cast<Type>(5)}, 64));
  CHECK(!net::isSound({.type = Type::kRequest, .dtype = static_cast<DType>(200)}, 64));
}
