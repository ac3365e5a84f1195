"""Groups that go over sockets: on this host, and between hosts that are network namespaces."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import expect
from conftest import MakeWorld
from hosts import Hosts, why_not
from pool import Died, Pool, Raised, Rank, World

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8)
SIZES = (0, 1, 1000, 70_001, 1_500_000)


def sums(me: Rank) -> list[tuple[Any, ...]]:
    """The bits of all-reduces, and what else a group can do."""
    found: list[tuple[Any, ...]] = []
    for dtype in DTYPES:
        for size in SIZES:
            generator = torch.Generator().manual_seed(100 * me.rank + size % 97)
            t = (torch.rand(size, generator=generator) * 20 - 5).to(dtype)
            dist.all_reduce(t)
            found.append((str(dtype), size, hash(t.view(torch.uint8).numpy().tobytes())))
    gathered = [torch.empty(3) for _ in range(me.world_size)]
    dist.all_gather(gathered, torch.full((3,), float(me.rank)))
    assert torch.stack(gathered)[:, 0].tolist() == list(range(me.world_size))
    for root in range(me.world_size):
        t = torch.full((300_000,), float(me.rank))
        dist.broadcast(t, root)
        assert t.eq(root).all()
    peer = me.rank ^ 1
    if peer < me.world_size:
        t = torch.full((200_000,), float(me.rank))
        got = torch.empty_like(t)
        for work in [dist.isend(t, peer), dist.irecv(got, peer)]:
            work.wait()
        assert got.eq(peer).all()
    dist.barrier()
    return found


# ---- between network namespaces


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with Hosts(3, delay_ms=0.1, rate_mbit=1000) as hosts:
        yield hosts


def on(
    hosts: Hosts, per_host: int = 1, family: str = "ipv4", timeout: float = 60.0, order: str = ""
) -> World:
    places = hosts.places(per_host=per_host, family=family)
    env = (("RINGREDUCE_ORDER", order),)
    return World(per_host * len(hosts), "ringreduce", env, timeout, places)


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
@pytest.mark.parametrize(("per_host", "order"), [(1, "ring"), (2, "ring"), (2, "rank")])
def test_hosts_give_the_bits_of_one(
    pool: Pool, world: MakeWorld, three: Hosts, per_host: int, order: str, family: str
) -> None:
    apart = pool.start(sums, on(three, per_host, family, order=order), fresh=True).results()
    assert all(bits == apart[0] for bits in apart)
    if per_host == 1 or order == "rank":  # the hierarchy has an order of its own
        assert apart == pool.start(sums, world(3 * per_host, ORDER=order)).results()


def loop(me: Rank, victim: int, own_end: bool) -> None:
    """All-reduces until something happens."""
    t = torch.ones(50_000)
    for k in range(10**9):
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        if k == 20:
            me.tell("flowing")
        if k == 40 and own_end and me.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_all(pool: Pool, three: Hosts, victim: int) -> None:
    call = pool.start(loop, on(three), victim, True, fresh=True)
    for outcome in call.outcomes():
        if outcome.rank == victim:
            assert outcome == Died(victim, -signal.SIGKILL)
        else:
            expect(outcome, "PeerLost", [victim], "its process ended")


def test_a_host_that_is_cut_off_is_named_and_names_the_others(pool: Pool) -> None:
    with Hosts(3, delay_ms=0.1, rate_mbit=1000) as hosts:
        call = pool.start(loop, on(hosts), 2, False, fresh=True)
        call.hear_all("flowing")
        hosts.cut(2)
        for outcome in call.outcomes():
            assert isinstance(outcome, Raised) and outcome.isa("PeerLost"), outcome
            lost = "rank 2" if outcome.rank != 2 else "rank [01]"
            assert re.search(lost + r" \(.* is lost", outcome.message), outcome.message


def receive_from_the_last(me: Rank) -> None:
    dist.barrier()
    me.tell("there")
    if me.rank == me.world_size - 1:
        me.hear()
    else:
        dist.recv(torch.empty(4), me.world_size - 1)


def test_who_waits_for_a_message_hears_why_it_will_not_come(pool: Pool) -> None:
    with Hosts(3, delay_ms=0.1, rate_mbit=1000) as hosts:
        call = pool.start(receive_from_the_last, on(hosts), fresh=True)
        call.hear_all("there")
        hosts.cut(2)
        call.await_end([0, 1], 20)
        call.tell(2)
        for outcome in call.outcomes()[:2]:
            expect(outcome, "PeerLost", [2], "is lost: no packet from its host came")


def test_a_stopped_rank_is_not_taken_for_dead(pool: Pool, three: Hosts) -> None:
    call = pool.start(loop, on(three, timeout=6.0), 1, False, fresh=True)
    call.hear_all("flowing")
    call.signal(1, signal.SIGSTOP)
    call.await_end([0, 2], 40)
    for rank in (0, 2):
        expect(call.ended[rank], "Timeout", [1])
    call.signal(1, signal.SIGKILL)
    call.outcomes()
