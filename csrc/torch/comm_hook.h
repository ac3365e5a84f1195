// The DDP communication hook in C++: a bucket goes from the reducer to the group's queue and back
// without the interpreter.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "torch/work.h"

namespace ringreduce {

// What names a bucket in errors: "DDP bucket 2 with 4 parameters of shape ...".
Context describeBucket(c10d::GradBucket& bucket);

// Averages a bucket over the backend's ranks, in place; the Future's value is the bucket's tensor.
c10::intrusive_ptr<c10::ivalue::Future> averageGradBucket(c10d::Backend& backend,
                                                          c10d::GradBucket& bucket);

// From now on `reducer` averages its buckets over `backend`, a ringreduce one.
void registerCommHook(c10d::Reducer& reducer, c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace ringreduce
