"""How long a collective takes: from the constants of an installation, the ranks and the line.

Inside a host the constants are measured times; those of other sizes and numbers of ranks are
interpolated.  Between hosts a time is the longest of three:

    line        the bytes that a host's line carries, and the last hop
    path        the hops one after the other, each with its first slice
    processors  bytes through sockets, added and coded, and the hops

The hops, messages and bytes of each algorithm are those of csrc/algorithm/choose.h, which is also
asked what a group takes.  How a ring and a two-shot flow in slices is in
csrc/collectives/stream_algorithms.h.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringreduce.core.backend import extension
from ringreduce.tools.plan.lines import Line

# Of csrc/collectives/stream_algorithms.h: how a chunk is cut, and how many slices are under way.
_SLICES, _LEAST_SLICE, _LARGEST_SLICE = 16, 16 << 10, 256 << 10
_UNDER_WAY, _MOST_RATE = 1024, 5e9  # slices, and bytes a second
_HEADER = 64  # bytes of a frame, beyond those of full packets
_SHORTEST = 16384.0  # bytes of a flow: TCP sends its first ten packets at once
_QUEUES = 8  # how many times as much as a long line its queues hold
_MUCH = 1.5  # times as slow, for a hint
_LESS_SURE = 0.03  # what the logarithm of an interval gains by twice the ranks that were measured
CODECS = ("bfloat16", "float16", "int8", "int4")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@dataclass(frozen=True)
class Sockets:
    """What processes that talk over TCP cost, in seconds or seconds a byte.

    Attributes:
        hop: from a rank's send to the other's receive, without the line.
        switch: more for each hop where ranks share cores and wait for them.
        message: a rank's own time for each message.
        byte: for a byte through a socket, at one end.
        add: for a byte that is added.
        code: for a byte that a codec takes, encodes once and decodes twice.
        wire: the part by which lines take longer than rate and headers say; `wire_long`: lines with
            a round trip above 2 ms.
        meet: more of it on long lines for many flows that meet there, once they are longer than
            the line and its queue hold, and lose packets.
        pace: of a round trip, by how much a call takes longer under BBR whose flows are too short
            for its estimate of the rate.
    """

    hop: float = 15e-6
    switch: float = 20e-6
    message: float = 6e-6
    byte: float = 0.1e-9
    add: float = 0.1e-9
    code: float = 0.3e-9
    wire: float = 0.01
    wire_long: float = 0.05
    meet: float = 0.1
    pace: float = 0.3


@dataclass(frozen=True)
class Job:
    """Who takes part.

    Attributes:
        ranks: all together.
        hosts: as many ranks on each.
        line: of each host; None: all are on one host.
        cores: of each host, for its ranks; 0: enough.
        emulated: all hosts are on one machine and share these cores.
        bandwidth_known: RINGREDUCE_BANDWIDTH_MBIT or RINGREDUCE_RING=measure tells the group the
            line's rate, else its calls measure it, and the choice of the hierarchy and of coded
            schedules takes it for 8 Gbit/s.
    """

    ranks: int
    hosts: int = 1
    line: Line | None = None
    cores: int = 0
    emulated: bool = False
    bandwidth_known: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.hosts < 1 or self.ranks % self.hosts:
            raise ValueError(
                f"{self.ranks} ranks on {self.hosts} hosts: each host has as many, at least one"
            )
        if self.hosts > 1 and self.line is None:
            raise ValueError("several hosts need a line between them: --link 10Gbit,0.2ms")

    @property
    def per_host(self) -> int:
        """Ranks on each host."""
        return self.ranks // self.hosts

    @property
    def crowd(self) -> float:
        """How many ranks share a core."""
        on_machine = self.ranks if self.emulated else self.per_host
        return max(1.0, on_machine / self.cores) if self.cores else 1.0


# Measured times inside a host, by number of ranks and kind: [bytes, seconds], by size.
Table = dict[int, dict[str, Sequence[tuple[float, float]]]]


@dataclass(frozen=True)
class Estimate:
    """A predicted time in seconds.

    Attributes:
        seconds: expected as the median.
        low, high: between them the median of a run is expected, in 9 of 10 cases.
        algorithm: what the group runs.
        bound: what most of the time goes to: "line", "path", "processors" or "memory".
    """

    seconds: float
    low: float
    high: float
    algorithm: str
    bound: str


def flows_of_a_host(world: int, per_host: int) -> float:
    """How many ranks' bytes share a host's line if all ranks send to all."""
    return max(1.0, per_host * (world - per_host) / (world - 1))


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of a curve through points, which are sorted and have positive coordinates.

    Waits and passes over memory take a + b x. So the curve is straight between the logarithms of
    the values and of x + a / b, where the first points say what a / b is.  Beyond the last point it
    is proportional to x, below the first it is constant.
    """
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1] * x / points[-1][0]
    (near, least), (far, more) = points[0], points[min(2, len(points) - 1)]
    start = max(0.0, (far * least - near * more) / (more - least)) if more > least else 0.0
    at = bisect.bisect_left(points, (x,))
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    part = math.log((x + start) / (x0 + start)) / math.log((x1 + start) / (x0 + start))
    return math.exp(math.log(y0) + part * math.log(y1 / y0))


def shared_time(table: Table, kind: str, size: float, ranks: int) -> float:
    """Seconds of a collective inside a host.

    Between numbers of ranks that were measured it interpolates.  Beyond the largest it takes the
    time to grow in proportion, as it does where ranks share cores or memory.
    """
    if ranks == 1:
        return 0.0
    of_ranks = [
        (float(count), interpolated(kinds[kind], size))
        for count, kinds in sorted(table.items())
        if kind in kinds
    ]
    if not of_ranks:
        raise ValueError(f"{kind} was not measured inside a host: run `plan measure` again")
    return interpolated(of_ranks, ranks)


@dataclass(frozen=True)
class _Parts:
    """What the time of a call between hosts is made of: seconds."""

    line: float
    path: float
    processors: float

    @property
    def seconds(self) -> float:
        return max(self.line, self.path, self.processors)

    @property
    def bound(self) -> str:
        return max(("line", "path", "processors"), key=lambda name: getattr(self, name))


def _slice_of(share: float) -> float:
    return min(share, max(_LEAST_SLICE, min(share / _SLICES, _LARGEST_SLICE)))


def _lanes(line: Line) -> int:
    """How many connections a stream has come to after a while, at least (docs/hosts.md)."""
    return 16 if line.is_long or line.loss else 1


def _wire(line: Line, costs: Sockets, flows: int, flow: float) -> float:
    """By which factor a byte takes longer on the line than its rate and headers say."""
    if not line.is_long:
        return 1 + costs.wire
    held = _QUEUES * line.rate * line.round_trip
    return 1 + costs.wire_long + costs.meet * (1 - 1 / flows) * min(1.0, flows * flow / held)


@dataclass(frozen=True)
class _Stream:
    """A call over streams.

    Attributes:
        kind, algorithm: what runs.
        size: bytes of the whole message.
        width: bytes of an element.
        codec: of the values, or "".
        world: ranks that take part in it.
        line: of each host.
        crowd: how many ranks share a core.
        flows: how many ranks' bytes share a host's line where all send to all.
        hop: of the cost by which the group chooses, for the ring's window.
        bruck: the hops and messages of Bruck's all-gather.
    """

    kind: str
    algorithm: str
    size: float
    width: int
    codec: str
    world: int
    line: Line
    crowd: float
    flows: float
    hop: float
    bruck: tuple[int, int]

    @property
    def carried(self) -> float:
        """Bytes of the message on the line."""
        return coded_size(self.size, self.codec, self.width) if self.codec else self.size


def coded_size(size: float, codec: str, width: int) -> int:
    """Bytes that a codec makes of a message with elements of `width` bytes."""
    coded: int = extension().coded_bytes(codec, max(1, int(size / width)))
    return coded


def stream_parts(call: _Stream, costs: Sockets) -> _Parts:
    """The parts of a call among ranks that talk over TCP."""
    P, line, kind, algorithm = call.world, call.line, call.kind, call.algorithm
    crowd = max(1.0, call.crowd)
    hop = line.delay + (costs.hop + (costs.switch if crowd > 1 else 0)) * crowd
    message = costs.message * crowd
    whole, share = call.carried, call.carried / P
    gathers = algorithm in ("bruck", "direct")
    # What a rank sends to another before it needs an answer, and to how many.
    flow = whole if (gathers and kind == "all_reduce") or kind == "broadcast" else share
    flows = 1 if algorithm in ("ring", "chain", "tree") else P - 1
    on_wire = _wire(line, costs, flows, flow)
    if flows > 1:
        on_wire *= call.flows
    beta = max(line.byte * on_wire, 1 / line.loss_rate(_lanes(line)))
    burst = line.burst / line.rate  # a shaped line that was idle lets as much pass at once
    slice_ = _slice_of(flow)
    if gathers:
        hops, messages = call.bruck if algorithm == "bruck" else (1, P - 1)
        carried = (P - 1) * (flow + _HEADER)
        path = hops * (hop + line.again(carried / hops)) + messages * message
        added = P * whole if kind == "all_reduce" else 0.0
        on_line = max(path, path + carried * beta - min(path, burst))
    elif kind == "broadcast":
        carried = flow + _HEADER
        levels = P - 1 if algorithm == "chain" else math.ceil(math.log2(P))
        first = slice_ if algorithm == "chain" else flow
        each = hop + message + first * beta + line.again(first)
        path = levels * each + (flow - slice_ if algorithm == "chain" else 0) * beta
        added, on_line = 0.0, carried * beta + hop
    else:
        # Halves of an all-reduce: a reduce-scatter and an all-gather.  On a ring all hops but the
        # first carry partial sums until the results go round.
        halves = 2 if kind == "all_reduce" else 1
        stages = halves * (P - 1) if algorithm == "ring" else halves
        step = hop + flows * message + line.again(flows * slice_)
        carried = halves * (P - 1) * (share + _HEADER)
        if algorithm == "ring" and call.width == 2 and not call.codec and kind != "all_gather":
            carried += (P - 2) * share
        # Each stage waits for its first slice, unless the line is busy until then.
        rounds = _rounds(share, slice_, P, call.hop) if algorithm == "ring" else 1
        path = rounds * stages * (step + flows * slice_ * beta) + flows * (share - slice_) * beta
        path = max(path - min(stages * step, burst), stages * step)
        on_line = carried * beta + max(0.0, step - burst)
        added = whole if kind != "all_gather" else 0.0
    if line.is_long and line.congestion == "bbr" and _SHORTEST < flow < line.rate * line.round_trip:
        on_line += costs.pace * line.round_trip
        path += costs.pace * line.round_trip
    coded = 3 * call.size * 4 / call.width * costs.code if call.codec else 0.0
    used = 2 * carried * costs.byte + added * costs.add + coded
    return _Parts(on_line, path, used * crowd + hop)


def _rounds(share: float, slice_: float, ranks: int, hop: float) -> int:
    """How often a ring's window of slices goes round (csrc/collectives/stream_algorithms.h)."""
    slices = max(1, math.ceil(share / max(1.0, slice_)))
    under_way = max(1, _UNDER_WAY // ranks)
    window = min(slices, under_way, math.ceil((3 * _LARGEST_SLICE + hop * _MOST_RATE) / slice_))
    return math.ceil(slices / window)


@dataclass(frozen=True)
class Model:
    """The constants of an installation, and what follows from them.

    Attributes:
        sockets: between hosts.
        shared: inside a host.
        spread: by what bounds a time, the logarithm of the ratio of a measured median and its
            prediction which 9 of 10 do not exceed.
        fitted: the most ranks of a host and the most hosts that were measured.
        flops: of one rank, a second.
        cores: of the machine.
    """

    sockets: Sockets = field(default_factory=Sockets)
    shared: Table = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    fitted: tuple[int, int] = (4, 4)
    flops: float = 50e9
    cores: int = 0

    def chooser_cost(self, job: Job) -> dict[str, float]:
        """By which a group of that job would choose its algorithms (csrc/epoch/network.cc)."""
        cost = dict(extension().wire_cost(None))
        system = cost.pop("system")
        assert job.line is not None
        cost["hop"] = system + job.line.delay
        cost["byte" if job.bandwidth_known else "measured"] = 1 / job.line.rate
        return cost

    def _stream(self, kind: str, size: float, codec: str, job: Job, width: int) -> _Stream:
        """What a group on several hosts runs for a call."""
        assert job.line is not None
        cost = self.chooser_cost(job)
        # Where hosts hold several ranks, each has a part of coded values, and its own ring.
        world, part = (job.hosts, size / job.per_host) if codec else (job.ranks, size)
        coded = coded_size(part, codec, width) if codec else 0
        elements = int(part / width)
        algorithm, _, candidates = extension().choose(
            kind, elements * 4 if codec else int(part), elements * 4 if width == 2 else int(part),
            coded, world, job.per_host, False, cost,
        )  # fmt: skip
        bruck = {name: (int(h), int(m)) for name, _, h, m, _ in candidates}.get("bruck", (0, 0))
        among_hosts = algorithm == "hierarchical" or (bool(codec) and job.per_host > 1)
        return _Stream(
            kind, algorithm, size, width, codec, job.hosts if among_hosts else job.ranks, job.line,
            job.crowd, 1.0 if among_hosts else flows_of_a_host(job.ranks, job.per_host),
            cost["hop"], bruck,
        )  # fmt: skip

    def choice(self, kind: str, size: float, codec: str, job: Job, width: int = 4) -> str:
        """The algorithm that a group takes between hosts."""
        return self._stream(kind, size, codec, job, width).algorithm

    def _parts(self, call: _Stream, job: Job) -> _Parts:
        """Of a call on several hosts."""
        if call.world == job.ranks:
            return stream_parts(call, self.sockets)
        # Inside the host a reduce-scatter and an all-gather, or the one that the call is.  Between
        # hosts each rank has a part; all parts share the line.
        way = "ring" if call.algorithm == "hierarchical" else call.algorithm
        parts = stream_parts(replace(call, algorithm=way), self.sockets)
        inside = sum(
            shared_time(self.shared, half, call.size, job.per_host)
            for half in ("reduce_scatter", "all_gather")
            if call.kind in (half, "all_reduce")
        )
        return _Parts(
            parts.line + inside, parts.path + inside, parts.processors / job.per_host + inside
        )

    def collective(
        self, kind: str, size: float, job: Job, codec: str = "", width: int = 4
    ) -> Estimate:
        """The time of one call, in a row of such calls.

        Args:
            kind: one of KINDS.
            size: bytes of the whole message of a rank, before a codec.
            job: who takes part.
            codec: of CODECS, or "" for the exact call.  Inside a host there is none.
            width: bytes of an element.

        Raises:
            ValueError: it is not modelled or was not measured.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind} is not modelled: {', '.join(KINDS)} are")
        if codec and codec not in CODECS:
            raise ValueError(f"there is no codec '{codec}': {', '.join(CODECS)} are")
        if codec and kind != "all_reduce":
            raise ValueError(f"a codec is for all_reduce only, and not for {kind}")
        if job.ranks == 1:
            return Estimate(0.0, 0.0, 0.0, "", "memory")
        if job.hosts == 1:
            seconds = shared_time(self.shared, kind, size, job.ranks)
            name, _, _ = extension().choose(
                kind, int(size), int(size), 0, job.ranks, job.ranks, True, {}
            )
            return self._around(seconds, name, "memory", job)
        call = self._stream(kind, size, codec, job, width)
        parts = self._parts(call, job)
        return self._around(parts.seconds, call.algorithm, parts.bound, job)

    def told(
        self, kind: str, size: float, job: Job, codec: str = "", width: int = 4
    ) -> tuple[Estimate, Estimate] | None:
        """Whether a group would choose much better if it knew the rate of its line.

        Args:
            kind, size, job, codec, width: as for `collective`.

        Returns:
            The time of what the group takes, and of what it would take; None if that is the same,
            or if the former is not slower by half.
        """
        if job.hosts == 1 or job.bandwidth_known:
            return None
        taken = self.collective(kind, size, job, codec, width)
        better = self.collective(kind, size, replace(job, bandwidth_known=True), codec, width)
        if better.algorithm == taken.algorithm or taken.seconds <= _MUCH * better.seconds:
            return None
        return taken, better

    def best(self, size: float, job: Job, width: int = 4) -> tuple[str, Estimate]:
        """The codec with the shortest all-reduce, or ""; and its time."""
        codecs = ("", *CODECS) if job.hosts > 1 else ("",)
        found = [(c, self.collective("all_reduce", size, job, c, width)) for c in codecs]
        return min(found, key=lambda pair: pair[1].seconds)

    def _around(self, seconds: float, algorithm: str, bound: str, job: Job) -> Estimate:
        spread = self.spread.get(bound, 0.25)
        # Farther from what was measured it is less certain.
        count, known = (job.hosts, self.fitted[1]) if job.hosts > 1 else (job.ranks, self.fitted[0])
        spread += _LESS_SURE * max(0.0, math.log2(count / known))
        factor = math.exp(spread)
        return Estimate(seconds, seconds / factor, seconds * factor, algorithm, bound)
