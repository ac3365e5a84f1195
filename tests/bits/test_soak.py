"""Programs of a thousand calls, drawn from a seed: every call, several groups that share ranks,
blocking and not, waited for in any order, from two threads.

A program is a list of steps that every rank draws alike and takes its part in.  Steps of one group
all belong to one thread, which takes them in the program's order, so no program can lock up.  What
a step must give is computed from the same numbers, with integers: exact in any order of addition.

The seed is printed; RINGREDUCE_SEED=n repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank
from threads import in_threads

Tensor = torch.Tensor
WORLD = 4
# The members of each group, and the thread that uses it.
GROUPS = (
    ((0, 1, 2, 3), 0),
    ((0, 1), 0),
    ((1, 2, 3), 0),
    ((3, 0), 0),
    ((0, 1, 2, 3), 1),
    ((0, 2, 3), 1),
    ((1, 2), 1),
)
THREADS = 2
MOST_PENDING = 12


@dataclass(frozen=True)
class Step:
    number: int
    group: int
    call: str
    count: int
    dtype: torch.dtype
    maximum: bool  # MAX, else SUM
    root: int  # of the group; of a message the sender
    peer: int  # of a message the receiver, another one
    asynchronous: bool

    @property
    def size(self) -> int:
        return len(GROUPS[self.group][0])

    @property
    def op(self) -> Any:
        return dist.ReduceOp.MAX if self.maximum else dist.ReduceOp.SUM

    def value(self, a: int, b: int = 0, count: int = -1) -> Tensor:
        """What rank a of the group gives, or gives rank b."""
        n = self.count if count < 0 else count
        numbers = torch.arange(n) * 3 + self.number * 17 + a * 101 + b * 59
        return (numbers % 251).to(self.dtype)

    def total(self, b: int = 0, count: int = -1) -> Tensor:
        every = torch.stack([self.value(a, b, count).long() for a in range(self.size)])
        return (every.amax(0) if self.maximum else every.sum(0)).to(self.dtype)

    def room(self, count: int = -1) -> Tensor:
        return torch.zeros(self.count if count < 0 else count, dtype=self.dtype)

    def uneven(self, a: int, b: int) -> int:
        """How much rank a gives rank b where that differs."""
        return (self.count // (1 + (a + 2 * b) % 3)) * ((a + b + self.number) % 4 > 0)


@dataclass
class Place:
    """One rank's place in a step."""

    rank: int  # of the group
    group: dist.ProcessGroup
    asynchronous: bool

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}


# What a call gives: what is to be waited for, and pairs of tensors that must then be equal.
Started = tuple[list[Any], Callable[[], list[tuple[Tensor, Tensor]]]]


def all_reduce(s: Step, at: Place) -> Started:
    t = s.value(at.rank)
    return [dist.all_reduce(t, op=s.op, **at.how)], lambda: [(t, s.total())]


def reduce(s: Step, at: Place) -> Started:
    t, root = s.value(at.rank), at.rank == s.root
    work = dist.reduce(t, group_dst=s.root, op=s.op, **at.how)
    return [work], lambda: [(t, s.total() if root else s.value(at.rank))]


def reduce_scatter(s: Step, at: Place) -> Started:
    counts = [s.uneven(0, b) for b in range(s.size)]
    out = s.room(counts[at.rank])
    parts = [s.value(at.rank, b, n) for b, n in enumerate(counts)]
    work = dist.reduce_scatter(out, parts, op=s.op, **at.how)
    return [work], lambda: [(out, s.total(at.rank, counts[at.rank]))]


def reduce_scatter_tensor(s: Step, at: Place) -> Started:
    out, whole = s.room(), torch.cat([s.value(at.rank, b) for b in range(s.size)])
    work = dist.reduce_scatter_tensor(out, whole, op=s.op, **at.how)
    return [work], lambda: [(out, s.total(at.rank))]


def broadcast(s: Step, at: Place) -> Started:
    t = s.value(at.rank)
    return [dist.broadcast(t, group_src=s.root, **at.how)], lambda: [(t, s.value(s.root))]


def all_gather(s: Step, at: Place) -> Started:
    counts = [s.uneven(a, 0) for a in range(s.size)]
    outs = [s.room(n) for n in counts]
    work = dist.all_gather(outs, s.value(at.rank, 0, counts[at.rank]), **at.how)
    return [work], lambda: [(out, s.value(a, 0, counts[a])) for a, out in enumerate(outs)]


def all_gather_into_tensor(s: Step, at: Place) -> Started:
    out = s.room(s.size * s.count)
    work = dist.all_gather_into_tensor(out, s.value(at.rank), **at.how)
    return [work], lambda: [(out, torch.cat([s.value(a) for a in range(s.size)]))]


def gather(s: Step, at: Place) -> Started:
    outs = [s.room() for _ in range(s.size)] if at.rank == s.root else []
    work = dist.gather(s.value(at.rank), outs or None, group_dst=s.root, **at.how)
    return [work], lambda: [(out, s.value(a)) for a, out in enumerate(outs)]


def scatter(s: Step, at: Place) -> Started:
    parts = [s.value(s.root, b) for b in range(s.size)] if at.rank == s.root else None
    out = s.room()
    work = dist.scatter(out, parts, group_src=s.root, **at.how)
    return [work], lambda: [(out, s.value(s.root, at.rank))]


def all_to_all(s: Step, at: Place) -> Started:
    parts = [s.value(at.rank, b, s.uneven(at.rank, b)) for b in range(s.size)]
    counts = [s.uneven(a, at.rank) for a in range(s.size)]
    outs = [s.room(n) for n in counts]
    work = dist.all_to_all(outs, parts, **at.how)
    return [work], lambda: [(o, s.value(a, at.rank, counts[a])) for a, o in enumerate(outs)]


def all_to_all_single(s: Step, at: Place) -> Started:
    sent = [s.uneven(at.rank, b) for b in range(s.size)]
    counts = [s.uneven(a, at.rank) for a in range(s.size)]
    whole = torch.cat([s.value(at.rank, b, n) for b, n in enumerate(sent)])
    out = s.room(sum(counts))
    work = dist.all_to_all_single(out, whole, counts, sent, **at.how)
    wanted = [s.value(a, at.rank, n) for a, n in enumerate(counts)]
    return [work], lambda: [(out, torch.cat(wanted))]


def barrier(s: Step, at: Place) -> Started:
    return [dist.barrier(**at.how)], list


def message(s: Step, at: Place) -> Started:
    """With few tags, so that several messages of one tag are under way."""
    tag = s.number % 3
    if at.rank == s.root:
        t, to = s.value(s.root), {"group_dst": s.peer, "group": at.group, "tag": tag}
        return [dist.isend(t, **to) if at.asynchronous else dist.send(t, **to)], list
    if at.rank != s.peer:
        return [], list
    out, whence = s.room(), {"group_src": s.root, "group": at.group, "tag": tag}
    work = dist.irecv(out, **whence) if at.asynchronous else dist.recv(out, **whence)
    return [work if at.asynchronous else None], lambda: [(out, s.value(s.root))]


def from_any(s: Step, at: Place) -> Started:
    """All others send to one, which takes what comes."""
    tag = 1000 + s.number
    if at.rank != s.root:
        return [dist.isend(s.value(at.rank), group_dst=s.root, group=at.group, tag=tag)], list
    outs = [s.room() for _ in range(s.size - 1)]
    works = [dist.irecv(out, group=at.group, tag=tag) for out in outs]

    def pairs() -> list[tuple[Tensor, Tensor]]:
        sources = [work._source_rank() for work in works]
        assert sorted(sources) == sorted(set(range(s.size)) - {s.root}), sources
        return [(out, s.value(r)) for out, r in zip(outs, sources, strict=True)]

    return works, pairs


CALLS = {
    f.__name__: f
    for f in (
        *(all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, broadcast, all_gather),
        *(all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single, barrier),
        *(message, from_any),
    )
}


def program(seed: int, length: int) -> list[Step]:
    draw = random.Random(seed)
    weights = [4 if name == "message" else 1 for name in CALLS]
    steps = []
    for number in range(length):
        group = draw.randrange(len(GROUPS))
        root, peer = draw.sample(range(len(GROUPS[group][0])), 2)
        steps.append(
            Step(
                number=number,
                group=group,
                call=draw.choices(list(CALLS), weights)[0],
                count=draw.choice((0, 1, 5, 64, 1000, 5000, 5000, 30_000)),
                dtype=draw.choice((torch.float32, torch.float64, torch.int32, torch.uint8)),
                maximum=draw.random() < 0.3,
                root=root,
                peer=peer,
                asynchronous=draw.random() < 0.5,
            )
        )
    return steps


def take_part(me: Rank, steps: list[Step], groups: list[Any], draw: random.Random) -> None:
    """One thread's steps; what is not waited for at once is, some of it at a time, in any order."""
    pending: list[tuple[Step, Started]] = []

    def finish(step: Step, started: Started) -> None:
        works, pairs = started
        for work in works:
            if work is not None:
                work.wait()
        for got, wanted in pairs():
            assert torch.equal(got, wanted), f"{step}: got {got}, not {wanted}"

    for step in steps:
        members = GROUPS[step.group][0]
        if me.rank not in members:
            continue
        place = Place(members.index(me.rank), groups[step.group], step.asynchronous)
        started = CALLS[step.call](step, place)
        # Nobody is made to wait for a step's sends before its receives have been posted.
        if step.asynchronous or step.call == "from_any":
            pending.append((step, started))
        else:
            finish(step, started)
        if len(pending) > MOST_PENDING:
            draw.shuffle(pending)
            while len(pending) > MOST_PENDING // 2:
                finish(*pending.pop())
    while pending:
        finish(*pending.pop(draw.randrange(len(pending))))


def run_program(me: Rank, seed: int, length: int) -> int:
    # Not sorted: ranks of a group are numbered as given only so.
    groups = [dist.new_group(list(members), sort_ranks=False) for members, _ in GROUPS]
    steps = program(seed, length)

    def use(thread: int) -> None:
        own = [step for step in steps if GROUPS[step.group][1] == thread]
        take_part(me, own, groups, random.Random(seed * 31 + me.rank * 7 + thread))

    def abort() -> None:  # so that nobody waits for a thread until a deadline
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                group.abort()

    in_threads([partial(use, thread) for thread in range(THREADS)], timeout=100.0, at_error=abort)
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    return len(steps)


def test_soak(pool: Pool, world: MakeWorld, full: bool) -> None:
    given = os.environ.get("RINGREDUCE_SEED")
    seeds = [int(given)] if given else [random.SystemRandom().randrange(10**6)]
    if full and not given:
        seeds += [seeds[0] + k for k in range(1, 40)]
    length = 1000
    for seed in seeds:
        print(f"RINGREDUCE_SEED={seed}")
        assert pool.run(run_program, world(WORLD), seed, length, deadline=120.0) == [length] * WORLD
