// What the stand-in for NCCL (fake_nccl.cc) was asked to do, and what it is to answer.
#pragma once

#include <cstddef>
#include <cstring>

// What the stand-in was made to do besides, when it moves bytes (fake_nccl_moves.h).
struct FakeMoves {
  bool moves = false;  // or else calls are only noted
  // Puts work into a stream; null: it is done at once.
  void (*enqueue)(void* stream, void (*run)(void*), void* work) = nullptr;
  int dies = -1, dies_at = 0;  // this rank is gone when it comes to that group of its own
  char complaint[256] = {};    // the first
};

struct FakeNccl : FakeMoves {
  int version = 23003;
  int result = 0;            // what calls return...
  const char* failing = "";  // ...whose name contains this, if it is not empty
  const char* last_error = "";
  int asynchronous_error = 0;

  // Of the latest call of each kind.
  char id[128] = {};
  int rank = -1, size = 0, max_blocks = 0, blocking = -1;
  size_t count = 0;
  int dtype = -1, op = -1, peer = -1;
  unsigned char scalar[8] = {};

  int made = 0, destroyed = 0, aborted = 0;
  int operators = 0;          // of PREMUL_SUM: made and not destroyed
  int depth = 0, groups = 0;  // groups of calls: open now, ended

  size_t moved = 0;  // bytes, when it moves them

  int answer(const char* call) const { return *failing && std::strstr(call, failing) ? result : 0; }
};
