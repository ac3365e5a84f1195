"""The report of a run, and the JSON file that holds it; the suite of several.

The schema, version 1 (times in seconds unless the name says otherwise, sizes in bytes):

    schema       1
    collective   "all_reduce", ...
    created      when, ISO 8601, UTC
    machine      {cpu, cores, memory_bytes, kernel, python, torch, environment, mpi}: what it ran
                 on; environment holds the RINGREDUCE_ variables that were set, mpi the
                 version of the library compared with; on GPUs also gpus (each rank's), cuda,
                 nccl (versions) and sharing ("ranks sharing one GPU", or "")
    library      {version, isa, staging_bytes, routes}: what ringreduce says about itself;
                 staging_bytes is shared memory owned by one rank, routes says over how many
                 connections it sent to each rank of another host, and why so many
    settings     the command's settings: world (ranks), sizes, dtype, op, backend, algorithm,
                 compare, iterations and warmup (null: chosen by size), rounds, timeout, device,
                 codecs
    titles       {contender: its name for people}
    skipped      {contender: why it was left out}
    rows         one a size, each
        bytes, count, dtype, op       of the whole message, as nccl-tests counts it; dtype
                                      and op are "" where there are none
        busbw_factor                  busbw / algbw
        measurements                  {contender: measurement}; "ours" and "roofline" are
                                      contenders, the others are peers by name

    measurement
        seconds      one value a round: seconds a call, that of the slowest rank; on GPUs device
                     time, between two events
        wall, issue  on GPUs, likewise: until the device is idle, until the last call returned
        iterations   timed calls in each round; `settings.warmup` untimed ones came before
                     them (null: a tenth as many, at least one)
        wrong        wrong elements of the checked calls before and after timing, all ranks
        same_bits    whether those results had the same bits on all ranks
        idle_cpu     CPU time / wall time of its ranks while others were timed (0: asleep)
        error        in a run with codecs, {max, rms, cosine} against the float64 sum, the worse of
                     the checked calls: the greatest and the root mean square error, each over
                     the root mean square of the sum, and the cosine of the two results
        median_us, p10_us, p90_us, wall_us, issue_us, algbw, busbw   follow from these (GB/s are
                     1e9 bytes/s); written for readers, not read back

The file of a suite has no rows of its own:

    schema       1
    refused      {collective: why ringreduce did not do it}
    reports      one document as above for each of the other collectives
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.tools.bench.settings import OURS, ROOFLINE

SCHEMA = 1


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document`, a line for each innermost list or object. Raises OSError."""
    text = json.dumps(document, indent=1)
    innermost = r"[\[{]\n[^][{}]*\n *[\]}]"  # strings have no newlines
    text = re.sub(innermost, lambda found: re.sub(r"\n *", " ", found[0]), text)
    path.write_text(text + "\n")


def percentile(values: list[float], fraction: float) -> float:
    """The value below which `fraction` of `values` lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass
class Measurement:
    """What one contender did at one size; see the module's schema."""

    seconds: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    issue: list[float] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    wrong: int = 0
    same_bits: bool = True
    idle_cpu: float = 0.0
    error: dict[str, float] = field(default_factory=dict)

    def add_error(self, found: dict[str, float]) -> None:
        """What another rank or call found: the worse counts (and NaN, whatever else there was)."""
        for name, value in found.items():
            known = self.error.get(name, value)
            worse = value < known if name == "cosine" else value > known
            if worse or name not in self.error or value != value:
                self.error[name] = value

    def add(self, answers: Sequence[dict[str, Any]], calls: int, trips: int = 1) -> None:
        """A round of `calls` calls: what each rank measured of it."""
        for name in ("seconds", "wall", "issue"):
            if name in answers[0]:
                slowest = max(float(answer[name]) for answer in answers)
                getattr(self, name).append(slowest / (calls * trips))
        self.iterations.append(calls)

    @property
    def median(self) -> float:
        """Seconds a call, median over the rounds."""
        return statistics.median(self.seconds)

    def quantile(self, fraction: float) -> float:
        """Seconds a call, at that fraction of the rounds."""
        return percentile(self.seconds, fraction)


@dataclass
class Row:
    """All contenders at one size; see the module's schema."""

    bytes: int
    count: int
    dtype: str
    op: str
    busbw_factor: float
    measurements: dict[str, Measurement]

    def algbw(self, key: str) -> float:
        """Size over median time, in GB/s."""
        return self.bytes / self.measurements[key].median / 1e9

    def busbw(self, key: str) -> float:
        """algbw times the collective's factor, in GB/s."""
        return self.algbw(key) * self.busbw_factor

    def ratio(self, peer: str) -> float:
        """The peer's median time over ours: how many times faster we are."""
        return self.measurements[peer].median / self.measurements[OURS].median


@dataclass
class Report:
    """A whole run; see the module's schema."""

    collective: str
    created: str
    machine: dict[str, Any]
    library: dict[str, Any]
    settings: dict[str, Any]
    titles: dict[str, str]
    skipped: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        """The contenders that ours is compared with, without those that were left out."""
        measured = {key for row in self.rows for key in row.measurements}
        return [
            key
            for key in self.titles
            if key not in (OURS, ROOFLINE, *self.codecs)
            and (key in measured or key not in self.skipped)
        ]

    @property
    def codecs(self) -> list[str]:
        """The contenders that are ours too, compressed; they have a table of their own."""
        return list(self.settings.get("codecs", ()))

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors were on GPUs."""
        return bool(self.settings.get("device", "cpu") != "cpu")

    def faults(self) -> list[str]:
        """A sentence for each contender and size with a wrong result."""
        found = []
        for row in self.rows:
            for key, measurement in row.measurements.items():
                what = f"{self.titles[key]}, {row.bytes} bytes"
                if measurement.wrong:
                    found.append(f"{what}: {measurement.wrong} wrong elements")
                if not measurement.same_bits:
                    found.append(f"{what}: ranks have different bits")
        return found

    @property
    def ours_is_right(self) -> bool:
        """Whether ours had no wrong element, and the same bits on all ranks, at every size."""
        keys = (OURS, *self.codecs)
        return all(
            found.wrong == 0 and found.same_bits
            for row in self.rows
            for key, found in row.measurements.items()
            if key in keys
        )

    def write(self, path: Path) -> None:
        """Write the JSON file. Raises OSError."""
        path.write_text(self.to_text() + "\n")

    def to_text(self) -> str:
        """The JSON text, a line a row."""
        document = self.to_json()
        rows = ",\n  ".join(json.dumps(row) for row in document.pop("rows"))
        return f'{json.dumps(document)[:-1]}, "rows": [\n  {rows}\n]}}'

    def to_json(self) -> dict[str, Any]:
        """The report as the schema has it."""
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        for row, entry in zip(self.rows, document["rows"], strict=True):
            for key, measurement in row.measurements.items():
                entry["measurements"][key].update(
                    median_us=measurement.median * 1e6,
                    p10_us=measurement.quantile(0.1) * 1e6,
                    p90_us=measurement.quantile(0.9) * 1e6,
                    algbw=row.algbw(key),
                    busbw=row.busbw(key),
                )
                for name in ("wall", "issue"):
                    if rounds := getattr(measurement, name):
                        median = 1e6 * statistics.median(rounds)
                        entry["measurements"][key][f"{name}_us"] = median
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Report:
        """The report of such a document. Raises ValueError for another schema."""
        if document.get("schema") != SCHEMA:
            raise ValueError(f"schema {document.get('schema')!r}, and not {SCHEMA}")
        values = {name: document[name] for name in cls.__dataclass_fields__ if name != "rows"}
        rows = []
        for entry in document["rows"]:
            measurements = {
                # Files of before there were GPUs lack their times.
                key: Measurement(**{n: m[n] for n in Measurement.__dataclass_fields__ if n in m})
                for key, m in entry["measurements"].items()
            }
            rows.append(Row(**{**entry, "measurements": measurements}))
        return cls(**values, rows=rows)

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a JSON file."""
        return cls.from_json(json.loads(path.read_text()))


@dataclass
class Suite:
    """Several collectives in one run; see the module's schema."""

    reports: list[Report] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the JSON file. Raises OSError."""
        head = json.dumps({"schema": SCHEMA, "refused": self.refused})
        reports = ",\n".join(report.to_text() for report in self.reports)
        path.write_text(f'{head[:-1]}, "reports": [\n{reports}\n]}}\n')

    @classmethod
    def read(cls, path: Path) -> Suite:
        """The suite in a JSON file. Raises ValueError for another schema."""
        document = json.loads(path.read_text())
        reports = [Report.from_json(entry) for entry in document["reports"]]
        return cls(reports, document["refused"])
