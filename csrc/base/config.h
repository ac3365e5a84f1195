// All environment variables of ringreduce: the table of all, and a struct of those that C++ reads.
// No other C++ file reads ringreduce's variables; Python reads its own variables (os.environ).
//
// `Config::read()` never throws.  A bad value raises its error when a layer takes it (`get`), so
// that the error occurs where the other ranks can be informed.  Read it once for each group: users
// change variables between groups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace ringreduce {

// The value of a variable, its default where it is not set, or the error of a bad value.
template <class T>
class EnvValue {
 public:
  EnvValue(T value = {}) : value_(std::move(value)) {}
  EnvValue(Error error) : error_(std::move(error)) {}

  // Throws the error of a bad value.
  const T& get() const {
    if (error_) throw Error(*error_);
    return value_;
  }
  // The default instead of an error, where another place reports it.
  const T& orDefault() const { return value_; }

 private:
  T value_ = {};
  std::optional<Error> error_;
};

// An empty text or a 0 stands for a variable that is not set, where no default is given here.
struct Config {
  static constexpr int64_t kLeastSlotBytes = 4 << 10, kMostSlotBytes = 64 << 20;
  static constexpr int64_t kLeastSlots = 3, kMostSlots = 32;  // two-shot uses three at a time
  static constexpr int64_t kMostLanes = 64;
  static constexpr size_t kMostHostId = 255;  // bytes: it is a part of small messages

  EnvValue<std::string> algorithm{"auto"}, order{"ring"}, on_loss{"error"}, instruction_set, log;
  EnvValue<int64_t> slot_bytes, slots, min_ranks{1};
  EnvValue<double> stall_seconds{10};

  EnvValue<std::string> wire{"auto"}, interfaces, ports, congestion, ring, host_id;
  EnvValue<int64_t> lanes, tls;
  EnvValue<double> lost_seconds{3}, round_trip_ms, bandwidth_mbit;

  EnvValue<std::string> cuda_algorithm{"auto"}, cuda_way, cuda_map{"own"}, nccl;

  EnvValue<bool> removed;  // `get` throws if a variable of an earlier version is set

  std::string master_addr;        // MASTER_ADDR, torch's
  bool nccl_shares_gpus = false;  // NCCL_MULTI_RANK_GPU_ENABLE=1

  static Config read();
};

// Whether lines that are merely good to know are logged (RINGREDUCE_LOG=info).
bool logsInfo();

// One row of the table of variables.
struct Variable {
  const char* name;
  const char* fallback;  // the default, in words
  const char* values;    // which are allowed, with the unit
  const char* meaning;
  const char* holds;   // whose value holds: "each rank's", "rank 0's", ...
  const char* reader;  // "core" or "Python"

  // Now, in this process.
  std::string text;   // "" where it is not set
  std::string error;  // "" where the value can be read
};
std::vector<Variable> variables();

}  // namespace ringreduce
