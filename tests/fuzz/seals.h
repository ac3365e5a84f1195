// What the targets have in common that play with a receiver of frames: the seal of a frame's head,
// and what becomes of damaged heads without it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "fuzz.h"
#include "input.h"

namespace fuzz {

// Aborts if `receiver` was seen to do what it must not.
template <class Play>
int playSealed(const uint8_t* data, size_t size, const char* receiver) {
  Play play(/*reseals=*/false);
  play.run(Input(data, size));
  if (play.wrong().empty()) return 0;
  std::fprintf(stderr, "%s %s\n", receiver, play.wrong().c_str());
  std::abort();
}

// The protection is the head's seal: a damaged head that is sealed again is taken for right.
template <class Play>
Trial withoutSeals(const uint8_t* data, size_t size) {
  Play with(/*reseals=*/false), without(/*reseals=*/true);
  with.run(Input(data, size));
  without.run(Input(data, size));
  return {.reached = with.reached(), .seen = !without.wrong().empty()};
}

}  // namespace fuzz
