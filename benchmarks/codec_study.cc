// Which block size, scale and grid: what each costs in bytes and in accuracy.
//
//   codec_study [FILE of float32 ...]     such as benchmarks/codec_gradients.py writes
//
// A column is a kind of data, a row a layout.  The figure is the RMS of the error over that of the
// data, in per cent: what error feedback has to make up for.  Layouts that csrc/codec does not have
// are tried in plain arithmetic.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace {

using namespace ringreduce;
using Floats = std::vector<float>;

struct Data {
  std::string name;
  Floats values;
};

struct Scale {
  const char* name;
  double bytes;
  float (*rounded)(float);
};

float toBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
float toFloat16(float value) {
  std::byte half[2];
  encode(Codec::kFloat16, half, nullptr, &value, 1);
  decode(Codec::kFloat16, &value, half, 2, 1);
  return value;
}
constexpr Scale kScales[] = {
    {"float32", 4, [](float value) { return value; }},
    {"bfloat16", 2, toBfloat16},
    {"float16", 2, toFloat16},
    {"power of 2", 1, [](float value) { return std::exp2(std::ceil(std::log2(value))); }}};

struct Ends {
  float least, greatest;
  float magnitude() const { return std::max(-least, greatest); }
};
Ends endsOf(const float* block, size_t n) {
  const auto [least, greatest] = std::minmax_element(block, block + n);
  return {std::min(*least, 0.f), std::max(*greatest, 0.f)};
}

// The squared error of a block whose values go to whole multiples of `step`, from `least` to
// `most`.
double errorOf(const float* block, size_t n, float step, int least, int most) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const float whole = step == 0 ? 0 : std::nearbyint(block[i] / step);
    const double off =
        block[i] - static_cast<double>(step) *
                       std::clamp(whole, static_cast<float>(least), static_cast<float>(most));
    sum += off * off;
  }
  return sum;
}

// The grids for one block.
using Grid = double (*)(const float* block, size_t n, int most, const Scale& scale);

double symmetric(const float* block, size_t n, int most, const Scale& scale) {
  const float magnitude = endsOf(block, n).magnitude();
  const float step = magnitude == 0 ? 0 : scale.rounded(magnitude / static_cast<float>(most));
  return errorOf(block, n, step, -most, most);
}
// The greatest magnitude becomes -8, whatever its sign is.
double oneMore(const float* block, size_t n, int most, const Scale& scale) {
  const auto [least, greatest] = endsOf(block, n);
  const float eighth = std::max(-least, greatest) / static_cast<float>(most + 1);
  const float other = std::min(-least, greatest) / (static_cast<float>(most) + 0.47f);
  const float step = eighth == 0 ? 0 : scale.rounded(std::max(eighth, other));
  return errorOf(block, n, greatest > -least ? -step : step, -most - 1, most);
}
// Somewhat less than the greatest magnitude, by the least error of nine trials.
double leastError(const float* block, size_t n, int most, const Scale& scale) {
  const float magnitude = endsOf(block, n).magnitude();
  double best = INFINITY;
  for (float part = 0.6f; part < 1.01f && magnitude > 0; part += 0.05f) {
    const float step = scale.rounded(part * magnitude / static_cast<float>(most));
    best = std::min(best, errorOf(block, n, step, -most, most));
  }
  return magnitude == 0 ? 0 : best;
}
// From the least to the greatest value, with the least one as a second number beside the scale.
double fromLeast(const float* block, size_t n, int most, const Scale& scale) {
  const auto [least, greatest] = std::minmax_element(block, block + n);
  const float step = scale.rounded((*greatest - *least) / static_cast<float>(2 * most + 1));
  const float first = scale.rounded(*least);
  Floats moved(block, block + n);
  for (float& value : moved) value -= first;
  return errorOf(moved.data(), n, *greatest == *least ? 0 : step, 0, 2 * most + 1);
}

double over(const Floats& values, size_t block, const std::function<double(const float*)>& error) {
  double lost = 0, all = 0;
  for (size_t i = 0; i + block <= values.size(); i += block) lost += error(&values[i]);
  for (const float value : values) all += static_cast<double>(value) * value;
  return 100 * std::sqrt(lost / all);
}

void row(const char* codec, size_t block, const char* scale, const char* grid, double bytes,
         const std::vector<Data>& data, const std::function<double(const float*)>& error) {
  std::printf("%-5s %5zu  %-10s %-22s %6.4f ", codec, block, scale, grid, bytes);
  for (const Data& each : data) std::printf(" %8.3f", over(each.values, block, error));
  std::printf("\n");
}

void tryGrid(int most, size_t block, const Scale& scale, const char* name, Grid grid,
             const std::vector<Data>& data, double numbers = 1) {
  const double codes = most == 127 ? 1 : 0.5;
  const double n = static_cast<double>(block);
  row(most == 127 ? "int8" : "int4", block, scale.name, name,
      (n * codes + numbers * scale.bytes) / n / 4, data,
      [&](const float* at) { return grid(at, block, most, scale); });
}

// What csrc/codec does.
void tryOurs(Codec codec, bool stochastic, const std::vector<Data>& data) {
  constexpr size_t kSome = 1024;
  uint64_t seed = 0;
  const double bytes = static_cast<double>(codedBytes(codec, kSome)) / kSome / 4;
  row(name(codec), kCodecBlock, "(built)", stochastic ? "rounded at random" : "", bytes, data,
      [&](const float* at) {
        Floats error(kCodecBlock);
        std::vector<std::byte> coded(codedBytes(codec, kCodecBlock));
        const Draw draw{.seed = ++seed, .first = 0};
        encode(codec, coded.data(), error.data(), at, kCodecBlock, stochastic ? &draw : nullptr);
        double sum = 0;
        for (const float lost : error) sum += static_cast<double>(lost) * lost;
        return sum;
      });
}

// Data like gradients: of one range and of several, with long tails, and mostly zeros.
std::vector<Data> drawn() {
  constexpr size_t kCount = 1 << 18, kRow = 512;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::student_t_distribution<float> tails(3);
  std::vector<Data> data{
      {"normal", {}}, {"laplace", {}}, {"tails", {}}, {"columns", {}}, {"sparse", {}}};
  Floats columns(kRow);
  for (float& each : columns) each = std::exp(1.5f * normal(random));
  std::exponential_distribution<float> exponential;
  for (size_t i = 0; i < kCount; ++i) {
    const float sign = random() & 1 ? 1.f : -1.f;
    data[0].values.push_back(1e-4f * normal(random));
    data[1].values.push_back(1e-4f * sign * exponential(random));
    data[2].values.push_back(1e-4f * tails(random));
    data[3].values.push_back(1e-4f * normal(random) * columns[i % kRow]);
    data[4].values.push_back(random() % 10 == 0 ? 1e-4f * normal(random) : 0.f);
  }
  return data;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Data> data = drawn();
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    Floats values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), 4 * values.size());
    if (values.empty()) {
      std::fprintf(stderr, "%s: no float32 values\n", argv[i]);
      return 2;
    }
    const std::string path = argv[i], name = path.substr(path.rfind('/') + 1);
    data.push_back({name.substr(0, name.find('.')), values});
  }
  std::printf("%-5s %5s  %-10s %-22s %6s ", "codec", "block", "scale", "grid", "size");
  for (const Data& each : data) std::printf(" %8s", each.name.c_str());
  std::printf("\n");
  for (const int most : {127, 7})
    for (const size_t block : {16, 32, 64, 128})
      for (const Scale& scale : kScales) tryGrid(most, block, scale, "symmetric", symmetric, data);
  for (const size_t block : {16, 32, 64, 128}) {
    tryGrid(7, block, kScales[1], "one level more", oneMore, data);
    tryGrid(7, block, kScales[1], "least error of nine", leastError, data);
    tryGrid(7, block, kScales[1], "from least to greatest", fromLeast, data, 2);
  }
  for (int codec = 0; codec < kCodecs; ++codec)
    for (const bool stochastic : {false, true})
      tryOurs(static_cast<Codec>(codec), stochastic, data);
  return 0;
}
