#include "wan_options.h"

#include <cstdlib>
#include <stdexcept>

namespace wan {

namespace {

constexpr int kMostHosts = 200;

}  // namespace

double numberFrom(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end || !(value >= 0 && value < 1e12)) {
    throw std::runtime_error("'" + text + "' is no number that fits here");
  }
  return value;
}

bool setLink(Link& link, const std::string& what, double value) {
  if (what == "delay-ms") {
    link.delay = static_cast<Nanos>(value * 1e6);
  } else if (what == "rate-mbit") {
    link.bits_per_nano = value / 1e3;
  } else if (what == "loss") {
    if (value > 1) throw std::runtime_error("a loss is at most 1");
    link.loss = value;
  } else if (what == "queue-ms") {
    link.queue = static_cast<Nanos>(value * 1e6);
  } else {
    return false;
  }
  return true;
}

Options optionsFrom(int argc, char** argv) {
  Options options;
  Plan& plan = options.plan;
  options.link.queue = static_cast<Nanos>(plan.queue_ms * 1e6);
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key == "--veth") {
      options.veth = true;
      continue;
    }
    if (key == "--shared-line") {
      options.shared = true;
      continue;
    }
    if (key == "--keep") {
      options.keep = true;
      continue;
    }
    if (key.rfind("--", 0) != 0 || i + 1 == argc) throw std::runtime_error("cannot take " + key);
    const std::string text = argv[++i];
    if (key == "--name") {
      plan.name = text;
      continue;
    }
    const double value = numberFrom(text);
    if (setLink(options.link, key.substr(2), value)) {
      if (key == "--rate-mbit") plan.rate_mbit = value;
      if (key == "--queue-ms") plan.queue_ms = value;
    } else if (key == "--hosts" && value >= 2 && value <= kMostHosts) {
      plan.hosts = static_cast<int>(value);
    } else if (key == "--mtu" && value >= 576 && value <= 65535) {
      plan.mtu = static_cast<int>(value);
    } else if (key == "--interfaces" && value >= 1 && value <= 9) {
      plan.interfaces = static_cast<int>(value);
    } else if (key == "--seed") {
      options.seed = static_cast<uint64_t>(value);
    } else {
      throw std::runtime_error("cannot take " + key + " " + text);
    }
  }
  if (options.veth && (options.link.delay > 0 || options.link.loss > 0)) {
    throw std::runtime_error("--veth has neither delay nor loss: leave it out");
  }
  if (!options.veth && plan.interfaces > 1) {
    throw std::runtime_error("several interfaces are to be had with --veth only");
  }
  return options;
}

}  // namespace wan
