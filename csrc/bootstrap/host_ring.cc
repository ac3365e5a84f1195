// Reads, checks and tells the order of rings.
#include "bootstrap/host_ring.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/text.h"

namespace ringreduce {
namespace {

constexpr int kMostNumbers = 1 << 20;
constexpr int kMostTold = 16;  // hosts whose rates are written to the log

std::vector<int> ownOrder(int n) {
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::string rateText(double mbit) {
  char text[32];
  std::snprintf(text, sizeof text, mbit < 100 ? "%.1f" : "%.0f", mbit);
  return text;
}

bool isOrderOf(const std::vector<int>& numbers, int n) {
  std::vector<int> sorted = numbers;
  std::ranges::sort(sorted);
  return sorted == ownOrder(n);
}

// The hosts in the order of their ranks; empty if some host's do not stand beside each other.
std::vector<int> hostsOf(const Hosts& hosts, const std::vector<int>& ranks) {
  std::vector<int> order;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int host = hosts.hostOf(ranks[i]);
    if (host != hosts.hostOf(ranks[(i + ranks.size() - 1) % ranks.size()])) order.push_back(host);
  }
  if (hosts.count() == 1) return {0};
  return isOrderOf(order, hosts.count()) ? order : std::vector<int>();
}

std::vector<int> ranksOf(const Hosts& hosts, const std::vector<int>& order) {
  std::vector<int> ranks;
  for (const int host : order)
    ranks.insert(ranks.end(), hosts.ranksOn(host).begin(), hosts.ranksOn(host).end());
  return ranks;
}

// Those of the group's ranks that a list names by their numbers in the whole job.
std::vector<int> ranksNamed(const std::vector<int>& list, const Hosts& hosts,
                            const GroupOptions& options) {
  std::vector<int> ranks;
  for (const int number : list)
    for (int r = 0; r < hosts.size(); ++r)
      if (options.shownAs(r) == number) ranks.push_back(r);
  return ranks;
}

void leaveOutOwnOrder(std::vector<int>& ranks) {
  if (std::ranges::is_sorted(ranks)) ranks.clear();
}

}  // namespace

RingWish RingWish::fromText(const std::string& text) {
  RingWish wish;
  if (text.empty()) return wish;
  if (text == "measure") {
    wish.measure = true;
    return wish;
  }
  const auto refuse = [&](const std::string& why) {
    throw Error(Failure::kSetup,
                "RINGREDUCE_RING=" + text + ": " + why +
                    "; it can be 'measure', or numbers of hosts or of ranks, such as 0,2,1,3");
  };
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    item.erase(0, item.find_first_not_of(" \t"));
    item.erase(item.find_last_not_of(" \t") + 1);
    if (item.empty() || item.size() > 7 ||
        item.find_first_not_of("0123456789") != std::string::npos ||
        std::stoi(item) >= kMostNumbers)
      refuse("'" + item + "' is no number of a host or a rank");
    if (std::ranges::count(wish.order, std::stoi(item)) != 0) refuse(item + " stands there twice");
    wish.order.push_back(std::stoi(item));
  }
  if (text.back() == ',') refuse("it ends with a comma");
  return wish;
}

HostRing HostRing::of(const Hosts& hosts, const RingWish& wish, const GroupOptions& options) {
  HostRing ring{.hosts = ownOrder(hosts.count())};
  if (wish.order.empty()) return ring;
  std::vector<int> order, ranks;
  if (isOrderOf(wish.order, hosts.count())) {
    order = wish.order;
    ranks = ranksOf(hosts, order);
  } else {
    // A list of all ranks there are, which may be more than these, is one of ranks.
    const int all = options.of_ranks > 0 ? options.of_ranks : hosts.size();
    ranks = ranksNamed(wish.order, hosts, options);
    if (static_cast<int>(wish.order.size()) == all &&
        static_cast<int>(ranks.size()) == hosts.size())
      order = hostsOf(hosts, ranks);
  }
  if (order.empty()) {
    if (options.of_ranks > 0) return ring;
    const auto upTo = [](int n) { return std::to_string(n) + " (0 to " + std::to_string(n - 1); };
    throw Error(Failure::kSetup,
                "RINGREDUCE_RING=" + joined(wish.order, ",") + " is no order for group '" +
                    options.name + "': name each of its hosts, " + upTo(hosts.count()) +
                    ", numbered by their lowest ranks), or each of its ranks, " +
                    upTo(hosts.size()) + "), once, and ranks of one host beside each other");
  }
  leaveOutOwnOrder(ranks);
  ring.source = Source::kGiven;
  ring.hosts = std::move(order);
  ring.ranks = std::move(ranks);
  return ring;
}

HostRing HostRing::measured(const Hosts& hosts, const Rates& mbit) {
  HostRing ring{.source = Source::kMeasured, .hosts = ownOrder(hosts.count()), .mbit = mbit};
  const std::vector<int> best = bestRing(mbit);
  if (slowestLink(mbit, best) > kWorth * slowestLink(mbit, ring.hosts)) ring.hosts = best;
  ring.ranks = ranksOf(hosts, ring.hosts);
  leaveOutOwnOrder(ring.ranks);
  return ring;
}

std::string HostRing::toText() const {
  std::string text = joined(hosts, " ");
  for (const std::vector<double>& row : mbit) {
    text += ';';
    for (const double rate : row) {
      text += ' ';
      text += rateText(rate);
    }
  }
  return text;
}

HostRing HostRing::fromText(const Hosts& hosts, const std::string& text) {
  HostRing ring{.source = Source::kMeasured, .hosts = {}};
  std::istringstream parts(text);
  std::string part;
  std::getline(parts, part, ';');
  std::istringstream order(part);
  for (int host = 0; order >> host;) ring.hosts.push_back(host);
  while (std::getline(parts, part, ';')) {
    std::istringstream row(part);
    ring.mbit.emplace_back();
    for (double rate = 0; row >> rate;) ring.mbit.back().push_back(rate);
  }
  if (!isOrderOf(ring.hosts, hosts.count()) || ring.mbit.size() != ring.hosts.size() ||
      std::ranges::any_of(ring.mbit,
                          [&](const auto& row) { return row.size() != ring.hosts.size(); }))
    throw Error(Failure::kSetup, "rank 0 sent an order of hosts that cannot be read");
  ring.ranks = ranksOf(hosts, ring.hosts);
  leaveOutOwnOrder(ring.ranks);
  return ring;
}

std::string HostRing::told(const Hosts& of) const {
  std::string text = "ring of hosts " + joined(hosts, " > ");
  if (source == Source::kGiven) {
    text += ", as RINGREDUCE_RING has it";
    if (!ranks.empty()) text += "; of ranks " + joined(ranks, " > ");
    return text;
  }
  if (mbit.size() < 2) return text + ", as there is no other to measure";
  text += ", as measured: its slowest link has " + rateText(slowestLink(mbit, hosts)) +
          " Mbit/s, that of the hosts' own order " +
          rateText(slowestLink(mbit, ownOrder(of.count())));
  if (of.count() > kMostTold) return text;
  for (int from = 0; from < of.count(); ++from) {
    text +=
        "; from host " + std::to_string(from) + " (" + of.machineOf(of.ranksOn(from).front()) + ")";
    for (int to = 0; to < of.count(); ++to) {
      text += ' ';
      text += to == from ? "-" : rateText(mbit[static_cast<size_t>(from)][static_cast<size_t>(to)]);
    }
  }
  return text;
}

}  // namespace ringreduce
