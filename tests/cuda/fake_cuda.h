// A CUDA runtime and driver made of host memory, for tests of who allocates, maps and frees what on
// machines that have no GPU.
//
// It has the calls that csrc/cuda/*.cc makes of CUDA, under their own names, so a test links to
// this in place of the real one.  "GPU memory" is a memfd, mapped where a GPU would map it: a
// descriptor or an IPC handle of it works between processes.  It refuses what CUDA refuses (a
// handle opened by its own process, memory registered twice, memory that no access was given to)
// and stops the program at what CUDA leaves undefined (memory freed while another process has it
// open, or touched by IPC after its process has ended).  The host cannot touch GPU memory, except
// while a kernel or a copy runs.  It knows nothing of kernels, streams are done at once, and what
// it shows about real drivers is nothing: tests/cuda/peer_memory_test.cc asks those.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

namespace fake {

inline constexpr int kMostGpus = 4;

// The machine, as every process of a test sees it; set before ranks start.
struct Machine {
  int gpus = 2;  // FAKE_GPUS
  bool has_driver = true;
  bool exports = true, ipc = true, registers = true;  // abilities of its GPUs
  bool apart[kMostGpus][kMostGpus] = {};              // no peer access from one to the other
  double gigabytes_per_s[kMostGpus][kMostGpus] = {};  // read by one from the other; 0: 300
  bool loses_data = false;  // a GPU maps another's memory, but sees other memory there
  bool mps = false;         // FAKE_MPS
  bool multicasts = false;  // FAKE_MULTICAST: an NVSwitch adds and multicasts
  int multiprocessors = 4;  // FAKE_MULTIPROCESSORS
  bool ends_long_kernels = false;
  bool bar1_is_full = false;  // there is no room to map memory of another process or GPU
  bool copies_hang = false;   // a copy never ends
  bool peers_hang = false;    // nor does one from another GPU's memory, or what follows it
  bool hides_memory = true;   // FAKE_HIDES_MEMORY: from the host
};
Machine& machine();

// How many mappings `bar1_is_full` has refused in this process.
int mapsRefused();

// Which of the machine's GPUs the calling thread's process sees, in its own order; all if not
// called.
void see(const std::vector<int>& gpus);

// Makes the calling thread's n-th call from now fail with `error` (1: the next).  Calls that give
// something back are not counted and never fail.  If it is cudaErrorIllegalAddress, the GPU is
// ruined then.
void failAt(int n, cudaError_t error, int ordinal = 0);
// Whether it has.
bool hasFailed();
// From now on every call on the GPU fails with `error` in all threads of this process, as after a
// kernel that has failed.
void ruin(int ordinal, cudaError_t error);
bool hasRuins();
void heal();  // forgets all that

// Memory that this process has not given back: "" or "1 ranges, 2 handles".
std::string leftovers();
void forgetLeftovers();

}  // namespace fake
