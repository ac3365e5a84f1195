"""What was predicted beside what happened: `python -m ringreduce.plan check DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringreduce.tools.bench.settings import format_size
from ringreduce.tools.bench.summary import format_time
from ringreduce.tools.plan.constants import quantiles
from ringreduce.tools.plan.model import KINDS, Estimate, Job, Model
from ringreduce.tools.plan.step import Recorded, StepEstimate, predict

_LEAST_TIMES = 3  # of a size; calls that set up a program come once


@dataclass(frozen=True)
class Row:
    """A prediction and what was measured, in seconds: the median, p10 and p90 of `count`."""

    name: str
    count: int
    median: float
    low: float
    high: float
    predicted: Estimate | StepEstimate

    @property
    def error(self) -> float:
        """The prediction's, as a part of the measured median."""
        return self.predicted.seconds / self.median - 1

    @property
    def inside(self) -> bool:
        """Whether the measured median lies in the predicted interval."""
        return self.predicted.low <= self.median <= self.predicted.high


def row_of(name: str, times: Sequence[float], predicted: Estimate | StepEstimate) -> Row:
    """The quantiles of the measured times beside the prediction."""
    return Row(name, len(times), *quantiles(times), predicted)


def compared(ran: Recorded, base: Recorded, job: Job, model: Model) -> list[Row]:
    """Rows for the collectives of a timeline, and for its step.

    Args:
        ran: the timeline.
        base: what the step is predicted from; `ran`, or the timeline of another run.
        job: who took part in `ran`.
        model: the constants.
    """
    rows = []
    for (kind, size, codec, width), times in sorted(ran.moving.items()):
        if kind not in KINDS or len(times) < _LEAST_TIMES:
            continue
        name = f"{kind} {format_size(size)}" + (f" {codec}" if codec else "")
        found = model.collective(kind, size, job, codec if job.hosts > 1 else "", width)
        rows.append(row_of(name, times, found))
    codec = next((bucket.codec for bucket in ran.step.buckets if bucket.codec), "")
    rows.append(row_of("step", ran.step.times, predict(base.step, job, model, codec)))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as text."""
    lines = [
        f"{'':24}{'n':>7}{'measured':>11}{'p10-p90':>20}{'predicted':>11}{'interval':>20}{'error':>8}"
    ]
    for row in rows:
        measured = f"{format_time(row.low)} - {format_time(row.high)}"
        interval = f"{format_time(row.predicted.low)} - {format_time(row.predicted.high)}"
        lines.append(
            f"{row.name:24}{row.count:7}{format_time(row.median):>11}{measured:>20}"
            f"{format_time(row.predicted.seconds):>11}{interval:>20}  {row.error * 100:7.1f}%"
            + ("" if row.inside else "  outside")
        )
    return lines
