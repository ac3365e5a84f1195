// What each lane of a kernel does, step by step, as the kernels' own text does it: programs for
// interleavings.h.
//
// One lane is run at a time, from its first step to its last, by nobody else's leave: barriers are
// noted and passed, and a flag is found at the least value that lets its lane go on (at first where
// it started, then at one more each time the lane looks again).  So what is noted is the weakest
// condition of each wait; values that a pipe remembers from an earlier, luckier look only ever
// promise more.  That a lane can be run alone at all is what makes its list of steps one list:
// nothing that it does depends on when others do what they do.
//
// Not noted: the words of a rank that gives up (nothing fails here), its count of finished blocks
// (one atomic that orders all who count), and its counters (read and written by one block).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "host_block.h"
#include "interleavings.h"
#include "transport/shm/page.h"

namespace recorded {

using namespace ringreduce;
using namespace ringreduce::cuda;
using interleavings::Program;
using interleavings::Range;
using interleavings::Step;

// Real addresses as the program knows them: region i begins at i * kRegion.
inline constexpr size_t kRegion = size_t{1} << 32;

class Regions {
 public:
  void add(const void* begin, size_t size) {
    regions_.emplace_back(reinterpret_cast<uintptr_t>(begin), size);
  }
  size_t count() const { return regions_.size(); }
  Range range(const void* p, size_t size) const {
    const auto at = reinterpret_cast<uintptr_t>(p);
    for (size_t i = 0; i < regions_.size(); ++i)
      if (const auto& [begin, length] = regions_[i]; at >= begin && at + size <= begin + length)
        return {i * kRegion + at - begin, i * kRegion + at - begin + size};
    throw std::runtime_error("a lane touches memory that is not its rank's or a peer's");
  }

 private:
  std::vector<std::pair<uintptr_t, size_t>> regions_;
};

// The steps of a lane.
class Tape {
 public:
  Tape(const Regions& regions, uint64_t start) : regions_(regions), start_(start) {}

  void read(Range r) { add(access().reads, r); }
  void write(Range r) { add(access().writes, r); }
  void read(const void* p, size_t size) { read(regions_.range(p, size)); }
  void write(const void* p, size_t size) { write(regions_.range(p, size)); }
  void meet(size_t group) { steps_.push_back({.what = Step::Do::kBarrier, .at = group}); }
  void publish(const uint64_t& flag, uint64_t n, bool orders) {
    steps_.push_back(
        {.what = Step::Do::kPublish, .at = at(flag), .n = n - start_, .orders = orders});
  }
  // Of a word that is set to `n` once, and found so.
  void found(const uint64_t& word, uint64_t n, bool orders) {
    steps_.push_back({.what = Step::Do::kWait, .at = at(word), .n = n, .orders = orders});
  }
  uint64_t observe(const uint64_t& flag, bool orders) {
    if (!steps_.empty() && steps_.back().what == Step::Do::kWait && steps_.back().at == at(flag))
      ++steps_.back().n;
    else
      steps_.push_back({.what = Step::Do::kWait, .at = at(flag), .n = 0, .orders = orders});
    if (steps_.back().n > 10'000) throw std::runtime_error("a lane waits for ever");
    return start_ + steps_.back().n;
  }

  void post(const uint64_t& word, uint64_t n) {
    steps_.push_back({.what = Step::Do::kPost, .at = at(word), .n = n});
  }
  void find(const uint64_t& word, uint64_t n) {
    steps_.push_back({.what = Step::Do::kFind, .at = at(word), .n = n});
  }

  // Without what has no effect: waits for what has been so from the start, and barriers of one.
  std::vector<Step> steps(const Program& program) const {
    std::vector<Step> kept;
    for (const Step& step : steps_) {
      const bool empty = step.what == Step::Do::kWait      ? step.n == 0
                         : step.what == Step::Do::kBarrier ? program.groups[step.at].size() == 1
                                                           : false;
      if (!empty) interleavings::then(kept, step);
    }
    return kept;
  }

 private:
  Step& access() {
    if (steps_.empty() || steps_.back().what != Step::Do::kAccess)
      steps_.push_back({.what = Step::Do::kAccess});
    return steps_.back();
  }
  static void add(std::vector<Range>& ranges, Range r) {
    if (!ranges.empty() && ranges.back().end == r.begin)
      ranges.back().end = r.end;
    else
      ranges.push_back(r);
  }
  size_t at(const uint64_t& flag) const { return regions_.range(&flag, sizeof flag).begin; }

  const Regions& regions_;
  const uint64_t start_;
  std::vector<Step> steps_;
};

inline thread_local Tape* tape = nullptr;  // of the lane that runs
// What the lane finds in words that others write before it, time after time: they have not run yet.
inline thread_local std::map<const uint64_t*, std::deque<uint64_t>> heard;
inline thread_local std::map<const uint64_t*, uint64_t> segments;  // numbers of own segments
inline thread_local uint32_t flag_of_words = 0;                    // of the call by LL that runs

// What a mutant does: memory orders that it weakens, slots that it takes too early, sets of push
// slots, and barriers that it forgets.  All of it is chosen at run time, so that the kernels are
// compiled once for all mutants.
struct Mutant {
  bool weak_publish = false, weak_observe = false;
  uint64_t early_reuse = 0, sets = DeviceRules::kSets, ll_sets = DeviceRules::kLLSets;
  bool forgets_sync = false, forgets_any = false;
  bool acknowledges_early = false;  // the mapping thread, before it has mapped
};
inline thread_local Mutant mutant;  // of the program that is recorded

// The mutant's numbers in the place of constants.
struct EarlyReuse {
  operator uint64_t() const { return mutant.early_reuse; }
};
struct Sets {
  operator uint64_t() const { return mutant.sets; }
  friend constexpr bool operator<=(Sets, uint64_t most) { return DeviceRules::kSets <= most; }
};

struct LLSets {
  operator uint64_t() const { return mutant.ll_sets; }
  friend constexpr bool operator<=(LLSets, uint64_t most) { return DeviceRules::kLLSets <= most; }
};

struct Rules : DeviceRules {
  static constexpr EarlyReuse kEarlyReuse{};
  static constexpr Sets kSets{};
  static constexpr LLSets kLLSets{};
  template <class R>
  static void store(uint64_t& flag, uint64_t n) {
    tape->publish(flag, n, !mutant.weak_publish);
  }
  template <class R>
  static uint64_t load(uint64_t& flag) {
    if (const auto own = segments.find(&flag); own != segments.end()) {
      tape->found(flag, 1, !mutant.weak_observe);
      return own->second;
    }
    return tape->observe(flag, !mutant.weak_observe);
  }
  template <class R>
  static void say(uint64_t& word, uint64_t) {
    tape->write(&word, sizeof word);
  }
  template <class R>
  static uint64_t hear(const uint64_t& word) {
    tape->read(&word, sizeof word);
    std::deque<uint64_t>& values = heard.at(&word);
    const uint64_t value = values.front();
    if (values.size() > 1) values.pop_front();
    return value;
  }
  // The lane finds what it waits for; when, is for the checks to ask.
  template <class R>
  static void storeWords(uint64_t* to, uint64_t first, uint64_t second) {
    tape->post(to[0], first >> 32);
    tape->post(to[1], second >> 32);
  }
  template <class R>
  static void loadWords(uint64_t* from, uint64_t& first, uint64_t& second) {
    for (int i = 0; i < 2; ++i) tape->find(from[i], flag_of_words);
    first = second = uint64_t{flag_of_words} << 32;
  }
};

// A block's lanes, one after the other: lane 0 first, whose votes decide (nobody else has any).
class Block {
 public:
  // `tensors`, by turn: what the lanes show each other of them (located.h).
  Block(int lane, int lanes, size_t group, std::vector<bool>& votes, const PeerTensors& shared,
        const std::vector<PeerTensors>& tensors)
      : lane_(lane),
        lanes_(lanes),
        group_(group),
        votes_(votes),
        shared_(reinterpret_cast<const std::byte*>(&shared)),
        tensors_(tensors) {}
  int thread() const { return lane_; }
  int threads() const { return lanes_; }
  void sync() {
    if (!mutant.forgets_sync) tape->meet(group_);
  }
  bool any(bool x) {
    if (!mutant.forgets_any) tape->meet(group_);
    if (lane_ == 0) votes_.push_back(x);
    const bool result = votes_.at(turn_++);
    if (x && !result) throw std::runtime_error("a lane other than 0 votes");
    return result;
  }
  template <class T>
  T load(const T* from) {
    tape->read(from, sizeof(T));
    return *from;
  }
  template <class T>
  void store(T* to, T value) {
    tape->write(to, sizeof(T));
    *to = value;
  }
  template <class T>
  T see(const T& at) {
    tape->read(&at, sizeof at);
    return shownAt(at);
  }
  template <class T>
  void show(T& at, T value) {
    tape->write(&at, sizeof at);
    if (shownAt(at) != value) throw std::runtime_error("a lane shows another value");
  }
  template <DType>
  Pack loadSum(const Pack* from) {
    for (int r = 0; r < nvlink::Windows::ranksAt(from); ++r)
      load(nvlink::Windows::placeAt(from, r));
    return {};
  }
  void storeAll(Pack* to, Pack value) {
    for (int r = 0; r < nvlink::Windows::ranksAt(to); ++r)
      store(nvlink::Windows::placeAt(to, r), value);
  }
  void fenceAliases() {}  // for ptx_model.py
  static uint64_t nanoseconds() { return 0; }
  static void pause() {}

 private:
  const int lane_, lanes_;
  const size_t group_;
  // Three votes come before the first turn, and two in each.
  template <class T>
  T shownAt(const T& at) const {
    T value;
    const auto* const turn = reinterpret_cast<const std::byte*>(&tensors_.at((turn_ - 3) / 2));
    std::memcpy(&value, turn + (reinterpret_cast<const std::byte*>(&at) - shared_), sizeof value);
    return value;
  }
  std::vector<bool>& votes_;
  const std::byte* const shared_;
  const std::vector<PeerTensors>& tensors_;
  size_t turn_ = 0;
};

struct Shape {
  int ranks, channels = 1, lanes = 1;
  uint64_t depth = 2;
  size_t slot_bytes = 128;
  uint64_t start = 0;  // of all counters
  size_t ll_bytes = 0;
};

struct Call {
  DeviceAlgorithm algorithm;  // of an all-reduce
  size_t count;               // of a part, where there are parts
  size_t slice = kChunkElements;
  size_t window = 1;
  int channels = 1;
  bool in_place = true;
  size_t shift = 0;  // elements by which the user's memory is off
  Kind kind = Kind::kAllReduce;
  int root = 0;
  bool two_hops = false;  // a broadcast in two hops
  bool fixed = false;     // an all-reduce of 2, 4 or 8 ranks by kernels for that number
  bool ll = false;        // the same by LL
  bool located = false;   // on tensors where they are; no broadcast
  bool nvls = false;      // an all-reduce in the NVSwitch
  uint32_t staged = 0;    // whose inputs (bit 2 r) and outputs (bit 2 r + 1) peers do not map

  size_t parts(int ranks) const {
    return kind == Kind::kReduceScatter || kind == Kind::kAllGather ? static_cast<size_t>(ranks)
                                                                    : 1;
  }
};

inline constexpr size_t kMostTurns = 8;  // of a call of located tensors

// Where each block has one piece of `n` elements.
inline size_t pieceOf(size_t n, int blocks) {
  return roundUp(ceilDiv(n, static_cast<size_t>(blocks)), kChunkElements);
}

// All ranks' programs for some calls in a row on the same memory.  Lanes are numbered by rank,
// channel and lane.  Between two kernels of a rank its stream orders everything (a barrier of all
// its lanes); there the user reads the last sums and writes the next addends.
template <class E>
Program record(const Shape& shape, const std::vector<Call>& calls, const Mutant& how = {}) {
  mutant = how;
  const auto index = [&](int r, int c, int l) {
    return static_cast<size_t>((r * shape.channels + c) * shape.lanes + l);
  };
  const auto size = [](int n) { return static_cast<size_t>(n); };
  host::Ranks ranks({.ranks = shape.ranks,
                     .channels = shape.channels,
                     .slot_bytes = shape.slot_bytes,
                     .depth = shape.depth,
                     .part_bytes = shape.slot_bytes,
                     .ll_bytes = shape.ll_bytes,
                     .window_bytes = size(shape.ranks * shape.channels) * shape.slot_bytes},
                    shape.start);
  Regions regions;
  for (int r = 0; r < shape.ranks; ++r) regions.add(ranks.comm(0).base[r], ranks.layout().bytes());
  size_t most = 0;
  for (const Call& call : calls)
    most = std::max(most, call.shift + call.parts(shape.ranks) * call.count);
  // A rank's two buffers; Packs, for their alignment.
  const size_t bytes = roundUp(most * sizeof(typename E::Stored), sizeof(Pack));
  std::vector<std::vector<Pack>> users(2 * size(shape.ranks),
                                       std::vector<Pack>(bytes / sizeof(Pack)));
  for (auto& user : users) regions.add(user.data(), bytes);
  for (int r = 0; r < shape.ranks; ++r)
    regions.add(ranks.comm(r).table, size(shape.ranks) * kMostSegments * sizeof(SegmentEntry));
  std::vector<PeerTensors> shared(size(shape.ranks * shape.channels));
  regions.add(shared.data(), shared.size() * sizeof(PeerTensors));
  for (int r = 0; r < shape.ranks; ++r) regions.add(ranks.window(r).own, nvlink::Windows::kBytes);
  // A segment for each buffer, known to all ranks, with the address that each finds there.
  heard.clear();
  segments.clear();
  std::vector<Place> places;
  const bool locates = std::ranges::any_of(calls, [](const Call& call) { return call.located; });
  for (size_t user = 0; locates && user < users.size(); ++user) {
    const int owner = static_cast<int>(user / 2);
    auto* const data = reinterpret_cast<std::byte*>(users[user].data());
    Place& place = places.emplace_back(Place{user + 1, 0});
    for (int at = 0; at < shape.ranks; ++at) {
      SegmentEntry& entry = ranks.entry(at, owner, place.segment);
      entry = {place.segment, data, bytes};
      if (at == owner) segments[&entry.number] = place.segment;
      heard[&entry.number] = {place.segment};
      heard[reinterpret_cast<uint64_t*>(&entry.data)] = {reinterpret_cast<uint64_t>(data)};
      heard[&entry.bytes] = {bytes};
    }
  }

  Program program;
  std::vector<Tape> tapes(index(shape.ranks, 0, 0), Tape(regions, shape.start));
  for (int r = 0; r < shape.ranks; ++r)
    for (int c = 0; c < shape.channels; ++c) {
      auto& group = program.groups.emplace_back();
      for (int l = 0; l < shape.lanes; ++l) group.push_back(index(r, c, l));
    }
  const size_t streams = program.groups.size();  // a group for each rank, after those of blocks
  for (int r = 0; r < shape.ranks; ++r) {
    auto& group = program.groups.emplace_back();
    for (size_t i = index(r, 0, 0); i < index(r + 1, 0, 0); ++i) group.push_back(i);
  }

  const auto runLane = [&](const Call& call, int r, int c, int l, std::vector<bool>& votes) {
    const DeviceComm& comm = ranks.comm(r);
    constexpr size_t kWidth = sizeof(typename E::Stored);
    const size_t part = call.count * kWidth, own = size(r) * part;
    const bool scatters = call.kind == Kind::kReduceScatter,
               gathers = call.kind == Kind::kAllGather;
    std::byte* const here =
        reinterpret_cast<std::byte*>(users[2 * size(r)].data()) + call.shift * kWidth;
    std::byte* const there =
        reinterpret_cast<std::byte*>(users[2 * size(r) + 1].data()) + call.shift * kWidth;
    std::byte* const in = here + (call.in_place && gathers ? own : 0);
    // Broadcast knows one memory only.
    const bool one = call.in_place || call.kind == Kind::kBroadcast;
    std::byte* const out = one ? here + (scatters ? own : 0) : there;
    const RankCall rank_call{
        .comm = &comm,
        .input = in,
        .output = out,
        .count = call.count,
        .arithmetic = {Combine::kAdd, false, false, shape.ranks, 1},
        .factor = nullptr,
        .timeout = ~uint64_t{0},
        .operation = 0,
        .slice = call.ll ? pieceOf(call.count, call.channels) : call.slice,
        .window = call.window,
        .scatter = scatters || call.two_hops,
        .poison = poisonOf(E::kDType),
        .root = call.kind == Kind::kBroadcast ? call.root : kEverybody,
    };
    // Where peer p's tensors are, and what it says of them.
    const auto mapped = [&](int p, int output) {
      const bool peers_touch_it = output ? !scatters : !gathers;
      return peers_touch_it && (call.staged >> (2 * p + output) & 1) == 0;
    };
    const auto locationOf = [&](int p) {
      const auto place = [&](int output) {
        Place at = places[2 * size(p) + size(output && !one)];
        at.offset = call.shift * kWidth;
        return mapped(p, output) ? at : Place{};
      };
      return Location{place(0), place(1), call.count};
    };
    std::vector<PeerTensors> tensors;
    for (size_t turn = 0; call.located && turn < kMostTurns; ++turn) {
      PeerTensors& now = tensors.emplace_back();
      const size_t chunk =
          scatters || gathers ? call.count : Cut{call.count, shape.ranks}.chunkSize();
      const Span whole = piece(call.parts(shape.ranks) * call.count, chunk, size(r));
      const size_t begin =
          whole.begin + piece(whole.size, call.slice, turn * size(call.channels) + size(c)).begin;
      for (int p = 0; p < shape.ranks; ++p) {
        const auto at = [&](int output) {
          if (!mapped(p, output) && (p != r || call.shift * kWidth % sizeof(Pack) != 0))
            return comm.base[p] + comm.layout.window() +
                   size(r * call.channels + c) * call.slice * kWidth;
          if (!mapped(p, output)) {  // its own, which may be its part alone
            const bool alone = output ? scatters : gathers;
            return (output ? out : in) + (begin - (alone ? whole.begin : 0)) * kWidth;
          }
          std::byte* const user =
              reinterpret_cast<std::byte*>(users[2 * size(p) + size(output && !one)].data());
          return user + (call.shift + begin) * kWidth;
        };
        now.input[p] = at(0);
        now.output[p] = at(1);
        const auto* line = reinterpret_cast<const uint64_t*>(
            comm.base[r] + comm.layout.pushedFlag(c, DeviceLayout::Of::kParts, p));
        const Location said = locationOf(p);
        const uint64_t words[] = {said.in.segment, said.in.offset, said.out.segment,
                                  said.out.offset,
                                  mixed(said.what, comm.local->counters[c].parts + turn)};
        for (size_t w = 0; w < std::size(words); ++w) {
          if (turn == 0) heard[line + 1 + w].clear();
          heard[line + 1 + w].push_back(words[w]);
        }
      }
    }
    const Location location = call.located ? locationOf(r) : Location{};
    PeerTensors& here_shared = shared[size(r * shape.channels + c)];
    tape = &tapes[index(r, c, l)];
    if (c == 0 && l == 0) tape->write(in, (scatters ? size(shape.ranks) : 1) * part);
    tape->meet(streams + size(r));
    if (c < call.channels) {
      Block block(l, shape.lanes, index(r, c, 0) / size(shape.lanes), votes, here_shared, tensors);
      using enum DeviceAlgorithm;
      const auto run = [&]<int P>() {
        if (call.located)
          return locatedBlock<E, Rules, P>(block, comm, rank_call, location, here_shared, c,
                                           call.channels);
        if constexpr (P > 0)
          if (call.ll) return llBlock<E, Rules, P>(block, comm, rank_call, c, call.channels);
        if constexpr (P == 0 && hasNvlsKernel(E::kDType))
          if (call.nvls)
            return nvlsBlock<E, Rules>(block, comm, rank_call, ranks.window(r), c, call.channels);
        if (call.algorithm == kOneShot)
          allReduceBlock<kOneShot, E, Rules, P>(block, comm, rank_call, c, call.channels);
        else if (call.algorithm == kTwoShot)
          allReduceBlock<kTwoShot, E, Rules, P>(block, comm, rank_call, c, call.channels);
        else
          allReduceBlock<kRing, E, Rules>(block, comm, rank_call, c, call.channels);
      };
      const int fixed = call.fixed || call.ll ? shape.ranks : 0;
      if (gathers && call.located)
        locatedGatherBlock<kWidth, Rules>(block, comm, rank_call, location, here_shared, c,
                                          call.channels);
      else if (gathers || call.kind == Kind::kBroadcast)
        gatherBlock<kWidth, Rules>(block, rank_call, c, call.channels);
      else if (!E::kFloating || fixed == 0 || call.nvls)
        run.template operator()<0>();
      if constexpr (E::kFloating) {
        if (fixed == 2) run.template operator()<2>();
        if (fixed == 4) run.template operator()<4>();
        if (fixed == 8) run.template operator()<8>();
      }
    }
    tape->meet(streams + size(r));
    if (c == 0 && l == 0) tape->read(out, (gathers ? size(shape.ranks) : 1) * part);
  };
  for (const Call& call : calls)
    for (int r = 0; r < shape.ranks; ++r)
      for (int c = 0; c < shape.channels; ++c) {
        Counters& counters = ranks.comm(r).local->counters[c];
        const Counters before = counters;
        Counters after = before;
        std::vector<bool> votes;
        for (int l = 0; l < shape.lanes; ++l) {
          counters = before;  // as every lane of the kernel finds them
          flag_of_words = static_cast<uint32_t>(before.ll + 1);
          runLane(call, r, c, l, votes);
          if (l == 0) after = counters;
        }
        counters = after;
      }
  for (const Tape& t : tapes) program.lanes.push_back(t.steps(program));

  // The mapping threads of the ranks: each maps all segments of the others, acknowledges them, and
  // says so of its own once all others have.
  const auto acknowledged = [&](int r) { return regions.count() * kRegion + size(r); };
  for (int r = 0; r < shape.ranks && !segments.empty(); ++r) {
    Tape mapper(regions, 0);
    std::vector<Step> steps;
    for (size_t user = 0; user < users.size(); ++user) {
      const int owner = static_cast<int>(user / 2);
      if (owner != r) mapper.write(&ranks.entry(r, owner, user + 1), sizeof(SegmentEntry));
    }
    steps = mapper.steps(program);
    steps.insert(how.acknowledges_early ? steps.begin() : steps.end(),
                 {.what = Step::Do::kPublish, .at = acknowledged(r), .n = 1});
    for (int p = 0; p < shape.ranks; ++p)
      if (p != r) steps.push_back({.what = Step::Do::kWait, .at = acknowledged(p), .n = 1});
    for (size_t user : {2 * size(r), 2 * size(r) + 1})
      steps.push_back({.what = Step::Do::kPublish,
                       .at = regions.range(&ranks.entry(r, r, user + 1).number, 8).begin,
                       .n = 1});
    program.lanes.push_back(steps);
  }
  return program;
}

}  // namespace recorded
