// Checks and conversions of torch's arguments, and contiguous copies of tensors that need one.
#include "torch/arguments.h"

#include <ATen/core/grad_mode.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"

#ifdef RINGREDUCE_CUDA
#include "cuda/gpu_device.h"
#endif

namespace ringreduce {

std::string cudaBuild() {
#ifdef RINGREDUCE_CUDA
  return cuda::buildInfo().text();
#else
  return "";
#endif
}

void refuse(const char* call, const std::string& why) {
  throw Error(Failure::kArgument, std::string("ringreduce ") + call + ": " + why);
}

DType dtypeOf(const at::Tensor& tensor, const char* call) {
  static constexpr std::pair<at::ScalarType, DType> kAll[] = {
      {at::kFloat, DType::kFloat32},
      {at::kDouble, DType::kFloat64},
      {at::kHalf, DType::kFloat16},
      {at::kBFloat16, DType::kBFloat16},
      {at::kChar, DType::kInt8},
      {at::kByte, DType::kUInt8},
      {at::kShort, DType::kInt16},
      {at::kInt, DType::kInt32},
      {at::kLong, DType::kInt64},
      {at::kBool, DType::kBool},
      {at::kUInt16, DType::kUInt16},
      {at::kUInt32, DType::kUInt32},
      {at::kUInt64, DType::kUInt64},
      {at::kComplexFloat, DType::kComplex64},
      {at::kComplexDouble, DType::kComplex128},
      {at::kFloat8_e4m3fn, DType::kFloat8E4M3FN},
      {at::kFloat8_e5m2, DType::kFloat8E5M2},
      {at::kFloat8_e4m3fnuz, DType::kFloat8E4M3FNUZ},
      {at::kFloat8_e5m2fnuz, DType::kFloat8E5M2FNUZ},
      {at::kFloat8_e8m0fnu, DType::kFloat8E8M0FNU},
      {at::kFloat4_e2m1fn_x2, DType::kFloat4E2M1FNx2},
      {at::kComplexHalf, DType::kComplex32},
  };
  for (const auto& [theirs, ours] : kAll)
    if (theirs == tensor.scalar_type()) return ours;
  refuse(call, std::string("no such elements: ") + c10::toString(tensor.scalar_type()));
}

void requireCpu(const at::Tensor& tensor, const char* call) {
  if (tensor.device().is_cpu()) return;
  std::string why = "takes tensors in CPU memory, not on " + tensor.device().str();
  if (tensor.is_cuda())
    why +=
        hasCuda()
            ? ", where the call's other tensors are not"
            : std::string(": this ringreduce was built without CUDA (") + cudaMissing() +
                  "); use nccl for CUDA tensors (\"cpu:ringreduce,cuda:nccl\"), or rebuild it with "
                  "RINGREDUCE_CUDA=1; the build then says what is missing";
  throw Error(Failure::kArgument, std::string("ringreduce ") + call + ": " + why);
}

void requireDense(const at::Tensor& tensor, const char* call, c10::Device device) {
  if (!tensor.defined()) refuse(call, "an undefined tensor");
  if (tensor.layout() != at::kStrided)
    refuse(call, std::string("takes dense tensors, not ") +
                     (tensor.is_sparse() ? "sparse" : c10::str(tensor.layout())) +
                     " ones; all_reduce alone takes sparse tensors, in COO layout");
  if (tensor.is_quantized()) refuse(call, "takes no quantized tensors; dequantize them first");
  if (tensor.device() == device) return;
  if (device.is_cpu()) requireCpu(tensor, call);
  refuse(call, "takes tensors on one device, not on " + device.str() + " and on " +
                   tensor.device().str());
}

const at::Tensor& onlyOne(const std::vector<at::Tensor>& tensors, const char* call,
                          c10::Device device) {
  if (tensors.size() != 1)
    refuse(call, "takes one tensor, not a list of " + std::to_string(tensors.size()));
  requireDense(tensors[0], call, device);
  return tensors[0];
}

namespace {

bool hasMemory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_meta() && tensor.numel() > 0;
}

// The memory from a tensor's first element to its last.
std::pair<const std::byte*, const std::byte*> extentOf(const at::Tensor& tensor) {
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + static_cast<size_t>(last + 1) * tensor.element_size()};
}

struct Dimension {
  size_t size, stride;
};

// Those of more than one element, the largest strides first.
std::vector<Dimension> dimensionsOf(const at::Tensor& tensor, size_t unit = 1) {
  std::vector<Dimension> all;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1)
      all.push_back(
          {static_cast<size_t>(tensor.size(d)), static_cast<size_t>(tensor.stride(d)) * unit});
  std::ranges::sort(all, [](const auto& a, const auto& b) { return a.stride > b.stride; });
  return all;
}

// Whether each dimension steps over all that the smaller ones reach: then no two elements are in
// one place.
bool isNested(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const std::vector<Dimension> all = dimensionsOf(tensor);
  size_t reach = 0;
  return std::all_of(all.rbegin(), all.rend(), [&](const Dimension& dimension) {
    const bool steps_over = dimension.stride > reach;
    reach += (dimension.size - 1) * dimension.stride;
    return steps_over;
  });
}

// Marks all elements from `dimensions[d]` on.  False if one has been marked.
bool mark(std::vector<bool>& taken, size_t at, size_t width,
          const std::vector<Dimension>& dimensions, size_t d = 0) {
  if (d < dimensions.size()) {
    for (size_t i = 0; i < dimensions[d].size; ++i)
      if (!mark(taken, at + i * dimensions[d].stride, width, dimensions, d + 1)) return false;
    return true;
  }
  for (size_t i = at; i < at + width; ++i) {
    if (taken[i]) return false;
    taken[i] = true;
  }
  return true;
}

// Of tensors whose extents overlap.  Takes as long as a copy of them.
bool haveDisjointElements(std::span<const at::Tensor* const> tensors, const std::byte* begin,
                          const std::byte* end) {
  const auto offsetOf = [&](const at::Tensor& tensor) {
    return static_cast<size_t>(extentOf(tensor).first - begin);
  };
  size_t bytes = 0, unit = 0;
  for (const at::Tensor* tensor : tensors) {
    bytes += tensor->nbytes();
    unit = std::gcd(std::gcd(unit, tensor->element_size()), offsetOf(*tensor));
  }
  const auto room = static_cast<size_t>(end - begin);
  if (bytes > room) return false;
  std::vector<bool> taken(room / unit);
  return std::ranges::all_of(tensors, [&](const at::Tensor* tensor) {
    const size_t width = tensor->element_size() / unit;
    return mark(taken, offsetOf(*tensor) / unit, width, dimensionsOf(*tensor, width));
  });
}

}  // namespace

bool isPartOf(const at::Tensor& part, const at::Tensor& whole, int index) {
  return part.defined() && whole.defined() && part.is_contiguous() && whole.is_contiguous() &&
         static_cast<const std::byte*>(part.const_data_ptr()) ==
             static_cast<const std::byte*>(whole.const_data_ptr()) +
                 static_cast<size_t>(index) * part.nbytes();
}

bool anyShareMemory(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() < 2) return false;
  std::vector<std::pair<const std::byte*, const std::byte*>> extents;
  for (const at::Tensor& tensor : tensors)
    if (hasMemory(tensor)) extents.push_back(extentOf(tensor));
  std::ranges::sort(extents);
  return std::ranges::adjacent_find(extents, [](const auto& a, const auto& b) {
           return b.first < a.second;
         }) != extents.end();
}

void requireDisjoint(const std::vector<at::Tensor>& outputs, const char* call) {
  std::vector<const at::Tensor*> all;
  for (const at::Tensor& output : outputs)
    if (hasMemory(output)) all.push_back(&output);
  const auto begins = [](const at::Tensor* tensor) { return extentOf(*tensor).first; };
  std::ranges::sort(all, {}, begins);
  // In runs of tensors whose extents overlap.
  for (size_t first = 0, next = 0; first < all.size(); first = next) {
    const auto [begin, own_end] = extentOf(*all[first]);
    const std::byte* end = own_end;
    for (next = first + 1; next < all.size() && begins(all[next]) < end; ++next)
      end = std::max(end, extentOf(*all[next]).second);
    const bool alone = next == first + 1;
    if (alone && isNested(*all[first])) continue;
    if (haveDisjointElements(std::span(all).subspan(first, next - first), begin, end)) continue;
    refuse(call, alone ? "cannot write to a tensor whose elements share memory (an expanded one); "
                         "pass .contiguous()"
                       : "cannot write to outputs that share memory, because each would overwrite "
                         "others; pass tensors that do not overlap");
  }
}

OutputMemory::OutputMemory(const std::vector<at::Tensor>& outputs, const char* call) {
  requireDisjoint(outputs, call);
  for (const at::Tensor& output : outputs) {
    if (!hasMemory(output)) continue;
    const auto [begin, end] = extentOf(output);
    extents_.push_back({begin, end, output.unsafeGetTensorImpl(), end});
  }
  std::sort(extents_.begin(), extents_.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents_.size(); ++i)
    extents_[i].furthest = std::max(extents_[i].end, extents_[i - 1].furthest);
}

bool OutputMemory::overlaps(const at::Tensor& input, const at::Tensor* in_place) const {
  if (!hasMemory(input)) return false;
  const auto [begin, end] = extentOf(input);
  // Starts at the last output that begins before the input ends, and goes back until `furthest`
  // shows that no earlier output reaches the input.
  auto at =
      std::lower_bound(extents_.begin(), extents_.end(), end,
                       [](const Extent& e, const std::byte* limit) { return e.begin < limit; });
  while (at != extents_.begin()) {
    --at;
    if (at->furthest <= begin) return false;
    if (at->end > begin && !(in_place && at->tensor == in_place->unsafeGetTensorImpl()))
      return true;
  }
  return false;
}

at::Tensor OutputMemory::copyIfShared(const at::Tensor& input, const at::Tensor* in_place) const {
  if (!overlaps(input, in_place)) return input;
  const at::NoGradGuard no_grad;
  return input.detach().clone(at::MemoryFormat::Contiguous);
}

std::vector<at::Tensor> OutputMemory::copyIfShared(std::vector<at::Tensor> inputs) const {
  for (at::Tensor& input : inputs) input = copyIfShared(input);
  return inputs;
}

namespace {

// The same elements, also if the tensor or its storage has other memory by the time that they are
// written.  The operation holds the memory (torch/held_memory.h).
at::Tensor inSameMemory(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.numel() == 0) return tensor.detach();
  at::Tensor same =
      at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

}  // namespace

Staged::Staged(at::Tensor tensor, Use use, const char* call)
    : tensor_(std::move(tensor)), use_(use) {
  // A lazily conjugated or negated view has other elements than its memory.
  if (!tensor_.is_contiguous() || tensor_.is_conj() || tensor_.is_neg()) {
    if (use != Use::kRead) requireDisjoint({tensor_}, call);
    const at::NoGradGuard no_grad;
    copy_ = use == Use::kWrite
                ? at::empty(tensor_.sizes(),
                            tensor_.options().memory_format(at::MemoryFormat::Contiguous))
                : tensor_.detach().resolve_conj().resolve_neg().contiguous();
    if (use != Use::kRead) tensor_ = inSameMemory(tensor_);
  }
  data_ = memory().data_ptr();
}

void Staged::giveBack() const {
  if (use_ == Use::kRead || !copy_.defined()) return;
  const at::NoGradGuard no_grad;
  tensor_.copy_(copy_);
}

// ---- arguments

AddOrder orderNamed(const std::string& name) {
  return name == "rank" ? AddOrder::kRank : AddOrder::kRing;
}

Nanos nanosOf(double seconds) {
  if (seconds < 0)
    throw Error(Failure::kArgument,
                c10::str("ringreduce: the timeout is ", seconds, " s; it cannot be negative"));
  return seconds * kSecond < static_cast<double>(kNever) ? static_cast<Nanos>(seconds * kSecond)
                                                         : kNever;
}

Nanos nanosOf(std::chrono::milliseconds timeout) {
  if (timeout.count() < 0)
    throw Error(Failure::kArgument, "ringreduce: the timeout is " +
                                        std::to_string(timeout.count()) +
                                        " ms; it cannot be negative");
  return timeout.count() < kNever / kMillisecond ? timeout.count() * kMillisecond : kNever;
}

Nanos timeoutOf(std::chrono::milliseconds timeout) {
  return timeout == c10d::kUnsetTimeout ? 0 : nanosOf(timeout);
}

ReduceOp opOf(const c10d::ReduceOp& op, const char* call) {
  using Theirs = c10d::ReduceOp;
  static constexpr std::pair<Theirs::RedOpType, ReduceOp> kAll[] = {
      {Theirs::SUM, ReduceOp::kSum},
      {Theirs::AVG, ReduceOp::kAvg},
      {Theirs::PRODUCT, ReduceOp::kProduct},
      {Theirs::MIN, ReduceOp::kMin},
      {Theirs::MAX, ReduceOp::kMax},
      {Theirs::BAND, ReduceOp::kBand},
      {Theirs::BOR, ReduceOp::kBor},
      {Theirs::BXOR, ReduceOp::kBxor},
      {Theirs::PREMUL_SUM, ReduceOp::kPremulSum},
  };
  for (const auto& [theirs, ours] : kAll)
    if (theirs == op.op_) return ours;
  refuse(call, "an unknown reduce op");
}

namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PremulSum = c10d::NCCLPreMulSumSupplement;
#else
using PremulSum = c10d::PreMulSumSupplement;
#endif

}  // namespace

Factor factorOf(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return {};
  const auto* supplement = dynamic_cast<const PremulSum*>(op.supplement_.get());
  if (!supplement) throw Error(Failure::kArgument, "ringreduce: PREMUL_SUM without its factor");
  return {supplement->double_factor, supplement->tensor_factor};
}

double numberOf(const Factor& factor) {
  return factor.tensor.defined() ? factor.tensor.item<double>() : factor.number;
}

at::Tensor addable(const at::Tensor& tensor, ReduceOp op, const char* call) {
  if (!tensor.is_complex()) return tensor;
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg && op != ReduceOp::kPremulSum)
    refuse(call, std::string("cannot take ") + name(op) + " of complex numbers");
  if (tensor.is_conj())
    refuse(call, "takes no lazily conjugated tensor; pass tensor.resolve_conj()");
  return at::view_as_real(tensor);
}

void requireLike(const at::Tensor& tensor, int64_t elements, const at::Tensor& like,
                 const char* call, const char* what) {
  requireDense(tensor, call, like.device());
  if (tensor.numel() != elements || tensor.scalar_type() != like.scalar_type())
    refuse(call, c10::str(what, " must have ", elements, " elements of ", like.scalar_type(),
                          "; it has ", tensor.numel(), " of ", tensor.scalar_type()));
}

const Tensors& onlyList(const std::vector<Tensors>& lists, size_t size, const char* call,
                        const char* what) {
  if (lists.size() != 1 || lists[0].size() != size)
    refuse(call, c10::str("needs a list of ", size, " ", what, " tensors, one for each rank",
                          lists.size() == 1 ? c10::str(", not of ", lists[0].size()) : ""));
  return lists[0];
}

void requireTag(int tag, const char* call) {
  if (tag < 0) refuse(call, "the tag is " + std::to_string(tag) + "; it cannot be negative");
}

void requireSome(const Tensors& tensors, const char* call) {
  if (tensors.empty()) refuse(call, "an empty list of tensors");
}

void requirePairs(const Tensors& outputs, const Tensors& inputs, const char* call) {
  requireSome(inputs, call);
  if (outputs.size() != inputs.size())
    refuse(call, c10::str(outputs.size(), " outputs for ", inputs.size(), " inputs"));
}

std::shared_ptr<at::Tensor> Buffers::take(size_t bytes) {
  const auto make = [](size_t size) {
    return at::empty({static_cast<int64_t>(size)}, at::TensorOptions(at::kByte));
  };
  if (bytes > kBytes) return std::make_shared<at::Tensor>(make(bytes));
  at::Tensor buffer;
  {
    const std::lock_guard lock(mutex_);
    if (!kept_.empty()) {
      buffer = std::move(kept_.back());
      kept_.pop_back();
    }
  }
  if (!buffer.defined()) buffer = make(kBytes);
  return {new at::Tensor(std::move(buffer)), [self = shared_from_this()](at::Tensor* done) {
            const std::unique_ptr<at::Tensor> owned(done);
            const std::lock_guard lock(self->mutex_);
            if (self->kept_.size() < kMostKept) self->kept_.push_back(std::move(*owned));
          }};
}

}  // namespace ringreduce
