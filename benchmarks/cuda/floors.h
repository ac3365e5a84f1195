// How many bytes an all-reduce has to move through device memory, and so the least time it can take
// when all its ranks share one GPU.  Each figure is counted in the header of its algorithm.
//
// They are of one rank, for a message of `bytes` and P ranks.  A GPU's L2 keeps slots that are used
// again soon (60 MB on an H200), so a message of less than some 40 MB in all can be faster than
// what is here, and the profiler counts fewer bytes.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

#include "base/dtype.h"

namespace perf {

// What is compared: the algorithms, and the two ways to run the direct schedule and two-shot.
enum class Path { kDirect, kDirectStaged, kRing, kTwoShot, kOneShot, kZeroCopy, kLL };
inline constexpr std::array kPathNames{"direct",  "direct-staged", "ring", "twoshot",
                                       "oneshot", "zerocopy",      "ll"};
inline constexpr int kPaths = static_cast<int>(kPathNames.size());

constexpr const char* name(Path path) {
  return kPathNames[static_cast<size_t>(path)];
}
constexpr std::optional<Path> pathNamed(std::string_view name) {
  for (int i = 0; i < kPaths; ++i)
    if (name == kPathNames[static_cast<size_t>(i)]) return static_cast<Path>(i);
  return std::nullopt;
}
constexpr bool isDirect(Path path) {
  return path == Path::kDirect || path == Path::kDirectStaged;
}
constexpr bool takesMapped(Path path) {
  return path == Path::kDirect || path == Path::kZeroCopy;
}
// Whether there are only kernels in a launch a rank.
constexpr bool isFixed(Path path) {
  return path == Path::kZeroCopy || path == Path::kLL;
}

// `wire`: how many times as wide as the message the partial sums of a ring travel.
constexpr size_t bytesMoved(Path path, int ranks, size_t bytes, size_t wire = 1) {
  const auto p = static_cast<size_t>(ranks);
  switch (path) {
    case Path::kDirect:
    case Path::kZeroCopy:  // read once, written once
      return 2 * bytes;
    case Path::kDirectStaged:  // and copied into memory that peers map, and out of it
      return 6 * bytes;
    case Path::kRing:
      return (6 * p - 4 + 2 * (p - 1) * (wire - 1)) * bytes / p;
    case Path::kTwoShot:
      return (2 * p + 4 * (p - 1)) * bytes / p;
    case Path::kOneShot:
      return (2 * p + 1) * bytes;
    case Path::kLL:  // a flag beside each four bytes
      return (4 * p - 1) * bytes;
  }
  return 0;
}

// Halves travel round the ring as float32 until they are complete.
constexpr size_t wireOf(Path path, ringreduce::DType dtype) {
  return path == Path::kRing && ringreduce::isHalf(dtype) ? 2 : 1;
}

// Of all ranks together.
constexpr size_t bytesMovedByAll(Path path, int ranks, size_t bytes, ringreduce::DType dtype) {
  return static_cast<size_t>(ranks) * bytesMoved(path, ranks, bytes, wireOf(path, dtype));
}

// Microseconds, at so many bytes a second read and written.
constexpr double floorMicroseconds(Path path, int ranks, size_t bytes, ringreduce::DType dtype,
                                   double bytes_per_second) {
  return static_cast<double>(bytesMovedByAll(path, ranks, bytes, dtype)) / bytes_per_second * 1e6;
}

// What a rank would have to send and receive over wires of its own: nccl-tests' bus bandwidth.
constexpr double busBandwidth(double algorithm_bandwidth, int ranks) {
  return algorithm_bandwidth * 2 * (ranks - 1) / ranks;
}

namespace floors_check {
using ringreduce::DType;
constexpr size_t kMessage = 12 << 20;
constexpr size_t of(Path path, int ranks, size_t wire = 1) {
  return bytesMoved(path, ranks, kMessage, wire);
}
static_assert(of(Path::kDirect, 2) == 2 * kMessage && of(Path::kDirect, 8) == 2 * kMessage);
static_assert(of(Path::kDirectStaged, 4) == 3 * of(Path::kDirect, 4));
static_assert(of(Path::kRing, 2) == 4 * kMessage && of(Path::kRing, 4) == 5 * kMessage);
static_assert(of(Path::kTwoShot, 2) == 4 * kMessage && of(Path::kTwoShot, 4) == 5 * kMessage);
static_assert(of(Path::kOneShot, 2) == 5 * kMessage && of(Path::kOneShot, 4) == 9 * kMessage);
// A rank's way through a ring, step by step, in chunks: the first send; P-2 times receive, add,
// send; the last addition, which is also stored and sent; P-2 times receive, store, send; the end.
constexpr size_t ringByHand(size_t p, size_t w) {
  return (1 + w) + (p - 2) * (w + 1 + w) + (w + 1 + 2) + (p - 2) * 3 + 2;
}
static_assert(of(Path::kRing, 2) == ringByHand(2, 1) * kMessage / 2);
static_assert(of(Path::kRing, 3) == ringByHand(3, 1) * kMessage / 3);
static_assert(of(Path::kRing, 4, 2) == ringByHand(4, 2) * kMessage / 4);
// With an infinity of ranks a ring and two-shot move the same.
static_assert(of(Path::kRing, 1 << 20) <= 6 * kMessage &&
              of(Path::kTwoShot, 1 << 20) <= of(Path::kRing, 1 << 20));
static_assert(bytesMovedByAll(Path::kRing, 4, kMessage, DType::kBFloat16) ==
              4 * of(Path::kRing, 4, 2));
// 256 MiB at 4.3 TB/s: a quarter of a millisecond for 2 ranks, half a one for 4.
constexpr double kExample = floorMicroseconds(Path::kDirect, 4, 256 << 20, DType::kFloat32, 4.3e12);
static_assert(kExample > 499 && kExample < 500);
static_assert(busBandwidth(100, 2) == 100 && busBandwidth(100, 4) == 150);
static_assert(pathNamed("direct-staged") == Path::kDirectStaged && !pathNamed("tree"));
}  // namespace floors_check

}  // namespace perf
