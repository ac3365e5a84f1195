// Runs the PTX of the all-reduce kernels, and of those for parts of located tensors, in an
// interpreter (ptx.h), with random calls, ranks, tensors and orders of warps, and compares the bits
// with the oracle of the CPU's tests.
//
//     ptx_run FILE... [--cases N] [--seed S] [--mutants]
//
// The files are PTX by nvcc.  The arguments of the kernels are the structs of the C++ source, so
// this also proves that both agree on their layout.  The files are those of one build, with all the
// kernels between them; cases take turns on the GPUs that they have PTX for.  --mutants puts
// mistakes into the PTX for the newest of these GPUs, each of which some case must notice.
//
// Messages have up to 4,099 elements, which is enough for every loop of sums.  Loops of copies take
// eight packs at once and need 8,192 elements of 4 bytes in a slice, so of these only those for 8
// bytes run.  Reduce-scatter and all-gather through slots, broadcast, the direct kernels, and what
// follows a deadline or an abort do not run here.
#define CHECK_OWN_MAIN
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <optional>
#include <ranges>

#include "cuda/kernels/kernel_table.h"
#include "device_calls.h"
#include "ptx_parser.h"

namespace {

using namespace ringreduce;
using namespace ringreduce::cuda;
using host::Alignment;
using host::Call;
using host::Calls;

constexpr auto kOne = DeviceAlgorithm::kOneShot, kTwo = DeviceAlgorithm::kTwoShot,
               kRing = DeviceAlgorithm::kRing;

// A kernel of all-reduce: of any number of ranks, or of the one that it is compiled for.  Located
// ones reduce and scatter too.  Or one of the located all-gather, for elements of a unit.
struct Which {
  DeviceAlgorithm algorithm;
  DType dtype;
  int ranks = 0;  // 0: any
  bool located = false, ll = false, nvls = false;
  int unit = -1;

  // A launch a rank.
  bool isRanks() const { return ranks > 0 || located || nvls; }

  std::string symbol() const {
    const auto number = [](auto value) { return std::to_string(static_cast<int>(value)); };
    const std::string type = "LNS_5DTypeE" + number(dtype) + "E";
    const std::string how = "LNS0_15DeviceAlgorithmE" + number(algorithm) + "E";
    const std::string of = "Li" + number(ranks) + "EEEvNS0_10RankLaunchE";
    const std::string begin = "_ZN10ringreduce4cuda";
    if (unit >= 0)
      return begin + "21locatedGatherKernelOfILi" + number(unit) + "EEEvNS0_10RankLaunchE";
    if (located) return begin + "13locatedKernelI" + type + of;
    if (nvls) return begin + "12nvlsKernelOfI" + type + "EEvNS0_10NvlsLaunchE";
    if (ll) return begin + "8llKernelI" + type + of;
    if (ranks > 0) return begin + "11fixedKernelI" + how + type + of;
    return begin + "15allReduceKernelI" + how + type + "EEvNS0_11RanksLaunchE";
  }
  std::string text() const {
    return (unit >= 0 ? "located all-gather"
            : located ? "located"
            : ll      ? "LL"
            : nvls    ? "NVLS"
                      : kDeviceAlgorithmNames[static_cast<int>(algorithm)]) +
           (ranks > 0 ? " of " + std::to_string(ranks) : "");
  }
};

std::vector<Which> everyKernel() {
  std::vector<Which> all;
  for (int unit = 0; unit < kUnits; ++unit)
    all.push_back({.algorithm = kTwo, .dtype = DType::kFloat32, .located = true, .unit = unit});
  for (int t = 0; t < kKernelDTypes; ++t) {
    const auto dtype = static_cast<DType>(t);
    for (const auto algorithm : {kOne, kTwo, kRing})
      if (hasKernel(algorithm, dtype)) all.push_back({algorithm, dtype});
    all.push_back({kTwo, dtype, 0, true});
    if (hasNvlsKernel(dtype)) all.push_back({kTwo, dtype, 0, false, false, true});
    for (int size = 0; size < kFixedSizes && hasFixedKernels(dtype); ++size) {
      const int ranks = fixedRanks(size);
      for (const auto algorithm : {kOne, kTwo}) all.push_back({algorithm, dtype, ranks});
      all.push_back({kTwo, dtype, ranks, true});
      all.push_back({kOne, dtype, ranks, false, true});
    }
  }
  return all;
}

const std::vector<ReduceOp>& opsOf(DType dtype) {
  using enum ReduceOp;
  static const std::vector<ReduceOp> floats{kSum, kAvg, kMin, kMax, kProduct, kPremulSum};
  static const std::vector<ReduceOp> integers{kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor};
  static const std::vector<ReduceOp> truths{kSum, kMin, kMax, kProduct, kBand, kBor, kBxor};
  return isFloating(dtype) ? floats : dtype == DType::kBool ? truths : integers;
}

class Program {
 public:
  Program(ptx::Module lines, int gpu) : multicasts(gpu >= 90), lines_(std::move(lines)) {}

  const bool multicasts;  // its kernels have multimem

  const ptx::Kernel& kernel(const Which& which) {
    const std::string symbol = which.symbol();
    auto& kernel = kernels_[symbol];
    if (!kernel) {
      kernel = ptx::Parser(symbol).read(lines_.at(symbol));
    }
    return *kernel;
  }

 private:
  ptx::Module lines_;
  std::map<std::string, std::optional<ptx::Kernel>> kernels_;
};

// A case, drawn by its seed; of this kernel and operation if they are given.
void runCase(Program& program, uint64_t seed, std::optional<Which> which = {},
             std::optional<ReduceOp> op = {}) {
  std::mt19937_64 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const auto any = static_cast<DType>(below(kKernelDTypes));
  const DType type = which ? which->dtype : any;
  const auto& ops = opsOf(type);
  // Half of the cases are SUM or AVG, of which there are more kernels.
  const ReduceOp drawn = ops[below(2) == 0 ? below(2) : below(ops.size())];
  constexpr int kRanks[] = {2, 3, 2, 3, 2, 3, 4, 4, 2, 3, 2, 3, 2, 3, 4, 8};
  const int P = kRanks[below(std::size(kRanks))];
  const oracle::Case numbers(which && which->ranks > 0 ? which->ranks : P, type,
                             op.value_or(drawn));
  const int blocks = 1 + static_cast<int>(below(3) == 0);
  // Long slices fill the loops that take several packs, or several elements that are not aligned.
  const size_t slice = kChunkElements * (below(6) == 0 ? 32 : 1 + below(4));

  const DeviceLayout layout{
      .ranks = numbers.P,
      .channels = blocks,
      .slot_bytes = 4096 * 8,
      .depth = 4,
      .part_bytes = 4096 * 8,
      .ll_bytes = 2 * sizeof(float) *
                  roundUp(ceilDiv(oracle::kMost, static_cast<size_t>(blocks)), kChunkElements),
      .window_bytes = static_cast<size_t>(numbers.P * blocks) * slice * numbers.width()};
  // Counters that pass 2^64, too.
  host::Ranks ranks(layout, below(4) == 0 ? uint64_t{0} - below(3) : 0);
  Calls calls(ranks);
  std::vector<Which> kernels;
  const size_t count = 1 + below(3);
  for (size_t i = 0; i < count; ++i) {
    const auto any_algorithm = static_cast<DeviceAlgorithm>(below(3));
    Call call{.algorithm = which                            ? which->algorithm
                           : hasKernel(any_algorithm, type) ? any_algorithm
                                                            : kTwo,
              .numbers = &numbers,
              .count = 0};
    call.fixed = which ? which->ranks > 0 : call.canBeFixed() && below(4) > 0;
    call.located = which ? which->located : call.algorithm == kTwo && below(2) == 0;
    if (call.located)
      call.kind =
          which ? which->unit >= 0 ? Kind::kAllGather
                  : below(2) == 0  ? Kind::kAllReduce
                                   : Kind::kReduceScatter
                : std::array{Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather}[below(3)];
    if (call.kind == Kind::kAllGather) call.fixed = false;
    // Each tensor by a coin; and where ranks' tensors are at other offsets, some are not aligned.
    call.staged = static_cast<uint32_t>(random());
    call.ll = which ? which->ll : call.fixed && call.algorithm == kOne && below(2) == 0;
    // Up to some slices of each channel; any tail.
    const size_t most =
        std::min<size_t>(oracle::kMost, slice * static_cast<size_t>(blocks * numbers.P) * 3);
    call.nvls = which ? which->nvls
                      : program.multicasts && call.canBeNvls() && !call.located && below(2) == 0;
    call.fixed = call.fixed && !call.nvls;
    call.count = below(6) == 0                  ? below(40)
                 : slice > 512 && below(2) == 0 ? oracle::kMost - below(8)
                                                : below(most + 1);
    if (call.kind != Kind::kAllReduce) call.count /= static_cast<size_t>(numbers.P);
    call.blocks = blocks;
    call.slice = slice;
    call.window = 1 + below(2);
    call.in_place = below(2) == 0;
    call.place = static_cast<Alignment>(below(4));
    call.device_factor = below(2) == 0;
    calls.add(call);
    kernels.push_back({call.algorithm, type, call.fixed ? numbers.P : 0, call.located, call.ll,
                       call.nvls, call.moves() ? call.unit() : -1});
  }

  ptx::Machine machine(seed);
  const auto give = [&](const void* at, size_t bytes) {
    const auto begin = reinterpret_cast<uint64_t>(at);
    machine.ranges.push_back({begin, begin + bytes});
  };
  for (int r = 0; r < numbers.P; ++r) {
    const DeviceComm& comm = ranks.comm(r);
    give(comm.base[r], layout.bytes());
    give(&comm, sizeof comm);
    give(comm.local, sizeof *comm.local);
    give(comm.abort, sizeof *comm.abort);
    give(comm.trouble, sizeof *comm.trouble);
    give(comm.table, static_cast<size_t>(numbers.P) * kMostSegments * sizeof *comm.table);
    give(ranks.window(r).own, nvlink::Windows::kBytes);
  }
  const auto address = [](const std::byte* at) { return reinterpret_cast<uint64_t>(at); };
  machine.multicasts.push_back({address(ranks.window(0).everyone), nvlink::Windows::kBytes, {}});
  for (int r = 0; r < numbers.P; ++r)
    machine.multicasts[0].places.push_back(address(ranks.window(r).own));
  // One grid for all ranks, or one each, in each rank's stream.
  const bool together = below(2) == 0 && std::ranges::none_of(kernels, &Which::isRanks);
  std::vector<ptx::Grid> grids;
  for (size_t i = 0; i < count; ++i) {
    const ptx::Kernel& kernel = program.kernel(kernels[i]);
    const auto start = [&](const auto& launch, int blocks_of_it, int stream) {
      std::vector<unsigned char> arguments(sizeof launch);
      std::memcpy(arguments.data(), &launch, sizeof launch);
      grids.push_back({&kernel, arguments, blocks_of_it, stream});
    };
    std::vector<RanksLaunch> launches(together ? 1 : static_cast<size_t>(numbers.P));
    for (int r = 0; r < numbers.P; ++r) {
      const RankCall& call = calls.rankCall(i, r);
      const Call& of = calls.call(i);
      give(call.input, of.inputParts() * of.partBytes());
      give(call.output, of.outputParts() * of.partBytes());
      if (call.factor) give(call.factor, type == DType::kFloat64 ? 8 : 4);
      if (kernels[i].nvls) {
        start(NvlsLaunch{ranks.comm(r), call, ranks.window(r)}, blocks, r);
        continue;
      }
      if (kernels[i].isRanks()) {
        start(RankLaunch{ranks.comm(r), call, calls.location(i, r)}, blocks, r);
        continue;
      }
      RanksLaunch& launch = launches[together ? 0 : static_cast<size_t>(r)];
      launch.calls[together ? r : 0] = call;
      launch.ranks = together ? numbers.P : 1;
    }
    for (size_t s = 0; s < launches.size() && !kernels[i].isRanks(); ++s)
      start(launches[s], blocks * launches[s].ranks, static_cast<int>(s));
  }
  machine.threads = kThreads;
  machine.run(grids);
  calls.verify();
}

// --- Mutants -------------------------------------------------------------------------------------

struct Mutant {
  const char* what;
  Which kernel;
  ReduceOp op;
  const char* from;
  const char* by;  // "": the line is left out
  int nth;         // of the lines that have it, or one of these two
  int since = 0;   // the oldest GPU whose PTX has such lines
};
constexpr int kAll = -1, kLast = -2;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kAdd = ReduceOp::kSum;
const Mutant kMutants[] = {
    {"releases of flags are relaxed",
     {kOne, kF32},
     kAdd,
     "st.release.sys.u64",
     "st.relaxed.sys.u64",
     kAll},
    {"releases of flags are plain stores",
     {kTwo, kF32},
     kAdd,
     "st.release.sys.u64",
     "st.u64",
     kAll},
    {"releases of flags are relaxed",
     {kRing, kF32},
     kAdd,
     "st.release.sys.u64",
     "st.relaxed.sys.u64",
     kAll},
    {"acquires of flags are relaxed",
     {kTwo, kF32},
     kAdd,
     "ld.acquire.sys.u64",
     "ld.relaxed.sys.u64",
     kAll},
    {"the arguments' barrier is dropped", {kOne, kF32}, kAdd, "bar.sync", "", 0},
    {"the barrier before a flag is dropped", {kOne, kF32}, kAdd, "bar.sync", "", 1},
    {"the barrier before a flag is dropped", {kTwo, kF32}, kAdd, "bar.sync", "", kAll},
    {"the tail of the sum is not stored", {kOne, kF32}, kAdd, "st.f32", "", kLast},
    {"releases of flags are relaxed",
     {kTwo, kF32, 2},
     kAdd,
     "st.release.sys.u64",
     "st.relaxed.sys.u64",
     kAll},
    {"acquires of flags are relaxed",
     {kOne, kF32, 4},
     kAdd,
     "ld.acquire.sys.u64",
     "ld.relaxed.sys.u64",
     kAll},
    {"words with their flags are plain stores",
     {kOne, kF32, 2, false, true},
     kAdd,
     "st.relaxed.sys.v2.u64",
     "st.v2.u64",
     kAll},
    {"flags of earlier calls are not stored",
     {kOne, kF32, 4, false, true},
     kAdd,
     "st.release.sys.u64",
     "",
     kAll},
    {"sums round towards zero",
     {kOne, kF32, 4, false, true},
     kAdd,
     "add.rn.f32",
     "add.rz.f32",
     kAll},
    {"flags are not stored", {kTwo, kF32, 2, true}, kAdd, "st.release.sys.u64", "", kAll},
    {"releases of flags are relaxed",
     {kTwo, kF32, 0, true},
     kAdd,
     "st.release.sys.u64",
     "st.relaxed.sys.u64",
     kAll},
    {"acquires of flags are relaxed",
     {kTwo, kF32, 2, true},
     kAdd,
     "ld.acquire.sys.u64",
     "ld.relaxed.sys.u64",
     kAll},
    {"releases of flags are relaxed",
     {kTwo, kF32, 0, true, false, false, 2},
     kAdd,
     "st.release.sys.u64",
     "st.relaxed.sys.u64",
     kAll},
    {"acquires of flags are relaxed",
     {kTwo, kF32, 0, true, false, false, 2},
     kAdd,
     "ld.acquire.sys.u64",
     "ld.relaxed.sys.u64",
     kAll},
    {"sums round towards zero", {kTwo, kF32, 4, true}, kAdd, "add.rn.f32", "add.rz.f32", kAll},
    {"the fence after the copy in is dropped",
     {kTwo, kF32, 0, false, false, true},
     kAdd,
     "fence.proxy.alias;",
     "",
     0,
     90},
    {"the fence after the sums is dropped",
     {kTwo, kF32, 0, false, false, true},
     kAdd,
     "fence.proxy.alias;",
     "",
     1,
     90},
    {"releases of flags are relaxed",
     {kTwo, DType::kBFloat16, 0, false, false, true},
     kAdd,
     "st.release.sys.u64",
     "st.relaxed.sys.u64",
     kAll,
     90},
    {"acquires of flags are relaxed",
     {kTwo, kF32, 0, false, false, true},
     kAdd,
     "ld.acquire.sys.u64",
     "ld.relaxed.sys.u64",
     kAll,
     90},
    {"the barrier before a flag is dropped",
     {kTwo, kF32, 0, false, false, true},
     kAdd,
     "bar.sync",
     "",
     kAll,
     90},
    {"sums are not stored",
     {kTwo, DType::kFloat16, 0, false, false, true},
     kAdd,
     "multimem.st.relaxed.sys.v4.f32",
     "",
     0,
     90},
    {"the tail of the sum is not stored", {kRing, kF32}, kAdd, "st.f32", "", kLast},
    {"sums round towards zero", {kOne, kF32}, kAdd, "add.rn.f32", "add.rz.f32", kAll},
    {"float16 rounds towards zero",
     {kTwo, DType::kFloat16},
     kAdd,
     "cvt.rn.f16.f32",
     "cvt.rz.f16.f32",
     kAll},
    {"bfloat16 rounds towards zero",
     {kTwo, DType::kBFloat16},
     kAdd,
     "cvt.rn.bf16.f32",
     "cvt.rz.bf16.f32",
     kAll,
     80},
};

// The module with a mistake in it, where it has that line.
std::optional<ptx::Module> mutated(ptx::Module module, const Mutant& mutant) {
  std::vector<std::string*> places;
  for (auto& [number, line] : module.at(mutant.kernel.symbol()))
    if (line.find(mutant.from) != std::string::npos) places.push_back(&line);
  if (mutant.nth >= static_cast<int>(places.size()) || places.empty()) return {};
  if (mutant.nth == kLast) places = {places.back()};
  if (mutant.nth >= 0) places = {places[static_cast<size_t>(mutant.nth)]};
  for (std::string* line : places) {
    if (*mutant.by)
      line->replace(line->find(mutant.from), std::strlen(mutant.from), mutant.by);
    else
      line->clear();
  }
  return module;
}

// What the first of some cases that fails says; "" if none does.
std::string failureOf(Program& program, const Mutant& mutant, uint64_t seed, int cases) {
  for (int i = 0; i < cases; ++i) try {
      runCase(program, seed + static_cast<uint64_t>(i), mutant.kernel, mutant.op);
    } catch (const std::exception& error) {
      return error.what();
    }
  return "";
}

int tryMutants(int gpu, const ptx::Module& module, uint64_t seed) {
  std::printf("Mistakes in the PTX for sm_%d:\n", gpu);
  int missed = 0;
  for (const Mutant& mutant : kMutants) {
    const std::string text = std::string(mutant.what) + ", " + mutant.kernel.text();
    if (gpu < mutant.since) {
      std::printf("%s: left out, sm_%d has no such instruction\n", text.c_str(), gpu);
      continue;
    }
    const auto with = mutated(module, mutant);
    if (!with) {
      std::printf("%s: the PTX has no such line\n", text.c_str());
      ++missed;
      continue;
    }
    constexpr int kCases = 20;
    Program program(*with, gpu), right(module, gpu);
    const std::string failure = failureOf(program, mutant, seed, kCases);
    // The same cases without the mistake; three tell whether they fail anyway.
    const std::string anyway = failureOf(right, mutant, seed, 3);
    std::printf("%s: %s\n", text.c_str(), failure.empty() ? "NOT NOTICED" : failure.c_str());
    if (!anyway.empty()) std::printf("  without the mistake too: %s\n", anyway.c_str());
    missed += failure.empty() || !anyway.empty();
  }
  return missed;
}

// --- The program ---------------------------------------------------------------------------------

constexpr const char* kUsage = "ptx_run FILE... [--cases N] [--seed S] [--mutants]";

// The PTX of all files, joined for each GPU.
ptx::Modules read(const std::vector<std::string>& files) {
  ptx::Modules all;
  for (const std::string& name : files) {
    std::ifstream file(name);
    ptx::Modules of = ptx::modulesOf(file);
    if (of.empty()) throw ptx::Error("no PTX in " + name);
    if (!all.empty() && !std::ranges::equal(all | std::views::keys, of | std::views::keys))
      throw ptx::Error(name + " has PTX for other GPUs than " + files.front() +
                       "; give the files of one build");
    for (auto& [gpu, module] : of) {
      all[gpu].merge(module);
      if (!module.empty())
        throw ptx::Error(name + " has the kernel " + module.begin()->first +
                         " of another file, too; give each file once");
    }
  }
  if (all.empty()) throw ptx::Error("no file is given");
  for (const auto& [gpu, module] : all)
    for (const Which& kernel : everyKernel())
      if (const std::string symbol = kernel.symbol(); !module.contains(symbol))
        throw ptx::Error("no kernel " + symbol + " for sm_" + std::to_string(gpu) +
                         "; give all files that have kernels of all-reduce");
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> files;
  uint64_t seed = 1;
  int cases = 30;
  bool mutants = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--mutants") {
      mutants = true;
    } else if (argument == "--seed" && i + 1 < argc) {
      seed = std::stoull(argv[++i]);
    } else if (argument == "--cases" && i + 1 < argc) {
      cases = std::stoi(argv[++i]);
    } else {
      files.push_back(argument);
    }
  }
  ptx::Modules modules;
  try {
    modules = read(files);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "No case is run: %s\n%s\n", error.what(), kUsage);
    return 2;
  }
  std::vector<Program> programs;
  for (const auto& [gpu, module] : modules) programs.emplace_back(module, gpu);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < cases; ++i) {
    const uint64_t one = seed + static_cast<uint64_t>(i);
    try {
      // By the seed, so that a case can be run again alone.
      runCase(programs[one % programs.size()], one);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "Seed %llu: %s\n", static_cast<unsigned long long>(one), error.what());
      return 1;
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%d cases passed in %.1f s, from seed %llu on\n", cases, took.count(),
              static_cast<unsigned long long>(seed));
  return mutants && tryMutants(modules.rbegin()->first, modules.rbegin()->second, seed) != 0;
}
