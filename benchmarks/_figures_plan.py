"""What `make figures` measures, and in which tables of README.md and docs/ it goes.

A measurement is a command, as a user types it and as it stands beside the table.  `seconds` is what
one visit takes on 2 idle cores; `make figures` makes `visits` of it, spread over its whole run.  A
table with `because` is no part of that run, for this reason: it is measured by --only NAME.
benchmarks/_figures_tables.py makes the rows.

Only the standard library is needed here: lint runs before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHERE = "where"  # the block of each page that says where, when and how all was measured
BENCH = "python -m ringreduce.bench"
TWO = "torchrun --standalone --nproc-per-node 2"
FOUR = "torchrun --standalone --nproc-per-node 4"
TCP = "RINGREDUCE_WIRE=tcp"

ROOT_ONLY = "root, for emulated networks"
MPI = "mpi4py and mpirun"
FRAMEWORKS = "an environment with the frameworks"


@dataclass(frozen=True)
class Measurement:
    """A command; its results are in benchmarks/results/figures/NAME.jsonl."""

    name: str
    command: str
    seconds: int
    needs: str = ""
    output: str = "--out"  # the option that names the file for all that was measured
    folder: bool = False  # it names a folder, for several files
    visits: int = 3


@dataclass(frozen=True)
class Table:
    """A table: its pages, and the measurements that it shows."""

    pages: tuple[str, ...]
    measured: tuple[str, ...]
    because: str = ""


README, PERFORMANCE, HOSTS = "README.md", "docs/performance.md", "docs/hosts.md"
COMPRESSION, SURVIVE, SEE = "docs/compression.md", "docs/survive.md", "docs/see.md"
FRAMEWORKS_PAGE, HOROVOD = "docs/frameworks.md", "docs/horovod.md"

MEASUREMENTS = {
    one.name: one
    for one in (
        Measurement(
            "all_reduce",
            f"{BENCH} all_reduce --nproc 2 --sizes 1K,64K,1M,25M,256M --compare gloo --rounds 5",
            27,
            output="--json",
        ),
        Measurement(
            "all_reduce_4",
            f"{BENCH} all_reduce --nproc 4 --sizes 1K,1M,25M --compare gloo,shared"
            " --rounds 5 --seconds 0.06",
            29,
            output="--json",
        ),
        Measurement(
            "calls",
            f"{BENCH} all --nproc 2 --sizes 1K,1M,25M --compare gloo --rounds 5 --seconds 0.04",
            42,
            output="--json",
        ),
        Measurement(
            "shared",
            f"{BENCH} all_reduce --nproc 2 --sizes 1K,64K,1M,25M,256M"
            " --compare mpi,shared,operator --rounds 5 --seconds 0.06",
            35,
            MPI,
            output="--json",
        ),
        Measurement(
            "shared_calls",
            f"{BENCH} reduce,reduce_scatter,broadcast,all_gather,all_to_all --nproc 2"
            " --sizes 64K,1M,25M --compare shared --rounds 5 --seconds 0.04",
            16,
            output="--json",
        ),
        Measurement("small_call", f"{TWO} benchmarks/small_call.py --rounds 7", 7, visits=5),
        Measurement(
            "step", "python benchmarks/ddp.py --models mlp --rounds 5 --steps 2 --warmup 1", 34
        ),
        Measurement(
            "net",
            "python benchmarks/net/compare.py --rounds 5"
            " --paths loopback,lan_2,lan_300,lan_4,wan_bbr,hierarchical",
            155,
            ROOT_ONLY,
            folder=True,
        ),
        Measurement(
            "net_losses",
            "python benchmarks/net/compare.py --rounds 4 --sizes 4M --paths wan_cubic,wan_reno",
            76,
            ROOT_ONLY,
            folder=True,
        ),
        Measurement(
            "net_codecs",
            "python benchmarks/net/compare.py --rounds 5 --sizes 8M --paths slow_2",
            43,
            ROOT_ONLY,
            folder=True,
        ),
        Measurement(
            "net_step",
            "python benchmarks/net/train.py --ways stock,ours,bfloat16,int8,int4,auto"
            " --rounds 5 --steps 1",
            95,
            ROOT_ONLY,
        ),
        Measurement(
            "shm_step",
            "python benchmarks/net/train.py --hosts 1 --ways ours,auto --rounds 6 --steps 2",
            20,
        ),
        Measurement("deaths", "python benchmarks/loss.py deaths --nproc 3 --deaths 8", 9, visits=5),
        Measurement(
            "deaths_tcp",
            f"{TCP} python benchmarks/loss.py deaths --nproc 3 --deaths 8",
            10,
            visits=5,
        ),
        Measurement(
            "cost", "python benchmarks/loss.py cost --nproc 2 --rounds 5 --seconds 0.2", 12
        ),
        Measurement(
            "cost_tcp",
            f"{TCP} python benchmarks/loss.py cost --nproc 2 --rounds 5 --seconds 0.2",
            13,
        ),
        Measurement(
            "commit", "python -m ringreduce.supervise --nproc 2 benchmarks/commit.py", 6, visits=8
        ),
        Measurement(
            "deaths_of_ways",
            "python benchmarks/survive.py --runs 1 --ways gloo restarted ringreduce",
            52,
            visits=5,
        ),
        Measurement(
            "watching", f"{TWO} benchmarks/watching.py --rounds 5 --calls 2000 --steps 3", 18
        ),
        Measurement("horovod", f"{TWO} benchmarks/horovod_step.py --rounds 5 --seconds 0.3", 16),
        Measurement("horovod_4", f"{FOUR} benchmarks/horovod_step.py --rounds 5 --seconds 0.3", 20),
        Measurement("tensor_parallel", f"{TWO} examples/tensor_parallel.py --rounds 4", 70),
        Measurement(
            "tensor_parallel_4", f"{FOUR} examples/tensor_parallel.py --rounds 2 --tokens 32", 145
        ),
        Measurement("frameworks", "python benchmarks/frameworks.py --rounds 1", 400, FRAMEWORKS),
        Measurement(
            "membership", "python benchmarks/membership.py --runs 1 --ways gloo ringreduce", 110
        ),
    )
}

TABLES = {
    "all_reduce": Table((README, PERFORMANCE), ("all_reduce",)),
    "all_reduce_4": Table((PERFORMANCE,), ("all_reduce_4",)),
    "calls": Table((PERFORMANCE,), ("calls",)),
    "shared": Table((PERFORMANCE,), ("shared",)),
    "shared_calls": Table((PERFORMANCE,), ("shared_calls",)),
    "small_call": Table((PERFORMANCE,), ("small_call",)),
    "step": Table((PERFORMANCE,), ("step",)),
    "net": Table((HOSTS,), ("net", "net_losses", "net_codecs")),
    "net_codecs": Table((COMPRESSION,), ("net_codecs",)),
    "net_step": Table((COMPRESSION,), ("net_step",)),
    "auto": Table((COMPRESSION,), ("shm_step", "net_step")),
    "deaths": Table((SURVIVE,), ("deaths", "deaths_tcp")),
    "cost": Table((SURVIVE,), ("cost", "cost_tcp")),
    "commit": Table((SURVIVE,), ("commit",)),
    "deaths_of_ways": Table((SURVIVE,), ("deaths_of_ways",)),
    "watching": Table((SEE,), ("watching",)),
    "horovod": Table((HOROVOD,), ("horovod", "horovod_4")),
    "tensor_parallel": Table(
        (FRAMEWORKS_PAGE,),
        ("tensor_parallel", "tensor_parallel_4"),
        "each start compiles the model anew",
    ),
    "frameworks": Table(
        (FRAMEWORKS_PAGE,), ("frameworks",), "it needs six frameworks, and as long as all others"
    ),
    "membership": Table((HOSTS,), ("membership",), "each join and loss waits for torchrun"),
}


def in_run() -> list[str]:
    """The names of what `make figures` measures."""
    wanted = {name for table in TABLES.values() if not table.because for name in table.measured}
    return [name for name in MEASUREMENTS if name in wanted]
