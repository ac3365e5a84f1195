// The order of the ring: what all ranks wish, and what is measured.  Each host's lowest rank meets
// those of the other hosts, puts what came from each into the store, and rank 0 decides for all.
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "group/network.h"
#include "transport/tcp/survey.h"

namespace ringreduce {
namespace {

// How often the store is asked for what another rank will put there.
constexpr Nanos kStorePoll = 10 * kMillisecond;

std::string await(Store& store, const std::string& key, const std::function<void()>& turn) {
  for (;;) {
    if (const auto text = store.get(key)) return *text;
    turn();
    std::this_thread::sleep_for(std::chrono::nanoseconds(kStorePoll));
  }
}

std::string ringKey(const std::string& word) {
  std::string key = "ringreduce/";
  key += word;
  key += "/ring";
  return key;
}

std::string rateKey(const std::string& word, int host) {
  std::string key = ringKey(word);
  key += '/';
  key += std::to_string(host);
  return key;
}

}  // namespace

// All see the same, so all refuse, or none.
void Network::compareWishes(const Hosts& hosts) const {
  const std::string wish = toldPart(hosts, 0, 2);
  const auto inWords = [](const std::string& text) {
    return text.empty() ? std::string("not set") : "'" + text + "'";
  };
  for (int r = 1; r < size_; ++r) {
    const std::string theirs = toldPart(hosts, r, 2);
    if (theirs == wish) continue;
    std::string text = "RINGREDUCE_RING is ";
    text += inWords(wish);
    text += " at " + who_[0] + ", and ";
    text += inWords(theirs);
    text += " at " + who_[static_cast<size_t>(r)] + ": set the same for all ranks";
    throw Error(Failure::kSetup, text);
  }
}

HostRing Network::findRing(const Hosts& hosts, Store& store, const std::function<void()>& turn) {
  const RingWish wish = RingWish::fromText(wish_);
  HostRing ring = HostRing::of(hosts, wish, options_);
  if (wish.measure) {
    const size_t H = static_cast<size_t>(hosts.count());
    if (hosts.placeOf(rank_) == 0 && rank_ != 0) {
      std::ostringstream row;
      for (const double rate : survey(hosts, turn)) row << rate << ' ';
      store.set(rateKey(word_, hosts.hostOf(rank_)), row.str());
    }
    if (rank_ == 0) {
      Rates mbit(H, std::vector<double>(H));
      for (size_t to = 0; to < H; ++to) {
        std::vector<double> into = to == 0 ? survey(hosts, turn) : std::vector<double>(H);
        if (to > 0) {
          const std::string key = rateKey(word_, static_cast<int>(to));
          std::istringstream row(await(store, key, turn));
          for (double& rate : into) row >> rate;
          store.remove(key);
        }
        for (size_t from = 0; from < H; ++from) mbit[from][to] = into[from];
      }
      store.set(ringKey(word_), HostRing::measured(hosts, mbit).toText());
    }
    ring = HostRing::fromText(hosts, await(store, ringKey(word_), turn));
  }
  const bool told = ring.source == HostRing::Source::kMeasured || logsInfo();
  if (rank_ == 0 && told && ring.source != HostRing::Source::kRanks)
    log("group '" + options_.name + "': " + ring.told(hosts));
  return ring;
}

// The rates at which data comes to this host from each.
std::vector<double> Network::survey(const Hosts& hosts, const std::function<void()>& turn) {
  const int H = hosts.count(), own = hosts.hostOf(rank_);
  std::vector<double> rates(static_cast<size_t>(H));
  for (int round = 0; round < net::roundsOf(H); ++round) {
    const int host = net::partnerOf(own, round, H);
    if (host < 0) continue;
    const int other = hosts.ranksOn(host).front();
    const std::string& who = who_[static_cast<size_t>(other)];
    for (const bool low_sends : {true, false}) {
      const bool is_low = own < host;
      net::Socket connection = is_low ? dial(other, net::Purpose::kSurvey, 0, turn)
                                      : awaitEarly(other, net::Purpose::kSurvey, turn);
      if (is_low == low_sends)
        net::sendBurst(connection, who, turn);
      else
        rates[static_cast<size_t>(host)] = net::receiveBurst(connection, who, turn);
    }
  }
  return rates;
}

// Of the wires to the next host, or in the ring that was measured.
void Network::lookAtWires() {
  cost_.ranks_on_host = ranks_on_host_;
  if (next_) slowest_.seeRoundTrip(net::roundTripOf(next_));
  if (host_ring_.mbit.size() > 1)
    slowest_.seeBandwidth(slowestLink(host_ring_.mbit, host_ring_.hosts));
}

void Network::forgetRing(Store& store) const {
  if (host_ring_.source == HostRing::Source::kMeasured) store.remove(ringKey(word_));
}

}  // namespace ringreduce
