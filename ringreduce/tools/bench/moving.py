"""The collectives that only move bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.tools.bench import oracle
from ringreduce.tools.bench.collective import (
    Call,
    Case,
    Collective,
    Gathering,
    InShares,
    Scattering,
    Traffic,
)
from ringreduce.tools.bench.oracle import Expected

# Renamed in torch 2.13, where the old name warns at every call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Broadcast(Collective):
    """From rank 0, one buffer of the whole size."""

    name = "broadcast"
    torch_name = "dist.broadcast(t, src=0)"

    @staticmethod
    def traffic(world: int) -> Traffic:
        return Traffic(read=1 / world, written=1 - 1 / world, touched=1)

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


class AllGather(Gathering):
    """Every rank gives size / world bytes and gets the whole size."""

    name = "all_gather"
    torch_name = f"dist.{all_gather_single.__name__}(out, t)"

    @staticmethod
    def traffic(world: int) -> Traffic:
        return Traffic(read=1 / world, written=1, touched=1 + 1 / world)

    def torch_call(self) -> Call:
        mine, everything = self.mine, self.all
        return lambda: all_gather_single(everything, mine)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        mine, everything = self._arrays()
        return lambda: comm.Allgather(mine, everything)

    def result(self) -> torch.Tensor:
        return self.all


class AllGatherList(AllGather):
    """The whole as a list of tensors."""

    name = "all_gather_list"
    torch_name = "dist.all_gather(shares, t), shares of one buffer"

    def torch_call(self) -> Call:
        mine, shares = self.mine, self.shares
        return lambda: dist.all_gather(shares, mine)


class Gather(Gathering):
    """Every rank gives size / world bytes, and rank 0 gets the whole size."""

    name = "gather"
    torch_name = "dist.gather(t, shares, dst=0), shares of one buffer"
    rooted = True

    def torch_call(self) -> Call:
        mine, shares = self.mine, self.shares or None
        return lambda: dist.gather(mine, shares, 0)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        mine, everything = self._arrays()
        return lambda: comm.Gather(mine, everything, 0)


class Scatter(Scattering):
    """Rank 0 gives the whole size, and every rank gets size / world bytes."""

    name = "scatter"
    torch_name = "dist.scatter(t, shares, src=0), shares of one buffer"
    rooted = True

    def torch_call(self) -> Call:
        mine, shares = self.mine, self.shares or None
        return lambda: dist.scatter(mine, shares, 0)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        mine, everything = self._arrays()
        return lambda: comm.Scatter(everything, mine, 0)

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        yield self.mine, Expected(self._block(self.share, salt, self.case.rank).of(0))


class AllToAll(InShares):
    """Every rank gives the whole size, a share to each rank, and gets as much."""

    name = "all_to_all"
    torch_name = "dist.all_to_all_single(out, t)"

    @staticmethod
    def traffic(world: int) -> Traffic:
        return Traffic(read=1, written=1, touched=2)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.sizes_to, self.sizes_from = self.split_sizes()
        self.given = self._empty(sum(self.sizes_to))
        self.got = self._empty(sum(self.sizes_from))
        self.to = list(torch.split(self.given, self.sizes_to))
        self.origin = list(torch.split(self.got, self.sizes_from))

    def split_sizes(self) -> tuple[list[int], list[int]]:
        """How many elements go to each rank, and come from each."""
        sizes = [self.share] * self.case.world
        return sizes, sizes

    def torch_call(self) -> Call:
        given, got = self.given, self.got
        return lambda: dist.all_to_all_single(got, given)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        given, got = self.given.numpy(), self.got.numpy()
        return lambda: comm.Alltoall(given, got)

    def load(self, salt: int) -> None:
        for receiver, piece in enumerate(self.to):
            oracle.fill(piece, self._block(piece.numel(), salt, receiver).of(self.case.rank))
        self.got.fill_(0)

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        for sender, piece in enumerate(self.origin):
            inputs = self._block(piece.numel(), salt, self.case.rank)
            yield piece, Expected(inputs.of(sender))


class AllToAllList(AllToAll):
    """Both sides as lists of tensors."""

    name = "all_to_all_list"
    torch_name = "dist.all_to_all(outs, ts), pieces of one buffer each"

    def torch_call(self) -> Call:
        to, origin = self.to, self.origin
        return lambda: dist.all_to_all(origin, to)


class AllToAllUneven(AllToAll):
    """One unit to the rank itself, two to the next, three to the one after it, and so on.

    So every rank gives and gets the whole size, and keeps one unit of it.
    """

    name = "all_to_all_uneven"
    torch_name = "dist.all_to_all_single(out, t, splits, splits), 1, 2, ... parts to the next ranks"

    @staticmethod
    def busbw_factor(world: int) -> float:
        return 1 - 1 / AllToAllUneven.units(world)

    @staticmethod
    def fit(count: int, world: int) -> int:
        units = AllToAllUneven.units(world)
        return count // units * units

    @staticmethod
    def units(world: int) -> int:
        """How many units make the whole."""
        return world * (world + 1) // 2

    def split_sizes(self) -> tuple[list[int], list[int]]:
        world, rank = self.case.world, self.case.rank
        unit = self.case.count // self.units(world)
        to = [unit * (1 + (peer - rank) % world) for peer in range(world)]
        return to, [unit * (1 + (rank - peer) % world) for peer in range(world)]

    def torch_call(self) -> Call:
        given, got, sizes_to, sizes_from = self.given, self.got, self.sizes_to, self.sizes_from
        return lambda: dist.all_to_all_single(got, given, sizes_from, sizes_to)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        given, got = self.given.numpy(), self.got.numpy()
        sizes_to, sizes_from = self.sizes_to, self.sizes_from
        return lambda: comm.Alltoallv([given, sizes_to], [got, sizes_from])
