"""Ways of doing the same that take turns; medians with the lowest and the highest value."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ringreduce.tools.bench.machine import describe_machine
from ringreduce.tools.bench.results import write_json

Runs = dict[str, list[dict[str, float]]]  # by way


def by_turns(ways: Iterable[str], count: int, run: Callable[[str], dict[str, float]]) -> Runs:
    """`count` runs of each way, every second round in the opposite order."""
    found: Runs = {way: [] for way in ways}
    for number in range(count):
        for way in list(found) if number % 2 == 0 else reversed(found):
            found[way].append(run(way))
            print(f"run {number + 1}, {way}: {found[way][-1]}", file=sys.stderr, flush=True)
    return found


def print_table(heading: str, figures: Mapping[str, str], found: Runs, digits: int) -> None:
    """A line for each of the figures, which are given with their titles."""
    print(f"{heading:<36}" + "".join(f"{way:>28}" for way in found))
    for key, title in figures.items():
        cells = []
        for runs in found.values():
            values = [one[key] for one in runs]
            numbers = (statistics.median(values), min(values), max(values))
            middle, low, high = (f"{number:.{digits}f}" for number in numbers)
            cells.append(f"{middle} ({low}-{high})")
        print(f"{title:<36}" + "".join(f"{cell:>28}" for cell in cells))


def write(path: Path, settings: dict[str, Any], found: Runs) -> None:
    write_json(path, {"settings": settings, "machine": describe_machine(), "runs": found})
