// Reads PTX for the interpreter (ptx.h): the instructions by name, their operands as registers.
#pragma once

#include "ptx.h"

namespace ptx {

template <class T>
T as(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
uint64_t bitsOf(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

// d = f(a, b, c) on values of type A, giving a D.
template <class D, class A, auto f>
void unary(Warp& w, const Step& s) {
  uint64_t *d = w.reg(s.to[0]), *a = w.reg(s.from[0]);
  w.each([&](int l) { d[l] = bitsOf(static_cast<D>(f(as<A>(a[l])))); });
}
template <class D, class A, auto f>
void binary(Warp& w, const Step& s) {
  uint64_t *d = w.reg(s.to[0]), *a = w.reg(s.from[0]), *b = w.reg(s.from[1]);
  w.each([&](int l) { d[l] = bitsOf(static_cast<D>(f(as<A>(a[l]), as<A>(b[l])))); });
}
template <class A, auto f>
void ternary(Warp& w, const Step& s) {
  uint64_t *d = w.reg(s.to[0]), *a = w.reg(s.from[0]), *b = w.reg(s.from[1]), *c = w.reg(s.from[2]);
  w.each([&](int l) { d[l] = bitsOf(static_cast<A>(f(as<A>(a[l]), as<A>(b[l]), as<A>(c[l])))); });
}
template <class A, auto f>
void shift(Warp& w, const Step& s) {
  uint64_t *d = w.reg(s.to[0]), *a = w.reg(s.from[0]), *b = w.reg(s.from[1]);
  w.each(
      [&](int l) { d[l] = bitsOf(static_cast<A>(f(as<A>(a[l]), static_cast<uint32_t>(b[l])))); });
}

inline float towardsZero(auto f, float a, float b) {
  std::fesetround(FE_TOWARDZERO);
  volatile float x = a, y = b, z = f(x, y);
  std::fesetround(FE_TONEAREST);
  return z;
}

inline uint16_t halfOf(DType t, float value, bool nearest) {
  if (!nearest) {
    // The next half towards zero: the nearest one, or the one before it.
    uint16_t half = oracle::encodeHalf(t, static_cast<double>(value));
    if (std::fabs(oracle::decodeHalf(t, half)) > std::fabs(static_cast<double>(value))) --half;
    return half;
  }
  return oracle::encodeHalf(t, static_cast<double>(value));
}

inline std::map<std::string, Run> arithmetic() {
  std::map<std::string, Run> all;
  const auto integers = [&]<class S, class U>(const std::string& bits) {
    for (const char* sign : {"s", "u"}) {
      all["add." + (sign + bits)] = binary<U, U, [](U a, U b) { return a + b; }>;
      all["sub." + (sign + bits)] = binary<U, U, [](U a, U b) { return a - b; }>;
      all["mul.lo." + (sign + bits)] =
          binary<U, U, [](U a, U b) { return static_cast<uint64_t>(a) * b; }>;
    }
    all["neg.s" + bits] = unary<U, U, [](U a) { return U{0} - a; }>;
    all["abs.s" + bits] =
        unary<U, S, [](S a) { return a < 0 ? U{0} - static_cast<U>(a) : static_cast<U>(a); }>;
    all["not.b" + bits] = unary<U, U, [](U a) { return ~a; }>;
    all["and.b" + bits] = binary<U, U, [](U a, U b) { return a & b; }>;
    all["or.b" + bits] = binary<U, U, [](U a, U b) { return a | b; }>;
    all["xor.b" + bits] = binary<U, U, [](U a, U b) { return a ^ b; }>;
    constexpr uint32_t kWidth = sizeof(U) * 8;
    all["shl.b" + bits] = shift<U, [](U a, uint32_t n) { return (n < kWidth ? a << n : 0); }>;
    all["shr.u" + bits] = shift<U, [](U a, uint32_t n) { return (n < kWidth ? a >> n : 0); }>;
    all["shr.s" + bits] = shift<S, [](S a, uint32_t n) { return (a >> std::min(n, kWidth - 1)); }>;
    const auto both = [&]<class T>(const std::string& type) {
      all["min." + type] = binary<T, T, [](T a, T b) { return std::min(a, b); }>;
      all["max." + type] = binary<T, T, [](T a, T b) { return std::max(a, b); }>;
      all["div." + type] =
          binary<T, T, [](T a, T b) { return b == 0 ? static_cast<T>(-1) : a / b; }>;
      all["rem." + type] = binary<T, T, [](T a, T b) { return b == 0 ? a : a % b; }>;
      all["setp.lt." + type] = binary<bool, T, [](T a, T b) { return a < b; }>;
      all["setp.le." + type] = binary<bool, T, [](T a, T b) { return a <= b; }>;
      all["setp.gt." + type] = binary<bool, T, [](T a, T b) { return (a > b); }>;
      all["setp.ge." + type] = binary<bool, T, [](T a, T b) { return (a >= b); }>;
    };
    both.template operator()<S>("s" + bits);
    both.template operator()<U>("u" + bits);
    for (const char* kind : {"s", "u", "b"}) {
      all["setp.eq." + (kind + bits)] = binary<bool, U, [](U a, U b) { return a == b; }>;
      all["setp.ne." + (kind + bits)] = binary<bool, U, [](U a, U b) { return a != b; }>;
    }
  };
  integers.template operator()<int16_t, uint16_t>("16");
  integers.template operator()<int32_t, uint32_t>("32");
  integers.template operator()<int64_t, uint64_t>("64");
  all["mul.wide.u16"] =
      binary<uint32_t, uint16_t, [](uint16_t a, uint16_t b) { return uint32_t{a} * b; }>;
  all["mul.wide.s32"] =
      binary<int64_t, int32_t, [](int32_t a, int32_t b) { return int64_t{a} * b; }>;
  all["mul.wide.u32"] =
      binary<uint64_t, uint32_t, [](uint32_t a, uint32_t b) { return uint64_t{a} * b; }>;
  all["mul.hi.u32"] =
      binary<uint32_t, uint32_t, [](uint32_t a, uint32_t b) { return (uint64_t{a} * b >> 32); }>;
  all["mad.lo.s64"] =
      ternary<uint64_t, [](uint64_t a, uint64_t b, uint64_t c) { return a * b + c; }>;
  // The width bits of a from bit first on.
  all["bfe.u32"] = ternary<uint32_t, [](uint32_t a, uint32_t first, uint32_t width) {
    const uint64_t from = first & 0xff, count = width & 0xff;
    return ((count < 32 ? (uint64_t{1} << count) - 1 : ~0u) & (from < 32 ? a >> from : 0));
  }>;
  // Any number but 0 is true.
  all["and.pred"] = binary<bool, uint64_t, [](uint64_t a, uint64_t b) { return a && b; }>;
  all["or.pred"] = binary<bool, uint64_t, [](uint64_t a, uint64_t b) { return a || b; }>;
  all["xor.pred"] = binary<bool, uint64_t, [](uint64_t a, uint64_t b) { return !a != !b; }>;
  all["not.pred"] = unary<bool, uint64_t, [](uint64_t a) { return !a; }>;

  const auto floats = [&]<class F>(const std::string& type) {
    all["add.rn." + type] = binary<F, F, [](F a, F b) { return a + b; }>;
    all["mul.rn." + type] = binary<F, F, [](F a, F b) { return a * b; }>;
    all["div.rn." + type] = binary<F, F, [](F a, F b) { return a / b; }>;
    all["setp.lt." + type] = binary<bool, F, [](F a, F b) { return a < b; }>;
    all["setp.gt." + type] = binary<bool, F, [](F a, F b) { return (a > b); }>;
    all["setp.nan." + type] =
        binary<bool, F, [](F a, F b) { return std::isnan(a) || std::isnan(b); }>;
  };
  floats.template operator()<float>("f32");
  floats.template operator()<double>("f64");
  // Of mutants.
  all["add.rz.f32"] = binary<float, float, [](float a, float b) {
    return towardsZero([](float x, float y) { return x + y; }, a, b);
  }>;

  const auto converts = [&]<class A>(const std::string& from) {
    all["cvt.u16." + from] = unary<uint16_t, A, [](A a) { return a; }>;
    all["cvt.s16." + from] = unary<int16_t, A, [](A a) { return a; }>;
    all["cvt.u32." + from] = unary<uint32_t, A, [](A a) { return a; }>;
    all["cvt.s32." + from] = unary<int32_t, A, [](A a) { return a; }>;
    all["cvt.u64." + from] = unary<uint64_t, A, [](A a) { return a; }>;
    all["cvt.s64." + from] = unary<int64_t, A, [](A a) { return a; }>;
    all["cvt.rn.f32." + from] = unary<float, A, [](A a) { return a; }>;
    all["cvt.rn.f64." + from] = unary<double, A, [](A a) { return a; }>;
  };
  converts.template operator()<int8_t>("s8");
  converts.template operator()<uint8_t>("u8");
  converts.template operator()<int16_t>("s16");
  converts.template operator()<uint16_t>("u16");
  converts.template operator()<int32_t>("s32");
  converts.template operator()<uint32_t>("u32");
  converts.template operator()<int64_t>("s64");
  converts.template operator()<uint64_t>("u64");
  all["cvt.rn.f32.f64"] = unary<float, double, [](double a) { return a; }>;
  all["cvt.f64.f32"] = unary<double, float, [](float a) { return a; }>;
  all["cvt.f32.f16"] =
      unary<float, uint16_t, [](uint16_t a) { return oracle::decodeHalf(DType::kFloat16, a); }>;
  all["cvt.rn.f16.f32"] =
      unary<uint16_t, float, [](float a) { return halfOf(DType::kFloat16, a, true); }>;
  all["cvt.rz.f16.f32"] =
      unary<uint16_t, float, [](float a) { return halfOf(DType::kFloat16, a, false); }>;
  all["cvt.rn.bf16.f32"] =
      unary<uint16_t, float, [](float a) { return halfOf(DType::kBFloat16, a, true); }>;
  all["cvt.rz.bf16.f32"] =
      unary<uint16_t, float, [](float a) { return halfOf(DType::kBFloat16, a, false); }>;
  return all;
}

inline void move(Warp& w, const Step& s) {
  uint64_t *d = w.reg(s.to[0]), *a = w.reg(s.from[0]);
  w.each([&](int l) { d[l] = a[l]; });
}
// mov.b32 {%rs1, %rs2}, %r1; and the other way round.
inline void split(Warp& w, const Step& s) {
  const int width = s.bytes * 8 / static_cast<int>(s.to.size());
  for (size_t i = 0; i < s.to.size(); ++i) {
    uint64_t *d = w.reg(s.to[i]), *a = w.reg(s.from[0]);
    w.each(
        [&](int l) { d[l] = a[l] >> width * static_cast<int>(i) & ((uint64_t{1} << width) - 1); });
  }
}
inline void join(Warp& w, const Step& s) {
  const int width = s.bytes * 8 / static_cast<int>(s.from.size());
  uint64_t* d = w.reg(s.to[0]);
  w.each([&](int l) {
    uint64_t value = 0;
    for (size_t i = 0; i < s.from.size(); ++i)
      value |= (w.reg(s.from[i])[l] & ((uint64_t{1} << width) - 1)) << width * static_cast<int>(i);
    d[l] = value;
  });
}
inline void select(Warp& w, const Step& s) {
  uint64_t *d = w.reg(s.to[0]), *a = w.reg(s.from[0]), *b = w.reg(s.from[1]), *p = w.reg(s.from[2]);
  w.each([&](int l) { d[l] = p[l] ? a[l] : b[l]; });
}
template <class U>
void insertBits(Warp& w, const Step& s) {  // bfi d, a, b, c, n: n bits of a into b from bit c on
  w.each([&](int l) {
    const auto value = [&](size_t i) { return w.reg(s.from[i])[l]; };
    const uint64_t from = value(2) & 0xff, width = value(3) & 0xff;
    const uint64_t mask = width >= 64 ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
    w.reg(s.to[0])[l] =
        bitsOf(static_cast<U>((value(1) & ~(mask << from)) | (value(0) & mask) << from));
  });
}
inline void permute(Warp& w, const Step& s) {
  w.each([&](int l) {
    const uint64_t bytes = (w.reg(s.from[0])[l] & 0xffffffff) | w.reg(s.from[1])[l] << 32;
    const uint64_t how = w.reg(s.from[2])[l];
    uint64_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const uint64_t pick = how >> 4 * i & 0xf;
      uint64_t byte = bytes >> 8 * (pick & 7) & 0xff;
      if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
      value |= byte << 8 * i;
    }
    w.reg(s.to[0])[l] = value;
  });
}
inline void clockOf(Warp& w, const Step& s) {
  w.each([&](int l) { w.reg(s.to[0])[l] = w.block.machine->time; });
}
inline void branch(Warp& w, const Step& s) {
  w.each([&](int l) { w.pc[l] = s.target; });
  w.jumped = true;
}
inline void leave(Warp& w, const Step&) {
  w.running &= ~w.active;
  w.jumped = true;
  w.block.leave(w.active);
}
inline void barrier(Warp& w, const Step& s) {
  uint32_t votes = 0;
  if (!s.from.empty())
    w.each([&](int l) { votes |= static_cast<uint32_t>(w.reg(s.from[0])[l] != 0) << l; });
  w.jumped = true;
  w.block.arrive(w, s, w.active, votes);
}
inline uint64_t addressOf(Warp& w, const Step& s, int base, int l) {
  const uint64_t address = w.reg(base)[l] + static_cast<uint64_t>(s.offset);
  return s.space == Step::Space::kShared ? static_cast<uint32_t>(address) : address;
}
inline void load(Warp& w, const Step& s) {
  w.each([&](int l) {
    const uint64_t address = addressOf(w, s, s.from[0], l);
    if (address % (static_cast<uint64_t>(s.bytes) * s.to.size()) != 0)
      throw Error("not aligned: " + s.text);
    uint64_t values[4];
    for (size_t i = 0; i < s.to.size(); ++i) {
      values[i] = w.load(l, address + i * static_cast<uint64_t>(s.bytes), s.bytes, s);
      const int unused = 64 - 8 * s.bytes;
      if (s.is_signed)
        values[i] = static_cast<uint64_t>(static_cast<int64_t>(values[i] << unused) >> unused);
    }
    for (size_t i = 0; i < s.to.size(); ++i) w.reg(s.to[i])[l] = values[i];
  });
}
inline void store(Warp& w, const Step& s) {
  w.each([&](int l) {
    uint64_t address = addressOf(w, s, s.from[0], l);
    if (address % (static_cast<uint64_t>(s.bytes) * (s.from.size() - 1)) != 0)
      throw Error("not aligned: " + s.text);
    for (size_t i = 1; i < s.from.size(); ++i, address += static_cast<uint64_t>(s.bytes)) {
      if (s.space != Step::Space::kShared) w.block.machine->check(address, s.bytes, s);
      w.store(l, address + (s.space == Step::Space::kShared ? kShared : 0), w.reg(s.from[i])[l],
              s.bytes);
    }
  });
}
// Four words of all places, added: each a float, or two halves if `type` is one.
template <DType type>
void loadSum(Warp& w, const Step& s) {
  w.each([&](int l) {
    const std::vector<uint64_t> places =
        w.block.machine->placesOf(addressOf(w, s, s.from[0], l), 16, s);
    for (size_t i = 0; i < 4; ++i) {
      uint64_t sum = 0;
      const auto add = [&](int shift, uint64_t mask, auto widen, auto narrow) {
        float value = 0;
        for (size_t r = 0; r < places.size(); ++r) {
          const float one = widen(w.load(l, places[r] + 4 * i, 4, s, 1) >> shift & mask);
          value = r == 0 ? one : value + one;
        }
        sum |= uint64_t{narrow(value)} << shift;
      };
      if constexpr (type == DType::kFloat32)
        add(0, 0xffffffff, as<float>, [](float v) { return bitsOf(v); });
      else
        for (const int shift : {0, 16})
          add(
              shift, 0xffff,
              [](uint64_t v) { return oracle::decodeHalf(type, static_cast<uint16_t>(v)); },
              [](float v) { return halfOf(type, v, true); });
      w.reg(s.to[i])[l] = sum;
    }
  });
}
inline void storeAll(Warp& w, const Step& s) {
  w.each([&](int l) {
    for (const uint64_t place : w.block.machine->placesOf(addressOf(w, s, s.from[0], l), 16, s)) {
      w.block.machine->check(place, 16, s);
      for (size_t i = 0; i < 4; ++i) w.store(l, place + 4 * i, w.reg(s.from[i + 1])[l], 4, 1);
    }
  });
}
inline void fenceAliases(Warp& w, const Step&) {
  w.each([&](int l) {
    for (Store& one : w.pending[l]) one.fenced = true;
  });
  for (auto& [at, granule] : w.block.kept) granule.unfenced[0] = granule.unfenced[1] = 0;
}
template <class T>
T* wordAt(Warp& w, const Step& s, int l) {
  const uint64_t address = addressOf(w, s, s.from[0], l);
  w.block.machine->check(address, sizeof(T), s);
  return reinterpret_cast<T*>(address);
}
inline void acquire(Warp& w, const Step& s) {
  w.each([&](int l) {
    w.reg(s.to[0])[l] = *wordAt<uint64_t>(w, s, l);
    w.acquired[l] = w.block.machine->epoch;
  });
  w.block.acquired = w.block.machine->epoch;
  w.polled = true;
}
inline void relaxed(Warp& w, const Step& s) {
  w.each([&](int l) {
    w.reg(s.to[0])[l] = s.bytes == 4 ? *wordAt<uint32_t>(w, s, l) : *wordAt<uint64_t>(w, s, l);
  });
  w.polled = true;
}
inline void release(Warp& w, const Step& s) {
  w.each([&](int l) {
    w.block.keep(w.pending[l]);
    w.block.letOut();
    *wordAt<uint64_t>(w, s, l) = w.reg(s.from[1])[l];
  });
  w.block.machine->progress = w.block.machine->time;
}
// A store that tells nothing of others: the word alone gets out.
inline void relaxedStore(Warp& w, const Step& s) {
  w.each([&](int l) { *wordAt<uint64_t>(w, s, l) = w.reg(s.from[1])[l]; });
}
// Words that carry their own flags: each gets out whole, at a time of its own.
inline void relaxedWords(Warp& w, const Step& s) {
  w.each([&](int l) {
    uint64_t* const at = wordAt<uint64_t>(w, s, l);
    w.block.machine->check(reinterpret_cast<uint64_t>(at), 16, s);
    for (size_t i = 0; i < 2; ++i)
      w.block.machine->floating.push_back({at + i, w.reg(s.from[i + 1])[l]});
  });
}
inline void findWords(Warp& w, const Step& s) {
  w.each([&](int l) {
    uint64_t* const at = wordAt<uint64_t>(w, s, l);
    w.block.machine->check(reinterpret_cast<uint64_t>(at), 16, s);
    const uint64_t values[] = {at[0], at[1]};
    for (size_t i = 0; i < 2; ++i) w.reg(s.to[i])[l] = values[i];
  });
  w.polled = true;
}
inline void exchange(Warp& w, const Step& s) {  // atom.cas
  w.each([&](int l) {
    uint32_t* word = wordAt<uint32_t>(w, s, l);
    const uint32_t old = *word;
    if (old == static_cast<uint32_t>(w.reg(s.from[1])[l]))
      *word = static_cast<uint32_t>(w.reg(s.from[2])[l]);
    w.reg(s.to[0])[l] = old;
  });
}
inline void count(Warp& w, const Step& s) {  // atom.add
  w.each([&](int l) {
    uint32_t* word = wordAt<uint32_t>(w, s, l);
    const uint32_t old = *word;
    *word = old + static_cast<uint32_t>(w.reg(s.from[1])[l]);
    w.reg(s.to[0])[l] = old;
  });
}
inline void nothing(Warp&, const Step&) {}

// Reads one kernel, lines from after its name on.
class Parser {
 public:
  explicit Parser(std::string name) { kernel_.name = std::move(name); }

  Kernel read(const std::vector<std::pair<int, std::string>>& lines) {
    for (const auto& [number, line] : lines) {
      number_ = number;
      one(line);
    }
    for (const auto& [step, label] : branches_) {
      if (!labels_.contains(label)) throw Error("no label " + label);
      kernel_.steps[step].target = labels_.at(label);
    }
    return std::move(kernel_);
  }

 private:
  static const std::map<std::string, Run>& arithmetics() {
    static const std::map<std::string, Run> all = arithmetic();
    return all;
  }

  void one(std::string line) {
    if (const size_t comment = line.find("//"); comment != std::string::npos) line.resize(comment);
    const size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string::npos) return;
    line = line.substr(begin, line.find_last_not_of(" \t\r") - begin + 1);
    if (line[0] == '{') return void(++depth_);
    if (line[0] == '}') {
      --depth_;
      return inner_.clear();
    }
    if (line.back() == ':') {
      labels_[line.substr(0, line.size() - 1)] = static_cast<int>(kernel_.steps.size());
      return;
    }
    if (line.starts_with(".shared")) return shared(line);
    if (line.starts_with(".reg") && depth_ > 1) {
      // Names of a block of inline assembly, which may hide the kernel's.
      const size_t at = line.find('%');
      const std::string name = line.substr(at, line.find(';') - at);
      inner_[name] = kernel_.registers++;
      return;
    }
    if (line[0] == '.' || line[0] == ')' || line[0] == '(') return;
    if (line.back() != ';') throw Error("line " + std::to_string(number_) + ": " + line);
    line.pop_back();
    Step step;
    step.text = line;
    step.line = number_;
    if (line[0] == '@') {
      step.guard_is = line[1] != '!';
      const size_t end = line.find_first_of(" \t");
      const size_t name = step.guard_is ? 1 : 2;
      step.guard = registerOf(line.substr(name, end - name));
      line = line.substr(line.find_first_not_of(" \t", end));
    }
    const size_t end = std::min(line.find_first_of(" \t"), line.size());
    decode(step, line.substr(0, end), operandsOf(line.substr(end)));
    kernel_.steps.push_back(std::move(step));
  }

  // Split at commas outside of braces and brackets.
  static std::vector<std::string> operandsOf(const std::string& text) {
    std::vector<std::string> all;
    std::string now;
    int depth = 0;
    for (const char c : text) {
      if (c == '{' || c == '[') ++depth;
      if (c == '}' || c == ']') --depth;
      if (c == ',' && depth == 0) {
        all.push_back(std::exchange(now, {}));
      } else if (c != ' ' && c != '\t') {
        now += c;
      }
    }
    if (!now.empty()) all.push_back(now);
    return all;
  }

  void shared(const std::string& line) {
    static const std::regex form(R"(\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\];)");
    std::smatch found;
    if (!std::regex_search(line, found, form))
      throw Error("line " + std::to_string(number_) + ": " + line);
    symbols_[found[2]] = kernel_.shared;
    kernel_.shared += (std::stoul(found[3]) + 15) / 16 * 16;
  }

  int registerOf(const std::string& name) {
    if (const auto inner = inner_.find(name); inner != inner_.end()) return inner->second;
    const auto [at, added] = registers_.try_emplace(name, kernel_.registers);
    if (!added) return at->second;
    ++kernel_.registers;
    static const std::map<std::string, int> specials{
        {"%tid.x", 0}, {"%ctaid.x", 1}, {"%nctaid.x", 2}, {"%ntid.x", 3}};
    if (const auto special = specials.find(name); special != specials.end()) {
      kernel_.specials.push_back({at->second, special->second});
    } else if (name[0] != '%') {
      kernel_.constants.push_back({at->second, constant(name)});
    }
    return at->second;
  }

  uint64_t constant(const std::string& text) const {
    if (text.starts_with("0f")) return std::stoull(text.substr(2), nullptr, 16);
    if (text.starts_with("0d")) return std::stoull(text.substr(2), nullptr, 16);
    if (text[0] == '-' || (text[0] >= '0' && text[0] <= '9')) {
      std::string digits = text;
      if (digits.back() == 'U') digits.pop_back();
      return digits[0] == '-' ? static_cast<uint64_t>(std::stoll(digits, nullptr, 0))
                              : std::stoull(digits, nullptr, 0);
    }
    if (text.ends_with("_param_0")) return 0;
    if (const auto found = symbols_.find(text); found != symbols_.end()) return found->second;
    throw Error("line " + std::to_string(number_) + ": what is " + text + "?");
  }

  std::vector<int> list(const std::string& operand) {
    if (operand[0] != '{') return {registerOf(operand)};
    std::vector<int> all;
    for (const std::string& one : operandsOf(operand.substr(1, operand.size() - 2)))
      all.push_back(registerOf(one));
    return all;
  }

  // [%rd1+8], [symbol], [%rd1+-8]
  int address(Step& step, const std::string& operand) {
    std::string inside = operand.substr(1, operand.size() - 2);
    if (const size_t plus = inside.find('+'); plus != std::string::npos) {
      step.offset = std::stoll(inside.substr(plus + 1));
      inside.resize(plus);
    }
    return registerOf(inside);
  }

  void decode(Step& step, const std::string& opcode, const std::vector<std::string>& operands) {
    const auto dot = opcode.find('.');
    const std::string word = opcode.substr(0, dot), type = opcode.substr(opcode.rfind('.') + 1);
    const auto rest = [&](size_t from) {
      for (size_t i = from; i < operands.size(); ++i) step.from.push_back(registerOf(operands[i]));
    };
    if (const auto found = arithmetics().find(opcode); found != arithmetics().end()) {
      step.run = found->second;
      step.to = {registerOf(operands.at(0))};
      return rest(1);
    }
    if (word == "bra") {
      branches_.push_back({kernel_.steps.size(), operands.at(0)});
      step.run = branch;
    } else if (opcode == "ret" || opcode == "exit") {
      step.run = leave;
    } else if (opcode == "bar.sync") {
      step.run = barrier;
    } else if (opcode == "bar.red.or.pred") {
      step.run = barrier;
      step.to = {registerOf(operands.at(0))};
      step.from = {registerOf(operands.at(2))};
    } else if (word == "mov" && operands.at(1) == "%globaltimer") {
      step.run = clockOf;
      step.to = list(operands[0]);
    } else if (word == "mov" || word == "cvta") {
      step.to = list(operands.at(0));
      step.from = list(operands.at(1));
      step.bytes = type == "b64" ? 8 : 4;
      step.run = step.to.size() > 1 ? split : step.from.size() > 1 ? join : move;
    } else if (word == "selp") {
      step.run = select;
      step.to = {registerOf(operands.at(0))};
      rest(1);
    } else if (word == "bfi") {
      step.run = type == "b64" ? insertBits<uint64_t> : insertBits<uint32_t>;
      step.to = {registerOf(operands.at(0))};
      rest(1);
    } else if (opcode == "prmt.b32") {
      step.run = permute;
      step.to = {registerOf(operands.at(0))};
      rest(1);
    } else if (word == "ld" || word == "st") {
      memory(step, opcode, type, operands);
    } else if (word == "atom") {
      if (opcode != "atom.acq_rel.gpu.cas.b32" && opcode != "atom.acq_rel.gpu.add.u32")
        unknown(step);
      step.run = type == "b32" ? exchange : count;
      step.to = {registerOf(operands.at(0))};
      step.from = {address(step, operands.at(1))};
      rest(2);
    } else if (word == "multimem") {
      static const std::map<std::string, Run> sums{
          {"multimem.ld_reduce.relaxed.sys.add.v4.f32", loadSum<DType::kFloat32>},
          {"multimem.ld_reduce.relaxed.sys.add.acc::f32.v4.f16x2", loadSum<DType::kFloat16>},
          {"multimem.ld_reduce.relaxed.sys.add.acc::f32.v4.bf16x2", loadSum<DType::kBFloat16>}};
      const bool stores = opcode == "multimem.st.relaxed.sys.v4.f32";
      const auto found = sums.find(opcode);
      if (!stores && found == sums.end()) unknown(step);
      step.run = stores ? storeAll : found->second;
      step.from = {address(step, operands.at(stores ? 0 : 1))};
      const std::vector<int> values = list(operands.at(stores ? 1 : 0));
      (stores ? step.from : step.to)
          .insert((stores ? step.from : step.to).end(), values.begin(), values.end());
    } else if (opcode == "fence.proxy.alias") {
      step.run = fenceAliases;
    } else if (opcode == "nop") {
      step.run = nothing;
    } else {
      unknown(step);
    }
  }

  void memory(Step& step, const std::string& opcode, const std::string& type,
              const std::vector<std::string>& operands) {
    static const std::map<std::string, Run> strong{
        {"ld.acquire.sys.u64", acquire},         {"ld.relaxed.sys.u64", relaxed},
        {"ld.relaxed.gpu.u32", relaxed},         {"ld.relaxed.sys.v2.u64", findWords},
        {"st.relaxed.sys.v2.u64", relaxedWords}, {"st.release.sys.u64", release},
        {"st.relaxed.sys.u64", relaxedStore}};
    static const std::regex weak(R"((ld|st)(\.global|\.shared|\.param)?(\.v[24])?\.[bfus]\d+)");
    const bool loads = opcode[0] == 'l';
    step.bytes = std::stoi(type.substr(1)) / 8;
    step.is_signed = type[0] == 's';
    const int at = address(step, operands.at(loads ? 1 : 0));
    step.from = {at};
    const std::vector<int> values = list(operands.at(loads ? 0 : 1));
    (loads ? step.to : step.from)
        .insert((loads ? step.to : step.from).end(), values.begin(), values.end());
    if (const auto found = strong.find(opcode); found != strong.end()) {
      step.run = found->second;
    } else if (std::regex_match(opcode, weak)) {
      step.run = loads ? load : store;
      if (opcode.find(".shared") != std::string::npos) step.space = Step::Space::kShared;
      if (opcode.find(".param") != std::string::npos) step.space = Step::Space::kParam;
    } else {
      unknown(step);
    }
  }

  [[noreturn]] void unknown(const Step& step) const {
    throw Error("line " + std::to_string(number_) +
                ": an instruction that is not known: " + step.text);
  }

  Kernel kernel_;
  int number_ = 0, depth_ = 0;
  std::map<std::string, int> registers_, inner_, labels_;
  std::map<std::string, size_t> symbols_;
  std::vector<std::pair<size_t, std::string>> branches_;
};

// The lines of each kernel by name, for each GPU that a file has PTX for: 90 is sm_90.
using Lines = std::vector<std::pair<int, std::string>>;
using Module = std::map<std::string, Lines>;
using Modules = std::map<int, Module>;
inline Modules modulesOf(std::istream& file) {
  static const std::regex entry(R"(\.entry\s+(\w+)\()"), target(R"(^\.target\s+sm_(\d+)\b)");
  Modules all;
  Module* module = nullptr;
  Lines* now = nullptr;
  int number = 0, depth = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    std::smatch found;
    const auto at = [&] { return "line " + std::to_string(number) + ": "; };
    if (line.starts_with(".version")) {
      module = nullptr;
    } else if (line.starts_with(".target")) {
      if (!std::regex_search(line, found, target))
        throw Error(at() + "a target that is not known: " + line);
      const auto [place, is_new] = all.try_emplace(std::stoi(found[1]));
      if (!is_new) throw Error(at() + "a second module for the same GPU: " + line);
      module = &place->second;
    } else if (line.find(".entry") != std::string::npos && std::regex_search(line, found, entry)) {
      if (!module) throw Error(at() + "a kernel before the .target of its module");
      now = &(*module)[found[1]];
    } else if (now) {
      now->push_back({number, line});
      // Blocks of inline assembly are inside.
      const size_t first = line.find_first_not_of(" \t");
      const char c = first == std::string::npos ? ' ' : line[first];
      depth += (c == '{') - (c == '}');
      if (c == '}' && depth == 0) now = nullptr;
    }
  }
  return all;
}

}  // namespace ptx
