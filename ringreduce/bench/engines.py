"""How a rank process calls a collective: through torch.distributed, through MPI, or not at
all but scaling its own buffer (the roofline)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ringreduce.bench.collective import Call, Collective, item_size
from ringreduce.bench.settings import Unsupported


class Engine(Protocol):
    """What a rank process needs of a contender."""

    rank: int

    def call(self, collective: Collective) -> Call:
        """What is timed, bound to the buffers of `collective`. Raises Unsupported."""

    def barrier(self) -> None:
        """Wait for all ranks of this contender."""

    def about(self) -> dict[str, Any]:
        """What the contender says about itself, for the header and the JSON."""

    def close(self) -> None:
        """Leave the group."""


class TorchEngine:
    """A process group of torch.distributed with the given backend."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank: int = spec["rank"]
        self.backend: str = spec["backend"]
        timeout = timedelta(seconds=spec["timeout"])
        store = TCPStore("127.0.0.1", spec["store_port"], None, False, timeout)
        dist.init_process_group(
            self.backend,
            store=PrefixStore(spec["key"], store),
            rank=self.rank,
            world_size=spec["world"],
            timeout=timeout,
        )

    def call(self, collective: Collective) -> Call:
        return collective.torch_call()

    def barrier(self) -> None:
        dist.barrier()

    def about(self) -> dict[str, Any]:
        if self.backend != "ringreduce":
            return {}
        library = importlib.import_module("ringreduce")
        return {
            "version": str(library.__version__),
            "isa": str(library.instruction_set()),
            "staging_bytes": int(library.staging_bytes()),
        }

    def close(self) -> None:
        dist.destroy_process_group()


class RooflineEngine(TorchEngine):
    """No collective: every rank scales its own buffer in place, all at the same time.

    Each byte is read once and written once, which no in-place all-reduce can undercut. The
    buffer is scaled as float32 whatever the dtype, since the roofline is memory's and not
    that of some conversion.
    """

    def call(self, collective: Collective) -> Call:
        size = collective.case.count * item_size(collective.case.dtype)
        buffer = torch.ones(max(1, size // 4), dtype=torch.float32)
        return lambda: buffer.mul_(1.0)


class MpiEngine:
    """MPI_COMM_WORLD through mpi4py, on NumPy views of the buffers."""

    def __init__(self, spec: dict[str, Any]) -> None:
        # mpi4py is optional, so that it is imported by name and not seen by type checkers.
        self.mpi: Any = importlib.import_module("mpi4py.MPI")
        self.comm: Any = self.mpi.COMM_WORLD
        self.rank = int(self.comm.Get_rank())
        size = int(self.comm.Get_size())
        if size != spec["world"]:
            raise Unsupported(
                f"mpi4py found {size} rank(s) and not {spec['world']}: mpirun belongs to "
                "another MPI than the one mpi4py is linked to"
            )

    def call(self, collective: Collective) -> Call:
        if collective.case.dtype in ("float16", "bfloat16"):
            raise Unsupported(f"MPI has no {collective.case.dtype}")
        return collective.mpi_call(self.mpi, self.comm)

    def barrier(self) -> None:
        self.comm.Barrier()

    def about(self) -> dict[str, Any]:
        return {"version": str(self.mpi.Get_library_version()).split(",")[0].strip("\0\n ")}

    def close(self) -> None:
        self.mpi.Finalize()


def make_engine(spec: dict[str, Any]) -> Engine:
    """The engine of `spec["kind"]`, its group set up; waits for the other ranks."""
    engines: dict[str, Callable[[dict[str, Any]], Engine]] = {
        "torch": TorchEngine,
        "roofline": RooflineEngine,
        "mpi": MpiEngine,
    }
    return engines[spec["kind"]](spec)
