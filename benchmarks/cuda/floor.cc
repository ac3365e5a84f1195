// floor: how fast this GPU copies, which nothing that moves bytes exceeds, and what each algorithm
// can reach at most.
#include <cstdio>

#include "bench.h"

namespace perf {

int runFloor(const Settings& settings) {
  std::printf("# one GPU copies, bytes read and written\n%12s %9s [%8s,%9s] %9s\n", "size(B)",
              "time(us)", "least", "most", "GB/s");
  double best = 0;
  for (size_t bytes : settings.sizes) {
    if (!fits(1, bytes)) {
      std::printf("# without %zu bytes: this GPU has not enough free memory for it\n", bytes);
      continue;
    }
    const Times times = copyTimes(bytes, settings.rounds);
    const double rate = 2 * algorithmBandwidth(bytes, times.median);
    best = std::max(best, rate);
    std::printf("%12zu %9s [%8s,%9s] %9.0f\n", bytes, shortNumber(times.median).c_str(),
                shortNumber(times.least).c_str(), shortNumber(times.most).c_str(), rate);
    Json line;
    line.add("mode", "floor").add("ranks", 1).add("sharing", false).add("algorithm", "copy");
    line.add("dtype", "float32").add("op", "SUM").add("bytes", bytes).add("time_us", times);
    line.add("algbw", rate / 2).add("busbw", rate).add("wrong", 0);
    append(settings.json, line);
  }
  if (best == 0) return kNotPossible;
  const size_t bytes = settings.sizes.back();
  for (int ranks : settings.ranks) {
    std::printf("%s\n%-14s %14s %14s %10s\n",
                titleOf(ranks, 1,
                        "the least time of float32 at " + std::to_string(bytes) +
                            " bytes, with that bandwidth")
                    .c_str(),
                "algorithm", "bytes a rank", "floor(us)", "busbw");
    for (int i = 0; i < kPaths; ++i) {
      const auto path = static_cast<Path>(i);
      const double floor = floorMicroseconds(path, ranks, bytes, DType::kFloat32, best * 1e9);
      const double busbw = busBandwidth(algorithmBandwidth(bytes, floor), ranks);
      const size_t moved = bytesMoved(path, ranks, bytes);
      std::printf("%-14s %14zu %14.1f %10.0f\n", name(path), moved, floor, busbw);
      Json line;
      line.add("mode", "floor").add("ranks", ranks).add("sharing", true);
      line.add("algorithm", name(path)).add("dtype", "float32").add("op", "SUM");
      line.add("bytes", bytes).add("time_us", Times{floor, floor, floor});
      line.add("algbw", algorithmBandwidth(bytes, floor)).add("busbw", busbw).add("wrong", 0);
      line.add("floor_us", floor).add("computed", true);
      append(settings.json, line);
    }
  }
  return kOk;
}

}  // namespace perf
