// How fast the reduction kernels are in cache, for each instruction set that this CPU has.
//
//   reduce_perf [KiB per buffer, 256 unless given] [repetitions, 50 unless given]
//
// The figure is GB/s of memory traffic: P buffers read and one written, over the time of the
// fastest repetition.  dst is the first source, as in an all-reduce in place.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "best_of.h"
#include "reduce/kernels.h"

namespace {

using namespace ringreduce;

constexpr size_t kAlignment = 4096;

std::unique_ptr<char, decltype(&std::free)> makeBuffer(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  char* const buffer = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
  if (!buffer) std::abort();
  std::memset(buffer, 0,
              rounded);  // zeros stay zeros under SUM, so no repetition differs from another
  return {buffer, &std::free};
}

}  // namespace

int main(int argc, char** argv) {
  const int kib = argc > 1 ? std::atoi(argv[1]) : 256;
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 50;
  if (kib <= 0 || repetitions <= 0) {
    std::fprintf(stderr, "usage: %s [KiB per buffer] [repetitions]\n", argv[0]);
    return 2;
  }
  const size_t bytes = static_cast<size_t>(kib) << 10;

  constexpr int kMost = 16;
  std::vector<std::unique_ptr<char, decltype(&std::free)>> buffers;
  const void* sources[kMost];
  for (const void*& source : sources) {
    buffers.push_back(makeBuffer(bytes));
    source = buffers.back().get();
  }
  char* const dst = buffers[0].get();

  const double copy = secondsOf(repetitions, [&] { std::memcpy(dst, buffers[1].get(), bytes); });
  std::printf("%d KiB a buffer; GB/s read and written; memcpy %.0f\n\n", kib,
              2 * static_cast<double>(bytes) / copy * 1e-9);

  constexpr int kSizes[] = {2, 4, 8, 16};
  std::printf("%-10s %-10s", "set", "dtype");
  for (const int p : kSizes) std::printf("  SUM P=%-2d", p);
  std::printf("   AVG P=3   combine    finish\n");
  for (const KernelSet& set : kernelSets()) {
    if (!set.runs) continue;
    for (int type = 0; type < kReducibleDTypes; ++type) {
      const DType dtype = static_cast<DType>(type);
      const size_t n = bytes / sizeOf(dtype);
      const auto rate = [&](size_t traffic, double seconds) {
        std::printf(" %9.1f", static_cast<double>(traffic) / seconds * 1e-9);
      };
      std::printf("%-10s %-10s", set.name, name(dtype));
      const ReduceKernels& sum = *set.table(dtype, ReduceOp::kSum);
      for (const int p : kSizes) {
        rate((p + 1) * bytes, secondsOf(repetitions, [&] { sum.reduce(dst, sources, p, n, p); }));
      }
      if (const ReduceKernels* average = set.table(dtype, ReduceOp::kAvg)) {
        rate(4 * bytes, secondsOf(repetitions, [&] { average->reduce(dst, sources, 3, n, 3); }));
      } else {
        std::printf(" %9s", "-");
      }
      // Of a partial type twice as wide, half as many elements fill a buffer.
      const size_t partialSize = sizeOf(sum.partial);
      const size_t m = bytes / partialSize;
      rate(m * (2 * partialSize + sizeOf(dtype)),
           secondsOf(repetitions, [&] { sum.combine(dst, dst, sources[1], m); }));
      rate(m * (partialSize + 2 * sizeOf(dtype)),
           secondsOf(repetitions, [&] { sum.finish(dst, sources[1], sources[2], m, 2); }));
      std::printf("\n");
    }
  }
  return 0;
}
