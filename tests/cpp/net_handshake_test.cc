// The handshake's two machines, without sockets: what they say, and that nothing but the whole
// truth gets either of them to believe.
#include <climits>
#include <set>
#include <string>
#include <string_view>

#include "base/error.h"
#include "check.h"
#include "transport/tcp/handshake.h"

using namespace ringreduce;
using namespace ringreduce::net;
using State = Handshake::State;

namespace {

constexpr size_t kHello = 32 + 16 + 16 + 32, kChallenge = 32 + 32 + 32, kProof = 32;

const Secret& secret() {
  static const Secret one = randomSecret();
  return one;
}

PeerHello caller() {
  return {.group = "0123456789abcdef",
          .from = 2,
          .to = 5,
          .purpose = Purpose::kMessages,
          .connection = 3};
}

Handshake::Find knows(const Secret& known) {
  return [known](const PeerHello& asked) -> std::optional<Secret> {
    if (asked.group != caller().group || asked.to != caller().to) return std::nullopt;
    return known;
  };
}

size_t feed(Handshake& machine, std::string_view bytes) {
  return machine.feed(std::as_bytes(std::span(bytes.data(), bytes.size())));
}

// Two machines and what they said.
struct Pair {
  Handshake dialler = Handshake::dialler(caller(), secret());
  Handshake acceptor = Handshake::acceptor(knows(secret()));
  std::string messages[4];

  // Lets them talk until `changed` has changed message number `which`.
  template <class Change>
  void run(int which, Change change) {
    for (int i = 0; i < 4; ++i) {
      Handshake& from = i % 2 == 0 ? dialler : acceptor;
      Handshake& to = i % 2 == 0 ? acceptor : dialler;
      messages[i] = from.takeOutput();
      std::string message = messages[i];
      if (i == which) change(message);
      feed(to, message);
    }
  }
  void run() {
    run(-1, [](std::string&) {});
  }
  bool bothDone() const {
    return dialler.state() == State::kDone && acceptor.state() == State::kDone;
  }
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(both_sides_believe_the_truth) {
  for (int purpose = 0; purpose < kPurposes; ++purpose)
    for (int number : {0, 1, 255, 256, INT_MAX}) {
      const PeerHello self{.group = "ffffffffffffffff",
                           .from = number,
                           .to = number,
                           .purpose = static_cast<Purpose>(purpose),
                           .connection = number};
      Pair pair;
      pair.dialler = Handshake::dialler(self, secret());
      pair.acceptor = Handshake::acceptor([&](const PeerHello& asked) -> std::optional<Secret> {
        CHECK_EQ(asked.to, number);
        return secret();
      });
      CHECK(!pair.bothDone());
      pair.run();
      CHECK(pair.bothDone());
      const PeerHello& proven = pair.acceptor.caller();
      CHECK_EQ(proven.group, self.group);
      CHECK(proven.from == number && proven.to == number && proven.connection == number);
      CHECK(proven.purpose == self.purpose);
      CHECK(pair.dialler.why().empty() && pair.acceptor.why().empty());
    }
}

// Written down a second time, from the description.
TEST(messages_are_as_described) {
  Nonce mine, theirs;
  mine.fill(0x11);
  theirs.fill(0x22);
  Pair pair;
  pair.dialler = Handshake::dialler(caller(), secret(), mine);
  pair.acceptor = Handshake::acceptor(knows(secret()), theirs);
  pair.run();
  CHECK(pair.bothDone());
  const std::string build = pair.messages[0].substr(0, 32);
  CHECK(build.starts_with("ringreduce ") && contains(build, " wire 6\n"));
  const std::string hello = build + caller().group +
                            std::string("\2\0\0\0\5\0\0\0\3\0\0\0\2\0\0\0", 16) +
                            std::string(32, '\x11');
  const auto prove = [](const char* place, const std::string& all) {
    return std::string(bytesOf(hmacSha256(bytesOf(secret()), place, all)));
  };
  std::string all = hello + build + std::string(32, '\x22');
  const std::string first = prove("ringreduce challenge", all);
  const std::string second = prove("ringreduce proof    ", all + first);
  const std::string third = prove("ringreduce welcome  ", all + first + second);
  CHECK(pair.messages[0] == hello);
  CHECK(pair.messages[1] == build + std::string(32, '\x22') + first);
  CHECK(pair.messages[2] == second);
  CHECK(pair.messages[3] == third);
}

TEST(nothing_is_taken_that_is_not_of_the_handshake) {
  Pair pair;
  std::string hello = pair.dialler.takeOutput();
  CHECK_EQ(hello.size(), kHello);
  CHECK_EQ(feed(pair.acceptor, hello), kHello);
  std::string challenge = pair.acceptor.takeOutput();
  CHECK_EQ(challenge.size(), kChallenge);
  CHECK_EQ(feed(pair.dialler, challenge), kChallenge);
  std::string proof = pair.dialler.takeOutput();
  CHECK_EQ(proof.size(), kProof);
  CHECK_EQ(feed(pair.acceptor, proof + "payload"), kProof);
  CHECK(pair.acceptor.state() == State::kDone);
  CHECK_EQ(feed(pair.acceptor, "payload"), size_t{0});
  CHECK_EQ(feed(pair.dialler, pair.acceptor.takeOutput() + "payload"), kProof);
  CHECK(pair.bothDone());
  CHECK_EQ(pair.dialler.wants(), size_t{0});
  CHECK(pair.dialler.takeOutput().empty() && pair.acceptor.takeOutput().empty());
}

TEST(single_bytes_are_enough) {
  Pair pair;
  const auto carry = [](Handshake& from, Handshake& to) {
    const std::string bytes = from.takeOutput();
    for (char byte : bytes) {
      CHECK(to.wants() > 0 && to.takeOutput().empty());
      CHECK_EQ(feed(to, {&byte, 1}), size_t{1});
    }
  };
  for (int i = 0; i < 2; ++i) {
    carry(pair.dialler, pair.acceptor);
    carry(pair.acceptor, pair.dialler);
  }
  CHECK(pair.bothDone());
}

TEST(a_part_of_a_message_does_nothing) {
  for (int which = 0; which < 4; ++which) {
    Pair whole;
    whole.run();
    for (size_t size = 0; size < whole.messages[which].size(); ++size) {
      Pair pair;
      pair.run(which, [&](std::string& message) { message.resize(size); });
      Handshake& fed = which % 2 == 0 ? pair.acceptor : pair.dialler;
      CHECK(fed.state() == State::kGoesOn);
      CHECK(fed.takeOutput().empty());
      CHECK(pair.dialler.state() != State::kDone);
    }
  }
}

TEST(no_changed_bit_is_believed) {
  const size_t sizes[] = {kHello, kChallenge, kProof, kProof};
  for (int which = 0; which < 4; ++which)
    for (size_t bit = 0; bit < 8 * sizes[which]; ++bit) {
      Pair pair;
      pair.run(which, [&](std::string& message) {
        CHECK_EQ(message.size(), sizes[which]);
        message[bit / 8] = static_cast<char>(message[bit / 8] ^ 1 << bit % 8);
      });
      // The acceptor is done before its last message is on its way.
      CHECK(pair.acceptor.state() != State::kDone || which == 3);
      CHECK(pair.dialler.state() != State::kDone);
      const bool noticed = pair.dialler.state() == State::kRefused ||
                           pair.acceptor.state() == State::kRefused ||
                           pair.acceptor.waitsForGroup();
      CHECK(noticed);
    }
}

TEST(a_conversation_does_not_work_twice) {
  Pair first;
  first.run();
  CHECK(first.bothDone());
  Handshake acceptor = Handshake::acceptor(knows(secret()));
  CHECK_EQ(feed(acceptor, first.messages[0]), kHello);
  CHECK(acceptor.takeOutput() != first.messages[1]);
  feed(acceptor, first.messages[2]);
  CHECK(acceptor.state() == State::kRefused);
  CHECK(acceptor.takeOutput().empty());

  Handshake dialler = Handshake::dialler(caller(), secret());
  CHECK(dialler.takeOutput() != first.messages[0]);
  feed(dialler, first.messages[1] + first.messages[3]);
  CHECK(dialler.state() == State::kRefused);
  CHECK(dialler.takeOutput().empty());
}

TEST(nobody_believes_his_own_words) {
  {
    Handshake dialler = Handshake::dialler(caller(), secret());
    const std::string hello = dialler.takeOutput();
    feed(dialler, hello + hello);
    CHECK(dialler.state() == State::kRefused);
  }
  {
    Pair pair;
    feed(pair.acceptor, pair.dialler.takeOutput());
    const std::string challenge = pair.acceptor.takeOutput();
    feed(pair.acceptor, challenge.substr(kChallenge - kProof));
    CHECK(pair.acceptor.state() == State::kRefused);
  }
  {
    Pair pair;
    feed(pair.acceptor, pair.dialler.takeOutput());
    feed(pair.dialler, pair.acceptor.takeOutput());
    feed(pair.dialler, pair.dialler.takeOutput());
    CHECK(pair.dialler.state() == State::kRefused);
  }
}

TEST(two_conversations_cannot_be_mixed) {
  Pair a, b;
  const std::string hello_a = a.dialler.takeOutput(), hello_b = b.dialler.takeOutput();
  feed(a.acceptor, hello_a);
  feed(b.acceptor, hello_b);
  const std::string challenge_a = a.acceptor.takeOutput(), challenge_b = b.acceptor.takeOutput();
  {
    Handshake dialler = a.dialler;
    feed(dialler, challenge_b);
    CHECK(dialler.state() == State::kRefused);
  }
  feed(a.dialler, challenge_a);
  feed(b.dialler, challenge_b);
  const std::string proof_a = a.dialler.takeOutput(), proof_b = b.dialler.takeOutput();
  {
    Handshake acceptor = a.acceptor;
    feed(acceptor, proof_b);
    CHECK(acceptor.state() == State::kRefused);
  }
  feed(a.acceptor, proof_a);
  feed(b.acceptor, proof_b);
  const std::string welcome_b = b.acceptor.takeOutput();
  feed(a.dialler, welcome_b);
  CHECK(a.dialler.state() == State::kRefused);
  feed(b.dialler, welcome_b);
  CHECK(b.bothDone());
}

TEST(another_secret_is_seen_by_the_dialler_first) {
  Pair pair;
  Secret other = secret();
  other[31] = static_cast<unsigned char>(other[31] ^ 1);
  pair.acceptor = Handshake::acceptor(knows(other));
  pair.run();
  CHECK(pair.dialler.state() == State::kRefused);
  CHECK(contains(pair.dialler.why(), "another secret"));
  CHECK_EQ(pair.messages[2], "");
  CHECK(pair.acceptor.state() == State::kGoesOn);
  feed(pair.acceptor, std::string(kProof, 'x'));
  CHECK(pair.acceptor.state() == State::kRefused);
  CHECK(contains(pair.acceptor.why(), "another secret"));
  CHECK(pair.acceptor.takeOutput().empty());
}

TEST(other_versions_say_so_to_each_other) {
  const std::string ours = Handshake::dialler(caller(), secret()).takeOutput().substr(0, 32);
  std::string theirs = "ringreduce 99.1.0 wire 7\n";
  theirs.resize(32);

  Handshake acceptor = Handshake::acceptor(knows(secret()));
  CHECK_EQ(feed(acceptor, theirs + "whatever it says"), size_t{32});
  CHECK(acceptor.state() == State::kRefused);
  CHECK(contains(acceptor.why(), "ringreduce 99.1.0 wire 7, this is ringreduce "));
  CHECK(contains(acceptor.why(), "install the same version"));
  CHECK(acceptor.takeOutput() == ours);

  Handshake dialler = Handshake::dialler(caller(), secret());
  dialler.takeOutput();
  CHECK_EQ(feed(dialler, theirs), size_t{32});
  CHECK(dialler.state() == State::kRefused);
  CHECK(contains(dialler.why(), "ringreduce 99.1.0 wire 7, this is ringreduce "));
  CHECK(dialler.takeOutput().empty());

  // What goes into a log is readable, whatever was sent.
  theirs = "ringreduce \x1b[31m\xff\r";
  theirs.resize(32);
  acceptor = Handshake::acceptor(knows(secret()));
  feed(acceptor, theirs);
  CHECK(contains(acceptor.why(), "ringreduce ?[31m??,"));
}

TEST(strangers_are_told_nothing) {
  for (const std::string& stranger :
       {std::string("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"), std::string(1000, '\0'),
        std::string(1000, '\xff'), "Ringreduce" + std::string(100, ' ')}) {
    Handshake acceptor = Handshake::acceptor(knows(secret()));
    CHECK_EQ(feed(acceptor, stranger), size_t{32});
    CHECK(acceptor.state() == State::kRefused);
    CHECK(acceptor.takeOutput().empty());
    CHECK(contains(acceptor.why(), "no rank of ringreduce"));
    Handshake dialler = Handshake::dialler(caller(), secret());
    dialler.takeOutput();
    feed(dialler, stranger);
    CHECK(dialler.state() == State::kRefused);
    CHECK(dialler.takeOutput().empty());
  }
}

TEST(a_hello_that_nobody_says_is_refused) {
  const std::string hello = Handshake::dialler(caller(), secret()).takeOutput();
  const auto refused = [&](size_t at, char byte) {
    Handshake acceptor = Handshake::acceptor([](const PeerHello&) { return secret(); });
    std::string other = hello;
    other[at] = byte;
    feed(acceptor, other);
    return acceptor.state() == State::kRefused && acceptor.takeOutput().empty();
  };
  CHECK(refused(32, 'G') && refused(32, 'A') && refused(47, '\0'));          // the group
  CHECK(refused(51, '\x80') && refused(55, '\xff') && refused(59, '\x80'));  // numbers
  CHECK(refused(60, kPurposes) && refused(60, '\xff'));                      // the purpose
  CHECK(refused(61, 2) && refused(62, 1) && refused(63, 1));                 // what is encrypted
  CHECK(!refused(60, 0) && !refused(61, 1));
}

TEST(a_caller_waits_until_its_group_is_there) {
  bool here = false;
  Pair pair;
  pair.acceptor = Handshake::acceptor([&](const PeerHello&) -> std::optional<Secret> {
    if (!here) return std::nullopt;
    return secret();
  });
  const std::string hello = pair.dialler.takeOutput();
  CHECK_EQ(feed(pair.acceptor, hello + "more"), kHello);
  CHECK(pair.acceptor.waitsForGroup() && !pair.acceptor.namedGroup());
  CHECK_EQ(pair.acceptor.wants(), size_t{0});
  CHECK(pair.acceptor.takeOutput().empty());
  CHECK_EQ(pair.acceptor.caller().group, caller().group);
  pair.acceptor.lookAgain();
  CHECK(pair.acceptor.waitsForGroup() && pair.acceptor.takeOutput().empty());
  here = true;
  pair.acceptor.lookAgain();
  CHECK(!pair.acceptor.waitsForGroup() && pair.acceptor.namedGroup());
  feed(pair.dialler, pair.acceptor.takeOutput());
  pair.acceptor.lookAgain();  // does nothing more
  CHECK(pair.acceptor.takeOutput().empty());
  feed(pair.acceptor, pair.dialler.takeOutput());
  feed(pair.dialler, pair.acceptor.takeOutput());
  CHECK(pair.bothDone());
}

TEST(a_wrong_caller_cannot_be_made) {
  const auto make = [](const std::string& group, int from, int to, int connection) {
    Handshake::dialler(
        {.group = group, .from = from, .to = to, .purpose = {}, .connection = connection},
        secret());
  };
  make(caller().group, 0, 0, 0);
  for (const char* group : {"", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF"})
    CHECK_THROWS(Error, make(group, 0, 0, 0));
  CHECK_THROWS(Error, make(caller().group, -1, 0, 0));
  CHECK_THROWS(Error, make(caller().group, 0, -1, 0));
  CHECK_THROWS(Error, make(caller().group, 0, 0, -1));
}

TEST(secrets_are_random_and_travel_as_text) {
  std::set<std::string> all;
  for (int i = 0; i < 1000; ++i) {
    const Secret one = randomSecret();
    const std::string text = secretText(one);
    CHECK(text.size() == 64 && secretFromText(text) == one);
    all.insert(text.substr(0, 16));
    all.insert(randomGroup());
  }
  CHECK_EQ(all.size(), size_t{2000});
  CHECK_EQ(randomGroup().size(), size_t{16});
  const std::string text = secretText(secret());
  for (const std::string& wrong :
       {std::string(), text.substr(1), text + "0", "G" + text.substr(1), " " + text.substr(1)})
    CHECK_THROWS(Error, secretFromText(wrong));
}
