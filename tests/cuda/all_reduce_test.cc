// All-reduce on a GPU, ranks of one process: a little of everything, against the CPU's bits.
// ringreduce_cuda_perf check is the thorough one.
#define CHECK_OWN_MAIN
#include <algorithm>
#include <cstring>
#include <numeric>

#include "check.h"
#include "one_process.h"
#include "ring_oracle.h"

using namespace ringreduce;
using one_process::Choice;
using one_process::Graphs;
using one_process::Ranks;
using one_process::Run;
using ring_oracle::Case;

namespace {

GroupOptions named(const char* name) {
  GroupOptions options;
  options.name = name;
  options.timeout = 20 * kSecond;
  return options;
}
cuda::CommunicatorOptions together(bool yes = true) {
  cuda::CommunicatorOptions options;
  options.together = yes;
  return options;
}

// Inputs and outputs of all ranks, `at` elements into their buffers.
class Data {
 public:
  Data(const Case& what, bool in_place, size_t at = 0, bool own = false)
      : what_(what), in_place_(in_place), offset_(at * sizeOf(what.dtype)) {
    const size_t bytes = what.count * sizeOf(what.dtype);
    std::vector<std::byte> host(bytes + 1);
    for (int r = 0; r < what.ranks; ++r) {
      for (auto* buffers : {&inputs_, &outputs_})
        buffers->push_back(own ? one_process::ownBuffer(offset_ + bytes + 1)
                               : gpu::Buffer(offset_ + bytes + 1));
      random_elements::fill(what.dtype, host.data(), 0, what.count, what.draw,
                            random_elements::keyOf(what.seed, r));
      gpu::must(
          cudaMemcpy(inputs_.back().get() + offset_, host.data(), bytes, cudaMemcpyHostToDevice),
          "copy to the GPU");
      gpu::must(cudaMemset(outputs_.back().get(), 0xa5, offset_ + bytes + 1), "fill memory");
    }
    gpu::must(cudaDeviceSynchronize(), "wait for the GPU");
  }

  Run run() const {
    Run run{.dtype = what_.dtype,
            .op = what_.op,
            .count = what_.count,
            .inputs = {},
            .outputs = {},
            .factor = what_.factor,
            .factor_on_device = nullptr};
    for (size_t r = 0; r < inputs_.size(); ++r) {
      run.inputs.push_back(inputs_[r].get() + offset_);
      run.outputs.push_back(output(r));
    }
    return run;
  }

  std::vector<void*> buffers(bool inputs) const {
    std::vector<void*> all;
    for (const gpu::Buffer& one : inputs ? inputs_ : outputs_) all.push_back(one.get());
    return all;
  }
  size_t bufferBytes() const { return inputs_[0].bytes(); }

  void expectRight(const std::string& how) const {
    const size_t width = sizeOf(what_.dtype), bytes = what_.count * width;
    std::vector<unsigned char> expected(bytes + 1);
    ring_oracle::expect(what_, expected.data());
    for (size_t r = 0; r < inputs_.size(); ++r) {
      const auto got = gpu::fromGpu<unsigned char>(output(r), bytes);
      for (size_t i = 0; i < what_.count; ++i)
        if (!ring_oracle::same(what_.dtype, &got[i * width], &expected[i * width]))
          check::fail(__FILE__, __LINE__,
                      how + ": " + std::to_string(what_.ranks) + " ranks, " + name(what_.dtype) +
                          ", " + name(what_.op) + ", rank " + std::to_string(r) + ", element " +
                          std::to_string(i) + " of " + std::to_string(what_.count));
    }
  }

 private:
  std::byte* output(size_t r) const { return (in_place_ ? inputs_ : outputs_)[r].get() + offset_; }

  const Case what_;
  const bool in_place_;
  const size_t offset_;
  std::vector<gpu::Buffer> inputs_, outputs_;
};

constexpr Choice kKernels[] = {Choice::kOneShot, Choice::kTwoShot, Choice::kRing, Choice::kLocated};

uint32_t next() {
  static uint32_t seed = 0;
  return ++seed;
}

}  // namespace

TEST(kernels_of_all_ranks_in_one_grid) {
  for (int P : {2, 3}) {
    const Ranks ranks(P, together(), named("grid"));
    if (const std::string why = ranks.whyNotTogether(DType::kFloat32); !why.empty()) {
      std::printf("without: %s\n", why.c_str());
      return;
    }
    for (Choice choice : kKernels)
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8})
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax})
          for (size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{300001}}) {
            const bool in_place = next() % 2 == 0;
            const Case what{.ranks = P, .count = count, .dtype = dtype, .op = op, .seed = next()};
            const Data data(what, in_place, next() % 4);
            ranks.together(data.run(), choice);
            ranks.wait();
            data.expectRight(cuda::kChoiceNames[static_cast<size_t>(choice)]);
          }
  }
}

TEST(kernels_with_a_launch_a_rank) {
  const Ranks ranks(2, together(), named("launches"));
  for (Choice choice : kKernels) {
    const Case what{
        .ranks = 2, .count = 70001, .dtype = DType::kFloat32, .op = ReduceOp::kSum, .seed = next()};
    const Data data(what, false);
    ranks.apart(data.run(), choice);
    ranks.wait();
    data.expectRight(cuda::kChoiceNames[static_cast<size_t>(choice)]);
  }
}

TEST(direct_staged_and_on_mapped_tensors) {
  for (int P : {2, 3})
    for (bool mapped : {false, true})
      // The last goes in more pieces than staging memory has halves.
      for (size_t count : {size_t{1}, size_t{999}, size_t{500000}, size_t{18} << 20}) {
        const Case what{.ranks = P,
                        .count = count,
                        .dtype = DType::kFloat32,
                        .op = ReduceOp::kSum,
                        .seed = next()};
        const Data data(what, false, mapped ? 4 : 3, mapped);  // outlives its mappings
        const Ranks ranks(P, together(false), named("direct"));
        if (mapped) {
          CHECK_EQ(ranks.map(data.buffers(true), data.bufferBytes()), std::string());
          CHECK_EQ(ranks.map(data.buffers(false), data.bufferBytes()), std::string());
        }
        for (int i = 0; i < 3; ++i) ranks.apart(data.run(), Choice::kAuto);
        ranks.wait();
        data.expectRight(mapped ? "direct, mapped" : "direct, staged");
      }
}

// The last takes several windows, and several turns where it needs none.
TEST(located_in_mapped_memory_and_in_windows) {
  for (int P : {2, 3, 4})
    for (bool mapped : {false, true})
      for (size_t count : {size_t{1}, size_t{999}, size_t{500000}, size_t{9} << 20}) {
        if (P > 2 && count > 500000) continue;
        const Case what{.ranks = P,
                        .count = count,
                        .dtype = P == 4 ? DType::kInt32 : DType::kFloat32,
                        .op = ReduceOp::kSum,
                        .seed = next()};
        const Data data(what, false, mapped ? 4 : 2, mapped);  // outlives its mappings
        const Ranks ranks(P, together(), named("located"));
        if (mapped) {
          CHECK_EQ(ranks.map(data.buffers(true), data.bufferBytes()), std::string());
          CHECK_EQ(ranks.map(data.buffers(false), data.bufferBytes()), std::string());
        }
        for (int i = 0; i < 2; ++i) ranks.apart(data.run(), Choice::kLocated);
        ranks.wait();
        data.expectRight(mapped ? "located, mapped" : "located, in windows");
      }
}

TEST(the_factor_may_lie_in_the_gpus_memory) {
  const gpu::Buffer factor(sizeof(double));
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const double value = 0.375;
    const float narrow = 0.375f;
    const bool wide = dtype == DType::kFloat64;
    gpu::must(cudaMemcpy(factor.get(), wide ? static_cast<const void*>(&value) : &narrow,
                         wide ? sizeof value : sizeof narrow, cudaMemcpyHostToDevice),
              "copy to the GPU");
    const Ranks ranks(2, together(), named("factor"));
    for (Choice choice : {Choice::kDirect, Choice::kRing, Choice::kOneShot, Choice::kLocated})
      for (bool on_device : {false, true}) {
        const Case what{.ranks = 2,
                        .count = 5000,
                        .dtype = dtype,
                        .op = ReduceOp::kPremulSum,
                        .factor = value,
                        .seed = next()};
        const Data data(what, true);
        Run run = data.run();
        if (on_device) {
          run.factor = 1;
          run.factor_on_device = factor.get();
        }
        ranks.apart(run, choice);
        ranks.wait();
        data.expectRight("a factor");
      }
  }
}

TEST(a_captured_graph_replays) {
  const Ranks ranks(2, together(), named("graph"));
  for (Choice choice :
       {Choice::kOneShot, Choice::kTwoShot, Choice::kRing, Choice::kLocated, Choice::kDirect}) {
    const Case what{
        .ranks = 2, .count = 3000, .dtype = DType::kFloat32, .op = ReduceOp::kSum, .seed = next()};
    const Data data(what, false);
    const Graphs graphs(ranks, [&] {
      for (int i = 0; i < 3; ++i) ranks.apart(data.run(), choice);
    });
    for (int i = 0; i < 5; ++i) graphs.launch();
    // Calls outside of the graph go on from there.
    ranks.apart(data.run(), choice);
    ranks.wait();
    data.expectRight("a graph");
  }
}

TEST(calls_on_several_streams_of_a_rank_follow_each_other) {
  for (bool kernels : {true, false}) {
    const Ranks ranks(2, together(kernels), named("streams")), others(2, together(), named("more"));
    const Case what{
        .ranks = 2, .count = 100000, .dtype = DType::kInt32, .op = ReduceOp::kSum, .seed = next()};
    const Data data(what, false);
    for (int i = 0; i < 10; ++i) {
      ranks.apart(data.run(), Choice::kAuto);
      ranks.apart(data.run(), Choice::kAuto, &others);
    }
    ranks.wait();
    others.wait();
    data.expectRight("two streams");
  }
}

TEST(what_cannot_be_done_is_refused_and_the_group_goes_on) {
  const Ranks ranks(2, together(false), named("refusals"));
  const Case what{.ranks = 2, .count = 100, .dtype = DType::kFloat32, .op = ReduceOp::kSum};
  const Data data(what, false);
  const auto refused = [&](auto change) {
    cuda::GpuAllReduce call = ranks.callOf(data.run(), 0, Choice::kAuto);
    change(call);
    return ranks::failureOf([&] { ranks.comm(0).allReduce(call, ranks.stream(0)); }) ==
           Failure::kArgument;
  };
  CHECK(refused([](cuda::GpuAllReduce& c) { c.dtype = DType::kComplex64; }));
  CHECK(refused([](cuda::GpuAllReduce& c) { c.op = ReduceOp::kBand; }));
  CHECK(refused([](cuda::GpuAllReduce& c) { c.output = nullptr; }));
  CHECK(refused([](cuda::GpuAllReduce& c) {
    c.output = static_cast<std::byte*>(const_cast<void*>(c.input)) + 8;
  }));
  CHECK(
      refused([](cuda::GpuAllReduce& c) { c.input = static_cast<const std::byte*>(c.input) + 1; }));
  // Without MPS, and not known to be of one process, kernels do not wait for each other.
  if (!ranks.comm(0).device().mps)
    CHECK(refused([](cuda::GpuAllReduce& c) { c.algorithm = Choice::kRing; }));
  ranks.apart(data.run(), Choice::kAuto);
  ranks.wait();
  data.expectRight("after refusals");
}

TEST(a_communicator_takes_little_memory_and_says_how_much) {
  const Ranks ranks(2, together(), named("bytes"));
  for (int r = 0; r < 2; ++r) {
    const size_t bytes = ranks.comm(r).bytes();
    CHECK(bytes >= ranks.comm(r).tuning().layout(2).bytes());
    CHECK(bytes <= size_t{112} << 20);
  }
}

TEST(a_group_of_one_copies_and_scales) {
  const Ranks ranks(1, together(), named("alone"));
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kPremulSum}) {
    const Case what{.ranks = 1,
                    .count = 12345,
                    .dtype = DType::kFloat32,
                    .op = op,
                    .factor = 0.25,
                    .seed = next()};
    const Data data(what, false);
    ranks.apart(data.run(), Choice::kAuto);
    ranks.wait();
    data.expectRight("alone");
  }
}

int main(int argc, char** argv) {
  return gpu::mainOf([&] { return check::runAll(argc > 1 ? argv[1] : nullptr); });
}
