"""Functional collectives, torch.compile and DeviceMesh, beside Gloo or the same without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as autograd_collectives
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from ranks import same_on_all
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PRELOAD = ("torch.distributed.tensor.parallel",)
Tensors = list[torch.Tensor]


def same(ours: Tensors, theirs: Tensors) -> None:
    assert len(ours) == len(theirs)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), (k, a, b)


def functional(me: Rank, group: dist.ProcessGroup) -> Tensors:
    p, r = group.size(), group.rank()
    t = torch.arange(8.0 * p) + r
    found = [
        funcol.all_reduce(t, "sum", group),
        funcol.all_reduce(t, "max", group),
        funcol.all_gather_tensor(t, 0, group),
        funcol.all_gather_tensor(t.view(2, -1), 1, group),
        funcol.reduce_scatter_tensor(t, "sum", 0, group),
        funcol.broadcast(t, 1, group),
        funcol.all_to_all_single(t, None, None, group),
        funcol.all_to_all_single(t[:p], [1] * p, [1] * p, group),
        *funcol.all_reduce_coalesced([t, t[:3] * 2], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([t, t[:3].clone()], group),
        *funcol.reduce_scatter_tensor_coalesced([t, t * 2], "sum", [0, 0], group),
    ]
    if hasattr(funcol, "permute_tensor"):
        found.append(funcol.permute_tensor(t, [(k + 1) % p for k in range(p)], group))
    found = [funcol.wait_tensor(f) for f in found]
    # Chained, without a wait between, and with gradients.
    x = t.clone().requires_grad_()
    y = funcol.all_gather_tensor_autograd(x * 2, 0, group)
    z = funcol.reduce_scatter_tensor_autograd(y * y, "sum", 0, group)
    funcol.wait_tensor(z).sum().backward()
    assert x.grad is not None
    return [*found, z.detach(), x.grad]


def with_autograd(me: Rank, group: dist.ProcessGroup) -> Tensors:
    """torch.distributed.nn: collectives that a gradient goes through."""
    p, r = group.size(), group.rank()
    x = (torch.arange(4.0) + 1 + r).requires_grad_()
    nnf = autograd_collectives
    empty = [torch.empty(4) for _ in range(p)]
    parts = [
        nnf.all_reduce(x * x, group=group),
        nnf.broadcast(x * 2, 1, group=group),
        nnf.reduce(x * 3, 0, group=group),
        torch.cat(nnf.all_gather(x * x, group=group)),
        nnf.reduce_scatter(torch.empty(4), [x * (k + 1) for k in range(p)], group=group),
        torch.cat(nnf.all_to_all(empty, [x * x * k for k in range(p)], group=group)),
        nnf.all_to_all_single(torch.empty(4), x * 5, group=group),
    ]
    parts.append(torch.cat(nnf.gather(x, 0, group=group)))
    parts.append(nnf.scatter([x * k for k in range(p)], 0, group=group))
    total = sum((part * (r + 1 + k)).sum() for k, part in enumerate(parts) if k != 2)
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert x.grad is not None
    return [*(part.detach() for k, part in enumerate(parts) if k != 2), x.grad]


@pytest.mark.parametrize("which", ["functional", "autograd"])
@on_ranks(2, 20.0)
def test_like_gloo(me: Rank, which: str) -> None:
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert world is not None
    run = {"functional": functional, "autograd": with_autograd}[which]
    ours, theirs = run(me, world), run(me, gloo)
    assert len(ours) >= 8
    same(ours, theirs)


def compiled_step(me: Rank, backend: str) -> dict[str, Any]:
    """A training step with an all-reduce inside, as one graph, against the same step in eager."""
    group = dist.group.WORLD
    assert group is not None

    def step(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        grad = (2 * (x @ weight - 1)).T @ x
        total = funcol.all_reduce(grad.T / x.shape[0], "avg", group)
        return weight - 0.1 * total

    def inplace(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        grad = (2 * (x @ weight - 1)).T @ x
        total = (grad.T / x.shape[0]).contiguous()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        return weight - 0.1 * total

    torch._dynamo.reset()
    torch.manual_seed(3)
    start = torch.randn(6, 6)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(me.rank))
    found: dict[str, Any] = {}
    for name, f in (("functional", step), ("in place", inplace)):
        fast = torch.compile(f, backend=backend, fullgraph=True)
        eager, graph = start, start
        for _ in range(3):
            eager, graph = f(eager, x), fast(graph, x)
        torch.testing.assert_close(graph, eager)
        found[name] = graph
    assert torch.equal(found["functional"], found["in place"])
    return found


def test_compiled_steps(pool: Pool, world: MakeWorld, full: bool) -> None:
    for compiler in ("aot_eager", "inductor") if full else ("aot_eager",):
        first, second = pool.run(compiled_step, world(2, 120.0), compiler, deadline=240.0)
        for name in first:
            assert torch.equal(first[name], second[name]), f"{name}: the ranks' weights differ"


@on_ranks(2, 60.0, deadline=120.0)
def test_compiled_ddp(me: Rank) -> None:
    """torch.compile of a model in DDP: the graph is split at the buckets."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = torch.compile(nn.parallel.DistributedDataParallel(inner), backend="aot_eager")
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(2):
        for m, x in ((plain, torch.cat(data)), (model, data[me.rank])):
            loss = m(x).square().mean()
            loss.backward()
    for a, b in zip(plain.parameters(), inner.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    found = [float(p.grad.sum()) for p in inner.parameters() if p.grad is not None]
    assert len(found) == 4
    same_on_all(found)


def meshes(me: Rank) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert isinstance(mesh, DeviceMesh)
    rows, columns = mesh["rows"], mesh["columns"]
    a = torch.tensor([10.0**me.rank])
    dist.all_reduce(a, group=rows.get_group())
    b = torch.tensor([10.0**me.rank])
    dist.all_reduce(b, group=columns.get_group())
    flat = mesh._flatten("all")
    c = torch.tensor([10.0**me.rank])
    dist.all_reduce(c, group=flat.get_group())
    kinds = {dist.get_backend(m.get_group()) for m in (rows, columns, flat)}
    return {
        "at": mesh.get_coordinate(),
        "sums": (float(a), float(b), float(c)),
        "kinds": kinds,
    }


def test_device_mesh(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(meshes, world(4, 20.0), remade=True)
    for rank, found in enumerate(call.results()):
        row, column = divmod(rank, 2)
        assert list(found["at"]) == [row, column]
        assert found["kinds"] == {"ringreduce"}
        across = 10.0**column + 10.0 ** (column + 2)
        along = 10.0 ** (2 * row) + 10.0 ** (2 * row + 1)
        assert found["sums"] == (across, along, 1111.0)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(timeout=20.0, remade=True)
def test_dtensor(me: Rank) -> None:
    """Every way from one placement to another gives back the tensor that was distributed."""
    mesh = init_device_mesh("cpu", (me.world_size,))
    whole = torch.arange(35.0).view(7, 5)  # not a multiple of the world size
    placements = [Replicate(), Shard(0), Shard(1)]
    for first in placements:
        for second in placements:
            d = distribute_tensor(whole, mesh, [first]).redistribute(mesh, [second])
            assert torch.equal(d.full_tensor(), whole), (first, second)
    ones = DTensor.from_local(torch.full((7, 5), float(me.rank)), mesh, [Partial()])
    total = me.world_size * (me.world_size - 1) / 2
    for second in placements:
        assert bool((ones.redistribute(mesh, [second]).full_tensor() == total).all())
    x = distribute_tensor(whole, mesh, [Shard(0)])
    y = distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    torch.testing.assert_close((x @ y).full_tensor(), whole @ whole.T)


@on_ranks(2, 20.0, remade=True)
def test_tensor_parallel(me: Rank) -> None:
    """Two layers split over the ranks, against the same layers whole."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    torch.manual_seed(1)
    split = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(3, 6)
    expected, got = whole(x), split(x)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        assert isinstance(b.grad, DTensor)
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    same_on_all(float(got.sum()))


@on_ranks(2)
def test_operator(me: Rank) -> None:
    """torch.ops.ringreduce.all_reduce_ is dist.all_reduce, also in a compiled program."""
    part = dist.new_group([1, 0], backend="ringreduce")
    assert part is not None

    def step(t: torch.Tensor, group: str) -> torch.Tensor:
        doubled = t * 2
        torch.ops.ringreduce.all_reduce_(doubled, "avg", group)
        return doubled + 1

    for group in (dist.group.WORLD, part):
        assert group is not None
        for op, named in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            t = torch.arange(100.0) * (me.rank + 1)
            expected = t.clone()
            dist.all_reduce(expected, named, group=group)
            torch.ops.ringreduce.all_reduce_(t, op, group.group_name)
            assert torch.equal(t, expected)
        t = torch.full((1000,), float(me.rank))
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        assert compiled(t, group.group_name).eq(2).all()
        assert t.eq(me.rank).all()
    with torch.profiler.profile() as seen:
        torch.ops.ringreduce.all_reduce_(torch.ones(3), "sum", part.group_name)
        dist.all_reduce(torch.ones(3))
    assert sum(event.name == "ringreduce:all_reduce" for event in seen.events()) == 2

    # Behind operations that are queued, it is queued too; each call is counted once.
    queued = [torch.ones(500_000) for _ in range(3)]
    backend = part._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    works = [dist.all_reduce(q, group=part, async_op=True) for q in queued]
    t = torch.ones(3)
    torch.ops.ringreduce.all_reduce_(t, "sum", part.group_name)
    torch.ops.ringreduce.all_reduce_(t, "sum", part.group_name)
    for work in works:
        work.wait()
    assert t.eq(4).all() and all(q.eq(2).all() for q in queued)
    assert backend._get_sequence_number_for_group() == before + 5

    saved = torch.ones(3, requires_grad=True) * 1
    square = (saved * saved).sum()
    torch.ops.ringreduce.all_reduce_(saved, "sum", part.group_name)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    wrapped = dist.new_group(backend="ringreduce")
    dist.set_debug_level(dist.DebugLevel.OFF)
    t = torch.ones(3)
    torch.ops.ringreduce.all_reduce_(t, "sum", wrapped.group_name)
    assert t.eq(2).all()
    with pytest.raises(ValueError, match="knows sum"):
        torch.ops.ringreduce.all_reduce_(torch.ones(3), "mean", part.group_name)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(RuntimeError, match="needs a ringreduce group, not one of gloo"):
        torch.ops.ringreduce.all_reduce_(torch.ones(3), "sum", gloo.group_name)
