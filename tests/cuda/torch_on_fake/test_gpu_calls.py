"""Every call on CUDA tensors gives what it gives on CPU tensors, on each fake machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import Machine
from gpu_jobs import use_gpu
from pool import Rank

Tensor = torch.Tensor


def same(gpu: list[Tensor], cpu: list[Tensor], what: str) -> None:
    for ours, wanted in zip(gpu, cpu, strict=True):
        assert ours.is_cuda, what
        assert torch.equal(oracle.bits(ours.cpu()), oracle.bits(wanted)), what


def op_of(name: str, rank: int) -> dist.ReduceOp:
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(oracle.factor(rank))
    return getattr(dist.ReduceOp, name)


def reduce_all(me: Rank, sizes: list[int]) -> None:
    """all_reduce and reduce_scatter_tensor, with every op of every dtype."""
    device = use_gpu(me)
    for k, (dtype, name) in enumerate(oracle.PAIRS):
        for n in sizes:
            what = f"{name} of {n} {dtype}"
            mine = oracle.make_input(dtype, name, n * me.world_size, me.rank, k)
            op = op_of(name, me.rank)
            cpu, gpu = mine.clone(), mine.to(device)
            dist.all_reduce(cpu, op=op)
            work = dist.all_reduce(gpu, op=op, async_op=k % 2 == 0)
            if work is not None:
                work.wait()
            same([gpu], [cpu], f"all_reduce: {what}")
            gpu = mine.to(device)
            part, wanted = gpu.new_empty(n), mine.new_empty(n)
            dist.reduce_scatter_tensor(wanted, mine, op=op)
            dist.reduce_scatter_tensor(part, gpu, op=op)
            same([part], [wanted], f"reduce_scatter_tensor: {what}")
            same([gpu], [mine], f"the input of reduce_scatter_tensor: {what}")


@pytest.mark.parametrize("size", [2, 4])
def test_reductions_have_the_cpus_bits(machine: Machine, size: int) -> None:
    machine.run(reduce_all, size, [1, 257])


def large(me: Rank) -> None:
    device = use_gpu(me)
    for n in (0, 70_000, 3_000_001):
        mine = oracle.make_input("float32", "SUM", n, me.rank, n)
        gpu = mine.to(device)
        dist.all_reduce(mine)
        dist.all_reduce(gpu)
        same([gpu], [mine], f"{n} elements")


@pytest.mark.parametrize("algorithm", ["direct", "oneshot", "twoshot", "ring"])
def test_every_algorithm_has_the_cpus_bits(machine: Machine, algorithm: str) -> None:
    if machine.name == "one GPU" and algorithm != "direct":
        pytest.skip("kernels of ranks that share a GPU in turns cannot wait for each other")
    machine.run(large, 2, RINGREDUCE_CUDA_ALGORITHM=algorithm)


@dataclass(frozen=True)
class Site:
    """Where a call is made, and how."""

    rank: int
    size: int
    device: torch.device
    later: bool  # asynchronously

    def mine(self, n: int) -> Tensor:
        return (torch.arange(n) + 100.0 * self.rank).to(self.device)

    def zeros(self, n: int) -> Tensor:
        return torch.zeros(n, device=self.device)

    def each(self, n: int) -> list[Tensor]:
        return [self.zeros(n) for _ in range(self.size)]

    def done(self, work: dist.Work | None, *results: Tensor) -> list[Tensor]:
        assert (work is not None) == self.later
        if work is not None:
            work.wait()
        return list(results)


def all_reduce_of_a_view(at: Site) -> list[Tensor]:
    whole = at.mine(60).view(6, 10)
    return at.done(dist.all_reduce(whole[:, 1:4], async_op=at.later), whole)


def broadcast(at: Site) -> list[Tensor]:
    a = at.mine(1000)
    return at.done(dist.broadcast(a, at.size - 1, async_op=at.later), a)


def all_gather(at: Site) -> list[Tensor]:
    parts = at.each(7)
    return at.done(dist.all_gather(parts, at.mine(7), async_op=at.later), *parts)


def all_gather_of_uneven_parts(at: Site) -> list[Tensor]:
    parts = [at.zeros(3 + r) for r in range(at.size)]
    return at.done(dist.all_gather(parts, at.mine(3 + at.rank), async_op=at.later), *parts)


def all_gather_into_tensor(at: Site) -> list[Tensor]:
    whole = at.zeros(at.size * 9)
    return at.done(dist.all_gather_into_tensor(whole, at.mine(9), async_op=at.later), whole)


def reduce_scatter(at: Site) -> list[Tensor]:
    part, parts = at.zeros(5), [at.mine(5) * r for r in range(at.size)]
    return at.done(dist.reduce_scatter(part, parts, async_op=at.later), part)


def reduce(at: Site) -> list[Tensor]:
    a = at.mine(33)
    return at.done(dist.reduce(a, 1, async_op=at.later), *([a] if at.rank == 1 else []))


def gather(at: Site) -> list[Tensor]:
    parts = at.each(4) if at.rank == 0 else []
    work = dist.gather(at.mine(4), parts or None, dst=0, async_op=at.later)
    return at.done(work, *parts)


def scatter(at: Site) -> list[Tensor]:
    part, parts = at.zeros(4), [at.mine(4) + r for r in range(at.size)]
    work = dist.scatter(part, parts if at.rank == 0 else None, async_op=at.later)
    return at.done(work, part)


def all_to_all(at: Site) -> list[Tensor]:
    outputs, inputs = at.each(6), [at.mine(6) + 10 * r for r in range(at.size)]
    return at.done(dist.all_to_all(outputs, inputs, async_op=at.later), *outputs)


def all_to_all_with_splits(at: Site) -> list[Tensor]:
    gives, takes = [1 + r for r in range(at.size)], [1 + at.rank] * at.size
    output, given = at.zeros(sum(takes)), at.mine(sum(gives))
    work = dist.all_to_all_single(output, given, takes, gives, async_op=at.later)
    return at.done(work, output)


def messages(at: Site) -> list[Tensor]:
    got = at.zeros(800)
    ops = [
        dist.P2POp(dist.isend, at.mine(800), (at.rank + 1) % at.size),
        dist.P2POp(dist.irecv, got, (at.rank - 1) % at.size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [got]


def coalesced(at: Site) -> list[Tensor]:
    a, b = at.mine(5), at.mine(4000)
    with dist._coalescing_manager(device=at.device, async_ops=at.later) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    if at.later:
        manager.wait()
    return [a, b]


def barrier(at: Site) -> list[Tensor]:
    return at.done(dist.barrier(async_op=at.later))


CALLS: list[Callable[[Site], list[Tensor]]] = [
    all_reduce_of_a_view,
    broadcast,
    all_gather,
    all_gather_of_uneven_parts,
    all_gather_into_tensor,
    reduce_scatter,
    reduce,
    gather,
    scatter,
    all_to_all,
    all_to_all_with_splits,
    messages,
    coalesced,
    barrier,
]


def every_call(me: Rank) -> None:
    device = use_gpu(me)
    for call in CALLS:
        for later in (False, True):
            wanted = call(Site(me.rank, me.world_size, torch.device("cpu"), later))
            same(
                call(Site(me.rank, me.world_size, device, later)),
                wanted,
                f"{call.__name__}, asynchronous: {later}",
            )


@pytest.mark.parametrize("backend", ["ringreduce", "cpu:ringreduce,cuda:ringreduce"])
def test_every_call_gives_what_it_gives_on_the_cpu(machine: Machine, backend: str) -> None:
    machine.run(every_call, 3, backend=backend)


def objects(me: Rank) -> None:
    use_gpu(me)
    told: list[object] = [None] * me.world_size
    dist.all_gather_object(told, {"rank": me.rank})
    assert told == [{"rank": r} for r in range(me.world_size)]
    said: list[object] = ["a word", me.rank]
    dist.broadcast_object_list(said, src=1)
    assert said == ["a word", 1]


def test_objects(machine: Machine) -> None:
    machine.run(objects, 2, backend="cpu:ringreduce,cuda:ringreduce")
