"""The time of a training step: of a model that is described, or of a timeline that is replayed.

A step is the computation of the slowest rank and what is left of the collectives when it ends.  The
buckets of a gradient become ready during the backward; a group runs one at a time, in that order.

The slowest of more ranks is slower.  A timeline has the times of computation of all its ranks and
steps; the expected maximum of as many draws as there are ranks is taken from their distribution,
whose tail beyond the 90th percentile is continued as an exponential one.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringreduce.observe.files import Group, Operation, load, operations
from ringreduce.observe.record import Record
from ringreduce.sparse import bytes_of_code, share_of
from ringreduce.tools.plan.model import Estimate, Job, Model

_BUCKET, _FIRST_BUCKET = 25 << 20, 1 << 20  # of DDP
_COMMON = 0.9  # the part of the distribution that is taken as it is
_LEAST_STEPS = 3
_LEAST_AWAY, _MOST_AWAY = 0.02, 0.1
_WARM_UP = 2  # steps of a timeline that are left out: connections and memory are new
_WIDTHS = {"float16": 2, "bfloat16": 2}
_EXACT = 4096.0  # bytes of a bucket's exact elements, beside a codec


@dataclass(frozen=True)
class Bucket:
    """A collective of a step.

    Attributes:
        size: bytes.
        ready: when it is called, in seconds after the step's first one.
        kind, codec: as in records.
        width: bytes of an element.
    """

    size: float
    ready: float
    kind: str = "all_reduce"
    codec: str = ""
    width: int = 4


@dataclass(frozen=True)
class Step:
    """What is to be synchronized, and when.

    Attributes:
        buckets: in the order of their calls.
        compute: seconds of a rank's computation in a step, one for each rank and step seen.
        times: seconds of steps, as measured; none of a model that is described.
        overlaps: whether the computation goes on beside the collectives.
    """

    buckets: tuple[Bucket, ...]
    compute: tuple[float, ...]
    times: tuple[float, ...] = ()
    overlaps: bool = True


@dataclass(frozen=True)
class StepEstimate:
    """Predicted seconds.

    Attributes:
        seconds, low, high: of a step, with its interval.
        mean: of the computation of a rank.
        compute: of that of the slowest rank.
        exposed: of collectives that the computation does not hide.
        buckets: of each collective.
    """

    seconds: float
    low: float
    high: float
    mean: float
    compute: float
    exposed: float
    buckets: tuple[Estimate, ...]

    @property
    def efficiency(self) -> float:
        """The part of the step that a rank computes, on average; it waits for the rest."""
        return self.mean / self.seconds if self.seconds else 1.0


def expected_maximum(samples: Sequence[float], ranks: int) -> float:
    """The expected maximum of that many independent draws.

    Up to the 90th percentile draws are those of the samples.  Beyond, they are exponential with the
    mean of what the samples have there: the maximum of k of them is that mean times the harmonic
    number of k (Renyi, 1953), and k is binomial.
    """
    ordered = sorted(samples)
    count = len(ordered)
    split = min(count - 1, math.ceil(_COMMON * count))
    threshold = ordered[split - 1] if split else ordered[0]
    tail = [x - threshold for x in ordered[split:]]
    beyond = len(tail) / count  # the probability of a draw in the tail
    total = 0.0
    for i, x in enumerate(ordered[:split]):  # the maximum is the i-th of these
        total += x * (((i + 1) / count) ** ranks - (i / count) ** ranks)
    excess = statistics.fmean(tail) if tail else 0.0
    harmonic = math.fsum((1 - (1 - beyond) ** k) / k for k in range(1, ranks + 1))
    return total + (1 - (1 - beyond) ** ranks) * threshold + excess * harmonic


def simulated(step: Step, times: Sequence[float]) -> float:
    """Seconds of the collectives that the computation does not hide."""
    if not step.overlaps:
        return sum(times)
    free = 0.0
    for bucket, seconds in zip(step.buckets, times, strict=True):
        free = max(free, bucket.ready) + seconds
    return max(0.0, free - step.buckets[-1].ready)


def codec_of(bucket: Bucket, step: Step, codec: str | None) -> str:
    """The codec of a step's bucket where `codec` is that of all, as for `predict`."""
    if codec is None or bucket.kind != "all_reduce":
        return bucket.codec
    # Beside coded buckets those without a codec are norms and biases, which stay exact.
    exact = codec and not bucket.codec and any(b.codec for b in step.buckets)
    return "" if exact else codec


def predict(step: Step, job: Job, model: Model, codec: str | None = None) -> StepEstimate:
    """The time of a step of that job.

    Args:
        step: what is synchronized.
        job: who takes part.
        model: the constants.
        codec: of all buckets; "": none; None: as in `step`.
    """

    @functools.cache
    def estimate(bucket: Bucket) -> Estimate:
        one = codec_of(bucket, step, codec)
        if not one or job.hosts == 1:
            return model.collective(bucket.kind, bucket.size, job, width=bucket.width)
        found = model.collective(bucket.kind, bucket.size, job, one, bucket.width)
        if bucket.codec:
            return found
        extra = model.collective("all_reduce", _EXACT, job)  # what the hook sends exactly
        return replace(
            found,
            seconds=found.seconds + extra.seconds,
            low=found.low + extra.low,
            high=found.high + extra.high,
        )

    found = [estimate(replace(b, ready=0.0)) for b in step.buckets]
    compute = expected_maximum(step.compute, job.ranks)
    exposed, low, high = (
        simulated(step, [getattr(e, name) for e in found]) for name in ("seconds", "low", "high")
    )
    # The computation itself differs from run to run, and by how much its samples do.
    middle = statistics.quantiles(step.compute, n=10) if len(step.compute) > 1 else [compute]
    away = min(_MOST_AWAY, (middle[-1] - middle[0]) / 2 / compute if compute else 0.0)
    away = max(_LEAST_AWAY, away)
    return StepEstimate(
        compute + exposed, compute * (1 - away) + low, compute * (1 + away) + high,
        statistics.fmean(step.compute), compute, exposed, tuple(found),
    )  # fmt: skip


def elements_of(step: Step) -> float:
    """How many parameters it has: elements of its all-reduces, or else of its reduce-scatters."""
    for kind in ("all_reduce", "reduce_scatter"):
        if found := sum(b.size / b.width for b in step.buckets if b.kind == kind):
            return found
    raise ValueError("the steps have no all_reduce and no reduce_scatter of gradients")


def round_call(step: Step, job: Job, codec: str) -> tuple[str, float, str]:
    """Kind, bytes and codec of the collective of a round of DiLoCo.

    Args:
        step, job, codec: as for `predict_outer`.
    """
    elements = elements_of(step)
    if (share := share_of(codec)) is None:
        return "all_reduce", 4 * elements, codec
    # Ranks gather each other's codes, which are not added up on their way.
    return "all_gather", job.ranks * bytes_of_code(int(elements), share), ""


def predict_outer(
    step: Step, job: Job, model: Model, every: int, overlap: int, codec: str
) -> StepEstimate:
    """The time of a step on average, where hosts average parameters once in many: DiLoCo.

    Ranks of a host average gradients in each step.  Hosts wait for the slowest only in a round: of
    `every` steps together, whose times differ less than those of one, by the root of their number.
    What a round computes by itself, on one copy of the parameters, is not in it.

    Args:
        step: what the ranks of a host synchronize.
        job: who takes part; on several hosts.
        model: the constants.
        every: inner steps from one round to the next.
        overlap: inner steps beside which a round travels.
        codec: of a round, such as int4 or topk:0.02+int2; "": none.
    """
    inner = predict(step, replace(job, ranks=job.per_host, hosts=1), model)
    kind, size, coded = round_call(step, job, codec)
    found = model.collective(kind, size, job, coded)
    mean = statistics.fmean(step.compute)
    behind = (expected_maximum(step.compute, job.hosts) - mean) / math.sqrt(every)
    exposed, low, high = (
        max(0.0, getattr(found, name) - overlap * getattr(inner, other)) / every
        for name, other in (("seconds", "seconds"), ("low", "high"), ("high", "low"))
    )
    return StepEstimate(
        inner.seconds + behind + exposed, inner.low + behind + low, inner.high + behind + high,
        mean, inner.compute + behind, inner.exposed + exposed, (found,),
    )  # fmt: skip


# ---- of a model that is described

_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_WIDE_MLP = 17_000_000  # parameters of the demo's


def parameters_of(text: str) -> float:
    """How many parameters "mlp", "gpt:7B" or "350M" has.

    Raises:
        ValueError: it is none of these.
    """
    if text == "mlp":
        return _WIDE_MLP
    number = re.fullmatch(r"(?:gpt:)?([0-9]+(?:\.[0-9]+)?)([kmbt])", text.lower())
    if number is None or float(number[1]) == 0:
        raise ValueError(f"a model is mlp, gpt:7B, 350M or from:FOLDER, and not '{text}'")
    return float(number[1]) * _COUNTS[number[2]]


def described(
    parameters: float, width: int, compute: float, jitter: float, bucket: float = _BUCKET
) -> Step:
    """A step of DDP: a small first bucket, then equal ones, ready in turn during the backward.

    Args:
        parameters: how many.
        width: bytes of a gradient's element.
        compute: seconds of forward, backward and optimizer; two thirds are the backward.
        jitter: the standard deviation of `compute` between ranks and steps, as a part of it.
        bucket: bytes of DDP's buckets.
    """
    total = parameters * width
    sizes = [min(total, _FIRST_BUCKET)]
    while total - sum(sizes) > 0.5:
        sizes.append(min(bucket, total - sum(sizes)))
        if len(sizes) > 4096:  # as many of a size tell the same
            return described(parameters, width, compute, jitter, bucket * 2)
    backward, done, first = compute * 2 / 3, 0.0, 0.0
    buckets = []
    for size in sizes:
        done += size
        ready = backward * done / total
        first = first or ready
        buckets.append(Bucket(size, ready - first, width=width))
    samples = [compute]
    if jitter and compute:  # log-normal, so that none is negative
        normal = statistics.NormalDist(0, math.sqrt(math.log1p(jitter**2)))
        drawn = [math.exp(normal.inv_cdf((i + 0.5) / 100)) for i in range(100)]
        samples = [compute * x / statistics.fmean(drawn) for x in drawn]
    return Step(tuple(buckets), tuple(samples))


# ---- of a timeline


@dataclass(frozen=True)
class Recorded:
    """What a timeline has.

    Attributes:
        step: its steps.
        ranks: how many there were.
        moving: seconds from the last rank's arrival to the last rank's end, of the operations of
            each kind, size, codec and width.
        notes: what a reader should know: files that are missing, and the like.
    """

    step: Step
    ranks: int
    moving: dict[Shape, list[float]]
    notes: tuple[str, ...]


Shape = tuple[str, int, str, int]


def _shape(record: Record) -> Shape:
    """Kind, bytes, codec and width; a compressed all-reduce is one with a codec."""
    kind = record.kind.removeprefix("compressed ")
    return kind, record.bytes, record.codec, _WIDTHS.get(record.dtype, 4)


def replayed(directory: Path, overlaps: bool = True) -> Recorded:
    """Reads a timeline (RINGREDUCE_TIMELINE), of the group that moved most bytes.

    Args:
        directory: of the files.
        overlaps: False where the program waits for each call before it goes on.

    Raises:
        ValueError: there are no files, or fewer than three steps that are alike.
    """
    folder = load(directory)
    job = folder.job()
    notes: list[str] = []
    of_group: dict[Group, list[Operation]] = {group: [] for group in job.groups}
    for operation in operations(job, notes):
        if not operation.is_message:
            of_group[operation.group].append(operation)
    group = max(of_group, key=lambda one: sum(
        record.bytes for operation in of_group[one] for record in operation.records.values()
    ))  # fmt: skip
    steps: list[list[Record]] = []
    following: list[Record | None] = []
    for rank in group.series:
        by_step: dict[int, list[Record]] = {}
        for operation in of_group[group]:
            record = operation.records.get(rank)
            if record and record.state == "done" and record.bytes:
                by_step.setdefault(record.step, []).append(record)
        for number in sorted(by_step)[_WARM_UP:]:
            steps.append(by_step[number])
            following.append(by_step[number + 1][0] if number + 1 in by_step else None)
    shapes = Counter(tuple(map(_shape, records)) for records in steps)
    alike = [
        (records, after) for records, after in zip(steps, following, strict=True)
        if after is not None and tuple(map(_shape, records)) == shapes.most_common(1)[0][0]
    ]  # fmt: skip
    if len(alike) < _LEAST_STEPS * len(group.series):
        raise ValueError(
            f"{directory} has fewer than {_LEAST_STEPS} steps that are alike, after {_WARM_UP} to "
            "warm up; steps are counted by torch's optimizers"
        )
    notes += folder.notes(job)
    if len(job.groups) > 1:
        notes.append(f"of {len(job.groups)} groups, {group} is taken, which moved most")
    waits = [all(b.posted_ns >= a.done_ns for a, b in itertools.pairwise(r)) for r, _ in alike]
    if overlaps and len(alike[0][0]) > 1 and all(waits):
        notes.append("each call came after the end of the one before: --no-overlap if it waits")
    step = _step_of(alike, overlaps)
    return Recorded(step, len(group.ranks), _moving(of_group[group]), tuple(notes))


def _step_of(alike: Sequence[tuple[list[Record], Record | None]], overlaps: bool) -> Step:
    """The step of records that are alike, each with the first one of the step after it."""
    ready: list[list[float]] = [[] for _ in alike[0][0]]
    compute, times = [], []
    for records, after in alike:
        assert after is not None
        first = records[0].posted_ns
        for at, record in zip(ready, records, strict=True):
            at.append((record.posted_ns - first) / 1e9)
        away = (after.posted_ns - max(r.done_ns for r in records)) / 1e9
        between = sum(max(0, b.posted_ns - a.done_ns) for a, b in itertools.pairwise(records))
        compute.append(max(0.0, away + (ready[-1][-1] if overlaps else between / 1e9)))
        times.append((after.posted_ns - first) / 1e9)
    buckets = tuple(
        Bucket(size, statistics.median(at), kind, codec, width)
        for (kind, size, codec, width), at in zip(map(_shape, alike[0][0]), ready, strict=True)
    )
    return Step(buckets, tuple(compute), tuple(times), overlaps)


def _moving(of_group: Sequence[Operation]) -> dict[Shape, list[float]]:
    """Without operations of which not all ranks' records are there, or whose clocks are vague."""
    found: dict[Shape, list[float]] = {}
    for operation in of_group:
        record = operation.any_record
        ends = []
        for rank, one in operation.records.items():
            clock = operation.series[rank].clock(one.done_ns)
            if clock is not None and one.state == "done":
                ends.append(one.done_ns - clock[0])
        if len(ends) < len(operation.group.ranks) or not operation.arrivals or not record.bytes:
            continue
        moving = max(ends) - max(operation.arrivals.values())
        if operation.error <= 0.1 * moving:
            found.setdefault(_shape(record), []).append(moving / 1e9)
    return found
