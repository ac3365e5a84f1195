"""Starts the rank processes of one job, as torchrun does, and sees that they end.

torchrun itself would do for a training script. The demo also wants the output of a rank that
fails, a deadline, and nothing left running after Ctrl-C, so it keeps the processes at hand:
each rank is its own process group and writes to a log file of its own.
"""

import contextlib
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed import TCPStore

from ringreduce.core.processes import (
    end,
    exit_at,
    how_ended,
    last_lines,
    torchrun_variables,
    uninterrupted,
)

GRACE_SECONDS = 3.0  # after one rank failed, for the others to say what they saw of it


class JobFailed(Exception):
    """A rank failed or the deadline passed; the message says which, and ends with its output."""


class Job:
    """`nproc` processes of one Python script with the environment that torchrun gives them.

    Use as a context manager: whatever happens inside, no process survives it. Rank 0's stderr
    goes to the terminal where `terminal` is set (for its progress bar); everything else that
    ranks write goes to <logs>/<name>-rank<r>.log, or, with `conversation`, their stdout comes
    to ask(). From the start to the end the job may take `deadline` seconds.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        logs: Path,
        deadline: float,
        *,
        nproc: int = 2,
        terminal: bool = False,
        conversation: bool = False,
    ) -> None:
        self.name, self.command, self.nproc = name, command, nproc
        self.terminal, self.conversation = terminal, conversation
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"{name}-rank{rank}.log" for rank in range(nproc)]
        for log in self.logs:
            log.unlink(missing_ok=True)
        self.allowed = deadline
        self.deadline = time.monotonic() + deadline
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Job":
        # The launcher holds the store, as torchrun's agent does: no port to guess, no race for it.
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        try:
            for rank in range(self.nproc):
                self.start(rank)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def wait(self) -> None:
        """Returns when every rank has ended well; raises JobFailed when one has not."""
        while not self.ended():
            time.sleep(0.05)

    def start(self, rank: int) -> None:
        """Starts a rank, or a process in the place of one that was killed, with the same log."""
        variables = torchrun_variables(rank, self.nproc, self.store.port)
        to_terminal = self.terminal and rank == 0
        with self.logs[rank].open("ab") as log, uninterrupted():
            self.ranks[rank] = subprocess.Popen(
                [sys.executable, *self.command],
                env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE if self.conversation else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.conversation else log,
                stderr=None if to_terminal else log,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the ranks
            )

    def kill(self, rank: int) -> None:
        """Ends a rank with SIGKILL; that is no failure of the job."""
        end([self.ranks[rank]])
        del self.ranks[rank]

    def ask(self, request: str) -> list[Any]:
        """Sends one line to every rank and returns the one JSON value that each answers."""
        for process in self.ranks.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # a rank is gone: ended() below says how
                process.stdin.write(request.encode() + b"\n")
                process.stdin.flush()
        answers: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in self.ranks.items():
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
            while len(answers) < self.nproc:
                if self.ended():
                    raise JobFailed(f"{self.name}: ended without an answer{self._tails()}")
                # Ranks answer with one short line, so a readable pipe holds all of it.
                for key, _ in selector.select(timeout=0.2):
                    rank, pipe = key.data
                    line = pipe.readline()
                    selector.unregister(pipe)
                    if line:  # else the rank closed its end: ended() will see it end
                        answers[rank] = line
        return [json.loads(answers[rank]) for rank in range(self.nproc)]

    def ended(self) -> bool:
        """Whether all ranks ended well. Raises JobFailed for a failure and after the deadline."""
        ranks = self.ranks.values()
        if any(process.poll() for process in ranks):
            limit = time.monotonic() + GRACE_SECONDS
            first = {rank: p.returncode for rank, p in self.ranks.items() if p.returncode}
            while time.monotonic() < limit and any(p.poll() is None for p in ranks):
                time.sleep(0.05)
            how = ", ".join(f"rank {r} ended with {how_ended(code)}" for r, code in first.items())
            raise JobFailed(f"{self.name}: {how}{self._tails()}")
        if time.monotonic() > self.deadline:
            raise JobFailed(f"{self.name}: not done after {self.allowed:.0f} s{self._tails()}")
        return all(process.poll() == 0 for process in ranks)

    def _tails(self) -> str:
        """The last lines that each rank wrote, for a message."""
        parts = []
        for rank, path in enumerate(self.logs):
            lines = last_lines(path)
            if self.terminal and rank == 0:
                lines.append("(rank 0 wrote its errors to the terminal, above)")
            parts.append(f"--- {self.name}, rank {rank}, end of {path}:")
            parts.extend(f"    {line}" for line in lines)
        return "\n" + "\n".join(parts)

    def _kill(self) -> None:
        """Ends what still runs, children of the ranks included, and collects every rank."""
        end(self.ranks.values())
        for process in self.ranks.values():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # of a request that nobody read
                        pipe.close()


def run_demo(demo: Callable[[], bool]) -> int:
    """The exit status of a demo: 0 if it returns True; Ctrl-C, SIGTERM and SIGHUP end it and its
    ranks."""
    exit_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # In a terminal the ranks' bars may have its width; in a log, a line now and then is enough.
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "10")
    try:
        return 0 if demo() else 1
    except JobFailed as failure:
        print(f"\nThe demo failed. {failure}", file=sys.stderr)
        return 1
    except SystemExit:
        print("\nStopped; all ranks were ended.", file=sys.stderr)
        raise


def machine() -> dict[str, Any]:
    """What the figures of a demo were measured on."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
