"""Whole runs of the benchmark and of the programs in benchmarks/: results, launchers, sudden ends.

Most of the former are with gloo in our place.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import why_not
from processes import wait_until

from ringreduce.tools.bench.collectives import COLLECTIVES
from ringreduce.tools.bench.results import Report, Suite
from ringreduce.tools.bench.summary import summary

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "benchmarks" / "net")]

import compare  # noqa: E402
import ring_order  # noqa: E402
import train  # noqa: E402

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())
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


def finish(process: subprocess.Popen, seconds: float = 400.0) -> tuple[int, str, str]:
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
    assert wait_until(lambda: len(children.read_text().split()) == 4, 240), "no four rank processes"
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
        assert [(row[0], row[8]) for row in rows_of(out)] == [("1024", "0"), ("65536", "0")]
        report = Report.read(json_path)
        for row in report.rows:
            assert list(row.measurements) == ["ours", "gloo", "roofline"]
            assert all(len(m.seconds) == 2 for m in row.measurements.values())
        assert plot_path.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_all_collectives(self, tmp_path, monkeypatch, dtype):
        # What is timed must not be torch's warning about a name that it no longer likes.
        monkeypatch.setenv("PYTHONWARNINGS", "error:`torch.distributed.:FutureWarning")
        json_path = tmp_path / "all.json"
        status, out, err = finish(
            start("-m", "ringreduce.bench", "all", "--backend", "ringreduce", "--compare", "gloo",
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

    def test_interrupt_leaves_nothing(self):
        process = start(*GLOO, "--sizes", "1K", "--rounds", "1000")
        ranks = four_ranks(process)
        os.kill(process.pid, signal.SIGINT)
        status, _, err = finish(process)
        assert status == 130
        assert "interrupted" in err
        # One that had only just been started notices by itself once it has imported torch.
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 30)

    def test_codecs(self, tmp_path):
        path = tmp_path / "run.json"
        status, out, err = finish(
            start("-m", "ringreduce.bench", "all_reduce", "--codec", "bfloat16,int8,int4@ring",
                  "--compare", "gloo", "--sizes", "100,64K", "--rounds", "1", "--iters", "2",
                  "--json", str(path))
        )  # fmt: skip
        assert status == 0, out + err
        assert len(rows_of(out)) == 2 + 2 * 5  # a row of the table a size, one of the codecs' each
        for row in Report.read(path).rows:
            errors = {key: m.error["rms"] for key, m in row.measurements.items() if m.error}
            assert errors["ours"] < 1e-6 and errors["gloo"] < 1e-6
            assert 1e-5 < errors["bfloat16"] < 0.01 and errors["int8"] < 0.02
            assert errors["int8"] < errors["int4@ring"] < 0.3


def test_survive(tmp_path):
    status, out, err = finish(
        start(str(REPOSITORY / "benchmarks" / "survive.py"), "--nproc", "3", "--runs", "1",
              "--checkpoint-every", "20", "--width", "16", "--out", str(tmp_path / "survive.json"))
    )  # fmt: skip
    assert status == 0, out + err
    runs = json.loads((tmp_path / "survive.json").read_text())["runs"]
    assert runs["ringreduce"][0]["repeated_steps"] == 0
    for restarted in (runs["gloo"][0], runs["restarted"][0]):
        assert restarted["repeated_steps"] > 0  # since the last checkpoint


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["deaths", "--nproc", "3", "--sizes", "1 KiB", "--deaths", "2"], 2),
        (["cost", "--sizes", "1 KiB", "--rounds", "2", "--seconds", "0.01"], 2),
        (["training", "--deaths", "1", "--seeds", "1", "--steps", "20", "--width", "16"], 2),
    ],
)
def test_loss(tmp_path, arguments, found):
    path = tmp_path / "loss.json"
    status, out, err = finish(
        start(str(REPOSITORY / "benchmarks" / "loss.py"), *arguments, "--out", str(path))
    )
    assert status == 0, out + err
    assert len(json.loads(path.read_text())["times"]) == found


def test_ddp(tmp_path):
    status, out, err = finish(
        start(str(REPOSITORY / "benchmarks" / "ddp.py"), "--tiny", "--rounds", "1", "--steps", "2",
              "--warmup", "1", "--out", str(tmp_path / "ddp")), 600
    )  # fmt: skip
    assert status == 0, out + err
    document = json.loads((tmp_path / "ddp.json").read_text())
    assert [model["name"] for model in document["models"]] == ["resnet50", "gpt2"]
    for model in document["models"]:
        assert list(model["ways"]) == ["bare", "stock", "ours", "hook", "private", "alone"]
        for key, way in model["ways"].items():
            assert len(way["step"]) == 2 and (way["wrong"], way["same_bits"]) == (0, True)
            assert (way["staging_bytes"] > 0) == (key in ("ours", "hook", "private"))
    assert list(document["skipped"]) == ["parallel"]


@pytest.mark.parametrize("where", [["--hosts", "1"], pytest.param([], marks=needs_hosts)])
def test_training(tmp_path, capsys, where):
    path = tmp_path / "train.json"
    names = ["ours", "auto"] if where else ["stock", "ours", "int8"]
    arguments = [*where, "--tiny", "--rounds", "1", "--steps", "2", "--ways", ",".join(names)]
    assert train.main([*arguments, "--out", str(path)]) == 0, capsys.readouterr().out
    [model] = json.loads(path.read_text())["models"]
    assert list(model["ways"]) == names
    for key, way in model["ways"].items():
        assert len(way["step"]) == 2 and (way["wrong"], way["same_bits"]) == (0, True)
        assert way["choice"].startswith(("exact: a step", "int8: a step") if key == "auto" else "")
        assert where or way["link_bytes"] > 1000


@needs_hosts
def test_a_run_with_codecs_between_hosts(tmp_path, capsys):
    arguments = ["--paths", "slow_2", "--sizes", "256K", "--rounds", "1", "--out", str(tmp_path)]
    assert compare.main(arguments) == 0
    [measured] = json.loads((tmp_path / "net_slow_2.json").read_text())["rows"]
    found = measured["measurements"]
    assert found.keys() == {"ours", "bfloat16", "int8", "int4", "gloo"}
    assert all(m["wrong"] == 0 and m["same_bits"] for m in found.values())
    shares = {key: found[key]["link_bytes"] / found["ours"]["link_bytes"] for key in found}
    assert found["ours"]["link_bytes"] > 2 * (256 << 10)
    assert 0.45 < shares["bfloat16"] < 0.6
    assert 0.13 < shares["int4"] < 0.25 < shares["int8"] < 0.35  # and what a small call adds
    assert "bytes at the link" in capsys.readouterr().out


@needs_hosts
def test_an_order_of_hosts_is_found(capsys):
    ring_order.main(["--hosts", "3", "--size", "64K", "--calls", "1", "--runs", "1"])
    said = capsys.readouterr().out
    assert "ring of hosts: 0 > " in said and "promised" in said
