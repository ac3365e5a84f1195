// Runs runRing with primitives that only record sends and receipts, and makes the steps of the
// records.
#include "cuda/internode/nccl_schedule.h"

#include "algorithm/ring.h"

namespace ringreduce::cuda {
namespace {

using In = RingPlace::In;
using Do = RingStep::Do;

struct Sent {
  enum class What : uint8_t { kOwn, kSum, kComplete, kCopy } what;  // kComplete: here, just now
  Span elements;
  size_t received = 0;  // kSum, kComplete: the exchange that brought the partial sums
};
struct Received {
  enum class What : uint8_t { kAddends, kSums, kComplete } what;
  Span elements;
  size_t sent = 0;  // the exchange that sends the result on
};

class Notes {
 public:
  explicit Notes(const RingPlan& plan) : plan_(plan) {}

  void send(int chunk, size_t j) { sends.push_back({Sent::What::kOwn, span(chunk, j)}); }
  void recvReduceSend(int chunk, size_t j) { add(chunk, j, Sent::What::kSum); }
  void recvReduceCopySend(int chunk, size_t j) { add(chunk, j, Sent::What::kComplete); }
  void recvCopySend(int chunk, size_t j) {
    recv(chunk, j);
    sends.push_back({Sent::What::kCopy, span(chunk, j)});
  }
  void recv(int chunk, size_t j) {
    receipts.push_back({Received::What::kComplete, span(chunk, j)});
  }

  std::vector<Sent> sends;
  std::vector<Received> receipts;

 private:
  void add(int chunk, size_t j, Sent::What what) {
    // The first rank that adds receives another rank's inputs, not sums.
    const bool first = (chunk + 2) % plan_.size == plan_.rank % plan_.size;
    sends.push_back({what, span(chunk, j), receipts.size()});
    receipts.push_back({first ? Received::What::kAddends : Received::What::kSums, span(chunk, j),
                        sends.size() - 1});
  }
  Span span(int chunk, size_t j) const {
    const Span whole = Cut{plan_.count, plan_.size}.chunk(chunk);
    Span s = piece(whole.size, plan_.slice, j);
    s.begin += whole.begin;
    return s;
  }

  const RingPlan& plan_;
};

// Makes the list of steps from the notes.
class StepList {
 public:
  StepList(const RingPlan& plan, const Notes& notes)
      : plan_(plan), sends_(notes.sends), receipts_(notes.receipts) {}

  std::vector<RingStep> make() {
    steps_.push_back({.what = Do::kBegin, .records = kOwnEvent});
    for (size_t t = 0; t < sends_.size(); ++t) exchange(t);
    RingStep end{.what = Do::kEnd};
    if (!sends_.empty()) end.waits = doneEvent(sends_.size() - 1);
    steps_.push_back(end);
    return std::move(steps_);
  }

 private:
  static RingPlace slot(In in, size_t exchange) { return {in, exchange % kRingSlots}; }

  // The event that exchange t records when it is done, for a later step to wait for.
  int doneEvent(size_t t) {
    const int event = static_cast<int>(t % static_cast<size_t>(kOwnEvent));
    steps_[step_of_[t]].records = event;
    return event;
  }

  void exchange(size_t t) {
    const size_t before = steps_.size();
    RingStep step{.what = Do::kExchange, .from = prepare(t)};
    step.elements = sends_[t].elements;
    step.coming = receipts_[t].elements;
    step.to = destination(receipts_[t]);
    const bool prepared_now = steps_.size() > before;
    if (t == 0 || prepared_now) step.waits = kOwnEvent;
    step_of_.push_back(steps_.size());
    steps_.push_back(step);
  }

  // Adds the step that makes the data of exchange t, if there must be one.  Returns where the data
  // are then.
  RingPlace prepare(size_t t) {
    const Sent& out = sends_[t];
    const bool empty = out.elements.size == 0;
    switch (out.what) {
      case Sent::What::kOwn:
        return plan_.scaled && !empty ? stage(t) : RingPlace{In::kInput};
      case Sent::What::kSum:
      case Sent::What::kComplete:
        return empty ? RingPlace{In::kOutput} : add(t);
      case Sent::What::kCopy:
        break;
    }
    return {In::kOutput};
  }

  // Scales this rank's addends.  The slot is free: this comes after all additions before it in the
  // list, and the latest of these, as many as the window has, were complete sums, which are sent
  // from the output.
  RingPlace stage(size_t t) {
    const RingPlace to = slot(In::kAddends, t);
    steps_.push_back({.what = Do::kStage,
                      .from = {In::kInput},
                      .to = to,
                      .elements = sends_[t].elements,
                      .records = kOwnEvent});
    return to;
  }

  // Adds this rank's addends to the partial sums that an earlier exchange has brought.
  RingPlace add(size_t t) {
    const Sent& out = sends_[t];
    const bool last = out.what == Sent::What::kComplete;
    const RingPlace to = last ? RingPlace{In::kOutput} : slot(In::kSums, t);
    const bool addends = receipts_[out.received].what == Received::What::kAddends;
    steps_.push_back({.what = Do::kAdd,
                      .from = slot(addends ? In::kAddends : In::kSums, t),
                      .to = to,
                      .elements = out.elements,
                      .last = last,
                      .waits = doneEvent(out.received),
                      .records = kOwnEvent});
    return to;
  }

  static RingPlace destination(const Received& in) {
    switch (in.what) {
      case Received::What::kAddends:
        return slot(In::kAddends, in.sent);
      case Received::What::kSums:
        return slot(In::kSums, in.sent);
      case Received::What::kComplete:
        break;
    }
    return {In::kOutput};
  }

  const RingPlan& plan_;
  const std::vector<Sent>& sends_;
  const std::vector<Received>& receipts_;
  std::vector<RingStep> steps_;
  std::vector<size_t> step_of_;  // by exchange
};

}  // namespace

std::vector<RingStep> ringSteps(const RingPlan& plan) {
  Notes notes(plan);
  if (plan.count > 0)
    runRing(notes, {.rank = plan.rank,
                    .world_size = plan.size,
                    .slices = ceilDiv(Cut{plan.count, plan.size}.chunkSize(), plan.slice),
                    .window = kRingWindow});
  return StepList(plan, notes).make();
}

}  // namespace ringreduce::cuda
