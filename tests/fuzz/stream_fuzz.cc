// What receives the data of collectives (transport/tcp/stream.h), over real sockets, from somebody
// who sends frames in any order and pieces, twice, damaged, and bytes of his own.
//
// The byte of the stream at each position is known, and only heads of frames are damaged.  Whatever
// comes: nothing is written beside where it was expected, and what is said to be there is right.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "seals.h"
#include "transport/tcp/stream.h"

using namespace ringreduce;
using namespace ringreduce::net;

namespace {

constexpr size_t kConnections = 3;
constexpr size_t kGuard = 32;
constexpr std::byte kUntouched{0xa5};

std::byte byteAt(uint64_t position) {
  return static_cast<std::byte>(position * 7 + position / 251);
}

class Play {
 public:
  explicit Play(bool reseals) : reseals_(reseals), stream_(pool_) {
    for (auto& connection : connections_) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0)
        std::abort();
      connection.ours = Fd(ends[0]);
      stream_.add(Fd(ends[1]));
    }
  }

  void run(fuzz::Input input) {
    while (!input.ended() && wrong_.empty() && !over_) act(input);
    for (auto& connection : connections_) connection.ours.reset();
    for (int i = 0; i < 4 && wrong_.empty() && !over_; ++i) move();
  }
  const std::string& wrong() const { return wrong_; }
  bool reached() const { return got_ > 0; }

 private:
  struct Connection {
    Fd ours;
    std::string unsent;  // what its socket had no room for
  };
  struct Place {
    uint64_t position;
    size_t bytes;
    std::vector<std::byte> memory;  // with a guard before and after; empty: of the pool
  };

  void act(fuzz::Input& input) {
    const uint8_t what = input.byte();
    Connection& connection = connections_[what / 8 % kConnections];
    switch (what % 8) {
      case 0:  // the next bytes
      case 1:
        return sendFrame(connection, next_, 1 + input.byte() * size_t{1 + what / 32u}, input,
                         false);
      case 2:  // the next bytes, in a frame whose head is damaged
        return sendFrame(connection, next_, 1 + input.byte(), input, true);
      case 3: {  // any bytes, in a frame that is not
        const uint64_t position = input.byte() * uint64_t{16};
        return sendFrame(connection, position, 1 + input.byte(), input, false);
      }
      case 4:
        forged_ = true;  // it may be a head with a right checksum
        return send(connection, std::string(input.bytes(input.byte())));
      case 5:
      case 6:
        return expect(input.byte() * size_t{1 + what / 8u}, what % 8 == 5);
      default:
        if (what / 8 == 31) connection.ours.reset();
        return move();
    }
  }

  void sendFrame(Connection& connection, uint64_t position, size_t bytes, fuzz::Input& input,
                 bool damaged) {
    std::string payload(bytes, '\0');
    for (size_t i = 0; i < bytes; ++i) payload[i] = static_cast<char>(byteAt(position + i));
    Frame frame = sealed({.bytes = static_cast<uint32_t>(bytes), .position = position});
    if (damaged) {
      const size_t bit = (input.byte() + 256u * input.byte()) % (8 * sizeof frame);
      std::array<uint8_t, sizeof frame> raw;
      std::memcpy(raw.data(), &frame, sizeof frame);
      raw[bit / 8] = static_cast<uint8_t>(raw[bit / 8] ^ 1 << bit % 8);
      std::memcpy(&frame, raw.data(), sizeof frame);
      if (reseals_) frame = sealed(frame);
    }
    if (position == next_) next_ += bytes;
    send(connection, std::string(reinterpret_cast<const char*>(&frame), sizeof frame) + payload);
  }

  // What finds no room is sent later, in order.
  void send(Connection& connection, const std::string& text) {
    connection.unsent += text;
    push(connection);
  }
  static void push(Connection& connection) {
    if (!connection.ours || connection.unsent.empty()) return;
    const ssize_t n = ::send(connection.ours.get(), connection.unsent.data(),
                             connection.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) connection.unsent.erase(0, static_cast<size_t>(n));
  }

  void expect(size_t bytes, bool in_memory) {
    if (places_.size() > 200) return;
    Place place{.position = expected_, .bytes = bytes, .memory = {}};
    if (in_memory) place.memory.assign(bytes + 2 * kGuard, kUntouched);
    expected_ += bytes;
    places_.push_back(std::move(place));
    Place& last = places_.back();
    if (in_memory)
      stream_.expect(last.memory.data() + kGuard, bytes);
    else
      stream_.expect(nullptr, bytes);
  }

  void move() {
    for (size_t i = 0; i < kConnections; ++i) {
      push(connections_[i]);
      // As epoll tells it.
      stream_.connection(static_cast<int>(i)).ready = true;
      stream_.connection(static_cast<int>(i)).hangup = !connections_[i].ours;
    }
    const Moved moved = stream_.progress();
    lookAt();
    if (moved != Moved::kBroken) return;
    over_ = true;
    if (stream_.why().empty()) wrong_ = "broke without a word why";
  }

  void lookAt() {
    for (const Place& place : places_) {
      const auto touched = [](std::byte b) { return b != kUntouched; };
      const std::vector<std::byte>& all = place.memory;
      if (all.empty()) continue;
      if (std::any_of(all.begin(), all.begin() + kGuard, touched) ||
          std::any_of(all.end() - kGuard, all.end(), touched))
        wrong_ = "wrote beside a place";
    }
    while (!stream_.expectsNone() && stream_.ready()) {
      const Place& place = places_.front();
      const std::byte* data = stream_.front();
      for (size_t i = 0; i < place.bytes; ++i)
        if (!forged_ && data[i] != byteAt(place.position + i))
          wrong_ = "took wrong bytes for right";
      got_ += place.bytes;
      stream_.pop();
      places_.pop_front();
    }
    if (got_ > stream_.received()) wrong_ = "has more than it received";
  }

  const bool reseals_;
  Pool pool_;
  RecvStream stream_;
  std::array<Connection, kConnections> connections_;
  std::deque<Place> places_;
  uint64_t next_ = 0, expected_ = 0;
  size_t got_ = 0;
  bool forged_ = false, over_ = false;
  std::string wrong_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return fuzz::playSealed<Play>(data, size, "the stream");
}

fuzz::Trial fuzz::control(const uint8_t* data, size_t size) {
  return withoutSeals<Play>(data, size);
}
