"""Starting and ending rank processes; what they wrote to stderr is kept in files."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ringreduce.core.processes import end, how_ended, is_open_mpi
from ringreduce.tools.bench.settings import Contender, Unsupported

# What torchrun tells its own ranks must not reach ours, whose groups are others.
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where rank processes report to: the same for all processes of a run."""

    folder: str
    store_port: int
    world: int
    timeout: float
    store_host: str = "127.0.0.1"

    @property
    def control(self) -> str:
        """The controller's Unix socket."""
        return str(Path(self.folder) / "control")

    def log(self, key: str, rank: int | None) -> Path:
        """Where a rank's output goes; mpirun's ranks share one file (`rank` None)."""
        return Path(self.folder) / (f"{key}.log" if rank is None else f"{key}.{rank}.log")


@dataclass
class Process:
    """A process that this one has started: a rank, or mpirun (`rank` None) with all ranks."""

    key: str
    rank: int | None
    popen: subprocess.Popen[bytes]
    log: Path

    def how_it_ended(self) -> str:
        """ "exit status 3", "signal SIGKILL"; waits a moment for it to end."""
        try:
            return how_ended(self.popen.wait(1.0))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def kill(self) -> None:
        """End the process and all that it has started, and wait for its end."""
        # mpirun ends its ranks if it is asked to. If it does not, the signal that they get at
        # their parent's death does.
        end([self.popen], grace=3.0 if self.rank is None else 0.0)


def start_rank(contender: Contender, rank: int, place: Place) -> Process:
    """Start rank `rank` of `contender`."""
    spec = _spec(contender, rank, place)
    command = [sys.executable, *contender.program, json.dumps(spec)]
    return _start(command, contender, rank, place)


def start_mpirun(contender: Contender, place: Place) -> Process:
    """Start all ranks of `contender` under mpirun. Raises Unsupported where that is missing."""
    reason = why_no_mpi()
    if reason:
        raise Unsupported(reason)
    spec = _spec(contender, None, place)
    program = [sys.executable, *contender.program, json.dumps(spec)]
    return _start([*mpirun_command(find_mpirun(), place.world), *program], contender, None, place)


def mpirun_command(mpirun: str, count: int) -> list[str]:
    """mpirun with the options for `count` ranks on this host, whose program comes after them."""
    more = ["--oversubscribe", "--bind-to", "none"] if is_open_mpi(mpirun) else []
    return [mpirun, "-n", str(count), *more]


def find_mpirun() -> str:
    """mpirun beside this Python, which is where a package's comes to lie, or on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""


def why_no_mpi() -> str:
    """Why MPI cannot be compared with, or "" if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if not find_mpirun():
        return "mpirun is not on the PATH"
    return ""


def _spec(contender: Contender, rank: int | None, place: Place) -> dict[str, object]:
    device = contender.device
    if device != "cpu" and rank is not None:
        device = f"{device}:{rank % contender.devices}"
    return {
        "key": contender.key,
        "kind": contender.kind,
        "backend": contender.backend,
        "device": device,
        "devices": contender.devices,
        "rank": rank,
        "world": place.world,
        "control": place.control,
        "store_host": place.store_host,
        "store_port": place.store_port,
        "timeout": place.timeout,
        "parent": None if rank is None else os.getpid(),
    }


def _start(command: list[str], contender: Contender, rank: int | None, place: Place) -> Process:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    environment["OMP_NUM_THREADS"] = "1"
    # Open MPI refuses to run as root without these two; containers often are.
    environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment.update(contender.environment)
    log = place.log(contender.key, rank)
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that a Ctrl-C reaches the controller only
        )
    return Process(contender.key, rank, popen, log)
