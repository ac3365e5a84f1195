// Entries, the table, and the two rounds in which all ranks come to have the same one.
#include "bootstrap/hosts.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/meeting.h"
#include "bootstrap/process.h"

namespace ringreduce {
namespace {

constexpr char kTableKey[] = "ringreduce/hosts";
// Where a rank that has found another with its number says so.
constexpr char kTwiceKey[] = "ringreduce/hosts/twice";
// How long rank 0, which takes the table out of the store, waits until all have read its last word.
constexpr Nanos kFarewell = 5 * kSecond;
// The same for the reason why the hosts do not meet.
constexpr Nanos kReasonTime = kSecond;

std::string entryKey(int rank) {
  return "ringreduce/hosts/" + std::to_string(rank);
}

std::string at(const char* field, int rank) {
  return field + std::to_string(rank);
}

class Meeting {
 public:
  // What this rank has to say, once it knows the table.
  using Say = std::function<std::string(const Fields& table)>;

  Meeting(Store& store, int rank, int size, const GroupOptions& options, const std::string& id,
          Say say, std::function<void()> turn)
      : store_(store),
        rank_(rank),
        size_(size),
        options_(options),
        say_(std::move(say)),
        each_turn_(std::move(turn)),
        stopwatch_(options_) {
    mine_ = {{"version", kVersion},
             {"size", std::to_string(size)},
             {"token", randomHex()},
             {"id", id.empty() ? hostId() : id},
             {"pid", std::to_string(getpid())},
             {"pid_namespace", pidNamespace()},
             {"host", hostName()}};
  }

  Fields hold() {
    store_.set(entryKey(rank_), encode(mine_));
    return rank_ == 0 ? preside() : attend();
  }

 private:
  // Rank 0.
  Fields preside() {
    Fields table;
    std::map<int, Fields> entries;  // by rank
    try {
      for (bool all_seen = false; !all_seen;) {
        entries.clear();
        const Fields twice = decode(store_.get(kTwiceKey).value_or(""));
        for (int r = 0; r < size_; ++r) {
          const Fields entry = decode(store_.get(entryKey(r)).value_or(""));
          if (!entry.empty()) entries[r] = entry;
        }
        for (const auto& [r, entry] : entries) {
          // Of an earlier meeting if the other is not here any more.
          if (word(entry, "token") != word(twice, "token")) continue;
          store_.set(kTwiceKey, "");
          throw Error(Failure::kSetup, word(twice, "text"));
        }
        if (entries.size() == static_cast<size_t>(size_)) {
          const Fields before = table;
          for (const auto& [r, entry] : entries) take(table, r, entry);
          if (table != before) {
            table["word"] = randomHex().substr(0, 16);
            table["secret"] = randomHex();
            store_.set(kTableKey, encode(table));
          }
          all_seen = std::all_of(entries.begin(), entries.end(), [&](const auto& one) {
            return one.first == 0 || word(one.second, "seen") == table["word"];
          });
        }
        if (!all_seen) turn();
      }
      for (const auto& [r, entry] : entries)
        table[at("said", r)] = r == 0 ? say_(table) : word(entry, "said");
    } catch (...) {
      const Reason reason = reasonOf(std::current_exception(), shown(0));
      // For those who have come, known by their tokens.
      Fields last{{"failed", reason.text}, {"kind", std::to_string(static_cast<int>(reason.kind))}};
      for (const auto& [r, entry] : entries) last[at("token", r)] = word(entry, "token");
      tellLast(last);
      awaitReaders(entries);
      throw;
    }
    table["go"] = "1";
    store_.set(kTableKey, encode(table));
    leave();
    pause_ = kMillisecond;
    // Whoever has read it empties its entry, and may be in the next meeting by then.
    const auto somebody_reads = [&] {
      for (int r = 1; r < size_; ++r)
        if (word(decode(store_.get(entryKey(r)).value_or("")), "seen") == table["word"])
          return true;
      return false;
    };
    for (const Nanos end = deadlineIn(kFarewell); somebody_reads() && now() < end;) rest();
    // Who is slower still finds it; the next meeting writes over it.
    if (!somebody_reads()) store_.remove(kTableKey);
    return table;
  }

  void tellLast(const Fields& last) {
    try {
      store_.set(kTableKey, encode(last));
    } catch (const std::exception& error) {  // what is being reported matters more
      log(std::string("cannot tell the others why the hosts do not meet: ") + error.what());
    }
  }

  // The process of rank 0 holds the store as a rule, and may end as soon as it knows that it has
  // failed: not before those who have come have read why, which they show by emptying their
  // entries.
  void awaitReaders(const std::map<int, Fields>& entries) {
    const auto waits = [&](const auto& one) {
      const auto& [r, entry] = one;
      if (r == 0 || !word(entry, "broken").empty()) return false;
      return word(decode(store_.get(entryKey(r)).value_or("")), "token") == word(entry, "token");
    };
    try {
      pause_ = kMillisecond;
      for (const Nanos end = deadlineIn(kReasonTime);
           std::any_of(entries.begin(), entries.end(), waits) && now() < end;)
        rest();
    } catch (const std::exception& error) {  // likewise
      log(std::string("cannot see whether the others know why the hosts do not meet: ") +
          error.what());
    }
  }

  // All others.
  Fields attend() {
    for (;;) {
      const Fields table = decode(store_.get(kTableKey).value_or(""));
      if (word(table, at("token", rank_).c_str()) == word(mine_, "token")) {
        if (const std::string why = word(table, "failed"); !why.empty()) {
          leave();
          throw Error(static_cast<Failure>(number(table, "kind")),
                      why + ", learned by " + shown(rank_));
        }
        if (word(mine_, "seen") != word(table, "word")) {
          mine_["seen"] = word(table, "word");
          try {
            mine_["said"] = say_(table);
          } catch (const Error& error) {
            mine_["broken"] = error.what();
            store_.set(entryKey(rank_), encode(mine_));
            throw;
          }
          store_.set(entryKey(rank_), encode(mine_));
        }
        if (word(table, "go") == "1") {
          leave();
          return table;
        }
      }
      turn();
    }
  }

  void take(Fields& table, int r, const Fields& entry) {
    if (word(entry, "version") != kVersion)
      throw Error(Failure::kSetup, shown(r) + " runs another version of ringreduce than " +
                                       shown(0) + ": install the same one on all hosts");
    if (number(entry, "size") != size_)
      throw Error(Failure::kSetup, "world size mismatch: " + shown(r) + " (pid " +
                                       word(entry, "pid") + ") was started with world size " +
                                       word(entry, "size") + ", " + shown(0) + " with " +
                                       std::to_string(size_));
    if (const std::string broken = word(entry, "broken"); !broken.empty())
      throw Error(Failure::kSetup, broken);
    for (const char* field : {"token", "id", "pid", "pid_namespace", "host"})
      table[at(field, r)] = word(entry, field);
  }

  // Emptied and not taken out: a store of torch's, asked for a key that goes at this very moment,
  // waits for it to come back.
  void leave() { store_.set(entryKey(rank_), ""); }

  void rest() {
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause_));
    pause_ = std::min(2 * pause_, kTick);
  }

  void turn() {
    if (each_turn_) each_turn_();
    const Fields own = decode(store_.get(entryKey(rank_)).value_or(""));
    if (!own.empty() && word(own, "token") != word(mine_, "token")) {
      const std::string text = "two processes claim " + shown(rank_) + ": pid " + word(own, "pid") +
                               " on host " + word(own, "host") + ", and pid " + word(mine_, "pid") +
                               " on host " + word(mine_, "host") + ", noticed by the latter";
      // Rank 0 tells the rest, and the other one, which cannot notice.
      store_.set(kTwiceKey, encode({{"token", word(own, "token")}, {"text", text}}));
      throw Error(Failure::kSetup, text);
    }
    stopwatch_.turn(options_.shownAs(rank_), [&] { return missing(); });
    // The others are told by rank 0 what it knows.
    if (stopwatch_.over(rank_ == 0 ? 0 : kSecond)) {
      const std::string late = missing();
      leave();
      throw Error(Failure::kTimeout, late + " of " + std::to_string(size_) +
                                         " did not join within " + seconds(options_.timeout) +
                                         ", making group '" + options_.name + "'; noticed by " +
                                         shown(rank_));
    }
    rest();
  }

  // Those of whom the store has no entry; if it has all, who has not seen the table.
  std::string missing() {
    std::vector<int> absent, unseeing;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Fields entry = decode(store_.get(entryKey(r)).value_or(""));
      if (entry.empty())
        absent.push_back(r);
      else if (word(entry, "seen").empty())
        unseeing.push_back(r);
    }
    if (absent.empty()) absent = unseeing;
    if (absent.empty()) absent.push_back(0);
    return rankList(options_.shownAs(absent));
  }

  std::string shown(int r) const { return "rank " + options_.shown(r); }

  Store& store_;
  const int rank_, size_;
  const GroupOptions& options_;
  const Say say_;
  const std::function<void()> each_turn_;
  Stopwatch stopwatch_;
  Fields mine_;
  Nanos pause_ = kMillisecond;
};

}  // namespace

Hosts::Hosts(const Fields& table, int rank, int size, const GroupOptions& options)
    : rank_(rank),
      word_(ringreduce::word(table, "word")),
      secret_(ringreduce::word(table, "secret")) {
  std::map<std::string, int> numbers;
  const std::string own_namespace = pidNamespace();
  for (int r = 0; r < size; ++r) {
    const auto field = [&](const char* name) {
      return ringreduce::word(table, at(name, r).c_str());
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
    pids_.push_back(seen_here ? static_cast<int>(number(table, at("pid", r).c_str())) : 0);
    told_.push_back(field("said"));
  }
}

Hosts Hosts::meet(Store& store, int rank, int world_size, const GroupOptions& options,
                  const std::string& id, const Tell& tell, const std::function<void()>& turn) {
  const auto say = [&](const Fields& table) -> std::string {
    if (!tell) return std::string();
    const Hosts hosts(table, rank, world_size, options);
    try {
      return tell(hosts);
    } catch (const Error& error) {
      throw Error(error.kind(), hosts.who(rank) + ": " + error.what());
    }
  };
  return Hosts(Meeting(store, rank, world_size, options, id, say, turn).hold(), rank, world_size,
               options);
}

int Hosts::placeOf(int rank) const {
  const std::vector<int>& all = ranksOn(hostOf(rank));
  return static_cast<int>(std::find(all.begin(), all.end(), rank) - all.begin());
}

bool Hosts::even() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [&](const auto& ranks) { return ranks.size() == ranks_[0].size(); });
}

PartOfStore Hosts::part(Store& store, const std::string& name) const {
  return {store, "ringreduce/" + word_ + "/" + name + std::to_string(hostOf(rank_)) + "/"};
}

GroupOptions Hosts::ofNeighbours(const GroupOptions& options) const {
  GroupOptions local = options;
  local.global_ranks = options.shownAs(neighbours());
  local.together = true;
  return local;
}

Membership Hosts::joinNeighbours(Store& store, const GroupOptions& options) const {
  PartOfStore own = part(store, "memory");
  return ringreduce::join(own, placeOf(rank_), static_cast<int>(neighbours().size()),
                          ofNeighbours(options));
}

}  // namespace ringreduce
