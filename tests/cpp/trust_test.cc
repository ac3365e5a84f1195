// Groups over a network with somebody in it: what he can read, and what becomes of what he changes,
// with encryption and without.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "messages.h"
#include "processes.h"
#include "ranks.h"
#include "relay.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/tls.h"

using namespace ringreduce;
using messages::Letter;
using ranks::failureOf;
using ranks::Setting;

namespace {

const char* tls(bool on) {
  return on ? "1" : "0";
}

// Runs body in a process for each rank, with a relay before each.
processes::Ends relayed(int size, bool encrypted,
                        const std::function<void(Group&, relay::Relay&)>& body) {
  const Setting wire("RINGREDUCE_WIRE", "tcp"), interface("RINGREDUCE_IF", "127.0.0.1"),
      encryption("RINGREDUCE_TLS", tls(encrypted));
  processes::SharedStore store;
  return processes::run(size, [&](int r) {
    const auto acceptor = net::Acceptor::shared("");
    const uint16_t port = acceptor->endpoint().addresses.at(0).port();
    relay::Relay relay;
    relay.start(port);
    relay::RelayedStore changed(store, port, relay.port());
    {
      const auto group = Group::create(changed, r, size, {.name = "test", .timeout = 30 * kSecond});
      body(*group, relay);
    }
    relay.stop();
  });
}

void allEnd(const processes::Ends& ends, const std::string& words = "") {
  for (const std::string& end : ends) {
    if (end.find(words) == std::string::npos || (words.empty() && !end.empty()))
      check::fail(__FILE__, __LINE__, "a rank ended with: '" + end + "'");
  }
}

std::vector<uint8_t> repeated(const std::string& words, size_t bytes) {
  std::vector<uint8_t> all;
  while (all.size() < bytes) all.insert(all.end(), words.begin(), words.end());
  all.resize(bytes);
  return all;
}

void broadcast(Group& group, std::vector<uint8_t>& data) {
  group.run({Broadcast{data.data(), data.size(), DType::kUInt8, 0}});
}

}  // namespace

TEST(what_is_encrypted_cannot_be_read_on_the_way) {
  for (const bool encrypted : {false, true}) {
    if (encrypted && !net::Tls::isBuiltIn()) continue;
    allEnd(relayed(2, encrypted, [&](Group& group, relay::Relay& relay) {
      const auto gradient = repeated("what a collective carries. ", 3'000'000);
      const auto note = repeated("what a message carries. ", 200'000);
      auto data = group.rank() == 0 ? gradient : std::vector<uint8_t>(gradient.size());
      broadcast(group, data);
      CHECK(data == gradient);
      if (group.rank() == 0) messages::send(group, 1, 0, note);
      if (group.rank() == 1) {
        CHECK(messages::receive(group, 0, 0, note.size()) == note);
        CHECK(relay.heard("what a collective carries") == !encrypted);
        CHECK(relay.heard("what a message carries") == !encrypted);
        group.abort("why it ended");
      }
      CHECK(failureOf([&] { group.run({Barrier{}}); }, "why it ended") == Failure::kAborted);
      // Each rank's relay hears what it says back over connections that were made to it as well.
      for (int i = 0; i < 200 && !relay.heard("why it ended") && !encrypted; ++i) usleep(10'000);
      CHECK(relay.heard("ringreduce "));
      if (!encrypted && group.rank() == 0) CHECK(relay.heard("why it ended"));
      if (encrypted) CHECK(!relay.heard("why it ended"));
    }));
  }
}

TEST(what_is_changed_on_the_way_fails_the_operation_and_names_the_connection) {
  if (!net::Tls::isBuiltIn()) return;
  for (const bool message : {false, true}) {
    const processes::Ends ends =
        relayed(2, /*encrypted=*/true, [&](Group& group, relay::Relay& relay) {
          std::vector<uint8_t> data = repeated("data ", 500'000);
          // Once as it should be.
          for (const bool spoil : {false, true}) {
            group.run({Barrier{}});
            if (spoil && group.rank() == 1) relay.spoil(1000);
            group.run({Barrier{}});
            if (!message)
              broadcast(group, data);
            else if (group.rank() == 0)
              messages::send(group, 1, 0, data);
            else
              CHECK(messages::receive(group, 0, 0, data.size()) == data);
            if (!spoil) CHECK(!relay.hasSpoilt());
          }
          // Rank 0 may have sent all before it hears.
          while (!group.failed()) usleep(1000);
          group.run({Barrier{}});
        });
    allEnd(ends, "cannot be decrypted");
    allEnd(ends, "connection from 127.0.0.1:");
  }
}

TEST(what_is_not_encrypted_goes_through_unseen) {
  // So the relay does change what is carried.
  allEnd(relayed(2, /*encrypted=*/false, [&](Group& group, relay::Relay& relay) {
    const auto right = repeated("data ", 500'000);
    auto data = right;
    group.run({Barrier{}});
    if (group.rank() == 1) relay.spoil(1000);
    group.run({Barrier{}});
    broadcast(group, data);
    CHECK((data == right) == (group.rank() == 0));
  }));
}

TEST(encryption_on_some_ranks_only_is_an_error_on_all_and_nothing_is_sent) {
  if (!net::Tls::isBuiltIn()) return;
  for (const int one : {0, 1, 2})
    for (const bool on : {false, true}) {
      const Setting wire("RINGREDUCE_WIRE", "tcp");
      processes::SharedStore store;
      const processes::Ends ends = processes::run(3, [&](int r) {
        const Setting encryption("RINGREDUCE_TLS", tls(on == (r == one)));
        Group::create(store, r, 3, {.name = "test", .timeout = 30 * kSecond});
      });
      allEnd(ends, "RINGREDUCE_TLS=1 is set on ");
      allEnd(ends, "nothing was sent");
    }
}

TEST(encryption_that_is_not_there_is_an_error_on_all) {
  if (net::Tls::isBuiltIn()) return;
  const Setting wire("RINGREDUCE_WIRE", "tcp"), encryption("RINGREDUCE_TLS", "1");
  processes::SharedStore store;
  allEnd(
      processes::run(
          2, [&](int r) { Group::create(store, r, 2, {.name = "test", .timeout = 30 * kSecond}); }),
      "built without OpenSSL 3");
}

TEST(all_that_a_group_does_works_encrypted) {
  if (!net::Tls::isBuiltIn()) return;
  const Setting encryption("RINGREDUCE_TLS", "1");
  processes::SharedStore store;
  const std::string hosts = "aabc";  // two ranks share one
  const processes::Ends ends = processes::run(4, [&](int r) {
    const Setting host("RINGREDUCE_HOSTID", hosts.substr(static_cast<size_t>(r), 1));
    const auto group = Group::create(store, r, 4, {.name = "test", .timeout = 30 * kSecond});
    for (const size_t n : {size_t{1}, size_t{1000}, size_t{1'000'000}}) {
      std::vector<float> x(n, static_cast<float>(r + 1));
      group->run({AllReduce{x.data(), n, DType::kFloat32, ReduceOp::kSum}});
      for (const float value : x) CHECK_EQ(value, 10.0f);
    }
    for (const size_t n : {size_t{1}, size_t{20'000}, size_t{700'000}})
      for (int other = 0; other < 4; ++other) {
        if (other == r) continue;
        const Letter own = messages::letter(r, other, n);
        Letter theirs(n);
        auto there = messages::post(*group, Message::Direction::kSend, other, 1, own);
        auto back = messages::post(*group, Message::Direction::kReceive, other, 1, theirs);
        messages::waitFor(*group, there);
        messages::waitFor(*group, back);
        CHECK(theirs == messages::letter(other, r, n));
      }
    // Nothing is lost at the end, however late it is read.
    const Letter last = messages::letter(r, 99, 100'000);
    auto sent = messages::post(*group, Message::Direction::kSend, (r + 1) % 4, 2, last);
    if (r % 2 == 1) usleep(100'000);
    CHECK(messages::receive(*group, (r + 3) % 4, 2, last.size()) ==
          messages::letter((r + 3) % 4, 99, last.size()));
    messages::waitFor(*group, sent);
    group->shutdown();
  });
  allEnd(ends);
}
