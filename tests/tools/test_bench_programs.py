"""benchmarks/ddp.py: what it compares, and that wrong results are seen."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ddp


def answers(synced, digests=("a", "a")):
    own = [{"local": [1.0, -4.0], "norms": [2.0, 5.0]}, {"local": [3.0, -2.0], "norms": [2.0, 5.0]}]
    return [dict(o, synced=synced[r], digest=digests[r]) for r, o in enumerate(own)]


def test_gradients_are_held_against_the_mean_of_all_ranks():
    for synced, wrong in (
        ([[2.0005, -3.0], [2.0, -3.001]], 0),  # roundings
        ([[4.0, -6.0], [4.0, -6.0]], 4),  # a sum
        ([[1.0, -4.0], [3.0, -2.0]], 4),  # no sync
        ([[2.0, -3.0], [2.0, float("nan")]], 1),
    ):
        found = answers(synced)
        assert ddp.wrong_gradients(found, found, ddp.TOLERANCE["float32"]) == wrong
