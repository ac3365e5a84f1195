"""Who was late, and which line was slow: the one definition, while a job runs and afterwards.

A `Judge` is fed operations and messages as they were seen: by one rank of a running job
(straggler.py), or by all ranks whose files are read (timeline.py).

- What a rank waited, from when it came until the last rank came, is put on that rank; but on
  another one as far as the last rank had itself waited for that one, in another group or for a
  message.  Ranks pass that on (csrc/base/waits.h), so it is put where the delay began.  The error
  of the clocks is taken off.  The sums add up to what was waited, once.
- A rank is named for one operation if the last rank came after the median by more than all of:
  1 ms, 3 MAD above the usual delay, 4 times the longest usual one, 2 % of the step, twice the error
  of the clocks; and if that is at least 80 % of what the operation took longer than usual.  Usual
  is what lies below a gap that parts frequent delays from the rest, else 99 %.  Operations for
  which a rank was named are left out of it.
- Of a message, what counts is how much longer it was waited for than for those at the same place of
  earlier steps: a rank of a pipeline always waits for the one before it.  In a job with messages
  that holds, for the whole run, for operations to which the last rank came late since it had waited
  elsewhere; such waits do not tell who is the last one in most steps.
- If processes of this host waited for a core meanwhile (/proc/pressure/cpu), nobody is named.
- Ranks are named for the whole run if they were the last in most steps, or if most of the long
  waits were for them, in more steps than chance explains; and if that cost time.
- Between hosts, the wire is called slow if the data took much longer than usual once all ranks were
  there.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringreduce.core.words import listed, ranks_text
from ringreduce.observe.record import FROM_ROOT, TO_ROOT, UNKNOWN, Record

_WINDOW = 1024  # operations that the usual delay is taken from
_FEWEST = 64  # no rank is named before so many operations,
_FEWEST_STEPS = 8  # nor for a message before it came in so many steps
_PLACES = 1024  # of messages that are alike, in a step
_MOST_KEYS = 1024  # sizes and places of a group, of which is kept what is usual
_MOST_NAMED = 4096  # operations that are kept with the ranks that were named
_LEAST_LATE = 1e6  # ns
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_TAIL_TIMES = 4
_STEP_SHARE = 0.02
_EXPLAINS = 0.8
_STARVED = 0.5  # of the delay, without a core
# Delays lie beyond a gap if they are so many times longer than the longest below it.  A few long
# ones are usual: k of them must be as far away as the k-th root of the next two tells, of many
# delays and of fewer than 100, which have no 99 %.
_GAP, _GAP_ONCE, _GAP_OF_FEW = 4.0, 1e4, 10.0

_LEAST_MOVED = 1 << 16  # bytes that tell the rate of a line
_FEWEST_LOOKS = 16  # before a line is called slow,
SLOW_LINE = 0.5  # if it has this share of its usual rate, or of the others',
_EXPLAINS_LINE = 0.5  # and was busy for this share of the operation

_STEPS = 20  # a rank is named for the run from so many steps on,
_LAST_IN = 0.8  # if it was the last one in this share of them,
_COSTS = 0.005  # and the others waited for it for this share of the time;
_OF_WAITS, _WAITS_COST = 0.8, 0.02  # or if these shares of long waits and of time were its,
_SIGMAS = 5  # and lie so many standard deviations above what chance would give it


class Cause(NamedTuple):
    """What a rank waited elsewhere before it came.

    Attributes:
        rank: where the delay began; -2: not known.
        nanos: how long it waited.
        where: the operation in which it waited, in words.
    """

    rank: int
    nanos: float
    where: str


class Arrival(NamedTuple):
    """A rank that came late: by how many nanoseconds after the median, and why not sooner."""

    rank: int
    delay: float
    cause: Cause | None


class Wait(NamedTuple):
    """What a rank waited in an operation for the last one, by its own clock, and why it came itself
    no sooner."""

    rank: int
    begin: float
    end: float
    cause: Cause | None = None


@dataclass(slots=True)
class Seen:
    """An operation, or a message, as far as it is known.  Ranks are global ones.

    Attributes:
        group: tells its group from others.
        title: that group's name, for sentences.
        record: of a rank of it.
        begin, end: when that rank came to it, and when it ended there.
        size: ranks of the group.
        known: of them, those whose arrival is known.
        median: when half of those had come, by the same clock.
        error: of the clocks; -1: they are not known yet.
        late: the ranks that came last, the last one first.
        waits: of the ranks that waited for the last one.
        hosts: the names of the ranks' hosts, if there are several.
        ranks: of the group; by chance, each of them is the last one as often.
    """

    group: Hashable
    title: str
    record: Record
    begin: float
    end: float
    size: int
    known: int
    median: float
    error: int
    late: Sequence[Arrival]
    waits: Sequence[Wait]
    hosts: dict[int, str] = field(default_factory=dict)
    ranks: Sequence[int] = ()

    @property
    def is_message(self) -> bool:
        return self.record.is_message

    def __str__(self) -> str:
        r = self.record
        return f"{r} of {self.title} ({place(r)})"


def of_root(
    record: Record, root: int, at_root: float, median: float, late: list[Arrival]
) -> tuple[float, list[Arrival]]:
    """Since when delays count where not all ranks wait for all, and the three longest of them.

    Args:
        record: of an operation or a message, which may have no root.
        root: the root, or the peer.
        at_root: when it came, for a reduce or gather.
        median, late: as in Seen, of all ranks that are known.
    """
    if record.is_message or record.kind in FROM_ROOT:  # only the root can delay others
        late = [one for one in late if one.rank == root] or [Arrival(root, 0.0, None)]
    elif record.kind in TO_ROOT:  # only the root waits
        late = [one._replace(delay=median + one.delay - at_root) for one in late]
        late = [a for a in late if a.rank != root and a.delay > 0] or [Arrival(-1, 0.0, None)]
        median = at_root
    return median, late[:3]


def place(record: Record) -> str:
    """Where in the training a record is: "step 3, bucket 1"."""
    bucket = f", bucket {record.bucket}" if record.kind.endswith("all_reduce") else ""
    return f"step {record.step}{bucket}"


class Late(NamedTuple):
    """A rank that others waited for.

    Attributes:
        rank: its global rank, as in errors: where the delay began.
        host: the name of its host, if the group has several; else "".
        record: the operation in which they waited, as one of them saw it.
        late_ms: how long after the median the last rank came there.
        explains: the share of what the operation took longer than usual.
        group: the operation's group, in words.
        by: the rank that came late there: `rank` itself, or one that had waited for it.
        cause: in that case, what that one had waited.
        waited_ms: how long those that are watched waited.
    """

    rank: int
    host: str
    record: Record
    late_ms: float
    explains: float
    group: str = ""
    by: int = -1
    cause: Cause | None = None
    waited_ms: float = 0.0

    def __str__(self) -> str:
        since = ""
        if self.cause:
            since = (
                f" since it had waited {self.cause.nanos / 1e6:.1f} ms for rank {self.rank} in "
                f"{self.cause.where}"
            )
        of = f" of {self.group}" if self.group else ""
        host = f" (on host {self.host})" if self.host and not self.cause else ""
        return (
            f"rank {self.by if self.cause else self.rank}{host} came {self.late_ms:.1f} ms late to "
            f"{self.record}{of} ({place(self.record)}){since}; "
            f"that is {self.explains:.0%} of what it took longer than usual"
        )


class SlowWire(NamedTuple):
    """An operation whose data took much longer than usual.

    Attributes:
        record: the operation, as this rank saw it.
        took_ms: from when the last rank was there until it ended.
        usual_ms: the median of such operations.
        line: the line from this rank that was slow, in words; "" if none of its own was, as far as
            the system tells.
    """

    record: Record
    took_ms: float
    usual_ms: float
    line: str = ""

    def __str__(self) -> str:
        return (
            f"{self.record} ({place(self.record)}) took {self.took_ms:.1f} ms once all ranks "
            f"were there, {self.usual_ms:.1f} ms usually" + (f"; {self.line}" if self.line else "")
        )


class Persistent(NamedTuple):
    """A rank that was late all along, or again and again.

    Attributes:
        last_in: the share of the steps in which most was waited for it.
        cost: the share of the time for which the others waited for it.
        of_waits: its share of all waits that mattered: for 1 ms and 2 % of a step, or more.
        steps: in which it made the others wait so long.
    """

    last_in: float
    cost: float
    of_waits: float
    steps: int

    def __str__(self) -> str:
        text = (
            f"was the last one in {self.last_in:.0%} of the steps: "
            f"the others waited {self.cost:.1%} of the time for it"
        )
        if self.steps:
            text += f"; {self.of_waits:.0%} of all long waits were for it, in {self.steps} steps"
        return text


class _Usual:
    """What is usual among the last values: their median and deviation, and the longest of them."""

    def __init__(self, window: int) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self.median = self.mad = self.tail = 0.0
        self._added = 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self._added += 1
        # Sorting takes as long as some tens of operations.
        every = 8 if self._added < 64 else 64 if self._added < 512 else 256
        if self._added % every == 0:
            self.settle()

    def settle(self) -> None:
        """Decides what is usual from all values so far."""
        if self.values:
            ordered = sorted(self.values)
            self.median = ordered[len(ordered) // 2]
            self.mad = statistics.median(abs(value - self.median) for value in ordered)
            self.tail = _longest_usual(ordered)

    def limit(self) -> float:
        return max(self.median + 3 * _MAD_TO_SIGMA * self.mad, _TAIL_TIMES * self.tail)


def _longest_usual(ordered: Sequence[float]) -> float:
    """Of ascending delays, which may be a mixture of usual ones and those of a late rank."""
    count = len(ordered)
    tail = ordered[int(count * 0.99)]
    beyond_by_chance = _GAP_ONCE if count >= 100 else _GAP_OF_FEW
    first = bisect.bisect_left(ordered, _LEAST_LATE, count // 2)
    for at in range(max(first, 1), count):
        gap = max(_GAP, beyond_by_chance ** (1 / (count - at)))
        if ordered[at] >= gap * max(ordered[at - 1], _LEAST_LATE / 20):
            # The limit lies in the middle of the gap.
            return min(tail, math.sqrt(ordered[at] * max(ordered[at - 1], 1.0)) / _TAIL_TIMES)
    return tail


class CpuPressure:
    """For how long processes of this host waited for a core: the kernel's PSI."""

    def __init__(self, path: str = "/proc/pressure/cpu") -> None:
        self._path = path
        self._samples: deque[tuple[float, int]] = deque(maxlen=1024)  # both in ns
        self.sample()

    def sample(self) -> None:
        if waited := pressure_ns(self._path):  # else nothing speaks for the late rank
            self.add(time.monotonic_ns(), waited)

    def add(self, at: float, waited: int) -> None:
        self._samples.append((at, waited))

    def clear(self) -> None:
        self._samples.clear()

    def waited(self, begin: float, end: float) -> float:
        """Of that time on time.monotonic_ns(), how many ns processes waited, as far as known."""
        if len(self._samples) < 2:
            return 0.0
        before = max((s for s in self._samples if s[0] <= begin), default=self._samples[0])
        after = min((s for s in self._samples if s[0] >= end), default=self._samples[-1])
        first, last = self._samples[0], self._samples[-1]
        usual = (last[1] - first[1]) / max(1, last[0] - first[0])
        waited = after[1] - before[1]
        # A host that is never idle waits all the time.
        return float(waited) if usual > _STARVED else waited - usual * (after[0] - before[0])


def pressure_ns(path: str = "/proc/pressure/cpu") -> int:
    """How long processes of this host have waited for a core; 0: this kernel does not tell."""
    try:
        with open(path) as file:
            return int(file.readline().rpartition("=")[2]) * 1000
    except (OSError, ValueError):
        return 0


class Lines:
    """How fast the lines from this rank to other hosts are while they are busy."""

    def __init__(self, names: dict[int, str]) -> None:
        """`names`: of the ranks."""
        self._names = names
        self._looks: deque[tuple[int, dict[int, tuple[int, float, int]]]] = deque(maxlen=256)
        self._usual: dict[int, _Usual] = defaultdict(lambda: _Usual(256))  # bytes a busy second

    def add(self, at: int, uses: Iterable[tuple[int, int, float, int]]) -> None:
        """A look at the sums of bytes, busy seconds and packets sent again, by rank."""
        now = {rank: (size, busy, again) for rank, size, busy, again in uses}
        last = self._looks[-1][1] if self._looks else {}
        if now == last:
            return
        for rank, (size, busy, _) in now.items():
            old_size, old_busy, _ = last.get(rank, (size, busy, 0))
            if size - old_size >= _LEAST_MOVED and busy > old_busy:
                self._usual[rank].add((size - old_size) / (busy - old_busy))
        self._looks.append((at, now))

    def slow(self, begin: float, end: float) -> str:
        """The line that was slow then, in words; "" if none was."""
        before = next((uses for at, uses in reversed(self._looks) if at <= begin), None)
        after = next((uses for at, uses in self._looks if at >= end), None) or (
            self._looks[-1][1] if self._looks else None
        )
        if before is None or after is None:
            return ""
        found = []
        for rank, (size, busy, again) in after.items():
            old_size, old_busy, old_again = before.get(rank, (size, busy, again))
            usual = self._usual[rank]
            took = busy - old_busy
            # Latency dominates the time of a few bytes: they do not tell the rate.
            moved = size - old_size >= _LEAST_MOVED or again > old_again
            long = took > 0 and took * 1e9 >= _EXPLAINS_LINE * (end - begin)
            if not moved or not long or len(usual.values) < _FEWEST_LOOKS:
                continue
            rate = (size - old_size) / took
            if rate < SLOW_LINE * usual.median:
                found.append((rate / usual.median, rank, rate, usual.median, again - old_again))
        if not found:
            return ""
        _, rank, rate, median, again = min(found)
        text = (
            f"the line to {self._names.get(rank, rank)} moved {rate / 1e6:.1f} MB/s, "
            f"{median / 1e6:.1f} usually"
        )
        return text + (f", and sent {again} packets again" if again > 0 else "")


class _OfGroup:
    """What is usual in a group."""

    def __init__(self) -> None:
        self.delay = _Usual(_WINDOW)
        self.transfer: dict[tuple[str, int], _Usual] = {}
        self.last_transfer = 0.0  # of the operation before
        self.named: deque[bool] = deque(maxlen=_WINDOW)  # of the last operations
        # Those of a step so far, and what is usual at a place of a step.
        self.step = -1
        self.places: Counter[Hashable] = Counter()
        self.at_place: dict[Hashable, _Usual] = {}

    def usual_transfer(self, record: Record) -> _Usual:
        return _kept(self.transfer, (record.kind, record.bytes), 256)

    def place_of(self, record: Record) -> _Usual:
        """What is usual for those at the same place of a step."""
        if record.step != self.step:
            self.step = record.step
            self.places.clear()
        key = record.kind, record.root, record.bytes
        self.places[key] = min(self.places[key] + 1, _PLACES)  # steps may not be counted
        at = *key, self.places[key]
        return _kept(self.at_place, at, 64)

    def learn(self, delay: float, named: bool) -> None:
        """Unless most delays are such that a rank is named: then they are what is usual."""
        self.named.append(named)
        if not named or 2 * sum(self.named) > len(self.named):
            self.delay.add(delay)


def _kept(among: dict[Any, _Usual], key: Hashable, window: int) -> _Usual:
    """What is usual for a key; those that have not been asked for longest are dropped."""
    found = among.pop(key, None) or _Usual(window)
    among[key] = found
    if len(among) > _MOST_KEYS:
        del among[next(iter(among))]
    return found


class Judge:
    """Decides for one operation after the other; without threads, groups and files.

    Args:
        pressure: of the host whose clock the operations have; None: it is not known.
        lines: from this rank to other hosts, likewise.
        watchers: how many ranks' waits are seen.
    """

    def __init__(
        self,
        pressure: CpuPressure | None = None,
        lines: Lines | None = None,
        watchers: int = 1,
    ) -> None:
        self.late: list[Late] = []  # the latest, as the next two
        self.starved: list[Late] = []  # that would be named, had the host had a core for them
        self.wires: list[SlowWire] = []
        self.times: Counter[int] = Counter()  # how often each rank was named
        self.operations = self.messages = 0
        self.waited: dict[int, float] = defaultdict(float)  # ns, by where the delay began
        self.unknown = 0  # delays that began with a rank that is not known here
        self.begin_ns = self.end_ns = 0.0
        self.longest: tuple[float, float, str] = (0.0, 0.0, "")  # delay, its limit, and where
        self._pressure, self._lines, self._watchers = pressure, lines, watchers
        self._fewest = _FEWEST
        self._groups: dict[Hashable, _OfGroup] = defaultdict(_OfGroup)
        # The intervals in which a rank's latest waits lie, ascending.
        self._covered: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._steps: deque[float] = deque(maxlen=32)  # ns
        self._share_of_step = 0.0
        self._step, self._step_began = -1, 0.0
        self._of_step: dict[int, float] = defaultdict(float)
        self._last_in: Counter[int] = Counter()  # steps in which most was waited for a rank
        self._counted = 0  # steps
        # Long waits of a step: by rank, their sums over all steps, those that each would have by
        # chance, the sum of their squares, and in how many steps each rank caused them.
        self._long_of_step: dict[int, float] = defaultdict(float)
        self._long: dict[int, float] = defaultdict(float)
        self._by_chance: dict[int, float] = defaultdict(float)
        self._long_squares = 0.0
        self._long_steps: Counter[int] = Counter()

    def afresh(self, pressure: CpuPressure | None, watchers: int) -> Judge:
        """A judge that has seen nothing, and knows what is usual from what this one has seen."""
        judge = Judge(pressure, None, watchers)
        judge._groups, judge._steps = self._groups, self._steps
        judge._share_of_step, judge._fewest = self._share_of_step, 2
        for group in judge._groups.values():
            group.step = -1
            for usual in (group.delay, *group.transfer.values(), *group.at_place.values()):
                usual.settle()
        return judge

    def feed(self, seen: Seen) -> tuple[list[Late], SlowWire | None]:
        """Judges an operation that is done; returns what it adds."""
        record, group = seen.record, self._groups[seen.group]
        if seen.is_message:
            self.messages += 1
        else:
            self.operations += 1
        self.begin_ns = self.begin_ns or seen.begin
        self.end_ns = max(self.end_ns, seen.end)
        self._follow_steps(record.step, seen.begin)
        if seen.known < 2 or seen.error < 0 or not seen.late:
            return [], None
        last = seen.late[0]
        last_came = seen.median + last.delay
        planned = self._planned(seen, group)
        transfer = seen.end - max(last_came, seen.begin)
        usual = group.usual_transfer(record)
        longer = seen.end - seen.median - usual.median
        named = self._judge(seen, group, longer, planned)
        wire = None
        # Where not all arrivals are known, a late rank looks like a slow wire.
        all_known = seen.known == seen.size
        if seen.hosts and len(usual.values) >= _FEWEST and not named and all_known:
            limit = max(usual.limit(), usual.median + _LEAST_LATE)
            if transfer > limit and not self._is_starved(
                last_came, seen.end, transfer - usual.median
            ):
                line = self._lines.slow(last_came, seen.end) if self._lines else ""
                wire = SlowWire(record, transfer / 1e6, usual.median / 1e6, line)
                self.wires.append(wire)
        for kept in (self.late, self.starved, self.wires):
            del kept[:-_MOST_NAMED]
        usual.add(transfer)
        self._count_waits(seen, group, planned)
        group.last_transfer = transfer
        return named, wire

    def takes_long(self, group: Hashable, record: Record) -> bool:
        """Whether an operation took so long that it matters when all ranks came to it."""
        usual = self._groups[group].usual_transfer(record)
        if len(usual.values) < _FEWEST:
            return False
        return record.duration_ms * 1e6 > _LEAST_LATE + usual.median

    def _follow_steps(self, step: int, began: float) -> None:
        # Operations of several groups do not end in the order of their steps.
        if self._step - 2 <= step <= self._step:
            return
        self._end_step()
        if step > self._step and self._step_began:  # of several optimizers, several
            self._steps.append((began - self._step_began) / (step - self._step))
            self._share_of_step = _STEP_SHARE * statistics.median(self._steps)
        self._step, self._step_began = step, began

    def _planned(self, seen: Seen, group: _OfGroup) -> float | None:
        """The usual delay at the place of a message, or of an operation that waits for messages as
        well; 0 for others; None: it is not known yet."""
        if not self.messages:
            return 0.0
        at_place = group.place_of(seen.record)
        known = len(at_place.values) >= min(self._fewest, _FEWEST_STEPS)
        usual = at_place.median
        at_place.add(seen.late[0].delay)
        if not seen.is_message and not seen.late[0].cause:
            return 0.0
        return usual if known else None

    def _judge(
        self, seen: Seen, group: _OfGroup, longer: float, planned: float | None
    ) -> list[Late]:
        usual_here, fewest = 0.0, self._fewest
        delay = seen.late[0].delay
        if seen.is_message:
            if planned is None:
                return []
            usual_here = planned
            longer = delay - usual_here
        above = delay - usual_here
        limit = max(_LEAST_LATE, group.delay.limit(), self._share_of_step, 2.0 * max(0, seen.error))
        enough = len(group.delay.values) >= fewest
        if enough and above > self.longest[0]:
            self.longest = above, limit, str(seen)
        if not enough or above <= limit:
            group.learn(above, named=False)
            return []
        waited = sum(wait.end - wait.begin for wait in seen.waits) / 1e6
        # What the rank that waited longest had waited for the same one has delayed both.
        waits = max(seen.waits, key=lambda wait: wait.end - wait.begin, default=None)
        own = waits.cause if waits else None
        found = []
        for rank, delay, cause in seen.late:
            above = delay - usual_here
            if above <= limit or above < _EXPLAINS * longer:
                continue
            explains = min(1.0, above / max(longer, 1))
            began, since = rank, None
            common = own.nanos if cause and own and own.rank == cause.rank else 0.0
            if cause and cause.nanos - common >= above / 2:
                began, since = cause.rank, cause
            found.append(
                Late(
                    began,
                    seen.hosts.get(began, ""),
                    seen.record,
                    delay / 1e6,
                    explains,
                    seen.title,
                    rank,
                    since,
                    waited,
                )
            )
        last = seen.late[0].delay
        if found and self._is_starved(seen.median, seen.median + last, last):
            self.starved += [late for late in found if late.rank != UNKNOWN]
            group.learn(last - usual_here, named=False)
            return []
        group.learn(last - usual_here, named=bool(found))
        self.unknown += sum(late.rank == UNKNOWN for late in found)
        found = [late for late in found if late.rank != UNKNOWN]
        self.late += found
        self.times.update(late.rank for late in found)
        return found

    def _count_waits(self, seen: Seen, group: _OfGroup, planned: float | None) -> None:
        """Puts what was waited on the rank where the delay began."""
        last = seen.late[0]
        unplanned = 0.0 if planned is None else max(0.0, 1 - planned / max(last.delay, 1.0))
        longest: dict[int, float] = defaultdict(float)
        for wait in seen.waits:
            waited = self._cover(wait)
            if waited <= 0:
                continue
            inherited = 0.0
            if last.cause:
                # What this rank had itself waited for the same one has delayed both.
                same = wait.cause is not None and wait.cause.rank == last.cause.rank
                common = wait.cause.nanos if wait.cause and same else 0.0
                inherited = min(waited, max(0.0, last.cause.nanos - common))
            shares = [(last.rank, waited - inherited)]
            if last.cause:
                shares.append((last.cause.rank, inherited))
            for rank, share in shares:
                if share > 0:
                    self.waited[rank] += share
                    if planned == 0.0 and not seen.is_message:
                        self._of_step[rank] += share
                    longest[rank] = max(longest[rank], share * unplanned)
        for rank, share in longest.items():
            if (
                rank != UNKNOWN
                and not seen.is_message
                and share > _LEAST_LATE
                and share > self._share_of_step
                # Where a line is slow, ranks end an operation at other times, and come to the next.
                and not (seen.hosts and share <= group.last_transfer)
                and not self._is_starved(seen.median, seen.median + last.delay, last.delay)
            ):
                self._long_of_step[rank] += share
                for other in seen.ranks:
                    self._by_chance[other] += share / len(seen.ranks)

    def _cover(self, wait: Wait) -> float:
        """What of a wait has not been counted: waits in two groups at the same time are one."""
        known = self._covered[wait.rank]
        begin, end, new = wait.begin, wait.end, wait.end - wait.begin
        apart = []
        for one in known:
            if one[1] < wait.begin or one[0] > wait.end:
                apart.append(one)
                continue
            new -= max(0.0, min(one[1], wait.end) - max(one[0], wait.begin))
            begin, end = min(begin, one[0]), max(end, one[1])
        self._covered[wait.rank] = sorted([*apart, (begin, end)])[-64:]
        return new

    def _is_starved(self, begin: float, end: float, delay: float) -> bool:
        return self._pressure is not None and (self._pressure.waited(begin, end) > _STARVED * delay)

    def persistent(self) -> dict[int, Persistent]:
        """Ranks that were late all along, or again and again."""
        last_in, steps = Counter(self._last_in), self._counted
        steps += self._step >= 0  # the one that is not over
        if self._of_step:
            last_in[self._last_of_step()] += 1
        if steps < _STEPS:
            return {}
        span = max(1, self.end_ns - self.begin_ns) * self._watchers
        waits = sum(self._long.values())
        again = self._again_and_again(span, waits)
        return {
            rank: Persistent(
                last_in[rank] / steps,
                waited / span,
                self._long[rank] / waits if waits else 0.0,
                self._long_steps[rank],
            )
            for rank, waited in self.waited.items()
            if rank != UNKNOWN
            and (rank in again or (last_in[rank] >= _LAST_IN * steps and waited >= _COSTS * span))
        }

    def _again_and_again(self, span: float, waits: float) -> set[int]:
        """The fewest ranks that most of the long waits were for, if chance does not explain it."""
        ordered = sorted(self._long, key=lambda rank: -self._long[rank])
        sigma = 0.5 * math.sqrt(self._long_squares)
        ranks = max(len(self.waited), 2)
        for count in range(1, min(ranks // 2, len(ordered)) + 1):
            some = ordered[:count]
            share = sum(self._long[rank] for rank in some)
            # As far above the next one as a rank that has that share alone.
            least = self._long[some[-1]]
            following = self._long[ordered[count]] if count < len(ordered) else 0.0
            if (
                share >= _OF_WAITS * waits
                and least * (1 - _OF_WAITS) >= following * _OF_WAITS
                and share - waits * max(0.5, count / ranks) > _SIGMAS * sigma
                and all(
                    self._long[rank] >= _WAITS_COST * span
                    and self._long[rank] - self._by_chance[rank] > _SIGMAS * sigma
                    for rank in some
                )
            ):
                return set(some)
        return set()

    def _last_of_step(self) -> int:
        return max(self._of_step, key=self._of_step.__getitem__)

    def _end_step(self) -> None:
        self._counted += self._step >= 0
        if self._of_step:
            self._last_in[self._last_of_step()] += 1
            self._of_step.clear()
        for rank, waited in self._long_of_step.items():
            self._long[rank] += waited
            self._long_squares += waited**2
            self._long_steps[rank] += 1
        self._long_of_step.clear()

    # ---- in words

    def summary(self) -> list[str]:
        """Who was late, when, and what it cost: a few sentences.  They say so if nobody was."""
        seconds = max(0, self.end_ns - self.begin_ns) / 1e9
        total = sum(self.waited.values())
        messages = f" and {self.messages} messages" if self.messages else ""
        text = f"{self.operations} operations{messages}, {total / 1e6:.1f} ms of waiting in "
        by_rank = sorted(self.waited.items(), key=lambda one: -one[1])
        shares = [f"{ns / 1e6:.1f} ms for {_who(rank)}" for rank, ns in by_rank[:4]]
        if len(by_rank) > 4:
            rest = sum(ns for _, ns in by_rank[4:])
            shares.append(f"{rest / 1e6:.1f} ms for {len(by_rank) - 4} more")
        lines = [text + f"{seconds:.1f} s" + (f": {listed(shares)}" if shares else "")]
        persistent = self.persistent()
        lines += [f"rank {rank} {one}" for rank, one in sorted(persistent.items())]
        lines += self._named()
        if self.wires:
            slow = max(self.wires, key=lambda wire: wire.took_ms)
            lines.append(f"the wire was slow in {len(self.wires)} operations; at worst {slow}")
            of_line = [wire for wire in self.wires if wire.line]
            if of_line and not slow.line:
                lines.append(f"in {len(of_line)} of them a line from this rank was: {of_line[-1]}")
        quiet = len(lines) == 1
        if self.starved:
            lines.append(
                f"{len(self.starved)} more delays are not counted: "
                "processes of this host waited for a core meanwhile"
            )
        if self.unknown:
            lines.append(
                f"{self.unknown} delays began elsewhere, with a rank that is not known here: "
                "ask the ranks of the other groups, or their timelines"
            )
        if quiet:
            lines.append(self._why_nobody())
        return lines

    def _named(self) -> list[str]:
        by_rank: dict[int, list[Late]] = defaultdict(list)
        for late in self.late:
            by_rank[late.rank].append(late)
        lines = []
        for rank, all_late in sorted(by_rank.items(), key=lambda item: -len(item[1])):
            worst = max(all_late, key=lambda late: (late.cause is None, late.late_ms))
            lines.append(f"rank {rank} was late {self.times[rank]} times; at worst: {worst}")
            chains = [late for late in all_late if late.cause]
            if chains and not worst.cause:
                one = max(chains, key=lambda late: late.late_ms)
                lines.append(f"{len(chains)} of these through other ranks; at worst: {one}")
        return lines

    def _why_nobody(self) -> str:
        delay, limit, where = self.longest
        if not where:
            few = self.operations + self.messages
            return f"no rank is named, and no wire slow: {few} operations do not tell what is usual"
        return (
            f"no rank was late, and no wire slow: the longest delay was {delay / 1e6:.1f} ms, in "
            f"{where}, and {max(limit, delay) / 1e6:.1f} ms are not unusual there"
        )


def _who(rank: int) -> str:
    return "ranks that are not known here" if rank == UNKNOWN else ranks_text([rank])


def slow_ones(rates: Sequence[float]) -> tuple[float, list[int]]:
    """Of lines that are compared with each other: the usual rate, and which are slow.

    Args:
        rates: of each line, of which 0 is not known.

    Returns:
        The median of those that are not slow, and the places of the slow ones.
    """
    known = [rate for rate in rates if rate > 0]
    limit = SLOW_LINE * statistics.median(known) if known else 0.0
    slow = [at for at, rate in enumerate(rates) if 0 < rate < limit]
    usual = [rate for rate in known if rate >= limit]
    return statistics.median(usual) if usual else 0.0, slow


def waited_for(shares: dict[int, float], least: float) -> set[int]:
    """Ranks that are waited for most, at a moment: `least` of the time, and half as long as any.

    Args:
        shares: by rank, of the time.
        least: a share that matters.
    """
    most = max(shares.values(), default=0.0)
    return {rank for rank, share in shares.items() if share >= max(least, most / 2)}
