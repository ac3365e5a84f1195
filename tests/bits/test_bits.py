"""All-reduce gives the promised bits: on every rank, in every run, by every algorithm.

Each rank knows how to make every rank's input, so a job carries only sizes, types and seeds.
"""

from __future__ import annotations

import os
import random
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool, Rank, World, on_ranks

ALGORITHMS = ("direct", "twoshot", "ring")
SIZES = (1, 2, 3, 4, 6, 9)
LAYOUTS = ("plain", "offset", "strided", "transposed")


def reduce_op(op: str, rank: int) -> Any:
    if op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(oracle.factor(rank))
    return getattr(dist.ReduceOp, op)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor with these values, in memory as `layout` says."""
    n = values.numel()
    if layout == "offset":  # starts one element into its storage: not aligned to anything
        storage = torch.zeros(n + 3, dtype=values.dtype)
        view = storage[1 : n + 1]
    elif layout == "strided":
        view = torch.zeros(2 * n + 1, dtype=values.dtype)[1::2][:n]
    elif layout == "transposed" and n % 3 == 0:
        view = torch.zeros(3, n // 3, dtype=values.dtype).t()
    else:
        return values.clone()
    view.copy_(values.view(view.shape))
    return view


def reduce_cases(me: Rank, cases: list[tuple[str, str, int, str, int]]) -> list[str]:
    """Runs the cases (dtype, op, elements, layout, seed); returns what each gave, as a digest.

    The ranks take turns at comparing a result with the oracles; one raises, after its last case, if
    they differ.  `check` compares the ranks' digests.
    """
    digests, faults = [], []
    for k, (dtype, op, n, layout, seed) in enumerate(cases):
        mine = laid_out(oracle.make_input(dtype, op, n, me.rank, seed), layout)
        dist.all_reduce(mine, op=reduce_op(op, me.rank))
        result = mine.contiguous().view(-1)
        digests.append(oracle.digest(result))
        if k % me.world_size != me.rank:
            continue
        inputs = [oracle.make_input(dtype, op, n, r, seed) for r in range(me.world_size)]
        case = f"{dtype} {op} n={n} {layout} seed={seed} on {me.world_size} ranks"
        wanted = oracle.exact(inputs, op)
        wrong = (oracle.bits(result) != oracle.bits(wanted)).nonzero()
        if wrong.numel():
            i = int(wrong[0]) // result.element_size()
            got = f"element {i} is {result[i]}, not {wanted[i]}"
            faults.append(f"{case}: {wrong.numel()} bytes differ, {got}")
        error = oracle.worst_error(result, inputs, op)
        if not error <= 1.0:
            faults.append(f"{case}: errs {error} times the bound")
    assert not faults, f"{len(faults)} faults, the first: " + "; ".join(faults[:3])
    return digests


def check(pool: Pool, world: Any, cases: list[tuple[str, str, int, str, int]]) -> list[str]:
    by_rank = pool.run(reduce_cases, world, cases)
    for digests in zip(*by_rank, strict=True):
        assert len(set(digests)) == 1, "ranks ended with different bits"
    first: list[str] = by_rank[0]
    return first


def interesting_sizes(world_size: int) -> list[int]:
    p = world_size
    around_chunks = [128 * p - 1, 128 * p, 128 * p + 1, 128 * (p - 1), 256 * p + 1]
    return sorted({0, 1, p - 1, p, p + 1, 127, 129, 1009, 10007, *around_chunks})


@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_and_op(pool: Pool, world: MakeWorld, size: int) -> None:
    cases = [
        (dtype, op, n, "plain", seed)
        for seed, (dtype, op) in enumerate(oracle.PAIRS)
        for n in (1009, 128 * size + 1)
    ]
    once = check(pool, world(size), cases)
    assert check(pool, world(size), cases) == once, "two runs gave different bits"


@pytest.mark.parametrize("size", SIZES)
def test_every_size(pool: Pool, world: MakeWorld, size: int) -> None:
    kinds = [("float32", "SUM"), ("bfloat16", "SUM"), ("float64", "AVG"), ("uint8", "MAX")]
    cases = [
        (dtype, op, n, layout, n)
        for dtype, op in kinds
        for n in interesting_sizes(size)
        for layout in LAYOUTS
    ]
    check(pool, world(size), cases)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("slots", ["3", "8"])
def test_around_slot_sizes(pool: Pool, world: MakeWorld, algorithm: str, slots: str) -> None:
    slot = 4096
    counts = [k * slot // 4 + d for k in (1, 2, 3, 16) for d in (-1, 0, 1)]
    cases = [("float32", "SUM", n, "plain", n) for n in counts]
    cases += [("bfloat16", "AVG", 2 * n, "plain", n) for n in counts]
    cases += [("int8", "BXOR", 4 * n + 1, "offset", n) for n in counts]
    for size in (2, 3):
        check(pool, world(size, ALGORITHM=algorithm, SLOT_BYTES=str(slot), SLOTS=slots), cases)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_around_large_sizes(pool: Pool, world: MakeWorld, size: int) -> None:
    """Around every power of two up to 4 MiB: wherever slots end, some message ends beside it."""
    counts = [(1 << k) + d for k in range(14, 21) for d in (-1, 0, 1)] + [3 * (1 << 18) + 5]
    check(pool, world(size), [("float32", "SUM", n, "plain", n) for n in counts])


@st.composite
def some_cases(draw: st.DrawFn) -> tuple[int, str, list[Any]]:
    size = draw(st.integers(1, 9))
    algorithm = draw(st.sampled_from(("auto", *ALGORITHMS)))
    counts = st.integers(0, 3000) | st.integers(0, 40).map(lambda k: k * 128 * size)
    kinds = st.sampled_from(oracle.PAIRS)
    one = st.tuples(kinds, counts, st.sampled_from(LAYOUTS), st.integers(0, 10**6))
    cases = draw(st.lists(one, min_size=1, max_size=12))
    return size, algorithm, [(d, o, n, layout, s) for (d, o), n, layout, s in cases]


def test_properties(pool: Pool, world: MakeWorld, full: bool) -> None:
    @settings(
        max_examples=1000 if full else 30,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(some_cases())
    def run(drawn: tuple[int, str, list[Any]]) -> None:
        size, algorithm, cases = drawn
        check(pool, world(size, ALGORITHM=algorithm), cases)

    run()


def reduce_split(me: Rank, t: torch.Tensor, op: str, draw: random.Random) -> None:
    """An all-reduce of a tensor, in as many as six buckets, one after the other or coalesced."""
    cuts = sorted(draw.randint(0, t.numel()) for _ in range(draw.randint(0, 5)))
    buckets = list(torch.tensor_split(t, cuts))
    if draw.random() < 0.3:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = reduce_op(op, me.rank)
        dist.group.WORLD.allreduce_coalesced(buckets, options).wait()  # type: ignore[union-attr]
        return
    for bucket in buckets:
        dist.all_reduce(bucket, op=reduce_op(op, me.rank))


def reduce_by_rank(me: Rank, name: str, hosts: str, settings: dict[str, str], seed: int) -> None:
    """Compares every reduction in the order of ranks with the oracle, however it is split."""
    os.environ |= {f"RINGREDUCE_{key}": value for key, value in settings.items()}
    os.environ |= {"RINGREDUCE_HOSTID": f"order {hosts[me.rank]}", "RINGREDUCE_ORDER": "rank"}
    me.world_size = size = len(hosts)
    me.init(name)
    draw = random.Random(seed)
    try:
        kinds = [(dtype, op) for dtype, op in oracle.PAIRS if dtype in oracle.FLOATS]
        for dtype, op, n in [(*kind, 3001) for kind in kinds] + [("float32", "AVG", 1_200_007)]:
            inputs = [oracle.make_input(dtype, op, n, r, seed) for r in range(size)]
            wanted, mine = oracle.exact(inputs, op, by_rank=True), inputs[me.rank]

            def check(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
                same = torch.equal(oracle.bits(got), oracle.bits(wanted))
                assert same, f"{what} of {n} {dtype}, {op}, seed={seed}"  # noqa: B023

            for _ in range(2):
                t = mine.clone()
                reduce_split(me, t, op, draw)
                check(t, wanted, "all_reduce")
            root = draw.randrange(size)
            t = mine.clone()
            dist.reduce(t, root, op=reduce_op(op, me.rank))
            check(t, wanted if me.rank == root else mine, "reduce")
            parts = torch.tensor_split(mine, sorted(draw.randint(0, n) for _ in range(size - 1)))
            counts = [len(part) for part in parts]
            t = torch.empty_like(parts[me.rank])
            dist.reduce_scatter(t, list(parts), op=reduce_op(op, me.rank))
            check(t, wanted.split(counts)[me.rank], "reduce_scatter")
            if op == "SUM":
                sparse = mine.to_sparse()
                dist.all_reduce(sparse)
                check(sparse.to_dense() + 0.0, wanted + 0.0, "sparse all_reduce")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "settings"),
    [
        ("aa", {}),
        ("aaa", {"ALGORITHM": "direct"}),
        ("aaaa", {"SLOT_BYTES": "4096"}),
        ("aaaaa", {"ALGORITHM": "twoshot"}),
        ("aaa", {"WIRE": "tcp"}),
        ("ab", {"BANDWIDTH_MBIT": "10"}),
        ("aab", {"ALGORITHM": "bruck"}),
        ("aabb", {}),
        ("abab", {"RING": "1,0"}),
        ("aabbc", {"ALGORITHM": "twoshot", "RING": "2,0,1"}),
    ],
    ids=str,
)
def test_the_order_of_ranks(pool: Pool, hosts: str, settings: dict[str, str]) -> None:
    seed = int(os.environ.get("RINGREDUCE_SEED", random.randrange(10**6)))
    print(f"RINGREDUCE_SEED={seed}")
    arguments = (pool.name("order"), hosts, settings, seed)
    pool.start(reduce_by_rank, World(0, "ringreduce"), *arguments, ranks=len(hosts)).results()


def reduce_specials(me: Rank, op: str) -> list[str]:
    inf, nan = float("inf"), float("nan")
    special = [0.0, -0.0, inf, -inf, nan, 1e-40, -1e-45, 3e38, -3e38, 1.5]
    found = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        base = torch.tensor(special, dtype=torch.float64)
        grid = torch.cartesian_prod(base, base, base)
        mine = grid[:, me.rank % 3].contiguous().to(dtype)
        dist.all_reduce(mine, op=reduce_op(op, me.rank))
        if op == "SUM":
            all_in = [grid[:, r % 3].contiguous().to(dtype) for r in range(me.world_size)]
            wanted = oracle.exact(all_in, op)
            assert torch.equal(oracle.bits(mine), oracle.bits(wanted)), dtype
        found.append(oracle.digest(mine))
    return found


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_infinities_nans_and_signed_zeros(pool: Pool, world: MakeWorld, op: str) -> None:
    """Any bit pattern passes, and is the same everywhere (NaN payloads aside)."""
    seen = set()
    for algorithm in ALGORITHMS:
        by_rank = pool.run(reduce_specials, world(3, ALGORITHM=algorithm), op)
        seen |= {tuple(digests) for digests in by_rank}
    assert len(seen) == 1


def beside_limits(n: int) -> list[int]:
    return [0, n // 2 - 1, n // 2, min(n, 2**31) - 1, n - 1]


def use_beyond_2_31(me: Rank, n: int, call: str) -> list[int]:
    """Adds the ranks' bytes, or moves rank 0's to rank 1, and back where the call has that."""
    t = torch.full((n,), me.rank + 1, dtype=torch.uint8)
    marks, others = beside_limits(n), 3 if call == "all_reduce" else 2 - me.rank
    for k, at in enumerate(marks):
        t[at] = 10 * k + me.rank
    got = t
    if call == "all_reduce":
        dist.all_reduce(t)
    elif call == "all_to_all_single":
        got = torch.zeros(n, dtype=torch.uint8)
        splits = [0, n] if me.rank == 0 else [n, 0]
        dist.all_to_all_single(got, t, splits, splits)
    elif me.rank == 0:
        dist.send(t, 1)
        return []
    else:
        dist.recv(got, 0)
    found = [int(got[at]) for at in marks]
    for at in marks:
        got[at] = others
    assert bool((got == others).all())
    return found


@pytest.mark.parametrize("call", ["all_reduce", "all_to_all_single", "send"])
def test_more_than_2_to_the_31_bytes(pool: Pool, world: MakeWorld, full: bool, call: str) -> None:
    n = 2**31 + 4099 if full else 2**26 + 4099
    last = {at: 10 * k for k, at in enumerate(beside_limits(n))}  # a mark may be written twice
    marks = [last[at] for at in beside_limits(n)]
    wanted = [[mark + other for mark in marks] for other in (1, 0)]
    if call == "all_reduce":
        wanted = [[2 * mark + 1 for mark in marks]] * 2
    if call == "send":
        wanted[0] = []
    assert pool.run(use_beyond_2_31, world(2), n, call, deadline=240.0) == wanted


@on_ranks(3)
def test_premul_sum_takes_a_tensor(me: Rank) -> None:
    t = torch.ones(5)
    dist.all_reduce(t, op=dist._make_nccl_premul_sum(torch.tensor(0.5 + me.rank)))
    assert t.eq(0.5 + 1.5 + 2.5).all(), t
