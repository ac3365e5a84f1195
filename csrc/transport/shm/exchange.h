// The exchange: each rank fills slots of its own memory, and every rank of the host reads them
// there.
//
// Time is counted in steps, the same on all ranks.  An operation takes the next few (begin).  In
// step s a rank may fill its slot s mod D, posts the step, reads slots of other ranks, and releases
// it:
//
//     acquire(s)    own slot of step s, to fill; waits until all ranks have released step s - D
//     post(s)       the slot is filled, or is not used in this step
//     peek(r, s)    rank r's slot of step s; waits until r has posted it
//     release(s)    this rank has read all that it needs of step s
//
// If ranks divide a sum among them (two-shot), a step has a middle:
//
//     share(s)      this rank's part of the sum is written into its own slot
//     shared(r, s)  rank r's slot with its part of the sum; waits until r has shared it
//
// Each function is called for steps in growing order, post and release for every step; one function
// may be ahead of another.  Why that is safe: slot s mod D of a rank is filled for step s + D only
// after every rank's `done` has passed s, and is read for step s only after the owner's `posted`
// has; between the two only its owner writes it.  A rank that fills alone in an operation (the root
// of a broadcast) may fill all ranks' slots of a step: the same holds for them.  All counters only
// grow and have one writer each. No barrier is needed.
//
// In a group that survives losses, ranks may be absent (WaitGuard::isAbsent).  An absent rank has
// ended or left, so its flags are final, and all other ranks read the same values: they agree
// without a message on the steps that it has posted and shared.  Slots of these steps stay
// readable.  For all other steps `find` and `shared` return null.  `acquire` does not wait for an
// absent rank, which reads no slots any more.
//
// If its process has not ended (it is frozen), it is left out before it is absent (page.h): then
// its flags count as final.  If it goes on later, it fills no slot that another rank reads, and the
// slots that it reads may be filled anew.  So it looks at its own page at the end of an operation,
// before it uses a result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/shm/page.h"
#include "transport/shm/wait.h"

namespace ringreduce {

struct Slots {
  std::byte* data;  // `depth` slots of `bytes` each
  size_t bytes;
  int depth;

  std::byte* at(uint64_t step) const { return data + step % static_cast<uint64_t>(depth) * bytes; }
};

template <class Rules = HostRules>
class BasicExchange {
 public:
  struct Member {
    RankPage* page;
    Slots slots;
  };

  BasicExchange(int rank, std::vector<Member> members, Waiter& waiter, WaitGuard& guard)
      : rank_(rank),
        members_(std::move(members)),
        waiter_(waiter),
        guard_(guard),
        seen_(members_.size()) {}

  int size() const { return static_cast<int>(members_.size()); }
  size_t slotBytes() const { return members_[0].slots.bytes; }
  int depth() const { return members_[0].slots.depth; }

  // Takes the next `steps` steps for a new operation and returns the first of them.
  uint64_t begin(uint64_t steps) {
    for (Seen& seen : seen_) seen.verified = false;
    return std::exchange(next_, next_ + steps);
  }

  std::byte* acquire(uint64_t step) {
    const Slots& slots = members_[rank_].slots;
    const auto depth = static_cast<uint64_t>(slots.depth) + Rules::kEarlyReuse;
    for (int r = 0; r < size(); ++r) {
      if (r == rank_ || seen_[r].done + depth > step) continue;
      waiter_.until(r, [&, r] {
        return (seen_[r].done = page(r).done.template observe<Rules>()) + depth > step ||
               guard_.isAbsent(r);
      });
    }
    return slots.at(step);
  }

  void post(uint64_t step) { publish(page(rank_).posted, step); }

  // Ends the operation if rank r is absent and has not posted the step.
  std::byte* peek(int r, uint64_t step) {
    std::byte* const slot = find(r, step);
    if (!slot) guard_.endOperation(r);
    return slot;
  }

  // As peek, but null if rank r is absent and has not posted the step.
  std::byte* find(int r, uint64_t step) {
    if (!await(r, step, &RankPage::posted, &RankPage::last_posted, seen_[r].posted)) return nullptr;
    if (!seen_[r].verified) {
      guard_.verify(r);
      seen_[r].verified = true;
    }
    return members_[r].slots.at(step);
  }

  // Rank r's slot of a step that was acquired, to fill alone; or that the filling rank has posted.
  std::byte* slotOf(int r, uint64_t step) const { return members_[r].slots.at(step); }

  std::byte* own(uint64_t step) const { return members_[rank_].slots.at(step); }

  void release(uint64_t step) { publish(page(rank_).done, step); }

  void share(uint64_t step) { publish(page(rank_).reduced, step); }

  // Null if rank r is absent and has not shared the step.
  const std::byte* shared(int r, uint64_t step) {
    return await(r, step, &RankPage::reduced, &RankPage::last_reduced, seen_[r].reduced)
               ? members_[r].slots.at(step)
               : nullptr;
  }

  // After endOperation: passes all steps of the operation, so that no rank waits for them.  Other
  // ranks may then read old data from the slots.  But they end the operation as well, because in
  // each of its steps a rank that reads peeks at the absent rank too.
  void passSteps() {
    post(next_ - 1);
    share(next_ - 1);
    release(next_ - 1);
  }

 private:
  // The other ranks' flags as last read, so that most checks touch no shared cache line.
  struct Seen {
    uint64_t posted = 0, reduced = 0, done = 0;
    bool verified = false;
  };

  RankPage& page(int r) { return *members_[r].page; }

  // Flags count steps: step s is complete when the flag is above s.
  void publish(Flag& flag, uint64_t step) {
    flag.publish<Rules>(step + 1);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) wakeIfWaiting<Rules>(page(r), rank_);
  }

  // Whether rank r has passed the step; false only if it is absent.
  bool await(int r, uint64_t step, Flag RankPage::* flag, uint64_t RankPage::* last,
             uint64_t& seen) {
    if (seen > step) return true;
    const auto passed = [&] { return (seen = (page(r).*flag).template observe<Rules>()) > step; };
    waiter_.until(r, [&] { return passed() || guard_.isAbsent(r); });
    if (seen <= step) passed();  // again: it may have passed the step just before it ended
    if (isLeftOut(page(r))) seen = agreedValue(page(r).*flag, page(r).*last);
    return seen > step;
  }

  const int rank_;
  std::vector<Member> members_;
  Waiter& waiter_;
  WaitGuard& guard_;
  std::vector<Seen> seen_;
  uint64_t next_ = 0;
};

using Exchange = BasicExchange<>;

}  // namespace ringreduce
