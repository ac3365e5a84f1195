"""Runs the stages of gpu_check.py: limits, clean ends, what came of each.

A stage is a list of commands with one limit for all.  Each command runs in a session of its own and
carries a mark in its environment, by which everything that it started is found and ended, whatever
session or parent it has by then, and nothing else.  Exit status 77 says "not possible here"; the
last line of the output says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_report import Lines, Result

MARK = "RINGREDUCE_GPU_CHECK_MARK"
NOT_POSSIBLE = 77
# Time that processes may take to end after their parent, and after they were killed.
LINGER = 3.0
DYING = 10.0
# How much of one stage's output the log keeps: its beginning and its end.
LOG_BYTES = 1 << 20
# Errors of reading malformed measurements.
MISSHAPEN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
# The lines of an output that name failures.
COMPLAINT = re.compile(r"FAILED|[Ee]rror\b.*:")


@dataclass(frozen=True)
class Step:
    """A command.  {json} in it is where it writes its measurements, {folder} a place for files.

    `inside`: it runs in {folder}, and not where gpu_check.py was started.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    inside: bool = False

    def text(self) -> str:
        settings = (f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        return " ".join([*settings, shlex.join(self.command)])


@dataclass(frozen=True)
class Stage:
    name: str
    shows: str
    limit: float
    steps: tuple[Step, ...]
    skip: str = ""  # why it cannot run on this machine
    needs: str = "build"  # the stage without which this one has nothing to run
    needs_gpu: bool = True
    measures: bool = False  # whether a success without measurements would be none
    # Measurements that the programs left in {folder} in a form of their own.
    collect: Callable[[Path], Lines] = lambda folder: []
    # Checks the measurements and {folder}, may add measurements; returns an error, or "".
    verify: Callable[[Lines, Path], str] = lambda lines, folder: ""
    figure: Callable[[Lines], str] = lambda lines: ""
    # Why this machine does not let the programs do it, by their output and {folder}, or "".
    excuse: Callable[[Sequence[str], Path], str] = lambda output, folder: ""
    # Whether its processes ("pids" of the lines) must be off the GPUs afterwards.
    frees_gpu: bool = False
    counted: bool = True  # whether its time is part of the budget


class Runner:
    """Runs stages one after the other until the budget, in seconds, is used up.

    `usage` tells which processes use the GPUs.
    """

    def __init__(
        self, log: Path, budget: float, usage: Callable[[], frozenset[int]] = frozenset
    ) -> None:
        self.log = log
        self.budget = budget
        self.usage = usage
        self.results: dict[str, Result] = {}
        self._used = 0.0

    def left(self) -> float:
        return self.budget - self._used

    def run(self, stage: Stage) -> Result:
        """Runs one stage; never raises for what the stage does."""
        result = Result(stage.name, "skipped", commands=[step.text() for step in stage.steps])
        if stage.skip:
            result.reason = stage.skip
        elif stage.needs and (missing := self._missing(stage.needs)):
            result.reason = missing
        elif stage.counted and self.left() < 1.0:
            result.reason = self._used_up()
        else:
            start = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
                self._run_steps(stage, result, Path(folder))
            result.seconds = round(time.monotonic() - start, 2)
            if stage.counted:
                self._used += result.seconds
        self.results[stage.name] = result
        return result

    def _missing(self, needed: str) -> str:
        """Why there is nothing of that stage to run; "" if it passed."""
        result = self.results.get(needed)
        if result is not None and result.status == "ok":
            return ""
        return f"there is no {needed} to run" + (f": {result.reason}" if result else "")

    def _run_steps(self, stage: Stage, result: Result, folder: Path) -> None:
        limit = min(stage.limit, self.left()) if stage.counted else stage.limit
        deadline = time.monotonic() + limit
        before = self.usage() if stage.frees_gpu else frozenset()
        problems: list[str] = []
        impossible: list[str] = []
        excuse = ""
        for step in stage.steps:
            status, output, remains = self._execute(stage.name, step, folder, deadline)
            program = Path(step.command[0]).name
            excuse = excuse or stage.excuse(output, folder)
            if status is None:
                problems.append(f"{program} was ended after the stage's {limit:.0f} s")
            elif status == NOT_POSSIBLE:
                impossible.append(output[-1] if output else f"{program} cannot run here")
            elif status < 0:
                problems.append(f"{program} was killed by {signal_name(-status)}: {gist(output)}")
            elif status > 0:
                problems.append(f"{program} ended with status {status}: {gist(output)}")
            if remains:
                problems.append(f"{program} left processes behind: {', '.join(remains)}")
            if status is None:
                result.status = "timeout"
                break
        lines, broken = read_lines(folder / "measured.jsonl")
        try:
            lines += stage.collect(folder)
        except (OSError, *MISSHAPEN) as error:
            broken = f"what it measured cannot be read: {error!r}"
        result.measurements = lines
        wrong = sum(bool(line.get("wrong")) for line in lines)
        if wrong:
            problems.append(f"{wrong} of {len(lines)} results are wrong")
        if excuse and not wrong and result.status != "timeout":
            problems = [excuse]
        elif result.status == "timeout":
            if limit < stage.limit and len(problems) == 1:
                result.status = "skipped"
                problems = [f"cut after {limit:.0f} of its {stage.limit:.0f} s: {self._used_up()}"]
        elif not problems and len(impossible) == len(stage.steps):
            problems = impossible[:1]
        else:
            if broken:
                problems.append(broken)
            elif stage.measures and not lines and not problems:
                problems.append("it measured nothing")
            if lines:
                problems += self._judge(stage, result, folder)
            if stage.frees_gpu:
                problems += self._still_used(before, lines)
            result.figure = "; ".join(filter(None, [result.figure, *impossible]))
            result.status = "failed" if problems else "ok"
        result.reason = "; ".join(problems)

    def _used_up(self) -> str:
        return f"the budget of {self.budget:.0f} s is used up"

    def _judge(self, stage: Stage, result: Result, folder: Path) -> list[str]:
        """Fills in what the measurements say; what is wrong with them."""
        lines = result.measurements
        try:
            if unfit := stage.verify(lines, folder):
                return [unfit]
            result.figure = stage.figure(lines)
        except MISSHAPEN as error:
            return [f"its measurements are not what was expected: {error!r}"]
        return []

    def _execute(
        self, stage: str, step: Step, folder: Path, deadline: float
    ) -> tuple[int | None, list[str], list[str]]:
        """Its exit status, None if it overran; its last lines; the processes that it left."""
        command = [
            part.replace("{json}", str(folder / "measured.jsonl")).replace("{folder}", str(folder))
            for part in step.command
        ]
        mark = secrets.token_hex(8)
        with self.log.open("ab") as log:
            log.write(f"=== {stage}: {step.text()}\n".encode())
            log.flush()
            begin = log.tell()
            try:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **step.env, MARK: mark},
                    cwd=folder if step.inside else None,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return 1, [str(error)], []
        status: int | None = None
        remains: list[str] = []
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
            patience = time.monotonic() + LINGER
            while (remains := describe(marked(mark))) and time.monotonic() < patience:
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            note = "\n".join(["=== overrun; what runs:", *describe(marked(mark))]) + "\n"
            with self.log.open("a") as log_text:
                log_text.write(note)
        finally:
            # Also when we are interrupted ourselves.
            if process.returncode is None or remains:
                stubborn = end(mark, process)
                if stubborn:
                    remains = [f"{name} (cannot be killed)" for name in stubborn]
                elif status is None:
                    remains = []
        return status, trim(self.log, begin), remains

    def _still_used(self, before: frozenset[int], lines: Lines) -> list[str]:
        """Processes of the stage that the driver still holds; none, as soon as all are gone.

        Others may use the GPUs at the same time, so neither their processes nor all memory counts.
        """
        own = {int(pid) for line in lines for pid in line.get("pids", [])} - before
        patience = time.monotonic() + LINGER
        while users := sorted(self.usage() & own):
            if time.monotonic() > patience:
                return [f"a GPU is still used by process {', '.join(map(str, users))}"]
            time.sleep(0.2)
        return []


def marked(mark: str) -> list[int]:
    """The processes that carry the mark."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and carries(entry, mark)]


def carries(pid: int | str, mark: str) -> bool:
    # Others' processes, and those that end just now, cannot be read.
    with contextlib.suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def describe(pids: Sequence[int]) -> list[str]:
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            names.append(f"{pid} ({text.decode(errors='replace').strip()[:80]})")
    return names


def end(mark: str, process: subprocess.Popen[bytes]) -> list[str]:
    """Kills a step's session and all that carry its mark; names those that do not die."""
    patience = time.monotonic() + DYING
    while True:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                kill_if_marked(pid, mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        left = marked(mark)
        if process.returncode is not None and not left:
            return []
        if time.monotonic() > patience:
            return describe(left or [process.pid])


def kill_if_marked(pid: int, mark: str) -> None:
    """Kills the process unless its number has gone to another one meanwhile."""
    handle = os.pidfd_open(pid)
    try:
        if carries(pid, mark):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


def trim(log: Path, begin: int) -> list[str]:
    """Cuts the middle out of what was written since `begin`, if it is long; returns its end."""
    with log.open("rb+") as file:
        size = file.seek(0, os.SEEK_END) - begin
        if size > LOG_BYTES:
            file.seek(begin + size - LOG_BYTES // 2)
            tail = file.read()
            file.seek(begin + LOG_BYTES // 2)
            file.write(f"\n=== {size - LOG_BYTES} bytes left out\n".encode() + tail)
            file.truncate()
        file.seek(max(begin, file.seek(0, os.SEEK_END) - LOG_BYTES // 8))
        written = file.read().decode(errors="replace")
    return [line.strip()[:300] for line in written.splitlines() if line.strip()]


def gist(lines: Sequence[str]) -> str:
    """The line that tells of a failure: the first that speaks of an error, else the last."""
    return next((line for line in lines if COMPLAINT.search(line)), lines[-1] if lines else "")


def read_lines(path: Path) -> tuple[Lines, str]:
    """The objects of a file of JSON lines, and what is wrong with it."""
    if not path.exists():
        return [], ""
    lines: Lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            return lines, f"line {number} of the measurements is no JSON"
        if not isinstance(line, dict):
            return lines, f"line {number} of the measurements is no object"
        lines.append(line)
    return lines, ""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
