"""The programs in benchmarks/: what they refuse, what they compare, that wrong results are seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringreduce.bench.placing import Placing, nccl_environment
from ringreduce.bench.settings import BenchError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "net")]

import _accuracy_report  # noqa: E402
import _ddp_report  # noqa: E402
import accuracy  # noqa: E402
import ddp  # noqa: E402


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        (accuracy, ["--ways", "int3"], "'int3' is none of"),
        (accuracy, ["--worlds", "3"], "2, 4 and 8 ranks"),
        (accuracy, ["--out", "no/such/place"], "there is no folder no/such"),
        (accuracy, ["--docs", __file__], "the document has no"),
        (ddp, ["--models", "vgg"], "'vgg' is none of"),
        (ddp, ["--set", "gpt2.depth=3"], "there is no gpt2.depth"),
        (ddp, ["--set", "gpt2.layers=x"], "is not MODEL.NAME=NUMBER"),
        (ddp, ["--nproc", "0"], "numbers above 0"),
    ],
)
def test_refuses(capsys, program, arguments, complaint):
    with pytest.raises(SystemExit):
        program.main(arguments)
    assert complaint in capsys.readouterr().err


# --- accuracy.py ----------------------------------------------------------------------------------


def record(way, seed, loss, feedback=False, **more):
    return {
        "model": "gpt", "world": 2, "way": way, "feedback": feedback, "seed": seed, "steps": 4,
        "held_out_loss": loss, "train_loss": 2 * loss, "parameters": 137_000, "cpu_seconds": 3.0,
        "same_weights": True, "curve": [3.0, 2.0], **more,
    }  # fmt: skip


def test_ways_are_compared_with_exact_of_the_same_seeds():
    records = [
        record("int8", 1, 2.02, True), record("exact", 0, 1.0), record("exact", 1, 2.0),
        record("int8", 0, 1.004, True), record("int8", 0, 1.1), record("powersgd_2", 0, 1.2, True),
    ]  # fmt: skip
    exact, coded, bare, other = _accuracy_report.summarise(records, {})["groups"]
    assert "over_exact" not in exact
    assert coded["over_exact_each"] == pytest.approx([0.004, 0.01])
    assert "met" not in coded  # it is of two seeds
    assert bare["over_exact"] == pytest.approx(0.1) and other["over_exact"] == pytest.approx(0.2)
    exact = [record("exact", seed, 1.0 + seed) for seed in range(3)]
    for over, met in ((0.019, True), (0.021, False), (float("nan"), False)):
        coded = [record("int4", seed, (1 + over) * (1.0 + seed), True) for seed in range(3)]
        group = _accuracy_report.summarise([*exact, *coded], {})["groups"][1]
        assert (group["asked"], group["met"]) == (0.02, met)
    [fault] = _accuracy_report.faults([*records, record("int4", 0, 1.0, same_weights=False)])
    assert fault == "gpt, 2 ranks, int4, without feedback, seed 0: ranks have different weights"
    answers = [{"weights_hash": digest, "cpu_seconds": 1.0} for digest in "ab"]
    assert not accuracy.result_of(answers)["same_weights"]


# --- ddp.py ---------------------------------------------------------------------------------------


def ways(monkeypatch, world, devices, version, device="cuda"):
    monkeypatch.setattr(nccl_environment, "__defaults__", (lambda: version,))
    return {way.key: way for way in ddp.ways(Placing(device, world, devices))}


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
    """The ranks of a way, by what they answer; a way named in `failing` fails at that question."""

    def __init__(self, contender, failing):
        self.contender, self.failing = contender, failing

    def ask(self, do, **arguments):
        if self.failing.get(self.contender.key) == do:
            raise BenchError(f"rank 1 failed:\nTraceback\nno {do} today")
        digests = ("a", "b") if self.contender.key == "hook" else ("a", "a")
        return {
            "round": [{"step": [1.0, 2.0], "no_sync": [1.0, 1.0]},
                      {"step": [3.0, 1.0], "no_sync": [0.5, 0.5]}],
            "memory": [{"allocated": 5, "staging": 1, "gpu": 7},
                       {"allocated": 4, "staging": 2, "gpu": 7}],
            "check": answers([[2.0, -3.0], [2.0, -3.0]], digests),
        }.get(do, [{"parameters": 9}] * 2)  # fmt: skip


def race(monkeypatch, failing):
    contenders = [way for way in ways(monkeypatch, 2, 2, (2, 30, 3)).values() if not way.missing]
    sets = {way.key: Ranks(way, failing) for way in contenders}
    controller = SimpleNamespace(sets=sets, skip=lambda key, reason: sets.pop(key))
    one = ddp.Race(controller, ddp.parse(["--tiny", "--rounds", "2"]), "gpt2")
    return one.run(), one.skipped


def test_a_step_is_that_of_the_slowest_rank_and_other_bits_are_a_fault(monkeypatch, tmp_path):
    result, _ = race(monkeypatch, {})
    stock = result.ways["stock"]
    assert stock.step == [3.0, 2.0, 3.0, 2.0]  # the first of three rounds is not timed
    assert stock.exposed == pytest.approx(1.5)
    assert (stock.allocated_bytes, stock.staging_bytes, stock.gpu_bytes) == (5, 2, 7)
    report = _ddp_report.Run(
        created="2030-01-01",
        machine={"cpu": "a CPU", "cores": 2, "torch": "2.11", "gpus": ["NVIDIA X"] * 2,
                 "cuda": "13.0", "nccl": ""},
        settings={"device": "cuda", "world": 2, "dtype": "float32", "rounds": 2, "steps": 2,
                  "sharing": "ranks sharing one GPU"},
        titles={key: way.title for key, way in ways(monkeypatch, 2, 1, (2, 30, 3)).items()},
        models=[result],
    )  # fmt: skip
    text = "\n".join([*_ddp_report.preamble(report), *_ddp_report.table(report, result)])
    assert "RANKS SHARING ONE GPU" in text
    assert report.faults() == ["gpt2, DDP, nccl + ringreduce hook: ranks have different bits"]
    assert not report.ours_is_right
    report.write(tmp_path / "ddp.json")
    way = json.loads((tmp_path / "ddp.json").read_text())["models"][0]["ways"]["ours"]
    assert way["samples_per_s"] == pytest.approx(2 * 2 / 2.5)


@pytest.mark.parametrize("question", ["prepare", "check", "round", "memory"])
def test_stock_that_fails_is_left_out_and_ours_is_not(monkeypatch, question):
    result, skipped = race(monkeypatch, {"stock": question})
    assert "stock" not in result.ways
    assert skipped == {"stock": f"it failed: no {question} today"}
    with pytest.raises(BenchError, match=f"no {question} today"):
        race(monkeypatch, {"hook": question})
