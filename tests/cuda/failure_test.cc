// Failures on a GPU: a rank that does not come, an abort, ranks that disagree, a process
// that is killed.  All ranks raise the same error, which names the rank; outputs are poisoned;
// nothing keeps the GPU busy; a new group works.
//
// Every test runs in processes of its own, forked before any has used the GPU.
#define CHECK_OWN_MAIN
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "check.h"
#include "one_process.h"
#include "processes.h"
#include "random_elements.h"

using namespace ringreduce;
using one_process::Choice;
using one_process::Ranks;
using one_process::Run;

namespace {

constexpr size_t kCount = 200000;
constexpr Nanos kSoon = 500 * kMillisecond;
// From the cause to the error, with some patience for a machine that does other things.
constexpr Nanos kPromptly = 10 * kSecond;

void inProcess(const std::function<void()>& body) {
  const processes::Ends ends = processes::run(1, [&](int) { body(); });
  if (!ends[0].empty()) throw std::runtime_error(ends[0]);
}

GroupOptions named(const char* name, Nanos timeout = 20 * kSecond) {
  GroupOptions options;
  options.name = name;
  options.timeout = timeout;
  return options;
}
cuda::CommunicatorOptions together(bool yes) {
  cuda::CommunicatorOptions options;
  options.together = yes;
  return options;
}

// Buffers of ones for two ranks.
struct Data {
  explicit Data(int size) {
    const std::vector<float> ones(kCount, 1);
    for (int r = 0; r < size; ++r) {
      inputs.emplace_back(kCount * sizeof(float));
      outputs.emplace_back(kCount * sizeof(float));
      gpu::must(cudaMemcpy(inputs.back().get(), ones.data(), kCount * sizeof(float),
                           cudaMemcpyHostToDevice),
                "copy to the GPU");
      gpu::must(cudaMemset(outputs.back().get(), 0, kCount * sizeof(float)), "clear memory");
    }
    gpu::must(cudaDeviceSynchronize(), "wait for the GPU");
  }
  Run run(size_t count = kCount) const {
    Run run{.dtype = DType::kFloat32,
            .op = ReduceOp::kSum,
            .count = count,
            .inputs = {},
            .outputs = {},
            .factor = 1,
            .factor_on_device = nullptr};
    for (size_t r = 0; r < inputs.size(); ++r) {
      run.inputs.push_back(inputs[r].get());
      run.outputs.push_back(outputs[r].get());
    }
    return run;
  }
  bool isPoisoned(size_t r, size_t count = kCount) const {
    const auto bytes = gpu::fromGpu<unsigned char>(outputs[r].get(), count * sizeof(float));
    return std::all_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b == 0xff; });
  }
  bool isAll(size_t r, float value) const {
    const auto got = gpu::fromGpu<float>(outputs[r].get(), kCount);
    return std::all_of(got.begin(), got.end(), [&](float x) { return x == value; });
  }
  std::vector<gpu::Buffer> inputs, outputs;
};

// The error that a rank raises, within kPromptly.
Error errorOf(cuda::HostCommunicator& comm) {
  const Nanos deadline = deadlineIn(kPromptly);
  while (now() < deadline) {
    try {
      comm.check();
    } catch (const Error& error) {
      return error;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  throw std::runtime_error("rank " + std::to_string(comm.rank()) + " raises nothing");
}

void expectError(const Ranks& ranks, Failure kind, const std::string& words) {
  for (int r = 0; r < ranks.size(); ++r) {
    const Error error = errorOf(ranks.comm(r));
    if (error.kind() != kind || std::string(error.what()).find(words) == std::string::npos)
      throw std::runtime_error("rank " + std::to_string(r) + ": '" + words +
                               "' is not in: " + error.what());
    // Nothing waits any more.
    gpu::finish(ranks.stream(r), "a stream after an error");
    CHECK(ranks::failureOf([&] { ranks.comm(r).wait(kSecond); }) == kind);
  }
}

// A new group of as many ranks works.
void expectAllWell(int size, bool kernels) {
  const Ranks ranks(size, together(kernels), named("afterwards"));
  const Data data(size);
  ranks.apart(data.run(), Choice::kAuto);
  ranks.wait();
  for (int r = 0; r < size; ++r)
    CHECK(data.isAll(static_cast<size_t>(r), static_cast<float>(size)));
}

void callOf(const Ranks& ranks, const Run& run, int r, Choice choice, Nanos timeout = 0) {
  cuda::GpuAllReduce call = ranks.callOf(run, r, choice);
  call.timeout = timeout;
  ranks.comm(r).allReduce(call, ranks.stream(r));
}

const std::vector<std::pair<bool, Choice>> kAll{{true, Choice::kOneShot},
                                                {true, Choice::kTwoShot},
                                                {true, Choice::kRing},
                                                {true, Choice::kLocated},
                                                {false, Choice::kDirect}};

}  // namespace

TEST(a_rank_that_does_not_come_is_named) {
  for (const auto& [kernels, choice] : kAll)
    inProcess([kernels = kernels, choice = choice] {
      {
        const Ranks ranks(3, together(kernels), named("missing"));
        const Data data(3);
        for (int r : {0, 2}) callOf(ranks, data.run(), r, choice, kSoon);
        expectError(ranks, Failure::kTimeout, "rank 1");
        CHECK(data.isPoisoned(0) && data.isPoisoned(2));
        CHECK(data.isAll(1, 0));
      }
      expectAllWell(3, kernels);
    });
}

TEST(an_abort_ends_all_waits) {
  for (const auto& [kernels, choice] : kAll)
    inProcess([kernels = kernels, choice = choice] {
      {
        const Ranks ranks(2, together(kernels), named("abort"));
        const Data data(2);
        for (int i = 0; i < 3; ++i) callOf(ranks, data.run(), 0, choice);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ranks.comm(1).abort("had enough");
        expectError(ranks, Failure::kAborted, "had enough");
        CHECK(data.isPoisoned(0));
        CHECK(ranks::failureOf([&] { callOf(ranks, data.run(), 0, choice); }) == Failure::kAborted);
      }
      expectAllWell(2, kernels);
    });
}

TEST(ranks_that_disagree_are_told) {
  for (const auto& [kernels, choice] : kAll)
    inProcess([kernels = kernels, choice = choice] {
      {
        const Ranks ranks(2, together(kernels), named("mismatch"));
        const Data data(2);
        callOf(ranks, data.run(kCount), 0, choice);
        callOf(ranks, data.run(kCount / 2), 1, choice);
        expectError(ranks, Failure::kMismatch, "rank 1");
      }
      expectAllWell(2, kernels);
    });
}

TEST(a_replayed_graph_keeps_its_deadline) {
  for (const auto& [kernels, choice] : kAll)
    inProcess([kernels = kernels, choice = choice] {
      const Ranks ranks(2, together(kernels), named("graph", 2 * kSecond));
      const Data data(2);
      cudaGraphExec_t ready[2];
      for (int r = 0; r < 2; ++r) {
        gpu::must(cudaStreamBeginCapture(ranks.stream(r), cudaStreamCaptureModeThreadLocal),
                  "capture");
        callOf(ranks, data.run(), r, choice);
        cudaGraph_t graph = nullptr;
        gpu::must(cudaStreamEndCapture(ranks.stream(r), &graph), "end a capture");
        gpu::must(cudaGraphInstantiate(&ready[r], graph, 0), "make a graph");
        gpu::must(cudaGraphUpload(ready[r], ranks.stream(r)), "upload a graph");
        gpu::must(cudaGraphDestroy(graph), "give a graph back");
      }
      for (int r = 0; r < 2; ++r)
        gpu::must(cudaGraphLaunch(ready[r], ranks.stream(r)), "replay a graph");
      for (int r = 0; r < 2; ++r) gpu::finish(ranks.stream(r), "a graph");
      CHECK(data.isAll(0, 2) && data.isAll(1, 2));
      const float* flag = &ranks.comm(0).local()->found_inf;
      CHECK_EQ(gpu::fromGpu<float>(flag, 1)[0], 0.f);
      // And once more, one of them alone.
      gpu::must(cudaGraphLaunch(ready[0], ranks.stream(0)), "replay a graph");
      expectError(ranks, Failure::kTimeout, "rank 1");
      CHECK(data.isPoisoned(0));
      CHECK_EQ(gpu::fromGpu<float>(flag, 1)[0], 1.f);
      for (cudaGraphExec_t graph : ready) gpu::must(cudaGraphExecDestroy(graph), "free a graph");
    });
}

TEST(a_killed_process_is_named_by_the_others) {
  constexpr int kSize = 3, kVictim = 1;
  for (const cuda::MemoryAccess access :
       {cuda::MemoryAccess::kDescriptor, cuda::MemoryAccess::kLegacyIpc,
        cuda::MemoryAccess::kHost}) {
    processes::SharedStore store, again;
    const processes::Ends ends = processes::run(kSize, [&](int r) {
      cuda::CommunicatorOptions options;
      options.access = access;
      const Data data(1);
      const gpu::Stream stream;
      const auto allReduce = [&](cuda::HostCommunicator& comm) {
        comm.allReduce({.input = data.inputs[0].get(),
                        .output = data.outputs[0].get(),
                        .count = kCount,
                        .dtype = DType::kFloat32,
                        .op = ReduceOp::kSum},
                       stream.get());
        if (!comm.wait(gpu::kHang)) throw std::runtime_error("neither ends nor raises");
      };
      {
        const auto comm = cuda::HostCommunicator::create(
            Group::create(store, r, kSize, named("kill")), 0, options);
        for (int i = 0; i < 5; ++i) allReduce(*comm);
        CHECK(data.isAll(0, kSize));
        if (r == kVictim)
          std::thread([] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            kill(getpid(), SIGKILL);
          }).detach();
        const Nanos deadline = deadlineIn(gpu::kHang);
        Failure failure = Failure::kNone;
        while (failure == Failure::kNone && now() < deadline)
          failure = ranks::failureOf([&] { allReduce(*comm); }, "rank 1");
        CHECK(failure == Failure::kPeerLost);
        gpu::finish(stream.get(), "a stream after an error");
        CHECK(data.isPoisoned(0) || data.isAll(0, kSize));
      }
      // The two that are left.
      const auto comm = cuda::HostCommunicator::create(
          Group::create(again, r == 0 ? 0 : 1, kSize - 1, named("left")), 0, options);
      allReduce(*comm);
      CHECK(data.isAll(0, kSize - 1));
    });
    const bool refused = std::all_of(ends.begin(), ends.end(), [](const std::string& end) {
      return end.find("not by ") != std::string::npos;
    });
    if (refused) {
      std::printf("without %s: %s\n", cuda::name(access), ends[0].c_str());
      continue;
    }
    for (int r = 0; r < kSize; ++r)
      CHECK_EQ(ends[static_cast<size_t>(r)], std::string(r == kVictim ? "killed by signal 9" : ""));
  }
}

int main(int argc, char** argv) {
  // Streams of ranks that wait for each other must not share a queue of the GPU's.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const processes::Ends ends = processes::run(1, [](int) {
    if (const std::string why = gpu::whyNone(); !why.empty()) throw std::runtime_error(why);
  });
  if (!ends[0].empty()) {
    std::printf("skipped: no GPU (%s)\n", ends[0].c_str());
    return 77;
  }
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}
