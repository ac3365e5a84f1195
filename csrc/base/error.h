// Errors and log lines.
//
// A group that has failed stays failed: every later operation on it raises the same error.  The
// text names ranks, hosts and the operation, and is made where these are known (csrc/health).
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace ringreduce {

enum class Failure : uint8_t {
  kNone = 0,
  kPeerLost,  // a process ended, or left the group, before its part was done
  kTimeout,   // a rank did not arrive, or stopped, before the deadline
  kMismatch,  // ranks disagree about the operation
  kAborted,   // a rank gave up: abort(), Ctrl-C, an error of its own
  kSetup,     // the group could not be made
  kArgument,  // refused before anything was sent; the group stays usable
};

inline constexpr int kNobody = -1;  // in the place of a rank to blame

// Why a group failed, as reported by the rank that found the cause first.
struct GroupFailure {
  Failure kind = Failure::kNone;
  int culprit = kNobody, reporter = 0;
  std::string text;

  bool operator==(const GroupFailure&) const = default;
};

// What an error is about, for programs; its text says more, for people.
struct Facts {
  int rank = kNobody;      // held responsible, the first if there are several
  int reporter = kNobody;  // the rank that noticed it
  std::string group = "";
  std::optional<bool> is_final = std::nullopt;  // the group has failed; unset: not known here
};

class Error : public std::runtime_error {
 public:
  Error(Failure kind, const std::string& what, Facts facts = {})
      : std::runtime_error(what), kind_(kind), facts_(std::move(facts)) {}
  Failure kind() const { return kind_; }
  const Facts& facts() const { return facts_; }

 private:
  Failure kind_;
  Facts facts_;
};

// An error of the operating system, with errno's text.
[[noreturn]] inline void throwErrno(Failure kind, const std::string& what) {
  throw Error(kind, what + ": " + std::generic_category().message(errno));
}

// The text of a thread that cannot be started.  `purpose`: "for messages".
inline std::string noThread(const std::string& purpose, const std::system_error& error) {
  return "ringreduce cannot start a thread " + purpose + ": " + error.code().message() +
         "; is a limit on processes reached (ulimit -u, pids.max of the container)?";
}

// A line on standard error, in one write, with a mark of ours.  For errors and stalls; other lines
// only if logsInfo() (base/config.h).
inline void log(const std::string& text) {
  const std::string line = "[ringreduce] " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace ringreduce
