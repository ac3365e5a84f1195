// What the targets have in common that play with a receiver of frames, with checksums and without:
// each input is played both ways, and a corpus must reach what the checksums protect.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "fuzz.h"
#include "input.h"

namespace fuzz {

// Aborts if `receiver` was seen to do what it must not.
template <class Play>
int playBoth(const uint8_t* data, size_t size, const char* receiver) {
  for (const bool checksum : {true, false}) {
    Play play(checksum);
    play.run(Input(data, size));
    if (play.wrong().empty()) continue;
    std::fprintf(stderr, "%s %s\n", receiver, play.wrong().c_str());
    std::abort();
  }
  return 0;
}

// The protection is the checksum: without it changed bytes are taken for right.
template <class Play>
Trial withoutChecksum(const uint8_t* data, size_t size) {
  Play with(true), without(false);
  with.run(Input(data, size));
  without.run(Input(data, size));
  return {.reached = with.reached(), .seen = without.tookWrong()};
}

}  // namespace fuzz
