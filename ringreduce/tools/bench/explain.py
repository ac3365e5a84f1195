"""`python -m ringreduce.bench --explain`: what the chooser takes for an all-reduce, and why.

    python -m ringreduce.bench --explain --nproc 8 --hosts 4 --round-trip-ms 50 --bandwidth-mbit 500
    torchrun ... -m ringreduce.bench --explain           # of the group at hand

Times are the cost model's (csrc/algorithm/choose.h), not measured.  Inside a host it counts passes
over memory and has no times.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringreduce import topology
from ringreduce.core.backend import backend_of, extension, ringreduce_group
from ringreduce.tools.bench import elastic
from ringreduce.tools.bench.collective import item_size
from ringreduce.tools.bench.settings import ALGORITHMS, DTYPES, OPS, format_size, parse_sizes
from ringreduce.tools.bench.summary import format_time

DEFAULT_SIZES = "64,1K,4K,16K,64K,256K,1M,4M,25M,256M"
CANDIDATES = ("bruck", "twoshot", "ring", "hierarchical")


@dataclass(frozen=True)
class World:
    """A group as the chooser sees it. `sockets`: ranks of one host, too, go over them."""

    ranks: int
    hosts: int
    ranks_on_host: int  # the most
    cost: dict[str, float]
    even: bool = True
    sockets: bool = False


def make_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.bench --explain",
        description="Show which algorithm an all-reduce takes at each size, and the modelled time "
        "of each candidate.",
        epilog="Under torchrun the group that its ranks make is explained; the options about "
        "hosts are then not for use.",
    )
    add = parser.add_argument
    add("--explain", action="store_true", help=argparse.SUPPRESS)
    add("collectives", nargs="?", default="all_reduce", choices=["all_reduce"])
    add("--nproc", type=int, help="ranks (2)")
    add("--hosts", type=int, help="hosts that hold them, as many each (as many as ranks)")
    add("--round-trip-ms", type=float, help="between hosts (0.02)")
    add("--bandwidth-mbit", type=float, help="of a host's wire (8000)")
    add("--sizes", default=DEFAULT_SIZES, help=f"as for the benchmark; default {DEFAULT_SIZES}")
    add("--dtype", default="float32", choices=DTYPES)
    add("--op", default="sum", choices=OPS)
    add("--algorithm", default=os.environ.get("RINGREDUCE_ALGORITHM", "auto"),
        choices=ALGORITHMS["cpu"], help="asked for (that of RINGREDUCE_ALGORITHM)")  # fmt: skip
    add("--order", default=os.environ.get("RINGREDUCE_ORDER", "ring"), choices=("ring", "rank"),
        help="of addition (that of RINGREDUCE_ORDER)")  # fmt: skip
    return parser


def partial_bytes(size: int, dtype: str) -> int:
    """Bytes of that message as partial sums: halves are added up as float32."""
    return size * 2 if item_size(dtype) == 2 and "float" in dtype else size


def world_of(options: argparse.Namespace) -> World:
    """What the options describe. Raises ValueError."""
    ranks = options.nproc or options.hosts or 2
    hosts = options.hosts or ranks
    if ranks < 2 or hosts < 1 or ranks % hosts:
        raise ValueError(f"{ranks} ranks on {hosts} hosts: it needs two at least, as many on each")
    cost = extension().wire_cost(None)
    # The limits of RINGREDUCE_ROUND_TRIP_MS, which may be 0 here, and of RINGREDUCE_BANDWIDTH_MBIT.
    for name, least, most in (("round_trip_ms", 0, 60_000), ("bandwidth_mbit", 1e-3, 1e7)):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:  # nor NaN
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} can be {least:g} to {most:g}, and not {value:g}")
    if options.round_trip_ms is not None:
        cost["hop"] = cost["system"] + options.round_trip_ms * 0.5e-3
    if options.bandwidth_mbit is not None:
        cost["byte"] = 8e-6 / options.bandwidth_mbit
    return World(ranks, hosts, ranks // hosts, cost)


def world_at_hand() -> tuple[World, int]:
    """The group that torchrun's ranks make, and this one's rank; collective."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    dist.init_process_group("ringreduce")
    dist.all_reduce(torch.ones(1, dtype=torch.float32, device="cpu"))
    found = topology.of()
    on_host = [len(ranks) for ranks in found.hosts]
    backend = backend_of(ringreduce_group(None))
    cost = extension().wire_cost(backend)
    sockets = bool(extension().routes(backend))
    world = World(
        dist.get_world_size(), len(on_host), max(on_host), cost, len(set(on_host)) == 1, sockets
    )
    rank = dist.get_rank()
    dist.destroy_process_group()
    return world, rank


def explained(
    world: World, sizes: Sequence[int], dtype: str, algorithm: str, order: str
) -> list[str]:
    """The table's lines. Raises ValueError for an algorithm that cannot add in that order."""
    # Where one host holds more than another there is no hierarchy; no more does the model know.
    per_host = world.ranks_on_host if world.even else 1
    model = {key: world.cost[key] for key in ("hop", "message", "byte", "memory", "crowd")}
    lines = [
        f"# {world.ranks} ranks on {world.hosts} host(s), at most {world.ranks_on_host} on one; "
        f"all-reduce of {dtype}"
    ]
    if world.hosts > 1 or world.sockets:
        lines.append(
            f"# a hop {format_time(model['hop'])}, a message {format_time(model['message'])}, "
            f"{8e-6 / model['byte']:.0f} Mbit/s, memory {1e-9 / model['memory']:.1f} GB/s"
        )
    heads = "".join(f"{name:>14}" for name in CANDIDATES)
    lines.append(f"{'size':>8}  {'takes':<13}{heads}  why")
    in_memory = per_host == world.ranks and not world.sockets
    for size in sizes:
        choice, why, candidates = extension().choose(
            "all_reduce", size, partial_bytes(size, dtype), 0, world.ranks, per_host, in_memory,
            model, algorithm, order,
        )  # fmt: skip
        times = {name: seconds for name, seconds, *_ in candidates}
        cells = "".join(
            f"{format_time(times[name]) if name in times else '-':>14}" for name in CANDIDATES
        )
        for name, _, hops, _, wire in candidates:
            if name == choice:
                why += f"; {hops:.0f} hop(s), {wire / max(size, 1):.2f} of the message on a wire"
        lines.append(f"{format_size(size):>8}  {choice:<13}{cells}  {why}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table; the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        sizes = parse_sizes(options.sizes)
        world, rank = (
            world_at_hand() if elastic.under_torchrun() and not options.nproc
            else (world_of(options), 0)
        )  # fmt: skip
        lines = explained(world, sizes, options.dtype, options.algorithm, options.order)
    except ValueError as error:
        parser.error(str(error))
    if rank == 0:
        print("\n".join(lines), flush=True)
    return 0
