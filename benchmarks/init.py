"""Times making and destroying groups, with one version of ringreduce or with several by turns.

    python benchmarks/init.py
    python benchmarks/init.py --python old/.venv/bin/python --python new/.venv/bin/python
    python benchmarks/init.py --reconfigure     # 3 ranks to 2 and back, beside Gloo; torch 2.14

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

BESIDE = ("ringreduce", "gloo")
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


def reconfigure_times(rank: int, port: int, rounds: int, turns: int, answer: Connection) -> None:
    """Leaves the third of 3 ranks out and takes it in again, with the backends by turns.

    A turn ends with an all-reduce of the new group, as making a group does.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    found: dict[str, list[list[float]]] = {backend: [[], []] for backend in BESIDE}
    for k in range(rounds):
        for backend in BESIDE if k % 2 == 0 else reversed(BESIDE):
            own = dist.PrefixStore(f"{k} {backend}", store)
            dist.init_process_group(
                backend, store=own, rank=rank, world_size=3, enable_reconfigure=True
            )
            for turn in range(2 * turns + 1):
                own.set(f"handle {turn} {rank}", dist._get_reconfigure_handle())
                handles = [own.get(f"handle {turn} {r}").decode() for r in range(3)]
                size = 2 if turn % 2 else 3
                if rank >= size:
                    continue
                own.set(f"ready {turn} {rank}", "")
                own.wait([f"ready {turn} {r}" for r in range(size)])
                start = time.monotonic()
                dist._reconfigure(turn, handles[:size]).wait()
                dist.all_reduce(torch.ones(1))
                if turn > 0:
                    found[backend][size - 2].append(time.monotonic() - start)
            dist.destroy_process_group()
    answer.send(found)


def compare_reconfigures(port: int, groups: int, rounds: int) -> None:
    # Not forked: this process serves the store in a thread.
    spawn = mp.get_context("spawn")
    mine, theirs = zip(*(spawn.Pipe(duplex=False) for _ in range(3)), strict=True)
    turns = -(-groups // rounds)
    ranks = [
        spawn.Process(target=reconfigure_times, args=(r, port, rounds, turns, end))
        for r, end in enumerate(theirs)
    ]
    for rank, end in zip(ranks, theirs, strict=True):
        rank.start()
        end.close()  # so that a rank that fails is not waited for
    found = mine[0].recv()
    for rank in ranks:
        rank.join()
    print("ms, medians and quartiles".ljust(40), "3 to 2 ranks".ljust(26), "2 to 3 ranks")
    for backend in BESIDE:
        smaller, larger = found[backend]
        print(f"{backend:40} {quartiles(smaller):26} {quartiles(larger)}")


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
    parser.add_argument("--reconfigure", action="store_true", help="3 ranks to 2 and back")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    pythons: list[str] = args.python or [sys.executable]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if args.reconfigure:
        compare_reconfigures(server.port, args.groups, args.rounds)
        return
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
