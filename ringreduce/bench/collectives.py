"""The collectives that can be measured: one small class each.

A class says how its buffers are filled, called (torch, MPI) and checked, and how its bus
bandwidth follows from its size. To measure another collective, add a class and list it in
`COLLECTIVES`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ringreduce.bench import oracle
from ringreduce.bench.oracle import Expected, Inputs
from ringreduce.bench.settings import Unsupported

Call = Callable[[], object]

MPI_OPS = {
    "sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row for one rank: `count` elements of `dtype` in the whole message."""

    count: int
    dtype: str
    op: str
    rank: int
    world: int


class Collective(ABC):
    """A collective with its buffers, ready to be called again and again."""

    name: ClassVar[str]
    reduces: ClassVar[bool] = False  # has a reduction operation
    has_size: ClassVar[bool] = True
    # Which public function is timed, on what; for the header.
    torch_name: ClassVar[str]

    def __init__(self, case: Case) -> None:
        self.case = case

    @staticmethod
    def busbw_factor(world: int) -> float:
        """busbw / algbw, as nccl-tests defines them."""
        return 1.0

    @staticmethod
    def fit(count: int, world: int) -> int:
        """The greatest count of elements up to `count` that this collective can move."""
        return count

    @abstractmethod
    def torch_call(self) -> Call:
        """One blocking call through torch's public interface, on the default group."""

    @abstractmethod
    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        """The same with mpi4py on NumPy views of the same buffers. Raises Unsupported."""

    def load(self, salt: int) -> None:
        """Fill the buffers for a call whose result `check` is to see."""

    def check(self, call: Call, salt: int) -> dict[str, Any]:
        """Load, call once, and compare: {"wrong": elements, "digest": of the result's bits}."""
        self.load(salt)
        call()
        wrong = sum(oracle.count_wrong(part, expected) for part, expected in self.parts(salt))
        return {"wrong": wrong, "digest": oracle.digest(self.result())}

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        """The parts of the result, each with what it must be."""
        yield from ()

    def result(self) -> torch.Tensor:
        """The tensor that must have the same bits on all ranks."""
        return torch.empty(0)

    def settle(self) -> None:
        """Fill the buffers for timing, with values that stay what they are call after call."""

    def _inputs(self, count: int, salt: int) -> Inputs:
        return Inputs(self.case.dtype, self.case.op, self.case.world, count, salt)

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=getattr(torch, self.case.dtype))


class AllReduce(Collective):
    """In place on one buffer of the whole size."""

    name = "all_reduce"
    reduces = True
    torch_name = "dist.all_reduce(t), in place on the same buffer"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tensor = self._empty(case.count)

    @staticmethod
    def busbw_factor(world: int) -> float:
        return 2 * (world - 1) / world

    def torch_call(self) -> Call:
        tensor, op = self.tensor, getattr(dist.ReduceOp, self.case.op.upper())
        return lambda: dist.all_reduce(tensor, op)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        if self.case.op not in MPI_OPS:
            raise Unsupported(f"MPI has no {self.case.op}")
        array, op = self.tensor.numpy(), getattr(mpi, MPI_OPS[self.case.op])
        return lambda: comm.Allreduce(mpi.IN_PLACE, array, op)

    def load(self, salt: int) -> None:
        oracle.fill(self.tensor, self._inputs(self.case.count, salt).of(self.case.rank))

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        yield self.tensor, oracle.expect_reduced(self._inputs(self.case.count, salt))

    def result(self) -> torch.Tensor:
        return self.tensor

    def settle(self) -> None:
        # Reduced in place again and again, other values would run to infinity (or, averaged,
        # to denormals), whose arithmetic takes another time.
        self.tensor.fill_(1 if self.case.op in ("product", "min", "max") else 0)


class Broadcast(Collective):
    """From rank 0, one buffer of the whole size."""

    name = "broadcast"
    torch_name = "dist.broadcast(t, src=0)"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tensor = self._empty(case.count)

    def torch_call(self) -> Call:
        tensor = self.tensor
        return lambda: dist.broadcast(tensor, 0)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        array = self.tensor.numpy()
        return lambda: comm.Bcast(array, 0)

    def load(self, salt: int) -> None:
        oracle.fill(self.tensor, self._inputs(self.case.count, salt).of(self.case.rank))

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        yield self.tensor, Expected(self._inputs(self.case.count, salt).of(0))

    def result(self) -> torch.Tensor:
        return self.tensor


class AllGather(Collective):
    """Every rank gives size / world bytes and gets the whole size."""

    name = "all_gather"
    torch_name = "dist.all_gather_into_tensor(out, t)"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.share = case.count // case.world
        self.mine = self._empty(self.share)
        self.all = self._empty(self.share * case.world)

    @staticmethod
    def busbw_factor(world: int) -> float:
        return (world - 1) / world

    @staticmethod
    def fit(count: int, world: int) -> int:
        return count // world * world

    def torch_call(self) -> Call:
        mine, everything = self.mine, self.all
        return lambda: dist.all_gather_into_tensor(everything, mine)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        mine, everything = self.mine.numpy(), self.all.numpy()
        return lambda: comm.Allgather(mine, everything)

    def load(self, salt: int) -> None:
        oracle.fill(self.mine, self._inputs(self.share, salt).of(self.case.rank))
        self.all.fill_(0)

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        inputs = self._inputs(self.share, salt)
        for rank in range(self.case.world):
            yield self.all[rank * self.share :][: self.share], Expected(inputs.of(rank))

    def result(self) -> torch.Tensor:
        return self.all


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
    cls.name: cls for cls in (AllReduce, Broadcast, AllGather, Barrier)
}
