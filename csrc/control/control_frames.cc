// Frames to bytes and back, integers in little-endian order; and the state that they change.
#include "control/control_frames.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "transport/shm/page.h"

namespace ringreduce::net {
namespace {

constexpr size_t kHead = 4;            // one byte of type, three of length
constexpr size_t kAtATime = 16 << 10;  // bytes that an outbox gives at a time

// Writer and Reader have the same functions, so that one `fields` describes each frame for both.
class Writer {
 public:
  template <class T>
  void number(T value) {
    const auto bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<char>(bits >> (8 * i)));
  }
  template <class T>
  void choice(T value, T /*low*/, T /*high*/) {
    number(value);
  }
  void rank(int rank) { number(rank); }
  void rankOrNone(int rank) { number(rank); }
  void flag(bool value) { number(static_cast<uint8_t>(value)); }
  void text(const std::string& text) { bytes_ += text.substr(0, kMostText); }
  template <class T>
  void resize(std::vector<T>& list, size_t most) {
    if (list.size() > most) list.resize(most);
    number(static_cast<uint8_t>(list.size()));
  }
  void ranksToTheEnd(const std::vector<int>& ranks) {
    for (int one : ranks) number(one);
  }
  void require(bool) {}
  int size() const { return std::numeric_limits<int>::max(); }
  std::string take(size_t type) {
    std::string head(1, static_cast<char>(type));
    for (size_t i = 0; i < 3; ++i) head.push_back(static_cast<char>(bytes_.size() >> (8 * i)));
    return head + bytes_;
  }

 private:
  std::string bytes_;
};

// After the first error it stays `wrong`.
class Reader {
 public:
  // `size`: of the group.
  Reader(const char* data, size_t bytes, int size) : data_(data), left_(bytes), size_(size) {}

  template <class T>
  void number(T& value) {
    uint64_t bits = 0;
    require(left_ >= sizeof(T));
    const size_t bytes = wrong_ ? 0 : sizeof(T);
    for (size_t i = 0; i < bytes; ++i)
      bits |= static_cast<uint64_t>(static_cast<unsigned char>(data_[i])) << (8 * i);
    data_ += bytes;
    left_ -= bytes;
    value = static_cast<T>(bits);
  }
  template <class T>
  void choice(T& value, T low, T high) {
    number(value);
    require(value >= low && value <= high);
  }
  void rank(int& rank) {
    number(rank);
    require(rank >= 0 && rank < size_);
  }
  void rankOrNone(int& rank) {
    number(rank);
    require(rank >= -1 && rank < size_);
  }
  void flag(bool& value) {
    uint8_t byte = 0;
    number(byte);
    require(byte <= 1);
    value = byte != 0;
  }
  void text(std::string& text) {
    require(left_ <= kMostText);
    text.assign(data_, wrong_ ? 0 : left_);
    left_ = 0;
  }
  template <class T>
  void resize(std::vector<T>& list, size_t most) {
    uint8_t n = 0;
    number(n);
    require(n <= most);
    list.resize(wrong_ ? 0 : n);
  }
  void ranksToTheEnd(std::vector<int>& ranks) {
    while (!wrong_ && left_ > 0) rank(ranks.emplace_back());
  }
  void require(bool fine) { wrong_ = wrong_ || !fine; }
  int size() const { return size_; }
  bool isComplete() const { return !wrong_ && left_ == 0; }

 private:
  const char* data_;
  size_t left_;
  const int size_;
  bool wrong_ = false;
};

// Sums of a few such times do not overflow.
constexpr bool isTime(Nanos time) {
  return time >= -(kNever >> 3) && time <= kNever >> 3;
}

template <class Io>
void fields(Io& io, Heartbeat& f) {
  io.number(f.sent);
  io.number(f.difference);
  io.number(f.offset.ahead);
  io.number(f.offset.error);
  io.require(isTime(f.sent) && isTime(f.offset.ahead) &&
             (isTime(f.difference) || f.difference == kNever) &&
             ((isTime(f.offset.error) && f.offset.error >= 0) || !f.offset.isKnown()));
}
template <class Io>
void fields(Io&, Bridged&) {}
template <class Io>
void fields(Io& io, Departed& f) {
  io.rank(f.rank);
  io.choice(f.how, Declared::kLeaving, Declared::kGone);
}
template <class Io>
void fields(Io& io, GroupFailure& f) {
  io.choice(f.kind, Failure::kPeerLost, Failure::kArgument);
  io.rankOrNone(f.culprit);
  io.rank(f.reporter);
  io.text(f.text);
}
template <class Io>
void fields(Io& io, Broken& f) {
  io.rank(f.reporter);
  io.rank(f.rank);
  io.choice(f.how, Broken::How::kEnded, Broken::How::kSilent);
}
template <class Io>
void fields(Io& io, Question& f) {
  io.rank(f.asker);
  io.number(f.number);
  io.number(f.since);
}
template <class Io>
void fields(Io& io, OpSignature& a) {
  std::apply([&](auto&... field) { (io.number(field), ...); }, OpSignature::fields(a));
  io.require(isSound(a, io.size()));
}
template <class Io>
void fields(Io& io, Announcement& a) {
  fields(io, static_cast<OpSignature&>(a));
  io.number(a.arrived);
  io.number(a.clock_error);
  io.number(a.why.rank);
  io.number(a.why.micros);
  io.number(a.why.sequence);
  io.require(isTime(a.arrived));
}
template <class Io>
void fields(Io& io, Answer& f) {
  io.rank(f.rank);
  io.number(f.number);
  io.number(f.there.announced);
  io.rankOrNone(f.there.waits_for);
  fields(io, f.there.last);
  io.flag(f.there.stopped);
  io.resize(f.there.earlier, kAnnouncements);
  for (Announcement& earlier : f.there.earlier) fields(io, earlier);
  StreamProgress& streams = f.there.streams;
  bool under_way = streams.oldest.sequence != kNoOperation;
  io.number(streams.announced);
  io.flag(under_way);
  if (under_way) {
    fields(io, streams.oldest);
    io.require(streams.oldest.sequence != kNoOperation);
    io.flag(streams.begun);
  }
  io.ranksToTheEnd(f.stopped);
}

// The frame of the type with this number.
template <size_t type = 0>
std::optional<ControlFrame> parse(size_t wanted, Reader& in) {
  if constexpr (type == std::variant_size_v<ControlFrame>) {
    return std::nullopt;
  } else {
    if (wanted != type) return parse<type + 1>(wanted, in);
    std::variant_alternative_t<type, ControlFrame> frame;
    fields(in, frame);
    if (!in.isComplete()) return std::nullopt;
    return frame;
  }
}

}  // namespace

std::string encode(const ControlFrame& frame) {
  Writer out;
  std::visit([&](auto f) { fields(out, f); }, frame);
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
