// The fake's streams as far as communicators need them: nothing runs, and what a test wants is said
// of events and captures.  Steps of the direct schedule are refused.
#pragma once

#include <atomic>

namespace fake {

// Somebody captures a stream in the mode `global`: calls that are not safe then end that, unless
// their thread has said that it knows (cudaThreadExchangeStreamCaptureMode).
inline std::atomic<bool> someone_captures = false;
inline std::atomic<int> captures_ended = 0;

// Launched kernels stay in their stream.
inline std::atomic<bool> gpu_is_busy = false;

// Runs a kernel at once; null: launches are only counted.
inline void (*run_kernel)(const void* kernel, void** arguments, int blocks) = nullptr;

inline std::atomic<int> launches = 0, streams_held_back = 0;

}  // namespace fake
