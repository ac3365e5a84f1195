"""ringreduce.horovod on GPUs: values, the order of streams, and ranks that are killed."""

from __future__ import annotations

import signal

import horovod_programs
import pytest
import torch
from blame import blamed
from conftest import Machine
from gpu_jobs import Gate, use_gpu
from pool import Rank

import ringreduce.horovod as hvd


def play(me: Rank, seeds: list[int]) -> int:
    return horovod_programs.play(me.rank, me.world_size, seeds, lambda _: None, use_gpu(me))


@pytest.mark.parametrize("size", [2, 3])
def test_random_programs(machine: Machine, size: int) -> None:
    seeds = list(range(12))
    assert min(machine.run(play, size, seeds)) > len(seeds)


def order(me: Rank) -> None:
    """Operations follow their inputs' stream, and the stream that waits follows them."""
    device = use_gpu(me)
    hvd.init()
    hvd.allreduce(torch.ones(1, device=device), name="first")
    torch.cuda.synchronize()
    size, total = me.world_size, float(sum(range(1, me.world_size + 1)))
    x = torch.zeros(5000, device=device)
    mine = torch.full((5000,), me.rank + 1.0, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate = Gate()
        x.copy_(mine)
        reduce = hvd.allreduce_async_(x, name="sum", op=hvd.Sum)
        gather = hvd.allgather_async(x, name="rows")
        assert hvd.synchronize(reduce) is x
        seen = torch.empty_like(x)
        seen.copy_(x, non_blocking=True)
        assert not hvd.poll(reduce) and not torch.cuda.current_stream().query()
        rows = hvd.synchronize(gather)
        gate.open()
        assert seen.cpu().tolist() == [total] * 5000 and hvd.poll(reduce)
        assert rows.cpu().shape == (5000 * size,)
    hvd.shutdown()


def test_streams_are_ordered_and_the_host_goes_on(machine: Machine) -> None:
    machine.run(order, 2)


def joined(me: Rank) -> None:
    """The default stream stands still, and a joined rank's zeros do not wait for it."""
    device = use_gpu(me)
    hvd.init()
    ones = torch.ones(3000, device=device)
    hvd.allreduce(ones, name="first")
    torch.cuda.synchronize()
    if me.rank == 1:
        gate = Gate(torch.cuda.default_stream())
        hvd.join()
        gate.open()
    else:
        assert hvd.allreduce(ones, name="one", op=hvd.Sum).cpu().tolist() == [1.0] * 3000
        hvd.join()
    hvd.shutdown()


def test_zeros_of_a_joined_rank_are_ordered(machine: Machine) -> None:
    machine.run(joined, 2)


def second_gpu(me: Rank) -> None:
    other = (me.rank + 1) % torch.cuda.device_count()
    device = use_gpu(me)
    hvd.init()
    hvd.allreduce(torch.ones(1, device=device), name="one")
    with pytest.raises(ValueError, match=rf"rank {me.rank} has used {device} and now gives"):
        hvd.allreduce(torch.ones(1, device=f"cuda:{other}"), name="other")
    assert float(hvd.allreduce(torch.full((1,), 2.0, device=device), name="one")) == 2.0
    hvd.shutdown()


def test_a_second_gpu_is_refused(machine: Machine) -> None:
    if machine.name != "four GPUs":
        pytest.skip("needs two GPUs for a rank")
    machine.run(second_gpu, 2)


def train(me: Rank) -> float:
    """How far DistributedOptimizer is from one process that has all shards."""
    device = use_gpu(me)
    hvd.init()
    torch.manual_seed(1)
    models = [torch.nn.Linear(20, 10).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    named = models[0].named_parameters()
    optimizers[0] = hvd.DistributedOptimizer(optimizers[0], named_parameters=named)
    hvd.broadcast_parameters(models[0].state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizers[0], root_rank=0)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(me.world_size, 5, 20, generator=generator).to(device)
        models[0](x[me.rank]).square().mean().backward()
        models[1](x.reshape(-1, 20)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    gaps = [
        float((a - b).detach().abs().max())
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    ]
    hvd.shutdown()
    return max(gaps)


def test_the_optimizer_trains_like_one_process(machine: Machine) -> None:
    assert max(machine.run(train, 2)) < 1e-5


def commit(me: Rank) -> list[float]:
    """A rank dies in a GPU operation.  No operation raises; commit() must not keep the result."""
    device = use_gpu(me)
    hvd.init()
    model = torch.nn.Linear(3, 1, bias=False).to(device)
    with torch.no_grad():
        model.weight.fill_(1.0)
    state = hvd.elastic.TorchState(model=model)
    gradient = torch.ones(1, 3, device=device)
    hvd.allreduce(gradient, name="first")
    torch.cuda.synchronize()
    gate = Gate() if me.rank == 1 else None
    total = hvd.allreduce(gradient, name="one")
    me.tell("under way")
    if gate:
        me.hear(60)
    with torch.no_grad():
        model.weight.add_(total)
    assert bool(model.weight.isnan().all())
    with pytest.raises(hvd.HorovodInternalError) as caught:
        state.commit()
    me.tell(str(caught.value))
    state.restore()
    hvd.shutdown()
    return [float(one) for one in model.weight.detach().cpu().flatten()]


def test_commit_does_not_keep_what_a_lost_rank_left(machine: Machine) -> None:
    call = machine.start(commit, 3, fresh=True)
    call.hear_all("under way")
    call.signal(1, signal.SIGKILL)
    for rank in (0, 2):
        text = call.heard(rank)
        assert blamed(text) == {1}, text
    call.await_end([0, 2], 60)
    assert [call.ended[rank].value for rank in (0, 2)] == [[1.0] * 3] * 2
