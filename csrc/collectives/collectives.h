// The collectives: their arguments, their functions, and the list of them all.  One .cc file each
// says how it works.
//
// A call is a struct with a Kind (base/op_signature.h) and a function for each kind of wires:
// shared memory (an OverMemory) and streams of bytes (an OverStreams).
// epoch/operation.cc checks and announces a call by its members: count, counts, dtype, op, root,
// inputs, outputs.  A call that needs more has one of these members:
//
//     std::string problem(int world_size) const     why it is refused; empty if it is not
//     void sign(OpSignature&) const                  what else the ranks compare
//     void reorder(const std::vector<int>& ranks)    its other lists by rank, in another order
//     SharedData shared(int rank) const              its memory that peers use in place
//
// Memory is the caller's and dense.  A list that is `by rank` has an entry for each rank of the
// group.  Inputs are only read.  An output shares no memory with an input unless it is said.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/op_signature.h"
#include "base/stream_copy.h"
#include "collectives/shared_memory.h"
#include "kernels/codec.h"

namespace ringreduce {

class OverStreams;

// Memory of this rank that the other ranks read or write, if all ranks have theirs in shared blocks
// (transport/shm/shared_tensors.h); null if the call has no such way.
struct SharedData {
  const void* data = nullptr;
  size_t bytes = 0;
  // Of a call that can share either: that it is its output, and not its input.  All ranks have to
  // share the same.
  bool is_output = false;
};

// In place: `data` holds this rank's addends and receives the reduction over all ranks.
struct AllReduce {
  static constexpr Kind kKind = Kind::kAllReduce;
  void* data;
  size_t count;
  DType dtype;
  ReduceOp op;
  double factor = 1;  // PREMUL_SUM: this rank's, applied to its addends first
  // Of the tensors in `data` (bordersOf), the same on all ranks.
  uint64_t borders = 0;

  void sign(OpSignature& signature) const { signature.parts = borders; }
  SharedData shared(int rank) const;
};
void allReduce(OverMemory&, const AllReduce&);
void allReduce(OverStreams&, const AllReduce&);
// What the choice of its algorithm needs to know.
CallSize callSize(const AllReduce&, Algorithm wanted = Algorithm::kAuto);

// Sums or averages of float32 that travel in fewer bytes, and not exactly.  A group of one sends
// nothing: its input is copied as it is.
struct CompressedAllReduce {
  static constexpr Kind kKind = Kind::kCompressedAllReduce;
  const float* input;
  float* output;  // may be the input
  size_t count;
  Coding coding;
  ReduceOp op;  // kSum or kAvg
  CodedSchedule schedule = CodedSchedule::kAuto;
  // If not null, memory of its own that receives the error of this rank's encodings.  The result is
  // that of the inputs less the errors of all ranks, except for the rounding of float32: so a rank
  // that adds its error to its next input makes up for it.  0 where the value was not finite.
  float* error = nullptr;
  // Elements for which kAuto chooses, if all messages of a caller must take the same schedule; 0:
  // `count`.  The same on all ranks.
  size_t chosen_for = 0;
  uint64_t borders = 0;  // of the tensors in `input` (bordersOf)

  std::string problem(int world_size) const;
  void sign(OpSignature& signature) const;
};
void compressedAllReduce(OverMemory&, const CompressedAllReduce&);
void compressedAllReduce(OverStreams&, const CompressedAllReduce&);

// The reduction arrives in `output` of `root`, which may be its input.  Other outputs stay as they
// are.
struct Reduce {
  static constexpr Kind kKind = Kind::kReduce;
  const void* input;
  void* output;
  size_t count;
  DType dtype;
  ReduceOp op;
  int root;
  double factor = 1;

  SharedData shared(int rank) const;
};
void reduce(OverMemory&, const Reduce&);
void reduce(OverStreams&, const Reduce&);

// `output` receives the reduction of inputs[this rank] of all ranks, counts[this rank] elements. It
// may be that input.
struct ReduceScatter {
  static constexpr Kind kKind = Kind::kReduceScatter;
  std::vector<const void*> inputs;  // by rank
  std::vector<size_t> counts;       // by rank, the same on all ranks
  void* output;
  DType dtype;
  ReduceOp op;
  double factor = 1;

  SharedData shared(int rank) const;
};
void reduceScatter(OverMemory&, const ReduceScatter&);
void reduceScatter(OverStreams&, const ReduceScatter&);
CallSize callSize(const ReduceScatter&);
// The same, but the output receives partial sums (kernels/reduce.h), not rounded and not divided,
// to which more can be added.  `output` may be the input only if partial sums have the dtype.
void reduceScatterSums(OverMemory&, const ReduceScatter&);

// `data` of `root` is copied to all ranks.
struct Broadcast {
  static constexpr Kind kKind = Kind::kBroadcast;
  void* data;
  size_t count;
  DType dtype;
  int root;

  SharedData shared(int rank) const;
};
void broadcast(OverMemory&, const Broadcast&);
void broadcast(OverStreams&, const Broadcast&);

// outputs[r] receives rank r's input of counts[r] elements.  An output may be the input itself.
struct AllGather {
  static constexpr Kind kKind = Kind::kAllGather;
  const void* input;
  std::vector<void*> outputs = {};  // by rank
  std::vector<size_t> counts = {};  // by rank, the same on all ranks
  DType dtype;

  SharedData shared(int rank) const;
};
void allGather(OverMemory&, const AllGather&);
void allGather(OverStreams&, const AllGather&);
CallSize callSize(const AllGather&);

// The same where a rank knows only its own count: once all are known, `place` returns where each
// rank's elements go.
struct AllGatherUnknown {
  const void* input;
  size_t count;
  DType dtype;
  std::function<std::vector<void*>(const std::vector<size_t>& counts)> place;
};
void allGatherUnknown(OverMemory&, const AllGatherUnknown&);
void allGatherUnknown(OverStreams&, const AllGatherUnknown&);

// An all-gather of the elements of sparse tensors.  Were they dense they would have `count`
// elements; `shape` is a hash of their shape.
struct SparseAllReduce {
  static constexpr Kind kKind = Kind::kSparseAllReduce;
  AllGatherUnknown gather;
  size_t count;
  DType dtype;
  ReduceOp op;
  uint64_t shape = 0;

  void sign(OpSignature& signature) const { signature.parts = shape; }
  void reorder(const std::vector<int>& ranks);
};

// outputs[r] of `root` receives rank r's input: `count` elements each.  The root's own may be its
// input.
struct Gather {
  static constexpr Kind kKind = Kind::kGather;
  const void* input;
  std::vector<void*> outputs;  // by rank; empty except on the root
  size_t count;
  DType dtype;
  int root;
};
void gather(OverMemory&, const Gather&);
void gather(OverStreams&, const Gather&);

// `output` receives inputs[this rank] of `root`: `count` elements.  The root's may be that input.
struct Scatter {
  static constexpr Kind kKind = Kind::kScatter;
  std::vector<const void*> inputs;  // by rank; empty except on the root
  void* output;
  size_t count;
  DType dtype;
  int root;
};
void scatter(OverMemory&, const Scatter&);
void scatter(OverStreams&, const Scatter&);

// outputs[r] receives inputs[this rank] of rank r.
struct AllToAll {
  static constexpr Kind kKind = Kind::kAllToAll;
  std::vector<const void*> inputs;               // by rank
  std::vector<void*> outputs;                    // by rank
  std::vector<size_t> send_counts, recv_counts;  // by rank
  bool even;  // all counts of all ranks are equal; if not, the ranks exchange them first
  DType dtype;

  std::string problem(int world_size) const;
  void sign(OpSignature& signature) const;
  void reorder(const std::vector<int>& ranks);
  SharedData shared(int rank) const;
};
void allToAll(OverMemory&, const AllToAll&);
void allToAll(OverStreams&, const AllToAll&);

// Returns when all ranks have called it.
struct Barrier {
  static constexpr Kind kKind = Kind::kBarrier;
};
void barrier(OverMemory&, const Barrier&);
void barrier(OverStreams&, const Barrier&);

// A barrier whose error names the absent ranks in the words of torch's monitored_barrier.
struct MonitoredBarrier {
  static constexpr Kind kKind = Kind::kMonitoredBarrier;
};

// ---- all of them

using CollectiveCall =
    std::variant<AllReduce, Reduce, ReduceScatter, Broadcast, AllGather, Gather, Scatter, AllToAll,
                 Barrier, SparseAllReduce, MonitoredBarrier, CompressedAllReduce>;

// The function of each call.  `wires`: an OverMemory or an OverStreams.
template <class Wires>
void perform(Wires& wires, const CollectiveCall& call) {
  struct {
    Wires& w;
    void operator()(const AllReduce& a) { allReduce(w, a); }
    void operator()(const Reduce& r) { reduce(w, r); }
    void operator()(const ReduceScatter& r) { reduceScatter(w, r); }
    void operator()(const Broadcast& b) { broadcast(w, b); }
    void operator()(const AllGather& a) { allGather(w, a); }
    void operator()(const Gather& g) { gather(w, g); }
    void operator()(const Scatter& s) { scatter(w, s); }
    void operator()(const AllToAll& a) { allToAll(w, a); }
    void operator()(const Barrier& b) { barrier(w, b); }
    void operator()(const SparseAllReduce& s) { allGatherUnknown(w, s.gather); }
    void operator()(const MonitoredBarrier&) { barrier(w, Barrier{}); }
    void operator()(const CompressedAllReduce& a) { compressedAllReduce(w, a); }
  } function{wires};
  std::visit(function, call);
}

// ---- between hosts (hierarchy.h)

// A compressed all-reduce between the ranks of a list, this one among them, in that order.  An
// average divides by `world_size`: inputs may be sums of several ranks'.
struct CompressedAmong {
  CompressedAllReduce call;
  std::vector<int> ranks;
  int world_size;
  size_t slice = 0, window = 0;  // elements, and slices in flight; 0: chosen for the message
};
void compressedAllReduce(OverStreams&, const CompressedAmong&);

// Adds up partial sums of several hosts, as reduceScatterSums makes them, round the ring of
// `ranks`, this rank among them.  The owner of a chunk adds its own sums last.
struct SumsOfHosts {
  std::byte* sums;    // of the partial type; overwritten, and lent
  std::byte* output;  // may be `sums` if these have the same dtype
  size_t count;
  DType dtype;
  ReduceOp op;
  std::vector<int> ranks;
  int world_size;  // addends of each element, for the average
};
void allReduceSums(OverStreams&, const SumsOfHosts&);

// ---- helpers for calls in shared tensors

// Calls body(data) if all ranks have the data of this operation in shared blocks; `data` is where
// they lie in this process, by rank.  Returns false if they have not; no data has moved then.
//
// The announcement of the operation says that a rank's data may be used, and the barrier that all
// ranks are done with them.  A rank whose call fails leaves its data to its caller while others may
// still read and write them.  So it takes a private copy, and a rank that finds the group failed
// after the barrier fails too: the pages at both ends of the data are shared with other tensors,
// and are not copied.
template <class Body>
bool inPlace(OverMemory& c, Body body) {
  if (!c.tensors || c.size == 1) return false;
  try {
    const std::vector<std::byte*>* const data = c.tensors->gather();
    if (!data) return false;
    c.way.in_place = true;
    body(*data);
    streamFence();
    barrier(c, Barrier{});
    auto never = [] { return false; };
    if (c.watch.failed()) c.watch.poll(c.previousRank(), Ready(never));
    return true;
  } catch (...) {
    c.tensors->detach();
    throw;
  }
}

// The memory of parts that follow each other; null if they do not.
template <class Pointer>
SharedData inOnePiece(const std::vector<Pointer>& parts, const std::vector<size_t>& counts,
                      size_t width) {
  const auto* end = static_cast<const std::byte*>(parts[0]);
  for (size_t r = 0; r < parts.size(); ++r) {
    if (parts[r] != end) return {};
    end += counts[r] * width;
  }
  return {parts[0], static_cast<size_t>(end - static_cast<const std::byte*>(parts[0]))};
}

// ---- helpers for calls with lists of their own

// Why a list by rank is refused: "3 inputs where 2 are needed"; empty if it is not.
inline std::string wrongLength(const char* what, size_t size, int world_size) {
  if (size == static_cast<size_t>(world_size)) return "";
  return std::to_string(size) + " " + what + " where " + std::to_string(world_size) + " are needed";
}

// From a list by rank to one in the order of `ranks`.  A list that is empty stays empty.
template <class T>
void reorderList(std::vector<T>& list, const std::vector<int>& ranks) {
  if (list.empty()) return;
  std::vector<T> ordered;
  for (const int rank : ranks) ordered.push_back(list[static_cast<size_t>(rank)]);
  list = std::move(ordered);
}

}  // namespace ringreduce
