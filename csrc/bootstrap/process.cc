// pidfds and /proc.
#include "bootstrap/process.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

#include "base/config.h"

namespace ringreduce {

namespace {

// The process number behind a pidfd; 0 if it is unknown.
int numberOf(const Fd& pidfd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(pidfd.get()));
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("Pid:")) return std::max(0, std::atoi(line.c_str() + 4));
  return 0;
}

}  // namespace

std::shared_ptr<Fd> shareProcessFd(Fd pidfd) {
  static auto* mutex = new std::mutex;  // never destroyed: groups may outlive static objects
  static auto* known = new std::map<int, std::weak_ptr<Fd>>;
  const int number = numberOf(pidfd);
  if (number == 0) return std::make_shared<Fd>(std::move(pidfd));
  const std::lock_guard lock(*mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Fd>& entry = (*known)[number];
  // A number is used again only after its process has ended.
  if (auto fd = entry.lock(); fd && fd->get() >= 0 && !ended({fd})[0]) return fd;
  auto fd = std::make_shared<Fd>(std::move(pidfd));
  entry = fd;
  return fd;
}

int pidSeenHere(const std::shared_ptr<Fd>& process) {
  return process && *process ? numberOf(*process) : 0;
}

std::string pidNamespace() {
  struct stat status{};
  if (stat("/proc/self/ns/pid", &status) != 0) return "";
  return std::to_string(status.st_dev) + "/" + std::to_string(status.st_ino);
}

std::vector<bool> ended(const std::vector<std::shared_ptr<Fd>>& processes) {
  std::vector<pollfd> wanted;
  for (const auto& fd : processes)
    wanted.push_back({.fd = fd ? fd->get() : -1, .events = POLLIN, .revents = 0});
  ::poll(wanted.data(), wanted.size(), 0);
  std::vector<bool> result;
  // Not POLLNVAL: a descriptor that the program has closed tells nothing.
  for (const pollfd& p : wanted) result.push_back((p.revents & (POLLIN | POLLHUP)) != 0);
  return result;
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
  syscall(SYS_pidfd_send_signal, process->get(), SIGKILL, nullptr, 0);
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
