"""Calls whose tensors share memory, large broadcasts, and barriers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_input_inside_the_output(me: Rank) -> None:
    p, n = me.world_size, 1000
    whole = torch.full((p * n,), -1.0)
    mine = whole[me.rank * n : (me.rank + 1) * n]
    mine.fill_(float(me.rank))
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, torch.arange(p).repeat_interleave(n).float())


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(SLOT_BYTES="4096")
def test_large_broadcasts(me: Rank) -> None:
    """Messages that fill the slots of all ranks, among calls that use them otherwise."""
    p, draw = me.world_size, torch.Generator().manual_seed(me.rank)
    for turn in range(12):
        n = (64 * 4096 - 1, 64 * 4096, 1_000_003)[turn % 3]
        root = turn % p
        wanted = torch.arange(n, dtype=torch.int32).mul(turn + 1).to(torch.int8)
        t = wanted.clone() if me.rank == root else torch.zeros(n, dtype=torch.int8)
        time.sleep(0.003 * float(torch.rand(1, generator=draw)))
        dist.broadcast(t, root)
        assert torch.equal(t, wanted), (turn, n, root)
        total = torch.full((5000,), float(me.rank + turn))
        dist.all_reduce(total)
        assert total.eq(p * (p - 1) / 2 + p * turn).all(), turn


def arrive_late(me: Rank, late: int) -> tuple[float, float]:
    dist.barrier()
    if me.rank == late:
        time.sleep(0.3)
    entered = time.monotonic()
    dist.barrier()
    return entered, time.monotonic()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nobody_leaves_a_barrier_before_the_last_enters(
    pool: Pool, world: MakeWorld, size: int
) -> None:
    for late in range(size):
        times = pool.run(arrive_late, world(size), late)
        assert min(left for _, left in times) >= max(entered for entered, _ in times)


Tensors = list[torch.Tensor]


def sharing(me: Rank, n: int) -> dict[str, Callable[[torch.Tensor, Any], Tensors]]:
    """Calls whose outputs lie in their inputs' memory: `call(whole, read)` returns the outputs.

    `whole` has (p + 1) n elements; `read` makes of a tensor the one that is passed as an input.
    """
    p, rank = me.world_size, me.rank
    after, own = (rank + 1) % p, slice(rank * n, (rank + 1) * n)
    group = dist.group.WORLD
    assert group is not None

    def cut(t: torch.Tensor) -> Tensors:
        return list(t[: p * n].chunk(p))

    def all_to_all(t: torch.Tensor, read: Any) -> Tensors:
        dist.all_to_all(cut(t), [read(part) for part in cut(t)])
        return cut(t)

    def all_to_all_single(t: torch.Tensor, read: Any, begin: int = 0) -> Tensors:
        dist.all_to_all_single(t[begin : begin + p * n], read(t[: p * n]))
        return [t[begin : begin + p * n]]

    def scatter(t: torch.Tensor, read: Any, to: int) -> Tensors:
        dist.scatter(cut(t)[to], [read(part) for part in cut(t)] if rank == 1 else None, src=1)
        return [cut(t)[to]]

    def gather(t: torch.Tensor, read: Any, of: int) -> Tensors:
        dist.gather(read(cut(t)[of]), cut(t) if rank == 1 else None, dst=1)
        return cut(t) if rank == 1 else []

    def all_gather(t: torch.Tensor, read: Any, of: int) -> Tensors:
        dist.all_gather(cut(t), read(cut(t)[of]))
        return cut(t)

    def into_tensor(t: torch.Tensor, read: Any, begin: int) -> Tensors:
        dist.all_gather_into_tensor(t[: p * n], read(t[begin : begin + n]))
        return [t[: p * n]]

    def reduce_scatter(t: torch.Tensor, read: Any, to: int) -> Tensors:
        dist.reduce_scatter(cut(t)[to], [read(part) for part in cut(t)])
        return [cut(t)[to]]

    def scatter_tensor(t: torch.Tensor, read: Any, begin: int) -> Tensors:
        dist.reduce_scatter_tensor(t[begin : begin + n], read(t[: p * n]))
        return [t[begin : begin + n]]

    def reduce_all(t: torch.Tensor, read: Any, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        both = [read(a), read(b)]
        group.allreduce_coalesced(both).wait()
        return both

    def gather_two(t: torch.Tensor, read: Any) -> Tensors:
        first, second = t[: p * n], torch.empty(p * n)
        group.allgather_into_tensor_coalesced(
            [first, second], [read(t[own]), read(t[after * n : (after + 1) * n])]
        ).wait()
        return [first, second]

    def scatter_two(t: torch.Tensor, read: Any) -> Tensors:
        outputs = [t[n : 2 * n], t[:n]]
        inputs = [read(t[: p * n]), read(t[n : (p + 1) * n])]
        group.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
        return outputs

    return {
        "all_to_all": all_to_all,
        "all_to_all_single": all_to_all_single,
        "all_to_all_single, shifted": partial(all_to_all_single, begin=n // 2),
        "scatter to another": partial(scatter, to=after),
        "scatter in place": partial(scatter, to=rank),
        "gather of another": partial(gather, of=after),
        "gather in place": partial(gather, of=rank),
        "all_gather of another": partial(all_gather, of=after),
        "all_gather in place": partial(all_gather, of=rank),
        "into_tensor of another": partial(into_tensor, begin=after * n),
        "into_tensor in place": partial(into_tensor, begin=rank * n),
        "into_tensor, shifted": partial(into_tensor, begin=n // 2),
        "reduce_scatter to another": partial(reduce_scatter, to=after),
        "reduce_scatter in place": partial(reduce_scatter, to=rank),
        "reduce_scatter_tensor to another": partial(scatter_tensor, begin=after * n),
        "reduce_scatter_tensor in place": partial(scatter_tensor, begin=rank * n),
        "reduce_scatter_tensor, shifted": partial(scatter_tensor, begin=n // 2),
        "coalesced, the same twice": lambda t, read: reduce_all(t, read, t, t),
        "coalesced, shifted": lambda t, read: reduce_all(t, read, t[: p * n], t[n:]),
        "coalesced all_gather": gather_two,
        "coalesced reduce_scatter": scatter_two,
    }


def share_memory(me: Rank, n: int) -> None:
    for name, call in sharing(me, n).items():
        # Whole numbers: a sum is the same wherever its elements are in the message.
        whole = torch.arange((me.world_size + 1) * n).remainder(1000).float() + 1000 * me.rank
        wanted = [t.clone() for t in call(whole.clone(), torch.clone)]
        found = call(whole, lambda t: t)
        for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(a, b), f"{name}, {n} elements, output {k}"


@on_ranks(2)
def test_one_rank_reduces_tensors_that_share_memory(me: Rank) -> None:
    """Which memory a rank's tensors lie in does not change which operations they make."""
    group, sizes = dist.group.WORLD, (100, 100_000, 100, 100_000)
    assert group is not None
    whole = torch.ones(100_000)
    tensors = [whole[:n] if me.rank == 0 else torch.ones(n) for n in sizes]
    group.allreduce_coalesced(tensors).wait()
    columns = torch.ones(100_000, 2)
    both = [columns[:, 0], columns[:, 1]] if me.rank == 0 else list(torch.ones(2, 100_000))
    group.allreduce_coalesced(both).wait()
    assert all(t.eq(2).all() for t in (*tensors, *both))


@pytest.mark.parametrize("wire", ["", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
def test_outputs_in_the_memory_of_inputs(
    pool: Pool, world: MakeWorld, size: int, wire: str
) -> None:
    options = {"WIRE": wire} if wire else {}
    for n in (5, 3000, 300_000):
        pool.run(share_memory, world(size, **options), n)
