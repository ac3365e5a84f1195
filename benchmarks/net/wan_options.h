// What the emulator is told: its command line, and the settings of a link in a command.
#pragma once

#include <cstdint>
#include <string>

#include "wan_hosts.h"
#include "wan_link.h"

namespace wan {

struct Options {
  Plan plan;
  Link link;
  uint64_t seed = 1;
  bool veth = false, keep = false, shared = false;
};

// These throw std::runtime_error with what is wrong.
Options optionsFrom(int argc, char** argv);
double numberFrom(const std::string& text);
// Sets one of what a link has by its name, "loss" say; false if it has none of that name.
bool setLink(Link& link, const std::string& what, double value);

}  // namespace wan
