// Going on after losses between hosts: plans, and ranks that die at each of their calls to the
// store in the recovery from another death.
#include "survival/recovery.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "group/group.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;

namespace {

TEST(a_plan_has_the_ranks_that_came_and_live) {
  const Standing in_four{.operation = 4};
  const Plan plan = planOf({{0, in_four}, {1, in_four}, {3, {.operation = 5}}}, {1});
  CHECK((plan.members == std::vector<int>{0, 3}));
  CHECK_EQ(plan.operation, 5u);
  CHECK(!plan.is_done);
}

TEST(an_operation_is_done_if_all_hold_the_same_result) {
  const Standing holds{.operation = 4, .holds = true, .epoch = 1};
  CHECK(planOf({{0, holds}, {1, holds}}, {}).is_done);
  CHECK(planOf({{0, holds}, {1, {.operation = 4}}}, {1}).is_done);
  CHECK(!planOf({{0, holds}, {1, {.operation = 4}}}, {}).is_done);
  CHECK(!planOf({{0, holds}, {1, {.operation = 3, .holds = true, .epoch = 1}}}, {}).is_done);
  CHECK(!planOf({{0, holds}, {1, {.operation = 4, .holds = true, .epoch = 0}}}, {}).is_done);
}

TEST(the_larger_side_of_a_cut_goes_on) {
  const std::map<int, Standing> came{{0, {.unreachable = {1, 2, 3}}},
                                     {1, {.unreachable = {0}}},
                                     {2, {.unreachable = {0}}},
                                     {3, {.unreachable = {}}}};
  CHECK((planOf(came, {}).members == std::vector<int>{1, 2, 3}));
  // One connection between equal sides: the higher rank stays out.
  CHECK((planOf({{0, {.unreachable = {1}}}, {1, {}}, {2, {}}}, {}).members ==
         std::vector<int>{0, 2}));
}

TEST(a_standing_is_the_same_in_the_store) {
  const Standing one{.operation = 7, .holds = true, .epoch = 2, .unreachable = {3, 5}};
  const Standing read = Standing::fromText(one.toText());
  CHECK(read.operation == 7 && read.holds && read.epoch == 2);
  CHECK((read.unreachable == std::vector<int>{3, 5}));
  for (const char* bad : {"", "1 1", "1 1 0 2 4", "x"})
    CHECK_THROWS(Error, Standing::fromText(bad));
}

// ---- deaths

constexpr int kRanks = 4, kOperations = 6;
constexpr size_t kCount = 40'000;

// What the children report.
struct Results {
  // The sum that each rank got, as the ranks in it.
  int ranks_in[kRanks][kOperations];
  bool died_in_store;
};

// Ends the process at its `last`th call.
class DeadlyStore final : public Store {
 public:
  DeadlyStore(Store& store, Results& results) : store_(store), results_(results) {}
  int last = -1;

  void set(const std::string& key, const std::string& value) override {
    count();
    store_.set(key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    count();
    return store_.get(key);
  }
  void remove(const std::string& key) override {
    count();
    store_.remove(key);
  }
  std::string setOnce(const std::string& key, const std::string& value) override {
    count();
    return store_.setOnce(key, value);
  }

 private:
  void count() {
    if (last < 0 || last-- > 0) return;
    results_.died_in_store = true;
    kill(getpid(), SIGKILL);
  }

  Store& store_;
  Results& results_;
};

// All-reduces in which `first` dies, and `second` at that call of its recovery.
bool runWithDeaths(int first, int second, int call) {
  processes::SharedStore store;
  auto* results = static_cast<Results*>(
      mmap(nullptr, sizeof(Results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const processes::Ends ends = processes::run(kRanks, [&](int rank) {
    // If only ranks 0 and 3 are left, they share memory.
    const ranks::Setting host("RINGREDUCE_HOSTID", std::string(1, "abca"[rank]));
    DeadlyStore deadly(store, *results);
    SharedOptions shared;
    shared.on_loss = OnLoss::kContinue;
    const auto group = Group::create(deadly, rank, kRanks,
                                     {.name = "test", .timeout = 60 * kSecond, .shared = shared});
    if (rank == second) deadly.last = call;
    std::vector<int> data(kCount);
    for (int i = 0; i < kOperations; ++i) {
      std::ranges::fill(data, 1 << rank);
      if (rank == first && i == 2) kill(getpid(), SIGKILL);
      group->run({AllReduce{data.data(), kCount, DType::kInt32, ReduceOp::kSum}});
      CHECK(std::ranges::count(data, data[0]) == static_cast<long>(kCount));
      results->ranks_in[rank][i] = data[0];
    }
  });
  const bool both = results->died_in_store;
  int survivors = 0;
  for (int r = 0; r < kRanks; ++r)
    if (r != first && !(both && r == second)) survivors |= 1 << r;
  const std::string where = "rank " + std::to_string(second) + ", call " + std::to_string(call);
  const int* expected = nullptr;
  for (int r = 0; r < kRanks; ++r) {
    const std::string& end = ends[static_cast<size_t>(r)];
    if (!(survivors >> r & 1)) {
      CHECK(end.starts_with("killed by signal"));
      continue;
    }
    if (!end.empty()) throw std::runtime_error(where + ": rank " + std::to_string(r) + ": " + end);
    const int* own = results->ranks_in[r];
    if (!expected) expected = own;
    for (int i = 0; i < kOperations; ++i)
      if (own[i] != expected[i] || (own[i] & survivors) != survivors)
        throw std::runtime_error(where + ": operation " + std::to_string(i) + " gave " +
                                 std::to_string(own[i]) + " and " + std::to_string(expected[i]));
  }
  CHECK_EQ(expected[kOperations - 1], survivors);
  munmap(results, sizeof(Results));
  return both;
}

// The first to die never comes, so the root has sent all that it has long before the others have
// it.
TEST(a_root_returns_once_all_hold_its_data) {
  processes::SharedStore store;
  const processes::Ends ends = processes::run(kRanks, [&](int rank) {
    const ranks::Setting host("RINGREDUCE_HOSTID", std::to_string(rank));
    SharedOptions shared;
    shared.on_loss = OnLoss::kContinue;
    const auto group = Group::create(store, rank, kRanks,
                                     {.name = "test", .timeout = 60 * kSecond, .shared = shared});
    for (int i = 0; i < kOperations; ++i) {
      if (rank == 1 && i == 2) kill(getpid(), SIGKILL);
      std::vector<int> data(kCount, rank == 0 ? i : -1);
      group->run({Broadcast{data.data(), kCount, DType::kInt32, 0}});
      CHECK(std::ranges::count(data, i) == static_cast<long>(kCount));
    }
  });
  for (int r = 0; r < kRanks; ++r)
    CHECK_EQ(ends[static_cast<size_t>(r)], r == 1 ? "killed by signal 9" : "");
}

TEST(a_rank_that_cannot_start_a_thread_says_so) {
  processes::SharedStore store;
  const processes::Ends ends = processes::run(2, [&](int rank) {
    const ranks::Setting host("RINGREDUCE_HOSTID", std::to_string(rank));
    SharedOptions shared;
    shared.on_loss = OnLoss::kContinue;
    const auto group =
        Group::create(store, rank, 2, {.name = "test", .timeout = 60 * kSecond, .shared = shared});
    int data = 0;
    const Operation sum{AllReduce{&data, 1, DType::kInt32, ReduceOp::kSum}};
    group->run(sum);
    if (rank == 1) kill(getpid(), SIGKILL);
    pthread_attr_t huge;  // no machine has room for such a stack
    CHECK(pthread_attr_init(&huge) == 0);
    CHECK(pthread_attr_setstacksize(&huge, size_t{1} << 48) == 0);
    CHECK(pthread_setattr_default_np(&huge) == 0);
    CHECK(ranks::failureOf([&] { group->run(sum); },
                           "cannot go on after a loss: ringreduce cannot start a thread that asks "
                           "the store: ") == Failure::kPeerLost);
  });
  CHECK_EQ(ends[0], "");
}

// The rank that proposes the plan, and another one, from the first call to the last.
TEST(a_second_death_at_any_call_of_the_recovery) {
  for (const int second : {0, 2}) {
    int deaths = 0;
    for (int call = 0; call < 60; call += call < 12 ? 1 : 6)
      deaths += runWithDeaths(1, second, call);
    CHECK(deaths >= 8);
  }
}

}  // namespace
