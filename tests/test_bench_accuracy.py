"""benchmarks/accuracy.py: what it runs, that it continues, what it says; a whole small study."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _accuracy_report  # noqa: E402
import accuracy  # noqa: E402

STEPS = {"gpt": 1000, "mlp": 300}


def planned(**more):
    asked = {"models": ("gpt",), "worlds": (2,), "ways": accuracy.WAYS, "seeds": (0,)}
    return accuracy.plan(**{**asked, **more}, steps=STEPS)


class TestPlan:
    def test_every_codec_runs_with_and_without_feedback(self):
        runs = [(one.way, one.feedback) for one in planned()]
        assert runs[0] == ("exact", False)
        for codec in accuracy.CODECS:
            assert {(codec, True), (codec, False)} <= set(runs)
        assert ("fp16_hook", False) in runs and ("powersgd_4", True) in runs
        assert len(runs) == len(set(runs)) == 1 + 2 * 4 + 4

    def test_codecs_can_be_run_one_way_only(self):
        assert not any(one.feedback for one in planned(feedback="without", ways=("exact", "int8")))
        runs = [(one.way, one.feedback) for one in planned(feedback="with", ways=("exact", "int8"))]
        assert runs == [("exact", False), ("int8", True)]

    def test_larger_groups_run_what_may_grow(self):
        ways = {one.way for one in planned(worlds=(4, 8))}
        assert ways == {"exact", "int8", "int4"}
        assert len(planned(worlds=(4, 8), seeds=(0, 1, 2))) == 2 * 3 * 5

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--ways", "int3"], "'int3' is none of"),
            (["--models", "vgg"], "'vgg' is none of"),
            (["--worlds", "3"], "2, 4 and 8 ranks"),
            (["--seeds", "x"], "no list of numbers"),
            (["--steps", "0"], "number above 0"),
            (["--out", "no/such/place"], "there is no folder no/such"),
            (["--docs", "no/such/file"], "No such file"),
            (["--docs", __file__], "the document has no"),
        ],
    )
    def test_refuses(self, capsys, tmp_path, arguments, complaint):
        with pytest.raises(SystemExit):
            accuracy.main(["--out", str(tmp_path), *arguments])
        assert complaint in capsys.readouterr().err


def line(**more):
    training = {
        "model": "mlp",
        "world": 2,
        "way": "exact",
        "feedback": False,
        "seed": 0,
        "steps": 9,
    }
    return json.dumps({"training": {**training, **more}, "result": {"held_out_loss": 1.0}})


class TestContinuing:
    def test_a_line_that_was_cut_off_is_run_again(self, tmp_path):
        path = tmp_path / "runs.jsonl"
        assert accuracy.read_runs(path) == {}
        path.write_text(line() + "\n" + line(seed=1)[:-9])
        assert [one.seed for one in accuracy.read_runs(path)] == [0]
        accuracy.mend_end(path)
        assert path.read_text() == line() + "\n"
        accuracy.mend_end(path)
        assert path.read_text() == line() + "\n"

    def test_other_damage_is_told(self, tmp_path):
        path = tmp_path / "runs.jsonl"
        path.write_text(line() + "\n???\n" + line(seed=1) + "\n")
        with pytest.raises(ValueError, match="line 2 is no JSON"):
            accuracy.read_runs(path)
        assert accuracy.main(["--out", str(tmp_path), "--report"]) == 0  # another file


def record(way, seed, loss, feedback=False, **more):
    return {
        "model": "gpt", "world": 2, "way": way, "feedback": feedback, "seed": seed, "steps": 4,
        "held_out_loss": loss, "train_loss": 2 * loss, "parameters": 137_000, "cpu_seconds": 3.0,
        "same_weights": True, "curve": [3.0, 2.0], **more,
    }  # fmt: skip


RECORDS = [
    record("int8", 1, 2.02, True), record("exact", 0, 1.0), record("exact", 1, 2.0),
    record("int8", 0, 1.004, True), record("int8", 0, 1.1), record("powersgd_2", 0, 1.2, True),
]  # fmt: skip


class TestReport:
    def test_ways_are_compared_with_exact_of_the_same_seeds(self):
        groups = _accuracy_report.summarise(RECORDS, {})["groups"]
        assert [(g["way"], g["feedback"], g["seeds"]) for g in groups] == [
            ("exact", False, [0, 1]), ("int8", True, [0, 1]), ("int8", False, [0]),
            ("powersgd_2", True, [0]),
        ]  # fmt: skip
        exact, coded, bare, other = groups
        assert "over_exact" not in exact
        assert coded["over_exact"] == pytest.approx(3.024 / 3 - 1)
        assert coded["over_exact_each"] == pytest.approx([0.004, 0.01])
        assert "met" not in coded  # it is of two seeds
        assert bare["over_exact"] == pytest.approx(0.1) and "asked" not in bare
        assert other["over_exact"] == pytest.approx(0.2)

    def test_what_is_asked_for_can_be_met(self):
        exact = [record("exact", seed, 1.0 + seed) for seed in range(3)]
        for over, met in ((0.019, True), (0.021, False), (float("nan"), False)):
            coded = [record("int4", seed, (1 + over) * (1.0 + seed), True) for seed in range(3)]
            group = _accuracy_report.summarise([*exact, *coded], {})["groups"][1]
            assert (group["asked"], group["met"]) == (0.02, met)
            verdict = "at most +2 %: met" if met else "at most +2 %: MISSED"
            assert verdict in _accuracy_report.tables({"groups": [group]})[-1]
            assert "met" not in _accuracy_report.summarise(coded, {})["groups"][0]

    def test_tables(self):
        lines = _accuracy_report.tables(_accuracy_report.summarise(RECORDS, {}))
        assert lines[0] == "GPT, 137 thousand parameters, 4 steps, mean of seeds 0, 1:"
        rows = [line.split(" | ") for line in lines if line.startswith("| 2")]
        assert rows[1][1:5] == ["int8, with feedback", "1.5120", "+0.80 %", "+0.40 +1.00"]
        assert rows[2][1] == "int8, without feedback (seeds 0 only)"
        assert rows[3][1].startswith("torch's PowerSGD, rank 2")

    def test_different_weights_are_a_fault(self):
        records = [*RECORDS, record("int4", 0, 1.0, same_weights=False)]
        [fault] = _accuracy_report.faults(records)
        assert fault == "gpt, 2 ranks, int4, without feedback, seed 0: ranks have different weights"
        answers = [{"weights_hash": digest, "cpu_seconds": 1.0} for digest in "ab"]
        assert not accuracy.result_of(answers)["same_weights"]
        assert accuracy.result_of([answers[0]] * 2) == {
            "weights_hash": "a", "cpu_seconds": 2.0, "same_weights": True
        }  # fmt: skip

    def test_a_document_keeps_what_is_around_its_marks(self):
        text = f"before\n{_accuracy_report.MARKS[0]}\nold\n{_accuracy_report.MARKS[1]}\nafter\n"
        once = _accuracy_report.between_marks(text, "| new |\n")
        assert once.startswith("before\n") and once.endswith("\nafter\n")
        assert "| new |" in once and "old" not in once
        assert _accuracy_report.between_marks(once, "| new |\n") == once
        for wrong in ("", _accuracy_report.MARKS[0], _accuracy_report.MARKS[1]):
            with pytest.raises(ValueError, match="the document has no"):
                _accuracy_report.between_marks(wrong, "")


def test_the_documentation_shows_what_was_measured():
    results = BENCHMARKS / "results" / "accuracy.json"
    table = "\n".join(_accuracy_report.tables(json.loads(results.read_text()))) + "\n"
    text = (BENCHMARKS.parent / "docs" / "compression.md").read_text()
    assert _accuracy_report.between_marks(text, table) == text


def study(folder, *arguments):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "accuracy.py"), "--out", str(folder),
         "--logs", str(folder / "logs"), *arguments],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_small_study_and_its_continuation(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    small = ("--steps", "3", "--worlds", "2", "--seeds", "0")
    first = study(tmp_path, *small, "--models", "mlp", "--ways", "exact")
    assert "# 1 runs to do" in first
    second = study(tmp_path, *small, "--ways", "exact,int8,powersgd_1")
    assert "# 7 runs to do, 1 are in" in second and "WRONG" not in second
    runs = accuracy.read_runs(tmp_path / "accuracy.jsonl")
    assert len(runs) == 8
    for training, result in runs.items():
        assert result["same_weights"] and len(result["curve"]) == 3
        assert ("test_accuracy" in result) == (training.model == "mlp")
    hashes = {training: result["weights_hash"] for training, result in runs.items()}
    assert len(set(hashes.values())) > 4  # each way has weights of its own
    document = json.loads((tmp_path / "accuracy.json").read_text())
    assert [(g["model"], g["way"]) for g in document["groups"]].count(("gpt", "int8")) == 2
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "accuracy.md").read_text() in second
    third = ["--out", str(tmp_path), *small, "--ways", "exact,int8", "--report"]
    assert accuracy.main(third) == 0
    said = capsys.readouterr().out
    assert "# 0 runs to do, 8 are in" in said and "PowerSGD" not in said
