"""Runs PyTorch's own distributed tests on ringreduce and sets what came of them beside Gloo's.

    python tests/torch_suite/run.py                     # as `make torch-suite`
    python tests/torch_suite/run.py --world 4 -k reduce
    python tests/torch_suite/run.py --record-gloo       # Gloo's results: for a new torch
    python tests/torch_suite/run.py --device cuda       # the tests that want GPUs
    RINGREDUCE_WIRE=tcp python tests/torch_suite/run.py             # over sockets
    python tests/torch_suite/run.py --world 4 --hosts 2             # ranks that pose as two hosts

The tests come with torch.  A first pass runs them all on the backend "ringreduce"; those that it
skips and Gloo runs ask for the name "gloo" literally, and run in a second pass, in which that name
makes a ringreduce group.  Gloo's results are kept beside this file, those for a torch without such
in build/torch-suite, or where --logs says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import results
from results import Result

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent.parent / "build" / "torch-suite"
# What a worker may take beyond the limit that it keeps itself.
GRACE = 60.0
# By this gpu_check.py (tests/cuda/gpu_run.py) finds and ends what it started.
MARK = "RINGREDUCE_GPU_CHECK_MARK"
# What it takes as a reason to skip.
NOT_POSSIBLE = 77


class Worker:
    """A process of worker.py, and what it tells."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        with log.open("a") as stderr:
            self.process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        self._unread = b""

    def hear(self, seconds: float) -> object:
        """The next thing it tells; None if it has ended, TimeoutError if it tells nothing."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    return None
                self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> int:
        """Kills what is left of it and its ranks; returns its exit status."""
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return status


def environment(suite_pass: str, world: int, hosts: int = 1) -> dict[str, str]:
    """What a worker needs to find at its start: one thread, the pass, how many ranks and hosts."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name in (MARK, "RINGREDUCE_WIRE") or not name.startswith("RINGREDUCE_")
    }
    env.pop("TORCH_DISTRIBUTED_DEBUG", None)
    return env | {
        "TORCH_SUITE_PASS": suite_pass,
        "TORCH_SUITE_HOSTS": str(hosts),
        "WORLD_SIZE": str(world),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(HERE), env.get("PYTHONPATH", ""), str(HERE.parent.parent)])
        ),
    }


def label(settings: argparse.Namespace) -> str:
    """What the names of logs and results say of a run: how many ranks, and where they are."""
    hosts = f"-on-{settings.hosts}-hosts" if settings.hosts > 1 else ""
    wire = os.environ.get("RINGREDUCE_WIRE", "auto")
    return f"{settings.world}{hosts}" + (f"-{wire}" if wire != "auto" else "")


def run_pass(
    suite_pass: str,
    settings: argparse.Namespace,
    only: Sequence[str] = (),
    program: Path = HERE / "worker.py",
) -> dict[str, Result]:
    """Runs one pass's tests, all of them or `only` some, however many workers that takes."""
    log = settings.logs / f"{suite_pass}-{label(settings)}.log"
    log.write_text("")
    env = environment(suite_pass, settings.world, settings.hosts)
    limits = [f"--limit={settings.limit}", f"--start={settings.start}"]
    command = [sys.executable, str(program), *limits]
    for part in settings.k or ():
        command += ["-k", part]
    done: dict[str, Result] = {}
    left: list[str] | None = None  # not known before a worker has told
    start = time.monotonic()
    while left is None or left:
        worker = Worker([*command, *(left or only)], env, log)
        running = ""
        try:
            names = worker.hear(GRACE)
            if names is None:
                raise SystemExit(f"{program.name} did not start; {log} says why")
            left = list(names)
            while (said := worker.hear(settings.limit + GRACE)) is not None:
                if isinstance(said, str):
                    running = said
                    continue
                name, outcome, seconds, why = said
                done[name] = Result(outcome, seconds, why)
                tell(name, done[name], settings.verbose)
                left.remove(name)
                running = ""
            why = "the process that starts the ranks died"
        except TimeoutError:
            why = f"hang: the process that starts the ranks tells nothing, {GRACE:.0f} s after all"
        finally:
            status = worker.end()
        if running:
            done[running] = Result("fail", 0.0, f"{why} (exit status {status})")
            tell(running, done[running], settings.verbose)
            left.remove(running)
        elif left:
            raise SystemExit(f"{program.name} ended ({status}) between two tests; see {log}")
    print(f"pass {suite_pass}: {len(done)} tests in {time.monotonic() - start:.0f} s; log: {log}")
    return done


def tell(name: str, result: Result, verbose: bool) -> None:
    """Prints a failure as it comes, or everything."""
    expected = name in results.exceptions.EXCEPTIONS
    if verbose or (result.outcome == "fail" and not expected):
        print(f"{result.outcome:5}{result.seconds:7.2f} s  {name}  {result.gist}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=3, help="ranks (3)")
    parser.add_argument(
        "--hosts", type=int, default=1, help="hosts that the ranks pose to be on, as many each (1)"
    )
    parser.add_argument("-k", metavar="PART", action="append", help="tests whose names have PART")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test (120)")
    parser.add_argument(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="fork ranks from a process that has torch, or start each as torch does, which takes "
        "10 times as long (fork)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--logs", type=Path, default=LOGS, help="where logs and results go")
    parser.add_argument("--record-gloo", action="store_true", help="keep Gloo's results")
    parser.add_argument("--verbose", "-v", action="store_true", help="a line for every test")
    settings = parser.parse_args()
    if settings.hosts < 1 or settings.world % settings.hosts:
        parser.error(f"{settings.world} ranks cannot be shared out over {settings.hosts} hosts")
    settings.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # workers end with us

    import torch

    if settings.device == "cuda":
        return on_gpus(settings)
    world, path = settings.world, results.baseline_path(torch.__version__)
    if world not in results.load(path) and not settings.record_gloo:
        path = settings.logs / path.name
    kept = results.load(path)
    print(f"torch {torch.__version__}, {world} ranks, {os.cpu_count()} cores")
    if settings.k and world not in kept:
        parser.error("there are no results of Gloo for this torch yet: leave -k out first")
    if settings.record_gloo or world not in kept:
        if not settings.record_gloo:
            print(f"no results of Gloo for this torch and {world} ranks: recording them")
        known = kept.get(world, {}) if settings.k else {}
        results.save(path, kept | {world: known | run_pass("gloo", settings)})
        if settings.record_gloo:
            return 0
    gloo = results.load(path)[world]

    ours = run_pass("ringreduce", settings)
    gloo = {name: result for name, result in gloo.items() if name in ours or not settings.k}
    gated = [
        name
        for name, result in ours.items()
        if result.outcome == "skip" and name in gloo and gloo[name].outcome == "pass"
    ]
    if gated:
        ours |= run_pass("as-gloo", settings, gated)
    return report(ours, gloo, settings)


def on_gpus(settings: argparse.Namespace) -> int:
    """Both passes of the tests that want GPUs; returns the exit status."""
    if importlib.util.find_spec("expecttest") is None:
        print("torch's tests need the Python package expecttest")
        return NOT_POSSIBLE
    ours = run_pass("ringreduce-on-gpus", settings)
    gated = [name for name, result in ours.items() if result.outcome == "skip"]
    if gated:
        again = run_pass("as-gloo-on-gpus", settings, gated)
        ours |= {name: result for name, result in again.items() if result.outcome != "skip"}
    return report_gpus(ours, settings)


def report_gpus(found: results.Results, settings: argparse.Namespace) -> int:
    """Prints and writes what came of the tests that want GPUs; returns the exit status.

    There is nothing to compare with: no other backend runs them where ranks share a GPU.
    """
    done = {name: results.without_a_device(result) for name, result in found.items()}
    written = settings.logs / f"results-on-gpus-{label(settings)}.json"
    results.save(written, {settings.world: done})
    count = {o: sum(r.outcome == o for r in done.values()) for o in ("pass", "fail", "skip")}
    for name, result in done.items():
        if result.outcome == "fail":
            print(f"FAILED: {name}: {result.gist}")
    print(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped; {written}")
    return 0 if count["pass"] else 1


def report(ours: results.Results, gloo: results.Results, settings: argparse.Namespace) -> int:
    """Prints and writes what came of it; returns the exit status."""
    verdict = results.judge(ours, gloo)
    written = settings.logs / f"results-{label(settings)}.json"
    results.save(written, {settings.world: ours})
    print(results.table(ours, gloo))
    for name in verdict.excepted:
        print(f"exception: {name}: {results.exceptions.EXCEPTIONS[name]}")
    for name in verdict.needless:
        print(f"passes by now, take it off exceptions.py: {name}")
    for name in verdict.missing:
        print(f"SKIPPED, but Gloo runs it: {name}")
    for name in verdict.failed:
        print(f"FAILED: {name}: {ours[name].gist}")
    but = f" but for {len(verdict.excepted)} on the list of exceptions" if verdict.excepted else ""
    print(f"{'all' if verdict.good else 'NOT all'} as on Gloo{but}; results: {written}")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
