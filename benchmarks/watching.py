"""What watching a job costs: each tool of docs/see.md, and all, in turns, in the same processes.

    torchrun --standalone --nproc-per-node 2 benchmarks/watching.py

Each round measures, with every tool in turn: all-reduces of 1 KiB, back to back, and steps of the
wide MLP of benchmarks/ddp.py.  Medians of the rounds with p10 and p90, on rank 0; and the median of
the ratios to the same round without a tool.  The records themselves are always kept.  --out FILE
has all rounds, as JSON.  With --device cuda a call is timed until it returns, which is what it
costs its caller; --steps 0 leaves the steps out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from _ddp_models import WORKLOADS, loss_of
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.observe import metrics
from ringreduce.tools.bench.results import write_json


class NoWriter:
    """Takes the scalars of ringreduce.tensorboard."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Nothing."""


@contextlib.contextmanager
def metric_files(folder: str) -> Iterator[None]:
    os.environ["RINGREDUCE_METRICS"] = folder
    metrics.follow_variable()
    yield
    metrics.end()


@contextlib.contextmanager
def scalars() -> Iterator[None]:
    handle = ringreduce.tensorboard(NoWriter())
    yield
    handle.remove()


def stepper(device: torch.device) -> Callable[[], None]:
    """A step of the wide MLP."""
    workload = WORKLOADS["mlp"]
    model = DistributedDataParallel(workload.make(workload.full).to(device))
    optimizer = workload.optimizer(model)
    batch = workload.batch(workload.full, torch.Generator().manual_seed(1))
    inputs, targets = (one.to(device) for one in batch)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20_000, help="all-reduces of a round")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="a file for all times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ringreduce.init()
    folder = tempfile.mkdtemp(prefix="watching-")
    tools: dict[str, Callable[[], AbstractContextManager[object]]] = {
        **({"metrics": lambda: metric_files(folder)} if find_spec("prometheus_client") else {}),
        "tensorboard": scalars,
        "straggler_detection": lambda: ringreduce.straggler_detection(log=False),
        "timeline": lambda: ringreduce.timeline(folder),
    }
    device, on_gpu = torch.device(args.device), args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    tensor = torch.zeros(256, device=device)
    dist.all_reduce(tensor)
    step = stepper(device) if args.steps else lambda: None

    def seconds(call: Callable[[], object], times: int) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(times):
            call()
        took = time.perf_counter() - begun
        if on_gpu:
            torch.cuda.synchronize()
        return took / max(1, times)

    names = ["nothing", *tools, "all"]
    calls: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.rounds + 1):
        for name in names:
            if on_gpu:  # calls tell when they begin until 3 s after somebody read records
                time.sleep(3.5)
            with ExitStack() as stack:
                for tool in tools if name == "all" else [name] if name in tools else []:
                    stack.enter_context(tools[tool]())
                call = seconds(lambda: dist.all_reduce(tensor), args.calls) * 1e6
                a_step = seconds(step, args.steps) * 1e3
            if turn > 0:
                calls[name].append(call)
                steps[name].append(a_step)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
        print(f"{'':<20}{'all-reduce (us)':>28}{'step (ms)':>32}")
        for name in names:
            shown = (calls, steps) if args.steps else (calls,)
            columns = (told(times[name], times["nothing"]) for times in shown)
            print(f"{name:<20}{''.join(columns)}")
        if args.out:
            write_json(args.out, {"call_us": calls, "step_ms": steps})
    shutil.rmtree(folder)
    dist.destroy_process_group()


def told(found: list[float], nothing: list[float]) -> str:
    deciles = statistics.quantiles(found, n=10)
    ratio = statistics.median(a / b for a, b in zip(found, nothing, strict=True))
    spread = f"{deciles[0]:.2f}-{deciles[-1]:.2f}"
    return f"{statistics.median(found):9.2f} {spread:>15} {ratio:6.3f}"


if __name__ == "__main__":
    main()
