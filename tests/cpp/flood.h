// Strangers at the ports of a job that trains: garbage, half handshakes, silence, connections that
// end at once, and what was recorded of a rank, again.
//
// Two ranks train over sockets in processes of their own, and a third process floods their ports.
// All of it is on loopback.  For the replays a store tells what somebody could have overheard who
// reads the network, and for the recording even the secret.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <new>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "bootstrap/meeting.h"
#include "group/group.h"
#include "processes.h"
#include "ranks.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/handshake.h"

namespace flood {

using namespace ringreduce;

inline constexpr int kRanks = 2;
inline constexpr size_t kHeld = 300;  // more than strangers may have open at a port

// What the processes share.
struct Scene {
  std::atomic<int> ports[kRanks] = {};
  std::atomic<bool> overheard = false, over = false;
  std::atomic<uint64_t> tried = 0;
  char word[64] = {}, secret[128] = {};

  static Scene& shared() {
    void* memory =
        mmap(nullptr, sizeof(Scene), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory to share");
    return *new (memory) Scene;
  }
  bool begun() const { return overheard && ports[0] > 0 && ports[1] > 0; }
};

// A store that tells the scene the group's secret.
class OverheardStore final : public Store {
 public:
  OverheardStore(Store& store, Scene& scene) : store_(store), scene_(scene) {}
  void set(const std::string& key, const std::string& value) override {
    const Fields fields = decode(value);
    if (const std::string secret = word(fields, "secret"); fields.contains("go")) {
      std::strncpy(scene_.word, word(fields, "nonce").c_str(), sizeof scene_.word - 1);
      std::strncpy(scene_.secret, secret.c_str(), sizeof scene_.secret - 1);
      if (word(fields, "go") == "1") scene_.overheard = true;
    }
    store_.set(key, value);
  }
  std::optional<std::string> get(const std::string& key) override { return store_.get(key); }
  void remove(const std::string& key) override { store_.remove(key); }

 private:
  Store& store_;
  Scene& scene_;
};

// What a rank says that is let in: once.
inline std::string recording(const std::string& group, const net::Secret& secret) {
  const net::PeerHello caller{.group = group, .from = 0, .to = 1, .purpose = net::Purpose::kData};
  net::Handshake rank = net::Handshake::dialler(caller, secret);
  net::Handshake door = net::Handshake::acceptor(
      [&](const net::PeerHello&) { return std::optional<net::Secret>(secret); });
  std::string said;
  while (door.state() == net::Handshake::State::kGoesOn) {
    const std::string part = rank.takeOutput();
    said += part;
    door.feed(std::as_bytes(std::span(part)));
    const std::string answer = door.takeOutput();
    rank.feed(std::as_bytes(std::span(answer)));
  }
  return said;
}

class Strangers {
 public:
  explicit Strangers(const Scene& scene) : scene_(scene) {
    replay_ = recording(scene.word, net::secretFromText(scene.secret));
  }

  void connectOne() {
    const int port = scene_.ports[number_ % kRanks];
    Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    // Who finds no place in the queue is one of the flood all the same.
    (void)!connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
    switch (number_++ / kRanks % 6) {
      case 0: {
        std::string garbage(1 + random_() % 400, '\0');
        for (char& c : garbage) c = static_cast<char>(random_());
        say(fd, garbage);
        break;
      }
      case 1:
        say(fd, replay_.substr(0, random_() % replay_.size()));
        break;
      case 2:
        break;  // says nothing
      case 3:
        fd.reset();
        return;
      case 4: {
        const linger at_once{.l_onoff = 1, .l_linger = 0};
        setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        return;
      }
      default:
        say(fd, replay_);
    }
    held_.push_back(std::move(fd));
    if (held_.size() > kHeld) held_.pop_front();
  }

 private:
  static void say(const Fd& fd, const std::string& text) {
    (void)!send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  const Scene& scene_;
  std::string replay_;
  std::minstd_rand random_{1};
  uint64_t number_ = 0;
  std::deque<Fd> held_;
};

// One step: something to compute, and gradients to sum, of which each rank knows what the sum is.
// The last step is the one in which rank 0 says so; returns whether this was it.
inline bool step(Group& group, std::vector<float>& gradients, int number, bool last) {
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i] = static_cast<float>((i + static_cast<size_t>(number)) % 1000 +
                                      static_cast<size_t>(group.rank()));
  gradients.back() = group.rank() == 0 && last ? 1.0f : 0.0f;
  group.run({AllReduce{gradients.data(), gradients.size(), DType::kFloat32, ReduceOp::kSum}});
  for (size_t i = 0; i + 1 < gradients.size(); ++i)
    if (gradients[i] != static_cast<float>(2 * ((i + static_cast<size_t>(number)) % 1000) + 1))
      throw std::runtime_error("a wrong sum in step " + std::to_string(number));
  return gradients.back() > 0;
}

// Runs `train` in each rank's process and `strangers` in another one; how they ended.
inline processes::Ends run(Scene& scene, const std::function<void(Group&)>& train,
                           const std::function<void(Strangers&)>& strangers) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp"), interface("RINGREDUCE_IF", "127.0.0.1");
  processes::SharedStore store;
  OverheardStore overheard(store, scene);
  return processes::run(kRanks + 1, [&](int r) {
    if (r == kRanks) {
      while (!scene.begun() && !scene.over) usleep(1000);
      if (scene.over) return;
      Strangers all(scene);
      strangers(all);
      return;
    }
    const auto acceptor = net::Acceptor::shared("");
    scene.ports[r] = acceptor->endpoint().addresses.at(0).port();
    try {
      const auto group = Group::create(overheard, r, kRanks, {.name = "training"});
      train(*group);
      group->shutdown();
    } catch (...) {
      scene.over = true;
      throw;
    }
  });
}

}  // namespace flood
