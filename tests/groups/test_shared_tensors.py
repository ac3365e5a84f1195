"""ringreduce.empty and share_: tensors that collectives use where they are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Died, Pool, Raised, Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce

SIZE = 100_003


def values(me: Rank, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(me.rank)
    return (torch.randn(SIZE, generator=draw) * 9).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_as_other_tensors(me: Rank) -> None:
    """Every op and dtype gives the same bits, wherever the ranks have their data."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            plain = values(me, dtype)
            shared = ringreduce.share_(plain.clone())
            # A view in the midst of the memory, and a rank that has none.
            part = ringreduce.empty(SIZE + 7, dtype=dtype)[5:-2].copy_(plain)
            mixed = part if me.rank else plain.clone()
            dist.all_reduce(plain, op)
            dist.all_reduce(shared, op)
            work = dist.all_reduce(mixed, op, async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(plain, shared) and torch.equal(plain, mixed), (dtype, op)
    premul = values(me, torch.float32)
    shared = ringreduce.share_(premul.clone())
    for t in (premul, shared):
        dist.all_reduce(t, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(premul, shared)


def moved_and_reduced(me: Rank, make: Callable[[int], torch.Tensor], size: int) -> list[str]:
    """What the collectives give that can use shared tensors in place; of memory from `make`."""
    whole = me.world_size * size
    part, everything, out = make(size), make(whole), make(whole)
    found = []

    def given(t: torch.Tensor, salt: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * salt + me.rank)
        return t.copy_(torch.randn(t.numel(), generator=draw))

    def keep(*tensors: torch.Tensor) -> None:
        found.append(oracle.digest(*tensors))

    for k in range(3):
        dist.broadcast(given(part, k), me.world_size - 1)
        keep(part)
        dist.reduce(given(part, k), 1)
        keep(*[part] * (me.rank == 1))
        dist.all_gather_into_tensor(out, given(part, k))
        keep(part, out)
        dist.reduce_scatter_tensor(part, given(everything, k), dist.ReduceOp.AVG)
        keep(part, everything)
        dist.all_to_all_single(out, given(everything, k))
        keep(out, everything)
        uneven = [size - 5 if r == me.rank else size for r in range(me.world_size)]
        dist.all_to_all_single(out[: sum(uneven)], everything[: sum(uneven)], uneven, uneven)
        keep(out)
        shards = list(given(everything, k).chunk(me.world_size))[::-1]  # not in one piece
        dist.reduce_scatter(part, shards)
        keep(part)
    return found


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_every_collective(me: Rank) -> None:
    for size in (SIZE, 1_100_003):  # the larger one is written past the caches
        expected = moved_and_reduced(me, torch.empty, size)
        assert moved_and_reduced(me, ringreduce.empty, size) == expected
        mixed = ringreduce.empty if me.rank else torch.empty
        assert moved_and_reduced(me, mixed, size) == expected


@on_ranks(2, fresh=True)
def test_memory_comes_and_goes(me: Rank) -> None:
    """New tensors, often at the addresses of old ones, are new to the peers too."""
    group = dist.new_group([1, 0])
    kept = ringreduce.empty(SIZE).fill_(3.0)
    for k in range(300):
        t = ringreduce.empty(SIZE).fill_(float(k + me.rank))
        dist.all_reduce(t, group=group if k % 2 else None)
        assert t.eq(2 * k + 1).all(), k
    dist.destroy_process_group()
    assert kept.eq(3.0).all() and t.eq(599).all()  # memory outlives the groups


@on_ranks(2, fresh=True)
def test_memory_of_a_size_that_comes_again_is_used_again(me: Rank) -> None:
    """FSDP asks for it in each step; a peer then has it mapped already."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def take(elements: int) -> torch.Tensor:
        t: torch.Tensor = backend.allocate_tensor(
            elements, dtype=torch.float32, device=torch.device("cpu")
        )
        dist.all_reduce(t.fill_(me.rank + 1.0))
        assert t.eq(3.0).all()
        return t

    for _ in range(2):  # not kept at first: DDP lets go of its first buckets for good
        take(SIZE)
    places = {take(SIZE).data_ptr() for _ in range(5)}
    assert len(places) == 1
    two = take(SIZE), take(SIZE)
    assert two[0].data_ptr() in places and two[1].data_ptr() not in places
    descriptors = len(os.listdir("/proc/self/fd"))
    del two
    assert len(os.listdir("/proc/self/fd")) == descriptors  # both are kept
    dist.destroy_process_group()
    assert not any("memfd:ringreduce" in fd for fd in map(target, os.listdir("/proc/self/fd")))


def target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # of the listing itself
        return ""


@on_ranks(2)
def test_a_forked_child_does_not_change_the_parent(me: Rank) -> None:
    t = ringreduce.empty(SIZE).fill_(1.0)
    dist.all_reduce(t)
    child = os.fork()
    if child == 0:
        t.fill_(99.0)
        os._exit(0 if t.eq(99.0).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert t.eq(me.world_size).all()
    dist.all_reduce(t)
    assert t.eq(me.world_size**2).all()


def until_lost(me: Rank, gathers: bool) -> None:
    t = ringreduce.empty(4_000_100)[50:-51]  # parts of the first and the last page are another's
    part = torch.ones(t.numel() // me.world_size)
    me.tell("flowing")
    try:
        while True:
            if gathers:
                dist.all_gather_into_tensor(t, part)
            else:
                dist.all_reduce(t)
    except ringreduce.PeerLost:
        # Nothing of the failed operation arrives later, but for the pages that are shared.
        t.fill_(5.0)
        time.sleep(0.3)
        assert t[5000:-5000].eq(5.0).all()
        t.fill_(5.0)
        child = os.fork()
        if child == 0:
            t.fill_(99.0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert t.eq(5.0).all()
        raise


@pytest.mark.parametrize("gathers", [False, True], ids=["all_reduce", "all_gather"])
def test_a_lost_rank(pool: Pool, world: MakeWorld, gathers: bool) -> None:
    call = pool.start(until_lost, world(3, 20.0), gathers, fresh=True)
    call.hear_all("flowing")
    call.signal(1, signal.SIGKILL)
    for outcome in call.outcomes():
        if outcome.rank == 1:
            assert outcome == Died(1, -signal.SIGKILL)
        else:
            assert isinstance(outcome, Raised) and outcome.isa("PeerLost"), outcome
            assert "rank 1 " in outcome.message, outcome.message


def a_group_that_fails(me: Rank) -> None:
    """The failure of one group does not touch another one's part of the same memory."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    x = ringreduce.empty(2 * SIZE)
    if me.rank == 1:
        for _ in range(20):
            dist.all_reduce(x[:SIZE], group=groups[0])
        os.kill(os.getpid(), signal.SIGKILL)
    part = x[SIZE:]
    lost = threading.Event()

    def until_lost() -> None:
        with pytest.raises(ringreduce.PeerLost):
            while True:
                dist.all_reduce(x[:SIZE], group=groups[0])
        lost.set()

    thread = threading.Thread(target=until_lost) if me.rank == 0 else None
    if thread:
        thread.start()
    for _ in range(400):
        part.fill_(1.0 + me.rank)
        dist.all_reduce(part, group=groups[1])
        assert part.eq(4.0).all()
    if thread:
        thread.join()
        assert lost.is_set()
    os._exit(0)


def test_a_group_that_fails_leaves_others_alone(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(a_group_that_fails, world(3, 20.0), fresh=True)
    found = [outcome.exitcode for outcome in call.outcomes() if isinstance(outcome, Died)]
    assert found == [0, -signal.SIGKILL, 0], call.outcomes()


def shared_model(me: Rank) -> list[str]:
    """Parameters that are shared before DDP is made train as others do."""
    digests = []
    for shares in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5))
        if shares:
            for parameter in model.parameters():
                assert ringreduce.share_(parameter) is parameter
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        ringreduce.register_comm_hook(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(5):
            draw = torch.Generator().manual_seed(100 * step + me.rank)
            ddp(torch.randn(8, 300, generator=draw)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        digests.append(oracle.digest(*model.parameters()))
    return digests


def test_a_model_of_shared_parameters(pool: Pool, world: MakeWorld) -> None:
    found = pool.run(shared_model, world(2))
    assert len({digest for digests in found for digest in digests}) == 1


def test_arguments() -> None:
    t = ringreduce.zeros(2, 3, dtype=torch.int16)
    assert t.shape == (2, 3) and t.dtype == torch.int16 and t.eq(0).all()
    assert ringreduce.empty().shape == () and ringreduce.empty(0).numel() == 0
    wide = torch.arange(6.0).view(2, 3).t()
    kept = wide.clone()
    assert ringreduce.share_(wide) is wide and torch.equal(wide, kept) and wide.is_contiguous()
    assert ringreduce.empty((2, 3)).shape == ringreduce.empty(torch.Size([2, 3])).shape == (2, 3)
    for lazy in (
        torch.randn(5, dtype=torch.cfloat).conj(),
        torch.randn(5, dtype=torch.cfloat).imag,
    ):
        kept = lazy.clone()
        assert torch.equal(ringreduce.share_(lazy), kept)
    with pytest.raises(ValueError, match="shape"):
        ringreduce.empty(-1)
    with pytest.raises(ValueError, match="dense tensors on the CPU"):
        ringreduce.share_(torch.eye(3).to_sparse())
