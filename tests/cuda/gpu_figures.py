"""What the measurements of gpu_check.py say: key figures and the profiler's counts.

Pure functions of the lines that gpu_stages.py describes.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpu_report import Line, Lines

KIB, MIB = 1 << 10, 1 << 20


def pick(lines: Iterable[Line], **wanted: object) -> Lines:
    return [line for line in lines if all(line.get(k) == v for k, v in wanted.items())]


def median(line: Line) -> float:
    return float(line["time_us"][0])


def beside(lines: Iterable[Line], size: int, what: str, digits: int = 0) -> list[str]:
    """All contenders of float32 at one size, a text for each number of ranks: "busbw GB/s" or
    their times, "us"."""
    table: dict[int, dict[str, float]] = {}
    for line in pick(lines, dtype="float32", bytes=size):
        # H has no size, and is no contender.
        if line["algorithm"] != "hop":
            value = median(line) if what == "us" else float(line["busbw"])
            table.setdefault(line["ranks"], {})[line["algorithm"]] = value
    label = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
    return [
        f"{ranks} ranks, {label}, {what}: "
        + ", ".join(f"{name} {value:.{digits}f}" for name, value in by.items())
        for ranks, by in table.items()
    ]


def checked(lines: Lines) -> str:
    cases = sum(int(line.get("cases", 1)) for line in lines)
    return f"{cases} cases, {sum(int(line.get('wrong') or 0) for line in lines)} wrong"


def counted(lines: Lines) -> str:
    return f"{len(lines)} measurements"


def copy_figure(lines: Lines) -> str:
    rate = max(float(line["busbw"]) for line in pick(lines, algorithm="copy"))
    return f"copy {rate:.0f} GB/s, read and written"


def bandwidth_figure(lines: Lines) -> str:
    return "; ".join(beside(lines, 256 * MIB, "busbw GB/s"))


def latency_figure(lines: Lines) -> str:
    return "; ".join(beside(lines, KIB, "us", 1))


def processes_figure(lines: Lines) -> str:
    """With H: microseconds from one process's stream write until another's stream has waited."""
    hops = [f"H {median(line):.1f} us" for line in pick(lines, algorithm="hop")[:1]]
    return "; ".join([*hops, *beside(lines, KIB, "us"), *beside(lines, 256 * MIB, "us")])


def all_gpus_met(ranks: int, algorithms: Sequence[str]) -> Callable[[Lines, Path], str]:
    """A check that every algorithm ran with so many ranks that had a GPU each."""

    def verify(lines: Lines, folder: Path) -> str:
        there = {line["algorithm"] for line in pick(lines, ranks=ranks, sharing=False)}
        missing = [name for name in algorithms if name not in there]
        return f"{', '.join(missing)} did not run on {ranks} GPUs at once" if missing else ""

    return verify


def all_gpus_figure(lines: Lines) -> str:
    ranks = max(line["ranks"] for line in lines)
    widest = pick(lines, ranks=ranks)
    return "; ".join([*beside(widest, KIB, "us", 1), *beside(widest, 256 * MIB, "busbw GB/s")])


def kill_figure(lines: Lines) -> str:
    """Seconds until the last survivor raised: after a kill, and after a stop (its deadline)."""
    slowest = {}
    for line in lines:
        worst = max(float(seconds) for seconds in line["raised_s"])
        slowest[line["mode"]] = max(worst, slowest.get(line["mode"], 0.0))
    return ", ".join(f"{mode}: raised after {s:.2f} s at most" for mode, s in slowest.items())


def bytes_figure(lines: Lines) -> str:
    most = max(float(line["dram_bytes_counted"] / line["dram_bytes"]) for line in lines)
    return f"at most {most:.3f} of the formula"


# --- Nsight Compute -------------------------------------------------------------------------------


def add_counters(lines: Lines, folder: Path) -> str:
    """Adds what ncu counted to the lines of the launches; says why, if it cannot."""
    try:
        counts = read_ncu((folder / "ncu.csv").read_text(errors="replace"))
    except (OSError, KeyError, ValueError) as error:
        return f"what ncu wrote cannot be read: {type(error).__name__}: {error}"
    if len(counts) != len(lines):
        return f"ncu counted {len(counts)} launches, not {len(lines)}"
    for line, count in zip(lines, counts, strict=True):
        line["dram_bytes_counted"] = count
    return ""


def read_ncu(text: str) -> list[float]:
    """Bytes read and written by each launch, of a table as `ncu --csv --page raw` prints it."""
    rows = text.splitlines()
    begin = next((i for i, row in enumerate(rows) if row.startswith('"ID"')), len(rows))
    # The row below the names has the units and no ID.
    launches = [row for row in csv.DictReader(rows[begin:]) if row["ID"]]
    columns = ("dram__bytes_read.sum", "dram__bytes_write.sum")
    return [sum(float(launch[c].replace(",", "")) for c in columns) for launch in launches]
