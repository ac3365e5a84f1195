"""The list of all that can be measured, and the barrier, which has no buffers.

To measure another collective, add a class beside its like (`reducing`, `moving`,
`point_to_point`) and list it in `COLLECTIVES`.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from ringreduce.bench import moving, point_to_point, reducing
from ringreduce.bench.collective import Call, Collective


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


COLLECTIVES: dict[str, type[Collective]] = {
    cls.name: cls
    for cls in (
        reducing.AllReduce,
        reducing.AllReduceCoalesced,
        reducing.Reduce,
        reducing.ReduceScatter,
        reducing.ReduceScatterList,
        moving.Broadcast,
        moving.AllGather,
        moving.AllGatherList,
        moving.Gather,
        moving.Scatter,
        moving.AllToAll,
        moving.AllToAllList,
        moving.AllToAllUneven,
        point_to_point.SendRecv,
        point_to_point.Exchange,
        Barrier,
    )
}
