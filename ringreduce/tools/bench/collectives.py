"""The list of all that can be measured, and the barrier, which has no buffers.

To measure another collective, add a class with a `name` beside its like (`reducing`, `moving`,
`point_to_point`).
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ringreduce.tools.bench import moving, point_to_point, reducing
from ringreduce.tools.bench.collective import Call, Collective


class Barrier(Collective):
    """No buffers. Right if nobody left before the last one came, by the host's clock."""

    name = "barrier"
    has_size = False
    torch_name = "dist.barrier()"

    def torch_call(self) -> Call:
        return lambda: dist.barrier()

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        return lambda: comm.Barrier()

    def check(self, call: Call, salt: int) -> dict[str, Any]:
        """Come one after the other; the controller compares the times of all ranks."""
        late = (self.case.rank + salt) % self.case.world
        time.sleep(0.02 * late / self.case.world)
        came = time.monotonic()
        call()
        return {"wrong": 0, "digest": "", "came": came, "left": time.monotonic()}


def _named(module: ModuleType) -> list[type[Collective]]:
    """The collectives that a module defines, in its order, without abstract ones."""
    return [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type)
        and issubclass(cls, Collective)
        and cls.__module__ == module.__name__
        and "name" in vars(cls)
    ]


_ALL: list[type[Collective]] = [
    *_named(reducing), *_named(moving), *_named(point_to_point), Barrier
]  # fmt: skip
COLLECTIVES: dict[str, type[Collective]] = {cls.name: cls for cls in _ALL}
