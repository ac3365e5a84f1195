"""Calls between the start and the end of coalescing: torch's manager, and the group's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Rank, on_ranks
from torch.distributed.distributed_c10d import _coalescing_manager

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(timeout=20.0)
def test_coalescing(me: Rank) -> None:
    p, r = me.world_size, me.rank
    group = dist.group.WORLD
    assert group is not None
    # torch's own manager: of a kind, and as one call where torch has one.
    many = [torch.full((n,), float(r + n)) for n in (1, 10, 5000)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for t in many:
            dist.all_reduce(t)
    manager.wait()
    for t in many:
        assert bool((t == p * t.numel() + p * (p - 1) / 2).all())
    wholes = [torch.empty(p * n) for n in (2, 7)]
    with _coalescing_manager(group, CPU):
        for whole in wholes:
            n = whole.numel() // p
            dist.all_gather_into_tensor(whole, torch.full((n,), float(r)))
    for whole in wholes:
        assert torch.equal(whole, torch.arange(float(p)).repeat_interleave(whole.numel() // p))
    parts = [torch.empty(n) for n in (2, 7)]
    with _coalescing_manager(group, CPU, async_ops=True) as manager:
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.arange(float(p * part.numel())))
    manager.wait()
    for part in parts:
        n = part.numel()
        assert torch.equal(part, p * torch.arange(float(n * r), float(n * (r + 1))))
    # The group's own: whatever comes between start and end, messages too.
    t, s, came = torch.full((9,), float(r)), torch.full((4,), float(r)), torch.empty(5)
    group._start_coalescing(CPU)
    group.allreduce([t])
    group.broadcast([s])
    group.send([torch.full((5,), float(r))], (r + 1) % p, 1)
    group.recv([came], (r - 1) % p, 1)
    work = group._end_coalescing(CPU)
    assert work.wait()
    assert work.is_completed() and work.is_success()
    assert float(t[0]) == p * (p - 1) / 2
    assert float(s[0]) == 0.0
    assert float(came[4]) == (r - 1) % p
    assert [x.data_ptr() for x in work.get_future().wait()][:2] == [t.data_ptr(), s.data_ptr()]
    # Empty, and again.
    group._start_coalescing(CPU)
    assert group._end_coalescing(CPU).wait()
    with pytest.raises(RuntimeError):
        group._end_coalescing(CPU)
