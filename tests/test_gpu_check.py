"""The GPU check on machines of stand-in programs, and on one without a GPU: what it says, what it
returns, and that it never says more than was checked."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda"))

import gpu_check
import gpu_figures
import gpu_machine
import gpu_site
import gpu_stages
import gpu_torch_figures
import stand_in_machine
from gpu_report import Report
from gpu_runner import Runner, Stage, Step
from stand_in_machine import StandIn

NOTHING = "gpu-check: NO GPU, nothing of what needs one was checked"
PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
Check = Callable[..., tuple[int, list[str], Path]]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in_machine.make(tmp_path_factory.mktemp("machine") / "bin")


@pytest.fixture
def check(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    programs: Path,
) -> Check:
    """Runs gpu_check.py on a machine; its exit status, what it printed, the folder of results.

    None of this machine's own tools is found: the stand-ins are all there is.
    """
    monkeypatch.setattr(gpu_machine, "TOOL_FOLDERS", ())
    monkeypatch.setattr(gpu_machine, "package_places", list)
    monkeypatch.setattr(gpu_stages, "BUILD", tmp_path / "build")
    monkeypatch.setattr(
        gpu_machine, "find_torch", lambda toolkit: (None, "this Python has no torch")
    )
    monkeypatch.setattr(gpu_machine, "find_nccl", lambda given, scratch: (None, "no NCCL"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(machine: StandIn, *arguments: str) -> tuple[int, list[str], Path]:
        for name, value in machine.env(programs).items():
            monkeypatch.setenv(name, value)
        status = gpu_check.main([*arguments, "--out", str(tmp_path / "results")])
        said = capsys.readouterr().out.splitlines()
        # However it ends, the last lines name what belongs to a report, and both files are there.
        files = [tmp_path / "results" / name for name in ("gpu-check.json", "gpu-check.log")]
        assert said[-3:] == [
            "Attach these two files to a report:",
            *(f"  {file}" for file in files),
        ]
        assert all(file.stat().st_size > 0 for file in files)
        assert said[-4].endswith(f"(exit status {status})")
        return status, said, tmp_path / "results"

    return run


def statuses(results: Path) -> dict[str, str]:
    found = json.loads((results / "gpu-check.json").read_text())
    return {stage["name"]: stage["status"] for stage in found["stages"]}


# --- What a machine is ----------------------------------------------------------------------------


def test_one_gpu(check: Check) -> None:
    status, said, results = check(StandIn(1))
    assert status == gpu_check.PASSED
    assert said[-4] == "gpu-check: passed, with 1 GPU (exit status 0)"
    assert said[0] == "GPUs: 1"
    assert "topology: one GPU, no connections" in said
    assert "peer access: one GPU, no peers" in said
    assert "driver: 580.65, for CUDA 13.0" in said and "toolkit: 13.0" in said
    assert "NCCL: no NCCL" in said
    found = statuses(results)
    assert list(found)[:4] == ["build", "check", "gpus", "kill"]
    assert found["check"] == found["kill"] == found["processes"] == "ok"
    # ncu may not count there, and there is no torch.
    left_out = {"gpus", "extension", "torch", "ddp", "torch-bench", "bytes"}
    assert {name for name, stage in found.items() if stage != "ok"} == left_out
    assert set(found.values()) == {"ok", "skipped"}
    assert list(found)[-3:] == ["memcheck", "initcheck", "synccheck"]


@pytest.mark.parametrize("gpus,extent", [(2, ["--quick"]), (8, [])])
def test_gpus_with_peer_access(check: Check, gpus: int, extent: list[str]) -> None:
    status, said, results = check(StandIn(gpus), *extent)
    assert status == gpu_check.PASSED
    assert said[-4] == f"gpu-check: passed, with {gpus} GPUs (exit status 0)"
    assert said[0] == f"GPUs: {gpus}"
    assert "topology: NVLink (NV18) between all pairs" in said
    assert "peer access: between all pairs" in said
    found_statuses = statuses(results)
    needed = dict.fromkeys(["build", "check", "gpus", "kill"], "ok")
    assert dict(list(found_statuses.items())[:4]) == needed
    assert (found_statuses == needed) == bool(extent)
    found = json.loads((results / "gpu-check.json").read_text())
    lines = next(s["measurements"] for s in found["stages"] if s["name"] == "gpus")
    ranks = {2} if extent else {2, 4, 8}
    assert {line["ranks"] for line in lines if not line["sharing"]} == ranks


def test_two_gpus_without_peer_access(check: Check) -> None:
    status, said, _ = check(StandIn(2, peers=False))
    assert status == gpu_check.PASSED
    assert said[-4] == "gpu-check: passed, with 2 GPUs (exit status 0)"
    assert "topology: PCIe (SYS) between all pairs" in said
    assert "peer access: none: data between GPUs passes through the host's memory" in said


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_gpu_with_a_display_runs_the_direct_schedule_only(check: Check, gpus: int) -> None:
    status, said, results = check(StandIn(gpus, displays=1))
    assert status == gpu_check.PASSED
    assert said[1].endswith("ends long kernels (a display, or WSL)")
    assert said[-4] == (
        f"gpu-check: passed, with {gpus} GPU{'s' * (gpus > 1)}; groups with GPU 0, which ends long "
        "kernels, ran the direct schedule only (exit status 0)"
    )
    found = statuses(results)
    assert found["gpus"] == ("ok" if gpus > 1 else "skipped")
    assert found["all_reduce_test"] == found["failure_test"] == "skipped"
    assert found["part_calls_test"] == "ok"


def test_an_old_driver(check: Check) -> None:
    status, said, results = check(StandIn(2, driver=12040))
    assert status == gpu_check.NO_GPU
    assert said[0].startswith(
        "GPUs: 2; none can be used: the driver is too old: it serves CUDA 12.4"
    )
    assert said[-4].startswith(
        "gpu-check: NO GPU, nothing of what needs one was checked: the driver"
    )
    assert set(statuses(results).values()) == {"ok", "skipped"}


def test_no_gpu(check: Check) -> None:
    status, said, results = check(StandIn(0))
    assert status == gpu_check.NO_GPU
    assert said[-4].startswith(
        "gpu-check: NO GPU, nothing of what needs one was checked: the driver"
    )
    assert statuses(results)["check"] == "skipped" and statuses(results)["build"] == "ok"


def test_hidden_gpus(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, said, _ = check(StandIn(8))
    assert status == gpu_check.NO_GPU
    assert "CUDA_VISIBLE_DEVICES is ''" in said[-4]


def test_no_driver(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_machine, "look", lambda: {"error": "there is no libcuda.so.1"})
    status, said, _ = check(StandIn(0), "--quick")
    assert status == gpu_check.NO_GPU and "there is no libcuda.so.1" in said[-4]


def test_what_the_extension_needs_of_this_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is not found before the build would fail it, and all that it builds."""
    torch, headers = tmp_path / "torch", tmp_path / "include"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_machine.sysconfig, "get_path", lambda name: str(headers))

    def found(version: str, cuda: str | None = "13.0") -> tuple[str | None, str]:
        text = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
        (torch / "version.py").write_text(text)
        return gpu_machine.find_torch("13.0")

    assert "there is no Python.h in" in found("2.11.0+cu130")[1]
    headers.mkdir()
    (headers / "Python.h").write_text("")
    assert found("2.11.0+cu130") == ("2.11.0+cu130, CUDA 13.0", "")
    assert "(2.10.1) is too old: 2.11 or newer is needed" in found("2.10.1")[1]
    assert "built without CUDA" in found("2.13.0", None)[1]
    assert "another major version" in found("2.13.0", "12.8")[1]


# --- What is said of what happened ----------------------------------------------------------------


@pytest.mark.parametrize("refused", ["check", "processes"])
def test_what_every_report_needs_and_did_not_run_is_incomplete(check: Check, refused: str) -> None:
    status, said, _ = check(StandIn(2, more=(("STAND_IN_REFUSES", refused),)), "--quick")
    assert status == gpu_check.INCOMPLETE
    stage = {"check": "check", "processes": "gpus"}[refused]
    assert said[-4].startswith(f"gpu-check: INCOMPLETE: {stage} did not run (skipped: no GPU")


def test_what_the_build_lacks_is_why_nothing_ran(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = gpu_machine.find_tool
    monkeypatch.setattr(gpu_machine, "find_tool", lambda n: None if n == "nvcc" else find(n))
    status, said, _ = check(StandIn(2), "--quick")
    assert status == gpu_check.INCOMPLETE
    reason = "(there is no build to run: there is no nvcc)"
    assert said[-4] == (
        f"gpu-check: INCOMPLETE: check did not run {reason}; gpus did not run {reason} "
        "(exit status 4)"
    )


def test_a_part_is_incomplete(check: Check) -> None:
    status, said, _ = check(StandIn(1), "--only", "floor")
    assert status == gpu_check.INCOMPLETE
    assert said[-4] == ("gpu-check: INCOMPLETE: check did not run (not asked for) (exit status 4)")


def test_a_budget_that_is_used_up_is_incomplete(check: Check) -> None:
    status, said, _ = check(StandIn(1), "--quick", "--budget", "0")
    assert status == gpu_check.INCOMPLETE
    assert "check did not run (the budget of 0 s is used up)" in said[-4]
    assert any(line.startswith("build ... ok") for line in said), "the build is not counted"


def test_all_gpus_must_meet(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = gpu_figures.all_gpus_met(8, ("ring", "twoshot"))
    lines = [{"algorithm": "ring", "ranks": 8, "sharing": False}]
    lines += [{"algorithm": "twoshot", "ranks": 8, "sharing": True}]
    assert verify(lines, Path()) == "twoshot did not run on 8 GPUs at once"
    status, said, _ = check(StandIn(2, more=(("STAND_IN_FAILS", "processes"),)), "--quick")
    assert status == gpu_check.FAILED
    assert said[-4] == "gpu-check: FAILED: gpus (exit status 1)"


def test_building_only(check: Check) -> None:
    status, said, results = check(StandIn(1), "--build")
    assert status == gpu_check.PASSED
    assert "compiled, and nothing is checked yet" in said[-4]
    assert statuses(results) == {"build": "ok", "extension": "skipped"}


def test_counters_that_ncu_may_not_read_are_no_failure(check: Check) -> None:
    status, said, results = check(StandIn(1), "--only", "check", "--only", "bytes")
    assert status == gpu_check.PASSED
    assert statuses(results)["bytes"] == "skipped"
    assert any("NVreg_RestrictProfilingToAdminUsers=0" in line for line in said)


@pytest.mark.parametrize("own", [False, True])
def test_only_our_own_processes_must_be_off_the_gpus(tmp_path: Path, own: bool) -> None:
    line = json.dumps({"pids": [123], "time_us": [1, 1, 1]})
    step = Step(("sh", "-c", f"echo '{line}' > {{json}}"))
    stage = Stage("kill", "", 60, (step,), needs="", measures=True, frees_gpu=True)
    users = iter([frozenset({7})])  # before; afterwards another user's process, or ours
    after = frozenset({7, 8, 123}) if own else frozenset({7, 8})
    runner = Runner(Report(tmp_path, {}).log, 60, lambda: next(users, after))
    result = runner.run(stage)
    assert (result.status, "process 123" in result.reason) == (
        ("failed", True) if own else ("ok", False)
    )


def test_the_ways_to_train_are_one_table() -> None:
    ways = {"parallel": "DataParallel", "stock": "DDP, nccl", "ours": "DDP, ringreduce"}
    lines = [
        {"mode": "gpt2", "ranks": 8, "algorithm": key, "title": title, "time_us": [1000.0, 1, 1]}
        for key, title in ways.items()
    ]
    assert gpu_torch_figures.ddp_table(lines) == [
        "ms a step        gpt2, 8 ranks",
        "DataParallel              1.00",
        "DDP, nccl                 1.00",
        "DDP, ringreduce           1.00",
    ]


def test_the_order_of_the_stages() -> None:
    tools = gpu_machine.Tools(*[None] * 7)
    plan = gpu_stages.Plan(tools, "90", 1, gpus=8)
    names = [stage.name for stage in gpu_stages.stages(plan)]
    wanted = ["build", "check", "gpus", "kill", "extension", "torch", "floor", "ddp", "memcheck"]
    assert [name for name in names if name in wanted] == wanted
    commands = {s.name: s.steps[0].text() for s in gpu_stages.stages(plan)}
    assert "--ranks 2,4,8" in commands["gpus"] and "--maxbytes 256M" in commands["gpus"]
    assert "--nproc 8" in commands["ddp"] and "--nproc 8" in commands["torch-bench"]


def test_the_packages_folder_is_as_pip_would_make_it(tmp_path: Path) -> None:
    (tmp_path / "_C.cpython-other.so").write_text("of another Python")
    (tmp_path / "_build_info.py").write_text("CUDA = '13.0'\n")
    assert gpu_site.main(tmp_path, tmp_path / "site") == 1
    extension = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / extension).write_text("the extension")
    assert gpu_site.main(tmp_path, tmp_path / "site") == 0
    names = {file.name for file in (tmp_path / "site" / "ringreduce").iterdir()}
    assert {"__init__.py", extension, "_build_info.py", "tools"} <= names
    assert "_C.cpython-other.so" not in names
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert found.version == re.findall(r'^version = "(.*)"', PYPROJECT.read_text(), re.M)[0]
    entries = {(entry.group, entry.name, entry.value) for entry in found.entry_points}
    assert ("torch.backends", "ringreduce", "_ringreduce_autoload:register") in entries
    assert (tmp_path / "site" / "_ringreduce_autoload.py").is_file()
