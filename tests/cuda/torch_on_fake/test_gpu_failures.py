"""Ranks that die, are late or disagree while others wait in streams: who says so, and what then."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import fake_rules
import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect, expect_all
from conftest import Machine
from gpu_jobs import Gate, use_gpu
from pool import Died, Done, Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ringreduce

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_torch_jobs as jobs


def loop(me: Rank, style: str) -> None:
    """Operations until something happens; tells the test once they flow."""
    device = use_gpu(me)
    x = torch.ones(50_000, device=device)
    model = DDP(nn.Linear(512, 512, bias=False).to(device), gradient_as_bucket_view=True)
    jobs.attach(model, "hook")
    for k in range(10**9):
        if style == "hook":  # the others read and write the killed rank's bucket where it is
            model(x[:512]).sum().backward()
        elif style == "staged":
            dist.reduce(x, 0)
        elif style == "broadcast":  # its root waits for credits of the killed rank
            dist.broadcast(x, 0)
        else:
            work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=style == "async")
            if work is not None:
                work.wait()
        torch.cuda.synchronize()
        if k == 3:
            me.tell("flowing")


@pytest.mark.parametrize(
    "style", ["blocking", "async", "staged", "broadcast", "launch blocking", "hook"]
)
def test_a_killed_rank_is_named(machine: Machine, style: str) -> None:
    # The host then waits in a launch until the other ranks have come.
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if style == "launch blocking" else {}
    call = machine.start(loop, 3, style, fresh=True, **env)
    call.hear_all()
    call.signal(1, signal.SIGKILL)
    outcomes = call.outcomes()
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
    call.await_end([0], 120)
    expect(call.ended[0], "Timeout", [1])
    call.tell(1)
    call.outcomes()


def disagree(me: Rank) -> None:
    x = torch.ones(1000 + me.rank, device=use_gpu(me))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.all_reduce(x)


def test_ranks_that_disagree_are_told(machine: Machine) -> None:
    for outcome in machine.start(disagree, 2, fresh=True).outcomes():
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
    call.hear_all("held")
    call.tell_all()
    call.results()


def crossed(me: Rank) -> None:
    """Ranks that first use their GPUs in different order."""
    for gpu in (0, 1) if me.rank == 0 else (1, 0):
        dist.all_reduce(torch.ones(8, device=f"cuda:{gpu}"))
    for gpu in 0, 1:
        torch.cuda.synchronize(gpu)
    x = torch.ones(8, device="cuda:0")
    with pytest.raises(ringreduce.Timeout) as raised:
        dist.all_reduce(x)
        torch.cuda.synchronize(0)
        ringreduce.commit()
    assert "calls the group on 2 GPUs: have all ranks used theirs for the first time in" in str(
        raised.value
    )


def test_a_timeout_on_one_of_several_gpus_says_how_they_belong_together(machine: Machine) -> None:
    if machine.name != "four GPUs":
        pytest.skip("needs two GPUs for a rank")
    machine.start(crossed, 2, timeout=2, fresh=True).results(30)


def stuck(me: Rank, call: str) -> None:
    """A stream that stands still when a call has to wait for it."""
    x = torch.ones(8, device=use_gpu(me))
    dist.all_reduce(x)
    gate = Gate()
    failed = "did not commit" if call == "commit" else "did not enter a barrier"
    with pytest.raises(ringreduce.Timeout, match=f"{failed}: cuda:"):
        ringreduce.commit() if call == "commit" else dist.barrier()
    gate.open()
    dist.all_reduce(x)  # the group goes on
    assert x.tolist() == [4.0] * 8


@pytest.mark.parametrize("call", ["barrier", "commit"])
def test_nothing_waits_for_a_gpu_without_end(machine: Machine, call: str) -> None:
    machine.start(stuck, 2, call, timeout=3, fresh=True).results()


def committed(me: Rank, mixed: bool) -> None:
    """Of another stream than the current one, without a wait for the Work."""
    x = torch.ones(50_000, device=use_gpu(me))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if me.rank == 1:
        me.hear(60)
    work = dist.all_reduce(x, async_op=True)
    if me.rank == 0:
        me.tell("in its stream")
    ringreduce.commit()
    assert work is not None and work.is_completed()
    assert ringreduce.found_inf().device == x.device and float(ringreduce.found_inf()) == 0
    if mixed:
        with pytest.raises(ValueError, match="calls of this group on cpu tensors are not"):
            ringreduce.found_inf(device="cpu")
    else:
        assert float(ringreduce.found_inf(device="cpu")) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        with pytest.raises(ValueError, match=r"ringreduce\.found_inf\(\), which works in graphs"):
            ringreduce.commit()


@pytest.mark.parametrize("backend", ["ringreduce", "cpu:gloo,cuda:ringreduce"])
def test_a_commit_waits_for_all_calls(machine: Machine, backend: str) -> None:
    call = machine.start(committed, 2, "gloo" in backend, backend=backend, fresh=True)
    assert call.heard(0) == "in its stream"
    time.sleep(0.3)  # a commit that waits for nothing has returned by then
    call.tell(1)
    call.results(60)


def optimizer_of(parameter: torch.nn.Parameter, kind: str) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    return torch.optim.AdamW([parameter], lr=0.1, fused=True)


def lost_step(me: Rank, way: str, kind: str) -> str:
    """A step of training, and one in which a rank is lost.  What the latter did to parameters."""
    device = use_gpu(me)
    parameter = torch.nn.Parameter(torch.ones(3000, device=device))
    parameter.grad = torch.ones(3000, device=device)
    optimizer = optimizer_of(parameter, kind)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    scaler.scale(torch.zeros((), device=device))
    dist.all_reduce(parameter.grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(parameter.grad)
    flag: Any = ringreduce.found_inf()
    assert flag.shape == () and flag.dtype == torch.float32 and float(flag) == 0

    def step() -> None:
        if "scaler" in way:
            scaler.unscale_(optimizer)
            for found in scaler._found_inf_per_device(optimizer).values():
                if way == "scaler with found_inf":
                    torch.maximum(found, flag, out=found)
            scaler.step(optimizer)
            scaler.update()
            return
        if "found_inf" in way:
            vars(optimizer)["found_inf"] = flag
        optimizer.step()

    step()
    assert not bool((parameter == 1).any())
    before = [parameter.detach().cpu()]
    before += [v.cpu() for v in optimizer.state[parameter].values() if v is not None]
    torch.cuda.synchronize()
    if me.rank == 1:
        me.tell("ready")
        me.hear(60)
    if way == "found_inf in a graph":
        graph.replay()
    else:
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        work.wait()  # does not wait on the host
    me.tell("in its stream")
    if way == "commit":
        with pytest.raises(ringreduce.PeerLost):
            ringreduce.commit()
    else:
        step()
    after = [parameter.detach().cpu()]
    after += [v.cpu() for v in optimizer.state[parameter].values() if v is not None]
    assert bool(parameter.grad.isnan().all()) and float(flag) == 1
    with pytest.raises(ringreduce.PeerLost):
        ringreduce.commit()
    if all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        return "intact"
    return "lost" if bool(after[0].isnan().all()) else "changed"


@pytest.mark.parametrize(
    ("way", "kind", "becomes"),
    [
        ("nothing", "AdamW", "lost"),
        ("commit", "AdamW", "intact"),
        ("found_inf", "AdamW", "intact"),
        ("found_inf", "SGD", "intact"),
        ("found_inf in a graph", "AdamW", "intact"),
        ("scaler", "AdamW", "intact"),
        ("scaler with found_inf", "AdamW", "intact"),
    ],
)
def test_parameters_after_a_lost_step(machine: Machine, way: str, kind: str, becomes: str) -> None:
    call = machine.start(lost_step, 2, way, kind, fresh=True)
    assert call.heard(1) == "ready" and call.heard(0) == "in its stream"
    call.signal(1, signal.SIGKILL)
    found, died = call.outcomes()
    assert isinstance(found, Done) and isinstance(died, Died), found
    assert found.value == becomes


def lost_integers(me: Rank) -> None:
    """Indices of a failed call are none that a lookup would fail for."""
    device = use_gpu(me)
    make = partial(torch.full, device=device)
    dist.all_reduce(make((4,), 1.0))
    sums, copies = make((5000,), 7), make((3000,), True)
    addends, sum_of_part = make((5000,), 7, dtype=torch.int32), make((2500,), 7, dtype=torch.int32)
    part, gathered = make((1500,), 7, dtype=torch.int16), make((3000,), 7, dtype=torch.int16)
    complex_part, complex_numbers = make((300,), 1j), make((600,), 1j)
    torch.cuda.synchronize()
    if me.rank == 1:
        me.tell("ready")
        me.hear(60)
    dist.all_reduce(sums)
    dist.reduce_scatter_tensor(sum_of_part, addends)
    dist.all_gather_into_tensor(gathered, part)
    dist.broadcast(copies, 1)
    dist.all_gather_into_tensor(complex_numbers, complex_part)
    me.tell("in its stream")
    for each in (sums, sum_of_part, gathered, copies):
        assert not bool(each.any()), each.dtype
    assert bool(complex_numbers.real.isnan().all()) and bool(complex_numbers.imag.isnan().all())
    assert float(ringreduce.found_inf()) == 1


def test_integers_of_a_failed_call_are_zero(machine: Machine) -> None:
    call = machine.start(lost_integers, 2, fresh=True)
    assert call.heard(1) == "ready" and call.heard(0) == "in its stream"
    call.signal(1, signal.SIGKILL)
    found = call.outcomes()[0]
    assert isinstance(found, Done), found


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


def without_registering(me: Rank) -> str:
    x = torch.ones(8, device=use_gpu(me))
    with pytest.raises(RuntimeError) as refused:
        dist.all_reduce(x)
    dist.reduce(x, 0)  # by way of the host's memory, it goes on
    assert me.rank != 0 or x.tolist() == [2.0] * 8
    return str(refused.value)


def test_a_machine_that_registers_no_host_memory_is_told(machine: Machine) -> None:
    env = {"FAKE_REGISTERS_NOTHING": "1", "RINGREDUCE_CUDA_OTHER": "host"}
    for said in machine.start(without_registering, 2, fresh=True, **env).results(60):
        assert "of host memory (cudaHostRegister)" in said and "does not allow it" in said
        assert 'use nccl for CUDA tensors ("cpu:ringreduce,cuda:nccl")' in said


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


def ruined(me: Rank, style: str) -> list[str]:
    """One rank's GPU is ruined.  Returns what is said, twice."""
    x = torch.ones(50_000, device=use_gpu(me))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    me.tell("reduced")
    if me.rank == 1:
        me.hear()  # until then the call of a slower rank may not have returned
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        fake_rules.runtime.fakeFault(stream, fake_rules.ILLEGAL_ADDRESS)
        while style == "noticed" and not fake_rules.runtime.fakeRuinOf(x.device.index):
            time.sleep(0.001)
    said = []
    for _ in range(2):
        try:
            for _ in range(10**9):
                if style == "staged":
                    dist.reduce(x, 0)
                elif style == "barrier":
                    dist.barrier()
                else:
                    work = dist.all_reduce(x, async_op=style != "blocking")
                    if work is not None:
                        work.wait()
                if me.rank != 1:  # there torch would say it first
                    torch.cuda.synchronize()
        except RuntimeError as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("style", ["blocking", "async", "noticed", "staged", "barrier"])
def test_a_ruined_gpu_is_named_and_nothing_waits_for_it(machine: Machine, style: str) -> None:
    call = machine.start(ruined, 3, style, fresh=True)
    call.hear_all("reduced")
    call.tell(1)
    results = call.results(40)
    for rank, said in enumerate(results):
        if rank != 1:
            assert blamed(said[0]) == blamed(said[1]) == {1}, results
            # On the fake, torch's copies are Python's, whose errors the library does not know.  And
            # before a barrier the rank may leave as soon as torch's own call has told it.
            assert style in ("staged", "barrier") or "illegal memory access" in said[0], results
