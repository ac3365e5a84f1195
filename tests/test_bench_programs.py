"""benchmarks/ddp.py: what it compares, and that wrong results are seen."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringreduce.bench.placing import Placing, nccl_environment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import _ddp_report
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


class Ranks:
    """The ranks of a way, by what they answer."""

    def __init__(self, contender):
        self.contender = contender

    def ask(self, do, **arguments):
        digests = ("a", "b") if self.contender.key == "hook" else ("a", "a")
        return {
            "round": [{"step": [1.0, 2.0], "no_sync": [1.0, 1.0]},
                      {"step": [3.0, 1.0], "no_sync": [0.5, 0.5]}],
            "memory": [{"allocated": 5, "staging": 1, "gpu": 7},
                       {"allocated": 4, "staging": 2, "gpu": 7}],
            "check": answers([[2.0, -3.0], [2.0, -3.0]], digests),
        }.get(do, [{"parameters": 9}] * 2)  # fmt: skip


def race(monkeypatch):
    monkeypatch.setattr(nccl_environment, "__defaults__", (lambda: (2, 30, 3),))
    contenders = [way for way in ddp.ways(Placing("cuda", 2, 2)) if not way.missing]
    sets = {way.key: Ranks(way) for way in contenders}
    controller = SimpleNamespace(sets=sets, skip=lambda key, reason: sets.pop(key))
    one = ddp.Race(controller, ddp.parse(["--tiny", "--rounds", "2"]), "gpt2")
    return one.run(), one.skipped


def test_a_step_is_that_of_the_slowest_rank_and_other_bits_are_a_fault(monkeypatch):
    result, _ = race(monkeypatch)
    stock = result.ways["stock"]
    assert stock.step == [3.0, 2.0, 3.0, 2.0]  # the first of three rounds is not timed
    assert stock.exposed == pytest.approx(1.5)
    assert (stock.allocated_bytes, stock.staging_bytes, stock.gpu_bytes) == (5, 2, 7)
    titles = {key: key for key in result.ways}
    report = _ddp_report.Run("2030-01-01", {}, {}, titles, models=[result])
    assert report.faults() == ["gpt2, hook: ranks have different bits"]
    assert not report.ours_is_right
