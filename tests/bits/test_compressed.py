"""Compressed all-reduces of tensors: ranks have the same bits, wherever the tensors lie.

In tests/cpp, compressed*_test.cc compare the bits with an oracle, and codec*_test.cc what is lost.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from test_bits import LAYOUTS, laid_out

CODECS = ("bfloat16", "float16", "int8", "int4")
SCHEDULES = ("auto", "owner", "ring")


@dataclass(frozen=True)
class Case:
    codec: str
    count: int
    schedule: str = "auto"
    op: str = "avg"
    stochastic: bool = False
    layout: str = "plain"
    in_place: bool = True
    seed: int = 0

    def values(self, rank: int) -> torch.Tensor:
        """A rank's addends, of many magnitudes."""
        draw = torch.Generator().manual_seed(1009 * self.seed + rank)
        exponents = torch.randint(-60, 60, (self.count,), generator=draw).float()
        return torch.randn(self.count, generator=draw) * torch.exp2(exponents)


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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of NaNs: many of these values are infinite as float16."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# Around blocks, chunks and slots.
SIZES = (0, 1, 31, 33, 128, 129, 1000, 4097, 70_001)


def run_cases(me: Rank, cases: list[Case]) -> list[str]:
    """Digests of the results, which do not depend on where and how the tensors lie."""
    digests = []
    for case in cases:
        found = reduce(case, me.rank)
        plain = reduce(replace(case, layout="plain", in_place=True), me.rank)
        assert all(map(same_bits, found, plain)), case
        if me.world_size == 1:
            assert torch.equal(found[0], case.values(0)), f"{case}: alone, yet coded"
        digests.append(oracle.digest(found[0]))
    return digests


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_all_ranks_have_the_same_bits(pool: Pool, world: MakeWorld, codec: str, size: int) -> None:
    lying = itertools.cycle(itertools.product(LAYOUTS, (True, False)))
    cases = [
        Case(codec, n, schedule, op, stochastic, *next(lying), seed=n)
        for n, schedule, op, stochastic in itertools.product(
            SIZES, SCHEDULES, ("sum", "avg"), (False, True)
        )
    ]
    by_rank: list[list[str]] = pool.run(run_cases, world(size), cases)
    for case, digests in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert len(set(digests)) == 1, f"{case}: ranks differ"


@on_ranks(3)
def test_several_at_once(me: Rank) -> None:
    """Asynchronous ones, beside exact ones, in the order of the calls."""
    from ringreduce import extension

    cases = [Case(codec, 5000, seed=k) for k, codec in enumerate(CODECS)]
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
    assert exact.eq(me.world_size).all() and all(map(same_bits, alone, outs))


@on_ranks(2)
def test_bad_arguments_are_refused(me: Rank) -> None:
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
    said: list[str] = []
    for values, out, arguments in attempts:
        try:
            call(backend(), values, out, **{"codec": "int8", **arguments}).wait()
            said.append("accepted")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    assert "accepted" not in said, said
    assert "int2" in said[0] and "int8" in said[0]
    assert floats.eq(1).all(), "nothing was written"
    dist.all_reduce(floats)  # and the group goes on
