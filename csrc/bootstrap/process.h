// This process and its host, and other ranks' processes: identities, whether one has ended or is
// stopped.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"

namespace ringreduce {

// What shows the end of a rank's process.  A pidfd shows the end of the process, whatever keeps its
// descriptors open.  The pipe shows the end of the program: its write end is closed by the kernel
// when the process ends, and when it runs another program in its place (exec), of which a pidfd
// shows nothing.  In both cases no thread of the program writes to memory any more.  But the kernel
// may close the pipe long before the descriptors of a GPU, whose kernels run until then.
struct ProcessFds {
  std::shared_ptr<Fd> pidfd;  // null where the kernel has none, or a sandbox refuses it
  std::shared_ptr<Fd> pipe;   // the read end; null if the process is this one or on another host
};

// Those of this process, for other ranks.  The pipe is the same for all groups.  Throws
// Error(kSetup) if there are no descriptors left.
ProcessFds ownProcessFds();

// Keeps a descriptor of a process, or drops it for the same one of a living process that another
// group already holds, so that many groups over the same ranks cost two descriptors a process.
// Null for none.
std::shared_ptr<Fd> shareProcessFd(Fd fd);

// Which of these processes have ended; false if there is no descriptor.
std::vector<bool> ended(const std::vector<ProcessFds>& processes);

// Whether nothing of that process is left, the kernels of its GPUs included.  Without a pidfd, and
// for a process of another host, that is not known: then it returns true.
bool hasExited(const ProcessFds& process);

// How one of them ended, as text after "is lost: ".
std::string howEnded(const ProcessFds& process);

// The process number behind a pidfd, in this process's PID namespace; 0 if it has none there.
int pidSeenHere(const std::shared_ptr<Fd>& process);

// Identifies this process's PID namespace; the same number means different processes in two of
// them.
std::string pidNamespace();

// Whether a process of this host is stopped (SIGSTOP, a debugger).  False if it cannot be seen.
bool isStopped(int pid);

// Sends SIGKILL, if there is a pidfd.  The system may not permit it.
void kill(const std::shared_ptr<Fd>& process);

// ---- this host

std::string hostName();
// Equal for processes that can share memory through an abstract socket: the same kernel and the
// same network namespace.  RINGREDUCE_HOSTID replaces it, so that processes of one machine can pose
// as several hosts.
std::string hostId();

}  // namespace ringreduce
