// Which ranks of a group are on the same host: found out over the store, before anything else that
// ranks do together, so that each host can have a group of its own and hosts something between
// them.
//
//     const Hosts hosts = Hosts::meet(store, rank, world_size, options);   // collective
//     auto local = Group::ofHost(hosts, store, options);                   // collective on a host
//
// Each rank puts an entry into the store, rank 0 gathers them into a table, everybody says in its
// entry that it has seen the table, and then rank 0 lets all go on.  Entries carry a random word,
// so those of an earlier run on the same store are told from this one's; in the end they are
// emptied.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/options.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/store.h"

namespace ringreduce {

// The keys of a store that begin with a prefix.
class PartOfStore final : public Store {
 public:
  PartOfStore(Store& whole, std::string prefix) : whole_(whole), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    whole_.set(prefix_ + key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    return whole_.get(prefix_ + key);
  }
  void remove(const std::string& key) override { whole_.remove(prefix_ + key); }

 private:
  Store& whole_;
  const std::string prefix_;
};

class Hosts {
 public:
  // What a rank tells the others once it knows who is where; `tell` throws what ends the meeting
  // for this rank.
  using Tell = std::function<std::string(const Hosts&)>;

  // Blocks until all ranks are there.  Throws Error: kTimeout naming who did not come, kSetup for
  // what waiting cannot mend.  `id` tells hosts apart; hostId() (handshake.h) unless it is given.
  // `turn` is called now and then, and may throw to end it.
  static Hosts meet(Store& store, int rank, int world_size, const GroupOptions& options,
                    const std::string& id = "", const Tell& tell = nullptr,
                    const std::function<void()>& turn = nullptr);

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

  // What the ranks of this host make a group of their own with: keys of the store, and options that
  // name the ranks by their numbers in the whole group.
  PartOfStore part(Store& store, const std::string& name) const;
  GroupOptions ofNeighbours(const GroupOptions& options) const;
  // Memory that the ranks of this host share, besides that group's.
  Membership joinNeighbours(Store& store, const GroupOptions& options) const;

 private:
  int rank_ = 0;
  std::vector<int> host_of_;             // by rank
  std::vector<std::vector<int>> ranks_;  // by host
  std::vector<std::string> who_, names_, machines_, told_;
  std::vector<int> pids_;
  std::string word_, secret_;

  Hosts(const std::map<std::string, std::string>& table, int rank, int size,
        const GroupOptions& options);
};

}  // namespace ringreduce
