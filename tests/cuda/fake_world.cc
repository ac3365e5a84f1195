// GPUs out of memfds.
#include "fake_world.h"

#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>
#include <thread>

namespace fake {
namespace {

constexpr size_t kTail = 4096;

struct Luck {
  int calls_left = -1;
  cudaError_t error = cudaSuccess;
  int ordinal = 0;
  bool failed = false;
};
thread_local Luck luck;
std::atomic<cudaError_t> ruins[kMostGpus];  // by ordinal

std::vector<int> visible;  // of this process
bool sees_all = true;

}  // namespace

Machine& machine() {
  static Machine m = [] {
    Machine made;
    if (const char* gpus = std::getenv("FAKE_GPUS")) made.gpus = std::atoi(gpus);
    if (const char* many = std::getenv("FAKE_MULTIPROCESSORS"))
      made.multiprocessors = std::atoi(many);
    made.mps = std::getenv("FAKE_MPS") != nullptr;
    made.multicasts = std::getenv("FAKE_MULTICAST") != nullptr;
    if (const char* hides = std::getenv("FAKE_HIDES_MEMORY"))
      made.hides_memory = std::atoi(hides) != 0;
    made.registers = std::getenv("FAKE_REGISTERS_NOTHING") == nullptr;
    return made;
  }();
  return m;
}

void undefined(const char* what) {
  std::fprintf(stderr, "fake CUDA: %s\n", what);
  std::abort();
}

// ---- which call fails

void failAt(int n, cudaError_t error, int ordinal) {
  luck = {.calls_left = n, .error = error, .ordinal = ordinal};
}

bool hasFailed() {
  return luck.failed;
}

void ruin(int ordinal, cudaError_t error) {
  ruins[ordinal] = error;
}

void heal() {
  luck = {};
  for (auto& ruined : ruins) ruined = cudaSuccess;
}

bool hasRuins() {
  for (const auto& ruined : ruins)
    if (ruined != cudaSuccess) return true;
  return false;
}

cudaError_t ruinOf(int ordinal) {
  return ordinal == kNoGpu ? cudaSuccess : ruins[ordinal].load();
}

cudaError_t fate(int ordinal) {
  if (!machine().has_driver) return cudaErrorInsufficientDriver;
  if (const auto ruined = ruinOf(ordinal)) return ruined;
  if (luck.calls_left < 0 || --luck.calls_left > 0) return cudaSuccess;
  luck.calls_left = -1;
  luck.failed = true;
  if (luck.error == cudaErrorIllegalAddress) ruin(luck.ordinal, luck.error);
  return luck.error;
}
cudaError_t fate() {
  return fate(currentOrdinal());
}

cudaError_t fateOfReturn(int ordinal) {
  return ruinOf(ordinal);
}
cudaError_t fateOfReturn() {
  return fateOfReturn(currentOrdinal());
}

// ---- GPUs

void see(const std::vector<int>& gpus) {
  sees_all = false;
  visible = gpus;
}

int count() {
  return sees_all ? machine().gpus : static_cast<int>(visible.size());
}

int gpuOf(int ordinal) {
  return sees_all ? ordinal : visible[static_cast<size_t>(ordinal)];
}

bool reaches(int gpu, int other) {
  return gpu == other || !machine().apart[gpu][other];
}

// ---- memory

size_t bytesIn(int fd) {
  struct stat status{};
  fstat(fd, &status);
  return static_cast<size_t>(status.st_size) - kTail;
}

Tail* tailOf(int fd) {
  void* at =
      mmap(nullptr, kTail, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(bytesIn(fd)));
  if (at == MAP_FAILED) undefined("no memory for a tail");
  return static_cast<Tail*>(at);
}

void drop(Tail* tail) {
  munmap(tail, kTail);
}

bool isOpen(const Tail& tail) {
  for (const auto& opener : tail.openers) {
    const pid_t pid = opener;
    if (pid == 0) continue;
    std::ifstream status("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    if (status >> number >> name >> state && state != "Z" && state != "X") return true;
  }
  return false;
}

int newMemory(int gpu, size_t bytes, unsigned exportable) {
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes + kTail)) != 0) undefined("no memfd");
  const std::string rubbish(bytes, '\x5a');
  if (pwrite(fd, rubbish.data(), bytes, 0) != static_cast<ssize_t>(bytes)) undefined("no memory");
  withTail(fd, [&](Tail& tail) {
    tail.gpu = gpu;
    tail.exportable = exportable;
    return 0;
  });
  return fd;
}

int newMulticast(size_t bytes, unsigned exportable, unsigned gpus) {
  const int fd = memfd_create("fake-multicast", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes + kTail)) != 0) undefined("no memfd");
  withTail(fd, [&](Tail& tail) {
    tail.gpu = -1;
    tail.exportable = exportable;
    tail.team.wanted = gpus;
    return 0;
  });
  return fd;
}

char* show(int fd, size_t bytes, int gpu, void* place) {
  const bool lost =
      machine().loses_data && withTail(fd, [&](const Tail& tail) { return tail.gpu != gpu; });
  const int flags = (lost ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | (place ? MAP_FIXED : 0);
  void* at = mmap(place, bytes, PROT_NONE, flags, lost ? -1 : fd, 0);
  if (at == MAP_FAILED) undefined("cannot map memory");
  return static_cast<char*>(at);
}

// ---- launches

cudaError_t checkLaunch(const cudaLaunchConfig_t& config) {
  constexpr unsigned kMostThreads = 1024, kMostInZ = 64, kMostInYZ = 65535, kMostInX = INT_MAX;
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (size_t{block.x} * block.y * block.z > kMostThreads || block.z > kMostInZ ||
      grid.x > kMostInX || grid.y > kMostInYZ || grid.z > kMostInYZ ||
      size_t{grid.x} * grid.y * grid.z * block.x * block.y * block.z == 0)
    return cudaErrorInvalidConfiguration;
  if (config.dynamicSmemBytes > 48 << 10) return cudaErrorInvalidValue;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    // A block of this project's kernels fills a multiprocessor.
    if (attribute.id == cudaLaunchAttributeCooperative && attribute.val.cooperative &&
        size_t{grid.x} * grid.y * grid.z > static_cast<size_t>(machine().multiprocessors))
      return cudaErrorCooperativeLaunchTooLarge;
  }
  return cudaSuccess;
}

// ---- who may touch it

namespace {

struct sigaction signal_before;

// Says what happened, if it was GPU memory, and leaves the rest to whoever is there for it.
void onFault(int, siginfo_t* fault, void*) {
  if (const Range* range = world().find(fault->si_addr)) {
    const std::string_view text =
        range->is_gone        ? "fake CUDA: touched a mapping by IPC whose exporter has ended\n"
        : range->is_multicast ? "fake CUDA: touched a multicast address without multimem\n"
                              : "fake CUDA: the host touched GPU memory\n";
    (void)!write(STDERR_FILENO, text.data(), text.size());
  }
  sigaction(SIGSEGV, &signal_before, nullptr);  // it faults again on return
}

void watchFaults() {
  static const bool watched = [] {
    struct sigaction action{};
    action.sa_sigaction = onFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &signal_before) == 0;
  }();
  (void)watched;
}

void protect(char* base, const Range& range, int protection) {
  if (range.isMapped() && mprotect(base, range.bytes, protection) != 0)
    undefined("cannot protect memory");
}

}  // namespace

void World::reveal(char* base, const Range& range) const {
  watchFaults();
  if (!hidden || !machine().hides_memory) protect(base, range, PROT_READ | PROT_WRITE);
}

void World::endWith(pid_t exporter) {
  static std::set<pid_t> watched;
  const std::lock_guard lock(mutex);
  if (!watched.insert(exporter).second) return;
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, exporter, 0));
  std::thread([this, fd, exporter] {
    pollfd end{.fd = fd, .events = POLLIN, .revents = 0};
    while (fd >= 0 && poll(&end, 1, -1) < 0) {
    }
    if (fd >= 0) close(fd);
    const std::lock_guard locked(mutex);
    for (auto& [base, range] : ranges) {
      if (range.exporter != exporter) continue;
      range.is_gone = true;
      mmap(base, range.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    }
    watched.erase(exporter);
  }).detach();
}

void World::noteUnmapper() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  unmappers.insert(name);
}

void finishWorkOn(const void* data, size_t bytes) {
  std::set<int> gpus;
  {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    auto* at = static_cast<char*>(const_cast<void*>(data));
    for (const auto& [base, range] : w.ranges) {
      if (base + range.bytes <= at || base >= at + bytes) continue;
      gpus.insert(range.gpu);
      for (const int ordinal : range.access) gpus.insert(gpuOf(ordinal));
    }
  }
  for (const int gpu : gpus) finish(gpu);
}

Working::Working() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  ++w.working;
  if (!w.hidden || !machine().hides_memory) return;
  w.hidden = false;
  for (const auto& [base, range] : w.ranges) protect(base, range, PROT_READ | PROT_WRITE);
}
Working::~Working() {
  constexpr std::chrono::milliseconds kPause(20);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  if (--w.working > 0 || !machine().hides_memory) return;
  const auto time = World::Clock::now();
  if (time - w.hidden_at < kPause) return;
  w.hidden = true;
  w.hidden_at = time;
  for (const auto& [base, range] : w.ranges) protect(base, range, PROT_NONE);
}

World& world() {
  static World* w = new World;
  return *w;
}

Range* World::find(const void* pointer, char** base) {
  auto* p = static_cast<char*>(const_cast<void*>(pointer));
  auto found = ranges.upper_bound(p);
  if (found == ranges.begin()) return nullptr;
  --found;
  if (p >= found->first + found->second.bytes) return nullptr;
  if (base) *base = found->first;
  return &found->second;
}

bool World::mayTouch(int ordinal, const void* pointer, size_t bytes) {
  char* base = nullptr;
  const Range* range = find(pointer, &base);
  if (!range) return true;
  const size_t left = static_cast<size_t>(base + range->bytes - static_cast<const char*>(pointer));
  if (bytes > left) {  // pieces of virtual memory may lie side by side
    const char* const next = base + range->bytes;
    return range->kind == Range::Kind::kVirtual && find(next) && mayTouch(ordinal, pointer, left) &&
           mayTouch(ordinal, next, bytes - left);
  }
  if (range->kind != Range::Kind::kPlain) return range->access.contains(ordinal);
  for (int owner : range->access)
    if (owner == ordinal || peers.contains({ordinal, owner})) return true;
  return false;
}

int mapsRefused() {
  const std::lock_guard lock(world().mutex);
  return world().maps_refused;
}

std::string leftovers() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  std::string text;
  const auto add = [&](size_t n, const char* what) {
    if (n > 0) text += (text.empty() ? "" : ", ") + std::to_string(n) + " " + what;
  };
  add(w.ranges.size(), "ranges");
  add(w.reservations.size(), "reservations");
  add(w.handles.size(), "handles");
  add(w.registered.size(), "registrations");
  add(w.bound.size(), "bindings");
  add(w.streams.size(), "streams");
  return text;
}

void forgetLeftovers() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.ranges.clear();
  w.reservations.clear();
  w.handles.clear();
  w.registered.clear();
  w.bound.clear();
  w.streams.clear();
}

}  // namespace fake
