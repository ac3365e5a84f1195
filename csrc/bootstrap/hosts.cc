// Reads the table, and numbers the hosts.
#include "bootstrap/hosts.h"

#include <algorithm>
#include <map>

#include "bootstrap/process.h"

namespace ringreduce {

Hosts::Hosts(const Fields& table, int rank, int size, const GroupOptions& options)
    : rank_(rank),
      word_(ringreduce::word(table, "nonce")),
      secret_(ringreduce::word(table, "secret")) {
  std::map<std::string, int> numbers;
  const std::string own_namespace = pidNamespace();
  for (int r = 0; r < size; ++r) {
    const auto field = [&](const char* name) {
      return ringreduce::word(table, (name + std::to_string(r)).c_str());
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
    told_.push_back(field("said"));
  }
}

int Hosts::placeOf(int rank) const {
  const std::vector<int>& all = ranksOn(hostOf(rank));
  return static_cast<int>(std::find(all.begin(), all.end(), rank) - all.begin());
}

bool Hosts::even() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [&](const auto& ranks) { return ranks.size() == ranks_[0].size(); });
}

LocalRanks Hosts::neighbourRanks(const std::string& purpose, const SharedOptions& shared,
                                 const GroupOptions& options) const {
  LocalRanks ranks{.rank = placeOf(rank_),
                   .size = static_cast<int>(neighbours().size()),
                   .socket = "ringreduce-" + word_ + "-" + purpose + std::to_string(hostOf(rank_)),
                   .secret = secret_,
                   .shared = shared,
                   .options = options};
  ranks.options.global_ranks = options.shownAs(neighbours());
  return ranks;
}

}  // namespace ringreduce
