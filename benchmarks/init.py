"""Times making and destroying groups, with one version of ringreduce or with several by turns.

    python benchmarks/init.py
    python benchmarks/init.py --python old/.venv/bin/python --python new/.venv/bin/python

A group counts as made when its first all-reduce has ended.  Each round forks new ranks, whose first
group is not timed.  All figures are those of rank 0: medians, with the quartiles after them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: it is forked
import torch
import torch.distributed as dist

# A letter for each rank's host: ranks of one machine pose as two.
CASES = {"2 ranks": "aa", "8 ranks": "a" * 8, "2 hosts of 2": "aabb"}


def rank_times(rank: int, job: dict[str, Any], answer: Connection) -> None:
    """Makes the groups and sends the seconds that each took to make and to destroy."""
    os.environ["RINGREDUCE_HOSTID"] = f"host {job['hosts'][rank]} of benchmarks/init.py"
    store = dist.TCPStore("127.0.0.1", job["port"], is_master=False)
    found = []
    for k in range(job["groups"] + 1):
        own = dist.PrefixStore(f"{job['name']}/{k}", store)
        start = time.monotonic()
        dist.init_process_group("ringreduce", store=own, rank=rank, world_size=len(job["hosts"]))
        dist.all_reduce(torch.ones(1))
        made = time.monotonic()
        dist.destroy_process_group()
        found.append((made - start, time.monotonic() - made))
    answer.send(found[1:])


def serve() -> None:
    """A version's process: forks ranks for each job that it reads, prints rank 0's times."""
    import ringreduce  # noqa: F401

    fork = mp.get_context("fork")
    for line in sys.stdin:
        job = json.loads(line)
        mine, theirs = zip(*(fork.Pipe(duplex=False) for _ in job["hosts"]), strict=True)
        ranks = [
            fork.Process(target=rank_times, args=(r, job, end)) for r, end in enumerate(theirs)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"ranks ended with {[rank.exitcode for rank in ranks]}")
        print(json.dumps(mine[0].recv()), flush=True)


def quartiles(seconds: list[float]) -> str:
    low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    return f"{middle:7.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", action="append", help="an interpreter, with its version")
    parser.add_argument("--groups", type=int, default=100, help="a case, over all rounds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    pythons: list[str] = args.python or [sys.executable]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    versions = [
        subprocess.Popen(
            [python, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for python in pythons
    ]
    print("ms, medians and quartiles".ljust(40), "make".ljust(26), "destroy")
    for title, hosts in CASES.items():
        times: list[list[tuple[float, float]]] = [[] for _ in pythons]
        for turn in range(args.rounds):
            order = range(len(pythons))
            for v in order if turn % 2 == 0 else reversed(order):
                job = {"hosts": hosts, "port": server.port, "name": f"{title} {turn} {v}",
                       "groups": -(-args.groups // args.rounds)}  # fmt: skip
                stdin, stdout = versions[v].stdin, versions[v].stdout
                assert stdin and stdout
                print(json.dumps(job), file=stdin, flush=True)
                times[v] += json.loads(stdout.readline() or sys.exit(f"{pythons[v]} failed"))
        for python, both in zip(pythons, times, strict=True):
            make, destroy = map(list, zip(*both, strict=True))
            print(f"{title + ', ' + python[-26:]:40} {quartiles(make):26} {quartiles(destroy)}")


if __name__ == "__main__":
    main()
