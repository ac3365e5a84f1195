// From a call to its check, its announcement and its collective.
#include "group/operation.h"

#include <string>

#include "base/error.h"

namespace ringreduce {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

}  // namespace

void validate(const Operation& operation, int world_size) {
  std::visit(Overloaded{
                 [](const AllReduce& a) {
                   if (!isSupported(a.dtype, a.op))
                     throw Error(Failure::kArgument,
                                 std::string("ringreduce all_reduce: cannot take ") + name(a.op) +
                                     " of " + name(a.dtype) + " elements");
                 },
                 [&](const Broadcast& b) {
                   if (b.root < 0 || b.root >= world_size)
                     throw Error(Failure::kArgument,
                                 "ringreduce broadcast: from rank " + std::to_string(b.root) +
                                     " in a group of " + std::to_string(world_size));
                 },
                 [&](const AllGather& a) {
                   if (static_cast<int>(a.outputs.size()) != world_size)
                     throw Error(Failure::kArgument,
                                 "ringreduce all_gather: into " + std::to_string(a.outputs.size()) +
                                     " outputs in a group of " + std::to_string(world_size));
                 },
                 [](const Barrier&) {},
             },
             operation.call);
}

Announcement announce(const Operation& operation, uint64_t sequence) {
  Announcement a{.sequence = sequence};
  std::visit(Overloaded{
                 [&](const AllReduce& r) {
                   a.kind = Kind::kAllReduce;
                   a.count = r.count;
                   a.dtype = r.dtype;
                   a.op = static_cast<uint8_t>(r.op);
                 },
                 [&](const Broadcast& b) {
                   a.kind = Kind::kBroadcast;
                   a.count = b.count;
                   a.dtype = b.dtype;
                   a.root = b.root;
                 },
                 [&](const AllGather& g) {
                   a.kind = Kind::kAllGather;
                   a.count = g.count;
                   a.dtype = g.dtype;
                 },
                 [&](const Barrier&) { a.kind = Kind::kBarrier; },
             },
             operation.call);
  return a;
}

void run(Communicator& c, const Operation& operation) {
  std::visit(Overloaded{
                 [&](const AllReduce& a) { allReduce(c, a); },
                 [&](const Broadcast& b) { broadcast(c, b); },
                 [&](const AllGather& a) { allGather(c, a); },
                 [&](const Barrier& b) { barrier(c, b); },
             },
             operation.call);
}

}  // namespace ringreduce
