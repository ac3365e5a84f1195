"""The backend as scripts use it: Work and its Future, order, subgroups, threads, names."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank
from threads import in_threads


def many_in_flight(me: Rank, seed: int) -> None:
    p = me.world_size
    draw = random.Random(seed)  # the same on every rank: the same calls in the same order
    counts = [draw.choice([0, 1, 33, 1000, 40000]) for _ in range(120)]
    tensors = [torch.full((n,), float(i + me.rank)) for i, n in enumerate(counts)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    order = list(range(len(works)))
    random.Random(seed + me.rank).shuffle(order)  # waited for in an order of its own
    for i in order:
        works[i].wait()
        assert works[i].is_completed()
        expected = p * i + p * (p - 1) / 2
        assert bool((tensors[i] == expected).all()), f"operation {i}"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_many_asynchronous_operations(pool: Pool, world: MakeWorld, size: int) -> None:
    pool.run(many_in_flight, world(size), 11 + size)


def work_api(me: Rank) -> None:
    p = float(me.world_size)
    t = torch.ones(1000)
    work = dist.all_reduce(t, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
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


def subsets(me: Rank) -> dict[str, float]:
    members = [[0, 1], [1, 2], [0, 2, 3], [3], [0, 1, 2, 3]]
    groups = [dist.new_group(m) for m in members]
    found = {}
    for ranks, group in zip(members, groups, strict=True):
        if me.rank in ranks:
            t = torch.tensor([10.0**me.rank])
            dist.all_reduce(t, group=group)
            src = ranks[-1]
            s = torch.tensor([float(me.rank)])
            dist.broadcast(s, src=src, group=group)
            assert float(s) == src, "src is a rank of the whole world"
            found[str(ranks)] = float(t)
    t = torch.ones(1)
    dist.all_reduce(t)
    assert float(t) == me.world_size
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    dist.all_reduce(t)  # the default group lives on
    return found


def test_new_group_of_subsets(pool: Pool, world: MakeWorld) -> None:
    found = pool.run(subsets, world(4))
    assert found[0] == {"[0, 1]": 11.0, "[0, 2, 3]": 1101.0, "[0, 1, 2, 3]": 1111.0}
    assert found[3] == {"[0, 2, 3]": 1101.0, "[3]": 1000.0, "[0, 1, 2, 3]": 1111.0}


def two_threads(me: Rank) -> list[float]:
    """Two groups over the same ranks, each used from a thread of its own at the same time."""
    groups = [dist.new_group(), dist.new_group()]
    sums = [0.0, 0.0]

    def use(which: int) -> None:
        for k in range(200):
            t = torch.full((17 + 1000 * which,), float(k))
            if k % 2:
                dist.all_reduce(t, group=groups[which])
            else:
                dist.all_reduce(t, group=groups[which], async_op=True).wait()
            assert bool((t == k * me.world_size).all()), (which, k)
            sums[which] += float(t[0])

    in_threads([partial(use, which) for which in range(2)])
    return sums


@pytest.mark.parametrize("size", [2, 3])
def test_two_groups_from_two_threads(pool: Pool, world: MakeWorld, size: int) -> None:
    total = float(size * sum(range(200)))
    assert pool.run(two_threads, world(size)) == [[total, total]] * size


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
    return [s - seen[0] for s in seen]


def test_sequence_numbers(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(sequence_numbers, world(2)) == [[0, 3, 4]] * 2


def profiled(me: Rank) -> list[str]:
    t, outs = torch.ones(4), [torch.empty(4) for _ in range(me.world_size)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        dist.all_reduce(t)
        dist.all_reduce(t, async_op=True).wait()
        dist.broadcast(t, 0)
        dist.all_gather(outs, t)
        dist.all_gather_into_tensor(torch.empty(4 * me.world_size), t)
        dist.barrier()
    return sorted({e.name for e in run.events() if e.name.startswith(me.backend + ":")})


def test_profiler_titles(pool: Pool, world: MakeWorld, backend: str) -> None:
    for names in pool.run(profiled, world(2)):
        assert {f"{backend}:all_reduce", f"{backend}:broadcast"} <= set(names), names
        if backend == "ringreduce":
            assert {"ringreduce:all_gather", "ringreduce:barrier"} <= set(names), names


def described(me: Rank) -> tuple[Any, ...]:
    group = dist.new_group(timeout=None)
    return dist.get_backend(), dist.get_backend(group), group.rank(), group.size()


def test_names_ranks_and_sizes(pool: Pool, world: MakeWorld, backend: str) -> None:
    assert pool.run(described, world(2)) == [(backend, backend, r, 2) for r in range(2)]
