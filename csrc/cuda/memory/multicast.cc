// Steps, after each of which the ranks exchange how it went: facts; rank 0 makes the object; all
// take it over and add their GPUs; all bind memory; all map it.
#include "cuda/memory/multicast.h"

#include <cuda.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/memory/device_memory.h"
#include "group/agreement.h"
#include "group/exchange_fds.h"

namespace ringreduce::cuda {
namespace {

CUmulticastObjectProp objectOf(int ranks, size_t bytes) {
  CUmulticastObjectProp properties{};
  properties.numDevices = static_cast<unsigned>(ranks);
  properties.size = bytes;
  properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

CUdevice cudaDevice(int device) {
  CUdevice handle = 0;
  check(driver().deviceGet(&handle, device), "find the GPU", device);
  return handle;
}

// The units of all sizes and offsets, for memory and for the object.
size_t granularityOf(int device, int ranks, size_t bytes) {
  const size_t of_memory = exportGranularity(device);
  const CUmulticastObjectProp properties = objectOf(ranks, roundUp(bytes, of_memory));
  size_t of_object = 0;
  check(multicastDriver().multicastGetGranularity(&of_object, &properties,
                                                  CU_MULTICAST_GRANULARITY_MINIMUM),
        "ask for the granularity of multicast objects", device);
  return std::max(of_memory, of_object);  // powers of two
}

}  // namespace

// What a rank holds of it, in the order in which it was taken.
struct MulticastWindow::Parts {
  explicit Parts(int on) : device(on) {}
  ~Parts() {
    // In a forked child all of it is the parent's.
    if (forkGeneration() != generation || copiesHang()) return;
    everyone.reset();
    try {
      const OnDevice here(device);
      if (bound > 0)
        checkQuietly(multicastDriver().multicastUnbind(object, cudaDevice(device), 0, bound),
                     "unbind memory from a multicast object", device);
      if (has_object)
        checkQuietly(driver().memRelease(object), "release a multicast object", device);
    } catch (const CudaError& error) {
      if (!error.ruinsProcess()) log(error.what());
    }
  }

  void create(int ranks, size_t bytes) {
    const CUmulticastObjectProp properties = objectOf(ranks, bytes);
    check(multicastDriver().multicastCreate(&object, &properties), "make a multicast object",
          device);
    has_object = true;
    int descriptor = -1;
    check(driver().memExportToShareableHandle(&descriptor, object,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "make a descriptor of a multicast object", device);
    fd = Fd(descriptor);
  }

  void join() {
    if (!has_object)
      check(driver().memImportFromShareableHandle(
                &object, reinterpret_cast<void*>(static_cast<uintptr_t>(fd.get())),
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            "take over a multicast object by its descriptor", device);
    has_object = true;
    check(multicastDriver().multicastAddDevice(object, cudaDevice(device)),
          "add the GPU to a multicast object", device);
  }

  void bind(size_t bytes) {
    own = allocateExported(device, bytes).memory;
    Stream(device).zero(own->data(), bytes);
    CUmemGenericAllocationHandle memory = 0;
    check(driver().memRetainAllocationHandle(&memory, own->data()), "find the handle of memory",
          device);
    const CUresult result = multicastDriver().multicastBindMem(object, 0, memory, 0, bytes, 0);
    checkQuietly(driver().memRelease(memory), "release a handle", device);
    check(result, "bind memory to a multicast object", device);
    bound = bytes;
  }

  void map(size_t bytes, size_t granularity) {
    const ExportedPiece whole{std::move(fd), bytes};
    everyone = mapExported(device, {&whole, 1}, granularity);
  }

  const int device;
  const int generation = forkGeneration();
  CUmemGenericAllocationHandle object = 0;
  bool has_object = false;
  Fd fd;  // of the object, until it is mapped
  MemoryPtr own;
  size_t bound = 0;  // bytes
  MemoryPtr everyone;
};

MulticastWindow::MulticastWindow(Group& group, int device, size_t bytes)
    : parts_(std::make_unique<Parts>(device)) {
  std::optional<OnDevice> here;
  struct {
    uint64_t granularity = 1;
  } mine;
  agreeOnStatus(group, [&] {
    here.emplace(device);
    if (!describeDevice(device).multicasts)
      throw Error(Failure::kSetup, "no NVSwitch adds for its GPU");
    mine.granularity = granularityOf(device, group.size(), bytes);
  });
  size_t granularity = 1;
  for (const auto& one : gatherEach(group, mine))
    granularity = std::max<size_t>(granularity, one.granularity);
  bytes_ = roundUp(bytes, granularity);
  agreeOnStatus(group, [&] {
    if (group.rank() == 0) parts_->create(group.size(), bytes_);
  });
  std::vector<Fd> fds = exchangeFds(group, parts_->fd.get(), "a multicast object");
  if (group.rank() != 0) parts_->fd = std::move(fds[0]);
  agreeOnStatus(group, [&] { parts_->join(); });
  agreeOnStatus(group, [&] { parts_->bind(bytes_); });
  agreeOnStatus(group, [&] { parts_->map(bytes_, granularity); });
}
MulticastWindow::~MulticastWindow() = default;

std::byte* MulticastWindow::own() const {
  return parts_->own->data();
}
std::byte* MulticastWindow::everyone() const {
  return parts_->everyone->data();
}

}  // namespace ringreduce::cuda
