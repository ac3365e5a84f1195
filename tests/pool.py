"""Rank processes for the tests: started once, used by every test, replaced when they die or hang.

Importing torch costs seconds a process, so one server process imports it once and forks a rank
whenever one is needed (multiprocessing's "forkserver", a server without threads that never makes a
group).  A rank takes *jobs*: a function, named by module and qualified name, called as
``function(rank, *args)``, where ``rank`` is a `Rank` whose process group already exists.  The group
is kept for the next job that wants the same `World`, and is destroyed and made again otherwise.

Every job has a deadline.  What came of it is reported for each rank: `Done`, `Raised`, `Died` or
`Hung`, the last with the stacks of all threads.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import wait_until
from ranks import Died, Done, Hung, Outcome, Raised, Rank, World, describe, serve

from ringreduce.core.processes import end, torchrun_variables

__all__ = [
    "Call",
    "Died",
    "Done",
    "Hung",
    "Outcome",
    "Pool",
    "Raised",
    "Rank",
    "RanksFailed",
    "World",
    "describe",
    "on_ranks",
    "run_ranks",
]


class RanksFailed(AssertionError):
    """Some rank did not return a value; the message has all of them."""


class Worker:
    """One rank process, as the test sees it."""

    def __init__(self, context: Any, log: Path, store_port: int) -> None:
        self.log_path = log
        self.conn, theirs = mp.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(log), store_port))
        self.process.daemon = False  # a rank may have children: DataLoader workers
        self.process.start()
        theirs.close()
        self.key = ""  # of the group that the rank holds

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stacks(self) -> str:
        """What every thread is doing: Python's stacks, and the native ones where gdb is there."""
        before = len(self.log())
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR2)
        wait_until(lambda: "most recent call first" in self.log()[before:], 10.0)
        time.sleep(0.5)  # for the other threads
        text = self.log()[before:]
        if shutil.which("gdb"):
            where = ["gdb", "-p", str(self.pid), "-batch", "-ex", "thread apply all bt 14"]
            try:
                done = subprocess.run(where, capture_output=True, text=True, timeout=30)
                text += "\n" + done.stdout[-6000:]
            except subprocess.TimeoutExpired:
                text += "\n(gdb did not answer)"
        return text

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.process.close()
        self.conn.close()


class Call:
    """A job under way on several ranks."""

    def __init__(self, pool: Pool, workers: list[Worker], fresh: bool) -> None:
        self.pool = pool
        self.workers = workers
        self.fresh = fresh
        self.ended: dict[int, Outcome] = {}
        self.events: list[list[Any]] = [[] for _ in workers]
        self.log_from = [len(w.log()) for w in workers]

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to one rank; returns the time of it, on the ranks' clock."""
        now = time.monotonic()
        self.workers[rank].signal(number)
        return now

    def tell(self, rank: int, what: Any = None) -> None:
        self.workers[rank].conn.send_bytes(pickle.dumps(what))

    def tell_all(self, what: Any = None) -> None:
        for rank in range(len(self.workers)):
            self.tell(rank, what)

    def log(self, rank: int) -> str:
        """What the rank wrote to stdout and stderr since this job began."""
        return self.workers[rank].log()[self.log_from[rank] :]

    def _take(self, timeout: float) -> None:
        waiting: dict[Any, int] = {}
        for rank, worker in enumerate(self.workers):
            if rank not in self.ended:
                waiting[worker.conn] = rank
                waiting[worker.process.sentinel] = rank
        ready = mpc.wait(list(waiting), timeout)
        for source in ready:
            rank = waiting[source]
            conn = self.workers[rank].conn
            if rank in self.ended:
                continue
            try:
                if conn.poll():
                    kind, what = pickle.loads(conn.recv_bytes())
                    if kind == "done":
                        self.ended[rank], self.workers[rank].key = what
                    else:
                        self.events[rank].append(what)
                    continue
            except (EOFError, ConnectionError):
                self.workers[rank].process.join(5)
            self.ended[rank] = Died(rank, self.workers[rank].process.exitcode)

    def heard(self, rank: int, timeout: float = 150.0) -> Any:
        """The next thing that the rank sent with `Rank.tell`."""
        until = time.monotonic() + timeout
        while not self.events[rank]:
            left = until - time.monotonic()
            if left <= 0 or rank in self.ended:
                outcomes = self.outcomes(0.0)
                raise RanksFailed(f"rank {rank} did not report:\n" + self._report(outcomes))
            self._take(left)
        return self.events[rank].pop(0)

    def hear_all(self, what: Any = None) -> None:
        """Hears from every rank, and that it told `what` if that is given."""
        for rank in range(len(self.workers)):
            told = self.heard(rank)
            assert what is None or told == what, f"rank {rank} told {told!r}"

    def await_end(self, ranks: Iterable[int], timeout: float) -> None:
        """Waits until these ranks have ended their part, for `timeout` seconds at the most."""
        awaited, until = set(ranks), time.monotonic() + timeout
        while not awaited <= self.ended.keys() and (left := until - time.monotonic()) > 0:
            self._take(left)

    def outcomes(self, deadline: float = 120.0) -> list[Outcome]:
        """What came of the job on each rank, after `deadline` seconds at the most."""
        self.await_end(range(len(self.workers)), deadline)
        for rank, worker in enumerate(self.workers):
            if rank not in self.ended:
                self.ended[rank] = Hung(rank, worker.stacks())
        self.pool.take_back(self)
        return [self.ended[rank] for rank in range(len(self.workers))]

    def results(self, deadline: float = 120.0) -> list[Any]:
        """The ranks' return values; `RanksFailed` if any rank has none."""
        outcomes = self.outcomes(deadline)
        values = [outcome.value for outcome in outcomes if isinstance(outcome, Done)]
        if len(values) < len(outcomes):
            raise RanksFailed(self._report(outcomes))
        return values

    def _report(self, outcomes: Sequence[Outcome]) -> str:
        lines = []
        for outcome in outcomes:
            lines.append(f"rank {outcome.rank}: {str(outcome)[:2000]}")
            lines.append(getattr(outcome, "trace", getattr(outcome, "stack", "")))
            log = self.log(outcome.rank)
            if log and not isinstance(outcome, Done | Hung):
                lines.append(f"rank {outcome.rank} wrote:\n{log[-3000:]}")
        return "\n".join(lines)


class Pool:
    """The session's rank processes, and the store on which their groups meet."""

    def __init__(self, folder: Path, preload: Sequence[str]) -> None:
        self.folder = folder
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["__main__", "torch.distributed", *preload])
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.server.port
        self.workers: dict[int, Worker] = {}
        self.numbers = itertools.count()

    def name(self, stem: str = "group") -> str:
        """A name that no test has used before, for a store's prefix or a file."""
        return f"{stem}-{next(self.numbers)}"

    def _worker(self) -> Worker:
        return Worker(self.context, self.folder / (self.name("rank") + ".log"), self.port)

    def start(
        self,
        function: Callable[..., Any],
        world: World,
        *args: Any,
        ranks: int = 0,
        fresh: bool = False,
        remade: bool = False,
    ) -> Call:
        """Starts a job on `world.size` ranks, or on `ranks` processes without a group.

        `fresh`: on processes of their own, which are killed after it.  `remade`: in a group that
        has run no operation yet.
        """
        count = ranks or world.size
        self._drop_dead()
        if fresh:
            workers = [self._worker() for _ in range(count)]
        else:
            for rank in range(count):
                if rank not in self.workers:
                    self.workers[rank] = self._worker()
            workers = [self.workers[rank] for rank in range(count)]
        tag = f"{world}"
        keys = {worker.key for worker in workers}
        key = keys.pop() if len(keys) == 1 else ""
        if remade or not world.size or not key.startswith(tag):
            key = f"{tag}/{self.name()}"
        call = Call(self, workers, fresh)
        job = (function.__module__, function.__qualname__, args)
        for rank, worker in enumerate(workers):
            worker.key = key
            worker.conn.send_bytes(pickle.dumps((*job, rank, world, key)))
        return call

    def run(
        self, function: Callable[..., Any], world: World, *args: Any, deadline: float = 120.0
    ) -> list[Any]:
        """Runs a job that must succeed on every rank; returns the ranks' values."""
        return self.start(function, world, *args).results(deadline)

    def take_back(self, call: Call) -> None:
        """Keeps the ranks that are whole for the next job, and replaces the others."""
        for rank, worker in enumerate(call.workers):
            outcome = call.ended[rank]
            if call.fresh or isinstance(outcome, Died | Hung):
                if self.workers.get(rank) is worker:
                    del self.workers[rank]
                call.log_from[rank] = min(call.log_from[rank], len(worker.log()))
                if worker.process._popen is not None:  # type: ignore[attr-defined]
                    worker.kill()

    def _drop_dead(self) -> None:
        """Fails if a rank has died since its last job; the job after this one gets another."""
        for rank, worker in list(self.workers.items()):
            if not worker.process.is_alive():
                code, log = worker.process.exitcode, worker.log()[-3000:]
                del self.workers[rank]
                worker.kill()
                raise RanksFailed(f"rank {rank} died after its last job ({code}):\n{log}")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()


def on_ranks(
    size: int = 0,
    timeout: float = 60.0,
    *,
    backend: str = "",
    deadline: float = 120.0,
    fresh: bool = False,
    remade: bool = False,
    **options: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a job, which must succeed on every rank.

    The job is called with its `Rank` and the arguments of the test.  `size` 0: the test has a
    parameter `size`.  `backend`: another one than the tested one.  The rest is that of the fixture
    `world` and of `Pool.start`.
    """

    def make(job: Callable[..., None]) -> Callable[..., None]:
        _, *parameters = inspect.signature(job).parameters
        given = ["pool", "world", *parameters, *(["size"] if not size else [])]

        def test(pool: Pool, world: Callable[..., World], **arguments: Any) -> None:
            group = world(size or arguments["size"], timeout, **options)
            group = replace(group, backend=backend or group.backend)
            values = [arguments[name] for name in parameters]
            pool.start(job, group, *values, fresh=fresh, remade=remade).results(deadline)

        test.__name__, test.__doc__, test.__module__ = job.__name__, job.__doc__, job.__module__
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in given]
        )
        test.job = job  # type: ignore[attr-defined]
        job.__qualname__ += ".job"  # by which ranks find it
        return test

    return make


def run_ranks(
    script: Path, world_size: int, env: dict[str, str] | None = None, timeout: float = 400.0
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a script as `world_size` whole Python processes, with RANK and the rest set (env://).

    For what the pool's forked ranks cannot show: imports, the interpreter's exit.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world_size):
        # The store lives here, not in rank 0, so that any rank may leave first.
        own = {**torchrun_variables(rank, world_size, server.port), "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, **own, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    until = time.monotonic() + timeout
    done = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        end(processes)
    return done
