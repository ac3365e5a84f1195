"""What users measure, on the fake: whole runs of the benchmark and of DDP's on CUDA tensors.

They show that everything fits together and that results are checked; the times mean nothing here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ringreduce.tools.bench.results import Report

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str, gpus: int) -> str:
    """The output of a Python program that must succeed, on a machine with so many GPUs."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "FAKE_GPUS": str(gpus)},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_ranks_that_share_a_gpu_are_labelled_and_old_nccl_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    out = run(
        *("-m", "ringreduce.bench", "all_reduce", "--device", "cuda", "--compare", "gloo,nccl"),
        *("--sizes", "1K,64K", "--rounds", "1", "--iters", "5", "--json", str(path)),
        gpus=1,
    )
    report = Report.read(path)
    assert report.machine["sharing"] == "ranks sharing one GPU"
    assert "RANKS SHARING ONE GPU" in out
    assert list(report.skipped) == ["nccl"] and "refuses ranks that share" in report.skipped["nccl"]
    for row in report.rows:
        assert list(row.measurements) == ["ours", "gloo", "roofline"]
        for measurement in row.measurements.values():
            assert measurement.wrong == 0 and measurement.same_bits
            assert len(measurement.seconds) == len(measurement.wall) == len(measurement.issue) == 1


def test_ddp_by_every_way(tmp_path: Path) -> None:
    run(
        *(str(ROOT / "benchmarks" / "ddp.py"), "--device", "cuda", "--tiny", "--rounds", "1"),
        *("--steps", "2", "--models", "resnet50", "--out", str(tmp_path / "ddp")),
        gpus=2,
    )
    document: dict[str, Any] = json.loads((tmp_path / "ddp.json").read_text())
    assert document["skipped"] == {} and document["settings"]["sharing"] == ""
    (model,) = document["models"]
    assert list(model["ways"]) == ["bare", "parallel", "stock", "ours", "hook"]
    assert "nccl" in document["titles"]["stock"]
    for key, way in model["ways"].items():
        assert (way["wrong"], way["same_bits"]) == (0, True), key
        assert (way["gpu_bytes"] > 0) == (key in ("ours", "hook"))
