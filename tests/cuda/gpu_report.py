"""What came of a run of gpu_check.py: a file that is whole at any time, and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Lines = list[Line]


@dataclass
class Result:
    name: str
    status: str  # ok, failed, timeout or skipped
    reason: str = ""
    seconds: float = 0.0
    figure: str = ""
    commands: list[str] = field(default_factory=list)
    measurements: Lines = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return self.status + (f": {self.reason}" if self.reason else "")


class Report:
    """What a run has found so far, in a file that is whole at any time."""

    def __init__(self, folder: Path, machine: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu-check.json"
        self.log = folder / "gpu-check.log"
        self.log.write_text("")
        self.machine = dict(machine)
        self.results: list[Result] = []
        self.write()

    def add(self, result: Result) -> None:
        self.results.append(result)
        self.write()
        # The log says why a stage has no output, too.
        with self.log.open("a") as log:
            log.write(f"=== {result.name}: {result.verdict}\n")

    def write(self) -> None:
        stages = [asdict(result) for result in self.results]
        content = {"machine": self.machine, "stages": stages}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self.path)

    def count(self, *statuses: str) -> int:
        return sum(result.status in statuses for result in self.results)

    def table(self) -> str:
        rows = [("stage", "verdict", "seconds", "")]
        for result in self.results:
            says = result.figure if result.status == "ok" else result.reason
            rows.append((result.name, result.status, f"{result.seconds:.1f}", says[:300]))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip()
            for a, b, c, d in rows
        ]
        return "\n".join(lines)
