"""Times State.commit of ringreduce.elastic, and the commit in which a new rank joins.

    python -m ringreduce.supervise --nproc 2 benchmarks/commit.py [--out FILE.json]

Rank 1 kills itself and is started again.  Medians of rounds, with the lowest and the highest; the
all_reduce has as many bytes as that of the commit.
"""

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import ringreduce
from ringreduce import elastic
from ringreduce.tools.bench.results import write_json

ROUNDS, CALLS = 9, 2000
STATE_MB = 100


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for all times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ringreduce.init(pg_options=ringreduce.Options(on_loss="continue"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = elastic.State(is_timed=False, weights=torch.zeros(STATE_MB << 18))
    state.restore()
    times: dict[str, list[float]] = {"commit": [], "all_reduce": []}
    if not state.is_timed:
        votes = torch.zeros(2 * world_size, dtype=torch.int64)
        for _ in range(ROUNDS):
            times["commit"].append(microseconds(state.commit))
            times["all_reduce"].append(
                microseconds(lambda: dist.all_reduce(votes, op=dist.ReduceOp.MAX))
            )
        if rank == 0:
            for name, found in times.items():
                median = statistics.median(found)
                print(f"{name}: {median:.1f} us ({min(found):.1f}-{max(found):.1f})")
        state.is_timed = True
        state.commit()
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    was_alone = False
    while not (was_alone and len(state.live_ranks) == world_size) and rank < world_size - 1:
        time.sleep(0.001)
        start = time.perf_counter()
        state.commit()
        seconds = time.perf_counter() - start
        was_alone |= len(state.live_ranks) < world_size
    if rank == 0:
        print(f"the commit in which a rank joined, with a state of {STATE_MB} MiB: {seconds:.3f} s")
        if args.out:
            write_json(args.out, {"us": times, "join_s": seconds, "state_mib": STATE_MB})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
