"""DDP over ringreduce, by backend and by hook: the same model, bit for bit, as over gloo."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.ringreduce
WAYS = ("backend", "hook", "hook on gloo", "python hook", "python hook on gloo")


class Net(nn.Module):
    """Some branches of it are not used in every step; `mixed`: half of it is bfloat16."""

    def __init__(self, mixed: bool = False, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)  # the same on every rank
        self.first = nn.Linear(24, 300)
        self.middle = nn.Linear(300, 300, dtype=torch.bfloat16 if mixed else torch.float32)
        self.branch = nn.Linear(300, 300)
        self.last = nn.Linear(300, 7)
        self.skips, self.step = skips, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(x.to(self.middle.weight.dtype))).to(x.dtype)
        if not self.skips or (self.step + dist.get_rank()) % 2:
            x = x + self.branch(x)
        return self.last(x)


# Name: options of DDP, of Net, and of the loop.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "many buckets": ({"bucket_cap_mb": 0.1}, {}, {}),
    "gradient_as_bucket_view": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.2}, {}, {}),
    "find_unused_parameters": ({"find_unused_parameters": True}, {"skips": True}, {}),
    "static_graph": ({"static_graph": True, "bucket_cap_mb": 0.2}, {}, {}),
    "no_sync": ({}, {}, {"accumulate": 3}),
    "no_sync in views": ({"gradient_as_bucket_view": True}, {}, {"accumulate": 2}),
    "mixed dtypes": ({"bucket_cap_mb": 0.2}, {"mixed": True}, {}),
}


def attach(model: DDP, way: str) -> None:
    import ringreduce

    if way.startswith("hook"):
        ringreduce.register_comm_hook(model)
    elif way.startswith("python hook"):
        model.register_comm_hook(None, ringreduce.hooks.allreduce_hook)


def train(me: Rank, way: str, case: str, steps: int = 5) -> list[str]:
    """Trains; returns a digest of loss, gradients and parameters for every step."""
    ddp, net, loop = CASES[case]
    model = DDP(Net(**net), **ddp)
    attach(model, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + me.rank)
    accumulate, seen = loop.get("accumulate", 1), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses = []
        for k in range(accumulate):
            x, y = torch.randn(8, 24, generator=data), torch.randn(8, 7, generator=data)
            quiet = model.no_sync() if k + 1 < accumulate else contextlib.nullcontext()
            with quiet:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
            losses.append(loss.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        mean = torch.stack(losses).mean().reshape(1)
        seen.append(oracle.digest(*grads, *model.parameters()) + f" loss {float(mean):.9g}")
    return seen


def world_for(world: MakeWorld, way: str, size: int = 2) -> World:
    return World(size, "gloo") if way == "gloo" or way.endswith("on gloo") else world(size)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_bit_for_bit_as_with_gloo(pool: Pool, world: MakeWorld, case: str) -> None:
    """Two addends have one sum, whoever adds them, and halving is exact."""
    runs = {way: pool.run(train, world_for(world, way), way, case) for way in ("gloo", *WAYS)}
    stock = runs.pop("gloo")
    for way, by_rank in runs.items():
        for rank, steps in enumerate(by_rank):
            for step, (ours, theirs) in enumerate(zip(steps, stock[rank], strict=True)):
                assert ours == theirs, f"{case}, {way}: rank {rank} differs at step {step}"
    first, second = ([step.split(" ")[0] for step in steps] for steps in stock)
    assert first == second, "the ranks' gradients and parameters must agree"
    assert len(set(first)) == len(first), "nothing was learned"


def differences(me: Rank, way: str) -> float:
    """One step's gradients against the mean of all ranks' own, computed in float64."""
    torch.manual_seed(me.rank)
    every = [torch.randn(8, 24, generator=torch.Generator().manual_seed(r)) for r in range(8)]
    wanted: list[torch.Tensor] = []
    for r in range(me.world_size):
        local = Net().double()
        local(every[r].double()).square().mean().backward()
        for i, p in enumerate(local.parameters()):
            assert p.grad is not None
            if r == 0:
                wanted.append(torch.zeros_like(p))
            wanted[i] += p.grad / me.world_size
    model = DDP(Net())
    attach(model, way)
    model(every[me.rank]).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return max(
        float((g.double() - w).abs().max() / (w.abs().max() + 1e-9))
        for g, w in zip(grads, wanted, strict=True)
        if g is not None
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 3])
def test_gradients_are_averaged(pool: Pool, world: MakeWorld, size: int, way: str) -> None:
    assert max(pool.run(differences, world_for(world, way, size), way)) < 1e-5


class Tables(nn.Module):
    """Sparse gradients beside dense ones; ranks use other rows, and as many only by chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(50, 40, sparse=True)
        self.few = nn.EmbeddingBag(7, 40, sparse=True, mode="sum", dtype=torch.float64)
        self.last = nn.Linear(40, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(rows).sum(0) + self.few(rows.view(1, -1) % 7)[0].float())


def sparse_gradients(me: Rank, way: str) -> list[str]:
    import ringreduce

    model = DDP(Tables())
    if way.startswith("coded"):
        if "python" in way:
            state = ringreduce.CompressionState(model, codec="int8")
            model.register_comm_hook(state, ringreduce.hooks.compressed)
        else:
            ringreduce.register_comm_hook(model, codec="int8")
    else:
        attach(model, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw, seen = torch.Generator().manual_seed(me.rank), []
    for _ in range(4):
        optimizer.zero_grad()
        rows = torch.randint(0, 50, (3 + me.rank,), generator=draw)
        model(rows).square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert [grad.is_sparse for grad in grads] == [True, True, False, False]
        optimizer.step()
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        seen.append(oracle.digest(*dense, *(p.detach() for p in model.parameters())))
    return seen


def test_sparse_gradients_are_averaged(pool: Pool, world: MakeWorld) -> None:
    stock = pool.run(sparse_gradients, World(2, "gloo"), "gloo")
    for way in (*WAYS, "coded hook", "coded python hook", "coded hook on gloo"):
        # Two dimensions and few elements: what is dense travels exactly with a codec too.
        assert pool.run(sparse_gradients, world_for(world, way), way) == stock, way
    three = pool.run(sparse_gradients, world(3), "hook")
    assert three[0] == three[1] == three[2]


def hook_with_own_group(me: Rank) -> bool:
    """The Python hook's state may be a ringreduce group."""
    import ringreduce

    group = dist.new_group(backend="ringreduce")
    model = DDP(nn.Linear(4, 2, bias=False))
    model.register_comm_hook(group, ringreduce.hooks.allreduce_hook)
    model(torch.full((1, 4), float(me.rank))).sum().backward()
    return bool((model.module.weight.grad == 0.5).all())


def test_the_old_name_of_the_hook_says_so_once() -> None:
    from ringreduce import hooks

    hooks._warn_of_old_name.cache_clear()
    with pytest.warns(DeprecationWarning, match="use allreduce_hook") as said:
        assert hooks.all_reduce_hook is hooks.allreduce_hook is hooks.all_reduce_hook
    assert [Path(warning.filename).name for warning in said] == [Path(__file__).name]


def test_python_hook_with_a_group(pool: Pool) -> None:
    assert pool.run(hook_with_own_group, World(2, "gloo")) == [True, True]


def in_more_groups_than_others(me: Rank) -> tuple[float, str]:
    import ringreduce

    pair = dist.new_group([0, 1])  # rank 2 is in one group less
    model = DDP(nn.Linear(4, 2, bias=False))
    ringreduce.register_comm_hook(model)
    model(torch.full((1, 4), float(me.rank))).sum().backward()
    grad = float(model.module.weight.grad[0, 0])
    if me.rank < 2:  # and a companion of that one, which rank 2 knows nothing of
        small = DDP(nn.Linear(4, 2, bias=False), process_group=pair)
        ringreduce.register_comm_hook(small)
        small(torch.full((1, 4), float(me.rank))).sum().backward()
        assert float(small.module.weight.grad[0, 0]) == 0.5
        assert ringreduce.staging_bytes(pair) > 0
    dist.barrier()
    return grad, dist.get_backend()


def test_ranks_may_be_in_different_numbers_of_groups(pool: Pool) -> None:
    results = pool.run(in_more_groups_than_others, World(3, "gloo", timeout=10.0))
    assert results == [(1.0, "gloo")] * 3


def aborted_and_again(me: Rank) -> list[str]:
    """What three steps gave, each with DDPs of its own, after rank 0 aborted the group beside."""
    import ringreduce
    from ringreduce._backend import backend_of, ringreduce_group

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP insists on its own annotations
        future = ringreduce.hooks.allreduce_hook(state, bucket)
        while not future.done():  # the next bucket comes when this one has failed
            time.sleep(0.001)
        return future

    backend_of(ringreduce_group(None))
    dist.barrier()
    if me.rank == 0:
        backend_of(ringreduce_group(None)).abort()
    results = []
    for _ in range(3):
        models = []
        for _ in range(2):  # whose buckets come in one backward
            layers = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))
            models.append(DDP(layers, bucket_cap_mb=0.1))
            models[-1].register_comm_hook(None, hook)
        try:
            sum(model(torch.ones(1, 200)).sum() for model in models).backward()
            results.append("averaged")
        except RuntimeError as error:
            results.append(type(error).__name__)
    return results


def test_a_group_beside_is_made_again_after_its_error(pool: Pool) -> None:
    for results in pool.run(aborted_and_again, World(2, "gloo")):
        assert results == ["Aborted", "averaged", "averaged"]


def hook_name(me: Rank) -> str:
    import ringreduce

    model = DDP(nn.Linear(4, 2))
    ringreduce.register_comm_hook(model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    return str(model._get_ddp_logging_data().get("comm_hook"))


def test_the_hook_is_in_ddps_log(pool: Pool, world: MakeWorld) -> None:
    for name in pool.run(hook_name, world(2)):
        assert "ringreduce" in name


def misused(me: Rank) -> list[str]:
    import ringreduce

    def attempt(call: Callable[[], object]) -> str:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error)
        return "accepted"

    model = DDP(nn.Linear(4, 2))
    ringreduce.register_comm_hook(model)
    said = [attempt(lambda: ringreduce.register_comm_hook(model))]
    said.append(attempt(lambda: ringreduce.register_comm_hook(nn.Linear(4, 2))))  # type: ignore[arg-type]
    model(torch.ones(1, 4)).sum().backward()
    return said


def test_misuse_is_refused(pool: Pool, world: MakeWorld) -> None:
    for said in pool.run(misused, world(2)):
        assert "accepted" not in said, said


def with_python_reducer(me: Rank) -> str:
    import ringreduce

    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        model = DDP(nn.Linear(4, 2))
        ringreduce.register_comm_hook(model)
        return "accepted"
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    finally:
        torch._dynamo.config.optimize_ddp = True


def test_compiled_autograds_reducer_is_refused(pool: Pool, world: MakeWorld) -> None:
    """It runs only Python hooks, so the C++ one would be ignored in silence."""
    for said in pool.run(with_python_reducer, world(2)):
        assert "compiled" in said.lower() or "python_reducer" in said, said
