"""What stands around a training loop: uneven inputs, torch's own hooks, DDP's buckets in our
memory, TORCH_DISTRIBUTED_DEBUG=DETAIL and the profiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from test_backend_methods import everything
from test_objects import objects
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def make_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 5))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def uneven(me: Rank, group: dist.ProcessGroup) -> torch.Tensor:
    """Rank 0 has fewer batches; Join shadows what it no longer calls."""
    model = DistributedDataParallel(make_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(me.rank)
    with Join([model]):
        for _ in range(2 + 3 * me.rank):
            optimizer.zero_grad()
            model(torch.randn(3, 6, generator=draw)).square().mean().backward()
            optimizer.step()
    return weights(model)


@on_ranks(2, 20.0)
def test_uneven_inputs(me: Rank) -> None:
    assert dist.group.WORLD is not None
    ours, theirs = uneven(me, dist.group.WORLD), uneven(me, dist.new_group(backend="gloo"))
    assert torch.equal(ours, theirs)


def bf16_by_another_name(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """DDP refuses the hook itself on CPUs, by its name."""
    return default_hooks.bf16_compress_hook(group, bucket)


HOOKS = (
    "allreduce",
    "fp16",
    "bf16",
    "powersgd",
    "c++ allreduce",
    "c++ fp16",
)


def with_hook(me: Rank, name: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Training with one of torch's own communication hooks, which call the backend themselves."""
    model = DistributedDataParallel(make_model(), process_group=group)
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name.startswith("c++"):
        kinds = dist.BuiltinCommHookType
        model._register_builtin_comm_hook(
            kinds.ALLREDUCE if "allreduce" in name else kinds.FP16_COMPRESS
        )
    else:
        hooks = {
            "allreduce": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": bf16_by_another_name,
        }
        model.register_comm_hook(group, hooks[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(me.rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 6, generator=draw)).square().mean().backward()
        optimizer.step()
    return weights(model)


@on_ranks(2, 20.0)
def test_torchs_own_hooks(me: Rank) -> None:
    """Two addends have one order and one rounding, so the bits are Gloo's."""
    assert dist.group.WORLD is not None
    gloo = dist.new_group(backend="gloo")
    for name in HOOKS:
        ours = with_hook(me, name, dist.group.WORLD)
        assert torch.equal(ours, with_hook(me, name, gloo)), name


def is_shared(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(place, 16) for place in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:ringreduce" in line
    return False


@on_ranks(2, 20.0, fresh=True)
def test_ddp_buckets_in_our_memory(me: Rank) -> None:
    """DDP's buckets lie in memory that the ranks share, unless the user has switched that off."""
    found = []
    for setting in (None, "1"):
        if setting is not None:
            os.environ["DDP_DISABLE_COMM_MEM"] = setting  # read when DDP makes its buckets
        model = DistributedDataParallel(
            make_model(), gradient_as_bucket_view=True, bucket_cap_mb=0.004
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + me.rank)
            model(torch.randn(3, 6, generator=draw)).square().mean().backward()
            optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        kept = [g.clone() for g in grads]
        found.append((weights(model), grads, kept))
    dist.destroy_process_group()  # the buckets outlive their group
    for got, grads, kept in found:
        assert torch.equal(got, found[0][0])
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
    assert [all(map(is_shared, grads)) for _, grads, _ in found] == [True, False]
    for _, (grad, *_), _ in found:  # as a hook does that pads its bucket
        before = grad.clone()
        grad.resize_(grad.numel() + 70_000)
        assert torch.equal(grad[: before.numel()], before.flatten()) and not is_shared(grad)


class Spectral(nn.Module):
    """With complex weights, which DDP averages as real numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Parameter(torch.randn(96, 96, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x) @ self.mix).abs() * self.scale


@on_ranks(2, 20.0)
def test_complex_weights(me: Rank) -> None:
    found = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        for as_view in (False, True):
            model = DistributedDataParallel(
                Spectral(), process_group=group, gradient_as_bucket_view=as_view
            )
            for step in range(3):  # DDP makes its buckets anew after the first
                draw = torch.Generator().manual_seed(10 * step + me.rank)
                model(torch.randn(3, 96, generator=draw)).square().mean().backward()
            found.append([p.grad for p in model.parameters()])
    for grads in found:
        assert all(torch.equal(a, b) for a, b in zip(grads, found[-1], strict=True))


def the_switch() -> bytes | None:
    """What DDP reads: os.environ does not show what C code has set."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found: bytes | None = getenv(b"DDP_DISABLE_COMM_MEM")
    return found


@on_ranks(2, 20.0, fresh=True)
def test_the_switch_of_buckets_goes_with_the_group(me: Rank) -> None:
    """DDP on another backend then takes memory as it ever did."""
    part = dist.new_group()
    assert the_switch() == b"0"
    dist.destroy_process_group(part)
    assert the_switch() == b"0"
    dist.destroy_process_group()
    assert the_switch() is None


def without_descriptors(me: Rank) -> None:
    assert dist.group.WORLD is not None
    gloos = with_hook(me, "allreduce", dist.new_group(backend="gloo"))  # imports all it needs, too
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    try:
        assert torch.equal(with_hook(me, "allreduce", dist.group.WORLD), gloos)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def test_buckets_are_private_where_no_descriptors_are_left(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(without_descriptors, world(2), ranks=2, fresh=True)
    call.results()
    for rank in range(2):
        told = f"rank {rank} cannot share the memory of a DDP bucket"
        assert call.log(rank).count(told) == 1


def in_detail(me: Rank, key: str) -> list[str]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper between torch and the backend."""
    me.world_size = 2
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        me.init(key, timeout=20.0)
        group = dist.group.WORLD
        assert group is not None
        wrapper = group._get_backend(torch.device("cpu"))
        assert type(wrapper).__name__ == "_ProcessGroupWrapper"
        plain = dist.new_group(backend="gloo")
        for k, (a, b) in enumerate(zip(everything(me, group), everything(me, plain), strict=True)):
            assert torch.equal(a, b), (k, a, b)
        assert repr(objects(me, group)) == repr(objects(me, plain))
        group.monitored_barrier()
        model = DistributedDataParallel(make_model())
        model(torch.ones(2, 6)).sum().backward()
        told: list[str] = []
        # The wrapper compares shapes before our backend sees the call.
        try:
            dist.all_reduce(torch.ones(3 + me.rank))
        except RuntimeError as error:
            told.append(str(error))
        dist.destroy_process_group()
        return told
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_debug_detail_passes_every_call(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(in_detail, world(0), pool.name("detail"), ranks=2, fresh=True)
    for told in call.results():
        assert len(told) == 1
        assert "mismatch" in told[0].lower()


def rooted_and_moving(group: dist.ProcessGroup) -> None:
    """Calls that Gloo has of its own; it performs a reduce-scatter by other calls."""
    p, root = group.size(), group.rank() == 0
    t = torch.ones(4, 3)
    many = [torch.ones(4, 3) for _ in range(p)]
    dist.broadcast(t, 0, group=group)
    dist.reduce(t, 0, group=group)
    dist.all_gather(many, t, group=group)
    dist.all_gather_into_tensor(torch.empty(4 * p, 3), t, group=group)
    dist.gather(t, many if root else None, 0, group=group)
    dist.scatter(t, many if root else None, 0, group=group)
    dist.all_to_all_single(torch.empty(2 * p), torch.ones(2 * p), group=group)
    group.allreduce_coalesced([t, torch.ones(5)]).wait()
    dist.barrier(group=group)


def profiled(me: Rank, path: str) -> tuple[dict[str, int], set[str]]:
    """The trace of a step: what was called, on which shapes, from start to end."""
    t, big = torch.ones(4, 3), torch.ones(1_000_000)
    activities = [torch.profiler.ProfilerActivity.CPU]
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert world is not None
    with torch.profiler.profile(activities=activities, record_shapes=True) as run:
        rooted_and_moving(world)
        rooted_and_moving(gloo)
    run.export_chrome_trace(f"{path}.{me.rank}")
    calls: dict[str, list[Any]] = {me.backend: [], "gloo": []}
    trace = json.loads(Path(f"{path}.{me.rank}").read_text())["traceEvents"]
    for event in sorted(trace, key=lambda event: event.get("ts", 0)):
        library, _, call = str(event.get("name")).partition(":")
        if library in calls and event["ph"] == "X":
            given = event["args"]
            calls[library].append((call, given.get("Input Dims"), given.get("Input type")))
    assert len(calls["gloo"]) >= 9
    assert calls[me.backend] == calls["gloo"]
    with torch.profiler.profile(activities=activities, record_shapes=True) as run:
        dist.all_reduce(t)
        dist.all_reduce(big, async_op=True).wait()
        dist.all_reduce(t)
        part = torch.empty(500_000)
        dist.reduce_scatter_tensor(part, big)
        if me.rank == 0:
            dist.send(t, 1)
        else:
            dist.recv(t, 0)
        dist.barrier()
    run.export_chrome_trace(f"{path}.{me.rank}")
    with open(f"{path}.{me.rank}") as f:
        trace = json.load(f)["traceEvents"]
    counts: dict[str, int] = {}
    for event in trace:
        name = str(event.get("name"))
        if name.startswith(me.backend + ":"):
            counts[name] = counts.get(name, 0) + 1
            assert event["dur"] >= 0
    shapes = {str(e.input_shapes) for e in run.events() if e.name == f"{me.backend}:all_reduce"}
    return counts, shapes


def test_profiler_trace(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    results = pool.run(profiled, world(2, 20.0), str(tmp_path / "trace"))
    for rank, (counts, shapes) in enumerate(results):
        assert counts["ringreduce:all_reduce"] == 3
        assert shapes == {"[[4, 3]]", "[[1000000]]"}
        assert counts[f"ringreduce:{'recv' if rank else 'send'}"] == 1
