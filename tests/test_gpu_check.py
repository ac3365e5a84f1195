"""The runner of the GPU checks, without a GPU: limits, verdicts, the budget, results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import alive, wait_until

CHECKS = Path(__file__).resolve().parent / "cuda"
sys.path.insert(0, str(CHECKS))

import gpu_check  # noqa: E402
import gpu_figures as figures  # noqa: E402
import gpu_machine  # noqa: E402
import gpu_stages  # noqa: E402
from gpu_machine import Machine, Tools  # noqa: E402
from gpu_report import Report  # noqa: E402
from gpu_runner import NOT_POSSIBLE, Runner, Stage, Step, Usage  # noqa: E402

pytestmark = pytest.mark.slow

HANG = 120  # seconds: far beyond what anything here takes
GPU = {
    "name": "Fake GPU",
    "uuid": "GPU-1",
    "driver_version": "580.0",
    "memory.total": "1000",
    "compute_cap": "9.0",
}
TOOLS = Tools(*["/tools/" + name for name in Tools.__dataclass_fields__])


def step(code: str, *arguments: str) -> Step:
    """A Python program.  {json} and {folder} may be arguments of it."""
    return Step((sys.executable, "-c", textwrap.dedent(code), *arguments))


def stage(name: str = "fake", *steps: Step, limit: float = HANG, **more: object) -> Stage:
    return Stage(name, "", limit, steps, needs="", **more)


def says(*lines: object, status: int = 0) -> Step:
    """A program that measures these lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return step(f"import sys; open(sys.argv[1], 'a').write({text!r}); sys.exit({status})", "{json}")


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "log", budget=10 * HANG)


# A program that starts another in a session of its own, whose parent ends at once, and which takes
# no notice of SIGTERM; its number goes to a file.  Then the program itself does {then}.
ORPHAN = """
    import os, signal, subprocess, sys, time
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            with open(sys.argv[1] + ".partial", "w") as file:
                file.write(str(os.getpid()))
            os.rename(sys.argv[1] + ".partial", sys.argv[1])
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
"""


# --- Verdicts -------------------------------------------------------------------------------------


def test_an_overrun_is_ended_with_all_that_it_started_and_nothing_else(
    runner: Runner, tmp_path: Path
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        pid_file = tmp_path / "pid"
        result = runner.run(
            stage("slow", step(ORPHAN + "    time.sleep(600)", str(pid_file)), limit=6)
        )
        assert result.status == "timeout"
        assert "6 s" in result.reason
        assert wait_until(lambda: not alive(int(pid_file.read_text())), HANG)
        assert bystander.poll() is None
        assert "what runs" in runner.log.read_text()
    finally:
        bystander.kill()
        bystander.wait()


def test_processes_left_behind_fail_a_stage_and_are_ended(runner: Runner, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = runner.run(stage("untidy", step(ORPHAN, str(pid_file))))
    pid = int(pid_file.read_text())
    assert result.status == "failed"
    assert f"left processes behind: {pid}" in result.reason
    assert not alive(pid)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('all went'); print('wrong here'); raise SystemExit(3)", "status 3: wrong here"),
        (
            "print('x.cu(3): error: no such\\nstopped'); raise SystemExit(1)",
            "status 1: x.cu(3): err",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_failure_says_how_it_ended_and_what_it_complained_of(
    runner: Runner, program: str, reason: str
) -> None:
    result = runner.run(stage("bad", step(program)))
    assert result.status == "failed"
    assert reason in result.reason


def test_a_failing_step_does_not_keep_the_next_from_running(runner: Runner) -> None:
    result = runner.run(stage("two", says({"algorithm": "a"}, status=1), says({"algorithm": "b"})))
    assert result.status == "failed"
    assert [line["algorithm"] for line in result.measurements] == ["a", "b"]


def test_what_is_not_possible_is_skipped_with_its_reason(runner: Runner) -> None:
    cannot = step(f"print('no peers here'); raise SystemExit({NOT_POSSIBLE})")
    result = runner.run(stage("alone", cannot, measures=True))
    assert (result.status, result.reason) == ("skipped", "no peers here")
    partly = runner.run(stage("partly", cannot, says({"wrong": 0}), measures=True))
    assert (partly.status, partly.figure) == ("ok", "no peers here")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([{"wrong": 0}, {"wrong": 5}], "1 of 2 results are wrong"),
        ([["no", "object"]], "line 1 of the measurements is no object"),
        ([], "it measured nothing"),
    ],
)
def test_success_takes_right_results(runner: Runner, lines: list[object], reason: str) -> None:
    result = runner.run(stage("measures", says(*lines), measures=True))
    assert (result.status, result.reason) == ("failed", reason)


def test_a_stage_that_must_free_the_gpu_is_held_to_it(tmp_path: Path) -> None:
    def with_usages(*usages: Usage) -> str:
        left = list(usages)
        runner = Runner(tmp_path / "log", HANG, lambda: left.pop(0) if len(left) > 1 else left[0])
        result = runner.run(stage("kill", says({"wrong": 0}), frees_gpu=True))
        return result.verdict

    before, busy = Usage(frozenset({7}), 500), Usage(frozenset({7, 99}), 9000)
    assert with_usages(before, busy, before) == "ok"
    assert "process 99" in with_usages(before, busy)
    assert "600 MiB more" in with_usages(before, Usage(frozenset({7}), 1100))


# --- The budget, the log, the results -------------------------------------------------------------


def test_the_budget_cuts_a_stage_and_skips_those_after_it(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log", budget=3)
    cut = runner.run(stage("long", step("import time; time.sleep(600)")))
    assert cut.status == "skipped"
    assert "cut after" in cut.reason
    late = runner.run(stage("late", step("")))
    assert (late.status, late.reason) == ("skipped", "the budget of 3 s is used up")


def test_without_a_build_what_needs_it_is_skipped(runner: Runner) -> None:
    failed = runner.run(stage("build", step("raise SystemExit(1)")))
    assert failed.status == "failed"
    needy = Stage("needy", "", HANG, (step(""),))
    assert runner.run(needy).verdict == "skipped: there is no build to run"
    assert runner.run(stage("build", step(""))).status == "ok"
    assert runner.run(needy).verdict == "ok"


def test_results_are_in_the_file_after_each_stage(tmp_path: Path) -> None:
    report = Report(tmp_path / "out", {"gpus": [GPU]})
    runner = Runner(report.log, HANG)
    code = """
        import json, sys
        content = json.load(open(sys.argv[1]))
        names = [stage["name"] for stage in content["stages"]]
        assert names == ["first"] and content["machine"]["gpus"], content
    """
    stages = [stage("first", step("")), stage("second", step(code, str(report.path)))]
    gpu_check.run_all(stages, runner, report, no_gpu="")
    assert [result.verdict for result in report.results] == ["ok", "ok"]
    content = json.loads(report.path.read_text())
    assert [stage["status"] for stage in content["stages"]] == ["ok", "ok"]
    assert len(list((tmp_path / "out").iterdir())) <= 8


# --- The whole ------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with a GPU, as gpu_check.py sees it; results go to a folder of the test."""
    facts = {"cuda_toolkit": "13.0", "cores": 2, "commit": "unknown", "gpus": [GPU]}
    here = Machine(TOOLS, [GPU], "", facts)
    monkeypatch.setattr(gpu_machine, "inspect", lambda: here)
    monkeypatch.setattr(gpu_machine, "find_nccl", lambda given, scratch: (None, "no NCCL here"))
    monkeypatch.setattr(gpu_machine, "find_torch", lambda: ("", "no torch here"))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return here


def use(monkeypatch: pytest.MonkeyPatch, *stages: Stage) -> None:
    monkeypatch.setattr(gpu_stages, "stages", lambda plan: list(stages))


def test_all_is_well_only_if_no_stage_failed(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = stage("good", says({"busbw": 7, "algorithm": "copy"}), figure=figures.copy_figure)
    away = stage("away", step(""), skip="there is no ncu")
    use(monkeypatch, good, away)
    assert gpu_check.main([]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "gpu-check: 1 passed, 0 failed, 1 skipped"
    rows = [line.split(None, 3) for line in out.splitlines()]
    assert ["good", "ok", "copy 7 GB/s, read and written"] in [
        [row[0], row[1], row[3]] for row in rows if len(row) == 4
    ]
    assert any(row[:2] == ["away", "skipped"] and row[3] == "there is no ncu" for row in rows)
    assert (tmp_path / "out" / "gpu-check.json").is_file()

    use(monkeypatch, good, stage("bad", step("raise SystemExit(1)")), away)
    assert gpu_check.main([]) == 1
    assert "1 passed, 1 failed, 1 skipped" in capsys.readouterr().out

    use(monkeypatch, away)
    assert gpu_check.main([]) == 1, "nothing was checked"


def test_without_a_gpu_only_the_build_runs_and_nothing_passes_for_checked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.gpus, machine.no_gpu = [], "there is no nvidia-smi"
    build = stage("build", step(""), needs_gpu=False)
    use(monkeypatch, build, stage("check", step("raise SystemExit(1)")))
    assert gpu_check.main([]) == gpu_check.NO_GPU == 3
    out = capsys.readouterr().out
    assert "no GPU was found: there is no nvidia-smi" in out
    assert out.splitlines()[-1] == "gpu-check: 1 passed, 0 failed, 1 skipped"

    use(monkeypatch, stage("build", step("raise SystemExit(1)"), needs_gpu=False))
    assert gpu_check.main([]) == 1


def test_a_machine_without_tools_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: None)
    assert gpu_check.main([]) == 3
    out = capsys.readouterr().out
    assert "there is no nvcc, cmake, ninja" in out
    assert "gpu-check: 0 passed, 0 failed" in out
    machine = json.loads((tmp_path / "out" / "gpu-check.json").read_text())["machine"]
    assert machine["gpus"] == [] and machine["cores"] >= 1


# Sent twice: the second one finds the program at the ending of what it runs.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ended_run_ends_what_it_runs_and_leaves_what_it_had(
    tmp_path: Path, number: signal.Signals
) -> None:
    pid_file, out = tmp_path / "pid", tmp_path / "out"
    driver = tmp_path / "driver.py"
    driver.write_text(
        textwrap.dedent(
            f"""
            import signal, sys
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
            sys.path[:0] = [{str(CHECKS.parent)!r}, {str(CHECKS)!r}]
            import test_gpu_check as t
            facts = {{"cuda_toolkit": "", "cores": 1, "commit": ""}}
            machine = t.Machine(t.TOOLS, [t.GPU], "", facts)
            t.gpu_machine.inspect = lambda: machine
            t.gpu_machine.find_nccl = lambda *_: (None, "")
            long = t.step(t.ORPHAN + "    time.sleep(600)", {str(pid_file)!r})
            t.gpu_stages.stages = lambda plan: [t.stage("first", t.step("")), t.stage("long", long)]
            sys.exit(t.gpu_check.main(["--out", {str(out)!r}]))
            """
        )
    )
    run = subprocess.Popen([sys.executable, str(driver)], stdout=subprocess.DEVNULL)
    try:
        assert wait_until(pid_file.exists, HANG)
        run.send_signal(number)
        run.send_signal(number)
        assert run.wait(HANG) == 128 + number
    finally:
        run.kill()
        run.wait()
    assert not alive(int(pid_file.read_text()))
    stages = json.loads((out / "gpu-check.json").read_text())["stages"]
    assert [(stage["name"], stage["status"]) for stage in stages] == [("first", "ok")]
