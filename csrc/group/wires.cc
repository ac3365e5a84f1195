// Groups in shared memory, and groups between hosts: which wires a call uses.
#include "group/wires.h"

#include <mutex>
#include <utility>
#include <variant>

#include "bootstrap/hosts.h"
#include "collectives/hierarchy.h"
#include "collectives/shared_memory.h"
#include "transport/places.h"
#include "transport/tcp/mesh.h"

namespace ringreduce {
namespace {

// Those of ranks that share memory.
class SharedWires final : public Wires {
 public:
  SharedWires(int rank, const Membership& membership, Session& session)
      : memory_(rank, membership, session) {}

  void setPatience(Patience patience) override { memory_.setPatience(patience); }
  void run(const Operation& operation, const OpSignature&) override {
    ringreduce::run(memory_.communicator(), operation);
  }
  size_t stagingBytes() const override { return memory_.bytes(); }

 private:
  SharedMemory memory_;
};

// Those of ranks that do not.
class MeshWires final : public Wires {
 public:
  // `hierarchy` may be null.  `ranks`: the mesh's order of them, or empty.  `memory`: bytes that
  // the group has for the others beside the mesh's buffers.
  MeshWires(std::unique_ptr<Mesh> mesh, std::unique_ptr<Hierarchy> hierarchy,
            std::vector<int> ranks, size_t memory)
      : mesh_(std::move(mesh)),
        hierarchy_(std::move(hierarchy)),
        ranks_(std::move(ranks)),
        memory_(memory) {}

  void setPatience(Patience patience) override {
    mesh_->setPatience(patience);
    if (hierarchy_) hierarchy_->setPatience(patience);
  }
  void run(const Operation& operation, const OpSignature& announced) override {
    const auto* all_reduce = std::get_if<AllReduce>(&operation.call);
    if (hierarchy_ && all_reduce && hierarchy_->takes(*mesh_, *all_reduce))
      return hierarchy_->allReduce(*mesh_, *all_reduce);
    const auto* compressed = std::get_if<CompressedAllReduce>(&operation.call);
    if (hierarchy_ && compressed && hierarchy_->takes(*mesh_, *compressed))
      return hierarchy_->compressedAllReduce(*mesh_, *compressed);
    mesh_->begin(announced);
    if (ranks_.empty())
      ringreduce::run(*mesh_, operation);
    else
      ringreduce::run(*mesh_, inPlaces(operation, ranks_));
    mesh_->finish();
  }
  size_t stagingBytes() const override {
    const std::lock_guard lock(closing_);
    return (mesh_ ? mesh_->stagingBytes() : 0) + memory_ +
           (hierarchy_ ? hierarchy_->stagingBytes() : 0);
  }
  std::vector<std::string> routes() const override {
    const std::lock_guard lock(closing_);
    return mesh_ ? mesh_->lanes() : std::vector<std::string>();
  }
  uint64_t bytesSent() const override {
    const std::lock_guard lock(closing_);
    return mesh_ ? mesh_->bytesSent() : 0;
  }
  // Closes the sockets: a group that has left, but is still referenced, does not need them.
  void close() override {
    const std::lock_guard lock(closing_);
    mesh_.reset();
  }

 private:
  mutable std::mutex closing_;  // questions about the mesh come from any thread
  std::unique_ptr<Mesh> mesh_;
  const std::unique_ptr<Hierarchy> hierarchy_;
  const std::vector<int> ranks_;
  const size_t memory_;
};

}  // namespace

std::unique_ptr<Wires> wiresInMemory(int rank, const Membership& membership, Session& session) {
  return std::make_unique<SharedWires>(rank, membership, session);
}

std::unique_ptr<Wires> wiresBetween(Network& network, const Hosts& hosts,
                                    const SharedOptions& shared, const Membership& neighbours,
                                    Session& session) {
  auto hierarchy = Hierarchy::create(hosts, shared, network.ring(), neighbours, session);
  std::unique_ptr<Mesh> mesh = network.start(session);
  try {
    return std::make_unique<MeshWires>(std::move(mesh), std::move(hierarchy), network.ring().ranks,
                                       static_cast<size_t>(hosts.size()) * sizeof(RankPage));
  } catch (...) {
    network.close();
    throw;
  }
}

}  // namespace ringreduce
