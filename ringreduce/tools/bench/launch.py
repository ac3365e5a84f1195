"""The controller's view of the rank processes: sets of ranks that answer questions.

Any rank that fails, ends or does not answer in time raises BenchError with its rank and what
it wrote, and on the way out everything that was started is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringreduce.core.processes import last_lines, uninterrupted
from ringreduce.tools.bench.processes import Place, Process, start_mpirun, start_rank
from ringreduce.tools.bench.settings import (
    BenchError,
    Contender,
    Message,
    Settings,
    Unsupported,
)

GRACE_SECONDS = 1.0  # how long the other ranks may still report after one has failed
DEATH = "its process ended"


class RankSet:
    """The ranks of one contender; `connections` has one for each rank, by rank."""

    def __init__(self, contender: Contender, controller: Controller) -> None:
        self.contender = contender
        self.connections: dict[int, Connection] = {}
        self._controller = controller

    def ask(self, do: str, **arguments: Any) -> list[Message]:
        """Put one question to all ranks; their answers in rank order.

        Raises Unsupported if every rank refuses, BenchError if any fails in another way.
        """
        question = {"do": do, **arguments}
        answers: dict[int, Message] = {}
        failures: dict[int, str] = {}
        for rank, connection in self.connections.items():
            try:
                connection.send(question)
            except OSError:
                failures[rank] = self._controller.obituary(self.contender.key, rank)
        pending: dict[object, int] = {
            connection: rank
            for rank, connection in self.connections.items()
            if rank not in failures
        }
        limit = self._controller.place.timeout
        deadline = time.monotonic() + limit
        while pending:
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            waiting = [self.connections[rank] for rank in pending.values()]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                missing = ", ".join(str(rank) for rank in sorted(pending.values()))
                raise BenchError(
                    f"{self.contender.title}: no answer to {do!r} within {limit:g} s from rank(s) "
                    f"{missing}"
                )
            if not ready:
                break
            for source in ready:
                rank = pending.pop(source)
                try:
                    answers[rank] = self.connections[rank].recv()
                except (EOFError, OSError):
                    failures[rank] = self._controller.obituary(self.contender.key, rank)
                    continue
                if "error" in answers[rank]:
                    failures[rank] = answers[rank]["error"]
        refusals = [a["reason"] for a in answers.values() if a.get("refusal")]
        if len(refusals) == len(self.connections):
            raise Unsupported(refusals[0])
        if failures:
            raise BenchError(describe(self.contender, failures))
        return [answers[rank] for rank in sorted(answers)]


def describe(contender: Contender, failures: dict[int, str]) -> str:
    """What went wrong at which rank; deaths first, since the other ranks fail of them."""
    ordered = sorted(failures.items(), key=lambda item: (not item[1].startswith(DEATH), item[0]))
    return "\n".join(f"{contender.title}: rank {rank} failed:\n{text}" for rank, text in ordered)


class Network(Protocol):
    """Where ranks run: hosts that are namespaces of this machine, say."""

    @property
    def store_host(self) -> str:
        """The address at which ranks reach what listens on rank 0's host."""

    def inside(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """This thread is on the rank's host."""


class ThisMachine:
    """All ranks run where this process does."""

    store_host = "127.0.0.1"

    def inside(self, rank: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Controller:
    """Starts the rank processes of all contenders, and ends them. A context manager.

    `start_ranks` says which ranks this process starts itself (all of them, unless torchrun
    runs a starter for each), `network` where.
    """

    def __init__(
        self, settings: Settings, start_ranks: Sequence[int], network: Network | None = None
    ) -> None:
        folder = tempfile.mkdtemp(prefix="ringreduce-bench-")
        self._processes: list[Process] = []
        self._starters: dict[int, Connection] = {}
        self._start_ranks = start_ranks
        self._listener = socket.socket(socket.AF_UNIX)
        # Only this process serves the store; the rank processes meet there and then leave it.
        self._network: Network = network or ThisMachine()
        host = self._network.store_host
        with self._network.inside(0):
            self._store = TCPStore(host, 0, None, True, timedelta(seconds=settings.timeout), False)
        self.place = Place(folder, self._store.port, settings.world, settings.timeout, host)
        self.sets: dict[str, RankSet] = {}
        self.skipped: dict[str, str] = {}
        try:
            self._listener.bind(self.place.control)
        except OSError as error:
            shutil.rmtree(folder)
            raise BenchError(f"cannot listen in {folder} (set TMPDIR?): {error}") from error
        self._listener.listen(1024)

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with uninterrupted():
            for process in self._processes:
                process.kill()
            for connection in self._starters.values():
                connection.close()  # which tells the starter to kill its own
            self._listener.close()
            shutil.rmtree(self.place.folder, ignore_errors=True)

    def start(self, contenders: Sequence[Contender]) -> None:
        """Start all contenders at once and wait until each of their groups is set up.

        A peer that cannot run here is left out, and `skipped` says why.
        """
        started: list[Contender] = []
        for contender in contenders:
            try:
                if contender.missing:
                    raise Unsupported(contender.missing)
                if contender.kind == "mpi":
                    with uninterrupted():
                        self._processes.append(start_mpirun(contender, self.place))
                else:
                    for rank in self._start_ranks:
                        with uninterrupted(), self._network.inside(rank):
                            self._processes.append(start_rank(contender, rank, self.place))
                started.append(contender)
            except Unsupported as reason:
                self.skipped[contender.key] = str(reason)
        self.sets = {contender.key: RankSet(contender, self) for contender in started}
        self._await_ranks()

    def skip(self, key: str, reason: str) -> None:
        """Leave out a contender from now on, and end its processes."""
        self.skipped[key] = reason
        for connection in self.sets.pop(key).connections.values():
            connection.close()
        for process in self._processes:
            if process.key == key:
                process.kill()

    def close(self) -> None:
        """End all rank processes in the proper way. Raises BenchError if one does not."""
        for ranks in self.sets.values():
            ranks.ask("close")
        for process in self._processes:
            if process.key not in self.sets:
                continue
            try:
                code = process.popen.wait(self.place.timeout)
            except Exception as error:
                raise BenchError(f"{process.key}: rank {process.rank} does not end") from error
            if code != 0:
                text = self.obituary(process.key, process.rank or 0)
                raise BenchError(f"{process.key}: after the benchmark, {text}")
        for connection in self._starters.values():
            connection.send({"exit": 0, "skipped": list(self.skipped)})

    def obituary(self, key: str, rank: int) -> str:
        """How a rank process ended, and the last lines of its output."""
        how = DEATH
        for process in self._processes:
            if process.key == key and process.rank == rank:
                how = f"{DEATH} ({process.how_it_ended()})"
        logs = (self.place.log(key, rank), self.place.log(key, None))
        output = "\n".join(line for log in logs for line in last_lines(log))
        return f"{how}; its output ends with:\n{output}" if output else how

    def _missing(self) -> dict[str, list[int]]:
        everyone = range(self.place.world)
        missing = {
            key: [rank for rank in everyone if rank not in ranks.connections]
            for key, ranks in self.sets.items()
        }
        return {key: ranks for key, ranks in missing.items() if ranks}

    def _await_ranks(self) -> None:
        deadline = time.monotonic() + self.place.timeout
        watched = {os.pidfd_open(p.popen.pid): p for p in self._processes}
        arriving: list[Connection] = []
        try:
            while self._missing():
                sources: list[Any] = [self._listener, *arriving, *self._starters.values(), *watched]
                ready = wait(sources, max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise BenchError(
                        f"after {self.place.timeout:g} s these ranks are not ready: "
                        + "; ".join(f"{key} {ranks}" for key, ranks in self._missing().items())
                    )
                # Messages before deaths: a rank that fails says why and then ends.
                for source in sorted(ready, key=lambda source: isinstance(source, int)):
                    if source is self._listener:
                        arriving.append(Connection(self._listener.accept()[0].detach()))
                    elif isinstance(source, Connection):
                        if source in arriving:
                            arriving.remove(source)
                        self._welcome(source)
                    elif isinstance(source, int):
                        process = watched.pop(source)
                        os.close(source)
                        self._bury(process.key, process.rank)
                    break  # what else is ready may follow from this one: look again
        finally:
            for descriptor in watched:
                os.close(descriptor)

    def _welcome(self, connection: Connection) -> None:
        """Take the first message of a rank or a starter."""
        try:
            message = connection.recv()
        except (EOFError, OSError) as error:
            if connection in self._starters.values():
                raise BenchError("one of torchrun's ranks has gone") from error
            return  # a rank; its end is reported by whoever started it
        if "starter" in message:
            self._starters[message["starter"]] = connection
        elif "dead" in message:
            self._bury(message["dead"], message["rank"])
        elif message["key"] not in self.sets:
            connection.close()
        elif "error" in message:
            ranks = self.sets[message["key"]]
            if ranks.contender.optional:  # never the fault of what is measured
                self.skip(message["key"], message["reason"])
            else:
                raise BenchError(describe(ranks.contender, {message["rank"]: message["error"]}))
        else:
            self.sets[message["key"]].connections[message["rank"]] = connection

    def _bury(self, key: str, rank: int | None) -> None:
        """A process has ended before its ranks were ready."""
        if key not in self.sets:
            return
        ranks = self.sets[key]
        where = rank if rank is not None else 0
        if ranks.contender.kind == "mpi":
            lines = filter(None, map(str.strip, last_lines(self.place.log(key, None))))
            self.skip(key, "mpirun failed: " + next(lines, "without a message"))
        elif ranks.contender.optional:
            self.skip(key, f"rank {where}: {self.obituary(key, where).splitlines()[0]}")
        else:
            raise BenchError(describe(ranks.contender, {where: self.obituary(key, where)}))
