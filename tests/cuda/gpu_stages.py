"""The stages of gpu_check.py, in the order in which they run.

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
    mapped      kill: whether peers used the tensors of the killed rank where they were
    pids        kill: the processes, none of which may be on a GPU afterwards
    dram_bytes  bytes: what the algorithm's formula says that one launch moves.  Each launch is one
                kernel, stands between cudaProfilerStart and Stop, and has its line, in order.

Options are as in nccl-tests: --minbytes, --maxbytes, --stepfactor; further --ranks, --dtypes and
--algorithms, with commas, and --ops.  `check --reduced` is small enough for compute-sanitizer.
Ranks of check, single, latency and bytes share the first GPU; rank r of processes and kill has GPU
r modulo their number.

Marks: limit (seconds; what a stage needs to start many ranks, never a bound on speed), build (needs
no GPU, and its time is not counted), torch (runs what `extension` made), quick and study (in which
runs it is), two_gpus and one_gpu, tool (a program without which there is nothing to do).
"""

from __future__ import annotations

import shlex
import sys
import time

import gpu_figures as figures
import pytest
from gpu_figures import KIB, MIB, beside, joined, pick
from gpu_machine import HERE, ROOT
from gpu_run import LINGER, PERF, Run, install

mark = pytest.mark
HOUR = 3600.0  # only a hang takes that long

BOTH = ("--ranks", "2,4")
EVERYTHING = ("--dtypes", "all", "--ops", "all")
HALVES = ("--dtypes", "float32,bfloat16")
ALGORITHMS = "direct,ring,twoshot,oneshot,zerocopy,ll"
# They ask for kernels by name, and not by auto.
ASK_FOR_KERNELS = ("all_reduce_test", "failure_test")


def gpu_tests() -> list[str]:
    """The tests that need a GPU; *_host_test and *_fake_test run with the others of the project."""
    names = [path.stem for path in [*HERE.glob("*_test.cc"), *HERE.glob("*_test.cu")]]
    return sorted(name for name in names if not name.endswith(("_host_test", "_fake_test")))


def sizes(least: str, most: str, factor: str = "4") -> tuple[str, ...]:
    return ("--minbytes", least, "--maxbytes", most, "--stepfactor", factor)


# --- What every report has to say -----------------------------------------------------------------


@mark.limit(HOUR)
@mark.build
@mark.quick
@mark.tool("nvcc", "cmake", "ninja")
def test_build(run: Run) -> None:
    """everything compiles for the GPUs that are here"""
    tools, folder, cmake = run.machine.tools, str(run.build), run.machine.tools["cmake"] or "cmake"
    # `extension` takes the same objects.
    run.command(
        *(cmake, "-S", str(ROOT), "-B", folder, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}",
        "-DRINGREDUCE_CUDA=1",
        f"-DRINGREDUCE_CUDA_ARCHS={run.machine.architectures}",
        f"-DRINGREDUCE_BUILD_EXTENSION={'OFF' if run.machine.no_torch else 'ON'}",
        f"-DRINGREDUCE_PYTHON={sys.executable}",
        env={"CUDACXX": tools["nvcc"] or "nvcc"},
    )
    targets = [PERF] if run.quick else [PERF, *gpu_tests()]
    run.command(cmake, "--build", folder, "-j", run.jobs, "--target", *targets)
    run.done()


@mark.limit(150)
@mark.quick
def test_check(run: Run) -> None:
    """bit for bit what the CPU ring gives, by ranks that share one GPU"""
    run.perf("check", *BOTH, *EVERYTHING, *sizes("0", "1M" if run.quick else "16M"))
    large = sizes("16M", "64M") if run.quick else sizes("64M", "1G")
    run.perf("check", *BOTH, *HALVES, *large)
    run.done(figures.checked)


@mark.limit(300)
@mark.quick
@mark.two_gpus
def test_gpus(run: Run) -> None:
    """a process on each GPU: all algorithms and NCCL"""
    # direct-staged is left out where the kernels run, and they where it runs.
    way = ("--way", "auto", "--algorithms", f"{ALGORITHMS},direct-staged")
    every = run.machine.every
    if run.quick:
        how = ("--ranks", str(every), *sizes("1K", "256M", "64"), "--rounds", "3")
    else:
        how = ("--ranks", run.machine.with_own_gpus, *sizes("1K", "256M"), "--rounds", "5")
    run.perf("processes", *way, *how, nccl=True)
    limited = any(number < every for number in run.machine.end_long_kernels)
    must_meet = ("direct-staged",) if limited else ("ring", "twoshot", "oneshot")
    lines = run.lines()
    there = {line["algorithm"] for line in pick(lines, ranks=every, sharing=False)}
    if lines and (missing := [name for name in must_meet if name not in there]):
        run.problems.append(f"{', '.join(missing)} did not run on {every} GPUs at once")
    run.done(figures.all_gpus_figure)


@mark.limit(150)
@mark.quick
def test_kill(run: Run) -> None:
    """a rank is killed, also with mapped tensors, one stopped: others raise, the GPUs are free"""
    machine, before = run.machine, run.machine.users()
    run.perf("kill", "--ranks", str(machine.every) if run.quick else machine.with_own_gpus or "2,4")
    # Others may use the GPUs at the same time, so neither their processes nor all memory counts.
    own = {int(pid) for line in run.lines() for pid in line.get("pids", [])} - before
    patience = time.monotonic() + LINGER
    while (users := sorted(machine.users() & own)) and time.monotonic() < patience:
        time.sleep(0.2)
    run.problems += [f"a GPU is still used by process {pid}" for pid in users]
    run.done(figures.kill_figure)


# --- Tests ----------------------------------------------------------------------------------------


@mark.limit(75)
@pytest.mark.parametrize("name", gpu_tests())
def test_gpu(run: Run, name: str) -> None:
    """a GPU test in C++ of tests/cuda"""
    if 0 in run.machine.end_long_kernels and name in ASK_FOR_KERNELS:
        run.skip("GPU 0 ends long kernels, so kernels that wait are refused")
    env = run.beside_nccl() if name == "internode_test" else {}
    run.command(str(run.build / "gpu_tests" / name), env=env)
    run.done()


LOOK = """
import torch, ringreduce
from ringreduce.core.backend import extension
built = extension().cuda_build()
print("ringreduce", ringreduce.__version__, "of", ringreduce.__file__, "for CUDA:", built)
raise SystemExit(0 if built else "Error: it was built without CUDA")
"""


@mark.limit(HOUR)
@mark.build
@mark.torch
def test_extension(run: Run) -> None:
    """torch's extension compiles for the GPUs that are here, and loads"""
    cmake = run.machine.tools["cmake"] or "cmake"
    run.command(cmake, "--build", str(run.build), "--target", "_C", "-j", run.jobs)
    if not run.problems:
        install(run.build, run.site)
        run.python("-c", LOOK)
    run.done()


@mark.limit(300)
@mark.torch
def test_torch(run: Run) -> None:
    """calls, DDP, FSDP2, graphs, streams, a killed rank, by PyTorch"""
    run.collect = figures.junit_lines
    run.python(
        *("-m", "pytest", str(HERE / "gpu_torch_test.py"), "-q", "-p", "no:cacheprovider"),
        *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
        *("-o", "junit_family=xunit2", "--junitxml", "{folder}/junit.xml"),
    )
    run.done(figures.tests_figure)


# --- Speed ----------------------------------------------------------------------------------------


@mark.limit(20)
def test_floor(run: Run) -> None:
    """how fast a GPU copies"""
    run.perf("floor")
    run.done(figures.copy_figure)


@mark.limit(60)
def test_single(run: Run) -> None:
    """bandwidth, ranks of one process, a launch a rank, beside NCCL"""
    run.perf("single", *BOTH, "--algorithms", ALGORITHMS, *sizes("1M", "1G"), nccl=True)
    run.done(beside(256 * MIB, "busbw GB/s"))


@mark.limit(30)
def test_latency(run: Run) -> None:
    """small messages inside CUDA graphs, beside NCCL"""
    run.perf("latency", *BOTH, *sizes("4", "256K"), nccl=True)
    run.done(beside(KIB, "us", 1))


PROCESSES = joined(figures.hop_figure, beside(KIB, "us"), beside(256 * MIB, "us"))


@mark.limit(60)
@mark.one_gpu
def test_processes(run: Run) -> None:
    """processes that share a GPU by turns; H, one wait and write"""
    run.perf("processes", *BOTH, *sizes("1K", "256M", "8"))
    run.done(PROCESSES)


@mark.limit(60)
@mark.tool("ncu")
def test_bytes(run: Run) -> None:
    """bytes by the profiler's counters, over the formula"""
    ncu = (
        *(run.machine.tools["ncu"] or "ncu", "--clock-control", "none"),
        *("--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"),
        *("--log-file", "{folder}/ncu.csv"),
        *("--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"),
    )
    output = run.perf("bytes", *BOTH, under=ncu)
    log = run.folder / "ncu.csv"
    said = [*output, log.read_text(errors="replace") if log.exists() else ""]
    if any("ERR_NVGPUCTRPERM" in text for text in said):
        run.skip(
            "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): root may, and everybody with "
            "the driver's option NVreg_RestrictProfilingToAdminUsers=0"
        )
    run.collect = figures.counted_lines
    run.done(figures.bytes_figure)


@mark.limit(45)
@mark.tool("nvidia-cuda-mps-control")
def test_mps(run: Run) -> None:
    """processes under MPS, where kernels run side by side"""
    # The daemon's pipes and logs lie in the stage's folder, so another daemon is neither used nor
    # disturbed; no setting of the GPU is changed.  After an overrun it is killed as all else is.
    control = shlex.quote(run.machine.tools["nvidia-cuda-mps-control"] or "")
    names = {"CUDA_MPS_PIPE_DIRECTORY": "mps-pipe", "CUDA_MPS_LOG_DIRECTORY": "mps-log"}
    env = {name: f"{{folder}}/{place}" for name, place in names.items()}

    def says(question: str) -> bool:
        command = f"echo {question} | {control}" if question else f"{control} -d"
        return run.execute("/bin/sh", "-c", command, env=env)[0] == 0

    for place in names.values():
        (run.folder / place).mkdir()
    # The daemon is there if it answers, here that it has no servers yet.
    if not (says("") and says("get_server_list")):
        for log in (run.folder / "mps-log").glob("*.log"):
            run.note(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
        run.skip(f"MPS does not start here ({control} -d)")
    run.perf("processes", *BOTH, *sizes("1K", "256M", "64"), env=env)
    says("quit -t 5")
    patience = time.monotonic() + 10
    while says("get_server_list") and time.monotonic() < patience:
        time.sleep(0.1)
    run.done(PROCESSES)


def ddp(run: Run, ranks: int, *more: str) -> None:
    run.collect = figures.ddp_lines
    run.python(
        *(str(ROOT / "benchmarks" / "ddp.py"), "--device", "cuda", "--nproc", str(ranks)),
        *("--timeout", "120", "--out", f"{{folder}}/ddp-{ranks}", *more),
        nccl=True,
    )


def bench(run: Run, what: str, ranks: int, of_bytes: str, *more: str) -> None:
    """ringreduce.bench beside all that may be compared with, into a file of its own."""
    run.collect = figures.bench_lines
    run.python(
        *("-m", "ringreduce.bench", what, "--device", "cuda", "--nproc", str(ranks)),
        *("--sizes", of_bytes, "--timeout", "60"),
        *("--json", f"{{folder}}/bench-{what}-{ranks}.json", *more),
        nccl=True,
    )


@mark.limit(120)
@mark.torch
def test_ddp(run: Run) -> None:
    """ResNet-50 and GPT-2 by DataParallel, DDP on NCCL or Gloo, DDP on ringreduce, hook"""
    ddp(run, run.machine.every, "--dtype", "bfloat16", "--rounds", "2", "--steps", "5")
    ddp(run, 1, "--models", "gpt2", "--rounds", "3", "--steps", "8")
    run.done(figures.ddp_figure)


@mark.limit(120)
@mark.torch
def test_torch_bench(run: Run) -> None:
    """dist.all_reduce beside NCCL, Gloo and symmetric memory"""
    peers = ("--compare", "nccl,gloo,symm_mem", "--rounds", "3")
    bench(run, "all_reduce", run.machine.every, "1K,64K,1M,64M,256M", *peers)
    bench(run, "all_reduce", 1, "1K", "--rounds", "3")
    run.done(figures.bench_figure)


@mark.limit(45)
@mark.tool("compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_sanitizer(run: Run, tool: str) -> None:
    """compute-sanitizer finds nothing in a reduced check"""
    program = run.machine.tools["compute-sanitizer"] or "compute-sanitizer"
    run.perf("check", "--reduced", under=(program, "--tool", tool, "--error-exitcode", "1"))
    run.done(figures.checked)


# --- The long tables: where one algorithm gives way to the next, and what dtypes cost -------------

WIDE = ("--ranks", "2,3,4,8")


@mark.limit(240)
@mark.study
def test_study_single(run: Run) -> None:
    """every algorithm at every size, 2 to 8 ranks"""
    run.perf("single", *WIDE, "--algorithms", ALGORITHMS, *HALVES, *sizes("1K", "1G", "2"),
             nccl=True)  # fmt: skip
    run.done(figures.counted)


@mark.limit(120)
@mark.study
def test_study_latency(run: Run) -> None:
    """every algorithm in graphs to 4 MiB"""
    run.perf("latency", *WIDE, *sizes("4", "4M", "2"), nccl=True)
    run.done(figures.counted)


@mark.limit(180)
@mark.study
def test_study_processes(run: Run) -> None:
    """processes at every size"""
    run.perf("processes", *WIDE, *sizes("1K", "1G"), nccl=True)
    run.done(figures.counted)


@mark.limit(300)
@mark.study
@mark.torch
def test_study_torch_bench(run: Run) -> None:
    """every collective and size; 8 ranks' bfloat16"""
    of_bytes = "1K,64K,1M,25M,256M"
    bench(run, "all", 2, of_bytes, "--compare", "nccl,gloo")
    bench(run, "all", 4, "1K,1M,64M", "--compare", "nccl", "--rounds", "3")
    bench(run, "all_reduce", 8, of_bytes, "--dtype", "bfloat16", "--compare", "nccl,symm_mem")
    run.done(figures.counted)


@mark.limit(240)
@mark.study
@mark.torch
def test_study_ddp(run: Run) -> None:
    """the two models in float32, 2 and 4 ranks"""
    ddp(run, 2)
    ddp(run, 4, "--dtype", "bfloat16")
    run.done(figures.ddp_figure)


@mark.limit(400)
@mark.study
@mark.torch
def test_study_torch_suite(run: Run) -> None:
    """PyTorch's own distributed tests that want GPUs"""
    run.collect = figures.suite_lines
    run.python(
        *(str(ROOT / "tests" / "torch_suite" / "run.py"), "--device", "cuda"),
        *("--world", "2", "--limit", "60", "--logs", "{folder}"),
    )
    run.done(figures.suite_figure)
