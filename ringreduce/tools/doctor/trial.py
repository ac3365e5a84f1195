"""What a job does first, in a process of its own, which a fault may stop or kill.

    python -m ringreduce.tools.doctor.trial

It tries what the ranks of a host need of the kernel, and makes a group of this rank alone, as a job
makes it.  Once it is told where the store is, it makes a group of all ranks.  It reads and writes
lines of JSON: what to do, and what came of each step.  `Trial` is the other end.
"""

import contextlib
import fcntl
import json
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from ringreduce.core.processes import end, how_ended

START, MEMORY, SOCKET, ALONE, ALL = "start", "shared-memory", "unix-socket", "alone", "all"
_START_SECONDS = 60.0  # to import torch, while other ranks do the same
_STEP_SECONDS, _HURRY_SECONDS = 30.0, 5.0
_ENDING_SECONDS = 10.0  # for a group of all ranks that times out, and tells so itself
# Of `Trial.first` and `Trial.all`, at most.
FIRST_SECONDS = _START_SECONDS + 3 * _STEP_SECONDS
ALL_SECONDS = _STEP_SECONDS + _ENDING_SECONDS
_MEMORY_BYTES = 1 << 20
_ELEMENTS = 1000
_LAST_LINES = 3
# Variables of a job's files, which belong to the job, and of a supervisor, which counts groups.
_LEFT_OUT = (
    "RINGREDUCE_DUMP",
    "RINGREDUCE_DUMP_SIGNAL",
    "RINGREDUCE_TIMELINE",
    "RINGREDUCE_METRICS",
    "_RR_SUPERVISOR",
)


class Trial:
    """The process, for the rank that has started it."""

    def __init__(self) -> None:
        self._told: queue.Queue[dict[str, str] | None] = queue.Queue()
        self._last: list[str] = []  # lines that it wrote, which may say why it ended
        self._over = ""
        self._readers: list[threading.Thread] = []
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ringreduce.tools.doctor.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={k: v for k, v in os.environ.items() if k not in _LEFT_OUT},
                text=True,
                errors="replace",
            )
            for read in (self._read, self._read_errors):
                reader = threading.Thread(target=read, args=(self._process,), daemon=True)
                reader.start()
                self._readers.append(reader)
        except (OSError, RuntimeError) as error:  # RuntimeError: of a thread
            self._over = f"a process, or a thread, cannot be started: {error}"

    def first(self, solo: bool, hurry: bool = False) -> dict[str, str]:
        """What the kernel gives, and a group of this rank alone.

        Args:
            solo: this rank is the whole job, and meets itself as the job would.
            hurry: it is known that a step will not end.

        Returns:
            An error by step, for MEMORY, SOCKET and ALONE; "" if there is none.
        """
        self._tell({"solo": solo})
        self._result(START, _START_SECONDS)
        found = dict.fromkeys((MEMORY, SOCKET, ALONE), "")
        for step in found:
            ended = self._over
            error = self._result(step, _HURRY_SECONDS if hurry else _STEP_SECONDS)
            # What was not tried, since the process is gone, is not at fault.
            found[step] = "" if ended and step != ALONE else error
        return found

    def all(self, **where: Any) -> str:
        """Makes the group of all ranks.

        Args:
            where: the arguments of `_all`.

        Returns:
            Its error, or "".
        """
        self._tell(where)
        return self._result(ALL, ALL_SECONDS)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            end([self._process])
            for reader in self._readers:
                reader.join()

    def _tell(self, what: dict[str, Any]) -> None:
        if not self._over and self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, which `_result` says
                self._process.stdin.write(json.dumps(what) + "\n")
                self._process.stdin.flush()

    def _result(self, step: str, seconds: float) -> str:
        if self._over or self._process is None:
            return self._over
        try:
            told = self._told.get(timeout=seconds)
        except queue.Empty:
            end([self._process])
            self._over = f"it did not end within {seconds:g} s"
            return self._over
        if told is None:
            self._readers[1].join()
            said = " / ".join(self._last)
            self._over = f"the process ended with {how_ended(self._process.wait())}"
            self._over += f"; it wrote: {said}" * bool(said)
            return self._over
        if told["step"] != step:
            self._over = f"it tried {told['step']} in place of {step}"
            end([self._process])
            return self._over
        return told["error"]

    def _read(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stdout or ():
            self._told.put(json.loads(line))
        self._told.put(None)

    def _read_errors(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stderr or ():
            self._last = [*self._last, line.strip()][-_LAST_LINES:]


# ---- in that process


@contextlib.contextmanager
def _naming(call: str) -> Iterator[None]:
    """Puts the name of a system call into its error."""
    try:
        yield
    except OSError as error:
        error.filename = call
        raise


def _memory() -> None:
    """Shared memory as a rank makes it (csrc/transport/shm/segment.cc)."""
    with _naming("memfd_create"):
        fd = os.memfd_create("ringreduce-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with _naming("ftruncate"):
            os.ftruncate(fd, _MEMORY_BYTES)
        with _naming("fcntl(F_ADD_SEALS)"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with _naming("mmap"), mmap.mmap(fd, _MEMORY_BYTES) as memory:
            memory[:] = bytes(_MEMORY_BYTES)
    finally:
        os.close(fd)


def _socket() -> None:
    """Passes a descriptor over an abstract socket, as ranks of one host pass their memory."""
    with _naming("socketpair"):
        for one in socket.socketpair():
            one.close()
    kind = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(*kind) as listener, socket.socket(*kind) as caller:
        listener.bind("\0ringreduce-doctor-" + os.urandom(8).hex())
        listener.listen()
        caller.connect(listener.getsockname())
        socket.send_fds(caller, [b"1"], [listener.fileno()])
        with listener.accept()[0] as accepted:
            for fd in socket.recv_fds(accepted, 1, 1)[1]:
                os.close(fd)


def _alone(solo: bool) -> None:
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    import ringreduce

    wait = timedelta(seconds=_STEP_SECONDS)
    if solo:
        ringreduce.init(timeout=wait)
    else:
        store = HashStore()
        dist.init_process_group("ringreduce", store=store, rank=0, world_size=1, timeout=wait)
    _use_group()


def _all(addr: str, port: int, prefix: str, rank: int, world_size: int) -> None:
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=_STEP_SECONDS)
    store = TCPStore(addr, port, world_size, timeout=wait, wait_for_workers=False)
    dist.init_process_group(
        "ringreduce",
        store=PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=wait,
    )
    _use_group()


def _use_group() -> None:
    """An all-reduce, whose result is looked at; then the group is left."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    tensor = torch.ones(_ELEMENTS, dtype=torch.float32, device="cpu")
    dist.all_reduce(tensor)
    wrong = [value for value in tensor.tolist() if value != size]
    if wrong:
        raise RuntimeError(f"an all_reduce of ones over {size} rank(s) gave {wrong[0]}")
    dist.destroy_process_group()


def _read_lines(lines: "queue.Queue[dict[str, Any]]") -> None:
    """Ends the process with its input: whoever has started it is gone."""
    for line in sys.stdin:
        lines.put(json.loads(line))
    os._exit(0)


def main() -> None:
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed

    def tell(step: str, error: str = "") -> None:
        print(json.dumps({"step": step, "error": error}), file=told, flush=True)

    def attempt(step: str, work: Callable[..., None], **arguments: Any) -> None:
        try:
            work(**arguments)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            tell(step, f"{where}{error.strerror or error}")
        except Exception as error:
            first = str(error).partition("\n")[0]
            tell(step, f"{type(error).__name__}: {first}")
        else:
            tell(step)

    lines: queue.Queue[dict[str, Any]] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(lines,), daemon=True)
    reader.start()
    tell(START)
    asked = lines.get()
    attempt(MEMORY, _memory)
    attempt(SOCKET, _socket)
    attempt(ALONE, _alone, **asked)
    attempt(ALL, _all, **lines.get())
    reader.join()  # until there is no more to do


if __name__ == "__main__":
    main()
