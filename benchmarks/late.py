"""Does `ringreduce.straggler_detection` name the rank that was late, and nobody in a clean run?

    python benchmarks/late.py --runs 100 --delay-ms 50       one rank late in one bucket of a run
    python benchmarks/late.py --runs 100 --delay-ms 0        clean runs
    python benchmarks/late.py --runs 50 --delay-ms 0 --busy  the same on a busy machine

Each run trains for --steps steps, DDP on the backend (or with --hook on gloo).  The late rank, the
step and the bucket are drawn from the seed.  A run is right if that rank is named in that step and
bucket and nobody else is; a clean run, if nobody is named.  The exit status is 1 if one is not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce


def train(rank: int, given: argparse.Namespace, store: str, out: Connection) -> None:
    torch.set_num_threads(1)
    backend = "gloo" if given.hook else "ringreduce"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=given.nproc
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(given.width, given.width) for _ in range(8)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=given.width**2 * 8 / 2**20)
    if given.hook:
        ringreduce.register_comm_hook(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    data = torch.randn(32, given.width)
    step, late_in, layer = -1, -1, 0

    def delay(gradient: torch.Tensor) -> torch.Tensor:
        if step == late_in:
            time.sleep(given.delay_ms / 1e3)
        return gradient

    for i, part in enumerate(model.children()):
        part.weight.register_hook(lambda g, i=i: delay(g) if i == layer else g)
    for run in range(-1, given.runs):  # the first one makes DDP's buckets
        draw = random.Random(given.seed + run)
        who, layer = draw.randrange(given.nproc), draw.randrange(8)
        when = draw.randrange(given.steps // 10, given.steps)
        late_in = when if rank == who and given.delay_ms > 0 and run >= 0 else -1
        with ringreduce.straggler_detection(log=False) as sd:
            begun = time.monotonic()
            for step in range(given.steps if run >= 0 else 20):  # noqa: B007
                optimizer.zero_grad()
                ddp(data).square().mean().backward()
                optimizer.step()
            took = time.monotonic() - begun
        first = ringreduce.records()[-1].step - given.steps + 1
        named = {(late.rank, late.record.step - first) for late in sd.late}
        buckets = [late.record.bucket for late in sd.late]
        steady = sd.persistent
        expected = {(who, when)} if given.delay_ms > 0 else set()
        dist.barrier()
        if rank == 0 and run >= 0:
            good = named == expected and not steady and not sd.wires
            out.send((good, expected, named, buckets, steady, len(sd.wires), sd.summary(), took))
    dist.destroy_process_group()


def burn() -> None:
    while True:
        sum(range(10_000))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hook", action="store_true", help="gloo with the hook")
    parser.add_argument("--busy", action="store_true", help="a process on each core beside it")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe(duplex=False)
    store = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"late-{os.getpid()}")
    ranks = [
        context.Process(target=train, args=(rank, given, store, tell))
        for rank in range(given.nproc)
    ]
    burners = [
        context.Process(target=burn, daemon=True) for _ in range(os.cpu_count() or 1) if given.busy
    ]
    for process in ranks + burners:
        process.start()
    tell.close()
    right, steps = 0, []
    for run in range(given.runs):
        try:
            good, expected, named, buckets, steady, wires, summary, took = hear.recv()
        except EOFError:
            print("a rank ended; its error is above", file=sys.stderr)
            return 1
        right += good
        steps.append(took / given.steps * 1e3)
        if not good:
            print(f"run {run}: expected {expected}, named {named} in buckets {buckets}, "
                  f"all along {steady}, slow wires {wires}\n{summary}\n")  # fmt: skip
    for process in ranks:
        process.join()
    for process in burners:
        process.kill()
    print(
        f"{right} of {given.runs} runs right, {given.nproc} ranks, {given.steps} steps of "
        f"{statistics.median(steps):.2f} ms, delay {given.delay_ms:g} ms"
        f"{', on a busy machine' if given.busy else ''}, load {os.getloadavg()[0]:.1f}"
    )
    return 0 if right == given.runs else 1


if __name__ == "__main__":
    sys.exit(main())
