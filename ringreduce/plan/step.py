"""The time of a training step: of a model that is described, or of a timeline that is replayed.

A step is the computation of the slowest rank and what is left of the collectives when it ends.  The
buckets of a gradient become ready during the backward; a group runs one at a time, in that order.

The slowest of more ranks is slower.  A timeline has the times of computation of all its ranks and
steps; the expected maximum of as many draws as there are ranks is taken from their distribution,
whose tail beyond the 90th percentile is continued as an exponential one.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringreduce.plan.model import Estimate, Job, Model
from ringreduce.record import Record
from ringreduce.timeline import _Group, _load

_BUCKET, _FIRST_BUCKET = 25 << 20, 1 << 20  # of DDP
_COMMON = 0.9  # the part of the distribution that is taken as it is
_LEAST_STEPS = 3
_EXACT = 4096.0  # bytes of a bucket's exact elements, beside a codec


@dataclass(frozen=True)
class Bucket:
    """A collective of a step: `size` bytes, called `ready` seconds after the step's first one."""

    size: float
    ready: float
    kind: str = "all_reduce"
    codec: str = ""


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
    """Predicted seconds: of a step with the limits of 9 of 10, of its computation, of its sync."""

    seconds: float
    low: float
    high: float
    compute: float
    exposed: float
    buckets: tuple[Estimate, ...]

    @property
    def efficiency(self) -> float:
        """The part of the step in which the ranks compute, beside one rank that waits for none."""
        return self.compute / self.seconds


def expected_maximum(samples: Sequence[float], ranks: int) -> float:
    """The expected maximum of that many independent draws.

    Up to the 90th percentile draws are those of the samples.  Beyond, they are exponential with the
    mean of what the samples have there: the maximum of n of them is that mean times the harmonic
    number of n (Renyi, 1953).
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
    none_beyond = (1 - beyond) ** ranks
    excess = statistics.fmean(tail) if tail else 0.0
    # Given that k are beyond, which is about their expected number.
    expected = beyond * ranks / max(1e-12, 1 - none_beyond)
    harmonic = (
        math.log(expected) + 0.5772 + 0.5 / expected if expected > 1.5 else 1 + 0.5 * (expected - 1)
    )
    return total + (1 - none_beyond) * (threshold + excess * harmonic)


def simulated(step: Step, times: Sequence[float]) -> float:
    """Seconds of the collectives that the computation does not hide."""
    if not step.overlaps:
        return sum(times)
    free = 0.0
    for bucket, seconds in zip(step.buckets, times, strict=True):
        free = max(free, bucket.ready) + seconds
    return max(0.0, free - step.buckets[-1].ready)


def predict(step: Step, job: Job, model: Model, codec: str | None = None) -> StepEstimate:
    """The time of a step of that job.

    Args:
        step: what is synchronized.
        job: who takes part.
        model: the constants.
        codec: of all buckets; "": none; None: as in `step`.
    """
    found = [
        model.collective(b.kind, b.size, job, b.codec if codec is None else codec)
        for b in step.buckets
    ]
    if codec and job.hosts > 1:  # a hook sends norms and biases apart, exactly
        extra = model.collective("all_reduce", _EXACT, job)
        found = [
            e if b.codec else replace(
                e, seconds=e.seconds + extra.seconds, low=e.low + extra.low,
                high=e.high + extra.high,
            )
            for b, e in zip(step.buckets, found, strict=True)
        ]  # fmt: skip
    compute = expected_maximum(step.compute, job.ranks)
    exposed = simulated(step, [e.seconds for e in found])
    low = simulated(step, [e.low for e in found])
    high = simulated(step, [e.high for e in found])
    ordered = sorted(step.compute)
    away = min(0.1, (ordered[-1 - len(ordered) // 10] - ordered[len(ordered) // 10]) / compute / 2)
    away = max(0.02, away)
    return StepEstimate(
        compute + exposed, compute * (1 - away) + low, compute * (1 + away) + high, compute,
        exposed, tuple(found),
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
    number = re.fullmatch(r"(?:gpt:)?([0-9.]+)([kmbt])", text.lower())
    if number is None:
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
        buckets.append(Bucket(size, ready - first))
    normal = statistics.NormalDist(compute, compute * jitter)
    samples = [normal.inv_cdf((i + 0.5) / 100) for i in range(100)] if jitter else [compute]
    return Step(tuple(buckets), tuple(samples))


# ---- of a timeline


def _group_of(directory: Path) -> _Group:
    """The group that moved most bytes."""
    groups = _load(directory).groups
    if not groups:
        raise ValueError(f"{directory} has no operations of a group")
    return max(groups, key=lambda g: sum(r.bytes for s in g.series.values() for r in s.records))


def replayed(directory: Path, overlaps: bool = True) -> Step:
    """The steps of a timeline (RINGREDUCE_TIMELINE).

    Args:
        directory: of the files.
        overlaps: False where the program waits for each call before it goes on.

    Raises:
        ValueError: there are no files, or fewer than three steps that are alike.
    """
    group = _group_of(directory)
    steps: list[list[Record]] = []
    following: list[Record | None] = []
    for series in group.series.values():
        by_step: dict[int, list[Record]] = {}
        for record in series.records:
            if record.state == "done" and record.bytes:
                by_step.setdefault(record.step, []).append(record)
        for number, found in by_step.items():
            steps.append(found)
            following.append(by_step[number + 1][0] if number + 1 in by_step else None)
    shapes = Counter(tuple((r.kind, r.bytes, r.codec) for r in records) for records in steps)
    if not shapes:
        raise ValueError(f"{directory} has no steps")
    shape, _ = shapes.most_common(1)[0]
    ready: list[list[float]] = [[] for _ in shape]
    compute, times = [], []
    for records, after in zip(steps, following, strict=True):
        if after is None or tuple((r.kind, r.bytes, r.codec) for r in records) != shape:
            continue
        first = records[0].posted_ns
        for at, record in zip(ready, records, strict=True):
            at.append((record.posted_ns - first) / 1e9)
        ended = max(r.done_ns for r in records)
        away = (after.posted_ns - ended) / 1e9
        between = sum(max(0, b.posted_ns - a.done_ns) for a, b in itertools.pairwise(records))
        compute.append(away + (ready[-1][-1] if overlaps else between / 1e9))
        times.append((after.posted_ns - first) / 1e9)
    if len(times) < _LEAST_STEPS * len(group.series):
        raise ValueError(f"{directory} has fewer than {_LEAST_STEPS} steps that are alike")
    buckets = tuple(
        Bucket(size, statistics.median(at), kind, codec)
        for (kind, size, codec), at in zip(shape, ready, strict=True)
    )
    return Step(buckets, tuple(compute), tuple(times), overlaps)


def scaled(step: Step, factor: float) -> Step:
    """With computation that takes `factor` times as long."""
    return replace(
        step,
        buckets=tuple(replace(b, ready=b.ready * factor) for b in step.buckets),
        compute=tuple(x * factor for x in step.compute),
    )


def moving_times(directory: Path) -> dict[tuple[str, int, str], list[float]]:
    """Seconds from the last rank's arrival to the last rank's end, of the operations of each kind,
    size and codec in a timeline.

    On ranks whose clocks are not known it is left out.
    """
    found: dict[tuple[str, int, str], list[float]] = {}
    for operation in _group_of(directory).operations:
        ends = []
        for rank, record in operation.records.items():
            clock = operation.group.clock(rank, record.done_ns)
            if clock is not None and record.state == "done":
                ends.append(record.done_ns - clock[0])
        if not ends or not operation.arrivals or not operation.any_record.bytes:
            continue
        record = operation.any_record
        moving = max(ends) - max(operation.arrivals.values())
        found.setdefault((record.kind, record.bytes, record.codec), []).append(moving / 1e9)
    return found
