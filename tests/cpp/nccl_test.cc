// NCCL loaded at run time, with a stand-in for it (fake_nccl.cc): which file is taken, what is said
// where there is none that will do, and that every call arrives as NCCL documents it.
#include "cuda/internode/nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>

#include "../../benchmarks/cuda/nccl_all_reduce.h"
#include "base/error.h"
#include "check.h"
#include "fake_nccl.h"

using namespace ringreduce;
using namespace ringreduce::cuda;

namespace {

constexpr const char* kFake = RINGREDUCE_FAKE_NCCL;  // its path: CMakeLists.txt

// The stand-in as it is after loading, and an environment without the variables that are read.
FakeNccl& fresh() {
  unsetenv("RINGREDUCE_NCCL");
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  static void* const handle = dlopen(kFake, RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
  auto& state = *static_cast<FakeNccl*>(dlsym(handle, "fake_nccl"));
  state = FakeNccl{};
  return state;
}

struct Failed {
  Failure kind = Failure::kNone;
  std::string what;
  bool says(const std::string& text) const { return what.find(text) != std::string::npos; }
};
Failed failureOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  return {};
}

NcclCommunicator rankOne() {
  const auto library = NcclLibrary::load(kFake);
  return NcclCommunicator(library, library->makeId(), 1, 4);
}

}  // namespace

TEST(a_missing_file_is_named_with_what_to_do) {
  fresh();
  const std::string missing = "/nowhere/libnccl.so.2";
  const Failed given = failureOf([&] { NcclLibrary::load(missing); });
  CHECK(given.kind == Failure::kSetup);
  CHECK(given.says(missing) && given.says("RINGREDUCE_NCCL") && given.says("nvidia-nccl"));

  setenv("RINGREDUCE_NCCL", missing.c_str(), 1);
  const Failed named = failureOf([] { NcclLibrary::load(); });
  CHECK(named.kind == Failure::kSetup);
  CHECK(named.says(missing + " (named by RINGREDUCE_NCCL)"));
}

TEST(what_is_no_nccl_is_refused_by_the_symbol_that_it_lacks) {
  fresh();
  const Failed other = failureOf([] { NcclLibrary::load("libm.so.6"); });
  CHECK(other.kind == Failure::kSetup);
  CHECK(other.says("libm.so.6") && other.says("ncclGetVersion"));
}

TEST(an_nccl_that_is_too_old_is_refused_by_its_version) {
  fresh().version = 21705;
  const Failed old = failureOf([] { NcclLibrary::load(kFake); });
  CHECK(old.kind == Failure::kSetup);
  CHECK(old.says("NCCL 2.17.5") && old.says("2.18.0 or newer"));
}

TEST(a_path_comes_before_the_variable_and_that_before_what_is_loaded) {
  fresh();
  CHECK_EQ(NcclLibrary::load(kFake)->description(),
           std::string("NCCL 2.30.3 (").append(kFake).append(")"));
  // The stand-in is loaded and calls itself libnccl.so.2, as NCCL does.
  CHECK_EQ(NcclLibrary::load()->version(), 23003);
  setenv("RINGREDUCE_NCCL", "/nowhere", 1);
  CHECK_THROWS(Error, NcclLibrary::load());
  CHECK_EQ(NcclLibrary::load(kFake)->version(), 23003);
  setenv("RINGREDUCE_NCCL", kFake, 1);
  CHECK_EQ(NcclLibrary::load()->version(), 23003);
}

TEST(ranks_share_a_gpu_from_2_30_on_and_if_asked) {
  FakeNccl& nccl = fresh();
  nccl.version = 22809;
  const auto before = NcclLibrary::load(kFake);
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  CHECK(!nccl::whyNoSharedGpu(*before).empty());
  CHECK(nccl::whyNoSharedGpu(*before).find("2.30.0 or newer") != std::string::npos);

  nccl.version = 23000;
  const auto library = NcclLibrary::load(kFake);
  CHECK(nccl::whyNoSharedGpu(*library).empty());
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  CHECK(nccl::whyNoSharedGpu(*library).find("NCCL_MULTI_RANK_GPU_ENABLE=1") != std::string::npos);
  CHECK(failureOf([&] { nccl::makeAll(library, 2); }).kind == Failure::kSetup);
  CHECK_EQ(nccl.made, 0);
}

TEST(a_rank_joins_with_the_id_and_its_bounds) {
  FakeNccl& nccl = fresh();
  const auto library = NcclLibrary::load(kFake);
  NcclId id = library->makeId();
  NcclId expected;
  std::iota(expected.begin(), expected.end(), 0);
  CHECK(id == expected);
  std::reverse(id.begin(), id.end());
  {
    const NcclCommunicator one(library, id, 2, 5, 6);
    CHECK(std::equal(id.begin(), id.end(), nccl.id));
    CHECK_EQ(nccl.rank, 2);
    CHECK_EQ(nccl.size, 5);
    CHECK_EQ(nccl.max_blocks, 6);
    CHECK_EQ(nccl.blocking, 1);
    CHECK_EQ(nccl.destroyed, 0);
  }
  CHECK_EQ(nccl.destroyed, 1);
  CHECK_EQ(nccl.aborted, 0);

  nccl.failing = "ncclCommInitRankConfig";
  nccl.result = 5;
  nccl.last_error = "rank 0 is elsewhere";
  const Failed refused = failureOf([&] { NcclCommunicator(library, id, 2, 5); });
  CHECK(refused.kind == Failure::kSetup);
  CHECK(refused.says("rank 2 of 5") && refused.says("ncclCommInitRankConfig"));
  CHECK(refused.says("rank 0 is elsewhere") && refused.says("NCCL_DEBUG"));
}

TEST(all_ranks_of_one_thread_join_together) {
  FakeNccl& nccl = fresh();
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  const auto library = NcclLibrary::load(kFake);
  {
    const auto all = nccl::makeAll(library, 4);
    CHECK_EQ(all.size(), 4u);
    CHECK_EQ(nccl.groups, 1);
    CHECK_EQ(nccl.depth, 0);
    for (int rank = 0; rank < 4; ++rank) {
      nccl::AllReduce(all[rank]->library())(*all[rank], nullptr, nullptr, 1, DType::kFloat32,
                                            ReduceOp::kSum, nullptr);
      CHECK_EQ(nccl.rank, rank);
    }
  }
  CHECK_EQ(nccl.made, 4);
  CHECK_EQ(nccl.destroyed, 4);

  nccl.failing = "ncclCommInitRankConfig";
  nccl.result = 1;
  CHECK_THROWS(Error, nccl::makeAll(library, 2));
  CHECK_EQ(nccl.depth, 0);  // a group left open would swallow all later calls
}

TEST(dtypes_and_ops_have_nccls_numbers) {
  FakeNccl& nccl = fresh();
  NcclCommunicator one = rankOne();
  const auto reduce = [&](DType dtype, ReduceOp op) {
    nccl::AllReduce(one.library())(one, nullptr, nullptr, 77, dtype, op, nullptr);
    CHECK_EQ(nccl.count, 77u);
  };
  const std::pair<DType, int> dtypes[] = {
      {DType::kInt8, 0},    {DType::kUInt8, 1},   {DType::kInt32, 2},   {DType::kInt64, 4},
      {DType::kFloat16, 6}, {DType::kFloat32, 7}, {DType::kFloat64, 8}, {DType::kBFloat16, 9}};
  for (const auto& [dtype, number] : dtypes) {
    reduce(dtype, ReduceOp::kMax);
    CHECK_EQ(nccl.dtype, number);
  }
  const std::pair<ReduceOp, int> ops[] = {{ReduceOp::kSum, 0},
                                          {ReduceOp::kProduct, 1},
                                          {ReduceOp::kMax, 2},
                                          {ReduceOp::kMin, 3},
                                          {ReduceOp::kAvg, 4}};
  for (const auto& [op, number] : ops) {
    reduce(DType::kBFloat16, op);
    CHECK_EQ(nccl.op, number);
  }
}

TEST(what_nccl_lacks_is_refused_before_it_is_called) {
  FakeNccl& nccl = fresh();
  NcclCommunicator one = rankOne();
  const std::pair<DType, ReduceOp> lacking[] = {{DType::kInt16, ReduceOp::kSum},
                                                {DType::kBool, ReduceOp::kSum},
                                                {DType::kInt32, ReduceOp::kBxor},
                                                {DType::kInt32, ReduceOp::kPremulSum},
                                                {DType::kComplex64, ReduceOp::kSum}};
  for (const auto& [dtype, op] : lacking) {
    CHECK(!nccl::supports(dtype, op));
    const Failed refused = failureOf(
        [&] { nccl::AllReduce(one.library())(one, nullptr, nullptr, 1, dtype, op, nullptr); });
    CHECK(refused.kind == Failure::kArgument);
    CHECK(refused.says(name(dtype)) && refused.says(name(op)));
  }
  CHECK_EQ(nccl.dtype, -1);
  CHECK(nccl::supports(DType::kFloat16, ReduceOp::kPremulSum));
}

TEST(a_factor_becomes_an_operator_for_one_call) {
  FakeNccl& nccl = fresh();
  NcclCommunicator one = rankOne();
  const auto scalarOf = [&](DType dtype, double factor, auto like) {
    nccl::AllReduce(one.library())(one, nullptr, nullptr, 1, dtype, ReduceOp::kPremulSum, nullptr,
                                   factor);
    CHECK_EQ(nccl.op, 5);
    CHECK_EQ(nccl.operators, 0);
    std::memcpy(&like, nccl.scalar, sizeof like);
    return like;
  };
  CHECK_EQ(scalarOf(DType::kFloat64, 0.1, double{}), 0.1);
  CHECK_EQ(scalarOf(DType::kFloat32, 0.1, float{}), 0.1f);
  CHECK_EQ(scalarOf(DType::kFloat16, 0.5, uint16_t{}), 0x3800);
  CHECK_EQ(scalarOf(DType::kBFloat16, -2.0, uint16_t{}), 0xc000);

  nccl.failing = "ncclAllReduce";
  nccl.result = 3;
  CHECK_THROWS(Error, nccl::AllReduce(one.library())(one, nullptr, nullptr, 1, DType::kFloat32,
                                                     ReduceOp::kPremulSum, nullptr, 2.0));
  CHECK_EQ(nccl.operators, 0);
}

TEST(messages_are_bytes) {
  FakeNccl& nccl = fresh();
  NcclCommunicator one = rankOne();
  one.send(nullptr, 1000, 3, nullptr);
  CHECK_EQ(nccl.count, 1000u);
  CHECK_EQ(nccl.dtype, 0);
  CHECK_EQ(nccl.peer, 3);
  one.recv(nullptr, 2000, 0, nullptr);
  CHECK_EQ(nccl.count, 2000u);
  CHECK_EQ(nccl.peer, 0);
}

TEST(failures_become_the_errors_that_they_are) {
  FakeNccl& nccl = fresh();
  NcclCommunicator one = rankOne();
  nccl.failing = "ncclSend";
  const std::pair<int, Failure> kinds[] = {{1, Failure::kAborted},
                                           {4, Failure::kArgument},
                                           {5, Failure::kArgument},
                                           {6, Failure::kPeerLost},
                                           {8, Failure::kTimeout}};
  for (const auto& [result, kind] : kinds) {
    nccl.result = result;
    const Failed failed = failureOf([&] { one.send(nullptr, 1, 0, nullptr); });
    CHECK(failed.kind == kind);
    CHECK(failed.says("rank 1 of 4: ncclSend failed in NCCL 2.30.3"));
  }
  one.check();
  nccl.asynchronous_error = 6;
  const Failed later = failureOf([&] { one.check(); });
  CHECK(later.kind == Failure::kPeerLost);
  CHECK(later.says("remote process exited"));
}

TEST(an_aborted_communicator_is_freed_once_and_says_so) {
  FakeNccl& nccl = fresh();
  {
    NcclCommunicator one = rankOne();
    one.abort();
    one.abort();
    CHECK_EQ(nccl.aborted, 1);
    for (const auto& call : std::initializer_list<std::function<void()>>{
             [&] { one.check(); }, [&] { one.send(nullptr, 1, 0, nullptr); },
             [&] {
               nccl::AllReduce(one.library())(one, nullptr, nullptr, 1, DType::kInt8,
                                              ReduceOp::kSum, nullptr);
             }})
      CHECK(failureOf(call).kind == Failure::kAborted);
  }
  CHECK_EQ(nccl.destroyed, 0);
}

TEST(a_group_that_an_exception_leaves_is_ended) {
  FakeNccl& nccl = fresh();
  const auto library = NcclLibrary::load(kFake);
  try {
    const NcclGroup group(*library);
    throw 1;
  } catch (int) {
  }
  CHECK_EQ(nccl.depth, 0);

  nccl.failing = "ncclGroupEnd";
  nccl.result = 6;
  NcclGroup group(*library);
  CHECK(failureOf([&] { group.end(); }).kind == Failure::kPeerLost);
  CHECK_EQ(nccl.depth, 0);
}
