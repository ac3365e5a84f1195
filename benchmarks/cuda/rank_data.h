// One rank's buffers on the GPU: filled before a run, and held against what must be there after it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "../../tests/cpp/ring_oracle.h"
#include "../../tests/cuda/gpu.h"
#include "gpu_data.h"

namespace perf {

// An all-reduce that is to be checked: what it computes, and where in the buffers it lies.
struct Job {
  ring_oracle::Case what;
  bool in_place = false;
  size_t input_at = 0, output_at = 0;  // elements into the buffers; in place the input's holds
};

// The right result, computed by the host, in the GPU's memory.
class Expected {
 public:
  explicit Expected(size_t bytes) : host_(bytes + 1), device_(bytes + 1) {}

  // The last comparison with it must be over.
  void make(const ring_oracle::Case& what, cudaStream_t stream) {
    ring_oracle::expect(what, host_.get());
    const size_t bytes = what.count * ringreduce::sizeOf(what.dtype);
    gpu::must(cudaMemcpyAsync(device_.get(), host_.get(), bytes, cudaMemcpyHostToDevice, stream),
              "copy to the GPU");
  }
  const std::byte* onGpu() const { return device_.get(); }
  const std::byte* onHost() const { return host_.get(); }

 private:
  gpu::PinnedBuffer host_;
  gpu::Buffer device_;
};

// What was wrong with a result, and the first place where it was.
struct Found {
  size_t wrong = 0;
  std::string first;
};

class RankData {
 public:
  // For messages of up to `bytes`, at most kMostOffset elements into the buffers.
  RankData(int rank, size_t bytes)
      : rank_(rank),
        input_(kBegin + bytes + kSpare),
        output_(kBegin + bytes + kSpare),
        verdicts_(sizeof(Verdict) * kVerdicts) {}

  // Where a job reads and writes.
  std::byte* input(const Job& job) const {
    return input_.get() + kBegin + job.input_at * ringreduce::sizeOf(job.what.dtype);
  }
  std::byte* output(const Job& job) const {
    if (job.in_place) return input(job);
    return output_.get() + kBegin + job.output_at * ringreduce::sizeOf(job.what.dtype);
  }
  const gpu::Buffer& inputBuffer() const { return input_; }
  const gpu::Buffer& outputBuffer() const { return output_; }

  // Gives both other memory, before they hold anything: `make` makes it of so many bytes.
  template <class F>
  void move(F&& make) {
    for (gpu::Buffer* buffer : {&input_, &output_}) *buffer = make(buffer->bytes());
  }

  // Fresh addends; where the result goes, and around it, bytes that it cannot have by chance.
  void prepare(const Job& job, cudaStream_t stream) const {
    const ring_oracle::Case& what = job.what;
    const size_t bytes = what.count * ringreduce::sizeOf(what.dtype);
    gpu::must(cudaMemsetAsync(verdicts_.get(), 0, verdicts_.bytes(), stream), "clear memory");
    gpu::must(cudaMemsetAsync(output(job) - kAround, kPoison, bytes + 2 * kAround, stream),
              "fill memory");
    fillOnGpu(what.dtype, input(job), what.count, what.draw,
              random_elements::keyOf(what.seed, rank_), stream);
  }

  void compare(const Job& job, const Expected& expected, cudaStream_t stream) const {
    const ring_oracle::Case& what = job.what;
    const size_t bytes = what.count * ringreduce::sizeOf(what.dtype);
    compareOnGpu(what.dtype, output(job), expected.onGpu(), what.count, verdict(kResult), stream);
    compareWithByte(output(job) - kAround, kAround, kPoison, verdict(kBefore), stream);
    compareWithByte(output(job) + bytes, kAround, kPoison, verdict(kBehind), stream);
    if (!job.in_place)
      compareWithFill(what.dtype, input(job), what.count, what.draw,
                      random_elements::keyOf(what.seed, rank_), verdict(kInput), stream);
  }

  // After the stream of `compare` has ended.
  Found found(const Job& job, const Expected& expected) const {
    const auto verdicts = gpu::fromGpu<Verdict>(verdicts_.get(), kVerdicts);
    Found found;
    for (int i = 0; i < kVerdicts; ++i) {
      const Verdict& one = verdicts[static_cast<size_t>(i)];
      if (one.wrong > 0 && found.wrong == 0)
        found.first = explain(static_cast<Which>(i), ~one.first_inverse, job, expected);
      found.wrong += one.wrong;
    }
    return found;
  }

  // Whether an output is poisoned as after an abort: all bytes 0xff.
  bool isPoisoned(const Job& job, cudaStream_t stream) const {
    gpu::must(cudaMemsetAsync(verdicts_.get(), 0, verdicts_.bytes(), stream), "clear memory");
    compareWithByte(output(job), job.what.count * ringreduce::sizeOf(job.what.dtype), 0xff,
                    verdict(kResult), stream);
    gpu::finish(stream, "a comparison");
    return gpu::fromGpu<Verdict>(verdicts_.get(), 1)[0].wrong == 0;
  }

  static constexpr size_t kMostOffset = 16;

 private:
  enum Which { kResult, kBefore, kBehind, kInput, kVerdicts };
  static constexpr unsigned char kPoison = 0xa5;
  static constexpr size_t kAround = 512;  // bytes before and behind an output that must stay
  static constexpr size_t kBegin = 4096;
  static constexpr size_t kSpare = kMostOffset * 8 + 4096;

  Verdict* verdict(Which which) const {
    return reinterpret_cast<Verdict*>(verdicts_.get()) + which;
  }

  std::string explain(Which which, unsigned long long i, const Job& job,
                      const Expected& expected) const {
    const std::string rank = "rank " + std::to_string(rank_);
    if (which == kBefore) return rank + ": bytes before its output were written";
    if (which == kBehind) return rank + ": bytes behind its output were written";
    if (which == kInput)
      return rank + ": element " + std::to_string(i) + " of its input was changed";
    const size_t width = ringreduce::sizeOf(job.what.dtype);
    const auto got = gpu::fromGpu<unsigned char>(output(job) + i * width, width);
    const auto* wanted = reinterpret_cast<const unsigned char*>(expected.onHost()) + i * width;
    const auto hex = [&](const unsigned char* bytes) {
      std::string text = "0x";
      char digits[4];
      for (size_t b = width; b-- > 0;) {
        std::snprintf(digits, sizeof digits, "%02x", bytes[b]);
        text += digits;
      }
      return text;
    };
    return rank + ": element " + std::to_string(i) + " of " + std::to_string(job.what.count) +
           " is " + hex(got.data()) + ", not " + hex(wanted);
  }

  const int rank_;
  gpu::Buffer input_, output_, verdicts_;
};

}  // namespace perf
