"""A normal end loses nothing, however slow the line; and who computes is alive."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hosts import Hosts, why_not
from pool import Died, Done, Pool, Rank, World

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SIZE = 250_000
LAST = 2  # the rank that leaves first


@pytest.fixture(scope="module")
def far() -> Iterator[Hosts]:
    """50 ms there and back, and one packet in a hundred is lost."""
    with Hosts(3, delay_ms=25, rate_mbit=100, loss=0.01) as hosts:
        yield hosts


def leave_at_once(me: Rank, call: str, late: float) -> bool:
    """The last call of rank LAST, which is gone as soon as it returns; the others come later.

    All have sent it messages that it never receives.
    """
    leaver = me.rank == LAST
    given = torch.arange(SIZE, dtype=torch.float32) + me.rank
    wanted = torch.arange(SIZE, dtype=torch.float32) + LAST
    dist.barrier()
    if not leaver:
        dist.send(torch.ones(100), LAST)
        time.sleep(late)
    if call == "send":
        if leaver:
            works = [dist.isend(given, r) for r in range(me.world_size) if r != LAST]
            for work in works:
                assert work is not None
                work.wait()
        else:
            dist.recv(given, LAST)
            assert given.equal(wanted)
    elif call == "broadcast":
        dist.broadcast(given, LAST)
        assert given.equal(wanted)
    elif call == "all_reduce":
        dist.all_reduce(given)
        assert given.equal(3 * torch.arange(SIZE, dtype=torch.float32) + 3)
    else:
        gathered = [torch.empty(SIZE) for _ in range(me.world_size)]
        dist.all_gather(gathered, given)
        for rank in range(me.world_size):
            assert gathered[rank].equal(torch.arange(SIZE, dtype=torch.float32) + rank)
    dist.destroy_process_group()
    if leaver:
        os._exit(0)
    return True


@pytest.mark.parametrize("call", ["send", "broadcast", "all_reduce", "all_gather"])
def test_who_leaves_first_has_given_all(pool: Pool, far: Hosts, call: str) -> None:
    world = World(3, "ringreduce", timeout=30.0, places=far.places())
    outcomes = pool.start(leave_at_once, world, call, 0.3, fresh=True).outcomes()
    assert outcomes == [Done(0, True), Done(1, True), Died(LAST, 0)]


def compute_between(me: Rank, seconds: float) -> float:
    """Rank 1 computes between two calls and lets no other thread of Python run."""
    t = torch.full((1000,), float(me.rank))
    dist.all_reduce(t)
    if me.rank == 1:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the GIL
    dist.all_reduce(t)
    return float(t[0])


@pytest.mark.skipif(bool(why_not(veth=True)), reason=why_not(veth=True))
def test_who_computes_is_not_taken_for_dead(pool: Pool) -> None:
    with Hosts(3, veth=True) as hosts:
        lost = (("RINGREDUCE_LOST_SECONDS", "0.5"),)
        world = World(3, "ringreduce", lost, timeout=30.0, places=hosts.places())
        assert pool.start(compute_between, world, 3.0, fresh=True).results() == [9.0] * 3
