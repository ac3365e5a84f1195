"""The backend as scripts use it: Work and its Future, order, names."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Rank, on_ranks
from ranks import exception_of


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_work_and_future(me: Rank) -> None:
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


@on_ranks(2)
def test_callbacks_may_start_operations(me: Rank) -> None:
    """Each callback starts the next operation, on whichever thread it runs."""
    t, ended = torch.ones(16), threading.Event()

    def again(left: int) -> None:
        future = dist.all_reduce(t, async_op=True).get_future()
        future.then(lambda _: again(left - 1) if left else ended.set())

    again(5)
    assert ended.wait(20), "a callback did not run"
    dist.barrier()
    assert t.eq(2.0**6).all(), t


@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_blocking_and_asynchronous_keep_their_order(me: Rank) -> None:
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
    assert t.eq(float(me.world_size) ** 20).all(), t


@on_ranks(2)
def test_sequence_numbers(me: Rank) -> None:
    """A call counts as one, whatever it is, as with Gloo."""
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
    assert [s - seen[0] for s in seen] == [0, 3, 4, 5, 6], seen


@on_ranks(2)
def test_names_ranks_and_sizes(me: Rank) -> None:
    group = dist.new_group(timeout=None)
    assert dist.get_backend() == dist.get_backend(group) == me.backend
    assert (group.rank(), group.size()) == (me.rank, 2)
