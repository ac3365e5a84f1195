"""Real launchers for the tests: torchrun and mpirun, in an environment that none has touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from ringreduce.core.processes import end, is_open_mpi
from ringreduce.tools.bench.processes import LAUNCHER_VARIABLES, find_mpirun, mpirun_command

PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_")


def untouched(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what launchers set; one thread a rank."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(PREFIXES)
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


@contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """os.environ as if a launcher had set `env`, and no other; as it was, afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update({**untouched(before), **env})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def torchrun(world_size: int, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc-per-node={world_size}", *arguments]


# What MPI's packages call their launchers where several are installed, and the package.
MPIRUNS = {
    "Open MPI": (["mpirun.openmpi", "mpiexec.openmpi"], "openmpi-bin"),
    "MPICH": (["mpirun.mpich", "mpiexec.mpich", "mpiexec.hydra"], "mpich"),
}


def mpirun(world_size: int, *arguments: str, kind: str = "") -> list[str]:
    """mpirun's command for a Python script; skips the test where there is none.

    `kind`: "Open MPI" or "MPICH"; the first on the PATH otherwise.  Options of mpirun may precede
    the script.
    """
    path = find_mpirun()
    if kind:
        names, package = MPIRUNS[kind]
        found = next(filter(None, map(shutil.which, names)), "")
        if found or not path or is_open_mpi(path) != (kind == "Open MPI"):
            path = found
        if not path:
            pytest.skip(f"no {kind} on the PATH (Debian: apt-get install {package})")
    if not path:
        pytest.skip("no mpirun on the PATH or beside Python (Debian: apt-get install openmpi-bin)")
    at = next((i for i, word in enumerate(arguments) if word.endswith(".py")), 0)
    command = [*mpirun_command(path, world_size), *arguments[:at]]
    return [*command, sys.executable, *arguments[at:]]


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """Runs a launcher to its end.

    After the timeout it is ended with all that it started, and the test fails with all that was
    written.
    """
    # Open MPI refuses to run as root, which one is in a container, without these.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.Popen(
        command,
        env={**untouched(), **root, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:
        end([process], grace=10.0)  # a launcher takes its ranks along
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"{command} did not end in {timeout:.0f} s:\n{out}\n{err}")
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
