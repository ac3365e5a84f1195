"""Random programs of Horovod's operations, on ranks that submit and await them in other orders.

test_horovod.py runs them (with RINGREDUCE_SEED=n from that seed on), and kills a rank in some.

A program is drawn from its seed by all ranks alike: a list of phases with named operations.  Each
rank submits a phase's operations in an order of its own, with small delays, and awaits them in
another order, some of them phases later.  Names come again, mostly with the same tensors, so that
the coordinator's cache is used, and sometimes with others.  In some operations one rank asks for
something else, and all must raise.  In some phases ranks join early.  Every result is compared with
what the seed says, in integers, which are exact in any order of addition.

Programs run one after the other in the same processes.  After some of them Horovod is initialized
again with other settings: small caches, no fusion, stall checks after milliseconds.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import ringreduce.horovod as hvd
from ringreduce.horovod import _collectives

Tensor = torch.Tensor
SECONDS = 30.0  # for a program
PROGRAMS_OF_A_JOB = 40  # between init and shutdown
NAMES = 10
MOST_OPERATIONS = 10  # of a phase
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *FLOATS, torch.int32, torch.int64, torch.uint8)
OPS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max}
OPS |= {"Product": hvd.Product, "Adasum": hvd.Adasum}
SETTINGS = {
    "HOROVOD_CACHE_CAPACITY": ("", "0", "1", "3", "8", "8"),
    "HOROVOD_FUSION_THRESHOLD": ("", "0", "300"),
    "HOROVOD_CYCLE_TIME": ("", "0", "3"),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("", "0.002", "0.02"),
}


def sets_of(size: int) -> list[list[int]]:
    """The process sets of a job; the first has all ranks."""
    ranks = list(range(size))
    return [ranks, [0, size - 1], ranks[1:]] if size > 2 else [ranks, [1]]


@dataclass(frozen=True)
class Form:
    """What is asked under a name."""

    kind: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]  # with the first dimension, if it is the same on all ranks
    rows: tuple[tuple[int, ...], ...] = ()  # by place and tensor; of an all-to-all by place and to
    op: str = ""
    scales: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    in_place: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class Operation:
    number: int
    group: int
    name: str
    form: Form
    other: int = -1  # a rank that asks for something else
    what: str = ""  # and what
    level: int = 0  # ranks with a lower one have joined

    def key(self) -> tuple[int, str, str]:
        """Of these, one at a time."""
        return self.group, self.form.kind, self.name


@dataclass(frozen=True)
class Phase:
    operations: tuple[Operation, ...]
    at_once: bool = False  # the one operation is awaited at once
    levels: tuple[int, ...] = ()  # by rank, if ranks join


def draw_form(draw: random.Random, size: int, members: list[int], only: str = "") -> Form:
    kinds = ("allreduce",) * 4 + ("allgather", "broadcast", "alltoall", "reducescatter")
    kind = only or draw.choice(kinds)
    grouped = kind in ("allreduce", "allgather", "reducescatter") and draw.random() < 0.25
    count = draw.randint(1, 4) if grouped else 1
    op = draw.choice(("Average", "Sum", "Sum", "Min", "Max", "Product"))
    dtypes = tuple(draw.choice(DTYPES) for _ in range(count))
    largest = draw.choices((4, 60, 3000, 200_000), (60, 40, 10, 1))[0]

    def shape() -> tuple[int, ...]:
        n = draw.randint(0, largest)
        shapes: list[tuple[int, ...]] = [(n,), (n, 1), (n // 3, 3), (2, n // 4, 2)]
        if kind in ("allreduce", "broadcast"):
            shapes.append(())
        return draw.choice(shapes)

    shapes = tuple(shape() for _ in range(count))
    rows: tuple[tuple[int, ...], ...] = ()
    if kind in ("allgather", "alltoall"):
        width = count if kind == "allgather" else len(members)
        alike = draw.random() < 0.4
        of_all = tuple(draw.choice((0, 1, 2, 5, 31)) for _ in range(width))
        rows = tuple(
            of_all if alike else tuple(draw.choice((0, 1, 3, 40)) for _ in range(width))
            for _ in members
        )
    scales = (1.0, 1.0)
    if op in ("Average", "Sum") and draw.random() < 0.2:
        scales = draw.choice(((2.0, 1.0), (1.0, 2.0), (2.0, 2.0), (0.5, 4.0)))
    if kind not in ("allreduce", "reducescatter"):
        op, scales = "", (1.0, 1.0)
    is_global = len(members) == size
    if kind == "allreduce" and is_global and size in (2, 4) and not only and draw.random() < 0.05:
        op, dtypes, scales = "Adasum", (torch.float64,) * count, (1.0, 1.0)
    in_place = kind in ("allreduce", "broadcast") and draw.random() < 0.5
    return Form(kind, dtypes, shapes, rows, op, scales, draw.choice(members), in_place, grouped)


def mistakes(form: Form, size: int) -> list[str]:
    """What one rank may ask for in another way."""
    found = ["dtype", "dimensions"]
    if form.op in ("Sum", "Min", "Max"):
        found.append("op")
    if form.op == "Sum":
        found.append("scale")
    if form.kind in ("allreduce", "broadcast", "reducescatter"):
        found.append("shape")
    if form.kind == "broadcast" and size > 1:
        found.append("root")
    return found


def draw_program(seed: int, size: int) -> list[Phase]:
    draw = random.Random(seed * 8 + size)
    sets = sets_of(size)
    known: dict[tuple[int, str], Form] = {}
    numbers = iter(range(10**6))

    def operation(name: int, only: str = "", level: int = 0) -> Operation:
        group = 0 if only or draw.random() < 0.7 else draw.randrange(len(sets))
        key = group, only + str(name)
        if key not in known or draw.random() < 0.15:
            known[key] = draw_form(draw, size, sets[group], only)
        form = known[key]
        one = Operation(next(numbers), group, f"n{name}", form, level=level)
        if not only and len(sets[group]) > 1 and draw.random() < 0.04 and form.op != "Adasum":
            return replace(
                one, other=draw.choice(sets[group]), what=draw.choice(mistakes(form, size))
            )
        return one

    phases = []
    for _ in range(draw.randint(2, 7)):
        names = draw.sample(range(NAMES), draw.randint(1, MOST_OPERATIONS))
        chance = draw.random()
        if chance < 0.2:
            phases.append(Phase((operation(names[0]),), at_once=True))
        elif chance < 0.35:
            levels = tuple(draw.randint(0, 2) for _ in range(size))
            top = max(levels)
            ops = tuple(operation(n, "allreduce", draw.randint(0, top)) for n in names)
            phases.append(Phase(ops, levels=levels))
        else:
            phases.append(Phase(tuple(operation(n) for n in names)))
    return phases


# ---- what an operation gets and gives


def value(number: int, rank: int, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A rank's tensor, of small integers."""
    count = 1
    for n in shape:
        count *= n
    step = 1 + (number * 7 + rank * 3 + place) % 11
    numbers = torch.arange(count).mul_(step).add_(number + 5 * rank + place).remainder_(7)
    numbers = numbers.remainder_(4) if dtype == torch.uint8 else numbers.sub_(3)
    return numbers.to(dtype).view(tuple(shape))


def inputs_of(one: Operation, rank: int, members: list[int]) -> list[Tensor]:
    form = one.form
    place = members.index(rank)
    if form.kind == "allgather":
        shapes = [
            (rows, *shape[1:]) for rows, shape in zip(form.rows[place], form.shapes, strict=True)
        ]
    elif form.kind == "alltoall":
        shapes = [(sum(form.rows[place]), *form.shapes[0][1:])]
    else:
        shapes = list(form.shapes)
    return [
        value(one.number, rank, k, shape, dtype)
        for k, (shape, dtype) in enumerate(zip(shapes, form.dtypes, strict=True))
    ]


def reduced(values: list[Tensor], form: Form) -> Tensor:
    """The reduction of all ranks' tensors, whose own are zeros if they have joined."""
    dtype = values[0].dtype
    whole = (lambda t: t) if dtype.is_floating_point else torch.trunc
    if form.op == "Adasum":
        while len(values) > 1:
            values = [adasum(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]
    wide = whole(torch.stack([v.double() for v in values]) * form.scales[0])
    if form.op in ("Sum", "Average"):
        total = wide.sum(0)
        total = whole(total / len(values)) if form.op == "Average" else total
    elif form.op == "Product":
        total = wide.prod(0)
    else:
        total = wide.amin(0) if form.op == "Min" else wide.amax(0)
    return whole(total * form.scales[1]).to(dtype)


def adasum(a: Tensor, b: Tensor) -> Tensor:
    dot = float((a * b).sum())
    aa, bb = float((a * a).sum()), float((b * b).sum())
    return a * (1 - dot / (2 * aa) if aa else 1) + b * (1 - dot / (2 * bb) if bb else 1)


def wanted(one: Operation, rank: int, members: list[int], levels: Sequence[int]) -> list[Tensor]:
    form = one.form
    by_rank = {r: inputs_of(one, r, members) for r in members}
    for r, tensors in by_rank.items():
        if levels and levels[r] < one.level:
            by_rank[r] = [torch.zeros_like(t) for t in tensors]
    place = members.index(rank)
    results = []
    for k in range(len(form.dtypes)):
        values = [tensors[k] for tensors in by_rank.values()]
        if form.kind == "allgather":
            results.append(torch.cat(values))
        elif form.kind == "broadcast":
            results.append(by_rank[form.root][k])
        elif form.kind == "alltoall":
            parts = [v.split(list(form.rows[p]))[place] for p, v in enumerate(values)]
            results.append(torch.cat(parts))
            results.append(torch.tensor([len(part) for part in parts], dtype=torch.int32))
        else:
            total = reduced(values, form)
            if form.kind == "reducescatter":
                total = total.split(_collectives.rows_of(total.shape[0], len(members)))[place]
            results.append(total)
    return results


def compare(one: Operation, got: list[Tensor], right: list[Tensor]) -> None:
    assert len(got) == len(right), f"{one}: {len(got)} results, not {len(right)}"
    for a, b in zip([t.cpu() for t in got], right, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{one}: {a.dtype} {a.shape}"
        if one.form.op in ("Average", "Adasum") and a.dtype.is_floating_point:
            same = torch.allclose(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-9)
        else:
            same = torch.equal(a, b)
        assert same, f"{one}: got {a}, not {b}"


# ---- a rank


class Player:
    """A rank that takes part in programs."""

    def __init__(self, rank: int, size: int, sets: list[Any], gpu: torch.device | None) -> None:
        self.rank, self.size, self.sets = rank, size, sets
        self.members = sets_of(size)
        self.gpu = gpu
        self.streams = [torch.cuda.Stream(gpu) for _ in range(3)] if gpu else []

    def play(self, seed: int) -> int:
        """Runs a program; how many operations it had."""
        self.draw = random.Random(seed * 64 + self.rank)
        self.slow = self.draw.choice((0.0, 0.0, 0.1, 0.4))
        self.pending: dict[tuple[int, str, str], Callable[[], None]] = {}
        phases = draw_program(seed, self.size)
        for phase in phases:
            self.take(phase)
        self.wait_for(list(self.pending))
        return sum(len(phase.operations) for phase in phases)

    def take(self, phase: Phase) -> None:
        level = phase.levels[self.rank] if phase.levels else 0
        if phase.levels:
            # Only all-reduces go on beside ranks that have joined.
            self.wait_for([key for key in self.pending if key[1] != "allreduce"])
        own = [
            one
            for one in phase.operations
            if self.rank in self.members[one.group] and one.level <= level
        ]
        self.draw.shuffle(own)
        for one in own:
            self.pause()
            if one.key() in self.pending:
                self.pending.pop(one.key())()
            self.pending[one.key()] = self.submit(one, phase.levels)
        keys = list(self.pending)
        self.draw.shuffle(keys)
        if phase.at_once:
            self.wait_for(keys)
        elif self.draw.random() < 0.7:
            self.wait_for(keys[: self.draw.randint(0, len(keys))])
        if phase.levels:
            self.join(phase)

    def join(self, phase: Phase) -> None:
        top = max(phase.levels)
        tops = [r for r in range(self.size) if phase.levels[r] == top]
        awaits = [one.key() for one in phase.operations if one.level == top]
        if len(tops) == 1 and tops[0] == self.rank:
            self.wait_for([key for key in awaits if key in self.pending])
        self.pause()
        last = hvd.join()
        if len(tops) == 1 and awaits and top > 0:
            assert last == tops[0], f"rank {last} joined last, not {tops}"
        assert 0 <= last < self.size

    def wait_for(self, keys: list[tuple[int, str, str]]) -> None:
        self.draw.shuffle(keys)
        for key in keys:
            self.pause()
            self.pending.pop(key)()

    def some_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.draw.choice(self.streams)) if self.streams else nullcontext()

    def pause(self) -> None:
        if self.draw.random() < self.slow:
            time.sleep(self.draw.choice((0.0, 0.0005, 0.004)))

    def submit(self, one: Operation, levels: Sequence[int]) -> Callable[[], None]:
        """Starts an operation; what waits for it and looks at the result."""
        members = self.members[one.group]
        tensors = inputs_of(one, self.rank, members)
        form = one.form
        if one.other == self.rank:
            tensors, form = mistaken(one, tensors, members)
        with self.some_stream():
            tensors = [t.to(self.gpu) for t in tensors] if self.gpu else tensors
            before = [t.clone() for t in tensors]
            handle = start(one.name, form, tensors, self.sets[one.group], members.index(self.rank))

        def finish() -> None:
            with self.some_stream():
                look()

        def look() -> None:
            if self.draw.random() < 0.2:
                hvd.poll(handle)
            if one.other >= 0:
                expect_mistake(one, handle)
                return
            got = hvd.synchronize(handle)
            got = list(got) if form.grouped or form.kind == "alltoall" else [got]
            compare(one, got, wanted(one, self.rank, members, levels))
            if form.in_place:
                assert all(a is b for a, b in zip(got, tensors, strict=True)), one
            else:
                assert all(map(torch.equal, tensors, before)), f"{one}: its inputs have changed"

        return finish


def expect_mistake(one: Operation, handle: Any) -> None:
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        if "Mismatched" not in str(error):
            raise
        assert f"rank {one.other} has" in str(error), f"{one}: {error}"
    else:
        raise AssertionError(f"{one}: no error")


def mistaken(
    one: Operation, tensors: list[Tensor], members: list[int]
) -> tuple[list[Tensor], Form]:
    """What another rank than the others asks for."""
    form, first = one.form, tensors[0]
    if one.what == "dtype":
        others = [t for t in (torch.float32, torch.int64) if t != first.dtype]
        return [first.to(others[0]), *tensors[1:]], form
    if one.what == "dimensions":
        return [first.unsqueeze(-1), *tensors[1:]], form
    if one.what == "shape":
        return [torch.zeros(first.numel() + 1, dtype=first.dtype), *tensors[1:]], form
    if one.what == "op":
        return tensors, replace(form, op="Product", scales=(1.0, 1.0))
    if one.what == "scale":
        return tensors, replace(form, scales=(8.0, 1.0))
    return tensors, replace(form, root=next(r for r in members if r != form.root))


def start(name: str, form: Form, tensors: list[Tensor], group: Any, place: int) -> Any:
    how: dict[str, Any] = {"name": name, "process_set": group}
    given: Any = tensors if form.grouped else tensors[0]
    if form.op:
        how |= {"op": OPS[form.op]}
        how |= {"prescale_factor": form.scales[0], "postscale_factor": form.scales[1]}
    if form.kind == "broadcast":
        how["root_rank"] = form.root
    if form.kind == "alltoall":
        rows = form.rows[place]
        alike = len({rows_ for of in form.rows for rows_ in of}) == 1
        how["splits"] = None if alike and name[-1] in "02468" else torch.tensor(rows)
    function = "grouped_" * form.grouped + form.kind + "_async" + "_" * form.in_place
    return getattr(hvd, function)(given, **how)


@contextmanager
def settings(seed: int) -> Iterator[None]:
    """Horovod's variables for the programs of a job."""
    draw = random.Random(seed)
    before = dict(os.environ)
    os.environ.update({name: draw.choice(values) for name, values in SETTINGS.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def play(
    rank: int,
    size: int,
    seeds: Sequence[int],
    tell: Callable[[Any], None],
    gpu: torch.device | None = None,
) -> int:
    """Takes part in programs; torch's default group exists.  Returns the number of operations.

    `gpu`: where the tensors are, if not in host memory.
    """
    logging.getLogger("ringreduce.horovod").setLevel(logging.ERROR)
    operations = 0
    for begin in range(0, len(seeds), PROGRAMS_OF_A_JOB):
        with settings(seeds[begin] + size):
            hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in sets_of(size)[1:]])
            sets: list[Any] = [hvd.global_process_set]
            sets += [_set_with(number) for number in range(1, len(sets_of(size)))]
            player = Player(rank, size, sets, gpu)
            for seed in seeds[begin : begin + PROGRAMS_OF_A_JOB]:
                tell(seed)
                faulthandler.dump_traceback_later(SECONDS, exit=True)
                operations += player.play(seed)
            hvd.barrier()
            hvd.shutdown()
            faulthandler.cancel_dump_traceback_later()
    return operations


def _set_with(number: int) -> Any:
    from ringreduce.horovod import _world

    assert _world._world is not None
    return _world._world.sets[number]


# ---- ranks of which one is killed


def serve(rank: int, size: int, port: int, seeds: list[int], pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("ringreduce", store=store, rank=rank, world_size=size)
    try:
        pipe.send(("done", play(rank, size, seeds, pipe.send)))
    except hvd.HorovodInternalError as error:
        faulthandler.cancel_dump_traceback_later()
        pipe.send(("raised", str(error)))
        sys.exit(1)
    finally:
        hvd.shutdown()
        dist.destroy_process_group()


def start_ranks(size: int, seeds: list[int]) -> tuple[list[Any], list[Any], Any]:
    """Their processes and pipes, and the store that they need."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["ringreduce.horovod"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [mp.Pipe() for _ in range(size)]
    given = size, store.port, seeds
    processes = [
        context.Process(target=serve, args=(r, *given, pipes[r][1]), daemon=True)
        for r in range(size)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    return processes, pipes, store


def kill_one(size: int, seed: int) -> bool:
    """Kills a rank at a random moment of programs; whether all others say so, and end."""
    draw = random.Random(seed * 8 + size)
    processes, pipes, _store = start_ranks(size, list(range(seed, seed + 10_000)))
    victim = draw.randrange(size)
    for ours, _ in pipes:
        ours.recv()
    time.sleep(draw.uniform(0.0, 0.3))
    processes[victim].kill()
    others = [r for r in range(size) if r != victim]
    open_pipes = {pipes[r][0]: r for r in others}
    told: dict[int, str] = {}
    until = time.monotonic() + SECONDS
    while open_pipes and (ready := mpc.wait(list(open_pipes), until - time.monotonic())):
        for ours in ready:
            try:
                if isinstance(what := ours.recv(), tuple):
                    told[open_pipes[ours]] = what[1]
            except (EOFError, ConnectionError):
                del open_pipes[ours]
    for process in processes:
        process.join(10)
    wrong = [
        f"rank {r} said {told.get(r)!r} and ended with {processes[r].exitcode}"
        for r in others
        if f"rank {victim} " not in told.get(r, "") or processes[r].exitcode != 1
    ]
    for text in wrong:
        print(f"{size} ranks, seed {seed}, rank {victim} was killed: {text}", flush=True)
    for process in processes:
        process.kill()
    return not wrong
