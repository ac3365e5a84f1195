// What ringreduce_cuda_perf says: tables with nccl-tests' columns, and lines of JSON.
#pragma once

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "base/dtype.h"
#include "floors.h"

namespace perf {

// Microseconds of several rounds.
struct Times {
  double median = 0, least = 0, most = 0;
};

inline Times timesOf(std::vector<double> seconds) {
  if (seconds.empty()) throw std::logic_error("no round was timed");
  std::sort(seconds.begin(), seconds.end());
  const size_t n = seconds.size();
  const double median = (seconds[(n - 1) / 2] + seconds[n / 2]) / 2;
  return {median * 1e6, seconds.front() * 1e6, seconds.back() * 1e6};
}

// GB/s, of 10^9 bytes.
inline double algorithmBandwidth(size_t bytes, double microseconds) {
  return microseconds > 0 ? static_cast<double>(bytes) / microseconds / 1e3 : 0;
}

// --- JSON ----------------------------------------------------------------------------------------

// An object, in the order in which it is filled.
class Json {
 public:
  Json& add(const char* key, const std::string& value) { return put(key, quoted(value)); }
  Json& add(const char* key, const char* value) { return put(key, quoted(value)); }
  Json& add(const char* key, bool value) { return put(key, value ? "true" : "false"); }
  template <class T>
    requires std::is_integral_v<T>
  Json& add(const char* key, T value) {
    return put(key, std::to_string(value));
  }
  Json& add(const char* key, double value) { return put(key, number(value)); }
  Json& add(const char* key, const Times& t) {
    return add(key, std::vector<double>{t.median, t.least, t.most});
  }
  Json& add(const char* key, const std::vector<double>& values) {
    std::string text;
    for (double value : values) text += (text.empty() ? "" : ", ") + number(value);
    return put(key, "[" + text + "]");
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  Json& put(const char* key, const std::string& value) {
    text_ += (text_.empty() ? "" : ", ") + quoted(key) + ": " + value;
    return *this;
  }
  // JSON has neither infinities nor NaN.
  static std::string number(double value) {
    char text[40];
    std::snprintf(text, sizeof text, "%.9g", value);
    return value - value == 0 ? text : "null";
  }
  static std::string quoted(const std::string& value) {
    std::string text = "\"";
    for (char c : value) {
      const auto code = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        text += {'\\', c};
      } else if (code < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
        text += escaped;
      } else {
        text += c;
      }
    }
    return text + "\"";
  }

  std::string text_;
};

// A file that each line is appended to at once, so that what was measured before a hang is kept.
inline void append(const std::string& path, const Json& line) {
  if (path.empty()) return;
  FILE* file = std::fopen(path.c_str(), "a");
  bool good = file && std::fprintf(file, "%s\n", line.text().c_str()) > 0;
  if (file) good = std::fclose(file) == 0 && good;
  if (!good) throw std::runtime_error("cannot write to " + path + " (--json)");
}

// --- Measurements --------------------------------------------------------------------------------

// One contender at one size: a row of the table and a line of the file.
struct Measurement {
  std::string mode, algorithm, way;
  int ranks = 2, gpus = 1;  // that the ranks use
  ringreduce::DType dtype = ringreduce::DType::kFloat32;
  ringreduce::ReduceOp op = ringreduce::ReduceOp::kSum;
  size_t bytes = 0;
  Times time;  // out of place
  std::optional<Times> in_place;
  size_t wrong = 0, in_place_wrong = 0;  // elements
  std::optional<double> floor_us;        // the least time, by the algorithm's formula
  std::optional<double> hop_us;          // H
  std::optional<double> nccl_us;         // NCCL's time beside it

  Json json() const {
    Json line;
    const double algbw = algorithmBandwidth(bytes, time.median);
    line.add("mode", mode).add("ranks", ranks).add("gpus", gpus).add("sharing", gpus < ranks);
    line.add("algorithm", algorithm);
    line.add("dtype", ringreduce::name(dtype)).add("op", ringreduce::name(op)).add("bytes", bytes);
    line.add("time_us", time).add("algbw", algbw).add("busbw", busBandwidth(algbw, ranks));
    line.add("wrong", wrong + in_place_wrong);
    if (in_place) line.add("in_place_us", *in_place);
    if (!way.empty()) line.add("way", way);
    if (floor_us) line.add("floor_us", *floor_us);
    if (hop_us) line.add("hop_us", *hop_us);
    if (nccl_us) line.add("nccl_us", *nccl_us);
    return line;
  }
};

inline std::string shortNumber(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.2f" : value < 1000 ? "%.1f" : "%.0f", value);
  return text;
}

// One side of a row: time [least, most] algbw busbw #wrong.
inline std::string sideText(const Times& t, size_t bytes, int ranks, size_t wrong) {
  const double algbw = algorithmBandwidth(bytes, t.median);
  char text[128];
  std::snprintf(text, sizeof text, "%10s [%8s,%9s] %7s %7s %6zu", shortNumber(t.median).c_str(),
                shortNumber(t.least).c_str(), shortNumber(t.most).c_str(),
                shortNumber(algbw).c_str(), shortNumber(busBandwidth(algbw, ranks)).c_str(), wrong);
  return text;
}

// What a table says besides nccl-tests' columns.
enum class Extra { kNone, kFloorAndNccl, kHops };

inline std::string tableHeader(Extra extra) {
  const char* const side = "  time(us) [   least,     most]   algbw   busbw #wrong";
  char text[400];
  std::snprintf(text, sizeof text, "%12s %11s %9s %10s %-18s |%-54s |%-54s |%s", "size(B)", "count",
                "type", "redop", "contender", " out-of-place:", " in-place:",
                extra == Extra::kFloorAndNccl ? " ceiling  x NCCL"
                : extra == Extra::kHops       ? "    in H x bytes"
                                              : "");
  char second[400];
  std::snprintf(second, sizeof second, "%12s %11s %9s %10s %-18s |%-54s |%-54s |", "", "", "", "",
                "", side, side);
  return std::string(text) + "\n" + second;
}

inline std::string tableRow(const Measurement& m, Extra extra) {
  const size_t count = m.bytes / ringreduce::sizeOf(m.dtype);
  char begin[128];
  std::snprintf(begin, sizeof begin, "%12zu %11zu %9s %10s %-18s |", m.bytes, count,
                ringreduce::name(m.dtype), ringreduce::name(m.op), m.algorithm.c_str());
  std::string text = begin;
  const auto side = [&](const std::string& shown) {
    char padded[160];
    std::snprintf(padded, sizeof padded, "%-54s |", shown.c_str());
    text += padded;
  };
  side(sideText(m.time, m.bytes, m.ranks, m.wrong));
  side(m.in_place ? sideText(*m.in_place, m.bytes, m.ranks, m.in_place_wrong) : "");
  const auto ratio = [&](std::optional<double> value) {
    char shown[16] = "       -";
    if (value) std::snprintf(shown, sizeof shown, " %7.2f", *value);
    text += shown;
  };
  const double time = m.time.median;
  if (extra == Extra::kFloorAndNccl) {
    ratio(m.floor_us ? std::optional(*m.floor_us / time) : std::nullopt);
    ratio(m.nccl_us ? std::optional(*m.nccl_us / time) : std::nullopt);
  } else if (extra == Extra::kHops) {
    ratio(m.hop_us ? std::optional(time / *m.hop_us) : std::nullopt);
    ratio(m.floor_us ? std::optional(time / *m.floor_us) : std::nullopt);
  }
  return text;
}

// Above every table: whose figures these are.
inline std::string titleOf(int ranks, int gpus, const std::string& rest) {
  const std::string where = gpus == 1       ? " ranks sharing one GPU, "
                            : gpus == ranks ? " ranks, each on a GPU of its own, "
                                            : " ranks on " + std::to_string(gpus) + " GPUs, ";
  return "# " + std::to_string(ranks) + where + rest;
}

}  // namespace perf
