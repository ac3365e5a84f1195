// The reduction kernels of every instruction set that this CPU has, against the oracle.
#include "kernels/reduce.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>

#include "check.h"
#include "reduce_oracle.h"

using namespace ringreduce;
using namespace oracle;

namespace {

constexpr size_t kSizes[] = {0, 1, 2, 7, 31, 127, 128, 129, 1000, kMost};
// Up to 8 sources are added in one pass, more of them 7 or 8 at a time.
constexpr int kCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, kMostSources};

std::string describe(const KernelSet& set, DType t, ReduceOp op, int count, size_t n) {
  return std::string(set.name) + " " + name(t) + " " + name(op) + " of " + std::to_string(count) +
         " sources, " + std::to_string(n) + " elements";
}
#define CHECK_SAME(t, a, b, n, what)                              \
  do {                                                            \
    if (!same(t, a, b, n)) check::fail(__FILE__, __LINE__, what); \
  } while (0)

// Calls body(set, dtype, op, kernels) for all that is supported.
template <class Body>
void forEachKernel(Body body) {
  for (size_t type = 0; type < kDTypes.size(); ++type) {
    for (int op = 0; op < kReduceOps; ++op) {
      const DType t = static_cast<DType>(type);
      const ReduceOp o = static_cast<ReduceOp>(op);
      if (!isSupported(t, o)) continue;
      for (const KernelSet& set : kernelSets()) {
        if (set.runs) body(set, t, o, *set.table(t, o));
      }
    }
  }
}

template <class Body>
void forEachSet(Body body) {
  for (const KernelSet& set : kernelSets()) {
    if (set.runs) body(set);
  }
}

// widen, combine, ..., finish, as a ring does it.
void chain(const ReduceKernels& kernels, void* dst, const void* const* sources, int count, size_t n,
           int worldSize) {
  Bytes partial(n * sizeOf(kernels.partial) + 1);
  kernels.widen(partial.data(), sources[0], n);
  for (int k = 1; k + 1 < count; ++k)
    kernels.combine(partial.data(), partial.data(), sources[k], n);
  kernels.finish(dst, partial.data(), sources[count - 1], n, worldSize);
}

// The same where the last source is a sum of others, which is not rounded yet.
void chainOfSums(const ReduceKernels& kernels, void* dst, const void* const* sources, int count,
                 size_t n, int worldSize) {
  Bytes partial(n * sizeOf(kernels.partial) + 1), last(partial);
  kernels.widen(partial.data(), sources[0], n);
  for (int k = 1; k + 1 < count; ++k)
    kernels.combine(partial.data(), partial.data(), sources[k], n);
  kernels.widen(last.data(), sources[count - 1], n);
  kernels.finishSums(dst, partial.data(), last.data(), n, worldSize);
}

// --- Tests ---------------------------------------------------------------------------------------

TEST(tables_hold_what_is_supported) {
  bool any = false;
  for (const KernelSet& set : kernelSets()) {
    any |= set.runs;
    for (size_t type = 0; type < kDTypes.size(); ++type) {
      for (int op = 0; op < kReduceOps; ++op) {
        const DType t = static_cast<DType>(type);
        const ReduceKernels* kernels = set.table(t, static_cast<ReduceOp>(op));
        CHECK_EQ(kernels != nullptr, isSupported(t, static_cast<ReduceOp>(op)));
        if (kernels) CHECK(kernels->partial == (isHalf(t) ? DType::kFloat32 : t));
      }
    }
  }
  CHECK(any);
}

TEST(reduce_and_chain_match_the_oracle) {
  for (size_t type = 0; type < kDTypes.size(); ++type) {
    const DType t = static_cast<DType>(type);
    if (!isReducible(t)) continue;
    const std::vector<Bytes> inputs = randomSources(t);
    const void* sources[kMostSources];
    for (int k = 0; k < kMostSources; ++k) sources[k] = inputs[k].data();
    for (int o = 0; o < kReduceOps; ++o) {
      const ReduceOp op = static_cast<ReduceOp>(o);
      if (!isSupported(t, op)) continue;
      for (const int count : kCounts) {
        const Bytes want = expected(t, op, inputs, count, count);
        forEachSet([&](const KernelSet& set) {
          const ReduceKernels& kernels = *set.table(t, op);
          for (const size_t n : kSizes) {
            const std::string what = describe(set, t, op, count, n);
            const size_t bytes = n * sizeOf(t);
            // The 64 bytes behind the end must stay as they are.
            Bytes got(bytes + 64, 0xa5), chained(bytes + 64, 0xa5);
            kernels.reduce(got.data(), sources, count, n, count);
            CHECK_SAME(t, got.data(), want.data(), n, what);
            if (count > 1) {
              chain(kernels, chained.data(), sources, count, n, count);
              CHECK_SAME(t, chained.data(), got.data(), n, what + ", chained");
              chainOfSums(kernels, chained.data(), sources, count, n, count);
              CHECK_SAME(t, chained.data(), got.data(), n, what + ", chained sums");
            } else {
              std::copy_n(got.begin(), bytes, chained.begin());
            }
            for (size_t i = bytes; i < bytes + 64; ++i) CHECK(got[i] == 0xa5 && chained[i] == 0xa5);
          }
        });
      }
    }
  }
}

// Every value of a small type; of a large one its ends, and multiples of the world size near them.
std::vector<int64_t> valuesToDivide(DType t, int world) {
  const int bits = static_cast<int>(8 * sizeOf(t));
  const int64_t most = static_cast<int64_t>(~uint64_t{0} >> (65 - bits));
  std::vector<int64_t> values;
  if (bits <= 16) {
    for (int64_t v = -most - 1; v <= most; ++v) values.push_back(v);
  } else {
    for (const int64_t near :
         {most, most / world * world, most / world / 2 * world, int64_t{world}}) {
      for (const int64_t v : {near, near - 1, -near, -near + 1, -near - 1}) values.push_back(v);
    }
  }
  return values;
}

TEST(average_of_integers_truncates_towards_zero) {
  forEachSet([](const KernelSet& set) {
    for (const DType t :
         {DType::kInt8, DType::kUInt8, DType::kInt16, DType::kInt32, DType::kInt64}) {
      for (const int world : {1, 2, 3, 5, 7, 10, 41, 47, 49, 55, 61, 64, 82, 98, 127, 128, 1000}) {
        const std::vector<int64_t> values = valuesToDivide(t, world);
        const size_t size = sizeOf(t);
        Bytes in(values.size() * size), out(in.size());
        for (size_t i = 0; i < values.size(); ++i) writeInteger(t, &in[i * size], values[i]);
        const void* sources[] = {in.data()};
        set.table(t, ReduceOp::kAvg)->reduce(out.data(), sources, 1, values.size(), world);
        for (size_t i = 0; i < in.size(); i += size) {
          if (readInteger(t, &out[i]) != readInteger(t, &in[i]) / world) {
            CHECK_EQ(std::to_string(readInteger(t, &in[i])) + " / " + std::to_string(world),
                     std::to_string(readInteger(t, &out[i])));
          }
        }
      }
    }
  });
}

TEST(any_alignment) {
  constexpr size_t n = 127;
  forEachKernel([](const KernelSet& set, DType t, ReduceOp op, const ReduceKernels& kernels) {
    const std::vector<Bytes> inputs = randomSources(t);
    const size_t bytes = n * sizeOf(t);
    for (int count = 2; count <= 5; ++count) {
      const Bytes want = expected(t, op, inputs, count, count);
      for (size_t offset = 0; offset < 64; ++offset) {
        std::vector<Bytes> moved(count);
        const void* sources[kMostSources];
        for (int k = 0; k < count; ++k) {
          const size_t shift = (offset * (k + 2) + k) % 64;
          moved[k].assign(shift + bytes, 0);
          std::copy_n(inputs[k].begin(), bytes, moved[k].begin() + shift);
          sources[k] = moved[k].data() + shift;
        }
        Bytes got(offset + bytes + 1, 0xa5);
        kernels.reduce(got.data() + offset, sources, count, n, count);
        CHECK_SAME(t, got.data() + offset, want.data(), n, describe(set, t, op, count, n));
        CHECK(got.back() == 0xa5 && (offset == 0 || got[offset - 1] == 0xa5));
        chain(kernels, got.data() + offset, sources, count, n, count);
        CHECK_SAME(t, got.data() + offset, want.data(), n, describe(set, t, op, count, n));
      }
    }
  });
}

TEST(dst_may_be_a_source) {
  forEachKernel([](const KernelSet& set, DType t, ReduceOp op, const ReduceKernels& kernels) {
    const std::vector<Bytes> inputs = randomSources(t);
    for (const int count : {1, 2, 3, 4, 6, 17}) {
      const Bytes want = expected(t, op, inputs, count, count);
      for (int own = 0; own < count; ++own) {
        for (const size_t n : {size_t{129}, kMost}) {
          Bytes mine = inputs[own];
          const void* sources[kMostSources];
          for (int k = 0; k < count; ++k) sources[k] = k == own ? mine.data() : inputs[k].data();
          kernels.reduce(mine.data(), sources, count, n, count);
          CHECK_SAME(t, mine.data(), want.data(), n, describe(set, t, op, count, n));
        }
      }
      if (count == 1) continue;
      Bytes mine = inputs[count - 1];
      const void* sources[kMostSources];
      for (int k = 0; k < count; ++k) sources[k] = inputs[k].data();
      sources[count - 1] = mine.data();
      chain(kernels, mine.data(), sources, count, kMost, count);  // finish with dst == own
      CHECK_SAME(t, mine.data(), want.data(), kMost, describe(set, t, op, count, kMost));
    }
  });
}

TEST(every_half_widens_exactly) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const DType t : {DType::kFloat16, DType::kBFloat16}) {
    forEachSet([&](const KernelSet& set) {
      const ReduceKernels& kernels = *set.table(t, ReduceOp::kSum);
      std::vector<uint32_t> wide(halves.size());
      kernels.widen(wide.data(), halves.data(), halves.size());
      for (size_t h = 0; h < halves.size(); ++h) {
        uint32_t want = 0;
        put(reinterpret_cast<unsigned char*>(&want), static_cast<float>(decodeHalf(t, halves[h])));
        if (std::isnan(decodeHalf(t, halves[h]))) {
          // float16: quieted, payload on top.  bfloat16: the same bits.
          want = t == DType::kBFloat16 ? halves[h] << 16
                                       : (h & 0x8000) << 16 | 0x7fc00000 | (h & 0x03ff) << 13;
        }
        CHECK_EQ(wide[h], want);
      }
      // There and back: only a NaN may change, by becoming quiet.
      std::vector<uint16_t> back(halves.size());
      const void* sources[] = {halves.data()};
      kernels.reduce(back.data(), sources, 1, halves.size(), 1);
      const int quiet = t == DType::kFloat16 ? 0x0200 : 0x0040;
      for (size_t h = 0; h < halves.size(); ++h) {
        const bool nan = std::isnan(decodeHalf(t, halves[h]));
        CHECK_EQ(back[h], halves[h] | (nan ? quiet : 0));
      }
    });
  }
}

TEST(float32_rounds_to_half_once_and_to_even) {
  for (const DType t : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<uint32_t> bits;
    const auto add = [&](double value) {
      uint32_t b;
      put(reinterpret_cast<unsigned char*>(&b), static_cast<float>(value));
      // The value and its neighbours, of both signs.
      for (const uint32_t near : {b - 1, b, b + 1}) {
        bits.push_back(near & 0x7fffffff);
        bits.push_back(near | 0x80000000);
      }
    };
    const int infinity = t == DType::kFloat16 ? 0x7c00 : 0x7f80;
    for (int h = 0; h < infinity; ++h) {
      const double value = decodeHalf(t, static_cast<uint16_t>(h));
      const double next = h + 1 < infinity
                              ? decodeHalf(t, static_cast<uint16_t>(h + 1))
                              : 2 * value - decodeHalf(t, static_cast<uint16_t>(h - 1));
      add(value);
      if ((value + next) / 2 <= std::numeric_limits<float>::max())
        add((value + next) / 2);  // a tie
    }
    for (const uint32_t b : {0x7f800000u, 0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7f802000u, 1u}) {
      bits.push_back(b);
      bits.push_back(b | 0x80000000);
    }
    std::mt19937 random(7);
    for (int i = 0; i < 500000; ++i) bits.push_back(static_cast<uint32_t>(random()));

    // The smaller of x and infinity is x, a signalling NaN as well: finish does nothing but round.
    const std::vector<uint16_t> infinities(bits.size(), static_cast<uint16_t>(infinity));
    std::vector<uint16_t> got(bits.size());
    forEachSet([&](const KernelSet& set) {
      const ReduceKernels& kernels = *set.table(t, ReduceOp::kMin);
      kernels.finish(got.data(), bits.data(), infinities.data(), bits.size(), 1);
      for (size_t i = 0; i < bits.size(); ++i) {
        float value;
        std::memcpy(&value, &bits[i], sizeof value);
        unsigned want = encodeHalf(t, value);
        if (std::isnan(value)) {  // quiet, with its sign and the upper bits of its payload
          want = t == DType::kBFloat16
                     ? bits[i] >> 16 | 0x0040
                     : (bits[i] >> 16 & 0x8000) | 0x7e00 | (bits[i] >> 13 & 0x3ff);
        }
        CHECK_EQ(got[i], want);
      }
    });
  }
}

TEST(instruction_sets_agree_bit_for_bit) {
  std::vector<const KernelSet*> sets;
  forEachSet([&](const KernelSet& set) { sets.push_back(&set); });
  forEachKernel([&](const KernelSet& set, DType t, ReduceOp op, const ReduceKernels& kernels) {
    if (&set == sets[0]) return;
    const std::vector<Bytes> inputs = randomSources(t);
    const void* sources[kMostSources];
    for (int k = 0; k < kMostSources; ++k) sources[k] = inputs[k].data();
    for (const int count : kCounts) {
      Bytes a(kMost * sizeOf(t)), b = a;
      // A world size of its own: AVG divides by what it is told, not by the number of sources.
      sets[0]->table(t, op)->reduce(a.data(), sources, count, kMost, count + 5);
      kernels.reduce(b.data(), sources, count, kMost, count + 5);
      CHECK_SAME(t, a.data(), b.data(), kMost, describe(set, t, op, count, kMost));
      Bytes wide(kMost * sizeOf(kernels.partial)), wide2 = wide;
      sets[0]->table(t, op)->combine(wide.data(), inputs[0].data(), inputs[1].data(), kMost / 2);
      kernels.combine(wide2.data(), inputs[0].data(), inputs[1].data(), kMost / 2);
      CHECK_SAME(kernels.partial, wide.data(), wide2.data(), kMost / 2,
                 describe(set, t, op, 2, kMost / 2));
    }
  });
}

TEST(scale_multiplies_and_rounds_once) {
  for (const DType t : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const Bytes in = randomSources(t)[0];
    for (const double factor : {1.0, 0.5, 1.0 / 3, -1e-5, 1e10, 0.0}) {
      Bytes want(in.size());
      for (size_t at = 0; at < in.size(); at += sizeOf(t)) {
        writeFloat(t, &want[at], round(t, readFloat(t, &in[at]) * round(t, factor)));
      }
      forEachSet([&](const KernelSet& set) {
        for (const size_t n : kSizes) {
          Bytes got(in.size(), 0xa5), self = in;
          set.scale(t, got.data(), in.data(), n, factor);
          set.scale(t, self.data(), self.data(), n, factor);
          const std::string what = std::string(set.name) + " " + name(t) + " scale";
          CHECK_SAME(t, got.data(), want.data(), n, what);
          CHECK_SAME(t, self.data(), want.data(), n, what);
          CHECK(n == kMost || got[n * sizeOf(t)] == 0xa5);
        }
      });
    }
  }
}

// What a fresh process chooses with RINGREDUCE_ISA set so, followed by what it says on stderr.
std::string chosenWith(const char* wish) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    dup2(ends[1], 2);
    setenv("RINGREDUCE_ISA", wish, 1);
    const char* const set = instructionSet();
    reduceKernels(DType::kFloat32, ReduceOp::kSum);  // a second use warns no second time
    (void)!write(2, set, std::strlen(set));
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char buffer[256];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, got);
  close(ends[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return said;
}

TEST(environment_chooses_the_instruction_set) {
  const char* widest = nullptr;
  forEachSet([&](const KernelSet& set) { widest = set.name; });
  forEachSet([](const KernelSet& set) { CHECK_EQ(chosenWith(set.choice), std::string(set.name)); });
  CHECK_EQ(chosenWith(""), std::string(widest));
  const std::string said = chosenWith("v9");
  CHECK(said.starts_with("ringreduce: RINGREDUCE_ISA=v9 "));
  CHECK(said.ends_with(std::string("\n") + widest));
  CHECK_EQ(std::count(said.begin(), said.end(), '\n'), 1);
}

}  // namespace
