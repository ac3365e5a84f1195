// Facts about the GPUs of this machine, and making one the thread's.
#define CHECK_OWN_MAIN
#include <set>

#include "cuda/gpu_device.h"
#include "peers.h"

using namespace peers;
using ranks::failureOf;

TEST(facts_about_gpus) {
  const int count = deviceCount();
  std::set<std::string> uuids;
  for (int i = 0; i < count; ++i) {
    const Device d = describeDevice(i);
    std::printf(
        "%s: %d.%d, %d multiprocessors, L2 %zu MiB, memory %zu MiB, exports %d, ipc %d, "
        "mps %d, cooperative %d, native host atomics %d, stream wait 64 %d, registers %d, "
        "same host pointer %d\n",
        d.shown().c_str(), d.compute_capability / 10, d.compute_capability % 10, d.multiprocessors,
        d.l2_bytes >> 20, d.memory_bytes >> 20, d.exports_memory, d.may_have_ipc, d.mps,
        d.cooperative_launch, d.native_host_atomics, d.stream_wait_64, d.registers_host_memory,
        d.same_host_pointer);
    CHECK_EQ(d.ordinal, i);
    CHECK(d.uuid.starts_with("GPU-") || d.uuid.starts_with("MIG-"));
    CHECK_EQ(d.uuid.size(), 40u);
    CHECK(uuids.insert(d.uuid).second);
    CHECK_EQ(findDevice(d.uuid), i);
    CHECK(!d.name.empty());
    CHECK(d.compute_capability >= 50 && d.compute_capability < 1000);
    CHECK(d.multiprocessors > 0 && d.memory_bytes > 0 && d.l2_bytes > 0);
  }
  CHECK_EQ(findDevice("GPU-none"), -1);
  CHECK(failureOf([&] { describeDevice(count); },
                  "cannot use GPU " + std::to_string(count) + " of " + std::to_string(count)) ==
        Failure::kSetup);
}

TEST(a_scope_on_a_gpu_leaves_the_thread_where_it_was) {
  const int count = deviceCount();
  int before = -1, inside = -1, after = -1;
  CHECK_EQ(cudaGetDevice(&before), cudaSuccess);
  {
    const OnDevice outer(count - 1);
    const OnDevice inner(0);
    CHECK_EQ(cudaGetDevice(&inside), cudaSuccess);
    CHECK_EQ(inside, 0);
  }
  {
    const OnDevice last(count - 1);
    CHECK_EQ(cudaGetDevice(&inside), cudaSuccess);
    CHECK_EQ(inside, count - 1);
    void* data = nullptr;
    CHECK_EQ(cudaMalloc(&data, 100), cudaSuccess);
    cudaPointerAttributes attributes{};
    CHECK_EQ(cudaPointerGetAttributes(&attributes, data), cudaSuccess);
    CHECK_EQ(attributes.device, count - 1);
    CHECK_EQ(cudaFree(data), cudaSuccess);
  }
  CHECK_EQ(cudaGetDevice(&after), cudaSuccess);
  CHECK_EQ(after, before);
}

int main(int argc, char** argv) {
  return peers::main(argc, argv);
}
