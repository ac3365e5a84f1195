"""Compressed all-reduces: ranks have the same bits, whatever the values, and errors that add up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool, Rank
from test_bits import laid_out

pytestmark = pytest.mark.ringreduce
CODECS = ("bfloat16", "float16", "int8", "int4")
SCHEDULES = ("auto", "owner", "ring")
# What a rank's values are made of.
KINDS = ("normal", "zeros", "subnormal", "huge", "mixed", "alternating", "infinite", "nan")
# How far off a value may come back, as a share of the largest of its block, for each encoding.
SHARES = {"bfloat16": 2**-7, "float16": 2**-9, "int8": 1 / 100, "int4": 1 / 5}


@dataclass(frozen=True)
class Case:
    codec: str
    count: int
    kinds: tuple[str, str]  # of even and of odd ranks
    schedule: str = "auto"
    op: str = "avg"
    stochastic: bool = False
    layout: str = "plain"
    in_place: bool = True
    seed: int = 0

    def values(self, rank: int) -> torch.Tensor:
        """A rank's addends."""
        kind, n = self.kinds[rank % 2], self.count
        draw = torch.Generator().manual_seed(1009 * self.seed + rank)
        values = torch.randn(n, generator=draw)
        if kind == "zeros":
            return torch.where(values < 0, -0.0, 0.0)
        if kind == "subnormal":
            return values * 1e-40
        if kind == "huge":
            return values.clamp(-2, 2) * 1e37
        if kind == "mixed":  # from one block to the next, and within
            return values * torch.exp2(torch.randint(-60, 60, (n,), generator=draw).float())
        if kind == "alternating":
            return torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0) * 2.0**-3
        if kind in ("infinite", "nan") and n:
            values[int(torch.randint(n, (1,), generator=draw))] = float(kind[:3])
        return values

    @property
    def finite(self) -> bool:
        return not {"infinite", "nan"} & set(self.kinds)


def backend() -> Any:
    from ringreduce import backend_of

    assert dist.group.WORLD is not None
    return backend_of(dist.group.WORLD)


def reduce(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the rank's error."""
    from ringreduce import extension

    given = laid_out(case.values(rank), case.layout)
    out = given if case.in_place else laid_out(torch.full((case.count,), 7.0), case.layout)
    error = torch.full((case.count,), 7.0)
    extension().compressed_all_reduce(
        backend(),
        given,
        out,
        codec=case.codec,
        op=case.op,
        schedule=case.schedule,
        stochastic=case.stochastic,
        seed=case.seed,
        error=error,
    ).wait()
    if not case.in_place:
        assert oracle.digest(given) == oracle.digest(case.values(rank)), f"{case}: wrote its input"
    return out.contiguous().view(-1), error


def check(case: Case, rank: int, size: int, out: torch.Tensor, errors: list[torch.Tensor]) -> None:
    """The result is what the inputs less the errors come to; and is as near as the codec allows."""
    inputs = [case.values(r).double() for r in range(size)]
    exact = torch.stack(inputs).sum(0)
    lost = torch.stack(errors).double().sum(0)
    divisor = size if case.op == "avg" else 1
    bad = ~torch.isfinite(exact)
    assert not torch.isfinite(out[bad]).any(), f"{case}: what is not finite arrived as finite"
    assert torch.isfinite(torch.stack(errors)).all(), f"{case}: an error is not finite"
    if not case.finite:
        return
    if case.count == 0:
        return
    largest = torch.stack(inputs).abs().max(0).values * size
    if "huge" not in case.kinds:  # where they saturate, what is lost is no float32 any more
        told = (out.double() * divisor + lost - exact).abs()
        assert (told <= 1e-5 * largest.max() + 1e-38).all(), f"{case}: errors do not add up"
    if size == 1:
        assert oracle.digest(out) == oracle.digest(case.values(rank)), f"{case}: alone, yet coded"
    if case.codec == "float16" and set(case.kinds) & {"huge", "mixed"}:
        return  # float16 saturates
    blocks = torch.nn.functional.pad(largest, (0, -case.count % 128)).view(-1, 128)
    near = blocks.max(1).values.repeat_interleave(128)[: case.count] * SHARES[case.codec] * 2
    hops = 2 * size
    tiny = 2.0**-24 if case.codec == "float16" else 2.0**-120
    worst = ((out.double() * divisor - exact).abs() - hops * (near + tiny)).max()
    assert worst <= 0, f"{case} on {size} ranks: off by {worst} more than it may be"


def run_cases(me: Rank, cases: list[Case]) -> list[str]:
    digests = []
    for case in cases:
        out, error = reduce(case, me.rank)
        errors = [torch.empty_like(error) for _ in range(me.world_size)]
        dist.all_gather(errors, error)
        check(case, me.rank, me.world_size, out, errors)
        digests.append(oracle.digest(out))
    return digests


def same_everywhere(pool: Pool, world: Any, cases: list[Case]) -> list[str]:
    by_rank: list[list[str]] = pool.run(run_cases, world, cases)
    for case, digests in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert len(set(digests)) == 1, f"{case}: ranks differ"
    return by_rank[0]


# Around blocks, chunks and slots.
SIZES = (0, 1, 31, 32, 33, 127, 128, 129, 255, 1000, 4096, 4097, 70_001)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_all_ranks_have_the_same_bits(pool: Pool, world: MakeWorld, codec: str, size: int) -> None:
    kinds = itertools.cycle(itertools.product(KINDS, KINDS))
    cases = [
        Case(codec, n, next(kinds), schedule, op, stochastic, seed=n)
        for n, schedule, op, stochastic in itertools.product(
            SIZES, SCHEDULES, ("sum", "avg"), (False, True)
        )
    ]
    same_everywhere(pool, world(size), cases)


@st.composite
def some_cases(draw: Any) -> tuple[int, str, list[Case]]:
    case = st.builds(
        Case,
        st.sampled_from(CODECS),
        st.one_of(st.sampled_from(SIZES), st.integers(0, 3000), st.integers(0, 100_000)),
        st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
        st.sampled_from(SCHEDULES),
        st.sampled_from(("sum", "avg")),
        st.booleans(),
        st.sampled_from(("plain", "offset", "strided", "transposed")),
        st.booleans(),
        st.integers(0, 10**6),
    )
    slots = draw(st.sampled_from(("4096", "131072")))
    return draw(st.integers(1, 5)), slots, draw(st.lists(case, min_size=1, max_size=12))


def test_properties(pool: Pool, world: MakeWorld, full: bool) -> None:
    @settings(
        max_examples=500 if full else 15,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(some_cases())
    def run(drawn: tuple[int, str, list[Case]]) -> None:
        size, slots, cases = drawn
        same_everywhere(pool, world(size, SLOT_BYTES=slots), cases)

    run()


def several_at_once(me: Rank) -> bool:
    """Asynchronous ones, beside exact ones, in the order of the calls."""
    from ringreduce import extension

    cases = [Case(codec, 5000, ("normal", "normal"), seed=k) for k, codec in enumerate(CODECS)]
    alone = [reduce(case, me.rank)[0] for case in cases]
    outs = [case.values(me.rank) for case in cases]
    exact = torch.ones(1000)
    works = [
        extension().compressed_all_reduce(backend(), out, out, codec=case.codec, op="avg")
        for case, out in zip(cases, outs, strict=True)
    ]
    works.append(dist.all_reduce(exact, async_op=True))
    for work in works:
        work.wait()
    return bool((exact == me.world_size).all()) and all(map(torch.equal, alone, outs))


def test_several_at_once(pool: Pool, world: MakeWorld) -> None:
    assert all(pool.run(several_at_once, world(3)))


def refusals(me: Rank) -> list[str]:
    from ringreduce import extension

    call, floats = extension().compressed_all_reduce, torch.ones(6)
    attempts: list[tuple[Any, Any, dict[str, Any]]] = [
        (floats, floats, {"codec": "int2"}),
        (floats, floats, {"op": "max"}),
        (floats, floats, {"schedule": "tree"}),
        (floats.double(), floats, {}),
        (floats.half(), floats.half(), {}),
        (floats, torch.ones(5), {}),
        (floats, floats, {"error": torch.ones(5)}),
        (floats, floats, {"error": floats}),
        (floats, floats, {"error": floats[:]}),
        (torch.eye(3).to_sparse(), floats, {}),
        (floats, torch.ones(1).expand(6), {}),
        (torch.ones(6, device="meta"), floats, {}),
    ]
    said = []
    for values, out, arguments in attempts:
        try:
            call(backend(), values, out, **{"codec": "int8", **arguments}).wait()
            said.append("accepted")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    said.append(str(float(floats.sum())))  # nothing was written
    dist.all_reduce(floats)  # and the group goes on
    return said


def test_bad_arguments_are_refused(pool: Pool, world: MakeWorld) -> None:
    for *said, total in pool.run(refusals, world(2)):
        assert "accepted" not in said, said
        assert "int2" in said[0] and "int8" in said[0]
        assert total == "6.0"
