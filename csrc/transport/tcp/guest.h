// Somebody who has connected to this process and has not proven anything yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/tcp/address.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/tls.h"

namespace ringreduce::net {

struct Guest {
  Fd socket;
  Address from;
  Nanos until;  // when its time is over
  Handshake machine;
  std::string output;
  uint32_t events;           // that are looked for
  std::unique_ptr<Tls> tls;  // once it has proven itself, if it is to be encrypted
  bool leaving = false;      // refused, but told of our build: it must have time to read that
  size_t discarded = 0;

  // Hears what it says, and says what there is to say.  False if it has gone.
  bool read();
  bool write();
  // Throws away what it says; false if it has gone, or says too much.
  bool discard();
};

}  // namespace ringreduce::net
