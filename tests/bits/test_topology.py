"""The order of rings: the solver, what a group says of its hosts, and lines that differ."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from hosts import Hosts, why_not
from pool import Pool, Rank, World, on_ranks

from ringreduce import topology
from ringreduce.topology import Topology


def test_the_order_of_a_matrix() -> None:
    assert topology.order([[0, 1, 9], [9, 0, 1], [1, 9, 0]]) == [0, 2, 1]
    for wrong in ([[0, 1], [2]], [[0, -1], [1, 0]], [[0, float("nan")], [1, 0]]):
        with pytest.raises(ValueError, match="rate"):
            topology.order(wrong)
    assert topology.order([]) == []


@on_ranks(2)
def test_ranks_that_share_memory_are_one_host(me: Rank) -> None:
    found = topology.of()
    assert found.hosts == ((0, 1),) and found.source == "ranks" and found.slowest is None
    assert "ring of hosts: 0 > 0" in str(found)


def reduced(me: Rank, name: str, layout: str, ring: str) -> tuple[Topology, Any]:
    """What a group of ranks that pose as hosts says, and the bits of all-reduces."""
    os.environ |= {"RINGREDUCE_HOSTID": layout[me.rank], "RINGREDUCE_RING": ring}
    me.world_size = len(layout)
    me.init(name, timeout=60)
    try:
        bits = []
        for size in (1, 1000, 300_000):
            t = torch.rand(size, generator=torch.Generator().manual_seed(me.rank))
            dist.all_reduce(t)
            bits.append(hash(t.numpy().tobytes()))
        part = dist.new_group([1, 2])  # the same variable is theirs
        if me.rank in (1, 2):
            t = torch.ones(10)
            dist.all_reduce(t, group=part)
            assert t.eq(2).all()
        return topology.of(), bits
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ring", ["", "0,2,3,1", "2,0,1,3", "measure"])
def test_an_order_is_the_same_for_all(pool: Pool, world: MakeWorld, ring: str) -> None:
    call = pool.start(reduced, world(0), pool.name("ring"), "abcd", ring, ranks=4, fresh=True)
    found = call.results()
    assert all(one == found[0] for one in found)
    shown = found[0][0]
    if ring[:1].isdigit():
        assert shown.source == "given" and ",".join(map(str, shown.ring)) == ring
        assert shown.ranks == shown.ring
    if ring == "measure":
        assert shown.source == "measured" and len(shown.matrix) == 4
        assert shown.slowest is not None and shown.slowest[2] > 1


def on_lines(me: Rank) -> tuple[Topology, float]:
    t = torch.full((100_000,), float(me.rank))
    dist.all_reduce(t)
    return topology.of(), t[0].item()


def test_a_ring_is_measured_on_lines_that_differ(pool: Pool) -> None:
    if why := why_not():
        pytest.skip(why)
    fast = {(0, 2), (2, 3), (3, 1), (1, 0)}  # this way round only
    with Hosts(4, delay_ms=0.1, rate_mbit=20) as hosts:
        for a, b in fast:
            hosts.link(a, b, rate_mbit=200)
        env = (("RINGREDUCE_RING", "measure"),)
        world = World(4, "ringreduce", env, places=hosts.places())
        found = pool.start(on_lines, world, fresh=True).results()
    for shown, value in found:
        assert shown == found[0][0] and value == 6
        assert shown.ring == (0, 2, 3, 1)
        for a in range(4):
            for b in range(4):
                if a != b:
                    assert 10 < shown.matrix[a][b] < 300
                    assert (shown.matrix[a][b] > 60) == ((a, b) in fast), shown.matrix
