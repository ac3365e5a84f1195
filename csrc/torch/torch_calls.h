// torch's calls on tensors: what c10d::Backend declares, and how they are named.
//
// A class that takes them all has RINGREDUCE_DECLARE_CALLS.  One that only passes them on
// (inner_nccl.h, staged_backend.cc) follows from the two lists; of the calls whose arguments are
// like no other's (messages, barrier, alltoall_base) it writes each.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace ringreduce {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

// Of outputs and inputs: the method, their types, its options, torch's number and name in errors.
// clang-format off
#define RINGREDUCE_CALLS_FROM_TO(X)                                                              \
  X(allgather, Lists, Tensors, AllgatherOptions, ALLGATHER, "all_gather")                        \
  X(allgather_coalesced, Lists, Tensors, AllgatherOptions, ALLGATHER_COALESCED,                  \
    "all_gather_coalesced")                                                                      \
  X(_allgather_base, at::Tensor, at::Tensor, AllgatherOptions, _ALLGATHER_BASE,                  \
    "all_gather_into_tensor")                                                                    \
  X(allgather_into_tensor_coalesced, Tensors, Tensors, AllgatherOptions, COALESCED,              \
    "all_gather_into_tensor_coalesced")                                                          \
  X(reduce_scatter, Tensors, Lists, ReduceScatterOptions, REDUCE_SCATTER, "reduce_scatter")      \
  X(_reduce_scatter_base, at::Tensor, at::Tensor, ReduceScatterOptions, _REDUCE_SCATTER_BASE,    \
    "reduce_scatter_tensor")                                                                     \
  X(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatterOptions, COALESCED,          \
    "reduce_scatter_tensor_coalesced")                                                           \
  X(gather, Lists, Tensors, GatherOptions, GATHER, "gather")                                     \
  X(scatter, Tensors, Lists, ScatterOptions, SCATTER, "scatter")                                 \
  X(alltoall, Tensors, Tensors, AllToAllOptions, ALLTOALL, "all_to_all")

// In place: the method, its options, torch's number and name in errors.
#define RINGREDUCE_CALLS_IN_PLACE(X)                                                             \
  X(allreduce, AllreduceOptions, ALLREDUCE, "all_reduce")                                        \
  X(allreduce_coalesced, AllreduceCoalescedOptions, ALLREDUCE_COALESCED, "all_reduce_coalesced") \
  X(allreduce_sparse, AllreduceOptions, _ALLREDUCE_SPARSE, "sparse all_reduce")                  \
  X(reduce, ReduceOptions, REDUCE, "reduce")                                                     \
  X(broadcast, BroadcastOptions, BROADCAST, "broadcast")
// clang-format on

// The declarations in a class, with those of no list.
#define RINGREDUCE_DECLARE_FROM_TO(name, Out, In, Options, type, title) \
  WorkPtr name(Out& outputs, In& inputs, const c10d::Options& options) override;
#define RINGREDUCE_DECLARE_IN_PLACE(name, Options, type, title) \
  WorkPtr name(Tensors& tensors, const c10d::Options& options) override;
#define RINGREDUCE_DECLARE_CALLS                                                                 \
  RINGREDUCE_CALLS_FROM_TO(RINGREDUCE_DECLARE_FROM_TO)                                           \
  RINGREDUCE_CALLS_IN_PLACE(RINGREDUCE_DECLARE_IN_PLACE)                                         \
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,                                   \
                        std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits, \
                        const c10d::AllToAllOptions& options) override;                          \
  WorkPtr send(Tensors& tensors, int peer, int tag) override;                                    \
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;                                    \
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;                                     \
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

}  // namespace ringreduce
