"""Shows how a late rank is found: live, afterwards, and when a job has failed.

    python examples/demo_see.py    # a minute on two cores

Four ranks train in a mesh of 2 x 2: DDP over one dimension, and an all-reduce of activations over
the other.  Rank 1 waits 60 ms for its input in each tenth step, and makes rank 0 late, for which
rank 2 waits then.  ringreduce.top, the summary and the timeline name rank 1, meanwhile and
afterwards.  In a second job rank 2 leaves out an all-reduce, and the records say so.

The files are in ./demo-out/see.  The exit status is 0 only if each of them named the right rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _launch import Job, JobFailed, run_demo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ringreduce

HERE = Path(__file__).resolve()
RANKS, LATE, PASSES_ON, FAR, ABSENT = 4, 1, 0, 2, 2
SECONDS = 300  # deadline of a job
LATE_SECONDS, EACH = 0.06, 10


def train(seconds: float) -> None:
    """A rank of the first job, for that long."""
    dist.init_process_group("ringreduce")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layers = [nn.Linear(128, 128) for _ in range(4)]
    model = DistributedDataParallel(
        nn.Sequential(*layers), process_group=mesh.get_group("data"), bucket_cap_mb=0.15
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(16, 128)
    goes_on = torch.ones(1)
    end = time.monotonic() + seconds
    with ringreduce.straggler_detection() as sd:
        for step in range(1 << 30):
            if dist.get_rank() == LATE and step % EACH == EACH - 1:
                time.sleep(LATE_SECONDS)  # its input
            optimizer.zero_grad()
            output = model(batch)
            dist.all_reduce(output.detach(), group=mesh.get_group("tensor"))
            output.sum().backward()
            optimizer.step()
            if step % EACH == 0:
                goes_on.fill_(time.monotonic() < end)
                dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
                if not goes_on:
                    break
    print(sd.summary())
    dist.destroy_process_group()


def leave_one_out() -> None:
    """A rank of the second job."""
    dist.init_process_group("ringreduce", timeout=timedelta(seconds=2))
    for call in range(20):
        if (dist.get_rank(), call) != (ABSENT, 17):
            dist.all_reduce(torch.ones(1000 + call))


def run(title: str, *command: str) -> str:
    """Prints a command and what it says."""
    print(f"\n$ python -m {' '.join(command)}", flush=True)
    ended = subprocess.run(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    lines = ended.stdout.splitlines()
    print("\n".join(lines[:14]))
    if len(lines) > 14:
        print(f"... and {len(lines) - 14} more lines")
    print(f"({title})")
    return ended.stdout


def says_who(text: str, words: str) -> bool:
    """Whether it names the rank before all others, and how another one passed its delay on."""
    chain = rf"rank {PASSES_ON} came .* late .* since it had waited .* for rank {LATE} in"
    named = re.search(r"^" + words, text, re.MULTILINE)
    return named is not None and named[1] == str(LATE) and re.search(chain, text) is not None


def show(args: argparse.Namespace) -> bool:
    """Runs both jobs; whether each tool named the right rank."""
    shutil.rmtree(args.out, ignore_errors=True)
    metrics, traces, dumps = (str(args.out / name) for name in ("metrics", "traces", "dumps"))
    os.environ |= {"RINGREDUCE_METRICS": metrics, "RINGREDUCE_TIMELINE": traces}
    named = []
    command = [str(HERE), "--rank-of", "late", "--seconds", str(args.seconds)]
    print(f"A mesh of 2 x 2 trains; rank {LATE} is {LATE_SECONDS} s late in each {EACH}th step.")
    with Job("late", command, args.out / "logs", SECONDS, nproc=RANKS) as job:
        begun = Path(metrics)
        while not job.ended() and not list(begun.glob("*.prom")):
            time.sleep(0.1)
        time.sleep(args.seconds / 3)
        top = run("live", "ringreduce.top", metrics, "--once", "--every", "3")
        named.append(f"for rank {LATE}" in top)
        job.wait()
        summary = job.logs[FAR].read_text()
    print(
        f"\nThe log and sd.summary() of rank {FAR}, which shares no group of two with rank {LATE}:"
    )
    print(summary.strip())
    named.append(says_who(summary, r"rank (\d+) was"))
    late = run("from the timeline", "ringreduce.timeline", "late", traces)
    named.append(says_who(late, r"rank (\d+): late in"))
    run("a table of it", "ringreduce.timeline", "summary", traces)
    run("for https://ui.perfetto.dev", "ringreduce.timeline", "merge", traces)

    print(f"\nNow rank {ABSENT} leaves out an all-reduce.")
    os.environ |= {"RINGREDUCE_DUMP": dumps, "RINGREDUCE_METRICS": "", "RINGREDUCE_TIMELINE": ""}
    command = [str(HERE), "--rank-of", "absent"]
    job = Job("absent", command, args.out / "logs", SECONDS, nproc=RANKS)
    with contextlib.suppress(JobFailed), job:
        job.wait()
    cause = run("what ended the job", "ringreduce.recorder", dumps)
    named.append(f"ank {ABSENT} called all_reduce" in cause)
    return all(named)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="of training")
    parser.add_argument("--out", type=Path, default=Path("demo-out/see"))
    parser.add_argument("--rank-of", choices=["late", "absent"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of == "late":
        train(args.seconds)
        return 0
    if args.rank_of == "absent":
        leave_one_out()
        return 0
    return run_demo(lambda: show(args))


if __name__ == "__main__":
    sys.exit(main())
