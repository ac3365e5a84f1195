"""A timeline of what all ranks did in their groups, and who was late.

    RINGREDUCE_TIMELINE=traces torchrun ... train.py    # all of a program
    with ringreduce.timeline("traces"):                 # a part of it
        ...

    python -m ringreduce.timeline late traces           # who was late, where, and who waited for it
    python -m ringreduce.timeline summary traces        # a table of ranks and groups
    python -m ringreduce.timeline merge traces          # traces/trace.json, for Perfetto and Chrome

The first half of this module writes: a thread of each process appends the records of its groups
(record.py) to a file of its rank.  The second half reads the files of all ranks.  Each has the
arrivals of its own rank, which are exact; matched by group and index, they say who was late.

A file holds a JSON object a line.  "part" tells one recording from another in the same file: its
first line is a header, later ones have the name and ranks of a group, or some of its records with
the clock at that time.  Records are written as they lie in memory, in base64: to format them would
hold the interpreter's lock ten times as long.
"""

from __future__ import annotations

import argparse
import binascii
import bisect
import contextlib
import functools
import gzip
import itertools
import json
import logging
import os
import socket
import statistics
import struct
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringreduce._backend import Backend, extension, job_name, live_groups, own_rank, ranks_of
from ringreduce._words import ranks_text
from ringreduce.errors import Error
from ringreduce.observe.record import FROM_ROOT, TO_ROOT, Record, parse
from ringreduce.observe.record import LAYOUT as _LAYOUT
from ringreduce.observe.record import names as _names

__all__ = ["timeline"]

_log = logging.getLogger("ringreduce")

# ---- writing

_VARIABLE = "RINGREDUCE_TIMELINE"
# Seconds between two looks at the records, of which a group keeps 4,096; sooner after many at once.
_POLL, _POLL_SOON, _MANY = 0.05, 0.01, 1024
_PATIENCE = 2.0  # seconds that a program waits, at most, for a file that does not take its lines
_INDEX = struct.Struct("<Q")  # at the start of a record
_STATE_AT, _RUNNING = _LAYOUT.size - 2, 0


@dataclass
class _Followed:
    """A group of this process, as far as its records are written."""

    number: int  # in the file
    last: bytes = b""  # the last record that was done and is written, or is not to be
    told: bool = False  # the file has its name and ranks


class timeline:
    """Writes what happens on this rank to a file in a directory, from entry to exit.

        with ringreduce.timeline("traces"):
            train()

    Use it on all ranks, with a directory that they share, or whose files are brought together
    afterwards; `python -m ringreduce.timeline` reads them.  The file is named after the job and the
    rank.  Another recording of that rank is appended.  If the file cannot be written, the log says
    so once, and the program goes on.

    Args:
        directory: made if there is none.
        group: only this group (or the one of ringreduce beside it); None for all of the process,
            those that are made later too.
    """

    def __init__(
        self, directory: str | os.PathLike[str], group: dist.ProcessGroup | None = None
    ) -> None:
        self.directory = Path(directory)
        self.lost = 0  # records that were overwritten before they could be written
        self.path: Path | None = None  # of the file, once there is one
        name = None if group is None else group.group_name
        self._wanted = {name, f"{name}/ringreduce"} if name else None
        self._part = uuid.uuid4().hex[:8]
        self._descriptor = -1
        self._failed = False
        self._numbers = 0
        self._followed: weakref.WeakKeyDictionary[dist.ProcessGroup, _Followed] = (
            weakref.WeakKeyDictionary()
        )

    def __enter__(self) -> timeline:
        _writer.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _writer.remove(self)

    # The next three are called by one thread at a time, and raise nothing.

    def _begin(self) -> None:
        """Leaves out what has happened in the groups that there are."""
        with self._ending_at_errors():
            for group, backend in self._groups():
                known = self._follow(group)
                with contextlib.suppress(Error):  # it has no members yet
                    known.last = _done(extension().records(backend, 0))[-_LAYOUT.size :]

    def _poll(self) -> int:
        """Writes what is new; returns how many records of a group, at most."""
        most = 0
        with self._ending_at_errors():
            for group, backend in [] if self._failed else self._groups():
                with contextlib.suppress(Error):  # it was destroyed a moment ago, or as above
                    most = max(most, self._write_new(group, backend))
        return most

    def _end(self) -> None:
        self._poll()
        with self._ending_at_errors():
            if self._descriptor >= 0:
                self._write({"end": time.monotonic_ns(), "lost": self.lost})
        self._close()

    @contextlib.contextmanager
    def _ending_at_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # nothing here is worth an end of the program
            self._failed = True
            self._close()
            _log.warning(
                "rank %d writes no more of its timeline to %s: %s",
                own_rank(),
                self.directory,
                error,
            )

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _groups(self) -> Iterator[tuple[dist.ProcessGroup, Backend]]:
        for group, backend in live_groups():
            if not self._wanted or group.group_name in self._wanted:
                yield group, backend

    def _follow(self, group: dist.ProcessGroup) -> _Followed:
        known = self._followed.get(group)
        if known is None:
            known = self._followed[group] = _Followed(self._numbers)
            self._numbers += 1
        return known

    def _write_new(self, group: dist.ProcessGroup, backend: Backend) -> int:
        known, size, lost = self._follow(group), _LAYOUT.size, 0
        # From the last known record on: if that is another one now, or gone, the group's ranks have
        # changed (elastic, reconfigure), and its records begin anew.
        data = extension().records(backend, _INDEX.unpack_from(known.last)[0] if known.last else 0)
        if known.last and data[:size] == known.last:
            data = data[size:]
        elif data and known.last and _INDEX.unpack_from(data) > _INDEX.unpack_from(known.last):
            lost = _INDEX.unpack_from(data)[0] - _INDEX.unpack_from(known.last)[0] - 1
        else:
            if known.last:
                del self._followed[group]
                known = self._follow(group)
                data = extension().records(backend, 0)
            lost = _INDEX.unpack_from(data)[0] if data else 0
        data = _done(data)
        if not data:
            return 0
        known.last = data[-size:]
        if not known.told:
            known.told = True
            self._write({"group": known.number, **_description(group, backend)})
        self.lost += lost
        ahead, error = extension().clock_offset(backend)
        line = {"group": known.number, "clock": [time.monotonic_ns(), ahead, error]}
        if lost:
            line["lost"] = lost
        self._write(line, data)
        return len(data) // size

    def _write(self, line: dict[str, Any], records: bytes = b"") -> None:
        if self._descriptor < 0:
            self._open()
        text = json.dumps({"part": self._part, **line}, separators=(",", ":"))
        if records:  # base64 needs no escapes, and json would look for them for long
            text = (
                f'{text[:-1]},"records":"{binascii.b2a_base64(records, newline=False).decode()}"}}'
            )
        rest = memoryview(f"{text}\n".encode())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _open(self) -> None:
        header = _header()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / f"{header['job']}-rank{header['rank']}.jsonl"
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, how, 0o644)
        if os.fstat(self._descriptor).st_size:  # another recording may have ended amid a line
            os.write(self._descriptor, b"\n")
        self._write(header)


def _done(records: bytes) -> bytes:
    """Without the last one, if it still runs."""
    runs = records and records[_STATE_AT - _LAYOUT.size] == _RUNNING
    return records[: -_LAYOUT.size] if runs else records


def _header() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        "rank": rank,
        "world_size": size,
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "job": job_name(),
        "wall_ns": time.time_ns() - time.monotonic_ns(),
        "layout": _LAYOUT.format,
        "names": _names(),
    }


def _boot() -> str:
    """What processes with the same CLOCK_MONOTONIC share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _description(group: dist.ProcessGroup, backend: Backend) -> dict[str, Any]:
    ranks = ranks_of(group, backend)
    return {"name": group.group_name, "ranks": ranks, "own": backend.rank()}


class _Writer:
    """The thread that serves the timelines of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.timelines: list[timeline] = []
        self.thread: threading.Thread | None = None
        self.ends = threading.Event()
        self.by_variable: timeline | None = None

    def add(self, added: timeline) -> None:
        _drain_at_destruction()
        with self._locked() as mine:
            if not mine:
                return
            added._begin()
            self.timelines.append(added)
            if self.thread is None:
                self.ends = threading.Event()
                self.thread = threading.Thread(
                    target=self._serve, args=(self.ends,), name="ringreduce-time", daemon=True
                )
                self.thread.start()

    def remove(self, removed: timeline) -> None:
        """Writes the rest of it."""
        with self._locked() as mine:
            if not mine or removed not in self.timelines:
                return
            removed._end()
            self.timelines.remove(removed)
            if not self.timelines:
                self.ends.set()
                self.thread = None

    def drain(self) -> None:
        """Writes what there is, before a group's records are gone."""
        with self._locked() as mine:
            for one in self.timelines if mine else []:
                one._poll()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the thread let go of the lock: a program does not wait for a file that hangs."""
        mine = self.lock.acquire(timeout=_PATIENCE)
        if not mine:
            _log.warning("rank %d does without its timeline: a write takes too long", own_rank())
        try:
            yield mine
        finally:
            if mine:
                self.lock.release()

    def _serve(self, ends: threading.Event) -> None:
        pause = _POLL
        while not ends.wait(pause):
            with self.lock:
                if ends.is_set():
                    return
                most = max([one._poll() for one in self.timelines], default=0)
            pause = _POLL_SOON if most >= _MANY else _POLL


_writer = _Writer()


def _forget() -> None:
    """A forked child has no thread; the files are its parent's."""
    global _writer
    _writer = _Writer()


os.register_at_fork(after_in_child=_forget)


def follow_variable() -> None:
    """Begins what RINGREDUCE_TIMELINE asks for, or ends it, when a group is made."""
    directory = os.environ.get(_VARIABLE) or None
    running = _writer.by_variable
    if (running and str(running.directory)) == (directory and str(Path(directory))):
        return
    if running is not None:
        running.__exit__()
    _writer.by_variable = timeline(directory).__enter__() if directory else None


def drain() -> None:
    """Writes the records that there are, before a group leaves its ranks for others."""
    _writer.drain()


def end_all() -> None:
    """Writes the rest of all timelines, at the end of the process."""
    for one in list(_writer.timelines):
        _writer.remove(one)


@functools.cache
def _drain_at_destruction() -> None:
    """Destroying a group ends its records, so they are written before."""
    for name in ("shutdown", "abort", "reconfigure"):
        call = getattr(dist.ProcessGroup, name, None)
        if call is not None:
            setattr(dist.ProcessGroup, name, _draining(call))


def _draining(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def draining(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        _writer.drain()
        try:
            return call(self, *args, **kwargs)
        finally:
            _writer.drain()  # what an abort has ended

    return draining


# ---- reading

_LEAST_LATE_NS = 1_000_000  # a smaller delay is not reported
_LEAST_WAIT_NS = 20_000  # shorter waits are not drawn


@dataclass
class _Clock:
    """How far the clock of a process was ahead of a group's, over time."""

    times: list[int] = field(default_factory=list)
    ahead: list[tuple[int, int]] = field(default_factory=list)  # and the bound of its error

    def add(self, at: int, ahead: int, error: int) -> None:
        if error >= 0:
            self.times.append(at)
            self.ahead.append((ahead, error))

    def at(self, when: int) -> tuple[int, int] | None:
        """The sample that was taken next after it, else the last; None if there are none."""
        if not self.times:
            return None
        return self.ahead[min(bisect.bisect_left(self.times, when), len(self.times) - 1)]


@dataclass
class _Series:
    """The records of a group in one recording."""

    recording: _Recording
    name: str
    ranks: tuple[int, ...]  # of the group, as the default group numbers them
    rank: int  # this one, in the default group; that of the file may be an earlier one
    records: list[Record] = field(default_factory=list)
    clock: _Clock = field(default_factory=_Clock)

    def wall(self, when: int) -> int:
        return when + int(self.recording.header["wall_ns"])

    @functools.cached_property
    def span(self) -> tuple[int, int]:
        """From its first call to its last end, by the wall clock."""
        return self.wall(self.records[0].posted_ns), self.wall(self.records[-1].done_ns)


@dataclass
class _Recording:
    """What one process wrote, from a header on."""

    header: dict[str, Any]
    series: dict[int, _Series] = field(default_factory=dict)
    lost: int = 0

    @property
    def rank(self) -> int:
        return int(self.header["rank"])


@dataclass
class _Operation:
    """An operation with the records of its ranks."""

    group: _Group
    records: dict[int, Record] = field(default_factory=dict)  # by rank of the default group

    @property
    def any_record(self) -> Record:
        return next(iter(self.records.values()))

    @functools.cached_property
    def arrivals(self) -> dict[int, int]:
        """By rank, on the group's clock.  Of ranks without a file, what the others know."""
        found: dict[int, int] = {}
        for rank, record in self.records.items():
            clock = self.group.clock(rank, record.arrived_ns)
            if clock is None:
                continue
            found[rank] = record.arrived_ns - clock[0]
            for number, nanos in record.late if record.clock_error_ns >= 0 else ():
                other = self.group.ranks[number]
                if other not in self.records:
                    found[other] = round(record.median_ns + nanos) - clock[0]
        return found

    @functools.cached_property
    def awaited(self) -> list[int]:
        """The ranks that others wait for, in the order in which they came."""
        record = self.any_record
        order = sorted(self.arrivals, key=self.arrivals.__getitem__)
        if record.kind not in FROM_ROOT:
            return order
        return [rank for rank in order if rank == self.group.ranks[record.root]]

    def _waits(self, rank: int) -> bool:
        record = self.any_record
        root = self.group.ranks[record.root] if record.root >= 0 else -1
        if record.kind in TO_ROOT:
            return rank == root
        return record.kind not in FROM_ROOT or rank != root

    @functools.cached_property
    def median(self) -> int:
        return statistics.median_low(self.arrivals.values())

    @functools.cached_property
    def clock_error(self) -> int:
        known = [self.group.clock(rank, r.arrived_ns) for rank, r in self.records.items()]
        return max((clock[1] for clock in known if clock), default=0)

    def wait(self, rank: int) -> int:
        """Nanoseconds that a rank waited for the last one."""
        if rank not in self.arrivals or not self.awaited or not self._waits(rank):
            return 0
        came = self.arrivals[rank]
        waited = self.arrivals[self.awaited[-1]] - came
        record = self.records.get(rank)
        if record:
            waited = min(waited, record.done_ns - record.arrived_ns)
        return max(0, waited)

    def shares(self) -> dict[int, float]:
        """By rank, how long the others waited for it, in sum.

        While several are missing, each has the same share of the wait.
        """
        shares: dict[int, float] = {}
        missing, waiting, before, share = len(self.awaited), 0, 0, 0.0
        awaited = set(self.awaited)
        for came, rank in sorted((came, rank) for rank, came in self.arrivals.items()):
            if missing:
                share += (came - before) * waiting / missing
            if rank in awaited:
                shares[rank] = share
                missing -= 1
            waiting += self._waits(rank)
            before = came
        return shares


@dataclass
class _Group:
    """A group with the series of its ranks."""

    name: str
    ranks: tuple[int, ...]
    series: dict[int, _Series] = field(default_factory=dict)  # by rank of the default group

    def __str__(self) -> str:
        return f"group '{self.name}'"

    def clock(self, rank: int, when: int) -> tuple[int, int] | None:
        """How far a rank's clock was ahead of the group's, and the error; None: not known."""
        known = self.series[rank].clock.at(when)
        return (0, 0) if known is None and self._shares_clock else known

    @functools.cached_property
    def _shares_clock(self) -> bool:
        return len({series.recording.header["boot"] for series in self.series.values()}) == 1

    @functools.cached_property
    def operations(self) -> list[_Operation]:
        found: dict[int, _Operation] = {}
        for rank, series in self.series.items():
            for record in series.records:
                operation = found.setdefault(record.index, _Operation(self))
                operation.records[rank] = record
        return [found[index] for index in sorted(found)]

    @functools.cached_property
    def step_ns(self) -> int:
        """The median time between the first operations of a training step and of the next."""
        times = []
        for series in self.series.values():
            first: dict[int, int] = {}
            for record in series.records:
                first.setdefault(record.step, record.arrived_ns)
            times += [
                first[after] - first[before]
                for before, after in itertools.pairwise(sorted(first))
                if after == before + 1
            ]
        return statistics.median_low(times) if times else 0

    @functools.cached_property
    def limit_ns(self) -> int:
        """A rank that comes later after the median than this is late, if the clocks can tell.

        Three median deviations above the distance from the median that is usual here, 2 % of a
        training step, and 1 ms at least.
        """
        away = [abs(c - o.median) for o in self.operations for c in o.arrivals.values()]
        usual = statistics.median_low(away) if away else 0
        deviation = statistics.median_low([abs(a - usual) for a in away]) if away else 0
        return max(_LEAST_LATE_NS, usual + 3 * deviation, self.step_ns // 50)


@dataclass
class _Files:
    """All that a directory holds."""

    recordings: list[_Recording]
    groups: list[_Group]
    torn: int  # lines that could not be read

    def notes(self) -> list[str]:
        """What is not there."""
        notes = []
        if self.torn:
            notes.append(f"{self.torn} lines are incomplete, as of a full disk or a killed process")
        for one in self.recordings:
            if one.lost:
                notes.append(f"rank {one.rank} lost {one.lost} records: it ran too many at once")
        for group in self.groups:
            missing = sorted(set(group.ranks) - set(group.series))
            if missing:
                notes.append(f"{group}: no file of {ranks_text(missing)}")
            if any(not group.clock(rank, 0) for rank in group.series):
                notes.append(f"{group}: the hosts' clocks were not known: nobody is called late")
        return notes


def _load(directory: Path) -> _Files:
    """Reads the files of all ranks.

    Raises:
        ValueError: there are none, or they are of another version.
    """
    parts: dict[str, _Recording] = {}
    torn = 0
    for path in sorted(directory.glob("*.jsonl")):
        with path.open(errors="replace") as lines:
            for text in filter(str.strip, lines):
                try:
                    line = json.loads(text)
                    part = line["part"]
                    if "layout" in line:
                        _check_version(line, path)
                        parts[part] = _Recording(line)
                    else:
                        _add_line(parts[part], line)
                except (json.JSONDecodeError, LookupError, TypeError, binascii.Error, struct.error):
                    torn += 1
    if not parts:
        raise ValueError(f"{directory} holds no timeline: there is no file JOB-rankN.jsonl in it")
    recordings = sorted(parts.values(), key=lambda one: one.rank)
    return _Files(recordings, _groups_of(recordings), torn)


def _check_version(header: dict[str, Any], path: Path) -> None:
    if header["layout"] != _LAYOUT.format or header["names"] != _names():
        raise ValueError(f"{path} is of another version of ringreduce: read it with that one")


def _add_line(recording: _Recording, line: dict[str, Any]) -> None:
    if "ranks" in line:
        ranks = tuple(line["ranks"])
        rank = ranks[line["own"]]
        recording.series[line["group"]] = _Series(recording, line["name"], ranks, rank)
    elif "records" in line:
        series = recording.series[line["group"]]
        data = binascii.a2b_base64(line["records"])
        # One without an arrival was refused before it began.
        series.records += [r for r in parse(data) if r.arrived_ns]
        series.clock.add(*line["clock"])
        recording.lost += line.get("lost", 0)


def _groups_of(recordings: Iterable[_Recording]) -> list[_Group]:
    """Brings the ranks of a group together.

    A name and its ranks may come again: after a restart, in another run.  Then a rank comes again,
    or all of the earlier ones have ended.
    """
    series = [s for one in recordings for s in one.series.values() if s.records]
    series.sort(key=lambda s: s.span[0])
    groups: list[_Group] = []
    latest: dict[tuple[str, tuple[int, ...]], _Group] = {}
    for one in series:
        group = latest.get((one.name, one.ranks))
        over = group and max(s.span[1] for s in group.series.values()) < one.span[0]
        if group is None or over or one.rank in group.series:
            group = latest[one.name, one.ranks] = _Group(one.name, one.ranks)
            groups.append(group)
        group.series[one.rank] = one
    return groups


# ---- in words


def _size_text(size: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024  # type: ignore[assignment]
    raise AssertionError


def _ms(nanos: float) -> str:
    return f"{nanos / 1e6:.1f} ms"


_COLUMNS = ("rank", "operations", "bytes", "in operations", "waiting", "moving data", "queued")
_EXPLANATION = """\
waiting: until the last rank that it needs had come.  moving data: the rest of its operations.
queued: between a call that does not block and the beginning of its operation.  Whether the program
computed meanwhile, or waited, is not recorded: it is an upper bound of what is hidden there."""


def summary_text(files: _Files) -> str:
    """A table for each group."""
    lines: list[str] = []
    for group in files.groups:
        rows = [_COLUMNS]
        for rank, series in sorted(group.series.items()):
            inside = sum(record.done_ns - record.arrived_ns for record in series.records)
            waiting = sum(o.wait(rank) for o in group.operations if rank in o.records)
            queued = sum(record.arrived_ns - record.posted_ns for record in series.records)
            size = _size_text(sum(record.bytes for record in series.records))
            times = map(_ms, (inside, waiting, inside - waiting, queued))
            rows.append((str(rank), str(len(series.records)), size, *times))  # type: ignore[arg-type]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(f"{group}, {len(group.ranks)} ranks")
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  " + "  ".join(cells))
        lines.append("")
    return "\n".join([*lines, _EXPLANATION, *files.notes()])


@dataclass
class _Late:
    """A rank that was late in an operation."""

    operation: _Operation
    rank: int
    nanos: int  # after the median
    share: float  # of the others' wait, in nanoseconds
    wait: float  # of all of them, for whomever

    def __str__(self) -> str:
        operation, group = self.operation, self.operation.group
        record = operation.records.get(self.rank, operation.any_record)
        where = (
            f"step {record.step}, bucket {record.bucket}"
            if _has_bucket(record)
            else (f"step {record.step}")
        )
        return (
            f"rank {self.rank} came {_ms(self.nanos)} after the median in {where}: "
            f"{record.kind} #{record.sequence} ({_size_text(record.bytes)}) of {group}. "
            f"{self._why(record)} The others waited {_ms(self.share)} for it in sum, "
            f"{100 * self.share / self.wait:.0f} % of their wait there."
        )

    def _why(self, record: Record) -> str:
        if self.rank not in self.operation.records:
            return "It has no file, so why is not known."
        if record.arrived_ns - record.posted_ns < self.nanos / 2:
            return "Its program called late."
        return (
            "Its program had called before: an operation before it, or a processor, was not free."
        )


def _has_bucket(record: Record) -> bool:
    return record.kind.endswith("all_reduce")


def _late(files: _Files) -> tuple[list[_Late], dict[int, float]]:
    """Who was late, worst first; and by rank, how long the others waited for it in all."""
    found, totals = [], dict[int, float]()
    for group in files.groups:
        for operation in group.operations:
            if len(operation.arrivals) < 2:
                continue
            shares = operation.shares()
            wait = sum(shares.values())
            for rank, share in shares.items():
                totals[rank] = totals.get(rank, 0) + share
                nanos = operation.arrivals[rank] - operation.median
                if nanos > max(group.limit_ns, 2 * operation.clock_error) and share > 0:
                    found.append(_Late(operation, rank, nanos, share, wait))
    found.sort(key=lambda late: -late.share)
    return found, totals


def late_text(files: _Files, most: int = 10) -> str:
    """Who was late, in words.

    Args:
        files: of all ranks.
        most: so many operations are told; the totals have all.
    """
    found, totals = _late(files)
    limits = [_ms(group.limit_ns) for group in files.groups if len(group.ranks) > 1]
    if not found:
        limit = f" (limits: {', '.join(sorted(set(limits)))} after the median)" if limits else ""
        return "\n".join([f"no rank was late{limit}", *files.notes()])
    lines = [str(late) for late in found[:most]]
    if len(found) > most:
        lines.append(f"... and {len(found) - most} more")
    lines.append("")
    everything = sum(totals.values())
    ranks = sorted({late.rank for late in found}, key=lambda rank: -totals[rank])
    for rank in ranks:
        times = sum(late.rank == rank for late in found)
        lines.append(
            f"rank {rank}: late in {times} operations; the others waited {_ms(totals[rank])} for "
            f"it in sum, {100 * totals[rank] / everything:.0f} % of all waiting"
        )
    return "\n".join([*lines, *files.notes()])


# ---- as a trace


class _Axis:
    """Puts the times of all processes on one axis.

    That is the wall clock of one process.  Processes of a group are on it by the group's clock;
    what no group joins, by their own wall clocks.
    """

    def __init__(self, files: _Files) -> None:
        self._main: dict[int, tuple[_Group, _Series, int]] = {}
        for group in sorted(files.groups, key=lambda group: -len(group.ranks)):
            origin = self._origin(group)
            for rank, series in group.series.items():
                if origin is not None and group.clock(rank, 0):
                    self._main.setdefault(id(series.recording), (group, series, origin))
        self.start = min(
            (self._at(s, r.posted_ns) for g in files.groups for s in g.series.values()
             for r in s.records[:1]),
            default=0,
        )  # fmt: skip

    @staticmethod
    def _origin(group: _Group) -> int | None:
        """What its clock is behind the wall clock of its first rank."""
        for rank, series in sorted(group.series.items()):
            when = series.records[0].posted_ns
            clock = group.clock(rank, when)
            if clock:
                return series.wall(when) - (when - clock[0])
        return None

    def at(self, series: _Series, when: int) -> int:
        """Nanoseconds since the beginning of the trace."""
        return self._at(series, when) - self.start

    def _at(self, series: _Series, when: int) -> int:
        if id(series.recording) not in self._main:
            return series.wall(when)
        group, main, origin = self._main[id(series.recording)]
        clock = group.clock(main.rank, when)
        return when - (clock[0] if clock else 0) + origin

    def error_us(self, recording: _Recording) -> float | None:
        """How far off its times may be; None: they are by its wall clock."""
        if id(recording) not in self._main:
            return None
        main = self._main[id(recording)][1]
        errors = [error for _, error in main.clock.ahead]
        return max(errors, default=0) / 1e3


_NO_FIELDS = ("", -1)


def _events(files: _Files, axis: _Axis) -> Iterator[dict[str, Any]]:
    lanes: dict[tuple[str, tuple[int, ...]], int] = {}
    for group in files.groups:
        lanes.setdefault((group.name, group.ranks), 2 * len(lanes) + 1)
    for recording in files.recordings:
        error = axis.error_us(recording)
        clock = "clock by wall time" if error is None else f"clock off by at most {error:.1f} us"
        named = {
            "process_name": {"name": f"rank {recording.rank} ({recording.header['host']})"},
            "process_sort_index": {"sort_index": recording.rank},
            "process_labels": {"labels": clock},
        }
        for name, args in named.items():
            yield {"ph": "M", "name": name, "pid": recording.rank, "args": args}
        for series in recording.series.values():
            lane = lanes.get((series.name, series.ranks))
            if lane is not None:
                name = f"group '{series.name}' ({ranks_text(series.ranks)})"
                for tid, text in ((lane, name), (lane + 1, f"{name}, queued")):
                    at = {"pid": recording.rank, "tid": tid}
                    yield {"ph": "M", "name": "thread_name", **at, "args": {"name": text}}
    flows = itertools.count(1)
    for group in files.groups:
        yield from _events_of(group, lanes[group.name, group.ranks], axis, flows)


def _events_of(
    group: _Group, lane: int, axis: _Axis, flows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    free: dict[int, int] = {}  # when each rank's last operation ended: slices do not overlap
    for operation in group.operations:
        last = operation.awaited[-1] if operation.awaited else -1
        spans: dict[int, tuple[int, int]] = {}
        for rank, record in operation.records.items():
            series = group.series[rank]
            begin = max(axis.at(series, record.arrived_ns), free.get(rank, 0))
            end = max(axis.at(series, record.done_ns), begin + 1)
            free[rank] = end
            spans[rank] = begin, end
            yield from _slices(operation, rank, lane, (begin, end))
            queued = axis.at(series, record.posted_ns)
            if begin - queued >= _LEAST_WAIT_NS:
                number = {"id2": {"local": f"{lane}-{record.index}"}, "name": "queued"}
                for phase, when in (("b", queued), ("e", begin)):
                    at = {"pid": rank, "tid": lane + 1, "ts": when / 1e3}
                    yield {"ph": phase, "cat": "queued", **number, **at}
        for rank, (begin, end) in spans.items():
            wait = min(operation.wait(rank), end - begin)
            if rank == last or wait < _LEAST_WAIT_NS:
                continue
            at = {"pid": rank, "tid": lane}
            waits = {"cat": "wait", "name": f"wait for rank {last}"}
            yield {"ph": "X", **waits, **at, "ts": begin / 1e3, "dur": wait / 1e3}
            # An arrow leads to the rest, which begins a nanosecond after the last rank came:
            # Perfetto takes the slice that begins first for the beginning of an arrow.
            start = spans[last][0] if last in spans else 0
            rest = max(begin + wait, start) + 1
            if rest >= end:
                continue
            moves = {"cat": "data", "name": "moving data", "ts": rest / 1e3}
            yield {"ph": "X", **moves, **at, "dur": (end - rest) / 1e3}
            if last in spans:
                flow = {"name": "wait", "cat": "late", "id": next(flows), "tid": lane}
                yield {"ph": "s", **flow, "pid": last, "ts": start / 1e3}
                yield {"ph": "f", "bp": "e", **flow, "pid": rank, "ts": rest / 1e3}


def _slices(
    operation: _Operation, rank: int, lane: int, times: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    record = operation.records[rank]
    begin, end = times
    shown = {
        "bytes": record.bytes,
        "dtype": record.dtype,
        "op": record.op,
        "algorithm": record.algorithm,
        "codec": record.codec,
        "root": record.root,
        "step": record.step,
        "bucket": record.bucket if _has_bucket(record) else -1,
        "sequence": record.sequence,
        "state": "" if record.state == "done" else record.state,
    }
    args = {name: value for name, value in shown.items() if value not in _NO_FIELDS}
    if operation.awaited:
        last = operation.awaited[-1]
        args["last_rank"] = last
        args["late_ms"] = (operation.arrivals[last] - operation.median) / 1e6
    name = {"name": f"{record.kind} #{record.sequence}", "cat": "operation"}
    span = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    yield {"ph": "X", **name, "pid": rank, "tid": lane, **span, "args": args}
    count = {"ph": "C", "name": f"bytes in {operation.group}", "pid": rank}
    yield {**count, "ts": begin / 1e3, "args": {"bytes": record.bytes}}
    yield {**count, "ts": end / 1e3, "args": {"bytes": 0}}


def write_trace(files: _Files, path: Path) -> int:
    """Writes a Chrome trace, with gzip if the name ends in .gz; returns the number of events."""
    axis = _Axis(files)
    count = 0
    write = gzip.open if path.suffix == ".gz" else open
    with write(path, "wt") as out:
        out.write('{"traceEvents":[\n')
        for count, event in enumerate(_events(files, axis), 1):
            out.write((",\n" if count > 1 else "") + json.dumps(event, separators=(",", ":")))
        other = {
            "source": "ringreduce",
            "start_ns": axis.start,
            "clock_error_us": {str(one.rank): axis.error_us(one) for one in files.recordings},
            "lost_records": {str(one.rank): one.lost for one in files.recordings},
        }
        out.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(other)}}}\n')
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the files of a directory.

    Args:
        arguments: of the command line; None for those of the process.

    Returns:
        The exit status: 1 if there is no timeline.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.timeline",
        description="Read what RINGREDUCE_TIMELINE=DIR or ringreduce.timeline(DIR) has written.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="one trace of all ranks, for Perfetto and Chrome")
    merge.add_argument("-o", "--output", type=Path, help="DIR/trace.json; with gzip if NAME.gz")
    commands.add_parser("summary", help="a table of ranks and groups")
    late = commands.add_parser("late", help="who was late, where, and who waited for it")
    late.add_argument("-n", "--most", type=int, default=10, help="so many operations are told")
    for command in commands.choices.values():
        command.add_argument("directory", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        files = _load(options.directory)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.command == "merge":
        path = options.output or options.directory / "trace.json"
        count = write_trace(files, path)
        said = f"{path}: {count} events of {len(files.recordings)} recordings"
        print("\n".join([said, *files.notes()]))
    elif options.command == "summary":
        print(summary_text(files))
    else:
        print(late_text(files, options.most))
    return 0
