// Ranks of one process with their data, NCCL beside them, and contenders that take turns.
#include "bench.h"

#include <algorithm>
#include <cstdio>
#include <iostream>

namespace perf {

Choice choiceOf(Path path) {
  switch (path) {
    case Path::kRing:
      return Choice::kRing;
    case Path::kTwoShot:
      return Choice::kTwoShot;
    case Path::kZeroCopy:  // of mapped tensors
      return Choice::kLocated;
    case Path::kOneShot:
      return Choice::kOneShot;
    case Path::kLL:
      return Choice::kLL;
    default:
      return Choice::kDirect;
  }
}

bool exists(Path path, DType dtype, ReduceOp op, size_t bytes) {
  if (path == Path::kLL)
    return bytes <= ringreduce::cuda::kLLMost && ringreduce::cuda::hasFixedKernels(dtype) &&
           (op == ReduceOp::kSum || op == ReduceOp::kAvg);
  return isDirect(path) ||
         ringreduce::cuda::hasKernel(ringreduce::cuda::kernelOf(choiceOf(path)), dtype);
}

Times copyTimes(size_t bytes, int rounds) {
  const gpu::Buffer from(bytes), to(bytes);
  const gpu::Stream stream;
  const gpu::Mark begin, end;
  const auto copy = [&] {
    gpu::must(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, stream.get()),
              "copy on the GPU");
  };
  // Zero pages that were never written would be read from nowhere.
  gpu::must(cudaMemsetAsync(from.get(), 1, bytes, stream.get()), "fill memory");
  copy();
  constexpr int kCalls = 8;
  std::vector<double> seconds;
  for (int i = 0; i < rounds; ++i) {
    begin.record(stream.get());
    for (int j = 0; j < kCalls; ++j) copy();
    end.record(stream.get());
    gpu::finish(stream.get(), "a copy");
    seconds.push_back(end.since(begin) / kCalls);
  }
  return timesOf(seconds);
}

double copyBandwidth() {
  constexpr size_t kBytes = size_t{512} << 20;
  return 2 * static_cast<double>(kBytes) / (copyTimes(kBytes, 5).median / 1e6);
}

int gpusFor(int ranks) {
  int gpus = 0;
  gpu::must(cudaGetDeviceCount(&gpus), "count the GPUs");
  return std::min(gpus, ranks);
}

bool fits(int ranks, size_t bytes) {
  size_t free = 0, total = 0;
  gpu::must(cudaMemGetInfo(&free, &total), "ask for free memory");
  const auto p = static_cast<size_t>(ranks);
  constexpr size_t kEach = size_t{256} << 20;  // what communicators take
  return (2 * p + 1) * bytes + p * kEach <= free;
}

ringreduce::GroupOptions groupOptions(const std::string& name) {
  ringreduce::GroupOptions options;
  options.name = name;
  options.timeout = 20 * ringreduce::kSecond;
  return options;
}

Measurement measurementOf(const Settings& settings, const std::string& contender, const Job& job) {
  Measurement m;
  m.mode = settings.modeName();
  m.algorithm = contender;
  m.ranks = job.what.ranks;
  m.dtype = job.what.dtype;
  m.op = job.what.op;
  m.bytes = job.what.count * sizeOf(job.what.dtype);
  return m;
}

void tell(const Settings& settings, const Measurement& measurement, Extra extra) {
  std::printf("%s\n", tableRow(measurement, extra).c_str());
  std::fflush(stdout);
  append(settings.json, measurement.json());
}

// --- Ranks of one process ------------------------------------------------------------------------

namespace {

ringreduce::cuda::CommunicatorOptions inOneProcess(bool maps) {
  ringreduce::cuda::CommunicatorOptions options;
  options.together = true;
  options.maps_tensors = maps;
  return options;
}

std::vector<void*> buffers(const std::vector<RankData>& data, bool inputs) {
  std::vector<void*> all;
  for (const RankData& one : data)
    all.push_back((inputs ? one.inputBuffer() : one.outputBuffer()).get());
  return all;
}

}  // namespace

Bench::Bench(int ranks, size_t most_bytes)
    : staged_(ranks, inOneProcess(false), groupOptions("staged")),
      most_bytes_(most_bytes),
      expected_(most_bytes),
      factor_(sizeof(double)) {
  for (int r = 0; r < ranks; ++r) data_.emplace_back(r, most_bytes);
  mapped_.emplace(ranks, inOneProcess(true), groupOptions("mapped"));
  try {
    for (RankData& one : data_) one.move(one_process::ownBuffer);
  } catch (const ringreduce::cuda::CudaError& error) {
    why_not_mapped_ = error.what();
  }
  const size_t bytes = data_[0].inputBuffer().bytes();
  for (const bool inputs : {true, false})
    if (why_not_mapped_.empty()) why_not_mapped_ = mapped_->map(buffers(data_, inputs), bytes);
  why_not_together_ = staged_.whyNotTogether(DType::kFloat32);
}

std::string Bench::whyNot(Path path) const {
  if (isFixed(path) && ringreduce::cuda::fixedSizeOf(size()) < 0)
    return "there is no such kernel for " + std::to_string(size()) + " ranks";
  if (takesMapped(path)) return why_not_mapped_;
  return isDirect(path) ? "" : why_not_together_;
}

void Bench::setFactor(DType dtype, double factor) {
  const auto narrow = static_cast<float>(factor);
  const bool wide = dtype == DType::kFloat64;
  gpu::must(cudaMemcpy(factor_.get(), wide ? static_cast<const void*>(&factor) : &narrow,
                       wide ? sizeof factor : sizeof narrow, cudaMemcpyHostToDevice),
            "copy to the GPU");
}

one_process::Run Bench::runOf(const Job& job) const {
  one_process::Run run{.dtype = job.what.dtype,
                       .op = job.what.op,
                       .count = job.what.count,
                       .inputs = {},
                       .outputs = {},
                       .factor = factor_on_device_ ? 1 : job.what.factor,
                       .factor_on_device = factor_on_device_ ? factor_.get() : nullptr};
  for (const RankData& one : data_) {
    run.inputs.push_back(one.input(job));
    run.outputs.push_back(one.output(job));
  }
  return run;
}

void Bench::issue(Path path, const Job& job, bool apart) const {
  const one_process::Run run = runOf(job);
  if (takesMapped(path))
    mapped_->apart(run, choiceOf(path), &staged_);
  else if (apart || isDirect(path) || isFixed(path))
    staged_.apart(run, choiceOf(path));
  else
    staged_.together(run, choiceOf(path));
}

void Bench::wait() const {
  staged_.wait();
  mapped_->wait();
}

Found Bench::runOnce(const Job& job, const std::function<void(const Job&)>& put, bool same) {
  for (const RankData& one : data_) one.prepare(job, stream());
  fork();
  put(job);
  join();
  if (!same) expected_.make(job.what, stream());  // the host computes while the GPU does
  for (const RankData& one : data_) one.compare(job, expected_, stream());
  wait();
  Found all;
  for (const RankData& one : data_) {
    const Found found = one.found(job, expected_);
    if (all.wrong == 0) all.first = found.first;
    all.wrong += found.wrong;
  }
  return all;
}

// --- NCCL ----------------------------------------------------------------------------------------

std::unique_ptr<Nccl> Nccl::make(const Settings& settings, const Bench& bench) {
  try {
    const auto library = ringreduce::cuda::NcclLibrary::load(settings.nccl);
    const int most_blocks =
        bench.size() > 2 ? bench.ranks().comm(0).device().multiprocessors / bench.size() : 0;
    auto nccl = std::make_unique<Nccl>();
    nccl->reduce_.emplace(*library);
    nccl->comms_ = nccl::makeAll(library, bench.size(), most_blocks);
    // Kernels that wait for each other for ever would end the whole run: try it, and let go.
    Job job;
    job.what = {.ranks = bench.size(),
                .count = std::min(size_t{256} << 10, bench.mostBytes() / sizeof(float)),
                .dtype = DType::kFloat32,
                .op = ReduceOp::kSum};
    bench.fork();
    nccl->issue(bench, job);
    bench.join();
    constexpr Nanos kPatience = 10 * ringreduce::kSecond;
    if (!gpu::ends(bench.stream(), kPatience)) {
      for (auto& comm : nccl->comms_) comm->abort();
      throw ringreduce::Error(
          ringreduce::Failure::kTimeout,
          library->description() + ": an all-reduce of ranks that share this GPU did not end");
    }
    std::printf("# beside %s\n", library->description().c_str());
    return nccl;
  } catch (const ringreduce::Error& error) {
    std::printf("# without NCCL: %s\n", error.what());
    return nullptr;
  }
}

void Nccl::issue(const Bench& bench, const Job& job) const {
  ringreduce::cuda::NcclGroup group(comms_[0]->library());
  for (int r = 0; r < bench.size(); ++r) {
    const RankData& data = bench.data(r);
    (*reduce_)(*comms_[static_cast<size_t>(r)], data.input(job), data.output(job), job.what.count,
               job.what.dtype, job.what.op, bench.ranks().stream(r));
  }
  group.end();
}

// --- Turns ---------------------------------------------------------------------------------------

void compete(std::vector<Contender>& contenders, const Job& job, int rounds) {
  for (Contender& one : contenders)
    for (auto& seconds : one.seconds) seconds.clear();
  for (int round = 0; round < rounds; ++round)
    for (Contender& one : contenders)
      for (const bool in_place : {false, true}) {
        Job turn = job;
        turn.in_place = in_place;
        one.seconds[in_place].push_back(one.time(turn));
      }
  for (Contender& one : contenders) {
    one.result.time = timesOf(one.seconds[0]);
    one.result.in_place = timesOf(one.seconds[1]);
  }
}

void tellBesideNccl(const Settings& settings, std::vector<Contender>& contenders) {
  for (Contender& one : contenders) {
    if (one.path && contenders.back().name == "nccl")
      one.result.nccl_us = contenders.back().result.time.median;
    tell(settings, one.result, Extra::kFloorAndNccl);
  }
}

}  // namespace perf
