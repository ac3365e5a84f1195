"""The backend as scripts use it: Work and its Future, order, names."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank
from ranks import exception_of


def work_api(me: Rank) -> None:
    p = float(me.world_size)
    t = torch.ones(1000)
    work = dist.all_reduce(t, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert exception_of(work) is None
    assert [r.data_ptr() for r in work.result()] == [t.data_ptr()]

    future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((10,), 2 * p))
    assert future.done()
    assert torch.equal(future.value()[0], torch.full((10,), p))

    gathered = [torch.empty(2) for _ in range(me.world_size)]
    work = dist.all_gather(gathered, torch.full((2,), float(me.rank)), async_op=True)
    work.wait()
    assert [float(g[0]) for g in gathered] == [float(r) for r in range(me.world_size)]
    for work in (dist.barrier(async_op=True), dist.broadcast(t, 0, async_op=True)):
        work.get_future().wait()
        work.wait()
        assert work.is_completed()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_work_and_future(pool: Pool, world: MakeWorld, size: int) -> None:
    pool.run(work_api, world(size))


def callbacks_chain(me: Rank) -> float:
    """Each callback starts the next operation, on whichever thread it runs."""
    t, ended = torch.ones(16), threading.Event()

    def again(left: int) -> None:
        future = dist.all_reduce(t, async_op=True).get_future()
        future.then(lambda _: again(left - 1) if left else ended.set())

    again(5)
    assert ended.wait(20), "a callback did not run"
    dist.barrier()
    return float(t[0])


def test_callbacks_may_start_operations(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(callbacks_chain, world(2)) == [2.0**6] * 2


def mixed_order(me: Rank) -> float:
    t = torch.ones(5000)
    kept = []
    for k in range(20):
        # The blocking one must come after the asynchronous ones on the same tensor.
        kept.append(dist.all_reduce(t, async_op=True))
        if k % 3 == 0:
            kept.append(dist.broadcast(t, src=k % me.world_size, async_op=True))
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        kept.append(dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=True))
        if k % 5 == 0:
            dist.barrier()
    for work in kept:
        work.wait()
    assert bool((t == t[0]).all())
    return float(t[0])


@pytest.mark.ringreduce
@pytest.mark.parametrize("size", [2, 4])
def test_blocking_and_asynchronous_keep_their_order(
    pool: Pool, world: MakeWorld, size: int
) -> None:
    assert pool.run(mixed_order, world(size)) == [float(size) ** 20] * size


def sequence_numbers(me: Rank) -> list[int]:
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))  # torch asks no plugin through the group
    backend._set_sequence_number_for_group()
    seen = [backend._get_sequence_number_for_group()]
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    seen.append(backend._get_sequence_number_for_group())
    dist.barrier(group=group, async_op=True).wait()
    seen.append(backend._get_sequence_number_for_group())
    backend.allreduce_coalesced([torch.ones(2), torch.ones(3)]).wait()
    seen.append(backend._get_sequence_number_for_group())
    move: Any = dist.send if me.rank == 0 else dist.recv
    move(torch.ones(1), 1 - me.rank, group=group)
    seen.append(backend._get_sequence_number_for_group())
    return [s - seen[0] for s in seen]


def test_sequence_numbers(pool: Pool, world: MakeWorld) -> None:
    """A call counts as one, whatever it is, as with Gloo."""
    assert pool.run(sequence_numbers, world(2)) == [[0, 3, 4, 5, 6]] * 2


def described(me: Rank) -> tuple[Any, ...]:
    group = dist.new_group(timeout=None)
    return dist.get_backend(), dist.get_backend(group), group.rank(), group.size()


def test_names_ranks_and_sizes(pool: Pool, world: MakeWorld, backend: str) -> None:
    assert pool.run(described, world(2)) == [(backend, backend, r, 2) for r in range(2)]
