"""What the stages with torch measured: read from the files of their programs, and figures.

Measurements become lines as gpu_stages.py describes them; `algorithm` is the contender's key, ours
is "ours", and "sharing" says whether ranks shared a GPU.  Times of DDP are of a step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_figures import KIB, MIB, beside, median, pick
from gpu_report import Line, Lines

OURS = "ours"


def documents(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The JSON files of that name; none where the program has not come so far."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


# --- Tests ----------------------------------------------------------------------------------------


def junit(folder: Path) -> Lines:
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


def tests_figure(lines: Lines) -> str:
    (line,) = lines
    passed = line["tests"] - line["wrong"] - line["skipped"]
    text = f"{passed} of {line['tests']} tests passed"
    return text + f", {line['skipped']} skipped" * bool(line["skipped"])


def suite(folder: Path) -> Lines:
    """A line with the counts of torch's own tests.  Their failures are told, and judged later."""
    lines: Lines = []
    for document in documents(folder, "results-on-gpus-*.json"):
        outcomes = [outcome for outcome, _ in document.values()]
        count = {name: outcomes.count(name) for name in ("pass", "fail", "skip")}
        failed = {test: why for test, (outcome, why) in document.items() if outcome == "fail"}
        lines.append({**count, "failed": failed})
    return lines


def suite_figure(lines: Lines) -> str:
    return "; ".join(
        f"{line['pass']} passed, {line['fail']} failed, {line['skip']} skipped" for line in lines
    )


# --- ringreduce.bench -----------------------------------------------------------------------------


def bench_lines(folder: Path) -> Lines:
    lines: Lines = []
    for document in documents(folder, "bench-*.json"):
        for report in document.get("reports", [document]):
            lines += report_lines(report)
    return lines


def report_lines(report: dict[str, Any]) -> Lines:
    lines: Lines = []
    for row in report["rows"]:
        for key, found in row["measurements"].items():
            if key == "roofline":
                continue
            times = [1e6 * seconds for seconds in found["seconds"]]
            line: Line = {
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
            lines.append(line)
    return lines


def bench_figure(lines: Lines) -> str:
    several = [line for line in lines if line["ranks"] > 1]
    return "; ".join(part for size in (KIB, MIB, 256 * MIB) for part in beside(several, size, "us"))


# --- benchmarks/ddp.py ----------------------------------------------------------------------------


def ddp_lines(folder: Path) -> Lines:
    lines: Lines = []
    for document in documents(folder, "ddp-*.json"):
        settings = document["settings"]
        for model in document["models"]:
            for key, way in model["ways"].items():
                ours = key in ("ours", "hook")
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


def ddp_figure(lines: Lines) -> str:
    parts = []
    for mode in dict.fromkeys(line["mode"] for line in lines):
        for ranks in dict.fromkeys(line["ranks"] for line in pick(lines, mode=mode)):
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
