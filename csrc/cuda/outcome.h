// How a step went at one rank, where another way may be tried on all ranks if it went wrong.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/errors.h"
#include "group/agreement.h"

namespace ringreduce::cuda {

struct Outcome {
  enum class Kind : uint8_t {
    kDone,
    kCannot,  // another way may
    kBroken,  // none will: no memory left, or CUDA is ruined in the rank's process
  } kind = Kind::kDone;
  char text[800] = {};

  Outcome() = default;
  Outcome(Kind k, const std::string& t) : kind(k) { setText(text, t); }
};

template <class F>
Outcome outcomeOf(F&& step) {
  using Kind = Outcome::Kind;
  try {
    step();
  } catch (const CudaError& error) {
    const bool hopeless = error.ruinsProcess() || error.is(cudaErrorMemoryAllocation);
    return {hopeless ? Kind::kBroken : Kind::kCannot, error.what()};
  } catch (const Error& error) {
    return {Kind::kCannot, error.what()};
  } catch (const std::exception& error) {
    return {Kind::kBroken, error.what()};
  }
  return {};
}

// The same on all ranks, who gathered these reports, each with an Outcome `outcome`: throws if the
// step broke at a rank, else returns "rank 2 cannot ..." of the first that cannot, "" if all can.
template <class Report>
std::string obstacleIn(const Group& group, const std::vector<Report>& reports) {
  for (int r = 0; r < group.size(); ++r)
    if (const Outcome& o = reports[static_cast<size_t>(r)].outcome;
        o.kind == Outcome::Kind::kBroken)
      throw Error(Failure::kSetup, group.who(r) + " " + o.text);
  for (int r = 0; r < group.size(); ++r)
    if (const Outcome& o = reports[static_cast<size_t>(r)].outcome;
        o.kind == Outcome::Kind::kCannot)
      return "rank " + group.options().shown(r) + " " + o.text;
  return "";
}

}  // namespace ringreduce::cuda
