"""Sharded training and its checkpoints: FSDP2, HSDP, FSDP1, ZeRO, torch.distributed.checkpoint.

The oracle is the same model trained whole on one rank's memory, or the same code over Gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from ranks import same_on_all
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

PRELOAD = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")
STEPS = 3


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 3)
    )


def batches(rank: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        yield torch.randn(4, 7, generator=draw)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for x in batches(rank):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained_whole(world_size: int) -> list[torch.Tensor]:
    """What data-parallel training must give: every step on all ranks' batches at once."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parts in zip(*(batches(r) for r in range(world_size)), strict=True):
        optimizer.zero_grad()
        model(torch.cat(parts)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def shard(mesh: DeviceMesh, **how: Any) -> nn.Sequential:
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    return model


def whole(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for p in model.parameters():
        assert isinstance(p, DTensor)
        found.append(p.full_tensor().detach())
    return found


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def mesh_of(me: Rank, shape: tuple[int, ...], backend: str) -> DeviceMesh:
    """A mesh over groups of the backend; Gloo's are made beside the default group."""
    names = ("replicas", "shards")[-len(shape) :]
    if backend == me.backend:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    return init_device_mesh(
        "cpu", shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
    )


def fsdp2(me: Rank, shape: tuple[int, ...], bits: bool) -> list[float]:
    found = []
    for backend in (me.backend, "gloo"):
        model = shard(mesh_of(me, shape, backend))
        losses = train(model, torch.optim.AdamW(model.parameters(), lr=0.01), me.rank)
        weights = whole(model)
        assert_close(weights, trained_whole(me.world_size))
        found.append((losses, weights))
    (ours, our_weights), (theirs, their_weights) = found
    assert_close(our_weights, their_weights)
    if bits:  # two addends have only one order
        assert ours == theirs
        assert all(torch.equal(a, b) for a, b in zip(our_weights, their_weights, strict=True))
    return [float(w.double().sum()) for w in our_weights]


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=["2", "3", "2x2"])
def test_fsdp2(pool: Pool, world: MakeWorld, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    call = pool.start(fsdp2, world(size, 20.0), shape, shape == (2,), remade=True)
    results = call.results()
    assert all(r == results[0] for r in results), "the ranks have different weights"


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16 sums", "no reshard", "our memory"])
@on_ranks(2, 20.0, remade=True)
def test_fsdp2_variants(me: Rank, name: str) -> None:
    mesh = mesh_of(me, (me.world_size,), me.backend)
    how: dict[str, Any] = {}
    if name == "bfloat16":
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    elif name == "bfloat16 sums":
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    elif name == "no reshard":
        how["reshard_after_forward"] = False
    model = shard(mesh, **how)
    if name == "our memory":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), me.rank)
    furthest = 0.0
    # AdamW moves a weight by at most lr a step, whichever way a gradient's sign goes.
    limit = 2 * STEPS * 0.011 if "bfloat16" in name else 1e-5
    for a, b in zip(whole(model), trained_whole(me.world_size), strict=True):
        furthest = max(furthest, float((a - b).abs().max()))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert isinstance(norm, DTensor)
    assert furthest < limit
    same_on_all((furthest, float(norm.full_tensor())))


@on_ranks(2, 20.0, remade=True)
def test_fsdp1(me: Rank) -> None:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), me.rank)
    with FullyShardedDataParallel.summon_full_params(model):
        weights = [p.detach().clone() for p in model.module.parameters()]
    expected = torch.cat([w.flatten() for w in trained_whole(me.world_size)])
    assert_close([torch.cat([w.flatten() for w in weights])], [expected])
    same_on_all([float(w.double().sum()) for w in weights])


def save(me: Rank, path: str) -> None:
    model = shard(mesh_of(me, (me.world_size,), me.backend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, me.rank)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    if me.rank == 0:
        torch.save(trained_whole(me.world_size), path + ".expected")


def load(me: Rank, path: str) -> list[float]:
    """Into a model sharded over another number of ranks, and into a whole one."""
    expected = torch.load(path + ".expected")
    model = shard(mesh_of(me, (me.world_size,), me.backend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_close(whole(model), expected)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(model, options=full)
    moments = get_optimizer_state_dict(model, optimizer, options=full)
    if me.rank == 0:
        assert_close(list(gathered.values()), expected)
        steps = {float(state["step"]) for state in moments["state"].values()}
        assert steps == {float(STEPS)}
    else:
        assert not gathered
    alone = make_model()
    dcp.load({"model": alone.state_dict()}, checkpoint_id=path)
    assert_close(list(alone.parameters()), expected)
    return [float(w.double().sum()) for w in whole(model)]


def test_checkpoint_over_another_number_of_ranks(
    pool: Pool, world: MakeWorld, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    pool.start(save, world(3, 20.0), path, remade=True).results()
    assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 3
    first, second = pool.start(load, world(2, 20.0), path, remade=True).results()
    assert first == second


@pytest.mark.parametrize("buckets", [False, True])
@on_ranks(2, 20.0)
def test_zero_redundancy_optimizer(me: Rank, buckets: bool) -> None:
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        lr=0.01,
        parameters_as_bucket_view=buckets,
    )
    train(model, optimizer, me.rank)
    assert_close(list(model.parameters()), trained_whole(me.world_size))
    held = sum(len(group["params"]) for group in optimizer.optim.param_groups)
    optimizer.consolidate_state_dict(to=0)
    if me.rank == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    same_on_all([float(p.detach().double().sum()) for p in model.parameters()])
    assert 0 < held < 6, "each rank keeps a part of the optimizer's state"
    parts = torch.tensor(held)
    dist.all_reduce(parts)
    assert parts == 6


@on_ranks(2, 20.0, remade=True)
def test_checkpoint_in_the_background(me: Rank, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    model = shard(mesh_of(me, (2,), me.backend))
    before = whole(model)
    # A group for the thread that saves: its calls come in no order with the training's.
    saving = dcp.async_save(
        {"model": get_model_state_dict(model)}, checkpoint_id=path, process_group=dist.new_group()
    )
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), me.rank)
    saving.result()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    restored = [w.full_tensor() for w in state["model"].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, restored, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="the backend's devices without a GPU")
@pytest.mark.parametrize("registered", [[], ["cpu", "cuda"]])
@on_ranks(2)
def test_gathered_shards_are_on_the_cpu(me: Rank, registered: list[str]) -> None:
    """ShardedTensor takes the last of the backend's devices for what it gathers."""
    if registered:  # as by a torch with CUDA; the next group is made on this machine
        dist.Backend.backend_capability["ringreduce"] = registered
        dist.new_group(backend="ringreduce")
    assert dist.Backend.backend_capability["ringreduce"] == ["cpu"]
    placements = [f"rank:{rank}/cpu" for rank in range(me.world_size)]
    sharded = sharded_tensor.empty(ChunkShardingSpec(dim=0, placements=placements), 6)
    sharded.local_tensor().fill_(me.rank)
    whole = torch.zeros(6) if me.rank == 0 else None
    sharded.gather(0, whole)
    assert whole is None or whole.tolist() == [0.0] * 3 + [1.0] * 3
