"""What gpu_check.py finds on a machine: its tools, its GPUs, an NCCL to compare with.

Everything may be missing; what is missing is said, and no package is imported or installed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
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
    gpus: list[dict[str, Any]]
    no_gpu: str  # why there is none that programs can use
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


def look() -> dict[str, Any]:
    """What gpu_look.py finds."""
    program = Path(__file__).resolve().parent / "gpu_look.py"
    try:
        return dict(json.loads(output_of(sys.executable, str(program), seconds=60)))
    except ValueError:
        return {"error": "the driver hangs or crashes when a program asks it for GPUs"}


def why_none(seen: dict[str, Any], toolkit: str | None) -> str:
    """Why no program can use a GPU here; "" if one can."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen.get("gpus") or "error" in seen:
        why = str(seen.get("error", ""))
    else:
        why = "the driver finds none"
    if why and hidden is not None:
        why += f" (CUDA_VISIBLE_DEVICES is {hidden!r} and hides all that it does not name)"
    driver, major = int(seen.get("driver", 0)), int(toolkit.split(".")[0]) if toolkit else 0
    if 0 < driver < 1000 * major:
        why = (
            f"the driver is too old: it serves CUDA {version_text(driver)} at most, and the nvcc "
            f"that is used makes programs for CUDA {toolkit}.  Update the driver, or put an nvcc "
            f"of CUDA {driver // 1000} first in PATH"
        )
    return why


def version_text(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def links(nvidia_smi: str | None, gpus: list[dict[str, Any]]) -> dict[str, str]:
    """How pairs of these GPUs are connected, as nvidia-smi's matrix says it: {"0-1": "NV18"}."""
    if nvidia_smi is None or len(gpus) < 2:
        return {}
    listing = output_of(nvidia_smi, "--query-gpu=index,uuid", "--format=csv,noheader")
    rows = [line.split(", ") for line in listing.splitlines()]
    index = {row[1].strip(): f"GPU{row[0].strip()}" for row in rows if len(row) == 2}
    names = [index.get(gpu["uuid"], "") for gpu in gpus]
    matrix = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in
              output_of(nvidia_smi, "topo", "-m").splitlines()]  # fmt: skip
    header = next((row for row in matrix if row[:1] == ["GPU0"]), [])
    cells = {row[0]: dict(zip(header, row[1:], strict=False)) for row in matrix[1:] if row}
    found = {}
    for i, a in enumerate(names):
        for j, b in enumerate(names[i + 1 :], i + 1):
            if b in cells.get(a, {}):
                found[f"{i}-{j}"] = cells[a][b]
    return found


# What nvidia-smi calls connections without NVLink.
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")


def topology(gpus: int, kinds: dict[str, str]) -> str:
    """One line about the connections."""
    if gpus < 2:
        return "one GPU, no connections"
    if not kinds:
        return "unknown (nvidia-smi topo -m says nothing of these GPUs)"
    by: dict[str, list[str]] = {}
    for pair, kind in kinds.items():
        by.setdefault(kind, []).append(pair)
    parts = []
    for kind, pairs in by.items():
        bus = "NVLink" if kind.startswith("NV") else "PCIe" if kind in PCIE else "other"
        where = "all pairs" if len(by) == 1 else ", ".join(pairs)
        parts.append(f"{bus} ({kind}) between {where}")
    return "; ".join(parts)


def peer_access(peers: list[list[bool]]) -> str:
    """One line about who can reach whose memory."""
    if len(peers) < 2:
        return "one GPU, no peers"
    pairs = [(a, b) for b in range(len(peers)) for a in range(b)]
    refused = [f"{a}-{b}" for a, b in pairs if not (peers[a][b] and peers[b][a])]
    if not refused:
        return "between all pairs"
    if len(refused) == len(pairs):
        return "none: data between GPUs passes through the host's memory"
    return f"not between {', '.join(refused)}: data of all pairs may pass through the host's memory"


def usage(nvidia_smi: str | None) -> frozenset[int]:
    """The processes that use the GPUs, as far as the driver tells."""
    if nvidia_smi is None:
        return frozenset()
    processes = output_of(nvidia_smi, "--query-compute-apps=pid", "--format=csv,noheader")
    return frozenset(int(line) for line in processes.split() if line.isdigit())


def architectures(gpus: list[dict[str, Any]]) -> str:
    """What to compile for, as CMake takes it: what these GPUs are."""
    capabilities = {gpu["compute_cap"].replace(".", "") for gpu in gpus}
    return ";".join(sorted(capabilities, key=int)) if capabilities else "90"


def end_long_kernels(gpus: list[dict[str, Any]]) -> tuple[int, ...]:
    """The numbers of the GPUs that end kernels which take long."""
    return tuple(number for number, gpu in enumerate(gpus) if gpu["ends_long_kernels"])


def inspect() -> Machine:
    tools = find_tools()
    release = re.search(
        r"release ([\d.]+)", output_of(tools.nvcc, "--version") if tools.nvcc else ""
    )
    toolkit = release.group(1) if release else None
    seen = look()
    gpus = seen.get("gpus", [])
    smi = tools.nvidia_smi
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    driver = output_of(smi, *query).splitlines() if smi else []
    commit = output_of("git", "rev-parse", "HEAD") or "unknown"
    if commit != "unknown" and output_of("git", "status", "--porcelain"):
        commit += " and changes"
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(errors="replace"))
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "gpus": gpus,
        "peers": seen.get("peers", []),
        "links": links(smi, gpus),
        "driver": driver[0].strip() if driver else None,
        "cuda_toolkit": toolkit,
        "cuda_driver": version_text(seen["driver"]) if seen.get("driver") else None,
        "nccl": None,
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    return Machine(tools, gpus, why_none(seen, toolkit), facts)


# --- torch --------------------------------------------------------------------------------------

# Without an import, which can take minutes from a cold or distant disk: whether torch is found
# decides what is built, so it may not depend on a deadline.
TORCH = """
import importlib.util, pathlib, runpy
found = importlib.util.find_spec("torch")
version = runpy.run_path(str(pathlib.Path(found.origin).parent / "version.py"))
print(version["__version__"], version["cuda"] or "none")
"""


def find_torch(toolkit: str | None) -> tuple[str | None, str]:
    """The version of this Python's torch and of its CUDA, or None and why nothing can be built
    against it."""
    version, _, cuda = output_of(sys.executable, "-c", TORCH, seconds=60).partition(" ")
    if not cuda:
        return None, "this Python has no torch"
    if cuda == "none":
        return None, f"this Python's torch ({version}) is built without CUDA"
    if toolkit and cuda.split(".")[0] != toolkit.split(".")[0]:
        return None, (
            f"this Python's torch ({version}) is built with CUDA {cuda}, and nvcc is of CUDA "
            f"{toolkit}, another major version"
        )
    least = least_torch()
    if version_numbers(version) < version_numbers(least):
        return None, f"this Python's torch ({version}) is too old: {least} or newer is needed"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return None, (
            f"there is no Python.h in {headers}, which extensions are compiled with (the system's "
            "package python3-dev or python3-devel has it)"
        )
    return f"{version}, CUDA {cuda}", ""


def least_torch() -> str:
    """The oldest torch that ringreduce works with."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return found.group(1) if found else "0.0"


def version_numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


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
