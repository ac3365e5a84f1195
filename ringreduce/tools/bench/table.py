"""The report as text: a header, and a row for each size with the columns of nccl-tests."""

from __future__ import annotations

from ringreduce.tools.bench.collectives import COLLECTIVES
from ringreduce.tools.bench.contenders import SYMMETRIC
from ringreduce.tools.bench.results import Report, Row, percentile
from ringreduce.tools.bench.settings import OURS, ROOFLINE, format_size

# Below this a call of torch costs as much as the memory it touches, so that the roofline
# would say more about torch than about memory; on a GPU, than a launch or its caches.
ROOFLINE_FROM = 64 << 10
ROOFLINE_FROM_ON_GPU = 64 << 20

# Name, unit and width of each column; the peers' follow.
COLUMNS = (
    ("size", "(B)", 11), ("count", "(elements)", 11), ("type", "", 9), ("redop", "", 9),
    ("time", "(us)", 10), ("p10-p90", "(us)", 17), ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8), ("#wrong", "", 7), ("roofline", "(GB/s)", 9),
)  # fmt: skip


# Only of GPUs: until the GPU is idle again, and until a call returns.
GPU_COLUMNS = (("wall", "(us)", 10), ("issue", "(us)", 9))


def roofline_from(report: Report) -> int:
    """The smallest size at which the roofline is one of memory."""
    return ROOFLINE_FROM_ON_GPU if report.on_gpu else ROOFLINE_FROM


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
    if report.on_gpu:
        names = list(dict.fromkeys(machine["gpus"]))
        libraries = f"CUDA {machine['cuda']}, NCCL {machine['nccl'] or 'none'}"
        lines.append(f"gpu       {', '.join(names)}; {libraries}")
        if machine["sharing"]:
            lines.append(
                f"          {machine['sharing'].upper()}: no link between GPUs is measured"
            )
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
    calls = "calls on CUDA tensors" if report.on_gpu else "blocking calls"
    lines.append(
        f"method    {calls}, back to back; contenders take turns over {settings['rounds']} "
        "rounds, the others asleep; a round is its slowest rank's time / calls; median of rounds"
    )
    if report.on_gpu:
        lines.append(
            "          time: the device's, between CUDA events before the first call and after the "
            "last; wall: until the GPU is idle; issue: until the last call returned to Python"
        )
    taking_part = report.titles.keys() - report.skipped.keys()
    symmetric = [title for key, title in SYMMETRIC.items() if key in taking_part]
    if symmetric:
        lines.append(
            f"symm_mem  {', '.join(symmetric)}: torch.ops.symm_mem.one_shot_all_reduce_out (to "
            "another tensor) and two_shot_all_reduce_ (in place), on symmetric memory"
        )
    if ROOFLINE in report.titles:
        lines.append(
            f"roofline  all {settings['world']} ranks scale their buffers in place at the same "
            "time, which moves the bytes that such a call has to: size / time, as algbw"
        )
    return [f"# {line}" for line in lines]


def header(report: Report) -> list[str]:
    """What is measured, who is left out, and the columns' names."""
    lines = [f"{report.collective}: {COLLECTIVES[report.collective].torch_name}"]
    for key, reason in report.skipped.items():
        lines.append(f"skipped   {report.titles[key]}: {reason}")
    if report.on_gpu and report.machine["sharing"]:
        lines.append(f"placing   {report.machine['sharing']}")
    names, units = [], []
    for name, unit, width in (*COLUMNS, *(GPU_COLUMNS if report.on_gpu else ())):
        names.append(f"{name:>{width}}")
        units.append(f"{unit:>{width}}")
    for peer in report.peers:
        wide, wider = peer_widths(report.titles[peer])
        names.append(f"{report.titles[peer]:>{wide}}{report.titles[peer] + '/ours':>{wider}}")
        units.append(f"{'(us)':>{wide}}{'':>{wider}}")
    return [f"# {line}".rstrip() for line in [*lines, "".join(names)[2:], "".join(units)[2:]]]


def codec_table(report: Report) -> list[str]:
    """A line for each size and codec, exact and the peers beside them.

    busbw counts the bytes of float32 that were reduced, not those that travelled.
    """
    keys = [OURS, *report.codecs, *report.peers]
    measured = {key for row in report.rows for key in row.measurements}
    beside = [key for key in (OURS, *report.peers) if key in measured]
    titles = {**report.titles, OURS: "exact"}
    names = [f"x {titles[key]}" for key in beside]
    lines = [
        "# compressed all-reduce beside exact; busbw in bytes of float32; x: times as fast; errors "
        "against the",
        "# float64 sum of uniform values, of one call (no residuals): max and rms over the rms of "
        "the sum",
        f"# {'size (B)':>9}  {'codec':<14}{'time (us)':>11}{'p10-p90 (us)':>19}{'busbw (GB/s)':>14}"
        + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in names)
        + f"{'max error':>11}{'rms error':>11}{'1 - cosine':>12}{'#wrong':>8}",
    ]
    for row in report.rows:
        for key in keys:
            if key in row.measurements:
                lines.append(_codec_row(row, key, titles[key], beside, names))
    return lines


def _codec_row(row: Row, key: str, title: str, beside: list[str], names: list[str]) -> str:
    found = row.measurements[key]
    spread = f"{format_us(found.quantile(0.1))}-{format_us(found.quantile(0.9))}"
    text = f"{row.bytes:>11}  {title:<14}{format_us(found.median):>11}{spread:>19}"
    text += f"{format_rate(row.busbw(key)):>14}"
    for other, name in zip(beside, names, strict=True):
        ratio = "-"
        if other in row.measurements and other != key:
            ratio = format_rate(row.measurements[other].median / found.median) + "x"
        text += f"{ratio:>{max(9, len(name) + 2)}}"
    for name, width in (("max", 11), ("rms", 11), ("cosine", 12)):
        value = found.error.get(name)
        if value is not None and name == "cosine":
            value = max(0.0, 1 - value)
        shown = "-" if value is None else f"{value:.2g}"
        text += f"{shown:>{width}}"
    return text + f"{found.wrong:>7}{' ' if found.same_bits else '!'}".rstrip()


def peer_widths(title: str) -> tuple[int, int]:
    """How wide a peer's two columns are."""
    return max(10, len(title) + 2), max(14, len(title) + 7)


def format_row(report: Report, row: Row) -> str:
    """One size. A "!" after #wrong: ranks had different bits."""
    ours = row.measurements[OURS]
    spread = f"{format_us(ours.quantile(0.1))}-{format_us(ours.quantile(0.9))}"
    sized = row.bytes > 0
    roofline = ROOFLINE in row.measurements and row.bytes >= roofline_from(report)
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
    if report.on_gpu:
        for (_, _, width), rounds in zip(GPU_COLUMNS, (ours.wall, ours.issue), strict=True):
            text += f"{format_us(percentile(rounds, 0.5)):>{width}}"
    for peer in report.peers:
        wide, wider = peer_widths(report.titles[peer])
        if peer in row.measurements:
            ratio = format_rate(row.ratio(peer)) + "x"
            text += f"{format_us(row.measurements[peer].median):>{wide}}{ratio:>{wider}}"
        else:
            text += f"{'-':>{wide}}{'-':>{wider}}"
    return text
