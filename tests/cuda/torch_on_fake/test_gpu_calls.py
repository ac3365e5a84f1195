"""Every call on CUDA tensors gives what it gives on CPU tensors, on each fake machine."""

from __future__ import annotations

import sys
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import Machine
from gpu_jobs import use_gpu
from pool import Rank

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_calls import CALLS, Site

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
    counters = torch.arange(3).add(me.rank)  # there may be no such kernel of integers
    gpu = counters.to(device)
    dist.all_reduce(counters)
    dist.all_reduce(gpu)
    same([gpu], [counters], "integers")


@pytest.mark.parametrize("algorithm", ["direct", "oneshot", "twoshot", "ring", "ll", "located"])
def test_every_algorithm_has_the_cpus_bits(machine: Machine, algorithm: str) -> None:
    if machine.name == "one GPU" and algorithm != "direct":
        pytest.skip("kernels of ranks that share a GPU in turns cannot wait for each other")
    machine.run(large, 2, RINGREDUCE_CUDA_ALGORITHM=algorithm)


def in_the_switch(me: Rank) -> None:
    """Whole numbers, of which sums in every order are the same; the last in two turns."""
    device = use_gpu(me)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n in (0, 1, 1000, 300_001, 9_000_003 if dtype == torch.float32 else 70_000):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                mine = (torch.arange(n) % 13 + me.rank).to(dtype)
                gpu = mine.to(device)
                dist.all_reduce(mine, op)
                dist.all_reduce(gpu, op)
                same([gpu], [mine], f"{n} elements of {dtype}")


@pytest.mark.parametrize("size", [2, 4])
def test_the_nvswitch_adds_where_it_is_asked_to(machine: Machine, size: int) -> None:
    if machine.name != "four GPUs":
        pytest.skip("ranks that share a GPU have no window")
    machine.run(in_the_switch, size, RINGREDUCE_CUDA_ALGORITHM="nvls")


def in_pieces(me: Rank) -> None:
    """Messages that go through both halves of the staging memory, or a window, several times."""
    device, P, n = use_gpu(me), me.world_size, 9 << 20
    for values in ("sums", "parts", "all", "root's"):
        length = 3 * n if values in ("sums", "root's") else n * P if values == "parts" else n
        mine = torch.arange(length, dtype=torch.int32).remainder(1009 + me.rank)
        of_all = [torch.arange(length, dtype=torch.int32).remainder(1009 + r) for r in range(P)]
        gpu = mine.to(device)
        if values == "sums":
            dist.all_reduce(gpu)
            wanted = sum(of_all[1:], of_all[0])
        elif values == "parts":
            part = gpu.new_empty(n)
            dist.reduce_scatter_tensor(part, gpu)
            gpu, wanted = part, sum(of_all[1:], of_all[0])[n * me.rank :][:n]
        elif values == "all":
            gathered = gpu.new_empty(n * P)
            dist.all_gather_into_tensor(gathered, gpu)
            gpu, wanted = gathered, torch.cat(of_all)
        else:
            dist.broadcast(gpu, 1)
            wanted = of_all[1]
        assert torch.equal(gpu.cpu(), wanted), values


@pytest.mark.parametrize("algorithm", ["direct", "located"])
def test_long_messages_go_in_pieces(machine: Machine, algorithm: str) -> None:
    if machine.name == "one GPU" and algorithm != "direct":
        pytest.skip("kernels of ranks that share a GPU in turns cannot wait for each other")
    machine.run(in_pieces, 2, RINGREDUCE_CUDA_ALGORITHM=algorithm)


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
