"""What the GPU checks find on a machine, and what they make of measurements; without a GPU."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CHECKS = Path(__file__).resolve().parent / "cuda"
sys.path.insert(0, str(CHECKS))

import gpu_figures as figures  # noqa: E402
import gpu_machine  # noqa: E402
from gpu_runner import NOT_POSSIBLE, Usage  # noqa: E402

HANG = 120  # seconds: far beyond what anything here takes


# --- The machine ----------------------------------------------------------------------------------


def fake_tool(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
    path.chmod(0o755)
    return str(path)


def test_gpus_and_their_users_are_read_from_nvidia_smi(tmp_path: Path) -> None:
    smi = fake_tool(
        tmp_path,
        "nvidia-smi",
        """
        case "$*" in
          *query-gpu=name*) echo "NVIDIA H200, GPU-12ab, 580.1, 143771, 9.0, 1980" ;;
          *query-gpu=memory.used*) echo 123 ;;
          *compute-apps*) echo 4711; echo "[N/A]" ;;
        esac
        """,
    )
    gpus, why = gpu_machine.find_gpus(smi)
    assert (gpus[0]["uuid"], gpus[0]["compute_cap"], why) == ("GPU-12ab", "9.0", "")
    assert gpu_machine.architectures(gpus) == "90"
    assert gpu_machine.architectures([*gpus, {"compute_cap": "8.0"}]) == "80;90"
    assert gpu_machine.architectures([{"compute_cap": "[N/A]"}]) == "native"
    assert gpu_machine.usage(smi) == Usage(frozenset({4711}), 123)
    broken = fake_tool(tmp_path, "broken", "echo 'No devices were found'; exit 6\n")
    assert gpu_machine.find_gpus(broken) == ([], f"{broken} finds none")


def test_an_nccl_that_will_not_do_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "libnccl.so.2").write_text("no library")
    (tmp_path / "bad.so.xz").write_text("not packed")
    for given, why in (
        (tmp_path / "missing", "there is no"),
        (tmp_path / "empty", "no libnccl*.so*"),
        (tmp_path / "libnccl.so.2", "cannot be loaded"),
        (tmp_path / "bad.so.xz", "cannot be unpacked"),
    ):
        found, reason = gpu_machine.find_nccl(str(given), tmp_path / "empty")
        assert found is None
        assert why in reason and str(given) in reason


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_packed_nccl_is_unpacked_and_asked_its_version(tmp_path: Path) -> None:
    source, library = tmp_path / "nccl.c", tmp_path / "nccl.so"
    source.write_text("int ncclGetVersion(int* v) { *v = 23003; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    carried, scratch = tmp_path / "carried", tmp_path / "scratch"
    carried.mkdir()
    scratch.mkdir()
    (carried / "libnccl-sm90.so.2.xz").write_bytes(lzma.compress(library.read_bytes(), preset=0))
    for given in (carried, carried / "libnccl-sm90.so.2.xz"):
        found, version = gpu_machine.find_nccl(str(given), scratch)
        assert (found, version) == (str(scratch / "libnccl.so.2"), "2.30.3")


DAEMON = """
    # nvidia-cuda-mps-control: what it was asked is written down beside it.
    here=$(dirname "$0")
    if [ "$1" = -d ]; then
      [ -e "$here/refuse" ] && exit 1
      touch "$here/running"; echo "pipe $CUDA_MPS_PIPE_DIRECTORY" >> "$here/asked"; exit 0
    fi
    [ -e "$here/running" ] || exit 1
    read -r question; echo "$question" >> "$here/asked"
    case "$question" in quit*) rm "$here/running" ;; esac
"""


def test_a_command_has_an_mps_daemon_of_its_own_that_ends_with_it(tmp_path: Path) -> None:
    control = fake_tool(tmp_path, "nvidia-cuda-mps-control", DAEMON)

    def under_mps(name: str, code: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, str(CHECKS / "with_mps.py"), control, str(folder), "--"]
        return subprocess.run(
            [*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG
        )

    code = "import os; print(os.environ['CUDA_MPS_PIPE_DIRECTORY']); raise SystemExit(5)"
    ran = under_mps("first", code)
    pipe = str(tmp_path / "first" / "mps-pipe")
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (5, pipe)
    assert (tmp_path / "asked").read_text().splitlines()[:2] == [f"pipe {pipe}", "get_server_list"]
    assert not (tmp_path / "running").exists()

    (tmp_path / "refuse").touch()
    refused = under_mps("second", "raise SystemExit('not reached')")
    assert refused.returncode == NOT_POSSIBLE
    assert "MPS does not start here" in refused.stdout.splitlines()[-1]


# --- Figures and goals ----------------------------------------------------------------------------


def measured(algorithm: str, size: int, time_us: float, **more: object) -> figures.Line:
    line = {"ranks": 2, "dtype": "float32", "algorithm": algorithm, "bytes": size, "busbw": 1.0}
    return line | {"time_us": [time_us, time_us - 1, time_us + 1], **more}


def met(goals: figures.Lines) -> dict[str, tuple[float, bool]]:
    return {goal["goal"]: (goal["value"], goal["met"]) for goal in goals}


def test_goals_of_bandwidth_are_shares_of_floors_and_of_nccls_time() -> None:
    big, middle = 256 << 20, 64 << 20
    lines = [
        measured("direct", big, 100, floor_us=85),
        measured("ring", big, 100, floor_us=84),
        measured("nccl", big, 149),
        measured("direct", middle, 100, floor_us=1),
        measured("twoshot", middle, 100, floor_us=90),
        measured("ring", 1 << 20, 100, floor_us=1),
        measured("oneshot", big, 100, floor_us=1),
        measured("direct", big, 100, floor_us=1) | {"dtype": "bfloat16"},
    ]
    assert met(figures.bandwidth_goals(lines)) == {
        "2 ranks, 256 MiB: direct, share of its floor >= 0.8": (0.85, True),
        "2 ranks, 256 MiB: direct, times as fast as NCCL >= 1.5": (1.49, False),
        "2 ranks, 256 MiB: ring, share of its floor >= 0.85": (0.84, False),
        "2 ranks, 256 MiB: ring, times as fast as NCCL >= 1": (1.49, True),
        "2 ranks, 64 MiB: twoshot, share of its floor >= 0.85": (0.9, True),
    }


def test_goals_of_latency_take_the_best_of_ours() -> None:
    lines = [measured("oneshot", 1024, 2), measured("ring", 1024, 9), measured("nccl", 1024, 4)]
    lines += [measured("oneshot", 2048, 2), measured("nccl", 1 << 20, 9)]
    assert met(figures.latency_goals(lines)) == {
        "2 ranks, 1024 B in graphs, times as fast as NCCL >= 1.5": (2, True)
    }


def test_goals_of_processes_are_in_h() -> None:
    h = {"algorithm": "hop", "time_us": [10, 9, 11]}
    lines = [h, measured("direct", 1024, 45), measured("direct", 256 << 20, 300, floor_us=140)]
    assert met(figures.processes_goals(lines)) == {
        "2 processes, 1 KiB: in H <= 4": (4.5, False),
        "2 processes, 256 MiB: over twice the floor and 4 H <= 1": (0.938, True),
    }
    assert figures.processes_goals(lines[1:]) == []
    assert figures.processes_figure(lines).startswith("H 10.0 us; 2 ranks, 1 KiB, us: direct 45")


NCU = """==PROF== Connected to process 12
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","12","allReduce<float, Direct>","1,000","500"
"1","12","allReduce<float, Ring>","2000.0","100"
"""


def test_bytes_are_those_that_the_profiler_counted(tmp_path: Path) -> None:
    def launches() -> figures.Lines:
        return [
            {"ranks": 2, "algorithm": "direct", "dram_bytes": 1500},
            {"ranks": 2, "algorithm": "ring", "dram_bytes": 1500},
        ]

    assert "ncu.csv" in figures.add_counters(launches(), tmp_path)
    (tmp_path / "ncu.csv").write_text(NCU)
    lines = launches()
    assert figures.add_counters(lines, tmp_path) == ""
    assert [line["dram_bytes_counted"] for line in lines] == [1500, 2100]
    assert figures.bytes_figure(lines) == "at most 1.400 of the formula"
    assert met(figures.bytes_goals(lines)) == {
        "2 ranks, direct: bytes over the formula <= 1.1": (1, True),
        "2 ranks, ring: bytes over the formula <= 1.1": (1.4, False),
    }
    assert figures.add_counters(launches()[:1], tmp_path) == "ncu counted 2 launches, not 1"
    (tmp_path / "ncu.csv").write_text(NCU.replace("write.sum", "wrote.sum"))
    assert "dram__bytes_write.sum" in figures.add_counters(launches(), tmp_path)
