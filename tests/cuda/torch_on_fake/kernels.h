// Kernels that the fake can run: those that somebody gives it as functions of the host.
#pragma once

#include <cstddef>

// Runs one block of a grid of `blocks`; `argument` is the kernel's.
using FakeBlock = void (*)(const void* kernel, const void* argument, int block, int blocks);

// A kernel that takes one argument of so many bytes.  Blocks of a grid run at the same time.
extern "C" void fakeRegisterKernel(const void* kernel, size_t argument_bytes, FakeBlock block);
// Between two looks of a block at a word that somebody sets.  Returns no more on a ruined GPU.
extern "C" void fakePause();

// Where this process sees the memory of all GPUs that a multicast address stands for, at most 8;
// how many there are.
extern "C" int fakeMulticast(const void* address, void** places);

// How many events this process has made.
extern "C" int fakeEventsMade();

// The rest returns a cudaError_t.
// As cudaLaunchHostFunc, but the function may touch GPU memory.
extern "C" int fakeLaunchWork(struct CUstream_st* stream, void (*function)(void*), void* data);
// Launches a kernel that fails with an error which ruins the GPU; which that is.
extern "C" int fakeFault(struct CUstream_st* stream, int error);
extern "C" int fakeRuinOf(int ordinal);
