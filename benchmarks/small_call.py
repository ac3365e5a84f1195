"""Where the time of a small all-reduce goes: each layer alone, in turns, in the same processes.

    torchrun --standalone --nproc-per-node 2 benchmarks/small_call.py

    nothing     dist.all_reduce on torch's fake backend, which does nothing: torch's Python part
    one rank    dist.all_reduce in a ringreduce group of this rank alone: adds the call into C++,
                its checks and the end of the Work
    all ranks   dist.all_reduce in a group of all ranks: adds the exchange
    operator    torch.ops.ringreduce.all_reduce_ of all ranks: without torch.distributed
    dispatch    the operator on a meta tensor, where it does nothing: torch's part of it
    barrier     dist.barrier of all ranks

Microseconds a call, back to back: medians of the rounds with p10 and p90, on rank 0.  --out FILE
has all rounds, as JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

import ringreduce
from ringreduce.tools.bench.results import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--out", type=Path, help="a file for all times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ringreduce.init()
    world = dist.group.WORLD
    assert world is not None
    fake = dist.new_group(backend="fake")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    tensor = torch.zeros(args.bytes // 4)
    nothing = tensor.to("meta")
    operator = torch.ops.ringreduce.all_reduce_.default
    calls: dict[str, Callable[[], object]] = {
        "nothing": lambda: dist.all_reduce(tensor, group=fake),
        "one rank": lambda: dist.all_reduce(tensor, group=alone),
        "all ranks": lambda: dist.all_reduce(tensor),
        "operator": lambda: operator(tensor, "sum", world.group_name),
        "dispatch": lambda: operator(nothing, "sum", world.group_name),
        "barrier": dist.barrier,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.calls):
                call()
            if turn > 0:
                times[name].append((time.perf_counter() - start) / args.calls * 1e6)
    if dist.get_rank() == 0:
        print(f"{args.bytes} bytes, {dist.get_world_size()} ranks, {args.rounds} rounds")
        for name, found in times.items():
            deciles = statistics.quantiles(found, n=10)
            print(f"{name:<12}{statistics.median(found):7.2f}  {deciles[0]:.2f}-{deciles[-1]:.2f}")
        if args.out:
            write_json(args.out, {"bytes": args.bytes, "us": times})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
