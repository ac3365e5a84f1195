"""Real launchers for the tests: torchrun and mpirun, in an environment that none has touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from ringreduce._processes import end
from ringreduce.bench.processes import LAUNCHER_VARIABLES, find_mpirun, mpirun_command

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


def mpirun(world_size: int, *arguments: str) -> list[str]:
    """mpirun's command for a Python script; skips the test where there is none."""
    path = find_mpirun()
    if not path:
        pytest.skip("no mpirun on the PATH or beside Python (Debian: apt-get install openmpi-bin)")
    return [*mpirun_command(path, world_size), sys.executable, *arguments]


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 400.0
) -> subprocess.CompletedProcess[str]:
    """Runs a launcher to its end; after the timeout, ends it with all that it started."""
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
    except BaseException:
        end([process], grace=10.0)  # torchrun and mpirun take their ranks along
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
