"""Whatever ranks, dtypes, ops, sizes, strides, parts and roots hypothesis draws: the promised bits.

Of all collectives but all_reduce, for which test_bits.py does the same.  A job carries only
sizes and seeds: each rank knows how to make every rank's input.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool, Rank
from test_bits import LAYOUTS, laid_out, reduce_op

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    call: str
    dtype: str
    op: str
    counts: tuple[int, ...]  # by rank; what there is one of is the first
    layouts: tuple[str, str]  # of inputs and of outputs
    root: int
    seed: int

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def given(self, values: Tensor) -> Tensor:
        return laid_out(values, self.layouts[0])

    def room(self, count: int) -> Tensor:
        zeros = torch.zeros(count * self.kind.itemsize, dtype=torch.uint8).view(self.kind)
        return laid_out(zeros, self.layouts[1])

    def addends(self, n: int, p: int) -> list[Tensor]:
        return [oracle.make_input(self.dtype, self.op, n, r, self.seed) for r in range(p)]


def noise(dtype: str, n: int, rank: int) -> Tensor:
    """Arbitrary bytes, NaNs and all; for bool the two that it has."""
    draw = torch.Generator().manual_seed(97 * n + rank)
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.randint(0, 2, (n,), generator=draw).bool()
    width = torch.empty(0, dtype=kind).element_size()
    return torch.randint(0, 256, (n * width,), generator=draw, dtype=torch.uint8).view(kind)


def raw(tensor: Tensor) -> bytes:
    # Not contiguous(): a single element counts as that with any stride.
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(plain.view(torch.uint8).numpy().tobytes())


def same(got: Tensor, wanted: Tensor, what: object) -> None:
    got = got.contiguous().view(-1)
    differing = (oracle.bits(got) != oracle.bits(wanted)).nonzero()
    assert got.numel() == wanted.numel() and not differing.numel(), f"{what}: not the promised bits"


def reduce(me: Rank, case: Case) -> None:
    inputs = case.addends(case.counts[0], me.world_size)
    mine, beside = case.given(inputs[me.rank]), inputs[me.rank].clone()
    op = reduce_op(case.op, me.rank)
    dist.reduce(mine, case.root, op=op)
    dist.all_reduce(beside, op=op)
    if me.rank == case.root:
        same(mine, oracle.exact(inputs, case.op), case)
        same(mine, beside, f"{case} beside all_reduce")
    else:
        same(mine, inputs[me.rank], f"{case}: wrote to who is not the root")


def reduce_scatter(me: Rank, case: Case) -> None:
    inputs = case.addends(sum(case.counts), me.world_size)
    wanted = oracle.exact_parts(inputs, case.op, case.counts)
    parts = [case.given(part) for part in inputs[me.rank].split(case.counts)]
    out = case.room(case.counts[me.rank])
    dist.reduce_scatter(out, parts, op=reduce_op(case.op, me.rank))
    same(out, wanted[me.rank], case)
    for part, before in zip(parts, inputs[me.rank].split(case.counts), strict=True):
        same(part, before, f"{case}: wrote to an input")


def reduce_scatter_tensor(me: Rank, case: Case) -> None:
    n, p = case.counts[0], me.world_size
    inputs = case.addends(n * p, p)
    wanted = oracle.exact_parts(inputs, case.op, [n] * p)
    out = case.room(n)
    dist.reduce_scatter_tensor(out, case.given(inputs[me.rank]), op=reduce_op(case.op, me.rank))
    same(out, wanted[me.rank], case)


def broadcast(me: Rank, case: Case) -> None:
    t = case.given(noise(case.dtype, case.counts[0], me.rank))
    dist.broadcast(t, case.root)
    assert raw(t) == raw(noise(case.dtype, case.counts[0], case.root)), case


def gather(me: Rank, case: Case) -> None:
    n, p = case.counts[0], me.world_size
    outs = [case.room(n) for _ in range(p)] if me.rank == case.root else None
    dist.gather(case.given(noise(case.dtype, n, me.rank)), outs, dst=case.root)
    for r, out in enumerate(outs or []):
        assert raw(out) == raw(noise(case.dtype, n, r)), f"{case}: from {r}"


def scatter(me: Rank, case: Case) -> None:
    n, p = case.counts[0], me.world_size
    parts = [case.given(noise(case.dtype, n, r)) for r in range(p)]
    out = case.room(n)
    dist.scatter(out, parts if me.rank == case.root else None, src=case.root)
    assert raw(out) == raw(noise(case.dtype, n, me.rank)), case


def all_gather(me: Rank, case: Case) -> None:
    outs = [case.room(n) for n in case.counts]
    dist.all_gather(outs, case.given(noise(case.dtype, case.counts[me.rank], me.rank)))
    for r, (out, n) in enumerate(zip(outs, case.counts, strict=True)):
        assert raw(out) == raw(noise(case.dtype, n, r)), f"{case}: from {r}"


def all_gather_into_tensor(me: Rank, case: Case) -> None:
    """Into one row for all ranks, and into one for each."""
    n, p = case.counts[0], me.world_size
    wanted = b"".join(raw(noise(case.dtype, n, r)) for r in range(p))
    for out in (case.room(n * p), torch.empty(p, n, dtype=case.kind)):
        dist.all_gather_into_tensor(out, case.given(noise(case.dtype, n, me.rank)))
        assert raw(out) == wanted, f"{case}, {out.shape}"


def all_to_all_single(me: Rank, case: Case) -> None:
    """Rank a sends rank b some of what either has a count of, or nothing."""
    p, draw = me.world_size, random.Random(case.seed)
    splits = [
        [draw.choice((0, case.counts[a], case.counts[b])) for b in range(p)] for a in range(p)
    ]
    sent, expected = splits[me.rank], [splits[a][me.rank] for a in range(p)]
    parts = [noise(case.dtype, n, 10 * me.rank + b) for b, n in enumerate(sent)]
    whole, row = torch.cat(parts), 1 + case.seed % 3
    # Rows of several elements are split as rows.
    given = case.given(whole.repeat_interleave(row)).contiguous().view(sum(sent), row)
    out = case.room(sum(expected) * row).contiguous().view(sum(expected), row)
    dist.all_to_all_single(out, given, expected, sent)
    wanted = [noise(case.dtype, n, 10 * a + me.rank) for a, n in enumerate(expected)]
    assert raw(out) == raw(torch.cat(wanted).repeat_interleave(row)), case


def all_to_all(me: Rank, case: Case) -> None:
    p = me.world_size
    parts = [case.given(noise(case.dtype, n, 10 * me.rank + b)) for b, n in enumerate(case.counts)]
    outs = [case.room(case.counts[me.rank]) for _ in range(p)]
    dist.all_to_all(outs, parts)
    for a, out in enumerate(outs):
        wanted = noise(case.dtype, case.counts[me.rank], 10 * a + me.rank)
        assert raw(out) == raw(wanted), f"{case}: from {a}"


ADDING = {f.__name__: f for f in (reduce, reduce_scatter, reduce_scatter_tensor)}
MOVING = {
    f.__name__: f
    for f in (
        *(broadcast, gather, scatter, all_gather),
        *(all_gather_into_tensor, all_to_all_single, all_to_all),
    )
}
FEW = ("float32", "uint8", "bool", "int64", "complex128", "float8_e4m3fn")


def run_cases(me: Rank, cases: list[Case]) -> None:
    for case in cases:
        (ADDING | MOVING)[case.call](me, case)


@st.composite
def some_cases(draw: st.DrawFn) -> tuple[int, list[Case]]:
    size = draw(st.integers(1, 6))
    counts = st.integers(0, 700) | st.sampled_from((0, 0, 1, 128, 5000))
    layouts = st.sampled_from(LAYOUTS)

    def case(call: str) -> st.SearchStrategy[Case]:
        adds = st.sampled_from(oracle.PAIRS)
        moves = st.tuples(st.sampled_from(FEW), st.just(""))
        return st.builds(
            lambda pair, c, layouts, root, seed: Case(call, *pair, tuple(c), layouts, root, seed),
            adds if call in ADDING else moves,
            st.lists(counts, min_size=size, max_size=size),
            st.tuples(layouts, layouts),
            st.integers(0, size - 1),
            st.integers(0, 10**6),
        )

    one = st.sampled_from(sorted(ADDING | MOVING)).flatmap(case)
    return size, draw(st.lists(one, min_size=1, max_size=16))


def test_properties(pool: Pool, world: MakeWorld, full: bool) -> None:
    @settings(
        max_examples=1000 if full else 20,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(some_cases())
    def run(drawn: tuple[int, list[Case]]) -> None:
        size, cases = drawn
        pool.run(run_cases, world(size), cases)

    run()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_dtype_and_op(pool: Pool, world: MakeWorld, size: int) -> None:
    counts = tuple(itertools.islice(itertools.cycle((129, 0, 7, 1)), size))
    cases = [
        Case(call, dtype, op, counts, ("plain", "plain"), k % size, k)
        for k, (dtype, op) in enumerate(oracle.PAIRS)
        for call in ADDING
    ]
    cases += [
        Case(call, dtype, "", counts, ("plain", "plain"), k % size, k)
        for k, dtype in enumerate((*oracle.REDUCIBLE, *oracle.MOVED))
        for call in MOVING
    ]
    pool.run(run_cases, world(size), cases)


@pytest.mark.parametrize("call", sorted(ADDING | MOVING))
def test_around_slots(pool: Pool, world: MakeWorld, call: str) -> None:
    """With slots of 4 KiB, where the parts of several ranks in one are small and odd."""
    kinds = [("float32", "SUM"), ("bfloat16", "AVG")]
    for size in (2, 3, 5):
        cases = [
            Case(call, dtype, op, tuple(n + r for r in range(size)), ("plain", "offset"), 0, n)
            for dtype, op in kinds
            for n in (4096 // 4 // size, 1023, 1024, 4096, 20_001)
        ]
        pool.run(run_cases, world(size, SLOT_BYTES="4096", SLOTS="3"), cases)
