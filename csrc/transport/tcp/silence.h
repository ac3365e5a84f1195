// Connections that are dead although nobody says so: packets of theirs are dropped (a firewall that
// has forgotten them, one of several ways between two hosts) while others get through, by which the
// two ranks still hear that both are alive.
//
// Who sends sees that nothing is acknowledged.  A rank that is stopped, or slow, is not taken for
// that: its system acknowledges, or says that it has no room.  Who receives sends nothing by which
// it would show, so its system asks the other's now and then.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/fd.h"

namespace ringreduce::net {

// Of one connection, looked at whenever somebody waits; there may be long times between.
class Silence {
 public:
  // For how long bytes have been on their way without a word from the other system, as far as is
  // known.  `heard`, `sent`: how long ago its last word came, and this system's last bytes went.
  Nanos look(Nanos time, bool under_way, Nanos heard, Nanos sent);
  // The same as the system has it; 0 where it does not know.
  Nanos look(const Fd& socket);

 private:
  Nanos since_ = 0, looked_ = 0;
  bool under_way_ = false;
};

// Has the system ask the other's, while nothing else is on its way; the connection ends with
// ETIMEDOUT where no answer comes for about `longest`, or a few seconds if that is less.
void askNowAndThen(const Fd& socket, Nanos longest);

// "from 10.0.0.2:41000 to 10.0.0.3:4711": from here to the other end.
std::string wayOf(const Fd& socket);

}  // namespace ringreduce::net
