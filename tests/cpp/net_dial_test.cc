// Dialling another process: addresses that refuse or are silent, and who answers there.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "transport/tcp/acceptor.h"

#define CHECK_OWN_MAIN
#include "base/error.h"
#include "check.h"
#include "door.h"

using namespace ringreduce;
using namespace ringreduce::net;
using namespace door;

TEST(a_refused_address_is_passed_over) {
  Group group;
  group.admit();
  Endpoint endpoint{{deserted()}};
  for (const Address& address : group.acceptor->endpoint().addresses)
    endpoint.addresses.push_back(address);
  for (size_t first = 0; first < 3; ++first) {
    DialOptions options;
    options.address = first;
    CHECK(dial(endpoint, callerOf(group.word), group.secret, options, "rank 1"));
    group.inbox.next();
  }
  const Address nobody = deserted();
  const std::string text =
      failure([&] { dial({{nobody}}, callerOf(group.word), group.secret, {}, "rank 3"); });
  CHECK(text.starts_with("cannot reach rank 3 at " + nobody.text() + ": connection refused; "));
  CHECK(contains(failure([&] { dial({}, callerOf(group.word), group.secret, {}, "rank 3"); }),
                 "gave no address"));
}

TEST(a_silent_address_takes_its_share_only) {
  Group group;
  group.admit();
  const Hole full;
  const Address& hole = full.address;
  // And one that takes it and is silent.
  const Other silent;
  Endpoint endpoint{{hole, silent.listener.addresses[0], group.acceptor->endpoint().addresses[0]}};
  DialOptions options;
  options.timeout = 1800 * kMillisecond;
  CHECK(dial(endpoint, callerOf(group.word), group.secret, options, "rank 1"));
  endpoint.addresses.pop_back();
  options.timeout = 300 * kMillisecond;
  const std::string text =
      failure([&] { dial(endpoint, callerOf(group.word), group.secret, options, "rank 1"); });
  CHECK(contains(text, hole.text() + ": no answer within 0."));
  CHECK(contains(text, silent.listener.addresses[0].text() + ": no handshake within 0."));
}

TEST(whoever_was_dropped_tries_again) {
  Group group;
  const Other other;
  Socket ours;
  std::thread caller(
      [&] { ours = dial(other.endpoint(), callerOf(group.word), group.secret, {}, "rank 1"); });
  for (int i = 0; i < 3; ++i) {
    const Fd dropped = other.accept();
    if (i == 1) receiveSome(dropped, 96);
    const linger reset{.l_onoff = 1, .l_linger = 0};
    if (i == 2) setsockopt(dropped.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }
  const Fd theirs = other.accept();
  Handshake machine = Handshake::acceptor([&](const PeerHello&) { return group.secret; });
  while (machine.state() == Handshake::State::kGoesOn) {
    const std::string bytes = receiveSome(theirs, machine.wants());
    machine.feed(std::as_bytes(std::span(bytes)));
    sendAll(theirs, machine.takeOutput());
  }
  caller.join();
  CHECK(ours && machine.state() == Handshake::State::kDone);
}

TEST(who_answers_without_the_secret_is_not_believed) {
  Group group;
  // A mirror, and a machine with another secret.
  for (int kind = 0; kind < 2; ++kind) {
    const Other other;
    std::string text;
    std::thread caller([&] {
      text = failure(
          [&] { dial(other.endpoint(), callerOf(group.word), group.secret, {}, "rank 1"); });
    });
    const Fd theirs = other.accept();
    const std::string hello = receiveSome(theirs, 96);
    Handshake machine = Handshake::acceptor([&](const PeerHello&) { return randomSecret(); });
    machine.feed(std::as_bytes(std::span(hello)));
    sendAll(theirs, kind == 0 ? hello : machine.takeOutput());
    CHECK_EQ(receiveAll(theirs), "");  // no proof is given away
    caller.join();
    CHECK(contains(text, "another secret"));
  }
}

TEST(a_turn_may_give_up) {
  const Other silent;
  DialOptions options;
  int turns = 0;
  options.context = &turns;
  options.poll = [](void* context) {
    if (++*static_cast<int*>(context) == 5) throw std::runtime_error("enough");
  };
  CHECK_THROWS(std::runtime_error,
               dial(silent.endpoint(), callerOf(randomGroup()), randomSecret(), options, "rank 1"));
  CHECK_EQ(turns, 5);
}

TEST(who_is_stopped_is_waited_for_and_who_is_deaf_is_not) {
  // A stopped process: its system takes connections, and nothing is said.
  const Other silent;
  const Hole hole;
  DialOptions options;
  options.timeout = kNever;
  options.deaf = 300 * kMillisecond;
  Nanos enough = now() + 900 * kMillisecond;
  options.context = &enough;
  options.poll = [](void* context) {
    if (now() >= *static_cast<Nanos*>(context)) throw std::runtime_error("enough");
  };
  const auto calling = [&](const Endpoint& endpoint) {
    return [&, endpoint] {
      dial(endpoint, callerOf(randomGroup()), randomSecret(), options, "rank 1");
    };
  };
  std::string why;
  try {
    calling(silent.endpoint())();
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  CHECK_EQ(why, "enough");
  enough = kNever;
  CHECK(
      contains(failure(calling({{hole.address}})), hole.address.text() + ": no answer within 0."));
  // Refused everywhere it is over at once, however long one would wait.
  options.deaf = kNever;
  CHECK(contains(failure(calling({{deserted()}})), "connection refused"));
}

std::string congestionOf(const Socket& socket) {
  char name[32] = {};
  socklen_t size = sizeof name;
  CHECK(getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0);
  return name;
}

TEST(congestion_control_is_set_or_an_error) {
  Group group;
  group.admit();
  DialOptions options;
  options.congestion = "reno";
  const Socket ours = group.dial(options);
  CHECK_EQ(congestionOf(ours), "reno");
  options.congestion = "none-such";
  const std::string text = failure([&] { group.dial(options); });
  CHECK(contains(text, "RINGREDUCE_CONGESTION=none-such") && contains(text, "reno"));
  CHECK_THROWS(Error, net::checkCongestion("none-such"));
  net::checkCongestion("");
  net::checkCongestion("reno");
}

int main(int argc, char** argv) {
  setenv("RINGREDUCE_IF", "lo", 1);
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}
