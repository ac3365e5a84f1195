"""The GPU path in PyTorch on a CUDA made of host memory: `make torch-on-fake` runs these tests.

They need torch's wheel for GPUs, the fake in place of CUDA's libraries, and ringreduce built for
both, so without the environment that `make torch-on-fake` sets none of them is collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pool import Call, Pool, World

if "/on_fake/lib/libcudart.so" not in os.environ.get("LD_PRELOAD", ""):
    collect_ignore_glob = ["test_*.py"]

# A rank's environment.  With NCCL for calls that have no kernels: test_nccl.py.
MACHINES = {
    "one GPU": {"FAKE_GPUS": "1"},
    "one GPU with MPS": {"FAKE_GPUS": "1", "FAKE_MPS": "1"},
    "four GPUs": {"FAKE_GPUS": "4", "FAKE_MULTICAST": "1", "RINGREDUCE_CUDA_OTHER": "host"},
}


@dataclass
class Machine:
    """A fake machine, and the processes that see it."""

    name: str
    pool: Pool

    def world(
        self, size: int, backend: str = "ringreduce", timeout: float = 60, **env: str
    ) -> World:
        """A group of `size` ranks on it; 0: the job makes its own."""
        return World(size, backend, tuple({**MACHINES[self.name], **env}.items()), timeout)

    def run(self, job: Any, size: int, *args: Any, **options: Any) -> list[Any]:
        """Runs a job that must succeed on every rank of such a group."""
        return self.pool.run(job, self.world(size, **options), *args)

    def start(self, job: Any, size: int, *args: Any, fresh: bool = False, **options: Any) -> Call:
        return self.pool.start(job, self.world(size, **options), *args, fresh=fresh)


# With MPS, ranks that share a GPU take the push kernels, as ranks of four GPUs do.
@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=pytest.mark.nightly) if "MPS" in name else name
        for name in MACHINES
    ],
)
def machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    folder = Path(tmp_path_factory.mktemp("ranks"))
    pool = Pool(folder, ["torch.multiprocessing", "torch.cuda", "pytest", "ringreduce", "gpu_jobs"])
    yield Machine(str(request.param), pool)
    pool.close()
