"""Trains the character GPT of train_gpt.py twice: by DDP, and by outer steps once in many.

    RINGREDUCE_WIRE=tcp torchrun --standalone --nproc-per-node 2 examples/train_diloco.py

With --ways DDP,LocalSGD,DiLoCo it also trains by torch's LocalSGD, which averages parameters.  All
runs begin at the same weights and see the same text; with --ddp-steps they begin by DDP, and go on
each in its way.  It prints the loss on text that training never saw, and of the steps after those
the seconds and the bytes that rank 0 has sent to others; with RINGREDUCE_WIRE=tcp ranks of one host
use sockets, whose bytes are counted.
"""

import argparse
import functools
import itertools
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import weights_hash, write_record
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from train_gpt import BATCH, GPT, held_out_loss, load_text, random_batch, rate_factor, text_loss

import ringreduce
from ringreduce.core.backend import backend_of, extension
from ringreduce.sparse import share_of


def bytes_sent() -> int:
    """To ranks that this one does not share memory with, as the operations before have seen."""
    for _ in range(3):
        dist.barrier()
        time.sleep(0.05)
    assert dist.group.WORLD is not None
    return sum(count for _, count, _, _ in extension().lines(backend_of(dist.group.WORLD)))


def make_diloco(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> ringreduce.DiLoCo:
    share = share_of(args.codec)
    is_sparse = share is not None  # SparseLoCo
    momentum = (0.0 if is_sparse else 0.9) if args.outer_momentum is None else args.outer_momentum
    if share is None:
        rate = 0.7
    elif momentum:
        rate = 1.0  # with a higher one training diverges
    else:
        # The average divides each element by all ranks, but only some have sent it.  This is all
        # ranks over those that sent it, on average, if each chose its share independently.
        rate = (1 - (1 - share) ** dist.get_world_size()) / share
    lr = rate if args.outer_lr is None else args.outer_lr
    outer = functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    return ringreduce.DiLoCo(
        model, optimizer, sync_every=args.sync_every, sync_seconds=args.sync_seconds,
        codec=args.codec, error_feedback=0.95 if is_sparse else True,
        fragments=args.fragments, overlap=args.overlap, outer_optimizer=outer,
    )  # fmt: skip


def train(args: argparse.Namespace, way: str, texts: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A run of `args.steps` steps: its loss, and time and bytes after `args.ddp_steps` of them."""
    torch.manual_seed(args.seed)
    gpt = GPT(args.layers, args.width)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate_factor(n, args.steps))
    generator = torch.Generator().manual_seed(args.seed + 1 + dist.get_rank())
    local = PeriodicModelAverager(period=args.sync_every) if way == "LocalSGD" else None

    def step_once(model: torch.nn.Module) -> float:
        """Returns the seconds that it took."""
        begin = time.perf_counter()
        loss = text_loss(model, *random_batch(texts[0], generator, args.batch))
        optimizer.zero_grad()
        loss.backward()
        if dist.get_rank() == args.half_speed:
            time.sleep(time.perf_counter() - begin)
        optimizer.step()
        schedule.step()
        if local and model is gpt:
            local.average_parameters(gpt.parameters())
        return time.perf_counter() - begin

    ddp = DistributedDataParallel(gpt) if way == "DDP" or args.ddp_steps else gpt
    for _ in range(args.ddp_steps):
        step_once(ddp)
    model = ddp if way == "DDP" else gpt
    steps = args.steps - args.ddp_steps
    diloco = make_diloco(args, gpt, optimizer) if way == "DiLoCo" else None
    by_time = diloco is not None and args.sync_seconds is not None

    def is_over(step: int) -> bool:
        if by_time:  # ranks make different numbers of steps
            return diloco.rounds >= steps // args.sync_every * args.fragments
        return step >= steps

    before = bytes_sent()
    took = []
    start = time.perf_counter()
    with diloco or nullcontext():
        total = None if by_time else steps
        bar = tqdm(itertools.count(), f"{way:>6}", total, disable=dist.get_rank() != 0)
        for step in bar:
            if is_over(step):
                break
            took.append(step_once(model))
    if local:
        average_parameters(gpt.parameters(), dist.group.WORLD)
    elif diloco and (by_time or args.fragments > 1 or steps % args.sync_every):
        diloco.sync()
    seconds = time.perf_counter() - start
    sent = bytes_sent() - before
    return {
        "held_out_loss": held_out_loss(gpt, texts[1], args.seed),
        "bytes": sent,
        "seconds": seconds,
        "steps": len(took),
        "step_seconds": statistics.median(took),
        "weights_hash": weights_hash(gpt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["DDP", "DiLoCo"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ddp-steps", type=int, default=0, help="the first of them, by DDP (0)")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"sequences of a rank ({BATCH})")
    parser.add_argument("--half-speed", type=int, metavar="RANK", help="it takes twice the time")
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--sync-seconds", type=float, help="so many rounds, but by time")
    parser.add_argument(
        "--outer-lr", type=float, help="(0.7; of a sparse codec (1 - (1 - share)^ranks) / share)"
    )
    parser.add_argument("--outer-momentum", type=float, help="(0.9, of a sparse codec 0)")
    parser.add_argument("--codec", default="int4", help='int8, ..., or "topk:0.02+int2" (int4)')
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="folder for one JSON file a rank")
    args = parser.parse_args()
    if unknown := set(args.ways) - {"DDP", "LocalSGD", "DiLoCo"}:
        parser.error(f"--ways are some of DDP, LocalSGD, DiLoCo, not {', '.join(unknown)}")
    if not 0 <= args.ddp_steps < args.steps:
        parser.error("--ddp-steps is at least 0, and less than --steps")
    by_time = args.sync_seconds is not None and "DiLoCo" in args.ways
    if by_time and args.steps - args.ddp_steps < args.sync_every:
        parser.error("with --sync-seconds, --sync-every steps or more must come after --ddp-steps")

    torch.set_num_threads(1)  # ranks share the cores of one host
    dist.init_process_group("ringreduce")
    if "DiLoCo" in args.ways:  # bad arguments are refused before the first run
        gpt = GPT(args.layers, args.width)
        make_diloco(args, gpt, torch.optim.AdamW(gpt.parameters()))
    texts = load_text()
    runs = {way: train(args, way, texts) for way in args.ways}
    given = {"batch": args.batch, "sync_every": args.sync_every, "ddp_steps": args.ddp_steps}
    write_record(args.record, {**runs, **given})
    if dist.get_rank() == 0:
        first = runs[args.ways[0]]["bytes"]
        print(f"{'':<8}{'held-out loss':>14}{'MB sent by rank 0':>20}{'x fewer':>9}{'seconds':>10}")
        for way, run in runs.items():
            loss, sent = run["held_out_loss"], run["bytes"] / 1e6
            fewer = f"{first / run['bytes']:.0f}" if run["bytes"] else "-"
            print(f"{way:<8}{loss:>14.4f}{sent:>20.2f}{fewer:>9}{run['seconds']:>10.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
