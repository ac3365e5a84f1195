// Which ranks of a group are on the same host, as the rendezvous found out
// (bootstrap/rendezvous.h).
#pragma once

#include <string>
#include <vector>

#include "bootstrap/meeting.h"
#include "bootstrap/membership.h"
#include "bootstrap/options.h"

namespace ringreduce {

class Hosts {
 public:
  // From the rendezvous' table.
  Hosts(const Fields& table, int rank, int size, const GroupOptions& options);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(host_of_.size()); }
  // Hosts are numbered by their lowest ranks.
  int count() const { return static_cast<int>(ranks_.size()); }
  int hostOf(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  // A host's ranks, in ascending order, and a rank's place among its host's.
  const std::vector<int>& ranksOn(int host) const { return ranks_[static_cast<size_t>(host)]; }
  const std::vector<int>& neighbours() const { return ranksOn(hostOf(rank_)); }
  int placeOf(int rank) const;
  // Whether all hosts hold the same number of ranks.
  bool even() const;

  // "rank 3 (pid 7 on host a)"
  const std::string& who(int rank) const { return who_[static_cast<size_t>(rank)]; }
  // 0 if it is in another PID namespace.
  int pidOf(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  const std::string& nameOf(int rank) const { return names_[static_cast<size_t>(rank)]; }
  // What its host calls itself.
  const std::string& machineOf(int rank) const { return machines_[static_cast<size_t>(rank)]; }
  // What it told; "" if nothing.
  const std::string& toldBy(int rank) const { return told_[static_cast<size_t>(rank)]; }
  // 256 random bits that all ranks have, through the store, as hexadecimal digits.
  const std::string& secret() const { return secret_; }
  // The same random word on all ranks, of no other meeting: what keys of a store can begin with.
  const std::string& word() const { return word_; }

  // What the ranks of this host exchange memory with; their errors name the ranks by their numbers
  // in the whole group.  `purpose` tells several exchanges apart.
  LocalRanks neighbourRanks(const std::string& purpose, const SharedOptions& shared,
                            const GroupOptions& options) const;

 private:
  int rank_ = 0;
  std::vector<int> host_of_;             // by rank
  std::vector<std::vector<int>> ranks_;  // by host
  std::vector<std::string> who_, names_, machines_, told_;
  std::vector<int> pids_;
  std::string word_, secret_;
};

}  // namespace ringreduce
