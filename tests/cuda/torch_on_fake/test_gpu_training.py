"""Training on the fake's GPUs: DDP on the backend and by the hook, and sharded."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import fake_rules
import pytest
import torch
import torch.distributed as dist
from conftest import Machine
from gpu_jobs import use_gpu
from pool import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ringreduce._C import is_mapped
from ringreduce.core.backend import backend_of, ringreduce_group

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_torch_jobs as jobs

BUCKET = 4 << 20
ROUNDINGS = 1e-4  # of float32: two ways to add up the same shards, over some steps


@pytest.mark.parametrize("way", ["backend", "hook", "python hook"])
def test_ddp_is_one_process_with_all_shards(machine: Machine, way: str) -> None:
    for found in machine.run(jobs.train, 2, way, "mlp", 2):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


def test_buckets_that_ddp_has_dropped_take_no_memory(machine: Machine) -> None:
    for left in machine.run(jobs.memory_beside_buckets, 2):
        assert left < BUCKET


def wrap_again_and_again(me: Rank) -> tuple[str, int]:
    """DDP's hook over one network after the other.

    Returns the threads that have unmapped memory, and the bytes by which more of it is mapped.
    """
    device = use_gpu(me)
    network = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(3)]).to(device)

    def used() -> int:
        left, memory = torch.cuda.mem_get_info()
        return memory - left

    def steps() -> int:
        model = DDP(network, bucket_cap_mb=5, gradient_as_bucket_view=True)
        jobs.attach(model, "hook")
        for _ in range(3):
            network.zero_grad()
            model(torch.ones(2, 1024, device=device)).sum().backward()
        torch.cuda.synchronize()
        return used()

    steps()  # makes the communicator
    fake_rules.unmappers()
    first, names, end = steps(), "", time.monotonic() + 20
    steps()
    while (more := used() - first) > BUCKET and time.monotonic() < end:
        time.sleep(0.01)
    while not names and time.monotonic() < end:
        names = fake_rules.unmappers()
    return names, more


def test_mappings_of_dropped_buckets_are_closed_by_no_thread_of_the_users(machine: Machine) -> None:
    for names, more in machine.run(wrap_again_and_again, 2):
        assert set(names.split()) <= {"ringreduce-free", "ringreduce-map"} and names
        assert more <= BUCKET


def train_in_mapped_buckets(me: Rank, way: str) -> bool:
    """Whether the gradients lie where all ranks use them, after some steps of DDP."""
    device = use_gpu(me)
    dist.all_reduce(torch.ones(1, device=device if way == "backend" else "cpu"))
    torch.manual_seed(5)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(3)]
    model = DDP(nn.Sequential(*layers).to(device), bucket_cap_mb=5, gradient_as_bucket_view=True)
    jobs.attach(model, way)
    backend = backend_of(ringreduce_group(model.process_group))

    def gradients(scale: float) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=False)
        model(torch.full((2, 1024), scale, device=device)).sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(found) == len(layers)
        return found

    alike = [one.clone() for one in gradients(1.0)]
    for _ in range(2):
        gradients(1.0)
    end = time.monotonic() + 20
    while not (mapped := all(is_mapped(backend, one) for one in gradients(1.0))):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    mean = (me.world_size + 1) / 2  # gradients are linear in the inputs
    for one, wanted in zip(gradients(me.rank + 1.0), alike, strict=True):
        assert torch.allclose(one.cpu(), wanted.cpu() * mean, rtol=ROUNDINGS)
    return mapped


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_buckets_are_used_where_they_are(machine: Machine, way: str) -> None:
    backend = "ringreduce" if way == "backend" else "gloo"
    assert all(machine.run(train_in_mapped_buckets, 2, way, backend=backend))


def test_ranks_that_run_out_of_inputs(machine: Machine) -> None:
    assert machine.run(jobs.train_uneven, 2) == [1, 1]


def test_the_hook_beside_gloo(machine: Machine) -> None:
    for found in machine.run(jobs.train, 2, "hook", "mlp", backend="gloo"):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


def test_half_precision(machine: Machine) -> None:
    for found in machine.run(jobs.train, 3, "hook", "mlp", 1, "bfloat16"):
        assert found["apart"] < 2e-2 and found["kinds"] == 1


def test_mixed_precision_with_a_scaler(machine: Machine) -> None:
    for found in machine.run(jobs.train, 2, "hook", "mlp", 2, "float32", True):
        assert found["finite"] and found["apart"] < 1e-2 and found["kinds"] == 1


def test_fsdp2(machine: Machine) -> None:
    assert max(machine.run(jobs.train_sharded, 2)) < 1e-3


def tensors_that_peers_map(me: Rank, pooled: bool) -> bool:
    """Sums tensors of the group's own memory, while it is offered, mapped and after.

    Pooled: torch's allocator cuts them out of it.

    Returns whether the memory was the group's own, not torch's.
    """
    device = use_gpu(me)
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(device)
    dist.all_reduce(torch.ones(1, device=device))  # makes the communicator

    def taken() -> int:
        torch.cuda.synchronize()
        left, memory = torch.cuda.mem_get_info()
        return memory - left

    before, torchs = taken(), torch.cuda.memory_allocated()
    for count, dtype in ((0, torch.float32), (1, torch.uint8), (1000, torch.float32)):
        small = backend.allocate_tensor(count, dtype=dtype, device=device)
        assert small.dtype == dtype and small.numel() == count and small.device == device
    del small
    if pooled:
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            beside = torch.ones(3, device=device)
            kept = torch.empty(BUCKET // 4, device=device)
        own = True  # torch counts it as its own
    else:
        kept = backend.allocate_tensor(BUCKET // 4, dtype=torch.float32, device=device)
        own = torch.cuda.memory_allocated() == torchs
    for step in range(20):
        kept.fill_(me.rank + step)
        dist.all_reduce(kept)
        total = sum(r + step for r in range(me.world_size))
        assert bool((kept == total).all()), step
        time.sleep(0.005)
    if pooled:
        end = time.monotonic() + 20
        while os.environ["RINGREDUCE_CUDA_ALGORITHM"] == "located" and not is_mapped(backend, kept):
            assert time.monotonic() < end
            time.sleep(0.01)
    view = kept[1 : 1 + BUCKET // 8]  # an odd place at one rank, others in torch's memory
    mixed = view.fill_(1) if me.rank == 0 else torch.ones(BUCKET // 8, device=device)
    for _ in range(3):
        mixed.fill_(1)
        dist.all_reduce(mixed)
        assert bool((mixed == me.world_size).all())
    del kept, view, mixed
    if pooled:
        del beside, pool
    torch.cuda.empty_cache()
    end = time.monotonic() + 20
    while taken() - before >= BUCKET and time.monotonic() < end:
        time.sleep(0.01)
    assert taken() - before < BUCKET
    return own


@pytest.mark.parametrize(
    ("size", "way", "ranks", "mebibytes"), [(3, "vmm", [0, 2], 45), (2, "own", [0, 1], 1)]
)
def test_expandable_segments_are_used_where_they_are(
    machine: Machine, size: int, way: str, ranks: list[int], mebibytes: int
) -> None:
    env = {
        "RINGREDUCE_CUDA_MAP": way,
        "RINGREDUCE_CUDA_ALGORITHM": "direct" if machine.name == "one GPU" else "located",
    }
    found = machine.run(jobs.in_expandable_segments, size, ranks, mebibytes, **env)
    assert found == [[way == "vmm" and rank in ranks] * 2 for rank in range(size)]


def shards_that_peers_map(me: Rank) -> None:
    """What FSDP calls, on the group's own memory, while it is offered and when it is mapped.

    In some steps a rank passes memory of torch's, or all pass tensors that begin at odd places.
    """
    device, P = use_gpu(me), me.world_size
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(device)
    dist.all_reduce(torch.ones(1, device=device))  # makes the communicator
    n = (9 << 20) // 4 // P // 4 * 4
    whole = backend.allocate_tensor(n * P, dtype=torch.float32, device=device)
    shard = backend.allocate_tensor(n, dtype=torch.float32, device=device)
    of_torch = torch.empty(n * P, device=device)
    places = torch.arange(n * P, dtype=torch.float32).remainder(1009)
    for step in range(6):
        odd = 1 if step == 5 else 0
        m = n - 3 * odd
        full = (of_torch if step > 2 and me.rank == step % P else whole)[odd : odd + m * P]
        part = shard[odd : odd + m]
        full.copy_(places[: m * P] + me.rank + step)
        dist.reduce_scatter_tensor(part, full)
        sums = places[: m * P] * P + sum(r + step for r in range(P))
        assert torch.equal(part.cpu(), sums[m * me.rank :][:m]), step
        full.zero_()
        mine = full[m * me.rank :][:m] if step % 2 else part
        mine.copy_(places[:m] + me.rank)
        dist.all_gather_into_tensor(full, mine)
        gathered = torch.cat([places[:m] + r for r in range(P)])
        assert torch.equal(full.cpu(), gathered), step
        time.sleep(0.005)


@pytest.mark.parametrize("algorithm", ["auto", "located"])
def test_shards_in_memory_that_peers_map(machine: Machine, algorithm: str) -> None:
    if algorithm == "located" and machine.name == "one GPU":
        pytest.skip("processes take turns there")
    for ranks in (2, 3):
        machine.run(shards_that_peers_map, ranks, RINGREDUCE_CUDA_ALGORITHM=algorithm)


@pytest.mark.parametrize("pooled", [False, True], ids=["allocated", "pooled"])
@pytest.mark.parametrize("algorithm", ["auto", "located"])
def test_tensors_in_memory_that_peers_map(machine: Machine, algorithm: str, pooled: bool) -> None:
    if algorithm == "located" and machine.name == "one GPU":
        pytest.skip("processes take turns there")
    found = machine.run(tensors_that_peers_map, 2, pooled, RINGREDUCE_CUDA_ALGORITHM=algorithm)
    assert len(set(found)) == 1 and (found[0] or algorithm == "auto")
