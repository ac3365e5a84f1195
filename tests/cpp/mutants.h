// A test program of a protocol, which also runs that protocol with mistakes put in:
//
//     PROGRAM                    the protocol as it is: passes
//     PROGRAM --list-mutants     names of the mutants
//     PROGRAM --mutant NAME      the protocol with one mistake in it: must not pass
//
// run_mutants.sh runs them all under ThreadSanitizer, which alone catches a weakened memory order;
// the others are caught by wrong data or by a deadline as well.  Define CHECK_OWN_MAIN first.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "check.h"

namespace mutants {

using Mutants = std::map<std::string, std::function<void()>>;

// Mostly nothing, sometimes a yield, rarely a sleep: finds orders that a machine's own timing
// hides.
inline void randomDelay() {
  thread_local std::minstd_rand random(
      static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  const auto dice = random() % 256;
  if (dice < 16) std::this_thread::yield();
  if (dice == 16) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
}

inline int main(int argc, char** argv, const Mutants& mutants) {
  const std::string verb = argc > 1 ? argv[1] : "";
  if (verb == "--list-mutants") {
    for (const auto& [name, run] : mutants) std::puts(name.c_str());
    return 0;
  }
  if (verb == "--mutant") {
    const auto mutant = mutants.find(argc > 2 ? argv[2] : "");
    if (mutant == mutants.end()) {
      std::puts("no such mutant: --list-mutants names them");
      return 2;
    }
    check::tests().clear();
    static std::function<void()> body;
    body = mutant->second;
    check::tests().push_back({mutant->first.c_str(), [] { body(); }});
    return check::runAll(nullptr);
  }
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}

}  // namespace mutants
