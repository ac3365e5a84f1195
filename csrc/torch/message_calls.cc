// Sends and receives of the backend.
#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"

namespace ringreduce {
namespace {

Message messageOf(const Tensors& tensors, Message::Way way, int peer, int tag, const char* call) {
  const at::Tensor& tensor = onlyOne(tensors, call);
  const Staged staged(tensor, way == Message::Way::kSend ? Staged::Use::kRead : Staged::Use::kWrite,
                      call);
  return {.way = way,
          .peer = peer,
          .tag = tag,
          .data = staged.data(),
          .count = static_cast<size_t>(tensor.numel()),
          .dtype = dtypeOf(tensor, call),
          .after = [staged] { staged.giveBack(); }};
}

}  // namespace

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  if (GpuBackend* gpu = gpuFor(tensors)) return gpu->send(tensors, peer, tag);
  return translated([&] {
    return startMessage({.type = c10d::OpType::SEND,
                         .title = "ringreduce:send",
                         .inputs = tensors,
                         .outputs = tensors},
                        messageOf(tensors, Message::Way::kSend, peer, tag, "send"));
  });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  if (GpuBackend* gpu = gpuFor(tensors)) return gpu->recv(tensors, peer, tag);
  return translated([&] {
    if (peer < 0)
      refuse("recv",
             "from rank " + std::to_string(peer) + " in a group of " + std::to_string(size_));
    return startMessage({.type = c10d::OpType::RECV,
                         .title = "ringreduce:recv",
                         .inputs = tensors,
                         .outputs = tensors},
                        messageOf(tensors, Message::Way::kReceive, peer, tag, "recv"));
  });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  if (GpuBackend* gpu = gpuFor(tensors)) return gpu->recvAnysource(tensors, tag);
  return translated([&] {
    return startMessage({.type = c10d::OpType::RECVANYSOURCE,
                         .title = "ringreduce:recvAnySource",
                         .inputs = tensors,
                         .outputs = tensors},
                        messageOf(tensors, Message::Way::kReceive, kAnySource, tag, "recv"));
  });
}

}  // namespace ringreduce
