"""Several collectives in one table: a row each, a column a size, in Markdown."""

from __future__ import annotations

from ringreduce.tools.bench.collectives import COLLECTIVES
from ringreduce.tools.bench.results import Report, Row, Suite
from ringreduce.tools.bench.settings import OURS, ROOFLINE, format_size

UNITS = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"))


def three_digits(value: float) -> str:
    """A positive `value` with three significant digits, and no exponent: "4.29", "1,380"."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"


def format_time(seconds: float) -> str:
    """Seconds for people, in the greatest unit that leaves a digit before the point."""
    unit, name = UNITS[0]
    for larger, larger_name in UNITS[1:]:
        if seconds >= 0.9995 * larger:
            unit, name = larger, larger_name
    return f"{three_digits(seconds / unit)} {name}"


def summary(suite: Suite) -> list[str]:
    """The lines of the table; nothing for a suite without reports.

    A cell is our median time, and for each peer how many times that its own is.
    """
    if not suite.reports:
        return []
    first = suite.reports[0]
    named = [key for key in first.titles if key not in (OURS, ROOFLINE)]
    peers = [key for key in named if _took_part(suite, key)]
    sizes = [size for report in suite.reports for size in report.settings["sizes"] if size]
    columns = list(dict.fromkeys(sizes)) or [0]
    names = [first.titles[peer] for peer in peers]
    says = " / ".join([f"time of {first.titles[OURS]}", *(f"{name}'s over it" for name in names)])
    lines = [["collective", *(format_size(size) if size else "-" for size in columns)]]
    for report in suite.reports:
        cells = dict(zip(report.settings["sizes"], report.rows, strict=True))
        if COLLECTIVES[report.collective].has_size:
            texts = [
                _cell(report, cells[size], peers) if size in cells else "-" for size in columns
            ]
            lines.append([report.collective, *texts])
        else:
            only = _cell(report, report.rows[0], peers)
            lines.append([f"{report.collective} (no size)", only, *["-"] * (len(columns) - 1)])
    for name in suite.refused:
        lines.append([name, *["refused"] * len(columns)])
    return [f"{first.settings['world']} ranks: {says}", "", *markdown_table(lines)]


def _took_part(suite: Suite, peer: str) -> bool:
    return any(peer in report.peers for report in suite.reports)


def _cell(report: Report, row: Row, peers: list[str]) -> str:
    ours = row.measurements[OURS]
    texts = [format_time(ours.median)]
    for peer in peers:
        texts.append(f"{three_digits(row.ratio(peer))} x" if peer in row.measurements else "-")
    wrong = ours.wrong or not ours.same_bits
    return " / ".join(texts) + (" WRONG" if wrong else "")


def markdown_table(lines: list[list[str]]) -> list[str]:
    """Rows of cells as a Markdown table whose columns stand under each other; a head first."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *rest = (
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [head, rule, *rest]
