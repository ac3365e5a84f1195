// Finds the allocations of a buffer, exports them, and maps those of the other ranks.
#include "cuda/memory/peer_buffer.h"

#include <cuda.h>

#include <utility>

#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/memory/access_probe.h"
#include "group/exchange_fds.h"
#include "group/gather.h"

namespace ringreduce::cuda {
namespace {

// A rank's facts about its buffer.
struct Offer {
  Outcome outcome;
  bool exported = false;  // a descriptor follows; else `handle` is valid
  uint64_t data = 0, bytes = 0;
  uint64_t base = 0, span = 0;  // of the allocation or mapping that contains it
  cudaIpcMemHandle_t handle = {};
};

[[noreturn]] void refuse(const std::string& why) {
  throw Error(Failure::kSetup, "cannot register its buffer: " + why);
}

template <class T>
T attributeOf(CUdeviceptr pointer, CUpointer_attribute which, int device) {
  T value{};
  const CUresult result = driver().pointerGetAttribute(&value, which, pointer);
  if (result == CUDA_ERROR_INVALID_VALUE) refuse("CUDA does not know its memory");
  check(result, "ask what memory a buffer is in", device);
  return value;
}

// The descriptor of the mapping that begins at `base`.
Fd exportMapping(CUdeviceptr base, int device) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result =
      driver().memRetainAllocationHandle(&handle, reinterpret_cast<void*>(base));
  if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED)
    refuse("its memory comes from a pool, which cannot be mapped by other processes");
  check(result, "find the handle of a buffer's memory", device);
  struct Release {
    CUmemGenericAllocationHandle handle;
    int device;
    ~Release() { checkQuietly(driver().memRelease(handle), "release a handle", device); }
  } const release{handle, device};
  CUmemAllocationProp properties{};
  check(driver().memGetAllocationProperties(&properties, handle),
        "ask how a buffer's memory was made", device);
  if (!(properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
    refuse("its memory was not made to be mapped by other processes");
  int fd = -1;
  check(
      driver().memExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "make a descriptor of a buffer's memory", device);
  return Fd(fd);
}

// Fills in `offer`, and `fd` where a descriptor goes with it.  `alone`: no other process and no
// other GPU is to reach it.  Throws Error for what cannot be registered.
void look(Offer& offer, Fd& fd, int device, bool alone) {
  const OnDevice here(device);
  const auto data = static_cast<CUdeviceptr>(offer.data);
  const auto type = attributeOf<CUmemorytype>(data, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device);
  if (type != CU_MEMORYTYPE_DEVICE ||
      attributeOf<unsigned>(data, CU_POINTER_ATTRIBUTE_IS_MANAGED, device))
    refuse("it is not in a GPU's own memory");
  const int where = attributeOf<int>(data, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, device);
  if (where != device)
    refuse("it is on GPU " + std::to_string(where) + ", not on GPU " + std::to_string(device));
  if (alone) return;

  CUdeviceptr base = 0;
  size_t span = 0;
  const CUresult result = driver().memGetAddressRange(&base, &span, data);
  if (result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_INVALID_VALUE)
    refuse("CUDA does not tell where its memory begins");
  check(result, "find the memory that a buffer is in", device);
  if (data + offer.bytes > base + span)
    refuse(
        "it lies in several pieces of memory (torch's expandable segments do that with large "
        "tensors)");
  offer.base = base;
  offer.span = span;
  if (attributeOf<int>(data, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, device)) {
    offer.handle = ipcHandleOf(device, reinterpret_cast<void*>(base));
  } else {
    fd = exportMapping(base, device);
    offer.exported = true;
  }
}

}  // namespace

Registration registerBuffer(Group& group, const PeerMemory& memory, void* data, size_t bytes) {
  const int me = group.rank(), device = memory.device();
  const auto& residents = memory.residents();
  if (memory.access() == MemoryAccess::kHost)
    return {nullptr, "the ranks' GPUs do not reach each other's memory"};
  const auto sharesAll = [&](int a, int b) {  // then the pointer itself serves
    const Resident &x = residents[static_cast<size_t>(a)], &y = residents[static_cast<size_t>(b)];
    return x.sharesProcess(y) && x.sharesGpu(y);
  };
  bool alone = true;
  for (int r = 0; r < group.size(); ++r) alone = alone && sharesAll(me, r);

  Offer mine;
  mine.data = reinterpret_cast<uint64_t>(data);
  mine.bytes = bytes;
  Fd fd;
  mine.outcome = outcomeOf([&] { look(mine, fd, device, alone); });
  const std::vector<Offer> offers = gatherEach(group, mine);
  std::string refusal = obstacleIn(group, offers);
  for (int r = 0; r < group.size() && refusal.empty(); ++r)
    if (offers[static_cast<size_t>(r)].bytes != offers[0].bytes)
      refusal = "the ranks' buffers are of different sizes";
  if (!refusal.empty()) return {nullptr, refusal};

  bool any_exported = false;
  for (const Offer& offer : offers) any_exported = any_exported || offer.exported;
  std::vector<Fd> fds;
  if (any_exported) fds = exchangeFds(group, fd.get(), "GPU memory");

  std::vector<PeerBuffer::Piece> pieces;
  struct Mapped {
    Outcome outcome;
  } mapped;
  mapped.outcome = outcomeOf([&] {
    for (int r = 0; r < group.size(); ++r) {
      const Offer& offer = offers[static_cast<size_t>(r)];
      PeerBuffer::Piece& piece =
          pieces.emplace_back(PeerBuffer::Piece{nullptr, reinterpret_cast<std::byte*>(offer.data)});
      if (sharesAll(me, r)) continue;
      if (offer.exported)
        piece.memory = mapExported(device, fds[static_cast<size_t>(r)], offer.span);
      else if (residents[static_cast<size_t>(r)].sharesProcess(residents[static_cast<size_t>(me)]))
        enablePeerAccess(device, findDevice(residents[static_cast<size_t>(r)].gpu));
      else
        piece.memory = openIpc(device, offer.handle, offer.span);
      if (piece.memory) piece.data = piece.memory->data() + (offer.data - offer.base);
    }
  });
  refusal = obstacleIn(group, gatherEach(group, mapped));
  if (!refusal.empty()) return {nullptr, refusal};
  return {std::make_unique<PeerBuffer>(std::move(pieces), bytes), ""};
}

}  // namespace ringreduce::cuda
