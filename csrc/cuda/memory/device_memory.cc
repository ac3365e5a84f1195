// cudaMalloc, virtual memory management, legacy IPC, registered host memory.
#include "cuda/memory/device_memory.h"

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "group/agreement.h"

namespace ringreduce::cuda {

namespace {

std::string mebibytes(size_t bytes) {
  return std::to_string(ceilDiv(bytes, 1 << 20)) + " MiB";
}

CUdeviceptr address(const void* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

std::atomic<int> copies_that_hang{0};

// Gives something back, from a destructor.
template <class F>
void giveBack(int device, F&& f) noexcept {
  if (copies_that_hang > 0) return;
  try {
    const OnDevice here(device);
    f();
  } catch (const CudaError& error) {  // the process ends, or CUDA is of no more use in it
    if (!error.ruinsProcess() && !error.is(cudaErrorCudartUnloading)) log(error.what());
  }
}

// ---- plain memory

class Allocated final : public DeviceMemory {
 public:
  Allocated(int device, size_t bytes) : DeviceMemory(device, bytes) {
    const OnDevice here(device);
    void* data = nullptr;
    check(cudaMalloc(&data, bytes), "allocate " + mebibytes(bytes), device);
    data_ = static_cast<std::byte*>(data);
  }
  ~Allocated() override {
    if (isOurs()) giveBack(device_, [&] { checkQuietly(cudaFree(data_), "free memory", device_); });
  }
};

// ---- virtual memory management

CUmemAllocationProp exportedOn(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

// Physical memory.  Its mappings keep it alive.
class Physical {
 public:
  static Physical create(int device, size_t bytes) {
    Physical physical(device, bytes);
    const CUmemAllocationProp properties = exportedOn(device);
    check(driver().memCreate(&physical.handle_, bytes, &properties, 0),
          "allocate " + mebibytes(bytes) + " that other processes can map", device);
    physical.held_ = true;
    return physical;
  }
  static Physical import(int device, const Fd& fd, size_t bytes) {
    Physical physical(device, bytes);
    void* descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(fd.get()));
    check(driver().memImportFromShareableHandle(&physical.handle_, descriptor,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "take over another rank's memory by its descriptor", device);
    physical.held_ = true;
    return physical;
  }
  // What is mapped at an address: always the same handle, which is held once more.
  static Physical at(int device, const std::byte* data) {
    Physical physical(device, 0);
    check(driver().memRetainAllocationHandle(&physical.handle_, const_cast<std::byte*>(data)),
          "find the handle of memory", device);
    physical.held_ = true;
    return physical;
  }
  Physical(Physical&& other) noexcept
      : device_(other.device_),
        bytes_(other.bytes_),
        held_(std::exchange(other.held_, false)),
        handle_(other.handle_) {}
  ~Physical() {
    if (held_) checkQuietly(driver().memRelease(handle_), "release memory", device_);
  }

  CUmemGenericAllocationHandle handle() const { return handle_; }
  size_t bytes() const { return bytes_; }

  Fd descriptor() const {
    int fd = -1;
    check(driver().memExportToShareableHandle(&fd, handle_,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "make a descriptor of memory for other processes", device_);
    return Fd(fd);
  }

 private:
  Physical(int device, size_t bytes) : device_(device), bytes_(bytes) {}

  int device_;
  size_t bytes_;
  bool held_ = false;
  CUmemGenericAllocationHandle handle_ = 0;
};

// Gives kernels on `device` access to mapped memory.
void allowAccess(int device, CUdeviceptr place, size_t bytes) {
  const CUmemAccessDesc access{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                               .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(driver().memSetAccess(place, bytes, &access, 1), "get access to mapped memory", device);
}

// Pieces of it, side by side.
class Mapped final : public DeviceMemory {
 public:
  Mapped(int device, std::span<const Physical> pieces, size_t alignment = 0)
      : DeviceMemory(device, std::accumulate(pieces.begin(), pieces.end(), size_t{0},
                                             [](size_t sum, const Physical& piece) {
                                               return sum + piece.bytes();
                                             })) {
    try {
      map(pieces, alignment);
    } catch (const CudaError&) {
      unmap();
      throw;
    }
  }
  ~Mapped() override {
    if (isOurs()) giveBack(device_, [&] { unmap(); });
  }

 private:
  void map(std::span<const Physical> pieces, size_t alignment) {
    CUdeviceptr place = 0;
    check(driver().memAddressReserve(&place, bytes_, alignment, 0, 0),
          "reserve addresses for " + mebibytes(bytes_), device_);
    data_ = reinterpret_cast<std::byte*>(place);
    for (const Physical& piece : pieces) {
      check(driver().memMap(place + mapped(), piece.bytes(), 0, piece.handle(), 0),
            "map " + mebibytes(piece.bytes()), device_);
      mapped_.push_back(piece.bytes());
    }
    allowAccess(device_, place, bytes_);
  }

  void unmap() noexcept {
    for (; !mapped_.empty(); mapped_.pop_back())
      checkQuietly(driver().memUnmap(address(data_) + mapped() - mapped_.back(), mapped_.back()),
                   "unmap memory", device_);
    if (data_)
      checkQuietly(driver().memAddressFree(address(data_), bytes_), "free addresses", device_);
  }

  size_t mapped() const { return std::accumulate(mapped_.begin(), mapped_.end(), size_t{0}); }

  std::vector<size_t> mapped_;  // bytes of each piece
};

class Reserved final : public ReservedAddresses {
 public:
  Reserved(int device, size_t bytes) : ReservedAddresses(device, bytes) {
    const OnDevice here(device);
    CUdeviceptr place = 0;
    check(driver().memAddressReserve(&place, bytes, 0, 0, 0),
          "reserve addresses for " + mebibytes(bytes), device);
    data_ = reinterpret_cast<std::byte*>(place);
  }
  ~Reserved() override {
    if (!isOurs()) return;
    giveBack(device_, [&] {
      while (!mapped_.empty()) takeOut(mapped_.begin());
      checkQuietly(driver().memAddressFree(address(data_), bytes_), "free addresses", device_);
    });
  }

  void map(size_t offset, const ExportedPiece& piece) override {
    const OnDevice here(device_);
    const Physical physical = Physical::import(device_, piece.fd, piece.bytes);
    const CUdeviceptr place = address(data_ + offset);
    check(driver().memMap(place, piece.bytes, 0, physical.handle(), 0),
          "map " + mebibytes(piece.bytes), device_);
    const auto made = mapped_.emplace(offset, piece.bytes).first;
    try {
      allowAccess(device_, place, piece.bytes);
    } catch (const CudaError&) {
      takeOut(made);
      throw;
    }
  }
  void unmap(size_t offset) override {
    giveBack(device_, [&] {
      if (const auto found = mapped_.find(offset); found != mapped_.end()) takeOut(found);
    });
  }

 private:
  using Pieces = std::map<size_t, size_t>;  // bytes by offset

  void takeOut(Pieces::iterator piece) noexcept {
    checkQuietly(driver().memUnmap(address(data_ + piece->first), piece->second), "unmap memory",
                 device_);
    mapped_.erase(piece);
  }

  Pieces mapped_;
};

// ---- legacy IPC

class Opened final : public DeviceMemory {
 public:
  Opened(int device, const cudaIpcMemHandle_t& handle, size_t bytes) : DeviceMemory(device, bytes) {
    const OnDevice here(device);
    void* data = nullptr;
    check(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess),
          "open another rank's memory by its IPC handle", device);
    data_ = static_cast<std::byte*>(data);
  }
  ~Opened() override {
    if (isOurs())
      giveBack(device_, [&] {
        checkQuietly(cudaIpcCloseMemHandle(data_), "close another rank's memory", device_);
      });
  }
};

// ---- registered host memory

// How often each segment of this process is registered.
struct Registrations {
  std::mutex mutex;
  std::map<std::byte*, int> counts;
};
Registrations& registrations() {
  static auto* all = new Registrations;  // never destroyed: memory may be freed at exit
  return *all;
}

class Registered final : public DeviceMemory {
 public:
  Registered(int device, std::shared_ptr<Segment> segment)
      : DeviceMemory(device, segment->size()), segment_(std::move(segment)) {
    const OnDevice here(device);
    std::byte* host = segment_->data();
    Registrations& all = registrations();
    const std::lock_guard lock(all.mutex);
    if (!all.counts.contains(host))
      check(cudaHostRegister(host, bytes_, cudaHostRegisterMapped | cudaHostRegisterPortable),
            "register " + mebibytes(bytes_) + " of host memory (cudaHostRegister)", device);
    ++all.counts[host];
    void* data = nullptr;
    const cudaError_t result = cudaHostGetDevicePointer(&data, host, 0);
    if (result != cudaSuccess) {
      unregister(all);
      raise(result, "find registered host memory", device);
    }
    data_ = static_cast<std::byte*>(data);
  }
  ~Registered() override {
    if (!isOurs()) return;
    giveBack(device_, [&] {
      Registrations& all = registrations();
      const std::lock_guard lock(all.mutex);
      unregister(all);
    });
  }

 private:
  // With the lock held, so that no other thread registers it while it is still registered.
  void unregister(Registrations& all) noexcept {
    std::byte* host = segment_->data();
    if (--all.counts[host] > 0) return;
    all.counts.erase(host);
    checkQuietly(cudaHostUnregister(host), "unregister host memory", device_);
  }

  const std::shared_ptr<Segment> segment_;
};

}  // namespace

MemoryPtr allocate(int device, size_t bytes) {
  return std::make_shared<Allocated>(device, roundUp(bytes == 0 ? 1 : bytes, kBlockBytes));
}

size_t exportGranularity(int device) {
  const OnDevice here(device);
  const CUmemAllocationProp properties = exportedOn(device);
  size_t granularity = 0;
  check(driver().memGetAllocationGranularity(&granularity, &properties,
                                             CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "ask for the granularity of memory", device);
  return granularity;
}

bool copiesHang() {
  return copies_that_hang > 0;
}

Exported allocateExported(int device, size_t bytes) {
  const OnDevice here(device);
  const Physical physical = Physical::create(device, bytes);
  Fd fd = physical.descriptor();
  return {std::make_shared<Mapped>(device, std::span(&physical, 1)), std::move(fd)};
}

MemoryPtr mapExported(int device, std::span<const ExportedPiece> pieces, size_t alignment) {
  const OnDevice here(device);
  std::vector<Physical> imported;
  for (const ExportedPiece& piece : pieces)
    imported.push_back(Physical::import(device, piece.fd, piece.bytes));
  return std::make_shared<Mapped>(device, imported, alignment);
}

PieceInPlace exportMapped(int device, const std::byte* at, const std::byte* first,
                          const std::byte* last) {
  const OnDevice here(device);
  const auto unit = static_cast<ptrdiff_t>(exportGranularity(device));
  const Physical physical = Physical::at(device, at);
  const auto isOfIt = [&](const std::byte* other) {
    try {
      return Physical::at(device, other).handle() == physical.handle();
    } catch (const CudaError& error) {
      if (error.code() != CUDA_ERROR_INVALID_VALUE) throw;
      return false;  // its allocator has just unmapped it, which it does with whole pieces
    }
  };
  const std::byte* begin = at - reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(unit);
  const std::byte* end = begin + unit;
  while (begin - first >= unit && isOfIt(begin - unit)) begin -= unit;
  while (last - end >= unit && isOfIt(end)) end += unit;
  return {begin, {physical.descriptor(), static_cast<size_t>(end - begin)}};
}

std::shared_ptr<ReservedAddresses> reserveAddresses(int device, size_t bytes) {
  return std::make_shared<Reserved>(device, bytes);
}

cudaIpcMemHandle_t ipcHandleOf(int device, void* base) {
  const OnDevice here(device);
  cudaIpcMemHandle_t handle{};
  check(cudaIpcGetMemHandle(&handle, base), "get an IPC handle", device);
  return handle;
}

MemoryPtr openIpc(int device, const cudaIpcMemHandle_t& handle, size_t bytes) {
  return std::make_shared<Opened>(device, handle, bytes);
}

void enablePeerAccess(int device, int peer) {
  if (device == peer) return;
  const OnDevice here(device);
  const cudaError_t result = cudaDeviceEnablePeerAccess(peer, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled)
    (void)cudaGetLastError();  // the next call in this thread must not report it
  else
    check(result, "get access to the memory of GPU " + std::to_string(peer), device);
}

MemoryPtr registerSegment(int device, std::shared_ptr<Segment> segment) {
  return std::make_shared<Registered>(device, std::move(segment));
}

Stream::Stream(int device, Nanos patience) : device_(device), patience_(patience) {
  const OnDevice here(device);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "make a stream", device);
}

Stream::~Stream() {
  if (forkGeneration() == generation_)
    giveBack(device_,
             [&] { checkQuietly(cudaStreamDestroy(stream_), "destroy a stream", device_); });
}

void Stream::copy(void* to, const void* from, size_t bytes) {
  const OnDevice here(device_);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy memory", device_);
  await("copy memory");
}

void Stream::zero(void* data, size_t bytes) {
  const OnDevice here(device_);
  check(cudaMemsetAsync(data, 0, bytes, stream_), "clear memory", device_);
  await("clear memory");
}

double Stream::rateOfCopy(void* to, const void* from, size_t bytes) {
  const OnDevice here(device_);
  struct Event {
    Event() { check(cudaEventCreateWithFlags(&event, cudaEventDefault), "make an event"); }
    ~Event() { checkQuietly(cudaEventDestroy(event), "free an event", kNoDevice); }
    cudaEvent_t event = nullptr;
  } const begin, end;
  check(cudaEventRecord(begin.event, stream_), "record an event", device_);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy memory", device_);
  check(cudaEventRecord(end.event, stream_), "record an event", device_);
  await("copy memory");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "time a copy", device_);
  if (milliseconds <= 0) return 0;  // not known
  return static_cast<double>(bytes) / (static_cast<double>(milliseconds) / 1e3);
}

void Stream::await(const char* tried) {
  const Nanos deadline = deadlineIn(patience_);
  cudaError_t state = cudaSuccess;
  while ((state = cudaStreamQuery(stream_)) == cudaErrorNotReady) {
    (void)cudaGetLastError();  // the next call in this thread must not report it
    if (now() >= deadline) {
      ++copies_that_hang;
      throw CopyHangs(Failure::kSetup, std::string("cannot ") + tried + " on GPU " +
                                           std::to_string(device_) + ": it was not done after " +
                                           std::to_string(patience_ / kSecond) +
                                           " s. End this process and start it again");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  check(state, tried, device_);
}

MappedPages::MappedPages(Group& group, int device, size_t bytes) : pages_(group, bytes) {
  agreeOnStatus(group, [&] {
    try {
      for (int r = 0; r < group.size(); ++r)
        mapped_.push_back(registerSegment(device, pages_.segment(r)));
    } catch (const CudaError& error) {
      if (error.ruinsProcess()) throw;
      throw CudaError(error.kind(), error.code(),
                      std::string(error.what()) +
                          ". Ranks on GPUs tell each other their progress there, so without it use "
                          "nccl for CUDA tensors (\"cpu:ringreduce,cuda:nccl\")");
    }
  });
}

}  // namespace ringreduce::cuda
