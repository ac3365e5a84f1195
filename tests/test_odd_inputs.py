"""What collectives and messages refuse: a ValueError on whoever calls it so, before anything moves.

As tests/test_bad_input.py, for the calls that take lists, parts and roots.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from test_bad_input import BAD, _backend, _quantized, _sparse

Tensor = torch.Tensor


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def lists(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [ones(*shape, dtype=dtype) for _ in range(count)]


def expanded(n: int) -> Tensor:
    return ones(1).expand(n)


def _alone(call: Callable[..., Any], *args: Any, kind: Any, root: int, op: Any = None) -> Any:
    """A rooted call straight to the backend: torch's own checks come first otherwise."""
    options = kind()
    options.rootRank = root
    if op is not None:
        options.reduceOp = op
    return call(*args, options)


def overlapping(way: int) -> list[Tensor]:
    """Two tensors of four elements that share some."""
    if way == 0:
        return [ones(4)] * 2
    if way == 1:
        return list(torch.ones(6).unfold(0, 4, 2))
    columns = torch.ones(5, 2)
    return [columns[:4, 0], columns[1:, 0]]


def _coalesced(call: str, outputs: Any, inputs: Any) -> Any:
    return getattr(dist.group.WORLD, call)(outputs, inputs).wait()


_OVERLAPPING: dict[str, Callable[[list[Tensor], int], object]] = {
    "all_gather": lambda out, r: dist.all_gather(out, ones(4)),
    "gather": lambda out, r: dist.gather(ones(4), out, dst=r),
    "all_to_all": lambda out, r: dist.all_to_all(out, lists(2, 4)),
    "all_gather_coalesced": lambda out, r: _coalesced(
        "allgather_coalesced", [[ones(4), out[0]], [ones(4), out[1]]], lists(2, 4)
    ),
    "all_gather_coalesced of one rank": lambda out, r: _coalesced(
        "allgather_coalesced", [out, lists(2, 4)], lists(2, 4)
    ),
    "all_gather_into_tensor_coalesced": lambda out, r: _coalesced(
        "allgather_into_tensor_coalesced", out, lists(2, 2)
    ),
    "reduce_scatter_tensor_coalesced": lambda out, r: _coalesced(
        "reduce_scatter_tensor_coalesced", out, lists(2, 8)
    ),
}


# Calls of a rank of two, each with what is wrong.  `r` is the rank itself.
REFUSED: dict[str, Callable[[int], object]] = {
    # lists of the wrong length
    "all_gather to 1": lambda r: dist.all_gather(lists(1, 4), ones(4)),
    "all_gather to none": lambda r: dist.all_gather([], ones(4)),
    "gather to 1": lambda r: dist.gather(ones(4), lists(1, 4), dst=r),
    "gather to none": lambda r: _alone(
        _backend().gather, [], [ones(4)], kind=dist.GatherOptions, root=r
    ),
    "gather, not the root's": lambda r: _alone(
        _backend().gather, [lists(2, 4)], [ones(4)], kind=dist.GatherOptions, root=1 - r
    ),
    "scatter of 1": lambda r: dist.scatter(ones(4), lists(1, 4), src=r),
    "scatter, not the root's": lambda r: _alone(
        _backend().scatter, [ones(4)], [lists(2, 4)], kind=dist.ScatterOptions, root=1 - r
    ),
    "reduce_scatter of 1": lambda r: dist.reduce_scatter(ones(4), lists(1, 4)),
    "all_to_all from 3": lambda r: dist.all_to_all(lists(2, 4), lists(3, 4)),
    "coalesced, none": lambda r: _backend().allreduce_coalesced([]),
    "coalesced, the second": lambda r: _backend().allreduce_coalesced(
        [torch.ones(70_000), torch.ones(2).to(torch.uint16)]
    ),
    "all_to_all_single to itself": lambda r: dist.all_to_all_single(
        ones(4), ones(4), [2, 2], [1 + 2 * r, 3 - 2 * r]
    ),
    # sizes
    "all_gather own output": lambda r: dist.all_gather(lists(2, 5), ones(4)),
    "all_gather_into_tensor": lambda r: dist.all_gather_into_tensor(ones(9), ones(4)),
    "scatter size": lambda r: dist.scatter(ones(4), [ones(4), ones(3)], src=r),
    "reduce_scatter own input": lambda r: dist.reduce_scatter(ones(4), lists(2, 5)),
    "reduce_scatter_tensor": lambda r: dist.reduce_scatter_tensor(ones(4), ones(9)),
    "all_to_all own part": lambda r: dist.all_to_all(lists(2, 4), lists(2, 5)),
    "all_to_all_single sizes": lambda r: dist.all_to_all_single(ones(4), ones(6)),
    "all_to_all_single odd": lambda r: dist.all_to_all_single(ones(5), ones(5)),
    "splits add up to less": lambda r: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2, 1]),
    "all_to_all_single, strided": lambda r: dist.all_to_all_single(ones(2, 2), ones(2, 2).t()),
    "negative split": lambda r: dist.all_to_all_single(ones(4), ones(4), [2, 2], [5, -1]),
    "three splits": lambda r: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2, 1, 1]),
    # dtypes
    "all_gather dtype": lambda r: _backend().allgather([lists(2, 4)], [ones(4).double()]),
    "all_gather_into_tensor dtype": lambda r: dist.all_gather_into_tensor(
        ones(8, dtype=torch.int32), ones(4)
    ),
    "all_to_all dtype": lambda r: dist.all_to_all(lists(2, 4), [ones(4), ones(4).int()]),
    "all_to_all_single dtype": lambda r: dist.all_to_all_single(ones(4), ones(4).double()),
    "reduce of uint16": lambda r: dist.reduce(ones(4).to(torch.uint16), 0),
    "reduce_scatter of float8": lambda r: dist.reduce_scatter(
        ones(4).to(torch.float8_e5m2), [ones(4).to(torch.float8_e5m2)] * 2
    ),
    "average of bool": lambda r: dist.reduce(ones(4).bool(), 0, op=dist.ReduceOp.AVG),
    "BAND of float": lambda r: dist.reduce_scatter_tensor(ones(2), ones(4), op=dist.ReduceOp.BAND),
    # outputs whose elements share memory
    "expanded reduce": lambda r: dist.reduce(expanded(4), r),
    "expanded broadcast": lambda r: dist.broadcast(expanded(4), 1 - r),
    "expanded all_gather": lambda r: dist.all_gather([ones(4), expanded(4)], ones(4)),
    "expanded scatter": lambda r: dist.scatter(expanded(4), lists(2, 4) if r == 0 else None, src=0),
    "expanded reduce_scatter": lambda r: dist.reduce_scatter(expanded(4), lists(2, 4)),
    "expanded all_to_all": lambda r: dist.all_to_all([ones(4), expanded(4)], lists(2, 4)),
    "expanded recv": lambda r: dist.recv(expanded(4), 1 - r),
    "expanded all_reduce_coalesced, twice": lambda r: dist.group.WORLD.allreduce_coalesced(
        [expanded(4)] * 2
    ).wait(),
    "expanded in itself": lambda r: dist.all_reduce(torch.ones(6).as_strided((3, 3), (1, 1))),
    # outputs that share memory with each other
    **{
        f"{name}, overlapping in way {way}": partial(call, overlapping(way))
        for way in range(3)
        for name, call in _OVERLAPPING.items()
    },
    # other kinds of tensors
    "sparse reduce": lambda r: _backend().reduce([_sparse()]),
    "sparse send": lambda r: _backend().send([_sparse()], 1 - r, 0),
    "quantized recv": lambda r: _backend().recv([_quantized()], 1 - r, 0),
    "meta all_to_all": lambda r: _backend().alltoall(
        lists(2, 4), [ones(4), torch.ones(4, device="meta")]
    ),
    # ranks that are none
    "reduce to 7": lambda r: _alone(_backend().reduce, [ones(4)], kind=dist.ReduceOptions, root=7),
    "gather to rank 7": lambda r: _alone(
        _backend().gather, [], [ones(4)], kind=dist.GatherOptions, root=7
    ),
    "scatter from -1": lambda r: _alone(
        _backend().scatter, [ones(4)], [], kind=dist.ScatterOptions, root=-1
    ),
    "send to 7": lambda r: _backend().send([ones(4)], 7, 0),
    "recv from -3": lambda r: _backend().recv([ones(4)], -3, 0),
}


def refuse(me: Rank, who: list[int]) -> dict[str, str]:
    """What each call said on the ranks that made it; the group goes on after each."""
    said = {}
    for name in (*BAD, *REFUSED):
        call = REFUSED[name] if name in REFUSED else lambda _, name=name: BAD[name][0]()
        if me.rank in who:
            try:
                call(me.rank)
                said[name] = "accepted"
            except (ValueError, TypeError, RuntimeError) as error:
                said[name] = f"{type(error).__name__}: {error}"
        t = torch.full((5,), float(me.rank))
        dist.all_reduce(t)
        assert float(t[0]) == 1.0, name
    work = dist.isend(torch.full((3,), float(me.rank)), 1 - me.rank)
    got = torch.empty(3)
    dist.recv(got, 1 - me.rank)
    work.wait()
    assert got.tolist() == [1.0 - me.rank] * 3, "no message was left behind by those"
    return said


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all ranks", "one rank"])
def test_calls_that_cannot_be_made(pool: Pool, world: MakeWorld, who: list[int]) -> None:
    for rank, said in enumerate(pool.run(refuse, world(2, timeout=10.0), who)):
        assert len(said) == (len(BAD) + len(REFUSED) if rank in who else 0)
        for name, (_, says) in BAD.items() if said else ():
            _, _, text = said.pop(name).partition(": ")
            assert re.search(says, text), f"{name}: {text}"
        for name, text in said.items():
            assert text.startswith("ValueError: ") and len(text) > 25, f"{name}: {text}"
            assert "ringreduce" in text or not re.search("expanded|overlapping", name), name
        if rank in who:
            assert "Tensors must be contiguous" in said["all_to_all_single, strided"]


@on_ranks(3)
def test_outputs_that_interleave(me: Rank) -> None:
    """Outputs whose memory interleaves, and shares no element."""
    p, whole = me.world_size, torch.zeros(5, me.world_size)
    dist.all_gather(list(whole.unbind(1)), torch.full((5,), float(me.rank)))
    assert torch.equal(whole, torch.arange(float(p)).expand(5, p))
    grid = torch.zeros(4, 4)  # a border and the middle, whose extents overlap
    parts = [grid[1:3, 1:3], grid[:, 0], grid[:, 3], grid[0, 1:3], grid[3, 1:3]]
    for part in parts:
        part += 1
    dist.group.WORLD.allreduce_coalesced(parts).wait()  # type: ignore[union-attr]
    assert grid.eq(p).all()
    back = torch.arange(4.0).as_strided((2, 2), (1, 2))
    dist.all_reduce(back)
    assert back.tolist() == [[0, 2 * p], [p, 3 * p]]


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_calls_that_only_look_odd(me: Rank) -> None:
    """Calls that only look odd: shapes differ where counts agree, and inputs share memory."""
    p, rank = me.world_size, me.rank
    out = ones(2, 2)
    dist.scatter(out, lists(p, 4, 1) if rank == 0 else None, src=0)
    assert out.tolist() == [[1, 1], [1, 1]]
    gathered = ones(p, 2, 2)
    dist.all_gather_into_tensor(gathered, expanded(4))
    assert gathered.eq(1).all()
    total = ones(2)
    dist.reduce_scatter_tensor(total, expanded(2 * p))
    assert total.tolist() == [p, p]
    scalar = torch.tensor(float(rank))
    dist.reduce(scalar, p - 1)
    assert rank != p - 1 or scalar == p * (p - 1) / 2
    scalars = [torch.tensor(0.0) for _ in range(p)]
    dist.all_gather(scalars, torch.tensor(float(rank)))
    assert [float(s) for s in scalars] == list(range(p))
    rows = torch.empty(0, 7)
    dist.all_to_all_single(rows, torch.empty(0, 7), [0] * p, [0] * p)
    wide = torch.empty(0)
    dist.all_to_all_single(torch.empty(5 * p, 0), torch.empty(5 * p, 0))
    dist.reduce_scatter(wide, [torch.empty(0) for _ in range(p)])
    dist.reduce(wide, 0)
    dist.gather(wide, [torch.empty(0) for _ in range(p)] if rank == 0 else None)


def sum_sparse(me: Rank, case: tuple[str, str, bool]) -> list[Any]:
    dtype, op, hybrid = case
    kind = getattr(torch, dtype)
    dense = torch.zeros(6, 5, dtype=kind)
    if me.rank < 3:  # the last of four has no element at all
        dense[me.rank] = me.rank + 1
        dense[5, 2] = 7
    t = dense.to_sparse(1 if hybrid else 2)
    dist.all_reduce(t, op=getattr(dist.ReduceOp, op))
    assert t.is_sparse and t.is_coalesced() and t.dtype == kind
    return t.to_dense().double().tolist()


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "SUM"), ("float16", "AVG"), ("int64", "SUM"), ("bfloat16", "SUM")]
)
def test_sparse_sums(pool: Pool, world: MakeWorld, dtype: str, op: str, hybrid: bool) -> None:
    wanted = torch.zeros(6, 5, dtype=torch.float64)
    for rank in range(3):
        wanted[rank] += rank + 1
        wanted[5, 2] += 7
    wanted /= 4 if op == "AVG" else 1
    assert pool.run(sum_sparse, world(4), (dtype, op, hybrid)) == [wanted.tolist()] * 4
