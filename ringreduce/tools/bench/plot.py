"""The report as a picture: bus bandwidth over size, and the time of small messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ringreduce.tools.bench.results import Report, Row
from ringreduce.tools.bench.settings import OURS, ROOFLINE, format_size
from ringreduce.tools.bench.table import roofline_from

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart; markers differ as well.
OUR_STYLE = ("#0072B2", "o")
PEER_STYLES = (("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"))
SMALL = 64 << 10


def write_plot(report: Report, path: Path) -> None:
    """Write the picture to `path`; its suffix chooses the format.

    Raises ImportError without matplotlib, ValueError for a report without sizes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted((row for row in report.rows if row.bytes), key=lambda row: row.bytes)
    if not rows:
        raise ValueError(f"{report.collective} has no sizes to plot")
    small = [row for row in rows if row.bytes <= SMALL]
    figure, axes = pyplot.subplots(
        1, 2 if small else 1, figsize=(11 if small else 6.5, 4.8), squeeze=False
    )
    _draw_bandwidth(axes[0][0], report, rows)
    if small:
        _draw_time(axes[0][1], report, small)
    settings, machine = report.settings, report.machine
    where = f"{machine['cores']} cores ({machine['cpu']})"
    if report.on_gpu:
        where = ", ".join(dict.fromkeys(machine["gpus"]))
        where += f" ({machine['sharing']})" if machine["sharing"] else ""
    operation = f", {rows[0].op}" if rows[0].op else ""
    figure.suptitle(
        f"{report.collective}, {rows[0].dtype}{operation}, {settings['world']} ranks on {where}, "
        f"torch {machine['torch']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _styles(report: Report) -> dict[str, tuple[str, str]]:
    styles = {OURS: OUR_STYLE}
    for place, peer in enumerate(report.peers):
        styles[peer] = PEER_STYLES[place % len(PEER_STYLES)]
    return styles


def _draw_bandwidth(axes: Axes, report: Report, rows: list[Row]) -> None:
    for key, (colour, marker) in _styles(report).items():
        chosen = [row for row in rows if key in row.measurements]
        axes.plot(
            [row.bytes for row in chosen],
            [row.busbw(key) for row in chosen],
            color=colour,
            marker=marker,
            label=report.titles[key],
        )
    bounded = [r for r in rows if ROOFLINE in r.measurements and r.bytes >= roofline_from(report)]
    if bounded:
        axes.plot(
            [row.bytes for row in bounded],
            [row.busbw(ROOFLINE) for row in bounded],
            color="black",
            linestyle="--",
            marker="x",
            label="roofline: each rank scales its own buffer",
        )
    _finish(axes, rows, "bus bandwidth (GB/s, higher is better)")


def _draw_time(axes: Axes, report: Report, rows: list[Row]) -> None:
    for key, (colour, marker) in _styles(report).items():
        chosen = [row for row in rows if key in row.measurements]
        sizes = [row.bytes for row in chosen]
        found = [row.measurements[key] for row in chosen]
        axes.plot(
            sizes,
            [m.median * 1e6 for m in found],
            color=colour,
            marker=marker,
            label=report.titles[key],
        )
        low, high = ([m.quantile(q) * 1e6 for m in found] for q in (0.1, 0.9))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
    _finish(axes, rows, "time a call (us, lower is better; band: p10-p90)")


def _finish(axes: Axes, rows: list[Row], label: str) -> None:
    sizes = sorted({row.bytes for row in rows})
    shown = sizes[:: -(-len(sizes) // 8)]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(shown, [format_size(size) for size in shown], rotation=30)
    axes.set_xlabel("message size")
    axes.set_ylabel(label)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    # Between the powers of ten, the labels of 2 and 5 are enough.
    axes.yaxis.set_minor_formatter(
        lambda value, place: f"{value:g}" if f"{value:.0e}"[0] in "25" else ""
    )
