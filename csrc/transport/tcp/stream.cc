// Cutting and joining frames.
#include "transport/tcp/stream.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

namespace ringreduce::net {
namespace {

constexpr std::align_val_t kBufferAlign{4096};
constexpr size_t kMostPieces = 16;  // of memory, in one system call
// A frame where several connections share a stream: small, so that a slow one holds up little.
constexpr size_t kSharedFrame = 64 << 10;
// How much one connection may take in before others have their turn.
constexpr size_t kBudget = 512 << 10;

std::string way(const Connection& connection) {
  return " (connection " + wayOf(connection.socket) + ")";
}

std::string failed(const Connection& connection, int error) {
  return textOfError(error) + way(connection);
}

}  // namespace

void Pool::Free::operator()(std::byte* buffer) const {
  ::operator delete[](buffer, kBufferAlign);
}

std::byte* Pool::take() {
  if (free_.empty()) {
    all_.emplace_back(static_cast<std::byte*>(::operator new[](kPieceBytes, kBufferAlign)));
    return all_.back().get();
  }
  std::byte* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Pool::trim(size_t bytes) {
  const size_t kept = bytes / kPieceBytes;
  if (all_.size() <= kept || free_.empty()) return;
  // Those given back first.
  const auto end =
      free_.begin() + static_cast<ptrdiff_t>(std::min(free_.size(), all_.size() - kept));
  std::vector<std::byte*> surplus(free_.begin(), end);
  free_.erase(free_.begin(), end);
  std::ranges::sort(surplus);
  std::erase_if(all_,
                [&](const auto& one) { return std::ranges::binary_search(surplus, one.get()); });
}

// ---- sending

void SendStream::push(const void* data, size_t bytes, std::byte* buffer) {
  spans_.push_back({.position = posted_,
                    .data = static_cast<const std::byte*>(data),
                    .bytes = bytes,
                    .left = bytes,
                    .buffer = buffer});
  posted_ += bytes;
}

void SendStream::send(const void* data, size_t bytes) {
  if (bytes > 0) push(data, bytes, nullptr);
}

void SendStream::sendBuffer(std::byte* buffer, size_t bytes) {
  if (bytes == 0) return pool_.give(buffer);
  push(buffer, bytes, buffer);
  ++buffers_;
}

Connection& SendStream::add(Socket socket, int number) {
  const auto place =
      std::ranges::find_if(lanes_, [&](const auto& lane) { return lane->number > number; });
  Lane& lane = **lanes_.insert(place, std::make_unique<Lane>());
  lane.connection.socket = std::move(socket);
  lane.number = number;
  return lane.connection;
}

size_t SendStream::spanAt(uint64_t position) const {
  const auto after = std::upper_bound(spans_.begin(), spans_.end(), position,
                                      [](uint64_t p, const Span& s) { return p < s.position; });
  return static_cast<size_t>(after - spans_.begin()) - 1;
}

// The lane's next frame.
void SendStream::cut(Lane& lane) {
  const uint64_t most = used() > 1 ? kSharedFrame : kLargestFrame;
  lane.at = cut_;
  lane.end = cut_ = std::min(posted_, cut_ + most);
  lane.frame = sealed({.bytes = static_cast<uint32_t>(lane.end - lane.at), .position = lane.at});
  lane.header_left = sizeof(Frame);
}

// False once the connection takes no more for now, or is broken.
bool SendStream::write(Lane& lane) {
  std::array<iovec, kMostPieces> pieces;
  size_t count = 0, wanted = lane.header_left;
  if (lane.header_left > 0)
    pieces[count++] = {reinterpret_cast<std::byte*>(&lane.frame) + sizeof(Frame) - lane.header_left,
                       lane.header_left};
  uint64_t at = lane.at;
  for (size_t i = at < lane.end ? spanAt(at) : 0; at < lane.end && count < kMostPieces; ++i) {
    const Span& s = spans_[i];
    const size_t n = std::min(lane.end, s.position + s.bytes) - at;
    pieces[count++] = {const_cast<std::byte*>(s.data) + (at - s.position), n};
    wanted += n;
    at += n;
  }
  const ssize_t n = lane.connection.socket.send(pieces.data(), count);
  if (n < 0) {
    if (errno == EINTR) return true;
    lane.connection.ready = false;
    if (errno != EAGAIN && errno != EWOULDBLOCK) why_ = failed(lane.connection, errno);
    return false;
  }
  auto moved = static_cast<size_t>(n);
  taken_ += moved;
  lane.connection.ready = moved == wanted;
  const size_t header = std::min(moved, lane.header_left);
  lane.header_left -= header;
  moved -= header;
  handedOver(lane.at, lane.at + moved);
  lane.at += moved;
  return true;
}

void SendStream::handedOver(uint64_t from, uint64_t to) {
  sent_ += to - from;
  for (size_t i = from < to ? spanAt(from) : 0; from < to; ++i) {
    Span& s = spans_[i];
    const size_t n = std::min(to, s.position + s.bytes) - from;
    s.left -= n;
    from += n;
  }
  while (!spans_.empty() && spans_.front().left == 0) {
    if (spans_.front().buffer) {
      pool_.give(spans_.front().buffer);
      --buffers_;
    }
    spans_.pop_front();
  }
}

Moved SendStream::progress() {
  bool moved = false;
  // The connections in turn, each one system call: so that all of a small backlog is shared out.
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      const size_t place = (turn_ + i) % lanes_.size();
      Lane& lane = *lanes_[place];
      if (!lane.connection.ready) continue;
      if (!lane.busy()) {
        if (cut_ == posted_ || place >= used_) continue;
        cut(lane);
      }
      if (write(lane)) again = moved = true;
      if (!why_.empty()) return Moved::kBroken;
    }
    if (!lanes_.empty()) turn_ = (turn_ + 1) % lanes_.size();
    if (used() == 1) break;  // one frame at a time: what comes in is looked at between
  }
  return moved ? Moved::kSome : Moved::kNothing;
}

// ---- receiving

void RecvStream::expect(void* data, size_t bytes) {
  expected_.push_back({.position = expected_end_,
                       .data = static_cast<std::byte*>(data),
                       .bytes = bytes,
                       .left = bytes,
                       .pooled = data == nullptr});
  expected_end_ += bytes;
  missing_ += bytes;
}

void RecvStream::pop() {
  if (expected_.front().pooled && expected_.front().data) pool_.give(expected_.front().data);
  expected_.pop_front();
}

void RecvStream::add(Socket socket) {
  lanes_.push_back(std::make_unique<Lane>());
  lanes_.back()->connection.socket = std::move(socket);
}

int RecvStream::openLanes() const {
  return static_cast<int>(
      std::ranges::count_if(lanes_, [](const auto& lane) { return !lane->closed; }));
}

bool RecvStream::broken(const std::string& why) {
  dead_ = true;
  if (why_.empty()) why_ = why;
  return false;
}

size_t RecvStream::entryAt(uint64_t position) {
  // Entries of no bytes share their position with the next: the last that begins there holds it.
  const auto after = std::upper_bound(expected_.begin(), expected_.end(), position,
                                      [](uint64_t p, const Expected& e) { return p < e.position; });
  return static_cast<size_t>(after - expected_.begin()) - 1;
}

void RecvStream::credit(uint64_t from, uint64_t to) {
  for (size_t i = from < to ? entryAt(from) : 0; from < to; ++i) {
    Expected& e = expected_[i];
    const size_t n = std::min(to, e.position + e.bytes) - from;
    e.left -= n;
    missing_ -= n;
    from += n;
  }
}

// `bytes` more of the frame are at their places.
void RecvStream::placed(Lane& lane, size_t bytes) {
  credit(lane.at, lane.at + bytes);
  lane.at += bytes;
}

// Whether no other frame has brought any of these bytes.
bool RecvStream::claim(uint64_t begin, uint64_t end) {
  const auto next = claimed_.lower_bound(begin);
  if (begin < floor_ || end < begin || (next != claimed_.end() && next->first < end) ||
      (next != claimed_.begin() && std::prev(next)->second > begin))
    return broken("a frame came for bytes that had come before");
  if (begin > floor_) {
    claimed_.emplace(begin, end);
    return true;
  }
  floor_ = end;
  while (!claimed_.empty() && claimed_.begin()->first == floor_) {
    floor_ = claimed_.begin()->second;
    claimed_.erase(claimed_.begin());
  }
  return true;
}

// The next header, once it is there; false if it cannot be one.
bool RecvStream::parse(Lane& lane) {
  Frame frame;
  std::memcpy(&frame, lane.ahead.data() + lane.ahead_begin, sizeof frame);
  lane.ahead_begin += sizeof(Frame);
  if (!isSound(frame))
    return broken("what came is no frame of ringreduce's" + way(lane.connection));
  lane.at = frame.position;
  lane.end = lane.at + frame.bytes;
  return claim(lane.at, lane.end);
}

// Puts what was read ahead where it belongs, as far as places are known.
void RecvStream::takeAhead(Lane& lane) {
  size_t total = 0;
  size_t n = std::min<uint64_t>(
      lane.aheadBytes(), std::min(lane.end, expected_end_) - std::min(lane.at, expected_end_));
  uint64_t at = lane.at;
  for (size_t i = n ? entryAt(at) : 0; n > 0; ++i) {
    Expected& e = expected_[i];
    const size_t here = std::min<uint64_t>(n, e.position + e.bytes - at);
    if (here == 0) continue;
    if (!e.data) e.data = pool_.take();
    std::memcpy(e.data + (at - e.position), lane.ahead.data() + lane.ahead_begin, here);
    lane.ahead_begin += here;
    at += here;
    n -= here;
    total += here;
  }
  placed(lane, total);
}

// One system call; false once there is no more for now, no place for it, or no more at all.
bool RecvStream::read(Lane& lane, size_t& budget) {
  std::array<iovec, kMostPieces> pieces;
  size_t count = 0, wanted = 0;
  uint64_t at = lane.at;
  const uint64_t known = std::min(lane.end, expected_end_);
  if (at < lane.end && at >= known) return false;  // no place yet: it stays where it is
  for (size_t i = at < known ? entryAt(at) : 0; at < known && count + 1 < kMostPieces; ++i) {
    Expected& e = expected_[i];
    const size_t n = std::min(known, e.position + e.bytes) - at;
    if (n == 0) continue;
    if (!e.data) e.data = pool_.take();
    pieces[count++] = {e.data + (at - e.position), n};
    wanted += n;
    at += n;
  }
  // The header that follows the frame comes with it.
  if (at == lane.end) {
    if (lane.ahead_begin == lane.ahead_end) lane.ahead_begin = lane.ahead_end = 0;
    if (lane.ahead_begin > 0 && lane.ahead.size() - lane.ahead_end < sizeof(Frame)) {
      std::memmove(lane.ahead.data(), lane.ahead.data() + lane.ahead_begin, lane.aheadBytes());
      lane.ahead_end -= lane.ahead_begin;
      lane.ahead_begin = 0;
    }
    pieces[count++] = {lane.ahead.data() + lane.ahead_end, lane.ahead.size() - lane.ahead_end};
  }
  const ssize_t n = lane.connection.socket.receive(pieces.data(), count);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    lane.connection.ready = false;
    return false;
  }
  if (n <= 0) {
    lane.connection.ready = false;
    lane.closed = true;
    if (n < 0) return broken(failed(lane.connection, errno));
    if (lane.at < lane.end || lane.aheadBytes() > 0)
      return broken("the connection ended in the midst of a frame");
    return false;
  }
  received_ += static_cast<uint64_t>(n);
  const size_t here = std::min(static_cast<size_t>(n), wanted);
  lane.ahead_end += static_cast<size_t>(n) - here;
  // Less than there was room for: that was all, unless an end stands behind it.
  if (here < wanted || (at == lane.end && lane.ahead_end < lane.ahead.size()))
    lane.connection.ready = lane.connection.hangup;
  budget -= std::min(budget, static_cast<size_t>(n));
  placed(lane, here);
  return true;
}

Moved RecvStream::progress() {
  bool moved = false;
  size_t closed = 0;
  for (const auto& each : lanes_) {
    Lane& lane = *each;
    size_t budget = kBudget;
    while (!dead_ && budget > 0) {
      if (lane.at == lane.end && lane.aheadBytes() >= sizeof(Frame)) {
        if (!parse(lane)) break;
      }
      if (lane.at < lane.end && lane.aheadBytes() > 0) {
        const uint64_t before = lane.at;
        takeAhead(lane);
        if (lane.at > before) {
          moved = true;
          continue;
        }
        break;  // no place for it yet
      }
      if (!lane.connection.ready || lane.closed) break;
      if (!read(lane, budget)) break;
      moved = true;
    }
    closed += lane.closed ? 1 : 0;
  }
  if (dead_) return Moved::kBroken;
  if (moved) return Moved::kSome;
  if (missing_ > 0 && !lanes_.empty() && closed == lanes_.size()) {
    if (why_.empty()) why_ = "it closed the connection";
    return Moved::kBroken;
  }
  return Moved::kNothing;
}

}  // namespace ringreduce::net
