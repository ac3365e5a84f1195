"""Where the ranks of an elastic run meet: again and again, without those that were lost.

The groups of a run have numbers, its *generations*.  Their ranks meet on a store that outlives
them, the launcher's.  In it a generation has

    N/arrivals   who wants to be in it: one line of JSON each, in the order in which they came;
    N/members    who is in it, by rank.  Written once, by compare_set, so all agree on it.
    N/ended      a rank has finished the training.

A process enters itself among the arrivals of the next generation: a rank of the running group when
that has failed or is given up, a new process when it starts.  So `commit` sees in the store that
new processes wait.  Each of the arrived looks whether the generation is complete, and the first one
that finds it so writes the members.  Ranks that had the state in the last group come first, in
their order, because rank 0 sends its state to the others.  Who comes too late goes on to the next
generation, and gets its place after those who were in this one.

Complete means: at least `min_ranks`, and all ranks of the last group that may still come.  Of those
on this host it is known whether their processes live.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ringreduce.core import clock
from ringreduce.core.launchers import whole

_log = logging.getLogger("ringreduce.horovod")

_PREFIX = "ringreduce/horovod/elastic"
_LATEST = "latest"  # the key of a generation that has members; later ones may have them too
_POLL_SECONDS = 0.02
# Seconds without a new arrival, after which ranks go on without one of the last group
_SETTLE_SECONDS = 1.0  # that is on another host, whose processes this one cannot see;
_LIVE_SECONDS = 30.0  # that lives: it may compute, and not know yet that the group has failed.
# How long the launcher's store may take to answer.
_STORE_TIMEOUT = timedelta(seconds=60)


def is_elastic(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher started this process for a run whose ranks may change."""
    return environment.get("HOROVOD_ELASTIC") == "1"


@dataclass(frozen=True)
class Limits:
    """How many ranks there may be, and how long to wait for them.

    Attributes:
        start: ranks of the first group: WORLD_SIZE.
        least: HOROVOD_ELASTIC_MIN_NP, or WORLD_SIZE: fewer do not go on.
        most: HOROVOD_ELASTIC_MAX_NP, or None: more are not let in.
        timeout: HOROVOD_ELASTIC_TIMEOUT: seconds to wait for enough ranks; 600.
        start_timeout: HOROVOD_START_TIMEOUT: seconds without a new arrival, after which the first
            group begins with fewer than `start` ranks; 30.
    """

    start: int
    least: int
    most: int | None = None
    timeout: float = 600.0
    start_timeout: float = 30.0

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> "Limits":
        """Raises ValueError that names the variable."""

        def number(name: str, default: int | None) -> int | None:
            value = whole(environment, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
            return default if value is None else value

        start = number("WORLD_SIZE", None)
        if start is None:
            raise ValueError("HOROVOD_ELASTIC=1 needs WORLD_SIZE, which horovodrun sets")
        least = number("HOROVOD_ELASTIC_MIN_NP", start) or start
        most = number("HOROVOD_ELASTIC_MAX_NP", None)
        if least > start or (most is not None and most < start):
            raise ValueError(
                f"WORLD_SIZE={start} must be from HOROVOD_ELASTIC_MIN_NP={least} to "
                f"HOROVOD_ELASTIC_MAX_NP={most}"
            )
        timeout = number("HOROVOD_ELASTIC_TIMEOUT", 600) or 600
        return Limits(start, least, most, timeout, number("HOROVOD_START_TIMEOUT", 30) or 30)


@dataclass(frozen=True)
class Member:
    """A process, as it enters itself.

    Attributes:
        token: of this process alone.
        generation: of the last group in which it had the state; 0 for none.
        rank: in that group; or the launcher's number of it.
        host: where `pid` says something.
        pid, started: the process, and when it began, as pids are used again.
    """

    token: str
    generation: int
    rank: int
    host: str
    pid: int
    started: str

    @staticmethod
    def of_this_process(rank: int) -> "Member":
        pid = os.getpid()
        return Member(uuid.uuid4().hex, 0, rank, _here(), pid, _started(pid))

    def lives(self) -> bool | None:
        """Whether the process has not ended; None if this host does not know it."""
        if not self.host or self.host != _here():
            return None
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        how = {True: "lives", False: "has ended", None: "is on another host"}[self.lives()]
        return f"process {self.pid}, which {how}"


@functools.cache
def _here() -> str:
    """What processes share that see each other's pids; "" if that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the boot; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True)
class Place:
    """This process's place in a generation.

    Attributes:
        is_unchanged: the ranks are those of the generation before.
    """

    generation: int
    rank: int
    size: int
    is_unchanged: bool


class Rendezvous:
    """This process's way through the generations.

    Args:
        store: the launcher's, or a part of it; of this object alone, since it is polled.
        me: this process.
        limits: the same on all ranks.
    """

    def __init__(self, store: Any, me: Member, limits: Limits) -> None:
        self._store, self._me, self._limits = store, me, limits
        self._place = Place(0, 0, 0, False)  # the last

    def next_group(self) -> Place:
        """Waits for a group with this process in it.

        Raises:
            TimeoutError: not enough ranks came; says how many, and which are missing.
            RuntimeError: all ranks that had the state have ended; or the store is lost.
        """
        deadline = clock.now() + self._limits.timeout
        while True:
            generation = self._latest() + 1
            self._store.append(f"{generation}/arrivals", json.dumps(vars(self._me)) + "\n")
            before = self._members(generation - 1)
            members = self._wait(generation, before, deadline)
            tokens = [member.token for member in members]
            if self._me.token in tokens:
                rank = tokens.index(self._me.token)
                unchanged = set(tokens) == {member.token for member in before}
                self._place = Place(generation, rank, len(tokens), unchanged)
                return self._place

    def has_newcomers(self) -> bool:
        """Whether processes wait that can be let in; asked by a rank of the running group."""
        if self._limits.most is not None and self._place.size >= self._limits.most:
            return False
        return bool(_living(self._arrivals(self._place.generation + 1)))

    def note_state(self) -> None:
        """This process has the state of the running group."""
        place = self._place
        self._me = dataclasses.replace(self._me, generation=place.generation, rank=place.rank)

    def note_end(self) -> None:
        """This process has finished the training function."""
        with contextlib.suppress(RuntimeError):  # the launcher may be gone, and the result is here
            self._store.set(f"{self._place.generation}/ended", "1")

    # ---- the store

    def _latest(self) -> int:
        """The last generation that has members, or 0."""
        latest = int(self._store.get(_LATEST)) if self._store.check([_LATEST]) else 0
        while self._store.check([f"{latest + 1}/members"]):
            latest += 1
        return latest

    def _members(self, generation: int) -> list[Member]:
        key = f"{generation}/members"
        if not self._store.check([key]):
            return []
        return [Member(**one) for one in json.loads(self._store.get(key))]

    def _has_ended(self, generation: int) -> bool:
        return bool(self._store.check([f"{generation}/ended"]))

    def _arrivals(self, generation: int) -> list[Member]:
        key = f"{generation}/arrivals"
        if not self._store.check([key]):
            return []
        arrived = [Member(**json.loads(line)) for line in self._store.get(key).splitlines()]
        # One that gave up may have come again.
        return list({member.token: member for member in arrived}.values())

    # ---- waiting

    def _wait(self, generation: int, before: Sequence[Member], deadline: float) -> list[Member]:
        """The members of a generation, as soon as it has some."""
        count, since = 0, clock.now()
        while True:
            if members := self._members(generation):
                return members
            arrived = self._arrivals(generation)
            if len(arrived) > count:
                count, since = len(arrived), clock.now()
            if chosen := self._complete(arrived, before, clock.now() - since):
                text = json.dumps([vars(member) for member in chosen])
                # Another rank may have been first, with another choice.
                self._store.compare_set(f"{generation}/members", "", text)
                self._store.set(_LATEST, str(generation))
                continue
            if (
                self._me.generation == generation - 1
                and self._has_ended(generation - 1)
                and len(_living(arrived)) < self._limits.least
            ):
                raise RuntimeError(
                    "ranks of the last group have finished the training function, and too few are "
                    f"left to go on: {self._why_not(arrived, before)}"
                )
            # A group that runs lets others in when it calls commit, whenever that is.
            is_newcomer = bool(before) and self._me.generation < generation - 1
            runs = is_newcomer and any(m.lives() for m in _missing(arrived, before))
            if clock.now() > deadline and not runs:
                raise TimeoutError(
                    f"waited {self._limits.timeout:g} s (HOROVOD_ELASTIC_TIMEOUT) for ranks: "
                    + self._why_not(arrived, before)
                )
            time.sleep(_POLL_SECONDS)

    def _complete(
        self, arrived: Sequence[Member], before: Sequence[Member], quiet: float
    ) -> list[Member]:
        """The members, if the arrived are enough; else an empty list.

        `quiet`: seconds since the last one came.
        """
        living = _living(arrived)
        missing = _missing(arrived, before)
        tokens = {member.token for member in before}
        # Of the last group some may have come to it without the state, and not have received it.
        latest = max((member.generation for member in before), default=0)
        has_state = any(m.token in tokens and m.generation >= latest for m in living)
        if before and not has_state:
            if missing:
                return []  # that group runs, and lets these in when it calls commit
            raise RuntimeError(
                "the ranks that had the state have all ended, so this process cannot join: "
                + _named(before, before)
            )
        if len(living) < self._limits.least:
            return []
        if not before:
            is_complete = len(living) >= self._limits.start or quiet > self._limits.start_timeout
        elif any(member.lives() for member in missing):
            is_complete = quiet > _LIVE_SECONDS
        else:
            is_complete = not missing or quiet > _SETTLE_SECONDS
        if not is_complete:
            return []
        return sorted(living, key=lambda one: (-one.generation, one.rank))[: self._limits.most]

    def _why_not(self, arrived: Sequence[Member], before: Sequence[Member]) -> str:
        limits = self._limits
        if missing := _missing(arrived, before):
            absent = f"of the last group there are missing: {_named(missing, before)}"
        else:
            absent = "no further process was started"
        return (
            f"{len(_living(arrived))} came, and at least {limits.least} are needed (--min-np), "
            f"{limits.start} at the start; {absent}"
        )


def _living(members: Sequence[Member]) -> list[Member]:
    """Those that are not known to have ended."""
    return [member for member in members if member.lives() is not False]


def _missing(arrived: Sequence[Member], before: Sequence[Member]) -> list[Member]:
    """The ranks of the last group that have not come, and may."""
    tokens = {member.token for member in arrived}
    return [member for member in _living(before) if member.token not in tokens]


def _named(members: Sequence[Member], group: Sequence[Member]) -> str:
    """Members of a group, by their ranks in it."""
    return ", ".join(f"rank {group.index(member)} ({member})" for member in members)


# ---- this process

_rendezvous: Rendezvous | None = None


def _address() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR"), whole(os.environ, "MASTER_PORT")
    if not host or not port:
        raise ValueError(
            "HOROVOD_ELASTIC=1 needs MASTER_ADDR and MASTER_PORT, where the launcher's store is; "
            "horovodrun --min-np N sets them"
        )
    return host, port


def _connect() -> Any:
    host, port = _address()
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)


def here() -> Rendezvous:
    """This process's, which is made when it is first asked for.

    Raises:
        ValueError: variables that the launcher sets are missing or make no sense.
        torch.distributed.DistError: the launcher's store does not answer.
    """
    global _rendezvous
    if _rendezvous is None:
        limits = Limits.read()
        me = Member.of_this_process(whole(os.environ, "RANK") or 0)
        _rendezvous = Rendezvous(PrefixStore(_PREFIX, _connect()), me, limits)
    return _rendezvous


def store_of(place: Place) -> Any:
    """Where the ranks of a generation exchange what they need to make their group."""
    return PrefixStore(f"{_PREFIX}/{place.generation}/group", _connect())
