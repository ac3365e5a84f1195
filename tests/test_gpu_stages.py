"""The stages of the GPU checks: what they need, the commands they run, the files they read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench import make_report

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ROOT / "tests" / "cuda"
sys.path[:0] = [str(CHECKS), str(ROOT / "benchmarks")]

import ddp  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_torch_figures as figures  # noqa: E402
import gpu_torch_stages  # noqa: E402
from gpu_machine import Tools  # noqa: E402
from gpu_runner import Runner, Stage, Step  # noqa: E402

from ringreduce.bench.cli import make_parser, read_plan  # noqa: E402

TOOLS = Tools(*["/tools/" + name for name in Tools.__dataclass_fields__])
TORCH_PLAN = gpu_stages.Plan(TOOLS, "90", 4, nccl="/lib/libnccl.so.2", study=True)


def test_tools_that_are_missing_skip_their_stages() -> None:
    fields = dict.fromkeys(Tools.__dataclass_fields__)
    bare = {s.name: s for s in gpu_stages.stages(gpu_stages.Plan(Tools(**fields), "90", 1))}
    skipped = {name for name, stage in bare.items() if stage.skip}
    assert skipped == {"build", "memcheck", "initcheck", "synccheck", "bytes", "mps"}
    assert not any(s.skip for s in gpu_stages.stages(gpu_stages.Plan(TOOLS, "90", 1)))


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
    assert with_nccl == ["internode_test", "single", "latency"]
    # A process with torch has an NCCL already, in whose place this one is loaded.
    preloaded = [
        stage.name
        for stage in gpu_stages.stages(plan)
        if any(step.env.get("LD_PRELOAD") == "/lib/libnccl.so.2" for step in stage.steps)
    ]
    assert preloaded == ["torch-bench", "ddp"]


# --- Those with torch -----------------------------------------------------------------------------


def commands(program: str) -> list[list[str]]:
    """The arguments that the stages give to a program."""
    found = []
    for stage in gpu_stages.stages(TORCH_PLAN):
        for step in stage.steps:
            names = [Path(word).name for word in step.command]
            if program in names:
                found.append(list(step.command[names.index(program) + 1 :]))
    return found


def test_the_programs_take_what_they_are_given(tmp_path: Path) -> None:
    given = {program: commands(program) for program in ("ringreduce.bench", "ddp.py")}
    assert [len(found) for found in given.values()] == [5, 4]
    for program, found in given.items():
        for words in found:
            arguments = [word.replace("{folder}", str(tmp_path)) for word in words]
            if program == "ddp.py":
                assert ddp.parse(arguments).device == "cuda"
                continue
            parser = make_parser()
            options = parser.parse_args(arguments)
            assert options.device == "cuda" and read_plan(parser, options, options.nproc)


def test_the_extension_comes_into_a_folder_of_its_own_without_a_network() -> None:
    install, look = gpu_torch_stages.extension(TORCH_PLAN).steps
    for option in ("--no-deps", "--no-build-isolation", "--no-index"):
        assert option in install.command
    assert install.command[install.command.index("--target") + 1] == str(TORCH_PLAN.site)
    assert install.env["RINGREDUCE_CUDA"] == "1" and install.env["RINGREDUCE_CUDA_ARCHS"] == "90"
    # In the source tree Python would find the ringreduce that has no extension.
    torch_steps = [step for stage in gpu_torch_stages.stages(TORCH_PLAN) for step in stage.steps]
    assert all(step.inside for step in [look, *torch_steps])
    assert all(step.env["PYTHONPATH"] == str(TORCH_PLAN.site) for step in [look, *torch_steps])


def test_files_that_cannot_be_read_fail_the_stage(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log", budget=60)
    program = "open('bench-all.json', 'w').write('{\"rows\": 3}')"
    step = Step((sys.executable, "-c", program), inside=True)
    result = runner.run(
        Stage("bench", "", 30, (step,), needs="", measures=True, collect=figures.bench_lines)
    )
    assert result.status == "failed" and "cannot be read" in result.reason


def test_wrong_results_in_the_benchmarks_file_are_ours_or_a_peers(tmp_path: Path) -> None:
    report = make_report()
    report.rows[0].measurements["gloo"].wrong = 7
    report.write(tmp_path / "bench-all_reduce-4.json")
    lines = figures.bench_lines(tmp_path)
    assert [(line["algorithm"], line["wrong"]) for line in lines[:2]] == [("ours", 0), ("gloo", 0)]
    assert lines[1]["peer_wrong"] == 7
    report.rows[0].measurements["ours"].same_bits = False
    report.write(tmp_path / "bench-all_reduce-4.json")
    assert figures.bench_lines(tmp_path)[0]["wrong"] == 1


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
