// Entries "ringreduce/makes/<rank>" in the store.
#include "bootstrap/other_groups.h"

#include <algorithm>
#include <exception>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "bootstrap/attempt.h"
#include "bootstrap/unix_socket.h"

namespace ringreduce {
namespace {

// A rank may time out some seconds before this one says why.
constexpr Nanos kPeriod = kSecond, kFresh = 6 * kPeriod;
constexpr size_t kMostAsked = 8;  // ranks a period

}  // namespace

OtherGroups::OtherGroups(Store& store, const GroupOptions& options, int rank, std::string group)
    : store_(options.global_ranks.empty() ? nullptr : store.ofJob()),
      options_(options),
      rank_(rank),
      group_(std::move(group)),
      next_look_(deadlineIn(kPeriod)) {}

OtherGroups::~OtherGroups() {
  if (looks_ == 0 || !store_) return;
  try {
    store_->set(key(rank_), "");  // a store without compareSet waits for keys that were removed
  } catch (const std::exception& error) {  // the first error matters more
    log("cannot empty " + key(rank_) + " in the store: " + error.what());
  }
}

void OtherGroups::look(const std::vector<int>& late) {
  if (!store_ || !AttemptClock::due(next_look_, kPeriod)) return;
  try {
    store_->set(key(rank_), encode({{"look", std::to_string(++looks_)}, {"group", group_}}));
    for (const int r : std::span(late).first(std::min(late.size(), kMostAsked))) {
      const std::string text = store_->get(key(r)).value_or("");
      Other& other = others_[r];
      if (text.empty() || text == other.text) continue;
      other = {text, other.changes + 1, now()};
    }
  } catch (const Error&) {  // of a store that has ended: the rendezvous finds out too, and says why
    store_ = nullptr;
  }
}

std::string OtherGroups::textOf(const std::vector<int>& late) const {
  std::string text;
  for (const int r : late) {
    const auto found = others_.find(r);
    // What was there at the first look may be old.  A rank that has ended its wait since did so at
    // its own timeout as a rule.
    if (found == others_.end() || found->second.changes < 2) continue;
    if (now() - found->second.changed > kFresh) continue;
    const std::string group = fieldOf(decode(found->second.text), "group");
    if (!group.empty() && group != group_)
      text += "; rank " + options_.shown(r) + " waits to make " + group;
  }
  return text.empty() ? "" : text + " (" + kSameOrder + ")";
}

std::string OtherGroups::key(int rank) const {
  return "ringreduce/makes/" + std::to_string(options_.shownAs(rank));
}

}  // namespace ringreduce
