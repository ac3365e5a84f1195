"""What the stages of gpu_check.py are made for, and where they build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_machine import ROOT, Tools

HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "gpu"
BUILD_LIMIT = 3600.0  # seconds: only a hang takes that long
MOST_RANKS = 16  # that ringreduce_cuda_perf takes


@dataclass(frozen=True)
class Plan:
    """What the stages are made for."""

    tools: Tools
    architectures: str
    jobs: int
    gpus: int = 1
    # Numbers of those that end long kernels (a display's, or under WSL).  Kernels that wait for
    # each other are refused in a group with such a GPU, so it runs the direct schedule only.
    end_long_kernels: tuple[int, ...] = ()
    nccl: str | None = None
    no_torch: str = ""  # why the stages with torch cannot run
    study: bool = False
    quick: bool = False
    build: Path = BUILD

    @property
    def site(self) -> Path:
        """The folder of Python packages with ringreduce."""
        return self.build / "site"

    @property
    def every(self) -> int:
        """Ranks for which all GPUs have work, two at least."""
        return min(max(2, self.gpus), MOST_RANKS)

    @property
    def with_own_gpus(self) -> str:
        """Numbers of ranks that have a GPU each, with commas; "" with one GPU."""
        numbers = {n for n in (2, 4, 8, self.every) if n <= min(self.gpus, MOST_RANKS)}
        return ",".join(map(str, sorted(numbers)))
