// Computes the rate of a call, and follows which ranks have heard of each other.
#include "algorithm/agreed_line.h"

#include <algorithm>
#include <utility>

namespace ringreduce {
namespace {

// Where hops take more than this part of a call, the rest says little of the line.
constexpr double kMostOfHops = 0.5;

// The distances, towards higher ranks, of those from which a rank hears.
std::vector<int> heardIn(Algorithm algorithm, int ranks, const WireCost& cost) {
  std::vector<int> distances;
  switch (algorithm) {
    case Algorithm::kRing:
      return {ranks - 1};
    case Algorithm::kBruck: {
      const int radix = bruckRadix(ranks, cost);
      for (int64_t near = 1; near < ranks; near *= radix)
        for (int64_t d = near; d < ranks && d < near * radix; d += near)
          distances.push_back(static_cast<int>(d));
      return distances;
    }
    case Algorithm::kDirect:
    case Algorithm::kTwoShot:
      for (int d = 1; d < ranks; ++d) distances.push_back(d);
      return distances;
    default:
      return {};
  }
}

}  // namespace

uint64_t arrivalRate(uint64_t bytes, Nanos took, double hops, const WireCost& cost) {
  const double all = static_cast<double>(took) * 1e-9, idle = std::max(0., hops - 1) * cost.hop;
  if (took <= 0 || bytes < AgreedLine::kLeastBytes || idle > kMostOfHops * all) return 0;
  return static_cast<uint64_t>(static_cast<double>(bytes) / (all - idle));
}

void AgreedLine::hear(Algorithm algorithm) {
  const std::vector<bool> before = heard_of_;
  for (const int d : heardIn(algorithm, ranks_, cost_))
    for (int x = 0; x < ranks_; ++x)
      if (before[static_cast<size_t>(x)]) heard_of_[static_cast<size_t>((x + d) % ranks_)] = true;
}

bool AgreedLine::end(const Candidate& taken, uint64_t seen, uint64_t heard) {
  bool is_new = false;
  if (tells_) {
    best_ = std::max(best_, heard);
    hear(taken.algorithm);
    if (std::ranges::find(heard_of_, false) == heard_of_.end()) {
      tells_ = false;
      is_new = best_ > 0;
      if (is_new) rate_.store(best_, std::memory_order_relaxed);
    }
  }
  if (taken.bytes < kLeastBytes) return is_new;
  carried_ += taken.bytes;
  // The ranks of a host share its line, but a ring crosses it once.
  const int ranks = taken.algorithm == Algorithm::kRing ? 1 : cost_.ranks_on_host;
  seen_ = std::max(seen_, seen * static_cast<uint64_t>(ranks));
  if (tells_ || carried_ < until_) return is_new;
  tells_ = true;
  best_ = std::exchange(seen_, 0);
  heard_of_.assign(static_cast<size_t>(ranks_), false);
  heard_of_[0] = true;
  carried_ = 0;
  until_ = std::min(8 * until_, kMost);
  return is_new;
}

}  // namespace ringreduce
