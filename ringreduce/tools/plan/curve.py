"""The efficiency of a job from a few ranks to many, as a picture with its assumptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ringreduce.core.files import replacing
from ringreduce.tools.plan.model import Job, Model
from ringreduce.tools.plan.step import Step, predict

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 100_000)


def counts(per_host: int) -> list[int]:
    """Numbers of ranks that fill their hosts, from one host to 100,000 ranks.

    Raises:
        ValueError: a host has more.
    """
    if per_host > RANKS[-1]:
        raise ValueError(f"a curve ends at {RANKS[-1]:,} ranks")
    return sorted({max(1, count // per_host) * per_host for count in RANKS} - {1})


def draw(
    path: Path, step: Step, model: Model, job_of: Callable[[int], Job], ranks: Sequence[int],
    codecs: Sequence[str], assumptions: Sequence[str],
) -> dict[str, list[float]]:  # fmt: skip
    """Draws the curve of each codec with its interval.

    Returns:
        By codec ("exact" for none) the efficiency at each number of ranks.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the picture cannot be written there.
    """
    with replacing(path, "wb") as file:
        return _draw(
            file, path.suffix[1:] or "png", step, model, job_of, ranks, codecs, assumptions
        )


def _draw(
    file: IO[bytes], kind: str, step: Step, model: Model, job_of: Callable[[int], Job],
    ranks: Sequence[int], codecs: Sequence[str], assumptions: Sequence[str],
) -> dict[str, list[float]]:  # fmt: skip
    try:
        import matplotlib
    except ImportError:
        raise ValueError("a curve needs matplotlib: pip install matplotlib") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    found = {}
    for codec in codecs:
        name = codec or "exact"
        estimates = [predict(step, job_of(count), model, codec) for count in ranks]
        found[name] = [estimate.efficiency for estimate in estimates]
        (line,) = axes.plot(ranks, found[name], marker="o", markersize=3, label=name)
        axes.fill_between(
            ranks,
            [min(1.0, e.mean / e.high) for e in estimates],
            [min(1.0, e.mean / e.low) for e in estimates],
            color=line.get_color(), alpha=0.15, linewidth=0,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("ranks")
    axes.set_ylabel("part of a step that a rank computes")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.suptitle("\n".join(assumptions), fontsize=8, x=0.01, ha="left")
    figure.savefig(file, format=kind, dpi=120)
    pyplot.close(figure)
    return found
