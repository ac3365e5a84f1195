"""What error feedback keeps: through checkpoints, other buckets, other world sizes, infinities."""

from __future__ import annotations

import functools
import gc
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from test_compressed_hook import (
    Net,
    Straight,
    attach,
    averaged,
    exactly,
    gradients,
    mean_residual,
    train,
)
from test_training import bf16_by_another_name
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


def saved(what: Any) -> Any:
    """What torch.save and torch.load, which takes no code by default, make of it."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file)


def stopped_and_resumed(me: Rank, settings: dict[str, Any], buckets: float) -> bool:
    """Whether training that is resumed goes on as it would have, in every bit."""
    draw = torch.Generator().manual_seed(me.rank)
    data = [torch.randn(8, 24, generator=draw) for _ in range(8)]

    def steps(model: DDP, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]) -> None:
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    model = DDP(Net(), bucket_cap_mb=0.05)
    state = attach(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps(model, optimizer, data[:4])
    kept = saved({"model": model.module.state_dict(), "hook": state.state_dict()})
    steps(model, optimizer, data[4:])

    again = DDP(Net(), bucket_cap_mb=buckets)
    again.module.load_state_dict(kept["model"])
    resumed = attach(again, "python hook", **settings)
    resumed.load_state_dict(kept["hook"])
    assert resumed.steps == 4
    steps(again, torch.optim.SGD(again.parameters(), lr=0.05), data[4:])
    assert resumed.steps == 8
    one, other = state.state_dict(), resumed.state_dict()
    return all(
        torch.equal(a, b)
        for a, b in zip(model.module.parameters(), again.module.parameters(), strict=True)
    ) and all(torch.equal(one["residuals"][n], other["residuals"][n]) for n in one["residuals"])


@pytest.mark.parametrize("size", [2, 3])
def test_a_checkpoint_continues_bit_for_bit(pool: Pool, world: MakeWorld, size: int) -> None:
    """Though DDP's first buckets are others than those it makes after one step."""
    for settings in (
        {"codec": "int8"},
        {"codec": "int4", "schedule": "ring"},
        {"codec": "int4", "start_after": 6},
        {"codec": "bfloat16", "error_feedback": False},
    ):
        for buckets in (0.05, 25):
            assert all(pool.run(stopped_and_resumed, world(size), settings, buckets))


def in_smaller_groups(me: Rank) -> list[float]:
    """Steps with four ranks, then with two of them, three, one: what is missing in the end."""
    import ringreduce

    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [0, 1], [0, 1, 2], [0])]
    module = Straight()
    state = ringreduce.CompressionState(module, "int4")
    found = []
    for group in groups:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            continue
        gc.collect()  # the last one's reducer watches the parameters as long as it lives
        model = DDP(module, process_group=group)
        state.process_group = group
        state.average_residuals()
        given: list[Any] = [state.state_dict()]  # who was not there knows of fewer steps
        dist.broadcast_object_list(given, 0, group=group)
        state.load_state_dict(given[0])
        assert ringreduce.register_comm_hook(model, state) is state
        before = state.residual("weight")
        owed = torch.zeros(40, 100).double() if before is None else before.double()
        total, wanted = torch.zeros(40, 100).double(), torch.zeros(40, 100).double()
        inside = Rank(rank, size, me.backend, me.store_port, me.conn)
        for step in range(6):
            total += averaged(inside, model, step)[0].double()
            wanted += exactly(inside, model, step)[0]
        if size == 1:  # nothing is coded, and what was held back has been paid out
            assert owed.any() and state.residual("weight") is None
        held = mean_residual(state, group) if size > 1 else 0
        found.append(float((total + held - owed - wanted).abs().max()))
        del model
    return found


def test_residuals_survive_another_world_size(pool: Pool, world: MakeWorld) -> None:
    results = pool.run(in_smaller_groups, world(4))
    assert [len(found) for found in results] == [4, 3, 2, 1]
    assert all(off < 1e-5 for found in results for off in found), results


class Sometimes(nn.Module):
    """As `Straight`, with a second weight that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 100))
        self.other = nn.Parameter(torch.zeros(40, 100))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        y = (self.weight * x).sum()
        return y + (self.other * x).sum() if uses else y


@on_ranks(2)
def test_nothing_is_lost_of_what_is_not_always_used(me: Rank) -> None:
    """Of a weight that no rank uses in some steps, and one in others."""
    model = DDP(Sometimes(), find_unused_parameters=True)
    state = attach(model, codec="int4")
    total, wanted = torch.zeros(40, 100).double(), torch.zeros(40, 100).double()
    for step in range(12):
        users = [r for r in range(me.world_size) if step % 3 == 0 or (step % 3 == 1 and r == 0)]
        given = [
            torch.randn(40, 100, generator=torch.Generator().manual_seed(31 * step + r))
            for r in range(me.world_size)
        ]
        model.zero_grad()
        model(given[me.rank], me.rank in users).backward()
        if model.module.other.grad is not None:
            total += model.module.other.grad.double()
        wanted += sum((given[r].double() for r in users), torch.zeros(40, 100)) / me.world_size
    held = state.residual("other").double()
    dist.all_reduce(held, op=dist.ReduceOp.AVG)
    assert (total + held - wanted).abs().max() < 2e-5, "DDP threw away what was owed"
    assert (total - wanted).abs().max() > 1e-3, "nothing was coded"


class Image(nn.Module):
    """Its gradient is the input; in memory it lies as images do that are fast to convolve."""

    def __init__(self, format: torch.memory_format) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 16, 3, 5).to(memory_format=format))

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return (self.weight * weights).sum()


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_residuals_belong_to_elements(me: Rank, views: bool) -> None:
    """Whatever the order in which a parameter lies in memory."""
    model = DDP(Image(torch.channels_last), gradient_as_bucket_view=views)
    state = attach(model, codec="int4")
    shape = model.module.weight.shape
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    model(inputs[me.rank]).backward()
    assert dist.group.WORLD is not None
    missing = torch.stack(inputs).double().mean(0) - model.module.weight.grad.double()
    held = mean_residual(state, dist.group.WORLD)
    loaded = attach(DDP(Image(torch.contiguous_format)), codec="int4")
    loaded.load_state_dict(saved(state.state_dict()))
    assert (missing - held).abs().max() < 1e-5 and missing.abs().max() > 0.01
    assert torch.equal(loaded.residual("weight"), state.residual("weight"))
    state.average_residuals()
    assert (state.residual("weight").double() - held).abs().max() < 1e-5


def poisoned(me: Rank, codec: str, bad: float, where: str) -> tuple[bool, bool, bool]:
    """One rank's gradient is not finite in step 2.

    Returns whether that arrives everywhere, leaves the residuals, and whether the next step is as
    if it had not been.
    """
    model, calm = DDP(Straight(), bucket_cap_mb=0.01), DDP(Straight(), bucket_cap_mb=0.01)
    state, other = (attach(each, codec=codec) for each in (model, calm))
    for step in range(2):
        averaged(me, model, step)
        averaged(me, calm, step)
    before = state.residual("weight")
    weight, bias = gradients(2, me.rank, model.module)
    if me.rank == 1:
        (weight if where == "weight" else bias).view(-1)[77] = bad
    model.zero_grad()
    model(weight, bias).backward()
    gradient = getattr(model.module, where).grad
    arrived = not bool(torch.isfinite(gradient).all())
    left = torch.equal(before, state.residual("weight"))
    same = torch.equal(averaged(me, model, 3)[0], averaged(me, calm, 3)[0])
    assert torch.equal(state.residual("weight"), other.residual("weight"))
    return arrived, left, same


@pytest.mark.parametrize("codec", ["bfloat16", "float16", "int8", "int4"])
def test_what_is_not_finite_leaves_residuals(pool: Pool, world: MakeWorld, codec: str) -> None:
    overflow = ("1e6",) if codec == "float16" else ()
    for bad in ("inf", "-inf", "nan", *overflow):
        # Coded, and exact in another bucket.
        for where in ("weight",) if bad in overflow else ("weight", "bias"):
            found = pool.run(poisoned, world(3), codec, float(bad), where)
            assert found == [(True, True, True)] * 3, (bad, where)


@on_ranks(2)
def test_grad_scaler_skips_everywhere(me: Rank) -> None:
    """One rank overflows in the fifth step."""
    model = DDP(Net())
    state = attach(model, codec="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    seen = []
    for step in range(8):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + me.rank))
        state.set_loss_scale(scaler.get_scale())
        kept = state.residual("middle.weight")
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step == 4 and me.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = list(model.parameters())
        taken = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(torch.isfinite(p).all() for p in after)
        if not taken:
            assert torch.equal(kept, state.residual("middle.weight"))
        seen.append((taken, scaler.get_scale()))
    assert [taken for taken, _ in seen] == [True] * 4 + [False] + [True] * 3
    assert [scale for _, scale in seen] == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048]


STEPS = 60


def trained_with_scaler(
    me: Rank, seed: int, start: float, settings: dict[str, Any], stock: str
) -> tuple[list[float], float, int]:
    """Trains for so many steps that are not skipped, with a scale that grows after every third.

    Returns the scales, the last loss, and how many steps were skipped.
    """
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
    model = DDP(net)
    if stock:
        model.register_comm_hook(None, STOCK[stock])
    else:
        attach(model, **settings)
    # Gradients are large, so that a scale can be too large for float32 too.
    large = 2.0**16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 / large, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=3)
    task = torch.randn(24, 24, generator=torch.Generator().manual_seed(seed)) / 5
    scales, taken = [start], 0
    while taken < STEPS and len(scales) < 3 * STEPS:
        draw = torch.Generator().manual_seed(10_000 * seed + 10 * taken + me.rank)
        x = torch.randn(16, 24, generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x @ task)
        scaler.scale(large * loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        taken += scales[-1] >= scales[-2]
    x = torch.randn(512, 24, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(x), x @ task)
    return scales, float(loss), len(scales) - 1 - taken


# torch's own hook of the same range.
STOCK = {
    "float16": default_hooks.fp16_compress_hook,
    "bfloat16": bf16_by_another_name,
    "exact": default_hooks.allreduce_hook,
}


@pytest.mark.parametrize("size, schedule", [(2, "owner"), (3, "ring")])
@pytest.mark.parametrize("codec", ["bfloat16", "float16", "int8", "int4"])
def test_a_scale_that_grows_is_found_to_be_too_large(
    pool: Pool, world: MakeWorld, codec: str, size: int, schedule: str
) -> None:
    """Every codec's overflow reaches the GradScaler of all ranks, as that of torch's hooks does."""
    stock = codec if codec in STOCK else "exact"
    start = 1.0 if codec == "float16" else 2.0**112
    for seed in range(4):
        run = functools.partial(pool.run, trained_with_scaler, world(size), seed)
        exact = run(1.0, {}, "exact")[0]
        theirs = run(start, {}, stock)[0]
        ours = run(start, {"codec": codec, "schedule": schedule}, "")
        scales, loss, skipped = ours[0]
        told = f"seed {seed}: {ours[0]}, of {stock} {theirs[0]}, exact loss {exact[1]}"
        assert all(other == ours[0] for other in ours), "ranks differ"
        assert skipped > 3 and max(scales) <= 4 * max(theirs[0]), told
        assert theirs[0][-1] / 4 <= scales[-1] <= 4 * theirs[0][-1], told
        assert loss < 1.05 * exact[1], told


@on_ranks(2)
def test_residuals_follow_the_loss_scale(me: Rank) -> None:
    """So that another one changes nothing."""
    models = [DDP(Straight()) for _ in range(2)]
    states = [attach(model, codec="int4") for model in models]
    for step in range(4):
        states[1].set_loss_scale(2.0**step)
        grads = []
        for model, scale in zip(models, (1.0, 2.0**step), strict=True):
            model.zero_grad()
            (model(*gradients(step, me.rank, model.module)) * scale).backward()
            grads.append(model.module.weight.grad / scale)
        assert torch.equal(*grads), step
    again = attach(DDP(Straight()), codec="int4")
    again.load_state_dict(states[1].state_dict())
    again.set_loss_scale(1.0)
    states[1].set_loss_scale(1.0)
    assert torch.equal(again.residual("weight"), states[0].residual("weight"))


class Gapped(nn.Module):
    """A weight whose strides leave gaps, so that its gradient lies in another way in its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 200)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


@on_ranks(2)
def test_residuals_under_other_defaults(me: Rank) -> None:
    """Residuals do not depend on the program's default device and dtype."""
    import ringreduce

    model, later = DDP(Gapped()), DDP(Gapped())
    state = ringreduce.register_comm_hook(model, codec="int4")
    fresh = ringreduce.register_comm_hook(later, codec="int4")
    model(torch.randn(40, 100, generator=torch.Generator().manual_seed(me.rank))).backward()
    residual = state.residual("weight")
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        again = state.residual("weight")
        state.average_residuals()
        averaged = state.residual("weight")
        fresh.average_residuals()  # there is none yet
        zeros = fresh.residual("weight")
        fresh.load_state_dict(state.state_dict())
        loaded = fresh.residual("weight")
    finally:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)
    assert residual is not None and again is not None
    assert averaged is not None and zeros is not None and loaded is not None
    mean = residual.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert residual.any() and torch.equal(again, residual)
    assert torch.equal(averaged, mean) and torch.equal(loaded, mean)
    assert torch.equal(zeros, torch.zeros(40, 100))


@on_ranks(2)
def test_a_backward_that_fails_leaves_residuals(me: Rank) -> None:
    """A new DDP, as it needs then, goes on."""
    import ringreduce

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ArithmeticError("no gradient today")

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(Fails.apply(x) if self.fails else x)

    model = DDP(Chain(), bucket_cap_mb=0.001)
    state = attach(model, codec="int8")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(me.rank))
    for _ in range(3):
        model(x).square().mean().backward()
    before = state.residual("last.weight")
    model.module.fails = True
    with pytest.raises(ArithmeticError):
        model(x).square().mean().backward()
    model.module.fails = False
    assert torch.equal(before, state.residual("last.weight"))
    module = model.module
    del model
    gc.collect()  # its reducer watches the parameters as long as it lives
    model = DDP(module, bucket_cap_mb=0.001)
    assert ringreduce.register_comm_hook(model, state) is state
    model(x).square().mean().backward()
    assert not torch.equal(before, state.residual("last.weight"))


@on_ranks(1)
def test_other_states_are_refused(me: Rank) -> None:
    import ringreduce

    state = ringreduce.CompressionState(Straight(), "int8")
    good = state.state_dict()
    good["residuals"] = {"weight": torch.ones(40, 100)}
    state.load_state_dict(good)
    for change in (
        {"version": 2},
        {"steps": -1},
        {"residuals": {"other": torch.ones(3)}},
        {"residuals": {"weight": torch.ones(100, 40)}},
        {"residuals": {"weight": torch.full((40, 100), float("nan"))}},
        {"residuals": {"weight": [1.0]}},
        {"loss_scale": 0.0},
        {"residuals": {"weight": torch.ones(40, 100, dtype=torch.complex64)}},
        {"residuals": {"weight": torch.ones(40, 100).to_sparse()}},
        {"residuals": {"weight": torch.ones(40, 100, device="meta")}},
        {"residuals": {"weight": 1.0}},
        {"residuals": [torch.ones(40, 100)]},
        {"residuals": None},
        {"steps": 1.0},
        {"loss_scale": 0},
        {"loss_scale": float("nan")},
        {"loss_scale": "1"},
    ):
        with pytest.raises(ValueError):
            state.load_state_dict({**good, **change})
    for key in good:
        with pytest.raises(ValueError):
            state.load_state_dict({k: v for k, v in good.items() if k != key})
    assert torch.equal(state.residual("weight"), torch.ones(40, 100))  # type: ignore[arg-type]
    state.load_state_dict({**good, "residuals": {}})
    assert state.residual("weight") is None
    state.load_state_dict({**good, "residuals": {"bias": torch.ones(100)}})  # exact here
    assert state.residual("bias") is None
    plain = ringreduce.CompressionState(Straight(), error_feedback=False)
    plain.load_state_dict({**good, "residuals": {"weight": torch.ones(40, 100)}})
    assert plain.residual("weight") is None and plain.residual_bytes() == 0  # it would never use it


def loaded_by_some(me: Rank) -> None:
    model = DDP(Net())
    state = attach(model, codec="int8")
    train(me, model, 2)
    kept = state.state_dict()
    kept["steps"] += me.rank  # of another checkpoint
    state.load_state_dict(kept)
    train(me, model, 1)


def test_ranks_that_load_other_checkpoints_are_told(pool: Pool, world: MakeWorld) -> None:
    for outcome in pool.start(loaded_by_some, world(2)).outcomes():
        assert outcome.isa("Mismatch"), outcome  # type: ignore[union-attr]
