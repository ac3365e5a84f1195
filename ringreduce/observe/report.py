"""A timeline in words, in a table, and as a trace for Perfetto and Chrome."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce.core.files import replacing
from ringreduce.core.words import aligned, ranks_text
from ringreduce.observe.files import Group, Job, Operation, Series, judge_of, operations
from ringreduce.observe.late import Late
from ringreduce.observe.record import UNKNOWN, Record

_LEAST_WAIT_NS = 20_000  # shorter waits are not drawn


def _size_text(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def _ms(nanos: float) -> str:
    return f"{nanos / 1e6:.1f} ms"


# ---- a table

_COLUMNS = ("rank", "operations", "bytes", "in operations", "waiting", "moving data", "queued")
_EXPLANATION = """\
waiting: until the last rank that it needs had come.  moving data: the rest of its operations.
queued: between a call that does not block and the beginning of its operation.  Whether the program
computed meanwhile, or waited, is not recorded: it is an upper bound of what is hidden there."""


@dataclass
class _Sums:
    count: int = 0
    size: int = 0
    inside: int = 0
    waiting: int = 0
    queued: int = 0

    def add(self, operation: Operation, rank: int, record: Record) -> None:
        self.count += 1
        self.size += record.bytes
        self.inside += record.done_ns - record.arrived_ns
        self.waiting += operation.wait(rank)
        # A message has no queue; its program goes on until it waits for it.
        self.queued += 0 if operation.is_message else record.arrived_ns - record.posted_ns

    def cells(self, rank: int) -> tuple[str, ...]:
        times = (self.inside, self.waiting, self.inside - self.waiting, self.queued)
        return (str(rank), str(self.count), _size_text(self.size), *map(_ms, times))


def summary_text(job: Job, problems: list[str]) -> str:
    """A table for each group; its messages have one of their own.  `problems` takes what could not
    be read."""
    sums: dict[tuple[Group, bool], dict[int, _Sums]] = defaultdict(lambda: defaultdict(_Sums))
    for operation in operations(job, problems):
        for rank, record in operation.records.items():
            sums[operation.group, operation.is_message][rank].add(operation, rank, record)
    lines: list[str] = []
    for group, messages in itertools.product(job.groups, (False, True)):
        if (group, messages) not in sums:
            continue
        rows = [_COLUMNS, *(s.cells(rank) for rank, s in sorted(sums[group, messages].items()))]
        lines.append(f"{'messages of ' if messages else ''}{group}, {len(group.ranks)} ranks")
        lines += [*(f"  {row}" for row in aligned(rows)), ""]
    return "\n".join([*lines, _EXPLANATION])


# ---- who was late


def _told(late: Late, operation: Operation) -> str:
    """A sentence on a rank that was named, and what it was doing."""
    if late.cause:
        why = ""
    elif operation.is_message:
        why = " Its program called late."
    elif (record := operation.records.get(late.by)) is None:
        why = " It has no file, so why is not known."
    elif record.arrived_ns - record.posted_ns < late.late_ms * 5e5:
        why = " Its program called late."
    else:
        why = (
            " Its program had called before: an operation before it, or a processor, was not free."
        )
    return f"{late}.{why} The others waited {late.waited_ms:.1f} ms in sum."


def late_text(job: Job, problems: list[str], most: int = 10) -> str:
    """Who was late, in words: `most` operations in which most was waited, then the sums of all."""
    judge = judge_of(job)
    found: list[tuple[Late, str]] = []
    for operation in operations(job, problems):
        for late in judge.feed(operation.seen(job.axis))[0]:
            found.append((late, _told(late, operation)))
            if len(found) > 64 * most:  # a long run has many
                found = _worst(found, most)
    lines = [text for _, text in _worst(found, most)]
    if (more := judge.times.total() - len(lines)) > 0:
        lines.append(f"... and {more} more")
    everything = sum(judge.waited.values())
    lines += [""] if lines else []
    lines += judge.summary()
    named = judge.times.keys() | judge.persistent().keys()
    for rank in sorted(named, key=lambda rank: -judge.waited[rank]):
        waited = judge.waited[rank]
        lines.append(
            f"rank {rank}: late in {judge.times[rank]} operations; the others waited {_ms(waited)} "
            f"for it in sum, {100 * waited / max(1, everything):.0f} % of all waiting"
        )
    return "\n".join(lines)


def _worst(found: list[tuple[Late, str]], most: int) -> list[tuple[Late, str]]:
    return sorted(found, key=lambda one: -one[0].waited_ms)[:most]


# ---- a trace

_NO_FIELDS = ("", -1)


class _Trace:
    """The events of a job, in microseconds since it began."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lanes = {group: 3 * number + 1 for number, group in enumerate(job.groups)}
        self._flows = itertools.count(1)
        self._free: dict[tuple[Group, int], float] = {}  # until when slices of a lane reach
        every = [s for g in job.groups for all in g.series.values() for s in all]
        self.start = min((job.axis.at(s, s.first) for s in every), default=0.0)

    def at(self, series: Series, when: float) -> float:
        return self._job.axis.at(series, when) - self.start

    def names(self) -> Iterator[dict[str, Any]]:
        """What processes and lanes are called."""
        for recording in self._job.recordings:
            error = self._job.axis.error_us(recording)
            clock = f"off by at most {error:.1f} us" if error is not None else "by wall time"
            rank, host = recording.rank, recording.header["host"]
            named = {
                "process_name": {"name": f"rank {rank} ({host})"},
                "process_sort_index": {"sort_index": rank},
                "process_labels": {"labels": f"clock {clock}"},
            }
            for name, args in named.items():
                yield {"ph": "M", "name": name, "pid": rank, "args": args}
            for series in recording.series.values():
                if series.group not in self._lanes:
                    continue
                group = f"{series.group} ({ranks_text(series.group.ranks)})"
                for lane, text in enumerate((group, f"{group}, queued", f"{group}, messages")):
                    at = {"pid": rank, "tid": self._lanes[series.group] + lane}
                    yield {"ph": "M", "name": "thread_name", **at, "args": {"name": text}}

    def events(self, operation: Operation) -> Iterator[dict[str, Any]]:
        lane = self._lanes[operation.group]
        if operation.is_message:
            return self._message(operation, lane + 2)
        return self._operation(operation, lane)

    def _operation(self, operation: Operation, lane: int) -> Iterator[dict[str, Any]]:
        last = operation.last()
        spans: dict[int, tuple[float, float]] = {}
        for rank, record in operation.records.items():
            series = operation.series[rank]
            # Slices of a lane do not overlap.
            begin = max(
                self.at(series, record.arrived_ns), self._free.get((operation.group, rank), 0)
            )
            end = max(self.at(series, record.done_ns), begin + 1)
            self._free[operation.group, rank] = end
            spans[rank] = begin, end
            yield from self._slice(operation, rank, lane, begin, end)
            queued = self.at(series, record.posted_ns)
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
                flow = {"name": "wait", "cat": "late", "id": next(self._flows), "tid": lane}
                yield {"ph": "s", **flow, "pid": last, "ts": start / 1e3}
                yield {"ph": "f", "bp": "e", **flow, "pid": rank, "ts": rest / 1e3}

    def _slice(
        self, operation: Operation, rank: int, lane: int, begin: float, end: float
    ) -> Iterator[dict[str, Any]]:
        record = operation.records[rank]
        args = _args(operation, record)
        last = operation.last()
        if last >= 0:
            came = sorted(operation.arrivals.values())
            args["last_rank"] = last
            args["late_ms"] = (operation.arrivals[last] - came[(len(came) - 1) // 2]) / 1e6
        name = {"name": f"{record.kind} #{record.sequence}", "cat": "operation"}
        span = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        yield {"ph": "X", **name, "pid": rank, "tid": lane, **span, "args": args}
        count = {"ph": "C", "name": f"bytes in {operation.group}", "pid": rank}
        yield {**count, "ts": begin / 1e3, "args": {"bytes": record.bytes}}
        yield {**count, "ts": end / 1e3, "args": {"bytes": 0}}

    def _message(self, operation: Operation, lane: int) -> Iterator[dict[str, Any]]:
        """From its call to its end, which others may overlap."""
        ((rank, record),) = operation.records.items()
        series = operation.series[rank]
        way = "to" if record.kind == "send" else "from"
        number = {"id2": {"local": f"{lane}-{record.index}"}, "pid": rank, "tid": lane}
        name = {"name": f"{record.kind} {way} rank {operation.root}", "cat": "message", **number}
        begin, end = self.at(series, record.posted_ns), self.at(series, record.done_ns)
        yield {"ph": "b", **name, "ts": begin / 1e3, "args": _args(operation, record)}
        if (wait := operation.wait(rank)) >= _LEAST_WAIT_NS:
            waits = {"name": f"wait for rank {operation.root}", "cat": "message", **number}
            since = self.at(series, record.arrived_ns)
            yield {"ph": "b", **waits, "ts": since / 1e3}
            yield {"ph": "e", **waits, "ts": (since + wait) / 1e3}
        yield {"ph": "e", **name, "ts": max(end, begin + 1) / 1e3}


def _args(operation: Operation, record: Record) -> dict[str, Any]:
    shown = {
        "bytes": record.bytes,
        "dtype": record.dtype,
        "op": record.op,
        "algorithm": record.algorithm,
        "codec": record.codec,
        "root": -1 if operation.is_message else operation.root,
        "step": record.step,
        "bucket": record.bucket if record.kind.endswith("all_reduce") else -1,
        "tag": record.bucket if operation.is_message else -1,
        "sequence": record.sequence,
        "state": "" if record.state == "done" else record.state,
    }
    if record.why and record.why.rank != UNKNOWN:
        shown["waited_before"] = f"{record.why.nanos / 1e6:.1f} ms for rank {record.why.rank}"
    return {name: value for name, value in shown.items() if value not in _NO_FIELDS}


def write_trace(job: Job, path: Path, problems: list[str]) -> int:
    """Writes a Chrome trace, with gzip if the name ends in .gz, and counts its events.

    Raises:
        OSError: it cannot be written.
    """
    trace = _Trace(job)
    events = itertools.chain(
        trace.names(), itertools.chain.from_iterable(map(trace.events, operations(job, problems)))
    )
    count = 0
    packs = path.suffix == ".gz"
    with (
        replacing(path, "wb") as file,
        gzip.open(file, "wt") if packs else io.TextIOWrapper(file) as out,
    ):
        out.write('{"traceEvents":[\n')
        for count, event in enumerate(events, 1):
            out.write((",\n" if count > 1 else "") + json.dumps(event, separators=(",", ":")))
        other = {
            "source": "ringreduce",
            "start_ns": trace.start,
            "clock_error_us": {str(one.rank): job.axis.error_us(one) for one in job.recordings},
            "lost_records": {str(one.rank): one.lost for one in job.recordings},
        }
        out.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(other)}}}\n')
    return count
