// The calls of the fake's NCCL, when a stream comes to them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "nccl_wire.h"

namespace fake::nccl {

// NCCL's numbers.
enum DType : int {
  kInt8,
  kUInt8,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kDTypes,
};
enum Op : int { kSum, kProduct, kMax, kMin, kAverage, kOps };
constexpr int kScaledSum = kOps;  // of ncclRedOpCreatePreMulSum; the same number on all ranks

enum class What : int {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kSend,
  kRecv,
};

size_t sizeOf(int dtype);
bool canReduce(int dtype);

// The factor of each rank's input.
struct Factor {
  double value;
  const void* on_device;  // instead, unless null: one element
};

struct Call {
  What what;
  const void* input;
  void* output;
  size_t count;  // of elements of one rank, where it gathers or scatters
  int dtype;
  int op = kSum;
  int root = 0;  // or the peer
  std::optional<Factor> factor = std::nullopt;

  bool isMessage() const { return what == What::kSend || what == What::kRecv; }
};
std::string describe(const Call& call);

// Calls that were made as one group, which wait for each other's partners at the same time.  Does
// nothing more once the wire has been ended.
void perform(Wire& wire, const std::vector<Call>& calls);

// Reduces all of `inputs`, in this order, into `to`.
void reduce(const std::vector<const std::byte*>& inputs, void* to, size_t count, int dtype, int op);
// Multiplies each element.
void multiply(void* data, size_t count, int dtype, const Factor& factor);

// One element.
double valueOf(const void* scalar, int dtype);

}  // namespace fake::nccl
