"""What the benchmark ran on, for the header and the JSON."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from ringreduce.core.gpu import loaded_nccl


def describe_machine() -> dict[str, str | int]:
    """CPU model, cores this process may use, memory, kernel, Python and torch versions."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_gpus(names: list[str]) -> dict[str, object]:
    """The ranks' GPUs, by rank, and the versions of CUDA and NCCL."""
    nccl = loaded_nccl()
    return {
        "gpus": names,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, nccl)) if nccl else "",
    }


def cpu_model() -> str:
    """The CPU's name, as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {name.strip(): value.strip() for name, value in fields.items()}
    return names.get("model name") or names.get("CPU part") or platform.machine()
