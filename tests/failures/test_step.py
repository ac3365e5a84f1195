"""Steps of optimizers after a loss: `ringreduce.commit` and `ringreduce.found_inf` on the CPU.

tests/cuda/torch_on_fake/test_gpu_failures.py has them on GPUs, test_failures.py the ends of waits.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Died, Done, Pool, Rank, on_ranks
from processes import wait_until
from torch import nn

import ringreduce


def committed(me: Rank) -> None:
    x = torch.ones(50_000)
    if me.rank == 1:
        me.hear()
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    if me.rank == 0:
        me.tell("queued")
    ringreduce.commit()
    assert all(work is not None and work.is_completed() for work in works)
    assert x[0] == 8 and float(ringreduce.found_inf()) == 0


def test_a_commit_waits_for_all_calls(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(committed, world(2))
    assert call.heard(0) == "queued"
    call.tell(1)
    call.results()


OPTIMIZERS: dict[str, Any] = {
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
}


def lost_step(me: Rank, way: str, kind: str) -> bool:
    """A step of training, and one in which a rank is lost.  Whether the latter changed anything."""
    flag = ringreduce.found_inf()
    assert flag.shape == () and flag.dtype == torch.float32 and flag.device.type == "cpu"
    parameter = nn.Parameter(torch.ones(3000))
    optimizer = OPTIMIZERS[kind]([parameter], lr=0.1, fused=True)
    if way == "found_inf":
        optimizer.found_inf = flag
    parameter.grad = torch.ones(3000)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    state = [parameter, *(v for v in optimizer.state[parameter].values() if v is not None)]
    before = [tensor.detach().clone() for tensor in state]
    assert float(flag) == 0 and not bool((parameter == 1).any())
    if me.rank == 1:
        me.tell("ready")
        me.hear()
    work = dist.all_reduce(parameter.grad, async_op=True)
    assert work is not None
    me.tell("queued")
    if way == "commit":
        with pytest.raises(ringreduce.PeerLost, match="rank 1"):
            ringreduce.commit()
    else:
        assert wait_until(work.is_completed)
        assert float(flag) == 1
        optimizer.step()
    with pytest.raises(ringreduce.PeerLost):
        ringreduce.commit()
    assert float(flag) == 1 and float(ringreduce.found_inf()) == 1
    return not all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize(
    ("way", "kind", "changes"),
    [("nothing", "AdamW", True), ("commit", "AdamW", False)]
    + [("found_inf", kind, False) for kind in OPTIMIZERS],
)
def test_parameters_after_a_lost_step(
    pool: Pool, world: MakeWorld, way: str, kind: str, changes: bool
) -> None:
    call = pool.start(lost_step, world(2), way, kind)
    assert call.heard(1) == "ready" and call.heard(0) == "queued"
    call.signal(1, signal.SIGKILL)
    found, died = call.outcomes()
    assert isinstance(found, Done) and isinstance(died, Died), found
    assert found.value == changes


@on_ranks(2)
def test_the_flag_is_set_by_an_abort(me: Rank) -> None:
    group = dist.new_group()
    flag = ringreduce.found_inf(group)
    dist.barrier()  # of another group, which the abort does not end
    if me.rank == 0:
        group.abort()
    with pytest.raises(ringreduce.Aborted):
        dist.all_reduce(torch.ones(8), group=group)
    assert flag == ringreduce.found_inf(group) == 1


@on_ranks(2, backend="gloo", remade=True)
def test_beside_another_backend_the_hooks_calls_are_meant(me: Rank) -> None:
    for call in (ringreduce.commit, ringreduce.found_inf):
        with pytest.raises(TypeError, match=f"{call.__name__} takes a group .* of gloo"):
            call()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    ringreduce.register_comm_hook(model)
    model(torch.ones(1, 4)).sum().backward()
    ringreduce.commit()
    assert float(ringreduce.found_inf()) == 0
    with pytest.raises(ValueError, match="calls of this group on meta tensors"):
        ringreduce.found_inf(device="meta")
    with pytest.raises(TypeError, match="this rank needs to be in the group"):
        ringreduce.commit(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
