"""Groups of some of the ranks: overlapping, made of others, ended in any order.

A rank knows what every group must give from the ranks' numbers alone.  test_soak.py uses several at
the same time, from two threads.
"""

from __future__ import annotations

import inspect
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Died, Done, Pool, Rank, on_ranks

import ringreduce

# torch 2.11 sorts the ranks of each group.
SORTS = "sort_ranks" not in inspect.signature(dist.new_group).parameters
AS_GIVEN: dict[str, Any] = {} if SORTS else {"sort_ranks": False}
REVERSED = [0, 1] if SORTS else [1, 0]
SHUFFLED = [0, 1, 2, 3] if SORTS else [3, 1, 0, 2]
OVERLAPPING = ([0, 1], [1, 2], [2, 3], [0, 3], [0, 2], [0, 1, 2], [1, 2, 3], SHUFFLED)


def every_call(group: dist.ProcessGroup, members: list[int], rank: int, tag: float) -> None:
    """One of each kind of call; `members` are global ranks, in the order of the group."""
    p, own = len(members), members.index(rank)
    total = float(sum(members))
    t = torch.full((300,), rank + tag)
    dist.all_reduce(t, group=group)
    assert bool((t == total + p * tag).all()), (members, float(t[0]))

    src = members[-1]
    t = torch.full((300,), rank + tag)
    dist.broadcast(t, src=src, group=group)
    assert bool((t == src + tag).all())
    dist.broadcast(t, group_src=0, group=group)

    outs = [torch.empty(5) for _ in range(p)]
    dist.all_gather(outs, torch.full((5,), rank + tag), group=group)
    assert [float(o[4]) for o in outs] == [r + tag for r in members]

    # Rank i sends 10 i + j to rank j, both counted within the group.
    sent = torch.tensor([10.0 * own + j for j in range(p)])
    received = torch.empty(p)
    dist.all_to_all_single(received, sent, group=group)
    assert received.tolist() == [10.0 * i + own for i in range(p)]

    part = torch.empty(4)
    dist.reduce_scatter_tensor(part, torch.arange(4.0 * p) + rank, group=group)
    assert torch.equal(part, p * torch.arange(4.0 * own, 4.0 * own + 4) + total)

    # Around the ring, by global ranks.
    after, before = members[(own + 1) % p], members[own - 1]
    t = torch.empty(7)
    works = [
        dist.isend(torch.full((7,), rank + tag), after, group=group, tag=3),
        dist.irecv(t, before, group=group, tag=3),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert float(t[6]) == before + tag

    said: list[Any] = [None] * p
    dist.all_gather_object(said, {"rank": rank, "tag": tag}, group=group)
    assert said == [{"rank": r, "tag": tag} for r in members]
    dist.barrier(group=group)


@on_ranks(4, 20.0)
def test_overlapping_groups(me: Rank) -> None:
    seed = 5
    groups = [dist.new_group(m, **AS_GIVEN) for m in OVERLAPPING]
    draw = random.Random(seed)  # the same order on all ranks, else groups wait in a circle
    for tag in range(3):
        for which in draw.sample(range(len(groups)), len(groups)):
            if me.rank in OVERLAPPING[which]:
                every_call(groups[which], OVERLAPPING[which], me.rank, float(tag))
    # Destroyed in an order that is each rank's own.
    mine = [g for g, m in zip(groups, OVERLAPPING, strict=True) if me.rank in m]
    random.Random(seed + me.rank).shuffle(mine)
    for k, group in enumerate(mine):
        dist.destroy_process_group(group)
        with pytest.raises(ValueError):
            dist.all_reduce(torch.ones(1), group=group)
        if k == 1:
            every_call(dist.group.WORLD, list(range(me.world_size)), me.rank, 0.5)


def disjoint(me: Rank) -> tuple[float, float, list[int]]:
    """torch's own ways to make many: enumerated, equal parts, and without the other ranks."""
    pair, pairs = dist.new_subgroups(2)
    assert len(pairs) == 2
    a = torch.tensor([float(me.rank)])
    dist.all_reduce(a, group=pair)
    stride, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    b = torch.tensor([float(me.rank)])
    dist.all_reduce(b, group=stride)
    ranks = [me.rank // 2 * 2, me.rank // 2 * 2 + 1]
    local = dist.new_group(ranks, use_local_synchronization=True)
    every_call(local, ranks, me.rank, 1.0)
    dist.destroy_process_group(pair)
    dist.destroy_process_group(local)
    every_call(stride, [me.rank % 2, me.rank % 2 + 2], me.rank, 2.0)
    return float(a), float(b), dist.get_process_group_ranks(stride)


def test_disjoint_groups(pool: Pool, world: MakeWorld) -> None:
    # Remade, since torch names a group that is made without the other ranks by its members and by
    # the number of groups that this rank is in: that must be the same for its members.
    call = pool.start(disjoint, world(4, 20.0), remade=True)
    assert call.results() == [
        (1.0, 2.0, [0, 2]),
        (1.0, 4.0, [1, 3]),
        (5.0, 2.0, [0, 2]),
        (5.0, 4.0, [1, 3]),
    ]


def in_another_order(me: Rank, alone: bool) -> list[str]:
    """One rank makes two groups the other way round; the errors that come of it."""
    wanted = [[0, 1, 2], [0, 1]] if alone else [[0, 1], [1, 2]]
    if me.rank == (1 if alone else 2):
        wanted.reverse()
    errors = []
    for ranks in wanted:
        if alone and me.rank not in ranks:
            continue
        try:
            dist.new_group(ranks, timeout=timedelta(seconds=8), use_local_synchronization=alone)
        except (ringreduce.Error, ringreduce.Timeout) as error:
            errors.append(str(error))
            break
    dist.barrier()
    return errors


@pytest.mark.parametrize("alone", [True, False])
def test_groups_in_another_order(pool: Pool, world: MakeWorld, alone: bool) -> None:
    first, second, third = pool.start(
        in_another_order, world(3, 30.0), alone, remade=True
    ).results()
    hint = "all ranks must make their groups in the same order"
    if alone:  # torch names the groups by their ranks
        whole, pair = f" of ranks 0, 1 and 2 ({hint})", f" of ranks 0 and 1 ({hint})"
        assert "; rank 1 waits to make group '" in first[0]
        assert first[0].endswith(pair)
        assert "; rank 0 waits to make group '" in second[0]
        assert second[0].endswith(whole)
        assert "rank 1 of 3 did not join" in third[0]  # rank 0's reason
        assert pair in third[0]
        return
    # torch counts the groups: rank 2's first one has the name of that of ranks 0 and 1, and meets
    # it or comes late.
    assert first == []
    assert "rank 2 of 2 did not join" in second[0]
    assert hint in third[0]
    met = re.search(r"makes (group '\w+') of ranks 1 and 2 where rank 0 .* makes \1 of", third[0])
    assert met or "; rank 1 waits to make group '" in third[0]


def members_of_a_split(me: Rank) -> tuple[list[int], float]:
    """ProcessGroup.split_group: a group made of a group."""
    world = dist.group.WORLD
    assert world is not None
    assert world._get_backend(torch.device("cpu")).supports_splitting
    wanted = [2, 0] if me.rank % 2 == 0 else [1, 3]
    part = world.split_group(wanted, timeout=timedelta(seconds=30), group_name=f"half{me.rank % 2}")
    assert part is not None
    t = torch.tensor([float(me.rank)])
    part.allreduce([t]).wait()
    s = torch.tensor([float(me.rank)])
    part.broadcast(s, 0).wait()
    # torch 2.14 keeps the order of the ranks of a split; before, it sorted them.
    assert float(s) == (wanted if torch.__version__ >= "2.14" else sorted(wanted))[0]
    # A split of the split: one rank each.
    alone = part.split_group([part.rank()], group_name=f"alone{me.rank}")
    u = torch.tensor([7.0])
    alone.allreduce([u]).wait()
    alone.shutdown()
    part.barrier().wait()
    part.shutdown()
    dist.all_reduce(u)
    return [part.rank(), part.size(), alone.size()], float(t) + float(u)


def test_split_group(pool: Pool, world: MakeWorld) -> None:
    places = [1, 0, 0, 1] if torch.__version__ >= "2.14" else [0, 0, 1, 1]
    totals = [2.0 + 28.0, 4.0 + 28.0] * 2
    expected = [([place, 2, 1], total) for place, total in zip(places, totals, strict=True)]
    assert pool.run(members_of_a_split, world(4, 20.0)) == expected


def merged(me: Rank, key: str) -> tuple[int, int, float]:
    """Two groups of two become one of four, on a store that both know."""
    pair = dist.new_group([me.rank // 2 * 2, me.rank // 2 * 2 + 1], use_local_synchronization=True)
    assert pair.size() == 2
    # torch adds each group's size to a counter in the store, to know where its ranks begin.
    whole = pair.merge_remote_group(me.store(key), 4, timedelta(seconds=30), group_name="whole")
    t = torch.tensor([10.0**me.rank])
    whole.allreduce([t]).wait()
    seen = whole.rank(), whole.size(), float(t)
    whole.barrier().wait()
    whole.shutdown()
    return seen


def test_merge_of_two_groups(pool: Pool, world: MakeWorld) -> None:
    seen = pool.run(merged, world(4, 20.0), pool.name("merge"))
    assert sorted(rank for rank, _, _ in seen) == [0, 1, 2, 3]
    assert {(size, total) for _, size, total in seen} == {(4, 1111.0)}


def shrunk(me: Rank, flags: int) -> Any:
    """Rank 2 is killed amid the work; the others leave it out and go on."""
    t = torch.full((1000,), float(me.rank))
    me.tell("ready")
    try:
        while True:
            dist.all_reduce(t, op=dist.ReduceOp.MAX)
    except dist.DistBackendError as error:
        said = str(error)
    smaller = dist.shrink_group([2], shrink_flags=flags)
    assert dist.group.WORLD is smaller
    u = torch.full((1000,), 10.0**me.rank)
    dist.all_reduce(u)
    # What is left is a group like any other: it can be shrunk and have subgroups.
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        v = torch.ones(3)
        dist.all_reduce(v, group=pair)
        assert float(v[0]) == 2.0
    ranks = dist.get_process_group_ranks(smaller)
    result = said, dist.get_rank(), dist.get_world_size(), ranks, float(u[0])
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("flags", [0, 1], ids=["default", "abort"])
def test_shrink_after_a_rank_was_killed(pool: Pool, world: MakeWorld, flags: int) -> None:
    call = pool.start(shrunk, world(4, 20.0), flags, fresh=True)
    call.hear_all()
    time.sleep(0.05)
    call.signal(2, signal.SIGKILL)
    outcomes = call.outcomes()
    assert isinstance(outcomes[2], Died)
    for group_rank, rank in enumerate([0, 1, 3]):
        outcome = outcomes[rank]
        assert isinstance(outcome, Done), outcome
        said, new_rank, size, _, total = outcome.value
        assert "rank 2" in said
        assert (new_rank, size, total) == (group_rank, 3, 1011.0)


def shrunk_whole(me: Rank) -> tuple[float, float]:
    """A healthy subgroup is shrunk; the default group and the rank left out go on."""
    group = dist.new_group([0, 1, 2])
    before = torch.ones(2)
    dist.all_reduce(before, group=group)
    after = torch.ones(2)
    if me.rank != 1:
        smaller = dist.shrink_group([1], group=group)
        dist.all_reduce(after, group=smaller)
        every_call(smaller, [0, 2], me.rank, 1.0)
    dist.barrier()
    return float(before[0]), float(after[0])


def test_shrink_of_a_healthy_group(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(shrunk_whole, world(3, 20.0)) == [(3.0, 2.0), (3.0, 1.0), (3.0, 2.0)]


def over_a_store(me: Rank, kind: str, path: str) -> float:
    stores: dict[str, Callable[[], dist.Store]] = {
        "file": lambda: dist.FileStore(path, 2),
        "tcp": lambda: dist.TCPStore("127.0.0.1", me.store_port, 2, wait_for_workers=False),
        "prefix": lambda: dist.PrefixStore("a", dist.PrefixStore("b", me.store(path))),
    }
    store = stores[kind]()
    if kind == "tcp":
        store = dist.PrefixStore(path, store)
    dist.init_process_group(me.backend, store=store, rank=me.rank, world_size=2)
    every_call(dist.group.WORLD, [0, 1], me.rank, 1.0)
    group = dist.new_group(REVERSED, **AS_GIVEN)
    every_call(group, REVERSED, me.rank, 2.0)
    t = torch.ones(1)
    dist.all_reduce(t)
    dist.destroy_process_group()
    return float(t)


@pytest.mark.parametrize("kind", ["file", "tcp", "prefix"])
def test_explicit_stores(pool: Pool, world: MakeWorld, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "store") if kind == "file" else pool.name("store")
    assert pool.start(over_a_store, world(0), kind, path, ranks=2).results() == [2.0, 2.0]


def composite(me: Rank, path: str, names: str) -> tuple[str, str, float]:
    store = me.store(path)
    dist.init_process_group(names, store=store, rank=me.rank, world_size=2)
    every_call(dist.group.WORLD, [0, 1], me.rank, 1.0)
    part = dist.new_group([0, 1])
    every_call(part, [0, 1], me.rank, 2.0)
    other = dist.new_group(backend="gloo")
    every_call(other, [0, 1], me.rank, 3.0)
    t = torch.ones(1)
    dist.all_reduce(t)
    cpu = part._get_backend(torch.device("cpu"))
    found = dist.get_backend_config(), cpu.name(), float(t)
    dist.destroy_process_group()
    return found


# nccl needs a CUDA build even to be named beside us; gloo stands in for it.
@pytest.mark.parametrize("names", ["cpu:{}", "cpu:{},cuda:gloo", "cpu:{},cuda:{}"])
def test_composite_names(pool: Pool, world: MakeWorld, names: str) -> None:
    asked = names.replace("{}", "ringreduce")
    call = pool.start(composite, world(0), pool.name("composite"), asked, ranks=2)
    for config, name, total in call.results():
        assert "cpu:ringreduce" in config
        assert (name, total) == ("ringreduce", 2.0)
