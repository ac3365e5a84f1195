"""What gpu_check.py finds on a machine: its tools, its GPUs, a torch, an NCCL to compare with.

Everything may be missing; what is missing is said, and no package is imported or installed.  By
itself it prints what CUDA's driver shows to a process of this user: a JSON object.  That is a
process of its own since a driver may hang or crash.  It asks libcuda by ctypes, so it sees what the
C++ programs will see (CUDA_VISIBLE_DEVICES, containers, a driver that does not start), and needs no
build.
"""

from __future__ import annotations

import contextlib
import ctypes
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOOLS = ("nvcc", "cmake", "ninja", "nvidia-smi", "ncu", "compute-sanitizer",
         "nvidia-cuda-mps-control")  # fmt: skip
# Where tools are that need not be in PATH, and the same below a folder of Python packages.
TOOL_FOLDERS: tuple[str, ...] = ("usr/local/cuda/bin", "usr/local/nvidia/bin",
    "opt/nvidia/nsight-compute/*", "usr/local/cuda/nsight-compute*")  # fmt: skip
PACKAGE_FOLDERS = ("nvidia/cu*/bin", "nvidia/cuda_nvcc/bin", "cmake/data/bin", "ninja/data/bin")
MOST_RANKS = 16  # that ringreduce_cuda_perf takes


@dataclass
class Machine:
    tools: dict[str, str | None]
    gpus: list[dict[str, Any]]
    no_gpu: str  # why there is none that programs can use
    facts: dict[str, Any]
    no_torch: str = ""  # why the stages with torch cannot run
    nccl: str | None = None
    # Numbers of GPUs that end long kernels (a display's, or under WSL).  Kernels that wait for each
    # other are refused in a group with such a GPU, so it runs the direct schedule only.
    end_long_kernels: list[int] = field(default_factory=list)

    @property
    def every(self) -> int:
        """Ranks for which all GPUs have work, two at least."""
        return min(max(2, len(self.gpus)), MOST_RANKS)

    @property
    def with_own_gpus(self) -> str:
        """Numbers of ranks that have a GPU each, with commas; "" with one GPU."""
        numbers = {n for n in (2, 4, 8, self.every) if n <= min(len(self.gpus), MOST_RANKS)}
        return ",".join(map(str, sorted(numbers)))

    @property
    def architectures(self) -> str:
        """What to compile for, as CMake takes it: what these GPUs are."""
        capabilities = {gpu["compute_cap"].replace(".", "") for gpu in self.gpus}
        return ";".join(sorted(capabilities, key=int)) if capabilities else "90"

    def users(self) -> frozenset[int]:
        """The processes that use the GPUs, as far as the driver tells."""
        found = self.smi("--query-compute-apps=pid", "--format=csv,noheader").split()
        return frozenset(int(line) for line in found if line.isdigit())

    def smi(self, *arguments: str) -> str:
        return output_of(smi, *arguments) if (smi := self.tools["nvidia-smi"]) else ""

    def introduction(self) -> list[str]:
        """What a reader of a report wants to know first."""
        no_gpu = f"; none can be used: {self.no_gpu}" * bool(self.no_gpu)
        about = {name: value for name, value in self.facts.items() if name != "gpus"}
        return [
            f"GPUs: {len(self.gpus)}{no_gpu}",
            *(f"  {number}: {gpu}" for number, gpu in enumerate(self.gpus)),
            *(f"{name}: {value}" for name, value in about.items()),
        ]


def inspect(nccl: str | None, scratch: Path) -> Machine:
    """What is here; `nccl` and `scratch` are as for find_nccl."""
    tools = {name: find_tool(name) for name in TOOLS}
    nvcc = tools["nvcc"]
    release = re.search(r"release ([\d.]+)", output_of(nvcc, "--version") if nvcc else "")
    toolkit = release.group(1) if release else None
    seen = look_apart()
    gpus = seen.get("gpus", [])
    commit = output_of("git", "rev-parse", "HEAD") or "unknown"
    if commit != "unknown" and output_of("git", "status", "--porcelain"):
        commit += " and changes"
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(errors="replace"))
    machine = Machine(tools, gpus, why_none(seen, toolkit), {})
    torch, machine.no_torch = find_torch(toolkit)
    about_nccl = "not looked for"
    if not machine.no_gpu:
        machine.nccl, about_nccl = find_nccl(nccl, scratch)
    machine.end_long_kernels = [n for n, gpu in enumerate(gpus) if gpu["ends_long_kernels"]]
    driver = machine.smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    # nvidia-smi numbers GPUs in its own way; its list names them by UUID.
    several = len(gpus) > 1
    topology = (machine.smi("-L") + "\n" + machine.smi("topo", "-m")).strip() if several else ""
    machine.facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "gpus": gpus,
        "peers": seen.get("peers", []),
        "topology": re.sub(r"\x1b\[[0-9;]*m", "", topology),
        "driver": driver[0].strip() if driver else None,
        "cuda_toolkit": toolkit,
        "cuda_driver": version_text(seen["driver"]) if seen.get("driver") else None,
        "nccl": {"path": machine.nccl, "version" if machine.nccl else "missing": about_nccl},
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch or machine.no_torch,
    }
    return machine


def find_tool(name: str) -> str | None:
    """A program of that name: from PATH, or where installers and Python packages put it."""
    if found := shutil.which(name):
        return found
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    for pattern in TOOL_FOLDERS:
        folders += sorted(Path("/").glob(pattern))
    for place in package_places():
        for pattern in PACKAGE_FOLDERS:
            folders += sorted(place.glob(pattern))
    return shutil.which(name, path=os.pathsep.join(map(str, folders)))


def package_places() -> list[Path]:
    return [Path(place) for place in dict.fromkeys(sys.path) if place and Path(place).is_dir()]


def output_of(*command: str, seconds: float = 20.0) -> str:
    """What a command prints; nothing if it fails, hangs or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=True, cwd=ROOT
        ).stdout.strip()
    return ""


# --- GPUs ---------------------------------------------------------------------------------------


def look_apart() -> dict[str, Any]:
    """What `look` finds, in a process of its own."""
    try:
        return dict(json.loads(output_of(sys.executable, __file__, seconds=60)))
    except ValueError:
        return {"error": "the driver hangs or crashes when a program asks it for GPUs"}


class Refused(Exception):
    pass


def look() -> dict[str, Any]:
    """The GPUs that the driver shows; "error" says why there is nothing to see."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"error": "there is no libcuda.so.1, which comes with the driver"}

    def call(name: str, *arguments: Any) -> None:
        if result := getattr(cuda, name)(*arguments):
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(result, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown"
            raise Refused(f"{name} gives error {result}: {said}")

    def number(name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        call(name, ctypes.byref(value), *arguments)
        return value.value

    def gpu(device: int) -> dict[str, Any]:
        name, uuid = ctypes.create_string_buffer(128), (ctypes.c_ubyte * 16)()
        size = ctypes.c_size_t()
        call("cuDeviceGetName", name, 128, device)
        call("cuDeviceGetUuid", ctypes.byref(uuid), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        h = bytes(uuid).hex()
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR and _KERNEL_EXEC_TIMEOUT.
        major, minor, limited = (number("cuDeviceGetAttribute", a, device) for a in (75, 76, 17))
        return {
            "name": name.value.decode(errors="replace"),
            "uuid": f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}",
            "memory_mib": size.value >> 20,
            "compute_cap": f"{major}.{minor}",
            "ends_long_kernels": bool(limited),
        }

    found: dict[str, Any] = {"driver": 0, "gpus": [], "peers": []}
    try:
        found["driver"] = number("cuDriverGetVersion")
        call("cuInit", 0)
        devices = [number("cuDeviceGet", i) for i in range(number("cuDeviceGetCount"))]
        found["gpus"] = [gpu(device) for device in devices]
        found["peers"] = [
            [a == b or bool(number("cuDeviceCanAccessPeer", a, b)) for b in devices]
            for a in devices
        ]
    except Refused as error:
        found["error"] = str(error)
    return found


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


# --- torch --------------------------------------------------------------------------------------

# Without an import, which can take minutes from a cold or distant disk: whether torch is found
# decides what is built, so it may not depend on a deadline.
TORCH = """
import importlib.util, pathlib, runpy
found = importlib.util.find_spec("torch")
version = runpy.run_path(str(pathlib.Path(found.origin).parent / "version.py"))
print(version["__version__"], version["cuda"] or "none")
"""


def find_torch(toolkit: str | None) -> tuple[str, str]:
    """The version of this Python's torch and of its CUDA, or "" and why nothing can be built
    against it."""
    version, _, cuda = output_of(sys.executable, "-c", TORCH, seconds=60).partition(" ")
    if not cuda:
        return "", "this Python has no torch"
    named = f"this Python's torch ({version})"
    if cuda == "none":
        return "", f"{named} is built without CUDA"
    if toolkit and cuda.split(".")[0] != toolkit.split(".")[0]:
        return "", (
            f"{named} is built with CUDA {cuda}, and nvcc is of CUDA {toolkit}, another major "
            "version"
        )
    least = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if least and major_minor(version) < major_minor(least[1]):
        return "", f"{named} is too old: {least[1]} or newer is needed"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return "", (
            f"there is no Python.h in {headers}, which extensions are compiled with (the system's "
            "package python3-dev or python3-devel has it)"
        )
    return f"{version}, CUDA {cuda}", ""


def major_minor(version: str) -> tuple[int, ...]:
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
    else:
        brought = [p / "nvidia/nccl/lib/libnccl.so.2" for p in package_places()]
        there = [p for p in brought if p.is_file()]
        if not there:
            return None, "no NCCL to compare with (name one by --nccl or RINGREDUCE_NCCL)"
        path = there[0]
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
    code = output_of(sys.executable, "-c", VERSION_OF, str(path), seconds=60)
    if not code.isdigit():
        return None, f"{path} cannot be loaded as NCCL"
    number = int(code)
    return str(path), f"{number // 10000}.{number // 100 % 100}.{number % 100}"


if __name__ == "__main__":
    json.dump(look(), sys.stdout)
