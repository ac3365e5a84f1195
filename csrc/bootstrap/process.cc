// pidfds, pipes and /proc.
#include "bootstrap/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "base/text.h"
#include "bootstrap/unix_socket.h"
#include "transport/wait_guard.h"

namespace ringreduce {

namespace {

// The process number behind a pidfd; 0 if it is unknown.
int numberOf(const Fd& pidfd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(pidfd.get()));
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("Pid:")) return std::max(0, std::atoi(line.c_str() + 4));
  return 0;
}

// Both ends of the pipe of this process, which stay open for as long as its program runs: another
// rank may still be in a group that this one has left.
struct OwnPipe {
  Fd write_end;
  std::shared_ptr<Fd> read_end;
  std::shared_ptr<OwnPipe> self;  // never destroyed
};

// A kernel or a sandbox may refuse pidfd_open, and give a pidfd of a socket's peer.
Fd ownPidfd() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throwErrno(Failure::kSetup, "cannot make a Unix socket");
  const Fd socket(ends[0]), other(ends[1]);
  return pidfdOf(socket, {.pid = getpid(), .uid = geteuid()});
}

// How long a process may take to end after its descriptors were closed.
constexpr int kEndingMs = 100;

// Whether the process runs and is not on its way to its end.  False if it cannot be seen.
bool keepsRunning(int pid) {
  constexpr unsigned kExiting = 4;  // PF_EXITING, set before descriptors are closed
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat{std::istreambuf_iterator<char>(file), {}};
  // The name, in parentheses, may contain anything.
  TextReader rest(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
  char state = 0;
  long parent = 0, process_group = 0, session = 0, terminal = 0, foreground = 0;
  unsigned flags = kExiting;
  rest >> state >> parent >> process_group >> session >> terminal >> foreground >> flags;
  return rest && state != 'Z' && state != 'X' && !(flags & kExiting);
}

}  // namespace

ProcessFds ownProcessFds() {
  static PerProcess<OwnPipe> of_this_process;
  const auto pipe = of_this_process.get([] {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
      throwErrno(Failure::kSetup, "cannot make the pipe that shows the end of this process");
    auto made = std::make_shared<OwnPipe>();
    made->read_end = std::make_shared<Fd>(ends[0]);
    made->write_end = Fd(ends[1]);
    return made->self = made;
  });
  return {.pidfd = shareProcessFd(ownPidfd()), .pipe = pipe->read_end};
}

std::shared_ptr<Fd> shareProcessFd(Fd fd) {
  static auto* mutex = new std::mutex;  // never destroyed: groups may outlive static objects
  static auto* known = new std::map<std::pair<bool, uint64_t>, std::weak_ptr<Fd>>;
  if (!fd) return nullptr;
  struct stat status{};
  const bool is_pipe = fstat(fd.get(), &status) == 0 && S_ISFIFO(status.st_mode);
  const uint64_t number = is_pipe ? status.st_ino : static_cast<uint64_t>(numberOf(fd));
  if (number == 0) return std::make_shared<Fd>(std::move(fd));
  const std::lock_guard lock(*mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Fd>& entry = (*known)[{is_pipe, number}];
  // A number is used again only after its process has ended.
  if (auto held = entry.lock(); held && held->get() >= 0) {
    const ProcessFds process = is_pipe ? ProcessFds{.pidfd = nullptr, .pipe = held}
                                       : ProcessFds{.pidfd = held, .pipe = nullptr};
    if (!ended({process})[0]) return held;
  }
  auto kept = std::make_shared<Fd>(std::move(fd));
  entry = kept;
  return kept;
}

int pidSeenHere(const std::shared_ptr<Fd>& process) {
  return process && *process ? numberOf(*process) : 0;
}

std::string pidNamespace() {
  struct stat status{};
  if (stat("/proc/self/ns/pid", &status) != 0) return "";
  return std::to_string(status.st_dev) + "/" + std::to_string(status.st_ino);
}

std::vector<bool> ended(const std::vector<ProcessFds>& processes) {
  // Only those of this host: poll() takes no more entries than this process may open files.
  std::vector<pollfd> wanted;
  std::vector<size_t> whose;
  for (size_t i = 0; i < processes.size(); ++i)
    for (const Fd* fd : {processes[i].pidfd.get(), processes[i].pipe.get()})
      if (fd) {
        wanted.push_back({.fd = fd->get(), .events = POLLIN, .revents = 0});
        whose.push_back(i);
      }
  std::vector<bool> result(processes.size());
  if (wanted.empty()) return result;
  ::poll(wanted.data(), wanted.size(), 0);
  // Not POLLNVAL: a descriptor that the program has closed tells nothing.
  for (size_t i = 0; i < wanted.size(); ++i)
    if (wanted[i].revents & (POLLIN | POLLHUP)) result[whose[i]] = true;
  return result;
}

bool hasExited(const ProcessFds& process) {
  return !process.pidfd || ended({{.pidfd = process.pidfd, .pipe = nullptr}})[0];
}

std::string howEnded(const ProcessFds& process) {
  if (!process.pidfd) return kProcessEndedOrReplaced;
  pollfd wanted{.fd = process.pidfd->get(), .events = POLLIN, .revents = 0};
  ::poll(&wanted, 1, kEndingMs);
  if (wanted.revents & POLLIN) return kProcessEnded;
  // A process that holds GPUs may take seconds to end.
  const int pid = pidSeenHere(process.pidfd);
  return pid != 0 && keepsRunning(pid) ? kProcessReplaced : kProcessEndedOrReplaced;
}

bool isStopped(int pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("State:"))
      return line.find("T (stopped") != std::string::npos ||
             line.find("t (tracing") != std::string::npos;
  return false;
}

void kill(const std::shared_ptr<Fd>& process) {
  if (process) syscall(SYS_pidfd_send_signal, process->get(), SIGKILL, nullptr, 0);
}

// ---- this host

std::string hostName() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string hostId() {
  if (const std::string posed = Config::read().host_id.get(); !posed.empty()) return posed;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char ns[64] = {};
  if (readlink("/proc/self/ns/net", ns, sizeof ns - 1) < 0) ns[0] = 0;
  return boot + ns;
}

}  // namespace ringreduce
