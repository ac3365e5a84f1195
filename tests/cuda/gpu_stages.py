"""What gpu_check.py runs on GPUs, in which order, and what to make of the measurements.

First what every report has to say: that the bits are right on one GPU, that all GPUs together give
them too, and that the end of a rank is noticed.  Then torch's tests, then speed (torch's last,
since it takes most time), then the slow tools.

The stages call `ringreduce_cuda_perf MODE [options] --json FILE` (benchmarks/cuda_perf.cc), which
appends a line of JSON for each measurement:

    mode, ranks, gpus, sharing, algorithm, dtype, op, bytes, time_us: [median, least, most],
    algbw, busbw, wrong (elements that differ from what they must be)

and where they apply

    floor_us    single, processes on one GPU: the least time in which the algorithm's bytes pass
                through device memory, at the bandwidth of a copy in the same run
    algorithm   also "nccl"; "hop", one stream's wait and another process's write, H; "copy"
    raised_s    kill: how long each survivor took to raise; the mode of stopped ranks is "stop"
    pids        kill: the processes, none of which may be on a GPU afterwards
    dram_bytes  bytes: what the algorithm's formula says that one launch moves.  Each launch is one
                kernel, stands between cudaProfilerStart and Stop, and has its line, in order.

gpu_torch_stages.py has the stages that need torch.

Options are as in nccl-tests: --minbytes, --maxbytes, --stepfactor; further --ranks, --dtypes and
--algorithms, with commas, and --ops.  `check --reduced` is small enough for compute-sanitizer.
Ranks of check, single, latency and bytes share the first GPU; rank r of processes and kill has GPU
r modulo their number.

Exit status 77 means "not possible here"; the last line of output says why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_figures as figures
import gpu_torch_stages
from gpu_machine import ROOT
from gpu_plan import BUILD, BUILD_LIMIT, HERE, Plan
from gpu_runner import Stage, Step

__all__ = ["ALL_GPUS", "BUILD", "CHECK", "Plan", "gpu_tests", "stages"]


# What stages are called by gpu_check.py, which asks whether they passed.
CHECK, ALL_GPUS = "check", "gpus"


def stages(plan: Plan) -> list[Stage]:
    """All stages in the order in which they run."""
    tools = plan.tools
    perf = str(plan.build / "ringreduce_cuda_perf")
    beside: dict[str, str] = {}
    if plan.nccl:
        beside = {"RINGREDUCE_NCCL": plan.nccl, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}

    def run(mode: str, *options: str, under: tuple[str, ...] = (), nccl: bool = False) -> Step:
        command = (*under, perf, mode, *options, "--json", "{json}")
        return Step(command, beside if nccl else {})

    control = tools.mps_control or "nvidia-cuda-mps-control"
    mps = (sys.executable, str(HERE / "with_mps.py"), control, "{folder}", "--")
    ncu = (
        *(tools.ncu or "ncu", "--clock-control", "none", "--profile-from-start", "off"),
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", "{folder}/ncu.csv"),
        *("--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"),
    )

    def sanitizer(tool: str) -> tuple[str, ...]:
        program = tools.compute_sanitizer or "compute-sanitizer"
        return (program, "--tool", tool, "--error-exitcode", "1")

    algorithms = "direct,ring,twoshot,oneshot,zerocopy,ll"
    both = ("--ranks", "2,4")

    def measured(name: str, shows: str, limit: float, *steps: Step, **more: Any) -> Stage:
        return Stage(name, shows, limit, steps, measures=True, **more)

    limited = any(number < plan.every for number in plan.end_long_kernels)
    ask_for_kernels = ("all_reduce_test", "failure_test")  # by name, not by auto

    def gpu_test(source: Path) -> Stage:
        env = beside if source.stem == "internode_test" else {}
        refused = 0 in plan.end_long_kernels and source.stem in ask_for_kernels
        step = Step((str(plan.build / "gpu_tests" / source.stem),), env)
        return Stage(
            *(source.stem, "the GPU test " + source.name, 75, (step,)),
            skip="GPU 0 ends long kernels, so kernels that wait are refused" if refused else "",
        )

    halves = ("--dtypes", "float32,bfloat16")
    everything = ("--dtypes", "all", "--ops", "all")
    if plan.quick:
        checks = [run("check", *both, *everything, *sizes("0", "1M")),
                  run("check", *both, *halves, *sizes("16M", "64M"))]  # fmt: skip
    else:
        checks = [run("check", *both, *everything, *sizes("0", "16M")),
                  run("check", *both, *halves, *sizes("64M", "1G"))]  # fmt: skip
    own = plan.with_own_gpus
    # direct-staged is left out where the kernels run, and they where it runs.
    across = ("--way", "auto", "--algorithms", f"{algorithms},direct-staged")
    must_meet = ("direct-staged",) if limited else ("ring", "twoshot", "oneshot")
    if plan.quick:
        across += ("--ranks", str(plan.every), *sizes("1K", "256M", "64"), "--rounds", "3")
    else:
        across += ("--ranks", own, *sizes("1K", "256M"), "--rounds", "5")
    first = [
        build(plan),
        measured(
            *(CHECK, "bit for bit what the CPU ring gives, by ranks that share one GPU", 150),
            *checks,
            figure=figures.checked,
        ),
        measured(
            *(
                ALL_GPUS,
                f"{plan.gpus} processes on {plan.gpus} GPUs: all algorithms and NCCL",
                300,
            ),
            run("processes", *across, nccl=True),
            skip="" if own else "there is one GPU",
            verify=figures.all_gpus_met(plan.every, must_meet),
            figure=figures.all_gpus_figure,
        ),
        measured(
            *("kill", "a rank is killed, one is stopped: the others raise, the GPUs are free", 150),
            run("kill", "--ranks", str(plan.every) if plan.quick else own or "2,4"),
            figure=figures.kill_figure,
            frees_gpu=True,
        ),
    ]
    if plan.quick:
        return first
    all_stages = [
        *first,
        *map(gpu_test, gpu_tests()),
        gpu_torch_stages.extension(plan),
        gpu_torch_stages.tests(plan),
        measured(
            *("floor", "how fast a GPU copies", 20),
            run("floor"),
            figure=figures.copy_figure,
        ),
        measured(
            *("single", "bandwidth, ranks of one process, a launch a rank, beside NCCL", 60),
            run("single", *both, "--algorithms", algorithms, *sizes("1M", "1G"), nccl=True),
            figure=figures.bandwidth_figure,
        ),
        measured(
            *("latency", "small messages inside CUDA graphs, beside NCCL", 30),
            run("latency", *both, *sizes("4", "256K"), nccl=True),
            figure=figures.latency_figure,
        ),
        measured(
            *("processes", "processes that share a GPU by turns; H, one wait and write", 60),
            run("processes", *both, *sizes("1K", "256M", "8")),
            skip="" if plan.gpus == 1 else f"there are {plan.gpus} GPUs, see {ALL_GPUS}",
            figure=figures.processes_figure,
        ),
        measured(
            *("bytes", "bytes by the profiler's counters, over the formula", 60),
            run("bytes", *both, under=ncu),
            skip="" if tools.ncu else "there is no ncu (Nsight Compute)",
            verify=figures.add_counters,
            excuse=no_counters,
            figure=figures.bytes_figure,
        ),
        measured(
            *("mps", "processes under MPS, where kernels run side by side", 45),
            run("processes", *both, *sizes("1K", "256M", "64"), under=mps),
            skip="" if tools.mps_control else "there is no nvidia-cuda-mps-control",
            figure=figures.processes_figure,
        ),
        *gpu_torch_stages.speed(plan),
        *(
            measured(
                *(tool, f"compute-sanitizer's {tool} finds nothing in a reduced check", 45),
                run("check", "--reduced", under=sanitizer(tool)),
                skip="" if tools.compute_sanitizer else "there is no compute-sanitizer",
                figure=figures.checked,
            )
            for tool in ("memcheck", "initcheck", "synccheck")
        ),
    ]
    if plan.study:
        for mode, shows, limit, options in study(algorithms):
            step = run(mode, *options, nccl=True)
            all_stages.append(measured(f"study-{mode}", shows, limit, step, figure=figures.counted))
        all_stages += gpu_torch_stages.study(plan)
    return all_stages


def no_counters(output: Sequence[str], folder: Path) -> str:
    """Why ncu may not read a GPU's counters, or ""."""
    log = folder / "ncu.csv"
    said = [*output, log.read_text(errors="replace") if log.exists() else ""]
    if not any("ERR_NVGPUCTRPERM" in text for text in said):
        return ""
    return (
        "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): root may, and everybody with the "
        "driver's option NVreg_RestrictProfilingToAdminUsers=0"
    )


def sizes(least: str, most: str, factor: str = "4") -> tuple[str, ...]:
    return ("--minbytes", least, "--maxbytes", most, "--stepfactor", factor)


def study(algorithms: str) -> Iterator[tuple[str, str, float, tuple[str, ...]]]:
    """The long tables: where one algorithm gives way to the next, and what dtypes cost."""
    ranks = ("--ranks", "2,3,4,8")
    sweep = ("--algorithms", algorithms, "--dtypes", "float32,bfloat16", *sizes("1K", "1G", "2"))
    yield "single", "every algorithm at every size, 2 to 8 ranks", 240, (*ranks, *sweep)
    yield "latency", "every algorithm in graphs to 4 MiB", 120, (*ranks, *sizes("4", "4M", "2"))
    yield "processes", "processes at every size", 180, (*ranks, *sizes("1K", "1G"))


def build(plan: Plan) -> Stage:
    """Compiles once what all stages run; `extension` takes the same objects."""
    tools = plan.tools
    missing = [name for name in ("nvcc", "cmake", "ninja") if getattr(tools, name) is None]
    folder = str(plan.build)
    cmake = tools.cmake or "cmake"
    with_torch = "OFF" if plan.no_torch else "ON"
    configure = [
        *(cmake, "-S", str(ROOT), "-B", folder, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja or 'ninja'}",
        "-DRINGREDUCE_CUDA=1",
        f"-DRINGREDUCE_CUDA_ARCHS={plan.architectures}",
        f"-DRINGREDUCE_BUILD_EXTENSION={with_torch}",
        f"-DRINGREDUCE_PYTHON={sys.executable}",
    ]
    targets = ["ringreduce_cuda_perf"]
    if not plan.quick:
        targets += [source.stem for source in gpu_tests()]
    return Stage(
        "build",
        "everything compiles for the GPUs that are here",
        BUILD_LIMIT,
        (
            Step(tuple(configure), {"CUDACXX": tools.nvcc or "nvcc"}),
            Step((cmake, "--build", folder, "-j", str(plan.jobs), "--target", *targets)),
        ),
        skip=f"there is no {', '.join(missing)}" if missing else "",
        needs="",
        needs_gpu=False,
        counted=False,
    )


def gpu_tests() -> list[Path]:
    """The tests that need a GPU; *_host_test and *_fake_test run with the others of the project."""
    sources = [*HERE.glob("*_test.cc"), *HERE.glob("*_test.cu")]
    elsewhere = ("_host_test", "_fake_test")
    return sorted(path for path in sources if not path.stem.endswith(elsewhere))
