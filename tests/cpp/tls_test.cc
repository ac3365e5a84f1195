// Encrypted connections by themselves: what goes in comes out whatever the pieces and however slow
// the socket, and nothing comes out that was changed, or said by one without the key.
#include "transport/tcp/tls.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "sockets.h"
#include "transport/tcp/socket.h"

using namespace ringreduce;
using net::Digest;
using net::Socket;
using net::Tls;
using sockets::Over;

namespace {

Digest keyOf(unsigned char byte) {
  Digest key;
  key.fill(byte);
  return key;
}

// Both sides of a handshake in turn, until neither goes on.
void shakeHands(Tls& one, Tls& other) {
  for (int turn = 0; turn < 1000; ++turn) {
    const Tls::State a = one.shakeHands(), b = other.shakeHands();
    if (a != Tls::State::kGoesOn && b != Tls::State::kGoesOn) return;
    usleep(100);
  }
}

struct Ends {
  Socket dialler, acceptor;
};

Ends encrypted(Over over, size_t bytes_of_a_key = Tls::kBytesOfAKey) {
  auto [one, other] = sockets::pair(over);
  auto a = Tls::make(Tls::Side::kDialler, one.get(), keyOf(7), bytes_of_a_key);
  auto b = Tls::make(Tls::Side::kAcceptor, other.get(), keyOf(7), bytes_of_a_key);
  shakeHands(*a, *b);
  CHECK(a->shakeHands() == Tls::State::kDone && b->shakeHands() == Tls::State::kDone);
  return {Socket(std::move(one), std::move(a)), Socket(std::move(other), std::move(b))};
}

// Up to `most` bytes from there on, in several pieces.
std::vector<iovec> piecesOf(std::string& text, size_t at, size_t most, std::minstd_rand& random) {
  std::vector<iovec> pieces;
  const size_t end = std::min(text.size(), at + most);
  while (at < end && pieces.size() < 16) {
    const size_t longest = random() % 3 == 0 ? 100'000 : 40;
    const size_t n = std::min<size_t>(end - at, random() % longest);
    pieces.push_back({text.data() + at, n});
    at += n;
  }
  return pieces;
}

size_t bytesOf(const std::vector<iovec>& pieces) {
  size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

// One way: offers the same pieces until all of them are taken, as the streams do.
struct Way {
  Way(Socket& f, Socket& t, size_t bytes, unsigned seed) : from(f), to(t), random(seed) {
    sent.resize(bytes);
    for (char& c : sent) c = static_cast<char>(random());
    got.resize(bytes);
  }
  bool isOver() const { return in == sent.size(); }
  void move() {
    if (out < sent.size()) {
      if (offered.empty()) offered = piecesOf(sent, out, 300'000, random);
      const ssize_t n = from.send(offered.data(), offered.size());
      CHECK(n >= 0 || errno == EAGAIN);
      for (auto left = static_cast<size_t>(std::max<ssize_t>(n, 0)); left > 0;) {
        iovec& first = offered.front();
        const size_t part = std::min(left, first.iov_len);
        first = {static_cast<char*>(first.iov_base) + part, first.iov_len - part};
        left -= part;
        out += part;
        if (first.iov_len == 0) offered.erase(offered.begin());
      }
      if (bytesOf(offered) == 0) offered.clear();
    }
    const std::vector<iovec> room = piecesOf(got, in, 200'000, random);
    if (bytesOf(room) == 0) return;
    const ssize_t n = to.receive(room.data(), room.size());
    CHECK(n > 0 || (n < 0 && errno == EAGAIN));
    if (n > 0) in += static_cast<size_t>(n);
    CHECK(in <= out + 300'000);
  }

  Socket &from, &to;
  std::minstd_rand random;
  std::string sent, got;
  std::vector<iovec> offered;
  size_t out = 0, in = 0;
};

void makeNarrow(const Socket& socket) {
  const int bytes = 4096;
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

// Takes what there is, and changes one bit of it; how much it was.
size_t carry(const Fd& from, const Fd& to, bool spoil) {
  std::string bytes(1 << 20, '\0');
  const ssize_t n = recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (n <= 0) return 0;
  auto& middle = bytes[static_cast<size_t>(n) / 2];
  if (spoil) middle = static_cast<char>(middle ^ 4);
  CHECK_EQ(send(to.get(), bytes.data(), static_cast<size_t>(n), 0), n);
  return static_cast<size_t>(n);
}

// Two ends, and somebody between them.
struct Relayed {
  Relayed(unsigned char one_key, unsigned char other_key)
      : one(sockets::pair(Over::kUnix)), other(sockets::pair(Over::kUnix)) {
    a = Tls::make(Tls::Side::kDialler, one.first.get(), keyOf(one_key));
    b = Tls::make(Tls::Side::kAcceptor, other.first.get(), keyOf(other_key));
  }
  // Whose `spoilt`th message to the acceptor, or the dialler, is changed; -1: none.
  void meet(int to_acceptor, int to_dialler) {
    for (int turn = 0; turn < 100; ++turn) {
      a->shakeHands();
      if (carry(one.second, other.second, to_acceptor == 0) > 0) --to_acceptor;
      b->shakeHands();
      if (carry(other.second, one.second, to_dialler == 0) > 0) --to_dialler;
    }
  }
  std::pair<Fd, Fd> one, other;
  std::unique_ptr<Tls> a, b;
};

}  // namespace

TEST(without_openssl_it_says_so) {
  if (Tls::isBuiltIn()) {
    CHECK(Tls::version().starts_with("OpenSSL 3"));
    return;
  }
  std::string text;
  try {
    Tls::make(Tls::Side::kDialler, 0, keyOf(0));
  } catch (const Error& error) {
    text = error.what();
  }
  CHECK(text.find("built without OpenSSL 3") != std::string::npos);
}

TEST(what_goes_in_comes_out) {
  if (!Tls::isBuiltIn()) return;
  for (const Over over : {Over::kUnix, Over::kIpv4, Over::kIpv6})
    for (const size_t key : {Tls::kBytesOfAKey, size_t{100'000}}) {
      Ends ends = encrypted(over, key);
      if (over == Over::kUnix) makeNarrow(ends.dialler);  // TCP would wait for acknowledgements
      Way there(ends.dialler, ends.acceptor, 3'000'000, 1);
      Way back(ends.acceptor, ends.dialler, 700'000, 2);
      while (!there.isOver() || !back.isOver()) {
        there.move();
        back.move();
      }
      CHECK(there.sent == there.got && back.sent == back.got);
    }
}

TEST(what_is_sent_before_the_end_arrives_and_the_end_is_one) {
  if (!Tls::isBuiltIn()) return;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{20'000}, size_t{100'000}}) {
    Ends ends = encrypted(Over::kIpv4);
    std::string sent(bytes, 'x'), got(bytes + 10, ' ');
    if (bytes > 0) CHECK_EQ(ends.dialler.send(sent.data(), bytes), static_cast<ssize_t>(bytes));
    ends.dialler.reset();
    size_t in = 0;
    for (ssize_t n = 1; n != 0;) {
      n = ends.acceptor.receive(got.data() + in, got.size() - in);
      CHECK(n >= 0 || errno == EAGAIN);
      if (n > 0) in += static_cast<size_t>(n);
    }
    CHECK_EQ(in, bytes);
    CHECK_EQ(ends.acceptor.receive(got.data(), 1), ssize_t{0});
  }
}

TEST(what_was_taken_from_the_socket_is_told_of) {
  if (!Tls::isBuiltIn()) return;
  Ends ends = encrypted(Over::kUnix);
  CHECK(!ends.acceptor.holdsBytes());
  CHECK_EQ(ends.dialler.send("a few bytes", 11), ssize_t{11});
  CHECK(!ends.acceptor.holdsBytes());  // nothing was asked for
  char text[16];
  CHECK_EQ(ends.acceptor.receive(text, 5), ssize_t{5});
  CHECK(ends.acceptor.holdsBytes());
  CHECK_EQ(ends.acceptor.receive(text, sizeof text), ssize_t{6});
  CHECK(!ends.acceptor.holdsBytes());
}

TEST(the_handshake_leaves_what_follows_it_in_the_socket) {
  if (!Tls::isBuiltIn()) return;
  auto [one, other] = sockets::pair(Over::kUnix);
  auto a = Tls::make(Tls::Side::kDialler, one.get(), keyOf(1));
  auto b = Tls::make(Tls::Side::kAcceptor, other.get(), keyOf(1));
  CHECK(a->shakeHands() == Tls::State::kGoesOn);
  CHECK(b->shakeHands() == Tls::State::kGoesOn);
  CHECK(a->shakeHands() == Tls::State::kDone);
  const iovec early{const_cast<char*>("early"), 5};
  CHECK_EQ(a->send(&early, 1), ssize_t{5});
  CHECK(b->shakeHands() == Tls::State::kDone);
  CHECK(!b->holdsBytes());
  char text[8];
  const iovec room{text, sizeof text};
  CHECK_EQ(b->receive(&room, 1), ssize_t{5});
}

TEST(whoever_has_another_key_is_refused) {
  if (!Tls::isBuiltIn()) return;
  Relayed right(1, 1);
  right.meet(-1, -1);
  CHECK(right.a->shakeHands() == Tls::State::kDone && right.b->shakeHands() == Tls::State::kDone);
  Relayed wrong(1, 2);
  wrong.meet(-1, -1);
  CHECK(wrong.a->shakeHands() == Tls::State::kRefused);
  CHECK(wrong.b->shakeHands() == Tls::State::kRefused);
  CHECK(wrong.b->why().find("cannot be encrypted") != std::string::npos);
}

TEST(a_handshake_that_is_changed_is_refused) {
  if (!Tls::isBuiltIn()) return;
  const std::pair<int, int> changes[] = {{0, -1}, {1, -1}, {-1, 0}};
  for (const auto& [to_acceptor, to_dialler] : changes) {
    Relayed relayed(1, 1);
    relayed.meet(to_acceptor, to_dialler);
    CHECK(relayed.b->shakeHands() != Tls::State::kDone);
  }
}

TEST(one_who_does_not_encrypt_is_refused) {
  if (!Tls::isBuiltIn()) return;
  for (const Tls::Side side : {Tls::Side::kDialler, Tls::Side::kAcceptor}) {
    auto [one, other] = sockets::pair(Over::kUnix);
    auto tls = Tls::make(side, one.get(), keyOf(1));
    CHECK(tls->shakeHands() == Tls::State::kGoesOn);
    CHECK_EQ(send(other.get(), "RR1F and so on, in clear", 24, 0), ssize_t{24});
    CHECK(tls->shakeHands() == Tls::State::kRefused);
    CHECK(tls->shakeHands() == Tls::State::kRefused);
  }
  auto [one, other] = sockets::pair(Over::kUnix);
  auto tls = Tls::make(Tls::Side::kAcceptor, one.get(), keyOf(1));
  other.reset();
  CHECK(tls->shakeHands() == Tls::State::kEnded);
  CHECK(tls->why().find("ended") != std::string::npos);
}

TEST(what_is_changed_on_the_way_is_an_error) {
  if (!Tls::isBuiltIn()) return;
  for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{40'000}}) {
    Relayed relayed(1, 1);
    relayed.meet(-1, -1);
    std::string text(bytes, 'x');
    const iovec all{text.data(), bytes};
    for (const bool spoil : {false, true}) {
      CHECK_EQ(relayed.a->send(&all, 1), static_cast<ssize_t>(bytes));
      CHECK(carry(relayed.one.second, relayed.other.second, spoil) > bytes);
      const ssize_t n = relayed.b->receive(&all, 1);
      const int error = errno;
      if (!spoil) CHECK_EQ(n, static_cast<ssize_t>(bytes));
      if (spoil) CHECK(n == -1 && error == EBADMSG);
    }
    CHECK_EQ(relayed.b->receive(&all, 1), ssize_t{-1});  // and stays one
    CHECK(net::textOfError(EBADMSG).find("cannot be decrypted") != std::string::npos);
  }
}

TEST(bytes_that_are_sent_again_are_an_error) {
  if (!Tls::isBuiltIn()) return;
  Relayed relayed(1, 1);
  relayed.meet(-1, -1);
  char text[] = "once";
  const iovec all{text, 4};
  CHECK_EQ(relayed.a->send(&all, 1), ssize_t{4});
  std::string record(1000, '\0');
  const ssize_t n = recv(relayed.one.second.get(), record.data(), record.size(), MSG_DONTWAIT);
  CHECK(n > 4);
  for (int i = 0; i < 2; ++i)
    CHECK_EQ(send(relayed.other.second.get(), record.data(), static_cast<size_t>(n), 0), n);
  CHECK_EQ(relayed.b->receive(&all, 1), ssize_t{4});
  CHECK_EQ(relayed.b->receive(&all, 1), ssize_t{-1});
}

TEST(a_peer_that_has_gone_is_an_error_and_no_signal) {
  if (!Tls::isBuiltIn()) return;
  Ends ends = encrypted(Over::kUnix);
  ends.acceptor.reset();
  CHECK_EQ(ends.dialler.send("x", 1), ssize_t{-1});
  CHECK_EQ(errno, EPIPE);
}
