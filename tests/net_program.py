"""What the ranks of a run of net_faults.py do: random calls whose results are known beforehand.

All ranks draw the same calls from the run's seed, each checks every result, and they go on until
rank 0 is told to end.  A rank that raises says what, when, and how long it took to leave.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import Raised, Rank, describe

CALLS = (
    "all_reduce",
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "all_to_all",
    "send",
    "barrier",
)
DTYPES = (torch.float32, torch.int64, torch.bfloat16)
BETWEEN_LOOKS = 6  # calls from one of rank 0's decisions to go on to the next


class WrongNumbersError(Exception):
    """A call has returned what it must not."""


@dataclass(frozen=True)
class Slow:
    """A rank that computes for some seconds before its call of that number, and holds the GIL."""

    rank: int
    call: int
    seconds: float


@dataclass(frozen=True)
class Left:
    """How a rank came out of it: `raised`, or all its calls were right."""

    calls: int  # that ended, with right results where they have any
    raised: Raised | None
    leaving: float  # seconds that leaving the group took


def values(size: int, dtype: torch.dtype, rank: int, call: int) -> torch.Tensor:
    """What a rank brings to a call: small whole numbers, whose sums are exact in every type."""
    return ((torch.arange(size) * 7 + rank * 5 + call) % 23).to(dtype)


def total(size: int, dtype: torch.dtype, world: int, call: int) -> torch.Tensor:
    """The sum of what all ranks bring."""
    return torch.stack([values(size, dtype, r, call) for r in range(world)]).sum(0, dtype=dtype)


def check(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(got, expected):
        wrong = int((got != expected).nonzero()[0])
        raise WrongNumbersError(
            f"{what}: element {wrong} of {got.numel()} is {got[wrong]}, not {expected[wrong]}"
        )


@dataclass(frozen=True)
class Drawn:
    """A call: `one` is the root of a broadcast, `step` how far on the receiver of a send is."""

    name: str
    dtype: torch.dtype
    size: int
    one: int
    step: int


def drawn(draw: random.Random, largest: int, world: int) -> Drawn:
    name, dtype, size = draw.choice(CALLS), draw.choice(DTYPES), int(largest ** draw.random())
    one = draw.randrange(world)
    return Drawn(name, dtype, size, one, draw.randrange(1, world) if name == "send" else 0)


def calls_of(seed: int) -> random.Random:
    return random.Random(f"calls {seed}")


def name_of(seed: int, largest: int, world: int, number: int) -> str:
    """The name of that call, from 1, in a run with this seed."""
    draw = calls_of(seed)
    return [drawn(draw, largest, world) for _ in range(number)][-1].name


def call(me: Rank, number: int, draw: random.Random, largest: int) -> None:
    """One random call, the same on all ranks, and a look at its result."""
    world = me.world_size
    it = drawn(draw, largest, world)
    name, dtype, size, one = it.name, it.dtype, it.size, it.one
    what = f"call {number}, {name} of {size} x {dtype} on rank {me.rank}"
    mine = values(size, dtype, me.rank, number)
    if name == "all_reduce":
        dist.all_reduce(mine)
        check(mine, total(size, dtype, world, number), what)
    elif name == "broadcast":
        dist.broadcast(mine, one)
        check(mine, values(size, dtype, one, number), what)
    elif name == "all_gather":
        gathered = [torch.empty(size, dtype=dtype) for _ in range(world)]
        dist.all_gather(gathered, mine)
        for rank in range(world):
            check(gathered[rank], values(size, dtype, rank, number), what)
    elif name == "reduce_scatter":
        every = total(size * world, dtype, world, number)
        part = torch.empty(size, dtype=dtype)
        dist.reduce_scatter_tensor(part, values(size * world, dtype, me.rank, number))
        check(part, every.view(world, size)[me.rank], what)
    elif name == "all_to_all":
        given = values(size * world, dtype, me.rank, number)
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given)
        for rank in range(world):
            theirs = values(size * world, dtype, rank, number).view(world, size)
            check(got.view(world, size)[rank], theirs[me.rank], what)
    elif name == "send":
        source, got = (me.rank - it.step) % world, torch.empty(size, dtype=dtype)
        works = [dist.isend(mine, (me.rank + it.step) % world), dist.irecv(got, source)]
        for work in works:
            work.wait()
        check(got, values(size, dtype, source, number), what)
    else:
        dist.barrier()


def calls_until_told(
    me: Rank, draw: random.Random, largest: int, slow: Slow | None
) -> Iterator[int]:
    """The number of each call, from 1, once its result was right."""
    for number in itertools.count(1):
        if slow and (me.rank, number) == (slow.rank, slow.call):
            ctypes.PyDLL(None).usleep(int(slow.seconds * 1e6))  # PyDLL: without letting the GIL go
        call(me, number, draw, largest)
        yield number
        if number % BETWEEN_LOOKS == 0:
            more = torch.tensor([not me.conn.poll(0)])
            dist.broadcast(more, 0)
            if number == BETWEEN_LOOKS:
                me.tell("flowing")
            if not more.item():
                return


def last_calls(me: Rank, draw: random.Random, largest: int, leaver: int) -> None:
    """One rank gives what it has and is gone; the others take it when they come to it."""
    late = [draw.random() for _ in range(me.world_size)]
    by_message, size = draw.random() < 0.5, int(largest ** draw.random())
    if me.rank != leaver:
        time.sleep(late[me.rank])
    given = values(size, torch.float32, me.rank, 0)
    wanted = values(size, torch.float32, leaver, 0)
    if not by_message:
        dist.broadcast(given, leaver)
        check(given, wanted, f"the last broadcast on rank {me.rank}")
    elif me.rank == leaver:
        works = [dist.isend(given, r) for r in range(me.world_size) if r != leaver]
        for work in works:
            work.wait()
    else:
        dist.recv(given, leaver)
        check(given, wanted, f"the last message to rank {me.rank}")
    if me.rank == leaver:
        dist.destroy_process_group()
        os._exit(0)


def program(me: Rank, seed: int, largest: int, slow: Slow | None, leaver: int) -> Left:
    """A rank's whole run; `leaver` is -1 if nobody is to leave before the others."""
    draw = calls_of(seed)
    done, raised = 0, None
    try:
        for done in calls_until_told(me, draw, largest, slow):  # noqa: B007
            pass
        if leaver >= 0:
            last_calls(me, draw, largest, leaver)
        elif draw.random() < 0.5:
            dist.barrier()
    except Exception as error:
        raised = describe(me.rank, error)
    start = time.monotonic()
    dist.destroy_process_group()
    return Left(done, raised, time.monotonic() - start)


def outcome_of(value: Any) -> str:
    """A rank's end in a few words."""
    if isinstance(value, Left):
        said = (
            f"raised {value.raised.kinds[0]}: {value.raised.message}" if value.raised else "right"
        )
        return f"{said} (left in {value.leaving:.2f} s)"
    return str(value)
