// Moves bytes between rings and sockets, and checks arriving parts.
#include "p2p/message_connection.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/tcp/stream.h"

namespace ringreduce::net {
namespace {

// The count of eager bytes that have arrived is sent with parts, or alone after so many bytes.
constexpr uint64_t kAcknowledgeEvery = 64 << 10;
constexpr size_t kBytesPerTurn = 1 << 20;

// The pieces of a ring from this position on: two if they wrap around its end.
int pieces(std::byte* ring, uint64_t position, size_t bytes, iovec* out) {
  const size_t at = position % kRingBytes, first = std::min(bytes, kRingBytes - at);
  int n = 0;
  if (first > 0) out[n++] = {ring + at, first};
  if (bytes > first) out[n++] = {ring, bytes - first};
  return n;
}

std::string route(const Socket& socket) {
  return " (connection " + routeOf(socket) + ")";
}

}  // namespace

MessageFrame sealed(MessageFrame head) {
  head.header = crc32c(&head, offsetof(MessageFrame, header));
  return head;
}

// ---- sending

bool MessageSender::hasNews() const {
  return ends_.out_filled->observe() != framed_.load(std::memory_order_relaxed) ||
         ends_.consumed->observe() - told_.load(std::memory_order_relaxed) >= kAcknowledgeEvery;
}

bool MessageSender::hasRecords() const {
  return head_left_ + bytes_left_ > 0 || ends_.out_filled->observe() != sent_;
}

void MessageSender::discard() {
  head_left_ = bytes_left_ = 0;
  sent_ = ends_.out_filled->observe();
  framed_ = sent_;
  markTold();
  ends_.out_emptied->publish(sent_);
}

// Cuts the next frame from the available bytes.
void MessageSender::cutFrame() {
  const uint64_t filled = ends_.out_filled->observe();
  const size_t bytes = filled - sent_;
  head_ = sealed({.bytes = static_cast<uint32_t>(bytes), .consumed = ends_.consumed->observe()});
  head_left_ = sizeof head_;
  bytes_left_ = bytes;
  framed_ = sent_ + bytes;
  told_ = head_.consumed;
}

Carried MessageSender::carry(Socket& socket, bool& moved) {
  for (size_t carried = 0; carried < kBytesPerTurn;) {
    if (head_left_ + bytes_left_ == 0) {
      if (!hasNews()) return Carried::kIdle;
      cutFrame();
    }
    iovec parts[3];
    int n = 0;
    if (head_left_ > 0)
      parts[n++] = {reinterpret_cast<std::byte*>(&head_) + sizeof head_ - head_left_, head_left_};
    n += pieces(ends_.out_ring, sent_, bytes_left_, parts + n);
    const ssize_t written = socket.send(parts, static_cast<size_t>(n));
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return Carried::kBlocked;
      error_ = errno;
      return Carried::kEnded;
    }
    const size_t of_head = std::min(static_cast<size_t>(written), head_left_);
    const size_t of_ring = static_cast<size_t>(written) - of_head;
    head_left_ -= of_head;
    bytes_left_ -= of_ring;
    carried += static_cast<size_t>(written);
    if (of_ring == 0) continue;
    sent_ += of_ring;
    moved = true;
    ends_.out_emptied->publish(sent_);
  }
  return Carried::kMore;
}

// ---- receiving

bool isSound(const MessagePart& part, size_t left) {
  if (part.payload > kRingBytes) return false;
  const size_t bytes = partBytes(part.payload);
  if (bytes > left) return false;
  if (static_cast<size_t>(part.dtype) >= kDTypes.size()) return false;
  switch (part.type) {
    case MessagePart::Type::kSkip:
      return bytes == left;
    case MessagePart::Type::kEager:
      return part.count <= kRingBytes && part.payload == part.count * sizeOf(part.dtype);
    case MessagePart::Type::kRequest:
    case MessagePart::Type::kGrant:
      return part.payload == 0;
    case MessagePart::Type::kFragment:
      return true;
  }
  return false;
}

bool MessageReceiver::canGoOn() const {
  const uint64_t then = full_at_.load();
  return then != kNotFull && ends_.in_emptied->observe() != then;
}

Carried MessageReceiver::endsWith(std::string how, bool damaged) {
  end_ = std::move(how);
  damaged_ = damaged;
  return Carried::kEnded;
}

Carried MessageReceiver::carry(Socket& socket, bool& moved) {
  full_at_ = kNotFull;
  for (size_t carried = 0; carried < kBytesPerTurn;) {
    const auto roomAfter = [&](uint64_t emptied) { return kRingBytes - (got_ - emptied); };
    uint64_t emptied = ends_.in_emptied->observe();
    if (bytes_left_ > 0 && roomAfter(emptied) == 0) {
      // The reader makes room and then looks at full_at_, so one of the two sees the other.
      full_at_ = emptied;
      emptied = ends_.in_emptied->observe();
      if (roomAfter(emptied) == 0) return Carried::kBlocked;
      full_at_ = kNotFull;
    }
    const size_t room = roomAfter(emptied);
    // The rest of this frame, and the header of the next one with it.
    const size_t wanted = std::min(bytes_left_, room);
    iovec parts[3];
    int n = pieces(ends_.in_ring, got_, wanted, parts);
    if (wanted == bytes_left_)
      parts[n++] = {reinterpret_cast<std::byte*>(&head_) + head_got_, sizeof head_ - head_got_};
    const ssize_t read = socket.receive(parts, static_cast<size_t>(n));
    if (read < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return Carried::kIdle;
      const int error = errno;
      return endsWith("its connection for messages broke: " + textOfError(error) + route(socket),
                      error == EBADMSG);
    }
    if (read == 0)
      return endsWith(bytes_left_ + head_got_ == 0 && got_ == published_
                          ? "it closed its connection for messages"
                          : "its connection for messages ended within a message",
                      false);
    const size_t of_ring = std::min(static_cast<size_t>(read), wanted);
    got_ += of_ring;
    bytes_left_ -= of_ring;
    head_got_ += static_cast<size_t>(read) - of_ring;
    carried += static_cast<size_t>(read);
    if (!publishRecords(moved) || (head_got_ == sizeof head_ && !takeHeader(moved)))
      return endsWith("its connection for messages carried what no rank sends" + route(socket),
                      true);
  }
  return Carried::kMore;
}

bool MessageReceiver::takeHeader(bool& moved) {
  const bool fits = head_.magic == MessageFrame::kMagic && head_.bytes <= kRingBytes &&
                    head_.header == sealed(head_).header && reached(head_.consumed, acknowledged_);
  if (!fits) return false;
  head_got_ = 0;
  bytes_left_ = head_.bytes;
  if (head_.consumed == acknowledged_) return true;
  acknowledged_ = head_.consumed;
  ends_.acknowledged->publish(acknowledged_);
  moved = true;
  return true;
}

// Publishes the parts that are complete.
bool MessageReceiver::publishRecords(bool& moved) {
  const uint64_t before = published_;
  while (got_ - published_ >= sizeof(MessagePart)) {
    const size_t at = published_ % kRingBytes;
    MessagePart part;
    std::memcpy(&part, ends_.in_ring + at, sizeof part);
    if (!isSound(part, kRingBytes - at)) return false;
    const size_t bytes = partBytes(part.payload);
    if (got_ - published_ < bytes) break;
    published_ += bytes;
  }
  if (published_ == before) return true;
  ends_.in_filled->publish(published_);
  moved = true;
  return true;
}

}  // namespace ringreduce::net
