"""Hosts for tests and benchmarks: network namespaces, lines between them, processes in them.

    with Hosts(2, delay_ms=25, rate_mbit=500, loss=0.001) as hosts:
        job = hosts.start([sys.executable, "rank.py"], per_host=2)
        hosts.cut(1)
        outcomes = job.wait(30)

A host is a network namespace that benchmarks/net/wan.cc makes and connects.  It needs root:
`why_not()` says what is missing, and tests are skipped with it.  Nothing is left behind: at the end
of the block all processes are killed, and the namespaces live no longer than what is in them.
This module knows nothing of ringreduce.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranks import Places

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "benchmarks" / "net"
CLONE_NEWNET = 0x40000000
PORT = 29400  # of a job's store: hosts of several emulators never meet, so it may be the same


class HostsError(Exception):
    """What the emulator or the system refused."""


@functools.cache
def why_not(veth: bool = False) -> str:
    """Why there can be no hosts here (those of `veth`, if asked for), or "" if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for tool in ("ip", "tc", "bridge"):
        if shutil.which(tool) is None:
            return f"needs {tool}, of iproute2"
    if not os.environ.get("RINGREDUCE_WAN") and not compiler():
        return "needs a C++ compiler, for benchmarks/net/wan.cc"
    # Without an input it makes its hosts and ends.
    command = [program(), *(["--veth", "--rate-mbit", "1"] if veth else [])]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return "" if done.returncode == 0 else f"the emulator does not run: {lines[0]}"


def compiler() -> str:
    """The C++ compiler's path, or ""."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next(filter(None, (shutil.which(name) for name in names if name)), "")


def program() -> str:
    """The emulator: what RINGREDUCE_WAN names, or CMake's, or one compiled here if need be."""
    if named := os.environ.get("RINGREDUCE_WAN"):
        return named
    sources = sorted(SOURCES.glob("wan*.cc"))
    newest = max(path.stat().st_mtime for path in SOURCES.glob("wan*"))
    built = ROOT / "build" / "net" / "wan"
    by_cmake = ROOT / "build" / "extension" / "ringreduce_wan"
    if by_cmake.exists() and by_cmake.stat().st_mtime >= newest:
        return str(by_cmake)
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not built.exists() or built.stat().st_mtime < newest:
            fresh = built.with_suffix(".new")
            command = [compiler(), "-std=c++20", "-O2", "-o", str(fresh), *map(str, sources)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise HostsError(f"the emulator does not compile:\n{done.stderr}")
            fresh.replace(built)
    return str(built)


@dataclass(frozen=True)
class Interface:
    """An interface of a host; `ipv6` is "" where the system has no IPv6."""

    name: str
    ipv4: str
    ipv6: str


@dataclass(frozen=True)
class Host:
    """One host; `number` counts from 0."""

    number: int
    netns: str
    interfaces: tuple[Interface, ...]

    @property
    def address(self) -> str:
        """The IPv4 address of its first interface."""
        return self.interfaces[0].ipv4

    def at(self, family: str) -> str:
        """The address of its first interface: family "ipv4" or "ipv6"."""
        return str(getattr(self.interfaces[0], family))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is on that host: sockets that it makes, threads and processes it starts."""
        libc = ctypes.CDLL(None, use_errno=True)
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(self.netns, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(there, CLONE_NEWNET) != 0:
                raise HostsError(f"cannot enter host {self.number}")
            try:
                yield
            finally:
                if libc.setns(home, CLONE_NEWNET) != 0:
                    os._exit(70)  # everything after this would happen on the wrong host
        finally:
            os.close(there)
            os.close(home)

    def run(self, *command: str, timeout: float = 30.0) -> str:
        """What a program says that runs there. Raises CalledProcessError, TimeoutExpired."""
        with self.inside():
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=timeout
            )
        return done.stdout

    def sysctl(self, name: str, value: str | None = None) -> str:
        """A setting of that host's network ("net.ipv4.tcp_congestion_control"), set if given."""
        path = Path("/proc/sys") / name.replace(".", "/")
        with self.inside():
            if value is not None:
                path.write_text(value)
            return path.read_text().strip()


@dataclass(frozen=True)
class Outcome:
    """How a rank's process ended, and all that it wrote. `code` is negative for a signal."""

    rank: int
    code: int
    output: str


@dataclass
class Job:
    """The processes of one group of ranks, by rank."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)  # where each is

    def output(self, rank: int) -> str:
        """What a rank has written so far, to standard output and error."""
        return self.logs[rank].read_text(errors="replace")

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send it a signal: SIGSTOP, SIGCONT, SIGKILL."""
        self.processes[rank].send_signal(number)

    def wait(self, timeout: float) -> list[Outcome]:
        """Waits for all to end. Raises HostsError, with what they wrote, if one does not."""
        until = time.monotonic() + timeout
        late = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        if late:
            said = "\n".join(f"rank {rank}:\n{self.output(rank)}" for rank in late)
            raise HostsError(f"after {timeout:g} s rank(s) {late} still run; they wrote:\n{said}")
        return [
            Outcome(rank, process.returncode, self.output(rank))
            for rank, process in enumerate(self.processes)
        ]

    def outputs(self, timeout: float) -> list[str]:
        """What each rank wrote, once all have ended. Raises HostsError if one did not end well."""
        outcomes = self.wait(timeout)
        for outcome in outcomes:
            if outcome.code != 0:
                raise HostsError(
                    f"rank {outcome.rank} ended with {outcome.code}:\n{outcome.output}"
                )
        return [outcome.output for outcome in outcomes]

    def kill(self) -> None:
        """End all processes and those that they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """Hosts and the lines between them. A context manager.

    `veth`: the kernel carries the packets, which costs less but knows no delay and no loss; then a
    host can have several `interfaces`, and `rate_mbit` is that of a host's line and not of a pair.
    So it is with `shared_line`, where the emulator carries them.
    """

    def __init__(
        self,
        count: int = 2,
        *,
        delay_ms: float = 0,
        rate_mbit: float = 0,
        loss: float = 0,
        queue_ms: float = 200,
        mtu: int = 1500,
        veth: bool = False,
        shared_line: bool = False,
        interfaces: int = 1,
        seed: int = 1,
        name: str = "",
    ) -> None:
        if reason := why_not(veth):
            raise HostsError(reason)
        options: dict[str, object] = {
            "hosts": count, "rate-mbit": rate_mbit, "queue-ms": queue_ms, "mtu": mtu, "seed": seed
        }  # fmt: skip
        options |= {"interfaces": interfaces} if veth else {"delay-ms": delay_ms, "loss": loss}
        if name:
            options["name"] = name
        command = [program(), *(["--veth"] if veth else [])]
        command += ["--shared-line"] if shared_line else []
        for key, value in options.items():
            command += [f"--{key}", str(value)]
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._jobs: list[Job] = []
        self._stores: list[Any] = []
        self._emulator = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for this program, which then ends the emulator
        )
        self.all: list[Host] = []
        try:
            for number, host in enumerate(json.loads(self._answer(30.0))["hosts"]):
                found = tuple(Interface(**interface) for interface in host["interfaces"])
                self.all.append(Host(number, host["netns"], found))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        return self.all[number]

    def __len__(self) -> int:
        return len(self.all)

    def close(self) -> None:
        """Kill what was started and take the hosts away."""
        for job in self._jobs:
            job.kill()
        with contextlib.suppress(HostsError):
            # Else it would take this for a crash, and kill what it finds on the hosts.
            self._tell("quit")
        for pipe in (self._emulator.stdin, self._emulator.stdout, self._emulator.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._emulator.wait(10.0)
        except subprocess.TimeoutExpired:
            self._emulator.kill()
            self._emulator.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def command(self, text: str) -> str:
        """Give the emulator a command (benchmarks/net/wan.cc has them); its answer."""
        self._tell(text)
        answer = self._answer(10.0)
        if answer.startswith("error: "):
            raise HostsError(answer.removeprefix("error: "))
        return answer

    def cut(self, host: int, other: int | None = None) -> None:
        """From now on nothing passes between them (or between `host` and anybody), in silence."""
        self.command(f"cut {host}" if other is None else f"cut {host} {other}")

    def heal(self, host: int, other: int | None = None) -> None:
        """Undo `cut`."""
        self.command(f"heal {host}" if other is None else f"heal {host} {other}")

    def link(self, sender: int | str, receiver: int | str, **settings: float) -> None:
        """Set delay_ms, rate_mbit, loss, queue_ms of one direction; "*" is every host."""
        words = " ".join(f"{k.replace('_', '-')}={value}" for k, value in settings.items())
        self.command(f"link {sender} {receiver} {words}")

    def statistics(self) -> dict[str, Any]:
        """What the emulator has carried and what it has not."""
        answer: dict[str, Any] = json.loads(self.command("stats"))
        return answer

    def store(self, host: int = 0, timeout: float = 60.0, family: str = "ipv4") -> Any:
        """A TCPStore that this process serves on a host: it outlives every rank.  Keep it."""
        from torch.distributed import TCPStore

        with self[host].inside():  # the store's thread stays there
            return TCPStore(self[host].at(family), 0, None, True, timedelta(seconds=timeout), False)

    def places(self, per_host: int = 1, family: str = "ipv4") -> Places:
        """For a `World` of the pool: rank r is on host r // per_host, the store on host 0."""
        from ranks import Places

        self._stores.append(self.store(family=family))
        spaces = tuple(host.netns for host in self.all for _ in range(per_host))
        return Places(spaces, self[0].at(family), self._stores[-1].port)

    def start(
        self,
        command: Sequence[str],
        per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        port: int = PORT,
        family: str = "ipv4",
    ) -> Job:
        """Start `per_host` ranks on every host, with the variables that torchrun would set.

        Rank r is on host r // per_host.  Each "{rank}" in the command is replaced.
        """
        world = per_host * len(self)
        job = Job()
        self._jobs.append(job)
        for rank in range(world):
            host = self[rank // per_host]
            variables = {
                "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % per_host,
                "LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": self[0].at(family),
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": host.interfaces[0].name, "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            log = self._folder / f"{len(self._jobs)}.{rank}.log"
            with log.open("wb") as output, host.inside():
                process = subprocess.Popen(
                    [word.replace("{rank}", str(rank)) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **{k: str(v) for k, v in variables.items()}}
                    | dict(environment or {}),
                    start_new_session=True,
                )
            job.processes.append(process)
            job.logs.append(log)
            job.hosts.append(host.number)
        return job

    def _tell(self, text: str) -> None:
        assert self._emulator.stdin is not None
        try:
            self._emulator.stdin.write(text + "\n")
            self._emulator.stdin.flush()
        except OSError as error:
            raise HostsError(self._end()) from error

    def _answer(self, timeout: float) -> str:
        """The emulator's next line. It writes one at a time, so none lies in the buffer."""
        assert self._emulator.stdout is not None
        if not select.select([self._emulator.stdout], [], [], timeout)[0]:
            raise HostsError(f"the emulator said nothing within {timeout:g} s")
        line = self._emulator.stdout.readline()
        if not line:
            raise HostsError(self._end())
        return line.rstrip("\n")

    def _end(self) -> str:
        """How the emulator ended."""
        code = self._emulator.wait(10.0)
        assert self._emulator.stderr is not None
        return f"the emulator ended with {code}: {self._emulator.stderr.read().strip()}"
