"""What a rank reads from its machine.  It judges nothing; checks.py and network.py do.

All of it is plain numbers, texts, lists and dictionaries, so that it travels as JSON and tests can
make it up.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ringreduce import _build_info as built
from ringreduce.config import variables
from ringreduce.core.launchers import Identity

_CGROUP = Path("/sys/fs/cgroup")
_STEAL_SECONDS = 0.2
_LOOPBACK_SECONDS = 2.0
# Folders that ringreduce makes if they are not there, and those that Python takes for /tmp.
_MADE_FOLDERS = ("RINGREDUCE_DUMP", "RINGREDUCE_TIMELINE", "RINGREDUCE_METRICS")
_TEMPORARY_FOLDERS = ("TMPDIR", "TEMP", "TMP")
_SIOCGIFMTU = 0x8921  # of <linux/sockios.h>


@dataclasses.dataclass
class Facts:
    """One rank's machine, process and environment.

    A None or "" is what the system does not tell; *_error is "" where all is well.
    """

    rank: int = 0
    world_size: int = 1
    launcher: str = "none"
    host: str = ""  # its name
    machine: str = ""  # the kernel and the network namespace
    uid: int = 0

    python: str = ""
    torch: str = ""
    ringreduce: str = ""
    cuda_built: str = ""
    cuda_missing: str = ""

    # Of ringreduce.config.
    variables: list[dict[str, str]] = dataclasses.field(default_factory=list)
    unknown_variables: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)  # a few others

    # Of trial.py.
    memfd_error: str = ""
    unix_error: str = ""
    alone_error: str = ""  # of a group of this rank alone
    all_error: str | None = None  # of a group of all ranks; None: it was not tried

    file_size: int | None = None  # ulimit -f, in bytes; None: no limit
    folders: dict[str, str] = dataclasses.field(default_factory=dict)  # an error by variable
    proc: bool = True  # whether there is a /proc
    open_files: int | None = None  # ulimit -n; None: no limit
    threads_left: int | None = None  # that ulimit -u and pids.max allow; None: no limit
    memory_limit: int | None = None  # of the cgroup, bytes
    memory_free: int = 1 << 62  # that may still be used
    shm_bytes: int | None = None  # of /dev/shm

    cores: int = 1  # of the machine
    affinity: list[int] = dataclasses.field(default_factory=list)
    affinity_error: str = ""  # all cores are assumed then
    quota: float | None = None  # cores that the cgroup may use
    threads: int = 1  # of torch's operations
    nodes: list[list[int]] = dataclasses.field(default_factory=list)  # the cores of NUMA nodes
    steal: float = 0.0  # the share of time that the hypervisor took
    pressure: float = 0.0  # PSI: the share of the last minute that some thread waited for a core

    loopback_error: str = ""
    listening: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    why_there: str = ""
    listen_error: str = ""
    mtu: int = 0  # of the first interface at which it listens
    rmem: int = 0  # the largest of tcp_rmem and tcp_wmem
    wmem: int = 0
    congestions: list[str] = dataclasses.field(default_factory=list)  # that are allowed or loaded

    torch_cuda: str = ""  # that torch was built for
    gpu_driver: bool = False
    gpus: int = 0  # that torch sees
    gpu: str = ""  # the identity of the one that this rank would use; "" if that is not known
    no_peer_access: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def given(self, variable: str) -> str:
        """A variable's value, if it is set; else ""."""
        here = {o["name"]: o["value"] for o in self.variables if o["source"] == "environment"}
        return here.get(variable, "")

    @property
    def host_id(self) -> str:
        """The same for ranks that ringreduce takes for ranks of one host."""
        return self.given("RINGREDUCE_HOSTID") or self.machine


def gather(me: Identity) -> Facts:
    """Reads it all.

    Args:
        me: who this process is.

    Returns:
        The facts but those of listening (exchange.py) and of trial.py.
    """
    facts = Facts(
        rank=me.rank,
        world_size=me.world_size,
        launcher=me.launcher,
        host=socket.gethostname(),
        machine=_read("/proc/sys/kernel/random/boot_id") + _link("/proc/self/ns/net"),
        uid=os.geteuid(),
        proc=os.path.exists("/proc/self/stat"),
    )
    for read in (_versions, _variables, _limits, _folders, _memory, _cores, _network):
        read(facts)
    _gpus(facts, me)
    return facts


def _read(path: str | Path) -> str:
    """A file's text without blanks around it; "" where the system has no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    """Where a link leads; "" where the system has no such link."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _versions(facts: Facts) -> None:
    facts.python = platform.python_version()
    facts.torch = torch.__version__
    facts.torch_cuda = torch.version.cuda or ""
    facts.ringreduce = importlib.metadata.version("ringreduce")
    facts.cuda_built, facts.cuda_missing = built.CUDA, built.CUDA_MISSING


def _variables(facts: Facts) -> None:
    given = {name for name in os.environ if name.startswith("RINGREDUCE_")}
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", *_MADE_FOLDERS, *_TEMPORARY_FOLDERS)
    facts.environment = {name: os.environ[name] for name in names if name in os.environ}
    facts.variables = variables()
    facts.unknown_variables = sorted(given - {row["name"] for row in facts.variables})


def _limits(facts: Facts) -> None:
    files, threads, size = (
        resource.getrlimit(kind)[0]
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    )
    facts.open_files = None if files == resource.RLIM_INFINITY else files
    facts.file_size = None if size == resource.RLIM_INFINITY else size
    # ulimit -u does not bind root.
    left = [] if facts.uid == 0 or threads == resource.RLIM_INFINITY else [threads]
    for folder in _cgroups("pids"):
        most = _number(_read(folder / "pids.max"))
        if most is not None:
            left.append(most - (_number(_read(folder / "pids.current")) or 0))
    facts.threads_left = min(left, default=None)


def _error_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _folders(facts: Facts) -> None:
    """Whether files can be made where the variables say."""
    for name in (*_MADE_FOLDERS, *_TEMPORARY_FOLDERS):
        if given := os.environ.get(name):
            folder = _existing(given) if name in _MADE_FOLDERS else Path(given)
            facts.folders[name] = _error_of(functools.partial(_try_folder, folder))
    named = any(name in facts.folders for name in _TEMPORARY_FOLDERS)
    if not named and facts.file_size != 0:  # Python's choice is /tmp, or another in its place
        facts.folders[_TEMPORARY_FOLDERS[0]] = _error_of(tempfile.gettempdir)


def _existing(folder: str) -> Path:
    """The folder, or the one in which it would be made."""
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _try_folder(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name, or removed again
        file.write(b"0")


def _cgroups(controller: str) -> list[Path]:
    """The folders of this process's cgroup and of those above it, in version 1 or 2."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _CGROUP / controllers if controllers else _CGROUP
        # A container may see its own cgroup as the top, and a path from outside.
        folders = [top, *(top / part for part in _below(path))]
        found = [folder for folder in folders if folder.is_dir()]
        if controllers or (top / "cgroup.controllers").exists():
            return found
    return []


def _below(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def _memory(facts: Facts) -> None:
    meminfo = dict(re.findall(r"^(\w+): +(\d+) kB", _read("/proc/meminfo"), re.M))
    total = int(meminfo.get("MemTotal", 1 << 52)) << 10
    facts.memory_free = int(meminfo.get("MemAvailable", 1 << 52)) << 10
    for folder in _cgroups("memory"):
        limit, used = (  # version 2's names, or those of version 1
            _number(_read(folder / new) or _read(folder / old))
            for new, old in (
                ("memory.max", "memory.limit_in_bytes"),
                ("memory.current", "memory.usage_in_bytes"),
            )
        )
        if limit is None or limit >= total:
            continue
        # Version 1 tells its own first, and then (total_) that of the cgroups below, too.
        stat = _read(folder / "memory.stat")
        cached = dict(re.findall(r"^(?:total_)?((?:in)?active_file) (\d+)", stat, re.M))
        free = limit - (used or 0) + sum(map(int, cached.values()))
        facts.memory_limit = min(limit, facts.memory_limit or limit)
        facts.memory_free = min(free, facts.memory_free)
    with contextlib.suppress(OSError):  # there may be none
        shm = os.statvfs("/dev/shm")
        facts.shm_bytes = shm.f_blocks * shm.f_frsize


def _cores(facts: Facts) -> None:
    before = _times()
    facts.cores = os.cpu_count() or 1
    try:
        facts.affinity = sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError) as error:  # AttributeError: of a Python without it
        facts.affinity = list(range(facts.cores))
        facts.affinity_error = getattr(error, "strerror", None) or str(error)
    facts.threads = torch.get_num_threads()
    for folder in _cgroups("cpu"):
        text = _read(folder / "cpu.max") or " ".join(
            _read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
        )
        if share := re.fullmatch(r"(\d+) (\d+)", text):
            facts.quota = min(int(share[1]) / int(share[2]), facts.quota or float("inf"))
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    facts.nodes = [cores for node in nodes if (cores := parse_list(_read(node)))]
    # Not of the last 10 s, in which the ranks themselves have started.
    some = re.search(r"some .*avg60=([\d.]+)", _read("/proc/pressure/cpu"))
    facts.pressure = float(some[1]) / 100 if some else 0.0
    time.sleep(_STEAL_SECONDS)
    passed = [b - a for a, b in zip(before, _times(), strict=True)]
    facts.steal = passed[-1] / max(1, sum(passed))


def _times() -> list[int]:
    """The machine's times by kind, the eighth of which is that of the hypervisor."""
    first = _read("/proc/stat").partition("\n")[0].split()
    return [int(text) for text in first[1:9]] or [0]


def parse_list(text: str) -> list[int]:
    """The numbers of a kernel's list: "0-2,8" is 0, 1, 2, 8."""
    ends = [part.split("-") for part in text.split(",") if part]
    return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]


def _network(facts: Facts) -> None:
    for name in ("rmem", "wmem"):
        sizes = _read(f"/proc/sys/net/ipv4/tcp_{name}").split()
        setattr(facts, name, int(sizes[-1]) if sizes else 0)
    facts.congestions = _read("/proc/sys/net/ipv4/tcp_available_congestion_control").split()

    facts.loopback_error = _error_of(_try_loopback)


def _try_loopback() -> None:
    """Connects to this process, by whichever address a loopback interface has."""
    for family, address in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")):
        try:
            with socket.create_server((address, 0), family=family) as listener:
                place = listener.getsockname()[:2]
                socket.create_connection(place, timeout=_LOOPBACK_SECONDS).close()
                return
        except OSError:
            if family == socket.AF_INET:
                raise


def mtu_of(interface: str) -> int:
    # Not of /sys, which shows the network namespace in which it was mounted.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFMTU, struct.pack("256s", interface.encode()))
    return int(struct.unpack_from("i", answer, 16)[0])


def _gpus(facts: Facts, me: Identity) -> None:
    facts.gpu_driver = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    if not facts.torch_cuda or not torch.cuda.is_available():
        return
    facts.gpus = torch.cuda.device_count()
    if me.local_rank is not None:
        mine = me.local_rank % facts.gpus
        facts.gpu = str(getattr(torch.cuda.get_device_properties(mine), "uuid", mine))
    pairs = itertools.permutations(range(facts.gpus), 2)
    can = torch.cuda.can_device_access_peer
    facts.no_peer_access = [(a, b) for a, b in pairs if not can(a, b)]
