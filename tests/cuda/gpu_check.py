"""Builds ringreduce for the GPUs of this machine and shows what only GPUs can show.

    python3 tests/cuda/gpu_check.py              # as `make gpu-check`: all stages
    python3 tests/cuda/gpu_check.py --quick      # at most 150 s after the build, without torch
    python3 tests/cuda/gpu_check.py --build      # as `make gpu-build`: only compiles
    python3 tests/cuda/gpu_check.py --study      # as `make gpu-study`: the long tables too
    python3 tests/cuda/gpu_check.py --only check --only single
    python3 tests/cuda/gpu_check.py --list

The stages are tests of pytest (gpu_stages.py); what is not an option here is one of pytest, such as
--junitxml.  Needs Python 3.10 with pytest, nvcc, cmake, ninja and g++, no other package and no
network.  What it finds is in gpu-check.json, with all output in gpu-check.log, after each
stage: in $OUT if that is set, else in build/gpu/results.  Exit status:

    0  nothing failed, `check` passed and, with two GPUs or more, `gpus` did (--build: it compiled)
    1  something failed
    2  a wrong call, no pytest, or a folder that cannot be written
    3  there is no GPU that programs can use: nothing was checked
    4  incomplete: nothing failed, but `check` or `gpus` did not run to its end
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_machine
from gpu_machine import HERE, Machine

# Seconds for all stages but the builds.
QUICK_BUDGET, BUDGET, STUDY_BUDGET = 150.0, 1200.0, 3000.0
PASSED, FAILED, WRONG_CALL, NO_GPU, INCOMPLETE = range(5)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

try:
    import pytest
except ImportError:
    print(f"gpu-check needs pytest: {sys.executable} -m pip install pytest")
    raise SystemExit(WRONG_CALL) from None

from gpu_figures import ddp_table  # noqa: E402
from gpu_run import Run  # noqa: E402

# Nothing of this project's other tests.
PYTEST = (
    *(str(HERE / "gpu_stages.py"), "-c", os.devnull, "--rootdir", str(HERE), "--noconftest"),
    *("-v", "-rN", "--tb=short", "--assert=plain", "--capture=no", "--strict-markers"),
    *("-p", "no:cacheprovider", "-o", "console_output_style=classic"),
)
MARKS = ("limit", "build", "quick", "study", "torch", "one_gpu", "two_gpus", "tool")


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("--list", action="store_true", help="show the stages and what they show")
    option("--only", action="append", metavar="STAGE", default=[],
           help="this stage (and those that it needs); again for more")  # fmt: skip
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="only what every report needs")
    extent.add_argument("--build", action="store_true", help="compile only")
    extent.add_argument("--study", action="store_true", help="add the long tables")
    option("--budget", type=float, metavar="SECONDS",
           help=f"for all stages but the builds ({BUDGET:.0f}; {QUICK_BUDGET:.0f} with --quick, "
           f"{STUDY_BUDGET:.0f} with --study)")  # fmt: skip
    option("--nccl", metavar="PATH", default=os.environ.get("RINGREDUCE_NCCL"),
           help="an NCCL to compare with: a libnccl.so.2, that packed by xz, or a folder with one "
           "(the Python package's; ranks share a GPU from 2.30 on)")  # fmt: skip
    option("--out", type=Path, metavar="FOLDER", help="where the results go")
    return parser.parse_known_args(arguments)


class Check:
    """A plugin of pytest: what may run, what is kept of it, and what it means."""

    def __init__(self, settings: argparse.Namespace, machine: Machine, folder: Path) -> None:
        self.settings, self.machine = settings, machine
        self.path, self.log = folder / "gpu-check.json", folder / "gpu-check.log"
        self.results: dict[str, dict[str, Any]] = {}
        self.running: Run | None = None
        budget = STUDY_BUDGET if settings.study else QUICK_BUDGET if settings.quick else BUDGET
        self.budget = budget if settings.budget is None else settings.budget
        self.left = self.budget
        folder.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.write()

    def write(self) -> None:
        """Writes the results, in a file that is whole at any time."""
        content = {"machine": self.machine.facts, "stages": list(self.results.values())}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self.path)

    def pytest_configure(self, config: pytest.Config) -> None:
        for name in MARKS:
            config.addinivalue_line("markers", f"{name}: see gpu_stages.py")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        settings = self.settings
        items[:] = [
            item
            for item in items
            if (settings.study or not has(item, "study"))
            and (has(item, "quick") or not settings.quick)
            and (has(item, "build") or not settings.build)
        ]
        names = {name_of(item.nodeid): item for item in items}
        if unknown := [name for name in settings.only if name not in names]:
            raise pytest.UsageError(
                f"no stage is called {', '.join(unknown)}; there are {', '.join(names)}"
            )
        if chosen := set(settings.only):
            if any(has(names[name], "torch") for name in chosen):
                chosen.add("extension")
            items[:] = [names[name] for name in names if name in {"build", *chosen}]
        if settings.list:
            for name, item in names.items():
                about = item.obj.__doc__  # type: ignore[attr-defined]
                print(f"{name:18} {limit_of(item):4.0f} s  {about}")
            items[:] = []

    @pytest.fixture
    def run(self, request: pytest.FixtureRequest) -> Iterator[Run]:
        item, settings = request.node, self.settings
        if why := self.why_not(item):
            pytest.skip(why)
        counted, limit = not has(item, "build"), limit_of(item)
        left = self.left if counted else limit
        run = self.running = Run(name_of(item.nodeid), self.machine, self.log,
                                 quick=settings.quick, limit=limit, left=left)  # fmt: skip
        yield run
        run.close()
        self.running = None
        self.left -= run.seconds() if counted else 0.0

    def why_not(self, item: pytest.Item) -> str:
        """Why a stage cannot run, or ""."""
        machine, several = self.machine, len(self.machine.gpus) > 1
        tools = item.get_closest_marker("tool")
        missing = [tool for tool in tools.args if not machine.tools[tool]] if tools else []
        name, builds, torch = name_of(item.nodeid), has(item, "build"), has(item, "torch")
        needed = self.result("extension" if torch and name != "extension" else "build")
        obstacles = (
            (not builds and machine.no_gpu, "no GPU"),
            (torch and machine.no_torch, machine.no_torch),
            (has(item, "two_gpus") and not several, "there is one GPU"),
            (has(item, "one_gpu") and several, "there are several GPUs, see gpus"),
            (missing, f"there is no {', '.join(missing)}"),
            (
                name != "build" and needed["status"] != "ok",
                f"there is no {needed['name']} to run: {needed['reason']}",
            ),
            (not builds and self.left < 1.0, f"the budget of {self.budget:.0f} s is used up"),
        )
        return next((why for there, why in obstacles if there), "")

    def result(self, name: str) -> dict[str, Any]:
        """What came of a stage, also of one that was not asked for."""
        return self.results.get(name, {"name": name, "status": "", "reason": "not asked for"})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        reason = "" if report.passed else report.longreprtext.strip().splitlines()[-1]
        if isinstance(report.longrepr, tuple):  # of what is skipped
            reason = report.longrepr[2].removeprefix("Skipped: ")
        status = "ok" if report.passed else report.outcome
        self.add(name_of(report.nodeid), status, reason)

    def add(self, name: str, status: str, reason: str) -> None:
        """Keeps what came of a stage, in the files too."""
        run = self.running
        lines: list[Any] = []
        if run:
            status, reason = run.status or status, run.reason or reason
            try:
                lines = run.lines()
            except Exception as error:
                run.note(f"the measurements cannot be read: {error!r}")
        self.results[name] = {
            "name": name,
            "status": status,
            "reason": reason,
            "seconds": run.seconds() if run else 0.0,
            "figure": run.figure if run else "",
            "commands": run.commands if run else [],
            "measurements": lines,
        }
        self.write()
        # The log says why a stage has no output, too.
        with self.log.open("a") as log:
            log.write(f"=== {name}: {status}{f': {reason}' * bool(reason)}\n")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when != "call" and report.passed:
            return None
        result = self.results[name_of(report.nodeid)]
        says = result["figure"] if result["status"] == "ok" else result["reason"]
        text = f"{result['status']} ({result['seconds']:.1f} s)" + f": {says}" * bool(says)
        return report.outcome, report.outcome[0], text

    def end(self, number: int, _: object) -> None:
        """The first signal that shall end this program, a lost terminal's too, ends what it runs as
        well; those that come while that goes on change nothing."""
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        why = f"ended by {signal.Signals(number).name}"
        if self.running and self.running.name not in self.results:
            self.add(self.running.name, "failed", why)
        pytest.exit(why, 128 + number)

    def conclude(self, status: int) -> int:
        """Prints what came of it all; returns the exit status."""
        if lines := self.results.get("ddp", {}).get("measurements"):
            print("\n" + "\n".join(ddp_table(lines)))
        status, why = self.verdict(status)
        print(f"\ngpu-check: {why} (exit status {status})")
        print("Attach these two files to a report:")
        print(f"  {self.path}\n  {self.log}", flush=True)
        return status

    def verdict(self, status: int) -> tuple[int, str]:
        """The exit status, and its reason in words; `status` is pytest's."""
        results, gpus = self.results.values(), len(self.machine.gpus)
        if status > 128:
            return status, f"ENDED by {signal.Signals(status - 128).name}"
        if failed := [r["name"] for r in results if r["status"] in ("failed", "timeout")]:
            return FAILED, f"FAILED: {', '.join(failed)}"
        if status != pytest.ExitCode.OK:
            return FAILED, f"FAILED: pytest ended with status {status}"
        wanted = ["check"] + ["gpus"] * (gpus > 1)
        if self.settings.build:
            wanted = ["build"]
        elif self.machine.no_gpu:
            why = f"NO GPU, nothing of what needs one was checked: {self.machine.no_gpu}"
            return NO_GPU, why
        if missing := [
            f"{name} did not run ({self.result(name)['reason']})"
            for name in wanted
            if self.result(name)["status"] != "ok"
        ]:
            return INCOMPLETE, f"INCOMPLETE: {'; '.join(missing)}"
        if self.settings.build:
            return PASSED, "compiled, and nothing is checked yet"
        limited = ", ".join(map(str, self.machine.end_long_kernels))
        return PASSED, f"passed, with {gpus} GPU{'s' * (gpus > 1)}" + bool(limited) * (
            f"; groups with GPU {limited}, which ends long kernels, ran the direct schedule only"
        )


def name_of(nodeid: str) -> str:
    """A stage's name: that of its function, or its parameter's."""
    function, _, parameter = nodeid.rpartition("::")[2].partition("[")
    return parameter.rstrip("]") or function.removeprefix("test_").replace("_", "-")


def has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def limit_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker("limit")
    return float(mark.args[0]) if mark else 60.0


def main(arguments: list[str] | None = None) -> int:
    settings, more = parse(arguments)
    # It may be packed; the stages that compare with NCCL get one that can be loaded.
    os.environ.pop("RINGREDUCE_NCCL", None)
    # Plugins of this machine and options of this shell change nothing.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        machine = gpu_machine.inspect(settings.nccl, Path(scratch))
        folder = scratch if settings.list else os.environ.get("OUT") or Run.build / "results"
        folder = Path(settings.out or folder).resolve()
        try:
            check = Check(settings, machine, folder)
        except OSError as error:
            print(f"the results cannot go to {folder}: {error.strerror} (--out names another)")
            return WRONG_CALL
        if not settings.list:
            print(*machine.introduction(), sep="\n", flush=True)
        for number in ENDING:
            # Signals that nohup ignores stay ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, check.end)
        status = int(pytest.main([*PYTEST, *more], plugins=[check]))
    if status == pytest.ExitCode.USAGE_ERROR:
        return WRONG_CALL
    if settings.list:
        return PASSED if status == pytest.ExitCode.NO_TESTS_COLLECTED else FAILED
    return check.conclude(status)


if __name__ == "__main__":
    sys.exit(main())
