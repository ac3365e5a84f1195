"""Ranks and lists in sentences, and what a program says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks for a sentence.

    Returns:
        "rank 3", or "ranks 0, 2-5 and 7".
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    one = len(runs) == 1 and len(runs[0]) == 1
    return ("rank " if one else "ranks ") + listed(words)


def listed(words: Sequence[str]) -> str:
    """Words for a sentence.

    Returns:
        "a, b and c".
    """
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def aligned(rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> list[str]:
    """A table for a terminal.

    Args:
        rows: its cells, of as many columns each.
        words: the columns that are aligned to the left.

    Returns:
        Its lines.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def say(text: str, file: TextIO | None = None) -> None:
    """Prints what a program has found, whatever characters a damaged file has put into it.

    Args:
        text: of one line or several.
        file: None for the standard output, whose reader (`| head`) may have read enough.
    """
    file = file or sys.stdout
    safe = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    encoding = file.encoding or "utf-8"
    try:
        print(safe.encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)
    except BrokenPipeError:  # Python would say so at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
