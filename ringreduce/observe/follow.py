"""The one thread that reads the records of this process's groups, for whoever wants them.

A sink is added and gets what happens from then on, group by group, as the records lie in memory.
Before a group is destroyed, and when a sink is removed, the thread's work is done at once, so
nothing that has happened is missing.  A sink that raises an error is dropped, with a line in the
log: nothing here may end or change a training step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch.distributed as dist

from ringreduce.core.backend import Backend, extension, live_groups, own_rank, ranks_of
from ringreduce.errors import Error
from ringreduce.observe.record import LAYOUT, STATE_AT, Record, on_gpus, parse

_log = logging.getLogger("ringreduce")

_POLL_SOON, _MANY = 0.01, 1024  # seconds between two looks, after so many records at once
_PATIENCE = 2.0  # seconds that a program waits, at most, for a sink that hangs in a write
_RUNNING, _QUEUED = 0, 3


@dataclass(eq=False)
class Group:
    """A group of this process, from when it was made until its ranks change.

    Attributes:
        name, description: as torch has them.
        ranks: the global ranks, by their numbers in the group.
        rank: this process's number in it.
        meeting: the same on all its ranks, and of no other group.
        recorder: how records of other groups of this process name it (Why.group).
        backend: ringreduce's.
        group: torch's group.
        gpu: of the GPU operations of a group, which count for themselves, the number of the GPU
            among those that this rank has used in it; else -1.
    """

    name: str
    description: str
    ranks: list[int]
    rank: int
    meeting: str
    recorder: int
    backend: Backend
    group: weakref.ref[dist.ProcessGroup]
    gpu: int = -1
    _next: int = 0
    _next_message: int = 0
    _gpus: list[Group] = field(default_factory=list)

    @property
    def title(self) -> str:
        words = "" if self.description in ("", "undefined", self.name) else f" ({self.description})"
        return f"group '{self.name}'{words}{on_gpus(self.gpu)}"


@dataclass
class News:
    """What has happened in a group: records of operations and messages that are over, and how many
    were overwritten before they were read."""

    group: Group
    operations: bytes
    messages: bytes
    lost: int

    @functools.cached_property
    def records(self) -> list[Record]:
        """Both, in the order of their ends."""
        found = parse(self.operations) + parse(self.messages)
        return sorted(found, key=lambda record: record.done_ns)


class Sink(Protocol):
    """Who wants to know.  All of it is called by one thread at a time."""

    _period: float  # seconds between two looks

    def _wants(self, group: dist.ProcessGroup) -> bool: ...
    def _take_news(self, news: list[News]) -> None: ...  # at each look: of all groups it wants
    def _close(self) -> None: ...  # after the last one


class Follower:
    """Reads the records of all groups of a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sinks: list[Sink] = []
        self._again: Counter[Sink] = Counter()  # how often each was added while it was there
        self._leaving: list[Sink] = []  # that were removed while a look hung
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = (
            weakref.WeakKeyDictionary()
        )
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def add(self, sink: Sink) -> None:
        """Lets a sink have what happens from now on."""
        with self._locked() as mine:
            if not mine:
                return
            if sink in self.sinks:  # once more
                self._again[sink] += 1
                return
            if not self.sinks:
                self._groups.clear()
            self._look()  # what has happened is not for it
            self.sinks.append(sink)
            if self._thread is None:
                self._ends = threading.Event()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._ends,), name="ringreduce-follow", daemon=True
                )
                self._thread.start()

    def remove(self, sink: Sink) -> None:
        """Lets it have the rest."""
        with self._locked() as mine:
            if not mine:
                self._leaving.append(sink)  # the thread drops it once it can
            elif self._again[sink] > 0:
                self._again[sink] -= 1
            elif sink in self.sinks:
                self._look()
                with self._dropping(sink):
                    self._drop(sink)

    def drain(self) -> None:
        """Reads what there is, before a group's records are gone."""
        if not self.sinks:
            return
        with self._locked() as mine:
            if mine:
                self._look()

    def end(self) -> None:
        """Ends all sinks, at the end of the process."""
        for sink in list(self.sinks):
            self.remove(sink)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the thread let go of the lock: a program does not wait for a file that hangs."""
        mine = self.lock.acquire(timeout=_PATIENCE)
        if not mine:
            _log.warning("rank %d goes on unobserved: a write takes too long", own_rank())
        try:
            yield mine
        finally:
            if mine:
                self.lock.release()

    def _serve(self, ends: threading.Event) -> None:
        pause = 0.0
        while not ends.wait(pause):
            with self.lock:
                if ends.is_set():
                    return
                most = self._look()
                while self._leaving:
                    with self._dropping(sink := self._leaving.pop()):
                        self._drop(sink)
                pause = min((sink._period for sink in self.sinks), default=0.0)
            if most >= _MANY:
                pause = min(pause, _POLL_SOON)

    def _look(self) -> int:
        """Tells the sinks what is new; returns how many records a group had, at most."""
        found: list[tuple[dist.ProcessGroup, News]] = []
        most = 0
        for group, backend in live_groups():
            # Destroyed a moment ago, or it has no members yet.
            with contextlib.suppress(Error, LookupError, ValueError, RuntimeError):
                news = self._news_of(group, backend)
                found.append((group, news))
                # Who reads these makes the calls tell when they begin.
                found += [(group, one) for one in self._gpu_news_of(news.group)]
        for _, news in found:
            most = max(most, (len(news.operations) + len(news.messages)) // LAYOUT.size)
        for sink in list(self.sinks):
            with self._dropping(sink):
                sink._take_news([news for group, news in found if sink._wants(group)])
        return most

    def _news_of(self, group: dist.ProcessGroup, backend: Backend) -> News:
        core = extension()
        meeting = core.meeting(backend)
        known = self._groups.get(group)
        if known is None or known.meeting != meeting:  # new, or its ranks have changed
            known = self._groups[group] = Group(
                name=group.group_name,
                description=group.group_desc,
                ranks=ranks_of(group, backend),
                rank=backend.rank(),
                meeting=meeting,
                recorder=core.recorder_id(backend),
                backend=backend,
                group=weakref.ref(group),
            )
        operations = _over(core.records(backend, known._next))
        messages = _over(core.messages(backend, known._next_message))
        lost = _lost(operations, known._next) + _lost(messages, known._next_message)
        known._next += _read_on(operations, known._next)
        known._next_message += _read_on(messages, known._next_message)
        return News(known, operations, messages, lost)

    def _gpu_news_of(self, group: Group) -> Iterator[News]:
        """That of its GPU operations, by GPU."""
        known = group._gpus
        raw = extension().gpu_records(group.backend, [one._next for one in known])
        for number in range(len(known), len(raw)):
            meeting = f"{group.meeting}/gpu{number}"
            known.append(replace(group, meeting=meeting, recorder=0, gpu=number, _next=0, _gpus=[]))
        for one, records in zip(known, map(_over, raw), strict=True):
            lost = _lost(records, one._next)
            one._next += _read_on(records, one._next)
            yield News(one, records, b"", lost)

    @contextlib.contextmanager
    def _dropping(self, sink: Sink) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _log.warning("rank %d is no longer observed by %s: %s", own_rank(), sink, error)
            with contextlib.suppress(Exception):  # it has been told
                self._drop(sink)

    def _drop(self, sink: Sink) -> None:
        """After its last news."""
        if sink in self.sinks:
            self.sinks.remove(sink)
            del self._again[sink]
            try:
                sink._close()
            finally:
                self._end_if_alone()

    def _end_if_alone(self) -> None:
        if not self.sinks:
            self._ends.set()
            self._thread = None


def _index_at(records: bytes, at: int) -> int:
    index: int = LAYOUT.unpack_from(records, at)[0]
    return index


def _lost(records: bytes, expected: int) -> int:
    return max(0, _index_at(records, 0) - expected) if records else 0


def _read_on(records: bytes, expected: int) -> int:
    """How far these records lead on from the one that was expected."""
    return _index_at(records, len(records) - LAYOUT.size) + 1 - expected if records else 0


def _over(records: bytes) -> bytes:
    """Without the last ones, which run or wait for others."""
    end = len(records)
    while end and records[end - LAYOUT.size + STATE_AT] in (_RUNNING, _QUEUED):
        end -= LAYOUT.size
    return records[:end]


_follower = Follower()


def _forget() -> None:
    """A forked child has no thread; what its parent's sinks have is the parent's."""
    global _follower
    _follower = Follower()


os.register_at_fork(after_in_child=_forget)


def add(sink: Sink) -> None:
    """Lets a sink have what happens from now on."""
    _drain_at_destruction()
    _follower.add(sink)


def remove(sink: Sink) -> None:
    """Lets a sink have the rest, and no more."""
    _follower.remove(sink)


def drain() -> None:
    """Reads what there is, before a group's records are gone."""
    _follower.drain()


def end() -> None:
    """Ends all sinks, at the end of the process."""
    _follower.end()


@functools.cache
def _drain_at_destruction() -> None:
    """Destroying a group ends its records, so they are read before."""
    for name in ("shutdown", "abort", "reconfigure"):
        call = getattr(dist.ProcessGroup, name, None)
        if call is not None:
            setattr(dist.ProcessGroup, name, _draining(call))


def _draining(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def draining(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        drain()
        try:
            return call(self, *args, **kwargs)
        finally:
            drain()  # what an abort has ended

    return draining
