"""The programs of gpu-check whose ranks are processes, on several GPUs of the fake: that each rank
takes its own, that every algorithm runs there beside NCCL, and that a killed and a stopped rank end
as they should.  No figure of these means anything."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

# The folder in which the Makefile runs these tests.
HERE = Path.cwd()
PERF = HERE / "cuda_perf_on_fake"


def perf(gpus: int, out: Path, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(PERF), *arguments, "--json", str(out), "--nccl", str(HERE / "lib" / "libnccl.so.2")],
        env={**os.environ, "FAKE_GPUS": str(gpus)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_algorithm_runs_on_all_gpus(tmp_path: Path, gpus: int) -> None:
    algorithms = ("direct", "ring", "twoshot", "oneshot", "ll")
    lines = perf(
        gpus,
        tmp_path / "lines",
        *("processes", "--ranks", str(gpus), "--way", "auto", "--rounds", "1"),
        *("--algorithms", ",".join(algorithms), "--sizes", "1K,64K", "--dtypes", "bfloat16"),
    )
    found = {(line["algorithm"], line["bytes"]) for line in lines if line["algorithm"] != "hop"}
    assert found == {(name, size) for name in (*algorithms, "nccl") for size in (1024, 65536)}
    assert all((line["gpus"], line["sharing"], line["wrong"]) == (gpus, False, 0) for line in lines)


@pytest.mark.parametrize("gpus", [1, 2])
def test_killed_ranks_and_a_stopped_one(tmp_path: Path, gpus: int) -> None:
    lines = perf(gpus, tmp_path / "lines", "kill", "--ranks", "2")
    fates = [(line["mode"], line["mapped"]) for line in lines]
    assert fates == [("kill", False), ("kill", True), ("stop", False)]
    assert all(line["gpus"] == gpus and len(line["pids"]) == 3 for line in lines)
    assert lines[1]["algorithm"] == ("direct" if gpus == 1 else "zerocopy")
    # Its deadline is 4 s after the call began; the time counts from the stop, which may be later.
    assert lines[2]["raised_s"][0] >= 2, "a stopped rank is an error at the deadline"
