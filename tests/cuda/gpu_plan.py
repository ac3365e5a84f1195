"""What the stages of gpu_check.py are made for, and where they build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_machine import ROOT, Tools

HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "gpu"


@dataclass(frozen=True)
class Plan:
    """What the stages are made for."""

    tools: Tools
    architectures: str
    jobs: int
    nccl: str | None = None
    no_torch: str = ""  # why the stages with torch cannot run
    study: bool = False
    build_limit: float = 240
    build: Path = BUILD

    @property
    def site(self) -> Path:
        """The folder of Python packages with ringreduce."""
        return self.build / "site"
