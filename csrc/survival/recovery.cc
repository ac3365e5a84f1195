// Standings and plans in the store.
#include "survival/recovery.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "bootstrap/topology.h"

namespace ringreduce {
namespace {

constexpr Nanos kShortestNap = 100 * kMicrosecond, kLongestNap = 20 * kMillisecond;

bool contains(const std::vector<int>& ranks, int rank) {
  return std::ranges::find(ranks, rank) != ranks.end();
}

template <class Number>
void write(std::ostream& out, const std::vector<Number>& numbers) {
  out << ' ' << numbers.size();
  for (const Number n : numbers) out << ' ' << n;
}

std::vector<int> readRanks(std::istream& in) {
  size_t n = 0;
  std::vector<int> ranks;
  for (in >> n; ranks.size() < n && in;) {
    int rank = 0;
    in >> rank;
    ranks.push_back(rank);
  }
  return ranks;
}

[[noreturn]] void throwUnreadable(const std::string& text) {
  throw Error(Failure::kSetup,
              "the store has '" + text +
                  "' where the ranks agree how to go on after a loss; does another "
                  "program write to the keys of this group?");
}

}  // namespace

std::string Standing::toText() const {
  TextWriter out;
  out << operation << ' ' << holds << ' ' << epoch;
  write(out, unreachable);
  return out.str();
}

Standing Standing::fromText(const std::string& text) {
  TextReader in(text);
  Standing one;
  in >> one.operation >> one.holds >> one.epoch;
  one.unreachable = readRanks(in);
  if (!in) throwUnreadable(text);
  return one;
}

Plan planOf(const std::map<int, Standing>& came, const std::vector<int>& ended) {
  Plan plan;
  for (const auto& [rank, standing] : came) {
    plan.operation = std::max(plan.operation, standing.operation);
    if (!contains(ended, rank)) plan.members.push_back(rank);
  }
  const auto cutBetween = [&](int a, int b) {
    return contains(came.at(a).unreachable, b) || contains(came.at(b).unreachable, a);
  };
  for (;;) {
    std::tuple<long, long, int> worst{0, 0, -1};
    for (const int rank : plan.members) {
      const auto count = [&](auto&& which) {
        return static_cast<long>(std::ranges::count_if(
            plan.members, [&](int other) { return other != rank && which(other); }));
      };
      const long cuts = count([&](int other) { return cutBetween(rank, other); });
      const long blames =
          count([&](int other) { return contains(came.at(other).unreachable, rank); });
      if (cuts > 0) worst = std::max(worst, {cuts, blames, rank});
    }
    if (std::get<int>(worst) < 0) break;
    std::erase(plan.members, std::get<int>(worst));
  }
  plan.is_done = !plan.members.empty();
  for (const int rank : plan.members) {
    const Standing& one = came.at(rank);
    plan.is_done = plan.is_done && one.operation == plan.operation && one.holds &&
                   one.epoch == came.at(plan.members.front()).epoch;
  }
  return plan;
}

Recovery::Recovery(const std::shared_ptr<Store>& store, Epochs& epochs)
    : epochs_(epochs),
      rank_(epochs.rank()),
      options_(epochs.options()),
      store_(std::make_unique<TimedStore>(store, epochs.ownName())),
      place_("ringreduce/epochs/" + epochs.running().hosts->nonce() + "/"),
      members_(epochs.running().ranks.ranks()) {
  store->setOnce(place_ + "0", "made");  // throws here for a store that cannot do it
}

std::string Recovery::key(const char* what) const {
  return place_ + std::to_string(epoch_ + 1) + "/" + what;
}

// Whether all have come that may; else `late` receives those that are awaited.
bool Recovery::mayPropose(const std::map<int, Standing>& came, Nanos waited, std::vector<int>& late,
                          std::vector<int>& ended) const {
  late.clear();
  ended.clear();
  bool silent = false;  // one that may yet come
  for (const int rank : members_) {
    if (rank == rank_) continue;
    const Sight sight = epochs_.look(rank);
    if (sight == Sight::kEnded) ended.push_back(rank);
    if (sight == Sight::kEnded || came.contains(rank)) continue;
    if (sight == Sight::kHere) late.push_back(rank);
    const auto cut_off = static_cast<size_t>(std::ranges::count_if(
        came, [&](const auto& one) { return contains(one.second.unreachable, rank); }));
    silent = silent || (sight == Sight::kSilent && 2 * cut_off <= members_.size());
  }
  return late.empty() && (!silent || waited >= limits::kUnreachable);
}

Plan Recovery::agree(Standing own, const Watch& watch, Nanos timeout) {
  for (const int rank : members_)
    if (rank != rank_ && epochs_.isCut(rank)) own.unreachable.push_back(rank);
  const std::string standing_key = key("rank/"), plan_key = key("plan");
  store_->set(standing_key + std::to_string(rank_), own.toText());
  std::map<int, Standing> came{{rank_, own}};
  std::vector<int> late, ended;
  const Nanos began = now();
  for (;;) {
    const bool is_late = now() - began >= timeout;
    watch.poll();
    if (const auto plan = store_->get(plan_key)) return adopt(*plan);
    const auto first = std::ranges::find_if(members_, [&](int r) {
      return r == rank_ || (epochs_.look(r) == Sight::kHere && !(is_late && epochs_.isStopped(r)));
    });
    const bool proposes = *first == rank_;
    if (proposes) {
      for (const int rank : members_)
        if (!came.contains(rank))
          if (const auto text = store_->get(standing_key + std::to_string(rank)))
            came.emplace(rank, Standing::fromText(*text));
      bool all_there = mayPropose(came, now() - began, late, ended);
      // A stopped rank that wakes up later finds itself left out.
      if (!all_there && is_late) {
        std::erase_if(late, [&](int r) { return epochs_.isStopped(r); });
        all_there = late.empty();
      }
      if (all_there) {
        const Plan plan = planOf(came, ended);
        TextWriter out;
        out << "plan " << plan.operation << ' ' << plan.is_done;
        write(out, plan.members);
        return adopt(store_->setOnce(plan_key, out.str()));
      }
    }
    if (now() - began >= timeout + limits::kTimeToGoOn + (proposes ? 0 : limits::kProposal)) {
      if (!proposes) late = {*first};
      const Error error(Failure::kTimeout, watch.nameLate(late) + " within " + seconds(timeout),
                        {.rank = options_.shownAs(late.front())});
      giveUp(error);
      return adopt(store_->get(plan_key).value_or(""));
    }
    std::this_thread::sleep_for(
        std::chrono::nanoseconds(std::clamp((now() - began) / 4, kShortestNap, kLongestNap)));
  }
}

void Recovery::giveUp(const Error& error) {
  store_->setOnce(key("plan"),
                  "end " + std::to_string(static_cast<int>(error.kind())) + ' ' + error.what());
}

Plan Recovery::adopt(const std::string& text) {
  TextReader in(text);
  std::string kind;
  in >> kind;
  if (kind == "end") {
    int failure = 0;
    std::string why;
    in >> failure >> std::ws;
    std::getline(in, why, '\0');
    throw Error(static_cast<Failure>(failure), why);
  }
  Plan plan;
  in >> plan.operation >> plan.is_done;
  plan.members = readRanks(in);
  if (!in || kind != "plan") throwUnreadable(text);
  ++epoch_;
  if (!contains(plan.members, rank_))
    throw Error(Failure::kPeerLost,
                "rank " + options_.shown(rank_) + " of group '" + options_.name +
                    "' was left out: " + options_.rankList(plan.members) +
                    " had no answer from it in time, and went on without it. Start its process "
                    "again.",
                {.rank = options_.shownAs(rank_)});
  members_ = plan.members;
  return plan;
}

}  // namespace ringreduce
