"""Trains the character GPT of train_gpt.py twice: by DDP, and by outer steps once in many.

    RINGREDUCE_WIRE=tcp torchrun --standalone --nproc-per-node 2 examples/train_diloco.py

With --ways DDP,LocalSGD,DiLoCo it also trains by torch's LocalSGD, which averages parameters.  All
runs begin at the same weights and see the same text.  It prints the loss on text that training
never saw, and the bytes that rank 0 has sent to others; with RINGREDUCE_WIRE=tcp ranks of one host
use sockets, whose bytes are counted.
"""

import argparse
import functools
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
from train_gpt import GPT, held_out_loss, load_text, random_batch, rate_factor, text_loss

import ringreduce
from ringreduce.core.backend import backend_of, extension


def bytes_sent() -> int:
    """To ranks that this one does not share memory with, as the operations before have seen."""
    for _ in range(3):
        dist.barrier()
        time.sleep(0.05)
    assert dist.group.WORLD is not None
    return sum(count for _, count, _, _ in extension().lines(backend_of(dist.group.WORLD)))


def train(args: argparse.Namespace, way: str, texts: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A run of `args.steps` steps: its losses, time and bytes."""
    torch.manual_seed(args.seed)
    gpt = GPT(args.layers, args.width)
    model = DistributedDataParallel(gpt) if way == "DDP" else gpt
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate_factor(n, args.steps))
    generator = torch.Generator().manual_seed(args.seed + 1 + dist.get_rank())
    diloco = nullcontext()
    local = PeriodicModelAverager(period=args.sync_every) if way == "LocalSGD" else None
    if way == "DiLoCo":
        settings: dict[str, Any] = {}
        if args.codec.startswith("topk"):  # SparseLoCo: averages are taken as they are
            settings["outer_optimizer"] = functools.partial(torch.optim.SGD, lr=1.0)
            settings["error_feedback"] = 0.95
        diloco = ringreduce.DiLoCo(
            model, optimizer, sync_every=args.sync_every, codec=args.codec,
            fragments=args.fragments, overlap=args.overlap, **settings,
        )  # fmt: skip
    before = bytes_sent()
    start = time.perf_counter()
    with diloco:
        for _ in tqdm(range(args.steps), desc=f"{way:>6}", disable=dist.get_rank() != 0):
            loss = text_loss(model, *random_batch(texts[0], generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if local:
                local.average_parameters(gpt.parameters())
    if local:
        average_parameters(gpt.parameters(), dist.group.WORLD)
    elif way == "DiLoCo" and args.steps % args.sync_every:
        diloco.sync()
    seconds = time.perf_counter() - start
    sent = bytes_sent() - before
    return {
        "held_out_loss": held_out_loss(gpt, texts[1], args.seed),
        "bytes": sent,
        "seconds": seconds,
        "weights_hash": weights_hash(gpt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["DDP", "DiLoCo"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sync-every", type=int, default=30)
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

    torch.set_num_threads(1)  # ranks share the cores of one host
    dist.init_process_group("ringreduce")
    texts = load_text()
    runs = {way: train(args, way, texts) for way in args.ways}
    write_record(args.record, {**runs, "steps": args.steps})
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
