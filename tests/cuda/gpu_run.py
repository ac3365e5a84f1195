"""A stage of gpu_check.py while it runs: its commands, its time, clean ends, what came of it.

Each command carries the stage's mark in its environment, by which everything that it started is
found and ended, whatever session or parent it has by then, and nothing else.  Exit status 77 says
"not possible here"; the last line of the output says why.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import gpu_figures
import pytest
from gpu_figures import Lines
from gpu_machine import ROOT, Machine

PERF = "ringreduce_cuda_perf"
MARK = "RINGREDUCE_GPU_CHECK_MARK"
NOT_POSSIBLE = 77
# Time that processes may take to end after their parent, and after they were killed.
LINGER = 3.0
DYING = 10.0
# How much of one command's output the log keeps: its beginning and its end.
LOG_BYTES = 1 << 20
# The lines of an output that name failures.
COMPLAINT = re.compile(r"FAILED|[Ee]rror\b.*:")


class Run:
    """What a stage's function works with; `done` is its last call.

    In a command and its environment {json} is where the measurements go, {folder} a place for
    files.  A command that fails is a problem of the stage, whose next commands run nevertheless.
    """

    interpreter = sys.executable
    build = ROOT / "build" / "gpu"
    site = build / "site"  # the folder of Python packages with ringreduce

    def __init__(
        self, name: str, machine: Machine, log: Path, *, quick: bool, limit: float, left: float
    ) -> None:
        self.name, self.machine, self.log, self.quick = name, machine, log, quick
        self.limit, self.left = limit, left
        self.status = self.reason = self.figure = ""  # as far as they differ from pytest's
        self.commands: list[str] = []
        self.problems: list[str] = []
        # Reads the measurements; some programs leave them in a form of their own.
        self.collect: Callable[[Path], Lines] = gpu_figures.read_lines
        self._impossible: list[str] = []
        self._mark = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)

    @property
    def jobs(self) -> str:
        """How many compilations at a time."""
        return str(self.machine.facts["cores"])

    def seconds(self) -> float:
        return round(time.monotonic() - self._begin, 2)

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def command(
        self, *parts: str, env: Mapping[str, str] | None = None, inside: bool = False
    ) -> list[str]:
        """Runs a command; `inside`: in {folder}, and not where gpu_check.py was started.

        Returns the last lines of its output.
        """
        settings = (f"{name}={shlex.quote(value)}" for name, value in (env or {}).items())
        self.commands.append(" ".join([*settings, shlex.join(parts)]))
        status, output = self.execute(*parts, env=env, inside=inside)
        program = Path(parts[0]).name
        if status == NOT_POSSIBLE:
            self._impossible.append(output[-1] if output else f"{program} cannot run here")
        elif status < 0:
            name = signal.Signals(-status).name
            self.problems.append(f"{program} was killed by {name}: {gist(output)}")
        elif status > 0:
            self.problems.append(f"{program} ended with status {status}: {gist(output)}")
        return output

    def perf(self, mode: str, *options: str, under: Sequence[str] = (), nccl: bool = False,
             env: Mapping[str, str] | None = None) -> list[str]:  # fmt: skip
        """ringreduce_cuda_perf; `nccl`: beside the NCCL to compare with."""
        command = (*under, str(self.build / PERF), mode, *options, "--json", "{json}")
        return self.command(*command, env=self.beside_nccl() if nccl else env)

    def beside_nccl(self) -> dict[str, str]:
        path = self.machine.nccl
        return {"RINGREDUCE_NCCL": path, "NCCL_MULTI_RANK_GPU_ENABLE": "1"} if path else {}

    def python(self, *parts: str, nccl: bool = False) -> None:
        """A Python program on the ringreduce that the stage `extension` made.

        It runs outside of the source tree, so that it finds that one.
        """
        env = {"PYTHONPATH": str(self.site)}
        if nccl and self.machine.nccl:
            env["LD_PRELOAD"] = self.machine.nccl
        self.command(self.interpreter, *parts, env=env, inside=True)

    def lines(self) -> Lines:
        """The measurements so far."""
        return self.collect(self.folder)

    def done(self, figure: Callable[[Lines], str] | None = None) -> None:
        """Judges what ran and what it measured, which `figure` says in a line, if it had to."""
        patience = time.monotonic() + LINGER
        while (left := describe(self._marked())) and time.monotonic() < patience:
            time.sleep(0.02)
        if left:
            self.problems.append(f"processes were left behind: {', '.join(left)}")
        self._end()
        lines = self._judged()
        if self.problems:
            self.fail()
        if self._impossible and len(self._impossible) == len(self.commands):
            self.skip(self._impossible[0])
        if figure:
            self.figure = figure(lines) if lines else self.fail("it measured nothing")
        self.figure = "; ".join(filter(None, [self.figure, *self._impossible]))

    def skip(self, reason: str) -> NoReturn:
        self.reason = reason
        pytest.skip(reason)

    def fail(self, *problems: str) -> NoReturn:
        self.reason = "; ".join([*self.problems, *problems])
        pytest.fail(self.reason, pytrace=False)

    def note(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text.rstrip("\n") + "\n")

    def execute(
        self, *parts: str, env: Mapping[str, str] | None = None, inside: bool = False
    ) -> tuple[int, list[str]]:
        """A command's exit status and its last lines.  The stage ends if its time is over."""

        def filled(text: str) -> str:
            measured = str(self.folder / "measured.jsonl")
            return text.replace("{json}", measured).replace("{folder}", str(self.folder))

        self.note(f"=== {self.name}: {shlex.join(parts)}")
        begin = self.log.stat().st_size
        settings = {name: filled(value) for name, value in (env or {}).items()}
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [filled(part) for part in parts],
                    env={**os.environ, **settings, MARK: self._mark},
                    cwd=self.folder if inside else None,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            return 1, [str(error)]
        deadline = self._begin + min(self.limit, self.left)
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            trim(self.log, begin)
            self.note("\n".join(["=== overrun; what runs:", *describe(self._marked())]))
            self._overrun(Path(parts[0]).name)
        return status, trim(self.log, begin)

    def _overrun(self, program: str) -> NoReturn:
        cut = self.left < self.limit and not self.problems
        self._end()
        with contextlib.suppress(Exception):  # files may be half written
            self._judged()
        if cut and not self.problems:
            what = f"cut after {self.left:.0f} of its {self.limit:.0f} s"
            self.skip(f"{what}: the budget is used up")
        self.status = "timeout"
        limit = min(self.limit, self.left)
        self.fail(f"{program} was ended after the stage's {limit:.0f} s")

    def _judged(self) -> Lines:
        lines = self.lines()
        if wrong := sum(bool(line.get("wrong")) for line in lines):
            self.problems.append(f"{wrong} of {len(lines)} results are wrong")
        return lines

    def _end(self) -> None:
        """Kills all that the stage has started; what does not die is a problem."""
        patience = time.monotonic() + DYING
        process = self._process
        while True:
            runs = process is not None and process.poll() is None
            if process and runs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            left = self._marked()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left and not runs:
                return
            if time.monotonic() > patience:
                self.problems.append(f"cannot be killed: {', '.join(describe(left))}")
                return
            time.sleep(0.02)

    def _marked(self) -> list[int]:
        """The processes that carry the mark."""
        mark, found = f"{MARK}={self._mark}".encode(), []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            # Others' processes, and those that end just now, cannot be read.
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found


def describe(pids: Sequence[int]) -> list[str]:
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            names.append(f"{pid} ({text.decode(errors='replace').strip()[:80]})")
    return names


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


def install(build: Path, site: Path) -> None:
    """Puts ringreduce and the extension into a folder where Python finds them.

    It is as pip would install it, without a second compilation: the package, the extension, and the
    metadata by which torch finds the backend.  Neither the system's Python nor .venv is touched.
    """
    shutil.rmtree(site, ignore_errors=True)
    package = site / "ringreduce"
    shutil.copytree(ROOT / "ringreduce", package, ignore=shutil.ignore_patterns("*.so", "__pyc*"))
    shutil.copy(ROOT / "_ringreduce_autoload.py", site)
    # The build folder may have the extensions of other Pythons too.
    for name in (f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "_build_info.py"):
        shutil.copy(build / name, package)
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, re.MULTILINE)
    points = re.findall(r'^\[project\.entry-points\."(.*)"\]\n((?:.+\n)+)', project, re.MULTILINE)
    metadata = site / f"ringreduce-{version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: ringreduce\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text)
    entries = [f"[{group}]\n" + names.replace('"', "") for group, names in points]
    (metadata / "entry_points.txt").write_text("\n".join(entries))
