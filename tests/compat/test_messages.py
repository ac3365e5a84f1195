"""Messages between ranks in torch's calls: sources, Futures, ends.

tests/cpp/messages_test.cc and messages_end_test.cc have every size and order, messages to oneself,
and what becomes of messages when a rank leaves.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect
from conftest import MakeWorld
from pool import Died, Pool, Rank, on_ranks
from test_failures import add_up

LARGE = 300_000  # elements; more than is sent before it is wanted


def said(call: Any) -> str:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def number(value: float, n: int = 4) -> torch.Tensor:
    return torch.full((n,), float(value))


def receive(source: int | None, n: int = 4, tag: int = 0) -> float:
    t = number(-1, n)
    dist.recv(t, source, tag=tag)
    assert bool((t == t[0]).all())
    return float(t[0])


def from_any(me: Rank) -> list[tuple[int, float]]:
    """Each of the others sends two; rank 0 takes what comes."""
    if me.rank:
        dist.send(number(me.rank), 0, tag=3)
        dist.send(number(10 * me.rank), 0, tag=3)
        return []
    got = []
    for k in range(2 * (me.world_size - 1)):
        t = number(-1)
        if k % 2:
            work = dist.irecv(t, tag=3)
            work.wait()
            source = work._source_rank()
        else:
            source = dist.recv(t, tag=3)
        got.append((source, float(t[0])))
    return got


@pytest.mark.parametrize("size", [2, 4])
def test_from_any_rank(pool: Pool, world: MakeWorld, size: int) -> None:
    got = pool.run(from_any, world(size))[0]
    assert sorted(got) == sorted((r, f * r) for r in range(1, size) for f in (1.0, 10.0))
    for rank in range(1, size):
        assert [v for r, v in got if r == rank] == [rank, 10.0 * rank]


@on_ranks(3)
def test_from_any_rank_of_a_part(me: Rank) -> None:
    """In a group of ranks 1 and 2 the source is told as torch tells it: as a rank of the whole."""
    group = dist.new_group([2, 1])
    if me.rank == 2:
        dist.send(number(8), 1, group=group)
    elif me.rank == 1:
        assert dist.recv(number(0), group=group) == 2
    dist.barrier()


def a_peer_leaves(me: Rank) -> list[Any]:
    """Rank 2 leaves.  Who receives from it is told; the two others go on with each other."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier(group=group)
    ends: list[Any] = []
    if me.rank == 2:
        dist.send(number(1), 0, group=group)  # stays there to be received
        dist.destroy_process_group(group)
    else:
        works = [dist.irecv(number(-1), 2, group=group, tag=t) for t in (4, 5)]
        ends = [said(work.wait) for work in works]
        ends.append(said(lambda: dist.send(number(1, LARGE), 2, group=group)))
        if me.rank == 0:
            t = number(-1)
            dist.recv(t, 2, group=group)
            ends.append(float(t[0]))
            dist.send(number(6), 1, group=group)
        else:
            t = number(-1)
            ends.append(dist.recv(t, group=group) * 100 + float(t[0]))
    dist.barrier()
    return ends


def test_a_peer_leaves(pool: Pool, world: MakeWorld) -> None:
    found = pool.run(a_peer_leaves, world(3))
    for rank in (0, 1):
        for text in found[rank][:3]:
            assert text.startswith("PeerLost: ") and "left group" in text, text
            assert blamed(text) == {2}, text
    assert found[0][3] == 1.0 and found[1][3] == 6.0


def die_after_sending(me: Rank) -> list[Any]:
    if me.rank == 1:
        for k in range(3):
            dist.send(number(k), 0)
        if os.environ.get("RINGREDUCE_WIRE") == "tcp":
            time.sleep(1.0)  # between hosts what was sent leaves a little later (docs/hosts.md)
        me.tell("sent")
        os.kill(os.getpid(), signal.SIGKILL)
    me.hear()
    return [receive(1), receive(1), receive(1), receive(1)]


def test_what_a_dead_rank_has_sent_arrives(pool: Pool, world: MakeWorld) -> None:
    job = pool.start(die_after_sending, world(2))
    job.heard(1)
    time.sleep(0.1)
    job.tell(0)
    outcomes = job.outcomes()
    assert outcomes[1] == Died(1, -signal.SIGKILL)
    raised = expect(outcomes[0], "PeerLost", {1}, says=r"receive 4 elements .* \(message #3\)")
    assert "ended" in raised.message
    assert pool.run(add_up, world(2)) == [3.0] * 2


def send_and_leave(me: Rank) -> float:
    dist.barrier()
    me.tell("there")
    if me.rank == 1:
        return receive(0)
    me.hear()
    dist.send(number(7), 1)
    dist.destroy_process_group()
    return 0.0


def test_who_leaves_waits_for_its_messages(pool: Pool, world: MakeWorld) -> None:
    """However long their receiver takes them: here it is stopped."""
    job = pool.start(send_and_leave, world(2))
    for rank in (0, 1):
        job.heard(rank)
    job.signal(1, signal.SIGSTOP)
    job.tell(0)
    time.sleep(1.5)
    job.signal(1, signal.SIGCONT)
    assert job.results() == [0.0, 7.0]


def wait_for_each_other(me: Rank) -> str:
    return said(lambda: dist.recv(number(0), 1 - me.rank))


@pytest.mark.parametrize("wire", ["memory", "tcp"])
def test_ranks_that_wait_for_each_other_are_told_so(
    pool: Pool, world: MakeWorld, wire: str
) -> None:
    group = world(2, timeout=2.0, **({"WIRE": "tcp"} if wire == "tcp" else {}))
    for text in pool.run(wait_for_each_other, group):
        assert text.startswith("Timeout") and "and waits for this rank itself" in text, text


def futures_without_an_end(me: Rank) -> list[str]:
    """Nobody calls Work.wait: torch waits for the Future, in its own code."""
    if me.rank == 0:
        work = dist.irecv(number(0), 1)
        outcome = [said(work.get_future().wait)]
    else:
        time.sleep(3.5)  # alive, and sends nothing
        outcome = []
    return [*outcome, said(lambda: dist.barrier())]


def test_a_future_of_a_receive_has_a_deadline(pool: Pool, world: MakeWorld) -> None:
    (future, after), (other,) = pool.run(futures_without_an_end, world(2, timeout=2.0))
    assert future.startswith("Timeout") and "rank 1" in future, future
    assert "did not send it" in future, future
    assert after.startswith("Timeout") and other.startswith("Timeout"), (after, other)


def leave_with_a_send(me: Rank) -> None:
    """Rank 0 leaves while rank 1, alive, does not receive what it was sent."""
    if me.rank == 1:
        me.hear()  # comes only after rank 0 has left
        return
    dist.isend(number(1, LARGE), 1)
    started = time.monotonic()
    dist.destroy_process_group()
    me.tell(time.monotonic() - started)


def test_leaving_has_a_deadline(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(leave_with_a_send, world(2, timeout=1.5))
    assert call.heard(0) > 1.0
    call.tell(1)
    call.results()


@on_ranks(2)
def test_lazy_views(me: Rank) -> None:
    """A view that torch has not negated yet is sent as what it shows."""
    got = number(0, 3)
    if me.rank == 0:
        dist.send(torch._neg_view(torch.tensor([1.0, 2.0, -3.0])), 1)
    else:
        dist.recv(got, 0)
        assert got.tolist() == [-1.0, -2.0, 3.0]


@on_ranks(2)
def test_futures(me: Rank) -> None:
    other, t = 1 - me.rank, number(-1)
    work = dist.irecv(t, other)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2)
    dist.send(number(me.rank + 1), other)
    assert doubled.wait().eq(2 * (other + 1)).all()
    late = dist.isend(number(0), other)
    late.wait()
    assert late.get_future().done() and receive(other) == 0.0
    dist.barrier()
