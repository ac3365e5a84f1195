// Frames to bytes and back, integers in little-endian order; and the state that they change.
#include "health/control_frames.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "transport/shm/page.h"

namespace ringreduce::net {
namespace {

constexpr size_t kHead = 4;            // one byte of type, three of length
constexpr size_t kAtATime = 16 << 10;  // bytes that an outbox gives at a time

class Writer {
 public:
  template <class T>
  Writer& put(T value) {
    const auto bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<char>(bits >> (8 * i)));
    return *this;
  }
  Writer& text(const std::string& text) {
    bytes_ += text.substr(0, kMostText);
    return *this;
  }
  std::string take(size_t type) {
    std::string head(1, static_cast<char>(type));
    for (size_t i = 0; i < 3; ++i) head.push_back(static_cast<char>(bytes_.size() >> (8 * i)));
    return head + bytes_;
  }

 private:
  std::string bytes_;
};

void write(Writer&, const Heartbeat&) {}
void write(Writer&, const Bridged&) {}
void write(Writer& out, const Departed& f) {
  out.put(f.rank).put(static_cast<uint32_t>(f.how));
}
void write(Writer& out, const GroupFailure& f) {
  out.put(static_cast<uint8_t>(f.kind)).put(f.culprit).put(f.reporter).text(f.text);
}
void write(Writer& out, const Broken& f) {
  out.put(f.reporter).put(f.rank).put(static_cast<uint8_t>(f.how));
}
void write(Writer& out, const Question& f) {
  out.put(f.asker).put(f.number).put(f.since);
}
void write(Writer& out, const OpSignature& a) {
  out.put(a.sequence).put(a.count).put(a.history);
  out.put(static_cast<uint8_t>(a.kind)).put(static_cast<uint8_t>(a.dtype)).put(a.op);
  out.put(a.root).put(a.parts);
}
void write(Writer& out, const Answer& f) {
  out.put(f.rank).put(f.number).put(f.there.announced).put(f.there.waits_for);
  write(out, f.there.last);
  out.put(static_cast<uint8_t>(f.there.stopped));
  const size_t earlier = std::min<size_t>(f.there.earlier.size(), kAnnouncements);
  out.put(static_cast<uint8_t>(earlier));
  for (size_t i = 0; i < earlier; ++i) write(out, f.there.earlier[i]);
  const StreamProgress& streams = f.there.streams;
  const bool under_way = streams.oldest.sequence != kNoOperation;
  out.put(streams.announced).put(static_cast<uint8_t>(under_way));
  if (under_way) {
    write(out, streams.oldest);
    out.put(static_cast<uint8_t>(streams.begun));
  }
  for (int rank : f.stopped) out.put(rank);
}

// Reads integers from a frame.  After the first error it stays `wrong`.
class Reader {
 public:
  Reader(const char* data, size_t bytes, int size) : data_(data), left_(bytes), size_(size) {}

  template <class T>
  T get() {
    uint64_t bits = 0;
    if (left_ < sizeof(T)) {
      wrong_ = true;
      return T{};
    }
    for (size_t i = 0; i < sizeof(T); ++i)
      bits |= static_cast<uint64_t>(static_cast<unsigned char>(data_[i])) << (8 * i);
    data_ += sizeof(T);
    left_ -= sizeof(T);
    return static_cast<T>(bits);
  }
  template <class T>
  T get(T low, T high) {
    const auto value = get<std::underlying_type_t<T>>();
    if (value < static_cast<std::underlying_type_t<T>>(low) ||
        value > static_cast<std::underlying_type_t<T>>(high))
      wrong_ = true;
    return static_cast<T>(value);
  }
  int rank() {
    const int value = get<int>();
    if (value < 0 || value >= size_) wrong_ = true;
    return value;
  }
  int rankOrNone() {
    const int value = get<int>();
    if (value < -1 || value >= size_) wrong_ = true;
    return value;
  }
  bool flag() {
    const auto value = get<uint8_t>();
    if (value > 1) wrong_ = true;
    return value != 0;
  }
  std::string text() {
    if (left_ > kMostText) wrong_ = true;
    std::string text(data_, wrong_ ? 0 : left_);
    left_ = 0;
    return text;
  }
  void require(bool fine) { wrong_ = wrong_ || !fine; }
  int size() const { return size_; }
  size_t left() const { return left_; }
  bool wrong() const { return wrong_; }

 private:
  const char* data_;
  size_t left_;
  const int size_;
  bool wrong_ = false;
};

void read(Reader&, Heartbeat&) {}
void read(Reader&, Bridged&) {}
void read(Reader& in, Departed& f) {
  f.rank = in.rank();
  f.how = in.get(Declared::kLeaving, Declared::kGone);
}
void read(Reader& in, GroupFailure& f) {
  f.kind = in.get(Failure::kPeerLost, Failure::kArgument);
  f.culprit = in.rank();
  f.reporter = in.rank();
  f.text = in.text();
}
void read(Reader& in, Broken& f) {
  f.reporter = in.rank();
  f.rank = in.rank();
  f.how = in.get(Broken::How::kEnded, Broken::How::kSilent);
}
void read(Reader& in, Question& f) {
  f.asker = in.rank();
  f.number = in.get<uint64_t>();
  f.since = in.get<uint64_t>();
}
void read(Reader& in, OpSignature& a) {
  a.sequence = in.get<uint64_t>();
  a.count = in.get<uint64_t>();
  a.history = in.get<uint64_t>();
  a.kind = static_cast<Kind>(in.get<uint8_t>());
  a.dtype = static_cast<DType>(in.get<uint8_t>());
  a.op = in.get<uint8_t>();
  a.root = in.get<int32_t>();
  a.parts = in.get<uint64_t>();
  in.require(isSound(a, in.size()));
}
void read(Reader& in, Answer& f) {
  f.rank = in.rank();
  f.number = in.get<uint64_t>();
  f.there.announced = in.get<uint64_t>();
  f.there.waits_for = in.rankOrNone();
  read(in, f.there.last);
  f.there.stopped = in.flag();
  const auto earlier = in.get<uint8_t>();
  in.require(earlier <= kAnnouncements);
  for (int i = 0; i < earlier && !in.wrong(); ++i) read(in, f.there.earlier.emplace_back());
  StreamProgress& streams = f.there.streams;
  streams.announced = in.get<uint64_t>();
  if (in.flag()) {
    read(in, streams.oldest);
    in.require(streams.oldest.sequence != kNoOperation);
    streams.begun = in.flag();
  }
  while (!in.wrong() && in.left() > 0) f.stopped.push_back(in.rank());
}

// The frame of the type with this number.
template <size_t type = 0>
std::optional<ControlFrame> parse(size_t wanted, Reader& in) {
  if constexpr (type == std::variant_size_v<ControlFrame>) {
    return std::nullopt;
  } else {
    if (wanted != type) return parse<type + 1>(wanted, in);
    std::variant_alternative_t<type, ControlFrame> frame;
    read(in, frame);
    if (in.wrong() || in.left() > 0) return std::nullopt;
    return frame;
  }
}

}  // namespace

std::string encode(const ControlFrame& frame) {
  Writer out;
  std::visit([&](const auto& f) { write(out, f); }, frame);
  return out.take(frame.index());
}

void ControlReader::feed(std::span<const std::byte> bytes) {
  if (failed_) return;
  bytes_.erase(0, read_);
  read_ = 0;
  bytes_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::optional<ControlFrame> ControlReader::next() {
  if (failed_ || bytes_.size() - read_ < kHead) return std::nullopt;
  const auto* head = reinterpret_cast<const unsigned char*>(bytes_.data() + read_);
  const size_t length = head[1] | size_t{head[2]} << 8 | size_t{head[3]} << 16;
  // Check the head first: no memory is kept for a frame that is refused.
  failed_ = head[0] >= std::variant_size_v<ControlFrame> || length > kMostFrame;
  if (failed_ || bytes_.size() - read_ < kHead + length) return std::nullopt;
  Reader in(bytes_.data() + read_ + kHead, length, size_);
  std::optional<ControlFrame> frame = parse(head[0], in);
  read_ += kHead + length;
  failed_ = !frame;
  return frame;
}

// ---- the state

ControlState::ControlState(int size) : ranks_(static_cast<size_t>(size)) {}

bool ControlState::depart(int rank, Declared how) {
  if (how <= at(rank).departure) return false;
  at(rank).departure = how;
  return true;
}

bool ControlState::asked(const Question& question) {
  if (question.number <= at(question.asker).questions) return false;
  at(question.asker).questions = question.number;
  at(question.asker).since = question.since;
  return true;
}

bool ControlState::answered(const Answer& answer) {
  if (answer.number <= at(answer.rank).answer.number) return false;
  at(answer.rank).answer = answer;
  return true;
}

std::optional<int> ControlState::broke(const Broken& broken) {
  const bool news = broken.how == Broken::How::kUnreachable
                        ? cut_.insert(std::minmax(broken.reporter, broken.rank)).second
                        : ended_.insert(broken.rank).second;
  if (!news) return std::nullopt;
  broken_.push_back(broken);
  return static_cast<int>(broken_.size()) - 1;
}

Outbox ControlState::all() const {
  Outbox all;
  if (failure) all.add({Outbox::Kind::kFailure, 0});
  for (int r = 0; r < size(); ++r)
    if (departure(r) != Declared::kHere) all.add({Outbox::Kind::kDeparture, r});
  for (size_t i = 0; i < broken_.size(); ++i) all.add({Outbox::Kind::kBroken, static_cast<int>(i)});
  return all;
}

ControlFrame ControlState::frame(Outbox::Item item) const {
  const int i = item.second;
  switch (item.first) {
    case Outbox::Kind::kFailure:
      return *failure;
    case Outbox::Kind::kDeparture:
      return Departed{i, departure(i)};
    case Outbox::Kind::kBroken:
      return broken_[static_cast<size_t>(i)];
    case Outbox::Kind::kQuestion:
      return Question{i, questionsOf(i), at(i).since};
    case Outbox::Kind::kAnswer:
      break;
  }
  return at(i).answer;
}

void ControlState::take(Outbox& from, bool also_asking, std::string& out) const {
  while (out.size() < kAtATime && !from.items_.empty()) {
    const Outbox::Item item = *from.items_.begin();
    if (item.first >= Outbox::Kind::kQuestion && !also_asking) return;
    out += encode(frame(item));
    from.items_.erase(from.items_.begin());
  }
}

}  // namespace ringreduce::net
