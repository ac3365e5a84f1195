// Hosts on one machine, and the lines between them, for tests and benchmarks.  Needs root.
//
//   wan --hosts 2 --delay-ms 25 --rate-mbit 500 --loss 0.001
//   wan --veth --hosts 4 --rate-mbit 1000 --mtu 9000
//
// A host is a network namespace (wan_hosts.h).  Without --veth each has a tun device, wan0, with
// the addresses 10.88.0.(H+1) and fd88::(H+1), and this program carries every packet between them
// itself, with a delay one way, a rate, a loss and a bound of the time spent queueing, for each
// direction of each pair.  With --veth the kernel carries them over bridges, shaped by tc's tbf on
// each host's line (--rate-mbit), and a host can have several interfaces (eth0 on 10.88.0.0/24,
// eth1 on 10.89.0.0/24, ...): there is no delay and no loss, but it costs less CPU time.
//
// Options: --hosts N (2)  --delay-ms D  --rate-mbit R (0: no limit)  --loss P (0 to 1)
//   --shared-line (what a host sends to all others shares its rate; else each pair has a line)
//   --queue-ms Q (200)  --mtu M (1500)  --seed S  --veth  --interfaces N (with --veth)
//   --name PREFIX  (ip netns exec PREFIX0 ...)  --keep  (do not end with the input or the parent)
//
// Once the hosts can talk it writes one line of JSON: {"hosts": [{"netns": a path to enter it by
// (nsenter --net=PATH), "interfaces": [{"name", "ipv4", "ipv6"}]}]}.  Then it takes commands from
// its standard input and answers each with one line, "ok", JSON or "error: ...":
//
//   link A B delay-ms=50 rate-mbit=100 loss=0.01 queue-ms=20    from A to B; either may be *
//   cut A [B]    from now on nothing passes between A and B (or anybody), in silence
//   heal A [B]   it does again
//   stats        what was carried and what was not, for each direction
//   quit         ends it, and the hosts are gone
//
// So do the end of the input, the end of the program that started it, and SIGTERM; these also kill
// whatever still runs on the hosts, since nobody may be left to do so.
//
// A rate is that of IP packets, headers included.  Hosts are numbered from 0.
#include <sched.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "wan_hosts.h"
#include "wan_link.h"
#include "wan_options.h"
#include "wan_packet.h"

namespace {

using namespace wan;

class Emulator {
 public:
  explicit Emulator(const Options& options)
      : options_(options),
        network_(options.plan.hosts, options.link, options.seed, options.shared) {
    if (options.veth) {
      veth_ = std::make_unique<VethHosts>(options.plan);
      hosts_ = veth_->hosts();
    } else {
      hosts_ = makeTunHosts(options.plan);
    }
  }

  std::string description() const {
    std::ostringstream out;
    out << "{\"hosts\": [";
    for (size_t h = 0; h < hosts_.size(); ++h) {
      out << (h ? ", " : "") << "{\"netns\": \"" << hosts_[h].netns() << "\", \"interfaces\": [";
      for (size_t k = 0; k < hosts_[h].interfaces.size(); ++k) {
        const Interface& interface = hosts_[h].interfaces[k];
        out << (k ? ", " : "") << "{\"name\": \"" << interface.name << "\", \"ipv4\": \""
            << interface.ipv4 << "\", \"ipv6\": \"" << interface.ipv6 << "\"}";
      }
      out << "]}";
    }
    out << "]}";
    return out.str();
  }

  // The answer to a command; "" ends it all.  Throws std::runtime_error.
  std::string answer(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "quit") return "";
    if (verb == "cut" || verb == "heal") return setCut(words, verb == "cut");
    if (verb == "link") return setLinks(words);
    if (verb == "stats") return network_.statistics();
    throw std::runtime_error("cannot take '" + line + "'");
  }

  // Whether it was told to end, by "quit".
  bool run();
  const std::vector<Host>& hosts() const { return hosts_; }

 private:
  enum class Input { kMore, kQuit, kEnd };

  // The host that a word names, or all.
  std::vector<int> hostsFrom(const std::string& word) const {
    std::vector<int> named;
    if (word == "*") {
      for (int host = 0; host < network_.hosts(); ++host) named.push_back(host);
    } else {
      const double value = numberFrom(word);
      if (value >= network_.hosts()) throw std::runtime_error("there is no host " + word);
      named.push_back(static_cast<int>(value));
    }
    return named;
  }

  std::string setCut(std::istringstream& words, bool cut) {
    std::string a, b = "*";
    words >> a >> b;
    for (const int from : hostsFrom(a)) {
      for (const int to : hostsFrom(b)) {
        if (from == to) continue;
        for (Link* link : {&network_.link(from, to), &network_.link(to, from)}) link->cut = cut;
        if (!veth_) continue;
        veth_->setCut(from, to, cut);
        veth_->setCut(to, from, cut);
      }
    }
    return "ok";
  }

  std::string setLinks(std::istringstream& words) {
    std::string a, b, setting;
    words >> a >> b;
    const std::vector<int> senders = hostsFrom(a), receivers = hostsFrom(b);
    while (words >> setting) {
      const size_t equals = setting.find('=');
      if (equals == std::string::npos) throw std::runtime_error("cannot take " + setting);
      const std::string what = setting.substr(0, equals);
      const double value = numberFrom(setting.substr(equals + 1));
      if (veth_) {
        if (what != "rate-mbit" || b != "*" || value <= 0) {
          throw std::runtime_error(
              "with --veth only a host's whole line has a rate: A * rate-mbit=");
        }
        for (const int from : senders) veth_->setRate(from, value);
        continue;
      }
      for (const int from : senders) {
        for (const int to : receivers) {
          Link& link = network_.link(from, to);
          if (!setLink(link, what, value)) throw std::runtime_error("cannot take " + setting);
          network_.drawLoss(link);
        }
      }
    }
    return "ok";
  }

  void receive(int from);
  void deliver();
  Input obey();

  Options options_;
  Network network_;
  std::unique_ptr<VethHosts> veth_;
  std::vector<Host> hosts_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(Run::kMost);
  std::string input_;
};

// What host `from` has sent.
void Emulator::receive(int from) {
  for (int burst = 0; burst < 64; ++burst) {
    const ssize_t got = read(hosts_[static_cast<size_t>(from)].tun, buffer_.data(), buffer_.size());
    if (got <= 0) return;
    const std::optional<Run> run = Run::of(buffer_.data(), static_cast<size_t>(got));
    if (!run) continue;
    static constexpr unsigned char kIpv4[] = {10, 88, 0};
    static constexpr unsigned char kIpv6[] = {0xfd, 0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const bool ours =
        run->version() == 4
            ? std::equal(std::begin(kIpv4), std::end(kIpv4),
                         reinterpret_cast<const unsigned char*>(run->destinationAddress()))
            : std::equal(std::begin(kIpv6), std::end(kIpv6),
                         reinterpret_cast<const unsigned char*>(run->destinationAddress()));
    const int to =
        static_cast<int>(run->version() == 4 ? run->destination() & 0xff : run->destination()) - 1;
    if (ours && to >= 0 && to < network_.hosts() && to != from) network_.take(from, to, *run);
  }
}

void Emulator::deliver() {
  for (;;) {
    const Network::Delivery next = network_.due(now());
    if (next.to < 0) return;
    // A host that takes no more loses it, as it would from a network card.
    if (write(hosts_[static_cast<size_t>(next.to)].tun, next.piece.data.get(), next.piece.bytes) <
            0 &&
        errno != EAGAIN && errno != ENOBUFS && errno != EINTR && errno != ENOMEM) {
      die("cannot give a packet to host " + std::to_string(next.to));
    }
  }
}

// Reads commands and answers them.
Emulator::Input Emulator::obey() {
  char text[4096];
  const ssize_t got = read(STDIN_FILENO, text, sizeof text);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return Input::kMore;
  if (got <= 0) return Input::kEnd;
  input_.append(text, static_cast<size_t>(got));
  for (size_t end; (end = input_.find('\n')) != std::string::npos; input_.erase(0, end + 1)) {
    std::string reply;
    try {
      reply = answer(input_.substr(0, end));
      if (reply.empty()) return Input::kQuit;
    } catch (const std::runtime_error& error) {
      reply = std::string("error: ") + error.what();
    }
    std::printf("%s\n", reply.c_str());
    std::fflush(stdout);
  }
  return Input::kMore;
}

bool Emulator::run() {
  sigset_t ends;
  sigemptyset(&ends);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&ends, signal);
  const int signals = signalfd(-1, &ends, SFD_CLOEXEC);
  const int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  const int parent = options_.keep ? -1 : static_cast<int>(syscall(SYS_pidfd_open, getppid(), 0));
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  if (signals < 0 || timer < 0 || poll < 0) die("cannot wait for events");
  const auto watch = [&](int fd, int tag) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = static_cast<uint32_t>(tag);
    return epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) == 0;
  };
  constexpr int kTimer = 1000, kEnd = 1001, kInput = 1002;
  watch(signals, kEnd);
  watch(timer, kTimer);
  if (parent >= 0) watch(parent, kEnd);
  // A plain file cannot be watched; it is as good as ended.
  if (!watch(STDIN_FILENO, kInput) && !options_.keep) return false;
  for (size_t h = 0; h < hosts_.size(); ++h) {
    if (hosts_[h].tun >= 0) watch(hosts_[h].tun, static_cast<int>(h));
  }

  Nanos armed = 0;
  for (;;) {
    epoll_event events[64];
    const int count = epoll_wait(poll, events, 64, -1);
    if (count < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < count; ++i) {
      const int tag = static_cast<int>(events[i].data.u32);
      if (tag == kEnd) return false;
      if (tag == kTimer) {
        uint64_t ticks;
        if (read(timer, &ticks, sizeof ticks) < 0 && errno != EAGAIN) die("timer");
        armed = 0;
      } else if (tag == kInput) {
        const Input input = obey();
        if (input == Input::kQuit) return true;
        if (input == Input::kMore) continue;
        if (!options_.keep) return false;
        epoll_ctl(poll, EPOLL_CTL_DEL, STDIN_FILENO, nullptr);
      } else {
        receive(tag);
      }
    }
    deliver();
    const Nanos next = network_.nextDue();
    if (next && next != armed) {
      itimerspec when{};
      when.it_value.tv_sec = next / 1'000'000'000;
      when.it_value.tv_nsec = next % 1'000'000'000;
      timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, nullptr);
      armed = next;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Before anything is made, so that no signal can end this program before it was taken away.
  sigset_t ends;
  sigemptyset(&ends);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&ends, signal);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  Options options;
  try {
    options = optionsFrom(argc, argv);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "wan: %s\n", error.what());
    return 2;
  }
  Emulator emulator(options);
  // A line does not wait for a processor, so this program comes before those that compute.
  sched_param first{};
  first.sched_priority = 1;
  if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &first) != 0) {
    setpriority(PRIO_PROCESS, 0, -20);
  }
  std::printf("%s\n", emulator.description().c_str());
  std::fflush(stdout);
  if (!emulator.run()) killAll(emulator.hosts());
  removeNames(options.plan);
  return 0;
}
