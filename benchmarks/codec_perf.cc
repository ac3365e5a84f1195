// How fast the codecs are in cache, on one core, for each instruction set that this CPU has.
//
//   codec_perf [KiB of float32, 64 unless given] [repetitions, 50 unless given]
//
// The figure is GB/s of float32: 4 bytes an element, over the time of the fastest repetition.  The
// values are normally distributed.  "error": what was lost is written too; "random": stochastic
// rounding.  Beside it stands the addition of float32 (P=2), in the same unit.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "best_of.h"
#include "codec/kernels.h"
#include "reduce/kernels.h"

using namespace ringreduce;

int main(int argc, char** argv) {
  const int kib = argc > 1 ? std::atoi(argv[1]) : 64;
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 50;
  if (kib <= 0 || repetitions <= 0) {
    std::fprintf(stderr, "usage: %s [KiB of float32] [repetitions]\n", argv[0]);
    return 2;
  }
  const size_t n = static_cast<size_t>(kib) * 1024 / sizeof(float);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(n), error(n), out(n);
  for (float& value : values) value = normal(random);

  std::printf("%d KiB of float32; GB/s of it\n\n", kib);
  std::printf("%-10s %-9s %8s %8s %8s %8s %8s %8s\n", "set", "codec", "encode", "+error", "+random",
              "+both", "decode", "add");
  const std::span<const KernelSet> reduce = kernelSets();
  for (size_t i = 0; i < reduce.size(); ++i) {
    const CodecSet& set = codecSets()[i];
    if (!set.runs) continue;
    const auto rate = [&](auto body) {
      std::printf(" %8.1f",
                  static_cast<double>(n * sizeof(float)) / secondsOf(repetitions, body) * 1e-9);
    };
    for (int c = 0; c < kCodecs; ++c) {
      const Codec codec = static_cast<Codec>(c);
      const CodecKernels& kernels = set.kernels(codec);
      std::vector<std::byte> coded(codedBytes(codec, n));
      const Draw draw{.seed = 1, .first = 0};
      std::printf("%-10s %-9s", set.name, name(codec));
      rate([&] { kernels.encode(coded.data(), nullptr, values.data(), n, nullptr); });
      rate([&] { kernels.encode(coded.data(), error.data(), values.data(), n, nullptr); });
      rate([&] { kernels.encode(coded.data(), nullptr, values.data(), n, &draw); });
      rate([&] { kernels.encode(coded.data(), error.data(), values.data(), n, &draw); });
      rate([&] {
        if (!kernels.decode(out.data(), coded.data(), coded.size(), n)) std::abort();
      });
      rate([&] {
        if (!kernels.decodeAdd(out.data(), coded.data(), coded.size(), n)) std::abort();
      });
      std::printf("\n");
    }
    const ReduceKernels& sum = *reduce[i].table(DType::kFloat32, ReduceOp::kSum);
    std::printf("%-10s %-9s %44s", set.name, "float32", "");
    rate([&] { sum.combine(out.data(), out.data(), values.data(), n); });
    std::printf("\n");
  }
  return 0;
}
