"""The runner of torch's own tests: what it says of hangs, deaths, skips and the comparison."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[1] / "torch_suite"
sys.path.insert(0, str(SUITE))

import results  # noqa: E402
import run  # noqa: E402
from results import Result  # noqa: E402

pytestmark = pytest.mark.slow

PASS, SKIP, FAIL = (Result(outcome, 0.0, "") for outcome in ("pass", "skip", "fail"))


def settings(**changes: object) -> argparse.Namespace:
    defaults = {"world": 2, "hosts": 1, "limit": 60, "start": "fork", "k": None, "verbose": False}
    run.LOGS.mkdir(exist_ok=True)
    defaults["logs"] = run.LOGS
    return argparse.Namespace(**(defaults | changes))


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    return tmp_path / "logs"


def test_results_go_to_the_folder_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing was recorded before: Gloo's results, and then ours."""
    folder = tmp_path / "a" / "b"
    monkeypatch.setattr(sys, "argv", ["run.py", "--world", "2", "--logs", str(folder)])
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "run_pass", lambda *_: {"a": PASS})
    monkeypatch.setattr(results, "baseline_path", lambda *_: tmp_path / "unknown.json")
    assert run.main() == 0
    assert sorted(path.name for path in folder.iterdir()) == ["results-2.json", "unknown.json"]
    assert not run.LOGS.exists()


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


def test_baselines_and_exceptions_hold_what_they_should() -> None:
    baselines = sorted(SUITE.glob("gloo-*.json"))
    assert baselines
    for path in baselines:
        for world, gloo in results.load(path).items():
            suite = {name: r for name, r in gloo.items() if not name.startswith("beyond.")}
            told = path.name, world
            assert not [name for name, result in suite.items() if result.outcome == "fail"], told
            assert sum(result.outcome == "pass" for result in suite.values()) >= 80, told
            assert all(gloo[name].outcome == "pass" for name in results.exceptions.EXCEPTIONS)


@pytest.mark.nightly
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
