// The rings in shared memory through which messages go between ranks of a host.
#pragma once

#include <vector>

#include "bootstrap/rendezvous.h"
#include "p2p/engine.h"

namespace ringreduce {

// What rank `rank` sends messages to each rank with, and receives them by.  The membership must
// live as long.
std::vector<Engine::Wire> messageRings(const Membership& membership, int rank);

}  // namespace ringreduce
