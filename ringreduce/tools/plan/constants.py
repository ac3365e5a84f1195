"""The constants of an installation: how they are fitted to measured times, and their file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ringreduce.core.files import Damaged, check, contents, natural, replacing
from ringreduce.tools.plan.lines import Line
from ringreduce.tools.plan.model import CODECS, KINDS, Job, Model, Sockets, Table

_VERSION = 1
_MOST_BYTES = 1 << 26
# Of the loopback interface: no line limits it.
LOOPBACK = Line(rate=1e12, mtu=65535)
_UNNOTICED = 0.1  # of the cores, for other programs
_STEP = 1e-3  # of a derivative, in logarithms
_PULL = 0.03  # to the defaults, for constants that the times say nothing of
_LEAST_SPREAD = 0.05
_ONE_COUNT = 0.15  # at least, where one number of hosts was measured


@dataclass(frozen=True)
class Point:
    """A measured call: the median of its rounds in seconds, and their p10 and p90.

    `others`: the part of the cores that other programs took meanwhile.
    """

    kind: str
    size: int
    codec: str
    job: Job
    seconds: float
    low: float
    high: float
    others: float = 0.0


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The median, p10 and p90; of fewer than ten times the least and the greatest."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return statistics.median(ordered), ordered[tenth], ordered[-1 - tenth]


def default_path() -> Path:
    """Where the constants are, unless a command is told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "ringreduce" / "plan.json"


def require_writable(path: Path) -> None:
    """Raises OSError, before minutes are spent, if the file could not be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no file: nothing is written in its place")
    tempfile.TemporaryFile(dir=path.parent).close()


def save(path: Path, model: Model, about: dict[str, Any], points: Sequence[Point]) -> None:
    """Writes them, with the times that they were fitted to."""
    others = max((point.others for point in points), default=0.0)
    document = {
        "version": _VERSION, "about": about | {"others": others}, "model": asdict(model),
        "points": [asdict(point) for point in points],
    }  # fmt: skip
    with replacing(path) as file:
        file.write(json.dumps(document, indent=1) + "\n")


# What is in the file, for `check`.


def _amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and value is not True and 1e-18 < value < 1e18


def _count(value: Any) -> bool:
    return natural(value) and _amount(value)


def _part(value: Any) -> bool:
    return _amount(value + 1) and 0 <= value <= 1


def _words(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) < 200


def _spread(value: Any) -> bool:
    return all(_amount(one) and one < 100 for one in value.values())


def _table(value: Any) -> bool:
    """Pairs of bytes and seconds, in ascending order of bytes."""
    for points in (points for kinds in value.values() for points in kinds.values()):
        check(points, [lambda pair: len(pair) == 2 and all(map(_amount, pair))])
        if not points or any(a[0] >= b[0] for a, b in pairwise(points)):
            return False
    return all(0 < int(ranks) < 1e18 for ranks in value)


_SOCKETS = dict.fromkeys((one.name for one in fields(Sockets)), _amount)
_MODEL = {
    "sockets": _SOCKETS,
    "shared": _table,
    "spread": _spread,
    "flops": _amount,
    "fitted": lambda value: len(value) == 2 and all(map(_count, value)),
    "cores": natural,
}
_ABOUT = {"created": _words, "others?": _part, "machine?": {"cpu?": _words, "cores?": natural}}
_POINT = {"kind": lambda kind: kind in KINDS, "codec": lambda codec: codec in ("", *CODECS),
          "size": _count, "seconds": _amount, "low": _amount, "high": _amount, "others?": _part,
          "job": {"ranks": _count, "hosts": _count, "cores": natural}}  # fmt: skip


@contextlib.contextmanager
def _document(path: Path) -> Iterator[Any]:
    """What is in the file; the context's errors are those of a damaged file."""
    measure = "run `python -m ringreduce.plan measure` (a minute)"
    try:
        found = json.loads(contents(path, _MOST_BYTES))
        if found["version"] != _VERSION:
            raise Damaged("it is of another version of ringreduce")
        yield found
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as e:
        if isinstance(e.__cause__, FileNotFoundError):
            raise ValueError(f"there are no constants in {path}: {measure}") from None
        raise ValueError(f"{path} cannot be used ({e}): {measure}") from None


def load(path: Path) -> tuple[Model, dict[str, Any]]:
    """The constants, and what they were measured on and beside (`warning`).

    Raises:
        ValueError: there is no such file, it is of another version, or damaged; the text says what
            to do.
    """
    with _document(path) as document:
        check(document, {"about": _ABOUT, "model": _MODEL})
        found, about = document["model"], document["about"]
        shared: Table = {int(ranks): kinds for ranks, kinds in found.pop("shared").items()}
        for kinds in shared.values():
            kinds |= {kind: [(s, t) for s, t in points] for kind, points in kinds.items()}
        sockets, fitted = Sockets(**found.pop("sockets")), tuple(found.pop("fitted"))
        machine = {"cpu": "?", "cores": 0, **about.get("machine", {})}
        model = Model(sockets=sockets, shared=shared, fitted=fitted, **found)
        return model, {"others": 0.0, **about, "machine": machine}


def load_points(path: Path) -> list[Point]:
    """The times that the constants in a file were fitted to.

    Raises:
        ValueError: as `load`.
    """
    with _document(path) as document:
        check(document, {"points": [_POINT]})
        found = []
        for entry in document["points"]:
            job = entry.pop("job")
            line = job.pop("line")
            found.append(Point(job=Job(line=Line(**line) if line else None, **job), **entry))
        return found


def warning(others: float) -> str:
    """What to say of times that were measured beside other programs; "" if nothing."""
    if others <= _UNNOTICED:
        return ""
    return (
        f"warning: other programs took {others:.0%} of the cores while these constants were "
        "measured, so predicted times may be too long: run `python -m ringreduce.plan measure` "
        "again when nothing else runs"
    )


def today() -> str:
    """The date, for a file."""
    return datetime.now(timezone.utc).date().isoformat()


def joined(earlier: Sequence[Point], new: Sequence[Point], add: bool) -> list[Point]:
    """What constants are fitted to after a measurement.

    New times inside a host replace earlier ones.  New times between hosts do too, unless they are
    to be added.  Those of the loopback interface stand in for a line until one was measured.

    Args:
        earlier, new: the times in the file, and those just measured.
        add: keep earlier times between hosts beside new ones.
    """
    if any(p.job.hosts == 1 for p in new):
        kept = [p for p in earlier if p.job.hosts > 1 and p.job.line != LOOPBACK]
    else:
        kept = [p for p in earlier if p.job.hosts == 1 or add]
    found = [*kept, *new]
    if any(p.job.line not in (None, LOOPBACK) for p in found):
        found = [p for p in found if p.job.line != LOOPBACK]
    return found


# ---- fitting


def _logs(sockets: Sockets) -> torch.Tensor:
    return torch.tensor(astuple(sockets), dtype=torch.float64, device="cpu").log()


def _sockets(logs: torch.Tensor) -> Sockets:
    return Sockets(*logs.exp().tolist())


def _residuals(model: Model, logs: torch.Tensor, points: Sequence[Point]) -> torch.Tensor:
    """The logarithms of prediction over measurement, and the pull to the defaults."""
    there = replace(model, sockets=_sockets(logs))
    ratios = [there.collective(p.kind, p.size, p.job, p.codec).seconds / p.seconds for p in points]
    off = torch.tensor(ratios, dtype=torch.float64, device="cpu").log()
    return torch.cat([off, _PULL * (logs - _logs(Sockets()))])


def fit_sockets(model: Model, points: Sequence[Point]) -> Sockets:
    """The constants with the least sum of errors, not of their squares: some times are outliers.

    Levenberg and Marquardt's method on the logarithms, with weights that make squares absolute
    values (iteratively reweighted least squares).
    """
    logs = _logs(model.sockets)
    each = torch.eye(len(logs), dtype=torch.float64, device="cpu")
    found, damping = _residuals(model, logs, points), 1e-2
    for _ in range(60):
        moves = [_residuals(model, logs + _STEP * one, points) - found for one in each]
        weight = found.abs().clamp(min=0.03).rsqrt()
        slope = torch.stack(moves, 1) / _STEP * weight[:, None]
        matrix = slope.T @ slope + damping * each
        moved = logs - torch.linalg.solve(matrix, slope.T @ (weight * found)).clamp(-1, 1)
        better = _residuals(model, moved, points)
        if better.abs().sum() < found.abs().sum():
            logs, found, damping = moved, better, damping / 3
        elif damping > 1e6:
            break
        else:
            damping *= 4
    return _sockets(logs)


def table_of(points: Sequence[Point]) -> Table:
    """Of the times inside a host."""
    found: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for p in sorted((p for p in points if p.job.hosts == 1 and not p.codec), key=lambda p: p.size):
        found.setdefault(p.job.ranks, {}).setdefault(p.kind, []).append((p.size, p.seconds))
    return {ranks: dict(kinds) for ranks, kinds in found.items()}


def spread_of(errors: Sequence[tuple[str, float]]) -> dict[str, float]:
    """For each bound, what 9 of 10 of the logarithmic errors do not exceed."""
    by_bound: dict[str, list[float]] = {}
    for bound, error in errors:
        by_bound.setdefault(bound, []).append(abs(error))
    return {
        bound: max(_LEAST_SPREAD, sorted(found)[min(len(found) - 1, int(0.9 * len(found)))])
        for bound, found in by_bound.items()
    }


def fit(points: Sequence[Point], base: Model) -> Model:
    """The constants that these times give; what they say nothing of stays as in `base`.

    The spread comes from points that were left out of a fit: inside a host each size in turn,
    between hosts each number of hosts, or each half where there is one number only.
    """
    inside = [p for p in points if p.job.hosts == 1]
    between = [p for p in points if p.job.hosts > 1]
    model = replace(base, shared=table_of(inside)) if inside else base
    errors: list[tuple[str, float]] = []
    for p in inside:
        rest = [q for q in inside if q is not p and (q.job, q.kind) == (p.job, p.kind)]
        sizes, error = [q.size for q in rest], 0.0
        if sizes and min(sizes) < p.size < max(sizes):
            guess = replace(model, shared=table_of(rest)).collective(p.kind, p.size, p.job).seconds
            # With the point the gap is half as wide, and what a curve misses is a fourth.
            error = math.log(guess / p.seconds) / 4
        errors.append(("memory", math.hypot(math.log(p.high / p.seconds), error)))
    if between:
        counts = {p.job.hosts for p in between}
        parts = [p.job.hosts if len(counts) > 1 else i % 2 for i, p in enumerate(between)]
        for part in set(parts):
            rest = [p for p, its in zip(between, parts, strict=True) if its != part]
            trial = replace(model, sockets=fit_sockets(model, rest))
            for p, its in zip(between, parts, strict=True):
                if its == part:
                    found = trial.collective(p.kind, p.size, p.job, p.codec)
                    errors.append((found.bound, math.log(found.seconds / p.seconds)))
        model = replace(model, sockets=fit_sockets(model, between))
    fitted = (
        max((p.job.ranks for p in inside), default=base.fitted[0]),
        max((p.job.hosts for p in between), default=base.fitted[1]),
    )
    spread = spread_of(errors)
    if between and len({p.job.hosts for p in between}) == 1:  # other numbers are less certain
        spread = {
            bound: found if bound == "memory" else max(found, _ONE_COUNT)
            for bound, found in spread.items()
        }
    return replace(model, spread={**base.spread, **spread}, fitted=fitted)
