"""Runs PyTorch's own distributed tests on ringreduce and sets what came of them beside Gloo's.

    python tests/torch_suite/run.py                     # as `make torch-suite`
    python tests/torch_suite/run.py --world 4 -k reduce
    python tests/torch_suite/run.py --record-gloo       # Gloo's results: for a new torch

The tests come with torch.  A first pass runs them all on the backend "ringreduce"; those that it
skips and Gloo runs ask for the name "gloo" literally, and run in a second pass, in which that name
makes a ringreduce group.  Gloo's results are kept beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
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


def environment(suite_pass: str, world: int) -> dict[str, str]:
    """What a worker needs to find at its start: one thread, the pass, the number of ranks."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGREDUCE_")}
    env.pop("TORCH_DISTRIBUTED_DEBUG", None)
    return env | {
        "TORCH_SUITE_PASS": suite_pass,
        "WORLD_SIZE": str(world),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(HERE), str(HERE.parent.parent), env.get("PYTHONPATH", "")])
        ),
    }


def run_pass(
    suite_pass: str,
    settings: argparse.Namespace,
    only: Sequence[str] = (),
    program: Path = HERE / "worker.py",
) -> dict[str, Result]:
    """Runs one pass's tests, all of them or `only` some, however many workers that takes."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{suite_pass}-{settings.world}.log"
    log.write_text("")
    env = environment(suite_pass, settings.world)
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
    parser.add_argument("-k", metavar="PART", action="append", help="tests whose names have PART")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test (120)")
    parser.add_argument(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="fork ranks from a process that has torch, or start each as torch does, which takes "
        "10 times as long (fork)",
    )
    parser.add_argument("--record-gloo", action="store_true", help="keep Gloo's results")
    parser.add_argument("--verbose", "-v", action="store_true", help="a line for every test")
    settings = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # workers end with us

    import torch

    path = results.baseline_path(torch.__version__, settings.world)
    print(f"torch {torch.__version__}, {settings.world} ranks, {os.cpu_count()} cores")
    if settings.k and not path.exists():
        parser.error("there are no results of Gloo for this torch yet: leave -k out first")
    if settings.record_gloo or not path.exists():
        if not settings.record_gloo:
            print(f"no results of Gloo for this torch and {settings.world} ranks: recording them")
        kept = results.load_baseline(path) if settings.k else {}
        results.save_baseline(path, kept | run_pass("gloo", settings))
        if settings.record_gloo:
            return 0
    gloo = results.load_baseline(path)

    ours = run_pass("ringreduce", settings)
    gloo = {name: result for name, result in gloo.items() if name in ours or not settings.k}
    gated = [
        name
        for name, result in ours.items()
        if result.outcome == "skip" and name in gloo and gloo[name].outcome == "pass"
    ]
    if gated:
        ours |= run_pass("as-gloo", settings, gated)
    return report(ours, gloo, settings.world)


def report(ours: results.Results, gloo: results.Results, world: int) -> int:
    """Prints and writes what came of it; returns the exit status."""
    verdict = results.judge(ours, gloo)
    written = LOGS / f"results-{world}.json"
    results.save_baseline(written, ours)
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
