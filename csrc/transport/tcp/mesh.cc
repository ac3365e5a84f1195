// What a mesh's users call.
#include "transport/tcp/mesh.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "transport/tcp/mesh_state.h"

namespace ringreduce {
namespace {

// Bytes of buffers that are kept from one operation to the next.
constexpr size_t kKeptBuffers = 64 << 20;

}  // namespace

Mesh::Mesh(int rank, int size, Watch& watch, Dial dial, const Options& options)
    : state_(std::make_unique<State>(rank, size, watch, std::move(dial), options)) {}

Mesh::~Mesh() = default;

int Mesh::rank() const {
  return state_->rank;
}
int Mesh::size() const {
  return state_->size;
}
Watch& Mesh::watch() const {
  return state_->watch;
}
const Mesh::Options& Mesh::options() const {
  return state_->options;
}
void Mesh::setPatience(Patience patience) {
  state_->patience = patience;
}

void Mesh::accept(int from, net::Socket socket) {
  const std::lock_guard lock(state_->mutex);
  std::vector<State::Arrived>& arrived = state_->arrived;
  if (std::ranges::count(arrived, from, &State::Arrived::from) >= kMostLanes) return;
  arrived.push_back({from, std::move(socket)});
  state_->ringBell();
}

void Mesh::begin(const Announcement& operation) {
  scratch_.reset();
  ++state_->operations;
  // It travels as it lies in memory, with no stray bytes between its fields.
  std::memset(static_cast<void*>(&state_->operation), 0, sizeof operation);
  Announcement& own = state_->operation;
  own.sequence = operation.sequence;
  own.count = operation.count;
  own.history = operation.history;
  own.kind = operation.kind;
  own.dtype = operation.dtype;
  own.op = operation.op;
  own.root = operation.root;
  own.parts = operation.parts;
}

void Mesh::advance() {
  state_->look(0);
  state_->progress();
}

void Mesh::finish() {
  while (!state_->sending.empty()) {
    const int to = state_->sending.front();
    state_->until(to, [&] { return state_->out(to).stream.idle(); });
    state_->progress();  // takes those that are done from the list
  }
  state_->pool.trim(kKeptBuffers);
  uint64_t taken = 0;
  for (const auto& out : state_->outs)
    if (out) taken += out->stream.taken();
  state_->taken.store(taken, std::memory_order_relaxed);
}

uint64_t Mesh::bytesSent() const {
  return state_->taken.load(std::memory_order_relaxed);
}

void Mesh::send(int to, const void* data, size_t bytes) {
  state_->announced(to).stream.send(data, bytes);
}

std::byte* Mesh::acquire(int to) {
  if (auto& out = state_->out(to); out.stream.buffersUnderWay() >= window())
    state_->until(to, [&] { return out.stream.buffersUnderWay() < window(); });
  return state_->pool.take();
}

void Mesh::post(int to, std::byte* buffer, size_t bytes) {
  state_->announced(to).stream.sendBuffer(buffer, bytes);
}

void Mesh::expect(int from, void* data, size_t bytes) {
  state_->expecting(from).stream.expect(data, bytes);
}

void Mesh::expect(int from, size_t bytes) {
  state_->expecting(from).stream.expect(nullptr, bytes);
}

const std::byte* Mesh::peek(int from) {
  State::In& in = state_->in(from);
  if (!in.verified) {
    state_->until(from, [&] { return in.stream.ready(); });
    in.stream.pop();
    if (!isSound(in.theirs, state_->size))
      state_->watch.broken(from, "it announced what no rank would");
    in.verified = true;
    state_->watch.verify(from, in.theirs);
  }
  state_->until(from, [&] { return in.stream.ready(); });
  return in.stream.front();
}

void Mesh::release(int from) {
  State::In& in = state_->in(from);
  in.stream.pop();
  if (--in.expected > 0) return;
  in.active = false;
  std::erase(state_->receiving, from);
}

void Mesh::leave(Nanos longest) {
  const auto everyLane = [&](const auto& body) {
    for (int r = 0; r < state_->size; ++r)
      if (const auto& out = state_->outs[static_cast<size_t>(r)])
        for (int i = 0; i < out->stream.lanes(); ++i) body(r, out->stream.lane(i).socket.get());
  };
  const auto isUnderWay = [&] {
    bool under_way = false;
    everyLane([&](int r, int socket) {
      int bytes = 0;
      under_way = under_way || (state_->watch.stateOf(r) == PeerState::kHere &&
                                ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0);
    });
    return under_way;
  };
  Nanos nap = 100 * kMicrosecond;
  for (const Nanos limit = deadlineIn(longest);
       now() < limit && !state_->watch.failed() && isUnderWay();
       nap = std::min(2 * nap, 5 * kMillisecond))
    std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
  everyLane([](int, int socket) { shutdown(socket, SHUT_WR); });
}

size_t Mesh::stagingBytes() const {
  return state_->pool.bytes();
}

std::vector<std::string> Mesh::lanes() const {
  std::vector<std::string> all;
  for (int r = 0; r < state_->size; ++r)
    if (const auto& out = state_->outs[static_cast<size_t>(r)]; out && out->requested > 0)
      all.push_back("to rank " +
                    std::to_string(state_->options.shown.empty()
                                       ? r
                                       : state_->options.shown[static_cast<size_t>(r)]) +
                    ": " + out->count.why());
  return all;
}

}  // namespace ringreduce
