// What is news, and the frames that tell it.
#include "health/control_state.h"

#include <algorithm>

namespace ringreduce::net {
namespace {

constexpr size_t kAtATime = 16 << 10;  // bytes

}  // namespace

ControlState::ControlState(int size) : ranks_(static_cast<size_t>(size)) {}

bool ControlState::depart(int rank, Declared how) {
  if (how <= at(rank).departure) return false;
  at(rank).departure = how;
  return true;
}

bool ControlState::asked(const Question& question) {
  if (question.number <= at(question.asker).questions) return false;
  at(question.asker).questions = question.number;
  at(question.asker).since = question.since;
  return true;
}

bool ControlState::answered(const Answer& answer) {
  if (answer.number <= at(answer.rank).answer.number) return false;
  at(answer.rank).answer = answer;
  return true;
}

std::optional<int> ControlState::broke(const Broken& broken) {
  const bool news = broken.how == Broken::How::kUnreachable
                        ? cut_.insert(std::minmax(broken.reporter, broken.rank)).second
                        : ended_.insert(broken.rank).second;
  if (!news) return std::nullopt;
  broken_.push_back(broken);
  return static_cast<int>(broken_.size()) - 1;
}

Outbox ControlState::all() const {
  Outbox all;
  if (failure) all.add({Outbox::Kind::kFailure, 0});
  for (int r = 0; r < size(); ++r)
    if (departure(r) != Declared::kHere) all.add({Outbox::Kind::kDeparture, r});
  for (size_t i = 0; i < broken_.size(); ++i) all.add({Outbox::Kind::kBroken, static_cast<int>(i)});
  return all;
}

ControlFrame ControlState::frame(Outbox::Item item) const {
  const int i = item.second;
  switch (item.first) {
    case Outbox::Kind::kFailure:
      return *failure;
    case Outbox::Kind::kDeparture:
      return Departed{i, departure(i)};
    case Outbox::Kind::kBroken:
      return broken_[static_cast<size_t>(i)];
    case Outbox::Kind::kQuestion:
      return Question{i, questionsOf(i), at(i).since};
    case Outbox::Kind::kAnswer:
      break;
  }
  return at(i).answer;
}

void ControlState::take(Outbox& from, bool also_asking, std::string& out) const {
  while (out.size() < kAtATime && !from.items_.empty()) {
    const Outbox::Item item = *from.items_.begin();
    if (item.first >= Outbox::Kind::kQuestion && !also_asking) return;
    out += encode(frame(item));
    from.items_.erase(from.items_.begin());
  }
}

}  // namespace ringreduce::net
