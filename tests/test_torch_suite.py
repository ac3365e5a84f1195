"""The runner of torch's own tests: what it says of hangs, deaths, skips and the comparison."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parent / "torch_suite"
sys.path.insert(0, str(SUITE))

import results  # noqa: E402
import run  # noqa: E402
from results import Result  # noqa: E402

pytestmark = pytest.mark.slow

PASS, SKIP, FAIL = (Result(outcome, 0.0, "") for outcome in ("pass", "skip", "fail"))


def settings(**changes: object) -> argparse.Namespace:
    defaults = {"world": 2, "hosts": 1, "limit": 60, "start": "fork", "k": None, "verbose": False}
    return argparse.Namespace(**(defaults | changes))


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    return tmp_path / "logs"


def test_failures_and_tests_that_only_gloo_runs_are_named() -> None:
    gloo = {"a": PASS, "b": PASS, "c": SKIP, "d": PASS, "e": PASS}
    verdict = results.judge({"a": PASS, "b": SKIP, "c": SKIP, "d": FAIL}, gloo, {})
    assert (verdict.failed, verdict.missing) == (["d"], ["b", "e"])
    assert not verdict.good


def test_exceptions_are_let_pass_and_told_when_needless() -> None:
    gloo = {"a": PASS, "b": PASS, "c": PASS}
    listed = {"a": "there.py:1", "b": "there.py:2", "c": "there.py:3"}
    verdict = results.judge({"a": SKIP, "b": FAIL, "c": PASS}, gloo, listed)
    assert verdict.good
    assert (sorted(verdict.excepted), verdict.needless) == (["a", "b"], ["c"])


def test_the_table_counts_both_kinds_of_tests() -> None:
    ours = {"a": PASS, "b": FAIL, "c": SKIP, "beyond.d": PASS}
    rows = [line.split()[-3:] for line in results.table(ours, {"a": PASS, "b": PASS}).splitlines()]
    assert rows[1:4] == [["passed", "1", "2"], ["failed", "1", "0"], ["skipped", "1", "0"]]
    assert rows[4] == ["passed", "1", "0"]


def test_workers_keep_the_mark_by_which_they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(SUITE.parent / "cuda"))
    from gpu_runner import MARK

    monkeypatch.setenv(MARK, "abc")
    monkeypatch.delenv("RINGREDUCE_WIRE", raising=False)
    monkeypatch.setenv("RINGREDUCE_ALGORITHM", "ring")
    kept = {n: v for n, v in run.environment("gloo", 2).items() if n.startswith("RINGREDUCE_")}
    assert kept == {MARK: "abc"}


def test_a_test_that_needs_more_gpus_than_there_are_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "Process 1 exited\nRuntimeError: CUDA error: invalid device ordinal\n"
    found = {"a": PASS, "b": Result("fail", 1.0, why), "c": FAIL, "d": SKIP}
    assert run.report_gpus(found, settings(logs=tmp_path)) == 0
    assert "1 passed, 1 failed, 2 skipped" in capsys.readouterr().out
    kept = results.load_baseline(tmp_path / "results-on-gpus-2.json")
    assert [kept[name].outcome for name in "abcd"] == ["pass", "skip", "fail", "skip"]
    assert run.report_gpus({"c": FAIL}, settings(logs=tmp_path)) == 1


def test_runs_over_other_wires_keep_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGREDUCE_WIRE", raising=False)
    assert run.label(settings()) == "2"
    assert run.label(settings(world=4, hosts=2)) == "4-on-2-hosts"
    assert run.environment("ringreduce", 4, 2)["TORCH_SUITE_HOSTS"] == "2"
    monkeypatch.setenv("RINGREDUCE_WIRE", "tcp")
    assert run.label(settings()) == "2-tcp"
    assert run.environment("ringreduce", 2)["RINGREDUCE_WIRE"] == "tcp"


def test_a_baseline_reads_as_it_was_written(tmp_path: Path) -> None:
    kept = {"a": PASS, "b": Result("skip", 0.0, 'no "GPU"'), "c": Result("fail", 0.0, "bad")}
    path = tmp_path / "gloo.json"
    results.save_baseline(path, kept)
    assert results.load_baseline(path) == kept


def test_baselines_and_exceptions_hold_what_they_should() -> None:
    baselines = sorted(SUITE.glob("gloo-*.json"))
    assert baselines
    for path in baselines:
        gloo = results.load_baseline(path)
        suite = {name: r for name, r in gloo.items() if not name.startswith("beyond.")}
        assert not [name for name, result in suite.items() if result.outcome == "fail"], path.name
        assert sum(result.outcome == "pass" for result in suite.values()) >= 80, path.name
        assert all(gloo[name].outcome == "pass" for name in results.exceptions.EXCEPTIONS)


def test_exceptions_are_few_and_say_where_in_torch() -> None:
    assert len(results.exceptions.EXCEPTIONS) <= 5
    for test, cause in results.exceptions.EXCEPTIONS.items():
        assert re.match(r"torch/[\w/]+\.(cpp|hpp|h|py):\d+: ", cause), test


def test_the_gist_of_a_traceback_is_its_exception() -> None:
    why = "Traceback:\n  File 'x'\ntorch.distributed.DistBackendError: rank 1\nis gone\n"
    assert Result("fail", 0.0, why).gist == "torch.distributed.DistBackendError: rank 1 is gone"
    assert Result("skip", 0.0, "no GPU").gist == "no GPU"


def test_a_worker_that_wedges_costs_one_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "worker.py"
    program.write_text(
        textwrap.dedent(
            """
            import json, sys, time
            names = [name for name in sys.argv[1:] if not name.startswith("-")]
            print(json.dumps(names), flush=True)
            for name in names:
                print(json.dumps(name), flush=True)
                if name == "wedges":
                    time.sleep(600)
                if name == "dies":
                    sys.exit(3)
                print(json.dumps([name, "pass", 0.1, ""]), flush=True)
            """
        )
    )
    monkeypatch.setattr(run, "GRACE", 3.0)
    done = run.run_pass("ringreduce", settings(limit=0), ["a", "wedges", "dies", "z"], program)
    assert {name: result.outcome for name, result in done.items()} == {
        "a": "pass",
        "wedges": "fail",
        "dies": "fail",
        "z": "pass",
    }
    assert "hang" in done["wedges"].why
    assert "exit status 3" in done["dies"].why


def test_ranks_that_hang_or_die_fail_their_test(tmp_path: Path) -> None:
    program = tmp_path / "odd_tests.py"
    program.write_text(
        textwrap.dedent(
            """
            import atexit, os, time
            import cases, torch, torch.distributed as dist, worker

            def test_one_hangs(self):
                if self.rank == 1:
                    atexit.register(time.sleep, 600)

            def test_one_dies(self):
                if self.rank == 1:
                    atexit.register(os._exit, 7)

            def test_one_fails(self):
                self.assertEqual(self.rank, 0)

            def test_sums(self):
                tensor = torch.ones(3)
                dist.all_reduce(tensor)
                self.assertEqual(tensor, torch.full((3,), 2.0))

            for name, test in list(globals().items()):
                if name.startswith("test_"):
                    setattr(cases.Suite, name, test)
            worker.main()
            """
        )
    )
    names = ["test_one_dies", "test_one_fails", "test_sums"]
    done = run.run_pass("ringreduce", settings(limit=60), names, program)
    assert {name: done[name].outcome for name in names} == {
        "test_one_dies": "fail",
        "test_one_fails": "fail",
        "test_sums": "pass",
    }
    assert "[0, 7]" in done["test_one_dies"].gist
    assert "not equal" in done["test_one_fails"].gist

    hung = run.run_pass("ringreduce", settings(limit=8), ["test_one_hangs"], program)
    assert hung["test_one_hangs"].outcome == "fail"
    assert re.search("hang: of 2 ranks, rank (0, )?1 did not end", hung["test_one_hangs"].gist)
