"""What a collective is to the benchmark: buffers, a call in each library, a check, a factor.

A class says how its buffers are filled, called (torch, MPI) and checked, and how its bus
bandwidth follows from its size. `collectives` lists all that there are.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ringreduce.tools.bench import oracle
from ringreduce.tools.bench.oracle import Expected, Inputs
from ringreduce.tools.bench.settings import Unsupported

Call = Callable[[], object]


@dataclass(frozen=True)
class Traffic:
    """The memory that a call has to move, in parts of its size and for each rank.

    A byte that several ranks need is read once, and shared out between them. `touched` is what the
    bytes take up: bytes that are written where they were read count once.
    """

    read: float
    written: float
    touched: float


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return torch.empty(0, dtype=getattr(torch, dtype), device="cpu").element_size()


@dataclass(frozen=True)
class Case:
    """One row for one rank: `count` elements of `dtype` in the whole message."""

    count: int
    dtype: str
    op: str
    rank: int
    world: int
    device: str = "cpu"
    shares: bool = False  # the buffers are tensors of ringreduce.empty


class Collective(ABC):
    """A collective with its buffers, ready to be called again and again."""

    name: ClassVar[str]
    reduces: ClassVar[bool] = False  # has a reduction operation
    has_size: ClassVar[bool] = True
    least_ranks: ClassVar[int] = 1
    # Messages that follow each other in one call; a call's time is divided by them.
    trips: ClassVar[int] = 1
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

    @staticmethod
    def traffic(world: int) -> Traffic:
        """What ranks that share memory have to move, for the roofline."""
        return Traffic(read=1, written=1, touched=1)

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

    def error(self, salt: int) -> dict[str, float]:
        """How far the result of `check` is from the exact one (oracle.error_of)."""
        raise Unsupported(f"{self.name} has no error to measure")

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        """The parts of this rank's result, each with what it must be."""
        yield from ()

    def result(self) -> torch.Tensor:
        """The tensor that must have the same bits on all ranks; empty where none must."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def settle(self) -> None:
        """Fill the buffers for timing, with values that stay what they are call after call."""

    def _inputs(self, count: int, salt: int) -> Inputs:
        return Inputs(self.case.dtype, self.case.op, self.case.world, count, salt)

    def _block(self, count: int, salt: int, receiver: int) -> Inputs:
        """What each rank has for `receiver`, where that differs from what others get."""
        return self._inputs(count, salt * self.case.world + receiver)

    def _empty(self, count: int) -> torch.Tensor:
        dtype = getattr(torch, self.case.dtype)
        if self.case.shares:
            tensor: torch.Tensor = importlib.import_module("ringreduce").empty(count, dtype=dtype)
            return tensor
        return torch.empty(count, dtype=dtype, device=self.case.device)


class InShares(Collective):
    """One whose whole message is `world` shares of the same size, a share for each rank.

    Of the whole message a rank sends or gets all but its own share.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.share = case.count // case.world

    @staticmethod
    def busbw_factor(world: int) -> float:
        return (world - 1) / world

    @staticmethod
    def fit(count: int, world: int) -> int:
        return count // world * world


class ToOrFromShares(InShares):
    """Every rank has one share, and all ranks, or rank 0 alone, have the whole in shares."""

    rooted: ClassVar[bool] = False  # rank 0 alone

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.mine = self._empty(self.share)
        self.all = self._empty(self.share * case.world if self._has_all() else 0)
        self.shares = list(torch.split(self.all, self.share)) if self._has_all() else []

    def _has_all(self) -> bool:
        return not self.rooted or self.case.rank == 0

    def _arrays(self) -> tuple[Any, Any]:
        """This rank's share and the whole, where it is, as MPI takes them."""
        return self.mine.numpy(), self.all.numpy() if self._has_all() else None


class Gathering(ToOrFromShares):
    """The whole is made of the ranks' shares."""

    def load(self, salt: int) -> None:
        oracle.fill(self.mine, self._inputs(self.share, salt).of(self.case.rank))
        self.all.fill_(0)

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        inputs = self._inputs(self.share, salt)
        for rank, share in enumerate(self.shares):
            yield share, Expected(inputs.of(rank))


class Scattering(ToOrFromShares):
    """The ranks' shares are made of the whole, whose shares are different ones."""

    def load(self, salt: int) -> None:
        for receiver, share in enumerate(self.shares):
            oracle.fill(share, self._block(self.share, salt, receiver).of(self.case.rank))
        self.mine.fill_(0)
