"""Builds ringreduce for the GPUs of this machine and shows what only GPUs can show.

    python3 tests/cuda/gpu_check.py              # as `make gpu-check`: all stages
    python3 tests/cuda/gpu_check.py --quick      # at most 150 s after the build, without torch
    python3 tests/cuda/gpu_check.py --build      # as `make gpu-build`: only compiles
    python3 tests/cuda/gpu_check.py --study      # as `make gpu-study`: the long tables too
    python3 tests/cuda/gpu_check.py --only check --only single
    python3 tests/cuda/gpu_check.py --list

Needs Python 3.10, nvcc, cmake, ninja and g++, no package and no network.  What it finds is in
gpu-check.json, with all output in gpu-check.log, after each stage: in $OUT if that is set, else in
build/gpu/results.  Exit status:

    0  nothing failed, `check` passed and, with two GPUs or more, `gpus` did (--build: it compiled)
    1  something failed
    2  a wrong call, or a folder that cannot be written
    3  there is no GPU that programs can use: nothing was checked
    4  incomplete: nothing failed, but `check` or `gpus` did not run to its end
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gpu_machine
import gpu_stages
import gpu_torch_figures
from gpu_report import Report, Result
from gpu_runner import Runner, Stage

# Seconds for all stages but the builds.
QUICK_BUDGET, BUDGET, STUDY_BUDGET = 150.0, 1200.0, 3000.0
PASSED, FAILED, WRONG_CALL, NO_GPU, INCOMPLETE = range(5)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the stages and what they show")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument(
        "--only", action="append", metavar="STAGE", help="this stage (and build); again for more"
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="only what every report needs")
    extent.add_argument("--build", action="store_true", help="compile only")
    extent.add_argument("--study", action="store_true", help="add the long tables")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"for all stages but the builds ({BUDGET:.0f}; {QUICK_BUDGET:.0f} with --quick, "
        f"{STUDY_BUDGET:.0f} with --study)",
    )
    parser.add_argument(
        "--nccl",
        metavar="PATH",
        default=os.environ.get("RINGREDUCE_NCCL"),
        help="an NCCL to compare with: a libnccl.so.2, that packed by xz, or a folder with one "
        "(the Python package's; ranks share a GPU from 2.30 on)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go")
    return parser.parse_args(arguments)


def chosen(stages: list[Stage], only: list[str] | None) -> list[Stage]:
    """The stages asked for and those that they need; SystemExit if there is none of a name."""
    if only is None:
        return stages
    names = [stage.name for stage in stages]
    if unknown := [name for name in only if name not in names]:
        print(f"no stage is called {', '.join(unknown)}; there are {', '.join(names)}")
        raise SystemExit(WRONG_CALL)
    wanted = {"build", *only} | {stage.needs for stage in stages if stage.name in only}
    return [stage for stage in stages if stage.name in wanted]


def main(arguments: list[str] | None = None) -> int:
    settings = parse(arguments)
    # It may be packed; the stages that compare with NCCL get one that can be loaded.
    os.environ.pop("RINGREDUCE_NCCL", None)
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        return check(settings, Path(scratch))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """The first signal that shall end this program, a lost terminal's too, ends what it runs as
    well; those that come while that goes on change nothing."""
    # Signals that nohup ignores stay ignored.
    before = {s: h for s in ENDING if (h := signal.getsignal(s)) is not signal.SIG_IGN}

    def end(number: int, _: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(settings: argparse.Namespace, scratch: Path) -> int:
    machine = gpu_machine.inspect()
    look = settings.list or settings.dry_run
    nccl, about_nccl, torch, no_torch = None, "not looked for", None, ""
    if not look:
        if not machine.no_gpu:
            nccl, about_nccl = gpu_machine.find_nccl(settings.nccl, scratch)
        torch, no_torch = gpu_machine.find_torch(machine.facts["cuda_toolkit"])
    machine.facts["torch"] = torch or no_torch
    machine.facts["nccl"] = {"path": nccl, "version" if nccl else "missing": about_nccl}
    budget = settings.budget
    if budget is None:
        budget = STUDY_BUDGET if settings.study else QUICK_BUDGET if settings.quick else BUDGET
    plan = gpu_stages.Plan(
        machine.tools,
        architectures=gpu_machine.architectures(machine.gpus),
        jobs=machine.facts["cores"],
        gpus=max(1, len(machine.gpus)),
        end_long_kernels=gpu_machine.end_long_kernels(machine.gpus),
        nccl=nccl,
        no_torch=no_torch,
        study=settings.study,
        quick=settings.quick,
        build=gpu_stages.BUILD,
    )
    stages = chosen(gpu_stages.stages(plan), settings.only)
    if settings.build:
        stages = [stage for stage in stages if not stage.counted]
    if settings.list:
        for stage in stages:
            print(f"{stage.name:16} {stage.limit:4.0f} s  {stage.shows}")
        return PASSED
    if settings.dry_run:
        for stage in stages:
            why = f" ({stage.skip})" if stage.skip else ""
            print(f"# {stage.name}: at most {stage.limit:.0f} s{why}")
            for step in stage.steps:
                print(step.text())
        return PASSED

    folder = settings.out or Path(os.environ.get("OUT") or gpu_stages.BUILD / "results")
    try:
        report = Report(folder.resolve(), machine.facts)
    except OSError as error:
        print(f"the results cannot go to {folder}: {error.strerror} (--out names another folder)")
        return WRONG_CALL
    runner = Runner(report.log, budget, lambda: gpu_machine.usage(machine.tools.nvidia_smi))
    introduce(machine, about_nccl if nccl is None else f"{about_nccl} ({nccl})")
    run_all(stages, runner, report, machine.no_gpu)
    return conclude(report, machine, settings.build)


def introduce(machine: gpu_machine.Machine, about_nccl: str) -> None:
    """What a reader of a report wants to know first."""
    facts, gpus = machine.facts, machine.gpus
    print(f"GPUs: {len(gpus)}" + (f"; none can be used: {machine.no_gpu}" * bool(machine.no_gpu)))
    for number, gpu in enumerate(gpus):
        print(
            f"  {number}: {gpu['name']}, {gpu['memory_mib']} MiB, compute capability "
            f"{gpu['compute_cap']}, {gpu['uuid']}"
            + ", ends long kernels (a display, or WSL)"
            * gpu["ends_long_kernels"]
        )
    if gpus:
        print(f"topology: {gpu_machine.topology(len(gpus), facts['links'])}")
        print(f"peer access: {gpu_machine.peer_access(facts['peers'])}")
    print(f"driver: {facts['driver'] or 'unknown'}, for CUDA {facts['cuda_driver'] or '(unknown)'}")
    print(f"toolkit: {facts['cuda_toolkit'] or 'there is no nvcc'}")
    print(f"NCCL: {about_nccl}")
    print(f"torch: {facts['torch']}")
    print(f"{facts['cores']} cores, commit {facts['commit'][:12]}", flush=True)


def run_all(stages: list[Stage], runner: Runner, report: Report, no_gpu: str) -> None:
    for stage in stages:
        if stage.needs_gpu and no_gpu:
            result = Result(stage.name, "skipped", "no GPU")
        else:
            print(f"{stage.name} ...", end=" ", flush=True)
            result = runner.run(stage)
            print(f"{result.verdict} ({result.seconds:.1f} s)", flush=True)
        report.add(result)


def conclude(report: Report, machine: gpu_machine.Machine, only_built: bool) -> int:
    """Prints what came of it all; returns the exit status."""
    print()
    print(report.table())
    for result in report.results:
        if result.name == "ddp" and result.measurements:
            print("\n" + "\n".join(gpu_torch_figures.ddp_table(result.measurements)))
    status, why = verdict(report, machine, only_built)
    passed, skipped = report.count("ok"), report.count("skipped")
    failed = report.count("failed", "timeout")
    print(f"\ngpu-check: {passed} passed, {failed} failed, {skipped} skipped")
    print(f"gpu-check: {why} (exit status {status})")
    print("Attach these two files to a report:")
    print(f"  {report.path}\n  {report.log}", flush=True)
    return status


def verdict(report: Report, machine: gpu_machine.Machine, only_built: bool) -> tuple[int, str]:
    """The exit status, and its reason in words."""
    if failed := [r.name for r in report.results if r.status in ("failed", "timeout")]:
        return FAILED, f"FAILED: {', '.join(failed)}"
    if only_built:
        left_out = [f"{r.name} not: {r.reason}" for r in report.results if r.status != "ok"]
        if any(r.name == "build" and r.status == "ok" for r in report.results):
            return PASSED, "; ".join(["compiled, and nothing is checked yet", *left_out])
        return INCOMPLETE, "; ".join(["INCOMPLETE", *left_out])
    if machine.no_gpu:
        return NO_GPU, f"NO GPU, nothing of what needs one was checked: {machine.no_gpu}"
    wanted = [gpu_stages.CHECK] + [gpu_stages.ALL_GPUS] * (len(machine.gpus) > 1)
    results = {result.name: result for result in report.results}
    missing = [
        f"{name} did not run ({results[name].reason if name in results else 'not asked for'})"
        for name in wanted
        if name not in results or results[name].status != "ok"
    ]
    if missing:
        return INCOMPLETE, f"INCOMPLETE: {'; '.join(missing)}"
    why = f"passed, with {len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}"
    if limited := gpu_machine.end_long_kernels(machine.gpus):
        why += (
            f"; groups with GPU {', '.join(map(str, limited))}, which ends long kernels, ran the "
            "direct schedule only"
        )
    return PASSED, why


if __name__ == "__main__":
    sys.exit(main())
