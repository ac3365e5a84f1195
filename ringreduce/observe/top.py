"""What the ranks of a running job do now, and whom they wait for: top for a job.

    python -m ringreduce.top FOLDER            # that of RINGREDUCE_METRICS
    python -m ringreduce.top http://host:25999 # torch's debug server, with debug_server.py's page
    python -m ringreduce.top FOLDER --once     # two looks, a second apart, as plain text

`rows` compares two looks at the metrics (metrics.py); the page of the debug server shows the same.
What is damaged there is told in a sentence, and the rest is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import os
import socket
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ringreduce.core.files import Damaged, contents
from ringreduce.core.words import aligned, listed, ranks_text, say
from ringreduce.observe.late import slow_ones, waited_for
from ringreduce.observe.metrics import MOST_BYTES, Damages, Status, statuses

if TYPE_CHECKING:
    from textual.app import App

_STALE = 5.0  # seconds without news from a rank
_LONG = 2.0  # seconds; the ranks that are missing in a longer operation are named
_MOST_LINES, _MOST_JOBS = 16, 8  # that are shown
_LEAST_MOVED, _LEAST_BUSY = 1 << 20, 0.01  # bytes and seconds that tell the rate of a line
_BUSY = 0.2  # the share of the time in which a line that is called slow has bytes to move
_APART, _OLD = 0.5, 10.0  # seconds between two looks, at least, and at most for rates
_WAITS = 0.05  # a rank that the others wait for is named from this share of the time on


@dataclass(frozen=True)
class Row:
    """What a rank does: a line of the table.  Shares are of the time."""

    rank: int
    host: str
    pid: int
    step: int
    operations: float  # a second
    megabytes: float  # a second
    inside: float  # the share in operations
    waits: float  # the share in which it waits for other ranks there
    waited_for: float  # the largest share in which another rank waits for it
    now: str  # what it does, in words
    missing: bool = False  # an operation of its group has run for 2 s or more without it

    def cells(self) -> tuple[str, ...]:
        return (
            str(self.rank), self.host, str(self.pid), str(self.step), f"{self.operations:.0f}",
            f"{self.megabytes:.1f}", f"{self.inside:.0%}", f"{self.waits:.0%}",
            f"{self.waited_for:.0%}", self.now,
        )  # fmt: skip


@dataclass(frozen=True)
class LineRow:
    """What the line from a rank to one of another host does."""

    sender: int
    receiver: int
    sender_host: str
    receiver_host: str
    megabytes: float  # a second, that have arrived
    busy: float  # the share of the time in which it had bytes to move
    resent: float  # packets that were sent again, a second
    rate: float  # megabytes a second in which it had bytes to move; 0: too few to tell

    def __str__(self) -> str:
        return (
            f"line from rank {self.sender} ({self.sender_host}) to rank {self.receiver} "
            f"({self.receiver_host})"
        )

    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.sender} ({self.sender_host})", f"{self.receiver} ({self.receiver_host})",
            f"{self.megabytes:.1f}", f"{self.rate:.1f}", f"{self.busy:.0%}", f"{self.resent:.0f}",
        )  # fmt: skip


_LINE_COLUMNS = ("FROM", "TO", "MB/S", "MB/S WHILE BUSY", "BUSY", "RESENT/S")
_COLUMNS = ("RANK", "HOST", "PID", "STEP", "OPS/S", "MB/S", "IN OPS", "WAITS", "WAITED FOR", "NOW")
# Keys that sort by a column; the largest first, but for ranks.
_SORTS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "r": ("rank", lambda row: row.rank),
    "l": ("waited for", lambda row: -row.waited_for),
    "w": ("waits", lambda row: -row.waits),
    "o": ("ops/s", lambda row: -row.operations),
    "b": ("MB/s", lambda row: -row.megabytes),
}


def rows(before: Sequence[Status], now: Sequence[Status]) -> list[Row]:
    """What happened between two looks: a row for each rank of the later one.  Ranks that the
    earlier one lacks have no rates yet."""
    rates = {rank: rate for rank, (rate, _) in _rates(before, now).items()}
    found = []
    for status in now:
        rank, rate = status.rank, rates.get(status.rank, Status(status.rank, ""))
        waiting = _waiting_for(status, now)
        row = Row(
            rank, status.host, status.pid, int(status.step), rate.operations, rate.bytes / 1e6,
            # An operation counts when it ends: a long one may be longer than the time between.
            inside=min(1.0, rate.seconds),
            waits=min(1.0, sum(rate.waited.values())),
            # Not the mean: between hosts only its neighbour may see when it came, and a rank of a
            # small group stops few others.
            waited_for=min(1.0, max([0.0, *(r.waited.get(rank, 0.0) for r in rates.values())])),
            now=_doing(status, waiting),
            missing=bool(waiting) and not status.running,
        )  # fmt: skip
        found.append(row)
    return found


def lines(before: Sequence[Status], now: Sequence[Status]) -> list[LineRow]:
    """The lines between hosts that moved bytes between two looks, the busiest first."""
    hosts = {status.rank: status.host for status in now}
    found = []
    for rank, (rate, span) in _rates(before, now).items():
        for to, (size, busy, resent) in rate.lines.items():
            tells = size * span >= _LEAST_MOVED and busy * span >= _LEAST_BUSY
            line = LineRow(
                rank, to, rate.host, hosts.get(to, "?"), size / 1e6,
                # Seconds are known when an operation ends; it may be longer than the span.
                min(1.0, busy), resent, size / busy / 1e6 if tells else 0.0,
            )  # fmt: skip
            found += [line] * (size > 0)
    return sorted(found, key=lambda line: -line.busy)


def _rates(before: Sequence[Status], now: Sequence[Status]) -> dict[int, tuple[Status, float]]:
    """What each rank did a second between two looks, and the seconds between them.

    Without ranks whose last figures are no news, or whose sums have begun anew.
    """
    old = {status.rank: status for status in before}
    found = {}
    for status in now:
        last = old.get(status.rank, status)
        span = status.updated - last.updated
        grown = [
            getattr(status, name) - getattr(last, name)
            for name in ("operations", "bytes", "seconds")
        ]
        if not 0 < span < _OLD or status.age > _STALE or status.pid != last.pid or min(grown) < 0:
            continue
        operations, size, seconds = (sum_ / span for sum_ in grown)
        rate = dataclasses.replace(
            status, operations=operations, bytes=size, seconds=seconds,
            waited={
                late: max(0.0, sum_ - last.waited.get(late, 0.0)) / span
                for late, sum_ in status.waited.items()
            },
            lines={
                to: [max(0.0, a - b) / span for a, b in zip(use, last.lines[to], strict=True)]
                for to, use in status.lines.items()
            },
        )  # fmt: skip
        found[status.rank] = rate, span
    return found


def _waiting_for(status: Status, ranks: Sequence[Status]) -> list[tuple[float, int]]:
    """The ranks that run an operation of a group of this rank without it, and for how long."""
    return [  # a rank that has done more operations than the one that waits has been there
        (seconds, other.rank)
        for other in ranks
        for group, seconds in other.running_seconds.items()
        if seconds > _LONG
        and other.age <= _STALE
        and group in status.done
        and status.done[group] <= other.done[group]
    ]


def _doing(status: Status, waiting: Sequence[tuple[float, int]]) -> str:
    """`waiting`: as of `_waiting_for`."""
    if status.age > _STALE:
        return f"no news for {status.age:.0f} s"
    if status.running:
        seconds, text = max(
            (status.running_seconds[of], text) for of, text in status.running.items()
        )
        return f"{text} for {seconds:.1f} s" if seconds >= 0.1 else text
    if not waiting:
        return "no operation"
    who = ranks_text({rank for _, rank in waiting})
    return f"not in the operation of {who}, for {max(waiting)[0]:.1f} s"


def slow_lines(table: Sequence[LineRow]) -> str:
    """A sentence on which lines are slow (late.py) and busy for a fifth of the time: one, all from
    a host, or all to a host; "" if none is."""
    usual, slower = slow_ones([line.rate for line in table])
    slow = [table[at] for at in slower if table[at].busy >= _BUSY]
    if not slow:
        return ""
    worst = min(slow, key=lambda line: line.rate)
    text = f"{worst.rate:.1f} MB/s while busy, where the others have {usual:.1f}"
    for end, word in (("sender_host", "from"), ("receiver_host", "to")):
        host = getattr(worst, end)
        of_host = [line for line in table if getattr(line, end) == host]
        if len(of_host) > 1 and all(line in slow for line in of_host):
            return f"All lines {word} host {host} are slow: {text}."
    return f"The {worst} is slow: {text}."


def late_ranks(table: Sequence[Row]) -> set[int]:
    """The ranks that the others wait for, for 5 % of the time at least."""
    shares = {row.rank: row.waited_for for row in table}
    return {row.rank for row in table if row.missing} | waited_for(shares, _WAITS)


def headline(table: Sequence[Row], job: str) -> str:
    """What the job does, and whom it waits for, in a line."""
    hosts = len({row.host for row in table})
    text = f"{job}: {len(table)} rank{'s' * (len(table) != 1)} on {hosts} host{'s' * (hosts != 1)}"
    text += f", step {max((row.step for row in table), default=0)}"
    missing = [row.rank for row in table if row.missing]
    if missing:
        return f"{text}. An operation of others waits for {ranks_text(missing)}."
    if not late_ranks(table):
        return f"{text}. No rank is waited for {_WAITS:.0%} of the time."
    late = max(table, key=lambda row: row.waited_for)
    on = f" on {late.host}" if hosts > 1 else ""
    return f"{text}. The others wait {late.waited_for:.0%} of the time for rank {late.rank}{on}."


class View(NamedTuple):
    """What there is to see of a job."""

    headline: str
    rows: list[Row]
    lines: list[LineRow]  # between hosts, the busiest first
    notes: Sequence[str] = ()  # on what is not shown: damaged files, other jobs


class Table(NamedTuple):
    """A table as text."""

    columns: Sequence[str]
    texts: Sequence[int]  # the columns of words; the others have numbers
    rows: Sequence[tuple[bool, Sequence[str]]]  # whether it is of a late rank, and its cells

    def __str__(self) -> str:
        lines = [self.columns, *(cells for _, cells in self.rows)]
        return "\n".join(aligned(lines, self.texts))


def tables(view: View, order: Callable[[Row], float] = lambda row: row.rank) -> list[Table]:
    """The table of the ranks in that order, and that of the lines between hosts, if any."""
    late = late_ranks(view.rows)
    ranks = [(row.rank in late, row.cells()) for row in sorted(view.rows, key=order)]
    between = [(False, line.cells()) for line in view.lines[:_MOST_LINES]]
    found = [Table(_COLUMNS, (1, len(_COLUMNS) - 1), ranks)]
    return found + [Table(_LINE_COLUMNS, (0, 1), between)] * bool(between)


class Looks:
    """The last two looks at each rank, half a second apart at least."""

    def __init__(self) -> None:
        self._before: dict[int, Status] = {}
        self._last: dict[int, Status] = {}
        self._changed: dict[int, float] = {}  # when a rank's figures did, on time.monotonic()
        self._job = ("", "")

    def add(
        self, now: Sequence[Status], notes: Sequence[str] = (), *, all_write: bool = True
    ) -> View:
        """Takes what the ranks of a job have written last.

        `all_write`: whether a rank that is not in it has ended; else it is still shown.
        """
        if now and (now[0].job, now[0].meeting) != self._job:
            for kept in (self._before, self._last, self._changed):
                kept.clear()
            self._job = now[0].job, now[0].meeting
        there = {status.rank for status in now}
        lost = [] if all_write else [s for rank, s in self._last.items() if rank not in there]
        now = sorted([*now, *lost], key=lambda status: status.rank)
        for status in now:
            last = self._last.get(status.rank)
            if last is None or abs(status.updated - last.updated) > _APART:
                if last is not None:
                    self._before[status.rank] = last
                self._last[status.rank] = status
                self._changed[status.rank] = time.monotonic()
        before = list(self._before.values())
        latest = [dataclasses.replace(self._last[s.rank], age=self._age(s)) for s in now]
        table, between = rows(before, latest), lines(before, latest)
        line = headline(table, now[0].job) if now else "no rank has answered"
        return View(f"{line} {slow_lines(between)}".rstrip(), table, between, notes)

    def _age(self, status: Status) -> float:
        """Seconds since its figures were new; clocks of other hosts do not tell."""
        here = time.time() - status.updated if status.host == socket.gethostname() else 0.0
        return max(status.age, here, time.monotonic() - self._changed[status.rank])


class Source:
    """Where the metrics of a job are: a folder, or torch's debug server.

    Args:
        where: a folder, or an address.
        job: a job's name, or the first letters of what tells it from others; "" for any.
    """

    def __init__(self, where: str, job: str = "") -> None:
        self._where, self._job = where, job
        self._looks = Looks()

    def look(self) -> View:
        """Looks once more, at the job that has begun last of those that still write.

        Raises:
            ValueError: nothing can be read there, with what to do.
        """
        by_page = self._where.startswith(("http://", "https://"))
        damages = Damages()
        jobs: dict[tuple[str, str], list[Status]] = defaultdict(list)
        for status in (self._of_page if by_page else self._of_folder)(damages):
            jobs[status.job, status.meeting].append(status)
        notes = damages.sentences()
        named = [job for job in jobs if job[0] == self._job]
        named = named or [job for job in jobs if job[1].startswith(self._job)]
        if not named:
            others = sorted({job for job, _ in jobs})
            notes.append(
                f"no rank{f' of job {self._job}' if self._job else ''} has written metrics to "
                f"{self._where}{f', but of {listed(others)}' if others else ''}: start the job "
                "with RINGREDUCE_METRICS=FOLDER, and give that folder"
            )
            raise ValueError("\n".join(notes))
        ages = {job: min(status.age for status in jobs[job]) for job in named}
        write = [job for job in named if ages[job] <= _STALE] or named
        shown = max(write, key=lambda job: (max(s.started for s in jobs[job]), -ages[job]))
        others = sorted(_name(job) for job in write if job != shown)
        if others:
            more = [f"{len(others) - _MOST_JOBS} more"] if len(others) > _MOST_JOBS else []
            notes.append(
                f"of the jobs that write there, {_name(shown)} is shown, and not "
                f"{listed(others[:_MOST_JOBS] + more)}: --job takes a name, or the first letters "
                "of what stands behind it"
            )
        return self._looks.add(jobs[shown], notes, all_write=not by_page)

    def _of_page(self, damages: Damages) -> list[Status]:
        url = self._where.rstrip("/") + "/ringreduce_metrics"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return statuses(answer.read(MOST_BYTES), url, damages)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(
                f"{url} does not answer ({error}): start the debug server on all ranks with "
                "handlers=ringreduce.debug_server.handlers() (docs/see.md)"
            ) from error

    def _of_folder(self, damages: Damages) -> list[Status]:
        folder = Path(self._where)
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".prom"))
        except OSError as error:
            raise ValueError(
                f"{folder} is not a folder that can be read ({error.strerror}): give the one of "
                "RINGREDUCE_METRICS"
            ) from error
        found: dict[tuple[str, str, int], Status] = {}
        written: dict[tuple[str, str, int], float] = {}
        for path in (folder / name for name in names):
            try:
                at = path.stat().st_mtime
                of_file = statuses(contents(path, MOST_BYTES), str(path), damages)
            except (OSError, Damaged) as error:
                if os.path.lexists(path):  # else the rank has ended meanwhile
                    why = getattr(error, "strerror", None)
                    text = f"{path} cannot be read: {why}" if why else str(error)
                    damages.add(text.removeprefix(str(path)), text)
                continue
            for status in of_file:
                of = status.job, status.meeting, status.rank
                if of in found:
                    text = f"{path} is of rank {status.rank} of {status.job}, as another file is"
                    damages.add("twice", f"{text}: the newer one counts")
                if of not in found or status.updated > found[of].updated:
                    found[of], written[of] = status, at
        # One clock dates all files of a folder, those of hosts may differ.
        for of, at in written.items():
            found[of].age = max(written.values()) - at
        return list(found.values())


def _name(job: tuple[str, str]) -> str:
    return " ".join(filter(None, (job[0], job[1][:8])))


def as_text(view: View) -> str:
    """The view for a terminal or a file, without the notes."""
    return "\n\n".join([view.headline, *map(str, tables(view))])


def app(source: Source, every: float) -> App[None]:
    """The table in a terminal, renewed every so many seconds until the user quits.

    Raises:
        ImportError: textual is not installed.
    """
    try:
        import textual.app
        import textual.widgets
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            f"ringreduce.top needs the package textual ({error}): "
            "pip install textual, or use --once"
        ) from error

    class Top(textual.app.App[None]):
        TITLE = "ringreduce top"
        BINDINGS: ClassVar = [
            ("q", "quit", "Quit"),
            *((key, f"sort('{key}')", f"by {name}") for key, (name, _) in _SORTS.items()),
        ]

        def compose(self) -> textual.app.ComposeResult:
            yield textual.widgets.Static(id="headline", markup=False)
            yield textual.widgets.DataTable[Text](cursor_type="row", zebra_stripes=True)
            yield textual.widgets.Static(id="lines", markup=False)
            yield textual.widgets.Footer()

        def on_mount(self) -> None:
            self.sorted_by = "r"
            self.query_one(textual.widgets.DataTable).add_columns(*_COLUMNS)
            self.look()
            self.set_interval(every, self.look)

        def action_sort(self, key: str) -> None:
            self.sorted_by = key
            self.show()

        def look(self) -> None:
            try:
                self.view = source.look()
            except ValueError as error:  # the job has ended, or has not begun
                self.view = View(str(error), [], [])
            self.show()

        def show(self) -> None:
            ranks, *between = tables(self.view, _SORTS[self.sorted_by][1])
            said = "\n".join([self.view.headline, *self.view.notes])
            self.query_one("#headline", textual.widgets.Static).update(said)
            self.query_one("#lines", textual.widgets.Static).update("".join(map(str, between)))
            table = self.query_one(textual.widgets.DataTable)
            at, scrolled = table.cursor_coordinate, table.scroll_y
            table.clear()
            for late, cells in ranks.rows:
                row = [Text(cell, "bold red" if late else "", justify="right") for cell in cells]
                for column in ranks.texts:
                    row[column].justify = "left"
                table.add_row(*row)
            if table.row_count:
                table.move_cursor(row=min(at.row, table.row_count - 1), scroll=False)
                table.scroll_y = scrolled

    return Top()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.top",
        description="What the ranks of a job do, and whom they wait for.",
    )
    parser.add_argument(
        "where", help="the folder of RINGREDUCE_METRICS, or a debug server's address"
    )
    parser.add_argument(
        "--job", default="", help="its name or the first letters of its identity; else the newest"
    )
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print the table, and end")
    given = parser.parse_args(arguments)
    if not 0 < given.every < 1e6:
        parser.error(f"--every {given.every} is not a time")
    source = Source(given.where, given.job)
    try:
        if not given.once:
            app(source, given.every).run()
            return 0
        source.look()
        time.sleep(max(given.every, 1.1))  # ranks write once a second
        view = source.look()
        print("".join(f"{note}\n" for note in view.notes), file=sys.stderr, end="")
        say(as_text(view))
    except (ValueError, ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
