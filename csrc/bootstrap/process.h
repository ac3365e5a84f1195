// This process and its host, and other ranks' processes: identities, whether one has ended or is
// stopped.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"

namespace ringreduce {

// Keeps a pidfd, or drops it for one of the same living process that another group already holds,
// so that many groups over the same ranks cost one descriptor a process.
std::shared_ptr<Fd> shareProcessFd(Fd pidfd);

// Which of these processes have ended; false for null entries.
std::vector<bool> ended(const std::vector<std::shared_ptr<Fd>>& processes);

// The process number behind a pidfd, in this process's PID namespace; 0 if it has none there.
int pidSeenHere(const std::shared_ptr<Fd>& process);

// Identifies this process's PID namespace; the same number means different processes in two of
// them.
std::string pidNamespace();

// Whether a process of this host is stopped (SIGSTOP, a debugger).  False if it cannot be seen.
bool isStopped(int pid);

// Sends SIGKILL.  The system may not permit it.
void kill(const std::shared_ptr<Fd>& process);

// ---- this host

std::string hostName();
// Equal for processes that can share memory through an abstract socket: the same kernel and the
// same network namespace.  RINGREDUCE_HOSTID replaces it, so that processes of one machine can pose
// as several hosts.
std::string hostId();

}  // namespace ringreduce
