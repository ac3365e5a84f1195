"""The stages of the GPU checks that need torch: their commands, and what is made of their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench_gpu import gpu_report

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ROOT / "tests" / "cuda"
sys.path[:0] = [str(CHECKS), str(ROOT / "benchmarks")]

import _ddp_report  # noqa: E402
import ddp  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_torch_figures as figures  # noqa: E402
import gpu_torch_stages  # noqa: E402
from gpu_machine import Tools  # noqa: E402
from gpu_runner import Runner, Stage, Step  # noqa: E402

from ringreduce.bench.cli import make_parser, read_plan  # noqa: E402
from ringreduce.bench.results import Suite  # noqa: E402

TOOLS = Tools(*["/tools/" + name for name in Tools.__dataclass_fields__])
PLAN = gpu_stages.Plan(TOOLS, "90", 4, nccl="/lib/libnccl.so.2", study=True)


def commands(program: str) -> list[list[str]]:
    """The arguments that the stages give to a program."""
    found = []
    for stage in gpu_stages.stages(PLAN):
        for step in stage.steps:
            names = [Path(word).name for word in step.command]
            if program in names:
                found.append(list(step.command[names.index(program) + 1 :]))
    return found


def test_the_benchmark_takes_what_it_is_given(tmp_path: Path) -> None:
    given = commands("ringreduce.bench")
    assert len(given) == 5
    for arguments in given:
        parser = make_parser()
        options = parser.parse_args([word.replace("{folder}", str(tmp_path)) for word in arguments])
        assert options.device == "cuda"
        assert read_plan(parser, options, options.nproc)


def test_ddp_takes_what_it_is_given(tmp_path: Path) -> None:
    given = commands("ddp.py")
    assert len(given) == 4
    for arguments in given:
        options = ddp.parse([word.replace("{folder}", str(tmp_path)) for word in arguments])
        assert options.device == "cuda" and options.out.parent == tmp_path


def test_the_extension_comes_into_a_folder_of_its_own_without_a_network() -> None:
    install, look = gpu_torch_stages.extension(PLAN).steps
    for option in ("--no-deps", "--no-build-isolation", "--no-index"):
        assert option in install.command
    assert install.command[install.command.index("--target") + 1] == str(PLAN.site)
    assert install.env["RINGREDUCE_CUDA"] == "1" and install.env["RINGREDUCE_CUDA_ARCHS"] == "90"
    # In the source tree Python would find the ringreduce that has no extension.
    torch_steps = [step for stage in gpu_torch_stages.stages(PLAN) for step in stage.steps]
    assert all(step.inside for step in [look, *torch_steps])
    assert all(step.env["PYTHONPATH"] == str(PLAN.site) for step in [look, *torch_steps])


def test_torch_comes_high_up_and_after_its_extension() -> None:
    names = [stage.name for stage in gpu_stages.stages(PLAN)]
    order = ["build", "extension", "torch", "torch-bench", "ddp", "check", "memcheck"]
    assert [name for name in names if name in order] == order


def test_a_stage_waits_for_the_one_that_it_needs(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log", budget=60)
    program = (sys.executable, "-c", "import os; print(os.getcwd())")
    needy = Stage("torch", "", 30, (Step(program, inside=True),), needs="extension")
    assert runner.run(needy).verdict == "skipped: there is no extension to run"
    assert runner.run(Stage("extension", "", 30, (Step(program),), needs="")).status == "ok"
    assert runner.run(needy).status == "ok"
    here, inside = (line for line in runner.log.read_text().splitlines() if line[:1] == "/")
    assert here == os.getcwd() and inside != here


def test_files_that_cannot_be_read_fail_the_stage(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log", budget=60)
    program = "open('bench-all.json', 'w').write('{\"rows\": 3}')"
    step = Step((sys.executable, "-c", program), inside=True)
    result = runner.run(
        Stage("bench", "", 30, (step,), needs="", measures=True, collect=figures.bench_lines)
    )
    assert result.status == "failed" and "cannot be read" in result.reason


def test_pytests_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\ndef test_not(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_worse(broken): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml"]
    subprocess.run(
        [*command, str(tmp_path / "junit.xml"), str(tmp_path)], capture_output=True, cwd=tmp_path
    )
    (line,) = figures.junit(tmp_path)
    assert (line["tests"], line["wrong"], line["skipped"]) == (4, 2, 1)
    assert line["failed"] == ["test_bad", "test_worse"]
    assert figures.tests_figure([line]) == "1 of 4 tests passed, 1 skipped"
    assert figures.junit(tmp_path / "nowhere") == []


def test_the_benchmarks_file_becomes_lines_and_goals(tmp_path: Path) -> None:
    report = gpu_report()
    report.rows[0].measurements["nccl"] = report.rows[0].measurements.pop("symm_one_shot")
    report.rows[0].measurements["gloo"].wrong = 7
    report.write(tmp_path / "bench-all_reduce-4.json")
    lines = figures.bench_lines(tmp_path)
    assert [(line["algorithm"], line["bytes"]) for line in lines] == [
        ("ours", 1024), ("gloo", 1024), ("nccl", 1024), ("ours", 1 << 20),
    ]  # fmt: skip
    ours = lines[0]
    assert ours["time_us"] == pytest.approx([3, 2, 4]) and ours["issue_us"] == pytest.approx(7)
    assert {line["sharing"] for line in lines} == {"gpu"}
    assert [line["wrong"] for line in lines] == [0] * 4 and lines[1]["peer_wrong"] == 7
    assert figures.bench_figure(lines) == "2 ranks, 1 KiB, us: ours 3, gloo 300, nccl 9"
    goals = {goal["goal"]: goal["met"] for goal in figures.bench_goals(lines)}
    assert goals == {
        "torch, 2 ranks, 1024 B: times as fast as nccl >= 1": True,
        "torch, 2 ranks, 1024 B: times as fast as gloo >= 3": True,
    }
    report.rows[0].measurements["ours"].same_bits = False
    Suite([report]).write(tmp_path / "bench-all_reduce-4.json")
    assert figures.bench_lines(tmp_path)[0]["wrong"] == 1


def test_torchs_own_tests_are_counted(tmp_path: Path) -> None:
    results = {"test_a": ["pass", ""], "test_b": ["fail", "why"], "test_c": ["skip", "no"]}
    (tmp_path / "results-on-gpus-2.json").write_text(json.dumps(results))
    (line,) = figures.suite(tmp_path)
    assert line["failed"] == {"test_b": "why"}
    assert figures.suite_figure([line]) == "1 passed, 1 failed, 1 skipped"


def test_one_ranks_call_cost_is_a_goal() -> None:
    line = {"ranks": 1, "dtype": "float32", "bytes": 1024, "algorithm": "ours", "issue_us": 12.0}
    (goal,) = figures.bench_goals([line])
    assert (goal["value"], goal["met"]) == (12.0, False)


def test_ddps_file_becomes_lines_and_goals(tmp_path: Path) -> None:
    steps = {"bare": 0.10, "stock": 0.13, "ours": 0.12, "hook": 0.102}
    report = _ddp_report.Run(
        created="2030-01-01",
        machine={},
        settings={"device": "cuda", "world": 1, "dtype": "bfloat16", "sharing": ""},
        titles={key: f"DDP, {key}" for key in steps},
        models=[
            _ddp_report.ModelResult(
                "gpt2", 1000, {"batch": 4},
                {key: _ddp_report.WayResult([s], [] if key == "bare" else [s / 2], wrong=2)
                 for key, s in steps.items()},
            )
        ],
    )  # fmt: skip
    report.write(tmp_path / "ddp-1.json")
    lines = figures.ddp_lines(tmp_path)
    assert [line["wrong"] for line in lines] == [0, 0, 2, 2]
    assert lines[1]["exposed_us"] == pytest.approx(65e3)
    assert figures.ddp_figure(lines) == (
        "gpt2, 1 ranks, ms a step: bare 100.0, stock 130.0, ours 120.0, hook 102.0"
    )
    (goal,) = figures.ddp_goals(lines)
    assert goal["met"] and goal["value"] == pytest.approx(0.02)
    for line in lines:
        line["ranks"] = 2
    assert [goal["met"] for goal in figures.ddp_goals(lines)] == [True, True]


@pytest.mark.slow
def test_the_jobs_of_the_ranks_pass_on_the_cpu() -> None:
    """Those of gpu_torch_test.py that need no CUDA, so that a GPU is not their first run."""
    some = "named_for_each or (killed and 1000-2) or every_call and float32-2 or fsdp2 or stock"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some,
         str(CHECKS / "gpu_torch_test.py")],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
        env={**os.environ, "GPU_TEST_DEVICE": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
