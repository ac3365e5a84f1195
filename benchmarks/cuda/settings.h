// What ringreduce_cuda_perf is asked to do: its arguments.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "cuda/kernels/kernel_table.h"
#include "floors.h"

namespace perf {

enum class Mode { kCheck, kFloor, kSingle, kLatency, kProcesses, kKill, kBytes };
struct ModeInfo {
  const char* name;
  const char* shows;
};
inline constexpr std::array kModes{
    ModeInfo{"check", "bit for bit what the CPU ring gives: every dtype, op and algorithm"},
    ModeInfo{"floor", "bandwidth of a copy, and what each algorithm can reach at most with it"},
    ModeInfo{"single", "bandwidth of ranks of one process, one launch a rank"},
    ModeInfo{"latency", "small messages inside CUDA graphs, one launch a rank"},
    ModeInfo{"processes",
             "ranks that are processes, on GPUs of their own as far as there are; first H, one "
             "stream's wait for another's write"},
    ModeInfo{"kill",
             "a rank is killed, another time stopped: how long the others take to raise, and what "
             "works after"},
    ModeInfo{"bytes", "runs each algorithm once, for a profiler to count the bytes"},
};

// An error in the arguments.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

struct Settings {
  Mode mode = Mode::kCheck;
  bool help = false;
  bool reduced = false;  // check: a little of everything, for the sanitizers
  std::vector<int> ranks;
  std::vector<size_t> sizes;  // bytes
  std::vector<ringreduce::DType> dtypes;
  std::vector<ringreduce::ReduceOp> ops;
  std::vector<Path> paths;
  std::vector<std::string> ways;  // processes: how peers' memory is mapped
  int rounds = 9;
  std::string nccl;  // a library; empty: what NcclLibrary finds
  std::string json;  // a file to append to; empty: none

  const char* modeName() const { return kModes[static_cast<size_t>(mode)].name; }
};

inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, at);) words.push_back(word);
  return words;
}

// Bytes; K, M and G are of 1024.
inline size_t parseSize(const std::string& text) {
  size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string unit(end, text.data() + text.size());
  const std::string units = "KMG";
  const size_t at = unit.size() == 1 ? units.find(unit) : std::string::npos;
  if (error != std::errc() || (!unit.empty() && at == std::string::npos))
    throw UsageError("'" + text + "' is no size: bytes, or with K, M or G, as in 64K");
  const int shift = unit.empty() ? 0 : 10 * (static_cast<int>(at) + 1);
  if (value > (std::numeric_limits<size_t>::max() >> shift))
    throw UsageError("'" + text + "' is too large");
  return value << shift;
}

inline int parseInteger(const std::string& option, const std::string& text, int least, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    throw UsageError(option + " takes whole numbers from " + std::to_string(least) + " to " +
                     std::to_string(most) + ", not '" + text + "'");
  return value;
}

// From a first to a last, each so many times the one before.  The last is there in any case, and
// from 0 it goes on with 8.
inline void addRange(std::vector<size_t>& sizes, size_t size, size_t last, size_t factor) {
  if (factor < 2) throw UsageError("the factor from one size to the next must be at least 2");
  if (size > last) throw UsageError("the first size of a range is above the last");
  if (size == 0) sizes.push_back(std::exchange(size, 8));
  for (; size < last; size *= factor) {
    sizes.push_back(size);
    if (size > last / factor) break;
  }
  sizes.push_back(last);
}

// "1K,3M,64M:1G:4": sizes and ranges, whose factor is 4 if it is not said.
inline std::vector<size_t> parseSizes(const std::string& text) {
  std::vector<size_t> sizes;
  for (const std::string& item : split(text, ',')) {
    const std::vector<std::string> parts = split(item, ':');
    if (parts.empty() || parts.size() > 3)
      throw UsageError("'" + item + "' is neither a size nor FIRST:LAST[:FACTOR]");
    if (parts.size() == 1)
      sizes.push_back(parseSize(parts[0]));
    else
      addRange(sizes, parseSize(parts[0]), parseSize(parts[1]),
               parts.size() == 3 ? parseSize(parts[2]) : 4);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  if (sizes.empty()) throw UsageError("--sizes names no size");
  return sizes;
}

// One of many by its name, in any case of its letters.
template <class T, class NameOf>
T byName(const char* what, const std::string& text, int count, NameOf name_of) {
  const auto lower = [](std::string s) {
    for (char& c : s) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return s;
  };
  std::string all;
  for (int i = 0; i < count; ++i) {
    const std::string name = name_of(static_cast<T>(i));
    if (lower(name) == lower(text)) return static_cast<T>(i);
    all += (i > 0 ? ", " : "") + name;
  }
  throw UsageError(std::string("no ") + what + " is called '" + text + "': there are " + all);
}

template <class T, class NameOf>
std::vector<T> listOf(const char* what, const std::string& text, int count, NameOf name_of) {
  std::vector<T> list;
  if (text == "all") {
    for (int i = 0; i < count; ++i) list.push_back(static_cast<T>(i));
    return list;
  }
  for (const std::string& item : split(text, ',')) {
    const T value = byName<T>(what, item, count, name_of);
    if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
  }
  if (list.empty()) throw UsageError(std::string("an empty list, where a ") + what + " is wanted");
  return list;
}

inline std::vector<ringreduce::DType> dtypesNamed(const std::string& text) {
  return listOf<ringreduce::DType>("dtype that can be reduced", text,
                                   ringreduce::cuda::kKernelDTypes,
                                   [](ringreduce::DType t) { return ringreduce::name(t); });
}
inline std::vector<ringreduce::ReduceOp> opsNamed(const std::string& text) {
  return listOf<ringreduce::ReduceOp>("op", text, ringreduce::kReduceOps,
                                      [](ringreduce::ReduceOp op) { return ringreduce::name(op); });
}
inline std::vector<Path> pathsNamed(const std::string& text) {
  return listOf<Path>("algorithm", text, kPaths, [](Path path) { return name(path); });
}

inline std::string helpText() {
  std::string text =
      "ringreduce_cuda_perf MODE [options]: all-reduce on GPUs, without torch\n\nmodes:\n";
  for (const ModeInfo& mode : kModes)
    text += "  " + std::string(mode.name) + std::string(11 - std::string(mode.name).size(), ' ') +
            mode.shows + "\n";
  return text +
         "\noptions (what they are without it depends on the mode):\n"
         "  --ranks 2,4          numbers of ranks; processes and kill: rank r has GPU r modulo the "
         "count of GPUs, the others use the first one\n"
         "  --sizes 1K,64M:1G:4  bytes; a range is FIRST:LAST[:FACTOR]; or a range as in "
         "nccl-tests:\n"
         "  --minbytes, --maxbytes, --stepfactor\n"
         "  --dtypes float32,... or all\n"
         "  --ops SUM,...        or all\n"
         "  --algorithms direct,direct-staged,ring,twoshot,oneshot,zerocopy,ll   or all\n"
         "  --way descriptor,ipc processes: how they map each other's memory; also host and auto\n"
         "  --rounds N           rounds measured; their median counts\n"
         "  --nccl PATH          the NCCL to compare with (else RINGREDUCE_NCCL, else the "
         "system's)\n"
         "  --json FILE          append a line of JSON for each measurement\n"
         "  --reduced            check: a little of everything\n"
         "  --help\n"
         "\nExit status: 0; 1 for wrong results or an error; 2 for wrong arguments; 77 if it is "
         "not\n"
         "possible here (no GPU).\n";
}

// What is not asked for, by mode.
inline void fillIn(Settings& s) {
  const bool check = s.mode == Mode::kCheck, small = check && s.reduced;
  if (s.ranks.empty()) s.ranks = small ? std::vector<int>{2} : std::vector<int>{2, 4};
  if (s.sizes.empty()) {
    const char* sizes[] = {small ? "0,520,4100,300K" : "0:16M",
                           "64M,256M,1G",
                           "1K:1G",
                           "8:256K",
                           "1K:256M",
                           "1M",
                           "256M"};
    s.sizes = parseSizes(sizes[static_cast<size_t>(s.mode)]);
  }
  if (s.dtypes.empty())
    s.dtypes = dtypesNamed(small ? "float32,bfloat16,int8" : check ? "all" : "float32");
  if (s.ops.empty()) s.ops = opsNamed(small ? "SUM,AVG" : "SUM");
  if (s.paths.empty())
    s.paths = pathsNamed(check ? "all"
                         : s.mode == Mode::kBytes
                             ? "direct,ring,twoshot,oneshot"
                             : "direct,direct-staged,ring,twoshot,oneshot,zerocopy,ll");
  if (s.ways.empty()) s.ways = {"descriptor", "ipc"};
}

// Throws UsageError.
inline Settings parse(const std::vector<std::string>& arguments) {
  Settings s;
  bool chosen = false;
  const auto mode = [&](const std::string& text) {
    if (std::exchange(chosen, true)) throw UsageError("two modes; one is '" + text + "'");
    s.mode = byName<Mode>("mode", text, static_cast<int>(kModes.size()),
                          [](Mode m) { return kModes[static_cast<size_t>(m)].name; });
  };
  std::string least, most, factor;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& key = arguments[i];
    if (key == "--help" || key == "-h") {
      s.help = true;
      return s;
    }
    if (key == "--reduced") {
      s.reduced = true;
      continue;
    }
    if (!key.starts_with("--")) {
      mode(key);
      continue;
    }
    constexpr std::array kKnown{"--mode",     "--ranks",    "--sizes",      "--dtypes",
                                "--dtype",    "--ops",      "--op",         "--way",
                                "--rounds",   "--nccl",     "--algorithms", "--json",
                                "--minbytes", "--maxbytes", "--stepfactor"};
    if (std::find(kKnown.begin(), kKnown.end(), key) == kKnown.end())
      throw UsageError("there is no option " + key);
    if (++i == arguments.size()) throw UsageError(key + " wants a value");
    const std::string& value = arguments[i];
    if (key == "--mode") {
      mode(value);
    } else if (key == "--ranks") {
      for (const std::string& item : split(value, ','))
        s.ranks.push_back(parseInteger(key, item, 2, 16));
    } else if (key == "--sizes") {
      s.sizes = parseSizes(value);
    } else if (key == "--dtypes" || key == "--dtype") {
      s.dtypes = dtypesNamed(value);
    } else if (key == "--ops" || key == "--op") {
      s.ops = opsNamed(value);
    } else if (key == "--algorithms") {
      s.paths = pathsNamed(value);
    } else if (key == "--way") {
      s.ways = split(value, ',');
      for (const std::string& way : s.ways)
        if (way != "auto" && way != "descriptor" && way != "ipc" && way != "host")
          throw UsageError("no way is called '" + way +
                           "': there are descriptor, ipc, host and auto");
    } else if (key == "--minbytes") {
      least = value;
    } else if (key == "--maxbytes") {
      most = value;
    } else if (key == "--stepfactor") {
      factor = value;
    } else if (key == "--rounds") {
      s.rounds = parseInteger(key, value, 1, 1000);
    } else if (key == "--nccl") {
      s.nccl = value;
    } else {
      s.json = value;
    }
  }
  if (!chosen) throw UsageError("no mode");
  if (!least.empty() || !most.empty() || !factor.empty()) {
    if (!s.sizes.empty()) throw UsageError("--sizes and --minbytes, --maxbytes are one too many");
    if (least.empty() || most.empty()) throw UsageError("--minbytes and --maxbytes go together");
    addRange(s.sizes, parseSize(least), parseSize(most), factor.empty() ? 4 : parseSize(factor));
  }
  fillIn(s);
  return s;
}

}  // namespace perf
