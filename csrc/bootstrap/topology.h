// The hosts of a group: which ranks are on which host, in which order ranks form rings between
// hosts, and what the wires between hosts cost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "algorithm/choose.h"
#include "algorithm/ring_order.h"
#include "base/clock.h"
#include "bootstrap/host_memory.h"
#include "bootstrap/options.h"
#include "bootstrap/unix_socket.h"

namespace ringreduce {

// Which ranks are on the same host, as the rendezvous found out (bootstrap/rendezvous.h).
class Hosts {
 public:
  // From the rendezvous' table.
  Hosts(const Fields& table, int rank, int size, const GroupOptions& options);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(host_of_.size()); }
  // Hosts are numbered by their lowest ranks.
  int count() const { return static_cast<int>(ranks_.size()); }
  int hostOf(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  // A host's ranks, in ascending order, and a rank's position among those of its host.
  const std::vector<int>& ranksOn(int host) const { return ranks_[static_cast<size_t>(host)]; }
  const std::vector<int>& localRanks() const { return ranksOn(hostOf(rank_)); }
  int localRankOf(int rank) const;
  // Whether all hosts hold the same number of ranks.
  bool even() const;

  // "rank 3 (pid 7 on host a)"
  const std::string& who(int rank) const { return who_[static_cast<size_t>(rank)]; }
  // 0 if it is in another PID namespace.
  int pidOf(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  const std::string& nameOf(int rank) const { return names_[static_cast<size_t>(rank)]; }
  // The name of its host.
  const std::string& machineOf(int rank) const { return machines_[static_cast<size_t>(rank)]; }
  // The settings that it gave to the others; "" if none.
  const std::string& settingsOf(int rank) const { return settings_[static_cast<size_t>(rank)]; }
  // 256 random bits that all ranks have, through the store, as hexadecimal digits.
  const std::string& secret() const { return secret_; }
  // The random nonce of this rendezvous, the same on all ranks.
  const std::string& nonce() const { return nonce_; }

  // For shareMemory() between the ranks of this host.  Errors name the ranks by their numbers in
  // the whole group.  `purpose` distinguishes several exchanges.
  LocalRanks memoryExchange(const std::string& purpose, const SharedOptions& shared,
                            const GroupOptions& options) const;

 private:
  int rank_ = 0;
  std::vector<int> host_of_;             // by rank
  std::vector<std::vector<int>> ranks_;  // by host
  std::vector<std::string> who_, names_, machines_, settings_;
  std::vector<int> pids_;
  std::string nonce_, secret_;
};

// ---- the order of rings
//
// RINGREDUCE_RING sets it:
//
//     unset          the order of the ranks
//     0,2,1,3        the order of these hosts, numbered by their lowest ranks, or of these ranks
//     measure        the order whose slowest link is the fastest (algorithm/ring_order.h), by rates
//                    that are measured while the group is made (transport/tcp/survey.h)
//
// Ranks of one host stay beside each other.  All ranks have the same order: the settings are
// compared, and rank 0 decides by the measured rates.
//
// Ranks are added in this order too: a rank's position in it is its number in algorithm/cut.h.  In
// the order of ranks (RINGREDUCE_ORDER=rank) they are added by their own numbers.

struct RingSetting {
  bool measure = false;
  std::vector<int> order;  // empty: that of the ranks
  // Throws Error(kSetup) for an invalid text.
  static RingSetting fromText(const std::string& text);
};

struct HostRing {
  enum class Source : uint8_t { kRanks, kGiven, kMeasured };
  Source source = Source::kRanks;
  std::vector<int> hosts;       // in the ring's order
  std::vector<int> ranks = {};  // the same; empty where it is that of their numbers
  Rates mbit = {};              // as measured, from host to host; else empty

  // The order by setting, before any measurement.  Throws Error(kSetup) for an order of other hosts
  // or ranks, unless the group is a part of a larger one, which may have that order.
  static HostRing of(const Hosts& hosts, const RingSetting& setting, const GroupOptions& options);
  // The order by rates: the hosts' own, unless another is faster by kWorth.  Rates vary, and
  // another order changes the last bits of results.
  static HostRing measured(const Hosts& hosts, const Rates& mbit);

  // The measured order, for the store.
  std::string toText() const;
  static HostRing fromText(const Hosts& hosts, const std::string& text);
  // For the log.
  std::string describe(const Hosts& hosts) const;

  static constexpr double kWorth = 1.1;
};

// ---- the cost of wires
//
// All ranks agree on the slowest wire that a rank was told of or has measured.  It sets the
// chooser's cost model (algorithm/choose.h).
//
// RINGREDUCE_ROUND_TRIP_MS and RINGREDUCE_BANDWIDTH_MBIT set it.  Otherwise the round trip is that
// of the control ring's connections, and the bandwidth that found by RINGREDUCE_RING=measure. Where
// nothing tells the bandwidth, the group's calls measure it (algorithm/agreed_line.h).

class AgreedWireCost {
 public:
  // The settings of the environment; throws Error(kSetup).
  static AgreedWireCost fromEnvironment();

  // Measured values, used where the environment sets none.
  void observeRoundTrip(Nanos round_trip);
  void observeBandwidth(double mbit);

  // To another rank and from it.  The slower of both is kept.
  std::string text() const;
  void merge(const std::string& text);

  void applyTo(WireCost& cost) const;
  bool knowsRate() const { return byte_ > 0; }
  // What is assumed of the wire, and whether that is known.  For the log.
  std::string describe() const;

 private:
  // Whole numbers, so that all ranks have the very same; 0: nothing is known.
  uint64_t round_trip_ = 0;  // ns
  uint64_t byte_ = 0;        // 1e-15 s
  bool round_trip_set_ = false, bandwidth_set_ = false;
};

}  // namespace ringreduce
