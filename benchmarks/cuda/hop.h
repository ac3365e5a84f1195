// H: what it costs until one process's stream goes on after another process's stream has written
// the word that it waits for.  Every hop of the direct schedule is one.
//
// Two streams play ping-pong in memory of the host's that both processes map, as the direct
// schedule's words do; half of a round trip is H.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "../../tests/cuda/gpu.h"
#include "cuda/cuda_errors.h"
#include "report.h"

namespace perf {

// Zero at first, and mapped by both processes before they fork.
struct HopWords {
  struct alignas(128) Word {
    uint32_t value;
  };
  Word gate, ball[2];  // ball[i]: side i waits for it
};

class HopMeter {
 public:
  explicit HopMeter(HopWords& words) : words_(words) {
    gpu::must(cudaHostRegister(&words, sizeof words, cudaHostRegisterMapped),
              "let the GPU reach the host's memory");
    void* mapped = nullptr;
    gpu::must(cudaHostGetDevicePointer(&mapped, &words, 0), "find memory of the host's");
    on_gpu_ = static_cast<HopWords*>(mapped);
  }
  ~HopMeter() { (void)cudaHostUnregister(&words_); }
  HopMeter(const HopMeter&) = delete;
  HopMeter& operator=(const HopMeter&) = delete;

  // By both sides, 0 and 1; `meet` returns when both have called it.
  Times measure(int side, int rounds, const std::function<void()>& meet) {
    std::vector<double> seconds;
    try {
      for (int round = 0; round < rounds; ++round)
        seconds.push_back(roundOf(side, static_cast<uint32_t>(round), meet));
    } catch (...) {
      // Let go of what waits: far ahead, as the comparison goes in a circle.
      for (HopWords::Word* word : {&words_.gate, &words_.ball[0], &words_.ball[1]})
        std::atomic_ref(word->value).store(kFarAhead);
      throw;
    }
    return timesOf(seconds);
  }

 private:
  static constexpr uint32_t kThrows = 32;
  static constexpr uint32_t kFarAhead = uint32_t{1} << 30;

  double roundOf(int side, uint32_t round, const std::function<void()>& meet) {
    // Nothing starts before everything is in both streams.
    await(on_gpu_->gate, round + 1);
    begin_.record(stream_.get());
    for (uint32_t i = round * kThrows + 1; i <= (round + 1) * kThrows; ++i) {
      if (side == 0) write(on_gpu_->ball[1], i);
      await(on_gpu_->ball[side], i);
      if (side == 1) write(on_gpu_->ball[0], i);
    }
    end_.record(stream_.get());
    meet();
    if (side == 0) std::atomic_ref(words_.gate.value).store(round + 1, std::memory_order_release);
    gpu::finish(stream_.get(), "a wait for another process's stream");
    meet();
    return end_.since(begin_) / (2 * kThrows);
  }

  static CUdeviceptr address(HopWords::Word& word) {
    return reinterpret_cast<CUdeviceptr>(&word.value);
  }
  void await(HopWords::Word& word, uint32_t value) {
    ringreduce::cuda::check(ringreduce::cuda::driver().streamWaitValue32(
                                stream_.get(), address(word), value, CU_STREAM_WAIT_VALUE_GEQ),
                            "put a wait into a stream");
  }
  void write(HopWords::Word& word, uint32_t value) {
    ringreduce::cuda::check(ringreduce::cuda::driver().streamWriteValue32(
                                stream_.get(), address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                            "put a write into a stream");
  }

  HopWords& words_;
  HopWords* on_gpu_ = nullptr;
  const gpu::Stream stream_;
  const gpu::Mark begin_, end_;
};

}  // namespace perf
