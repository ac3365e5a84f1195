// What receives messages (p2p/message_connection.h), over real sockets, from a rank with somebody
// on the way, who cuts, drops, changes and adds bytes, and forges heads.
//
// Whatever comes: what the reader is shown are sound parts within the ring, and counters go
// forwards.  As long as only heads of frames were changed, and nothing was added or dropped, the
// heads' checksums find it: the parts are those that were sent, and no more eager bytes are
// acknowledged than have arrived.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "p2p/message_connection.h"
#include "seals.h"
#include "transport/shm/channel.h"

using namespace ringreduce;
using namespace ringreduce::net;

namespace {

struct Rings {
  alignas(kPartAlign) std::byte out[kRingBytes];
  alignas(kPartAlign) std::byte in[kRingBytes + kPartAlign];  // the rest is nobody's
};
Rings rings;  // as a used ring's, its bytes are whatever was there

struct Pair {
  Pair() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    one = Socket(Fd(ends[0]));
    other = Socket(Fd(ends[1]));
  }
  Socket one, other;
};

class Play {
 public:
  explicit Play(bool reseals)
      : ends_{.out_ring = rings.out,
              .out_filled = &flags_[0],
              .out_emptied = &flags_[1],
              .in_ring = rings.in,
              .in_filled = &flags_[2],
              .in_emptied = &flags_[3],
              .consumed = &flags_[4],
              .acknowledged = &flags_[5]},
        reseals_(reseals),
        sender_(ends_),
        receiver_(ends_) {
    std::memset(rings.in + kRingBytes, 0x5a, kPartAlign);
  }

  void run(fuzz::Input input) {
    while (!input.ended() && wrong_.empty() && !over_) act(input);
    pass(wire_.size());
    for (int i = 0; i < 4 && wrong_.empty() && !over_; ++i) receive();
  }
  const std::string& wrong() const { return wrong_; }
  bool reached() const { return shown_ > 0; }

 private:
  struct Sent {
    uint64_t id;
    std::string payload;
  };

  void act(fuzz::Input& input) {
    const uint8_t what = input.byte();
    switch (what % 8) {
      case 0:
        return write(input.byte() * size_t{1 + what / 8u});
      case 1:  // its eager bytes arrive, too
        consumed_ += what / 8u * size_t{16 << 10};
        flags_[4].publish(consumed_);
        return carry();
      case 2:
        return pass(input.byte() * size_t{1 + what / 8u});
      case 3: {
        const size_t bytes = 1 + input.byte() * size_t{1 + what / 8u};
        if (!wire_.empty()) change((input.byte() + 256u * input.byte()) % (8 * wire_.size()));
        return pass(bytes);
      }
      case 4:
        forged_ = true;
        wire_.insert(0, input.bytes(input.byte()));
        return;
      case 5:
        forged_ = true;
        wire_.erase(0, input.byte());
        return;
      case 6: {
        forged_ = true;
        MessageFrame head{.bytes = input.byte() * uint32_t{1 + what / 8u} * 64,
                          .consumed = input.byte() * uint64_t{64}};
        head = sealed(head);
        wire_.insert(0, reinterpret_cast<const char*>(&head), sizeof head);
        return;
      }
      default:
        return receive();
    }
  }

  void write(size_t payload) {
    std::byte* place = writer_.reserve(payload);
    if (!place) return;
    Sent sent{.id = ++written_, .payload = std::string(payload, '\0')};
    for (size_t i = 0; i < payload; ++i) sent.payload[i] = static_cast<char>(sent.id * 31 + i);
    std::memcpy(place, sent.payload.data(), payload);
    writer_.commit({.id = sent.id,
                    .count = payload,
                    .payload = static_cast<uint32_t>(payload),
                    .type = MessagePart::Type::kEager});
    sent_.push_back(std::move(sent));
  }

  void carry() {
    bool moved = false;
    if (sender_.carry(out_.one, moved) == net::Carried::kEnded) wrong_ = "cannot send";
    std::array<char, 64 << 10> bytes;
    for (ssize_t n; (n = out_.other.receive(bytes.data(), bytes.size())) > 0;)
      wire_.append(bytes.data(), static_cast<size_t>(n));
    findHeads();
  }

  // Where the heads on the way are, as long as nothing was added or dropped.
  void findHeads() {
    if (forged_) return;
    while (next_head_ >= passed_) {
      const size_t at = next_head_ - passed_;
      if (at + sizeof(MessageFrame) > wire_.size()) return;
      heads_.push_back(next_head_);
      MessageFrame head;
      std::memcpy(&head, wire_.data() + at, sizeof head);
      next_head_ += sizeof head + head.bytes;
    }
  }

  // Changes a bit of what is on the way.
  void change(size_t bit) {
    wire_[bit / 8] = static_cast<char>(wire_[bit / 8] ^ 1 << bit % 8);
    const auto begin = std::ranges::find_if(heads_, [at = passed_ + bit / 8](uint64_t head) {
      return at - head < sizeof(MessageFrame);
    });
    if (forged_ || begin == heads_.end()) {
      forged_ = true;
    } else if (reseals_ && *begin >= passed_) {
      char* at = wire_.data() + (*begin - passed_);
      MessageFrame head;
      std::memcpy(&head, at, sizeof head);
      head = sealed(head);
      std::memcpy(at, &head, sizeof head);
    }
  }

  void pass(size_t bytes) {
    const ssize_t n = in_.one.send(wire_.data(), std::min(bytes, wire_.size()));
    if (n <= 0) return;
    wire_.erase(0, static_cast<size_t>(n));
    passed_ += static_cast<uint64_t>(n);
  }

  void receive() {
    bool moved = false;
    const uint64_t filled = flags_[2].observe(), acknowledged = flags_[5].observe();
    const net::Carried result = receiver_.carry(in_.other, moved);
    if (flags_[2].observe() < filled || flags_[5].observe() < acknowledged)
      wrong_ = "went backwards";
    if (!forged_ && flags_[5].observe() > consumed_) wrong_ = "acknowledged what never came";
    if (flags_[2].observe() - flags_[3].observe() > kRingBytes) wrong_ = "shows more than a ring";
    for (size_t i = 0; i < kPartAlign; ++i)
      if (rings.in[kRingBytes + i] != std::byte{0x5a}) wrong_ = "wrote beyond the ring";
    while (const MessagePart* part = reader_.front()) look(*part);
    if (result != net::Carried::kEnded) return;
    over_ = true;
    if (receiver_.end().empty()) wrong_ = "ended without a word why";
  }

  void look(const MessagePart& part) {
    ++shown_;
    const auto* begin = reinterpret_cast<const std::byte*>(&part);
    const auto left = static_cast<size_t>(rings.in + kRingBytes - begin);
    if (!isSound(part, left)) wrong_ = "showed a part that is none";
    if (!forged_) {
      const bool right = !sent_.empty() && part.id == sent_.front().id &&
                         part.payload == sent_.front().payload.size() &&
                         std::memcmp(&part + 1, sent_.front().payload.data(), part.payload) == 0;
      if (!right) wrong_ = "showed what was not sent";
      if (!sent_.empty()) sent_.pop_front();
    }
    reader_.pop(part.payload);
  }

  Flag flags_[6]{};
  const ChannelEnds ends_;
  const bool reseals_;
  MessageSender sender_;
  MessageReceiver receiver_;
  ChannelWriter writer_{rings.out, flags_[0], flags_[1]};
  ChannelReader reader_{rings.in, flags_[2], flags_[3]};
  Pair out_, in_;
  std::string wire_;                     // on the way
  uint64_t passed_ = 0, next_head_ = 0;  // bytes before wire_, and before the next head
  std::vector<uint64_t> heads_;          // where they begin
  std::deque<Sent> sent_;
  uint64_t written_ = 0, consumed_ = 0, shown_ = 0;
  bool forged_ = false, over_ = false;
  std::string wrong_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return fuzz::playSealed<Play>(data, size, "the receiver of messages");
}

fuzz::Trial fuzz::control(const uint8_t* data, size_t size) {
  return withoutSeals<Play>(data, size);
}
