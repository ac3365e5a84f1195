"""What came of the tests: Gloo's, which are kept, and ours beside them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import exceptions

HERE = Path(__file__).resolve().parent
# How the line of a traceback begins that names the exception.
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")


@dataclasses.dataclass(frozen=True)
class Result:
    """One test: `outcome` is pass, skip or fail; `why` is empty for a pass."""

    outcome: str
    seconds: float
    why: str

    @property
    def gist(self) -> str:
        """The exception at the end of a traceback, or the reason as it is."""
        lines = [line.strip() for line in self.why.splitlines() if line.strip()]
        errors = [i for i, line in enumerate(lines) if ERROR.match(line)]
        gist = " ".join(lines[errors[-1] :] if errors else lines)
        return gist.split(" To execute this test")[0][:300]


Results = Mapping[str, Result]

# What CUDA and torch say of the number of a GPU that is not there.
NO_SUCH_DEVICE = ("invalid device ordinal", "do you have enough GPUs?", "device < num_gpus")


def without_a_device(result: Result) -> Result:
    """A failure for want of a GPU for each rank is a skip."""
    if result.outcome == "fail" and any(text in result.why for text in NO_SUCH_DEVICE):
        return Result("skip", result.seconds, "it needs a GPU for each rank")
    return result


def baseline_path(torch_version: str) -> Path:
    """Where Gloo's results are; builds of one torch ("+cpu" and the like) share them."""
    return HERE / f"gloo-{torch_version.split('+')[0]}.json"


def save(path: Path, by_world: Mapping[int, Results]) -> None:
    """Writes one line a test: each result with the numbers of ranks that had it."""
    lines = []
    for name in sorted({name for results in by_world.values() for name in results}):
        found: dict[tuple[str, str], list[str]] = {}
        for world, results in sorted(by_world.items()):
            if result := results.get(name):
                found.setdefault((result.outcome, result.gist), []).append(str(world))
        worlds = {" ".join(worlds): kept for kept, worlds in found.items()}
        lines.append(f"  {json.dumps(name)}: {json.dumps(worlds)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path) -> dict[int, dict[str, Result]]:
    """What `save` wrote, by the number of ranks; nothing if there is no such file."""
    by_world: dict[int, dict[str, Result]] = {}
    for name, found in json.loads(path.read_text()).items() if path.exists() else ():
        for worlds, (outcome, why) in found.items():
            for world in worlds.split():
                by_world.setdefault(int(world), {})[name] = Result(outcome, 0.0, why)
    return by_world


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Names of tests by what is to be said of them."""

    failed: list[str]
    missing: list[str]  # skipped here, though Gloo runs them
    excepted: list[str]  # of both kinds, but on the list of exceptions
    needless: list[str]  # exceptions that pass

    @property
    def good(self) -> bool:
        return not self.failed and not self.missing


def judge(ours: Results, gloo: Results, listed: Mapping[str, str] | None = None) -> Verdict:
    """Compares; `listed` are the exceptions with their causes, those of exceptions.py if None."""
    listed = exceptions.EXCEPTIONS if listed is None else listed
    failed = [name for name, result in ours.items() if result.outcome == "fail"]
    missing = [
        name
        for name, theirs in gloo.items()
        if theirs.outcome == "pass" and (name not in ours or ours[name].outcome == "skip")
    ]
    return Verdict(
        failed=[name for name in failed if name not in listed],
        missing=[name for name in missing if name not in listed],
        excepted=[name for name in failed + missing if name in listed],
        needless=[name for name in listed if name in ours and ours[name].outcome == "pass"],
    )


def table(ours: Results, gloo: Results) -> str:
    """Passed, failed and skipped beside Gloo's, of torch's tests and of those beyond them."""
    lines = [f"{'':34}{'ringreduce':>12}{'gloo':>8}"]
    for title, beyond in (("torch's tests", False), ("further ones, for the CPU", True)):
        for number, outcome in enumerate(("pass", "fail", "skip")):
            counts = [
                sum(
                    result.outcome == outcome and name.startswith("beyond.") == beyond
                    for name, result in results.items()
                )
                for results in (ours, gloo)
            ]
            label = {"pass": "passed", "fail": "failed", "skip": "skipped"}[outcome]
            left = f"{'' if number else title:26}{label:8}"
            lines.append(f"{left}{counts[0]:>12}{counts[1]:>8}")
    return "\n".join(lines)
