"""Random programs of calls of all kinds and of graphs of them, replayed in any order.

The host waits for nothing in between, so a rank may be ahead of another as far as its stream can.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from conftest import Machine
from gpu_jobs import use_gpu
from pool import Rank

VALUES = 3  # inputs that each call has


@dataclass
class Drawn:
    """A call with its tensors: `put` takes the input from `source`."""

    sources: list[torch.Tensor]
    wanted: list[torch.Tensor]
    source: torch.Tensor
    output: torch.Tensor
    put: Callable[[], None]


def draw(me: Rank, of_all: random.Random, device: torch.device) -> Drawn:
    """`of_all` draws the same on all ranks."""
    P, ranks = me.world_size, torch.arange(me.world_size)
    kind = of_all.choice(["all_reduce", "broadcast", "broadcast", "all_gather", "reduce_scatter"])
    n, root = of_all.choice([1, 500, 70_000]), of_all.randrange(P)
    length = n * P if kind == "reduce_scatter" else n
    source = torch.zeros(length, device=device)
    output = torch.zeros(n * P if kind == "all_gather" else n, device=device)

    def put() -> None:
        if kind == "all_gather":
            dist.all_gather_into_tensor(output, source)
        elif kind == "reduce_scatter":
            dist.reduce_scatter_tensor(output, source)
        else:
            output.copy_(source)
            if kind == "all_reduce":
                dist.all_reduce(output)
            else:
                dist.broadcast(output, root)

    sources, wanted = [], []
    for _ in range(VALUES):
        value = float(of_all.randrange(1000))
        sources.append(torch.full((length,), value + me.rank, device=device))
        if kind == "all_gather":
            wanted.append((value + ranks).repeat_interleave(n))
        else:
            one = value + root if kind == "broadcast" else float((value + ranks).sum())
            wanted.append(torch.full((n,), one))
    return Drawn(sources, wanted, source, output, put)


def play(me: Rank, seed: int, actions: int) -> None:
    of_all, own = random.Random(seed), random.Random(f"{seed} {me.rank}")
    device = use_gpu(me)
    dist.all_reduce(torch.ones(1, device=device))
    calls = [draw(me, of_all, device) for _ in range(6)]
    graphs = []
    for _ in range(4):
        inside = of_all.sample(calls, of_all.randint(1, 3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in inside:
                call.put()
        graphs.append((graph, inside))
    streams, seen = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(actions):
        graph, together = of_all.choice([*graphs, *((None, [call]) for call in calls)])
        values = [of_all.randrange(VALUES) for _ in together]
        stream = of_all.choice(streams)
        stream.wait_stream(streams[0] if stream is streams[1] else streams[1])
        if own.randrange(8) == 0:
            time.sleep(own.random() / 100)
        with torch.cuda.stream(stream):
            for call, value in zip(together, values, strict=True):
                call.source.copy_(call.sources[value])
            if graph is None:
                together[0].put()
            else:
                graph.replay()
            for call, value in zip(together, values, strict=True):
                copy = torch.empty_like(call.output)
                copy.copy_(call.output)
                seen.append((copy, call.wanted[value]))
    torch.cuda.synchronize()
    for copy, wanted in seen:
        assert torch.equal(copy.cpu(), wanted)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_programs_with_graphs(machine: Machine, size: int, seed: int) -> None:
    machine.run(play, size, seed, 60)
