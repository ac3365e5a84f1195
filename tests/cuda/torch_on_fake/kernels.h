// Kernels that the fake can run: those that somebody gives it as functions of the host.
#pragma once

#include <cstddef>

// Runs one block of a grid of `blocks`; `argument` is the kernel's.
using FakeBlock = void (*)(const void* kernel, const void* argument, int block, int blocks);

// A kernel that takes one argument of so many bytes.  Blocks of a grid run at the same time.
extern "C" void fakeRegisterKernel(const void* kernel, size_t argument_bytes, FakeBlock block);
