"""Names the rank that the others waited for, or the wire, and when, while the job runs.

    with ringreduce.straggler_detection() as sd:
        train()
    print(sd.summary())

Each rank judges by what it sees itself (late.py): when the ranks came whose data it reads, and what
they told it that they had waited elsewhere.  Between hosts it asks for the other arrivals after an
operation that took long.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque

import torch.distributed as dist

from ringreduce.core.backend import extension, ringreduce_group
from ringreduce.observe import follow
from ringreduce.observe.late import (
    Arrival,
    Cause,
    CpuPressure,
    Judge,
    Late,
    Lines,
    Persistent,
    Seen,
    SlowWire,
    Wait,
    of_root,
)
from ringreduce.observe.record import TO_ROOT, Record, Why

_LOG_EVERY = 60.0  # seconds between two lines about a rank
_ANSWERS_IN = 0.3  # seconds that the answers of other ranks are awaited
_STEPS = 20  # between two looks at what takes many steps to show

# What a record, or an answer, tells of a rank: when it came, and why not sooner.
_Came = tuple[float, int, Cause | None]


def _cause(why: Why | None) -> Cause | None:
    """As another rank tells it, whose groups are not known here."""
    return why and Cause(why.rank, why.nanos, f"operation #{why.sequence} of another group")


class _Followed:
    """What the judge needs of a group, and the records that it has not judged yet."""

    def __init__(self, group: follow.Group) -> None:
        self.group = group
        self.rank = group.ranks[group.rank]
        self.live = list(group.ranks)
        ranks_of_hosts, names = extension().topology(group.backend)[:2]
        self.hosts: dict[int, str] = {}
        if len(ranks_of_hosts) > 1:
            for ranks, name in zip(ranks_of_hosts, names, strict=True):
                self.hosts |= {group.ranks[rank]: name for rank in ranks}
        shown = {rank: f"rank {rank} on host {host}" for rank, host in self.hosts.items()}
        # GPUs of several hosts have no line of this process, and their arrivals are not known.
        self.lines = Lines(shown) if self.hosts and group.gpu < 0 else None
        # In their order; the first of them awaits answers of other ranks since then.
        self.waiting: deque[Record] = deque()
        self.asked_at = 0.0

    def look(self) -> None:
        """After losses there are fewer ranks.  Lines have moved more."""
        core, ranks = extension(), self.group.ranks
        self.live = [ranks[rank] for rank in core.live_ranks(self.group.backend)]
        if self.lines:
            uses = core.lines(self.group.backend)
            self.lines.add(time.monotonic_ns(), [(ranks[to], *use) for to, *use in uses])

    def ask(self, record: Record) -> list[_Came]:
        """Asks the ranks once; returns the arrivals that are known by now."""
        first = self.asked_at == 0.0
        if first:
            self.asked_at = time.monotonic()
        answers = extension().arrivals(self.group.backend, record.sequence, first)
        found: list[_Came] = []
        for rank, came, since, micros, sequence in answers:
            why = None if since == -1 else Why(since, micros * 1000, sequence)
            found.append((came, self.group.ranks[rank], _cause(why)))
        return sorted(found, key=lambda one: one[0])

    def seen(self, record: Record, came: list[_Came] | None = None) -> Seen:
        """`came`: what other ranks have answered, ascending."""
        ranks = self.group.ranks
        own = _cause(record.why)
        known, median = record.known, float(record.median_ns)
        late = [
            Arrival(ranks[rank], nanos, _cause(why))
            for (rank, nanos), why in zip(record.late, record.causes, strict=True)
        ]
        if came:
            known, median = len(came), came[(len(came) - 1) // 2][0]
            late = [Arrival(rank, at - median, cause) for at, rank, cause in came[:0:-1]]
        size = 2 if record.is_message else len(self.live)
        error, waits = record.clock_error_ns, []
        root = ranks[record.root] if record.root >= 0 else -1
        if record.state != "done" or known < 2 or (record.kind in TO_ROOT and root != self.rank):
            late = []
        else:
            median, late = of_root(record, root, float(record.arrived_ns), median, late)
            # If this rank was the last one, the others waited for it: without that, all waits that
            # it knows of would be for others.
            mine = late[0].rank == self.rank
            begin = median if mine else float(record.arrived_ns)
            until = min(median + late[0].delay, float(record.done_ns)) - max(0, error)
            if until > begin:
                waits = [Wait(self.rank, begin, until, None if mine else own)]
        kind = "messages" if record.is_message else "operations"
        return Seen(
            (self.group.meeting, kind),
            self.group.title,
            record,
            float(record.arrived_ns),
            float(record.done_ns),
            size,
            known,
            median,
            error,
            late,
            waits,
            self.hosts,
            self.live,
        )


class straggler_detection:
    """Names ranks that come late to collectives and messages, while its body runs.

    Each rank that enters it judges for itself, from what it sees, and adds nothing to an operation.
    On one host a rank sees the arrivals of all ranks whose data it reads: of an all-reduce, all.
    Between hosts it sees those of the ranks that it receives from, and asks for the others' after
    an operation that took long.  A rank that came late since it had waited for another one, in
    another group or for a message, is not named: that other one is.

    Args:
        group: a ringreduce group, or another, beside which one is made if there is none.  None for
            all groups of ringreduce that this process is in, those that are made later too; if the
            default group is another backend's, one is made beside that.
        log: whether to log a rank that is named, within the next step (for the whole run: within
            20), and at most once a minute for each rank.  The lowest other rank logs.

    Raises:
        TypeError: not a group, or one that this rank is not in.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: the group beside it could not be made.
    """

    _period = 0.01

    def __init__(self, group: dist.ProcessGroup | None = None, *, log: bool = True) -> None:
        own = ringreduce_group(group, again=False)
        self._only = None if group is None else own
        self._log = log
        self._pressure = CpuPressure()
        self._judge = Judge(self._pressure)
        self._lock = threading.RLock()  # of the judge; a signal handler may ask too
        _all.add(self)
        self._groups: dict[str, _Followed] = {}  # by their meetings
        self._lost = 0
        self._logged: dict[int, float] = {}
        self._next_look = 0  # the step

    def __enter__(self) -> straggler_detection:
        follow.add(self)
        return self

    def __exit__(self, *exc: object) -> None:
        follow.remove(self)

    @property
    def late(self) -> list[Late]:
        """Ranks that were named for an operation, in order."""
        with self._lock:
            return list(self._judge.late)

    @property
    def wires(self) -> list[SlowWire]:
        """Operations whose data took much longer than usual, in order."""
        with self._lock:
            return list(self._judge.wires)

    @property
    def persistent(self) -> dict[int, Persistent]:
        """Ranks that were the last in most steps, or that the others waited for again and again.

        Returns:
            By rank; empty if there are none, or fewer than 20 steps.
        """
        with self._lock:
            return self._judge.persistent()

    def summary(self) -> str:
        """Who was late, when, and what it cost.

        Returns:
            Plain text of a few lines.  If nobody was late, it says so and why.
        """
        with self._lock:
            first, *rest = self._judge.summary()
        if self._lost:
            rest.insert(0, f"{self._lost} records were overwritten before they were read")
        return "\n".join([first, *rest])

    # ---- as a sink

    def _wants(self, group: dist.ProcessGroup) -> bool:
        return self._only is None or group is self._only

    def _take_news(self, news: list[follow.News]) -> None:
        self._pressure.sample()
        records: list[tuple[_Followed, Record]] = []
        for one in news:
            known = self._groups.get(one.group.meeting)
            if known is None:
                known = self._groups[one.group.meeting] = _Followed(one.group)
            known.look()
            self._lost += one.lost
            known.waiting += one.records
            records += self._judged(known)
        # Those that have been destroyed are let go.
        for meeting in self._groups.keys() - {one.group.meeting for one in news}:
            known = self._groups.pop(meeting)
            records += [(known, record) for record in known.waiting]
        # As they ended, whatever their groups.
        for known, record in sorted(records, key=lambda one: one[1].done_ns):
            self._take(known, known.seen(record))

    def _close(self) -> None:
        for known in self._groups.values():
            for record in known.waiting:
                self._take(known, known.seen(record))
            known.waiting.clear()

    def _judged(self, known: _Followed) -> list[tuple[_Followed, Record]]:
        """Records that need no answers; those behind one that does wait for it."""
        found = []
        while known.waiting:
            record = known.waiting[0]
            if self._misses_arrivals(known, record):
                came = known.ask(record)
                if not came:  # all share memory: the record has all that can be known
                    known.asked_at = -_ANSWERS_IN
                late = time.monotonic() - known.asked_at > _ANSWERS_IN
                if len(came) < len(known.live) and not late:
                    break
                if len(came) > record.known:
                    known.waiting.popleft()
                    known.asked_at = 0.0
                    self._take(known, known.seen(record, came))
                    continue
            known.waiting.popleft()
            known.asked_at = 0.0
            found.append((known, record))
        return found

    def _misses_arrivals(self, known: _Followed, record: Record) -> bool:
        missing = record.known < len(known.live) and record.state == "done"
        missing = missing and known.group.gpu < 0  # the ranks of a host have told already
        if not missing or record.is_message:
            return False
        return self._judge.takes_long((known.group.meeting, "operations"), record)

    def _take(self, known: _Followed, seen: Seen) -> None:
        with self._lock:
            named, wire = self._judge.feed(seen)
            looks = seen.record.step >= self._next_look
            persistent = self._judge.persistent() if self._log and looks else {}
        if looks:
            self._next_look = seen.record.step + _STEPS
        if not self._log:
            return
        if wire and wire.line:  # its sender knows
            self._say(-1, f"the wire was slow: {wire}, in {known.group.title}")
        for late in named:
            self._say_of(known, late.rank, str(late))
        for rank, one in persistent.items():
            self._say_of(known, rank, f"rank {rank} {one}")

    def _say_of(self, known: _Followed, rank: int, text: str) -> None:
        """Logs a sentence on a late rank, if this is the lowest of the others."""
        if known.rank == min({*known.live} - {rank}, default=known.rank):
            self._say(rank, text)

    def _say(self, of: int, text: str) -> None:
        """Logs a sentence of a rank, or of the wire (-1), once a minute at most."""
        if time.monotonic() - self._logged.get(of, -_LOG_EVERY) < _LOG_EVERY:
            return
        self._logged[of] = time.monotonic()
        sys.stderr.write(f"[ringreduce] {text}\n")

    def __str__(self) -> str:
        return "straggler_detection"


_all: weakref.WeakSet[straggler_detection] = weakref.WeakSet()


def _forget() -> None:
    """The parent's thread may have held a lock as this child was forked."""
    for one in _all:
        one._lock = threading.RLock()


os.register_at_fork(after_in_child=_forget)
