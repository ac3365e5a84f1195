"""DDP with compressed gradients: by every way to register it, with everything that DDP can do."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from blame import expect, expect_all
from conftest import MakeWorld
from pool import Died, Pool, Raised, Rank, World, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CODECS = ("bfloat16", "float16", "int8", "int4")
WAYS = ("hook", "hook on gloo", "python hook", "python hook on gloo")


class Net(nn.Module):
    """Weights of several sizes, biases, a norm; some branches are not used in every step."""

    def __init__(self, dtype: torch.dtype = torch.float32, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)  # the same on every rank
        self.first = nn.Linear(24, 130)
        self.norm = nn.LayerNorm(130)
        self.middle = nn.Linear(130, 301, dtype=dtype)
        self.branch = nn.Linear(301, 301, dtype=dtype)
        self.last = nn.Linear(301, 7)
        self.skips, self.step = skips, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        x = self.norm(torch.tanh(self.first(x)))
        x = torch.tanh(self.middle(x.to(self.middle.weight.dtype)))
        if not self.skips or (self.step + dist.get_rank()) % 2:
            x = x + self.branch(x)
        return self.last(x.to(self.last.weight.dtype))


def attach(model: DDP, way: str = "hook", **settings: Any) -> Any:
    """Registers the hook; returns its state."""
    import ringreduce

    if way.startswith("hook"):
        return ringreduce.register_comm_hook(model, **settings)
    state = ringreduce.CompressionState(model, **settings)
    model.register_comm_hook(state, ringreduce.hooks.compressed)
    return state


def world_for(world: MakeWorld, way: str, size: int = 2) -> World:
    return World(size, "gloo") if way.endswith("gloo") else world(size)


def train(me: Rank, model: DDP, steps: int, accumulate: int = 1, seed: int = 0) -> list[str]:
    """Trains; returns a digest of gradients and parameters for every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + me.rank + 1000 * seed)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        for k in range(accumulate):
            x, y = torch.randn(8, 24, generator=data), torch.randn(8, 7, generator=data)
            quiet = model.no_sync() if k + 1 < accumulate else contextlib.nullcontext()
            with quiet:
                nn.functional.mse_loss(model(x), y).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        seen.append(oracle.digest(*grads, *model.parameters()))
    return seen


# Name: options of DDP, of Net, and of the loop.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "many buckets": ({"bucket_cap_mb": 0.05}, {}, {}),
    "gradient_as_bucket_view": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.2}, {}, {}),
    "static_graph": ({"static_graph": True, "bucket_cap_mb": 0.2}, {}, {}),
    "find_unused_parameters": ({"find_unused_parameters": True}, {"skips": True}, {}),
    "unused in small buckets": (
        {"find_unused_parameters": True, "bucket_cap_mb": 0.05},
        {"skips": True},
        {},
    ),
    "no_sync": ({}, {}, {"accumulate": 3}),
    "no_sync in views": (
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.05},
        {},
        {"accumulate": 3},
    ),
    "bfloat16": ({"bucket_cap_mb": 0.2}, {"dtype": torch.bfloat16}, {}),
    "float16": ({"bucket_cap_mb": 0.2}, {"dtype": torch.float16}, {}),
    "float64": ({"bucket_cap_mb": 0.2}, {"dtype": torch.float64}, {}),
}
# Those that differ in their buckets alone, and so not in a bit.
SAME = (
    ("plain", "many buckets", "gradient_as_bucket_view", "static_graph"),
    ("find_unused_parameters", "unused in small buckets"),
    ("no_sync", "no_sync in views"),
)


def train_cases(me: Rank, way: str, settings: dict[str, Any]) -> dict[str, list[str]]:
    seen = {}
    for case, (ddp, net, loop) in CASES.items():
        model = DDP(Net(**net), **ddp)
        state = attach(model, way, **settings)
        seen[case] = train(me, model, 5, **loop)
        assert state.steps == 5, case
        assert (state.residual_bytes() > 0) == settings.get("error_feedback", True), case
    return seen


@pytest.mark.parametrize(("size", "schedule"), [(2, "owner"), (3, "ring")])
@pytest.mark.parametrize("codec", CODECS)
def test_ranks_stay_the_same_whatever_the_buckets(
    pool: Pool, world: MakeWorld, codec: str, schedule: str, size: int
) -> None:
    settings = {"codec": codec, "schedule": schedule}
    by_rank = pool.run(train_cases, world(size), "hook", settings)
    for case, seen in by_rank[0].items():
        assert all(other[case] == seen for other in by_rank), f"{case}: ranks differ"
        assert len(set(seen)) == len(seen), f"{case}: nothing was learned"
    for first, *others in SAME:
        for other in others:
            assert by_rank[0][other] == by_rank[0][first], f"{other} is not as {first}"


@pytest.mark.parametrize("feedback", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_way_to_register_it(pool: Pool, world: MakeWorld, feedback: bool) -> None:
    settings = {"codec": "int8", "error_feedback": feedback, "schedule": "owner"}
    runs = [pool.run(train_cases, world_for(world, way), way, settings) for way in WAYS]
    assert all(run == runs[0] for run in runs)


class Straight(nn.Module):
    """Its gradients are the inputs, whatever its weights are."""

    def __init__(self, rows: int = 40, columns: int = 100) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        return (self.weight * weights).sum() + (self.bias * biases).sum()


def gradients(step: int, rank: int, model: Straight) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(31 * step + rank)
    kind = model.weight.dtype
    return (
        torch.randn(model.weight.shape, generator=draw).to(kind),
        torch.randn(model.bias.shape, generator=draw).to(kind),
    )


def averaged(me: Rank, model: DDP, step: int) -> list[torch.Tensor]:
    """The gradients of one step."""
    model.zero_grad()
    model(*gradients(step, me.rank, model.module)).backward()
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def exactly(me: Rank, model: DDP, step: int) -> list[torch.Tensor]:
    """What they should be, in float64."""
    every = [gradients(step, r, model.module) for r in range(me.world_size)]
    return [torch.stack([g.double() for g in each]).mean(0) for each in zip(*every, strict=True)]


def mean_residual(state: Any, group: dist.ProcessGroup) -> torch.Tensor:
    residual: torch.Tensor = state.residual("weight").double()
    dist.all_reduce(residual, group=group)
    return residual / dist.get_world_size(group)


def adds_up(me: Rank, settings: dict[str, Any]) -> list[float]:
    """By how much the sums of all steps so far are off, less what residuals hold; and with it."""
    model = DDP(Straight())
    state = attach(model, **settings)
    total, wanted = torch.zeros(40, 100).double(), torch.zeros(40, 100).double()
    assert state.residual("weight") is None and state.residual_bytes() == 0
    for step in range(20):
        weight, bias = averaged(me, model, step)
        exact = exactly(me, model, step)
        assert (bias.double() - exact[1]).abs().max() < 1e-6, "the bias travels exactly"
        total, wanted = total + weight.double(), wanted + exact[0]
    assert dist.group.WORLD is not None
    held = mean_residual(state, dist.group.WORLD)
    # Two float32 an element; each rank's part is as long, and a multiple of 128.
    part = -(-4000 // me.world_size // 128) * 128
    assert 2 * 4 * 4000 <= state.residual_bytes() <= 2 * 4 * (part + 128) * me.world_size
    return [float((total + held - wanted).abs().max()), float((total - wanted).abs().max())]


@pytest.mark.parametrize("schedule", ["owner", "ring"])
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_lost_over_the_steps(
    pool: Pool, world: MakeWorld, size: int, schedule: str
) -> None:
    for codec, bound in (("bfloat16", 0.05), ("float16", 0.01), ("int8", 0.1), ("int4", 1.5)):
        settings = {"codec": codec, "schedule": schedule}
        for left, off in pool.run(adds_up, world(size), settings):
            assert left < 2e-5, f"{codec}: residuals are not what is missing"
            assert 1e-6 < off < bound, f"{codec}: {off}"


@on_ranks(2)
def test_it_starts_after_some_steps(me: Rank) -> None:
    model = DDP(Straight())
    attach(model, codec="int4", start_after=3)
    for step in range(5):
        weight, _ = averaged(me, model, step)
        off = (weight.double() - exactly(me, model, step)[0]).abs().max()
        assert (off < 1e-6) == (step < 3), (step, off)


@on_ranks(2)
def test_some_parameters_travel_exactly(me: Rank) -> None:
    biases = {f"{layer}.bias" for layer in ("first", "norm", "middle", "branch", "last")}
    small = biases | {"norm.weight"}
    cases: list[tuple[Any, set[str]]] = [
        (None, small),
        ("middle.weight", small | {"middle.weight"}),
        (["m*", "last.*"], small | {"middle.weight", "last.weight"}),
        (lambda name, p: p.numel() < 5000, small | {"first.weight", "last.weight"}),
        (lambda name, p: False, set()),
    ]
    for exact, names in cases:
        stock, model = DDP(Net()), DDP(Net())
        state = attach(model, codec="int4", exact=exact)
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(me.rank))
        for each in (stock, model):
            each(x).square().mean().backward()
        assert set(state.exact_parameters()) == names
        for (name, ours), theirs in zip(
            model.module.named_parameters(), stock.module.parameters(), strict=True
        ):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad) == (name in names), name


def test_what_cannot_be_coded_is_called_exact() -> None:
    import ringreduce

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float64))
    for exact in (None, lambda name, p: False):
        state = ringreduce.CompressionState(model, exact=exact)
        assert "1.weight" in state.exact_parameters()
        assert "0.weight" not in state.exact_parameters()


def halves(me: Rank, dtype: torch.dtype) -> float:
    """By how many units of rounding the average of half gradients is off, coded as float16."""
    model = DDP(Straight().to(dtype))
    attach(model, codec="float16" if dtype == torch.bfloat16 else "int8", error_feedback=False)
    weight, _ = averaged(me, model, 0)
    exact = exactly(me, model, 0)[0]
    assert weight.dtype == dtype
    return float(((weight.double() - exact).abs() / exact.abs().max()).max())


def test_half_gradients_are_rounded_once(pool: Pool, world: MakeWorld) -> None:
    assert max(pool.run(halves, world(2), torch.bfloat16)) < 2**-8 + 2**-10
    assert max(pool.run(halves, world(2), torch.float16)) < 0.02


def measured(me: Rank) -> tuple[list[str], str, int]:
    model = DDP(Straight(100, 200))
    state = attach(model, codec="auto")
    choices = []
    for step in range(16):
        averaged(me, model, step)
        choices.append(state.choice)
    return choices, state.why, state.residual_bytes()


def test_auto_decides_after_some_steps(pool: Pool, world: MakeWorld) -> None:
    """All ranks alike, with its reasons; in shared memory nothing is gained by coding."""
    for size in (2, 3):
        results = pool.run(measured, world(size))
        assert all(result[:1] == results[0][:1] for result in results)
        choices, why, held = results[0]
        assert choices[0] == "measuring" and choices[-1] in ("exact", "int8")
        assert "ms" in why
        if choices[-1] == "exact":
            assert held == 0, "what was held back has been sent"


@on_ranks(2)
def test_misuse_is_refused(me: Rank) -> None:
    import ringreduce

    said: list[str] = []

    def attempt(call: Any) -> None:
        try:
            call()
            said.append("accepted")
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            said.append(f"{type(error).__name__}: {error}")

    model = DDP(Net())
    for settings in (
        {"codec": "int2"},
        {"codec": 8},
        {"codec": "int8", "schedule": "tree"},
        {"codec": "int8", "schedule": None},
        {"codec": "int8", "start_after": -1},
        {"codec": "int8", "start_after": 1.5},
        {"codec": "int8", "seed": 2**64},
        {"codec": "int8", "exact": "no.such"},
        {"codec": "int8", "exact": 7},
        {"codec": "int8", "exact": [7]},
    ):
        attempt(lambda settings=settings: ringreduce.register_comm_hook(model, **settings))
    attempt(lambda: ringreduce.register_comm_hook(model, exact="last.*"))  # type: ignore[call-overload]
    known = ringreduce.CompressionState(model)
    attempt(lambda: ringreduce.register_comm_hook(model, known, error_feedback=False))
    attempt(lambda: ringreduce.CompressionState(nn.Identity()))
    attempt(lambda: ringreduce.CompressionState(model.parameters()))  # type: ignore[arg-type]
    attempt(lambda: ringreduce.CompressionState(nn.Linear(99, 99, device="meta")))
    state = ringreduce.register_comm_hook(model, codec="int8")
    attempt(lambda: ringreduce.register_comm_hook(model, codec="int8"))
    attempt(lambda: ringreduce.hooks.compressed(None, None))  # type: ignore[arg-type]
    attempt(lambda: state.residual("no.such"))
    attempt(lambda: state.set_loss_scale(0))

    attempt(lambda: ringreduce.register_comm_hook(DDP(Net()), state))
    other = DDP(Net())
    other.register_comm_hook(state, ringreduce.hooks.compressed)
    attempt(lambda: other(torch.ones(1, 24)).sum().backward())
    model(torch.ones(1, 24)).sum().backward()  # and the group goes on
    assert "accepted" not in said, said
    assert "int4" in said[0] and "no.such" in said[7]
    assert "exact cannot be set" in said[10] and "error_feedback" in said[11]
    assert "meta" in said[14]
    assert "made of another model" in said[19], said[19]
    assert "CompressionState does not know" in said[20], said[20]


def with_settings(me: Rank, other: dict[str, Any], way: str) -> None:
    model = DDP(Net())
    attach(model, way, **{"codec": "int8", **(other if me.rank == 1 else {})})
    model(torch.ones(1, 24)).sum().backward()


@pytest.mark.parametrize("way", ["hook", "python hook"])
@pytest.mark.parametrize(
    "other",
    [{"codec": "int4"}, {"codec": "auto"}, {"exact": "last.*"}, {"start_after": 1}, {"seed": 1}],
    ids=lambda other: "".join(other),
)
def test_different_settings_are_told(
    pool: Pool, world: MakeWorld, other: dict[str, Any], way: str
) -> None:
    for outcome in pool.start(with_settings, world(3), other, way).outcomes():
        expect(outcome, "Mismatch", [1])


def train_forever(me: Rank, way: str) -> None:
    model = DDP(nn.Sequential(*(nn.Linear(500, 500) for _ in range(6))), bucket_cap_mb=1)
    attach(model, way, codec="int8")
    for step in range(10**9):
        model(torch.randn(2, 500)).square().mean().backward()
        if step == 2:
            me.tell("flowing")


@pytest.mark.parametrize("way", ["hook", "python hook on gloo"])
def test_a_killed_rank_is_named(pool: Pool, world: MakeWorld, way: str) -> None:
    for victim in (0, 2):
        call = pool.start(train_forever, world_for(world, way, 3), way)
        call.hear_all()
        call.signal(victim, signal.SIGKILL)
        outcomes = call.outcomes()
        assert isinstance(outcomes[victim], Died)
        for raised in expect_all(outcomes, [victim], "PeerLost", [victim]):
            assert isinstance(raised, Raised)
            assert "DDP bucket" in raised.message or "compress" in raised.message


@on_ranks(2)
def test_complex_gradients_travel_exactly(me: Rank) -> None:

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))
            self.weight = nn.Parameter(torch.ones(40, 40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.turn * x).sum().imag + (self.weight * x.real).sum()

    def gradient(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        model = Both()
        model(torch.randn(40, 40, dtype=torch.complex64, generator=generator)).backward()
        return model.turn.grad  # type: ignore[return-value]

    mean = torch.stack([gradient(rank) for rank in range(me.world_size)]).mean(0)
    model = DDP(Both())
    state = attach(model, codec="int8")
    assert state.exact_parameters() == ["turn"]
    generator = torch.Generator().manual_seed(me.rank)
    model(torch.randn(40, 40, dtype=torch.complex64, generator=generator)).backward()
    assert model.module.turn.grad is not None
    assert (model.module.turn.grad - mean).abs().max() < 1e-6


def with_and_without(me: Rank) -> None:
    import ringreduce

    model = DDP(Net())
    if me.rank == 2:
        ringreduce.register_comm_hook(model)
    else:
        ringreduce.register_comm_hook(model, codec="int8")
    model(torch.ones(1, 24)).sum().backward()


def test_one_rank_without_a_codec_is_told(pool: Pool, world: MakeWorld) -> None:
    for outcome in pool.start(with_and_without, world(3, 20.0)).outcomes():
        expect(outcome, "Mismatch", [2])
