"""Real launchers for the tests: torchrun and mpirun, in an environment that none has touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from ringreduce.bench.processes import find_mpirun

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_")


def untouched(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what launchers set; one thread a rank."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in TORCHRUN and not name.startswith(PREFIXES)
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
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    options = ["-n", str(world_size)]
    if "Open MPI" in version.stdout + version.stderr:
        options += ["--oversubscribe", "--bind-to", "none"]
    return [path, *options, sys.executable, *arguments]


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
        process.terminate()  # torchrun and mpirun take their ranks along
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
