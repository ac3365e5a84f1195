"""Names the rank that the others waited for, or the wire, and when.

    with ringreduce.straggler_detection(group) as sd:
        train()
    print(sd.summary())

A thread follows the records of the group (ringreduce/record.py).  It judges each operation by the
arrival times of the ranks: a duration names nobody, since all ranks of an all-reduce wait for the
last one.  Medians and deviations are those of this group on this machine:

- A rank is named for one operation if it came after the median by more than all of: 1 ms, 3 MAD
  above the median delay, 4 times the 99th percentile, 2 % of the step, twice the error of the
  clocks; and if that is at least 80 % of what the operation took longer than usual.
- If processes of this host waited for a core meanwhile (/proc/pressure/cpu), nobody is.
- A rank is named for the whole run if it was the last one in most steps, or if most of the others'
  waiting was for it, in more steps than chance explains; and if that cost time.
- Between hosts, the wire is called slow if the data took much longer than usual once all ranks were
  there.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist

from ringreduce._backend import Backend, backend_of, extension, ranks_of, ringreduce_group
from ringreduce.observe.record import FROM_ROOT, Record, read

_POLL = 0.01  # seconds between two looks at the records
_LOG_EVERY = 60.0  # seconds between two lines about a rank
_ANSWERS_IN = 0.3  # seconds that the answers of other ranks are awaited

_WINDOW = 1024  # operations that the usual delay is taken from
_FEWEST = 64  # no rank is named before so many operations
_LEAST_LATE = 1e6  # ns
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_PERCENTILE_TIMES = 4
_STEP_SHARE = 0.02
_EXPLAINS = 0.8
_STARVED = 0.5  # of the delay, without a core

_LEAST_MOVED = 1 << 16  # bytes that tell the rate of a line
_FEWEST_LOOKS = 16  # before a line is called slow,
_SLOW_LINE = 0.5  # if it has this share of its usual rate,
_EXPLAINS_LINE = 0.5  # and was busy for this share of the operation

_STEPS = 20  # a rank is named for the run from so many steps on,
_LAST_IN = 0.8  # if it was the last one in this share of them,
_COSTS = 0.005  # and the others waited for it for this share of the time;
_OF_WAITS, _WAITS_COST = 0.8, 0.02  # or if these shares of long waits and of time were its,
_SIGMAS = 5  # and lie so many standard deviations above the half that chance would give it


class Late(NamedTuple):
    """A rank that came late to an operation.

    Attributes:
        rank: its global rank, as in errors.
        host: the name of its host, if the group has several; else "".
        record: the operation, as this rank saw it.
        late_ms: how long after the median of the ranks.
        explains: the share of what the operation took longer than usual.
    """

    rank: int
    host: str
    record: Record
    late_ms: float
    explains: float

    def __str__(self) -> str:
        r = self.record
        where = f" (on host {self.host})" if self.host else ""
        return (
            f"rank {self.rank}{where} came {self.late_ms:.1f} ms late to {r} "
            f"(step {r.step}, bucket {r.bucket}); "
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
        r = self.record
        return (
            f"{r} (step {r.step}, bucket {r.bucket}) took {self.took_ms:.1f} ms once all ranks "
            f"were there, {self.usual_ms:.1f} ms usually" + (f"; {self.line}" if self.line else "")
        )


class Persistent(NamedTuple):
    """A rank that was late all along, or again and again.

    Attributes:
        last_in: the share of the steps in which it was the last one.
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
    """What is usual among the last values: their median, MAD and 99th percentile."""

    def __init__(self, window: int) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self.median = self.mad = self.high = 0.0
        self._added = 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self._added += 1
        # Sorting takes as long as some tens of operations.
        every = 8 if self._added < 64 else 64 if self._added < 512 else 256
        if self._added % every == 0:
            ordered = sorted(self.values)
            self.median = ordered[len(ordered) // 2]
            self.mad = statistics.median(abs(value - self.median) for value in ordered)
            self.high = ordered[int(len(ordered) * 0.99)]

    def limit(self) -> float:
        return max(
            self.median + 3 * _MAD_TO_SIGMA * self.mad,
            _PERCENTILE_TIMES * self.high,
        )


class _CpuPressure:
    """For how long processes of this host waited for a core: the kernel's PSI."""

    def __init__(self, path: str = "/proc/pressure/cpu") -> None:
        self._path = path
        self._samples: deque[tuple[int, int]] = deque(maxlen=1024)  # both in ns
        self.sample()

    def sample(self) -> None:
        try:
            with open(self._path) as file:
                some = file.readline()
        except OSError:  # a kernel without PSI: then nothing speaks for the late rank
            return
        self._samples.append((time.monotonic_ns(), int(some.rpartition("=")[2]) * 1000))

    def waited(self, begin: int, end: int) -> float:
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


class _Lines:
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

    def slow(self, begin: int, end: int) -> str:
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
            if rate < _SLOW_LINE * usual.median:
                found.append((rate / usual.median, rank, rate, usual.median, again - old_again))
        if not found:
            return ""
        _, rank, rate, median, again = min(found)
        text = (
            f"the line to {self._names.get(rank, rank)} moved {rate / 1e6:.1f} MB/s, "
            f"{median / 1e6:.1f} usually"
        )
        return text + (f", and sent {again} packets again" if again > 0 else "")


class _Judge:
    """Decides for one record after the other; without threads and groups."""

    def __init__(
        self,
        size: int,
        pressure: _CpuPressure | None = None,
        hosts: dict[int, str] | None = None,
        lines: _Lines | None = None,
    ) -> None:
        """`hosts`: the names of the hosts of ranks, if there are several."""
        self._lines = lines
        self.size = size
        self._hosts = hosts or {}
        self.late: list[Late] = []
        self.starved: list[Late] = []  # that would be named, had the host had a core for them
        self.wires: list[SlowWire] = []
        self.operations = 0
        self.waited_ms: dict[int, float] = defaultdict(float)  # by the rank that came last
        self.begin_ns = self.end_ns = 0
        self._pressure = pressure
        self._delay = _Usual(_WINDOW)
        self._transfer: dict[tuple[str, int], _Usual] = {}
        self._steps: deque[float] = deque(maxlen=32)  # ns
        self._share_of_step = 0.0
        self._last_transfer = 0.0  # of the operation before
        self._step, self._step_began = -1, 0
        self._of_step: dict[int, float] = defaultdict(float)
        self._last_in: Counter[int] = Counter()  # steps in which a rank was the last one
        self._counted = 0  # steps
        # Long waits of a step: by rank, their sums over all steps, the sum of their squares, and in
        # how many steps each rank caused them.
        self._long_of_step: dict[int, float] = defaultdict(float)
        self._long: dict[int, float] = defaultdict(float)
        self._long_squares = 0.0
        self._long_steps: Counter[int] = Counter()

    def feed(self, record: Record) -> tuple[list[Late], SlowWire | None]:
        """Judges an operation that is done; returns what it adds."""
        self.operations += 1
        self.begin_ns = self.begin_ns or record.arrived_ns
        self.end_ns = record.done_ns
        self._follow_steps(record)
        if record.known < 2 or record.state != "done" or record.clock_error_ns < 0:
            return [], None
        # Of a broadcast or scatter only the root can delay other ranks.
        if record.kind in FROM_ROOT and record.last_rank != record.root:
            return [], None
        last, delay = record.late[0]
        last_came = record.median_ns + delay
        transfer = record.done_ns - max(last_came, record.arrived_ns)
        usual = self._transfer.get((record.kind, record.bytes))
        if usual is None:
            usual = self._transfer[record.kind, record.bytes] = _Usual(256)
        named = self._judge(record, record.done_ns - record.median_ns - usual.median)
        wire = None
        # Where not all arrivals are known, a late rank looks like a slow wire.
        all_known = record.known == self.size
        if self._hosts and len(usual.values) >= _FEWEST and not named and all_known:
            limit = max(usual.limit(), usual.median + _LEAST_LATE)
            if transfer > limit and not self._is_starved(
                int(last_came), record.done_ns, transfer - usual.median
            ):
                line = self._lines.slow(int(last_came), record.done_ns) if self._lines else ""
                wire = SlowWire(record, transfer / 1e6, usual.median / 1e6, line)
                self.wires.append(wire)
        usual.add(transfer)
        self._delay.add(delay)
        # A constant error of the clocks names no rank; nor does a record that lacks arrivals.
        certain = max(0.0, delay - 2 * record.clock_error_ns)
        if all_known:
            self.waited_ms[last] += certain / 1e6
            self._of_step[last] += certain
            if (
                certain > _LEAST_LATE
                and certain > self._share_of_step
                # Where a line is slow, ranks end an operation at other times, and come to the next.
                and not (self._hosts and certain <= self._last_transfer)
                and not self._is_starved(record.median_ns, int(last_came), delay)
            ):
                self._long_of_step[last] += certain
        self._last_transfer = transfer
        return named, wire

    def takes_long(self, record: Record) -> bool:
        """Whether an operation took so long that it matters when all ranks came to it."""
        usual = self._transfer.get((record.kind, record.bytes))
        if usual is None or len(usual.values) < _FEWEST:
            return False
        return record.duration_ms * 1e6 > _LEAST_LATE + usual.median

    def _follow_steps(self, record: Record) -> None:
        if record.step == self._step:
            return
        self._end_step()
        if record.step > self._step and self._step_began:  # of several optimizers, several
            self._steps.append((record.arrived_ns - self._step_began) / (record.step - self._step))
            self._share_of_step = _STEP_SHARE * statistics.median(self._steps)
        self._step, self._step_began = record.step, record.arrived_ns

    def _judge(self, record: Record, longer: float) -> list[Late]:
        if len(self._delay.values) < _FEWEST:
            return []
        limit = max(
            _LEAST_LATE,
            self._delay.limit(),
            self._share_of_step,
            2.0 * record.clock_error_ns,
        )
        if record.late[0][1] <= limit:
            return []
        found = [
            Late(
                rank, self._hosts.get(rank, ""), record, delay / 1e6, min(1, delay / max(longer, 1))
            )
            for rank, delay in record.late
            if delay > limit and delay >= _EXPLAINS * longer
        ]
        if found and self._is_starved(
            record.median_ns, int(record.median_ns + record.late[0][1]), record.late[0][1]
        ):
            self.starved += found
            return []
        self.late += found
        return found

    def _is_starved(self, begin: int, end: int, delay: float) -> bool:
        return self._pressure is not None and (self._pressure.waited(begin, end) > _STARVED * delay)

    def persistent(self) -> dict[int, Persistent]:
        """Ranks that were late all along, or again and again."""
        last_in, steps = Counter(self._last_in), self._counted
        if self._of_step:  # the one that is not over
            last_in[self._last_of_step()] += 1
            steps += 1
        if steps < _STEPS:
            return {}
        span = max(1, self.end_ns - self.begin_ns) / 1e6
        waits = sum(self._long.values())
        sigma = 0.5 * math.sqrt(self._long_squares)
        found = {}
        for rank, waited in self.waited_ms.items():
            long = self._long[rank]
            always = last_in[rank] >= _LAST_IN * steps and waited >= _COSTS * span
            often = (
                long >= _OF_WAITS * waits
                and long - waits / 2 > _SIGMAS * sigma
                and long / 1e6 >= _WAITS_COST * span
            )
            if always or often:
                found[rank] = Persistent(
                    last_in[rank] / steps,
                    waited / span,
                    long / waits if waits else 0.0,
                    self._long_steps[rank],
                )
        return found

    def _last_of_step(self) -> int:
        return max(self._of_step, key=self._of_step.__getitem__)

    def _end_step(self) -> None:
        if self._of_step:
            self._counted += 1
            self._last_in[self._last_of_step()] += 1
            self._of_step.clear()
        for rank, waited in self._long_of_step.items():
            self._long[rank] += waited
            self._long_squares += waited**2
            self._long_steps[rank] += 1
        self._long_of_step.clear()


class straggler_detection:
    """Names ranks that come late to the collectives of a group, while its body runs.

    Each rank that enters it judges for itself, from what it sees, and adds nothing to an operation.
    On one host a rank sees the arrivals of all ranks whose data it reads: of an all-reduce, all.
    Between hosts it sees those of the ranks that it receives from, and asks for the others' after
    an operation that took long.

    Args:
        group: a ringreduce group, or another, beside which one is made if there is none; None for
            the default group.
        log: whether to log a rank that is named, within the next step (for the whole run: within
            20), and at most once a minute for each rank.  The lowest other rank logs.

    Raises:
        TypeError: not a group, or one that this rank is not in.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: the group beside it could not be made.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, log: bool = True) -> None:
        self._group = ringreduce_group(group, again=False)
        self._backend: Backend = backend_of(self._group)
        self._log = log
        self._pressure = _CpuPressure()
        self._ranks = ranks_of(self._group, self._backend)  # global ones
        self._live = list(range(len(self._ranks)))
        ranks_of_hosts, names = extension().topology(self._backend)[:2]
        hosts: dict[int, str] = {}
        if len(ranks_of_hosts) > 1:
            for ranks, name in zip(ranks_of_hosts, names, strict=True):
                hosts |= {self._ranks[rank]: name for rank in ranks}
        self._hosts = hosts
        self._lines = _Lines({rank: f"rank {rank} on host {hosts[rank]}" for rank in hosts})
        self._judge = _Judge(self._group.size(), self._pressure, hosts, self._lines)
        self._lock = threading.Lock()  # of the judge
        self._next = 0
        self._lost = 0
        self._logged: dict[int, float] = {}
        self._next_look = 0  # the step
        # Records in their order; the first of them awaits answers of other ranks since then.
        self._waiting: deque[Record] = deque()
        self._asked_at = 0.0
        self._ended = ""
        self._stop = threading.Event()  # of each entry
        self._thread: threading.Thread | None = None

    def __enter__(self) -> straggler_detection:
        self._stop = threading.Event()
        done = read(self._backend)
        self._next = done[-1].index + 1 if done else 0
        self._thread = threading.Thread(target=self._follow, name="ringreduce-late", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

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
            Plain text of a few lines.  It says so if nobody was late.
        """
        with self._lock:
            return self._summary(self._judge)

    def _summary(self, judge: _Judge) -> str:
        lines = [
            f"{judge.operations} operations, {sum(judge.waited_ms.values()):.1f} ms of waiting for "
            f"the last rank in {(judge.end_ns - judge.begin_ns) / 1e9:.1f} s"
        ]
        if self._lost:
            lines.append(f"{self._lost} records were overwritten before they were read")
        if self._ended:
            lines.append(f"the group could not be followed to the end: {self._ended}")
        for rank, persistent in sorted(judge.persistent().items()):
            lines.append(f"rank {rank} {persistent}")
        by_rank: dict[int, list[Late]] = defaultdict(list)
        for late in judge.late:
            by_rank[late.rank].append(late)
        for rank, all_late in sorted(by_rank.items(), key=lambda item: -len(item[1])):
            worst = max(all_late, key=lambda late: late.late_ms)
            lines.append(f"rank {rank} was late {len(all_late)} times; at worst: {worst}")
        if judge.wires:
            slow = max(judge.wires, key=lambda wire: wire.took_ms)
            lines.append(f"the wire was slow in {len(judge.wires)} operations; at worst {slow}")
            of_line = [wire for wire in judge.wires if wire.line]
            if of_line and not slow.line:
                lines.append(f"in {len(of_line)} of them a line from this rank was: {of_line[-1]}")
        if judge.starved:
            lines.append(
                f"{len(judge.starved)} more delays are not counted: "
                "processes of this host waited for a core meanwhile"
            )
        if len(lines) == 1:
            lines.append("no rank was late, and no wire slow")
        return "\n".join(lines)

    # ---- the thread

    def _follow(self) -> None:
        while True:
            stopping = self._stop.wait(_POLL)
            self._pressure.sample()
            try:
                self._look(stopping)
            except Exception as error:  # the group has been destroyed, as a rule
                self._ended = str(error) or type(error).__name__
                return
            if stopping:
                return

    def _look(self, stopping: bool) -> None:
        # After losses there are fewer; a reconfiguration may have brought others.
        self._live = extension().live_ranks(self._backend)
        self._judge.size = len(self._live)
        self._ranks = ranks_of(self._group, self._backend)
        if self._hosts:
            uses = extension().lines(self._backend)
            self._lines.add(time.monotonic_ns(), [(self._ranks[to], *use) for to, *use in uses])
        for record in read(self._backend, self._next):
            if record.state == "running":
                break
            self._lost += max(0, record.index - self._next)  # less: of a group that replaced it
            self._next = record.index + 1
            self._waiting.append(record)
        while self._waiting:
            record = self._waiting[0]
            if self._misses_arrivals(record):
                record = self._asked(record)
                late = time.monotonic() - self._asked_at > _ANSWERS_IN
                if record.known < self._judge.size and not late and not stopping:
                    return
            self._waiting.popleft()
            self._asked_at = 0.0
            record.root = self._ranks[record.root] if record.root >= 0 else -1
            record.late = tuple((self._ranks[rank], nanos) for rank, nanos in record.late)
            with self._lock:
                self._take(record)

    def _misses_arrivals(self, record: Record) -> bool:
        missing = record.known < self._judge.size and record.state == "done"
        return missing and self._judge.takes_long(record)

    def _asked(self, record: Record) -> Record:
        """Asks the ranks once, and returns the record with the arrivals that are known by now."""
        ask = self._asked_at == 0.0
        if ask:
            self._asked_at = time.monotonic()
        known = extension().arrivals(self._backend, record.sequence, ask)
        if not known:  # all share memory: the record has all that can be known
            self._asked_at = -math.inf
        return _with_arrivals(record, known) if len(known) > record.known else record

    def _take(self, record: Record) -> None:
        named, wire = self._judge.feed(record)
        if not self._log:
            return
        if wire and wire.line:  # its sender knows
            self._say(-1, f"the wire was slow: {wire}")
        for late in named:
            self._say_of(late.rank, str(late))
        if record.step >= self._next_look:  # at what takes many steps to show
            self._next_look = record.step + _STEPS
            for rank, persistent in self._judge.persistent().items():
                self._say_of(rank, f"rank {rank} {persistent}")

    def _say_of(self, rank: int, text: str) -> None:
        """Logs a sentence on a late rank, if this is the lowest of the others."""
        me = self._ranks[self._group.rank()]
        if me == min({self._ranks[live] for live in self._live} - {rank}, default=me):
            self._say(rank, text)

    def _say(self, of: int, text: str) -> None:
        """Logs a sentence of a rank, or of the wire (-1), once a minute at most."""
        if time.monotonic() - self._logged.get(of, -math.inf) < _LOG_EVERY:
            return
        self._logged[of] = time.monotonic()
        sys.stderr.write(f"[ringreduce] {text}, in group '{self._group.group_name}'\n")


def _with_arrivals(record: Record, known: Iterable[tuple[int, int]]) -> Record:
    """The record with arrivals that were heard of later."""
    ordered = sorted((came, rank) for rank, came in known)
    median = ordered[(len(ordered) - 1) // 2][0]
    return dataclasses.replace(
        record,
        known=len(ordered),
        first_ns=ordered[0][0],
        median_ns=median,
        late=tuple((rank, float(came - median)) for came, rank in ordered[:0:-1][:3]),
    )
