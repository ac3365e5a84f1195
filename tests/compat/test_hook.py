"""DDP over ringreduce, by backend and by hook: the same model, bit for bit, as over gloo."""

from __future__ import annotations

import time
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, World, on_ranks
from test_compressed_hook import CASES, Net, train, world_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WAYS = ("backend", "hook", "hook on gloo", "python hook", "python hook on gloo")


def attach(model: DDP, way: str) -> None:
    import ringreduce

    if way.startswith("hook"):
        ringreduce.register_comm_hook(model)
    elif way.startswith("python hook"):
        model.register_comm_hook(None, ringreduce.hooks.allreduce_hook)


def train_case(me: Rank, way: str, case: str) -> list[str]:
    ddp, net, loop = CASES[case]
    model = DDP(Net(**net), **ddp)
    attach(model, way)
    return train(me, model, 5, **loop)


# Half a gradient in float16 may be too small to be exact.
@pytest.mark.parametrize("case", [case for case in CASES if case != "float16"])
def test_two_ranks_train_bit_for_bit_as_with_gloo(pool: Pool, world: MakeWorld, case: str) -> None:
    """Two addends have one sum, whoever adds them, and halving is exact."""
    runs = {way: pool.run(train_case, world_for(world, way), way, case) for way in ("gloo", *WAYS)}
    stock = runs.pop("gloo")
    for way, by_rank in runs.items():
        for rank, steps in enumerate(by_rank):
            for step, (ours, theirs) in enumerate(zip(steps, stock[rank], strict=True)):
                assert ours == theirs, f"{case}, {way}: rank {rank} differs at step {step}"
    assert stock[0] == stock[1], "the ranks' gradients and parameters must agree"
    assert len(set(stock[0])) == len(stock[0]), "nothing was learned"


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


@on_ranks(2, backend="gloo")
def test_python_hook_with_a_group(me: Rank) -> None:
    """The Python hook's state may be a ringreduce group."""
    import ringreduce

    group = dist.new_group(backend="ringreduce")
    model = DDP(nn.Linear(4, 2, bias=False))
    model.register_comm_hook(group, ringreduce.hooks.allreduce_hook)
    model(torch.full((1, 4), float(me.rank))).sum().backward()
    assert model.module.weight.grad.eq(0.5).all()


def test_the_old_name_of_the_hook_says_so_once() -> None:
    from ringreduce import hooks

    hooks._warn_of_old_name.cache_clear()
    with pytest.warns(DeprecationWarning, match="use allreduce_hook") as said:
        assert hooks.all_reduce_hook is hooks.allreduce_hook is hooks.all_reduce_hook
    assert [Path(warning.filename).name for warning in said] == [Path(__file__).name]


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


@on_ranks(2, backend="gloo")
def test_a_group_beside_is_made_again_after_its_error(me: Rank) -> None:
    """Three steps, each with DDPs of its own, after rank 0 aborted the group beside."""
    import ringreduce
    from ringreduce.core.backend import backend_of, ringreduce_group

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
    assert results == ["Aborted", "averaged", "averaged"], results


@on_ranks(2)
def test_the_hook_is_in_ddps_log(me: Rank) -> None:
    import ringreduce

    model = DDP(nn.Linear(4, 2))
    ringreduce.register_comm_hook(model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert "ringreduce" in str(model._get_ddp_logging_data().get("comm_hook"))


@on_ranks(2)
def test_misuse_is_refused(me: Rank) -> None:
    import ringreduce

    model = DDP(nn.Linear(4, 2))
    ringreduce.register_comm_hook(model)
    for wrong in (model, nn.Linear(4, 2)):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            ringreduce.register_comm_hook(wrong)  # type: ignore[arg-type]
    model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_compiled_autograds_reducer_is_refused(me: Rank) -> None:
    """It runs only Python hooks, so the C++ one would be ignored in silence."""
    import ringreduce

    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        model = DDP(nn.Linear(4, 2))
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"(?i)compiled|python_reducer"
        ):
            ringreduce.register_comm_hook(model)
    finally:
        torch._dynamo.config.optimize_ddp = True
