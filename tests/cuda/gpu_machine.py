"""What gpu_check.py finds on a machine: its tools, its GPUs, an NCCL to compare with.

Everything may be missing; what is missing is said, and no package is imported or installed.
"""

from __future__ import annotations

import contextlib
import datetime
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_runner import Usage

ROOT = Path(__file__).resolve().parent.parent.parent

# Where tools are that need not be in PATH.
TOOL_FOLDERS: tuple[str, ...] = (
    "/usr/local/cuda/bin",
    "/usr/local/nvidia/bin",
    "/opt/nvidia/nsight-compute/*",
    "/usr/local/cuda/nsight-compute*",
)
# The same below a folder of Python packages: nvidia-cuda-nvcc, cmake and ninja.
PACKAGE_FOLDERS: tuple[str, ...] = (
    "nvidia/cu*/bin",
    "nvidia/cuda_nvcc/bin",
    "cmake/data/bin",
    "ninja/data/bin",
)


@dataclass(frozen=True)
class Tools:
    nvcc: str | None
    cmake: str | None
    ninja: str | None
    nvidia_smi: str | None
    ncu: str | None
    compute_sanitizer: str | None
    mps_control: str | None


@dataclass
class Machine:
    tools: Tools
    gpus: list[dict[str, str]]
    no_gpu: str  # why there is none
    facts: dict[str, Any] = field(default_factory=dict)


def find_tool(name: str) -> str | None:
    """A program of that name: from PATH, or where installers and Python packages put it."""
    if found := shutil.which(name):
        return found
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    for pattern in TOOL_FOLDERS:
        folders += sorted(Path("/").glob(pattern.lstrip("/")))
    for place in package_places():
        for pattern in PACKAGE_FOLDERS:
            folders += sorted(place.glob(pattern))
    return shutil.which(name, path=os.pathsep.join(map(str, folders)))


def package_places() -> list[Path]:
    return [Path(place) for place in dict.fromkeys(sys.path) if place and Path(place).is_dir()]


def find_tools() -> Tools:
    """As the fields of Tools come."""
    names = ["nvcc", "cmake", "ninja", "nvidia-smi", "ncu", "compute-sanitizer"]
    return Tools(*map(find_tool, [*names, "nvidia-cuda-mps-control"]))


def output_of(*command: str, seconds: float = 20.0) -> str:
    """What a command prints; nothing if it fails, hangs or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=True, cwd=ROOT
        ).stdout.strip()
    return ""


def find_gpus(nvidia_smi: str | None) -> tuple[list[dict[str, str]], str]:
    """The GPUs, or why there are none."""
    if nvidia_smi is None:
        return [], "there is no nvidia-smi, which comes with the driver"
    fields = ["name", "uuid", "driver_version", "memory.total", "compute_cap", "clocks.max.sm"]
    listing = output_of(
        nvidia_smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"
    )
    gpus = []
    for line in listing.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            gpus.append(dict(zip(fields, values, strict=True)))
    return gpus, "" if gpus else f"{nvidia_smi} finds none"


def usage(nvidia_smi: str | None) -> Usage:
    """Who uses the GPUs, as far as the driver tells."""
    if nvidia_smi is None:
        return Usage()
    processes = output_of(nvidia_smi, "--query-compute-apps=pid", "--format=csv,noheader")
    memory = output_of(nvidia_smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return Usage(
        frozenset(int(line) for line in processes.split() if line.isdigit()),
        sum(int(line) for line in memory.split() if line.isdigit()),
    )


def architectures(gpus: list[dict[str, str]]) -> str:
    """What to compile for, as CMake takes it: what these GPUs are."""
    capabilities = {gpu["compute_cap"].replace(".", "") for gpu in gpus}
    if capabilities and all(map(str.isdigit, capabilities)):
        return ";".join(sorted(capabilities, key=int))
    return "native"


def inspect() -> Machine:
    tools = find_tools()
    gpus, no_gpu = find_gpus(tools.nvidia_smi)
    release = re.search(
        r"release ([\d.]+)", output_of(tools.nvcc, "--version") if tools.nvcc else ""
    )
    shown = output_of(tools.nvidia_smi) if tools.nvidia_smi else ""
    driver = re.search(r"CUDA Version: *([\d.]+)", shown)
    commit = output_of("git", "rev-parse", "HEAD") or "unknown"
    if commit != "unknown" and output_of("git", "status", "--porcelain"):
        commit += " and changes"
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(errors="replace"))
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "gpus": gpus,
        "cuda_toolkit": release.group(1) if release else None,
        "cuda_driver": driver.group(1) if driver else None,
        "nccl": None,
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    return Machine(tools, gpus, no_gpu, facts)


# --- torch --------------------------------------------------------------------------------------

TORCH = "import torch; print(torch.__version__, torch.version.cuda or 'none')"


def find_torch() -> tuple[str | None, str]:
    """The version of this Python's torch and of its CUDA, or None and why it will not do."""
    version, _, cuda = output_of(sys.executable, "-c", TORCH, seconds=60).partition(" ")
    if not cuda:
        return None, "this Python has no torch"
    if cuda == "none":
        return None, f"this Python's torch ({version}) is built without CUDA"
    return f"{version}, CUDA {cuda}", ""


# --- NCCL ---------------------------------------------------------------------------------------

VERSION_OF = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
"""


def find_nccl(given: str | None, scratch: Path) -> tuple[str | None, str]:
    """An NCCL library and its version, or None and why.

    `given` is the library, packed by xz or not, or a folder that has it.  If there is none, the one
    that Python packages brought is taken.  A packed one is unpacked into `scratch`.
    """
    if given:
        path = Path(given)
        if path.is_dir():
            found = sorted(path.glob("libnccl*.so*"))
            if not found:
                return None, f"there is no libnccl*.so* in {path}"
            path = found[-1]
        if not path.is_file():
            return None, f"there is no {path}"
        if path.suffix == ".xz":
            unpacked = scratch / "libnccl.so.2"
            try:
                with lzma.open(path) as packed, unpacked.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
            except (lzma.LZMAError, EOFError) as error:
                return None, f"{path} cannot be unpacked: {error}"
            path = unpacked
        path = path.resolve()
    else:
        places = [p / "nvidia/nccl/lib/libnccl.so.2" for p in package_places()]
        path = next((p for p in places if p.is_file()), Path())
        if not path.name:
            return None, "no NCCL to compare with (name one by --nccl or RINGREDUCE_NCCL)"
    code = output_of(sys.executable, "-c", VERSION_OF, str(path), seconds=60)
    if not code.isdigit():
        return None, f"{path} cannot be loaded as NCCL"
    number = int(code)
    return str(path), f"{number // 10000}.{number // 100 % 100}.{number % 100}"
