// The reduction kernels.  This file is compiled once for each instruction set, with RINGREDUCE_ISA
// set to the end of the namespace that its two functions go to: kernels_v3::table,
// kernels_v3::scale.
//
// There is one loop, `fold`.  A kernel is that loop with a load, an operation, a last step and a
// store; the tables at the end name them all.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/dtype.h"
#include "kernels/reduce.h"
#include "kernels/tile.h"

#define RINGREDUCE_JOIN(a, b) a##b
#define RINGREDUCE_JOIN_VALUES(a, b) RINGREDUCE_JOIN(a, b)
#define RINGREDUCE_NAMESPACE RINGREDUCE_JOIN_VALUES(kernels_, RINGREDUCE_ISA)

namespace ringreduce {
namespace {

// --- Operations: the accumulator first, the next source second -----------------------------------

struct Sum {
  template <class V>
  RINGREDUCE_INLINE static V of(V sum, V next) {
    return sum + next;
  }
};

struct Product {
  template <class V>
  RINGREDUCE_INLINE static V of(V product, V next) {
    return product * next;
  }
};

struct And {
  template <class V>
  RINGREDUCE_INLINE static V of(V bits, V next) {
    return bits & next;
  }
};

struct Or {
  template <class V>
  RINGREDUCE_INLINE static V of(V bits, V next) {
    return bits | next;
  }
};

struct Xor {
  template <class V>
  RINGREDUCE_INLINE static V of(V bits, V next) {
    return bits ^ next;
  }
};

// As torch.minimum and torch.maximum: a NaN on either side is the result.  Of equal values the
// first stays, which decides between 0 and -0.  T is the type compared, for integers with its sign.
template <class T>
struct Min {
  template <class V>
  RINGREDUCE_INLINE static V of(V least, V next) {
    const auto a = reinterpret_cast<Vector<T>>(least), b = reinterpret_cast<Vector<T>>(next);
    return ((b < a) | (b != b)) ? next : least;
  }
};

template <class T>
struct Max {
  template <class V>
  RINGREDUCE_INLINE static V of(V greatest, V next) {
    const auto a = reinterpret_cast<Vector<T>>(greatest), b = reinterpret_cast<Vector<T>>(next);
    return ((b > a) | (b != b)) ? next : greatest;
  }
};

// --- Last steps ----------------------------------------------------------------------------------

struct Keep {
  template <class T>
  RINGREDUCE_INLINE Tile<T> operator()(Tile<T> tile) const {
    return tile;
  }
};

template <class T>
struct MultiplyBy {
  T factor;
  RINGREDUCE_INLINE Tile<T> operator()(Tile<T> tile) const {
    return {tile.lo * factor, tile.hi * factor};
  }
};

template <class T>
struct DivideBy {
  T divisor;
  RINGREDUCE_INLINE Tile<T> operator()(Tile<T> tile) const {
    return {tile.lo / divisor, tile.hi / divisor};
  }
};

// T is the integer type with its sign.
template <class T>
struct TruncatingDivideBy {
  int divisor;

  template <class Lane>
  RINGREDUCE_INLINE Tile<Lane> operator()(Tile<Lane> tile) const {
    T lanes[sizeof tile / sizeof(T)];
    __builtin_memcpy(lanes, &tile, sizeof tile);
    for (T& value : lanes) value = quotient(value);
    __builtin_memcpy(&tile, lanes, sizeof tile);
    return tile;
  }

 private:
  // CPUs divide vectors of floating-point numbers only.  Where those hold twice the bits of the
  // integer, a quotient below a whole number is never rounded up to it.
  RINGREDUCE_INLINE T quotient(T value) const {
    if constexpr (sizeof(T) == 1) {
      return static_cast<T>(static_cast<float>(value) / static_cast<float>(divisor));
    } else if constexpr (sizeof(T) < 8) {
      return static_cast<T>(static_cast<double>(value) / divisor);
    } else {
      return value / divisor;
    }
  }
};

// --- The loop ------------------------------------------------------------------------------------

// dst[i] = finish(sources[0][i] (op) sources[1][i] (op) ...): the first source is of element First,
// the others of Rest, dst of Out.  kCount is the number of sources, or 0 to take `count`.
//
// All of a tile is read before any of it is written, so dst may be one of the sources.
template <class Out, class First, class Rest, class Op, int kCount, class Finish>
void fold(void* dst, const void* const* sources, int count, size_t n, Finish finish) {
  using Lane = typename First::Lane;
  constexpr size_t kStep = kTileLanes<Lane>;
  if constexpr (kCount > 0) count = kCount;

  // A local copy: the compiler must assume that a store to dst changes `sources`.
  const char* fixed[kCount > 0 ? kCount : 1];
  if constexpr (kCount > 0) {
    for (int k = 0; k < kCount; ++k) fixed[k] = static_cast<const char*>(sources[k]);
  }
  const auto source = [&](int k) {
    if constexpr (kCount > 0) return fixed[k];
    return static_cast<const char*>(sources[k]);
  };
  char* const out = static_cast<char*>(dst);

  size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    Tile<Lane> result = First::load(source(0) + i * First::kBytes);
    for (int k = 1; k < count; ++k) {
      const Tile<Lane> next = Rest::load(source(k) + i * Rest::kBytes);
      result = {Op::of(result.lo, next.lo), Op::of(result.hi, next.hi)};
    }
    Out::store(out + i * Out::kBytes, finish(result));
  }

  // The last elements go through a tile padded with zeros.
  const size_t rest = n - i;
  if (rest == 0) return;
  char padded[2 * kVectorBytes] = {};
  __builtin_memcpy(padded, source(0) + i * First::kBytes, rest * First::kBytes);
  Tile<Lane> result = First::load(padded);
  for (int k = 1; k < count; ++k) {
    __builtin_memcpy(padded, source(k) + i * Rest::kBytes, rest * Rest::kBytes);
    const Tile<Lane> next = Rest::load(padded);
    result = {Op::of(result.lo, next.lo), Op::of(result.hi, next.hi)};
  }
  Out::store(padded, finish(result));
  __builtin_memcpy(out + i * Out::kBytes, padded, rest * Out::kBytes);
}

// --- The kernels of reduce.h ---------------------------------------------------------------------

// The last step of AVG, for element type T (with its sign).  Calls body(step).
template <class T>
struct Average {
  template <class Body>
  static void with(int worldSize, Body body) {
    if constexpr (static_cast<T>(0.5) == 0) {
      body(TruncatingDivideBy<T>{worldSize});
    } else if ((worldSize & (worldSize - 1)) == 0) {
      // The reciprocal of a power of two is exact, so this gives the bits of the quotient, faster.
      body(MultiplyBy<T>{T{1} / static_cast<T>(worldSize)});
    } else {
      body(DivideBy<T>{static_cast<T>(worldSize)});
    }
  }
};

struct Nothing {
  template <class Body>
  static void with(int, Body body) {
    body(Keep{});
  }
};

template <class E>
void widen(void* dst, const void* src, size_t n) {
  fold<typename E::Partial, E, E, Sum, 1>(dst, &src, 1, n, Keep{});
}

template <class E, class Op>
void combine(void* dst, const void* partial, const void* own, size_t n) {
  using Partial = typename E::Partial;
  const void* const sources[] = {partial, own};
  fold<Partial, Partial, E, Op, 2>(dst, sources, 2, n, Keep{});
}

template <class E, class Op, class LastStep>
void finish(void* dst, const void* partial, const void* own, size_t n, int worldSize) {
  const void* const sources[] = {partial, own};
  LastStep::with(worldSize, [&](auto step) {
    fold<E, typename E::Partial, E, Op, 2>(dst, sources, 2, n, step);
  });
}

template <class E, class Op, class LastStep>
void finishSums(void* dst, const void* a, const void* b, size_t n, int worldSize) {
  using Partial = typename E::Partial;
  const void* const sources[] = {a, b};
  LastStep::with(worldSize,
                 [&](auto step) { fold<E, Partial, Partial, Op, 2>(dst, sources, 2, n, step); });
}

// More sources than a first-level cache has ways (at least 8) evict each other's lines if all begin
// at the same offset in a page, as slots do.  So a few are added at a time, block by block, with
// the partial result in cache.  Up to 8 sources this would only cost time.
constexpr int kMostAtOnce = 8;
constexpr size_t kBlock = 1024;  // elements; a multiple of every tile

template <class E, class Op, class Finish>
void foldInGroups(void* dst, const void* const* sources, int count, size_t n, Finish finish) {
  using Partial = typename E::Partial;
  alignas(kVectorBytes) char partial[kBlock * Partial::kBytes];
  const void* group[kMostAtOnce];
  for (size_t i = 0; i < n; i += kBlock) {
    const size_t m = n - i < kBlock ? n - i : kBlock;
    int next = 0;
    const auto gather = [&](int from, int to) {
      for (int k = from; k < to; ++k) {
        group[k] = static_cast<const char*>(sources[next++]) + i * E::kBytes;
      }
      return to;
    };
    fold<Partial, E, E, Op, 0>(partial, group, gather(0, kMostAtOnce), m, Keep{});
    group[0] = partial;
    while (count - next >= kMostAtOnce) {
      fold<Partial, Partial, E, Op, 0>(partial, group, gather(1, kMostAtOnce), m, Keep{});
    }
    char* const out = static_cast<char*>(dst) + i * E::kBytes;
    fold<E, Partial, E, Op, 0>(out, group, gather(1, 1 + count - next), m, finish);
  }
}

template <class E, class Op, class LastStep>
void reduce(void* dst, const void* const* sources, int count, size_t n, int worldSize) {
  LastStep::with(worldSize, [&](auto step) {
    switch (count) {
      case 1:
        return fold<E, E, E, Op, 1>(dst, sources, count, n, step);
      case 2:
        return fold<E, E, E, Op, 2>(dst, sources, count, n, step);
      case 3:
        return fold<E, E, E, Op, 3>(dst, sources, count, n, step);
      case 4:
        return fold<E, E, E, Op, 4>(dst, sources, count, n, step);
      default:
        if (count > kMostAtOnce) return foldInGroups<E, Op>(dst, sources, count, n, step);
        return fold<E, E, E, Op, 0>(dst, sources, count, n, step);
    }
  });
}

// --- The tables ----------------------------------------------------------------------------------

// One for each dtype that can be reduced.  Element: how it is loaded and stored.  Value: the type
// that is compared and divided.
template <DType type>
struct TypeOf;
template <class E, class T>
struct Is {
  using Element = E;
  using Value = T;
};
template <>
struct TypeOf<DType::kFloat32> : Is<Plain<float>, float> {};
template <>
struct TypeOf<DType::kFloat64> : Is<Plain<double>, double> {};
template <>
struct TypeOf<DType::kFloat16> : Is<Float16, float> {};
template <>
struct TypeOf<DType::kBFloat16> : Is<BFloat16, float> {};
template <>
struct TypeOf<DType::kInt8> : Is<Plain<uint8_t>, int8_t> {};
template <>
struct TypeOf<DType::kUInt8> : Is<Plain<uint8_t>, uint8_t> {};
template <>
struct TypeOf<DType::kInt16> : Is<Plain<uint16_t>, int16_t> {};
template <>
struct TypeOf<DType::kInt32> : Is<Plain<uint32_t>, int32_t> {};
template <>
struct TypeOf<DType::kInt64> : Is<Plain<uint64_t>, int64_t> {};
template <>
struct TypeOf<DType::kBool> : Is<Bool, uint8_t> {};

template <DType type, class Op, class LastStep = Nothing>
constexpr ReduceKernels kernelsOf() {
  using E = typename TypeOf<type>::Element;
  return {isHalf(type) ? DType::kFloat32 : type,
          widen<E>,
          combine<E, Op>,
          finish<E, Op, LastStep>,
          finishSums<E, Op, LastStep>,
          reduce<E, Op, LastStep>};
}

template <DType type, ReduceOp op>
constexpr ReduceKernels supportedEntry() {
  using T = typename TypeOf<type>::Value;
  constexpr bool kTruth = numberKindOf(type) == NumberKind::kTruth;
  if constexpr (op == ReduceOp::kBor || (kTruth && op == ReduceOp::kSum) ||
                (kTruth && op == ReduceOp::kMax)) {
    return kernelsOf<type, Or>();
  } else if constexpr (op == ReduceOp::kBand || (kTruth && op == ReduceOp::kProduct) ||
                       (kTruth && op == ReduceOp::kMin)) {
    return kernelsOf<type, And>();
  } else if constexpr (op == ReduceOp::kBxor) {
    return kernelsOf<type, Xor>();
  } else if constexpr (op == ReduceOp::kAvg) {
    return kernelsOf<type, Sum, Average<T>>();
  } else if constexpr (op == ReduceOp::kMin) {
    return kernelsOf<type, Min<T>>();
  } else if constexpr (op == ReduceOp::kMax) {
    return kernelsOf<type, Max<T>>();
  } else if constexpr (op == ReduceOp::kProduct) {
    return kernelsOf<type, Product>();
  } else {
    static_assert(op == ReduceOp::kSum || op == ReduceOp::kPremulSum);
    return kernelsOf<type, Sum>();
  }
}

template <DType type, ReduceOp op>
constexpr ReduceKernels entry() {
  if constexpr (isSupported(type, op))
    return supportedEntry<type, op>();
  else
    return {};
}

struct Table {
  ReduceKernels entries[kDTypes.size() * kReduceOps];
};

template <size_t... indices>
constexpr Table makeTable(std::index_sequence<indices...>) {
  return {{entry<static_cast<DType>(indices / kReduceOps),
                 static_cast<ReduceOp>(indices % kReduceOps)>()...}};
}

constexpr Table kTable = makeTable(std::make_index_sequence<kDTypes.size() * kReduceOps>());

template <DType type>
void scaleBy(void* dst, const void* src, size_t n, double factor) {
  if constexpr (isFloating(type)) {
    using E = typename TypeOf<type>::Element;
    using T = typename TypeOf<type>::Value;
    fold<E, E, E, Sum, 1>(dst, &src, 1, n, MultiplyBy<T>{static_cast<T>(factor)});
  }
}

using Scale = void (*)(void* dst, const void* src, size_t n, double factor);
struct Scales {
  Scale of[kDTypes.size()];
};

template <size_t... types>
constexpr Scales makeScales(std::index_sequence<types...>) {
  return {{scaleBy<static_cast<DType>(types)>...}};
}

constexpr Scales kScales = makeScales(std::make_index_sequence<kDTypes.size()>());

}  // namespace

namespace RINGREDUCE_NAMESPACE {

const ReduceKernels* table(DType dtype, ReduceOp op) {
  const ReduceKernels& found =
      kTable.entries[static_cast<int>(dtype) * kReduceOps + static_cast<int>(op)];
  return found.reduce ? &found : nullptr;
}

// dispatch.cc passes floating dtypes only.
void scale(DType dtype, void* dst, const void* src, size_t n, double factor) {
  kScales.of[static_cast<size_t>(dtype)](dst, src, n, factor);
}

}  // namespace RINGREDUCE_NAMESPACE
}  // namespace ringreduce
