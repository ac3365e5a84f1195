// Exchanges facts about the ranks, tries one access after the other, and frees the memory.
#include "cuda/memory/peer_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "algorithm/cut.h"
#include "base/bytes.h"
#include "base/error.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "group/agreement.h"
#include "group/exchange_fds.h"

namespace ringreduce::cuda {

namespace {

struct Facts {
  Resident resident;
  uint64_t bytes = 0, granularity = 1;
  int wish = -1;
};

Facts factsOf(int device, size_t bytes, std::optional<MemoryAccess> wish) {
  Facts facts;
  facts.bytes = bytes;
  if (wish) facts.wish = static_cast<int>(*wish);
  const Device d = describeDevice(device);
  const auto token = processToken();
  std::copy(token.begin(), token.end(), facts.resident.process);
  setText(facts.resident.gpu, d.uuid);
  facts.resident.exports_memory = d.exports_memory;
  facts.resident.registers_host_memory = d.registers_host_memory;
  facts.resident.mps = d.mps;
  if (d.exports_memory) facts.granularity = exportGranularity(device);
  return facts;
}

std::vector<std::string> namesIn(const Group& group) {
  std::vector<std::string> names;
  for (int r = 0; r < group.size(); ++r) names.push_back("rank " + group.options().shown(r));
  return names;
}

void requireSameWishes(const std::vector<Facts>& all, const std::vector<std::string>& names) {
  const auto wishOf = [](const Facts& facts) {
    return std::to_string(facts.bytes) + " bytes by " +
           (facts.wish < 0 ? "any way" : name(static_cast<MemoryAccess>(facts.wish)));
  };
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r].bytes != all[0].bytes || all[r].wish != all[0].wish)
      throw Error(Failure::kSetup, "ranks ask for different GPU memory: " + names[0] + " for " +
                                       wishOf(all[0]) + ", " + names[r] + " for " + wishOf(all[r]) +
                                       "; all must ask for the same");
}

Reach reachOf(int device, const Resident& own, const Resident& other) {
  if (own.sharesGpu(other)) return Reach::kYes;
  const int peer = findDevice(other.gpu);
  if (peer < 0) return Reach::kUnknown;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device, peer), "ask for peer access", device);
  return can ? Reach::kYes : Reach::kNo;
}

// The obstacles that all ranks together know.
Obstacles gatherObstacles(Group& group, int device, const std::vector<Resident>& residents,
                          const std::vector<std::string>& names) {
  struct Texts {
    char text[kMemoryAccesses][240] = {};
  } mine;
  agreeOnStatus(group, [&] {
    const auto me = static_cast<size_t>(group.rank());
    std::vector<Reach> reach;
    for (const Resident& other : residents) reach.push_back(reachOf(device, residents[me], other));
    const Obstacles own = obstaclesOf(me, residents, reach, names);
    for (size_t access = 0; access < kMemoryAccesses; ++access)
      setText(mine.text[access], own[access]);
  });
  std::vector<Obstacles> all;
  for (const Texts& texts : gatherEach(group, mine)) {
    Obstacles& one = all.emplace_back();
    for (size_t access = 0; access < kMemoryAccesses; ++access) one[access] = texts.text[access];
  }
  return merged(all);
}

}  // namespace

PeerMemory::PeerMemory(Group& group, int device, size_t bytes, std::optional<MemoryAccess> wish) {
  Facts mine;
  agreeOnStatus(group, [&] { mine = factsOf(device, bytes, wish); });
  const std::vector<Facts> facts = gatherEach(group, mine);
  const std::vector<std::string> names = namesIn(group);
  requireSameWishes(facts, names);
  std::vector<Resident> residents;
  size_t granularity = 1;
  for (const Facts& f : facts) {
    residents.push_back(f.resident);
    granularity = std::max<size_t>(granularity, f.granularity);
  }

  Obstacles obstacles = gatherObstacles(group, device, residents, names);
  while (const auto access = chooseAccess(obstacles, wish)) {
    auto state = std::make_unique<PeerPieces>(group, device, residents);
    state->access = *access;
    const std::string obstacle = tryAccess(group, *state, bytes, granularity, names);
    if (obstacle.empty()) {
      state->why = explain(obstacles, access);
      state_ = std::move(state);
      if (*access == MemoryAccess::kHost && !wish && group.rank() == 0)
        log("the GPUs of group '" + group.options().name +
            "' exchange data through host memory, which is slow: " + state_->why);
      return;
    }
    obstacles[static_cast<size_t>(*access)] = obstacle;
  }
  throw Error(
      Failure::kSetup,
      "the ranks of group '" + group.options().name + "' do not reach each other's GPU memory" +
          (wish ? std::string(" by ") + name(*wish) +
                      ", which was asked for: " + obstacles[static_cast<size_t>(*wish)]
                : ", " + explain(obstacles, std::nullopt)) +
          (wish == MemoryAccess::kHost ? ""
                                       : ". RINGREDUCE_CUDA_WAY=host takes none but host memory") +
          ". `nvidia-smi topo -p2p r` shows which GPUs have peer access");
}

PeerMemory::~PeerMemory() = default;

double PeerMemory::readRate(int rank) const {
  constexpr size_t kMost = size_t{16} << 20;
  constexpr int kTimes = 4;  // the first may take longer
  const size_t read = std::min(bytes(), kMost);
  const MemoryPtr to = allocate(device(), read);
  Stream stream(device());
  double best = 0;
  for (int i = 0; i < kTimes; ++i)
    best = std::max(best, stream.rateOfCopy(to->data(), at(rank), read));
  return best;
}

// ---- users' buffers

namespace {

// A rank's facts about its buffer.
struct Offer {
  Outcome outcome;
  uint64_t pieces = 0;  // that follow, each with a descriptor; 0: `handle` is valid
  uint64_t data = 0, bytes = 0;
  uint64_t base = 0, span = 0;  // of the allocation or the mappings that contain it
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

bool isPlain(CUdeviceptr data, int device) {
  return attributeOf<int>(data, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, device) != 0;
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

// The allocation or the mapping of one handle that contains a place.
Span rangeOf(CUdeviceptr place, int device) {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const CUresult result = driver().memGetAddressRange(&base, &bytes, place);
  if (result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_INVALID_VALUE)
    refuse("CUDA does not tell where its memory begins");
  check(result, "find the memory that a buffer is in", device);
  return {base, bytes};
}

// Who reaches a rank's buffer.
struct Readers {
  bool others;        // on other GPUs or of other processes
  bool of_processes;  // of other processes
};

// Fills in `offer`, and `pieces` if it is exported.  Throws Error if it cannot be registered.
void look(Offer& offer, std::vector<ExportedPiece>& pieces, const PeerMemory& memory,
          Readers readers) {
  const int device = memory.device();
  const OnDevice here(device);
  const auto data = static_cast<CUdeviceptr>(offer.data);
  const auto type = attributeOf<CUmemorytype>(data, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device);
  if (type != CU_MEMORYTYPE_DEVICE ||
      attributeOf<unsigned>(data, CU_POINTER_ATTRIBUTE_IS_MANAGED, device))
    refuse("it is not in a GPU's own memory");
  const int where = attributeOf<int>(data, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, device);
  if (where != device)
    refuse("it is on GPU " + std::to_string(where) + ", not on GPU " + std::to_string(device));
  if (!readers.others) return;

  Span range = rangeOf(data, device);
  offer.base = range.begin;
  offer.span = range.size;
  if (isPlain(data, device)) {
    if (readers.of_processes && memory.access() != MemoryAccess::kLegacyIpc)
      refuse("plain memory (cudaMalloc) goes with its process, also from under those who map it");
    if (data + offer.bytes > range.end()) refuse("it goes beyond the memory that it begins in");
    offer.handle = ipcHandleOf(device, reinterpret_cast<void*>(range.begin));
    return;
  }
  // Torch's expandable segments are mappings of 2 or 20 MiB, side by side.
  for (;;) {
    pieces.push_back({exportMapping(range.begin, device), range.size});
    if (data + offer.bytes <= range.end()) break;
    range = rangeOf(range.end(), device);
    offer.span += range.size;
  }
  offer.pieces = pieces.size();
}

// The pieces of each rank's buffer, by rank.  Collective.
std::vector<std::vector<ExportedPiece>> exchangePieces(Group& group,
                                                       const std::vector<Offer>& offers,
                                                       const std::vector<ExportedPiece>& mine) {
  std::vector<std::vector<ExportedPiece>> all(offers.size());
  const uint64_t most = std::ranges::max(offers, {}, &Offer::pieces).pieces;
  for (size_t i = 0; i < most; ++i) {
    const bool have = i < mine.size();
    const auto bytes = gatherEach(group, have ? mine[i].bytes : size_t{0});
    std::vector<Fd> fds = exchangeFds(group, have ? mine[i].fd.get() : -1, "GPU memory");
    for (size_t r = 0; r < offers.size(); ++r)
      if (i < offers[r].pieces) all[r].push_back({std::move(fds[r]), bytes[r]});
  }
  return all;
}

}  // namespace

MemoryPtr lastingMemory(const PeerMemory& memory, const void* data, size_t bytes) {
  if (memory.access() != MemoryAccess::kDescriptor) return nullptr;
  const int device = memory.device();
  const OnDevice here(device);
  try {
    if (!isPlain(reinterpret_cast<CUdeviceptr>(data), device)) return nullptr;
    return allocateExported(device, roundUp(bytes, exportGranularity(device))).memory;
  } catch (const CudaError& error) {
    if (error.ruinsProcess()) throw;
  } catch (const Error&) {
    // Registering it tells all ranks why not.
  }
  return nullptr;
}

Registration registerBuffer(Group& group, const PeerMemory& memory, void* data, size_t bytes) {
  const int me = group.rank(), device = memory.device();
  const auto& residents = memory.residents();
  if (memory.access() == MemoryAccess::kHost)
    return {nullptr, "the ranks' GPUs do not reach each other's memory"};
  const auto sharesAll = [&](int a, int b) {  // then the pointer itself serves
    const Resident &x = residents[static_cast<size_t>(a)], &y = residents[static_cast<size_t>(b)];
    return x.sharesProcess(y) && x.sharesGpu(y);
  };
  Readers readers{};
  for (int r = 0; r < group.size(); ++r) {
    readers.others = readers.others || !sharesAll(me, r);
    readers.of_processes =
        readers.of_processes ||
        !residents[static_cast<size_t>(me)].sharesProcess(residents[static_cast<size_t>(r)]);
  }

  Offer mine;
  mine.data = reinterpret_cast<uint64_t>(data);
  mine.bytes = bytes;
  std::vector<ExportedPiece> own;
  mine.outcome = outcomeOf([&] { look(mine, own, memory, readers); });
  const std::vector<Offer> offers = gatherEach(group, mine);
  std::string refusal = obstacleIn(group, offers);
  for (int r = 0; r < group.size() && refusal.empty(); ++r)
    if (offers[static_cast<size_t>(r)].bytes != offers[0].bytes)
      refusal = "the ranks' buffers are of different sizes";
  if (!refusal.empty()) return {nullptr, refusal};

  const std::vector<std::vector<ExportedPiece>> exported = exchangePieces(group, offers, own);
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
      if (offer.pieces > 0)
        piece.memory = mapExported(device, exported[static_cast<size_t>(r)]);
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
