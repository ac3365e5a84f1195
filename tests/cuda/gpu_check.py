"""Builds ringreduce for the GPU of this machine and shows what only a GPU can show.

    python3 tests/cuda/gpu_check.py              # as `make gpu-check`: all stages, under 8 minutes
    python3 tests/cuda/gpu_check.py --study      # as `make gpu-study`: the long tables too
    python3 tests/cuda/gpu_check.py --only check --only single
    python3 tests/cuda/gpu_check.py --list

Needs Python 3.10, nvcc, cmake, ninja and g++, no package and no network.  What it finds is in
gpu-check.json, with all output in gpu-check.log, after each stage: in $OUT if that is set, else in
build/gpu/results.  Exit status: 0 if nothing failed, 1 if something did, 2 for a wrong call or a
folder that cannot be written, 3 if there is no GPU.
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
from gpu_report import Report, Result
from gpu_runner import Runner, Stage

BUDGET, STUDY_BUDGET = 460.0, 1500.0
NO_GPU = 3
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
    parser.add_argument("--study", action="store_true", help="add the long tables")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"for all stages ({BUDGET:.0f}; {STUDY_BUDGET:.0f} with --study)",
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
        raise SystemExit(2)
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
    if machine.gpus and not look:
        nccl, about_nccl = gpu_machine.find_nccl(settings.nccl, scratch)
        torch, no_torch = gpu_machine.find_torch()
    machine.facts["torch"] = torch or no_torch
    machine.facts["nccl"] = {"path": nccl, "version" if nccl else "missing": about_nccl}
    budget = settings.budget
    if budget is None:
        budget = STUDY_BUDGET if settings.study else BUDGET
    plan = gpu_stages.Plan(
        machine.tools,
        # Without a GPU there is none to ask, and nothing but the build to run.
        architectures=gpu_machine.architectures(machine.gpus) if machine.gpus else "90",
        jobs=machine.facts["cores"],
        nccl=nccl,
        no_torch=no_torch,
        study=settings.study,
        build_limit=240 if machine.gpus else budget,
        build=gpu_stages.BUILD,
    )
    stages = chosen(gpu_stages.stages(plan), settings.only)
    if settings.list:
        for stage in stages:
            print(f"{stage.name:16} {stage.limit:4.0f} s  {stage.shows}")
        return 0
    if settings.dry_run:
        for stage in stages:
            why = f" ({stage.skip})" if stage.skip else ""
            print(f"# {stage.name}: at most {stage.limit:.0f} s{why}")
            for step in stage.steps:
                print(step.text())
        return 0

    folder = settings.out or Path(os.environ.get("OUT") or gpu_stages.BUILD / "results")
    try:
        report = Report(folder, machine.facts)
    except OSError as error:
        print(f"the results cannot go to {folder}: {error.strerror} (--out names another folder)")
        return 2
    runner = Runner(report.log, budget, lambda: gpu_machine.usage(machine.tools.nvidia_smi))
    introduce(machine, about_nccl if nccl is None else f"NCCL {about_nccl} ({nccl})")
    run_all(stages, runner, report, machine.no_gpu)
    return conclude(report, machine.no_gpu)


def introduce(machine: gpu_machine.Machine, about_nccl: str) -> None:
    for gpu in machine.gpus:
        print(
            f"GPU: {gpu['name']}, {gpu['memory.total']} MiB, compute capability "
            f"{gpu['compute_cap']}, driver {gpu['driver_version']}, {gpu['uuid']}"
        )
    facts = machine.facts
    print(f"CUDA {facts['cuda_toolkit']}, {facts['cores']} cores, commit {facts['commit'][:12]}")
    print(about_nccl, flush=True)


def run_all(stages: list[Stage], runner: Runner, report: Report, no_gpu: str) -> None:
    for stage in stages:
        if stage.needs_gpu and no_gpu:
            result = Result(stage.name, "skipped", "no GPU")
        else:
            print(f"{stage.name} ...", end=" ", flush=True)
            result = runner.run(stage)
            print(f"{result.verdict} ({result.seconds:.1f} s)", flush=True)
        report.add(result)


def conclude(report: Report, no_gpu: str) -> int:
    """Prints what came of it all; returns the exit status."""
    print()
    print(report.table())
    print(f"results: {report.path}, {report.log.name}")
    passed, skipped = report.count("ok"), report.count("skipped")
    failed = report.count("failed", "timeout")
    if no_gpu:
        print(f"no GPU was found: {no_gpu}; nothing of what needs one was checked")
    print(f"gpu-check: {passed} passed, {failed} failed, {skipped} skipped")
    if failed:
        return 1
    if no_gpu:
        return NO_GPU
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
