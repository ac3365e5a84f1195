"""Random programs of calls, memory that comes and goes, graphs and streams, against an oracle on
the CPU, to the bit.

A program is its seed and the numbers of its actions: each action is drawn from both, so some of
them can be left out, and a program that fails is made shorter before it is shown.  To play one:

    RINGREDUCE_TEST_PROGRAM="17 0-9,12" pytest test_gpu_programs.py

All ranks draw the same; what a rank contributes, and where it pauses, is its own.  The host waits
for nothing between actions, so a rank may be ahead of another as far as its stream can.  Whole
blocks of memory are compared, so a write beside an output or into memory that was freed shows.
"""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from blame import expect_all
from conftest import Machine
from gpu_jobs import use_gpu
from pool import Died, Rank, RanksFailed

import ringreduce

ACTIONS = 16
CASES = 9  # machines and sizes
FULL = os.environ.get("RINGREDUCE_TEST_FULL", "0") not in ("", "0")
PROGRAMS = 1112 if FULL else 11  # of each case
KILLS = 20 if FULL else 1
_TOGETHER = 50  # programs in one job
_LONGEST = 70_000  # elements of a part
_SHIFTS = 64  # patterns begin at one of so many elements

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]
OPS: dict[str, tuple[dist.ReduceOp, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, lambda x: x.sum(0, dtype=x.dtype)),
    "product": (dist.ReduceOp.PRODUCT, lambda x: x.prod(0, dtype=x.dtype)),
    "min": (dist.ReduceOp.MIN, lambda x: x.amin(0)),
    "max": (dist.ReduceOp.MAX, lambda x: x.amax(0)),
    "average": (dist.ReduceOp.AVG, lambda x: _divided(x.sum(0, dtype=x.dtype), len(x))),
}


def _divided(x: torch.Tensor, by: int) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) / by).to(x.dtype)


@functools.cache
def pattern(dtype: torch.dtype, below: int) -> torch.Tensor:
    """Integers whose sums, or products if they are below 4, are exact in the dtype in any order.
    `below` 0: any numbers, whose sum is exact in no order."""
    draw = torch.Generator().manual_seed(1)
    length = 4 * _LONGEST + 4096
    if below == 0:
        return torch.randn(length, generator=draw, dtype=torch.float64).to(dtype)
    return torch.randint(0, below, (length,), generator=draw).to(dtype)


@functools.cache
def pattern_on(device: torch.device, dtype: torch.dtype, below: int) -> torch.Tensor:
    found = pattern(dtype, below).to(device)
    torch.cuda.synchronize()
    return found


@dataclass(eq=False)
class Memory:
    """A block on the GPU, and what should be in it.  What used it last recorded the event."""

    bytes: torch.Tensor
    home: torch.cuda.Stream  # for which it was allocated
    truth: torch.Tensor
    event: torch.cuda.Event | None = None
    busy: bool = False  # an asynchronous call has it, or a graph
    own: bool = False  # the group's, of which torch's allocator knows no streams

    def use(self, stream: torch.cuda.Stream) -> None:
        if self.event:
            stream.wait_event(self.event)
        if stream != self.home:
            self.bytes.record_stream(stream)

    def used(self, stream: torch.cuda.Stream) -> None:
        self.event = stream.record_event()

    @staticmethod
    def view(of: torch.Tensor, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
        end = of.numel() // dtype.itemsize * dtype.itemsize
        return of[:end].view(dtype)[first : first + count]


@dataclass(eq=False)
class Call:
    """A call with its memory: `fill` puts inputs there, `put` calls, both in the current stream."""

    memories: list[Memory]
    fill: Callable[[random.Random], None]
    put: Callable[[bool], dist.Work | None]


@dataclass(eq=False)
class Program:
    """What a rank has while it plays one."""

    me: Rank
    seed: int
    device: torch.device
    streams: list[torch.cuda.Stream]
    alive: list[Memory] = field(default_factory=list)
    graphs: list[tuple[torch.cuda.CUDAGraph, list[Call], torch.cuda.Stream]] = field(
        default_factory=list
    )
    pending: list[tuple[dist.Work, Call]] = field(default_factory=list)
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def do(self, at: int) -> str:
        """Does an action, and returns what it was."""
        draw = random.Random(f"{self.seed} {at}")
        own = random.Random(f"{self.seed} {at} {self.me.rank}")
        if own.randrange(16) == 0:
            time.sleep(own.random() / 200)
        stream = draw.choice(self.streams)
        kinds = {"call": 8, "wait": 3, "allocate": 3, "free": 2, "empty_cache": 1, "capture": 2}
        what = draw.choices([*kinds, "replay"], [*kinds.values(), 3])[0]
        with torch.cuda.stream(stream):
            getattr(self, what)(draw, stream, at)
        return what

    # ---- actions

    def allocate(self, draw: random.Random, stream: torch.cuda.Stream, _: int) -> None:
        self.alive.append(self._new(draw, stream, draw.choice([1000, 1 << 16, 600_000, 2 << 20])))

    def free(self, draw: random.Random, stream: torch.cuda.Stream, _: int) -> None:
        free = [one for one in self.alive if not one.busy]
        if free:
            one = draw.choice(free)
            if one.own and one.event:  # it goes behind the current stream
                stream.wait_event(one.event)
            self.alive.remove(one)

    def empty_cache(self, *_: object) -> None:
        torch.cuda.empty_cache()

    def call(self, draw: random.Random, stream: torch.cuda.Stream, at: int) -> None:
        call = self._draw(draw, stream)
        call.fill(draw)
        way = draw.choice(["blocking", "blocking", "asynchronous", "dropped"])
        work = call.put(way != "blocking")
        if way == "asynchronous":
            assert work is not None
            for memory in call.memories:
                memory.busy = True
            self.pending.append((work, call))
        elif way == "blocking":
            self._see(call, stream, at)
        else:  # nobody waits for it: its memory is free for others as soon as it is done
            for memory in call.memories:
                if memory in self.alive:
                    self.alive.remove(memory)

    def wait(self, draw: random.Random, stream: torch.cuda.Stream, at: int) -> None:
        if self.pending:
            work, call = self.pending.pop(draw.randrange(len(self.pending)))
            work.wait()
            for memory in call.memories:
                memory.busy = False
                memory.use(stream)
            self._see(call, stream, at)

    def capture(self, draw: random.Random, stream: torch.cuda.Stream, _: int) -> None:
        calls = []
        for _ in range(draw.randint(1, 3)):
            calls.append(self._draw(draw, stream))
            for memory in calls[-1].memories:  # the graph's own from now on
                memory.busy = True
        graph, apart = torch.cuda.CUDAGraph(), draw.random() < 0.3
        with torch.cuda.graph(graph):
            works = [call.put(apart) for call in calls]
            for work in works:
                if work is not None:
                    work.wait()
        self.graphs.append((graph, calls, stream))

    def replay(self, draw: random.Random, stream: torch.cuda.Stream, at: int) -> None:
        if not self.graphs:
            return
        graph, calls, last = draw.choice(self.graphs)
        stream.wait_stream(last)
        for call in calls:
            call.fill(draw)
        graph.replay()
        for call in calls:
            self._see(call, stream, at)
        self.graphs = [(g, c, stream if g is graph else s) for g, c, s in self.graphs]

    # ---- parts of them

    def _new(self, draw: random.Random, stream: torch.cuda.Stream, size: int) -> Memory:
        first, chance = draw.randrange(_SHIFTS), draw.random()
        # The group's own, which other ranks map, on all ranks or some; or torch's.
        own = chance < 0.3 or (chance < 0.6 and self.me.rank % 2 == 1)
        group = dist.group.WORLD
        assert group is not None
        make = group._get_backend(self.device).allocate_tensor if own else torch.empty
        found = make(size, dtype=torch.uint8, device=self.device)
        found.copy_(pattern_on(self.device, torch.int64, 64).view(torch.uint8)[first:][:size])
        truth = pattern(torch.int64, 64).view(torch.uint8)[first:][:size]
        memory = Memory(found, stream, truth.clone(), own=own)
        memory.used(stream)
        return memory

    def _take(
        self, draw: random.Random, stream: torch.cuda.Stream, size: int, others: list[Memory]
    ) -> Memory:
        """Free memory that is large enough, or new memory."""
        free = [
            one
            for one in self.alive
            if not one.busy and one.bytes.numel() >= size and one not in others
        ]
        if free and draw.random() < 0.8:
            return draw.choice(free)
        return self._new(draw, stream, size + draw.choice([0, 0, 512]))

    def _draw(self, draw: random.Random, stream: torch.cuda.Stream) -> Call:
        P, rank = self.me.world_size, self.me.rank
        kind = draw.choices(
            ["all_reduce", "broadcast", "all_gather", "reduce_scatter"], [2, 1, 1, 1]
        )[0]
        dtype, n = draw.choice(DTYPES), draw.choice([0, 1, 7, 500, 4097, _LONGEST])
        root, odd = draw.randrange(P), draw.choice([0, 0, 0, 1, 3])
        names = [name for name in OPS if name != "average" or dtype.is_floating_point]
        op, oracle = OPS[name := draw.choice(names)]
        # The sum of two is the same in any order.
        any_order = P == 2 and name != "average" and dtype.is_floating_point
        below = 4 if name == "product" else 0 if any_order else 64
        reads = n * P if kind == "reduce_scatter" else n
        writes = n * P if kind == "all_gather" else n
        in_place = kind in ("all_reduce", "broadcast") or draw.random() < 0.3
        memories: list[Memory] = []
        for count in [max(reads, writes)] if in_place else [reads, writes]:
            memories.append(self._take(draw, stream, (count + odd) * dtype.itemsize, memories))
        # In place, the smaller of both is this rank's part of the other.
        at = [odd + (rank * n if in_place and count < max(reads, writes) else 0)
              for count in (reads, writes)]  # fmt: skip

        def views(of: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            source, output = of[0], of[-1]
            return (
                Memory.view(source, dtype, at[0], reads),
                Memory.view(output, dtype, at[1], writes),
            )

        source, output = views([memory.bytes for memory in memories])
        true_source, truth = views([memory.truth for memory in memories])

        def fill(draw: random.Random) -> None:
            stream = torch.cuda.current_stream()
            for memory in memories:
                memory.use(stream)
            shifts = [draw.randrange(_SHIFTS) for _ in range(P)]
            source.copy_(pattern_on(self.device, dtype, below)[shifts[rank] :][:reads])
            inputs = torch.stack([pattern(dtype, below)[shift:][:reads] for shift in shifts])
            true_source.copy_(inputs[rank])
            if kind == "broadcast":
                truth.copy_(inputs[root])
            elif kind == "all_gather":
                truth.copy_(inputs.flatten())
            elif kind == "all_reduce":
                truth.copy_(oracle(inputs))
            else:
                truth.copy_(oracle(inputs)[rank * n :][:n])
            for memory in memories:
                memory.used(stream)

        def put(apart: bool) -> dist.Work | None:
            if kind == "all_gather":
                return dist.all_gather_into_tensor(output, source, async_op=apart)
            if kind == "reduce_scatter":
                return dist.reduce_scatter_tensor(output, source, op, async_op=apart)
            if kind == "all_reduce":
                return dist.all_reduce(output, op, async_op=apart)
            return dist.broadcast(output, root, async_op=apart)

        return Call(memories, fill, put)

    def _see(self, call: Call, stream: torch.cuda.Stream, at: int) -> None:
        """Keeps what is in all memory of a call that is in the stream, or behind it."""
        for memory in call.memories:
            memory.used(stream)
            self._keep(memory, at)

    def _keep(self, memory: Memory, at: int) -> None:
        copy = torch.empty_like(memory.bytes)
        copy.copy_(memory.bytes)
        memory.used(torch.cuda.current_stream())
        self.seen.append((at, copy, memory.truth.clone()))

    def end(self, last: int) -> None:
        """Waits for all calls, and compares."""
        draw = random.Random(self.seed)
        while self.pending:
            self.wait(draw, torch.cuda.current_stream(), last)
        for memory in self.alive:
            memory.use(torch.cuda.current_stream())
            self._keep(memory, last)
        torch.cuda.synchronize()
        for at, copy, truth in self.seen:
            differ = (copy.cpu() != truth).nonzero()
            assert not len(differ), (
                f"after action {at} {len(differ)} of {len(truth)} bytes differ, from "
                f"{int(differ[0])} to {int(differ[-1])}"
            )


def begin(me: Rank, seed: int) -> Program:
    device = use_gpu(me)
    # Ranks need not agree on this; memory of other programs in the process stays as it is.
    pieces = random.Random(f"{seed} {me.rank} pieces").random() < 0.5
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{pieces}")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    return Program(me, seed, device, streams)


def play(me: Rank, programs: Sequence[tuple[int, Sequence[int]]]) -> None:
    for seed, actions in programs:
        done = []
        try:
            program = begin(me, seed)
            done = [f"{at} {program.do(at)}" for at in actions]
            program.end(max(actions, default=0))
        except BaseException as error:
            raise AssertionError(f"program {seed}, of {done}: {error}") from error
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    torch.cuda.empty_cache()


def shortened(fails: Callable[[list[int]], bool], actions: list[int]) -> list[int]:
    """Fewer actions that fail too, as found within two minutes."""
    until, size = time.monotonic() + 120, len(actions) // 2
    while size:
        for first in range(0, len(actions), size):
            fewer = actions[:first] + actions[first + size :]
            if time.monotonic() < until and fails(fewer):
                actions = fewer
                break
        else:
            size //= 2
    return actions


def _chosen() -> tuple[int, list[int]] | None:
    text = os.environ.get("RINGREDUCE_TEST_PROGRAM")
    if not text:
        return None
    seed, _, ranges = text.partition(" ")
    actions: list[int] = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        actions += range(int(first), int(last or first) + 1)
    return int(seed), actions


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs(machine: Machine, size: int) -> None:
    world = machine.world(size, RINGREDUCE_CUDA_MAP="vmm")
    all_actions = list(range(ACTIONS))
    programs = [(seed, all_actions) for seed in range(PROGRAMS)]
    if chosen := _chosen():
        programs = [chosen]
    for first in range(0, len(programs), _TOGETHER):
        try:
            machine.pool.run(play, world, programs[first : first + _TOGETHER], deadline=300)
        except RanksFailed as failure:
            found = re.search(r"program (\d+), of", str(failure))
            if not found or chosen:
                raise
            seed = int(found[1])

            def fails(actions: list[int], seed: int = seed) -> bool:
                outcomes = machine.pool.start(play, world, [(seed, actions)]).outcomes(60)
                return any(f"program {seed}, of" in str(one) for one in outcomes)

            shorter = ",".join(map(str, shortened(fails, all_actions)))
            pytest.fail(f'RINGREDUCE_TEST_PROGRAM="{seed} {shorter}" fails too; whole:\n{failure}')


# ---- a rank dies


def play_to_the_death(me: Rank, seed: int) -> None:
    """A rank kills itself amid an action's calls.  What others have seen is right, or poison."""
    draw = random.Random(f"{seed} death")
    victim, when = draw.randrange(me.world_size), draw.randrange(ACTIONS)
    late = draw.random() / 500
    program = begin(me, seed)
    dist.all_reduce(torch.zeros(1, device=program.device))
    torch.cuda.synchronize()
    try:
        for at in range(ACTIONS):
            program.do(at)
            if at == when and me.rank == victim:
                time.sleep(late)
                os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            dist.all_reduce(torch.zeros(1, device=program.device))
            torch.cuda.synchronize()
            ringreduce.commit()
    except ringreduce.Error:
        torch.cuda.synchronize()
        for at, copy, truth in program.seen:
            differ = copy.cpu() != truth
            # NaN of any float dtype, or 0.
            poison = torch.tensor([0x00, 0x7E, 0x7F, 0xC0, 0xF8, 0xFF], dtype=torch.uint8)
            wrong = copy.cpu()[differ]
            assert bool(torch.isin(wrong, poison).all()), f"action {at} of program {seed}"
        raise


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_dies_in_a_random_program(machine: Machine, size: int) -> None:
    for seed in range(KILLS):
        outcomes = machine.start(
            play_to_the_death, size, seed, fresh=True, RINGREDUCE_CUDA_MAP="vmm"
        ).outcomes(60)
        draw = random.Random(f"{seed} death")
        victim = draw.randrange(size)
        assert isinstance(outcomes[victim], Died), (seed, outcomes[victim])
        expect_all(outcomes, [victim], "PeerLost", [victim])
