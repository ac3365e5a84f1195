// Hosts: network namespaces, each with its interfaces and addresses.
//
// The namespaces have no names unless one is asked for: they live as long as this program has them
// open, or a process runs in them, so nothing is left behind however it ends.  Whoever wants to
// enter one opens /proc/PID/fd/N (netns() below).
#pragma once

#include <string>
#include <vector>

namespace wan {

struct Interface {
  std::string name, ipv4, ipv6;  // "" where there is no IPv6
};

struct Host {
  int space = -1;  // the namespace
  int tun = -1;    // with the emulator
  std::vector<Interface> interfaces;
  std::string netns() const;
};

struct Plan {
  int hosts = 2;
  int interfaces = 1;
  int mtu = 1500;
  double rate_mbit = 0;
  double queue_ms = 200;
  std::string name;  // also as /run/netns/<name>0 and so on
};

// All of these end the program with a message if the system refuses.
std::vector<Host> makeTunHosts(const Plan& plan);

// Hosts on bridges, one for each interface, in a namespace of its own.  Addresses of neighbours are
// written down and not asked for, so that a cut is silent: it writes down wrong ones.
class VethHosts {
 public:
  explicit VethHosts(const Plan& plan);
  const std::vector<Host>& hosts() const { return hosts_; }
  void setRate(int host, double mbit);
  void setCut(int from, int to, bool cut);

 private:
  std::string neighbours(int from, int to, bool cut) const;
  std::string shape(const std::string& verb, const std::string& device, double mbit) const;

  Plan plan_;
  int switch_ = -1;
  std::vector<Host> hosts_;
};

// Kills every process that is on one of the hosts.
void killAll(const std::vector<Host>& hosts);

// Takes the names away again.
void removeNames(const Plan& plan);

// Ends the program with a message.
[[noreturn]] void die(const std::string& what);

}  // namespace wan
