"""Groups between hosts that go on after losses: a lost process, a cut host, a stopped rank."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist
from hosts import Hosts, why_not
from pool import Call, Died, Done, Pool, Raised, Rank, World

import ringreduce

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
SIZE = 100_000


def sums(me: Rank, after: int) -> tuple[list[float], list[int]]:
    """The sums of the last `after` all-reduces, which lack a rank, and the ranks that are left."""
    t = torch.empty(SIZE)
    found: list[float] = []
    calls = 0
    while len(found) < after:
        t.fill_(1 << me.rank)
        dist.all_reduce(t)
        assert t.eq(t[0]).all()
        if t[0] < (1 << me.world_size) - 1:
            found.append(float(t[0]))
        calls += 1
        if calls == 5:
            me.tell("flowing")
    return found, ringreduce.live_ranks()


def start(pool: Pool, hosts: Hosts, ranks: int, timeout: float) -> Call:
    settings = (("RINGREDUCE_ON_LOSS", "continue"), ("RINGREDUCE_LOST_SECONDS", "1"))
    places = hosts.places(ranks // len(hosts.all))
    world = World(ranks, "ringreduce", settings, timeout=timeout, places=places)
    call = pool.start(sums, world, 20, fresh=True)
    call.hear_all("flowing")
    return call


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_rank_of_several_hosts(pool: Pool, victim: int) -> None:
    with Hosts(2) as hosts:
        call = start(pool, hosts, 4, 60.0)
        call.signal(victim, signal.SIGKILL)
        left = [r for r in range(4) if r != victim]
        expected = ([float(sum(1 << r for r in left))] * 20, left)
        for outcome in call.outcomes():
            wanted = Died(victim, -signal.SIGKILL) if outcome.rank == victim else None
            assert outcome == (wanted or Done(outcome.rank, expected)), outcome


def test_the_side_that_reaches_the_store_goes_on(pool: Pool) -> None:
    """The store is at host 0.  The rank that is cut off gets an error too."""
    with Hosts(3, veth=not why_not(veth=True)) as hosts:
        call = start(pool, hosts, 3, 60.0)
        began = time.monotonic()
        hosts.cut(2)
        *others, cut_off = call.outcomes()
        assert others == [Done(r, ([3.0] * 20, [0, 1])) for r in (0, 1)], others
        assert isinstance(cut_off, Raised) and cut_off.isa("PeerLost"), cut_off
        assert "the store has not answered" in cut_off.message, cut_off.message
        assert "The group has failed" in cut_off.message and "goes on" not in cut_off.message
        assert cut_off.when - began < 40


def test_a_stopped_rank_is_left_out_and_told_so(pool: Pool) -> None:
    with Hosts(2) as hosts:
        call = start(pool, hosts, 4, 3.0)
        call.signal(3, signal.SIGSTOP)
        call.await_end(range(3), 60.0)
        call.signal(3, signal.SIGCONT)
        *others, stopped = call.outcomes()
        assert others == [Done(r, ([7.0] * 20, [0, 1, 2])) for r in range(3)], others
        assert isinstance(stopped, Raised) and stopped.isa("PeerLost"), stopped
        assert "was left out: ranks 0, 1 and 2 had no answer" in stopped.message, stopped.message
