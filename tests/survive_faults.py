"""Random faults in training that goes on: kills and stops of ranks, of newcomers and of donors.

    python tests/survive_faults.py --runs 100           (make survive)
    python tests/survive_faults.py --runs 1 --seed 17   one of them again

Each run trains on 2 to 4 processes (ringreduce.elastic) and has a seed, which decides on the model,
the batches and the faults.  Lost ranks are started again at random moments.  At the end: all ranks
have ended in time; in each step all ranks have the same weights; each element of a gradient is the
average over all ranks of that step or over those that were left; no step is missing or done twice;
and each sample of an epoch was in a batch of a rank that took part in its step.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import elastic

DEADLINE = 120.0  # seconds of a run
TIMEOUT = 8.0  # of an operation, so that stopped ranks are killed soon
SAMPLES, BATCH = 301, 4


@dataclass(frozen=True)
class Plan:
    """What a seed decides on."""

    seed: int
    world: int
    way: str  # "ddp", with BatchNorm, with a static graph, or "loop"
    steps: int
    size: int  # of the model
    faults: int
    codec: str | None  # of DDP's hook

    @staticmethod
    def of(seed: int) -> Plan:
        draw = random.Random(seed)
        return Plan(
            seed,
            world=draw.choice([2, 3, 4]),
            way=draw.choice(["ddp", "ddp bn", "ddp static", "loop"]),
            steps=draw.randint(500, 3000),
            size=draw.choice([3, 200, 3000]),
            faults=draw.randint(3, 20),
            codec=draw.choice([None, None, "int8", "int4"]),
        )


# ---- a rank


def addend(rank: int) -> float:
    return float(1 << 5 * rank)


def contributors(gradient: torch.Tensor, world: int) -> list[int]:
    """The ranks, as bits, over which elements of the average of `addend`s are averages."""
    found = set()
    for value in gradient.unique().tolist():
        masks = [
            mask
            for mask in range(1, 1 << world)
            if abs(sum(addend(r) for r in range(world) if mask >> r & 1) / mask.bit_count() - value)
            < 1e-3
        ]
        assert len(masks) == 1, f"{value} is no average over any ranks"
        found.add(masks[0])
    return sorted(found)


def net_of(plan: Plan) -> torch.nn.Module:
    layers: list[torch.nn.Module] = [torch.nn.Linear(8, plan.size)]
    if plan.way == "ddp bn":
        layers.append(torch.nn.BatchNorm1d(plan.size))
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(plan.size, 1))


def train(plan: Plan, rank: int, life: int, port: int, folder: str, pipe: Any) -> None:
    """Trains, and writes a line before each commit and one after it."""
    torch.set_num_threads(1)
    torch.manual_seed(100 * rank + life)
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
    state = elastic.State(
        model=model, optimizer=optimizer, sampler=sampler, step=0, join_seconds=2.0
    )
    state.restore()
    pipe.send("in")
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    with open(f"{folder}/{rank}-{life}", "w", buffering=1) as record:
        while state.step < plan.steps:
            for batch in state.batches(sampler):
                masks = None
                if plan.way == "loop":
                    for parameter in net.parameters():
                        parameter.grad = torch.full_like(parameter, addend(rank))
                    ringreduce.average_gradients(net)
                    grads = [p.grad for p in net.parameters() if p.grad is not None]
                    masks = contributors(torch.cat([g.flatten() for g in grads]), plan.world)
                else:
                    optimizer.zero_grad()
                    model(inputs[batch]).square().mean().backward()
                optimizer.step()
                state.step += 1
                weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
                before = {"batch": batch, "masks": masks, "epoch": sampler.epoch}
                before["weights"] = hashlib.sha256(weights).hexdigest()[:16]
                record.write(json.dumps({"step": state.step, **before}) + "\n")
                state.commit()
                record.write(json.dumps({"step": state.step, "ranks": state.took_part}) + "\n")
                if state.step >= plan.steps:
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
    struck: bool = False  # killed or stopped

    def look(self) -> None:
        while self.pipe.poll():
            try:
                told = self.pipe.recv()
            except EOFError:
                return
            self.is_in |= told == "in"
            self.is_done |= told == "done"


@dataclass
class Ended:
    """What a run came to."""

    wrong: list[str] = field(default_factory=list)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    joined: int = 0


class Run:
    """One training run."""

    def __init__(self, plan: Plan, context: Any, port: int, folder: str) -> None:
        self.plan, self.context, self.port, self.folder = plan, context, port, folder
        self.draw = random.Random(plan.seed + 1)
        self.ranks: dict[int, Life] = {}
        self.lives = collections.Counter[int]()
        self.again: dict[int, float] = {}  # when a rank is started again
        self.ended = Ended()

    def start(self, rank: int) -> None:
        ours, theirs = mp.Pipe()
        arguments = (self.plan, rank, self.lives[rank], self.port, self.folder, theirs)
        process = self.context.Process(target=train, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.ranks[rank] = Life(process, ours, is_new=self.lives[rank] > 0)
        self.lives[rank] += 1

    def strike(self) -> bool:
        """Kills or stops some ranks, but one that has the state; whether there were any."""
        with_state = [r for r, life in self.ranks.items() if life.is_in and not life.struck]
        if not with_state:
            return False
        safe = self.draw.choice(with_state)
        others = [r for r, life in self.ranks.items() if r != safe and not life.struck]
        if not others:
            return False
        victims = self.draw.sample(others, self.draw.choice([1, 1, 1, len(others)]))
        stop = self.draw.random() < 0.03
        for rank in victims:
            life = self.ranks[rank]
            kind = "newcomer" if not life.is_in else "lowest" if rank == min(self.ranks) else "rank"
            life.struck = True
            if stop and life.is_in:
                self.ended.faults["stop of a " + kind] += 1
                os.kill(life.process.pid, signal.SIGSTOP)
            else:
                self.ended.faults["kill of a " + kind] += 1
                life.process.kill()
        return True

    def watch(self) -> None:
        """Sees who has ended, and starts lost ranks again."""
        finished = any(life.is_done for life in self.ranks.values())
        for rank, life in list(self.ranks.items()):
            was_in = life.is_in
            life.look()
            self.ended.joined += life.is_new and life.is_in and not was_in
            if life.process.exitcode is None:
                continue
            if life.process.exitcode not in (0, -signal.SIGKILL):
                self.ended.wrong.append(f"rank {rank} ended with {life.process.exitcode}")
            if life.is_done:
                continue
            del self.ranks[rank]
            self.again[rank] = time.monotonic() + self.draw.choice([0, 0.02, 0.2])
        for rank, when in list(self.again.items()):
            if not finished and time.monotonic() >= when:
                del self.again[rank]
                self.start(rank)

    def go(self) -> Ended:
        deadline = time.monotonic() + DEADLINE
        for rank in range(self.plan.world):
            self.start(rank)
        left = self.plan.faults
        next_fault = deadline  # until all are in
        while time.monotonic() < deadline:
            time.sleep(0.001)
            self.watch()
            lives = self.ranks.values()
            if any(life.is_done for life in lives):
                break
            if next_fault == deadline and all(life.is_in for life in lives):
                next_fault = time.monotonic() + self.draw.random() * 0.1
            if left and time.monotonic() > next_fault:
                left -= self.strike()
                next_fault = time.monotonic() + self.draw.choice([0.005, 0.05, 0.2])
        self.finish(deadline)
        if not self.ended.wrong:
            self.check()
        return self.ended

    def finish(self, deadline: float) -> None:
        """Waits for the ranks that are in; the others have nothing to join any more."""
        grace = time.monotonic() + 2 * TIMEOUT + 6.0
        for rank, life in self.ranks.items():
            life.look()
            while life.is_in and not life.struck and life.process.exitcode is None:
                if time.monotonic() > max(deadline, grace):
                    self.ended.wrong.append(f"rank {rank} hangs: {self.stacks(life)}")
                    break
                time.sleep(0.002)
            life.look()
            if life.is_in and not life.struck and life.process.exitcode not in (0, None):
                self.ended.wrong.append(f"rank {rank} ended with {life.process.exitcode}")
            if life.process.exitcode is None:
                life.process.kill()
            life.process.join()
        if not any(life.is_done for life in self.ranks.values()):
            self.ended.wrong.append("no rank came to the end in time")

    def stacks(self, life: Life) -> str:
        return os.popen(f"py-spy dump --pid {life.process.pid} 2> /dev/null").read()

    # ---- afterwards

    def check(self) -> None:
        before: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        took_part: dict[int, list[int]] = {}
        wrong = self.ended.wrong
        for path in sorted(Path(self.folder).iterdir()):
            rank = int(path.name.split("-")[0])
            for line in path.read_text().splitlines():
                try:
                    told = json.loads(line)
                except json.JSONDecodeError:
                    continue  # it was killed while it wrote
                step = told["step"]
                if "ranks" in told:
                    if took_part.setdefault(step, told["ranks"]) != told["ranks"]:
                        wrong.append(f"step {step}: ranks {took_part[step]} and {told['ranks']}")
                elif rank in before[step]:
                    wrong.append(f"rank {rank} did step {step} twice")
                else:
                    before[step][rank] = told
        if sorted(took_part) != list(range(1, self.plan.steps + 1)):
            missing = set(range(1, self.plan.steps + 1)) - set(took_part)
            wrong.append(f"steps {sorted(missing)} are missing")
        seen: dict[int, set[int]] = collections.defaultdict(set)
        for step, ranks in sorted(took_part.items()):
            there = before[step]
            for what in ("weights", "masks", "epoch"):
                kinds = {json.dumps(told[what]) for told in there.values()}
                if len(kinds) > 1:
                    wrong.append(f"step {step}: other {what} on some ranks: {kinds}")
            if not set(ranks) <= set(there):
                wrong.append(f"step {step}: of ranks {ranks}, only {sorted(there)} were in it")
                continue
            for mask in there[ranks[0]]["masks"] or []:
                if not all(mask >> r & 1 for r in ranks):
                    wrong.append(f"step {step}: an average over {mask:b}, not all of {ranks}")
            for rank in ranks:
                seen[there[rank]["epoch"]].update(there[rank]["batch"])
        for epoch in sorted(seen)[:-1]:
            if len(seen[epoch]) != SAMPLES:
                wrong.append(f"epoch {epoch}: {SAMPLES - len(seen[epoch])} samples are missing")


def run(seed: int, context: Any, port: int) -> Ended:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        return Run(Plan.of(seed), context, port, folder).go()


def context_of() -> Any:
    """Starts processes that have imported torch already."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "ringreduce.elastic"])
    return context


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--out", type=Path, help="a file for the counts, as JSON")
    arguments = parser.parse_args()
    context = context_of()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    faults = collections.Counter[str]()
    joined, bad = 0, []
    started = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        ended = run(seed, context, store.port)
        faults += ended.faults
        joined += ended.joined
        for text in ended.wrong:
            print(f"seed {seed} ({Plan.of(seed)}): {text}", flush=True)
        if ended.wrong:
            bad.append(seed)
        if (seed - arguments.seed) % 20 == 19:
            print(f"{seed - arguments.seed + 1} runs, {faults.total()} faults", flush=True)
    result = {
        "runs": arguments.runs,
        "first_seed": arguments.seed,
        "faults": dict(faults),
        "all_faults": faults.total(),
        "ranks_joined": joined,
        "failed_seeds": bad,
        "seconds": round(time.monotonic() - started),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
