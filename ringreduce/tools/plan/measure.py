"""Measures the constants of an installation: on this machine, or in the group of a launcher.

    python -m ringreduce.plan measure                                        # this machine
    torchrun --nnodes=2 ... -m ringreduce.plan measure --link 10Gbit,0.2ms   # between hosts

On one machine it starts ranks that share memory, as many as 2, 4, the cores, one more and twice
the cores, and ranks that talk over TCP by loopback.  Calls of all kinds and sizes take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringreduce import topology
from ringreduce.core.backend import backend_of, extension, ringreduce_group
from ringreduce.core.processes import end, torchrun_variables
from ringreduce.tools.plan.constants import LOOPBACK, Point, quantiles
from ringreduce.tools.plan.lines import Line
from ringreduce.tools.plan.model import KINDS, Job

KIB, MIB = 1 << 10, 1 << 20
INSIDE = {
    # From 32 KiB on three and more ranks run another algorithm.
    "all_reduce": tuple(k * KIB for k in (1, 4, 16, 28, 32, 64, 256, 1024, 4096, 16384, 32768)),
    **dict.fromkeys(KINDS[1:], tuple(k * KIB for k in (1, 16, 64, 256, 1024, 4096, 16384, 32768))),
}
BETWEEN = (KIB, 8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB)
CODECS = ("bfloat16", "int8")
_Memory = dict[tuple[str, int], torch.Tensor]
_MOST_CALLS, _LONGEST_START = 2000, 300.0


@dataclass(frozen=True)
class Call:
    """What is timed: `size` bytes of the whole message."""

    kind: str
    size: int
    codec: str = ""


def calls_inside() -> list[Call]:
    """What is measured inside a host."""
    return [Call(kind, size) for kind, sizes in INSIDE.items() for size in sizes]


def calls_between(sizes: Sequence[int] = BETWEEN, codecs: Sequence[str] = CODECS) -> list[Call]:
    """What is measured between hosts."""
    large = [size for size in sizes if size >= 16 * KIB]
    return [
        Call("all_reduce", size, codec)
        for codec in ("", *codecs)
        for size in (large if codec else sizes)
    ]


# ---- in a rank


def _function(call: Call, world: int, memory: _Memory) -> Callable[[], object]:
    def tensor(name: str, elements: int) -> torch.Tensor:
        return memory.setdefault(
            (name, elements), torch.ones(elements, dtype=torch.float32, device="cpu")
        )

    count = max(1, call.size // 4)
    share = max(1, count // world)
    if call.codec:
        backend, buffer = backend_of(ringreduce_group(None)), tensor("whole", count)
        run = extension().compressed_all_reduce
        options = {"codec": call.codec, "op": "avg", "schedule": "auto", "async_op": False}
        return lambda: run(backend, buffer, buffer, **options).wait()
    if call.kind == "all_reduce":
        buffer = tensor("whole", count)
        return lambda: dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
    if call.kind == "broadcast":
        buffer = tensor("whole", count)
        return lambda: dist.broadcast(buffer, 0)
    parts, whole = tensor("share", share), tensor("shares", share * world)
    if call.kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, parts)
    return lambda: dist.reduce_scatter_tensor(parts, whole, op=dist.ReduceOp.AVG)


def time_calls(calls: Sequence[Call], rounds: int, span: float) -> list[list[float]]:
    """Seconds of a call in each round, by call; collective.

    In a round each call takes its turn for `span` seconds, again and again, or once if it takes
    longer.  The time is that of the slowest rank.
    """
    slowest = torch.zeros(1, dtype=torch.float64, device="cpu")

    def of_all(seconds: float) -> float:
        slowest[0] = seconds
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest[0])

    memory: _Memory = {}
    functions = [_function(call, dist.get_world_size(), memory) for call in calls]
    counts = []
    for function in functions:
        for _ in range(3):
            begin = time.perf_counter()
            function()
            took = of_all(time.perf_counter() - begin)
        counts.append(max(1, min(_MOST_CALLS, round(span / took))))
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for function, count, times in zip(functions, counts, found, strict=True):
            for _ in range(max(1, count // 4)):  # connections, caches and shapers reach their pace
                function()
            of_all(0.0)
            begin = time.perf_counter()
            for _ in range(count):
                function()
            times.append(of_all(time.perf_counter() - begin) / count)
    return found


@dataclass(frozen=True)
class Used:
    """Seconds up to a moment: of the clock, of the cores, and of this process's own.

    Attributes:
        at: of the clock.
        cores: that all programs ran, and other virtual machines in this one's place; summed over
            the cores that this process may use.
        own: that this process and those of its children ran which have ended.
    """

    at: float
    cores: float
    own: float


def used() -> Used:
    """The seconds up to now; without /proc/stat nothing is known of the cores."""
    ticks, mine = 0, {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with contextlib.suppress(OSError), open("/proc/stat") as lines:
        for name, *columns in map(str.split, lines):
            if name in mine:
                user, nice, system, _, _, _, _, steal = map(int, columns[:8])
                ticks += user + nice + system + steal
    seconds = ticks / os.sysconf("SC_CLK_TCK")
    return Used(time.monotonic(), seconds, sum(os.times()[:4]))


def others_part(before: Used, after: Used, cores: int, own: float | None = None) -> float:
    """The part of the cores that other programs took in between.

    Args:
        before, after: when it began, and ended.
        cores: how many there are.
        own: seconds of the measuring processes, where they are more than this one's.
    """
    own = after.own - before.own if own is None else own
    part = (after.cores - before.cores - own) / (cores * (after.at - before.at))
    return min(1.0, max(0.0, part))


def points_of(
    calls: Sequence[Call], times: Sequence[Sequence[float]], job: Job, others: float = 0.0
) -> list[Point]:
    """The medians of the rounds."""
    return [
        Point(call.kind, call.size, call.codec, job, *quantiles(found), others)
        for call, found in zip(calls, times, strict=True)
    ]


def worker(spec: dict[str, Any]) -> list[list[float]]:
    """What a rank that `measure` has started does."""
    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    dist.init_process_group("ringreduce")
    found = time_calls([Call(**call) for call in spec["calls"]], spec["rounds"], spec["span"])
    dist.destroy_process_group()
    return found


# ---- on this machine


def start_ranks(
    calls: Sequence[Call], ranks: int, rounds: int, span: float, environment: dict[str, str]
) -> list[list[float]]:
    """Times the calls among ranks on this machine.

    Raises:
        RuntimeError: a rank ended with an error; the text has what it wrote.
    """
    store = TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=_LONGEST_START), wait_for_workers=False
    )
    spec = json.dumps({"calls": [vars(call) for call in calls], "rounds": rounds, "span": span})
    processes = []
    try:
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "ringreduce.tools.plan.measure", spec],
                    env=os.environ | torchrun_variables(rank, ranks, store.port)
                    | {"OMP_NUM_THREADS": "1"} | environment,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    start_new_session=True,
                )
            )  # fmt: skip
        output, first = processes[0].communicate(timeout=_LONGEST_START)
        for rank, process in enumerate(processes):
            _, said = process.communicate(timeout=30) if rank else ("", first)
            if process.returncode:
                raise RuntimeError(
                    f"rank {rank} of {ranks} failed while it measured: {said[-2000:]}"
                )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{ranks} ranks did not end within {_LONGEST_START:.0f} s") from None
    finally:
        end(processes)
    found: list[list[float]] = json.loads(output.splitlines()[-1])
    return found


def flops_of_a_rank() -> float:
    """Floating point operations a second of a matrix product in float32, with torch's threads."""
    side = 768
    a = torch.rand(side, side, dtype=torch.float32, device="cpu")
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best


def measure_here(rounds: int, span: float, tell: Callable[[str], None]) -> list[Point]:
    """Times among ranks of this machine."""
    cores = len(os.sched_getaffinity(0))
    points: list[Point] = []

    def add(calls: Sequence[Call], job: Job, environment: dict[str, str]) -> None:
        before = used()
        times = start_ranks(calls, job.ranks, rounds, span, environment)
        others = others_part(before, used(), cores)
        points.extend(points_of(calls, times, job, others))

    for ranks in sorted({2, 4, cores, cores + 1, 2 * cores} - {1}):
        tell(f"{ranks} ranks in shared memory")
        add(calls_inside(), Job(ranks, cores=cores), {})
    for ranks in sorted({2, min(4, max(3, cores))}):
        tell(f"{ranks} ranks over TCP")
        job = Job(ranks, ranks, LOOPBACK, cores=cores, emulated=True)
        add(calls_between(), job, {"RINGREDUCE_WIRE": "tcp"})
    return points


# ---- in the group of a launcher


def measure_between(line: Line, rounds: int, span: float, emulated: bool) -> list[Point]:
    """Times between the hosts of this job, of one rank each; collective.

    Args:
        line: between them.
        rounds, span: as for `time_calls`.
        emulated: the hosts are on one machine, and share its cores.

    Raises:
        ValueError: there is one host, or several ranks on one.
    """
    dist.all_reduce(torch.ones(1, dtype=torch.float32, device="cpu"))  # the hosts are known then
    hosts, ranks = len(topology.of().hosts), dist.get_world_size()
    if hosts < 2 or hosts != ranks:
        raise ValueError(
            f"start it with one rank on each of several hosts, and not {ranks} on {hosts}; without "
            "a launcher it measures one host"
        )
    calls = calls_between()
    before = used()
    times = time_calls(calls, rounds, span)
    after = used()
    own = torch.tensor([after.own - before.own], dtype=torch.float64, device="cpu")
    if emulated:  # the others' processes are not other programs
        dist.all_reduce(own)
    part = others_part(before, after, len(os.sched_getaffinity(0)), float(own))
    others = torch.tensor([part], dtype=torch.float64, device="cpu")
    dist.all_reduce(others, op=dist.ReduceOp.MAX)
    known = bool(os.environ.get("RINGREDUCE_BANDWIDTH_MBIT"))
    cores = len(os.sched_getaffinity(0))
    job = Job(hosts, hosts, line, cores, emulated, known)
    return points_of(calls, times, job, float(others))


if __name__ == "__main__":
    found = worker(json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
