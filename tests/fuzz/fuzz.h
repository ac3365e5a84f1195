// What a fuzz target gives to standalone.cc.
#pragma once

#include <cstddef>
#include <cstdint>

// Takes any input; aborts if it finds something wrong.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fuzz {

struct Trial {
  bool reached;  // the input gets as far as what is to be protected
  bool seen;     // with the protection broken on purpose, the target finds something wrong
};
// A check that cannot fail is none: some inputs of the corpus must do both.
Trial control(const uint8_t* data, size_t size);

}  // namespace fuzz
