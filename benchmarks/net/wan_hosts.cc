#include "wan_hosts.h"

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace wan {

namespace {

int openSelf() {
  const int fd = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
  if (fd < 0) die("cannot open this process's network namespace");
  return fd;
}

void enter(int space) {
  if (setns(space, CLONE_NEWNET) != 0) die("cannot enter a network namespace");
}

// This process is in another namespace while one of these exists.
class Inside {
 public:
  explicit Inside(int space) : home_(openSelf()) { enter(space); }
  ~Inside() {
    enter(home_);
    close(home_);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  int home_;
};

int makeSpace() {
  const int home = openSelf();
  if (unshare(CLONE_NEWNET) != 0) die("cannot make a network namespace (it needs root)");
  const int made = openSelf();
  enter(home);
  close(home);
  return made;
}

// Runs a program in a namespace and gives it `input` to read; whether it succeeded.
bool run(int space, const std::vector<std::string>& words, const std::string& input = "") {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) die("pipe");
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t child = fork();
  if (child < 0) die("fork");
  if (child == 0) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    if (setns(space, CLONE_NEWNET) != 0 || dup2(ends[0], STDIN_FILENO) < 0) _exit(126);
    dup2(STDERR_FILENO, STDOUT_FILENO);  // our own output is for answers
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(ends[0]);
  size_t written = 0;
  while (written < input.size()) {
    const ssize_t part = write(ends[1], input.data() + written, input.size() - written);
    if (part < 0 && errno == EINTR) continue;
    if (part <= 0) break;  // it has ended, and its status says how
    written += static_cast<size_t>(part);
  }
  close(ends[1]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void batch(int space, const std::string& tool, const std::string& lines) {
  errno = 0;
  if (!run(space, {tool, "-batch", "-"}, lines)) die(tool + " (of iproute2) failed at:\n" + lines);
}

bool hasIpv6(int mtu) {
  return mtu >= 1280 && std::filesystem::exists("/proc/sys/net/ipv6");
}

std::string number(int value) {
  return std::to_string(value);
}

std::string numbered(const std::string& what, int value) {
  return what + std::to_string(value);
}

std::string hexadecimal(int value) {
  char text[16];
  std::snprintf(text, sizeof text, "%x", static_cast<unsigned>(value));
  return text;
}

Interface makeInterface(const std::string& name, int index, int host, int mtu) {
  Interface made{name, numbered("10.", 88 + index) + numbered(".0.", host + 1), ""};
  if (hasIpv6(mtu)) {
    made.ipv6 = std::string("fd88:") + (index ? number(index) + "::" : ":") + hexadecimal(host + 1);
  }
  return made;
}

// Lines for ip(8).
std::string addresses(const Interface& of) {
  std::string lines = "addr add " + of.ipv4 + "/24 dev " + of.name + "\n";
  if (!of.ipv6.empty()) lines += "addr add " + of.ipv6 + "/64 dev " + of.name + " nodad\n";
  return lines + "link set " + of.name + " up\n";
}

std::string mac(int interface, int host) {
  char text[48];
  std::snprintf(text, sizeof text, "02:88:00:00:%02x:%02x", static_cast<unsigned>(interface),
                static_cast<unsigned>(host + 1));
  return text;
}

// What the kernel makes of that.
std::string linkLocal(int interface, int host) {
  char text[48];
  std::snprintf(text, sizeof text, "fe80::88:ff:fe00:%x",
                static_cast<unsigned>(interface << 8 | (host + 1)));
  return text;
}

std::string port(int interface, int host) {
  return numbered("h", host) + numbered("e", interface);
}

void nameSpaces(const Plan& plan, const std::vector<Host>& hosts) {
  if (plan.name.empty()) return;
  removeNames(plan);
  for (int host = 0; host < plan.hosts; ++host) {
    const int space = hosts[static_cast<size_t>(host)].space;
    const Inside there(space);
    if (!run(space, {"ip", "netns", "attach", plan.name + number(host), number(getpid())})) {
      die("cannot give a network namespace the name " + plan.name + number(host));
    }
  }
}

}  // namespace

void die(const std::string& what) {
  if (errno) {
    std::fprintf(stderr, "wan: %s: %s\n", what.c_str(), std::strerror(errno));
  } else {
    std::fprintf(stderr, "wan: %s\n", what.c_str());
  }
  std::exit(1);
}

std::string Host::netns() const {
  return numbered("/proc/", getpid()) + numbered("/fd/", space);
}

std::vector<Host> makeTunHosts(const Plan& plan) {
  std::vector<Host> hosts;
  for (int index = 0; index < plan.hosts; ++index) {
    Host host;
    host.space = makeSpace();
    host.interfaces = {makeInterface("wan0", 0, index, plan.mtu)};
    {
      const Inside there(host.space);
      host.tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
      if (host.tun < 0) die("cannot open /dev/net/tun");
      ifreq request{};
      std::strcpy(request.ifr_name, "wan0");
      request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
      if (ioctl(host.tun, TUNSETIFF, &request) != 0) die("cannot make a tun device");
      if (ioctl(host.tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) != 0) {
        die("the tun device takes no offloads");
      }
    }
    batch(host.space, "ip",
          "link set lo up\nlink set wan0 mtu " + number(plan.mtu) + " txqueuelen 5000\n" +
              addresses(host.interfaces[0]));
    hosts.push_back(std::move(host));
  }
  nameSpaces(plan, hosts);
  return hosts;
}

VethHosts::VethHosts(const Plan& plan) : plan_(plan), switch_(makeSpace()) {
  const std::string size = " mtu " + number(plan.mtu);
  std::string links, ports, shapes;
  for (int index = 0; index < plan.interfaces; ++index) {
    const std::string bridge = numbered("sw", index);
    links += "link add " + bridge + " type bridge stp_state 0 mcast_snooping 0\nlink set " +
             bridge + size + " up\n";
  }
  for (int index = 0; index < plan.hosts; ++index) {
    Host host;
    host.space = makeSpace();
    for (int k = 0; k < plan.interfaces; ++k) {
      const std::string name = numbered("eth", k), end = port(k, index);
      host.interfaces.push_back(makeInterface(name, k, index, plan.mtu));
      links += "link add " + end + size + " type veth peer name " + name + " address " +
               mac(k, index) + size + " netns " + host.netns() + "\nlink set " + end +
               " master sw" + number(k) + " up\n";
      ports += "link set dev " + end + " learning off flood off\nfdb replace " + mac(k, index) +
               " dev " + end + " master static\n";
      if (plan.rate_mbit > 0) shapes += shape("add", end, plan.rate_mbit);
    }
    hosts_.push_back(std::move(host));
  }
  batch(switch_, "ip", links);
  batch(switch_, "bridge", ports);
  if (!shapes.empty()) batch(switch_, "tc", shapes);
  for (int index = 0; index < plan.hosts; ++index) {
    const Host& host = hosts_[static_cast<size_t>(index)];
    std::string lines = "link set lo up\n", own;
    for (const Interface& interface : host.interfaces) {
      lines += addresses(interface);
      if (plan.rate_mbit > 0) own += shape("add", interface.name, plan.rate_mbit);
    }
    for (int to = 0; to < plan.hosts; ++to) {
      if (to != index) lines += neighbours(index, to, false);
    }
    batch(host.space, "ip", lines);
    if (!own.empty()) batch(host.space, "tc", own);
  }
  nameSpaces(plan, hosts_);
}

std::string VethHosts::shape(const std::string& verb, const std::string& device,
                             double mbit) const {
  char text[160];
  // The bucket holds one run of packets that the kernel has not cut up yet.
  std::snprintf(text, sizeof text,
                "qdisc %s dev %s root tbf rate %.0fbit burst %d latency %.0fms\n", verb.c_str(),
                device.c_str(), mbit * 1e6, 70'000, plan_.queue_ms);
  return text;
}

void VethHosts::setRate(int host, double mbit) {
  std::string outer, inner;
  for (int k = 0; k < plan_.interfaces; ++k) {
    outer += shape("replace", port(k, host), mbit);
    inner += shape("replace", numbered("eth", k), mbit);
  }
  batch(switch_, "tc", outer);
  batch(hosts_[static_cast<size_t>(host)].space, "tc", inner);
}

std::string VethHosts::neighbours(int from, int to, bool cut) const {
  std::string lines;
  const Host& there = hosts_[static_cast<size_t>(to)];
  for (int k = 0; k < plan_.interfaces; ++k) {
    const Interface& interface = there.interfaces[static_cast<size_t>(k)];
    const std::string way =
        " dev " + hosts_[static_cast<size_t>(from)].interfaces[static_cast<size_t>(k)].name +
        " lladdr " + mac(k, cut ? 254 : to) + " nud permanent\n";
    lines += "neigh replace " + interface.ipv4 + way;
    if (interface.ipv6.empty()) continue;
    lines += "neigh replace " + interface.ipv6 + way;
    lines += "neigh replace " + linkLocal(k, to) + way;
  }
  return lines;
}

void VethHosts::setCut(int from, int to, bool cut) {
  batch(hosts_[static_cast<size_t>(from)].space, "ip", neighbours(from, to, cut));
}

void killAll(const std::vector<Host>& hosts) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const int process = std::atoi(entry.path().filename().c_str());
    struct stat theirs{};
    if (process <= 0 || stat((entry.path() / "ns/net").c_str(), &theirs) != 0) continue;
    for (const Host& host : hosts) {
      struct stat ours{};
      if (fstat(host.space, &ours) == 0 && ours.st_ino == theirs.st_ino &&
          ours.st_dev == theirs.st_dev) {
        kill(process, SIGKILL);
      }
    }
  }
}

void removeNames(const Plan& plan) {
  if (plan.name.empty()) return;
  const int home = openSelf();
  for (int host = 0; host < plan.hosts; ++host) {
    const std::string name = plan.name + number(host);
    if (std::filesystem::exists("/run/netns/" + name)) run(home, {"ip", "netns", "del", name});
  }
  close(home);
}

}  // namespace wan
