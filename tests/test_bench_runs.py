"""Whole runs of the benchmark, most with gloo in our place: results, launchers, sudden ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until

from ringreduce.bench.collectives import COLLECTIVES
from ringreduce.bench.results import Report, Suite
from ringreduce.bench.summary import summary

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent
GLOO = ["-m", "ringreduce.bench", "all_reduce", "--backend", "gloo"]


def start(*arguments: str) -> subprocess.Popen:
    """A Python program of its own, in a session of its own, from this checkout."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )


def finish(process: subprocess.Popen, seconds: float = 120.0) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; kills a process that does not end."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def four_ranks(controller: subprocess.Popen) -> list[int]:
    """Process ids of the rank processes of a benchmark, once it has started all four."""
    children = Path(f"/proc/{controller.pid}/task/{controller.pid}/children")
    assert wait_until(lambda: len(children.read_text().split()) == 4, 60), "no four rank processes"
    return [int(pid) for pid in children.read_text().split()]


class TestRuns:
    """Whole runs. They share two cores with each other's leftovers, so no time is asserted."""

    def test_all_reduce(self, tmp_path):
        pytest.importorskip("matplotlib")
        json_path, plot_path = tmp_path / "run.json", tmp_path / "run.png"
        status, out, err = finish(
            start(*GLOO, "--compare", "gloo", "--nproc", "2", "--sizes", "1K,64K", "--rounds", "2",
                  "--json", str(json_path), "--plot", str(plot_path))
        )  # fmt: skip
        assert status == 0, err
        rows = rows_of(out)
        assert [row[:4] for row in rows] == [
            ["1024", "256", "float32", "sum"],
            ["65536", "16384", "float32", "sum"],
        ]
        assert all(row[8] == "0" for row in rows)
        report = Report.read(json_path)
        for row in report.rows:
            assert list(row.measurements) == ["ours", "gloo", "roofline"]
            assert all(len(m.seconds) == 2 for m in row.measurements.values())
        assert plot_path.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_all_collectives(self, tmp_path, backend, monkeypatch, dtype):
        # What is timed must not be torch's warning about a name that it no longer likes.
        monkeypatch.setenv("PYTHONWARNINGS", "error:`torch.distributed.:FutureWarning")
        json_path = tmp_path / "all.json"
        status, out, err = finish(
            start("-m", "ringreduce.bench", "all", "--backend", backend, "--compare", "gloo",
                  "--nproc", "3", "--dtype", dtype, "--sizes", "100,64K", "--rounds", "1",
                  "--iters", "2", "--json", str(json_path))
        )  # fmt: skip
        assert status == 0, out + err
        suite = Suite.read(json_path)
        assert [report.collective for report in suite.reports] == list(COLLECTIVES)
        for report in suite.reports:
            assert list(report.titles) == ["ours", "gloo"]
            assert report.skipped == {} and report.faults() == []
            sizes = [0] if report.collective == "barrier" else [100, 64 << 10]
            for size, row in zip(sizes, report.rows, strict=True):
                assert list(row.measurements) == ["ours", "gloo"]
                assert size - 24 < row.bytes <= size
        assert "\n".join(summary(suite)) in out

    def test_what_ours_refuses_is_passed_over(self, tmp_path):
        json_path = tmp_path / "two.json"
        status, out, err = finish(  # Gloo has no such integers, and a barrier has none
            start("-m", "ringreduce.bench", "reduce,barrier", "--backend", "gloo", "--rounds", "1",
                  "--dtype", "int16", "--sizes", "1K", "--iters", "2", "--json", str(json_path))
        )  # fmt: skip
        assert status == 1
        assert "# reduce\n# refused by gloo (as ours): " in out, err
        suite = Suite.read(json_path)
        assert list(suite.refused) == ["reduce"]
        assert [report.collective for report in suite.reports] == ["barrier"]

    def test_under_torchrun(self):
        status, out, err = finish(
            start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                  *GLOO, "--sizes", "1K", "--rounds", "1", "--iters", "3")
        )  # fmt: skip
        assert status == 0, err
        (row,) = rows_of(out)
        assert (row[0], row[8]) == ("1024", "0")
        assert "2 for each of" in out

    def test_a_killed_rank_ends_the_run(self):
        process = start(*GLOO, "--sizes", "1K", "--rounds", "1000")
        ranks = four_ranks(process)
        os.kill(ranks[1], signal.SIGKILL)
        status, _, err = finish(process)
        assert status == 1
        assert "rank 1 failed" in err and "SIGKILL" in err
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

    def test_an_error_names_its_rank(self):
        status, _, err = finish(
            start("-m", "ringreduce.bench", "all_reduce", "--backend", "no_such", "--sizes", "1K")
        )
        assert status == 1
        assert "failed" in err and "no_such" in err and "Traceback" in err

    def test_interrupt_leaves_nothing(self):
        process = start(*GLOO, "--sizes", "1K", "--rounds", "1000")
        ranks = four_ranks(process)
        os.kill(process.pid, signal.SIGINT)
        status, _, err = finish(process)
        assert status == 130
        assert "interrupted" in err
        # One that had only just been started notices by itself once it has imported torch.
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 30)
