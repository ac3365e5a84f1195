// reduce_scatter, all_gather and broadcast on a GPU, ranks of one process: against the CPU's bits,
// by kernels that wait for each other, through slots and on tensors where they are, and by the
// direct schedule, between all-reduces on the same memory.
#define CHECK_OWN_MAIN
#include <algorithm>
#include <cstring>

#include "check.h"
#include "one_process.h"
#include "ring_oracle.h"

using namespace ringreduce;
using one_process::Ranks;
using ring_oracle::Case;

namespace {

using Bytes = std::vector<unsigned char>;

// How calls are done: by push or on tensors where they are, by kernels that wait for each other; or
// by the direct schedule.
enum class How { kPush, kLocated, kDirect };
constexpr How kHows[] = {How::kPush, How::kLocated, How::kDirect};

Ranks ranksOf(int P, How kind, Nanos timeout = 20 * kSecond) {
  GroupOptions options;
  options.name = "parts";
  options.timeout = timeout;
  cuda::CommunicatorOptions how;
  how.together = kind != How::kDirect;
  how.algorithm = kind == How::kLocated ? cuda::Choice::kLocated : cuda::Choice::kAuto;
  return Ranks(P, how, options);
}

uint32_t next() {
  static uint32_t seed = 0;
  return ++seed;
}

// One call of all ranks, `at` elements into their buffers, and the expected result.
class Data {
 public:
  Data(Kind kind, int P, size_t count, DType dtype, bool in_place, size_t at = 0,
       ReduceOp op = ReduceOp::kSum)
      : kind_(kind),
        P_(P),
        count_(count),
        dtype_(dtype),
        op_(op),
        in_place_(in_place),
        seed_(next()),
        root_(static_cast<int>(seed_) % P) {
    const size_t width = sizeOf(dtype), part = count * width;
    const auto all = static_cast<size_t>(P) * part, shift = at * width;
    for (int r = 0; r < P; ++r) {
      first_.emplace_back(shift + all + 1);
      second_.emplace_back(shift + all + 1);
      for (const auto* buffers : {&first_, &second_})
        gpu::must(cudaMemset(buffers->back().get(), 0xa5, shift + all + 1), "fill memory");
      const size_t own = static_cast<size_t>(r) * part;
      std::byte *here = first_.back().get() + shift, *there = second_.back().get() + shift;
      inputs_.push_back(here + (in_place && kind == Kind::kAllGather ? own : 0));
      outputs_.push_back(!in_place && kind != Kind::kBroadcast ? there
                         : kind == Kind::kReduceScatter        ? here + own
                                                               : here);
      if (kind == Kind::kBroadcast && r != root_) continue;
      const Bytes elements = elementsOf(r);
      gpu::must(
          cudaMemcpy(inputs_.back(), elements.data(), elements.size(), cudaMemcpyHostToDevice),
          "copy to the GPU");
    }
    gpu::must(cudaDeviceSynchronize(), "wait for the GPU");
  }

  void put(const Ranks& ranks, int r, Nanos timeout = 0, const cuda::Label& label = {}) const {
    const auto i = static_cast<size_t>(r);
    cuda::HostCommunicator& comm = ranks.comm(r);
    if (kind_ == Kind::kReduceScatter)
      comm.reduceScatter({.input = inputs_[i],
                          .output = outputs_[i],
                          .count = count_,
                          .dtype = dtype_,
                          .op = op_,
                          .factor = kFactor,
                          .timeout = timeout,
                          .label = label},
                         ranks.stream(r));
    else if (kind_ == Kind::kAllGather)
      comm.allGather({.input = inputs_[i],
                      .output = outputs_[i],
                      .count = count_,
                      .dtype = dtype_,
                      .timeout = timeout,
                      .label = label},
                     ranks.stream(r));
    else
      comm.broadcast({.data = outputs_[i],
                      .count = count_,
                      .dtype = dtype_,
                      .root = root_,
                      .timeout = timeout,
                      .label = label},
                     ranks.stream(r));
  }
  void put(const Ranks& ranks) const {
    for (int r = 0; r < P_; ++r) put(ranks, r);
  }

  Bytes output(int r) const {
    const size_t parts = kind_ == Kind::kAllGather ? static_cast<size_t>(P_) : 1;
    return gpu::fromGpu<unsigned char>(outputs_[static_cast<size_t>(r)],
                                       parts * count_ * sizeOf(dtype_));
  }
  bool isPoisoned(int r) const {
    const Bytes got = output(r);
    const unsigned char poison = isFloating(dtype_) ? 0xff : 0;
    return std::all_of(got.begin(), got.end(), [&](unsigned char b) { return b == poison; });
  }
  int root() const { return root_; }

  void expectRight(const std::string& how) const {
    const size_t width = sizeOf(dtype_), part = count_ * width;
    Bytes sums;
    if (kind_ == Kind::kReduceScatter) {
      sums.resize(static_cast<size_t>(P_) * part + 1);
      ring_oracle::expect(addends(), sums.data());
    }
    for (int r = 0; r < P_; ++r) {
      const Bytes got = output(r);
      Bytes wanted;
      if (kind_ == Kind::kAllGather)
        for (int p = 0; p < P_; ++p) {
          const Bytes one = elementsOf(p);
          wanted.insert(wanted.end(), one.begin(), one.end());
        }
      if (kind_ == Kind::kBroadcast) wanted = elementsOf(root_);
      const unsigned char* expected = kind_ == Kind::kReduceScatter
                                          ? sums.data() + static_cast<size_t>(r) * part
                                          : wanted.data();
      for (size_t i = 0; i < got.size(); i += width)
        if (kind_ == Kind::kReduceScatter ? !ring_oracle::same(dtype_, &got[i], expected + i)
                                          : std::memcmp(&got[i], expected + i, width) != 0)
          check::fail(__FILE__, __LINE__,
                      how + ": " + std::string(name(kind_)) + ", " + std::to_string(P_) +
                          " ranks, " + name(dtype_) + ", " + name(op_) + ", rank " +
                          std::to_string(r) + ", element " + std::to_string(i / width) + " of " +
                          std::to_string(count_));
    }
  }

 private:
  static constexpr double kFactor = 0.375;

  Case addends() const {
    return {.ranks = P_,
            .count = static_cast<size_t>(P_) * count_,
            .dtype = dtype_,
            .op = op_,
            .factor = kFactor,
            .seed = seed_,
            .chunk = count_};
  }
  // A rank's input.  Calls that only move data take 8-bit integers.
  Bytes elementsOf(int r) const {
    const size_t parts = kind_ == Kind::kReduceScatter ? static_cast<size_t>(P_) : 1;
    const DType drawn = kind_ == Kind::kReduceScatter ? dtype_ : DType::kUInt8;
    const size_t n = parts * count_ * sizeOf(dtype_) / sizeOf(drawn);
    Bytes elements(n * sizeOf(drawn));
    random_elements::fill(drawn, elements.data(), 0, n, random_elements::Texture::kRough,
                          random_elements::keyOf(seed_, r));
    return elements;
  }

  const Kind kind_;
  const int P_;
  const size_t count_;
  const DType dtype_;
  const ReduceOp op_;
  const bool in_place_;
  const uint32_t seed_;
  const int root_;
  std::vector<gpu::Buffer> first_, second_;
  std::vector<std::byte*> inputs_, outputs_;
};

constexpr Kind kKinds[] = {Kind::kReduceScatter, Kind::kAllGather, Kind::kBroadcast};
const char* nameOf(How how) {
  return how == How::kPush ? "by push" : how == How::kLocated ? "located" : "direct";
}

}  // namespace

TEST(sums_of_parts_are_the_cpus) {
  for (const How how : kHows)
    for (int P : {2, 3}) {
      const Ranks ranks = ranksOf(P, how);
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8})
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kPremulSum})
          for (size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{100001}}) {
            if (!isSupported(dtype, op)) continue;
            const Data data(Kind::kReduceScatter, P, count, dtype, next() % 2 == 0, next() % 4, op);
            data.put(ranks);
            ranks.wait();
            data.expectRight(nameOf(how));
          }
    }
}

TEST(elements_of_all_widths_are_moved) {
  for (const How how : kHows)
    for (int P : {2, 3}) {
      const Ranks ranks = ranksOf(P, how);
      for (Kind kind : {Kind::kAllGather, Kind::kBroadcast})
        for (DType dtype : {DType::kFloat8E4M3FN, DType::kBFloat16, DType::kFloat32,
                            DType::kComplex64, DType::kComplex128})
          for (size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{100001}}) {
            const Data data(kind, P, count, dtype, next() % 2 == 0, next() % 4);
            data.put(ranks);
            ranks.wait();
            data.expectRight(nameOf(how));
          }
    }
}

// More than slots, and than a half of the memory to be staged in; and many calls in a row.
TEST(long_messages_and_many_calls) {
  for (const How how : kHows) {
    const Ranks ranks = ranksOf(2, how);
    std::vector<Data> data;
    data.reserve(16);
    for (Kind kind : kKinds) data.emplace_back(kind, 2, size_t{9} << 20, DType::kFloat32, false, 1);
    for (int i = 0; i < 9; ++i)
      data.emplace_back(kKinds[i % 3], 2, 3000 + 100 * static_cast<size_t>(i), DType::kFloat32,
                        i % 2 == 0);
    gpu::Buffer sums(4096);
    gpu::must(cudaMemset(sums.get(), 0, sums.bytes()), "clear memory");
    gpu::must(cudaDeviceSynchronize(), "wait for the GPU");
    for (const Data& one : data) {
      one.put(ranks);
      for (int r = 0; r < 2; ++r)
        ranks.comm(r).allReduce({.input = sums.get() + 2048 * r,
                                 .output = sums.get() + 2048 * r,
                                 .count = 512,
                                 .dtype = DType::kFloat32,
                                 .op = ReduceOp::kSum},
                                ranks.stream(r));
    }
    ranks.wait();
    for (const Data& one : data) one.expectRight(nameOf(how));
  }
}

TEST(a_captured_graph_replays) {
  for (const How how : kHows) {
    const Ranks ranks = ranksOf(2, how);
    std::vector<Data> data;
    data.reserve(3);
    for (Kind kind : kKinds) data.emplace_back(kind, 2, 3000, DType::kFloat32, false);
    const one_process::Graphs graphs(ranks, [&] {
      for (const Data& one : data) one.put(ranks);
    });
    for (int again = 0; again < 4; ++again) graphs.launch();
    for (const Data& one : data) one.put(ranks);
    ranks.wait();
    for (const Data& one : data) one.expectRight("a graph");
  }
}

TEST(a_group_of_one_copies_and_scales) {
  const Ranks ranks = ranksOf(1, How::kPush);
  for (Kind kind : kKinds)
    for (bool in_place : {false, true}) {
      const Data data(kind, 1, 12345, DType::kFloat32, in_place, 0, ReduceOp::kPremulSum);
      data.put(ranks);
      ranks.wait();
      data.expectRight("alone");
    }
}

TEST(a_rank_that_does_not_come_is_named_and_outputs_are_poisoned) {
  for (const How how : kHows)
    for (Kind kind : kKinds) {
      const Ranks ranks = ranksOf(3, how);
      const Data data(kind, 3, 20000, how == How::kPush ? DType::kFloat32 : DType::kInt32, false);
      // Of a broadcast by the direct schedule only the root is missed.
      const int absent = kind == Kind::kBroadcast ? data.root() : 1;
      for (int r = 0; r < 3; ++r)
        if (r != absent)
          data.put(ranks, r, 300 * kMillisecond, [] { return std::string("DDP bucket 2"); });
      for (int r = 0; r < 3; ++r) {
        const Nanos deadline = deadlineIn(10 * kSecond);
        Failure failure = Failure::kNone;
        while (failure == Failure::kNone && now() < deadline)
          failure = ranks::failureOf([&] { ranks.comm(r).check(); }, "(DDP bucket 2)");
        CHECK(failure == Failure::kTimeout);
        gpu::finish(ranks.stream(r), "a stream after an error");
        if (r != absent) CHECK(data.isPoisoned(r));
        const float* flag = &ranks.comm(r).local()->found_inf;
        CHECK_EQ(gpu::fromGpu<float>(flag, 1)[0], r == absent ? 0.f : 1.f);
      }
      CHECK(ranks::failureOf([&] { ranks.comm(0).check(); }, "rank " + std::to_string(absent)) ==
            Failure::kTimeout);
    }
}

int main(int argc, char** argv) {
  return gpu::mainOf([&] { return check::runAll(argc > 1 ? argv[1] : nullptr); });
}
