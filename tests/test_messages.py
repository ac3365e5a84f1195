"""Messages between ranks, as scripts send and receive them: tags, order, sources, both at once."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect
from conftest import MakeWorld
from pool import Died, Done, Pool, Rank
from processes import wait_until

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


def in_order(me: Rank, seed: int) -> None:
    """Within a tag messages keep their order, small behind large ones too, whoever waits how."""
    draw = random.Random(seed)
    counts = [draw.choice([0, 1, 100, 5000, LARGE]) for _ in range(40)]
    which = [draw.randrange(2) for _ in counts]  # the tag
    mine = random.Random(seed + 1 + me.rank)
    works, got = [], []
    for k, (n, tag) in enumerate(zip(counts, which, strict=True)):
        t = number(k if me.rank == 0 else -1, n)
        if me.rank == 0:
            works.append(dist.isend(t, 1, tag=tag))
        else:
            works.append(dist.irecv(t, 0, tag=tag))
        got.append(t)
        if mine.random() < 0.1:
            time.sleep(0.002)
    mine.shuffle(works)
    for work in works:
        work.wait()
        assert work.is_completed()
    for k, t in enumerate(got):
        assert bool((t == k).all()), f"message {k} of {counts[k]} elements"


@pytest.mark.parametrize("seed", range(3))
def test_order_within_a_tag(pool: Pool, world: MakeWorld, seed: int) -> None:
    pool.run(in_order, world(2), seed)


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


def any_in_a_part(me: Rank) -> int:
    """In a group of ranks 1 and 2 the source is told as torch tells it: as a rank of the whole."""
    group = dist.new_group([2, 1])
    source = -5
    if me.rank == 2:
        dist.send(number(8), 1, group=group)
    elif me.rank == 1:
        source = dist.recv(number(0), group=group)
    dist.barrier()
    return source


@pytest.mark.ringreduce
def test_from_any_rank_of_a_part(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(any_in_a_part, world(3)) == [-5, 2, -5]


def batch(me: Rank, n: int) -> None:
    """Everybody with everybody, in both directions at once."""
    p = me.world_size
    got = [number(-1, n) for _ in range(p)]
    ops = []
    for r in range(p):
        if r != me.rank:
            ops.append(dist.P2POp(dist.irecv, got[r], r))
            ops.append(dist.P2POp(dist.isend, number(10 * me.rank + r, n), r))
    for _ in range(2):
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    for r in range(p):
        assert r == me.rank or bool((got[r] == 10 * r + me.rank).all()), f"from {r}"


@pytest.mark.parametrize("n", [3, LARGE])
@pytest.mark.parametrize("size", [2, 3])
def test_batches(pool: Pool, world: MakeWorld, size: int, n: int) -> None:
    pool.run(batch, world(size), n)


def poll(me: Rank, n: int) -> None:
    """A receive that nobody waits for is done some time."""
    if me.rank == 0:
        dist.barrier()
        time.sleep(0.1)
        dist.isend(number(9, n), 1).wait()
        return
    t = number(-1, n)
    work = dist.irecv(t, 0)
    assert not work.is_completed()
    dist.barrier()  # beside a message that is awaited
    assert wait_until(work.is_completed, 20.0), "never done"
    assert bool((t == 9).all())
    work.wait()


@pytest.mark.ringreduce
@pytest.mark.parametrize("n", [4, LARGE])
def test_polling_without_a_wait(pool: Pool, world: MakeWorld, n: int) -> None:
    pool.run(poll, world(2), n)


def to_oneself(me: Rank) -> list[float]:
    """torch's functions refuse it; a group does it."""
    group = dist.group.WORLD
    assert group is not None
    assert "ValueError" in said(lambda: dist.send(number(1), me.rank))
    got = []
    for n in (4, LARGE):
        t = number(-1, n)
        works = [group.send([number(me.rank + 3, n)], me.rank, 5), group.recv([t], me.rank, 5)]
        for work in works:
            work.wait()
        assert bool((t == t[0]).all())
        got.append(float(t[0]))
    dist.barrier()
    return got


@pytest.mark.ringreduce
@pytest.mark.parametrize("size", [1, 2])
def test_to_oneself(pool: Pool, world: MakeWorld, size: int) -> None:
    assert pool.run(to_oneself, world(size)) == [[r + 3.0] * 2 for r in range(size)]


def destroy_with_receives(me: Rank) -> list[str]:
    group = dist.new_group()
    works = [dist.irecv(number(-1), 1 - me.rank, group=group) for _ in range(3)]
    works.append(dist.irecv(number(-1), group=group))
    dist.barrier()
    dist.destroy_process_group(group)
    ends = [said(work.wait) for work in works]
    assert all(work.is_completed() and not work.is_success() for work in works)
    dist.barrier()  # of another group: nothing has happened to it
    return ends


@pytest.mark.ringreduce
def test_destroy_with_open_receives(pool: Pool, world: MakeWorld) -> None:
    """Each ends with an error; it was this rank that left, or the other had already."""
    for rank, ends in enumerate(pool.run(destroy_with_receives, world(2))):
        for text in ends:
            assert text.startswith(("Aborted: ", "PeerLost: ")) and "left group" in text, text
            assert blamed(text) == ({rank} if text.startswith("Aborted") else {1 - rank}), text


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


@pytest.mark.ringreduce
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


@pytest.mark.ringreduce
def test_what_a_dead_rank_has_sent_arrives(pool: Pool, world: MakeWorld) -> None:
    job = pool.start(die_after_sending, world(2))
    job.heard(1)
    time.sleep(0.1)
    job.tell(0)
    outcomes = job.outcomes()
    assert outcomes[1] == Died(1, -signal.SIGKILL)
    raised = expect(outcomes[0], "PeerLost", {1}, says=r"receive 4 elements .* \(message #3\)")
    assert "ended" in raised.message
    assert all(isinstance(o, Done) for o in pool.start(to_oneself, world(2)).outcomes())


def send_and_leave(me: Rank) -> float:
    dist.barrier()
    me.tell("there")
    if me.rank == 1:
        return receive(0)
    me.hear()
    dist.send(number(7), 1)
    dist.destroy_process_group()
    return 0.0


@pytest.mark.ringreduce
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


@pytest.mark.ringreduce
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


@pytest.mark.ringreduce
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


@pytest.mark.ringreduce
def test_leaving_has_a_deadline(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(leave_with_a_send, world(2, timeout=1.5))
    assert call.heard(0) > 1.0
    call.tell(1)
    call.results()


def lazy_views(me: Rank) -> list[float]:
    """A view that torch has not negated yet is sent as what it shows."""
    got = number(0, 3)
    if me.rank == 0:
        dist.send(torch._neg_view(torch.tensor([1.0, 2.0, -3.0])), 1)
    else:
        dist.recv(got, 0)
    return got.tolist()


@pytest.mark.ringreduce
def test_lazy_views(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(lazy_views, world(2))[1] == [-1.0, -2.0, 3.0]


def futures(me: Rank) -> float:
    other, t = 1 - me.rank, number(-1)
    work = dist.irecv(t, other)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2)
    dist.send(number(me.rank + 1), other)
    twice = float(doubled.wait()[0])
    late = dist.isend(number(0), other)
    late.wait()
    assert late.get_future().done() and receive(other) == 0.0
    dist.barrier()
    return twice


@pytest.mark.ringreduce
def test_futures(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(futures, world(2)) == [4.0, 2.0]
