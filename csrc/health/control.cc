// A rank in the control ring, as its users have it: from any thread.
#include "health/control.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "health/control_node.h"

namespace ringreduce::net {
namespace {

class RingControl final : public Control {
 public:
  RingControl(std::shared_ptr<Reactor> reactor, std::shared_ptr<ControlNode> node)
      : reactor_(std::move(reactor)), node_(std::move(node)) {}
  ~RingControl() override {
    reactor_->run([&] { node_->end(); });
    node_->stopDialling();
  }

  void accept(int from, Socket socket) override {
    soon([from, socket = std::make_shared<Socket>(std::move(socket))](ControlNode& node) {
      node.add(from, std::move(*socket), false, false);
    });
  }
  void tell(const Verdict& verdict) override {
    soon([verdict](ControlNode& node) { node.tell(verdict); });
  }
  void depart(Departure how) override {
    soon([how](ControlNode& node) { node.depart(how); });
  }
  void ask(uint64_t since) override {
    soon([since](ControlNode& node) { node.ask(since); });
  }
  bool flush(Nanos longest) override {
    const Nanos limit = deadlineIn(longest);
    Nanos nap = 100 * kMicrosecond;
    for (;;) {
      bool flushed = true;
      reactor_->run([&] { flushed = node_->isFlushed(); });
      const Nanos left = limit - now();
      if (flushed || left <= 0 || reactor_->isItsThread()) return flushed;
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(nap, left)));
      nap = std::min(2 * nap, 5 * kMillisecond);
    }
  }

 private:
  template <class F>
  void soon(F f) {
    reactor_->soon([node = node_, f = std::move(f)] {
      if (!node->isOver()) f(*node);
    });
  }

  const std::shared_ptr<Reactor> reactor_;
  const std::shared_ptr<ControlNode> node_;
};

}  // namespace

std::unique_ptr<Control> Control::start(std::shared_ptr<Reactor> reactor, int rank, int size,
                                        Socket next, Socket previous, Dial dial, Listener& listener,
                                        const Options& options) {
  if (size > kMostControlRanks)
    throw Error(Failure::kSetup, "a group over several hosts has at most " +
                                     std::to_string(kMostControlRanks) + " ranks");
  auto node =
      std::make_shared<ControlNode>(reactor, rank, size, std::move(dial), listener, options);
  auto control = std::make_unique<RingControl>(reactor, node);
  reactor->run([&] { node->begin(std::move(next), std::move(previous)); });
  return control;
}

}  // namespace ringreduce::net
