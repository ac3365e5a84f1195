// An interpreter of the PTX that nvcc makes of the kernels: it runs whole grids on the host, so
// that a test sees what the compiler made of the source without a GPU.
//
// Warps run in a random order, some instructions at a time.  The lanes of a warp that stand at the
// same instruction take it together, and which of several such groups goes on is drawn too.
//
// Memory is as weak as the protocol may expect.  What a thread stores stays with it until a barrier
// of its block, and with the block until one of its threads stores with release at system scope; at
// the end of a block all of it gets out.  A thread sees what others have let out only after its own
// load with acquire at system scope, and a block after a barrier behind one; until then they read
// the old bytes.  Every access must lie in memory that was given to the kernels, and in no other.
//
// Multicast addresses (multimem) stand for the same place of several ranks' memory; the sum of what
// is there is made in the order of ranks.  What is stored by one kind of address can be loaded by
// the other only if the block that stored it had fence.proxy.alias between the store and its
// release (or has ended): until then the other kind reads the old bytes.
//
// It is kinder than a GPU in one way: an acquire makes visible all that any block had let out by
// then, whatever flag it loads, and even if that flag was old.  So a kernel that polled another
// flag is forgiven that it did not wait for the right one.
//
// It knows the instructions that the kernels have now, and refuses all others by name.
#pragma once

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reduce_oracle.h"

namespace ptx {

using ringreduce::DType;

inline constexpr int kLanes = 32;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Warp;
struct Step;
using Run = void (*)(Warp&, const Step&);

struct Step {
  std::string text;  // for errors and mutants
  int line = 0;
  Run run = nullptr;
  int guard = -1;  // a register
  bool guard_is = true;
  std::vector<int> to, from;  // registers
  enum class Space : uint8_t { kGlobal, kShared, kParam } space = Space::kGlobal;
  int64_t offset = 0;  // of an address
  int bytes = 0;       // of an element in memory
  bool is_signed = false;
  int target = -1;  // of a branch
};

struct Kernel {
  std::string name;
  std::vector<Step> steps;
  int registers = 0;
  std::vector<std::pair<int, uint64_t>> constants;  // registers that hold a number
  std::vector<std::pair<int, int>> specials;        // registers that hold %tid.x (0), %ctaid.x, ...
  size_t shared = 0;
};

// --- Threads and memory --------------------------------------------------------------------------

struct Range {
  uint64_t begin, end;
};

// Some bytes of a granule of 8.  `unfenced`: those of them that were stored by ordinary addresses
// (0) or multicast ones (1) with no fence since.
struct Granule {
  uint64_t value = 0;
  uint8_t mask = 0;
  uint64_t since = 0;
  uint8_t unfenced[2] = {};
};
using Granules = std::unordered_map<uint64_t, Granule>;

struct Store {
  uint64_t address, value;
  int bytes;
  int view = 0;  // 1: by a multicast address
  bool fenced = false;
};

// Addresses that stand for as many at each of some places.
struct Multicast {
  uint64_t begin, bytes;
  std::vector<uint64_t> places;
};

struct Grid;
struct Machine;

struct Block {
  Machine* machine;
  Grid* grid;
  int index;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<unsigned char> shared;
  Granules kept;   // stored by its threads before a barrier, not let out
  Granules stale;  // what others have let out since it last acquired: the old bytes
  uint64_t acquired = 0;
  int arrived = 0, left = 0, threads = 0;
  bool any = false, done = false;
  const Step* barrier = nullptr;

  void arrive(Warp& warp, const Step& step, uint32_t lanes, uint32_t votes);
  void complete();
  void leave(uint32_t lanes);
  void keep(std::vector<Store>& stores);
  void letOut(bool fenced = false);
};

struct Grid {
  const Kernel* kernel;
  std::vector<unsigned char> arguments;
  int blocks;
  int stream;  // grids of a stream follow each other
};

struct Machine {
  explicit Machine(uint64_t seed) : random(seed) {}
  std::mt19937_64 random;
  std::vector<Range> ranges;
  std::vector<std::unique_ptr<Block>> blocks;  // that run
  std::vector<Multicast> multicasts;
  Granules aliased[2];  // the old bytes that loads by each kind of address still get
  // Relaxed stores that have not got out yet.
  std::vector<std::pair<uint64_t*, uint64_t>> floating;
  uint64_t time = 0, progress = 0, epoch = 1;
  int threads = 512;

  void check(uint64_t address, int bytes, const Step& step) const {
    for (const Range& range : ranges)
      if (address >= range.begin && address + static_cast<uint64_t>(bytes) <= range.end) {
        if (address % static_cast<uint64_t>(bytes) != 0)
          throw Error("line " + std::to_string(step.line) + ": not aligned: " + step.text);
        return;
      }
    throw Error("line " + std::to_string(step.line) + ": outside of all memory: " + step.text);
  }
  std::vector<uint64_t> placesOf(uint64_t address, int bytes, const Step& step) const {
    for (const Multicast& one : multicasts)
      if (address >= one.begin && address + static_cast<uint64_t>(bytes) <= one.begin + one.bytes) {
        std::vector<uint64_t> places = one.places;
        for (uint64_t& place : places) place += address - one.begin;
        return places;
      }
    throw Error("line " + std::to_string(step.line) + ": no multicast address: " + step.text);
  }
  void run(std::vector<Grid>& grids);
  void letOneOut() {
    std::swap(floating[random() % floating.size()], floating.back());
    *floating.back().first = floating.back().second;
    floating.pop_back();
    progress = time;
  }
};

class Warp {
 public:
  Warp(Block& block, int index, const Kernel& kernel) : block(block), kernel(kernel), index(index) {
    registers.resize(static_cast<size_t>(kernel.registers) * kLanes, 0xdeadbeefdeadbeef);
    for (const auto& [at, value] : kernel.constants)
      for (int l = 0; l < kLanes; ++l) reg(at)[l] = value;
    for (const auto& [at, what] : kernel.specials)
      for (int l = 0; l < kLanes; ++l)
        reg(at)[l] = static_cast<uint64_t>(what == 0   ? index * kLanes + l
                                           : what == 1 ? block.index
                                           : what == 2 ? block.grid->blocks
                                                       : block.machine->threads);
  }
  uint64_t* reg(int at) { return &registers[static_cast<size_t>(at) * kLanes]; }
  template <class F>
  void each(F f) {
    if (active == ~0u)
      for (int l = 0; l < kLanes; ++l) f(l);
    else
      for (uint32_t m = active; m != 0; m &= m - 1) f(std::countr_zero(m));
  }
  void step();
  bool runs() const { return running != 0; }

  uint64_t load(int lane, uint64_t address, int bytes, const Step& step, int view = 0);
  void store(int lane, uint64_t address, uint64_t value, int bytes, int view = 0) {
    pending[lane].push_back({address, value, bytes, view});
  }

  Block& block;
  const Kernel& kernel;
  const int index;
  std::vector<uint64_t> registers;
  int pc[kLanes] = {};
  uint32_t running = ~0u;  // lanes that neither wait at a barrier nor have ended
  uint32_t waiting = 0;
  uint32_t active = 0;
  bool jumped = false, polled = false;
  std::vector<Store> pending[kLanes];
  uint64_t acquired[kLanes] = {};  // when each did last
};

// Shared memory has addresses that no other has.
inline constexpr uint64_t kShared = uint64_t{1} << 60;

// Of what is newer than `after`, and not stored by the other view with no fence since.
inline void overlay(const Granules& from, uint64_t address, int bytes, uint64_t& value,
                    uint64_t after = 0, int view = 0) {
  const auto found = from.find(address / 8);
  if (found == from.end() || (after != 0 && found->second.since <= after)) return;
  const int mask = found->second.mask & ~found->second.unfenced[1 - view];
  for (int b = 0; b < bytes; ++b) {
    const uint64_t at = address % 8 + static_cast<uint64_t>(b);
    if (mask >> at & 1) {
      const uint64_t byte = found->second.value >> 8 * at & 0xff;
      value = (value & ~(uint64_t{0xff} << 8 * b)) | byte << 8 * b;
    }
  }
}

inline uint64_t Warp::load(int lane, uint64_t address, int bytes, const Step& step, int view) {
  uint64_t value = 0;
  const auto size = static_cast<size_t>(bytes);
  if (step.space == Step::Space::kParam) {
    if (address + size > block.grid->arguments.size())
      throw Error("past the arguments: " + step.text);
    std::memcpy(&value, &block.grid->arguments[address], size);
    return value;
  }
  if (step.space == Step::Space::kShared) {
    if (address + size > block.shared.size()) throw Error("past shared memory: " + step.text);
    std::memcpy(&value, &block.shared[address], size);
    address += kShared;
  } else {
    block.machine->check(address, bytes, step);
    std::memcpy(&value, reinterpret_cast<void*>(address), size);
    const Granules& aliased = block.machine->aliased[view];
    if (!aliased.empty()) overlay(aliased, address, bytes, value);
    if (!block.stale.empty()) overlay(block.stale, address, bytes, value, acquired[lane]);
    if (!block.kept.empty()) overlay(block.kept, address, bytes, value, 0, view);
  }
  for (const Store& one : pending[lane])
    if ((one.view == view || one.fenced) && one.address < address + size &&
        address < one.address + static_cast<uint64_t>(one.bytes))
      for (int b = 0; b < bytes; ++b) {
        const uint64_t at = address + static_cast<uint64_t>(b) - one.address;
        if (at < static_cast<uint64_t>(one.bytes))
          value = (value & ~(uint64_t{0xff} << 8 * b)) | (one.value >> 8 * at & 0xff) << 8 * b;
      }
  return value;
}

inline void Block::keep(std::vector<Store>& stores) {
  for (const Store& one : stores) {
    if (one.address >= kShared) {
      std::memcpy(&shared[one.address - kShared], &one.value, static_cast<size_t>(one.bytes));
      continue;
    }
    Granule& granule = kept[one.address / 8];
    for (int b = 0; b < one.bytes; ++b) {
      const uint64_t at = one.address % 8 + static_cast<uint64_t>(b);
      granule.value = (granule.value & ~(uint64_t{0xff} << 8 * at)) | (one.value >> 8 * b & 0xff)
                                                                          << 8 * at;
      granule.mask = static_cast<uint8_t>(granule.mask | 1u << at);
      for (int view = 0; view < 2; ++view) {
        const unsigned others = granule.unfenced[view] & ~(1u << at);
        const bool is_unfenced = view == one.view && !one.fenced;
        granule.unfenced[view] = static_cast<uint8_t>(others | unsigned{is_unfenced} << at);
      }
    }
  }
  stores.clear();
}

inline void Block::letOut(bool fenced) {
  ++machine->epoch;
  for (const auto& [at, granule] : kept) {
    for (int b = 0; b < 8; ++b) {
      if (!(granule.mask >> b & 1)) continue;
      auto* byte = reinterpret_cast<unsigned char*>(at * 8 + static_cast<uint64_t>(b));
      for (const auto& other : machine->blocks) {
        if (other.get() == this || other->done) continue;
        Granule& old = other->stale[at];
        if (old.mask >> b & 1) continue;
        old.value = (old.value & ~(uint64_t{0xff} << 8 * b)) | static_cast<uint64_t>(*byte)
                                                                   << 8 * b;
        old.mask = static_cast<uint8_t>(old.mask | 1u << b);
        old.since = machine->epoch;
      }
      for (int view = 0; view < 2; ++view) {
        Granules& aliased = machine->aliased[view];
        const bool hides = !fenced && granule.unfenced[1 - view] >> b & 1;
        const auto found = aliased.find(at);
        if (!hides && found == aliased.end()) continue;
        Granule& old = found == aliased.end() ? aliased[at] : found->second;
        if (!hides) {
          old.mask = static_cast<uint8_t>(old.mask & ~(1u << b));
        } else if (!(old.mask >> b & 1)) {
          old.value = (old.value & ~(uint64_t{0xff} << 8 * b)) | static_cast<uint64_t>(*byte)
                                                                     << 8 * b;
          old.mask = static_cast<uint8_t>(old.mask | 1u << b);
        }
      }
      *byte = static_cast<unsigned char>(granule.value >> 8 * b);
    }
  }
  kept.clear();
}

inline void Block::arrive(Warp& warp, const Step& step, uint32_t lanes, uint32_t votes) {
  if (arrived == 0) {
    barrier = &step;
    any = false;
  } else if (barrier != &step) {
    throw Error("threads of a block at different barriers, lines " + std::to_string(barrier->line) +
                " and " + std::to_string(step.line));
  }
  warp.running &= ~lanes;
  warp.waiting |= lanes;
  any |= votes != 0;
  arrived += std::popcount(lanes);
  if (arrived + left == threads) complete();
}

inline void Block::complete() {
  machine->progress = machine->time;
  arrived = 0;
  for (auto& warp : warps) {
    for (int l = 0; l < kLanes; ++l) keep(warp->pending[l]);
    if (!barrier->to.empty())
      for (int l = 0; l < kLanes; ++l)
        if (warp->waiting >> l & 1) warp->reg(barrier->to[0])[l] = any;
    warp->running |= warp->waiting;
    warp->waiting = 0;
  }
  if (acquired != 0)
    std::erase_if(stale, [&](const auto& one) { return one.second.since <= acquired; });
  acquired = 0;
}

inline void Block::leave(uint32_t lanes) {
  left += std::popcount(lanes);
  machine->progress = machine->time;
  if (left == threads) {
    for (auto& warp : warps)
      for (auto& stores : warp->pending) keep(stores);
    letOut(true);
    while (!machine->floating.empty()) machine->letOneOut();
    done = true;
  } else if (arrived != 0 && arrived + left == threads) {
    throw Error("threads end while others wait at the barrier of line " +
                std::to_string(barrier->line));
  }
}

inline void Warp::step() {
  // The lanes at one instruction: mostly the first in the code, so that lanes meet again.
  int at = -1;
  if (block.machine->random() % 32 == 0) {
    const int pick = static_cast<int>(block.machine->random() % kLanes);
    for (int l = 0; l < kLanes && at < 0; ++l)
      if (running >> (l + pick) % kLanes & 1) at = pc[(l + pick) % kLanes];
  } else {
    for (uint32_t m = running; m != 0; m &= m - 1) {
      const int here = pc[std::countr_zero(m)];
      if (at < 0 || here < at) at = here;
    }
  }
  uint32_t group = 0;
  for (uint32_t m = running; m != 0; m &= m - 1)
    if (pc[std::countr_zero(m)] == at) group |= m & -m;
  // On through the code for as long as these lanes stay together.
  for (;;) {
    if (static_cast<size_t>(at) >= kernel.steps.size())
      throw Error("past the end of " + kernel.name);
    const Step& now = kernel.steps[static_cast<size_t>(at)];
    active = group;
    if (now.guard >= 0) {
      const uint64_t* p = reg(now.guard);
      for (uint32_t m = group; m != 0; m &= m - 1)
        if ((p[std::countr_zero(m)] != 0) != now.guard_is) active &= ~(m & -m);
    }
    ++at;
    for (uint32_t m = group; m != 0; m &= m - 1) pc[std::countr_zero(m)] = at;
    ++block.machine->time;
    if (active == 0) continue;
    jumped = false;
    now.run(*this, now);
    if (jumped) return;
  }
}

inline void Machine::run(std::vector<Grid>& grids) {
  std::map<int, std::vector<Grid*>> streams;
  for (Grid& grid : grids) streams[grid.stream].push_back(&grid);
  std::map<int, size_t> at;
  std::map<int, int> open;
  const auto start = [&](int stream) {
    if (open[stream] != 0 || at[stream] == streams[stream].size()) return;
    Grid* grid = streams[stream][at[stream]++];
    open[stream] = grid->blocks;
    for (int b = 0; b < grid->blocks; ++b) {
      auto block = std::make_unique<Block>();
      block->machine = this;
      block->grid = grid;
      block->index = b;
      block->threads = threads;
      block->shared.resize(grid->kernel->shared, 0xcc);
      for (int w = 0; w < threads / kLanes; ++w)
        block->warps.push_back(std::make_unique<Warp>(*block, w, *grid->kernel));
      blocks.push_back(std::move(block));
    }
  };
  for (auto& [stream, list] : streams) start(stream);
  std::vector<Warp*> ready;
  while (!blocks.empty()) {
    ready.clear();
    for (auto& block : blocks)
      for (auto& warp : block->warps)
        if (warp->runs()) ready.push_back(warp.get());
    if (ready.empty()) throw Error("all threads wait at barriers");
    if (time - progress > 3'000'000) throw Error("nothing goes on: a flag is not seen");
    while (!floating.empty() && random() % 8 != 0) letOneOut();
    // A few turns with the same list: warps that have come to a barrier are passed over.
    for (size_t turn = 0; turn < ready.size(); ++turn) {
      Warp& warp = *ready[random() % ready.size()];
      warp.polled = false;
      for (uint64_t quantum = 1 + random() % 64; quantum > 0 && warp.runs() && !warp.polled;
           --quantum)
        warp.step();
    }
    for (size_t i = 0; i < blocks.size();) {
      if (!blocks[i]->done) {
        ++i;
        continue;
      }
      const int stream = blocks[i]->grid->stream;
      blocks.erase(blocks.begin() + static_cast<ptrdiff_t>(i));
      if (--open[stream] == 0) start(stream);
    }
  }
}

}  // namespace ptx
