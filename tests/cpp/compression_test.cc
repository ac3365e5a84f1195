// What a hook does with the buckets of a step: rounds of training whose gradients are known.
#include "group/compression.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace ringreduce;
using ranks::failureOf;

namespace {

// Two weights, of which one is cut unevenly, and a bias that is never coded.
const std::vector<CompressedParameter> kParameters = {
    {.count = 5000, .exact = false, .name = 1},
    {.count = 10, .exact = true, .name = 2},
    {.count = 300, .exact = false, .name = 3},
};
using Order = std::vector<std::vector<size_t>>;  // which parameters each bucket has
const Order kOne = {{2, 1, 0}}, kTwo = {{1, 2}, {0}}, kThree = {{0}, {1}, {2}};

float gradient(int rank, size_t step, size_t parameter, size_t i) {
  const size_t word = (i + 1) * 2654435761u ^ (step * 977 + parameter * 31 + 7) * 40503u;
  return static_cast<float>((word + static_cast<size_t>(rank) * 7919) % 2003) / 1000.f - 1.f;
}

using Gradients = std::vector<std::vector<float>>;  // by parameter

// One step of a rank; `spoil` may change a gradient before it is sent.
Gradients step(Compression& state, Group& group, size_t number, const Order& order,
               const std::function<void(Gradients&)>& spoil = nullptr) {
  Gradients all;
  for (size_t p = 0; p < kParameters.size(); ++p) {
    all.emplace_back(kParameters[p].count);
    for (size_t i = 0; i < all[p].size(); ++i) all[p][i] = gradient(group.rank(), number, p, i);
  }
  if (spoil) spoil(all);
  std::vector<std::vector<float>> buckets(order.size());
  std::vector<std::shared_ptr<OperationHandle>> tickets;
  for (size_t b = 0; b < order.size(); ++b) {
    std::vector<Part> parts;
    for (const size_t p : order[b]) {
      parts.push_back({p, buckets[b].size(), kParameters[p].count});
      buckets[b].insert(buckets[b].end(), all[p].begin(), all[p].end());
    }
    tickets.push_back(
        group.submitAll(state.average({buckets[b].data(), buckets[b].size(), DType::kFloat32, parts,
                                       /*last=*/b + 1 == order.size()},
                                      group),
                        nullptr));
  }
  for (const auto& ticket : tickets) {
    group.await(*ticket, kNever);
    if (ticket->error()) std::rethrow_exception(ticket->error());
  }
  for (size_t b = 0; b < order.size(); ++b) {
    size_t at = 0;
    for (const size_t p : order[b])
      for (float& value : all[p]) value = buckets[b][at++];
  }
  return all;
}

std::vector<float> residual(Compression& state, size_t parameter) {
  std::vector<float> values(kParameters[parameter].count);
  CHECK(state.readResidual(parameter, values.data()));
  return values;
}

const CompressionSettings kInt4{.codec = Codec::kInt4};

}  // namespace

TEST(no_bit_depends_on_the_buckets) {
  for (const CodedSchedule schedule : {CodedSchedule::kOwner, CodedSchedule::kRing})
    ranks::inGroup(3, [&](Group& group) {
      std::vector<Gradients> seen;
      for (const Order& first : {kOne, kTwo, kThree}) {
        CompressionSettings settings = kInt4;
        settings.schedule = schedule;
        Compression state(settings, kParameters);
        // They change after the first step, as DDP's do.
        step(state, group, 0, first);
        step(state, group, 1, kTwo);
        seen.push_back(step(state, group, 2, first));
        CHECK_EQ(state.steps(), uint64_t{3});
      }
      CHECK(seen[1] == seen[0] && seen[2] == seen[0]);
    });
}

TEST(what_began_but_did_not_end_leaves_no_trace) {
  ranks::inGroup(2, [&](Group& group) {
    Compression state(kInt4, kParameters), calm(kInt4, kParameters);
    step(state, group, 0, kThree);
    step(calm, group, 0, kThree);
    const std::vector<float> before = residual(state, 0);
    // Its first bucket, and then another step's.
    std::vector<float> bucket(5000, 1);
    for (const Operation& one : state.average(
             {bucket.data(), 5000, DType::kFloat32, {{0, 0, 5000}}, /*last=*/false}, group))
      group.run(one);
    CHECK(residual(state, 0) == before);
    CHECK(step(state, group, 1, kThree) == step(calm, group, 1, kThree));
    CHECK(residual(state, 0) != before);
    CHECK_EQ(state.steps(), uint64_t{3});
  });
}

TEST(who_joins_later_measures_with_the_others) {
  CompressionSettings settings;
  settings.automatic = true;
  ranks::inGroup(3, [&](Group& group) {
    auto state = std::make_unique<Compression>(settings, kParameters);
    for (size_t s = 0; s < 14; ++s) step(*state, group, s, kTwo);
    CHECK(state->choice() != "measuring");
    // One rank starts anew from a checkpoint, which all load.
    if (group.rank() == 2) state = std::make_unique<Compression>(settings, kParameters);
    state->setSteps(14);
    for (size_t s = 14; s < 28; ++s) {
      step(*state, group, s, kTwo);
      if (s < 16) CHECK_EQ(state->choice(), std::string("measuring"));
    }
    CHECK(state->choice() != "measuring");
  });
}

TEST(a_step_ends_where_another_group_begins) {
  std::vector<std::unique_ptr<Compression>> states;
  for (int r = 0; r < 2; ++r) states.push_back(std::make_unique<Compression>(kInt4, kParameters));
  const auto mine = [&](Group& group) -> Compression& {
    return *states[static_cast<size_t>(group.rank())];
  };
  ranks::inGroup(2, [&](Group& group) {
    mine(group).agree(group);
    std::vector<float> bucket(5000);
    // One rank has come to its first bucket when the group ends.
    if (group.rank() == 0)
      mine(group).average({bucket.data(), 5000, DType::kFloat32, {{0, 0, 5000}}, false}, group);
    else
      mine(group).setSteps(1);
  });
  ranks::inGroup(2, [&](Group& group) {
    step(mine(group), group, 1, {{1, 2}, {0}});
    CHECK_EQ(mine(group).steps(), uint64_t{2});
    // All buckets were of one step, so it counts.
    const std::vector<float> held = residual(mine(group), 2);
    CHECK(std::any_of(held.begin(), held.end(), [](float lost) { return lost != 0; }));
  });
}

TEST(what_a_trial_owes_is_not_sent_in_a_step_that_is_skipped) {
  ranks::inGroup(3, [&](Group& group) {
    CompressionSettings settings;
    settings.automatic = true;
    Compression state(settings, kParameters);
    const auto spoil = [&](Gradients& all) {  // of a bucket that nothing is owed to
      if (group.rank() == 1) all[1][3] = std::numeric_limits<float>::infinity();
    };
    for (size_t s = 0; s < 4; ++s) step(state, group, s, kThree);
    const std::vector<float> before = residual(state, 0);
    for (size_t s = 4; s < 12; ++s) step(state, group, s, kThree, spoil);
    CHECK(residual(state, 0) == before);
    step(state, group, 12, kThree);
    if (state.choice() == "exact") {
      state.readResidual(1, nullptr);  // the step is over
      CHECK_EQ(state.residualBytes(), size_t{0});
    }
  });
}

TEST(a_trial_compares_medians) {
  using Mode = AutoTuner::Mode;
  const auto tried = [](double exact, double coded, double exact_step, double coded_step) {
    AutoTuner trial;
    std::string why;
    size_t steps = 0;
    for (;;) {
      const bool codes = trial.next() == Mode::kCoded;
      // The first of each is slow, and so is one in the middle.
      const double late = steps < 2 || steps == 5 ? 100 : 0;
      trial.record(codes ? StepTimes{coded + late, coded_step + late}
                         : StepTimes{exact + late, exact_step + late});
      ++steps;
      if (!trial.hasPair()) continue;
      const std::optional<bool> answer = trial.decide(trial.numbers(), why);
      if (answer) return std::pair(*answer, steps);
    }
  };
  CHECK(tried(1.0, 0.25, 1.2, 0.4) == std::pair(true, size_t{4}));     // a slow wire
  CHECK(tried(0.01, 0.05, 0.1, 0.12) == std::pair(false, size_t{4}));  // shared memory
  CHECK(tried(0.10, 0.08, 0.20, 0.18) == std::pair(true, size_t{10}));
  CHECK(tried(0.10, 0.08, 0.20, 0.20) == std::pair(false, size_t{10}));  // hidden by the backward
  CHECK(tried(0.10, 0.11, 0.20, 0.18) == std::pair(false, size_t{10}));
}

TEST(what_differs_between_ranks_is_told) {
  const auto kind = [](const std::function<void(CompressionSettings&)>& change) {
    std::atomic<int> told{0};
    ranks::inGroup(3, [&](Group& group) {
      CompressionSettings settings = kInt4;
      if (group.rank() == 1) change(settings);
      Compression state(settings, kParameters);
      told += failureOf([&] { state.agree(group); }, "rank 1") == Failure::kMismatch;
    });
    return told.load();
  };
  CHECK_EQ(kind([](CompressionSettings& s) { s.codec = Codec::kInt8; }), 3);
  CHECK_EQ(kind([](CompressionSettings& s) { s.start_after = 1; }), 3);
  CHECK_EQ(kind([](CompressionSettings& s) { s.feedback = false; }), 3);
  CHECK_EQ(kind([](CompressionSettings&) {}), 0);
}

TEST(what_does_not_fit_is_refused) {
  ranks::inGroup(2, [&](Group& group) {
    Compression state(kInt4, kParameters);
    std::vector<float> bucket(5010);
    const auto given = [&](std::vector<Part> parts) {
      return failureOf([&] {
        state.average({bucket.data(), 5010, DType::kFloat32, std::move(parts), true}, group);
      });
    };
    CHECK(given({{0, 0, 5000}}) == Failure::kArgument);
    CHECK(given({{0, 0, 5010}}) == Failure::kArgument);
    CHECK(given({{7, 0, 5010}}) == Failure::kArgument);
    CHECK(given({{0, 0, 5000}, {1, 5000, 10}}) == Failure::kNone);
  });
}
