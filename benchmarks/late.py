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

    python benchmarks/late.py --shape mesh2x2x2 --runs 10    ranks in several groups
    python benchmarks/late.py --shape all --turns            two ranks late in turns, in each shape
    python benchmarks/late.py --shape all --on-hosts         each rank on a host of its own (root)

With --shape a rank is late again and again, in one step of each ten, and the others wait for it in
one group and come late to the next.  A run is right if exactly the late ranks are named, live (on
all ranks together) and by the timelines that they have written.  To compute is to sleep, as there
are more ranks than cores.  With --on-hosts the clock of each host is 5 s ahead of the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import _C
from ringreduce.observe.files import judge_of, load, operations
from ringreduce.observe.late import Late

PORT = 29417  # of the store of ranks that share a host


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


# ---- ranks in several groups


class Computation:
    """What a rank computes in a step, in parts: it sleeps, longer in the part where it is late."""

    parts = 0  # of this step so far
    late_in, late_seconds = -1, 0.0
    overslept = 0.0  # seconds in this step

    def __call__(self, ms: float) -> None:
        seconds = ms / 1e3 + (self.late_seconds if self.parts == self.late_in else 0.0)
        begun = time.monotonic()
        time.sleep(seconds)
        self.overslept += time.monotonic() - begun - seconds
        self.parts += 1


class Machine:
    """By how much the machine has made this rank late in each step, in ms: it slept too long or
    waited for a core, as the kernel tells it; or its threads, of which each may have Python's lock,
    ran longer than usual, as if another guest had the core."""

    def __init__(self) -> None:
        self._last = self._now()
        self._steps: list[tuple[int, float, float]] = []  # number, ms late and ms that it ran

    @staticmethod
    def _now() -> tuple[float, float]:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
        return time.process_time() * 1e3, waited / 1e6

    def end_step(self, number: int, overslept: float) -> None:
        """`overslept`: seconds."""
        (ran, waited), (ran_before, waited_before) = self._now(), self._last
        self._last = ran, waited
        self._steps.append((number, overslept * 1e3 + waited - waited_before, ran - ran_before))

    def late(self) -> dict[int, tuple[float, float]]:
        """By the number of the step: as the kernel tells it, and what it ran beside."""
        usual = statistics.median(ran for _, _, ran in self._steps)
        return {number: (late, max(0.0, ran - usual)) for number, late, ran in self._steps}


def in_meshes(mesh: DeviceMesh, compute: Computation) -> Callable[[], None]:
    """Two layers: tensor parallelism in the last dimension, DDP in the first one, and shards of
    the parameters in one between them."""
    data, *shards, tensor = mesh.get_all_groups()
    activation, gradient, whole = torch.ones(4096), torch.ones(1 << 14), torch.ones(1 << 15)

    def step() -> None:
        for _ in range(2):
            for group in shards:
                dist.all_gather_into_tensor(whole, gradient, group=group)
            compute(2)
            dist.all_reduce(activation, group=tensor)
        works = []
        for _ in range(2):
            compute(3)
            dist.all_reduce(activation, group=tensor)
            for group in shards:
                dist.reduce_scatter_tensor(gradient, whole, group=group)
            works.append(dist.all_reduce(gradient, group=data, async_op=True))
        for work in works:
            work.wait()
        _C.count_training_step()

    return step


def in_a_pipeline(mesh: DeviceMesh, compute: Computation) -> Callable[[], None]:
    """One forward, one backward, of six micro-batches."""
    rank, stages, batches = dist.get_rank(), dist.get_world_size(), 6
    x, gradient = torch.ones(4096), torch.ones(1 << 14)

    def step() -> None:
        sent = []

        def forward() -> None:
            if rank > 0:
                dist.recv(torch.empty_like(x), rank - 1)
            compute(1)
            if rank < stages - 1:
                sent.append(dist.isend(x, rank + 1))

        def backward() -> None:
            if rank < stages - 1:
                dist.recv(torch.empty_like(x), rank + 1)
            compute(2)
            if rank > 0:
                sent.append(dist.isend(x, rank - 1))

        ahead = min(stages - 1 - rank, batches)
        for _ in range(ahead):
            forward()
        for _ in range(batches - ahead):
            forward()
            backward()
        for _ in range(ahead):
            backward()
        for work in sent:
            work.wait()
        dist.all_reduce(gradient)
        _C.count_training_step()

    return step


def of_shards(mesh: DeviceMesh, compute: Computation) -> Callable[[], None]:
    """FSDP over the first dimension, tensor parallelism over the second."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(2):
        layer = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        layer.register_forward_pre_hook(lambda *_: compute(4))
        fully_shard(layer, mesh=mesh["data"])
        model.append(layer)
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(16, 64)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        compute(4)
        loss.backward()
        optimizer.step()

    return step


def of_experts(mesh: DeviceMesh, compute: Computation) -> Callable[[], None]:
    """Two layers of experts over the second dimension, forward and backward; DDP over the first."""
    data, experts = mesh.get_all_groups()
    tokens, routed, gradient = torch.ones(4096), torch.empty(4096), torch.ones(1 << 14)

    def step() -> None:
        for _ in range(4):
            compute(2)
            dist.all_to_all_single(routed, tokens, group=experts)
            compute(1)
            dist.all_to_all_single(tokens, routed, group=experts)
        dist.all_reduce(gradient, group=data)
        _C.count_training_step()

    return step


SHAPES = {
    "mesh3x2": ((3, 2), in_meshes),
    "mesh2x2x2": ((2, 2, 2), in_meshes),
    "pipeline": ((4,), in_a_pipeline),
    "fsdp-tp": ((2, 2), of_shards),
    "moe": ((2, 4), of_experts),
}
NAMES = {1: ("stage",), 2: ("data", "tensor"), 3: ("data", "shard", "tensor")}


def delays(given: argparse.Namespace, world: int, run: int) -> dict[int, tuple[int, float]]:
    """Who is late in which step of a run, and where in it."""
    draw = random.Random(f"{given.seed} {run}")
    culprits = itertools.cycle(draw.sample(range(world), 2 if given.turns else 1))
    if run < 0 or given.delay_ms == 0:
        return {}
    blocks = range(20, given.steps - 9, 10)
    return {block + draw.randrange(10): (next(culprits), draw.random()) for block in blocks}


def delays_in(named: list[Late]) -> list[tuple[int, int, float]]:
    """Of those who were named: rank, step, and how late it was itself, in ms."""
    return [
        (late.rank, late.record.step, late.cause.nanos / 1e6 if late.cause else late.late_ms)
        for late in named
    ]


def train_in_shape(given: argparse.Namespace) -> None:
    """A rank of all runs; leaves in a folder of each what it has found."""
    torch.set_num_threads(1)
    dist.init_process_group("ringreduce")
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes, make = SHAPES[given.shape]
    compute = Computation()
    step = make(init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[len(sizes)]), compute)
    together = dist.new_group(backend="gloo")  # ringreduce does not see what it does
    parts, steps = 1, 0
    for run in range(-1, given.runs):  # the first one makes what is made once
        late = delays(given, world, run)
        folder = Path(given.as_rank, str(run))
        dist.barrier(together)
        gc.collect()  # amid a run Python's collector would make this rank late by 70 ms
        gc.freeze()
        with ringreduce.timeline(folder), ringreduce.straggler_detection(log=False) as sd:
            dist.barrier(together)
            begun, machine = time.monotonic(), Machine()
            for number in range(given.steps if run >= 0 else 20):
                who, where = late.get(number, (-1, 0.0))
                compute.late_in = int(where * parts) if who == rank else -1
                compute.parts, compute.late_seconds = 0, given.delay_ms / 1e3
                compute.overslept = 0.0
                step()
                parts = compute.parts
                machine.end_step(steps, compute.overslept)
                steps += 1
            took = time.monotonic() - begun
        found = {"delays": delays_in(sd.late), "steady": list(sd.persistent), "took": took}
        found |= {"summary": sd.summary(), "machine": machine.late()}
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def start_ranks(given: argparse.Namespace, world: int, command: list[str], folder: str) -> None:
    """Runs them, to their ends.

    Raises:
        RuntimeError: one failed; with what they wrote.
    """
    if given.on_hosts:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from hosts import Hosts

        shift = 'exec unshare --time --fork --monotonic $((5 * {rank})) "$@"'
        with Hosts(world, veth=True, rate_mbit=given.mbit) as hosts:
            outcomes = hosts.start(["bash", "-c", shift, "-", *command]).wait(500)
        ended = [(outcome.code, outcome.output) for outcome in outcomes]
    else:
        logs = [Path(folder, f"{rank}.log") for rank in range(world)]
        variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}  # fmt: skip
        processes = []
        for rank, log in enumerate(logs):
            of_rank = {**variables, "RANK": rank, "LOCAL_RANK": rank}
            environment = os.environ | {name: str(value) for name, value in of_rank.items()}
            with log.open("wb") as out:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        ended = [(p.wait(), log.read_text()) for p, log in zip(processes, logs, strict=True)]
    if any(code for code, _ in ended):
        raise RuntimeError("\n".join(f"{code}: {output}" for code, output in ended))


def judged(folder: Path) -> dict[str, Any]:
    """What the timelines there tell."""
    job = load(folder).job()
    judge = judge_of(job)
    for operation in operations(job):
        judge.feed(operation.seen(job.axis))
    text = "\n".join(judge.summary())
    return {"delays": delays_in(judge.late), "steady": list(judge.persistent()), "summary": text}


def name_in_shape(given: argparse.Namespace, shape: str) -> bool:
    """Whether all runs were right."""
    world = math.prod(SHAPES[shape][0])
    live, afterwards, both, but_for_machine, times = 0, 0, 0, [0, 0, 0], []
    with tempfile.TemporaryDirectory(prefix="late-") as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--shape", shape, "--as-rank", folder]
        start_ranks(given, world, command, folder)
        for run in range(given.runs):
            culprits = {who for who, _ in delays(given, world, run).values()}
            there = Path(folder, str(run))
            found = [json.loads((there / f"rank{r}.json").read_text()) for r in range(world)]
            times.append(found[0]["took"] / given.steps * 1e3)

            def by_machine(rank: int, step: int, ms: float, found: list = found) -> int:
                """How sure that is: 0, 1: with what it ran, 2: as the kernel tells it."""
                steps = (found[rank]["machine"].get(str(at), (0, 0)) for at in (step, step - 1))
                slept, ran = map(sum, zip(*steps, strict=True))
                return 2 if slept > ms / 2 else 1 if slept + ran > ms / 2 else 0

            def named(by: dict[str, Any], sure: int = 3) -> set[int]:
                """But for those whose delays the machine has made, as sure as that."""
                late = [one for one in by["delays"] if by_machine(*one) < sure]
                return {rank for rank, *_ in late} | set(by["steady"])

            by_files = judged(there)
            right = set().union(*map(named, found)) == culprits, named(by_files) == culprits
            live, afterwards, both = live + right[0], afterwards + right[1], both + all(right)
            for sure in (1, 2):
                but_for_machine[sure] += culprits == set().union(
                    *(named(by, sure) | (named(by) & culprits) for by in (*found, by_files))
                )
            if all(right):
                continue
            print(f"run {run} of {shape}: expected {sorted(culprits)}")
            for who, by in (*enumerate(found), ("the timeline", by_files)):
                if named(by) - culprits or (culprits - named(by) and by is by_files):
                    more = [
                        f"rank {rank} {ms:.1f} ms in step {step}"
                        + (
                            (", as it ran long", ", by the machine")[sure - 1]
                            if (sure := by_machine(rank, step, ms))
                            else ""
                        )
                        for rank, step, ms in by["delays"]
                        if rank not in culprits
                    ]
                    print(f"{f'rank {who}' if who in range(world) else who} names "
                          f"{sorted(named(by))} ({'; '.join(more)}): {by['summary']}")  # fmt: skip
    print(
        f"{both} of {given.runs} runs right (live {live}, timeline {afterwards}; but for delays by "
        f"the machine {but_for_machine[2]} as the kernel tells it, {but_for_machine[1]} with what "
        f"ranks ran beside): {shape}, "
        f"{world} ranks{' on hosts' if given.on_hosts else ''}, {given.steps} steps of "
        f"{statistics.median(times):.1f} ms, delay {given.delay_ms:g} ms"
        f"{' in turns' if given.turns else ''}{', on a busy machine' if given.busy else ''}, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return both == given.runs


@contextlib.contextmanager
def beside_others(busy: bool) -> Iterator[None]:
    """With --busy a process computes on each core."""
    context = multiprocessing.get_context("spawn")
    count = (os.cpu_count() or 1) if busy else 0
    burners = [context.Process(target=burn, daemon=True) for _ in range(count)]
    for process in burners:
        process.start()
    try:
        yield
    finally:
        for process in burners:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, help="1000, or 100 in a shape")
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hook", action="store_true", help="gloo with the hook")
    parser.add_argument("--hosts", type=int, default=0, help="slow a line between so many hosts")
    parser.add_argument("--mbit", type=float, help="of a host's line; 1000, or in a shape no limit")
    parser.add_argument("--slow-mbit", type=float, default=100.0, help="of the slow one")
    parser.add_argument("--on-host", default="", help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help="a process on each core beside it")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], help="ranks in several groups")
    parser.add_argument("--turns", action="store_true", help="two ranks of a shape are late")
    parser.add_argument("--on-hosts", action="store_true", help="each rank of a shape on its own")
    parser.add_argument("--as-rank", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.steps = given.steps or (100 if given.shape else 1000)
    if given.mbit is None:
        given.mbit = 0.0 if given.shape else 1000.0
    if given.as_rank:
        train_in_shape(given)
        return 0
    if given.shape:
        with beside_others(given.busy):
            shapes = SHAPES if given.shape == "all" else [given.shape]
            right = [name_in_shape(given, shape) for shape in shapes]
        return 0 if all(right) else 1
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
    right, found, beside, steps = 0, 0, 0, []
    with beside_others(given.busy):
        for process in ranks:
            process.start()
        tell.close()
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
