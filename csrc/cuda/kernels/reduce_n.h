// One pass over elements: every source is read once, every sink written once.
//
//     sinks[i] = finish(source 0 [i] (op) source 1 [i] (op) ...)
//
// A thread reads several packs of 16 bytes before it uses the first, to hide the memory's latency;
// threads of a block read neighbouring packs.  If the number of sources is known when it is
// compiled, the thread reads packs of all of them before it adds the first two.  Where a pointer is
// not aligned to 16 bytes, elements go one by one (threads still take neighbouring ones, so the
// memory moves the same bytes); where all are off by the same amount, only the first few do, and
// always the last few.
//
// Bytes moved: (sources + sinks) * n elements, each of its size on its wire.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/elements.h"
#include "cuda/kernels/thread_block.h"

namespace ringreduce::cuda {

// Operations on elements besides combining them.
struct Arithmetic {
  Combine combine;
  bool divide;  // AVG: by the world size, last
  bool scale;   // PREMUL_SUM: this rank's own addends by `factor`, first
  int world_size;
  double factor;
};

// SUM, or AVG over a number of ranks that is a power of two, of floating-point elements: then a
// product with 1 / ranks has the bits of the division, and takes one instruction.
struct PlainSum {
  bool divide;
  float inverse;
};

// ---- how elements lie in memory

// In the dtype itself: users' memory, finished values, and addends of the push algorithms.
template <class E>
struct AsStored {
  using Memory = typename E::Stored;
  RINGREDUCE_DEVICE static typename E::Value decode(Memory m) { return E::widen(m); }
  RINGREDUCE_DEVICE static Memory encode(typename E::Value v) { return E::narrow(v); }
};

// Unrounded: partial sums on their way round a ring.
template <class E>
struct AsValue {
  using Memory = typename E::Value;
  RINGREDUCE_DEVICE static Memory decode(Memory m) { return m; }
  RINGREDUCE_DEVICE static Memory encode(Memory v) { return v; }
};

// Bits to copy.  As integers, since loading and storing a float may change a NaN.
template <size_t bytes>
struct Raw {
  using Stored = std::conditional_t<
      bytes == 1, uint8_t,
      std::conditional_t<bytes == 2, uint16_t, std::conditional_t<bytes == 4, uint32_t, uint64_t>>>;
  using Value = Stored;
  static constexpr bool kFloating = false, kComputes = false;
  RINGREDUCE_DEVICE static Value widen(Stored s) { return s; }
  RINGREDUCE_DEVICE static Stored narrow(Value v) { return v; }
};

// ---- where they lie

// A few pointers to the same elements.  Algorithms pass others of the same form that compute
// pointers from a rank's number, since an array indexed at run time would lie in local memory.  If
// their number is known at run time only, kCount is 0; sinks may be fewer than it says.
template <int n>
struct Spans {
  std::byte* at[n];
  static constexpr int kCount = n;
  RINGREDUCE_DEVICE int count() const { return n; }
  RINGREDUCE_DEVICE std::byte* operator()(int k) const { return at[k]; }
};
template <int n>
struct ConstSpans {
  const std::byte* at[n];
  int own = -1;  // which of them holds this rank's own addends, not scaled yet
  static constexpr int kCount = n;
  RINGREDUCE_DEVICE int count() const { return n; }
  RINGREDUCE_DEVICE const std::byte* operator()(int k) const { return at[k]; }
};

// ---- the pass

template <class Memory, int n, class Block>
RINGREDUCE_DEVICE void read(Block& block, const std::byte* from, size_t element, Memory (&out)[n]) {
  const auto* p = reinterpret_cast<const Memory*>(from) + element;
  if constexpr (n == 1) {
    out[0] = block.load(p);
  } else {
    constexpr int kPer = sizeof(Pack) / sizeof(Memory);
    RINGREDUCE_UNROLL for (int i = 0; i < n; i += kPer) {
      const Pack pack = block.load(reinterpret_cast<const Pack*>(p + i));
      std::memcpy(&out[i], &pack, sizeof pack);
    }
  }
}

template <class Memory, int n, class Block>
RINGREDUCE_DEVICE void write(Block& block, std::byte* to, size_t element, const Memory (&in)[n]) {
  auto* p = reinterpret_cast<Memory*>(to) + element;
  if constexpr (n == 1) {
    block.store(p, in[0]);
  } else {
    constexpr int kPer = sizeof(Pack) / sizeof(Memory);
    RINGREDUCE_UNROLL for (int i = 0; i < n; i += kPer) {
      Pack pack;
      std::memcpy(&pack, &in[i], sizeof pack);
      block.store(reinterpret_cast<Pack*>(p + i), pack);
    }
  }
}

// acc[i] = acc[i] (op) in[i].
template <class E, int n>
RINGREDUCE_DEVICE void combine(const Arithmetic& a, typename E::Value (&acc)[n],
                               const typename E::Value (&in)[n]) {
  combine<E>(a.combine, acc, in);
}
template <class E, int n>
RINGREDUCE_DEVICE void combine(const PlainSum&, typename E::Value (&acc)[n],
                               const typename E::Value (&in)[n]) {
  RINGREDUCE_UNROLL for (int i = 0; i < n; ++i) acc[i] = E::add(acc[i], in[i]);
}

// The first source is encoded as First, the others as Rest, the sinks as Out.
template <class E, class First, class Rest, class Out>
struct Pass {
  using Value = typename E::Value;
  static constexpr int kPer = sizeof(Pack) / sizeof(typename E::Stored);  // elements of a pack
  // Packs of each source that a thread has in flight: eight of all sources together.  A pack of
  // small elements takes four times the registers once widened, or twice, so fewer of those are in
  // flight.
  template <class Sources>
  static constexpr int packsOf() {
    if (!E::kComputes) return 8;
    constexpr int kWidth = sizeof(typename E::Stored);
    constexpr int kMost = kWidth >= 4 ? 4 : kWidth;
    return Sources::kCount < 2 ? kMost : std::max(1, std::min(kMost, 8 / Sources::kCount));
  }

  template <class Block, class Sources, class Sinks, class A>
  RINGREDUCE_DEVICE static void run(Block& block, size_t n, const Sources& sources,
                                    const Sinks& sinks, const A& a, bool last) {
    constexpr int kPacks = packsOf<Sources>();
    const auto whole = [&](size_t size, size_t of) { return size / of * of; };
    const size_t threads = static_cast<size_t>(block.threads());
    const size_t head = headOf(n, sources, sinks);
    const size_t packs = head + whole(n - head, kPer);
    // Where a thread has one pack in flight there is nothing to do several at a time.
    const size_t tiles = kPacks == 1 ? head : head + whole(n - head, threads * kPer * kPacks);
    const size_t rows = kPacks == 1 ? 0 : whole(head, threads * kPacks);
    if constexpr (kPacks > 1) sweep<1, kPacks>(block, 0, rows, sources, sinks, a, last);
    sweep<1, 1>(block, rows, head, sources, sinks, a, last);
    if constexpr (kPacks > 1) sweep<kPer, kPacks>(block, head, tiles, sources, sinks, a, last);
    sweep<kPer, 1>(block, tiles, packs, sources, sinks, a, last);
    sweep<1, 1>(block, packs, n, sources, sinks, a, last);
  }

 private:
  // Elements up to the first at which every pointer is aligned; all n if there is none.
  template <class Sources, class Sinks>
  RINGREDUCE_DEVICE static size_t headOf(size_t n, const Sources& sources, const Sinks& sinks) {
    size_t head = missing<First>(sources(0));
    // Wider elements have fewer phases: take the narrowest that there are.
    if (sinks.count() > 0 && phases<Out>() > phases<First>()) head = missing<Out>(sinks(0));
    if constexpr (Sources::kCount != 1)
      if (phases<Rest>() > phases<First>()) head = missing<Rest>(sources(1));
    bool all = head <= n && fits<First>(sources(0), head);
    for (int k = 1; k < sources.count(); ++k) all &= fits<Rest>(sources(k), head);
    for (int s = 0; s < sinks.count(); ++s) all &= fits<Out>(sinks(s), head);
    return all ? head : n;
  }
  template <class As>
  RINGREDUCE_DEVICE static constexpr size_t phases() {
    return sizeof(Pack) / sizeof(typename As::Memory);
  }
  template <class As>
  RINGREDUCE_DEVICE static size_t missing(const std::byte* p) {
    return (0 - reinterpret_cast<uintptr_t>(p)) % sizeof(Pack) / sizeof(typename As::Memory);
  }
  template <class As>
  RINGREDUCE_DEVICE static bool fits(const std::byte* p, size_t head) {
    return (reinterpret_cast<uintptr_t>(p) + head * sizeof(typename As::Memory)) % sizeof(Pack) ==
           0;
  }

  // Elements [from, to): each thread takes `per` neighbouring ones at `packs` places.  With several
  // places that must come out even; with one, some threads may get one turn less.
  template <int per, int packs, class Block, class Sources, class Sinks, class A>
  RINGREDUCE_DEVICE static void sweep(Block& block, size_t from, size_t to, const Sources& sources,
                                      const Sinks& sinks, const A& a, bool last) {
    const size_t stride = static_cast<size_t>(block.threads()) * per;
    for (size_t i = from + static_cast<size_t>(block.thread()) * per; i < to; i += stride * packs) {
      Value acc[packs][per];
      Loaded<First, packs, per> first;
      first.load(block, sources(0), i, stride);
      const auto begin = [&](int u, const Value(&in)[per]) {
        RINGREDUCE_UNROLL for (int v = 0; v < per; ++v) acc[u][v] = in[v];
        if (sources.own == 0) scaled(acc[u], a);
      };
      if constexpr (Sources::kCount == 1) {
        first.each(begin);
      } else {
        const auto add = [&](const Loaded<Rest, packs, per>& other, int k) {
          other.each([&](int u, Value(&in)[per]) {
            if (sources.own == k) scaled(in, a);
            combine<E>(a, acc[u], in);
          });
        };
        if constexpr (Sources::kCount == 0) {
          first.each(begin);
          for (int k = 1; k < sources.count(); ++k) {
            Loaded<Rest, packs, per> other;
            other.load(block, sources(k), i, stride);
            add(other, k);
          }
        } else {
          constexpr int kOthers = Sources::kCount - 1;
          Loaded<Rest, packs, per> others[kOthers];
          RINGREDUCE_UNROLL for (int k = 0; k < kOthers; ++k) others[k].load(block, sources(k + 1),
                                                                             i, stride);
          first.each(begin);
          RINGREDUCE_UNROLL for (int k = 0; k < kOthers; ++k) add(others[k], k + 1);
        }
        if (last && a.divide) divide(acc, a);
      }
      typename Out::Memory out[packs][per];
      RINGREDUCE_UNROLL for (int u = 0; u < packs; ++u)
          RINGREDUCE_UNROLL for (int v = 0; v < per; ++v) out[u][v] = Out::encode(acc[u][v]);
      const auto to_sink = [&](int s) {
        RINGREDUCE_UNROLL for (int u = 0; u < packs; ++u)
            write(block, sinks(s), i + static_cast<size_t>(u) * stride, out[u]);
      };
      if constexpr (Sinks::kCount > 0) {
        RINGREDUCE_UNROLL for (int s = 0; s < Sinks::kCount; ++s) if (s < sinks.count()) to_sink(s);
      } else {
        for (int s = 0; s < sinks.count(); ++s) to_sink(s);
      }
    }
  }

  // A source's packs, as loaded: until they are widened and used, a value takes no more registers
  // than bytes of memory.
  template <class As, int packs, int per>
  struct Loaded {
    typename As::Memory raw[packs][per];
    template <class Block>
    RINGREDUCE_DEVICE void load(Block& block, const std::byte* from, size_t i, size_t stride) {
      RINGREDUCE_UNROLL for (int u = 0; u < packs; ++u)
          read(block, from, i + static_cast<size_t>(u) * stride, raw[u]);
    }
    template <class Use>
    RINGREDUCE_DEVICE void each(Use use) const {
      RINGREDUCE_UNROLL for (int u = 0; u < packs; ++u) {
        Value values[per];
        RINGREDUCE_UNROLL for (int v = 0; v < per; ++v) values[v] = As::decode(raw[u][v]);
        use(u, values);
      }
    }
  };

  template <int packs, int per>
  RINGREDUCE_DEVICE static void divide(Value (&acc)[packs][per], const Arithmetic& a) {
    const Divider<E> divided(a.world_size);
    RINGREDUCE_UNROLL for (int u = 0; u < packs; ++u)
        RINGREDUCE_UNROLL for (int v = 0; v < per; ++v) acc[u][v] = divided(acc[u][v]);
  }
  template <int packs, int per>
  RINGREDUCE_DEVICE static void divide(Value (&acc)[packs][per], const PlainSum& a) {
    RINGREDUCE_UNROLL for (int u = 0; u < packs; ++u)
        RINGREDUCE_UNROLL for (int v = 0; v < per; ++v) acc[u][v] *= a.inverse;
  }

  template <int per>
  RINGREDUCE_DEVICE static void scaled(Value (&)[per], const PlainSum&) {}
  template <int per>
  RINGREDUCE_DEVICE static void scaled(Value (&values)[per], const Arithmetic& a) {
    if constexpr (E::kFloating)
      if (a.scale)
        RINGREDUCE_UNROLL for (int v = 0; v < per; ++v) values[v] = E::scale(values[v], a.factor);
  }
};

// Copies the bits of n elements of E::Stored to every sink.
template <class E, class Block, class Sinks>
RINGREDUCE_DEVICE void copyElements(Block& block, size_t n, const std::byte* from,
                                    const Sinks& sinks) {
  using R = Raw<sizeof(typename E::Stored)>;
  Pass<R, AsStored<R>, AsStored<R>, AsStored<R>>::run(block, n, ConstSpans<1>{{from}}, sinks,
                                                      Arithmetic{}, false);
}

}  // namespace ringreduce::cuda
