"""Does `ringreduce.straggler_detection` name the rank that was late, and nobody in a clean run?

    python benchmarks/late.py --runs 100 --delay-ms 50       one rank late in one bucket of a run
    python benchmarks/late.py --runs 100 --delay-ms 0        clean runs
    python benchmarks/late.py --runs 50 --delay-ms 0 --busy  the same on a busy machine
    python benchmarks/late.py --runs 20 --hosts 3            a line between hosts is slowed (root)

Each run trains for --steps steps, DDP on the backend (or with --hook on gloo).  The late rank, the
step and the bucket are drawn from the seed.  A run is right if that rank is named in that step and
bucket and nobody else is; a clean run, if nobody is named.  The exit status is 1 if one is not.

With --hosts each rank is on a host of its own: a network namespace, whose line tc limits.  In the
middle of a run the line of one host, drawn from the seed, gets --slow-mbit in place of --mbit.  A
run is right if lines from or to that host are called slow, no others, and no rank is called late.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

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


def train_on_host(given: argparse.Namespace) -> None:
    """A rank of a job on several hosts; tells what it has found as a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("ringreduce")
    model = nn.Sequential(*(nn.Linear(given.width, given.width) for _ in range(8)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=given.width**2 * 8 / 2**20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    data = torch.randn(32, given.width)
    with ringreduce.straggler_detection(log=False) as sd:
        for step in range(given.steps):
            if step == given.steps // 2 and dist.get_rank() == 0:
                Path(given.on_host, "half").touch()
            optimizer.zero_grad()
            ddp(data).square().mean().backward()
            optimizer.step()
    lines = sorted({wire.line.partition(" moved ")[0] for wire in sd.wires if wire.line})
    print(json.dumps({"late": len(sd.late), "steady": list(sd.persistent), "lines": lines}))
    print(sd.summary())
    dist.destroy_process_group()


def slow_a_line(given: argparse.Namespace, run: int) -> bool:
    """Whether that line was named, and no rank."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from hosts import Hosts

    draw = random.Random(given.seed + run)
    slow = draw.randrange(given.hosts)
    with (
        tempfile.TemporaryDirectory(prefix="late-") as folder,
        Hosts(given.hosts, veth=True, rate_mbit=given.mbit) as hosts,
    ):
        command = [sys.executable, __file__, "--on-host", folder, "--steps", str(given.steps)]
        command += ["--width", str(given.width)]
        job = hosts.start(command)
        while not Path(folder, "half").exists() and job.processes[0].poll() is None:
            time.sleep(0.005)
        hosts.link(slow, "*", rate_mbit=given.slow_mbit)
        outcomes = job.wait(300)
    said = [
        [line for line in outcome.output.splitlines() if line.startswith("{")]
        for outcome in outcomes
    ]
    found = [json.loads(lines[-1]) for lines in said]
    # The line is slow both ways: the rank there names its lines, and the others those to it.
    named = [
        rank == slow or f"to rank {slow} " in line
        for rank, of in enumerate(found)
        for line in of["lines"]
    ]
    good = bool(named) and all(named) and not any(f["late"] or f["steady"] for f in found)
    if not good:
        print(f"run {run}: the line of rank {slow}'s host was slow; found {found}")
        print("\n".join(o.output for o in outcomes))
    return good


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
    parser.add_argument("--hosts", type=int, default=0, help="slow a line between so many hosts")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of a host's line")
    parser.add_argument("--slow-mbit", type=float, default=100.0, help="of the slow one")
    parser.add_argument("--on-host", default="", help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help="a process on each core beside it")
    given = parser.parse_args()
    if given.on_host:
        train_on_host(given)
        return 0
    if given.hosts:
        right = sum(slow_a_line(given, run) for run in range(given.runs))
        print(
            f"{right} of {given.runs} runs right, {given.hosts} hosts, a line of {given.mbit:g} "
            f"Mbit/s slowed to {given.slow_mbit:g}, load {os.getloadavg()[0]:.1f}"
        )
        return 0 if right == given.runs else 1
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
    right, found, beside, steps = 0, 0, 0, []
    for run in range(given.runs):
        try:
            good, expected, named, buckets, steady, wires, summary, took = hear.recv()
        except EOFError:
            print("a rank ended; its error is above", file=sys.stderr)
            return 1
        right += good
        found += expected <= named
        beside += bool(named - expected or steady or wires)
        steps.append(took / given.steps * 1e3)
        if not good:
            print(f"run {run}: expected {expected}, named {named} in buckets {buckets}, "
                  f"all along {steady}, slow wires {wires}\n{summary}\n")  # fmt: skip
    for process in ranks:
        process.join()
    for process in burners:
        process.kill()
    named_in = f"the delay named in {found}, " if given.delay_ms > 0 else ""
    print(
        f"{right} of {given.runs} runs right ({named_in}something else in {beside}), "
        f"{given.nproc} ranks, {given.steps} steps of {statistics.median(steps):.2f} ms, "
        f"delay {given.delay_ms:g} ms"
        f"{', on a busy machine' if given.busy else ''}, load {os.getloadavg()[0]:.1f}"
    )
    return 0 if right == given.runs else 1


if __name__ == "__main__":
    sys.exit(main())
