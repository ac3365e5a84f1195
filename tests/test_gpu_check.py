"""The GPU check on a machine without a GPU: it runs what it can, says why it cannot do the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda"))

import gpu_check
import gpu_machine
import gpu_stages
from gpu_runner import Stage, Step


def test_without_a_gpu_the_build_runs_and_nothing_counts_as_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Step((sys.executable, "-c", "print('compiled')"))
    fails = Step((sys.executable, "-c", "raise SystemExit(1)"))
    stages = [
        Stage("build", "", 60, (build,), needs="", needs_gpu=False),
        Stage("check", "", 60, (fails,), needs=""),
    ]
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: None)
    monkeypatch.setattr(gpu_stages, "stages", lambda plan: stages)
    assert gpu_check.main(["--out", str(tmp_path)]) == gpu_check.NO_GPU
    said = capsys.readouterr().out
    assert "no GPU was found: there is no nvidia-smi" in said
    assert said.splitlines()[-1] == "gpu-check: 1 passed, 0 failed, 1 skipped"
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["machine"]["gpus"] == []
    assert [stage["status"] for stage in found["stages"]] == ["ok", "skipped"]
    assert "compiled" in (tmp_path / "gpu-check.log").read_text()
