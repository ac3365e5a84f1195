"""Starts and ends the processes of ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAIL_LINES = 20
_POLL_SECONDS = 0.02


def torchrun_variables(
    rank: int, world_size: int, port: int, address: str = "127.0.0.1", hosts: int = 1
) -> dict[str, str]:
    """The variables that torchrun sets for a rank.  Each host has equally many ranks.

    Args:
        rank, world_size: the rank's number, and how many there are.
        port, address: of a store that is there already; rank 0 starts none.
        hosts: the number of hosts.

    Returns:
        Their values by name.
    """
    per_host = world_size // hosts
    host, local_rank = divmod(rank, per_host)
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": hosts,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {name: str(value) for name, value in values.items()}


def is_open_mpi(mpirun: str) -> bool:
    """Whether the program is Open MPI's, and not MPICH's or Intel MPI's."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    # Called by another name than mpirun (mpirun.openmpi), it gives the name of its runtime.
    return any(name in done.stdout + done.stderr for name in ("Open MPI", "OpenRTE"))


def how_ended(code: int) -> str:
    """A process's `returncode` in words: "exit status 3" or "signal SIGKILL"."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # of a real-time signal, which has no name
        return f"signal {-code}"


def last_lines(log: Path) -> list[str]:
    """The end of what a process wrote to its log; nothing if there is none."""
    return log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if log.exists() else []


def exit_at(*signals: signal.Signals) -> None:
    """Makes these signals raise SystemExit(128 + number) in the main thread.

    What was started can then be ended first; signals that come meanwhile are ignored.  So are those
    that were ignored before, as by nohup.
    """

    def leave(number: int, _: FrameType | None) -> None:
        for other in _ENDING:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off Ctrl-C, SIGTERM and SIGHUP until the block is over, if Python functions handle them.

    One between the start of a process and the moment when its starter knows of it would leave that
    process behind.  Of several signals the first counts.  Does nothing outside of the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {n: h for n in _ENDING if is_main and callable(h := signal.getsignal(n))}
    late: list[tuple[int, FrameType | None]] = []
    try:
        for number in before:
            signal.signal(number, lambda number, frame: late.append((number, frame)))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if late:
            before[signal.Signals(late[0][0])](*late[0])


def _has_ended(process: subprocess.Popen[Any]) -> bool:
    """Leaves it to be waited for, so that its number, which may be its group's, stays its own."""
    if process.returncode is not None:
        return True
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # SIGCHLD is ignored
        return True
    return found is not None


def end(processes: Iterable[subprocess.Popen[Any]], grace: float = 0.0) -> None:
    """Ends processes, and waits for their end.  Signals that Python handles wait until it is done.

    Those that have not ended `grace` seconds after SIGTERM get SIGKILL; without a grace all get it
    at once.  The whole process group of one that leads it (`start_new_session`) gets SIGKILL, also
    if that one has ended, unless its end was seen before.
    """
    running = list(processes)
    with uninterrupted():
        if grace > 0:
            for process in running:
                process.terminate()
            until = time.monotonic() + grace
            while not all(map(_has_ended, running)) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        for process in running:
            if process.returncode is not None:  # its number may be another's by now
                continue
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
        for process in running:
            process.wait()
