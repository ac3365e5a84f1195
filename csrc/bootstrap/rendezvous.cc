// Entries, the table, and its confirmation by all ranks.
#include "bootstrap/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "bootstrap/attempt.h"
#include "bootstrap/other_groups.h"
#include "bootstrap/process.h"
#include "bootstrap/unix_socket.h"
#include "transport/tcp/handshake.h"

namespace ringreduce {
namespace {

constexpr char kTableKey[] = "ringreduce/table";
// The shortest time between two looks for notes of ranks.
constexpr Nanos kNotesPause = kSecond / 4;
constexpr size_t kMostName = 128;  // bytes of a job's or a program's name in an entry
// The shortest time between two looks into the store: for a table, times the number of ranks that
// look, and at most the second one; for entries of other hosts, the second one.
constexpr Nanos kLeastPause = 25 * kMicrosecond, kEntriesPause = kMillisecond;

std::string entryKey(int rank) {
  return "ringreduce/rank/" + std::to_string(rank);
}

// A rank that cannot take part as it is says why, and keeps no other from this rank's entry.
std::string noteKey(int rank) {
  return "ringreduce/note/" + std::to_string(rank);
}

std::string at(const char* field, int rank) {
  return field + std::to_string(rank);
}

// Attempts that failed and that ranks of this process took part in.
class FailedAttempts {
 public:
  void add(const std::string& attempt, int rank) {
    const std::lock_guard lock(mutex_);
    known_.emplace(attempt, rank);
  }
  bool knows(const std::string& attempt, int rank) {
    const std::lock_guard lock(mutex_);
    return known_.contains({attempt, rank});
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<std::string, int>> known_;
};

FailedAttempts& failedAttempts() {
  static auto* all = new FailedAttempts;  // never destroyed: groups are made until the process ends
  return *all;
}

constexpr char kOneStoreEach[] =
    "two jobs use one store; give each a MASTER_PORT of its own, or a store of its own";

bool sharesMemory(const Fields& table) {
  return fieldOf(table, "wire") == "memory";
}

// The ranks of a group, to be shown and compared; empty where they are all, or may change.
std::string ranksText(const GroupOptions& options, int size) {
  if (options.global_ranks.empty() || options.attempt) return "";
  constexpr size_t kMostShown = 8;  // an entry must fit into a message
  std::vector<int> ranks = otherRanks(/*rank=*/-1, size);
  if (ranks.size() <= kMostShown) return options.rankList(ranks);
  uint64_t hash = 0;
  for (const int rank : ranks) hash = mixed(hash, static_cast<uint64_t>(options.shownAs(rank)));
  ranks.resize(kMostShown);
  return "ranks " + joined(ranks, ", ", [&](int r) { return options.shown(r); }) + " and " +
         std::to_string(static_cast<size_t>(size) - kMostShown) + " others (hash " +
         hexText(&hash, sizeof hash) + ")";
}

}  // namespace

class Meeting {
 public:
  Meeting(Store& store, int rank, int size, const GroupOptions& options,
          const OwnSettings& own_settings)
      : store_(store),
        rank_(rank),
        size_(size),
        options_(options),
        own_settings_(own_settings),
        clock_(options_, rank),
        mine_{{"version", kVersion},
              {"size", std::to_string(size)},
              {"token", net::randomGroup()},
              {"pid", std::to_string(getpid())},
              {"pid_namespace", pidNamespace()},
              {"host", hostName()},
              {"launcher", options.launcher},
              {"job", options.job.substr(0, kMostName)},
              {"program", options.program.substr(0, kMostName)},
              {"ranks", ranksText(options, size)}},
        other_groups_(store, options, rank, groupOf(mine_)),
        refusal_(options.refusal) {
    try {
      mine_["id"] = hostId();
    } catch (const Error& error) {
      if (!refusal_) refusal_ = error;
    }
  }

  Rendezvous run() {
    Rendezvous met = rank_ == 0 ? runRank0() : runOther();
    met.id = attempt_;
    return met;
  }

 private:
  // ---- rank 0

  Rendezvous runRank0() {
    try {
      prepare();
      if (size_ > 1) publish();
      if (options_.attempt) options_.attempt->claim();
      if (size_ == 1) return {leader().run(nullptr, nullptr), std::nullopt};
      for (;; poll()) {
        if (sharesMemory(table_)) {
          if (auto host_memory = lead()) return {std::move(*host_memory), std::nullopt};
        }
        readEntries(otherRanks(rank_, size_));
        if (absentRanks().empty()) publish();
        if (allConfirmed()) return publishFinalTable();
      }
    } catch (...) {
      giveUp(std::current_exception());
      throw;
    }
  }

  // Before anything is sent.
  void prepare() try {
    if (refusal_) throw Error(*refusal_);
    shared_ = options_.chosenShared(size_);
    shared_.validate(size_);
    socket_ = "ringreduce-" + randomSecretText();
    secret_ = randomSecretText();
  } catch (const Error& error) {
    throw named(error);
  }
  // A rank's own errors do not say whose they are.
  Error named(const Error& error) const {
    return Error(error.kind(),
                 shown(rank_) + " (pid " + std::to_string(getpid()) + "): " + error.what());
  }

  std::vector<int> absentRanks() const {
    std::vector<int> ranks = otherRanks(rank_, size_);
    std::erase_if(ranks, [&](int r) { return entries_.contains(r); });
    return ranks;
  }

  // Takes the entries that ranks have put into the store for this attempt.
  void readEntries(const std::vector<int>& ranks) {
    for (const int r : ranks) {
      const Fields entry = entryOf(r);
      const auto known = entries_.find(r);
      const bool gave_up_before = options_.attempt && entry.contains("broken");
      if (fieldOf(entry, "attempt") == attempt_ || gave_up_before)
        take(r, entry);
      else if (entry.empty() && known != entries_.end() && !sharesMemory(table_) &&
               fieldOf(known->second, "seen") == fieldOf(table_, "nonce"))
        entries_.erase(known);  // it has left
    }
  }

  // A rank's entry, from the store or its connection.  Throws the rank's own error, and errors in
  // the entry.
  void take(int r, const Fields& entry) {
    const std::string who = r >= 0 && r < size_ ? shown(r) : "rank " + std::to_string(r);
    if (fieldOf(entry, "version") != kVersion)
      throw Error(Failure::kSetup, who + " runs another version of ringreduce than " + shown(0) +
                                       ": install the same one on all hosts");
    if (number(entry, "size") != size_)
      throw Error(Failure::kSetup, "world size mismatch: " + who + " (pid " +
                                       fieldOf(entry, "pid") + ") was started with world size " +
                                       fieldOf(entry, "size") + ", " + shown(0) + " with " +
                                       std::to_string(size_));
    if (r > 0 && r < size_) {
      if (!entries_.contains(r)) compareProgram(r, entry);
      entries_[r] = entry;
    }
    if (const std::string broken = fieldOf(entry, "broken"); !broken.empty())
      throw Error(kindOf(entry), broken);
  }

  // Programs of one job may differ, so a difference is no error.
  void compareProgram(int r, const Fields& entry) const {
    const std::string own = fieldOf(mine_, "program"), theirs = fieldOf(entry, "program");
    if (own.empty() || theirs.empty() || own == theirs) return;
    log("group '" + options_.name + "': " + shown(r) + " (pid " + fieldOf(entry, "pid") +
        " on host " + fieldOf(entry, "host") + ") runs " + theirs + ", and " + shown(0) + " runs " +
        own + "; if these are two jobs, give each a MASTER_PORT of its own");
  }

  // Of ranks that have not come.
  void readNotes() {
    if (!AttemptClock::due(next_notes_, kNotesPause)) return;
    for (const int r : absentRanks()) {
      const std::string text = store_.get(noteKey(r)).value_or("");
      const Fields note = decode(text);
      if (text.empty() || fieldOf(note, "nonce") != fieldOf(table_, "nonce")) continue;
      if (notes_[r] == note) continue;
      notes_[r] = note;
      log("group '" + options_.name + "': " + fieldOf(note, "text"));
      if (!isOfOthers(note)) continue;
      table_["refused"] += fieldOf(note, "token") + " ";
      store_.set(kTableKey, encode(table_));
    }
  }

  // An invitation to the ranks of this host, while the known ranks are all here; else the table of
  // all ranks, or the request for their entries.  Does nothing if that is published.
  void publish() {
    const bool here = std::ranges::all_of(entries_, [&](const auto& one) {
      return fieldOf(one.second, "id") == fieldOf(mine_, "id");
    });
    const bool memory = here && (options_.together || !forcesSockets());
    Fields table{{"attempt", attempt_},
                 {"version", kVersion},
                 {"id", fieldOf(mine_, "id")},
                 {"options", shared_.toText()},
                 {"wire", memory ? "memory" : "tcp"},
                 {"secret", secret_},
                 {"who", whoIsThis()},
                 {"ranks", fieldOf(mine_, "ranks")},
                 {"refused", fieldOf(table_, "refused")},
                 {"nonce", fieldOf(table_, "nonce")}};
    addJobTo(table);
    if (memory) {
      table["socket"] = socket_;
      leader();  // listens before any rank looks for it
    } else if (absentRanks().empty()) {
      addTo(table, 0, mine_);
      for (const auto& [r, entry] : entries_) addTo(table, r, entry);
    }
    if (table == table_) return;
    table["nonce"] = net::randomGroup();
    table_ = std::move(table);
    store_.set(kTableKey, encode(table_));
  }

  // A rank of a group that goes on after losses may come back from another launcher.
  void addJobTo(Fields& table) const {
    if (shared_.goesOn()) return;
    table["launcher"] = fieldOf(mine_, "launcher");
    table["job"] = fieldOf(mine_, "job");
  }

  static void addTo(Fields& table, int r, const Fields& entry) {
    for (const char* field : {"token", "id", "pid", "pid_namespace", "host"})
      table[at(field, r)] = fieldOf(entry, field);
  }

  bool allConfirmed() const {
    return !sharesMemory(table_) && absentRanks().empty() &&
           std::ranges::all_of(entries_, [&](const auto& one) {
             return fieldOf(one.second, "seen") == fieldOf(table_, "nonce");
           });
  }

  HostLeader& leader() try {
    if (!leader_)
      leader_.emplace(localRanks(socket_, secret_),
                      [this](int r, const Fields& entry) { take(r, entry); });
    return *leader_;
  } catch (const Error& error) {
    throw named(error);
  }

  // None if some ranks are on another host.
  std::optional<HostMemory> lead() {
    struct Elsewhere {};
    bool all_there = false;
    const auto each = [&](std::vector<int> missing, const char* what) {
      if (!all_there && AttemptClock::due(next_entries_, std::max(pause(), kEntriesPause))) {
        checkEntry();
        readEntries(missing);
        // A rank of this host with an entry is about to connect.
        if (absentRanks().empty()) publish();
        if (!sharesMemory(table_)) throw Elsewhere();
        if (!absentRanks().empty()) missing = absentRanks();
      }
      stepClock(missing, what);
    };
    try {
      return leader().run(each, [&] {
        all_there = true;
        store_.remove(kTableKey);
        if (is_put_) store_.remove(entryKey(0));
      });
    } catch (const Elsewhere&) {
      leader().sendAway();
      leader_.reset();
      return std::nullopt;
    }
  }

  // Ranks that share no memory have all confirmed the table.
  Rendezvous publishFinalTable() {
    for (const auto& [r, entry] : entries_) table_[at("said", r)] = fieldOf(entry, "said");
    table_[at("said", 0)] = ownSettings(table_);
    table_["go"] = "1";
    store_.set(kTableKey, encode(table_));
    leave();
    return {{}, Hosts(table_, rank_, size_, options_)};
  }

  void giveUp(const std::exception_ptr& error) {
    if (size_ == 1) return;
    const Reason reason = reasonOf(error, shown(0));
    if (leader_) leader_->fail(reason);
    try {
      Fields last{{"failed", reason.text},
                  {"kind", std::to_string(static_cast<int>(reason.kind))},
                  {"attempt", attempt_},
                  {"ranks", fieldOf(mine_, "ranks")},
                  {"time", std::to_string(std::time(nullptr))}};
      addJobTo(last);
      std::map<int, std::string> tokens;
      const auto tell = [&](const std::vector<int>& ranks) {
        const Fields before = last;
        for (const int r : ranks) {
          const Fields entry = lastEntryOf(r);
          if (const auto note = notes_.find(r); note != notes_.end())
            last[at("token", r)] = fieldOf(note->second, "token");
          if (entry.empty()) continue;
          last[at("token", r)] = fieldOf(entry, "token");
          // Two processes claim this rank.
          if (entry.contains("rival")) last[at("rival", r)] = fieldOf(entry, "rival");
          tokens[r] = fieldOf(entry, "token");
          if (!fieldOf(entry, "broken").empty()) store_.set(entryKey(r), "");
        }
        if (last != before || ranks.empty()) store_.set(kTableKey, encode(last));
      };
      tell({});
      tell(otherRanks(rank_, size_));
      leave();
      // The store may go with the process of rank 0, so it waits until the others have the reason.
      // Those that are about to come put an entry when they see it.
      const bool waits_for_all =
          reason.kind == Failure::kSetup || reason.kind == Failure::kArgument;
      AttemptClock::await(
          [&] {
            std::vector<int> untold = otherRanks(rank_, size_);
            std::erase_if(untold, [&](int r) { return tokens.contains(r); });
            if (waits_for_all) tell(untold);
            const bool all_known = !waits_for_all || untold.empty();
            return all_known && std::ranges::none_of(tokens, [&](const auto& one) {
                     return fieldOf(entryOf(one.first), "token") == one.second;
                   });
          },
          limits::kReadersTime);
    } catch (const std::exception& failure) {  // the first error matters more
      log(std::string("cannot tell the others why the group is not made: ") + failure.what());
    }
  }

  // As the store has it, or as it was last read, or as the rank sent it when it connected.
  Fields lastEntryOf(int rank) {
    try {
      if (const Fields entry = entryOf(rank); !entry.empty()) return entry;
    } catch (const std::exception& error) {  // the first error matters more
      log("cannot read the entry of " + shown(rank) + ": " + error.what());
    }
    return entries_[rank];
  }

  // ---- the other ranks

  Rendezvous runOther() try {
    if (refusal_) refuseToTakePart();
    for (;; poll()) {
      const Fields table = readTable();
      const std::string nonce = fieldOf(table, "nonce");
      if (isOfOthers(table)) {
        meetOther(table);
        continue;
      }
      if (table.contains("failed")) {
        if (lists(table) || options_.attempt) failAs(table, ", learned by " + shown(rank_));
        if (isLateReason(table)) failAs(table, beforeItCame());
        if (!is_put_ && concerns(table)) putEntry();  // rank 0 may wait to tell this rank
        continue;
      }
      if (!table.empty() && fieldOf(table, "attempt") != fieldOf(mine_, "attempt")) {
        attempt_ = mine_["attempt"] = fieldOf(table, "attempt");
        if (is_put_) putEntry();  // it answered a table of an earlier run
      }
      if (invites(table) || lists(table)) hint_.clear();
      if (invites(table)) {
        if (nonce == refused_) continue;
        if (auto host_memory = join(table)) return {std::move(*host_memory), std::nullopt};
      } else if (lists(table)) {
        confirm(table);
        if (fieldOf(table, "go") != "1") continue;
        leave();
        return {{}, Hosts(table, rank_, size_, options_)};
      } else if (!table.empty() && !is_put_) {
        putEntry();
      }
    }
  } catch (const Error& error) {
    failedAttempts().add(attempt_, rank_);
    if (error.kind() == Failure::kTimeout) leaveAfterError();
    throw;
  } catch (...) {  // Ctrl-C, or the store
    failedAttempts().add(attempt_, rank_);
    tellRank0(reasonOf(std::current_exception(), shown(rank_)));
    throw;
  }

  // Rank 0's table.  A store that fails has most likely ended with the process of rank 0; its last
  // table is then the reason, if it is one.
  Fields readTable() {
    try {
      const std::string text = store_.get(kTableKey).value_or("");
      if (text != seen_) {
        seen_ = text;
        seen_since_ = now();
      }
    } catch (const Error&) {
      const Fields last = decode(seen_);
      if (last.contains("failed") && concerns(last)) failAs(last, beforeItCame());
      throw;
    }
    return decode(seen_);
  }

  // Rank 0 of another job, or of another group of this name, has published it.  It may have ended
  // long ago, in which case this rank waits for its own rank 0; it is refused if the other answers.
  void meetOther(const Fields& table) {
    const bool other_job = isOfOtherJob(table);
    const std::string text = other_job
                                 ? whoIsThis() + " of " + jobOf(mine_) + " came to the store of " +
                                       fieldOf(table, "who") + " of " + jobOf(table)
                                 : whoIsThis() + " makes " + groupOf(mine_) + " where " +
                                       fieldOf(table, "who") + " makes " + groupOf(table);
    if (fieldOf(table, "refused").find(fieldOf(mine_, "token")) != std::string::npos) {
      leaveAfterError();
      throw Error(Failure::kSetup, text + ": " + (other_job ? kOneStoreEach : kSameOrder));
    }
    hint_ = text;
    if (!table.contains("failed")) leaveNote(table, text + ", and is refused");
  }
  void leaveNote(const Fields& table, const std::string& text) {
    if (noted_ == fieldOf(table, "nonce")) return;
    noted_ = fieldOf(table, "nonce");
    store_.set(noteKey(rank_), encode({{"nonce", noted_},
                                       {"token", fieldOf(mine_, "token")},
                                       {"launcher", fieldOf(mine_, "launcher")},
                                       {"job", fieldOf(mine_, "job")},
                                       {"ranks", fieldOf(mine_, "ranks")},
                                       {"text", text}}));
  }

  bool invites(const Fields& table) const {
    return sharesMemory(table) && fieldOf(table, "id") == fieldOf(mine_, "id") &&
           fieldOf(table, "version") == kVersion;
  }
  bool lists(const Fields& table) const {
    const std::string token = fieldOf(mine_, "token");
    return fieldOf(table, at("token", rank_).c_str()) == token ||
           fieldOf(table, at("rival", rank_).c_str()) == token;
  }

  // Whether a failed attempt may be the one that this rank has come for.
  bool concerns(const Fields& failure) const {
    if (isOfOthers(failure)) return false;
    const Nanos age = (std::time(nullptr) - number(failure, "time")) * kSecond;
    return age < limits::kFailureLife &&
           !failedAttempts().knows(fieldOf(failure, "attempt"), rank_);
  }
  bool isLateReason(const Fields& table) const {
    return table.contains("failed") && now() - seen_since_ > limits::kFailureGrace &&
           concerns(table);
  }

  std::string beforeItCame() const { return " (before " + shown(rank_) + " came)"; }
  [[noreturn]] void failAs(const Fields& table, const std::string& note) {
    failedAttempts().add(fieldOf(table, "attempt"), rank_);
    const Error error(static_cast<Failure>(number(table, "kind")), fieldOf(table, "failed") + note);
    leaveAfterError();
    throw error;
  }

  void confirm(const Fields& table) {
    if (fieldOf(mine_, "seen") == fieldOf(table, "nonce")) return;
    mine_["seen"] = fieldOf(table, "nonce");
    try {
      mine_["said"] = ownSettings(table);
    } catch (const Error& error) {
      refuse(error);
    }
    putEntry();
  }

  // None if it is not the end: the leader's queue is full, or it sent this rank away.
  std::optional<HostMemory> join(const Fields& table) {
    shared_ = SharedOptions::fromText(fieldOf(table, "options"));
    const LocalRanks ranks = localRanks(fieldOf(table, "socket"), fieldOf(table, "secret"));
    Fd socket;
    try {
      socket = connectTo(ranks.socket);
      if (socket) checkUser(socket, ranks);
    } catch (const Error& error) {
      refuse(error);
    }
    if (!socket) {
      noteUnreachable(table);
      return std::nullopt;
    }
    bool all_there = false;
    const auto each = [&] {
      stepClock(lateRanks());
      if (!all_there) checkEntry();
    };
    try {
      auto host_memory = joinLeader(std::move(socket), ranks, each, [&] {
        all_there = true;
        if (is_put_) store_.remove(entryKey(rank_));
        if (!noted_.empty()) store_.remove(noteKey(rank_));
      });
      if (!host_memory) refused_ = fieldOf(table, "nonce");
      return host_memory;
    } catch (const LeaderClosed&) {
      findReason(fieldOf(table, "nonce"));
    } catch (const Error&) {
      failedAttempts().add(attempt_, rank_);
      if (!all_there) leaveAfterError();
      throw;
    }
    return std::nullopt;
  }

  // An invitation of an earlier run leads nowhere; or rank 0 is on a machine with the same id.
  void noteUnreachable(const Fields& table) {
    const std::string nonce = fieldOf(table, "nonce");
    if (unreachable_ != nonce) unreachable_since_ = now();
    unreachable_ = nonce;
    if (now() - unreachable_since_ < limits::kLeaderConnects) return;
    hint_ = whoIsThis() + " finds no process behind the socket of " + fieldOf(table, "who") +
            ", although both have the host id '" + fieldOf(table, "id").substr(0, kMostName) +
            "'; if they are two machines (clones of one?), give each a RINGREDUCE_HOSTID of its "
            "own";
    leaveNote(table, hint_);
  }

  // Rank 0 closed its connection.  It may have given up, or started over, when this rank called,
  // and had no time to say so.
  void findReason(const std::string& nonce) {
    const Fields table = readTable();
    if (table.contains("failed") && fieldOf(table, "attempt") == attempt_)
      failAs(table, ", learned by " + shown(rank_));
    if (!table.empty() && fieldOf(table, "nonce") != nonce) {
      refused_ = nonce;
      return;
    }
    throw Error(Failure::kPeerLost, shown(0) + " ended while group '" + options_.name +
                                        "' was being made (this is " + shown(rank_) + ")");
  }

  // Rank 0 learns it, if it is there or comes soon.  A table may be an old one, so the entry is
  // put for each attempt that shows, until rank 0 has given up for it.
  [[noreturn]] void refuseToTakePart() {
    const Error error = named(*refusal_);
    const auto is_known = [&] {
      if (options_.interrupt) options_.interrupt();
      const Fields table = readTable();
      if (table.empty() || isOfOthers(table)) return false;
      const bool is_new = fieldOf(table, "attempt") != fieldOf(mine_, "attempt");
      if (table.contains("failed")) return is_put_ && !is_new;
      if (!is_new) return false;
      attempt_ = mine_["attempt"] = fieldOf(table, "attempt");
      tellRank0({error.kind(), error.what()});
      return false;
    };
    AttemptClock::await(is_known, std::min(options_.timeout, limits::kRefusal));
    throw Error(error);
  }

  // Tells rank 0 in this rank's entry, and throws.
  [[noreturn]] void refuse(const Error& error) {
    tellRank0({error.kind(), error.what()});
    throw error;
  }
  void tellRank0(const Reason& why) {
    mine_["broken"] = why.text;
    mine_["kind"] = std::to_string(static_cast<int>(why.kind));
    try {
      putEntry();
    } catch (const std::exception& failure) {  // the first error matters more
      log("cannot tell rank 0 why " + shown(rank_) + " gave up: " + failure.what());
    }
  }

  // ---- both

  LocalRanks localRanks(const std::string& socket, const std::string& secret) {
    return {.rank = rank_,
            .size = size_,
            .socket = socket,
            .secret = secret,
            .shared = shared_,
            .options = options_,
            .entry = mine_};
  }

  std::string ownSettings(const Fields& table) const {
    const Hosts hosts(table, rank_, size_, options_);
    try {
      return own_settings_(hosts);
    } catch (const Error& error) {
      throw Error(error.kind(), hosts.who(rank_) + ": " + error.what());
    }
  }

  Fields entryOf(int rank) { return decode(store_.get(entryKey(rank)).value_or("")); }
  void putEntry() {
    store_.set(entryKey(rank_), encode(mine_));
    is_put_ = true;
  }
  // Empties the entry and does not remove it: a store of torch's without compareSet waits for a
  // key that is removed while another rank asks for it.
  // An entry that names a rival or a reason stays, for the rival and rank 0 to read.
  void leave() {
    if (!noted_.empty()) store_.set(noteKey(rank_), "");
    if (is_put_ && !mine_.contains("rival") && !mine_.contains("broken"))
      store_.set(entryKey(rank_), "");
  }

  // The store may have ended with rank 0, and the first error matters more.
  void leaveAfterError() {
    try {
      leave();
    } catch (const std::exception& failure) {
      log("cannot empty the entry of " + shown(rank_) + ": " + failure.what());
    }
  }

  // Throws if another process has taken this rank's entry.  Once a tick.
  // No rank needs the entry of rank 0, but a second process of rank 0: it is put once rank 0
  // waits.
  void checkEntry() {
    if (rank_ == 0 && !is_put_) putEntry();
    if (rank_ == 0) readNotes();
    if (!is_put_ || !AttemptClock::due(next_look_)) return;
    if (rank_ == 0) checkTable();
    const Fields own = entryOf(rank_);
    if (own.empty() || fieldOf(own, "token") == fieldOf(mine_, "token")) return;
    mine_["rival"] = fieldOf(own, "token");  // rank 0 tells it too
    refuse(Error(Failure::kSetup, "two processes claim " + shown(rank_) + ": pid " +
                                      fieldOf(own, "pid") + " on host " + fieldOf(own, "host") +
                                      ", and pid " + fieldOf(mine_, "pid") + " on host " +
                                      fieldOf(mine_, "host") + ", noticed by the latter" +
                                      difference(own)));
  }

  // Rank 0 of another group of this name may have replaced the table, or removed it.
  void checkTable() {
    const std::string text = store_.get(kTableKey).value_or("");
    const Fields table = decode(text);
    if (text.empty() && !table_.empty())
      store_.set(kTableKey, encode(table_));
    else if (isOfOtherGroup(table) && table.contains("who"))
      hint_ = fieldOf(table, "who") + " makes " + groupOf(table) + " meanwhile: " + kSameOrder;
  }

  void poll() {
    stepClock(lateRanks());
    checkEntry();
    AttemptClock::sleep(pause());
  }

  Nanos pause() const { return clock_.pause(std::min(size_ * kLeastPause, kEntriesPause)); }

  // Throws at the deadline.  `late` did not do `what` yet.
  void stepClock(const std::vector<int>& late, const std::string& what = "join") {
    const std::string names = options_.rankList(late);
    other_groups_.look(late);
    try {
      clock_.poll([&] { return names + " to " + what + other_groups_.textOf(late); });
    } catch (const Error& error) {  // the attempt was ended
      if (rank_ == 0) throw;
      refuse(error);
    }
    if (!clock_.over(rank_ == 0 ? 0 : limits::kRank0Grace)) return;
    const Error error(Failure::kTimeout, names + " of " + std::to_string(size_) + " did not " +
                                             what + " within " + seconds(options_.timeout) +
                                             ", making group '" + options_.name + "'; noticed by " +
                                             shown(rank_) + hints() + other_groups_.textOf(late));
    if (rank_ == 0) throw error;
    // Rank 0 gave up before this rank came, or was stopped; then its own clock says that the others
    // are late.
    if (const Fields table = decode(seen_); table.contains("failed") && concerns(table))
      failAs(table, beforeItCame());
    const Reason reason{error.kind(), error.what()};
    if (is_put_) tellRank0(reason);
    // Rank 0 may have seen all confirmations already, and goes on to make connections.
    if (mine_.contains("seen")) {
      const std::string own = encode(reason, /*culprit=*/0), nonce = fieldOf(mine_, "seen");
      const std::string stored = storeReason(store_, reasonKey(nonce), own);
      confirmReason(store_, nonce, rank_, options_);
      const Fields fields = decode(stored);
      if (stored != own)
        throw Error(kindOf(fields), fieldOf(fields, "text") + ", learned by " + shown(rank_));
    }
    throw error;
  }

  // Why ranks may be missing.
  std::string hints() const {
    std::string text = hint_.empty() ? "" : "; " + hint_;
    if (clock_.stopped() > kSecond)
      text += "; the process of " + shown(rank_) + " was stopped for " + seconds(clock_.stopped()) +
              " meanwhile, so the others may have given up";
    for (const auto& [r, note] : notes_) text += "; " + fieldOf(note, "text");
    return text;
  }

  // Of an entry, a table or a note.  Two launchers may have started ranks of one job.
  bool isOfOtherJob(const Fields& fields) const {
    const std::string job = fieldOf(fields, "job"), own = fieldOf(mine_, "job");
    return !job.empty() && !own.empty() && job != own &&
           fieldOf(fields, "launcher") == fieldOf(mine_, "launcher");
  }
  // new_group in another order gives groups of different ranks the same name.
  bool isOfOtherGroup(const Fields& fields) const {
    const std::string ranks = fieldOf(fields, "ranks"), own = fieldOf(mine_, "ranks");
    return !ranks.empty() && !own.empty() && ranks != own;
  }
  bool isOfOthers(const Fields& fields) const {
    return isOfOtherJob(fields) || isOfOtherGroup(fields);
  }
  std::string groupOf(const Fields& fields) const {
    const std::string ranks = fieldOf(fields, "ranks");
    return "group '" + options_.name + "'" + (ranks.empty() ? "" : " of " + ranks);
  }
  // Of two processes that claim one rank.
  std::string difference(const Fields& other) const {
    if (isOfOtherJob(other))
      return "; the former is of " + jobOf(other) + ", the latter of " + jobOf(mine_) + ": " +
             kOneStoreEach;
    if (isOfOtherGroup(other))
      return "; the former makes " + groupOf(other) + ", the latter " + groupOf(mine_) + ": " +
             kSameOrder;
    return "";
  }
  static std::string jobOf(const Fields& fields) {
    return fieldOf(fields, "launcher") + " job " + fieldOf(fields, "job");
  }
  std::string whoIsThis() const {
    return shown(rank_) + " (pid " + fieldOf(mine_, "pid") + " on host " + fieldOf(mine_, "host") +
           ")";
  }

  // Only rank 0 knows.
  std::vector<int> lateRanks() const {
    if (rank_ != 0) return {0};
    if (std::vector<int> absent = absentRanks(); !absent.empty()) return absent;
    std::vector<int> unconfirmed;
    for (const auto& [r, entry] : entries_)
      if (fieldOf(entry, "seen") != fieldOf(table_, "nonce")) unconfirmed.push_back(r);
    return unconfirmed;
  }

  std::string shown(int r) const { return "rank " + options_.shown(r); }

  Store& store_;
  const int rank_, size_;
  const GroupOptions& options_;
  const OwnSettings& own_settings_;
  AttemptClock clock_;
  Nanos next_look_ = 0, next_entries_ = now() + kEntriesPause;
  Fields mine_;
  OtherGroups other_groups_;
  std::optional<Error> refusal_;  // an error in this rank's own settings
  bool is_put_ = false;           // the entry is in the store
  SharedOptions shared_;

  // Rank 0.
  std::string attempt_ = net::randomGroup();  // on other ranks: rank 0's
  std::string socket_, secret_;
  std::map<int, Fields> entries_;  // of the other ranks
  Fields table_;
  std::optional<HostLeader> leader_;
  std::map<int, Fields> notes_;  // of ranks that have not come
  Nanos next_notes_ = 0;

  // The other ranks.
  std::string seen_;  // rank 0's table
  Nanos seen_since_ = 0;
  std::string refused_;      // the nonce of an invitation that came to nothing
  std::string noted_;        // the nonce of the table about which this rank left a note
  std::string unreachable_;  // the nonce of the invitation whose socket has no process
  Nanos unreachable_since_ = 0;
  std::string hint_;
};

Rendezvous rendezvous(Store& store, int rank, int world_size, const GroupOptions& options,
                      const OwnSettings& own_settings) {
  return Meeting(store, rank, world_size, options, own_settings).run();
}

void removeTable(Store& store) {
  store.remove(kTableKey);
}

}  // namespace ringreduce
