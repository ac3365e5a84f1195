"""What the programs of gpu_check.py measured: read from what they wrote, and said in key figures.

Pure functions of files and of lines as gpu_stages.py describes them.  Of programs on torch,
`algorithm` is the contender's key, ours is "ours"; "sharing" says whether ranks shared a GPU.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Line = dict[str, Any]
Lines = list[Line]
KIB, MIB = 1 << 10, 1 << 20
OURS = "ours"


def pick(lines: Iterable[Line], **wanted: object) -> Lines:
    return [line for line in lines if all(line.get(k) == v for k, v in wanted.items())]


def median(line: Line) -> float:
    return float(line["time_us"][0])


# --- Key figures ----------------------------------------------------------------------------------


def beside(size: int, what: str, digits: int = 0) -> Callable[[Lines], str]:
    """All contenders of float32 at one size, for each number of ranks: "busbw GB/s" or their times,
    "us"."""

    def figure(lines: Lines) -> str:
        table: dict[int, dict[str, float]] = {}
        for line in pick(lines, dtype="float32", bytes=size):
            # H has no size, and is no contender.
            if line["algorithm"] != "hop":
                value = median(line) if what == "us" else float(line["busbw"])
                table.setdefault(line["ranks"], {})[line["algorithm"]] = value
        label = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        return "; ".join(
            f"{ranks} ranks, {label}, {what}: "
            + ", ".join(f"{name} {value:.{digits}f}" for name, value in by.items())
            for ranks, by in table.items()
        )

    return figure


def joined(*figures: Callable[[Lines], str]) -> Callable[[Lines], str]:
    return lambda lines: "; ".join(filter(None, (figure(lines) for figure in figures)))


def checked(lines: Lines) -> str:
    cases = sum(int(line.get("cases", 1)) for line in lines)
    return f"{cases} cases, {sum(int(line.get('wrong') or 0) for line in lines)} wrong"


def counted(lines: Lines) -> str:
    return f"{len(lines)} measurements"


def copy_figure(lines: Lines) -> str:
    rate = max(float(line["busbw"]) for line in pick(lines, algorithm="copy"))
    return f"copy {rate:.0f} GB/s, read and written"


def hop_figure(lines: Lines) -> str:
    """H: microseconds from one process's stream write until another's stream has waited."""
    return "; ".join(f"H {median(line):.1f} us" for line in pick(lines, algorithm="hop")[:1])


def all_gpus_figure(lines: Lines) -> str:
    widest = pick(lines, ranks=max(line["ranks"] for line in lines))
    return joined(beside(KIB, "us", 1), beside(256 * MIB, "busbw GB/s"))(widest)


def kill_figure(lines: Lines) -> str:
    """Seconds until the last survivor raised: after a kill, and after a stop (its deadline)."""
    slowest: dict[str, float] = {}
    for line in lines:
        worst = max(float(seconds) for seconds in line["raised_s"])
        what = line["mode"] + ", tensors mapped" * line["mapped"]
        slowest[what] = max(worst, slowest.get(what, 0.0))
    return "; ".join(f"{what}: raised after {s:.2f} s at most" for what, s in slowest.items())


def bytes_figure(lines: Lines) -> str:
    most = max(float(line["dram_bytes_counted"] / line["dram_bytes"]) for line in lines)
    return f"at most {most:.3f} of the formula"


def tests_figure(lines: Lines) -> str:
    (line,) = lines
    passed = line["tests"] - line["wrong"] - line["skipped"]
    text = f"{passed} of {line['tests']} tests passed"
    return text + f", {line['skipped']} skipped" * bool(line["skipped"])


def suite_figure(lines: Lines) -> str:
    return "; ".join(
        f"{line['pass']} passed, {line['fail']} failed, {line['skip']} skipped" for line in lines
    )


def bench_figure(lines: Lines) -> str:
    several = [line for line in lines if line["ranks"] > 1]
    return joined(*(beside(size, "us") for size in (KIB, MIB, 256 * MIB)))(several)


def ddp_figure(lines: Lines) -> str:
    parts = []
    for mode, ranks in dict.fromkeys((line["mode"], line["ranks"]) for line in lines):
        by = pick(lines, mode=mode, ranks=ranks)
        shown = ", ".join(f"{line['algorithm']} {median(line) / 1000:.1f}" for line in by)
        parts.append(f"{mode}, {ranks} ranks, ms a step: {shown}")
    return "; ".join(parts)


def ddp_table(lines: Lines) -> list[str]:
    """Milliseconds of a step: a row for each way to train, a column for each model and ranks."""
    columns = list(dict.fromkeys((line["mode"], line["ranks"]) for line in lines))
    titles = {line["algorithm"]: line["title"] for line in lines}
    width = max(map(len, titles.values()))
    heads = [f"{mode}, {ranks} rank{'s' * (ranks > 1)}" for mode, ranks in columns]
    rows = [f"{'ms a step':<{width}}  " + "  ".join(heads)]
    for key, title in titles.items():
        cells = []
        for (mode, ranks), head in zip(columns, heads, strict=True):
            found = pick(lines, algorithm=key, mode=mode, ranks=ranks)
            text = f"{median(found[0]) / 1000:.2f}" if found else "-"
            cells.append(f"{text:>{len(head)}}")
        rows.append(f"{title:<{width}}  " + "  ".join(cells))
    return rows


# --- What programs wrote --------------------------------------------------------------------------


def read_lines(folder: Path) -> Lines:
    """The measurements as ringreduce_cuda_perf appends them."""
    path = folder / "measured.jsonl"
    text = path.read_text() if path.exists() else ""
    # A program that was ended may have written half a line.
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def counted_lines(folder: Path) -> Lines:
    """The lines of the launches with what Nsight Compute counted."""
    lines = read_lines(folder)
    counts = read_ncu((folder / "ncu.csv").read_text(errors="replace"))
    if len(counts) != len(lines):
        raise ValueError(f"ncu counted {len(counts)} launches, not {len(lines)}")
    return [{**line, "dram_bytes_counted": c} for line, c in zip(lines, counts, strict=True)]


def read_ncu(text: str) -> list[float]:
    """Bytes read and written by each launch, of a table as `ncu --csv --page raw` prints it."""
    rows = text.splitlines()
    begin = next((i for i, row in enumerate(rows) if row.startswith('"ID"')), len(rows))
    # The row below the names has the units and no ID.
    launches = [row for row in csv.DictReader(rows[begin:]) if row["ID"]]
    columns = ("dram__bytes_read.sum", "dram__bytes_write.sum")
    return [sum(float(launch[c].replace(",", "")) for c in columns) for launch in launches]


def documents(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The JSON files of that name; none where the program has not come so far."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def junit_lines(folder: Path) -> Lines:
    """A line with the counts of pytest's report."""
    path = folder / "junit.xml"
    if not path.is_file():
        return []
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        case.attrib["name"]
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return [{**count, "wrong": count["failures"] + count["errors"], "failed": failed}]


def suite_lines(folder: Path) -> Lines:
    """A line with the counts of torch's own tests.  Their failures are told, and judged later."""
    lines: Lines = []
    for document in documents(folder, "results-on-gpus-*.json"):
        outcomes = [outcome for outcome, _ in document.values()]
        count = {name: outcomes.count(name) for name in ("pass", "fail", "skip")}
        failed = {test: why for test, (outcome, why) in document.items() if outcome == "fail"}
        lines.append({**count, "failed": failed})
    return lines


def bench_lines(folder: Path) -> Lines:
    """What ringreduce.bench measured."""
    lines: Lines = []
    for document in documents(folder, "bench-*.json"):
        for report in document.get("reports", [document]):
            for row in report["rows"]:
                for key, found in row["measurements"].items():
                    if key != "roofline":
                        lines.append(bench_line(report, row, key, found))
    return lines


def bench_line(
    report: dict[str, Any], row: dict[str, Any], key: str, found: dict[str, Any]
) -> Line:
    times = [1e6 * seconds for seconds in found["seconds"]]
    return {
        "mode": report["collective"],
        "ranks": report["settings"]["world"],
        "sharing": "gpu" if report["machine"]["sharing"] else "",
        "algorithm": key,
        "dtype": row["dtype"],
        "op": row["op"],
        "bytes": row["bytes"],
        "time_us": [found["median_us"], min(times), max(times)],
        "issue_us": found.get("issue_us"),
        "algbw": found["algbw"],
        "busbw": found["busbw"],
        # Wrong results of a peer are no failure of ours.
        "wrong": found["wrong"] + (not found["same_bits"]) if key == OURS else 0,
        "peer_wrong": found["wrong"] if key != OURS else 0,
    }


def ddp_lines(folder: Path) -> Lines:
    """What benchmarks/ddp.py measured; times are of a step."""
    lines: Lines = []
    for document in documents(folder, "ddp-*.json"):
        settings = document["settings"]
        for model in document["models"]:
            for key, way in model["ways"].items():
                ours = key in (OURS, "hook")
                times = [1e6 * seconds for seconds in way["step"]]
                lines.append(
                    {
                        "mode": model["name"],
                        "ranks": settings["world"],
                        "sharing": "gpu" if settings["sharing"] else "",
                        "algorithm": key,
                        "title": document["titles"][key],
                        "dtype": settings["dtype"],
                        "bytes": 4 * model["parameters"],
                        "time_us": [1e6 * way["median_s"], min(times), max(times)],
                        "samples_per_s": way["samples_per_s"],
                        "exposed_us": None if way["exposed_s"] is None else 1e6 * way["exposed_s"],
                        "wrong": way["wrong"] + (not way["same_bits"]) if ours else 0,
                    }
                )
    return lines
