// bytes: each algorithm once, as one kernel between cudaProfilerStart and cudaProfilerStop, so that
// a profiler counts what it moves; the formula says what that should be.
//
// The kernel of the direct schedule waits for nothing, so one launch of it does the work of all its
// leaders; streams with waits between would be several.
#include <cuda_profiler_api.h>

#include <cstdio>

#include "bench.h"

namespace perf {
namespace {

void directKernel(const Bench& bench, const Job& job, const gpu::Buffer& never) {
  const one_process::Run run = bench.runOf(job);
  ringreduce::cuda::DirectCall call{};
  call.size = bench.size();
  call.sinks = bench.size();
  call.chunk = ringreduce::Cut{job.what.count, bench.size()}.chunkSize();
  call.elements = job.what.count;
  for (size_t r = 0; r < run.inputs.size(); ++r) {
    call.tensors.input[r] = static_cast<const std::byte*>(run.inputs[r]);
    call.tensors.output[r] = static_cast<std::byte*>(run.outputs[r]);
  }
  call.arithmetic = {.combine = ringreduce::cuda::combineOf(job.what.dtype, job.what.op),
                     .divide = job.what.op == ReduceOp::kAvg,
                     .scale = false,
                     .world_size = bench.size(),
                     .factor = 1};
  call.abort = reinterpret_cast<ringreduce::cuda::AbortFlag*>(never.get());
  void* arguments[] = {&call};
  gpu::must(
      cudaLaunchKernel(ringreduce::cuda::kernelsOf(job.what.dtype).direct,
                       dim3(static_cast<unsigned>(bench.ranks().comm(0).device().multiprocessors)),
                       dim3(ringreduce::cuda::kThreads), arguments, 0, bench.stream()),
      "launch the direct kernel");
}

}  // namespace

int runBytes(const Settings& settings) {
  size_t wrong = 0, measured = 0;
  const gpu::Buffer never(sizeof(ringreduce::cuda::AbortFlag));  // that nobody sets
  gpu::must(cudaMemset(never.get(), 0, never.bytes()), "clear memory");
  for (int ranks : settings.ranks) {
    const size_t bytes = settings.sizes.back();
    if (!fits(ranks, bytes)) {
      std::printf("# without %zu bytes: this GPU has not enough free memory for it\n", bytes);
      continue;
    }
    std::printf("%s\n%-14s %9s %14s %16s %18s %7s\n",
                titleOf(ranks, 1, "bytes through device memory by the formula").c_str(),
                "algorithm", "type", "size(B)", "bytes a rank", "bytes of a launch", "#wrong");
    Bench bench(ranks, bytes);
    uint32_t seed = 0;
    for (DType dtype : settings.dtypes)
      for (Path path : settings.paths) {
        if (path == Path::kDirectStaged || isFixed(path)) continue;
        if (!exists(path, dtype, ReduceOp::kSum, bytes)) continue;
        // The direct kernel by itself needs no mapped tensors.
        const std::string why = isDirect(path) ? "" : bench.whyNot(path);
        if (!why.empty()) {
          std::printf("# without %s: %s\n", name(path), why.c_str());
          continue;
        }
        Job job;
        job.what = {.ranks = ranks,
                    .count = bytes / sizeOf(dtype),
                    .dtype = dtype,
                    .op = ReduceOp::kSum,
                    .seed = ++seed};
        const Found found = bench.runOnce(job, [&](const Job& j) {
          gpu::finish(bench.stream(), "the filling of memory");
          gpu::must(cudaProfilerStart(), "start the profiler");
          if (isDirect(path))
            directKernel(bench, j, never);
          else
            bench.issue(path, j);
          gpu::finish(bench.stream(), name(path));
          gpu::must(cudaProfilerStop(), "stop the profiler");
        });
        wrong += found.wrong;
        ++measured;
        const size_t moved = bytesMovedByAll(path, ranks, bytes, dtype);
        std::printf("%-14s %9s %14zu %16zu %18zu %7zu\n", name(path), name(dtype), bytes,
                    moved / static_cast<size_t>(ranks), moved, found.wrong);
        if (found.wrong > 0) std::printf("WRONG: %s\n", found.first.c_str());
        Json line;
        line.add("mode", "bytes").add("ranks", ranks).add("sharing", true);
        line.add("algorithm", name(path)).add("dtype", name(dtype)).add("op", "SUM");
        line.add("bytes", bytes).add("wrong", found.wrong).add("dram_bytes", moved);
        append(settings.json, line);
      }
  }
  if (measured == 0) return kNotPossible;
  return wrong > 0 ? kWrong : kOk;
}

}  // namespace perf
