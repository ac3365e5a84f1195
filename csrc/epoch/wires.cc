// Groups in shared memory, and groups between hosts: which wires a call uses.
#include "epoch/wires.h"

#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>

#include "bootstrap/topology.h"
#include "collectives/hierarchy.h"
#include "collectives/over_streams.h"
#include "collectives/shared_memory.h"
#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace ringreduce {
namespace {

// The wires of a group whose ranks share memory.
class SharedWires final : public Wires {
 public:
  SharedWires(int rank, const HostMemory& host_memory, Arbiter& arbiter)
      : arbiter_(arbiter), memory_(rank, host_memory, arbiter) {}

  void setPatience(Patience patience) override { memory_.setPatience(patience); }
  void prepare(const Operation& operation, uint64_t sequence) override {
    if (SharedTensors* tensors = memory_.tensors()) {
      const auto [data, bytes, is_output] = sharedData(operation, memory_.over().rank);
      tensors->offer(sequence, data, bytes, is_output);
    }
  }
  void run(const Operation& operation, const Announcement&) override {
    memory_.over().way = {};
    try {
      perform(memory_.over(), operation.call);
      if (SharedTensors* tensors = memory_.tensors()) tensors->finish();
    } catch (const Error& error) {
      // The group goes on without a lost rank, but this operation cannot.
      if (error.kind() == Failure::kPeerLost && !arbiter_.failed())
        memory_.over().exchange.passSteps();
      throw;
    }
  }
  Way way() override { return memory_.over().way; }
  bool usesTensorsInPlace() const override { return memory_.tensors() != nullptr; }
  size_t stagingBytes() const override { return memory_.bytes(); }

 private:
  Arbiter& arbiter_;
  SharedMemory memory_;
};

// The wires of a group on several hosts.
class StreamWires final : public Wires {
 public:
  // `guard`: the transport's.  `hierarchy` may be null.  `ranks`: the ranks in the transport's
  // order; empty if that is the usual one.  `memory`: bytes of the mirrored pages and of what the
  // host's ranks share, for stagingBytes().  `tells`: called with a new cost.
  StreamWires(std::unique_ptr<Transport> transport, WaitGuard& guard, StreamOptions options,
              std::unique_ptr<Hierarchy> hierarchy, std::vector<int> ranks, size_t memory,
              std::function<void(const WireCost&)> tells)
      : transport_(std::move(transport)),
        over_(std::in_place, *transport_, guard, std::move(options)),
        hierarchy_(std::move(hierarchy)),
        ranks_(std::move(ranks)),
        memory_(memory),
        tells_(std::move(tells)) {}

  void setPatience(Patience patience) override {
    transport_->setPatience(patience);
    if (hierarchy_) hierarchy_->setPatience(patience);
  }
  void run(const Operation& operation, const Announcement& announced) override {
    OverStreams& c = *over_;
    c.way = {.algorithm = Algorithm::kHierarchical};
    if (hierarchy_ && hierarchy_->run(c, operation.call)) {
      c.notice();
      return;
    }
    c.way = {};
    c.begin(announced);
    if (ranks_.empty())
      perform(c, operation.call);
    else
      perform(c, byPositions(operation, ranks_).call);
    transport_->finish();
    if (c.learn()) tells_(c.cost());
  }
  Way way() override { return over_ ? over_->way : Way{}; }
  size_t stagingBytes() const override {
    const std::lock_guard lock(closing_);
    return (transport_ ? transport_->stagingBytes() : 0) + memory_;
  }
  std::vector<std::string> routes() const override {
    const std::lock_guard lock(closing_);
    return transport_ ? transport_->routes() : std::vector<std::string>();
  }
  uint64_t bytesSent() const override {
    const std::lock_guard lock(closing_);
    return transport_ ? transport_->bytesSent() : 0;
  }
  std::vector<Line> lines() const override {
    const std::lock_guard lock(closing_);
    return transport_ ? transport_->lines() : std::vector<Line>();
  }
  WireCost cost() const override {
    const std::lock_guard lock(closing_);
    return over_ ? over_->cost() : WireCost{};
  }
  // Closes the sockets: a group that has left, but is still referenced, does not need them.
  void close() override {
    const std::lock_guard lock(closing_);
    over_.reset();
    transport_.reset();
  }

 private:
  mutable std::mutex closing_;  // questions about the transport come from any thread
  std::unique_ptr<Transport> transport_;
  std::optional<OverStreams> over_;  // over it
  const std::unique_ptr<Hierarchy> hierarchy_;
  const std::vector<int> ranks_;
  const size_t memory_;
  const std::function<void(const WireCost&)> tells_;
};

}  // namespace

std::unique_ptr<Wires> wiresInMemory(int rank, const HostMemory& host_memory, Arbiter& arbiter) {
  return std::make_unique<SharedWires>(rank, host_memory, arbiter);
}

std::unique_ptr<Wires> wiresBetween(Network& network, const Hosts& hosts,
                                    const SharedOptions& shared, const HostMemory& local_memory,
                                    Arbiter& arbiter) {
  auto hierarchy = Hierarchy::create(hosts, shared, network.ring(), local_memory, arbiter);
  std::unique_ptr<Transport> transport = network.start(arbiter, hosts, local_memory);
  size_t memory = static_cast<size_t>(hosts.size()) * sizeof(RankPage);
  if (const auto here = static_cast<int>(local_memory.members.size()); here > 0)
    memory += Layout(local_memory.options, here, /*pipes=*/true).bytes;
  try {
    StreamOptions options{.algorithm = shared.algorithm,
                          .cost = network.cost(),
                          .measures = !network.knowsRate(),
                          .order = shared.order,
                          .callers_ranks = positionsOf(network.ring().ranks)};
    return std::make_unique<StreamWires>(
        std::move(transport), network.guard(), std::move(options), std::move(hierarchy),
        network.ring().ranks, memory, [&network](const WireCost& cost) { network.tellCost(cost); });
  } catch (...) {
    network.close();
    throw;
  }
}

}  // namespace ringreduce
