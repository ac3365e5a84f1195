// Groups, checks, and streams.
#include "nccl_comm.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "kernels.h"

namespace fake::nccl {
namespace {

constexpr int kVersion = 22809, kFirstToShareGpus = 23000;

void must(cudaError_t error) {
  if (error != cudaSuccess)
    throw Failed{kCudaError, std::string("CUDA says: ") + cudaGetErrorString(error)};
}

class OnDevice {
 public:
  explicit OnDevice(int device) {
    must(cudaGetDevice(&before_));
    must(cudaSetDevice(device));
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

struct Enqueued {
  ncclComm* comm;
  Call call;
  cudaStream_t stream;
};
struct Group {
  int depth = 0;
  Result result = kSuccess;
  std::vector<std::pair<ncclComm*, std::function<Seat()>>> joining;
  std::vector<Enqueued> calls;
};
thread_local Group group;

std::string rankOf(const ncclComm& comm) {
  return "rank " + std::to_string(comm.rank) + " of " + std::to_string(comm.size);
}

// ---- joining

bool sharesGpus() {
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return version() >= kFirstToShareGpus && enabled && std::strcmp(enabled, "1") == 0;
}

void checkGpus(const std::vector<Facts>& all) {
  for (const Facts& one : all)
    for (const Facts& other : all)
      if (one.rank < other.rank && std::strcmp(one.host, other.host) == 0 &&
          std::strcmp(one.gpu, other.gpu) == 0 && !sharesGpus())
        throw Failed{kInvalidUsage, "Duplicate GPU: rank " + std::to_string(one.rank) +
                                        " and rank " + std::to_string(other.rank) +
                                        " are both on the GPU " + one.gpu};
}

void join(ncclComm& comm, const std::function<Seat()>& find_seat) {
  const Seat seat = find_seat();
  comm.rank = seat.rank;
  comm.size = seat.size;
  comm.name = seat.name;
  Facts own{.rank = seat.rank, .size = seat.size, .host = {}, .gpu = {}};
  if (const char* host = std::getenv("NCCL_HOSTID"))
    std::strncpy(own.host, host, sizeof own.host - 1);
  must(cudaDeviceGetPCIBusId(own.gpu, sizeof own.gpu, comm.device));
  auto wire = Wire::join(seat.name, own);
  try {
    checkGpus(wire->facts());
  } catch (const Failed&) {
    wire->end();
    throw;
  }
  const OnDevice here(comm.device);
  must(cudaEventCreateWithFlags(&comm.tail, cudaEventDisableTiming));
  const std::lock_guard lock(comm.mutex);
  comm.wire = std::move(wire);
  comm.state = ncclComm::State::kLive;
}

// All at once, since they wait for each other.
Result joinAll(const std::vector<std::pair<ncclComm*, std::function<Seat()>>>& joining) {
  std::vector<Result> results(joining.size(), kSuccess);
  const auto attempt = [&](size_t i) {
    try {
      join(*joining[i].first, joining[i].second);
    } catch (const Failed& failed) {
      warn(failed.why);
      results[i] = failed.result;
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < joining.size(); ++i) threads.emplace_back(attempt, i);
  if (!joining.empty()) attempt(0);
  for (std::thread& thread : threads) thread.join();
  const auto failed = std::ranges::find_if(results, [](Result r) { return r != kSuccess; });
  return failed == results.end() ? kSuccess : *failed;
}

// ---- arguments of calls

struct Place {
  const std::byte* begin;
  size_t bytes;
  bool overlaps(const Place& other) const {
    return bytes > 0 && other.bytes > 0 && begin < other.begin + other.bytes &&
           other.begin < begin + bytes;
  }
};

Place inputOf(const Call& call, const ncclComm& comm) {
  const auto all = static_cast<size_t>(comm.size);
  const bool parts = call.what == What::kReduceScatter || call.what == What::kAllToAll;
  const bool reads =
      call.what != What::kRecv && (call.what != What::kBroadcast || comm.rank == call.root);
  return {static_cast<const std::byte*>(call.input),
          reads ? call.count * sizeOf(call.dtype) * (parts ? all : 1) : 0};
}
Place outputOf(const Call& call, const ncclComm& comm) {
  const auto all = static_cast<size_t>(comm.size);
  const bool parts = call.what == What::kAllGather || call.what == What::kAllToAll;
  const bool writes =
      call.what != What::kSend && (call.what != What::kReduce || comm.rank == call.root);
  return {static_cast<const std::byte*>(call.output),
          writes ? call.count * sizeOf(call.dtype) * (parts ? all : 1) : 0};
}

void checkMemory(const Place& place, const ncclComm& comm, const Call& call) {
  if (place.bytes == 0) return;
  cudaPointerAttributes first, last;
  must(cudaPointerGetAttributes(&first, place.begin));
  must(cudaPointerGetAttributes(&last, place.begin + place.bytes - 1));
  if (first.type == cudaMemoryTypeUnregistered || last.type != first.type)
    punish(rankOf(comm) + ": " + describe(call) + " with memory that its GPU cannot reach");
  if (first.type == cudaMemoryTypeDevice && first.device != comm.device)
    punish(rankOf(comm) + " is on GPU " + std::to_string(comm.device) + ": " + describe(call) +
           " with memory of GPU " + std::to_string(first.device));
}

// A rank's part may lie where it belongs in the whole; otherwise input and output are apart.
void checkPlaces(const Call& call, const ncclComm& comm) {
  const Place input = inputOf(call, comm), output = outputOf(call, comm);
  checkMemory(input, comm, call);
  checkMemory(output, comm, call);
  if (!input.overlaps(output)) return;
  const size_t part = call.count * sizeOf(call.dtype) * static_cast<size_t>(comm.rank);
  const std::byte* in_place = output.begin;
  if (call.what == What::kAllGather) in_place = output.begin + part;
  if (call.what == What::kReduceScatter) in_place = output.begin - part;
  if (call.what == What::kAllToAll || input.begin != in_place)
    punish(rankOf(comm) + ": " + describe(call) + " with an output that lies across its input");
}

void checkArguments(const Call& call, const ncclComm& comm) {
  const auto must_be = [&](bool right, const std::string& why) {
    if (!right) throw Failed{kInvalidArgument, rankOf(comm) + ": " + why};
  };
  must_be(call.dtype >= 0 && call.dtype < kDTypes, "no dtype: " + std::to_string(call.dtype));
  must_be(call.root >= 0 && call.root < comm.size, "no rank: " + std::to_string(call.root));
  if (call.what == What::kAllReduce || call.what == What::kReduce ||
      call.what == What::kReduceScatter)
    must_be(canReduce(call.dtype), "no dtype to reduce: " + std::to_string(call.dtype));
  must_be(inputOf(call, comm).bytes == 0 || call.input, "the input is null");
  must_be(outputOf(call, comm).bytes == 0 || call.output, "the output is null");
  checkPlaces(call, comm);
}

// Messages of one group go at the same time.
void checkMessages(const ncclComm& comm, const std::vector<Call>& calls) {
  int to_itself = 0;
  for (const Call& call : calls) {
    if (!call.isMessage()) continue;
    if (call.root == comm.rank) to_itself += call.what == What::kSend ? 1 : -1;
    for (const Call& other : calls)
      if (&other != &call && other.isMessage() &&
          outputOf(call, comm)
              .overlaps(other.what == What::kSend ? inputOf(other, comm) : outputOf(other, comm)))
        punish(rankOf(comm) + ": " + describe(call) + " writes what " + describe(other) +
               ", in the same group, reads or writes");
  }
  if (to_itself != 0)
    throw Failed{kInvalidUsage,
                 rankOf(comm) + ": messages to itself need send and recv in the same group"};
}

// ---- streams

struct Launch {
  ncclComm* comm;
  std::vector<Call> calls;
  bool once;  // or as often as a graph is replayed
};

void CUDART_CB run(void* data) {
  auto* launch = static_cast<Launch*>(data);
  ncclComm& comm = *launch->comm;
  std::unique_lock lock(comm.mutex);
  const auto wire = comm.wire;
  if (!wire) punish(rankOf(comm) + ": a graph with calls of a communicator that was given back");
  lock.unlock();
  {
    const std::lock_guard performing(comm.performing);
    perform(*wire, launch->calls);
  }
  if (!launch->once) return;
  delete launch;
  lock.lock();
  --comm.pending;
  comm.changed.notify_all();
}

// `to` waits for the work in `from`.
void follow(cudaStream_t to, cudaStream_t from) {
  cudaEvent_t event;
  must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  must(cudaEventRecord(event, from));
  must(cudaStreamWaitEvent(to, event, 0));
  must(cudaEventDestroy(event));
}

// In the first stream, while the others wait.  Calls of one communicator are done in the order in
// which they were made, whatever their streams.
void launch(ncclComm& comm, std::vector<Call> calls, const std::vector<cudaStream_t>& streams) {
  checkMessages(comm, calls);
  const OnDevice here(comm.device);
  const cudaStream_t first = streams[0];
  cudaStreamCaptureStatus capture;
  must(cudaStreamIsCapturing(first, &capture));
  const bool once = capture == cudaStreamCaptureStatusNone;
  for (size_t i = 1; i < streams.size(); ++i) follow(first, streams[i]);
  const std::lock_guard lock(comm.mutex);
  if (once && comm.last != first) must(cudaStreamWaitEvent(first, comm.tail, 0));
  must(static_cast<cudaError_t>(
      fakeLaunchWork(first, run, new Launch{&comm, std::move(calls), once})));
  if (once) {
    ++comm.pending;
    comm.last = first;
    must(cudaEventRecord(comm.tail, first));
  }
  for (size_t i = 1; i < streams.size(); ++i) follow(streams[i], first);
}

void launchAll(const std::vector<Enqueued>& enqueued) {
  std::vector<ncclComm*> comms;
  for (const Enqueued& one : enqueued)
    if (std::ranges::find(comms, one.comm) == comms.end()) comms.push_back(one.comm);
  for (ncclComm* comm : comms) {
    std::vector<Call> calls;
    std::vector<cudaStream_t> streams;
    for (const Enqueued& one : enqueued) {
      if (one.comm != comm) continue;
      calls.push_back(one.call);
      if (std::ranges::find(streams, one.stream) == streams.end()) streams.push_back(one.stream);
    }
    launch(*comm, std::move(calls), streams);
  }
}

Result flush() {
  const Group done = std::exchange(group, {});
  if (done.result != kSuccess) return done.result;
  if (const Result joined = joinAll(done.joining); joined != kSuccess) return joined;
  try {
    launchAll(done.calls);
  } catch (const Failed& failed) {
    warn(failed.why);
    return failed.result;
  }
  return kSuccess;
}

}  // namespace

int version() {
  const char* text = std::getenv("FAKE_NCCL_VERSION");
  return text ? std::atoi(text) : kVersion;
}

ncclComm& usable(ncclComm* comm, const char* call, bool finalized) {
  if (!comm) throw Failed{kInvalidArgument, std::string(call) + " without a communicator"};
  const std::lock_guard lock(comm->mutex);
  if (comm->state == ncclComm::State::kLeft)
    punish(rankOf(*comm) + ": " + call + " with a communicator that was given back");
  if (comm->state == ncclComm::State::kJoining ||
      (comm->state == ncclComm::State::kFinalized && !finalized))
    throw Failed{kInvalidUsage, rankOf(*comm) + ": " + call +
                                    " with a communicator that has not joined, or was finalized"};
  return *comm;
}

void joinSoon(ncclComm* comm, std::function<Seat()> find_seat) {
  group.joining.emplace_back(comm, std::move(find_seat));
  if (group.depth > 0) return;
  if (const Result result = flush(); result != kSuccess) throw Failed{result, lastWarning()};
}

void enqueue(ncclComm* handle, const char* name, Call call, cudaStream_t stream) {
  ncclComm& comm = usable(handle, name);
  if (const Result error = comm.wire->error(); error != kSuccess)
    throw Failed{error, rankOf(comm) + ": " + name + " after an error of this communicator"};
  if (call.op >= kOps) {
    const std::lock_guard lock(comm.mutex);
    const auto op = comm.ops.find(call.op);
    if (op == comm.ops.end() || op->second.dtype != call.dtype)
      throw Failed{kInvalidArgument, rankOf(comm) + ": no op for this dtype"};
    call.op = kScaledSum;
    call.factor = op->second.factor;
  } else if (call.op < 0) {
    throw Failed{kInvalidArgument, rankOf(comm) + ": no op: " + std::to_string(call.op)};
  }
  checkArguments(call, comm);
  group.calls.push_back({&comm, call, stream});
  if (group.depth > 0) return;
  if (const Result result = flush(); result != kSuccess) throw Failed{result, lastWarning()};
}

void beginGroup() {
  ++group.depth;
}

Result endGroup() {
  if (group.depth == 0) return kInvalidUsage;
  return --group.depth > 0 ? kSuccess : flush();
}

void groupFailed(Result result) {
  if (group.depth > 0 && group.result == kSuccess) group.result = result;
}

void leave(ncclComm* comm, bool abort) {
  if (!comm) return;
  std::unique_lock lock(comm->mutex);
  if (comm->state == ncclComm::State::kLeft)
    punish(rankOf(*comm) + ": a communicator is given back twice");
  if (comm->wire) {
    if (abort) comm->wire->end();
    while (comm->pending > 0 && !fakeRuinOf(comm->device))
      comm->changed.wait_for(lock, std::chrono::milliseconds(10));
    comm->wire->end();
    comm->wire = nullptr;
    cudaEventDestroy(comm->tail);
  }
  comm->state = ncclComm::State::kLeft;
}

}  // namespace fake::nccl
