"""Random faults in training that goes on: kills and stops of ranks, of newcomers and of donors.

    python tests/survive_faults.py --runs 100           (make survive)
    python tests/survive_faults.py --runs 1 --seed 17   one of them again

Each run trains on 2 to 4 processes (ringreduce.elastic) and has a seed, which decides on the model,
the batches and the faults.  A fault strikes at a random moment, or up to some milliseconds after a
rank has come to a point of `POINTS`: in its backward, in its commit, while it lets a rank join.
Lost ranks are started again at random moments.  At the end: all ranks have ended in time; in each
step all ranks have the same weights; each element of a gradient or of another all-reduce is the
reduction over all ranks of that step or over those that were left; no step is missing or done
twice; and each sample of an epoch was in a batch of a rank that took part in its step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import functools
import hashlib
import importlib
import io
import itertools
import json
import math
import mmap
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import elastic
from ringreduce.core.backend import backend_of

DEADLINE = 120.0  # seconds of a run
TIMEOUT = 6.0  # of an operation, so that stopped ranks are killed soon
JOIN_SECONDS = 0.5
SAMPLES, BATCH = 301, 4
# Where a rank can be told to die or to be late; "first": the first step after ranks have joined,
# in which DDP orders its buckets.
POINTS = ("backward", "no_sync", "first", "commit", "admit", "receive", "late")
OBSERVED = "SURVIVE_OBSERVED"  # set: with the timeline, metrics and all else that watches a job
WAYS = ("ddp", "ddp bn", "ddp static", "ddp no_sync", "loop")


@dataclass(frozen=True)
class Plan:
    """What a seed decides on."""

    seed: int
    world: int
    way: str  # "ddp", with BatchNorm, a static graph or accumulation, or "loop"
    size: int  # of the model
    faults: int
    look_seconds: float  # how often ranks look for newcomers
    codec: str | None  # of DDP's hook
    wire: str  # RINGREDUCE_WIRE; "tcp": as if each rank was on a host of its own

    @staticmethod
    def of(seed: int) -> Plan:
        draw = random.Random(seed)
        return Plan(
            seed,
            world=draw.choice([2, 3, 4, 4]),
            way=draw.choice(WAYS),
            size=draw.choice([3, 200, 3000]),
            faults=draw.randint(5, 25),
            look_seconds=draw.choice([0.01, 0.01, 0.1]),
            codec=draw.choice([None, None, "int8", "int4"]),
            wire=draw.choice(["auto", "auto", "tcp"]),
        )


# ---- all-reduces of known inputs


@dataclass(frozen=True)
class Known:
    """An all-reduce; over other ranks it has other results."""

    op: Callable[[int], Any]  # of a rank
    dtype: torch.dtype
    addend: Callable[[int], float]
    of: Callable[[list[float]], float]


KNOWN = {
    "average_gradients": Known(
        lambda r: None, torch.float32, lambda r: 1 << 5 * r, lambda a: sum(a) / len(a)
    ),
    "SUM": Known(lambda r: dist.ReduceOp.SUM, torch.bfloat16, lambda r: 1 << r, sum),
    "PREMUL_SUM": Known(
        lambda r: dist._make_nccl_premul_sum(0.5 * (r + 1)),
        torch.float32,
        lambda r: 1 << 5 * r,
        lambda a: sum(0.5 * (int(math.log2(x)) // 5 + 1) * x for x in a),
    ),
    "AVG": Known(
        lambda r: dist.ReduceOp.AVG, torch.int64, lambda r: 12 << 5 * r, lambda a: sum(a) / len(a)
    ),
    "MAX": Known(lambda r: dist.ReduceOp.MAX, torch.int32, lambda r: r + 1, max),
}


def values_of(t: torch.Tensor) -> list[float]:
    """The values of its elements, each once."""
    low, high = float(t.min()), float(t.max())
    return [low] if low == high else t.double().unique().tolist()


@functools.cache
def allowed(call: str, survivors: tuple[int, ...], started: tuple[int, ...]) -> list[float]:
    """The values that an element may have: over all that started the step, or those left."""
    known = KNOWN[call]
    lost = [r for r in started if r not in survivors]
    return [
        known.of([known.addend(r) for r in sorted((*survivors, *some))])
        for n in range(len(lost) + 1)
        for some in itertools.combinations(lost, n)
    ]


# ---- a rank


class NoWriter:
    """Takes the scalars of ringreduce.tensorboard."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert math.isfinite(scalar_value), (tag, global_step, scalar_value)


class Orders:
    """What ranks are told to do, in memory that they share with the program that strikes them."""

    def __init__(self, folder: str, rank: int = 0) -> None:
        with open(f"{folder}/orders", "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.rank = rank

    @staticmethod
    def make(folder: str, world: int) -> Orders:
        Path(folder, "orders").write_bytes(bytes(world + 1))
        return Orders(folder)

    def give(self, rank: int, point: str | None) -> None:
        self.memory[rank] = 0 if point is None else POINTS.index(point) + 1

    def are_to_end(self) -> bool:
        """Whether the training is to end."""
        return self.memory[-1] == 1

    def tell_to_end(self) -> None:
        self.memory[-1] = 1

    def at(self, point: str) -> None:
        """Dies soon if this rank was told to at this point; or is late."""
        if self.memory[self.rank] != POINTS.index(point) + 1:
            return
        self.memory[self.rank] = 0
        if point == "late":
            time.sleep(random.uniform(0.1, 2.0))
        else:  # a signal ends a process inside of an all-reduce too
            signal.setitimer(signal.ITIMER_REAL, random.choice([1e-6, 1e-3, 5e-3]))


class State(elastic.State):
    """With points at which a rank may die."""

    orders: Orders

    def _admit(self, *arguments: Any, **options: Any) -> Any:
        self.orders.at("admit")
        return super()._admit(*arguments, **options)

    def _receive_from(self, *arguments: Any, **options: Any) -> Any:
        self.orders.at("receive")
        return super()._receive_from(*arguments, **options)


def net_of(plan: Plan) -> torch.nn.Module:
    layers: list[torch.nn.Module] = [torch.nn.Linear(8, plan.size)]
    if plan.way == "ddp bn":
        layers.append(torch.nn.BatchNorm1d(plan.size))
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(plan.size, 1))


def reduce_known(net: torch.nn.Module, rank: int, step: int) -> tuple[dict[str, Any], bytes]:
    """Averages gradients, and reduces one tensor more; the values of each, and the latter."""
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, KNOWN["average_gradients"].addend(rank))
    ringreduce.average_gradients(net)
    grads = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    name = sorted(set(KNOWN) - {"average_gradients"})[step % (len(KNOWN) - 1)]
    known = KNOWN[name]
    t = torch.full((len(grads) + step % 7,), known.addend(rank), dtype=known.dtype)
    dist.all_reduce(t, op=known.op(rank))
    values = {"average_gradients": values_of(grads), name: values_of(t)}
    return values, t.view(torch.uint8).numpy().tobytes()


def train(plan: Plan, rank: int, life: int, port: int, folder: str, pipe: Any) -> None:
    """Trains, and writes a line before each commit and one after it."""
    os.environ["RINGREDUCE_WIRE"] = plan.wire
    if os.environ.get(OBSERVED):
        for what in ("TIMELINE", "DUMP", "METRICS"):
            os.environ[f"RINGREDUCE_{what}"] = f"{folder}/{what}"
    torch.set_num_threads(1)
    torch.manual_seed(100 * rank + life)
    elastic._LOOK_SECONDS, elastic._ASK_SECONDS = plan.look_seconds, plan.look_seconds / 2
    dist.init_process_group(
        "ringreduce",
        store=dist.PrefixStore(str(plan.seed), dist.TCPStore("127.0.0.1", port)),
        rank=rank,
        world_size=plan.world,
        timeout=datetime.timedelta(seconds=TIMEOUT if life == 0 else DEADLINE),
        pg_options=ringreduce.Options(on_loss="continue"),
    )
    net = net_of(plan)
    model = net
    if plan.way != "loop":
        static = plan.way == "ddp static"
        model = DistributedDataParallel(
            net, init_sync=False, bucket_cap_mb=0.01, static_graph=static
        )
        if plan.codec is None:
            ringreduce.register_comm_hook(model)
        else:
            ringreduce.register_comm_hook(model, codec=plan.codec)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    sampler = elastic.ElasticSampler(SAMPLES, BATCH, seed=plan.seed)
    state = State(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        step=0,
        is_over=False,
        join_seconds=JOIN_SECONDS,
    )
    state.orders = orders = Orders(folder, rank)
    state.restore()
    backend = backend_of(dist.group.WORLD)
    assert backend is not None
    backend.set_timeout(datetime.timedelta(seconds=TIMEOUT))
    if os.environ.get(OBSERVED):
        ringreduce.tensorboard(NoWriter())
        ringreduce.straggler_detection().__enter__()
    pipe.send("in")
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    is_first = [True]
    state.on_change(lambda ranks: is_first.append(True))
    samples: list[int] = []  # since the last commit
    with open(f"{folder}/{rank}-{life}", "w", buffering=1) as record:
        record.write(json.dumps({"step": state.step, "joined": True}) + "\n")
        while not state.is_over:
            for batch in state.batches(sampler):
                orders.at("late")
                if is_first:
                    orders.at("first")
                accumulates = not samples and not state.is_last_batch
                samples += batch
                if plan.way == "ddp no_sync" and accumulates:
                    orders.at("no_sync")
                    with model.no_sync():
                        model(inputs[batch]).square().mean().backward()
                    continue
                orders.at("backward")
                values, digest = {}, hashlib.sha256()
                if plan.way == "loop":
                    values, reduced = reduce_known(net, rank, state.step)
                    digest.update(reduced)
                else:
                    model(inputs[batch]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                is_first.clear()
                state.step += 1
                if state.step % 8 == 0:
                    over = torch.tensor([orders.are_to_end()], dtype=torch.int32)
                    dist.all_reduce(over, op=dist.ReduceOp.MAX)
                    state.is_over = bool(over)
                for parameter in net.parameters():
                    digest.update(parameter.detach().numpy())
                before = {
                    "step": state.step,
                    "started": state.live_ranks,
                    "batch": samples,
                    "epoch": sampler.epoch,
                    "values": values,
                    "weights": digest.hexdigest()[:16],
                }
                record.write(json.dumps(before) + "\n")
                samples = []
                orders.at("commit")
                state.commit()
                record.write(json.dumps({"step": state.step, "ranks": state.took_part}) + "\n")
                if state.is_over:
                    break
    pipe.send("done")
    dist.destroy_process_group()


# ---- all of them


@dataclass
class Life:
    """A process."""

    process: Any
    pipe: Any
    is_new: bool  # started in the place of another
    is_in: bool = False
    is_done: bool = False
    struck: bool = False  # killed, stopped for long, or told to die
    told: str = ""  # at which point

    def look(self) -> None:
        while self.pipe.poll():
            try:
                told = self.pipe.recv()
            except EOFError:
                return
            self.is_in |= told == "in"
            self.is_done |= told == "done"

    def signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.process.pid, number)


@dataclass
class Ended:
    """What a run came to."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    joined: int = 0
    steps: int = 0


class Run:
    """One training run."""

    def __init__(self, plan: Plan, context: Any, port: int, folder: str) -> None:
        self.plan, self.context, self.port, self.folder = plan, context, port, folder
        self.orders = Orders.make(folder, plan.world)
        self.draw = random.Random(plan.seed + 1)
        self.ranks: dict[int, Life] = {}
        self.lives = collections.Counter[int]()
        self.again: dict[int, float] = {}  # when a rank is started again
        self.later: list[tuple[float, Life, int]] = []  # signals that are due
        self.ended = Ended(plan.seed)

    def start(self, rank: int) -> None:
        self.orders.give(rank, None)
        ours, theirs = mp.Pipe()
        arguments = (self.plan, rank, self.lives[rank], self.port, self.folder, theirs)
        process = self.context.Process(target=train, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.ranks[rank] = Life(process, ours, is_new=self.lives[rank] > 0)
        self.lives[rank] += 1

    # ---- faults

    def strike(self) -> bool:
        """Some fault, but to one rank that has the state; whether there was any."""
        alive = {r: life for r, life in self.ranks.items() if not life.struck}
        with_state = [r for r, life in alive.items() if life.is_in]
        if not with_state:
            return False
        safe = self.draw.choice(with_state)
        old = [r for r in with_state if r != safe]
        new = [r for r in alive if r not in with_state]
        if not old:
            if not new or self.draw.random() > 0.02:
                return False
            self.kill(self.draw.choice(new))
            return True
        chance = self.draw.random()
        if chance < 0.004:
            self.stop(self.draw.choice(old))
        elif chance < 0.01:
            self.faults["late rank"] += 1
            self.orders.give(self.draw.choice(with_state), "late")
        elif chance < 0.06:
            self.pause(self.draw.choice(with_state))
        elif chance < 0.3 and new:
            self.tell(self.draw.choice(new), "receive")
            self.tell(min(old), "receive")
        elif chance < 0.7:
            self.tell_some(old)
        else:
            for rank in self.some(old if self.draw.random() < 0.9 else old + new):
                self.kill(rank)
        return True

    @property
    def faults(self) -> collections.Counter[str]:
        return self.ended.faults

    def kind(self, rank: int) -> str:
        if not self.ranks[rank].is_in:
            return "newcomer"
        return "lowest" if rank == min(self.ranks) else "rank"

    def some(self, ranks: list[int]) -> list[int]:
        return self.draw.sample(ranks, self.draw.choice([1, 1, 1, len(ranks)]))

    def after(self, seconds: float, life: Life, number: int) -> None:
        self.later.append((time.monotonic() + seconds, life, number))

    def kill(self, rank: int) -> None:
        self.faults["kill of a " + self.kind(rank)] += 1
        self.ranks[rank].struck = True
        self.ranks[rank].process.kill()

    def tell(self, rank: int, point: str) -> None:
        """Tells a rank to die at that point; counted when it has."""
        life = self.ranks[rank]
        life.struck, life.told = True, f"death of a {self.kind(rank)} in {point}"
        self.orders.give(rank, point)
        self.after(1.0, life, signal.SIGKILL)  # it may not come there

    def tell_some(self, ranks: list[int]) -> None:
        """Tells some ranks to die at a point."""
        points = ["backward", "commit"]
        if self.plan.way == "ddp no_sync":
            points.append("no_sync")
        others = list(ranks)
        is_full = len(self.ranks) == self.plan.world
        if not is_full or len(ranks) > 1:
            points += ["first", "admit", "receive"]
        point = self.draw.choice(points)
        if point in ("first", "admit", "receive") and is_full:
            others.remove(self.draw.choice(others))
            self.kill(*set(ranks).difference(others))  # so that one joins soon
        for rank in self.some(others):
            self.tell(rank, point)

    def stop(self, rank: int) -> None:
        """Stops a rank for about as long as the others wait, or for ever."""
        life = self.ranks[rank]
        life.struck = True
        life.signal(signal.SIGSTOP)
        if self.draw.random() < 0.3:
            self.faults["stop"] += 1
            self.after(2 * TIMEOUT, life, signal.SIGKILL)
            return
        self.faults["stop until about the deadline"] += 1
        seconds = TIMEOUT + self.draw.uniform(-0.2, 0.3)
        self.after(seconds, life, signal.SIGCONT)
        self.after(seconds + 1.0, life, signal.SIGKILL)

    def pause(self, rank: int) -> None:
        """Stops a rank for a moment, in which others may die."""
        self.faults["short stop of a " + self.kind(rank)] += 1
        self.ranks[rank].signal(signal.SIGSTOP)
        self.after(self.draw.choice([0.001, 0.02, 0.2]), self.ranks[rank], signal.SIGCONT)

    # ---- what goes on

    def watch(self) -> None:
        """Sends what is due, sees who has ended, and starts lost ranks again."""
        now = time.monotonic()
        for _, life, number in [due for due in self.later if due[0] <= now]:
            life.signal(number)
        self.later = [due for due in self.later if due[0] > now and due[1].process.is_alive()]
        finished = any(life.is_done for life in self.ranks.values())
        for rank, life in list(self.ranks.items()):
            was_in = life.is_in
            life.look()
            self.ended.joined += life.is_new and life.is_in and not was_in
            status = life.process.exitcode
            if status is None:
                continue
            if life.told:
                there = status == -signal.SIGALRM
                self.faults[life.told if there else life.told.split(" in ")[0]] += 1
            elif status == 1 and life.struck and self.plan.wire == "tcp":
                pass  # it was left out while it was stopped, and raised that
            elif status not in (0, -signal.SIGKILL) or not (life.struck or life.is_done):
                self.ended.wrong.append(f"rank {rank} ended with {status}")
            if life.is_done:
                continue
            del self.ranks[rank]
            self.again[rank] = now + self.draw.choice([0, 0.02, 0.2])
        for rank, when in list(self.again.items()):
            if not finished and now >= when:
                del self.again[rank]
                self.start(rank)

    def go(self) -> Iterator[None]:
        """Runs it; yields whenever there is nothing to do for a millisecond."""
        deadline = time.monotonic() + DEADLINE
        for rank in range(self.plan.world):
            self.start(rank)
        left = self.plan.faults
        next_fault, awaits_all = deadline, True
        while time.monotonic() < deadline:
            yield
            self.watch()
            now = time.monotonic()
            if any(life.is_done for life in self.ranks.values()):
                break
            all_in = len(self.ranks) == self.plan.world and all(
                life.is_in and not life.struck for life in self.ranks.values()
            )
            if awaits_all and all_in:
                next_fault, awaits_all = now + self.draw.random() * 0.05, False
            if now < next_fault:
                continue
            if left > 0 and self.strike():
                told = sum(life.told != "" for life in self.ranks.values())
                left = self.plan.faults - self.faults.total() - told
                # At once, in a while, or when all are in again.
                seconds = self.draw.choice([0.002, 0.02, 0.1, 1.0])
                next_fault, awaits_all = now + seconds, seconds == 1.0
            elif left > 0:
                next_fault = now + 0.01
            elif not self.later:
                self.orders.tell_to_end()
        yield from self.finish(deadline)
        if not self.ended.wrong:
            self.check()

    def finish(self, deadline: float) -> Iterator[None]:
        """Waits for the ranks that are in; the others have nothing to join any more."""
        grace = time.monotonic() + 2 * TIMEOUT + 6.0
        for rank, life in self.ranks.items():
            life.look()
            while life.is_in and not life.struck and life.process.exitcode is None:
                if time.monotonic() > max(deadline, grace):
                    self.ended.wrong.append(f"rank {rank} hangs: {self.stacks(life)}")
                    break
                yield
            life.look()
            if life.is_in and not life.struck and life.process.exitcode not in (0, None):
                self.ended.wrong.append(f"rank {rank} ended with {life.process.exitcode}")
            if life.process.exitcode is None:
                life.process.kill()
            life.process.join()
        if not any(life.is_done for life in self.ranks.values()):
            self.ended.wrong.append("no rank came to the end in time")

    def kill_all(self) -> None:
        """After Ctrl-C or an error."""
        for life in self.ranks.values():
            life.process.kill()
            life.process.join()

    def stacks(self, life: Life) -> str:
        return os.popen(f"py-spy dump --pid {life.process.pid} 2> /dev/null").read()

    # ---- afterwards

    def check(self) -> None:
        before: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        took_part: dict[int, list[int]] = {}
        joined_after = set()
        wrong = self.ended.wrong
        for path in sorted(Path(self.folder).glob("*-*")):
            rank = int(path.name.split("-")[0])
            for line in path.read_text().splitlines():
                try:
                    told = json.loads(line)
                except json.JSONDecodeError:
                    continue  # it was killed while it wrote
                step = told["step"]
                if "joined" in told:
                    joined_after.add(step)
                elif "ranks" in told:
                    if took_part.setdefault(step, told["ranks"]) != told["ranks"]:
                        wrong.append(f"step {step}: ranks {took_part[step]} and {told['ranks']}")
                elif rank in before[step]:
                    wrong.append(f"rank {rank} did step {step} twice")
                else:
                    before[step][rank] = told
        # All who were in a step may die in its commit, once newcomers have the state.
        for step in joined_after.intersection(before).difference(took_part):
            took_part[step] = sorted(before[step])
        self.ended.steps = max(before, default=0)
        missing = set(range(1, self.ended.steps + 1)).symmetric_difference(took_part)
        if missing:
            wrong.append(f"steps {sorted(missing)} are missing")
        seen: dict[int, set[int]] = collections.defaultdict(set)
        for step, ranks in sorted(took_part.items()):
            there = before[step]
            for what in ("weights", "started", "epoch"):
                kinds = {json.dumps(told[what]) for told in there.values()}
                if len(kinds) > 1:
                    wrong.append(f"step {step}: other {what} on some ranks: {kinds}")
            if not set(ranks) <= set(there):
                wrong.append(f"step {step}: of ranks {ranks}, only {sorted(there)} were in it")
                continue
            started = tuple(there[ranks[0]]["started"])
            for call, values in there[ranks[0]]["values"].items():
                right = allowed(call, tuple(ranks), started)
                for value in values:
                    if not any(math.isclose(value, x, rel_tol=1e-6) for x in right):
                        wrong.append(
                            f"step {step}: {call} is {value} over no ranks between {ranks} and "
                            f"{started}"
                        )
            for rank in ranks:
                seen[there[rank]["epoch"]].update(there[rank]["batch"])
        for epoch in sorted(seen)[:-1]:
            if len(seen[epoch]) != SAMPLES:
                wrong.append(f"epoch {epoch}: {SAMPLES - len(seen[epoch])} samples are missing")


def one_run(seed: int, context: Any, port: int) -> Generator[Ended | None, None, None]:
    """Yields None while it goes on."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Plan.of(seed), context, port, folder)
        try:
            yield from run.go()
            if os.environ.get(OBSERVED):
                with contextlib.redirect_stdout(io.StringIO()) as told:
                    timeline = importlib.import_module("ringreduce.observe.timeline")
                    code = timeline.main(["summary", f"{folder}/TIMELINE"])
                if code != 0 or "iB" not in told.getvalue():  # of the bytes of some rank
                    run.ended.wrong.append(f"its timeline is empty: {told.getvalue()}")
            yield run.ended
        finally:
            run.kill_all()


def runs(seeds: Iterable[int], at_once: int) -> Iterator[Ended]:
    """Some runs beside each other, since most of a run is waiting; each as it ends."""
    context = context_of()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    to_start = (one_run(seed, context, store.port) for seed in seeds)
    active = list(itertools.islice(to_start, at_once))
    while active:
        for run in list(active):
            if (ended := next(run)) is not None:
                run.close()
                active.remove(run)
                active.extend(itertools.islice(to_start, 1))
                yield ended
        time.sleep(0.001)


def context_of() -> Any:
    """Starts processes that have imported torch already."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "ringreduce.elastic"])
    return context


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other")
    parser.add_argument("--wire", choices=["auto", "tcp"], help="only seeds that decide on it")
    parser.add_argument("--observed", action="store_true", help="with all that watches a job")
    parser.add_argument("--out", type=Path, help="a file for the counts, as JSON")
    arguments = parser.parse_args()
    os.environ[OBSERVED] = "1" if arguments.observed else ""
    faults = collections.Counter[str]()
    joined, steps, bad, result = 0, 0, list[int](), dict[str, Any]()
    started = time.monotonic()
    from_first = itertools.count(arguments.seed)
    fitting = (s for s in from_first if arguments.wire in (None, Plan.of(s).wire))
    seeds = itertools.islice(fitting, arguments.runs)
    for done, ended in enumerate(runs(seeds, arguments.jobs), 1):
        faults += ended.faults
        joined += ended.joined
        steps += ended.steps
        for text in ended.wrong:
            print(f"seed {ended.seed} ({Plan.of(ended.seed)}): {text}", flush=True)
        if ended.wrong:
            bad.append(ended.seed)
        result = {
            "runs": done,
            "first_seed": arguments.seed,
            "faults": dict(sorted(faults.items())),
            "all_faults": faults.total(),
            "ranks_joined": joined,
            "steps": steps,
            "failed_seeds": bad,
            "seconds": round(time.monotonic() - started),
            "torch": torch.__version__,
        }
        if done % 20 == 0:
            print(f"{done} runs, {faults.total()} faults, {result['seconds']} s", flush=True)
        if arguments.out:  # kept also if this is stopped
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
