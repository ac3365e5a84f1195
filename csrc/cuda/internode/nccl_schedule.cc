// runRing with primitives that only note what is to be sent and received; then the steps.
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
  size_t sent = 0;  // the exchange that sends on what becomes of it
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
    // The first to add gets what one rank alone has put in.
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

}  // namespace

std::vector<RingStep> ringSteps(const RingPlan& plan) {
  std::vector<RingStep> steps{{.what = Do::kBegin, .records = kOwnEvent}};
  Notes notes(plan);
  if (plan.count > 0)
    runRing(notes, {.rank = plan.rank,
                    .world_size = plan.size,
                    .slices = ceilDiv(Cut{plan.count, plan.size}.chunkSize(), plan.slice),
                    .window = kRingWindow});
  const auto slot = [](In in, size_t exchange) { return RingPlace{in, exchange % kRingSlots}; };
  std::vector<size_t> step_of;  // by exchange
  // The step that is put in next waits until that exchange is done.
  const auto awaited = [&](size_t exchange) {
    RingStep& step = steps[step_of[exchange]];
    return step.records = static_cast<int>(exchange % static_cast<size_t>(kOwnEvent));
  };

  for (size_t t = 0; t < notes.sends.size(); ++t) {
    const Sent& out = notes.sends[t];
    const Received& in = notes.receipts[t];
    RingStep exchange{.what = Do::kExchange, .elements = out.elements, .coming = in.elements};
    exchange.from.in = In::kOutput;
    bool prepared = t == 0;  // or else it is there already
    if (out.what == Sent::What::kOwn) {
      exchange.from.in = In::kInput;
      if (plan.scaled && out.elements.size > 0) {
        exchange.from = slot(In::kAddends, t);
        // The slot is free: this comes after all additions before it in the list, and the latest of
        // these, as many as the window has, were complete sums, which are sent from the output.
        steps.push_back({.what = Do::kStage,
                         .from = {In::kInput},
                         .to = exchange.from,
                         .elements = out.elements,
                         .records = kOwnEvent});
        prepared = true;
      }
    } else if (out.what != Sent::What::kCopy && out.elements.size > 0) {
      const bool raw = notes.receipts[out.received].what == Received::What::kAddends;
      const bool last = out.what == Sent::What::kComplete;
      if (!last) exchange.from = slot(In::kSums, t);
      steps.push_back({.what = Do::kAdd,
                       .from = slot(raw ? In::kAddends : In::kSums, t),
                       .to = exchange.from,
                       .elements = out.elements,
                       .last = last,
                       .waits = awaited(out.received),
                       .records = kOwnEvent});
      prepared = true;
    }
    exchange.to =
        in.what == Received::What::kComplete
            ? RingPlace{In::kOutput}
            : slot(in.what == Received::What::kAddends ? In::kAddends : In::kSums, in.sent);
    if (prepared) exchange.waits = kOwnEvent;
    step_of.push_back(steps.size());
    steps.push_back(exchange);
  }
  const int done = step_of.empty() ? -1 : awaited(step_of.size() - 1);
  steps.push_back({.what = Do::kEnd, .waits = done});
  return steps;
}

}  // namespace ringreduce::cuda
