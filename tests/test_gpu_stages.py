"""The stages of the GPU checks, with stand-ins for the GPU, its tools and the programs they run."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

CHECKS = Path(__file__).resolve().parent / "cuda"
sys.path.insert(0, str(CHECKS))

import gpu_check  # noqa: E402
import gpu_machine  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_torch_stages  # noqa: E402
from gpu_machine import Tools  # noqa: E402

TOOLS = Tools(*["/tools/" + name for name in Tools.__dataclass_fields__])


def test_tools_that_are_missing_skip_their_stages() -> None:
    fields = dict.fromkeys(Tools.__dataclass_fields__)
    bare = {s.name: s for s in gpu_stages.stages(gpu_stages.Plan(Tools(**fields), "90", 1))}
    skipped = {name for name, stage in bare.items() if stage.skip}
    assert skipped == {"build", "memcheck", "initcheck", "synccheck", "bytes", "mps"}
    assert not any(s.skip for s in gpu_stages.stages(gpu_stages.Plan(TOOLS, "90", 1)))


def test_without_torch_its_stages_are_skipped_with_the_reason() -> None:
    plan = gpu_stages.Plan(TOOLS, "90", 1, no_torch="this Python has no torch", study=True)
    skipped = {stage.name for stage in gpu_stages.stages(plan) if stage.skip == plan.no_torch}
    assert skipped == {"extension", "torch", "torch-bench", "ddp"} | {
        stage.name for stage in gpu_torch_stages.study(plan)
    }


def test_tests_that_need_no_gpu_are_none_of_its_stages() -> None:
    names = {path.stem for path in gpu_stages.gpu_tests()}
    assert {"all_reduce_test", "failure_test", "peer_memory_test"} <= names
    # Of the others there is no program in the folder of GPU tests.
    assert not {name for name in names if name.endswith(("_host_test", "_fake_test"))}


def test_the_program_knows_every_option_that_it_is_given() -> None:
    known = (CHECKS.parent.parent / "benchmarks" / "cuda" / "settings.h").read_text()
    given: set[str] = set()
    for stage in gpu_stages.stages(gpu_stages.Plan(TOOLS, "90", 1, study=True)):
        for step in stage.steps:
            programs = [Path(word).name for word in step.command]
            if "ringreduce_cuda_perf" in programs:
                arguments = step.command[programs.index("ringreduce_cuda_perf") :]
                given |= {word for word in arguments if word.startswith("--")}
    assert {"--json", "--ranks", "--reduced"} <= given
    assert not {option for option in given if f'"{option}"' not in known}


def test_nccl_goes_only_to_what_is_beside_it() -> None:
    plan = gpu_stages.Plan(TOOLS, "90", 1, nccl="/lib/libnccl.so.2")
    with_nccl = [
        stage.name
        for stage in gpu_stages.stages(plan)
        if any(step.env.get("RINGREDUCE_NCCL") == "/lib/libnccl.so.2" for step in stage.steps)
    ]
    assert with_nccl == ["spanning_test", "single", "latency"]
    # A process with torch has an NCCL already, in whose place this one is loaded.
    preloaded = [
        stage.name
        for stage in gpu_stages.stages(plan)
        if any(step.env.get("LD_PRELOAD") == "/lib/libnccl.so.2" for step in stage.steps)
    ]
    assert preloaded == ["torch-bench", "ddp"]


# --- All of it, with stand-ins --------------------------------------------------------------------

# What ringreduce_cuda_perf writes, as gpu_stages.py describes it.
PERF = """
    import argparse, json, os, sys
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    for name in "ranks dtypes ops algorithms minbytes maxbytes stepfactor json".split():
        parser.add_argument("--" + name, default="")
    parser.add_argument("--reduced", action="store_true")
    settings = parser.parse_args()

    def write(**line):
        line = {"mode": settings.mode, "sharing": "gpu", **line}
        with open(settings.json, "a") as file:
            print(json.dumps(line), file=file)

    def bytes_of(text):
        number, unit = text.rstrip("KMG"), text[len(text.rstrip("KMG")):]
        return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]

    def timed(ranks, algorithm, size, time, **more):
        write(ranks=ranks, algorithm=algorithm, dtype="float32", op="SUM", bytes=size, wrong=0,
              time_us=[time, time, time], algbw=1.0, busbw=2.0, **more)

    ranks = [int(number) for number in (settings.ranks or "2").split(",")]
    size, sizes = bytes_of(settings.minbytes or "4"), []
    while size <= bytes_of(settings.maxbytes or "4"):
        sizes.append(size)
        size = max(4, size * int(settings.stepfactor or 4))
    names = (settings.algorithms or "direct").split(",")
    if settings.mode == "floor":
        timed(1, "copy", 1 << 30, 100)
    elif settings.mode == "kill":
        for number in ranks:
            write(ranks=number, raised_s=[0.1] * (number - 1), wrong=0)
    elif settings.mode == "bytes":
        for number in ranks:
            write(ranks=number, algorithm="ring", dram_bytes=1000)
    else:
        if settings.mode == "processes":
            write(algorithm="hop", time_us=[10, 9, 11])
            names = ["direct"]
        beside = settings.mode in ("single", "latency") and "RINGREDUCE_NCCL" in os.environ
        assert not beside or os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        for number in ranks:
            for size in sizes:
                for name in names:
                    timed(number, name, size, 20, floor_us=19)
                if beside:
                    timed(number, "nccl", size, 40)
"""
SMI = """
    case "$*" in
      *query-gpu=name*) echo "NVIDIA H200, GPU-12ab, 580.1, 143771, 9.0, 1980" ;;
      *query-gpu=memory.used*) echo 5 ;;
    esac
"""
# Makes the "build": a GPU test for each there is, and the program.
CMAKE = """
    if [ "$1" = --build ]; then
      mkdir -p "$2/gpu_tests"
      cp "$(dirname "$0")/perf" "$2/ringreduce_cuda_perf"
      for test in {tests}; do cp "$(dirname "$0")/true" "$2/gpu_tests/$test"; done
    fi
"""
NCU = """
    until [ "$1" = --metrics ]; do
      [ "$1" = --log-file ] && log=$2
      shift
    done
    shift 2
    cat > "$log" <<'TABLE'
    "ID","dram__bytes_read.sum","dram__bytes_write.sum"
    "","byte","byte"
    "0","600","450"
    "1","600","400"
    TABLE
    exec "$@"
"""
SANITIZER = """
    shift 4
    exec "$@"
"""
MPS = """
    running=$(dirname "$0")/running
    if [ "$1" = -d ]; then touch "$running"; exit; fi
    [ -e "$running" ] || exit 1
    read -r question
    case "$question" in quit*) rm "$running" ;; esac
"""


# Stands for Python in the stages with torch: pip, pytest, ringreduce.bench and ddp.py.
PYTHON = """
    import json, pathlib, sys
    words = sys.argv[1:]

    def after(option):
        return words[words.index(option) + 1]

    if words[:3] == ["-m", "pip", "install"]:
        pathlib.Path(after("--target")).mkdir(parents=True)
    elif "--junitxml" in words:
        pathlib.Path(after("--junitxml")).write_text(
            '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1">'
            '<testcase name="a"/></testsuite></testsuites>')
    elif words[:2] == ["-m", "ringreduce.bench"]:
        found = {"seconds": [1e-5], "issue_us": 5.0, "median_us": 10.0, "algbw": 1.0, "busbw": 1.0,
                 "wrong": 0, "same_bits": True}
        row = {"bytes": 1024, "dtype": "float32", "op": "sum",
               "measurements": {"ours": found, "nccl": {**found, "median_us": 40.0}}}
        report = {"collective": words[2], "rows": [row], "machine": {"sharing": "one GPU"},
                  "settings": {"world": int(after("--nproc"))}}
        pathlib.Path(after("--json")).write_text(json.dumps(report))
    elif words[0].endswith("torch_suite/run.py"):
        results = {"test_a": ["pass", ""], "test_b": ["fail", "why"], "test_c": ["skip", "no"]}
        path = pathlib.Path(after("--logs")) / "results-on-gpus-2.json"
        path.write_text(json.dumps(results))
    elif words[0].endswith("ddp.py"):
        way = {"step": [0.01], "median_s": 0.01, "samples_per_s": 1.0, "exposed_s": 0.001,
               "wrong": 0, "same_bits": True}
        ways = {key: way for key in ("bare", "stock", "ours", "hook")}
        pathlib.Path(after("--out") + ".json").write_text(json.dumps({
            "settings": {"world": int(after("--nproc")), "sharing": "one GPU", "dtype": "bfloat16"},
            "titles": dict.fromkeys(ways, "DDP"),
            "models": [{"name": "gpt2", "parameters": 1000, "ways": ways}]}))
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU and all tools, none of them real; returns where they are."""
    folder = tmp_path / "tools"
    folder.mkdir()

    def put(name: str, script: str, interpreter: str = "/bin/sh") -> None:
        path = folder / name
        path.write_text(f"#!{interpreter}\n" + textwrap.dedent(script))
        path.chmod(0o755)

    tests = " ".join(path.stem for path in gpu_stages.gpu_tests())
    put("perf", PERF, sys.executable)
    put("true", "")
    put("python", PYTHON, sys.executable)
    put("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    put("ninja", "")
    put("cmake", CMAKE.replace("{tests}", tests))
    put("nvidia-smi", SMI)
    put("ncu", NCU)
    put("compute-sanitizer", SANITIZER)
    put("nvidia-cuda-mps-control", MPS)
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: str(folder / name))
    nccl = (str(folder / "libnccl.so.2"), "2.30.3")
    monkeypatch.setattr(gpu_machine, "find_nccl", lambda given, scratch: nccl)
    monkeypatch.setattr(gpu_machine, "find_torch", lambda: ("2.11.0, CUDA 13.0", ""))
    monkeypatch.setattr(gpu_torch_stages, "PYTHON", str(folder / "python"))
    monkeypatch.setattr(gpu_stages, "BUILD", tmp_path / "build")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return folder


def test_every_stage_runs_and_says_what_it_found(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--study"]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert result["machine"]["cuda_toolkit"] == "13.0"
    assert result["machine"]["nccl"]["version"] == "2.30.3"
    stages = {stage["name"]: stage for stage in result["stages"]}
    assert {stage["status"] for stage in stages.values()} == {"ok"}
    assert f"gpu-check: {len(stages)} passed, 0 failed, 0 skipped" in out
    silent = {
        name for name, stage in stages.items() if stage["measurements"] and not stage["figure"]
    }
    assert not silent
    with_goals = {name for name, stage in stages.items() if stage["goals"]}
    torchs = {"torch-bench", "ddp"}
    assert with_goals == {"single", "latency", "processes", "kill", "bytes"} | torchs
    assert "MISSED" not in out
    assert not (machine / "running").exists()


def test_a_slip_of_one_program_is_one_failed_stage(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    perf = machine / "perf"
    perf.write_text(perf.read_text().replace("wrong=0,", 'wrong=settings.mode == "latency",'))
    assert gpu_check.main([]) == 1
    stages = json.loads((tmp_path / "out" / "gpu-check.json").read_text())["stages"]
    failed = {stage["name"] for stage in stages if stage["status"] != "ok"}
    assert failed == {"latency"}
    assert "1 failed, 0 skipped" in capsys.readouterr().out
