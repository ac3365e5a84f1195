"""Compressed gradients on the fake's GPUs: the CPU's bits, the order of streams, and errors."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import expect, expect_all
from conftest import Machine
from gpu_jobs import Gate, use_gpu
from pool import Died, Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_coded_jobs as jobs
import gpu_torch_jobs

SETTINGS: list[dict[str, Any]] = [
    {"codec": "int8"},
    {"codec": "int4", "schedule": "ring"},
    {"codec": "int4", "error_feedback": False},
    {"codec": "int8", "start_after": 2, "stochastic": True, "seed": 7},
    {"codec": "bfloat16"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_bits_of_the_cpu(machine: Machine, settings: dict[str, Any]) -> None:
    assert machine.run(jobs.unlike_the_cpus, 2, "hook", settings) == [[]] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_bits_of_halves(machine: Machine, dtype: str) -> None:
    assert machine.run(jobs.unlike_the_cpus, 2, "hook", {"codec": "int4"}, dtype) == [[]] * 2


def test_three_ranks_by_a_python_hook(machine: Machine) -> None:
    assert machine.run(jobs.unlike_the_cpus, 3, "python hook", {"codec": "int8"}) == [[]] * 3


def test_gradients_that_are_views_of_buckets(machine: Machine) -> None:
    ddp = {"gradient_as_bucket_view": True, "static_graph": True}
    arguments = "hook", {"codec": "int8"}, "float32", ddp
    assert machine.run(jobs.unlike_the_cpus, 2, *arguments) == [[]] * 2


def test_on_another_gpu_than_the_current_one(machine: Machine) -> None:
    arguments = "hook", {"codec": "int8"}, "float32", None, True
    assert machine.run(jobs.unlike_the_cpus, 2, *arguments) == [[]] * 2


@pytest.mark.parametrize("way", ["hook", "python hook"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_beside_nccl(machine: Machine, codec: str, way: str) -> None:
    if machine.name != "four GPUs":
        pytest.skip("NCCL wants a GPU for each rank")
    arguments = way, {"codec": codec}
    assert machine.run(jobs.unlike_the_cpus, 2, *arguments, backend="nccl") == [[]] * 2


def test_auto_decides_alike(machine: Machine) -> None:
    found = machine.run(jobs.chosen, 2)
    assert found[0]["choices"] == found[1]["choices"]
    assert found[0]["choices"][0] == "measuring"
    assert found[0]["choices"][-1] in ("exact", "int8") and "ms" in found[0]["why"]
    assert all(each["off"] < 0.2 for each in found)


@pytest.mark.parametrize("scaled", [False, True])
def test_training(machine: Machine, scaled: bool) -> None:
    for found in machine.run(gpu_torch_jobs.train, 2, "int8", "mlp", 2, "float32", scaled):
        assert found["finite"] and found["apart"] < 2e-2 and found["kinds"] == 1


# ---- streams


class Probe:
    """A model whose gradients go by a hook that a test can look into."""

    def __init__(self, device: torch.device) -> None:
        import ringreduce

        self.model = DDP(nn.Linear(64, 64, bias=False).to(device), gradient_as_bucket_view=True)
        self.state = ringreduce.CompressionState(self.model, "bfloat16")
        self.around: Any = lambda compress, buffer: compress()

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants its own annotations
            return self.around(lambda: ringreduce.hooks.compressed(state, bucket), bucket.buffer())

        self.model.register_comm_hook(self.state, hook)
        for _ in range(3):  # the buckets are those of all later steps
            self.step()

    def step(self) -> torch.Tensor:
        self.model(torch.ones(1, 64, device=self.model.module.weight.device)).sum().backward()
        assert self.model.module.weight.grad is not None
        return self.model.module.weight.grad


def behind_the_stream(me: Rank) -> None:
    """What the hook is given is not there yet, and it does not wait for that."""
    device = use_gpu(me)
    probe = Probe(device)
    given = torch.full((64 * 64,), me.rank + 1.0, device=device)
    torch.cuda.synchronize()

    def around(compress: Any, buffer: torch.Tensor) -> Any:
        gate = Gate()
        buffer.copy_(given, non_blocking=True)
        future = compress()
        time.sleep(0.1)  # for a copy that has not waited
        assert not future.done()
        gate.open()
        return future

    probe.around = around
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert probe.step().cpu().flatten().tolist() == [1.5] * 64 * 64


def test_gradients_are_copied_behind_their_stream(machine: Machine) -> None:
    machine.run(behind_the_stream, 2)


def before_the_stream(me: Rank) -> None:
    """What uses the average is in its stream while the average is not on the GPU yet."""
    device = use_gpu(me)
    probe = Probe(device)
    given = torch.full((64 * 64,), me.rank + 1.0, device=device)
    seen = torch.empty(64, 64, device=device)
    # All that there are of the kind that copies are in.
    streams = [torch.cuda.Stream(priority=-5) for _ in range(32)]
    gates: list[Gate] = []
    torch.cuda.synchronize()

    def around(compress: Any, buffer: torch.Tensor) -> Any:
        buffer.copy_(given, non_blocking=True)
        if me.rank == 1:
            me.hear()
            return compress()
        future = compress()
        while not all(stream.query() for stream in [torch.cuda.current_stream(), *streams]):
            time.sleep(0.001)
        gates.extend(Gate(stream) for stream in streams)
        me.tell("held")
        return future

    probe.around = around
    grad = probe.step()
    seen.copy_(grad, non_blocking=True)
    if me.rank == 0:
        assert not torch.cuda.current_stream().query()
    for gate in gates:
        gate.open()
    torch.cuda.synchronize()
    assert seen.cpu().flatten().tolist() == [1.5] * 64 * 64


def test_averages_are_used_behind_their_copy(machine: Machine) -> None:
    call = machine.start(before_the_stream, 2)
    assert call.heard(0) == "held"
    call.tell(1)
    call.results()


def beside_a_capture(me: Rank) -> None:
    """The gradients are on their way while the thread that gave them captures something else."""
    device = use_gpu(me)
    probe = Probe(device)
    x, y = torch.zeros(8, device=device), torch.ones(8, device=device)
    graph = torch.cuda.CUDAGraph()

    def around(compress: Any, buffer: torch.Tensor) -> Any:
        gate = Gate()
        future = compress()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            x.copy_(y)
            gate.open()
            deadline = time.monotonic() + 30
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert future.done()
            graph.capture_end()
        return future

    probe.around = around
    probe.step()
    graph.replay()
    torch.cuda.synchronize()
    assert x.cpu().tolist() == [1.0] * 8


def test_gradients_leave_captures_alone(machine: Machine) -> None:
    machine.start(beside_a_capture, 2, fresh=True).results(60)


def captured(me: Rank) -> str:
    """What the hook says in a capture; the same step goes on without one."""
    probe = Probe(use_gpu(me))
    said = []

    def around(compress: Any, buffer: torch.Tensor) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                compress()
            except ValueError as error:
                said.append(str(error))
            graph.capture_end()
        return compress()

    probe.around = around
    probe.step()
    return said[0]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_it_cannot_be_captured(machine: Machine) -> None:
    for said in machine.run(captured, 2):
        assert "cannot be captured" in said


# ---- errors


def aborted(me: Rank) -> None:
    """One rank gives up while its GPU is not through with the gradients, and never will be."""
    probe = Probe(use_gpu(me))
    gates: list[Gate] = []

    def around(compress: Any, buffer: torch.Tensor) -> Any:
        if me.rank == 1:
            return compress()
        gates.append(Gate())
        future = compress()
        assert dist.group.WORLD is not None
        dist.group.WORLD._get_backend(buffer.device).abort()
        return future

    probe.around = around
    try:
        probe.step()
    finally:
        for gate in gates:
            gate.open()


def test_an_abort_ends_the_wait_for_the_gpu(machine: Machine) -> None:
    for outcome in machine.start(aborted, 2, fresh=True).outcomes():
        expect(outcome, "Aborted", [0])


def forever(me: Rank, way: str) -> None:
    device = use_gpu(me)
    model = DDP(nn.Linear(400, 400).to(device), bucket_cap_mb=0.1)
    jobs.attach(model, way, {"codec": "int8"})
    for step in range(10**9):
        model(torch.ones(2, 400, device=device)).square().mean().backward()
        if step == 2:
            me.tell("flowing")


@pytest.mark.parametrize("way", ["hook", "python hook"])
def test_a_killed_rank_is_named(machine: Machine, way: str) -> None:
    call = machine.start(forever, 3, way, fresh=True)
    call.hear_all()
    call.signal(1, signal.SIGKILL)
    outcomes = call.outcomes()
    assert isinstance(outcomes[1], Died)
    expect_all(outcomes, [1], "PeerLost", [1])
