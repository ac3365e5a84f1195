// All-reduce between hosts on a GPU: processes that share it pose as hosts, for us
// (RINGREDUCE_HOSTID) and for NCCL (NCCL_HOSTID), which then goes through the network of this
// machine.  What it shows is that the calls of NCCL and CUDA do what the stand-ins for them do; how
// fast hosts are it cannot show.
//
// Every test runs in processes of its own, forked before any has used the GPU.
#define CHECK_OWN_MAIN
#include <csignal>
#include <cstdlib>
#include <thread>

#include "check.h"
#include "cuda/communicator/host_communicator.h"
#include "cuda/internode/internode_communicator.h"
#include "cuda/internode/nccl.h"
#include "gpu.h"
#include "processes.h"
#include "ranks.h"
#include "ring_oracle.h"

using namespace ringreduce;
using random_elements::Texture;
using ranks::failureOf;
using ring_oracle::Case;

namespace {

constexpr int kSkipped = 77;

struct Rank {
  int rank, size;
  cuda::InterNodeCommunicator& communicator;
  cudaStream_t stream;
};

// Rank r is on the host of that letter; those in `doomed` are killed.
void onHosts(const std::string& letters, const std::function<void(Rank&)>& body,
             Nanos timeout = 30 * kSecond, int doomed = -1) {
  processes::SharedStore store;
  const auto size = static_cast<int>(letters.size());
  const auto ends = processes::run(size, [&](int r) {
    const std::string host = letters.substr(static_cast<size_t>(r), 1);
    setenv("RINGREDUCE_HOSTID", host.c_str(), 1);
    setenv("NCCL_HOSTID", host.c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
    gpu::must(cudaSetDevice(0), "use the GPU");
    const GroupOptions options{.name = "test", .timeout = timeout};
    const auto group = Group::create(store, r, size, options);
    const auto local = cuda::HostCommunicator::create(group->local(), 0, {});
    const auto communicator = cuda::InterNodeCommunicator::create(group, *group->epoch()->hosts,
                                                                  group->local(), local, 0);
    const gpu::Stream stream;
    Rank rank{r, size, *communicator, stream.get()};
    body(rank);
  });
  for (int r = 0; r < size; ++r)
    if (r != doomed) CHECK_EQ(ends[static_cast<size_t>(r)], "");
}

struct Data {
  Data(const Case& c, int rank) : buffer(c.count * sizeOf(c.dtype) + 1) {
    std::vector<std::byte> host(buffer.bytes());
    random_elements::fill(c.dtype, host.data(), 0, c.count, c.draw,
                          random_elements::keyOf(c.seed, rank));
    gpu::must(cudaMemcpy(buffer.get(), host.data(), host.size(), cudaMemcpyHostToDevice),
              "copy to the GPU");
  }
  gpu::Buffer buffer;
};

void put(Rank& rank, const Case& c, const Data& data) {
  rank.communicator.allReduce({.input = data.buffer.get(),
                               .output = data.buffer.get(),
                               .count = c.count,
                               .dtype = c.dtype,
                               .op = c.op,
                               .factor = c.factor},
                              rank.stream);
}

void expectRight(Rank& rank, const Case& c) {
  const Data data(c, rank.rank);
  put(rank, c, data);
  CHECK(rank.communicator.wait(gpu::kHang));
  const size_t width = sizeOf(c.dtype);
  std::vector<unsigned char> right(c.count * width + 1);
  ring_oracle::expect(c, right.data());
  const auto got = gpu::fromGpu<unsigned char>(data.buffer.get(), c.count * width);
  for (size_t i = 0; i < c.count; ++i)
    if (!ring_oracle::same(c.dtype, &got[i * width], &right[i * width]))
      check::fail(__FILE__, __LINE__,
                  std::string(name(c.dtype)) + ", " + name(c.op) + ", rank " +
                      std::to_string(rank.rank) + ", element " + std::to_string(i) + " of " +
                      std::to_string(c.count));
}

const Case kOnes{.ranks = 2, .count = 100000, .dtype = DType::kFloat32, .op = ReduceOp::kSum};

void expectPoisoned(const Data& data) {
  const auto got = gpu::fromGpu<unsigned char>(data.buffer.get(), kOnes.count * sizeof(float));
  for (unsigned char byte : got) CHECK_EQ(static_cast<int>(byte), 0xff);
}

// Why there is nothing to test with, as a child finds out: this process must not use the GPU.
std::string whyNone() {
  const auto ends = processes::run(1, [](int) {
    if (const std::string why = gpu::whyNone(); !why.empty())
      throw std::runtime_error("no GPU (" + why + ")");
    cuda::NcclLibrary::load();
  });
  return ends[0];
}

}  // namespace

TEST(one_ring_has_the_bits_of_the_core) {
  onHosts("ab", [](Rank& rank) {
    CHECK(!rank.communicator.hierarchical());
    uint32_t seed = 0;
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64})
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum})
        for (size_t count : {0, 1, 1000, 300001})
          if (isSupported(dtype, op))
            expectRight(rank, {.ranks = 2,
                               .count = count,
                               .dtype = dtype,
                               .op = op,
                               .factor = 0.7,
                               .seed = ++seed});
    // Many slices.
    expectRight(rank, {.ranks = 2,
                       .count = size_t{8} << 20,
                       .dtype = DType::kFloat32,
                       .op = ReduceOp::kSum,
                       .seed = 99});
  });
}

TEST(three_ranks_round_halves_once) {
  onHosts("abc", [](Rank& rank) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16})
      expectRight(rank,
                  {.ranks = 3, .count = 400001, .dtype = dtype, .op = ReduceOp::kAvg, .seed = 5});
  });
}

TEST(hosts_of_the_same_size_add_inside_first) {
  onHosts("aabb", [](Rank& rank) {
    CHECK(rank.communicator.hierarchical());
    for (size_t count : {size_t{1000}, size_t{300001}})
      expectRight(rank, {.ranks = 4,
                         .count = count,
                         .dtype = DType::kFloat32,
                         .op = ReduceOp::kAvg,
                         .draw = Texture::kExact,
                         .seed = 3});
  });
}

TEST(an_abort_ends_who_waits_and_poisons_the_output) {
  onHosts("ab", [](Rank& rank) {
    const Data data(kOnes, rank.rank);
    if (rank.rank == 1) {
      rank.communicator.abort("for a test");
      return;
    }
    put(rank, kOnes, data);
    CHECK(failureOf([&] { rank.communicator.wait(gpu::kHang); }, "rank 1 (pid") ==
          Failure::kAborted);
    expectPoisoned(data);
  });
}

TEST(a_rank_that_does_not_come_is_named) {
  onHosts(
      "ab",
      [](Rank& rank) {
        const Data data(kOnes, rank.rank);
        if (rank.rank == 1) {
          std::this_thread::sleep_for(std::chrono::seconds(8));
          return;
        }
        put(rank, kOnes, data);
        CHECK(failureOf([&] { rank.communicator.wait(gpu::kHang); }, "rank 1 (pid") ==
              Failure::kTimeout);
        expectPoisoned(data);
      },
      3 * kSecond);
}

TEST(a_killed_rank_ends_the_others) {
  onHosts(
      "ab",
      [](Rank& rank) {
        const Data data(kOnes, rank.rank);
        if (rank.rank == 1) raise(SIGKILL);
        put(rank, kOnes, data);
        CHECK(failureOf([&] { rank.communicator.wait(gpu::kHang); }, "rank 1 (pid") ==
              Failure::kPeerLost);
        expectPoisoned(data);
      },
      8 * kSecond, 1);
}

int main(int argc, char** argv) {
  if (const std::string why = whyNone(); !why.empty()) {
    std::printf("skipped: %s\n", why.c_str());
    return kSkipped;
  }
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}
