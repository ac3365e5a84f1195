"""Calls that move and do not add: bytes arrive as they were sent, of every dtype there is."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank

EVERY = (*oracle.REDUCIBLE, *oracle.MOVED)


def noise(dtype: str, n: int, rank: int) -> torch.Tensor:
    """Arbitrary bytes, NaNs and all; for bool the two that it has."""
    draw = torch.Generator().manual_seed(97 * n + rank)
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.randint(0, 2, (n,), generator=draw).bool()
    width = torch.empty(0, dtype=kind).element_size()
    return torch.randint(0, 256, (n * width,), generator=draw, dtype=torch.uint8).view(kind)


def raw(tensor: torch.Tensor) -> bytes:
    # Not contiguous(): a single element counts as that with any stride.
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(plain.view(torch.uint8).numpy().tobytes())


def kinds(backend: str) -> list[str]:
    few = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")
    return list(EVERY if backend == "ringreduce" else few)


def move_everything(me: Rank, dtypes: list[str], counts: list[int]) -> None:
    p = me.world_size
    for dtype in dtypes:
        kind = getattr(torch, dtype)
        for n in counts:
            all_in = [noise(dtype, n, r) for r in range(p)]
            case = f"{dtype} n={n}"
            for root in range(p):
                t = all_in[me.rank].clone()
                dist.broadcast(t, src=root)
                assert raw(t) == raw(all_in[root]), f"broadcast from {root}: {case}"
            outs = [torch.empty(n, dtype=kind) for _ in range(p)]
            mine = all_in[me.rank].clone()
            dist.all_gather(outs, mine)
            assert [raw(o) for o in outs] == [raw(i) for i in all_in], f"all_gather: {case}"
            assert raw(mine) == raw(all_in[me.rank])
            out = torch.empty(n * p, dtype=kind)
            dist.all_gather_into_tensor(out, mine)
            assert raw(out) == b"".join(raw(i) for i in all_in), f"into_tensor: {case}"
            if me.backend == "ringreduce":  # gloo wants it flat
                stacked = torch.empty(p, n, dtype=kind)
                dist.all_gather_into_tensor(stacked, mine)
                assert raw(stacked) == raw(out), f"into_tensor, stacked: {case}"
            move_between(me, dtype, n, case)
        dist.barrier()


def move_between(me: Rank, dtype: str, n: int, case: str) -> None:
    """The calls in which ranks get different things: `noise` number 10 a + b goes from a to b."""
    p, rank, root = me.world_size, me.rank, n % me.world_size
    kind = getattr(torch, dtype)

    def empty(count: int) -> list[torch.Tensor]:
        return [torch.empty(count, dtype=kind) for _ in range(p)]

    def sent(a: int, b: int, count: int = n) -> torch.Tensor:
        return noise(dtype, count, 10 * a + b)

    outs = empty(n)
    dist.gather(sent(rank, root), outs if rank == root else None, dst=root)
    if rank == root:
        assert [raw(o) for o in outs] == [raw(sent(r, root)) for r in range(p)], f"gather: {case}"
    out = torch.empty(n, dtype=kind)
    dist.scatter(out, [sent(root, r) for r in range(p)] if rank == root else None, src=root)
    assert raw(out) == raw(sent(root, rank)), f"scatter: {case}"

    outs = empty(n)
    dist.all_to_all(outs, [sent(rank, r) for r in range(p)])
    wanted = [raw(sent(r, rank)) for r in range(p)]
    assert [raw(o) for o in outs] == wanted, f"all_to_all: {case}"
    out = torch.empty(p * n, dtype=kind)
    dist.all_to_all_single(out, torch.cat([sent(rank, r) for r in range(p)]))
    assert raw(out) == b"".join(wanted), f"all_to_all_single: {case}"

    if p > 1 and me.backend == "ringreduce":  # uneven: rank a sends rank b n + a elements, or none
        counts = [[n + a if (a + b) % 3 else 0 for b in range(p)] for a in range(p)]
        mine, theirs = counts[rank], [counts[a][rank] for a in range(p)]
        out = torch.empty(sum(theirs), dtype=kind)
        parts = torch.cat([sent(rank, b, mine[b]) for b in range(p)])
        dist.all_to_all_single(out, parts, theirs, mine)
        wanted = [raw(sent(a, rank, theirs[a])) for a in range(p)]
        assert raw(out) == b"".join(wanted), f"all_to_all_single with splits: {case}"
        outs = [torch.empty(n + r, dtype=kind) for r in range(p)]
        dist.all_gather(outs, sent(rank, 0, n + rank))
        wanted = [raw(sent(r, 0, n + r)) for r in range(p)]
        assert [raw(o) for o in outs] == wanted, f"uneven all_gather: {case}"

    out, work = torch.empty(n, dtype=kind), None
    if p > 1:
        work = dist.isend(sent(rank, 0), (rank + 1) % p)
        dist.recv(out, (rank - 1) % p)
        assert raw(out) == raw(sent((rank - 1) % p, 0)), f"recv: {case}"
    if work:
        work.wait()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_dtype_arrives(pool: Pool, world: MakeWorld, backend: str, size: int) -> None:
    pool.run(move_everything, world(size), kinds(backend), [1, 7, 129])


@pytest.mark.ringreduce
@pytest.mark.parametrize("size", [2, 4, 9])
def test_no_elements(pool: Pool, world: MakeWorld, size: int) -> None:
    pool.run(move_everything, world(size), ["float32", "complex64", "uint8"], [0, 0])


@pytest.mark.ringreduce
@pytest.mark.parametrize("size", [2, 3])
def test_small_slots(pool: Pool, world: MakeWorld, size: int) -> None:
    counts = [4095, 4096, 4097, 65537]
    pool.run(move_everything, world(size, SLOT_BYTES="4096", SLOTS="3"), ["uint8"], counts)


def move_views(me: Rank) -> None:
    p = me.world_size
    for root in range(p):
        square = torch.arange(35.0).view(5, 7) + 100 * me.rank
        dist.broadcast(square.t(), src=root)  # written back through the strides
        assert torch.equal(square, torch.arange(35.0).view(5, 7) + 100 * root)
    whole = torch.arange(20, dtype=torch.int32) * (me.rank + 1)
    outs = [torch.zeros(2 * 10, dtype=torch.int32)[::2] for _ in range(p)]
    dist.all_gather(outs, whole[1::2])
    for r, out in enumerate(outs):
        assert torch.equal(out, torch.arange(20, dtype=torch.int32)[1::2] * (r + 1))
    wide = torch.zeros(10 * p, 2, dtype=torch.int32)
    dist.all_gather_into_tensor(wide[:, 0], whole[1::2])
    expected = torch.cat([torch.arange(20, dtype=torch.int32)[1::2] * (r + 1) for r in range(p)])
    assert torch.equal(wide[:, 0], expected)
    assert not wide[:, 1].any(), "wrote beside the view"


def gather_over_itself(me: Rank) -> None:
    p, n = me.world_size, 1000
    whole = torch.full((p * n,), -1.0)
    mine = whole[me.rank * n : (me.rank + 1) * n]
    mine.fill_(float(me.rank))
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, torch.arange(p).repeat_interleave(n).float())


@pytest.mark.parametrize("size", [2, 3])
def test_input_inside_the_output(pool: Pool, world: MakeWorld, size: int) -> None:
    pool.run(gather_over_itself, world(size))


def large_broadcasts(me: Rank) -> None:
    """Messages that fill the slots of all ranks, among calls that use them otherwise."""
    p, draw = me.world_size, torch.Generator().manual_seed(me.rank)
    for turn in range(12):
        n = (64 * 4096 - 1, 64 * 4096, 1_000_003)[turn % 3]
        root = turn % p
        wanted = torch.arange(n, dtype=torch.int32).mul(turn + 1).to(torch.int8)
        t = wanted.clone() if me.rank == root else torch.zeros(n, dtype=torch.int8)
        time.sleep(0.003 * float(torch.rand(1, generator=draw)))
        dist.broadcast(t, root)
        assert torch.equal(t, wanted), (turn, n, root)
        total = torch.full((5000,), float(me.rank + turn))
        dist.all_reduce(total)
        assert total.eq(p * (p - 1) / 2 + p * turn).all(), turn


@pytest.mark.ringreduce
@pytest.mark.parametrize("size", [2, 3])
def test_large_broadcasts(pool: Pool, world: MakeWorld, size: int) -> None:
    pool.run(large_broadcasts, world(size, SLOT_BYTES="4096"))


def arrive_late(me: Rank, late: int) -> tuple[float, float]:
    dist.barrier()
    if me.rank == late:
        time.sleep(0.3)
    entered = time.monotonic()
    dist.barrier()
    return entered, time.monotonic()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nobody_leaves_a_barrier_before_the_last_enters(
    pool: Pool, world: MakeWorld, size: int
) -> None:
    for late in range(size):
        times = pool.run(arrive_late, world(size), late)
        assert min(left for _, left in times) >= max(entered for entered, _ in times)


Tensors = list[torch.Tensor]


def sharing(me: Rank, n: int) -> dict[str, Callable[[torch.Tensor, Any], Tensors]]:
    """Calls whose outputs lie in their inputs' memory: `call(whole, read)` returns the outputs.

    `whole` has (p + 1) n elements; `read` makes of a tensor the one that is passed as an input.
    """
    p, rank = me.world_size, me.rank
    after, own = (rank + 1) % p, slice(rank * n, (rank + 1) * n)
    group = dist.group.WORLD
    assert group is not None

    def cut(t: torch.Tensor) -> Tensors:
        return list(t[: p * n].chunk(p))

    def all_to_all(t: torch.Tensor, read: Any) -> Tensors:
        dist.all_to_all(cut(t), [read(part) for part in cut(t)])
        return cut(t)

    def all_to_all_single(t: torch.Tensor, read: Any, begin: int = 0) -> Tensors:
        dist.all_to_all_single(t[begin : begin + p * n], read(t[: p * n]))
        return [t[begin : begin + p * n]]

    def scatter(t: torch.Tensor, read: Any, to: int) -> Tensors:
        dist.scatter(cut(t)[to], [read(part) for part in cut(t)] if rank == 1 else None, src=1)
        return [cut(t)[to]]

    def gather(t: torch.Tensor, read: Any, of: int) -> Tensors:
        dist.gather(read(cut(t)[of]), cut(t) if rank == 1 else None, dst=1)
        return cut(t) if rank == 1 else []

    def all_gather(t: torch.Tensor, read: Any, of: int) -> Tensors:
        dist.all_gather(cut(t), read(cut(t)[of]))
        return cut(t)

    def into_tensor(t: torch.Tensor, read: Any, begin: int) -> Tensors:
        dist.all_gather_into_tensor(t[: p * n], read(t[begin : begin + n]))
        return [t[: p * n]]

    def reduce_scatter(t: torch.Tensor, read: Any, to: int) -> Tensors:
        dist.reduce_scatter(cut(t)[to], [read(part) for part in cut(t)])
        return [cut(t)[to]]

    def scatter_tensor(t: torch.Tensor, read: Any, begin: int) -> Tensors:
        dist.reduce_scatter_tensor(t[begin : begin + n], read(t[: p * n]))
        return [t[begin : begin + n]]

    def reduce_all(t: torch.Tensor, read: Any, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        both = [read(a), read(b)]
        group.allreduce_coalesced(both).wait()
        return both

    def gather_two(t: torch.Tensor, read: Any) -> Tensors:
        first, second = t[: p * n], torch.empty(p * n)
        group.allgather_into_tensor_coalesced(
            [first, second], [read(t[own]), read(t[after * n : (after + 1) * n])]
        ).wait()
        return [first, second]

    def scatter_two(t: torch.Tensor, read: Any) -> Tensors:
        outputs = [t[n : 2 * n], t[:n]]
        inputs = [read(t[: p * n]), read(t[n : (p + 1) * n])]
        group.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
        return outputs

    return {
        "all_to_all": all_to_all,
        "all_to_all_single": all_to_all_single,
        "all_to_all_single, shifted": partial(all_to_all_single, begin=n // 2),
        "scatter to another": partial(scatter, to=after),
        "scatter in place": partial(scatter, to=rank),
        "gather of another": partial(gather, of=after),
        "gather in place": partial(gather, of=rank),
        "all_gather of another": partial(all_gather, of=after),
        "all_gather in place": partial(all_gather, of=rank),
        "into_tensor of another": partial(into_tensor, begin=after * n),
        "into_tensor in place": partial(into_tensor, begin=rank * n),
        "into_tensor, shifted": partial(into_tensor, begin=n // 2),
        "reduce_scatter to another": partial(reduce_scatter, to=after),
        "reduce_scatter in place": partial(reduce_scatter, to=rank),
        "reduce_scatter_tensor to another": partial(scatter_tensor, begin=after * n),
        "reduce_scatter_tensor in place": partial(scatter_tensor, begin=rank * n),
        "reduce_scatter_tensor, shifted": partial(scatter_tensor, begin=n // 2),
        "coalesced, the same twice": lambda t, read: reduce_all(t, read, t, t),
        "coalesced, shifted": lambda t, read: reduce_all(t, read, t[: p * n], t[n:]),
        "coalesced all_gather": gather_two,
        "coalesced reduce_scatter": scatter_two,
    }


def share_memory(me: Rank, n: int) -> None:
    for name, call in sharing(me, n).items():
        # Whole numbers: a sum is the same wherever its elements are in the message.
        whole = torch.arange((me.world_size + 1) * n).remainder(1000).float() + 1000 * me.rank
        wanted = [t.clone() for t in call(whole.clone(), torch.clone)]
        found = call(whole, lambda t: t)
        for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(a, b), f"{name}, {n} elements, output {k}"


def share_memory_on_one_rank(me: Rank) -> list[float]:
    """Which memory a rank's tensors lie in does not change which operations they make."""
    group, sizes = dist.group.WORLD, (100, 100_000, 100, 100_000)
    assert group is not None
    whole = torch.ones(100_000)
    tensors = [whole[:n] if me.rank == 0 else torch.ones(n) for n in sizes]
    group.allreduce_coalesced(tensors).wait()
    columns = torch.ones(100_000, 2)
    both = [columns[:, 0], columns[:, 1]] if me.rank == 0 else list(torch.ones(2, 100_000))
    group.allreduce_coalesced(both).wait()
    return [float(t.min() + t.max()) for t in (*tensors, *both)]


@pytest.mark.ringreduce
def test_one_rank_reduces_tensors_that_share_memory(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(share_memory_on_one_rank, world(2)) == [[4.0] * 6] * 2


@pytest.mark.ringreduce
@pytest.mark.parametrize("wire", ["", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
def test_outputs_in_the_memory_of_inputs(
    pool: Pool, world: MakeWorld, size: int, wire: str
) -> None:
    options = {"WIRE": wire} if wire else {}
    for n in (5, 3000, 300_000):
        pool.run(share_memory, world(size, **options), n)
