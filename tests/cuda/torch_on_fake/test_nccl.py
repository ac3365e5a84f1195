"""torch's own "nccl" backend on the fake's NCCL, and ringreduce beside it and with it inside."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import expect_all
from conftest import Machine
from gpu_jobs import use_gpu
from pool import Died, Pool, Raised, Rank
from test_gpu_calls import every_call, same

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_torch_jobs
from gpu_calls import CALLS, Site, all_reduce_of_a_view, in_one_memory

STOCK = "cpu:ringreduce,cuda:nccl"
ROUNDINGS = 1e-4  # of float32: two ways to add up the same shards, over some steps


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = Path(tmp_path_factory.mktemp("ranks"))
    pool = Pool(folder, ["torch.multiprocessing", "torch.cuda", "pytest", "ringreduce", "gpu_jobs"])
    yield Machine("four GPUs", pool)
    pool.close()


# ---- torch's own backend: the fake is NCCL enough


def calls_of_torchs(me: Rank) -> None:
    device = use_gpu(me)
    for call in CALLS:
        # It refuses tensors that are not contiguous; NCCL wants outputs apart from the inputs.
        if call in (all_reduce_of_a_view, in_one_memory):
            continue
        for later in (False, True):
            wanted = call(Site(me.rank, me.world_size, torch.device("cpu"), later))
            gpu = call(Site(me.rank, me.world_size, device, later))
            same(gpu, wanted, f"{call.__name__}, asynchronous: {later}")


def test_every_call_of_torchs_backend(machine: Machine) -> None:
    machine.run(calls_of_torchs, 3, backend=STOCK)


OPS = {
    "SUM": lambda a: a.sum(0),
    "PRODUCT": lambda a: a.prod(0),
    "MIN": lambda a: a.min(0).values,
    "MAX": lambda a: a.max(0).values,
}
TYPES = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def reductions_of_torchs(me: Rank) -> None:
    """Of small whole numbers, which every dtype can add exactly."""
    device = use_gpu(me)
    of_all = torch.stack([(torch.arange(40) * 7 + 3 * r) % 5 for r in range(me.world_size)])

    def must_be(gpu: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        assert torch.equal(gpu.cpu(), wanted.to(gpu.dtype)), what

    for name in TYPES:
        dtype = getattr(torch, name)
        mine = of_all[me.rank].to(device, dtype)
        for op, function in OPS.items():
            gpu = mine.clone()
            dist.all_reduce(gpu, getattr(dist.ReduceOp, op))
            must_be(gpu, function(of_all), f"{op} of {name}")
        if not dtype.is_floating_point:
            continue
        if dtype is not torch.bfloat16:  # torch 2.11 gives NCCL half of a float32 as its factor
            gpu = mine.clone()
            dist.all_reduce(gpu, dist._make_nccl_premul_sum(0.5 + me.rank))
            factors = torch.arange(me.world_size) + 0.5
            must_be(gpu, (of_all * factors[:, None]).sum(0), f"PREMUL_SUM of {name}")
        part = mine.new_empty(40 // me.world_size)
        dist.reduce_scatter_tensor(part, mine, dist.ReduceOp.AVG)
        must_be(
            part,
            (of_all.sum(0) / me.world_size).chunk(me.world_size)[me.rank],
            f"AVG of {name}",
        )


def test_reductions_of_torchs_backend(machine: Machine) -> None:
    machine.run(reductions_of_torchs, 4, backend=STOCK)


def groups_of_torchs(me: Rank) -> None:
    """An eager group, whose subgroups come from ncclCommSplit."""
    device = use_gpu(me)
    dist.init_process_group(
        "nccl", store=me.store("eager"), rank=me.rank, world_size=4, device_id=device
    )
    odd = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.full((6,), float(me.rank), device=device)
    dist.all_reduce(x, group=odd[me.rank % 2])
    assert x.cpu().tolist() == [2.0 + 2 * (me.rank % 2)] * 6
    dist.all_reduce(x)
    assert x.cpu().tolist() == [12.0] * 6
    dist.destroy_process_group()


def test_groups_of_torchs_backend(machine: Machine) -> None:
    call = machine.pool.start(groups_of_torchs, machine.world(0), ranks=4)
    call.results()


# ---- misuse of NCCL


def different_counts(me: Rank) -> None:
    dist.all_reduce(torch.ones(5 + me.rank, device=use_gpu(me)))
    torch.cuda.synchronize()


def different_calls(me: Rank) -> None:
    x = torch.ones(8, device=use_gpu(me))
    dist.all_reduce(x) if me.rank == 0 else dist.broadcast(x, 0)
    torch.cuda.synchronize()


def different_sizes(me: Rank) -> None:
    x = torch.ones(5 + me.rank, device=use_gpu(me))
    dist.send(x, 1) if me.rank == 0 else dist.recv(x, 0)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "job,dying,words",
    [
        (different_counts, [0, 1], "calls ncclAllReduce of 6 float32 by sum"),
        (different_calls, [0, 1], "calls ncclBroadcast of 8 float32 with root 0"),
        (different_sizes, [1], "rank 1 of 2 waits for 24 bytes of rank 0, which sends 20"),
    ],
)
def test_calls_that_do_not_fit_together(
    machine: Machine, job: Any, dying: list[int], words: str
) -> None:
    call = machine.start(job, 2, backend="nccl", fresh=True)
    call.await_end(dying, 120)
    for rank in dying:
        assert call.ended[rank] == Died(rank, -signal.SIGABRT)
        assert words in call.log(rank)
    if 0 not in dying:
        call.signal(0, signal.SIGKILL)
    call.outcomes(10)


def both_send_first(me: Rank) -> None:
    x = torch.ones(5, device=use_gpu(me))
    dist.send(x, 1 - me.rank)
    event = torch.cuda.current_stream().record_event()
    me.tell("sent")
    me.hear()  # that both have
    me.tell(event.query())
    me.hear()


def test_a_send_waits_for_its_receiver(machine: Machine) -> None:
    call = machine.start(both_send_first, 2, backend="nccl", timeout=600, fresh=True)
    call.hear_all()
    call.tell_all()
    assert [call.heard(rank) for rank in range(2)] == [False, False]
    for rank in range(2):
        call.signal(rank, signal.SIGKILL)
    call.outcomes(10)


def one_gpu(me: Rank) -> list[float]:
    torch.cuda.set_device(0)
    x = torch.ones(3, device="cuda")
    dist.all_reduce(x)
    return x.tolist()


def test_ranks_on_one_gpu(machine: Machine) -> None:
    refused = machine.start(one_gpu, 2, backend="nccl", fresh=True).outcomes(30)
    for outcome in refused:
        assert isinstance(outcome, Raised) and "Duplicate GPU" in outcome.message
    newer = {"FAKE_NCCL_VERSION": "23003", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    call = machine.start(one_gpu, 2, backend="nccl", fresh=True, **newer)
    assert call.results() == [[2.0] * 3] * 2


def until_one_dies(me: Rank) -> None:
    x = torch.ones(1000, device=use_gpu(me))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    me.tell("flowing")
    if me.rank == 1:
        me.hear(60)
    dist.all_reduce(x, async_op=True).wait()


def test_a_rank_that_dies(machine: Machine) -> None:
    env = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    call = machine.start(until_one_dies, 2, backend="nccl", timeout=60, fresh=True, **env)
    call.hear_all()
    call.signal(1, signal.SIGKILL)
    call.await_end([0], 120)
    outcome = call.ended[0]
    assert isinstance(outcome, Raised) and "remote" in outcome.message.lower(), outcome
    call.outcomes(5)


# ---- ringreduce beside it, and with it inside


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_the_hook_beside_nccl(machine: Machine, way: str) -> None:
    for found in machine.run(gpu_torch_jobs.train, 2, way, "mlp", 2, backend="nccl"):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


@pytest.mark.parametrize("other", ["nccl", "host"])
def test_every_call_of_the_backend(machine: Machine, other: str) -> None:
    machine.run(every_call, 3, RINGREDUCE_CUDA_OTHER=other)


def test_the_inner_nccl_where_ranks_share_a_gpu(machine: Machine) -> None:
    newer = {"FAKE_NCCL_VERSION": "23003", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    env = {**newer, "RINGREDUCE_CUDA_OTHER": "auto", "FAKE_GPUS": "1"}
    machine.start(every_call, 2, fresh=True, **env).results()


def sleeps_of_watchers() -> dict[str, int]:
    """How often the threads that watch this process's GPU calls have gone to sleep."""
    sleeps: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # another thread, which ended meanwhile
            name = (task / "comm").read_text().strip()
            if name in ("ringreduce-gpu", "ringreduce-nccl"):
                status = (task / "status").read_text()
                sleeps[name] += int(status.partition("voluntary_ctxt_switches:")[2].split()[0])
    return sleeps


def stand_idle(me: Rank) -> dict[str, int]:
    x = torch.ones(30, device=use_gpu(me))
    dist.all_reduce(x)
    dist.all_to_all_single(torch.empty_like(x), x)
    torch.cuda.synchronize()
    time.sleep(2.5)
    before = sleeps_of_watchers()
    time.sleep(2)
    return {name: n - before[name] for name, n in sleeps_of_watchers().items()}


def test_an_idle_group_hardly_wakes(machine: Machine) -> None:
    for woken in machine.run(stand_idle, 2, RINGREDUCE_CUDA_OTHER="nccl"):
        assert woken["ringreduce-gpu"] == 0
        assert woken["ringreduce-nccl"] <= 5


def different_roots(me: Rank) -> None:
    x = torch.ones(8, device=use_gpu(me))
    dist.reduce(x, me.rank)
    torch.cuda.synchronize()


def test_the_inner_nccl_is_really_called(machine: Machine) -> None:
    call = machine.start(different_roots, 2, RINGREDUCE_CUDA_OTHER="nccl", fresh=True)
    call.await_end(range(2), 120)
    for rank in range(2):
        assert f"rank {rank} of 2 calls ncclReduce of 8 float32 by sum with root {rank}, rank" in (
            call.log(rank)
        )
    call.outcomes(10)


def exchange(me: Rank, later: bool) -> None:
    """Calls of the inner NCCL alone, until a rank is lost."""
    x = torch.ones(3000, device=use_gpu(me))
    y = torch.empty_like(x)
    for k in range(10**9):
        work = dist.all_to_all_single(y, x, async_op=later)
        if work is not None:
            work.wait()
        torch.cuda.synchronize()
        if k == 3:
            me.tell("flowing")


@pytest.mark.parametrize("later", [False, True])
def test_a_rank_that_dies_amid_calls_of_the_inner_nccl(machine: Machine, later: bool) -> None:
    call = machine.start(exchange, 3, later, RINGREDUCE_CUDA_OTHER="nccl", fresh=True)
    call.hear_all()
    call.signal(1, signal.SIGKILL)
    outcomes = call.outcomes(20)
    assert isinstance(outcomes[1], Died)
    expect_all(outcomes, [1], "PeerLost", [1])
