"""The GPU check on machines of stand-in programs, and on one without a GPU: what it says, what it
returns, and that it never says more than was checked."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_figures
import gpu_machine
import stand_in_machine
from gpu_check import FAILED, INCOMPLETE, NO_GPU, PASSED, WRONG_CALL
from gpu_run import install
from stand_in_machine import StandIn

CUDA = Path(__file__).resolve().parent
PYPROJECT = CUDA.parent.parent / "pyproject.toml"
Check = Callable[..., tuple[int, list[str], dict[str, Any]]]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in_machine.make(tmp_path_factory.mktemp("machine") / "bin")


@pytest.fixture
def start(tmp_path: Path, programs: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts gpu_check.py on a machine."""

    def start(machine: StandIn, *arguments: str) -> subprocess.Popen[str]:
        build = {"STAND_IN_BUILD": str(tmp_path / "build"), "STAND_IN_RUN": str(os.getpid())}
        command = [sys.executable, str(CUDA / "stand_in_machine.py"), *arguments]
        return subprocess.Popen(
            [*command, "--out", str(tmp_path / "results")],
            env={**build, **machine.env(programs)},
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def check(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Check:
    """Runs it; its exit status, what it printed, the stages of the report by name."""

    def run(machine: StandIn, *arguments: str) -> tuple[int, list[str], dict[str, Any]]:
        process = start(machine, *arguments)
        said = process.communicate(timeout=600)[0].splitlines()
        # However it ends, the last lines name what belongs to a report, and both files are there.
        files = [tmp_path / "results" / name for name in ("gpu-check.json", "gpu-check.log")]
        attach = "Attach these two files to a report:"
        assert said[-3:] == [attach, *(f"  {file}" for file in files)]
        assert all(file.stat().st_size > 0 for file in files)
        assert said[-4].endswith(f"(exit status {process.returncode})")
        return process.returncode, said, stages(tmp_path)

    return run


def stages(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "results" / "gpu-check.json").read_text())
    return {stage["name"]: stage for stage in found["stages"]}


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {name: stage["status"] for name, stage in found.items()}


def does(what: str, mode: str, gpus: int = 1, **more: str) -> StandIn:
    """A machine on which a mode of the benchmark goes wrong."""
    return StandIn(gpus, more=((f"STAND_IN_{what}", mode), *more.items()))


# --- What a machine is ----------------------------------------------------------------------------


def test_one_gpu(check: Check) -> None:
    status, said, found = check(StandIn(1))
    assert status == PASSED
    assert said[-4] == "gpu-check: passed, with 1 GPU (exit status 0)"
    assert said[0] == "GPUs: 1" and "NVIDIA Stand-in" in said[1] and "'GPU-0000" in said[1]
    assert {"driver: 580.65", "cuda_driver: 13.0", "cuda_toolkit: 13.0"} <= set(said)
    assert list(found)[:4] == ["build", "check", "gpus", "kill"]
    assert list(found)[-3:] == ["memcheck", "initcheck", "synccheck"]
    # ncu may not count there, which is no failure, and there is no torch.
    left_out = {"gpus", "extension", "torch", "ddp", "torch-bench", "bytes"}
    assert {name for name, stage in statuses(found).items() if stage != "ok"} == left_out
    assert set(statuses(found).values()) == {"ok", "skipped"}
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found["bytes"]["reason"]
    assert found["check"]["figure"] == "40 cases, 0 wrong" and found["check"]["seconds"] > 0
    assert found["check"]["measurements"][0]["ranks"] == 2
    assert any("::test_check ok (" in line and "40 cases" in line for line in said)


@pytest.mark.parametrize("gpus,extent", [(2, ["--quick"]), (8, [])])
def test_gpus_with_peer_access(check: Check, gpus: int, extent: list[str]) -> None:
    status, said, found = check(StandIn(gpus), *extent)
    assert status == PASSED
    assert said[-4] == f"gpu-check: passed, with {gpus} GPUs (exit status 0)"
    assert said[0] == f"GPUs: {gpus}"
    assert any("NV18" in line for line in said), "how they are connected"
    assert any(line.startswith("peers: [[True, True") for line in said)
    needed = dict.fromkeys(["build", "check", "gpus", "kill"], "ok")
    assert dict(list(statuses(found).items())[:4]) == needed
    assert (statuses(found) == needed) == bool(extent)
    ranks = {2} if extent else {2, 4, 8}
    lines = found["gpus"]["measurements"]
    assert {line["ranks"] for line in lines if not line["sharing"]} == ranks


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_gpu_with_a_display_runs_the_direct_schedule_only(check: Check, gpus: int) -> None:
    status, said, found = check(StandIn(gpus, displays=1))
    assert status == PASSED
    assert "'ends_long_kernels': True" in said[1]
    assert said[-4] == (
        f"gpu-check: passed, with {gpus} GPU{'s' * (gpus > 1)}; groups with GPU 0, which ends long "
        "kernels, ran the direct schedule only (exit status 0)"
    )
    there = statuses(found)
    assert there["gpus"] == ("ok" if gpus > 1 else "skipped")
    assert there["all_reduce_test"] == there["failure_test"] == "skipped"
    assert there["part_calls_test"] == "ok"


@pytest.mark.parametrize(
    "machine,why",
    [
        (StandIn(2, driver=12040), "the driver is too old: it serves CUDA 12.4"),
        (StandIn(0), "the driver finds none"),
        (StandIn(8, more=(("CUDA_VISIBLE_DEVICES", ""),)), "CUDA_VISIBLE_DEVICES is ''"),
    ],
)
def test_no_gpu_that_programs_can_use(check: Check, machine: StandIn, why: str) -> None:
    status, said, found = check(machine)
    assert status == NO_GPU
    assert said[0].startswith(f"GPUs: {machine.gpus * (not machine.more)}; none can be used: ")
    assert said[-4].startswith("gpu-check: NO GPU, nothing of what needs one was checked: ")
    assert why in said[-4]
    left = {name for name, status in statuses(found).items() if status == "ok"}
    assert left == {"build"} and set(statuses(found).values()) == {"ok", "skipped"}


def test_no_driver() -> None:
    assert "no libcuda" in gpu_machine.why_none({"error": "there is no libcuda.so.1"}, "13.0")


def test_what_the_extension_needs_of_this_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is not found before the build would fail it, and all that it builds."""
    torch, headers = tmp_path / "torch", tmp_path / "include"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_machine.sysconfig, "get_path", lambda name: str(headers))

    def found(version: str, cuda: str | None = "13.0") -> tuple[str, str]:
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


@pytest.mark.parametrize("refused,stage", [("check", "check"), ("processes", "gpus")])
def test_what_every_report_needs_and_did_not_run_is_incomplete(
    check: Check, refused: str, stage: str
) -> None:
    status, said, _ = check(does("REFUSES", refused, 2), "--quick")
    assert status == INCOMPLETE
    assert said[-4].startswith(f"gpu-check: INCOMPLETE: {stage} did not run (skipped: no GPU")


@pytest.mark.parametrize(
    "machine,arguments,why",
    [
        (does("LACKS", "nvcc"), ["--quick"], "there is no build to run: there is no nvcc"),
        (StandIn(1), ["--only", "floor"], "not asked for"),
        (StandIn(1), ["--quick", "--budget", "0"], "the budget of 0 s is used up"),
        (does("HANGS", "check"), ["--quick", "--budget", "3"], "cut after 3 of its 150 s: the "
         "budget is used up"),
    ],
)  # fmt: skip
def test_what_was_not_checked_is_incomplete(
    check: Check, machine: StandIn, arguments: list[str], why: str
) -> None:
    status, said, found = check(machine, *arguments)
    assert status == INCOMPLETE
    assert f"gpu-check: INCOMPLETE: check did not run ({why})" in said[-4]
    assert (found["build"]["status"] == "ok") == ("nvcc" not in why), "the build is not counted"


def test_building_only(check: Check) -> None:
    status, said, found = check(StandIn(1), "--build")
    assert status == PASSED
    assert "compiled, and nothing is checked yet" in said[-4]
    assert statuses(found) == {"build": "ok", "extension": "skipped"}


def test_a_stage_that_does_not_exist(start: Callable[..., subprocess.Popen[str]]) -> None:
    assert start(StandIn(1), "--only", "nothing").wait(60) == WRONG_CALL


@pytest.mark.parametrize(
    "machine,stage,why",
    [
        (does("FAILS", "check", 2), "check", "1 of 2 results are wrong"),
        (does("CRASHES", "check", 2), "check", "ended with status 1: Error: it crashes"),
        (does("LEAVES", "check", 2), "check", "processes were left behind: "),
        (does("FAILS", "processes", 2), "gpus", "results are wrong"),
        (does("WITHOUT", "twoshot", 2), "gpus", "twoshot did not run on 2 GPUs at once"),
        (does("STAYS", "kill", 2), "kill", "a GPU is still used by process "),
    ],
)
def test_a_stage_that_fails_stops_no_other(
    check: Check, machine: StandIn, stage: str, why: str
) -> None:
    status, said, found = check(machine, "--quick")
    assert status == FAILED
    assert said[-4] == f"gpu-check: FAILED: {stage} (exit status 1)"
    assert why.removeprefix("1 of 2 ") in found[stage]["reason"]
    others = {name: status for name, status in statuses(found).items() if name != stage}
    assert set(others.values()) == {"ok"} and len(others) == 3


def sleepers() -> set[str]:
    """The processes that stand-ins of this test run have started."""
    command = ["pgrep", "-f", "^/bin/sleep 1000$"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    run = f"STAND_IN_RUN={os.getpid()}".encode()

    def is_ours(pid: str) -> bool:
        try:
            return run in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            return False

    return set(filter(is_ours, found))


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(check: Check) -> None:
    before = sleepers()
    machine = does("HANGS", "check", STAND_IN_LIMIT="6")
    status, said, found = check(machine, "--only", "check", "--only", "floor")
    assert status == FAILED
    assert said[-4] == "gpu-check: FAILED: check (exit status 1)"
    assert statuses(found) == {"build": "ok", "check": "timeout", "floor": "ok"}
    assert found["check"]["reason"] == "ringreduce_cuda_perf was ended after the stage's 6 s"
    assert sleepers() <= before, "a child in a session of its own"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_leaves_its_results(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    before = sleepers()
    process = start(does("HANGS", "kill"))
    patience = time.monotonic() + 60
    while not (started := sleepers() - before) and time.monotonic() < patience:
        time.sleep(0.05)
    assert started
    process.send_signal(number)
    said = process.communicate(timeout=300)[0]
    found = statuses(stages(tmp_path))
    assert {found["build"], found["check"]} == {"ok"}
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number and "gpu-check: ENDED by SIGTERM" in said
        assert stages(tmp_path)["kill"]["reason"] == "ended by SIGTERM"
        assert not sleepers() & started
    for pid in sleepers() & started:
        os.kill(int(pid), signal.SIGKILL)


def test_what_torch_measures(check: Check) -> None:
    machine = StandIn(8, more=(("STAND_IN_TORCH", "1"),))
    status, said, found = check(machine)
    assert status == PASSED
    names = [name for name in found if not name.endswith("_test")]
    assert names[:8] == ["build", "check", "gpus", "kill", "extension", "torch", "floor", "single"]
    assert names[-5:-3] == ["ddp", "torch-bench"]
    assert found["torch"]["figure"] == "2 of 3 tests passed, 1 skipped"
    assert found["torch-bench"]["figure"] == "8 ranks, 1 KiB, us: ours 2, nccl 2"
    # Wrong results of a peer are no failure of ours.
    ranks = {(line["ranks"], line["peer_wrong"]) for line in found["torch-bench"]["measurements"]}
    assert ranks == {(8, 0), (8, 1), (1, 0), (1, 1)}
    assert found["ddp"]["measurements"][0]["time_us"] == [1000.0, 1000.0, 2000.0]
    table = said.index("ms a step        gpt2, 1 rank  gpt2, 8 ranks")
    assert said[table + 2] == "DDP, ringreduce          1.00           1.00"


def test_the_packages_folder_is_as_pip_would_make_it(tmp_path: Path) -> None:
    extension = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
    for name in ("_C.cpython-other.so", "_build_info.py", extension):
        (tmp_path / name).write_text("")
    install(tmp_path, tmp_path / "site")
    names = {file.name for file in (tmp_path / "site" / "ringreduce").iterdir()}
    assert {"__init__.py", extension, "_build_info.py", "tools"} <= names
    assert "_C.cpython-other.so" not in names
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert found.version == re.findall(r'^version = "(.*)"', PYPROJECT.read_text(), re.M)[0]
    entries = {(entry.group, entry.name, entry.value) for entry in found.entry_points}
    assert ("torch.backends", "ringreduce", "_ringreduce_autoload:register") in entries
    assert (tmp_path / "site" / "_ringreduce_autoload.py").is_file()


def test_the_bytes_that_ncu_counted_are_added(tmp_path: Path) -> None:
    lines = [{"dram_bytes": 100}, {"dram_bytes": 200}]
    (tmp_path / "measured.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = '"ID","dram__bytes_read.sum","dram__bytes_write.sum"\n"","byte","byte"\n'
    counts = '"0","1,000","1"\n"1","90","9"\n'
    (tmp_path / "ncu.csv").write_text("==PROF== said\n" + columns + counts)
    found = gpu_figures.counted_lines(tmp_path)
    assert [line["dram_bytes_counted"] for line in found] == [1001.0, 99.0]
    assert gpu_figures.bytes_figure(found) == "at most 10.010 of the formula"
