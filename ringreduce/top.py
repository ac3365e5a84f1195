"""What the ranks of a running job do now, and whom they wait for: top for a job.

    python -m ringreduce.top FOLDER            # that of RINGREDUCE_METRICS
    python -m ringreduce.top http://host:25999 # torch's debug server, with debug_server.py's page
    python -m ringreduce.top FOLDER --once     # two looks, a second apart, as plain text

`rows` compares two looks at the metrics (metrics.py); the page of the debug server shows the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ringreduce.metrics import Status, statuses
from ringreduce.record import ranks_text

if TYPE_CHECKING:
    from textual.app import App

__path__: list[str] = []  # else `python -m` warns that the package has imported this module

_STALE = 5.0  # seconds without news from a rank
_LONG = 2.0  # seconds of an operation, from which on it says who is missing
MOST_LINES = 16  # that are shown
_BUSY, _SLOW = 0.2, 0.5  # a line is slow if so busy, and so much slower than others
_APART = 0.5  # seconds between two looks, at least
WAITS = 0.05  # a rank that the others wait for is named from this share of the time on


@dataclass(frozen=True)
class Row:
    """What a rank does: a line of the table.

    Attributes:
        rank, host, pid, step: as in Status.
        operations, megabytes: a second.
        inside: the share of the time in operations.
        waits: the share of the time that it waits for other ranks there.
        waited_for: the share of the time that the others wait for it, on average.
        now: what it does, in words.
    """

    rank: int
    host: str
    pid: int
    step: int
    operations: float
    megabytes: float
    inside: float
    waits: float
    waited_for: float
    now: str

    def cells(self) -> tuple[str, ...]:
        return (
            str(self.rank),
            self.host,
            str(self.pid),
            str(self.step),
            f"{self.operations:.0f}",
            f"{self.megabytes:.1f}",
            f"{self.inside:.0%}",
            f"{self.waits:.0%}",
            f"{self.waited_for:.0%}",
            self.now,
        )


@dataclass(frozen=True)
class LineRow:
    """What the line from a rank to one of another host does.

    Attributes:
        sender, receiver: their ranks.
        sender_host, receiver_host: their hosts.
        megabytes: a second, of bytes that have arrived.
        busy: the share of the time in which it had bytes to move.
        resent: packets that were sent again, a second.
    """

    sender: int
    receiver: int
    sender_host: str
    receiver_host: str
    megabytes: float
    busy: float
    resent: float

    @property
    def rate(self) -> float:
        """Megabytes a second while it has bytes to move."""
        return self.megabytes / self.busy if self.busy else 0.0

    def __str__(self) -> str:
        return (
            f"the line from rank {self.sender} ({self.sender_host}) to rank {self.receiver} "
            f"({self.receiver_host})"
        )

    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.sender} ({self.sender_host})",
            f"{self.receiver} ({self.receiver_host})",
            f"{self.megabytes:.1f}",
            f"{self.rate:.1f}",
            f"{self.busy:.0%}",
            f"{self.resent:.0f}",
        )


LINE_COLUMNS = ("FROM", "TO", "MB/S", "MB/S WHILE BUSY", "BUSY", "RESENT/S")
COLUMNS = ("RANK", "HOST", "PID", "STEP", "OPS/S", "MB/S", "IN OPS", "WAITS", "WAITED FOR", "NOW")
TEXT_COLUMNS = (1, len(COLUMNS) - 1)
LINE_TEXT_COLUMNS = (0, 1)
# Keys that sort by a column; the largest first, but for ranks.
_SORTS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "r": ("rank", lambda row: row.rank),
    "l": ("waited for", lambda row: -row.waited_for),
    "w": ("waits", lambda row: -row.waits),
    "o": ("ops/s", lambda row: -row.operations),
    "b": ("MB/s", lambda row: -row.megabytes),
}


def rows(before: Sequence[Status], now: Sequence[Status]) -> list[Row]:
    """What happened between two looks.

    Args:
        before: an earlier look; ranks that it lacks have no rates yet.
        now: the later one.

    Returns:
        A row for each rank of the later look.
    """
    old = {status.rank: status for status in before}
    waits: dict[int, dict[int, float]] = {}  # of each rank, for each
    for status in now:
        earlier = old.get(status.rank)
        if earlier and _goes_on(earlier, status):
            span = status.updated - earlier.updated
            waits[status.rank] = {
                late: max(0.0, seconds - earlier.waited.get(late, 0.0)) / span
                for late, seconds in status.waited.items()
            }
    return [_row(old.get(s.rank), s, now, waits) for s in now]


def lines(before: Sequence[Status], now: Sequence[Status]) -> list[LineRow]:
    """What the lines between hosts did between two looks.

    Args:
        before, now: as for `rows`.

    Returns:
        Those that moved bytes, the busiest first.
    """
    old = {status.rank: status for status in before}
    hosts = {status.rank: status.host for status in now}
    found = []
    for status in now:
        earlier = old.get(status.rank)
        if not earlier or not _goes_on(earlier, status):
            continue
        span = status.updated - earlier.updated
        for receiver, use in status.lines.items():
            zeros = [0.0] * 3
            size, busy, resent = (
                max(0.0, new - last)
                for new, last in zip(use, earlier.lines.get(receiver, zeros), strict=True)
            )
            if size > 0:
                host = hosts.get(receiver, "?")
                found.append(
                    LineRow(
                        status.rank,
                        receiver,
                        status.host,
                        host,
                        size / span / 1e6,
                        min(1.0, busy / span),
                        resent / span,
                    )
                )
    return sorted(found, key=lambda line: -line.busy)


def slow_lines(table: Sequence[LineRow]) -> str:
    """Which lines are slow: one, all from a host, or all to a host.

    Args:
        table: the lines.

    Returns:
        A sentence; "" if none is busy for a fifth of the time and less than half as fast as the
        median of the others.
    """
    slow = []
    for line in table:
        others = [other.rate for other in table if other is not line]
        if others and line.busy >= _BUSY and line.rate < _SLOW * statistics.median(others):
            slow.append(line)
    if not slow:
        return ""
    worst = min(slow, key=lambda line: line.rate)
    usual = statistics.median(line.rate for line in table if line not in slow)
    rates = f"{worst.rate:.1f} MB/s while busy, where the others have {usual:.1f}"
    for end, word in (("sender_host", "from"), ("receiver_host", "to")):
        host = getattr(worst, end)
        of_host = [line for line in table if getattr(line, end) == host]
        if len(of_host) > 1 and all(line in slow for line in of_host):
            return f"All lines {word} host {host} are slow: {rates}."
    return f"T{str(worst)[1:]} is slow: {rates}."


def _goes_on(before: Status, now: Status) -> bool:
    """Whether the same process has written since, and its sums have not begun anew."""
    return (
        now.updated > before.updated
        and now.pid == before.pid
        and now.operations >= before.operations
    )


def _row(
    before: Status | None,
    now: Status,
    ranks: Sequence[Status],
    waits: dict[int, dict[int, float]],
) -> Row:
    operations = size = seconds = 0.0
    if before and _goes_on(before, now):
        span = now.updated - before.updated
        operations = (now.operations - before.operations) / span
        size = (now.bytes - before.bytes) / span
        seconds = (now.seconds - before.seconds) / span
    others = [of for rank, of in waits.items() if rank != now.rank]
    return Row(
        rank=now.rank,
        host=now.host,
        pid=now.pid,
        step=now.step,
        operations=operations,
        megabytes=size / 1e6,
        # An operation counts when it ends: a long one may be longer than the time between looks.
        inside=min(1.0, seconds),
        waits=min(1.0, sum(waits.get(now.rank, {}).values())),
        waited_for=min(1.0, sum(of.get(now.rank, 0.0) for of in others) / max(1, len(others))),
        now=_doing(now, ranks),
    )


def _doing(status: Status, ranks: Sequence[Status]) -> str:
    if status.age > _STALE:
        return f"no news for {status.age:.0f} s"
    if status.running:
        group = max(status.running, key=lambda name: status.running_seconds[name])
        seconds = status.running_seconds[group]
        text = status.running[group]
        return f"{text} for {seconds:.1f} s" if seconds >= 0.1 else text
    waiting = [
        (seconds, other)
        for other in ranks
        for seconds in other.running_seconds.values()
        if seconds > _LONG and other.age <= _STALE
    ]
    if not waiting:
        return "computes"
    seconds = max(seconds for seconds, _ in waiting)
    who = ranks_text({other.rank for _, other in waiting})
    return f"not in the operation of {who}, for {seconds:.1f} s"


def late_ranks(table: Sequence[Row]) -> set[int]:
    """The ranks that the others wait for: 5 % of the time, and half as long as for any, or more.

    Args:
        table: the rows of all ranks.

    Returns:
        Their ranks.
    """
    most = max((row.waited_for for row in table), default=0.0)
    return {row.rank for row in table if row.waited_for >= max(WAITS, most / 2)}


def headline(table: Sequence[Row], job: str) -> str:
    """What the job does, and whom it waits for.

    Args:
        table: the rows of all ranks.
        job: its name.

    Returns:
        A line of text.
    """
    hosts = len({row.host for row in table})
    text = f"{job}: {len(table)} ranks on {hosts} host{'s' * (hosts != 1)}"
    text += f", step {max((row.step for row in table), default=0)}"
    if not late_ranks(table):
        return f"{text}. No rank is waited for {WAITS:.0%} of the time."
    late = max(table, key=lambda row: row.waited_for)
    on = f" on {late.host}" if hosts > 1 else ""
    return f"{text}. The others wait {late.waited_for:.0%} of the time for rank {late.rank}{on}."


class View(NamedTuple):
    """What there is to see of a job.

    Attributes:
        headline: in words.
        rows: of the ranks.
        lines: between hosts, the busiest first.
    """

    headline: str
    rows: list[Row]
    lines: list[LineRow]


class Looks:
    """The last two looks at each rank, half a second apart at least."""

    def __init__(self) -> None:
        self._before: dict[int, Status] = {}
        self._last: dict[int, Status] = {}
        self._changed: dict[int, float] = {}  # when a rank's figures did, on time.monotonic()

    def add(self, now: Sequence[Status]) -> View:
        """Looks once more.

        Args:
            now: what all ranks have written last.

        Returns:
            What there is to see.
        """
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
        line = headline(table, now[0].job if now else "no job")
        return View(f"{line} {slow_lines(between)}".rstrip(), table, between)

    def _age(self, status: Status) -> float:
        """Seconds since its figures were new; clocks of other hosts do not tell."""
        here = time.time() - status.updated if status.host == socket.gethostname() else 0.0
        return max(here, time.monotonic() - self._changed[status.rank])


class Source:
    """Where the metrics of a job are: a folder, or torch's debug server."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._looks = Looks()

    def look(self) -> View:
        """Looks once more.

        Raises:
            ValueError: nothing can be read there, with what to do.
        """
        now = statuses(self._texts())
        if not now:
            raise ValueError(
                f"no rank has written metrics to {self._where}: start the job with "
                "RINGREDUCE_METRICS=FOLDER, and give that folder"
            )
        return self._looks.add(now)

    def _texts(self) -> list[str]:
        if self._where.startswith(("http://", "https://")):
            url = self._where.rstrip("/") + "/ringreduce_metrics"
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    return [answer.read().decode()]
            except (urllib.error.URLError, OSError) as error:
                raise ValueError(
                    f"{url} does not answer ({error}): start the debug server on all ranks with "
                    "handlers=ringreduce.debug_server.handlers() (docs/see.md)"
                ) from error
        folder = Path(self._where)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: give the one of RINGREDUCE_METRICS")
        texts = []
        for path in folder.glob("*.prom"):
            try:
                texts.append(path.read_text())
            except FileNotFoundError:  # the rank has ended
                continue
        return texts


def as_text(view: View) -> str:
    """The view for a terminal or a file.

    Args:
        view: what to show.

    Returns:
        Lines of text.
    """
    ranks = _aligned(COLUMNS, [row.cells() for row in view.rows], TEXT_COLUMNS)
    return "\n\n".join(filter(None, [view.headline, ranks, _lines_text(view)]))


def _lines_text(view: View) -> str:
    cells = [line.cells() for line in view.lines[:MOST_LINES]]
    return _aligned(LINE_COLUMNS, cells, LINE_TEXT_COLUMNS) if cells else ""


def _aligned(names: Sequence[str], cells: Sequence[Sequence[str]], texts: Sequence[int]) -> str:
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (names, *cells)
    )


def app(source: Source, every: float) -> App[None]:
    """The table in a terminal, until the user quits.

    Args:
        source: where the metrics are.
        every: seconds between two looks.

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
            yield textual.widgets.Static(id="headline")
            yield textual.widgets.DataTable[Text](cursor_type="row", zebra_stripes=True)
            yield textual.widgets.Static(id="lines")
            yield textual.widgets.Footer()

        def on_mount(self) -> None:
            self.sorted_by = "r"
            self.query_one(textual.widgets.DataTable).add_columns(*COLUMNS)
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
            self.query_one("#headline", textual.widgets.Static).update(self.view.headline)
            self.query_one("#lines", textual.widgets.Static).update(_lines_text(self.view))
            table = self.query_one(textual.widgets.DataTable)
            at = table.cursor_coordinate
            scrolled = table.scroll_y
            table.clear()
            late_ones = late_ranks(self.view.rows)
            for row in sorted(self.view.rows, key=_SORTS[self.sorted_by][1]):
                late = row.rank in late_ones
                table.add_row(
                    *(
                        Text(
                            cell,
                            style="bold red" if late else "",
                            justify="left" if column in TEXT_COLUMNS else "right",
                        )
                        for column, cell in enumerate(row.cells())
                    )
                )
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
    parser.add_argument("job", help="the folder of RINGREDUCE_METRICS, or a debug server's address")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print the table, and end")
    given = parser.parse_args(arguments)
    if not given.every > 0:
        parser.error(f"--every {given.every} is not a time")
    source = Source(given.job)
    try:
        if not given.once:
            app(source, given.every).run()
            return 0
        source.look()
        time.sleep(max(given.every, 1.1))  # ranks write once a second
        print(as_text(source.look()))
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
