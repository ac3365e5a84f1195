"""What the loss of ranks costs with on_loss="continue": time, and quality of the training.

    python benchmarks/loss.py deaths --nproc 4 --deaths 100
    python benchmarks/loss.py cost --nproc 2          (--option order: what that of ranks costs)
    python benchmarks/loss.py training --nproc 4 --deaths 20

`deaths`: ranks call all_reduce one after the other.  One is killed at a random moment, in an
all_reduce or while the others wait for it; then the next, until one rank is left.  The time goes
from the later of two moments, the death and the last survivor's call, to the moment at which the
all_reduce has ended on all survivors.  The death is the moment at which the kernel tells this
program that the process has ended; the columns of "kill" count from the signal instead, and are an
upper bound.

`cost`: the same processes have a group with each value of on_loss, or of another option, which take
turns.  Figures are medians of the rounds; the ratio is the median of the rounds' ratios, with their
quartiles.

`training`: the character GPT of examples/train_gpt.py is trained with several seeds, with as many
deaths, each of a random rank that is started again at once, and without.  The loss is that on text
that training has not seen, the same for all seeds.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing as mp
import os
import random
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import elastic
from ringreduce.tools.bench.results import write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_gpt import BATCH, CONTEXT, GPT, held_out_loss, load_text, rate_factor, text_loss

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "25 MiB": 25 << 20}
OPTIONS = {"on_loss": ("error", "continue"), "order": ("ring", "rank")}
WARM = 10  # calls before the first death, and after each
DEADLINE = 60  # seconds of a group of ranks


def tensor_of(size: str) -> torch.Tensor:
    return torch.ones(SIZES[size] // 4)


def connect(rank: int, world: int, port: int, name: str, on_loss: str) -> None:
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port))
    options = ringreduce.Options(on_loss=on_loss)
    dist.init_process_group(
        "ringreduce", store=store, rank=rank, world_size=world, pg_options=options
    )


def start(rank: int, nproc: int, target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    """A process and a pipe to it."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "train_gpt"])
    ours, theirs = mp.Pipe()
    process = context.Process(target=target, args=(rank, nproc, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def hear(pipe: Any) -> Any:
    if not pipe.poll(DEADLINE):
        raise RuntimeError(f"a rank did not answer in {DEADLINE} s")
    return pipe.recv()


# ---- deaths


def reduce_on(rank: int, world: int, pipe: Any, port: int, name: str, size: str) -> None:
    """Reduces for ever; after each loss, tells in which call it saw it and the last calls' times.

    A rank to which the parent writes stays away from the calls.
    """
    connect(rank, world, port, name, "continue")
    t = tensor_of(size)
    calls: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=2 * WARM)
    live, seen = world, 0
    for number in itertools.count():
        if number == seen + WARM:
            pipe.send((seen, {n: (begin, end) for n, begin, end in calls}))
        if number % WARM == 0 and pipe.poll():
            pipe.recv()
            pipe.send("away")
            signal.pause()
        begin = time.monotonic_ns()
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        calls.append((number, begin, time.monotonic_ns()))
        if len(ringreduce.live_ranks()) != live:
            live, seen = len(ringreduce.live_ranks()), number


def kill(pid: int) -> tuple[int, int]:
    """When the signal was sent and when the process had ended."""
    ended = os.pidfd_open(pid)
    sent = time.monotonic_ns()
    signal.pidfd_send_signal(ended, signal.SIGKILL)
    select.select([ended], [], [], DEADLINE)
    now = time.monotonic_ns()
    os.close(ended)
    return sent, now


def seconds_after(moment: int, told: list[tuple[int, dict[int, tuple[int, int]]]]) -> float:
    """From the later of the moment and the last call to the end, of the slowest call in which a
    survivor saw the loss."""
    numbers = [seen for seen, _ in told]
    times = []
    for number in range(min(numbers), max(numbers) + 1):
        begin = max(calls[number][0] for _, calls in told)
        end = max(calls[number][1] for _, calls in told)
        times.append(end - max(moment, begin))
    return max(times) / 1e9


def die(nproc: int, size: str, port: int, name: str) -> list[dict[str, Any]]:
    """The times of all deaths but the last rank's."""
    ranks = [start(rank, nproc, reduce_on, port, name, size) for rank in range(nproc)]
    for _, pipe in ranks:
        hear(pipe)
    found = []
    random.shuffle(ranks)
    while len(ranks) > 1:
        process, pipe = ranks.pop()
        is_away = random.random() < 0.5
        if is_away:
            pipe.send("stay away")
            hear(pipe)
        time.sleep(random.random() * 0.05)
        sent, ended = kill(process.pid)
        told = [hear(pipe) for _, pipe in ranks]
        found.append(
            {
                "size": size,
                "left": len(ranks),
                "away": is_away,
                "death_s": seconds_after(ended, told),
                "kill_s": seconds_after(sent, told),
            }
        )
    ranks[0][0].kill()
    return found


def deaths(args: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in itertools.count():
        if len(found) >= args.deaths * len(args.sizes):
            break
        for size in args.sizes:
            found += die(args.nproc, size, port, f"{args.nproc} {size} {number}")
    print(f"{args.nproc} ranks, {len(found)} deaths; milliseconds")
    heads = ["median", "p90", "max", "kill: median", "p90", "max"]
    print(f"{'':<32}{'deaths':>8}" + "".join(f"{head:>14}" for head in heads))
    for size, is_away in itertools.product(args.sizes, [True, False]):
        those = [one for one in found if (one["size"], one["away"]) == (size, is_away)]
        cells = []
        for key in ("death_s", "kill_s"):
            times = sorted(1e3 * one[key] for one in those) or [float("nan")]
            cells += [statistics.median(times), times[int(0.9 * (len(times) - 1))], times[-1]]
        what = f"{size}, the others " + ("wait" if is_away else "reduce")
        print(f"{what:<32}{len(those):>8}" + "".join(f"{cell:>14.2f}" for cell in cells))
    return found


# ---- what it costs while no rank dies


def network(width: int = 512) -> torch.nn.Module:
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    return torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.ReLU())))


def time_turns(rank: int, world: int, pipe: Any, port: int, args: argparse.Namespace) -> None:
    """Tells the seconds of each round, for each value of the option and each call."""
    connect(rank, world, port, "cost", "error")
    groups = {
        value: dist.new_group(pg_options=ringreduce.Options(**{args.option: value}))
        for value in OPTIONS[args.option]
    }
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for size in args.sizes:
        t = tensor_of(size)
        calls[size] = {
            value: lambda t=t, group=group: dist.all_reduce(t, dist.ReduceOp.AVG, group)
            for value, group in groups.items()
        }
    steps, inputs = {}, torch.randn(16, 512)
    for value, group in groups.items():
        model = DistributedDataParallel(network(), process_group=group)
        ringreduce.register_comm_hook(model)
        steps[value] = lambda model=model: model(inputs).square().mean().backward()
    calls["DDP step"] = steps
    found: dict[str, dict[str, list[float]]] = {}
    for what, ways in calls.items():
        counts = torch.zeros(1, dtype=torch.int64)
        for way in ways.values():
            way()
            begin = time.perf_counter()
            for _ in range(3):
                way()
            counts += int(args.seconds / 2 * 3 / (time.perf_counter() - begin))
        dist.broadcast(counts, 0)
        count = max(3, int(counts))
        times: dict[str, list[float]] = {value: [] for value in ways}
        for number in range(args.rounds):
            for value in ways if number % 2 == 0 else reversed(ways):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(count):
                    ways[value]()
                times[value].append((time.perf_counter() - begin) / count)
        found[what] = times
    pipe.send(found)
    dist.destroy_process_group()


def cost(args: argparse.Namespace, port: int) -> dict[str, Any]:
    ranks = [start(rank, args.nproc, time_turns, port, args) for rank in range(args.nproc)]
    deadline = time.monotonic() + 10 * DEADLINE
    while not ranks[0][1].poll(1.0):
        if time.monotonic() > deadline or any(process.exitcode for process, _ in ranks):
            raise RuntimeError("a rank has failed, or takes too long")
    found: dict[str, dict[str, list[float]]] = ranks[0][1].recv()
    for process, _ in ranks:
        process.join()
    print(f"{args.nproc} ranks, {args.rounds} rounds; microseconds")
    usual, other = OPTIONS[args.option]
    print(f"{'':<12}{usual:>12}{other:>12}{'ratio':>10}   quartiles")
    for what, times in found.items():
        ratios = [b / a for a, b in zip(times[usual], times[other], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = [1e6 * statistics.median(times[value]) for value in (usual, other)]
        print(f"{what:<12}{medians[0]:>12.1f}{medians[1]:>12.1f}{middle:>10.4f}", end="")
        print(f"   {low:.4f}-{high:.4f}")
    return found


# ---- training


def train(
    rank: int, world: int, pipe: Any, port: int, name: str, seed: int, args: argparse.Namespace
) -> None:
    """Tells the number of each step and of ranks that took part, and the loss at the end."""
    connect(rank, world, port, name, "continue")
    text, held_out = load_text(1 << 20)
    pieces = text.unfold(0, CONTEXT + 1, CONTEXT)  # each with the character after it
    torch.manual_seed(seed)
    model = DistributedDataParallel(GPT(2, args.width), init_sync=False)
    ringreduce.register_comm_hook(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate_factor(n, args.steps))
    sampler = elastic.ElasticSampler(len(pieces), BATCH, seed=seed)
    state = elastic.State(
        model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, step=0
    )
    state.restore()
    while state.step < args.steps:
        for batch in state.batches(sampler):
            piece = pieces[batch]
            optimizer.zero_grad()
            text_loss(model, piece[:, :-1], piece[:, 1:]).backward()
            optimizer.step()
            schedule.step()
            state.step += 1
            state.commit()
            pipe.send((state.step, len(state.took_part)))
            if state.step == args.steps:
                break
    pipe.send(held_out_loss(model.module, held_out, 0))
    dist.destroy_process_group()


def train_once(args: argparse.Namespace, port: int, seed: int, deaths: int) -> dict[str, Any]:
    """Trains once; the loss, and the step of each death and of each join."""
    draw = random.Random(seed)
    rest = (train, port, f"{seed} {deaths}", seed, args)
    ranks = {rank: start(rank, args.nproc, *rest) for rank in range(args.nproc)}
    due = [args.steps * (number + 1) // (deaths + 1) for number in range(deaths)]
    steps = dict.fromkeys(ranks, 0)  # of each rank that takes part, the last
    killed, joined, losses, live = [], [], {}, {}
    deadline = time.monotonic() + args.steps + DEADLINE
    while not losses or losses.keys() < steps.keys():
        if time.monotonic() > deadline:
            raise RuntimeError("the training takes too long")
        for rank, (_, pipe) in ranks.items():
            while rank not in losses and pipe.poll(0.001):
                told = pipe.recv()
                if isinstance(told, float):
                    losses[rank] = told
                    break
                if rank not in steps:
                    joined.append(told[0])
                steps[rank], live[told[0]] = told
        if due and len(steps) > 1 and max(steps.values()) >= due[0]:
            victim = draw.choice(sorted(steps))
            killed.append({"rank": victim, "step": steps.pop(victim)})
            ranks[victim][0].kill()
            ranks[victim] = start(victim, args.nproc, *rest)
            due.pop(0)
    for process, _ in ranks.values():
        process.kill()
        process.join()
    if due or len(set(losses.values())) != 1:
        raise RuntimeError(f"deaths that did not happen: {len(due)}; losses of ranks: {losses}")
    loss = next(iter(losses.values()))
    mean = statistics.mean(live.values())
    return {"seed": seed, "loss": loss, "ranks": mean, "killed": killed, "joined_after": joined}


def training(args: argparse.Namespace, port: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    for seed in range(args.seeds):
        for way, deaths in (("without", 0), ("with", args.deaths)):
            found[way].append(train_once(args, port, seed, deaths))
            one = found[way][-1]
            print(
                f"seed {seed}, {deaths} deaths, {len(one['joined_after'])} joined, "
                f"{one['ranks']:.2f} ranks a step: loss {one['loss']:.4f}",
                flush=True,
            )
    for way, those in found.items():
        losses = [one["loss"] for one in those]
        print(
            f"{way} deaths: mean {statistics.mean(losses):.4f}, "
            f"{min(losses):.4f} to {max(losses):.4f}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["deaths", "cost", "training"])
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="of the tensors")
    parser.add_argument("--deaths", type=int, default=20, help="at each size, or of a training")
    parser.add_argument("--option", choices=OPTIONS, default="on_loss", help="whose cost")
    parser.add_argument("--rounds", type=int, default=51, help="of each value of the option")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a round, about")
    parser.add_argument("--seeds", type=int, default=5, help="of the training")
    parser.add_argument("--steps", type=int, default=600, help="of a training")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 4")
    parser.add_argument("--out", type=Path, help="a file for all times, as JSON")
    args = parser.parse_args()
    if min(args.nproc, args.rounds) < 2 or min(args.deaths, args.seeds) < 1:
        parser.error("--nproc and --rounds must be at least 2, --deaths and --seeds 1")
    args.sizes = args.sizes or (["1 KiB", "25 MiB"] if args.what == "deaths" else [*SIZES])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {"deaths": deaths, "cost": cost, "training": training}[args.what](args, store.port)
    if args.out:
        content = {"command": " ".join(sys.argv), "cores": os.cpu_count(), "times": found}
        write_json(args.out, content)


if __name__ == "__main__":
    main()
