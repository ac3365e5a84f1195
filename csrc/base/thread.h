// Threads of ringreduce's own.
#pragma once

#include <pthread.h>

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace ringreduce {

// Starts a thread that receives no signals, which are for the threads of the user's program.
// `name`: as the system shows it, 15 characters at most.  `purpose`: "for messages".  Throws
// Error(kSetup).
template <size_t N, class F>
std::thread startThread(const char (&name)[N], const std::string& purpose, F run) {
  static_assert(N <= 16, "the kernel takes no longer name");
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread([&name, run = std::move(run)]() mutable {
      pthread_setname_np(pthread_self(), name);
      run();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(Failure::kSetup, noThread(purpose, error));
  }
}

}  // namespace ringreduce
