"""benchmarks/net/ring_order.py: what it promises and how it judges, and a whole small run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import why_not

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks" / "net"))

import ring_order

MATRIX = [[0.0, 10, 40], [40, 0, 20], [30, 50, 0]]  # 0 > 1 > 2: 10, 0 > 2 > 1: 40


def found(own: float, chosen: float, ring: list[int]) -> dict[str, list[dict[str, Any]]]:
    one = {"made": 1.0, "table": "", "matrix": MATRIX}
    return {
        "": [{**one, "times": [own, own], "ring": [0, 1, 2]}],
        "measure": [{**one, "times": [chosen, chosen], "ring": ring}],
    }


def test_lines_differ_and_the_hosts_own_ring_has_a_slow_one():
    for seed in range(5):
        matrix = ring_order.draw(6, seed)
        assert ring_order.slowest(matrix, range(6)) == min(ring_order.RATES)
        assert ring_order.best(matrix) > 2 * min(ring_order.RATES)
        assert matrix == ring_order.draw(6, seed)


@pytest.mark.parametrize(
    ("own", "chosen", "ring", "status"),
    [
        (4.0, 1.0, [0, 2, 1], 0),
        (4.0, 1.14, [0, 2, 1], 0),
        (4.0, 1.3, [0, 2, 1], 1),  # slower than promised by more than 15 %
        (4.0, 0.8, [0, 2, 1], 1),
        (4.0, 4.0, [0, 1, 2], 1),  # as promised, but another order has a faster slowest link
    ],
)
def test_a_run_is_judged(capsys, own, chosen, ring, status):
    assert ring_order.judge(MATRIX, found(own, chosen, ring), 1 << 20) == status
    said = capsys.readouterr().out
    assert ("NOT THE BEST" in said) == (ring == [0, 1, 2]) and "measured" in said


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_small_run(capsys):
    ring_order.main(["--hosts", "3", "--size", "64K", "--calls", "1", "--runs", "1"])
    said = capsys.readouterr().out
    assert "ring of hosts: 0 > " in said and "promised" in said
