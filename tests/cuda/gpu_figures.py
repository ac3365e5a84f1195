"""What the measurements of gpu_check.py say: key figures, goals, the profiler's counts.

Pure functions of the lines that gpu_stages.py describes.  A goal is {goal, value, met}; there is
none for what was not measured.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpu_report import Line, Lines

KIB, MIB = 1 << 10, 1 << 20
Place = tuple[int, str, int]


def pick(lines: Iterable[Line], **wanted: object) -> Lines:
    return [line for line in lines if all(line.get(k) == v for k, v in wanted.items())]


def median(line: Line) -> float:
    return float(line["time_us"][0])


def by_place(lines: Iterable[Line]) -> dict[Place, dict[str, Line]]:
    """The line of each algorithm, by (ranks, dtype, bytes); without H, which has no size."""
    table: dict[Place, dict[str, Line]] = {}
    for line in lines:
        if line["algorithm"] != "hop":
            place = (line["ranks"], line["dtype"], line["bytes"])
            table.setdefault(place, {})[line["algorithm"]] = line
    return table


def hop(lines: Lines) -> float | None:
    """H: microseconds from one process's stream write until another's stream has waited for it."""
    found = pick(lines, algorithm="hop")
    return median(found[0]) if found else None


# --- Key figures ----------------------------------------------------------------------------------


def checked(lines: Lines) -> str:
    cases = sum(int(line.get("cases", 1)) for line in lines)
    return f"{cases} cases, {sum(int(line.get('wrong') or 0) for line in lines)} wrong"


def counted(lines: Lines) -> str:
    return f"{len(lines)} measurements"


def copy_figure(lines: Lines) -> str:
    rate = max(float(line["busbw"]) for line in pick(lines, algorithm="copy"))
    return f"copy {rate:.0f} GB/s, read and written"


def bandwidth_figure(lines: Lines) -> str:
    parts = []
    for (ranks, dtype, size), by in by_place(lines).items():
        if size == 256 * MIB and dtype == "float32":
            shown = ", ".join(f"{name} {line['busbw']:.0f}" for name, line in by.items())
            parts.append(f"{ranks} ranks, 256 MiB, busbw GB/s: {shown}")
    return "; ".join(parts)


def latency_figure(lines: Lines) -> str:
    parts = []
    for (ranks, dtype, size), by in by_place(lines).items():
        if size == KIB and dtype == "float32":
            shown = ", ".join(f"{name} {median(line):.1f}" for name, line in by.items())
            parts.append(f"{ranks} ranks, 1 KiB, us: {shown}")
    return "; ".join(parts)


def processes_figure(lines: Lines) -> str:
    once = hop(lines)
    parts = [] if once is None else [f"H {once:.1f} us"]
    for (ranks, dtype, size), by in by_place(lines).items():
        if size in (KIB, 256 * MIB) and dtype == "float32":
            shown = ", ".join(f"{name} {median(line):.0f}" for name, line in by.items())
            parts.append(f"{ranks} ranks, {'1 KiB' if size == KIB else '256 MiB'}, us: {shown}")
    return "; ".join(parts)


def kill_figure(lines: Lines) -> str:
    return f"raised after {max(slowest(line) for line in lines):.2f} s at most"


def slowest(line: Line) -> float:
    return max(float(seconds) for seconds in line["raised_s"])


def bytes_figure(lines: Lines) -> str:
    return f"at most {max(map(over_formula, lines)):.3f} of the formula"


def over_formula(line: Line) -> float:
    return float(line["dram_bytes_counted"] / line["dram_bytes"])


# --- Goals ----------------------------------------------------------------------------------------


def at_least(what: str, value: float, bound: float) -> Line:
    return {"goal": f"{what} >= {bound:g}", "value": round(value, 3), "met": value >= bound}


def at_most(what: str, value: float, bound: float) -> Line:
    return {"goal": f"{what} <= {bound:g}", "value": round(value, 3), "met": value <= bound}


def bandwidth_goals(lines: Lines) -> Lines:
    """direct at 256 MiB, ring and twoshot from 64 MiB on: shares of their floors, and over NCCL."""
    goals = []
    for (ranks, dtype, size), by in by_place(lines).items():
        if dtype != "float32" or size < 64 * MIB:
            continue
        label = f"{ranks} ranks, {size // MIB} MiB"
        for name, of_floor, over_nccl in (
            ("direct", 0.8, 1.5),
            ("ring", 0.85, 1.0),
            ("twoshot", 0.85, 1.0),
        ):
            if name not in by or (name == "direct" and size != 256 * MIB):
                continue
            time = median(by[name])
            if "floor_us" in by[name]:
                share = float(by[name]["floor_us"]) / time
                goals.append(at_least(f"{label}: {name}, share of its floor", share, of_floor))
            goals += over(by, time, f"{label}: {name}", over_nccl)
    return goals


def latency_goals(lines: Lines) -> Lines:
    goals = []
    for (ranks, dtype, size), by in by_place(lines).items():
        ours = [median(line) for name, line in by.items() if name != "nccl"]
        if dtype == "float32" and size <= 256 * KIB and ours:
            goals += over(by, min(ours), f"{ranks} ranks, {size} B in graphs", 1.5)
    return goals


def over(by: Mapping[str, Line], time: float, label: str, bound: float) -> Lines:
    if "nccl" not in by:
        return []
    return [at_least(f"{label}, times as fast as NCCL", median(by["nccl"]) / time, bound)]


def processes_goals(lines: Lines) -> Lines:
    once = hop(lines)
    if once is None:
        return []
    goals = []
    for (ranks, dtype, size), by in by_place(lines).items():
        for line in by.values() if dtype == "float32" else ():
            if size == KIB:
                goals.append(at_most(f"{ranks} processes, 1 KiB: in H", median(line) / once, 4))
            if size == 256 * MIB and "floor_us" in line:
                allowed = 2 * float(line["floor_us"]) + 4 * once
                what = f"{ranks} processes, 256 MiB: over twice the floor and 4 H"
                goals.append(at_most(what, median(line) / allowed, 1))
    return goals


def kill_goals(lines: Lines) -> Lines:
    what = "ranks, one killed: seconds until all have raised"
    return [at_most(f"{line['ranks']} {what}", slowest(line), 2) for line in lines]


def bytes_goals(lines: Lines) -> Lines:
    return [
        at_most(
            f"{line['ranks']} ranks, {line['algorithm']}: bytes over the formula",
            over_formula(line),
            1.1,
        )
        for line in lines
    ]


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
