// The three threads, and what ranks tell each other through the store.
#include "cuda/far_watcher.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "base/bytes.h"
#include "base/error.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "bootstrap/meeting.h"

namespace ringreduce::cuda {
namespace {

constexpr Nanos kShortRound = 20 * kMicrosecond, kLongRound = 5 * kMillisecond;
constexpr Nanos kLookRound = 10 * kMillisecond;
// How long a verdict waits for the store, and who only guesses for somebody who knows.
constexpr Nanos kPatience = 3 * kSecond, kHearsay = 1500 * kMillisecond;
// Two ranks may write at the same time: the one who reads its own word after this has won.
constexpr Nanos kSettling = 50 * kMillisecond;

uint64_t extended(uint64_t history, const OpSignature& a) {
  for (uint64_t word : {a.count, static_cast<uint64_t>(a.kind), static_cast<uint64_t>(a.dtype),
                        static_cast<uint64_t>(a.op)})
    history = mixed(history, word);
  return history;
}

}  // namespace

FarWatcher::FarWatcher(std::shared_ptr<Store> store, const Hosts& hosts,
                       const GroupOptions& options, FarOptions far)
    : store_(std::move(store)),
      hosts_(hosts),
      options_(options),
      far_(std::move(far)),
      words_(static_cast<size_t>(hosts.size())) {
  collecting_ = std::thread([this] { collect(); });
  looking_ = std::thread([this] { look(); });
  corresponding_ = std::thread([this] { correspond(); });
  for (std::thread* thread : {&collecting_, &looking_, &corresponding_})
    pthread_setname_np(thread->native_handle(), "ringreduce-far");
}

FarWatcher::~FarWatcher() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread* thread : {&collecting_, &looking_, &corresponding_}) thread->join();
}

std::string FarWatcher::key(const std::string& name) const {
  return "ringreduce/" + hosts_.word() + "/" + name;
}

void FarWatcher::pause(Lock& lock, Nanos time) {
  changed_.wait_for(lock, std::chrono::nanoseconds(time));
}

// ---- for users' threads

uint64_t FarWatcher::announce(OpSignature what) {
  const std::lock_guard lock(mutex_);
  if (verdict_) throwVerdict();
  what.sequence = announced_++;
  what.history = history_ = extended(history_, what);
  latest_ = what;
  return what.sequence;
}

void FarWatcher::entrust(uint64_t number, Nanos timeout, Reached begun, Reached finished) {
  {
    const std::lock_guard lock(mutex_);
    if (under_way_.empty()) head_since_ = now();
    under_way_.push_back({number, latest_, timeout, std::move(begun), std::move(finished)});
  }
  changed_.notify_all();
}

void FarWatcher::stayAwake() {
  const std::lock_guard lock(mutex_);
  awake_ = true;
  changed_.notify_all();
}

void FarWatcher::check() const {
  const std::lock_guard lock(mutex_);
  if (verdict_) throwVerdict();
}

bool FarWatcher::failed() const {
  const std::lock_guard lock(mutex_);
  return verdict_.has_value();
}

bool FarWatcher::wait(Nanos longest) {
  const Nanos deadline = deadlineIn(longest);
  Lock lock(mutex_);
  while (!under_way_.empty()) {
    const Nanos left = deadline - now();
    if (left <= 0) return false;
    pause(lock, std::min(kLongRound, left));
    lock.unlock();
    try {
      if (options_.interrupt) options_.interrupt();
    } catch (...) {
      abort("interrupted while it waited for GPU operations");
      throw;
    }
    lock.lock();
  }
  if (verdict_) throwVerdict();
  return true;
}

bool FarWatcher::settle(Nanos longest) {
  const Nanos deadline = deadlineIn(longest);
  Lock lock(mutex_);
  while (!under_way_.empty()) {
    const Nanos left = deadline - now();
    if (left <= 0) return false;
    pause(lock, std::min(kLongRound, left));
  }
  return true;
}

void FarWatcher::abort(const std::string& why) {
  const int me = hosts_.rank();
  Lock lock(mutex_);
  propose(lock, {.kind = Failure::kAborted,
                 .culprit = me,
                 .reporter = me,
                 .text = hosts_.who(me) + " aborted group '" + options_.name + "': " + why});
}

void FarWatcher::fail(Failure kind, int culprit, const std::string& text) {
  Lock lock(mutex_);
  propose(lock, {.kind = kind, .culprit = culprit, .reporter = hosts_.rank(), .text = text});
  throwVerdict();
}

void FarWatcher::throwVerdict() const {
  std::string text = verdict_->text + "; noticed by " + shown(verdict_->reporter);
  if (verdict_->reporter != hosts_.rank()) text += ", learned by " + shown(hosts_.rank());
  throw Error(verdict_->kind, text + ". The group has failed: destroy it and make a new one.");
}

// ---- verdicts

// Returns once there is a verdict: this one, or that of somebody who was first.
void FarWatcher::propose(Lock& lock, Verdict mine) {
  if (verdict_) return;
  if (!proposed_) proposed_ = std::move(mine);
  changed_.notify_all();
  for (const Nanos end = deadlineIn(kPatience); !verdict_ && !stopping_ && now() < end;)
    pause(lock, kLookRound);
  if (!verdict_) verdict_ = proposed_;  // the store does not answer
  changed_.notify_all();
}

// What the store says of the group's end, if it does.
void FarWatcher::hearVerdict(Lock& lock) {
  lock.unlock();
  Fields fields;
  try {
    fields = decode(store_->get(key("verdict")).value_or(""));
  } catch (const std::exception&) {
    // A store that is gone tells nothing: each rank then has its own story.
  }
  lock.lock();
  if (fields.empty() || verdict_) return;
  verdict_ = Verdict{.kind = static_cast<Failure>(number(fields, "kind")),
                     .culprit = static_cast<int>(number(fields, "culprit")),
                     .reporter = static_cast<int>(number(fields, "reporter")),
                     .text = word(fields, "text")};
  changed_.notify_all();
}

// Makes the proposed verdict the group's, if there is none yet.
void FarWatcher::settleVerdict(Lock& lock) {
  const Verdict mine = *proposed_;
  for (const Nanos end = deadlineIn(mine.guessed ? kHearsay : 0); !verdict_;) {
    hearVerdict(lock);
    if (now() >= end) break;
    pause(lock, kSettling);
  }
  if (verdict_) return;
  lock.unlock();
  try {
    store_->set(key("verdict"), encode({{"kind", std::to_string(static_cast<int>(mine.kind))},
                                        {"culprit", std::to_string(mine.culprit)},
                                        {"reporter", std::to_string(mine.reporter)},
                                        {"text", mine.text}}));
  } catch (const std::exception& error) {
    log(shown(hosts_.rank()) + " of group '" + options_.name +
        "' cannot tell the others why it has failed: " + error.what());
  }
  std::this_thread::sleep_for(std::chrono::nanoseconds(kSettling));
  lock.lock();
  hearVerdict(lock);
  if (!verdict_) verdict_ = mine;
  changed_.notify_all();
}

// ---- words

void FarWatcher::exchangeWords(Lock& lock) {
  hearVerdict(lock);
  if (under_way_.empty() || verdict_) return;
  const Operation head = under_way_.front();
  const Fields mine{{"announced", std::to_string(announced_)},
                    {"head", std::to_string(head.number)},
                    {"history", std::to_string(head.what.history >> 1)},
                    {"begun", begun_since_ ? "1" : "0"},
                    {"what", describe(head.what)}};
  lock.unlock();
  std::vector<Word> words(words_.size());
  bool heard = true;
  try {
    store_->set(key("at/" + std::to_string(hosts_.rank())), encode(mine));
    for (int r = 0; r < hosts_.size(); ++r) {
      const Fields fields = decode(store_->get(key("at/" + std::to_string(r))).value_or(""));
      if (fields.empty()) continue;
      words[static_cast<size_t>(r)] = {
          .announced = static_cast<uint64_t>(number(fields, "announced")),
          .head = static_cast<uint64_t>(number(fields, "head")),
          .history = static_cast<uint64_t>(number(fields, "history")),
          .begun = number(fields, "begun") == 1,
          .what = word(fields, "what")};
    }
  } catch (const std::exception&) {
    heard = false;
  }
  lock.lock();
  words_ = std::move(words);
  heard_ = heard;
  wrote_ = true;
  for (int r = 0; r < hosts_.size() && !proposed_; ++r) {
    const Word& theirs = words_[static_cast<size_t>(r)];
    if (r == hosts_.rank() || theirs.announced == 0 || theirs.head != head.number ||
        theirs.history == head.what.history >> 1)
      continue;
    proposed_ =
        Verdict{.kind = Failure::kMismatch,
                .culprit = r,
                .reporter = hosts_.rank(),
                .text = "ranks disagree on GPU operation #" + std::to_string(head.number) +
                        " or on one before it: " + hosts_.who(hosts_.rank()) + " calls " +
                        describe(head.what) + ", " + hosts_.who(r) + " calls " + theirs.what};
  }
}

// The timeout of an operation: who keeps it waiting, as far as the ranks' words tell.
FarWatcher::Verdict FarWatcher::late(const Operation& head) const {
  std::vector<int> absent, behind;
  for (int r = 0; r < hosts_.size(); ++r) {
    const Word& w = words_[static_cast<size_t>(r)];
    if (r == hosts_.rank()) continue;
    if (w.announced <= head.number)
      absent.push_back(r);
    else if (w.head < head.number || (w.head == head.number && !w.begun))
      behind.push_back(r);
  }
  const auto named = [&](const std::vector<int>& ranks) {
    return joined(ranks, ", ", [&](int r) { return hosts_.who(r); });
  };
  std::string text;
  int culprit = (hosts_.rank() + hosts_.size() - 1) % hosts_.size();
  if (!heard_) {
    text = "who is late is not known, since the store does not answer";
  } else if (!absent.empty()) {
    culprit = absent.front();
    text = named(absent) + " did not arrive";
  } else if (!behind.empty()) {
    culprit = behind.front();
    text = named(behind) + " came, but with other work in " +
           (behind.size() > 1 ? "their" : "its") + " stream before it";
  } else {
    text =
        "all ranks came, and something between their GPUs stands still: a network, or a GPU; "
        "which cannot be told from here";
  }
  return {.kind = Failure::kTimeout,
          .culprit = culprit,
          .reporter = hosts_.rank(),
          .text = text + ": GPU " + describe(head.what) + " timed out after a timeout of " +
                  seconds(head.timeout) + ", in group '" + options_.name + "'"};
}

// ---- the threads

void FarWatcher::collect() {
  Lock lock(mutex_);
  Nanos round = kShortRound;
  while (!stopping_) {
    if (under_way_.empty()) {
      round = kShortRound;
      changed_.wait(lock, [&] { return stopping_ || !under_way_.empty(); });
      continue;
    }
    const Operation& head = under_way_.front();
    Reached begun = begun_since_ ? Reached([] { return true; }) : head.begun;
    Reached finished = head.finished;
    lock.unlock();
    bool is_begun = false, is_finished = false;
    std::string gpu_error;
    try {
      is_begun = begun();
      is_finished = is_begun && finished();
    } catch (const Error& error) {
      gpu_error = error.what();
    }
    begun = finished = nullptr;
    lock.lock();
    if (is_begun && begun_since_ == 0) begun_since_ = now();
    if (!gpu_error.empty()) {
      propose(lock, {.kind = Failure::kAborted,
                     .culprit = hosts_.rank(),
                     .reporter = hosts_.rank(),
                     .text = hosts_.who(hosts_.rank()) + " gave up: " + gpu_error});
      under_way_.clear();  // a GPU that has failed finishes nothing any more
      changed_.notify_all();
    } else if (is_finished) {
      under_way_.pop_front();
      head_since_ = now();
      begun_since_ = next_report_ = 0;
      round = kShortRound;
      changed_.notify_all();
    } else {
      pause(lock, round);
      round = std::min(2 * round, kLongRound);
    }
  }
}

void FarWatcher::look() {
  Lock lock(mutex_);
  while (!stopping_) {
    if (verdict_ && !let_go_) {
      let_go_ = true;
      const std::string why = verdict_->text;
      lock.unlock();
      far_.let_go(why);
      lock.lock();
      continue;
    }
    if (verdict_ || (under_way_.empty() && !awake_)) {
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    const std::optional<FarTrouble> trouble = far_.probe();
    lock.lock();
    if (trouble)
      propose(lock, {.kind = trouble->kind,
                     .culprit = hosts_.rank(),
                     .reporter = hosts_.rank(),
                     .text = trouble->text,
                     .guessed = trouble->guessed});
    else if (!under_way_.empty())
      lookAtHead(lock);
    if (!verdict_) pause(lock, kLookRound);
  }
}

void FarWatcher::lookAtHead(Lock& lock) {
  const Operation head = under_way_.front();
  const Nanos time = now();
  const Nanos stall = std::max(options_.stall, far_.word_after);
  if (time - head_since_ >= stall && time >= next_report_) {
    next_report_ = time + std::max(time - head_since_, kSecond);
    const std::string since = seconds(time - head_since_);
    const std::string who_is_late = late(head).text;
    lock.unlock();
    log(shown(hosts_.rank()) + " of group '" + options_.name + "' has had GPU " +
        describe(head.what) + " in its stream for " + since + ": " +
        who_is_late.substr(0, who_is_late.rfind(": GPU ")));
    lock.lock();
  }
  if (begun_since_ == 0 || time - begun_since_ < head.timeout) return;
  // Whoever waits too writes a word within this time.
  const auto over = [&] {
    return verdict_ || stopping_ || under_way_.empty() || under_way_.front().number != head.number;
  };
  for (const Nanos end = deadlineIn(far_.word_after + far_.word_after / 4); !over() && now() < end;)
    pause(lock, kLookRound);
  if (over()) return;
  roll_call_ = true;
  changed_.notify_all();
  for (const Nanos end = deadlineIn(kPatience); roll_call_ && !over() && now() < end;)
    pause(lock, kLookRound);
  if (!over()) propose(lock, late(head));
}

void FarWatcher::correspond() {
  Lock lock(mutex_);
  Nanos next = 0;
  while (!stopping_) {
    const Nanos time = now();
    if (proposed_ && !verdict_) {
      settleVerdict(lock);
    } else if (roll_call_) {
      exchangeWords(lock);
      roll_call_ = false;
      changed_.notify_all();
    } else if (!verdict_ && !under_way_.empty()) {
      const Nanos due = std::max(next, head_since_ + far_.word_after);
      if (time < due) {
        pause(lock, due - time);
        continue;
      }
      exchangeWords(lock);
      next = now() + far_.word_after;
    } else {
      changed_.wait(lock);
    }
  }
  if (!wrote_) return;
  lock.unlock();
  try {
    // Emptied and not taken out: see Meeting::leave.
    store_->set(key("at/" + std::to_string(hosts_.rank())), "");
  } catch (const std::exception&) {
    // A store that is gone keeps nothing either.
  }
}

}  // namespace ringreduce::cuda
