// Cutting a stream into frames, and joining them.
#include "transport/tcp/stream.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>
#include <string>

#include "base/text.h"

namespace ringreduce::net {

// ---- frames

namespace {

// The CRC of each byte.
constexpr std::array<uint32_t, 256> kCrcOfByte = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78U : 0);
    table[byte] = crc;
  }
  return table;
}();

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  uint32_t crc = ~uint32_t{0};
  for (; bytes > 0; --bytes) crc = crc >> 8 ^ kCrcOfByte[(crc ^ *next++) & 255];
  return ~crc;
}

Frame sealed(Frame frame) {
  frame.header = crc32c(&frame, offsetof(Frame, header));
  return frame;
}

bool isSound(const Frame& frame) {
  return frame.magic == kFrameMagic && frame.bytes > 0 && frame.bytes <= kLargestFrame &&
         frame.header == crc32c(&frame, offsetof(Frame, header));
}

namespace {

constexpr std::align_val_t kBufferAlign{4096};
constexpr size_t kMostPieces = 16;  // in one system call
// A frame if several connections share a stream: small, so that a slow connection delays little.
constexpr size_t kSharedFrame = 64 << 10;
// Bytes that are read from one connection before the next one is served.
constexpr size_t kBudget = 512 << 10;

std::string route(const Connection& connection) {
  return " (connection " + routeOf(connection.socket) + ")";
}

std::string failed(const Connection& connection, int error) {
  return textOfError(error) + route(connection);
}

}  // namespace

void Pool::Free::operator()(std::byte* buffer) const {
  ::operator delete[](buffer, kBufferAlign);
}

std::byte* Pool::take() {
  if (free_.empty()) {
    all_.emplace_back(static_cast<std::byte*>(::operator new[](kPieceBytes, kBufferAlign)));
    bytes_.store(all_.size() * kPieceBytes, std::memory_order_relaxed);
    return all_.back().get();
  }
  std::byte* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Pool::trim(size_t bytes) {
  const size_t kept = bytes / kPieceBytes;
  if (all_.size() <= kept || free_.empty()) return;
  // Free those that were returned first.
  const auto end =
      free_.begin() + static_cast<ptrdiff_t>(std::min(free_.size(), all_.size() - kept));
  std::vector<std::byte*> surplus(free_.begin(), end);
  free_.erase(free_.begin(), end);
  std::ranges::sort(surplus);
  std::erase_if(all_,
                [&](const auto& one) { return std::ranges::binary_search(surplus, one.get()); });
  bytes_.store(all_.size() * kPieceBytes, std::memory_order_relaxed);
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
      std::ranges::find_if(writers_, [&](const auto& writer) { return writer->number > number; });
  Writer& writer = **writers_.insert(place, std::make_unique<Writer>());
  writer.connection.socket = std::move(socket);
  writer.number = number;
  return writer.connection;
}

size_t SendStream::spanAt(uint64_t position) const {
  const auto after = std::upper_bound(spans_.begin(), spans_.end(), position,
                                      [](uint64_t p, const Span& s) { return p < s.position; });
  return static_cast<size_t>(after - spans_.begin()) - 1;
}

// Gives the writer its next frame.
void SendStream::cutFrame(Writer& writer) {
  const uint64_t most = used() > 1 ? kSharedFrame : kLargestFrame;
  writer.at = cut_;
  writer.end = cut_ = std::min(posted_, cut_ + most);
  writer.frame =
      sealed({.bytes = static_cast<uint32_t>(writer.end - writer.at), .position = writer.at});
  writer.header_left = sizeof(Frame);
}

// One system call.  False if the connection takes no more for now, or is broken.
bool SendStream::write(Writer& writer) {
  std::array<iovec, kMostPieces> pieces;
  size_t count = 0, wanted = writer.header_left;
  if (writer.header_left > 0)
    pieces[count++] = {
        reinterpret_cast<std::byte*>(&writer.frame) + sizeof(Frame) - writer.header_left,
        writer.header_left};
  uint64_t at = writer.at;
  for (size_t i = at < writer.end ? spanAt(at) : 0; at < writer.end && count < kMostPieces; ++i) {
    const Span& s = spans_[i];
    const size_t n = std::min(writer.end, s.position + s.bytes) - at;
    pieces[count++] = {const_cast<std::byte*>(s.data) + (at - s.position), n};
    wanted += n;
    at += n;
  }
  const ssize_t n = writer.connection.send(pieces.data(), count);
  if (n < 0) {
    if (errno == EINTR) return true;
    writer.connection.ready = false;
    if (errno != EAGAIN && errno != EWOULDBLOCK) why_ = failed(writer.connection, errno);
    return false;
  }
  auto moved = static_cast<size_t>(n);
  taken_ += moved;
  writer.connection.ready = moved == wanted;
  const size_t header = std::min(moved, writer.header_left);
  writer.header_left -= header;
  moved -= header;
  markSent(writer.at, writer.at + moved);
  writer.at += moved;
  return true;
}

void SendStream::markSent(uint64_t from, uint64_t to) {
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
  // One system call for each connection in turn, so that even a small backlog is shared.
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < writers_.size(); ++i) {
      const size_t place = (first_ + i) % writers_.size();
      Writer& writer = *writers_[place];
      if (!writer.connection.mayMove()) continue;
      if (!writer.busy()) {
        if (cut_ == posted_ || place >= used_) continue;
        cutFrame(writer);
      }
      if (write(writer)) again = moved = true;
      if (!why_.empty()) return Moved::kBroken;
    }
    if (!writers_.empty()) first_ = (first_ + 1) % writers_.size();
    if (used() == 1) break;  // the caller receives between two frames
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
  readers_.push_back(std::make_unique<Reader>());
  readers_.back()->connection.socket = std::move(socket);
}

int RecvStream::openConnections() const {
  return static_cast<int>(
      std::ranges::count_if(readers_, [](const auto& reader) { return !reader->closed; }));
}

uint64_t RecvStream::arrived() const {
  uint64_t bytes = 0;
  for (const auto& reader : readers_) {
    if (reader->connection.pipe) continue;
    const Socket& socket = reader->connection.socket;
    bytes += socket.bytesRead() + (reader->closed ? 0 : bytesWaiting(socket));
  }
  return bytes;
}

bool RecvStream::broken(const std::string& why) {
  dead_ = true;
  if (why_.empty()) why_ = why;
  return false;
}

size_t RecvStream::entryAt(uint64_t position) {
  // Empty entries share their position with the next one: the last that begins there is meant.
  const auto after = std::upper_bound(expected_.begin(), expected_.end(), position,
                                      [](uint64_t p, const Expected& e) { return p < e.position; });
  return static_cast<size_t>(after - expected_.begin()) - 1;
}

void RecvStream::markReceived(uint64_t from, uint64_t to) {
  for (size_t i = from < to ? entryAt(from) : 0; from < to; ++i) {
    Expected& e = expected_[i];
    const size_t n = std::min(to, e.position + e.bytes) - from;
    e.left -= n;
    missing_ -= n;
    from += n;
  }
}

// `bytes` more of the frame have arrived at their destination.
void RecvStream::advance(Reader& reader, size_t bytes) {
  markReceived(reader.at, reader.at + bytes);
  reader.at += bytes;
}

// Records a frame.  False if an earlier frame contained any of its bytes.
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

// Reads the next header.  False if it is invalid.
bool RecvStream::parseHeader(Reader& reader) {
  Frame frame;
  std::memcpy(&frame, reader.ahead.data() + reader.ahead_begin, sizeof frame);
  reader.ahead_begin += sizeof(Frame);
  if (!isSound(frame))
    return broken("what came is no frame of ringreduce's" + route(reader.connection));
  reader.at = frame.position;
  reader.end = reader.at + frame.bytes;
  return claim(reader.at, reader.end);
}

// Copies bytes that were read ahead to their destination, as far as that is known.
void RecvStream::takeAhead(Reader& reader) {
  size_t total = 0;
  size_t n = std::min<uint64_t>(reader.aheadBytes(), std::min(reader.end, expected_end_) -
                                                         std::min(reader.at, expected_end_));
  uint64_t at = reader.at;
  for (size_t i = n ? entryAt(at) : 0; n > 0; ++i) {
    Expected& e = expected_[i];
    const size_t here = std::min<uint64_t>(n, e.position + e.bytes - at);
    if (here == 0) continue;
    if (!e.data) e.data = pool_.take();
    std::memcpy(e.data + (at - e.position), reader.ahead.data() + reader.ahead_begin, here);
    reader.ahead_begin += here;
    at += here;
    n -= here;
    total += here;
  }
  advance(reader, total);
}

// One system call.  False if nothing is left for now, the destination is not known yet, or the
// connection has ended.
bool RecvStream::read(Reader& reader, size_t& budget) {
  std::array<iovec, kMostPieces> pieces;
  size_t count = 0, wanted = 0;
  uint64_t at = reader.at;
  const uint64_t known = std::min(reader.end, expected_end_);
  if (at < reader.end && at >= known) return false;  // no destination yet: it stays in the socket
  for (size_t i = at < known ? entryAt(at) : 0; at < known && count + 1 < kMostPieces; ++i) {
    Expected& e = expected_[i];
    const size_t n = std::min(known, e.position + e.bytes) - at;
    if (n == 0) continue;
    if (!e.data) e.data = pool_.take();
    pieces[count++] = {e.data + (at - e.position), n};
    wanted += n;
    at += n;
  }
  // Read the next header together with the end of the frame.
  if (at == reader.end) {
    if (reader.ahead_begin == reader.ahead_end) reader.ahead_begin = reader.ahead_end = 0;
    if (reader.ahead_begin > 0 && reader.ahead.size() - reader.ahead_end < sizeof(Frame)) {
      std::memmove(reader.ahead.data(), reader.ahead.data() + reader.ahead_begin,
                   reader.aheadBytes());
      reader.ahead_end -= reader.ahead_begin;
      reader.ahead_begin = 0;
    }
    pieces[count++] = {reader.ahead.data() + reader.ahead_end,
                       reader.ahead.size() - reader.ahead_end};
  }
  const ssize_t n = reader.connection.receive(pieces.data(), count);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    reader.connection.ready = false;
    return false;
  }
  if (n <= 0) {
    reader.connection.ready = false;
    reader.closed = true;
    if (n < 0) return broken(failed(reader.connection, errno));
    if (reader.at < reader.end || reader.aheadBytes() > 0)
      return broken("the connection ended in the midst of a frame");
    return false;
  }
  received_ += static_cast<uint64_t>(n);
  const size_t here = std::min(static_cast<size_t>(n), wanted);
  reader.ahead_end += static_cast<size_t>(n) - here;
  // A short read: the socket is empty, unless the end of the connection follows.
  if (here < wanted || (at == reader.end && reader.ahead_end < reader.ahead.size()))
    reader.connection.ready = reader.connection.hangup;
  budget -= std::min(budget, static_cast<size_t>(n));
  advance(reader, here);
  return true;
}

Moved RecvStream::progress() {
  bool moved = false;
  size_t closed = 0;
  for (const auto& each : readers_) {
    Reader& reader = *each;
    size_t budget = kBudget;
    while (!dead_ && budget > 0) {
      if (reader.at == reader.end && reader.aheadBytes() >= sizeof(Frame)) {
        if (!parseHeader(reader)) break;
      }
      if (reader.at < reader.end && reader.aheadBytes() > 0) {
        const uint64_t before = reader.at;
        takeAhead(reader);
        if (reader.at > before) {
          moved = true;
          continue;
        }
        break;  // no destination yet
      }
      if (!reader.connection.mayMove() || reader.closed) break;
      if (!read(reader, budget)) break;
      moved = true;
    }
    closed += reader.closed ? 1 : 0;
  }
  if (dead_) return Moved::kBroken;
  if (moved) return Moved::kSome;
  if (missing_ > 0 && !readers_.empty() && closed == readers_.size()) {
    if (why_.empty()) why_ = "it closed the connection";
    return Moved::kBroken;
  }
  return Moved::kNothing;
}

// ---- how many connections

namespace {

// Connections on a long path: slow start needs a round trip for each doubling.  BBR needs fewer.
constexpr int kAtFirst = 8, kAtFirstWithBbr = 4;
constexpr double kWorthwhile = 1.15;
constexpr int kTriesPaced = 3;
// A stream that reaches this part of its pace, or of its rate of before, has enough connections.
constexpr double kWell = 0.8;

}  // namespace

int initialConnections(Nanos round_trip) {
  return round_trip > kLongPath ? kAtFirstWithBbr : 1;
}

int ConnectionCount::look(const Sample& sample, bool busy) {
  round_trip_ = sample.round_trip;
  pace_ = sample.pace;
  if (const bool paced = sample.pace > 0; std::exchange(paced_, paced) != paced) {
    settled_ = false;
    before_ = 0;
    in_vain_ = 0;
    lost_ = 0;
    since_ = sample;
    if (paced) wanted_ = std::min(wanted_, std::max(least_, kAtFirstWithBbr));
    return wanted_;
  }
  if (!busy || sample.connections < wanted_ || since_.time == 0) {
    since_ = sample;
    return wanted_;
  }
  const Nanos measured = sample.time - since_.time;
  const int first = std::min(sample.bbr || paced_ ? kAtFirstWithBbr : kAtFirst, most_);
  if (isLongPath() && wanted_ < first) {
    since_ = sample;
    return wanted_ = first;
  }
  if (measured < std::max<Nanos>(50 * kMillisecond, 4 * round_trip_)) return wanted_;
  rate_ = static_cast<double>(sample.sent - since_.sent) / static_cast<double>(measured) * 1e9;
  const uint64_t lost = sample.retransmits - since_.retransmits;
  lost_ += lost;
  since_ = sample;
  if (wanted_ == most_ || sample.bbr) return wanted_;
  if (settled_) {
    // Losses shrink windows only after a while, and then the first measurements have said too much.
    // Connections that do not help do no harm on a long path.
    if (isLongPath() && !paced_ && lost > 0 && rate_ < kWell * before_)
      wanted_ = std::min(2 * wanted_, most_);
    return wanted_;
  }
  // The pace tells what the line carries.  A stream that loses packets and is slower needs more.
  if (paced_ && (lost == 0 || rate_ > kWell * sample.pace)) return wanted_;
  if (lost_ == 0 && !isLongPath()) return wanted_;
  if (rate_ < before_ * kWorthwhile) {
    // Of a paced stream that loses packets one measurement says little.
    if (paced_ && ++in_vain_ < kTriesPaced) return wanted_;
    settled_ = true;
    // On a short path surplus connections only cost system calls.  On a long path they do no harm,
    // and one measurement says little while windows open and close.
    if (isLongPath()) {
      before_ = std::max(before_, rate_);
      return wanted_;
    }
    no_faster_ = wanted_;
    rate_ = before_;
    return wanted_ = fewer_;
  }
  in_vain_ = 0;
  before_ = rate_;
  fewer_ = wanted_;
  return wanted_ = std::min(2 * wanted_, most_);
}

bool ConnectionCount::isLongPath() const {
  return round_trip_ > kLongPath;
}

std::string ConnectionCount::why() const {
  std::string text = std::to_string(wanted_) + ": round trip " +
                     fixedText(static_cast<double>(round_trip_) / kMillisecond, 1) + " ms, " +
                     std::to_string(lost_) + " packets lost, " + fixedText(rate_ * 8e-6, 0) +
                     " Mbit/s";
  if (paced_) text += ", paced at " + fixedText(pace_ * 8e-6, 0);
  if (no_faster_ > 0) text += "; " + std::to_string(no_faster_) + " were no faster";
  return text;
}

// ---- the rate of a stream on a long path

void Pace::countLosses(const Sample& sample, bool queue) {
  constexpr int kMany = 3;
  // A queue that overflows is empty soon, and its packets are sent again later, some by timers.
  constexpr Nanos kRepaired = kSecond;
  const bool loses = sample.retransmits > std::exchange(retransmits_, sample.retransmits);
  if (queue) queue_seen_ = sample.time;
  if (sample.sent - counted_from_ > kLossBytes) {
    counted_from_ = sample.sent;
    losses_alone_ = 0;
  }
  if (loses && sample.time - queue_seen_ > kRepaired) ++losses_alone_;
  is_lossy_ = is_lossy_ || losses_alone_ >= kMany;
}

double Pace::look(const Sample& sample, double line) {
  constexpr Nanos kSystems = 2 * kMillisecond;  // systems may answer so late
  constexpr double kStep = 0.1;                 // the part by which the rate rises in a round trip
  constexpr double kMost = 16;                  // so many times the line is no limit any more
  // Round trips: with a queue at the least rate, and at half of it.
  constexpr int kPatience = 16, kTry = 3;
  if (sample.smoothed > 0) base_ = std::min(base_, sample.smoothed);
  const bool queue = sample.smoothed > std::max(sample.round_trip, base_) * 5 / 4 + kSystems;
  countLosses(sample, queue);
  if (line <= 0 || sample.bbr || is_lossy_ || sample.round_trip <= kLongPath) return rate_ = 0;
  if (sample.smoothed == 0) return rate_;  // nothing is on its way
  const auto looksIn = [&](int round_trips) {
    return round_trips * static_cast<int>(1 + sample.smoothed / kLookEvery);
  };
  if (tries_ > 0) {
    if (--tries_ > 0) return rate_;
    if (queue) base_ = sample.smoothed;
    return rate_ = line;
  }
  const double step = kStep * kLookEvery / static_cast<double>(sample.round_trip);
  // A call of before may have had more streams, and a lower limit.
  if (queue)
    rate_ = std::max(line, rate_ * (1 - 2 * step));
  else if (rate_ > 0)
    rate_ = std::clamp(rate_ * (1 + step), line, kMost * line);
  at_least_ = queue && rate_ <= line ? at_least_ + 1 : 0;
  if (at_least_ >= looksIn(kPatience)) {
    at_least_ = 0;
    tries_ = looksIn(kTry);
    rate_ = line / 2;
  }
  return rate_;
}

}  // namespace ringreduce::net
