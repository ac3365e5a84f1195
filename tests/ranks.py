"""A rank's process: it makes the group that a job wants, runs the job, tells what came of it."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import multiprocessing.connection as mpc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.core.backend import backend_of, extension

PREFIX = "RINGREDUCE_"
CLONE_NEWNET = 0x40000000
# What a whole run of the tests is given: RINGREDUCE_WIRE=tcp has them go over sockets.  As it was
# when the rank began, so that what one job's world sets is not the next one's.
GIVEN = {
    name: os.environ[name]
    for name in ("RINGREDUCE_TEST_FULL", "RINGREDUCE_WIRE")
    if name in os.environ
}


@dataclass(frozen=True)
class Places:
    """Where ranks are if not where the test is: on hosts (hosts.py makes one of these)."""

    netns: tuple[str, ...]  # by rank, as a path
    store_host: str
    store_port: int


@dataclass(frozen=True)
class World:
    """The group a job runs in.  `size` 0: no group, the job makes its own.

    With `places` a job should have processes of its own (`Pool.start`'s `fresh`): others would take
    their group along when the hosts are gone.
    """

    size: int
    backend: str
    env: tuple[tuple[str, str], ...] = ()
    timeout: float = 60.0
    places: Places | None = None


@functools.cache
def _client(host: str, port: int, _pid: int) -> dist.TCPStore:
    """A process's one connection to a store.

    For every new one torch looks up the name behind its address, which takes seconds when the
    answer is lost.
    """
    return dist.TCPStore(host, port, is_master=False)


@dataclass
class Rank:
    """What a job gets: who it is, and a line to the test."""

    rank: int
    world_size: int
    backend: str
    store_port: int
    conn: mpc.Connection
    store_host: str = "127.0.0.1"

    def tell(self, what: Any) -> None:
        """Sends `what` to the test, which takes it with `Call.heard`."""
        self.conn.send_bytes(pickle.dumps(("event", what)))

    def hear(self, timeout: float = 150.0) -> Any:
        """Waits for what the test sends with `Call.tell`."""
        if not self.conn.poll(timeout):
            raise TimeoutError("the test sent nothing")
        return pickle.loads(self.conn.recv_bytes())

    def store(self, prefix: str) -> dist.Store:
        """A part of the session's store that nobody else uses if `prefix` is a new name."""
        return dist.PrefixStore(prefix, _client(self.store_host, self.store_port, os.getpid()))

    def init(self, prefix: str, rank: int = -1, size: int = -1, timeout: float = 60.0) -> None:
        """Makes a default group of the tested backend on a part of the session's store."""
        dist.init_process_group(
            self.backend,
            store=self.store(prefix),
            rank=self.rank if rank < 0 else rank,
            world_size=self.world_size if size < 0 else size,
            timeout=timedelta(seconds=timeout),
        )


def pids_of_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """The processes of a group's ranks.  Collective."""
    pids = [0] * dist.get_world_size(group)
    dist.all_gather_object(pids, os.getpid(), group=group)
    return pids


def same_on_all(value: Any) -> None:
    """Asserts that all ranks of the default group have this value.  Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(other == value for other in found), found


@dataclass
class Done:
    rank: int
    value: Any


@dataclass
class Raised:
    rank: int
    kinds: tuple[str, ...]  # the class and its bases, most derived first: "ringreduce.PeerLost"
    message: str
    when: float  # time.monotonic() at which the job ended; one clock for all processes
    trace: str = field(repr=False)
    culprit: int | None = None  # `ringreduce.Error.rank`
    group: str = ""  # `ringreduce.Error.group`; "" while a group is made

    def isa(self, name: str) -> bool:
        """Whether the exception's class, or a base of it, has this (unqualified) name."""
        return any(kind.rsplit(".", 1)[-1] == name for kind in self.kinds)


@dataclass
class Died:
    rank: int
    exitcode: int | None


@dataclass
class Hung:
    rank: int
    stack: str = field(repr=False)


Outcome = Done | Raised | Died | Hung


def _resolve(module: str, qualname: str) -> Callable[..., Any]:
    target: Any = importlib.import_module(module)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # An init_process_group that failed has counted a group, and the next one's name would differ
    # from what other ranks call it.
    dist.distributed_c10d._world.group_count = 0
    gc.collect()  # a job's closures may hold a group in a cycle


def _enter_group(me: Rank, world: World, key: str) -> None:
    for name in [k for k in os.environ if k.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(GIVEN)
    os.environ.update(world.env)
    if world.size:
        # The timeout is for calls.  On a busy machine ranks may take longer to make the group.
        me.init(key, timeout=max(60.0, world.timeout))
        if world.timeout < 60.0 and dist.group.WORLD is not None and me.backend != "gloo":
            dist.group.WORLD.set_timeout(timedelta(seconds=world.timeout))


def _is_usable() -> bool:
    """Whether the job's group can take another job, which may have destroyed it or made it fail."""
    if not dist.is_initialized():
        return False
    group = dist.group.WORLD
    backend = backend_of(group) if group is not None else None
    return backend is None or not extension().has_failed(backend)


def _enter_place(me: Rank, places: Places | None, home: int) -> None:
    """Moves this thread, and those that it starts from now on, to the rank's host, or home."""
    there = os.open(places.netns[me.rank], os.O_RDONLY | os.O_CLOEXEC) if places else home
    if ctypes.CDLL(None, use_errno=True).setns(there, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    if places:
        os.close(there)
        me.store_host, me.store_port = places.store_host, places.store_port


def exception_of(work: dist.Work) -> Exception | None:
    """`work.exception()` of a work that has ended.  torch 2.11 cannot hand it to Python."""
    try:
        return work.exception()
    except TypeError:
        if work.is_success():
            return None
    try:
        work.wait()
    except Exception as error:
        return error
    raise AssertionError("a work that has failed raises no error")


def describe(rank: int, error: BaseException) -> Raised:
    """The exception as something that another process, without its class, can look at."""
    kinds = tuple(f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__)
    facts = getattr(error, "rank", None), getattr(error, "group", "")
    return Raised(rank, kinds, str(error), time.monotonic(), traceback.format_exc(), *facts)


def serve(conn: mpc.Connection, log: str, store_port: int) -> None:
    """A rank's life: jobs, one after the other, until the test session closes the line."""
    # The server that forked us ends with the session, however that ends; then so do we.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setsid()  # Ctrl-C in the terminal is for pytest, which then stops us
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    faulthandler.enable(file=2)  # type: ignore[arg-type]
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    # A job's cycles are looked for between jobs, and not each time among all that torch has made.
    gc.freeze()

    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    away = False
    held = ""
    while True:
        try:
            module, qualname, args, number, world, key = pickle.loads(conn.recv_bytes())
        except EOFError:
            return
        me = Rank(number, world.size, world.backend, store_port, conn)
        answer: Done | Raised
        try:
            if held != key:
                held = ""
                _leave_group()
                if away or world.places:
                    _enter_place(me, world.places, home)
                    away = world.places is not None
                _enter_group(me, world, key)
                held = key
            elif world.places:
                me.store_host, me.store_port = world.places.store_host, world.places.store_port
            answer = Done(number, _resolve(module, qualname)(me, *args))
        except BaseException as error:  # KeyboardInterrupt is a result too
            answer = describe(number, error)
            held = ""
        if world.size and not _is_usable():
            held = ""
        conn.send_bytes(pickle.dumps(("done", (answer, held))))
