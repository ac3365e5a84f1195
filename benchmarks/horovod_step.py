"""Times a training step under hvd.DistributedOptimizer beside DDP with ringreduce's hook.

    torchrun --standalone --nproc-per-node 2 benchmarks/horovod_step.py

Models, on CPUs: the wide MLP of benchmarks/ddp.py (17.1 million parameters in 6 tensors), and a
small GPT (0.8 million in 51 tensors), whose step takes more of the coordinator and less of the
wire.
The ways take turns in the same processes: DDP, hvd.DistributedOptimizer, and no sync.  Figures are
medians of the rounds, with p10 and p90; the ratio is the median of the rounds' ratios.  --out FILE
has all rounds, as JSON.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _ddp_models import WORKLOADS, loss_of
from torch.nn.parallel import DistributedDataParallel

import ringreduce
import ringreduce.horovod as hvd
from ringreduce.tools.bench.results import write_json

WAYS = ("DDP", "hvd", "no sync")
SIZES = {
    "mlp": WORKLOADS["mlp"].full,
    "gpt2": WORKLOADS["gpt2"].tiny
    | {"layers": 4, "width": 128, "heads": 4, "context": 64, "tokens": 64, "batch": 8},
}


def steps_of(name: str) -> dict[str, Callable[[], None]]:
    """A function for each way that takes a step of the model."""
    workload, sizes = WORKLOADS[name], SIZES[name]
    torch.manual_seed(0)
    net = workload.make(sizes)
    batch = workload.batch(sizes, torch.Generator().manual_seed(hvd.rank()))
    steps: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        model: torch.nn.Module = copy.deepcopy(net)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if way == "DDP":
            model = DistributedDataParallel(model)
            ringreduce.register_comm_hook(model)
        elif way == "hvd":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def step(model: torch.nn.Module = model, opt: torch.optim.Optimizer = optimizer) -> None:
            opt.zero_grad()
            loss_of(model, *batch).backward()
            opt.step()

        steps[way] = step
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mlp,gpt2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a round of one way")
    parser.add_argument("--out", type=Path, help="a file for all times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ringreduce.init()
    hvd.init()
    found_of: dict[str, dict[str, list[float]]] = {}
    for name in args.models.split(","):
        steps = steps_of(name)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        found_of[name] = times
        calls = 1
        for turn in range(args.rounds + 2):
            for way, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    step()
                seconds = torch.tensor([(time.perf_counter() - start) / calls])
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if turn > 1:
                    times[way].append(seconds.item())
                elif way == "DDP":
                    calls = max(1, int(args.seconds / seconds.item()))
        if hvd.rank() == 0:
            print(f"{name}, {hvd.size()} ranks, {args.rounds} rounds of {calls} steps")
            for way, found in times.items():
                deciles = statistics.quantiles(found, n=10)
                ratio = statistics.median(
                    mine / ddp for mine, ddp in zip(found, times["DDP"], strict=True)
                )
                print(
                    f"  {way:<8}{statistics.median(found) * 1e3:8.1f} ms "
                    f"({deciles[0] * 1e3:.1f}-{deciles[-1] * 1e3:.1f}){ratio:7.2f} x DDP"
                )
    if args.out and hvd.rank() == 0:
        write_json(args.out, {"ranks": hvd.size(), "seconds": found_of})
    hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
