// Pairs of ranks, and what lies between them.
#include "fake_nccl_moves.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fake_nccl.h"

extern FakeNccl fake_nccl;

namespace {

constexpr auto kStalled = std::chrono::seconds(20);

// A send that its receiver has not taken yet.
struct Offer {
  const void* data;
  size_t bytes;
  bool taken = false;
};

struct World {
  int size = 0, came = 0, left = 0;
  bool broken = false;  // a rank is gone: what needs it stands still, the others are told
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<Offer*>> offers;  // by sender and receiver
};

std::mutex worlds_mutex;
std::map<std::string, std::shared_ptr<World>> worlds;

void complain(const std::string& what) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (!fake_nccl.complaint[0])
    std::snprintf(fake_nccl.complaint, sizeof fake_nccl.complaint, "%s", what.c_str());
}

}  // namespace

struct Moving {
  std::shared_ptr<World> world;
  int rank = 0, groups = 0, at_work = 0;
  bool aborted = false;
};

struct ncclComm : Moving {};

namespace {

struct Transfer {
  const void* from;
  void* to;  // null for a send
  size_t bytes;
  int peer;
};

// A group's calls of one communicator, as they lie in its stream.
struct Work {
  std::shared_ptr<ncclComm> comm;
  std::vector<Transfer> transfers;
};

// The library's pointers are plain; what is in a stream keeps its communicator.
std::map<ncclComm*, std::shared_ptr<ncclComm>> live;
std::shared_ptr<ncclComm> find(ncclComm* comm) {
  const std::lock_guard lock(worlds_mutex);
  const auto found = live.find(comm);
  if (found != live.end()) return found->second;
  complain("a communicator was used that is not there");
  return nullptr;
}

struct Group {
  int depth = 0;
  std::map<std::pair<ncclComm*, void*>, std::vector<Transfer>> calls;  // by communicator and stream
};
thread_local Group group;

void perform(const Work& work) {
  ncclComm& comm = *work.comm;
  World& world = *comm.world;
  std::unique_lock lock(world.mutex);
  ++comm.at_work;
  const auto wait = [&](auto ready) {
    const auto over = [&] { return comm.aborted || ready(); };
    if (!world.changed.wait_for(lock, kStalled, over)) {
      complain("rank " + std::to_string(comm.rank) + " waits for ever in its group " +
               std::to_string(comm.groups));
      comm.aborted = true;
    }
    return !comm.aborted;
  };
  if (comm.rank == fake_nccl.dies && comm.groups == fake_nccl.dies_at) world.broken = true;
  ++comm.groups;
  world.changed.notify_all();
  std::vector<std::unique_ptr<Offer>> own;
  if (world.broken) wait([] { return false; });
  for (const Transfer& t : work.transfers) {
    if (t.to) continue;
    own.push_back(std::make_unique<Offer>(Offer{t.from, t.bytes}));
    world.offers[{comm.rank, t.peer}].push_back(own.back().get());
  }
  world.changed.notify_all();
  for (const Transfer& t : work.transfers) {
    if (!t.to) continue;
    auto& offers = world.offers[{t.peer, comm.rank}];
    if (!wait([&] { return world.broken || !offers.empty(); })) break;
    if (world.broken) {
      wait([] { return false; });
      break;
    }
    Offer& offer = *offers.front();
    if (offer.bytes != t.bytes)
      complain("rank " + std::to_string(t.peer) + " sends " + std::to_string(offer.bytes) +
               " bytes, and rank " + std::to_string(comm.rank) + " receives " +
               std::to_string(t.bytes));
    std::memcpy(t.to, offer.data, std::min(offer.bytes, t.bytes));
    std::atomic_ref(fake_nccl.moved) += offer.bytes;
    offer.taken = true;
    offers.pop_front();
    world.changed.notify_all();
  }
  for (const auto& offer : own) wait([&] { return offer->taken; });
  // What nobody has taken when this was aborted, nobody shall take any more.
  for (auto& [pair, offers] : world.offers)
    std::erase_if(offers, [&](const Offer* o) {
      for (const auto& offer : own)
        if (o == offer.get()) return true;
      return false;
    });
  --comm.at_work;
  world.changed.notify_all();
}

void put(ncclComm* comm, void* stream, const std::vector<Transfer>& transfers) {
  auto* work = new Work{find(comm), transfers};
  const auto run = [](void* opaque) {
    const std::unique_ptr<Work> mine(static_cast<Work*>(opaque));
    perform(*mine);
  };
  if (!work->comm)
    delete work;
  else if (fake_nccl.enqueue)
    fake_nccl.enqueue(stream, run, work);
  else
    run(work);
}

}  // namespace

namespace fake_nccl_moves {

void makeId(char (&id)[128]) {
  static std::mutex mutex;
  static int made = 0;
  const std::lock_guard lock(mutex);
  std::memset(id, 0, sizeof id);
  std::snprintf(id, sizeof id, "world %d", ++made);
}

int join(ncclComm** comm, int size, const char (&id)[128], int rank) {
  std::shared_ptr<World> world;
  auto made = std::make_shared<ncclComm>();
  {
    const std::lock_guard lock(worlds_mutex);
    auto& entry = worlds[id];
    if (!entry) entry = std::make_shared<World>();
    world = entry;
    live[made.get()] = made;
  }
  made->world = world;
  made->rank = rank;
  *comm = made.get();
  std::unique_lock lock(world->mutex);
  if (world->size != 0 && world->size != size) complain("ranks differ in their world's size");
  world->size = size;
  ++world->came;
  world->changed.notify_all();
  return world->changed.wait_for(lock, kStalled, [&] { return world->came >= size; }) ? 0 : 2;
}

int leave(ncclComm* plain, bool aborting) {
  const auto comm = find(plain);
  if (!comm) return 4;
  World& world = *comm->world;
  {
    std::unique_lock lock(world.mutex);
    if (aborting) {
      comm->aborted = true;
      world.broken = world.broken || comm->at_work > 0;
    }
    world.changed.notify_all();
    if (!world.changed.wait_for(lock, kStalled, [&] { return comm->at_work == 0; }))
      complain("a communicator was destroyed with work under way");
  }
  const std::lock_guard lock(worlds_mutex);
  live.erase(plain);
  return 0;
}

int asyncError(ncclComm* plain, int* error) {
  const auto comm = find(plain);
  if (!comm) return 4;
  const std::lock_guard lock(comm->world->mutex);
  *error = comm->world->broken ? 6 : 0;
  return 0;
}

int groupStart() {
  ++group.depth;
  return 0;
}

int groupEnd() {
  if (group.depth == 0) {
    complain("a group ended that was not begun");
    return 5;
  }
  if (--group.depth > 0) return 0;
  const auto calls = std::exchange(group.calls, {});
  for (const auto& [where, transfers] : calls) put(where.first, where.second, transfers);
  return 0;
}

int transfer(ncclComm* comm, const void* from, void* to, size_t bytes, int peer, void* stream) {
  if (bytes == 0) complain("a transfer of nothing");
  if (group.depth == 0)
    put(comm, stream, {{from, to, bytes, peer}});
  else
    group.calls[{comm, stream}].push_back({from, to, bytes, peer});
  return 0;
}

}  // namespace fake_nccl_moves
