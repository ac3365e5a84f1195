// The codecs' kernels of the instruction set that the reductions use.
#include "kernels/codec.h"

#include <array>
#include <cstring>

#include "kernels/reduce.h"

namespace ringreduce {

#define RINGREDUCE_DECLARE_CODECS(isa)       \
  namespace kernels_##isa {                  \
    const CodecKernels& codecs(Codec codec); \
  }
#if defined(__x86_64__)
RINGREDUCE_DECLARE_CODECS(v2)
RINGREDUCE_DECLARE_CODECS(v3)
RINGREDUCE_DECLARE_CODECS(v4)
#else
RINGREDUCE_DECLARE_CODECS(aarch64)
#endif
#undef RINGREDUCE_DECLARE_CODECS

namespace {

const CodecSet& chosenCodecs() {
  static const CodecSet& set = []() -> const CodecSet& {
    const char* const wanted = instructionSet();  // throws where this CPU can run none
    const CodecSet* found = nullptr;
    for (const CodecSet& each : codecSets())
      if (std::strcmp(each.name, wanted) == 0) found = &each;
    return *found;
  }();
  return set;
}

}  // namespace

std::span<const CodecSet> codecSets() {
#if defined(__x86_64__)
  constexpr std::array kernels{kernels_v2::codecs, kernels_v3::codecs, kernels_v4::codecs};
#else
  constexpr std::array kernels{kernels_aarch64::codecs};
#endif
  static const auto sets = [&] {
    std::array<CodecSet, kernels.size()> made;
    const std::span<const KernelSet> reduce = kernelSets();
    for (size_t i = 0; i < made.size(); ++i) made[i] = {reduce[i].name, reduce[i].runs, kernels[i]};
    return made;
  }();
  return sets;
}

const CodecKernels& codecKernels(Codec codec) {
  return chosenCodecs().kernels(codec);
}

}  // namespace ringreduce
