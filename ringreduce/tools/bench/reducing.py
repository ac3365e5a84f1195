"""The collectives that reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.tools.bench import oracle
from ringreduce.tools.bench.collective import Call, Case, Collective, Scattering, Traffic
from ringreduce.tools.bench.oracle import Expected
from ringreduce.tools.bench.settings import Unsupported

MPI_OPS = {
    "sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip
COALESCED = 8  # tensors in one call

# Renamed in torch 2.13, where the old name warns at every call.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def torch_op(op: str) -> Any:
    """torch's name for the operation `op`."""
    return getattr(dist.ReduceOp, op.upper())


def mpi_op(mpi: Any, op: str) -> Any:
    """mpi4py's name for the operation `op`. Raises Unsupported where it has none."""
    if op not in MPI_OPS:
        raise Unsupported(f"MPI has no {op}")
    return getattr(mpi, MPI_OPS[op])


class AllReduce(Collective):
    """In place on one buffer of the whole size."""

    name = "all_reduce"
    reduces = True
    torch_name = "dist.all_reduce(t), in place on the same buffer"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tensor = self._empty(case.count)
        self.output = self.tensor  # an engine may put another one in its place
        self.codec = ""  # and names the codec through which the values travel

    @staticmethod
    def busbw_factor(world: int) -> float:
        return 2 * (world - 1) / world

    def torch_call(self) -> Call:
        tensor, op = self.tensor, torch_op(self.case.op)
        return lambda: dist.all_reduce(tensor, op)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        array, op = self.tensor.numpy(), mpi_op(mpi, self.case.op)
        return lambda: comm.Allreduce(mpi.IN_PLACE, array, op)

    def load(self, salt: int) -> None:
        self.output.zero_()
        oracle.fill(self.tensor, self._inputs(self.case.count, salt).of(self.case.rank))

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        inputs = self._inputs(self.case.count, salt)
        expected = oracle.expect_reduced(inputs)
        yield self.output, oracle.coded(expected, inputs, self.codec) if self.codec else expected

    def error(self, salt: int) -> dict[str, float]:
        expected = oracle.expect_reduced(self._inputs(self.case.count, salt))
        return oracle.error_of(self.output, expected.reference)

    def result(self) -> torch.Tensor:
        return self.output

    def settle(self) -> None:
        # Reduced in place again and again, other values would run to infinity (or, averaged,
        # to denormals), whose arithmetic takes another time.
        self.tensor.fill_(1 if self.case.op in ("product", "min", "max") else 0)


class AllReduceCoalesced(AllReduce):
    """The same buffer as several tensors, in one call."""

    name = "all_reduce_coalesced"
    torch_name = f"{COALESCED} x dist.all_reduce(t) in dist._coalescing_manager(), in place"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tensors = [t for t in self.tensor.tensor_split(COALESCED) if t.numel()]

    def torch_call(self) -> Call:
        tensors, op = self.tensors, torch_op(self.case.op)

        # The public all_reduce_coalesced does the same and warns that it will go.
        def coalesced() -> None:
            with dist._coalescing_manager():  # type: ignore[attr-defined]
                for tensor in tensors:
                    dist.all_reduce(tensor, op)

        return coalesced

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        raise Unsupported("MPI has no coalesced all-reduce")


class Reduce(AllReduce):
    """To rank 0, in place; what the others' buffers hold afterwards is nobody's business."""

    name = "reduce"
    torch_name = "dist.reduce(t, dst=0), in place on the same buffer"

    @staticmethod
    def traffic(world: int) -> Traffic:
        return Traffic(read=1, written=1 / world, touched=1)

    @staticmethod
    def busbw_factor(world: int) -> float:
        return 1.0

    def torch_call(self) -> Call:
        tensor, op = self.tensor, torch_op(self.case.op)
        return lambda: dist.reduce(tensor, 0, op)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        array, op = self.tensor.numpy(), mpi_op(mpi, self.case.op)
        if self.case.rank == 0:
            return lambda: comm.Reduce(mpi.IN_PLACE, array, op, 0)
        return lambda: comm.Reduce(array, None, op, 0)

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        if self.case.rank == 0:
            yield from super().parts(salt)

    def result(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")


class ReduceScatter(Scattering):
    """Every rank gives the whole size and gets size / world bytes, its share of the result."""

    name = "reduce_scatter"
    reduces = True
    torch_name = f"dist.{reduce_scatter_single.__name__}(out, t)"

    @staticmethod
    def traffic(world: int) -> Traffic:
        return Traffic(read=1, written=1 / world, touched=1 + 1 / world)

    def torch_call(self) -> Call:
        mine, everything, op = self.mine, self.all, torch_op(self.case.op)
        return lambda: reduce_scatter_single(mine, everything, op)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        (mine, everything), op = self._arrays(), mpi_op(mpi, self.case.op)
        return lambda: comm.Reduce_scatter_block(everything, mine, op)

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        yield self.mine, oracle.expect_reduced(self._block(self.share, salt, self.case.rank))


class ReduceScatterList(ReduceScatter):
    """The shares as a list of tensors."""

    name = "reduce_scatter_list"
    torch_name = "dist.reduce_scatter(out, shares), shares of one buffer"

    def torch_call(self) -> Call:
        mine, shares, op = self.mine, self.shares, torch_op(self.case.op)
        return lambda: dist.reduce_scatter(mine, shares, op)
