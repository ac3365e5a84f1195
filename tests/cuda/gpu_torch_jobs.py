"""What the ranks of gpu_torch_test.py do: every call on the GPU beside the CPU, and training.

GPU_TEST_DEVICE=cpu runs what it can on the CPU, as a check of these jobs themselves.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_calls import CALLS, MORE, Site
from ranks import Rank
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

import _ddp_models

DEVICE = os.environ.get("GPU_TEST_DEVICE", "cuda")


def device_of(rank: int) -> torch.device:
    """This rank's device, made the current one."""
    if DEVICE == "cpu":
        return torch.device("cpu")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def synchronize() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


# --- Every call -----------------------------------------------------------------------------------


def unlike_the_cpu(me: Rank, dtype: str, unit: int) -> list[str]:
    """The calls whose results on the GPU are not those on the CPU."""
    wrong = []
    for call in [*CALLS, *MORE]:
        on_cpu, on_gpu = (
            call(Site(me.rank, me.world_size, device, False, getattr(torch, dtype), unit))
            for device in (torch.device("cpu"), device_of(me.rank))
        )
        if not all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True)):
            wrong.append(call.__name__)
    told: list[Any] = [None] * me.world_size
    dist.all_gather_object(told, {"rank": me.rank})
    assert told == [{"rank": rank} for rank in range(me.world_size)]
    return wrong


def odd_bits(me: Rank, dtype: str, count: int) -> list[str]:
    """Sums whose roundings tell the order of addition: bit for bit as the CPU's, or what is not."""
    generator = torch.Generator().manual_seed(me.rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    device, wrong = device_of(me.rank), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        wanted, found = values.clone(), values.to(device)
        dist.all_reduce(wanted, op)
        dist.all_reduce(found, op)
        if not torch.equal(wanted, found.cpu()):
            wrong.append(f"all_reduce {op}")
        share = count // me.world_size
        part, on_gpu = values.new_empty(share), found.new_empty(share)
        whole = values[: share * me.world_size].contiguous()
        dist.reduce_scatter_tensor(part, whole, op)
        dist.reduce_scatter_tensor(on_gpu, whole.to(device), op)
        if not torch.equal(part, on_gpu.cpu()):
            wrong.append(f"reduce_scatter {op}")
    return wrong


# --- Training -------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Some tensors of some thousand elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(24, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(5)
    if name == "mlp":
        return Mlp()
    workload = _ddp_models.WORKLOADS[name]
    return workload.make(workload.tiny)


def make_batch(name: str, shard: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + shard)
    if name == "mlp":
        x = torch.randn(8, 24, generator=generator)
        return x.to(device), torch.randint(7, (8,), generator=generator).to(device)
    workload = _ddp_models.WORKLOADS[name]
    x, y = workload.batch(workload.tiny, generator)
    return x.to(device), y.to(device)


def attach(model: DDP, way: str) -> None:
    """`way`: "backend", "hook", "python hook" or a codec."""
    import ringreduce

    if way == "hook":
        ringreduce.register_comm_hook(model)
    elif way == "python hook":
        model.register_comm_hook(None, ringreduce.hooks.allreduce_hook)
    elif way != "backend":
        ringreduce.register_comm_hook(model, codec=way)


def train(
    me: Rank, way: str, name: str, accumulate: int = 1, dtype: str = "float32", scaled: bool = False
) -> dict[str, float]:
    """Trains by DDP, and beside it a model that adds up all ranks' shards by itself.

    Returns the greatest difference of the two over the greatest weight, and how many different
    weights the ranks have ("kinds", 1 if all have the same bits).  `scaled`: float16 by autocast
    and GradScaler.
    """
    device = device_of(me.rank)
    alone = make_model(name).to(device, getattr(torch, dtype))
    model = DDP(copy.deepcopy(alone), bucket_cap_mb=0.2)
    attach(model, way)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, alone)]
    scalers = [torch.amp.GradScaler(DEVICE, enabled=scaled, init_scale=256.0) for _ in range(2)]

    def loss_of(which: nn.Module, shard: int) -> torch.Tensor:
        inputs, targets = make_batch(name, shard, device)
        if inputs.is_floating_point():
            inputs = inputs.to(getattr(torch, dtype))
        with torch.autocast(DEVICE, torch.float16, enabled=scaled):
            return _ddp_models.loss_of(which, inputs, targets) / accumulate

    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(accumulate):
            first = (step * accumulate + part) * me.world_size
            quiet = model.no_sync() if part + 1 < accumulate else contextlib.nullcontext()
            with quiet:
                scalers[0].scale(loss_of(model, first + me.rank)).backward()
            for shard in range(first, first + me.world_size):
                scalers[1].scale(loss_of(alone, shard) / me.world_size).backward()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
    weights = [torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (
        model.module, alone
    )]  # fmt: skip
    bits = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    seen: list[Any] = [None] * me.world_size
    dist.all_gather_object(seen, bits.view(torch.uint8).numpy().tobytes())
    apart = (weights[0] - weights[1]).abs().max() / weights[1].abs().max()
    return {"apart": float(apart), "kinds": len(set(seen)), "finite": bool(apart.isfinite())}


def memory_beside_buckets(me: Rank) -> int:
    """Bytes that stay allocated besides parameters and buckets after some steps of DDP's hook.

    DDP makes other buckets after the first step, and drops those of it.
    """
    device = device_of(me.rank)
    torch.manual_seed(5)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(3)]
    model = DDP(nn.Sequential(*layers).to(device), bucket_cap_mb=5, gradient_as_bucket_view=True)
    attach(model, "hook")
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        model(torch.ones(2, 1024, device=device)).sum().backward()
    synchronize()
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    return torch.cuda.memory_allocated() - 2 * own


def train_uneven(me: Rank) -> int:
    """DDP's hook within torch's Join, after steps without: rank r has r + 1 batches.

    Returns how many different weights the ranks have.
    """
    device = device_of(me.rank)
    torch.manual_seed(5)
    model = DDP(nn.Linear(512, 512, bias=False).to(device), gradient_as_bucket_view=True)
    attach(model, "hook")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def steps(count: int) -> None:
        for step in range(count):
            optimizer.zero_grad()
            model(torch.full((2, 512), step + me.rank + 1.0, device=device)).sum().backward()
            optimizer.step()

    steps(3)
    with Join([model]):
        steps(me.rank + 1)
    bits = next(model.parameters()).detach().cpu().numpy().tobytes()
    seen: list[Any] = [None] * me.world_size
    dist.all_gather_object(seen, bits)
    return len(set(seen))


def train_sharded(me: Rank) -> float:
    """FSDP2 beside one process: the greatest difference of their losses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = device_of(me.rank)
    alone = make_model("gpt2").to(device)
    model = copy.deepcopy(alone)
    mesh = init_device_mesh(DEVICE, (me.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, alone)]
    apart = 0.0
    for step in range(3):
        shards = [step * me.world_size + rank for rank in range(me.world_size)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        own = [_ddp_models.loss_of(alone, *make_batch("gpt2", s, device)) for s in shards]
        (sum(own) / len(own)).backward()
        loss = _ddp_models.loss_of(model, *make_batch("gpt2", shards[me.rank], device))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        apart = max(apart, abs(float(loss.detach()) - float(own[me.rank].detach())))
    return apart


# --- Streams, graphs, groups ----------------------------------------------------------------------


def replay(me: Rank, times: int) -> list[int]:
    """Replays of a captured all-reduce after which the result was wrong."""
    device = device_of(me.rank)
    source, t = torch.zeros(5000, device=device), torch.zeros(5000, device=device)
    dist.all_reduce(t)  # the plane is there before anything is captured
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        t.copy_(source)
        dist.all_reduce(t)
    wrong = []
    for number in range(times):
        source.fill_(number + me.rank)
        graph.replay()
        if number % 50 == 0 or number == times - 1:
            wanted = me.world_size * number + sum(range(me.world_size))
            if not bool((t == wanted).all()):
                wrong.append(number)
    dist.all_reduce(t.fill_(1))  # and calls outside of graphs go on
    if not bool((t == me.world_size).all()):
        wrong.append(times)
    return wrong


def two_streams(me: Rank, rounds: int) -> list[str]:
    """All-reduces of two groups in two streams, in turns; what was wrong."""
    device = device_of(me.rank)
    groups = [dist.new_group(), dist.new_group()]
    streams = [torch.cuda.Stream(device) for _ in groups] if DEVICE != "cpu" else [None, None]
    wrong, works = [], []
    tensors = [torch.zeros(200_000, device=device) for _ in groups]
    synchronize()
    for turn in range(rounds):
        works = []
        for number, (group, stream, t) in enumerate(zip(groups, streams, tensors, strict=True)):
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                t.fill_(10 * number + turn + me.rank)
                works.append(dist.all_reduce(t, group=group, async_op=True))
        for number, (work, stream, t) in enumerate(zip(works, streams, tensors, strict=True)):
            wanted = me.world_size * (10 * number + turn) + sum(range(me.world_size))
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                work.wait()
                if not bool((t == wanted).all()):
                    wrong.append(f"group {number}, turn {turn}")
    return wrong


def wait_in_a_stream(me: Rank) -> dict[str, bool]:
    """Whether wait() left the host free while the stream was still busy, and the order held."""
    device = device_of(me.rank)
    t = torch.ones(1000, device=device)
    dist.all_reduce(t)
    synchronize()
    t.fill_(me.rank + 1)
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    work = dist.all_reduce(t, async_op=True)
    before = work.is_completed()
    work.wait()
    busy = not torch.cuda.current_stream().query()
    t.mul_(2)  # in the stream, behind the sum
    synchronize()
    total = me.world_size * (me.world_size + 1) // 2
    return {
        "busy": busy,
        "completed before": before,
        "completed after": work.is_completed(),
        "right": bool((t == 2 * total).all()),
    }


def expandable(me: Rank) -> dict[str, bool]:
    """All-reduces and a hook on memory of expandable segments, asked for before all else."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    device = device_of(me.rank)
    t = torch.full((8 << 20,), float(me.rank), device=device)
    used = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    dist.all_reduce(t)
    right = bool((t == sum(range(me.world_size))).all())
    trained = train(me, "hook", "mlp")
    return {"used": used, "right": right, "trained": trained["apart"] < 1e-4}


def in_expandable_segments(me: Rank, ranks: list[int], mebibytes: int = 45) -> list[bool]:
    """Whether tensors in torch's expandable segments, which these ranks have, were used
    where they are: at first, and when the memory was given back and taken again."""
    from ringreduce._C import is_mapped
    from ringreduce.core.backend import backend_of, ringreduce_group

    device = device_of(me.rank)
    backend = backend_of(ringreduce_group(dist.group.WORLD))
    kind = "True" if me.rank in ranks else "False"
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{kind}")
    count = (mebibytes << 18) // me.world_size * me.world_size  # a piece has 20 MiB
    ramp = torch.arange(count).remainder(251).float()
    wanted_at_all = me.rank in ranks and os.environ.get("RINGREDUCE_CUDA_MAP") == "vmm"
    found = []
    dist.all_reduce(torch.ones(1, device=device))
    for turn in range(2):
        given = ramp + 3 * me.rank + turn
        total = me.world_size * (ramp + turn) + 3 * sum(range(me.world_size))
        data, whole = given.to(device), torch.empty(count, device=device)
        part = torch.empty(count // me.world_size, device=device)

        def check(what: str, data: torch.Tensor = data, total: torch.Tensor = total) -> None:
            dist.all_reduce(data)
            assert torch.equal(data.cpu(), total), what

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(data)
        check("before it is mapped")
        end = time.monotonic() + 20
        while wanted_at_all and time.monotonic() < end:
            if is_mapped(backend, data) and is_mapped(backend, whole):
                break
            time.sleep(0.01)
        found.append(is_mapped(backend, data) and is_mapped(backend, whole))
        data.copy_(given)
        check("where it is")
        data.copy_(given)
        graph.replay()
        assert torch.equal(data.cpu(), total), "in a graph"
        data.copy_(given)
        dist.reduce_scatter_tensor(part, data)
        dist.all_gather_into_tensor(whole, part)
        assert torch.equal(whole.cpu(), total), "in parts"
        del data, whole, part, graph, check
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return found


def on_both_devices(me: Rank) -> list[float]:
    """An all-reduce on the CPU and one on the GPU, in one group."""
    results = []
    for device in (torch.device("cpu"), device_of(me.rank)):
        t = torch.full((1000,), float(me.rank + 1), device=device)
        dist.all_reduce(t)
        results += [float(t.min()), float(t.max())]
    return results


def with_device_id(me: Rank, name: str, size: int) -> float:
    """A group that is told its device, and a group from it."""
    device = device_of(me.rank)
    dist.init_process_group(
        me.backend, store=me.store(name), rank=me.rank, world_size=size, device_id=device
    )
    group = dist.new_group()
    t = torch.full((1000,), float(me.rank + 1), device=device)
    dist.all_reduce(t)
    dist.all_reduce(t, group=group)
    value = float(t[0])
    dist.destroy_process_group()
    return value


# --- The end of a rank ----------------------------------------------------------------------------


def outlive(me: Rank, count: int, again: str) -> dict[str, Any]:
    """All-reduces until a rank dies; then the others make a group without it.

    Returns what was raised, when, and a sum over the new group.
    """
    import time

    device = device_of(me.rank)
    t = torch.ones(count, device=device)
    said: dict[str, Any] = {}
    try:
        for number in range(10**9):
            dist.all_reduce(t, dist.ReduceOp.MAX)
            synchronize()
            if number == 3:
                me.tell("flowing")
    except dist.DistBackendError as error:
        said = {"kind": type(error).__name__, "message": str(error), "when": time.monotonic()}
    dist.destroy_process_group()
    me.tell(said)
    left = sorted(me.hear())
    me.init(again, rank=left.index(me.rank), size=len(left))
    t = torch.full((count,), float(me.rank + 1), device=device)
    dist.all_reduce(t)
    return {**said, "sum": float(t.max())}
