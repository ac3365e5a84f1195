"""The report as text: a header, and a row for each size with the columns of nccl-tests."""

from __future__ import annotations

from ringreduce.bench.collectives import COLLECTIVES
from ringreduce.bench.results import Report, Row
from ringreduce.bench.settings import OURS, ROOFLINE, format_size

# Below this a call of torch costs as much as the memory it touches, so that the roofline
# would say more about torch than about memory.
ROOFLINE_FROM = 64 << 10

# Name, unit and width of each column; the peers' follow.
COLUMNS = (
    ("size", "(B)", 11), ("count", "(elements)", 11), ("type", "", 9), ("redop", "", 9),
    ("time", "(us)", 10), ("p10-p90", "(us)", 17), ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8), ("#wrong", "", 7), ("roofline", "(GB/s)", 9),
)  # fmt: skip


def format_us(seconds: float) -> str:
    """Microseconds with about four digits."""
    micros = seconds * 1e6
    return f"{micros:.{2 if micros < 99.995 else 1 if micros < 999.95 else 0}f}"


def format_rate(value: float) -> str:
    """GB/s, or a ratio, with about three digits."""
    return f"{value:.{3 if value < 0.0995 else 2 if value < 99.995 else 1}f}"


def preamble(report: Report) -> list[str]:
    """What it ran on and how it was measured: the same for all collectives of a run."""
    machine, library, settings = report.machine, report.library, report.settings
    lines = [
        f"ringreduce.bench, {report.created}",
        f"machine   {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB memory, {machine['kernel']}, "
        f"torch {machine['torch']}, Python {machine['python']}",
    ]
    if library:
        lines.append(
            f"library   ringreduce {library['version']}"
            + (f", ISA {library['isa']}" if library["isa"] else "")
            + f", staging memory {format_size(int(library['staging_bytes']))} a rank"
        )
    if machine.get("environment"):
        lines.append(f"          with {machine['environment']}")
    rivals = ", ".join(title for key, title in report.titles.items() if key not in report.skipped)
    lines.append(
        f"ranks     {settings['world']} for each of: {rivals}; one process a rank, one thread "
        "each, not pinned"
    )
    if machine.get("mpi"):
        lines.append(f"mpi       {machine['mpi']}, through mpi4py on NumPy views of the buffers")
    lines.append(
        f"method    blocking calls, back to back; contenders take turns over {settings['rounds']} "
        "rounds, the others asleep; a round is its slowest rank's time / calls; median of rounds"
    )
    if ROOFLINE in report.titles:
        lines.append(
            f"roofline  all {settings['world']} ranks scale a buffer of that size in place at "
            "the same time: size / time, as algbw"
        )
    return [f"# {line}" for line in lines]


def header(report: Report) -> list[str]:
    """What is measured, who is left out, and the columns' names."""
    lines = [f"{report.collective}: {COLLECTIVES[report.collective].torch_name}"]
    for key, reason in report.skipped.items():
        lines.append(f"skipped   {report.titles[key]}: {reason}")
    names, units = [], []
    for name, unit, width in COLUMNS:
        names.append(f"{name:>{width}}")
        units.append(f"{unit:>{width}}")
    for peer in report.peers:
        names.append(f"{report.titles[peer]:>10}{report.titles[peer] + '/ours':>14}")
        units.append(f"{'(us)':>10}{'':>14}")
    return [f"# {line}".rstrip() for line in [*lines, "".join(names)[2:], "".join(units)[2:]]]


def format_row(report: Report, row: Row) -> str:
    """One size. A "!" after #wrong: ranks had different bits."""
    ours = row.measurements[OURS]
    spread = f"{format_us(ours.quantile(0.1))}-{format_us(ours.quantile(0.9))}"
    sized = row.bytes > 0
    roofline = ROOFLINE in row.measurements and row.bytes >= ROOFLINE_FROM
    cells = (
        str(row.bytes) if sized else "-",
        str(row.count) if sized else "-",
        row.dtype or "-",
        row.op or "-",
        format_us(ours.median),
        spread,
        format_rate(row.algbw(OURS)) if sized else "-",
        format_rate(row.busbw(OURS)) if sized else "-",
        f"{ours.wrong}{'' if ours.same_bits else '!'}",
        format_rate(row.algbw(ROOFLINE)) if roofline else "-",
    )
    text = "".join(f"{cell:>{column[2]}}" for cell, column in zip(cells, COLUMNS, strict=True))
    for peer in report.peers:
        if peer in row.measurements:
            ratio = format_rate(row.ratio(peer)) + "x"
            text += f"{format_us(row.measurements[peer].median):>10}{ratio:>14}"
        else:
            text += f"{'-':>10}{'-':>14}"
    return text
