// ringreduce_perf: all-reduce of the core alone, without torch and Python, its algorithms side by
// side.
//
//     ringreduce_perf [--ranks 2] [--sizes 1024,65536,...] [--algorithms direct,twoshot,ring]
//                     [--dtype float32] [--slot-bytes N] [--slots N] [--rounds 9]
//
// Ranks are threads, each with a group of its own for every algorithm; algorithms take turns round
// by round, and the median round counts.  The tables compare algorithms and slot sizes on one
// machine; for a comparison with other libraries, over processes and torch, there is
// ringreduce.bench.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "../tests/cpp/ranks.h"
#include "base/error.h"
#include "kernels/reduce.h"

using namespace ringreduce;

namespace {

struct Settings {
  int ranks = 2, rounds = 9;
  std::vector<size_t> sizes{1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 25 << 20, 256 << 20};
  std::vector<std::string> algorithms{"direct", "twoshot", "ring"};
  DType dtype = DType::kFloat32;
  SharedOptions shared;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) words.push_back(word);
  return words;
}

[[noreturn]] void usage(const std::string& why) {
  std::fprintf(stderr, "ringreduce_perf: %s (see the top of benchmarks/core_perf.cc)\n",
               why.c_str());
  std::exit(2);
}

Settings parse(int argc, char** argv) {
  Settings s;
  const auto argument = [&](int i) -> std::string {
    if (i + 1 >= argc) usage(std::string(argv[i]) + " wants a value");
    return argv[i + 1];
  };
  for (int i = 1; i + 1 < argc; i += 2)
    if (!std::strcmp(argv[i], "--ranks")) s.ranks = std::stoi(argument(i));
  s.shared = SharedOptions::fromEnvironment(s.ranks);
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i], value = argument(i);
    if (key == "--ranks") continue;
    if (key == "--rounds")
      s.rounds = std::stoi(value);
    else if (key == "--slot-bytes")
      s.shared.slot_bytes = std::stoul(value);
    else if (key == "--slots")
      s.shared.slots = std::stoi(value);
    else if (key == "--algorithms")
      s.algorithms = split(value);
    else if (key == "--sizes") {
      s.sizes.clear();
      for (const std::string& size : split(value)) s.sizes.push_back(std::stoul(size));
    } else if (key == "--dtype") {
      const auto named = std::ranges::find(kDTypes, value, &DTypeInfo::name);
      if (named == kDTypes.end() || named->numbers == NumberKind::kNone)
        usage("no dtype " + value + " that can be reduced");
      s.dtype = static_cast<DType>(named - kDTypes.begin());
    } else {
      usage("no option " + key);
    }
  }
  for (const std::string& algorithm : s.algorithms)
    if (!algorithmNamed(algorithm)) usage("no algorithm " + algorithm);
  return s;
}

// Seconds an all-reduce takes, by algorithm and round; filled by rank 0.
using Times = std::vector<std::vector<double>>;

Times measure(const Settings& s, size_t bytes) {
  Times times(s.algorithms.size());
  std::vector<ranks::MemoryStore> stores(s.algorithms.size());
  ranks::inThreads(s.ranks, [&](int r) {
    std::vector<std::shared_ptr<Group>> groups;
    for (size_t a = 0; a < s.algorithms.size(); ++a) {
      GroupOptions options;
      options.name = s.algorithms[a];
      options.shared = s.shared;
      options.shared->algorithm = *algorithmNamed(s.algorithms[a]);
      groups.push_back(Group::create(stores[a], r, s.ranks, options));
    }
    std::vector<std::byte> data(bytes);
    const Operation operation{
        AllReduce{data.data(), bytes / sizeOf(s.dtype), s.dtype, ReduceOp::kSum}};
    // About 50 ms a round, from one timed call; all ranks take rank 0's count.
    int64_t calls = 1;
    for (int warm = 0; warm < 2; ++warm) {
      const Nanos start = now();
      for (int i = 0; i < 3; ++i)
        for (const auto& group : groups) group->run(operation);
      calls = std::max<int64_t>(1, 50 * kMillisecond * 3 * static_cast<int64_t>(groups.size()) /
                                       std::max<Nanos>(1, now() - start));
    }
    groups[0]->run({Broadcast{&calls, 1, DType::kInt64, 0}});
    for (int round = 0; round < s.rounds; ++round)
      for (size_t a = 0; a < groups.size(); ++a) {
        groups[a]->run({Barrier{}});
        const Nanos start = now();
        for (int64_t i = 0; i < calls; ++i) groups[a]->run(operation);
        if (r == 0)
          times[a].push_back(static_cast<double>(now() - start) / kSecond /
                             static_cast<double>(calls));
      }
  });
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  const Settings s = parse(argc, argv);
  std::printf("# %d ranks (threads), %s, %s, slots: %d of %zu bytes, kernels: %s\n", s.ranks,
              name(s.dtype), "SUM", s.shared.slots, s.shared.slot_bytes, instructionSet());
  std::printf(
      "# time: median of %d rounds [least, most]; algbw = size/time; "
      "busbw = algbw * 2 (P-1)/P\n",
      s.rounds);
  std::printf("%12s %10s %12s %22s %9s %9s\n", "size (B)", "algorithm", "time (us)", "", "algbw",
              "busbw");
  try {
    for (size_t bytes : s.sizes) {
      Times times = measure(s, bytes);
      for (size_t a = 0; a < times.size(); ++a) {
        std::sort(times[a].begin(), times[a].end());
        const double median = times[a][times[a].size() / 2];
        const double algbw = static_cast<double>(bytes) / median / 1e9;
        std::printf("%12zu %10s %12.2f [%9.2f, %9.2f] %9.2f %9.2f\n", bytes,
                    s.algorithms[a].c_str(), median * 1e6, times[a].front() * 1e6,
                    times[a].back() * 1e6, algbw, algbw * 2 * (s.ranks - 1) / s.ranks);
      }
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "ringreduce_perf: %s\n", error.what());
    return 1;
  }
}
