#include "wan_link.h"

#include <algorithm>
#include <sstream>

namespace wan {

namespace {

// A run is cut into pieces that take no longer than this on the line, so that it arrives about as
// evenly as its packets would; on a long line that is not needed as closely.
Nanos longestPiece(const Link& link) {
  return std::max<Nanos>(100'000, link.delay / 50);
}

// To be woken takes about this long, so what is delayed at all is due that much earlier.
constexpr Nanos kEarly = 25'000;

}  // namespace

Network::Network(int hosts, const Link& each, uint64_t seed, bool shared)
    : hosts_(hosts),
      shared_(shared),
      links_(static_cast<size_t>(hosts * hosts), each),
      free_at_(static_cast<size_t>(hosts * hosts)),
      random_(seed) {
  for (Link& link : links_) drawLoss(link);
}

void Network::drawLoss(Link& link) {
  if (link.loss <= 0) {
    link.until_loss = std::numeric_limits<int64_t>::max();
  } else if (link.loss >= 1) {
    link.until_loss = 0;
  } else {
    link.until_loss = std::geometric_distribution<int64_t>(link.loss)(random_);
  }
}

void Network::take(int from, int to, const Run& run) {
  Link& link = this->link(from, to);
  if (link.cut) {
    link.dropped_by_cut += run.packets();
    return;
  }
  const double rate = link.bits_per_nano;
  int64_t most = run.packets();
  if (rate > 0) {
    const double packet = static_cast<double>(run.bytesOf(0, 1)) * 8 / rate;
    most = std::clamp<int64_t>(
        static_cast<int64_t>(static_cast<double>(longestPiece(link)) / packet), 1, most);
  }
  const Nanos time = now();
  Nanos& free_at = free_at_[static_cast<size_t>(from * hosts_ + (shared_ ? from : to))];
  for (int64_t first = 0, count = 0; first < run.packets(); first += count) {
    const bool lost = link.until_loss == 0;
    count = lost ? 1 : std::min({most, run.packets() - first, link.until_loss});
    const Nanos start = std::max(time, free_at);
    if (start - time > link.queue) {
      link.overflowed += count;
      continue;
    }
    const int64_t bytes = run.bytesOf(first, count);
    // What is lost is lost on the way: it has taken its time on the line.
    free_at = rate > 0 ? start + static_cast<Nanos>(static_cast<double>(bytes) * 8 / rate) : start;
    if (lost) {
      ++link.lost;
      drawLoss(link);
      continue;
    }
    link.until_loss -= count;
    link.last_due = std::max(link.last_due, free_at + link.delay - std::min(kEarly, link.delay));
    link.packets += count;
    link.bytes += bytes;
    waiting_.push_back({link.last_due, order_++, &link, to, count, run.piece(first, count)});
    std::push_heap(waiting_.begin(), waiting_.end(), later);
  }
}

Network::Delivery Network::due(Nanos time) {
  while (!waiting_.empty() && waiting_.front().due <= time) {
    std::pop_heap(waiting_.begin(), waiting_.end(), later);
    Waiting next = std::move(waiting_.back());
    waiting_.pop_back();
    if (next.link->cut) {
      next.link->dropped_by_cut += next.packets;
      continue;
    }
    ++deliveries_;
    lateness_ += time - next.due;
    latest_ = std::max(latest_, time - next.due);
    return {next.to, std::move(next.piece)};
  }
  return {};
}

std::string Network::statistics() const {
  std::ostringstream out;
  out << "{\"links\": [";
  const char* comma = "";
  for (int i = 0; i < hosts_ * hosts_; ++i) {
    const Link& link = links_[static_cast<size_t>(i)];
    if (i / hosts_ == i % hosts_) continue;
    out << comma << "{\"from\": " << i / hosts_ << ", \"to\": " << i % hosts_
        << ", \"packets\": " << link.packets << ", \"bytes\": " << link.bytes
        << ", \"lost\": " << link.lost << ", \"overflowed\": " << link.overflowed
        << ", \"dropped_by_cut\": " << link.dropped_by_cut << "}";
    comma = ", ";
  }
  const int64_t mean = deliveries_ ? lateness_ / deliveries_ : 0;
  out << "], \"late_us\": {\"mean\": " << static_cast<double>(mean) / 1e3
      << ", \"most\": " << static_cast<double>(latest_) / 1e3 << "}}";
  return out.str();
}

}  // namespace wan
