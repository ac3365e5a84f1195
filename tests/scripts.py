"""Training scripts in ranks of the pool, whose torch is loaded, with the variables of torchrun."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from conftest import MakeWorld
from launchers import environment
from pool import Pool, Rank

DEADLINE = 400.0  # seconds; a script takes about one


def run_script(me: Rank, script: str, arguments: list[str], env: dict[str, str]) -> str:
    """A rank's job: runs a script as `python script`, and returns what it printed."""
    output = io.StringIO()
    argv, path = sys.argv, sys.path
    sys.argv = [script, *(a.format(rank=me.rank) for a in arguments)]
    sys.path = [str(Path(script).parent), *path]
    try:
        with environment({**env, "RANK": str(me.rank)}), contextlib.redirect_stdout(output):
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path = argv, path
    assert not dist.is_initialized()
    return output.getvalue()


def as_by_torchrun(
    pool: Pool, world: MakeWorld, script: Path, size: int, *arguments: str, **env: str
) -> list[str]:
    """What each rank printed, as if torchrun had started the script."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        # The store lives here, not in rank 0, as it does with torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **env,
    }
    return in_pool(pool, world, script, size, *arguments, **variables)


def in_pool(
    pool: Pool, world: MakeWorld, script: Path, size: int, *arguments: str, **env: str
) -> list[str]:
    """The same with no variables but RANK and those of `env`, in processes of its own."""
    job = (str(script), list(arguments), env)
    return pool.start(run_script, world(0), *job, ranks=size, fresh=True).results(DEADLINE)
