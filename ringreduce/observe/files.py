"""The files of a timeline: what a rank writes, and what is read of them, checked and in a stream.

A file holds a JSON object a line.  "part" tells one recording from another in the same file: its
first line is a header, later ones have the name and ranks of a group, or some of its records with
the clock at that time.  Records are written as they lie in memory, in base64: to format them would
hold the interpreter's lock ten times as long.

A folder is read twice: first who wrote what, then, for one job, the operations about in the order
in which they happened, each with the records of all ranks.  What is damaged is left out and told.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import functools
import heapq
import itertools
import json
import math
import os
import socket
import stat
import struct
import time
import uuid
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringreduce.core.backend import extension, job_name
from ringreduce.core.files import Damaged, check, natural, opened, sharing
from ringreduce.core.words import ranks_text
from ringreduce.observe.follow import Group as Followed
from ringreduce.observe.follow import News
from ringreduce.observe.late import (
    Arrival,
    Cause,
    CpuPressure,
    Judge,
    Seen,
    Wait,
    of_root,
    pressure_ns,
)
from ringreduce.observe.record import FROM_ROOT, LAYOUT, TO_ROOT, Record, names, parse

_LONGEST_LINE = 64 << 20
_MOST_PENDING = 1 << 17  # operations of a group for which records of a rank are awaited
_MOST_LOST = 1 << 32  # records between two that are read
_LEARNED = 1024  # operations of a group that tell what is usual
_DAY = 86_400 * 10**9

# ---- writing


class Writer:
    """Appends what a rank did to its file in a folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path: Path | None = None  # once there is one
        self._part = uuid.uuid4().hex[:8]
        self._descriptor = -1
        self._numbers: dict[str, int] = {}  # of groups, by their meetings

    def add(self, news: News) -> None:
        """Writes what has happened in a group.

        Raises:
            OSError: it cannot be written.
        """
        group = news.group
        if self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink == 0:
            raise OSError(f"{self.path} has been removed")
        number = self._numbers.get(group.meeting)
        if number is None:
            number = self._numbers[group.meeting] = len(self._numbers)
            self._write({"group": number, **_description(group)})
        ahead, error = extension().clock_offset(group.backend)
        line = {"group": number, "clock": [time.monotonic_ns(), ahead, error]}
        if waited := pressure_ns():
            line["waited"] = waited
        if news.lost:
            line["lost"] = news.lost
        self._write(line, operations=news.operations, messages=news.messages)

    def close(self, lost: int) -> None:
        """The last line, if there are others.

        Raises:
            OSError: it cannot be written.
        """
        if self._descriptor < 0:
            return
        try:
            self._write({"end": time.monotonic_ns(), "lost": lost})
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
            # Another entry is another recording.
            self._part = uuid.uuid4().hex[:8]
            self._numbers.clear()

    def _write(self, line: dict[str, Any], **records: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        text = json.dumps({"part": self._part, **line}, separators=(",", ":"))
        for name, data in records.items():
            if data:  # base64 needs no escapes, and json would look for them for long
                coded = binascii.b2a_base64(data, newline=False).decode()
                text = f'{text[:-1]},"{name}":"{coded}"}}'
        rest = memoryview(f"{text}\n".encode())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _open(self) -> None:
        header = _header()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / f"{header['job']}-rank{header['rank']}.jsonl"
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor = os.open(self.path, how, 0o644)
        found = os.fstat(self._descriptor)
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            raise OSError(f"{self.path} is no file")
        if found.st_size:  # another recording may have ended amid a line
            os.write(self._descriptor, b"\n")
        self._write(header)


def _header() -> dict[str, Any]:
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "job": job_name(),
        "wall_ns": time.time_ns() - time.monotonic_ns(),
        "layout": LAYOUT.format,
        "names": names(),
    }


def _boot() -> str:
    """What processes with the same CLOCK_MONOTONIC share."""
    found = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets"):
        try:
            found.append(" ".join(Path(path).read_text().split()))
        except OSError:
            found.append(socket.gethostname())
    return "/".join(found)


def _description(group: Followed) -> dict[str, Any]:
    return {
        "name": group.name,
        "title": group.title,
        "ranks": group.ranks,
        "own": group.rank,
        "meeting": group.meeting,
        "recorder": group.recorder,
        **({"gpu": group.gpu} if group.gpu >= 0 else {}),
    }


_HEADER = {"part": str, "rank": natural, "world_size": natural, "host": str, "boot": str,
           "pid": natural, "job": str, "wall_ns": int, "layout": str, "names": dict}  # fmt: skip
_GROUP = {"part": str, "group": natural, "name": str, "title": str, "ranks": [natural],
          "own": natural, "meeting": str, "recorder": natural, "gpu?": natural}  # fmt: skip
_RECORDS = {"part": str, "group": natural, "clock": [int], "operations?": str, "messages?": str,
            "waited?": natural, "lost?": natural}  # fmt: skip

# ---- who wrote what


@dataclass(eq=False)
class Series:
    """The records of a group in one recording."""

    recording: Recording
    group: Group  # with the other ranks' series
    rank: int  # the global one
    recorder: int  # how records of this recording name the group (Why.group)
    # The time of each sample of how far this rank's clock was ahead of the group's, and the bound
    # of its error.
    clocks: list[tuple[int, int, int]] = field(default_factory=list)
    first: int = 0  # call, by this rank's clock
    kinds: dict[int, str] = field(default_factory=dict)  # of its latest operations, by number

    def clock(self, when: int) -> tuple[int, int] | None:
        """The sample that was taken next after it, else the last; None if there are none."""
        if not self.clocks:
            return (0, 0) if self.group.shares_clock else None
        at = min(bisect.bisect_left(self.clocks, (when,)), len(self.clocks) - 1)
        return self.clocks[at][1:]

    def wall(self, when: int) -> int:
        return when + int(self.recording.header["wall_ns"])


@dataclass(eq=False)
class Recording:
    """What one process wrote, from a header on."""

    path: Path
    header: dict[str, Any]
    series: dict[int, Series] = field(default_factory=dict)
    lost: int = 0
    pressure: CpuPressure = field(default_factory=lambda: CpuPressure(""))  # as far as it is read

    @property
    def rank(self) -> int:
        return int(self.header["rank"])


@dataclass(eq=False)
class Group:
    """A group: the same on all ranks that met in it."""

    meeting: str
    name: str
    title: str
    ranks: tuple[int, ...]  # as the default group numbers them
    series: dict[int, list[Series]] = field(default_factory=dict)  # by rank, of each recording
    on_gpus: bool = False  # of GPU operations, whose times have an error of their own

    def __str__(self) -> str:
        return self.title

    @functools.cached_property
    def shares_clock(self) -> bool:
        every = itertools.chain(*self.series.values())
        return len({one.recording.header["boot"] for one in every}) == 1

    @property
    def clocks_are_known(self) -> bool:
        return all(one.clock(0) for all in self.series.values() for one in all)


@dataclass(eq=False)
class Job:
    """The recordings of processes that have met, and their groups."""

    recordings: list[Recording]
    groups: list[Group]

    @property
    def name(self) -> str:
        return str(self.recordings[0].header["job"])

    @functools.cached_property
    def axis(self) -> Axis:
        return Axis(self.groups)

    @functools.cached_property
    def began(self) -> int:
        """Wall time in nanoseconds of its first operation."""
        every = [s.wall(s.first) for g in self.groups for all in g.series.values() for s in all]
        return min(every, default=0)

    def __str__(self) -> str:
        ranks = {one.rank for one in self.recordings}
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began / 1e9))
        where = min((group.meeting for group in self.groups), default="")
        return f"{self.name} ({where}) of {ranks_text(ranks)}, begun {when}"

    def notes(self) -> list[str]:
        """What is not there."""
        notes = []
        for one in self.recordings:
            if one.lost:
                notes.append(f"rank {one.rank} lost {one.lost} records: it ran too many at once")
        for group in self.groups:
            missing = sorted(set(group.ranks) - set(group.series))
            if missing:
                notes.append(f"{group}: no file of {ranks_text(missing)}")
            if not group.clocks_are_known:
                notes.append(f"{group}: the hosts' clocks were not known: nobody is called late")
        return notes


class Axis:
    """Puts the times of all processes of a job on one axis.

    That is the wall clock of one process.  Processes of a group are on it by the group's clock;
    what no group joins, by their own wall clocks.
    """

    def __init__(self, groups: list[Group]) -> None:
        self._main: dict[Recording, tuple[Series, int]] = {}
        for group in sorted(groups, key=lambda group: -len(group.ranks)):
            if not group.clocks_are_known:
                continue
            every = [s for _, all in sorted(group.series.items()) for s in all]
            # What its clock is behind the wall clock of its first rank.
            ahead = every[0].clock(every[0].first)
            origin = every[0].wall(ahead[0] if ahead else 0)
            for series in every:
                self._main.setdefault(series.recording, (series, origin))

    def at(self, series: Series, when: float) -> float:
        """Nanoseconds of Unix time, of a time of that rank's clock."""
        known = self._main.get(series.recording)
        if known is None:
            return when + int(series.recording.header["wall_ns"])
        main, origin = known
        clock = main.clock(int(when))
        return when - (clock[0] if clock else 0) + origin

    def error_us(self, recording: Recording) -> float | None:
        """How far off its times may be; None: they are by its wall clock."""
        known = self._main.get(recording)
        if known is None:
            return None
        return max((error for _, _, error in known[0].clocks), default=0) / 1e3


@dataclass
class Folder:
    """All that a folder holds: its jobs, the newest first, and what could not be read."""

    jobs: list[Job]
    problems: list[str]

    def job(self, wanted: str = "") -> Job:
        """A job: the newest, or the one of that name or identity.

        Raises:
            ValueError: there is none, or there are several.
        """
        found = [job for job in self.jobs if not wanted or job.name == wanted
                 or any(group.meeting.startswith(wanted) for group in job.groups)]  # fmt: skip
        if not found or (wanted and len(found) > 1):
            known = "; ".join(map(str, self.jobs))
            raise ValueError(f"{len(found)} jobs are called '{wanted}'; there are: {known}")
        return found[0]

    def notes(self, job: Job) -> list[str]:
        others = [f"left out: {other}" for other in self.jobs if other is not job]
        return [*self.problems, *others, *job.notes()]


def load(directory: Path) -> Folder:
    """Reads who wrote what in a folder, of one job or several.

    Raises:
        ValueError: there is no timeline, or none that can be read.
    """
    groups: dict[str, Group] = {}
    recordings: list[Recording] = []
    problems = []
    try:
        paths = sorted(path for path in directory.iterdir() if path.name.endswith(".jsonl"))
    except OSError as error:
        raise ValueError(
            f"{directory} is not a folder that can be read ({error.strerror}): give the one of "
            "RINGREDUCE_TIMELINE, or of ringreduce.timeline"
        ) from error
    for path in paths:
        parts: dict[str, Recording | None] = {}  # None: of another version
        try:
            bad: Counter[str] = Counter()
            for line in _lines(path, bad):
                _note(path, line, parts, groups, bad)
        except Damaged as error:
            problems.append(str(error))
        else:
            problems += [
                f"{path}: {count} {'lines are' if count > 1 else 'line is'} left out: {why}"
                for why, count in bad.items()
            ]
        recordings += filter(None, parts.values())
    recordings = [one for one in recordings if any(s.first for s in one.series.values())]
    if not recordings:
        raise ValueError(
            "\n".join(
                [f"{directory} holds no timeline: there is no file JOB-rankN.jsonl in it that can "
                 "be read", *problems]
            )
        )  # fmt: skip
    return Folder(_jobs_of(recordings), problems)


def _lines(path: Path, bad: Counter[str]) -> Iterator[dict[str, Any]]:
    with opened(path) as file:
        try:
            while raw := file.readline(_LONGEST_LINE):
                if not raw.strip():
                    continue
                try:
                    line = json.loads(raw)
                    check(line, {"part": str})
                except RecursionError:
                    bad["it is nested too deeply"] += 1
                except Damaged as error:
                    bad[str(error)] += 1
                except ValueError:  # as of a full disk or a killed process
                    bad["it is torn or damaged"] += 1
                else:
                    yield line
        except OSError as error:
            raise Damaged(f"{path} cannot be read to its end: {error.strerror}") from error


def _note(
    path: Path,
    line: dict[str, Any],
    parts: dict[str, Recording | None],
    groups: dict[str, Group],
    bad: Counter[str],
) -> None:
    """Takes what a line says of its recording."""
    try:
        if "layout" in line:
            check(line, _HEADER)
            if line["layout"] != LAYOUT.format or line["names"] != names():
                parts[line["part"]] = None
                raise Damaged("it is of another version of ringreduce: read it with that one")
            parts[line["part"]] = Recording(path, line)
            return
        recording = parts.get(line["part"])
        if recording is None:
            if line["part"] in parts:
                return  # its header has been told
            raise Damaged("its recording has no header that can be read")
        if "ranks" in line:
            recording.series[line["group"]] = _series_of(recording, line, groups)
        elif "clock" in line:
            series = _series_in(recording, line)
            at, ahead, error = line["clock"]
            if error >= 0:
                series.clocks.append((at, ahead, error))
            recording.lost += line.get("lost", 0)
            if not series.first:
                first = [r for name in ("operations", "messages") for r in _records_in(line, name)]
                series.first = min((r.posted_ns for r in first), default=0)
    except Damaged as error:
        bad[str(error)] += 1


def _series_of(recording: Recording, line: dict[str, Any], groups: dict[str, Group]) -> Series:
    check(line, _GROUP)
    ranks = tuple(line["ranks"])
    if line["own"] >= len(ranks) or len(set(ranks)) != len(ranks):
        raise Damaged("its ranks are not those of a group")
    group = groups.setdefault(
        line["meeting"],
        Group(line["meeting"], line["name"], line["title"], ranks, on_gpus="gpu" in line),
    )
    if group.ranks != ranks:
        raise Damaged("its ranks are not those that others tell of the group")
    series = Series(recording, group, ranks[line["own"]], line["recorder"])
    group.series.setdefault(series.rank, []).append(series)
    return series


def _series_in(recording: Recording, line: dict[str, Any]) -> Series:
    check(line, _RECORDS)
    clock = line["clock"]
    if len(clock) != 3 or any(abs(one) >= 1 << 62 for one in clock):
        raise Damaged("its clock is not a clock")
    series = recording.series.get(line["group"])
    if series is None:
        raise Damaged("its group is not known")
    return series


def _records_in(line: dict[str, Any], name: str, bad: Counter[str] | None = None) -> list[Record]:
    """The records of a line that can be.  One without an arrival was refused before it began."""
    bad = Counter() if bad is None else bad
    try:
        data = base64.b64decode(line.get(name, ""), validate=True)
        found = parse(data)
    except (binascii.Error, ValueError, struct.error) as error:
        raise Damaged("its records are torn or damaged") from error
    except LookupError:  # of one of them
        found = []
        for at in range(0, len(data), LAYOUT.size):
            try:
                found += parse(data[at : at + LAYOUT.size])
            except LookupError:
                bad["a record has numbers that have no meaning"] += 1
    written = line["clock"][0]
    sound = [
        record for record in found
        if _is_sound(record, written) and record.is_message == (name == "messages")
    ]  # fmt: skip
    if len(sound) < len(found):
        bad["a record has times that cannot be"] += len(found) - len(sound)
    return [record for record in sound if record.arrived_ns]


def _is_sound(r: Record, written: int) -> bool:
    """Whether its times are in order, and it was over when it was written."""
    ordered = r.posted_ns <= (r.arrived_ns or r.done_ns) <= r.done_ns <= written + _DAY // 1440
    near = written - 30 * _DAY < r.posted_ns
    others = all(abs(t - r.done_ns) < 30 * _DAY for t in (r.first_ns, r.median_ns) if t)
    late = all(math.isfinite(nanos) and abs(nanos) < 30 * _DAY for _, nanos in r.late)
    return ordered and near and others and late and r.bytes < 1 << 60


def _jobs_of(recordings: list[Recording]) -> list[Job]:
    """Those that share a group, or a process, are one job."""

    def keys(one: Recording) -> Iterator[Hashable]:
        yield from (series.group.meeting for series in one.series.values())
        yield one.header["boot"], one.header["pid"], one.path

    made = []
    for mine in sharing(recordings, keys):
        mine.sort(key=lambda one: one.rank)
        found = {s.group.meeting: s.group for one in mine for s in one.series.values() if s.first}
        for group in found.values():
            group.series = {rank: kept for rank, all in sorted(group.series.items())
                            if (kept := [s for s in all if s.first])}  # fmt: skip
        groups = [group for group in found.values() if group.series]
        groups.sort(key=lambda group: min(s.wall(s.first) for s in group.series[min(group.series)]))
        made.append(Job(mine, groups))
    return sorted(made, key=lambda job: -job.began)


# ---- what happened


@dataclass(slots=True)
class Operation:
    """An operation, or a message, with the records of its ranks."""

    group: Group
    records: dict[int, Record] = field(default_factory=dict)  # of a message that of one rank
    series: dict[int, Series] = field(default_factory=dict)
    _arrivals: dict[int, int] | None = None
    _last: int | None = None

    @property
    def any_record(self) -> Record:
        return next(iter(self.records.values()))

    @property
    def is_message(self) -> bool:
        return self.any_record.is_message

    @property
    def arrivals(self) -> dict[int, int]:
        """By rank, on the group's clock.  Of ranks without a file, what the others know."""
        if self._arrivals is None:
            found: dict[int, int] = {}
            for rank, record in self.records.items():
                clock = self.series[rank].clock(record.arrived_ns)
                if clock is None:
                    continue
                found[rank] = record.arrived_ns - clock[0]
                for number, nanos in record.late if record.clock_error_ns >= 0 else ():
                    other = self.group.ranks[number] if number < len(self.group.ranks) else -1
                    if other not in self.records and other >= 0:
                        found[other] = round(record.median_ns + nanos) - clock[0]
            self._arrivals = found
        return self._arrivals

    @property
    def error(self) -> int:
        """The bound of the error of its arrivals, which of GPU operations is that of each more."""
        known = [
            (clock, max(0, r.clock_error_ns) if self.group.on_gpus else 0)
            for rank, r in self.records.items()
            if (clock := self.series[rank].clock(r.arrived_ns))
        ]
        return max((clock[1] + own for clock, own in known), default=0)

    @property
    def root(self) -> int:
        number = self.any_record.root
        return self.group.ranks[number] if 0 <= number < len(self.group.ranks) else -1

    def last(self) -> int:
        """The rank that the others waited for, as the last one; -1: there is none."""
        if self._last is None:
            came, root = self.arrivals, self.root
            if self.any_record.kind in FROM_ROOT:
                self._last = root if root in came else -1
            else:
                self._last = max(came, key=came.__getitem__) if len(came) > 1 else -1
        return self._last

    def wait(self, rank: int) -> int:
        """Nanoseconds that a rank waited for the last one."""
        last, record = self.last(), self.records.get(rank)
        if self.is_message:
            record = self.any_record
            came = record.late[0][1] if record.late and record.late[0][0] == record.root else 0.0
            return max(0, min(round(came), record.done_ns - record.arrived_ns))
        if record is None or rank not in self.arrivals or last in (-1, rank):
            return 0
        if record.kind in TO_ROOT and rank != self.root:
            return 0
        waited = self.arrivals[last] - self.arrivals[rank]
        return max(0, min(waited, record.done_ns - record.arrived_ns))

    def seen(self, axis: Axis) -> Seen:
        """For the judge."""
        rank, record = next(iter(self.records.items()))
        series = self.series[rank]
        begin, end = axis.at(series, record.arrived_ns), axis.at(series, record.done_ns)
        group, size = (self.group.meeting, 0), len(self.group.ranks)
        known, error, median = record.known, record.clock_error_ns, begin
        late: list[Arrival] = []
        if self.is_message:
            group, size, error = (self.group.meeting, rank + 1), 2, max(0, error)
            if known == 2 and self.root >= 0:
                is_late = bool(record.late) and record.late[0][0] == record.root
                delay = record.late[0][1] if is_late else 0.0
                why = record.causes[0] if is_late else None
                where = f"operation #{why.sequence} of another group" if why else ""
                cause = Cause(why.rank, why.nanos, where) if why else None
                late = [Arrival(self.root, delay, cause)]
        else:
            came = sorted((at, of) for of, at in self.arrivals.items())
            clock = series.clock(record.arrived_ns)
            known, error = len(came), self.error if clock else -1
            last = self.last()
            if clock and known > 1 and last >= 0 and record.state == "done":
                middle = float(came[(known - 1) // 2][0])
                late = [Arrival(of, at - middle, self._cause(of)) for at, of in came[:0:-1]]
                at_root = float(self.arrivals.get(self.root, middle))
                middle, late = of_root(record, self.root, at_root, middle, late)
                median = axis.at(series, middle + clock[0])
        waits = []
        for of, one in self.records.items() if late else ():
            waited = self.wait(of) - max(0, error)
            if waited > 0:
                at = float(one.arrived_ns)
                waits.append(Wait(of, at, at + waited, self._cause(of)))
        return Seen(
            group, self.group.title, record, begin, end, size, known, median, error, late, waits,
            self._hosts(), self.group.ranks,
        )  # fmt: skip

    def _cause(self, rank: int) -> Cause | None:
        """Why a rank did not come sooner, by its own record."""
        record = self.records.get(rank)
        if record is None or record.why is None:
            return None
        why = record.why
        where = "another group"
        for one in self.series[rank].recording.series.values():
            if one.recorder == why.group // 2:
                kind = "message" if why.group % 2 else one.kinds.get(why.sequence, "operation")
                where = f"{kind} #{why.sequence} of {one.group}"
        return Cause(why.rank, why.nanos, where)

    def _hosts(self) -> dict[int, str]:
        if self.group.shares_clock:
            return {}
        return {rank: s.recording.header["host"] for rank, s in self.series.items()}


def operations(job: Job, problems: list[str] | None = None) -> Iterator[Operation]:
    """What happened in a job, about in the order in which it did: operations with the records of
    all ranks that have files, and messages.  `problems` takes what could not be read."""
    pending = {group.meeting: _Pending(group) for group in job.groups}
    bad: Counter[str] = Counter()
    # How many files a rank's records of a group may still come from.
    left: Counter[tuple[str, int]] = Counter()
    of_path: dict[Path, set[tuple[str, int]]] = {}
    for one in job.recordings:
        one.pressure.clear()
        known = {(s.group.meeting, s.rank) for s in one.series.values() if s.first}
        of_path.setdefault(one.path, set()).update(known)
    for keys in of_path.values():
        left.update(keys)
    readers: list[tuple[float, Path, Iterator[_Batch], _Batch | None]] = [
        (-math.inf, path, _batches(path, job, bad), None) for path in sorted(of_path)
    ]
    while readers:
        _, path, batches, batch = heapq.heappop(readers)
        if batch is not None:
            yield from pending[batch.series.group.meeting].add(batch)
        following = next(batches, None)
        if following is not None:
            heapq.heappush(readers, (following.at, path, batches, following))
            continue
        for meeting, rank in of_path[path]:
            left[meeting, rank] -= 1
            if left[meeting, rank] == 0:
                yield from pending[meeting].end(rank)
    if problems is not None:
        problems += [f"{count} records are left out: {why}" for why, count in bad.items()]


@dataclass(eq=False)
class _Batch:
    """Some records of a series; `at`: the wall time when they were written."""

    at: float
    series: Series
    operations: list[Record]
    messages: list[Record]


def _batches(path: Path, job: Job, bad: Counter[str]) -> Iterator[_Batch]:
    wanted = {one.header["part"]: one for one in job.recordings if one.path == path}
    for line in _lines(path, Counter()):
        recording = wanted.get(line["part"])
        if recording is None or "clock" not in line:
            continue
        try:
            series = _series_in(recording, line)
            found = [_records_in(line, name, bad) for name in ("operations", "messages")]
        except Damaged:
            continue  # the first reading has told it
        if not series.first:
            continue  # none of its records can be read
        at = job.axis.at(series, line["clock"][0])
        if waited := line.get("waited"):
            recording.pressure.add(at, waited)
        yield _Batch(at, series, *found)


class _Pending:
    """Operations of a group for which records of ranks are awaited."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._next = dict.fromkeys(group.series, 0)  # by rank, the index that is awaited
        self._operations: dict[int, Operation] = {}
        self._order: deque[int] = deque()

    def add(self, batch: _Batch) -> Iterator[Operation]:
        series = batch.series
        rank, kinds = series.rank, series.kinds
        for record in batch.operations:
            ahead = record.index - self._next.get(rank, 0)
            if not 0 <= ahead < _MOST_LOST:
                continue  # of two recordings at the same time, or damaged
            operation = self._operations.get(record.index)
            if operation is None:
                operation = self._operations[record.index] = Operation(self._group)
                if self._order and record.index < self._order[-1]:
                    bisect.insort(self._order, record.index)
                else:
                    self._order.append(record.index)
            operation.records[rank] = record
            operation.series[rank] = series
            self._next[rank] = record.index + 1
            kinds[record.sequence] = record.kind
            if len(kinds) > 4096:
                del kinds[next(iter(kinds))]
        for message in batch.messages:
            yield Operation(self._group, {rank: message}, {rank: series})
        yield from self._ready()

    def end(self, rank: int) -> Iterator[Operation]:
        self._next[rank] = 1 << 62
        yield from self._ready()

    def _ready(self) -> Iterator[Operation]:
        least = min(self._next.values())
        while self._order and (self._order[0] < least or len(self._order) > _MOST_PENDING):
            operation = self._operations.pop(self._order.popleft())
            operation.records = dict(sorted(operation.records.items()))
            yield operation


def judge_of(job: Job) -> Judge:
    """A judge that knows what is usual in the job's groups, as far as their beginning tells."""
    known = Judge()
    seen: Counter[str] = Counter()
    for operation in operations(job):
        seen[operation.group.meeting] += 1
        known.feed(operation.seen(job.axis))
        # Some groups have few.
        if seen.total() >= 4 * _LEARNED * len(job.groups) or all(
            seen[group.meeting] >= _LEARNED for group in job.groups
        ):
            break
    # Processes of the other hosts are not judged by this one's.
    ranks = {one.rank for one in job.recordings}
    return known.afresh(job.recordings[0].pressure, len(ranks))
