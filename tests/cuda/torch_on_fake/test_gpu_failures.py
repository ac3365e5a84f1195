"""Ranks that die, are late or disagree while others wait in streams: who says so, and what then."""

from __future__ import annotations

import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from blame import expect, expect_all
from conftest import Machine
from gpu_jobs import Gate, use_gpu
from pool import Died, Rank

import ringreduce


def loop(me: Rank, style: str) -> None:
    """Operations until something happens; tells the test once they flow."""
    x = torch.ones(50_000, device=use_gpu(me))
    for k in range(10**9):
        if style == "staged":
            dist.reduce(x, 0)
        else:
            work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=style == "async")
            if work is not None:
                work.wait()
        torch.cuda.synchronize()
        if k == 3:
            me.tell("flowing")


@pytest.mark.parametrize("style", ["blocking", "async", "staged", "launch blocking"])
def test_a_killed_rank_is_named(machine: Machine, style: str) -> None:
    # The host then waits in a launch until the other ranks have come.
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if style == "launch blocking" else {}
    call = machine.start(loop, 3, style, fresh=True, **env)
    for rank in range(3):
        call.heard(rank)
    call.signal(1, signal.SIGKILL)
    outcomes = call.outcomes(30)
    assert isinstance(outcomes[1], Died)
    expect_all(outcomes, [1], "PeerLost", [1])


def late(me: Rank, barrier: bool) -> None:
    device = use_gpu(me)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if me.rank == 1:
        me.hear(60)
        return
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    if barrier:  # it waits for the call, but does not speak first
        dist.barrier()
    torch.cuda.synchronize()
    assert bool(x.isnan().all())
    work.wait()


@pytest.mark.parametrize("barrier", [False, True])
def test_a_late_rank_is_named_and_the_result_is_nan(machine: Machine, barrier: bool) -> None:
    call = machine.start(late, 2, barrier, timeout=2, fresh=True)
    call.await_end([0], 30)
    expect(call.ended[0], "Timeout", [1])
    call.tell(1)
    call.outcomes(30)


def disagree(me: Rank) -> None:
    x = torch.ones(1000 + me.rank, device=use_gpu(me))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.all_reduce(x)


def test_ranks_that_disagree_are_told(machine: Machine) -> None:
    for outcome in machine.start(disagree, 2, fresh=True).outcomes(30):
        assert getattr(outcome, "kinds", [""])[0] == "ringreduce.errors.Mismatch", outcome


def held(me: Rank) -> None:
    """A stream that stands still for reasons of its own is nobody's fault."""
    device = use_gpu(me)
    x = torch.full((100,), me.rank + 1.0, device=device)
    dist.all_reduce(x.clone())
    torch.cuda.synchronize()
    gate = Gate()
    work = dist.all_reduce(x, async_op=True)
    me.tell("held")
    me.hear()
    gate.open()
    work.wait()
    assert x.cpu().tolist() == [3] * 100


def test_streams_may_be_held_back(machine: Machine) -> None:
    call = machine.start(held, 2)
    for rank in range(2):
        assert call.heard(rank) == "held"
    for rank in range(2):
        call.tell(rank)
    call.results()


def stuck(me: Rank) -> None:
    """A stream that stands still when a barrier has to wait for it."""
    x = torch.ones(8, device=use_gpu(me))
    dist.all_reduce(x)
    gate = Gate()
    with pytest.raises(dist.DistBackendError, match="did not enter a barrier: cuda:"):
        dist.barrier()
    gate.open()
    dist.all_reduce(x)  # the group goes on
    assert x.tolist() == [4.0] * 8


def test_a_barrier_does_not_wait_for_a_gpu_without_end(machine: Machine) -> None:
    machine.start(stuck, 2, timeout=1, fresh=True).results(30)


def going_on(me: Rank, name: str) -> None:
    """A group that goes on after losses takes no CUDA tensors, for NCCL's calls either."""
    dist.init_process_group(
        me.backend,
        store=me.store(name),
        rank=me.rank,
        world_size=2,
        pg_options=ringreduce.Options(on_loss="continue"),
    )
    x = torch.ones(8, device=use_gpu(me))
    for call in (dist.all_reduce, partial(dist.reduce, dst=0)):
        with pytest.raises(ValueError, match="on_loss='continue', which CUDA tensors do not"):
            call(x)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("other", ["nccl", "host"])
def test_groups_that_go_on_take_no_cuda_tensors(machine: Machine, other: str) -> None:
    call = machine.pool.start(
        going_on,
        machine.world(0, RINGREDUCE_CUDA_OTHER=other),
        machine.pool.name(),
        ranks=2,
        fresh=True,
    )
    call.results(60)


def again(me: Rank, names: list[str]) -> None:
    """Groups after groups, with and without a device of their own, and parts of them."""
    device = use_gpu(me)
    for k, name in enumerate(names):
        dist.init_process_group(
            me.backend,
            store=me.store(name),
            rank=me.rank,
            world_size=3,
            device_id=device if k % 2 else None,
        )
        pair = dist.new_group([0, 2])
        x = torch.full((1000,), me.rank + 1.0, device=device)
        dist.all_reduce(x)
        if me.rank != 1:
            dist.all_reduce(x, group=pair)
            assert x.cpu().tolist() == [12] * 1000
        dist.barrier()
        dist.destroy_process_group()


def test_groups_are_made_anew(machine: Machine) -> None:
    names = [machine.pool.name() for _ in range(4)]
    machine.pool.start(again, machine.world(0), names, ranks=3, fresh=True).results(60)


def after_an_error(me: Rank, name: str) -> None:
    device = use_gpu(me)
    x = torch.ones(1000 + me.rank, device=device)
    with pytest.raises(dist.DistBackendError):
        while True:
            dist.all_reduce(x)
            torch.cuda.synchronize()
    dist.destroy_process_group()
    me.init(name)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    assert x.cpu().tolist() == [2] * 1000


def test_a_process_goes_on_after_an_error(machine: Machine) -> None:
    machine.start(after_an_error, 2, machine.pool.name(), fresh=True).results(60)
