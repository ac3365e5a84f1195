// What all steps of the bootstrap have in common: messages as lines of key=value, the identity of
// this process and its host, and the clock of making a group.
#pragma once

#include <map>
#include <string>

#include "base/clock.h"
#include "bootstrap/options.h"

namespace ringreduce {

inline constexpr char kVersion[] = "4";  // of these messages and of the layout of shared memory

// The period of polling for events that cannot wake a waiting process.
inline constexpr Nanos kTick = 50 * kMillisecond;

using Fields = std::map<std::string, std::string>;
std::string encode(const Fields& fields);
Fields decode(const std::string& text);
std::string word(const Fields& fields, const char* key);  // "" if it is not there
int64_t number(const Fields& fields, const char* key);    // -1 if it is not there, or no number

std::string randomHex();  // 256 bits
bool sameSecret(const std::string& a, const std::string& b);

std::string hostName();
// Equal for processes that can share memory through an abstract socket: the same kernel and the
// same network namespace.  RINGREDUCE_HOSTID replaces it, so that processes of one machine can pose
// as several hosts.
std::string hostId();

// How long making a group has taken, and may take.
class Stopwatch {
 public:
  explicit Stopwatch(const GroupOptions& options);

  bool over(Nanos grace = 0) const { return waited() - grace >= options_.timeout; }
  Nanos waited() const { return now() - started_; }

  // Called on every turn of a waiting loop: lets Ctrl-C end it and reports a stall now and then.
  // `missing` returns what is waited for.
  template <class Missing>
  void turn(int rank, Missing missing) {
    if (options_.interrupt) options_.interrupt();
    if (now() >= next_report_) report(rank, missing());
  }

 private:
  void report(int rank, const std::string& missing);

  const GroupOptions& options_;
  const Nanos started_;
  Nanos next_report_;
};

}  // namespace ringreduce
