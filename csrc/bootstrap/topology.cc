// Reads the table of the rendezvous, numbers the hosts, reads and checks orders of rings.
#include "bootstrap/topology.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/config.h"
#include "base/error.h"
#include "base/text.h"
#include "bootstrap/process.h"

namespace ringreduce {

Hosts::Hosts(const Fields& table, int rank, int size, const GroupOptions& options)
    : rank_(rank),
      nonce_(ringreduce::fieldOf(table, "nonce")),
      secret_(ringreduce::fieldOf(table, "secret")) {
  std::map<std::string, int> numbers;
  const std::string own_namespace = pidNamespace();
  for (int r = 0; r < size; ++r) {
    const auto field = [&](const char* name) {
      return ringreduce::fieldOf(table, (name + std::to_string(r)).c_str());
    };
    const int host =
        numbers.try_emplace(field("id"), static_cast<int>(numbers.size())).first->second;
    host_of_.push_back(host);
    ranks_.resize(numbers.size());
    ranks_[static_cast<size_t>(host)].push_back(r);
    names_.push_back("pid " + field("pid") + " on host " + field("host"));
    machines_.push_back(field("host"));
    who_.push_back("rank " + options.shown(r) + " (" + names_.back() + ")");
    const bool seen_here = field("pid_namespace") == own_namespace;
    pids_.push_back(seen_here ? static_cast<int>(number(table, ("pid" + std::to_string(r)).c_str()))
                              : 0);
    settings_.push_back(field("said"));
  }
}

int Hosts::localRankOf(int rank) const {
  const std::vector<int>& all = ranksOn(hostOf(rank));
  return static_cast<int>(std::ranges::find(all, rank) - all.begin());
}

bool Hosts::even() const {
  return std::ranges::all_of(ranks_,
                             [&](const auto& ranks) { return ranks.size() == ranks_[0].size(); });
}

LocalRanks Hosts::memoryExchange(const std::string& purpose, const SharedOptions& shared,
                                 const GroupOptions& options) const {
  return {.rank = localRankOf(rank_),
          .size = static_cast<int>(localRanks().size()),
          .socket = "ringreduce-" + nonce_ + "-" + purpose + std::to_string(hostOf(rank_)),
          .secret = secret_,
          .shared = shared,
          .options = options.ofRanks(localRanks())};
}

// ---- the order of rings

namespace {

constexpr int kMostNumbers = 1 << 20;
constexpr int kMostTold = 16;  // hosts whose rates are written to the log

std::vector<int> ownOrder(int n) {
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::string rateText(double mbit) {
  return fixedText(mbit, mbit < 100 ? 1 : 0);
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
      if (options.startedAs(r) == number) ranks.push_back(r);
  return ranks;
}

void leaveOutOwnOrder(std::vector<int>& ranks) {
  if (std::ranges::is_sorted(ranks)) ranks.clear();
}

}  // namespace

RingSetting RingSetting::fromText(const std::string& text) {
  RingSetting setting;
  if (text.empty()) return setting;
  if (text == "measure") {
    setting.measure = true;
    return setting;
  }
  const auto refuse = [&](const std::string& why) {
    throw Error(Failure::kSetup,
                "RINGREDUCE_RING=" + text + ": " + why +
                    "; it can be 'measure', or numbers of hosts or of ranks, such as 0,2,1,3");
  };
  TextReader items(text);
  for (std::string item; std::getline(items, item, ',');) {
    item.erase(0, item.find_first_not_of(" \t"));
    item.erase(item.find_last_not_of(" \t") + 1);
    if (item.empty() || item.size() > 7 ||
        item.find_first_not_of("0123456789") != std::string::npos ||
        std::stoi(item) >= kMostNumbers)
      refuse("'" + item + "' is no number of a host or a rank");
    if (std::ranges::count(setting.order, std::stoi(item)) != 0)
      refuse(item + " stands there twice");
    setting.order.push_back(std::stoi(item));
  }
  if (text.back() == ',') refuse("it ends with a comma");
  return setting;
}

HostRing HostRing::of(const Hosts& hosts, const RingSetting& setting, const GroupOptions& options) {
  HostRing ring{.hosts = ownOrder(hosts.count())};
  if (setting.order.empty()) return ring;
  std::vector<int> order, ranks;
  if (isOrderOf(setting.order, hosts.count())) {
    order = setting.order;
    ranks = ranksOf(hosts, order);
  } else {
    // A list of all ranks there are, which may be more than these, is one of ranks.
    const int all = options.of_ranks > 0 ? options.of_ranks : hosts.size();
    ranks = ranksNamed(setting.order, hosts, options);
    if (static_cast<int>(setting.order.size()) == all &&
        static_cast<int>(ranks.size()) == hosts.size())
      order = hostsOf(hosts, ranks);
  }
  if (order.empty()) {
    if (options.of_ranks > 0) return ring;
    const auto upTo = [](int n) { return std::to_string(n) + " (0 to " + std::to_string(n - 1); };
    throw Error(Failure::kSetup,
                "RINGREDUCE_RING=" + joined(setting.order, ",") + " is no order for group '" +
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
  TextReader parts(text);
  std::string part;
  std::getline(parts, part, ';');
  TextReader order(part);
  for (int host = 0; order >> host;) ring.hosts.push_back(host);
  while (std::getline(parts, part, ';')) {
    TextReader row(part);
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

std::string HostRing::describe(const Hosts& of) const {
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

// ---- the cost of wires

AgreedWireCost AgreedWireCost::fromEnvironment() {
  AgreedWireCost cost;
  const Config config = Config::read();
  const double round_trip = config.round_trip_ms.get(), mbit = config.bandwidth_mbit.get();
  cost.observeRoundTrip(static_cast<Nanos>(round_trip * static_cast<double>(kMillisecond)));
  cost.observeBandwidth(mbit);
  cost.round_trip_set_ = cost.round_trip_ > 0;
  cost.bandwidth_set_ = cost.byte_ > 0;
  return cost;
}

void AgreedWireCost::observeRoundTrip(Nanos round_trip) {
  if (!round_trip_set_ && round_trip > 0) round_trip_ = static_cast<uint64_t>(round_trip);
}

void AgreedWireCost::observeBandwidth(double mbit) {
  if (!bandwidth_set_ && mbit > 0) byte_ = static_cast<uint64_t>(8e9 / mbit);
}

std::string AgreedWireCost::text() const {
  std::string text;
  for (const uint64_t number : {round_trip_, byte_})
    for (int byte = 0; byte < 8; ++byte) text += static_cast<char>(number >> (8 * byte) & 0xff);
  return text;
}

void AgreedWireCost::merge(const std::string& text) {
  const auto numberAt = [&](size_t at) {
    uint64_t number = 0;
    for (size_t byte = 0; byte < 8; ++byte)
      number |= static_cast<uint64_t>(static_cast<unsigned char>(text[at + byte])) << (8 * byte);
    return number;
  };
  round_trip_ = std::max(round_trip_, numberAt(0));
  byte_ = std::max(byte_, numberAt(8));
}

void AgreedWireCost::applyTo(WireCost& cost) const {
  if (round_trip_ > 0) cost.hop = WireCost::kSystem + static_cast<double>(round_trip_) * 0.5e-9;
  if (byte_ > 0) cost.byte = static_cast<double>(byte_) * 1e-15;
}

std::string AgreedWireCost::describe() const {
  WireCost cost;
  applyTo(cost);
  std::string text = "algorithms are chosen for round trips of ";
  text += shortText(cost.roundTrip() * 1e3, 3) + " ms and " + rateText(8e-6 / cost.byte) +
          " Mbit/s of a host";
  if (byte_ > 0) return text;
  return text + ", until calls have measured it";
}

}  // namespace ringreduce
